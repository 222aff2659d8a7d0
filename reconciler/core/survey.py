"""What a pass found and wants, host by host: the whole input of acting, and of every view. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reconciler.core.live import LiveHost
from reconciler.core.plan import Plan, ServerPlan
from reconciler.core.sealed import Sealed
from reconciler.core.spec import Host


@dataclass(frozen=True, slots=True)
class HostSurvey:
    """What a pass found and wants on one host; `silence` says why nothing could be found.

    `baselines` holds, by server, what the gate of the applied revision measured.
    """

    host: Host
    plans: tuple[ServerPlan, ...]
    live: LiveHost | None = None
    silence: str = ""
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sealed: Mapping[str, Sealed] = field(default_factory=dict)
    """The fleet's encrypted secrets, by digest."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The plan of a pass, host by host."""

    hosts: tuple[HostSurvey, ...]

    @property
    def plan(self) -> Plan:
        """Give the plan of the whole fleet."""
        return Plan(tuple(p for h in self.hosts for p in h.plans))

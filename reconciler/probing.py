"""Performance as desired state, watched: now and then, while nobody uses a server, is it still as fast as when it was applied?

The daemon asks at the end of a pass that found a server in sync. Nothing is done about what is found; it is said, with the
numbers, until a later probe says otherwise or another revision is applied.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.errors import ReconcilerError
from reconciler.core.perf_drift import NotProbed, PerfDrifted, PerfFinding
from reconciler.core.plan import Action, ServerPlan
from reconciler.core.revision import restored
from reconciler.core.spec import Server
from reconciler.core.survey import HostSurvey
from reconciler.effects.perf_probe import probe_performance
from reconciler.effects.perform import fetch_args
from reconciler.effects.ports import HostPort, Request
from reconciler.engines.base import Engine
from reconciler.logs import log
from reconciler.reconcile import World, fetch_revision

DEADLINE_S: Final = 60.0
"""A host's next pass waits for a probe."""
FETCH_S: Final = 20.0
SOONER: Final = 8
"""A server that was in use is asked again after a part of the interval."""


class Probe(Protocol):
    """Whoever measures; `probed` in life."""

    def __call__(
        self, plan: ServerPlan, port: HostPort, world: World, busy: Callable[[], bool]
    ) -> PerfFinding:
        """Say how fast the server of a plan is; `busy` says that somebody waits for us."""
        ...


def probed(plan: ServerPlan, port: HostPort, world: World, busy: Callable[[], bool]) -> PerfFinding:
    """Probe what is applied, by what the host keeps of it."""
    target, evidence = fetch_revision(port, plan.wish.server, plan.applied)
    spec = restored(json.loads(target.spec), world.engines) if target is not None else None
    if target is None or spec is None:
        return NotProbed(f"{plan.wish.server}: what the host keeps of it cannot be read")
    server, engine = spec, world.engines[spec.engine.name]
    facts = {"gpus": ",".join(target.gpu_uuids), "model": server.model or ""}
    return probe_performance(
        server,
        port,
        evidence,
        lambda: None if busy() else in_flight(server, engine, port),
        facts=facts,
        deadline_s=DEADLINE_S,
    )


def in_flight(server: Server, engine: Engine, port: HostPort) -> int | None:
    """Ask a server how many requests it has; None when it does not say."""
    request = engine.in_flight_request(server)
    if request is None:
        return None
    answer = port.call(Request("fetch", fetch_args(server, request)), deadline_s=FETCH_S)
    known = answer.data.get("known") if answer.outcome == "done" else None
    if not isinstance(known, Mapping):
        return None
    return engine.in_flight(int(known["status"]), base64.b64decode(str(known.get("body") or "")))


@dataclass
class Performance:
    """When each server is to be probed, and what was found last; of passes that follow each other on each host."""

    probe: Probe = probed
    due: dict[str, float] = field(default_factory=dict)
    drifted: dict[str, tuple[str, PerfDrifted]] = field(default_factory=dict)

    def judged(
        self,
        found: HostSurvey,
        results: Iterable[ServerResult],
        world: World,
        *,
        every_s: float,
        busy: Callable[[], bool],
    ) -> tuple[tuple[ServerResult, ...], tuple[tuple[str, str], ...]]:
        """Give the results with what is known of speed in them, and what there is to say that is new: server and sentence."""
        plans, told, news = {p.wish.server: p for p in found.plans}, [], []
        for result in results:
            plan = plans[result.server]
            if not _serves_as_applied(plan, result):
                told.append(result)
                continue
            sentence = self._probe_if_due(plan, found, world, every_s, busy)
            news += [(result.server, sentence)] if sentence else []
            told.append(self._with_finding(plan, result))
        return tuple(told), tuple(news)

    def _probe_if_due(
        self,
        plan: ServerPlan,
        found: HostSurvey,
        world: World,
        every_s: float,
        busy: Callable[[], bool],
    ) -> str:
        name, now = plan.wish.server, world.clock.now()
        if now < self.due.setdefault(name, now + every_s) or busy():
            return ""
        try:
            with world.connect(found.host) as port:
                finding = self.probe(plan, port, world, busy)
        except ReconcilerError as error:
            finding = NotProbed(f"{name}: {error}")
        known = self.drifted.pop(name, None)
        if isinstance(finding, NotProbed):
            log.info("not probed", server=name, why=finding.sentence)
            self.due[name] = now + every_s / SOONER
            if known is not None:
                self.drifted[name] = known  # Nothing was learnt, so what was known still stands.
            return ""
        self.due[name] = now + every_s
        if not isinstance(finding, PerfDrifted):
            return finding.sentence if known is not None else ""
        self.drifted[name] = (plan.applied, finding)
        log.warning("performance drifted", server=name, evidence=finding.evidence)
        return finding.sentence

    def _with_finding(self, plan: ServerPlan, result: ServerResult) -> ServerResult:
        revision, finding = self.drifted.get(plan.wish.server, ("", None))
        if finding is None or revision != plan.applied:
            self.drifted.pop(plan.wish.server, None)
            return result
        return replace(result, reason=Reason.PERF_DRIFTED, sentence=finding.sentence)


def _serves_as_applied(plan: ServerPlan, result: ServerResult) -> bool:
    return (
        result.outcome is Outcome.IN_SYNC
        and plan.action is Action.NOTHING
        and bool(plan.applied)
        and plan.wish.gated
    )

"""A light probe of a server in use, for the daemon: when it is idle, compared with what was measured when it was applied.

It looks and reports; nothing is changed on the server, not even a cache emptied, and nothing follows from it by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress
from reconciler.bench.meter import LOCAL, Meter
from reconciler.bench.rounds import run_gate
from reconciler.core.errors import HostError
from reconciler.core.measurement import Baseline, RunResult
from reconciler.core.perf_drift import NotProbed, PerfFinding, light_gate, perf_finding
from reconciler.core.spec import Server
from reconciler.effects.bench import endpoint_of
from reconciler.effects.gate import stored_baseline
from reconciler.effects.ports import HostPort

DEADLINE_S = 120.0


class _BusyError(Exception):
    """Somebody uses the server."""


@dataclass(frozen=True, slots=True)
class _WhenIdle:
    """A meter that measures only while nobody else does anything; it empties no cache."""

    meter: Meter
    in_flight: Callable[[], int | None]

    def measure(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: Callable[[Progress], None] | None
    ) -> RunResult:
        """Run one round, if the server says that it has nothing to do: unknown is not idle."""
        if self.in_flight() != 0:
            raise _BusyError
        return self.meter.measure(plan, endpoint, on_progress)

    def ask(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: Callable[[Progress], None] | None
    ) -> tuple[RunResult, Mapping[int, str]]:
        """Run one round and give the texts."""
        if self.in_flight() != 0:
            raise _BusyError
        return self.meter.ask(plan, endpoint, on_progress)

    def flush(self, endpoint: Endpoint) -> bool:  # noqa: ARG002 - the protocol's
        """Leave the cache of a server in use alone."""
        return False


def probe_performance(
    server: Server,
    host: HostPort,
    gate_evidence: Mapping[str, Any] | None,
    in_flight: Callable[[], int | None],
    *,
    facts: Mapping[str, str],
    meter: Meter = LOCAL,
    deadline_s: float = DEADLINE_S,
) -> PerfFinding:
    """Say whether a server is still as fast as when it was applied.

    Args:
        server: What is applied; it must have a gate.
        host: The way to it.
        gate_evidence: What the host keeps with the applied revision (`reconcile.fetch_revision`).
        in_flight: Asks for the number of requests running and waiting; None is unknown, and then nothing is measured.
        facts: The same facts about server and host as the gate's: GPUs and model.
        meter: Who measures.
        deadline_s: For the whole probe.
    """
    baseline = stored_baseline(gate_evidence)
    if server.gate is None or baseline is None:
        return NotProbed(f"{server.name}: no measurement is stored with the applied revision")
    try:
        with endpoint_of(server, host, facts=facts) as endpoint:
            return _probed(server, endpoint, baseline, _WhenIdle(meter, in_flight), deadline_s)
    except _BusyError:
        return NotProbed(f"{server.name}: it is in use, or does not say whether it is")
    except HostError as error:
        return NotProbed(f"{server.name}: {error}")


def _probed(
    server: Server, endpoint: Endpoint, baseline: Baseline, meter: Meter, deadline_s: float
) -> PerfFinding:
    assert server.gate is not None
    outcome = run_gate(
        light_gate(server.gate),
        endpoint,
        baseline,
        deadline_s=deadline_s,
        meter=meter,
        speculative=json.dumps(server.speculative, sort_keys=True) if server.speculative else "",
    )
    return perf_finding(server.name, outcome.verdict, baseline.revision)

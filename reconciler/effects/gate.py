"""The real gate: the benchmark client against the server's port, reached through the host's own connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from reconciler.bench.rounds import GateOutcome, run_gate
from reconciler.core.desired import Target
from reconciler.core.errors import HostUnreachableError, OutcomeUnknownError
from reconciler.core.gate import VerdictKind
from reconciler.core.measurement import Baseline
from reconciler.core.revision import restored
from reconciler.effects.bench import endpoint_of
from reconciler.effects.ports import GateReport, HostPort
from reconciler.engines.base import Engine


def measure(
    target: Target,
    engine: Engine,
    host: HostPort,
    baseline: Mapping[str, Any] | None,
    *,
    deadline_s: float,
    on_progress: Callable[[str], None],
) -> GateReport:
    """Measure the server that runs `target`, and judge it; see `GateRunner`.

    What is not a measurement (no connection, a stored baseline that cannot be read) is an error or is left out, never
    a verdict about the revision (S22).
    """
    server = restored(json.loads(target.spec), {engine.name: engine})
    if server is None or server.gate is None:
        return GateReport(
            "error", "the recorded spec has no gate that this version can read", {"kind": "gate"}
        )
    try:
        facts = {"gpus": ",".join(target.gpu_uuids), "model": server.model or ""}
        with endpoint_of(server, host, facts=facts) as endpoint:
            outcome = run_gate(
                server.gate,
                endpoint,
                _stored(baseline),
                deadline_s=deadline_s,
                on_progress=lambda progress: on_progress(str(progress)),
            )
    except (HostUnreachableError, OutcomeUnknownError) as error:
        return GateReport(
            "error", f"the server could not be reached for the gate: {error}", {"kind": "gate"}
        )
    return report_of(outcome, target.revision)


def _stored(baseline: Mapping[str, Any] | None) -> Baseline | None:
    content = (baseline or {}).get("baseline")
    if not isinstance(content, Mapping):
        return None
    try:
        return Baseline.from_json(content)
    except (KeyError, TypeError, ValueError):
        return None


def report_of(outcome: GateOutcome, revision: str) -> GateReport:
    """Give the outcome as evidence for the record; the rounds in it are the next gate's baseline."""
    verdict = outcome.verdict
    message = "; ".join(r.message for r in verdict.reasons) or summary(outcome)
    evidence: dict[str, Any] = {
        "version": 1,
        "kind": "gate",
        "message": message,
        "judgement": verdict.to_json(),
        "rounds": outcome.rounds,
        "took_s": round(outcome.took_s, 3),
    }
    if verdict.kind is VerdictKind.PASS:
        evidence["baseline"] = outcome.as_baseline(revision).to_json()
    return GateReport(verdict.kind.value, message, evidence)


def summary(outcome: GateOutcome) -> str:
    """Say in a line what was measured, for a gate that passed."""
    rows = [
        f"{r.run} {r.key} {r.measured:g} (limit {r.bound:g})"
        for r in outcome.verdict.rows
        if r.measured is not None
    ]
    return "; ".join(rows) or f"{outcome.rounds} rounds, no limit set"

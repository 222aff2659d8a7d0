"""Performance as desired state: is what serves still as fast as when it was applied? Pure; it judges and never acts.

A light probe measures one run of the gate, the one with the fewest streams, with few requests and no questions, and
compares it with the rounds that were stored with the applied revision. Only a clear loss is reported, with what was
measured; anything less says nothing, because a short probe of a server in use is no gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from reconciler.core.gate import Verdict, VerdictKind
from reconciler.core.spec import Baseline, Gate

DEFAULT_LOSS: Final = 0.05
"""Where the gate sets no margin: the gate's own default for speed."""

REQUESTS_A_ROUND: Final = 6
"""A light probe takes seconds from the users of the server, not minutes."""


@dataclass(frozen=True, slots=True)
class PerfDrifted:
    """What serves has become slower than its own applied measurement; `evidence` is plain JSON for the record."""

    sentence: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PerfHeld:
    """As fast as when it was applied, as far as a light probe can tell."""

    sentence: str


@dataclass(frozen=True, slots=True)
class NotProbed:
    """Nothing was learnt: busy, no baseline, unreachable, or another thing than was applied."""

    sentence: str


PerfFinding = PerfDrifted | PerfHeld | NotProbed


def light_gate(gate: Gate) -> Gate:
    """Give the part of a gate that a light probe measures: its smallest realistic run, without limits and questions."""
    realistic = [r for r in gate.runs if (r.workload or gate.workload) == "realistic"]
    run = min(realistic, key=lambda r: r.concurrency)
    requests = max(run.concurrency, min(run.requests, 3 * REQUESTS_A_ROUND))
    light = run.model_copy(update={"limits": (), "requests": requests})
    margin = gate.baseline or Baseline.model_construct(max_loss=DEFAULT_LOSS)
    return gate.model_copy(
        update={"runs": (light,), "baseline": margin, "quality": "off", "max_error_rate": 1.0}
    )


def perf_finding(server: str, verdict: Verdict, revision: str) -> PerfFinding:
    """Read the verdict of a light probe. Only a fail by comparison with the baseline is drift."""
    rows = [row for row in verdict.rows if row.key.endswith("_against_baseline")]
    slower = [row for row in rows if row.verdict is VerdictKind.FAIL and row.reason is not None]
    if slower:
        what = "; ".join(row.reason.message for row in slower if row.reason is not None)
        evidence = {"revision": revision, "judgement": verdict.to_json()}
        return PerfDrifted(f"{server}: PerfDrifted: {what}. Nothing was done about it", evidence)
    if verdict.kind is VerdictKind.PASS and rows:
        return PerfHeld(f"{server}: as fast as when {revision[:12]} was applied")
    why = "; ".join([*(r.message for r in verdict.reasons), *verdict.notes]) or "no comparison"
    return NotProbed(f"{server}: {why}")

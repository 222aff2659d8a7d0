"""The gate's statistics against SciPy, and the design's table of shares by simulated gates.

Each simulated gate has six rounds of baseline, a 5 % margin and restarts that vary by 0.5 %; rounds are added one
by one, as the real gate does, until the verdict no longer wants more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

import pytest

from reconciler.core.gate import MAX_ROUNDS, MIN_ROUNDS, VerdictKind, judge
from reconciler.core.measurement import Baseline, Distribution, RunResult
from reconciler.core.significance import binomial_at_most, requests_needed, student_t
from reconciler.core.spec import Gate

stats = pytest.importorskip("scipy.stats")

GATES = 300
PASS, FAIL, OPEN = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.INCONCLUSIVE


def _round(number: int, tps: float) -> RunResult:
    return RunResult(
        run="single",
        round=number,
        workload="realistic",
        concurrency=1,
        max_tokens=64,
        sent=20,
        completed=20,
        duration_s=15.0,
        ttft=Distribution.of([0.1]),
        decode_tps=Distribution((tps,), 20, tps),
        output_tokens=Distribution.of([64.0]),
        output_tps=tps,
    )


def _rounds(draw: random.Random, level: float, spread: float, count: int) -> list[RunResult]:
    level *= math.exp(draw.gauss(0, 0.005))
    return [_round(n, level * math.exp(draw.gauss(0, spread))) for n in range(1, count + 1)]


def _played(gate: Gate, base: Baseline, rounds: Sequence[RunResult]) -> tuple[VerdictKind, int]:
    for count in range(MIN_ROUNDS, MAX_ROUNDS + 1):
        verdict = judge(gate, rounds[:count], base)
        if not verdict.more_rounds_wanted:
            return verdict.kind, count
    raise AssertionError("a gate must end after its last round")


@cache
def _ends(truth: float, spread: float) -> list[tuple[VerdictKind, int]]:
    draw = random.Random(f"{truth} {spread}")
    run = {"name": "single", "concurrency": 1, "requests": 60, "max_tokens": 64}
    gate = Gate.model_validate({"runs": [run], "baseline": {"max_loss": "5%"}})
    ends = []
    for _ in range(GATES):
        base = Baseline("r1", tuple(_rounds(draw, 200.0, spread, 6)))
        ends.append(_played(gate, base, _rounds(draw, 200.0 * truth, spread, MAX_ROUNDS)))
    return ends


# The design's shares, from 1,500 runs: (truth, round spread, verdict, share). 0.95 is the edge of the margin.
TABLE = [
    (1.00, 0.005, PASS, 1.00), (0.98, 0.005, PASS, 0.91), (0.95, 0.005, PASS, 0.004), (0.95, 0.005, FAIL, 0.004),
    (0.92, 0.005, FAIL, 0.94), (0.90, 0.005, FAIL, 1.00), (0.85, 0.005, FAIL, 1.00),
    (1.00, 0.01, PASS, 0.999), (0.98, 0.01, PASS, 0.79), (0.95, 0.01, PASS, 0.002), (0.95, 0.01, FAIL, 0.005),
    (0.92, 0.01, FAIL, 0.82), (0.90, 0.01, FAIL, 1.00), (0.85, 0.01, FAIL, 1.00),
    (1.00, 0.02, PASS, 0.90), (0.98, 0.02, PASS, 0.44), (0.95, 0.02, PASS, 0.018), (0.92, 0.02, FAIL, 0.48),
    (0.90, 0.02, FAIL, 0.92), (0.85, 0.02, FAIL, 1.00),
    (1.00, 0.04, PASS, 0.40), (0.98, 0.04, PASS, 0.18), (0.95, 0.04, PASS, 0.017), (0.92, 0.04, FAIL, 0.16),
    (0.90, 0.04, FAIL, 0.45), (0.85, 0.04, FAIL, 0.98),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "spread", "kind", "share"), TABLE)
def test_simulated_gates_have_the_designs_shares(
    truth: float, spread: float, kind: VerdictKind, share: float
) -> None:
    """Passes and fails come as often as designed: within what 300 runs can tell, and ten points, because a fail is tested more strictly here (two metrics)."""
    found = sum(end is kind for end, _ in _ends(truth, spread))
    low, high = stats.binom.interval(0.999, GATES, share)
    slack = 0.10 * GATES if 0.01 < share < 0.99 else 0.01 * GATES
    assert low - slack <= found <= high + slack, found / GATES


def test_an_equal_server_passes_and_a_slower_one_never_does() -> None:
    """At 1 % noise at least 99 % of gates let an equal server through, in three rounds; 10 % slower never passes."""
    equal, slower = _ends(1.00, 0.01), _ends(0.90, 0.01)
    assert sum(end is PASS for end, _ in equal) >= 0.99 * GATES
    assert sum(rounds for _, rounds in equal) / GATES < 3.2
    assert sum(end is FAIL for end, _ in slower) >= 0.99 * GATES
    assert not any(end is PASS for end, _ in slower)


@pytest.mark.parametrize("spread", [0.005, 0.01, 0.02, 0.04])
def test_wrong_verdicts_are_as_rare_as_the_level_says(spread: float) -> None:
    """An equal server fails, and one at twice the margin passes, in at most 5 % of gates whatever the noise."""
    assert sum(end is FAIL for end, _ in _ends(1.00, spread)) <= 0.05 * GATES
    assert sum(end is PASS for end, _ in _ends(0.90, spread)) <= 0.05 * GATES


@pytest.mark.parametrize("level", [0.9, 0.95, 0.99, 1 - 0.05 / 6, 1 - 0.05 / 12])
@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 12, 40])
def test_our_student_is_scipys(level: float, freedom: int) -> None:
    """Quantiles agree to seven digits."""
    assert student_t(level, freedom) == pytest.approx(stats.t.ppf(level, freedom), rel=1e-7)


@pytest.mark.parametrize("draws", [1, 16, 299, 5000])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.5, 0.95])
def test_our_binomial_is_scipys(draws: int, share: float) -> None:
    """Tails agree, also far out."""
    for count in {0, 1, draws // 50, draws // 2, draws - 1, draws}:
        wanted = stats.binom.cdf(count, draws, share)
        assert binomial_at_most(count, draws, share) == pytest.approx(wanted, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("percentile", [50, 82.9, 90, 95, 97.7, 99, 99.9])
def test_so_many_requests_decide_a_percentile(percentile: float) -> None:
    """With no value beyond the limit so many are just enough for 95 %, and one less is not."""
    needed = requests_needed("max", percentile)
    share = percentile / 100
    assert stats.binom.cdf(0, needed, 1 - share) <= 0.05 + 1e-6
    assert stats.binom.cdf(0, needed - 1, 1 - share) > 0.05

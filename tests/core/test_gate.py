"""The gate's judgement: what passes, what fails, what stays open, and what is no verdict at all."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from reconciler.core.gate import Verdict, VerdictKind, judge
from reconciler.core.measurement import (
    Answer,
    Baseline,
    Distribution,
    QualityResult,
    ReasonCode,
    RunResult,
)
from reconciler.core.significance import binomial_at_most, student_t
from reconciler.core.spec import Gate


def _gate(*, max_loss: str | None = None, error_rate: str = "0%", **limits: Any) -> Gate:
    run = {"name": "single", "concurrency": 1, "requests": 300, "max_tokens": 64, **limits}
    fields: dict[str, Any] = {"runs": [run], "max_error_rate": error_rate}
    if max_loss is not None:
        fields["baseline"] = {"max_loss": max_loss}
    return Gate.model_validate(fields)


def _round(number: int = 1, *, tps: float = 200.0, ttft: float = 0.1, **changes: Any) -> RunResult:
    fields: dict[str, Any] = {
        "run": "single",
        "round": number,
        "workload": "realistic",
        "concurrency": 1,
        "max_tokens": 64,
        "sent": 100,
        "completed": 100,
        "duration_s": 30.0,
        "ttft": Distribution.of([ttft] * 100),
        "decode_tps": Distribution.of([tps] * 100),
        "e2e": Distribution.of([ttft + 64 / tps] * 100),
        "event_gap": Distribution.of([1 / tps] * 6300),
        "output_tokens": Distribution.of([64.0] * 100),
        "output_tps": tps,
        "output_tps_window_s": 25.0,
    }
    return RunResult(**fields | changes)


def _rounds(values: Sequence[float], **changes: Any) -> list[RunResult]:
    return [_round(n, tps=value, **changes) for n, value in enumerate(values, 1)]


def _codes(verdict: Verdict) -> list[ReasonCode]:
    return [reason.code for reason in verdict.reasons]


# --- absolute limits -------------------------------------------------------------------------------


def test_a_fast_server_passes_after_three_rounds() -> None:
    """Three alike rounds on the right side of every limit are a pass."""
    gate = _gate(min_decode_tps=180, max_ttft_p95="200ms", min_output_tps=150)
    verdict = judge(gate, _rounds([200, 201, 199]))
    assert verdict.kind is VerdictKind.PASS
    assert not verdict.more_rounds_wanted


@pytest.mark.parametrize("count", [0, 1, 2])
def test_before_the_third_round_nothing_passes(count: int) -> None:
    """However good the first rounds are, the spread between rounds is not known yet."""
    verdict = judge(_gate(min_decode_tps=10), _rounds([200] * count))
    assert (verdict.kind, verdict.more_rounds_wanted) == (VerdictKind.INCONCLUSIVE, True)
    assert _codes(verdict) == [ReasonCode.TOO_FEW_ROUNDS]


def test_a_clear_miss_fails_in_the_first_round() -> None:
    """The service is waiting: what is far from its limit is not measured three times."""
    verdict = judge(_gate(min_decode_tps=300), _rounds([200]))
    assert (verdict.kind, _codes(verdict)) == (VerdictKind.FAIL, [ReasonCode.LIMIT_MISSED])
    assert "min_decode_tps is 300, measured 200" in verdict.reasons[0].message


def test_a_near_miss_is_measured_on_and_then_fails() -> None:
    """A little below the limit is open at first and a fail once the rounds agree."""
    gate = _gate(min_decode_tps=200)
    assert judge(gate, _rounds([196])).kind is VerdictKind.INCONCLUSIVE
    assert judge(gate, _rounds([195, 196, 195])).kind is VerdictKind.FAIL


def test_a_close_call_stays_open_until_the_last_round() -> None:
    """Rounds on both sides of the limit decide nothing; after the eighth no more are asked for."""
    gate = _gate(min_decode_tps=200)
    values = [196, 204, 197, 203, 198, 202, 199, 201]
    third = judge(gate, _rounds(values[:3]))
    last = judge(gate, _rounds(values))
    assert (third.kind, third.more_rounds_wanted) == (VerdictKind.INCONCLUSIVE, True)
    assert (last.kind, last.more_rounds_wanted) == (VerdictKind.INCONCLUSIVE, False)
    assert _codes(last) == [ReasonCode.UNDECIDED]


def test_a_maximum_is_judged_like_a_minimum() -> None:
    """A limit from above fails and passes on the other side."""
    assert judge(_gate(max_ttft="200ms"), _rounds([200] * 3)).kind is VerdictKind.PASS
    assert judge(_gate(max_ttft="50ms"), _rounds([200] * 3)).kind is VerdictKind.FAIL


@pytest.mark.parametrize(
    ("slow", "kind"),
    [(0, VerdictKind.PASS), (1, VerdictKind.INCONCLUSIVE), (14, VerdictKind.FAIL)],
)
def test_a_percentile_is_judged_by_counting(slow: int, kind: VerdictKind) -> None:
    """For p99 over 300 requests none may be late to pass; many are a fail; one alone says too little."""
    late = [Distribution.of([0.1] * 100) for _ in range(2)]
    late.append(Distribution.of([0.1] * (100 - slow) + [0.9] * slow))
    rounds = [_round(n, ttft=0.1) for n in (1, 2, 3)]
    rounds = [_replaced(r, ttft=d) for r, d in zip(rounds, late, strict=True)]
    assert judge(_gate(max_ttft_p99="600ms"), rounds).kind is kind


def test_a_low_percentile_is_a_limit_from_below() -> None:
    """`min_decode_tps_p5` allows five in a hundred streams to be slower."""
    gate = _gate(min_decode_tps_p5=150)
    assert judge(gate, _rounds([200] * 3)).kind is VerdictKind.PASS
    slow = Distribution.of([200.0] * 80 + [100.0] * 20)
    rounds = [_replaced(r, decode_tps=slow) for r in _rounds([200] * 3)]
    assert judge(gate, rounds).kind is VerdictKind.FAIL


def test_no_acceptance_fails_its_floor_and_none_told_is_open() -> None:
    """HTTP 200 with no draft accepted fails; a server that tells nothing decides nothing."""
    gate = _gate(min_accept_length=2.5)
    broken = _rounds([200] * 3, accept_length=1.0, accept_rate=0.0)
    assert judge(gate, broken).kind is VerdictKind.FAIL
    silent = judge(gate, _rounds([200] * 3))
    assert (silent.kind, _codes(silent)) == (VerdictKind.INCONCLUSIVE, [ReasonCode.NOT_MEASURED])
    assert not silent.more_rounds_wanted


def test_no_usage_leaves_speed_open_and_latency_judged() -> None:
    """Without the server's counts a speed limit is inconclusive, never passed and never failed."""
    blind = _rounds([200] * 3, decode_tps=Distribution(), output_tps=None, without_usage=100)
    verdict = judge(_gate(min_decode_tps=1, max_ttft="1s"), blind)
    assert (verdict.kind, _codes(verdict)) == (VerdictKind.INCONCLUSIVE, [ReasonCode.NO_USAGE])
    assert judge(_gate(max_ttft="1s"), blind).kind is VerdictKind.PASS


def test_answers_that_came_in_one_piece_tell_no_speed() -> None:
    """When most answers have no decode speed, the few that do are not taken for all."""
    few = _rounds([200] * 3, decode_tps=Distribution.of([200.0] * 20))
    verdict = judge(_gate(min_decode_tps=100), few)
    assert _codes(verdict) == [ReasonCode.NOT_MEASURED]


# --- error budget ----------------------------------------------------------------------------------


def test_one_failure_breaks_a_budget_of_none() -> None:
    """With no errors allowed one failed request fails the gate at once, and says what it was."""
    bad = _round(
        sent=100, completed=99, failures={"truncated": 1}, failure_examples=("truncated: x",)
    )
    verdict = judge(_gate(), [bad])
    assert (verdict.kind, _codes(verdict)) == (VerdictKind.FAIL, [ReasonCode.ERROR_BUDGET])
    assert "1 truncated" in verdict.reasons[0].message


def test_a_share_that_chance_explains_is_measured_on() -> None:
    """Two failures of 100 with 1 % allowed are open; twenty are a fail; ten times fewer than allowed pass."""
    gate = _gate(error_rate="1%")

    def with_failures(count: int, rounds: int) -> list[RunResult]:
        bad = {"completed": 100 - count, "failures": {"http_503": count}}
        return [_round(n, **bad) for n in range(1, rounds + 1)]

    assert judge(gate, with_failures(2, 1)).more_rounds_wanted
    assert judge(gate, with_failures(20, 1)).kind is VerdictKind.FAIL
    assert judge(gate, with_failures(2, 8)).kind is VerdictKind.FAIL
    assert judge(gate, with_failures(1, 3)).kind is VerdictKind.PASS


def test_a_run_may_have_an_error_limit_of_its_own() -> None:
    """`max_error_rate` of a run is judged over that run."""
    gate = _gate(error_rate="50%", max_error_rate="1%")
    bad = [_round(n, completed=90, failures={"http_503": 10}) for n in (1, 2, 3)]
    assert judge(gate, bad).kind is VerdictKind.FAIL


# --- infrastructure --------------------------------------------------------------------------------

GONE = {
    "infrastructure": ReasonCode.UNREACHABLE,
    "infrastructure_message": "refused",
    "sent": 3,
    "completed": 0,
}


def test_infrastructure_is_never_a_verdict() -> None:
    """S22: what kept us from measuring is an error, whatever the broken round looked like."""
    verdict = judge(_gate(min_decode_tps=300), [_round(1, **GONE)])
    assert (verdict.kind, _codes(verdict)) == (VerdictKind.ERROR, [ReasonCode.UNREACHABLE])
    assert not verdict.more_rounds_wanted


def test_a_good_round_heals_a_broken_one() -> None:
    """A tunnel that came back leaves nothing behind: only the last try of a run counts as trouble."""
    gate = _gate(min_decode_tps=100)
    rounds = [_round(1, **GONE), *_rounds([200, 200, 200])]
    assert judge(gate, rounds).kind is VerdictKind.PASS
    assert judge(gate, [*_rounds([200, 200, 200]), _round(4, **GONE)]).kind is VerdictKind.ERROR


def test_a_proven_fail_stays_a_fail() -> None:
    """What was proven before the connection broke is not taken back."""
    gate = _gate(min_decode_tps=300)
    assert judge(gate, [_round(1), _round(2, **GONE)]).kind is VerdictKind.FAIL


# --- the client as the bottleneck ------------------------------------------------------------------


def test_a_busy_client_proves_fast_but_never_slow() -> None:
    """An overloaded client turns a fail into an open question, and leaves a pass alone."""
    busy = {"client_cpu_share": 0.9}
    slow = judge(_gate(min_decode_tps=300), _rounds([200] * 3, **busy))
    assert (slow.kind, _codes(slow)) == (VerdictKind.INCONCLUSIVE, [ReasonCode.CLIENT_BOTTLENECK])
    assert judge(_gate(min_decode_tps=100), _rounds([200] * 3, **busy)).kind is VerdictKind.PASS


def test_lateness_of_the_client_is_granted_to_the_server() -> None:
    """A limit missed by less than the client was itself late is open; one missed by more is a fail."""
    late = _rounds([200] * 3, client_loop_lag_p99_ms=30.0)
    assert judge(_gate(max_ttft="80ms"), late).kind is VerdictKind.INCONCLUSIVE
    assert judge(_gate(max_ttft="60ms"), late).kind is VerdictKind.FAIL
    assert judge(_gate(max_ttft_p95="80ms"), late).kind is VerdictKind.INCONCLUSIVE
    assert judge(_gate(min_decode_tps=201), _rounds([200] * 3)).kind is VerdictKind.INCONCLUSIVE


# --- texts and quality -----------------------------------------------------------------------------


def test_answers_without_a_word_are_judged_by_their_number() -> None:
    """A model may say nothing now and then; one that mostly does is broken, and no request counts as failed."""
    rare = _rounds([200] * 3, completed=98, empty=2)
    assert judge(_gate(), rare).kind is VerdictKind.PASS
    mute = judge(_gate(), _rounds([200], completed=60, empty=40))
    assert (mute.kind, _codes(mute)) == (VerdictKind.FAIL, [ReasonCode.DEGENERATE])
    assert judge(_gate(), _rounds([200], completed=0, empty=100)).kind is VerdictKind.FAIL


def _quality(passed: int, *, of: int = 16, garbage: int = 0) -> QualityResult:
    answers = tuple(Answer(f"q{n}", n < passed, "", "text") for n in range(of))
    return QualityResult(answers, garbage)


def test_a_fast_server_that_writes_garbage_fails() -> None:
    """Speed and transport may be perfect: garbled texts fail by themselves."""
    verdict = judge(_gate(min_decode_tps=100), _rounds([900], garbage=64))
    assert (verdict.kind, _codes(verdict)) == (VerdictKind.FAIL, [ReasonCode.DEGENERATE])
    assert judge(_gate(), [], None, _quality(0, garbage=16)).kind is VerdictKind.FAIL


def test_wrong_answers_fail_only_against_a_baseline() -> None:
    """A small model may answer almost nothing; it fails when it answers clearly less than before."""
    rounds = _rounds([200] * 3)
    assert judge(_gate(), rounds, None, _quality(1)).kind is VerdictKind.PASS
    for before, now, kind in [
        (15, 15, VerdictKind.PASS),
        (15, 13, VerdictKind.PASS),
        (15, 8, VerdictKind.FAIL),
        (4, 3, VerdictKind.PASS),
        (16, 16, VerdictKind.PASS),
        (0, 0, VerdictKind.PASS),
    ]:
        base = Baseline("r1", (), _quality(before))
        verdict = judge(_gate(), rounds, base, _quality(now))
        assert verdict.kind is kind, (before, now)


def test_refrains_fail_when_nearly_all_texts_are_one_or_many_more_than_before() -> None:
    """A sampled model that repeats a phrase in every text is broken; a small one that always did is judged by its past."""
    looping = _rounds([200] * 3, looping=95)
    mute = judge(_gate(), looping)
    assert (mute.kind, _codes(mute)) == (VerdictKind.FAIL, [ReasonCode.DEGENERATE])
    assert judge(_gate(), _rounds([200] * 3, looping=60)).kind is VerdictKind.PASS
    assert judge(_gate(), _rounds([200] * 3, looping=60), _base()).kind is VerdictKind.FAIL
    assert judge(_gate(), looping, _base(looping=80)).kind is VerdictKind.PASS
    greedy = _rounds([200] * 3, looping=100, workload="greedy")
    assert judge(_gate(), greedy).kind is VerdictKind.PASS


# --- speculation -----------------------------------------------------------------------------------


def _said(*texts: str) -> QualityResult:
    return QualityResult(tuple(Answer(f"q{n}", True, "", t) for n, t in enumerate(texts)), 0)


def test_speculation_must_not_change_what_the_model_says() -> None:
    """Other greedy answers after a change of drafts ask; the same, ties late in the text, or no change do not."""
    old = _said(*(f"a b c d e f g h {n} tail" for n in range(16)))
    late = _said(*(f"a b c d e f g h {n} other" for n in range(16)))
    other = _said(*(f"x{n} b c d e f g h" for n in range(16)))
    rounds = _rounds([200] * 3)

    def verdict(new: QualityResult, was: str, now: str) -> Verdict:
        base = Baseline("r1", (), old, was)
        return judge(_gate(), rounds, base, new, speculative=now)

    assert verdict(late, "", '{"num_steps": 3}').kind is VerdictKind.PASS
    changed = verdict(other, "", '{"num_steps": 3}')
    assert (changed.kind, _codes(changed)) == (
        VerdictKind.INCONCLUSIVE,
        [ReasonCode.TEXT_CHANGED],
    )
    assert not changed.more_rounds_wanted
    assert verdict(other, "x", "x").kind is VerdictKind.PASS


def test_acceptance_of_greedy_runs_is_told_apart() -> None:
    """Where greedy text is guessed far better than sampled text, that is said."""
    both = [
        *_rounds([200] * 3, accept_length=1.4),
        *[
            replace(r, run="fixed", workload="greedy", accept_length=5.9)
            for r in _rounds([200] * 3)
        ],
    ]
    verdict = judge(_gate(), both)
    assert "only the latter is what users get" in verdict.notes[0]


def test_sampled_text_that_is_always_guessed_is_implausible() -> None:
    """Acceptance at its ceiling asks for a second look; in greedy runs it is ordinary."""
    assert judge(_gate(), _rounds([200] * 3, accept_rate=0.99)).implausible
    assert not judge(_gate(), _rounds([200] * 3, accept_rate=0.6)).implausible
    assert not judge(_gate(), _rounds([200] * 3, accept_rate=1.0, workload="greedy")).implausible


def test_a_second_look_that_finds_wrong_answers_fails() -> None:
    """Implausibly fast and clearly worse at other questions is a fail; as good as before is a pass."""
    fast = _rounds([400, 401, 399])
    base = Baseline("r1", tuple(_rounds([200, 201, 199])), _quality(14))
    gate = _gate(max_loss="5%")
    assert judge(gate, fast, base, _quality(14)).implausible
    assert judge(gate, fast, base, _quality(14), again=_quality(10, of=12)).kind is VerdictKind.PASS
    worse = judge(gate, fast, base, _quality(14), again=_quality(3, of=12))
    assert (worse.kind, _codes(worse)) == (VerdictKind.FAIL, [ReasonCode.QUALITY_WORSE])


# --- tunnel ----------------------------------------------------------------------------------------


def test_a_latency_missed_through_a_tunnel_belongs_on_the_host() -> None:
    """What the tunnel may explain is left open and names the remedy; what it cannot explain fails; a pass stands."""
    tunnel = {"tunnelled": True, "tunnel_ms": 40.0}
    near = judge(_gate(max_ttft="80ms"), _rounds([200] * 3, **tunnel))
    assert (near.kind, _codes(near)) == (VerdictKind.INCONCLUSIVE, [ReasonCode.TUNNEL])
    assert "gate.from: host" in near.reasons[0].message
    assert judge(_gate(max_ttft="50ms"), _rounds([200] * 3, **tunnel)).kind is VerdictKind.FAIL
    assert judge(_gate(max_ttft="110ms"), _rounds([200] * 3, **tunnel)).kind is VerdictKind.PASS
    untimed = {"tunnelled": True, "tunnel_ms": None}
    assert (
        judge(_gate(max_ttft_p95="50ms"), _rounds([200] * 3, **untimed)).kind
        is VerdictKind.INCONCLUSIVE
    )
    assert judge(_gate(min_decode_tps=300), _rounds([200] * 3, **tunnel)).kind is VerdictKind.FAIL


# --- baseline --------------------------------------------------------------------------------------


def _base(values: Sequence[float] = (200, 201, 199), **changes: Any) -> Baseline:
    return Baseline("r1", tuple(_rounds(values, **changes)))


@pytest.mark.parametrize(
    ("now", "kind"),
    [
        ((200, 199, 201), VerdictKind.PASS),
        ((300, 301, 299), VerdictKind.PASS),
        ((180, 179, 181), VerdictKind.FAIL),
        ((191, 189, 190), VerdictKind.INCONCLUSIVE),
    ],
)
def test_a_revision_may_lose_no_more_than_its_margin(
    now: Sequence[float], kind: VerdictKind
) -> None:
    """As fast as before passes, 10 % slower fails, and the edge of a 5 % margin is open."""
    verdict = judge(_gate(max_loss="5%"), _rounds(now), _base())
    assert verdict.kind is kind
    if kind is VerdictKind.FAIL:
        assert _codes(verdict) == [ReasonCode.SLOWER]
        assert "-10.0%" in verdict.reasons[0].message


def test_a_longer_wait_for_the_first_token_fails_too() -> None:
    """Time to first token has three times the margin, and beyond it fails."""
    gate = _gate(max_loss="5%")
    assert judge(gate, _rounds([200, 201, 199], ttft=0.105), _base()).kind is VerdictKind.PASS
    assert judge(gate, _rounds([200, 201, 199], ttft=0.15), _base()).kind is VerdictKind.FAIL


def test_without_a_baseline_only_the_limits_count() -> None:
    """The first deployment of a server has nothing to be compared with."""
    assert judge(_gate(max_loss="5%"), _rounds([200] * 3)).kind is VerdictKind.PASS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fingerprint": {"server.gpu": "H200"}}, "server.gpu was None, is H200"),
        ({"output_tokens": Distribution.of([50.0 + n % 5 for n in range(100)])}, "tokens long"),
        ({"cached_prompt_share": 0.5}, "prefix cache"),
    ],
)
def test_two_measurements_of_two_things_are_not_compared(
    changes: dict[str, Any], said: str
) -> None:
    """Another GPU, other lengths or a warm cache: no comparison; with limits they decide, without nothing does."""
    slow = _rounds([100, 101, 99], **changes)
    with_limit = judge(_gate(max_loss="5%", min_decode_tps=50), slow, _base())
    assert with_limit.kind is VerdictKind.PASS
    assert said in with_limit.notes[0]
    without = judge(_gate(max_loss="5%"), slow, _base())
    assert (without.kind, _codes(without)) == (
        VerdictKind.INCONCLUSIVE,
        [ReasonCode.NOT_COMPARABLE],
    )


def test_an_implausible_speed_up_is_said() -> None:
    """Twice as fast passes, with a note that asks for a look at the answers."""
    verdict = judge(_gate(max_loss="5%"), _rounds([400, 401, 399]), _base())
    assert verdict.kind is VerdictKind.PASS
    assert "implausibly" in verdict.notes[0]


@pytest.mark.parametrize("loss", ["0%", "50%", "100%"])
def test_every_margin_of_the_spec_can_be_judged(loss: str) -> None:
    """From no loss to all of it, a margin gives a verdict."""
    verdict = judge(_gate(max_loss=loss), _rounds([200, 201, 199]), _base())
    assert verdict.kind is (VerdictKind.INCONCLUSIVE if loss == "0%" else VerdictKind.PASS)


def _gate_of_simulated_rounds(
    draw: random.Random, truth: float, spread: float
) -> tuple[VerdictKind, int]:
    """Play one gate: restarts vary by 0.5 %, rounds by `spread`, six rounds of baseline."""
    gate = _gate(max_loss="5%")
    plain = _round(output_tokens=Distribution.of([64.0] * 5))

    def rounds(level: float, count: int) -> list[RunResult]:
        level *= math.exp(draw.gauss(0, 0.005))
        speeds = [level * math.exp(draw.gauss(0, spread)) for _ in range(count)]
        made = [Distribution((v,) * 3, 100, v) for v in speeds]
        return [replace(plain, round=n, decode_tps=d) for n, d in enumerate(made, 1)]

    base = Baseline("r1", tuple(rounds(200.0, 6)))
    new = rounds(200.0 * truth, 8)
    for count in range(3, 9):
        verdict = judge(gate, new[:count], base)
        if not verdict.more_rounds_wanted:
            return verdict.kind, count
    return verdict.kind, 8


@pytest.mark.parametrize(
    ("truth", "spread", "kind", "least", "most"),
    [
        (1.00, 0.01, VerdictKind.PASS, 0.99, 1.0),
        (1.00, 0.01, VerdictKind.FAIL, 0.0, 0.0),
        (0.98, 0.01, VerdictKind.PASS, 0.65, 0.95),
        (0.95, 0.01, VerdictKind.PASS, 0.0, 0.03),
        (0.95, 0.01, VerdictKind.FAIL, 0.0, 0.03),
        (0.90, 0.01, VerdictKind.FAIL, 0.99, 1.0),
        (1.00, 0.02, VerdictKind.PASS, 0.80, 1.0),
        (0.85, 0.04, VerdictKind.FAIL, 0.90, 1.0),
    ],
)
def test_simulated_gates_end_as_designed(
    truth: float, spread: float, kind: VerdictKind, least: float, most: float
) -> None:
    """Over 300 simulated gates the shares of passes and fails are those of the design's table."""
    ends = _ends(truth, spread)
    assert least <= sum(end is kind for end in ends) / len(ends) <= most


@cache
def _ends(truth: float, spread: float) -> list[VerdictKind]:
    draw = random.Random(f"{truth} {spread}")
    return [_gate_of_simulated_rounds(draw, truth, spread)[0] for _ in range(300)]


# --- storage and statistics ------------------------------------------------------------------------


def test_a_baseline_survives_storage() -> None:
    """What is stored with an applied revision reads back to the same judgement."""
    base = Baseline("r1", tuple(_rounds([200, 201, 199])), _quality(12))
    again = Baseline.from_json(json.loads(json.dumps(base.to_json())))
    assert again.to_json() == base.to_json()
    gate = _gate(max_loss="5%")
    now = _rounds([180, 179, 181])
    assert judge(gate, now, again) == judge(gate, now, base)
    with pytest.raises(ValueError, match="format"):
        Baseline.from_json({"format_version": "2.0"})


def test_a_verdict_is_json() -> None:
    """Verdicts go into records and onto the run stream as they are."""
    verdict = judge(_gate(min_decode_tps=300), _rounds([200]))
    told = json.loads(json.dumps(verdict.to_json()))
    assert told["verdict"] == "fail"
    assert told["rows"][-1] == {
        "run": "single",
        "key": "min_decode_tps",
        "measured": 200.0,
        "bound": 300.0,
        "verdict": "fail",
        "reason": "LimitMissed",
        "message": "single: min_decode_tps is 300, measured 200 in 1 round",
    }


def test_a_thinned_distribution_keeps_its_shape() -> None:
    """Very many values are kept as order statistics: count, mean, ends and percentiles stay."""
    many = Distribution.of(range(100_001), keep=101)
    assert (many.count, many.mean, len(many.values)) == (100_001, 50_000.0, 101)
    assert (many.values[0], many.values[-1]) == (0.0, 100_000.0)
    assert many.percentile(0.95) == pytest.approx(95_000, rel=0.01)
    assert Distribution.of([]).p50 is None
    assert Distribution.of([7.0]).percentile(0.99) == 7.0


@pytest.mark.parametrize(
    ("level", "freedom", "value"),
    [
        (0.95, 1, 6.3138),
        (0.95, 2, 2.9200),
        (0.975, 7, 2.3646),
        (0.99, 10, 2.7638),
        (0.995, 30, 2.7500),
    ],
)
def test_student_quantiles_are_those_of_the_tables(
    level: float, freedom: int, value: float
) -> None:
    """Quantiles of Student's t agree with printed tables."""
    assert student_t(level, freedom) == pytest.approx(value, abs=6e-5)


@pytest.mark.parametrize(
    ("count", "draws", "share", "value"),
    [
        (0, 299, 0.01, 0.04954),
        (3, 10, 0.5, 0.171875),
        (-1, 5, 0.5, 0.0),
        (5, 5, 0.5, 1.0),
        (0, 5, 0.0, 1.0),
        (4, 5, 1.0, 0.0),
    ],
)
def test_binomial_tails_are_exact(count: int, draws: int, share: float, value: float) -> None:
    """The chance of at most so many hits is exact, at its edges too."""
    assert binomial_at_most(count, draws, share) == pytest.approx(value, abs=1e-5)


def _replaced(result: RunResult, **changes: Any) -> RunResult:
    return replace(result, **changes)

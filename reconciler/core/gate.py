"""What a gate says about a measured server. Pure.

`judge` turns the rounds measured so far, the spec's gate, the rounds stored with the last applied
revision and the quality answers into a `Verdict`. The order is: is the measurement valid, is the error
budget kept, are the absolute limits met, is it no slower than the baseline. The unit of analysis is the
*round* (one pass of a run's prompts at its concurrency), since requests of one round share its luck.

Three rules stand above the statistics. What the infrastructure did (tunnel down, key refused) is never
a verdict about a revision. A measuring client that was itself too slow can prove that a server is fast
enough, never that it is too slow. A fail is definite: callers stop at the first one.

`core/measurement.py` has the results, `bench/rounds.py` runs the rounds, `core/rollout.py` acts on verdicts.
Only the standard library at run time, so that it can travel to a host with the client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from reconciler.core.measurement import (
    FORMAT_VERSION,
    Baseline,
    Distribution,
    QualityResult,
    ReasonCode,
    RunResult,
    short,
)
from reconciler.core.significance import binomial_at_most, mean_of, student_t, variance

if TYPE_CHECKING:
    from reconciler.core.spec import Gate, GateRun, Limit

# Fewer rounds say nothing about the spread between rounds; more do not change a close call enough to
# be worth the outage (bench-gate.md section 3, the simulated table).
MIN_ROUNDS = 3
MAX_ROUNDS = 8
# Before the third round only a value this far on the wrong side of its limit is a fail: no healthy
# host was seen to spread that much.
CLEAR_MISS = 0.2
ALPHA = 0.05
# Looks at rounds 3 to 8 share the error probability evenly.
LOOK_ALPHA = ALPHA / (MAX_ROUNDS - MIN_ROUNDS + 1)
# No two rounds are equal to better than this, however alike the few seen so far look.
MIN_ROUND_SPREAD = 0.003
# Restart-to-restart spread of one and the same revision on one and the same host.
DEPLOY_SPREAD = 0.005
# Time to first token varies more than speed and matters less: three times the margin.
TTFT_MARGIN_FACTOR = 3
# A client busier than this delays its own stamps.
CLIENT_CPU_LIMIT = 0.7
CLIENT_LAG_LIMIT_MS = 2.0
# Output lengths and cached prompt tokens may differ this much before two measurements are of two things.
COMPARABLE_LENGTH = 0.05
COMPARABLE_CACHED_SHARE = 0.05
IMPLAUSIBLE_SPEEDUP = 1.5
# So many garbled texts are no accident of sampling.
GARBAGE_SHARE = 0.5
# A model may end at once now and then; more often than this it says nothing.
EMPTY_SHARE = 0.05
# Small models run into refrains now and then even when sampled. What nobody sees is nearly all of them doing so
# (without a baseline), or so many more than before.
LOOPING_SHARE = 0.9
LOOPING_GROWTH = 0.5
# Greedy texts with and without speculation agree up to numeric ties, which seldom come in the first words.
SAME_WORDS = 8
# Some lanes give other greedy text after each restart, though rarely in the first words of a short answer: only
# where hardly any answer begins as before is it asked, and where many do not it is said.
SAME_TEXT_SHARE = 0.25
SAME_TEXT_NOTED = 0.75
# No draft model guesses sampled text this well.
IMPLAUSIBLE_ACCEPTANCE = 0.98
# Latencies: what a tunnel adds to.
LATENCIES = frozenset({"ttft", "ttfv_ms", "e2e", "event_gap"})


class VerdictKind(StrEnum):
    """The four verdicts."""

    PASS = "pass"  # noqa: S105 - a verdict, no secret
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason of a verdict: a stable code and a sentence with numbers."""

    code: ReasonCode
    message: str


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was judged: which key of which run, what was measured, what was allowed.

    `open` says that more rounds may decide what is inconclusive now.
    """

    run: str
    key: str
    measured: float | None
    bound: float
    verdict: VerdictKind
    reason: Reason | None = None
    open: bool = False

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object."""
        return {
            "run": self.run,
            "key": self.key,
            "measured": short(self.measured),
            "bound": short(self.bound),
            "verdict": self.verdict.value,
            "reason": self.reason.code.value if self.reason else None,
            "message": self.reason.message if self.reason else "",
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says. `notes` are worth reading and decided nothing.

    `implausible`: it is faster than anything explains, so the answers deserve a second look.
    """

    kind: VerdictKind
    reasons: tuple[Reason, ...] = ()
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    more_rounds_wanted: bool = False
    implausible: bool = False

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object, with `format_version`."""
        return {
            "format_version": FORMAT_VERSION,
            "verdict": self.kind.value,
            "reasons": [{"code": r.code.value, "message": r.message} for r in self.reasons],
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }


def judge(
    gate: Gate,
    results: Sequence[RunResult],
    baseline: Baseline | None = None,
    quality: QualityResult | None = None,
    *,
    speculative: str = "",
    again: QualityResult | None = None,
) -> Verdict:
    """Say whether the measured server passes its gate.

    `speculative` is the new revision's speculative decoding as JSON; `again` are the answers to the second
    set of questions, asked after an implausible speed-up.

    `results` are all rounds so far, in any order. While the answer is open, the kind is inconclusive and
    `more_rounds_wanted` is set; a caller whose time is over takes the verdict as it is.

    A definite fail outranks an infrastructure error: what was proven before the tunnel broke stays true.
    """
    measured = [r for r in results if r.infrastructure is None]
    rows: list[Row] = list(_quality_rows(quality, baseline.quality if baseline else None))
    rows += _second_look_rows(again, quality, baseline.quality if baseline else None)
    rows += _speculation_rows(quality, baseline, speculative)
    rows += _text_rows(measured, baseline)
    rows += _budget_rows(gate.max_error_rate, measured)
    notes: list[str] = []
    uncompared: list[str] = []
    for run in gate.runs:
        rounds = [r for r in measured if r.run == run.name]
        rows += _run_rows(run, rounds)
        if gate.baseline is not None and baseline is not None:
            base = baseline.rounds_of(run.name)
            compared, why_not, remarks = _baseline_rows(
                gate.baseline.max_loss, rounds, base, comparisons=2 * len(gate.runs)
            )
            rows += compared
            uncompared += why_not
            notes += remarks
    notes += _profile_notes(measured)
    notes += [
        f"speculative decoding was changed, and only {row.measured:.0%} of the greedy answers begin as before"
        for row in rows
        if row.key == "same_greedy_texts" and (row.measured or 0.0) < SAME_TEXT_NOTED
    ]
    verdict = _combined(gate, rows, (notes, uncompared), results, quality)
    return replace(verdict, implausible=_is_implausible(rows, measured))


def _is_implausible(rows: Sequence[Row], measured: Sequence[RunResult]) -> bool:
    """Say whether a speed grew beyond belief, or sampled text was guessed too well."""
    grown = (
        row.measured is not None and row.measured > IMPLAUSIBLE_SPEEDUP
        for row in rows
        if row.key in {"decode_tps_against_baseline", "output_tps_against_baseline"}
    )
    guessed = (
        r.accept_rate is not None and r.accept_rate >= IMPLAUSIBLE_ACCEPTANCE
        for r in measured
        if r.workload != "greedy"
    )
    return any(grown) or any(guessed)


def _profile_notes(measured: Sequence[RunResult]) -> list[str]:
    """Say where greedy text is guessed much better than what users get: then only the latter counts."""
    lengths: dict[bool, list[float]] = {True: [], False: []}
    for result in measured:
        if result.accept_length is not None:
            lengths[result.workload == "greedy"].append(result.accept_length)
    if not lengths[True] or not lengths[False]:
        return []
    greedy, real = mean_of(lengths[True]), mean_of(lengths[False])
    if abs(greedy / real - 1) <= 0.25:
        return []
    return [
        f"accepted tokens per pass: {greedy:.3g} in greedy runs, {real:.3g} in realistic ones; only the latter is what users get"
    ]


def _combined(
    gate: Gate,
    rows: list[Row],
    remarks: tuple[list[str], list[str]],
    results: Sequence[RunResult],
    quality: QualityResult | None,
) -> Verdict:
    """Put the rows together: fail, error, inconclusive, pass, in this order of strength.

    `remarks` are plain notes, and why a comparison with the baseline made no sense.
    """
    notes = [*remarks[1], *remarks[0]]
    failed = [row.reason for row in rows if row.verdict is VerdictKind.FAIL and row.reason]
    if failed:
        return Verdict(VerdictKind.FAIL, tuple(failed), tuple(rows), tuple(notes))
    broken = _infrastructure(results, quality)
    if broken:
        return Verdict(VerdictKind.ERROR, broken, tuple(rows), tuple(notes))
    done = _rounds_done(gate, results)
    reasons = [row.reason for row in rows if row.verdict is VerdictKind.INCONCLUSIVE and row.reason]
    wanted = any(row.open for row in rows)
    if gate.runs and done < MIN_ROUNDS:
        message = f"{done} of at least {MIN_ROUNDS} rounds were measured"
        settled = [reason for reason in reasons if reason.code is not ReasonCode.UNDECIDED]
        reasons = [Reason(ReasonCode.TOO_FEW_ROUNDS, message), *settled]
        wanted = True
    elif remarks[1] and not reasons and _nothing_left(gate):
        reasons = [Reason(ReasonCode.NOT_COMPARABLE, why) for why in remarks[1]]
    if not reasons:
        return Verdict(VerdictKind.PASS, (), tuple(rows), tuple(notes))
    wanted = wanted and bool(gate.runs) and done < MAX_ROUNDS
    return Verdict(
        VerdictKind.INCONCLUSIVE,
        tuple(reasons),
        tuple(rows),
        tuple(notes),
        more_rounds_wanted=wanted,
    )


def _nothing_left(gate: Gate) -> bool:
    """Say whether a gate asks for a comparison only, so that without one it has no opinion."""
    return gate.baseline is not None and not any(run.limits for run in gate.runs)


def _rounds_done(gate: Gate, results: Sequence[RunResult]) -> int:
    measured = [r for r in results if r.infrastructure is None]
    return min((sum(r.run == run.name for r in measured) for run in gate.runs), default=0)


def _infrastructure(
    results: Sequence[RunResult], quality: QualityResult | None
) -> tuple[Reason, ...]:
    """Collect what kept us from measuring; a later good round of the same run heals an earlier bad one."""
    last = {result.run: result for result in results}
    broken = [
        Reason(r.infrastructure, r.infrastructure_message)
        for r in last.values()
        if r.infrastructure is not None
    ]
    if quality is not None and quality.infrastructure is not None:
        broken.insert(0, Reason(quality.infrastructure, quality.infrastructure_message))
    return tuple(broken)


# --- quality and texts -------------------------------------------------------------------------------


def _quality_rows(quality: QualityResult | None, base: QualityResult | None) -> Iterable[Row]:
    """Judge the answers: garbage absolutely, right answers only against the baseline's share.

    A small model misses many; what counts is that it misses more than before. One prompt of margin,
    and beyond it the exact binomial tail.
    """
    if quality is None or quality.infrastructure is not None or not quality.asked:
        return
    yield _garbage_row("quality", quality.garbage, quality.asked)
    if base is None or not base.asked:
        return
    before = base.passed / base.asked
    allowed = max(0.0, (base.passed - 1) / base.asked)
    share = quality.passed / quality.asked
    worse = share < allowed and binomial_at_most(quality.passed, quality.asked, allowed) < ALPHA
    message = (
        f"{quality.passed} of {quality.asked} quality prompts were answered right, "
        f"{base.passed} of {base.asked} by the last applied revision"
    )
    reason = Reason(ReasonCode.QUALITY_WORSE, message) if worse else None
    kind = VerdictKind.FAIL if worse else VerdictKind.PASS
    yield Row("quality", "right_answers", share, before, kind, reason)


def _second_look_rows(
    again: QualityResult | None, quality: QualityResult | None, base: QualityResult | None
) -> Iterable[Row]:
    """Judge other questions, asked because the speed is beyond belief: against the share right before, here or there."""
    if again is None or again.infrastructure is not None or not again.asked:
        return
    yield _garbage_row("quality-again", again.garbage, again.asked)
    before = base if base is not None and base.asked else quality
    if before is None or not before.asked:
        return
    allowed = max(0.0, (before.passed - 1) / before.asked)
    share = again.passed / again.asked
    if share >= allowed or binomial_at_most(again.passed, again.asked, allowed) >= ALPHA:
        yield Row("quality-again", "right_answers", share, allowed, VerdictKind.PASS)
        return
    message = (
        f"it is implausibly fast, and of {again.asked} other questions {again.passed} were answered right, "
        f"where {before.passed} of {before.asked} were before"
    )
    reason = Reason(ReasonCode.QUALITY_WORSE, message)
    yield Row("quality-again", "right_answers", share, allowed, VerdictKind.FAIL, reason)


def _speculation_rows(
    quality: QualityResult | None, baseline: Baseline | None, speculative: str
) -> Iterable[Row]:
    """Compare greedy answers with those of the baseline where speculative decoding was turned on, off or changed.

    It must not change what greedy decoding says. Numeric ties may, so a difference asks and does not fail.
    """
    base = baseline.quality if baseline is not None else None
    if base is None or quality is None or quality.infrastructure is not None or baseline is None:
        return
    if baseline.speculative == speculative:
        return
    before = {answer.prompt: answer.text.split()[:SAME_WORDS] for answer in base.answers}
    pairs = [(a.text.split()[:SAME_WORDS], before[a.prompt]) for a in quality.answers if a.prompt in before]  # fmt: skip
    pairs = [(new, old) for new, old in pairs if new or old]
    if not pairs:
        return
    same = sum(new == old for new, old in pairs)
    share = same / len(pairs)
    if share >= SAME_TEXT_SHARE:
        yield Row("quality", "same_greedy_texts", share, SAME_TEXT_SHARE, VerdictKind.PASS)
        return
    message = (
        f"speculative decoding was {baseline.speculative or 'off'}, is {speculative or 'off'}, and only {same} of {len(pairs)} greedy "
        "answers begin as before: it must not change what the model says"
    )
    reason = Reason(ReasonCode.TEXT_CHANGED, message)
    yield Row("quality", "same_greedy_texts", share, SAME_TEXT_SHARE, VerdictKind.INCONCLUSIVE, reason)  # fmt: skip


def _text_rows(measured: Sequence[RunResult], baseline: Baseline | None) -> Iterable[Row]:
    """Judge the texts of the speed runs: a broken model is often the fastest one."""
    for run in dict.fromkeys(r.run for r in measured):
        rounds = [r for r in measured if r.run == run]
        texts = sum(r.completed for r in rounds)
        if texts:
            yield _garbage_row(run, sum(r.garbage for r in rounds), texts)
            yield from _looping_rows(run, rounds, baseline)
        silent = sum(r.empty for r in rounds)
        if silent:
            yield _empty_row(run, silent, texts + silent)


def _garbage_row(run: str, garbage: int, texts: int) -> Row:
    share = garbage / texts
    if share < GARBAGE_SHARE:
        return Row(run, "garbled_texts", share, GARBAGE_SHARE, VerdictKind.PASS)
    message = (
        f"{garbage} of {texts} texts of {run} are garbled (one character for ever, or no text)"
    )
    reason = Reason(ReasonCode.DEGENERATE, message)
    return Row(run, "garbled_texts", share, GARBAGE_SHARE, VerdictKind.FAIL, reason)


def _looping_rows(
    run: str, rounds: Sequence[RunResult], baseline: Baseline | None
) -> Iterable[Row]:
    """Judge refrains: against the baseline's share, and without one only where nearly every text is one.

    Under greedy decoding with the end of sequence ignored all models loop: only the comparison counts there.
    """
    texts = sum(r.completed for r in rounds)
    share = sum(r.looping for r in rounds) / texts
    before = [r for r in (baseline.rounds_of(run) if baseline else ()) if r.completed]
    if before:
        was = sum(r.looping for r in before) / sum(r.completed for r in before)
        allowed, compared = min(1.0, was + LOOPING_GROWTH), f", {was:.0%} before"
    elif all(r.workload == "greedy" for r in rounds):
        return
    else:
        allowed, compared = LOOPING_SHARE, ""
    if share < allowed or texts < 4:
        yield Row(run, "looping_texts", share, allowed, VerdictKind.PASS)
        return
    message = f"{share:.0%} of {texts} texts of {run} repeat a phrase to their end{compared}"
    yield Row(run, "looping_texts", share, allowed, VerdictKind.FAIL, Reason(ReasonCode.DEGENERATE, message))  # fmt: skip


def _empty_row(run: str, silent: int, answers: int) -> Row:
    """Judge answers without a word: a share that chance explains is no fault."""
    share = silent / answers
    if binomial_at_most(silent - 1, answers, EMPTY_SHARE) <= 1 - ALPHA:
        return Row(run, "empty_answers", share, EMPTY_SHARE, VerdictKind.PASS)
    reason = Reason(
        ReasonCode.DEGENERATE, f"{silent} of {answers} answers of {run} ended without a word"
    )
    return Row(run, "empty_answers", share, EMPTY_SHARE, VerdictKind.FAIL, reason)


# --- error budget ------------------------------------------------------------------------------------


def _budget_rows(allowed: float, measured: Sequence[RunResult]) -> Iterable[Row]:
    if any(r.sent for r in measured):
        yield _budget_row("all", "max_error_rate", allowed, measured)


def _budget_row(run: str, key: str, allowed: float, rounds: Sequence[RunResult]) -> Row:
    """Judge failed requests exactly: a share that chance explains is measured on, not failed.

    With a budget of 0 one failed request is a fail, whatever the number of requests.
    """
    sent = sum(r.sent for r in rounds)
    failed = sum(r.failed for r in rounds)
    share = failed / sent if sent else 0.0
    if share <= allowed:
        return Row(run, key, share, allowed, VerdictKind.PASS)
    classes: dict[str, int] = {}
    for name, count in (item for r in rounds for item in r.failures.items()):
        classes[name] = classes.get(name, 0) + count
    named = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
    example = next((text for r in rounds for text in r.failure_examples), "")
    message = f"{failed} of {sent} requests failed ({named}), allowed are {allowed:.2%}" + (
        f"; the first said: {example}" if example else ""
    )
    last_look = len({r.round for r in rounds}) >= MAX_ROUNDS
    sure = binomial_at_most(failed - 1, sent, allowed) > 1 - ALPHA
    if sure or last_look:
        reason = Reason(ReasonCode.ERROR_BUDGET, message)
        return Row(run, key, share, allowed, VerdictKind.FAIL, reason)
    reason = Reason(ReasonCode.UNDECIDED, message)
    return Row(run, key, share, allowed, VerdictKind.INCONCLUSIVE, reason, open=True)


# --- absolute limits ---------------------------------------------------------------------------------


def _run_rows(run: GateRun, rounds: Sequence[RunResult]) -> Iterable[Row]:
    if not rounds:
        return
    for limit in run.limits:
        if limit.result == "error_rate":
            yield _budget_row(run.name, limit.key, limit.value, rounds)
        else:
            yield _with_lag_granted(run, limit, rounds)


def _with_lag_granted(run: GateRun, limit: Limit, rounds: Sequence[RunResult]) -> Row:
    """Judge one limit; a fail must stand even when the client's own lateness is taken off.

    The client can only be late, so what passes needs no such care.
    """
    row = _limit_row(run, limit, rounds)
    if row.verdict is VerdictKind.PASS:
        return row
    busy = _client_trouble(rounds)
    if row.verdict is VerdictKind.FAIL and not busy:
        granted = _limit_row(run, limit, [_lag_granted(r) for r in rounds])
        if granted.verdict is VerdictKind.FAIL:
            return _through_the_tunnel(run, limit, row, rounds)
        busy = "its own lateness explains what was measured"
    if not busy:
        return row
    reason = Reason(
        ReasonCode.CLIENT_BOTTLENECK, f"{limit.key}: the measuring client was too slow: {busy}"
    )
    return replace(row, verdict=VerdictKind.INCONCLUSIVE, reason=reason, open=True)


def _through_the_tunnel(run: GateRun, limit: Limit, row: Row, rounds: Sequence[RunResult]) -> Row:
    """Leave a missed latency open where what the tunnel adds could be the reason: that limit belongs on the host.

    A pass through a tunnel stands, because a tunnel only ever adds.
    """
    if limit.result not in LATENCIES or not any(r.tunnelled for r in rounds):
        return row
    granted = _limit_row(run, limit, [_tunnel_granted(r) for r in rounds])
    if granted.verdict is VerdictKind.FAIL:
        return row
    message = (
        f"{run.name}: {limit.key} is {limit.value:g}, measured {_number(row.measured)} through a tunnel that may explain the difference; "
        "set `gate.from: host`"
    )
    reason = Reason(ReasonCode.TUNNEL, message)
    return replace(row, verdict=VerdictKind.INCONCLUSIVE, reason=reason)


def _tunnel_granted(result: RunResult) -> RunResult:
    """Give the result as if the slowest tiny request through the tunnel had been added to every latency."""
    if not result.tunnelled:
        return result
    # A tunnel that could not be timed explains anything.
    added = math.inf if result.tunnel_ms is None else result.tunnel_ms / 1000
    late = _lag_granted(result)
    return replace(
        late,
        ttft=_mapped(late.ttft, lambda v: max(0.0, v - added)),
        e2e=_mapped(late.e2e, lambda v: max(0.0, v - added)),
        event_gap=_mapped(late.event_gap, lambda v: max(0.0, v - added)),
    )


def _client_trouble(rounds: Sequence[RunResult]) -> str:
    """Say why these rounds measured the client, or "" when they did not."""
    share = max((r.client_cpu_share for r in rounds), default=0.0)
    if share >= CLIENT_CPU_LIMIT:
        return f"it used {share:.0%} of a core (limit {CLIENT_CPU_LIMIT:.0%})"
    return ""


def _lag_granted(result: RunResult) -> RunResult:
    """Give the result as if the client's p99 lateness had been the server's gain in every request."""
    lag = result.client_loop_lag_p99_ms / 1000
    if result.client_loop_lag_p99_ms < CLIENT_LAG_LIMIT_MS:
        return result
    spent = (result.e2e.p50 or 0.0) - (result.ttft.p50 or 0.0)
    faster = spent / (spent - lag) if spent > lag else 1.0
    window = result.output_tps_window_s or result.duration_s
    wider = window / (window - lag) if window > lag else 1.0
    return replace(
        result,
        ttft=_mapped(result.ttft, lambda v: max(0.0, v - lag)),
        e2e=_mapped(result.e2e, lambda v: max(0.0, v - lag)),
        event_gap=_mapped(result.event_gap, lambda v: max(0.0, v - lag)),
        decode_tps=_mapped(result.decode_tps, lambda v: v * faster),
        output_tps=None if result.output_tps is None else result.output_tps * wider,
    )


def _mapped(values: Distribution, change: Callable[[float], float]) -> Distribution:
    return replace(values, values=tuple(change(v) for v in values.values))


def _limit_row(run: GateRun, limit: Limit, rounds: Sequence[RunResult]) -> Row:
    missing = _why_missing(limit.result, rounds)
    if missing is not None:
        return Row(run.name, limit.key, None, limit.value, VerdictKind.INCONCLUSIVE, missing)
    if limit.percentile is not None:
        return _percentile_row(run, limit, rounds)
    return _central_row(run, limit, rounds)


def _why_missing(result: str, rounds: Sequence[RunResult]) -> Reason | None:
    """Say why there is no number for a result, or None when every round has one."""
    if all(_central(result, r) is not None for r in rounds):
        # Answers that came in one piece have no decode speed, and they may be the fastest ones.
        if result != "decode_tps" or all(2 * r.decode_tps.count >= r.completed for r in rounds):
            return None
        message = "decode_tps: most answers came in one piece, which tells no speed"
        return Reason(ReasonCode.NOT_MEASURED, message)
    if result in {"output_tps", "decode_tps"} and any(r.without_usage for r in rounds):
        message = f"{result}: the server told no token counts (usage), and events are not tokens"
        return Reason(ReasonCode.NO_USAGE, message)
    if result in {"accept_length", "accept_rate"}:
        return Reason(
            ReasonCode.NOT_MEASURED, f"{result}: the server tells nothing about its drafts"
        )
    return Reason(ReasonCode.NOT_MEASURED, f"{result}: no request gave a value")


def _central(result: str, measured: RunResult) -> float | None:
    """Give the one number of a round for a result: the median where there is one per request."""
    value = getattr(measured, result)
    return value.p50 if isinstance(value, Distribution) else value


def _central_row(run: GateRun, limit: Limit, rounds: Sequence[RunResult]) -> Row:
    """Judge a limit on the middle of a result: its 95 % bound over rounds must be on the right side."""
    values = [value for r in rounds if (value := _central(limit.result, r)) is not None]
    mean = math.fsum(values) / len(values)
    sign = 1 if limit.bound == "min" else -1

    def good(value: float) -> bool:
        return (value - limit.value) * sign >= 0

    if len(values) < MIN_ROUNDS:
        far = limit.value * (1 - sign * CLEAR_MISS)
        if all(not good(v) and (v - far) * sign < 0 for v in values):
            return _missed(run, limit, mean, len(values))
        return _undecided(run, limit, mean, len(values))
    half = _half_width(values, mean)
    if good(mean - sign * half):
        return Row(run.name, limit.key, mean, limit.value, VerdictKind.PASS)
    if not good(mean + sign * half):
        return _missed(run, limit, mean, len(values))
    return _undecided(run, limit, mean, len(values))


def _half_width(values: Sequence[float], mean: float) -> float:
    spread = max(math.sqrt(variance(values)), MIN_ROUND_SPREAD * abs(mean))
    return student_t(1 - ALPHA, len(values) - 1) * spread / math.sqrt(len(values))


def _percentile_row(run: GateRun, limit: Limit, rounds: Sequence[RunResult]) -> Row:
    """Judge a percentile limit by counting values on the wrong side: exact binomial, over all rounds.

    Gaps between events of one stream are no independent draws; they count as many as there are requests.
    """
    assert limit.percentile is not None
    place = limit.percentile / 100
    allowed = 1 - place if limit.bound == "max" else place
    over = total = 0.0
    for measured in rounds:
        values: Distribution = getattr(measured, limit.result)
        wrong = sum(
            v > limit.value if limit.bound == "max" else v < limit.value for v in values.values
        )
        draws = min(values.count, measured.completed)
        over += wrong / len(values.values) * draws
        total += draws
    count, draws = math.ceil(over - 1e-9), round(total)
    every = Distribution.of(v for r in rounds for v in getattr(r, limit.result).values)
    measured_value = every.percentile(place)
    if binomial_at_most(count, draws, allowed) <= ALPHA:
        return Row(run.name, limit.key, measured_value, limit.value, VerdictKind.PASS)
    if binomial_at_most(count - 1, draws, allowed) >= 1 - ALPHA:
        return _missed(run, limit, measured_value, len(rounds))
    return _undecided(run, limit, measured_value, len(rounds))


def _missed(run: GateRun, limit: Limit, measured: float | None, rounds: int) -> Row:
    message = f"{run.name}: {limit.key} is {limit.value:g}, measured {_number(measured)} in {_rounds(rounds)}"
    reason = Reason(ReasonCode.LIMIT_MISSED, message)
    return Row(run.name, limit.key, measured, limit.value, VerdictKind.FAIL, reason)


def _undecided(run: GateRun, limit: Limit, measured: float | None, rounds: int) -> Row:
    message = (
        f"{run.name}: {limit.key} is {limit.value:g}, measured {_number(measured)} in {_rounds(rounds)}: "
        "too close to call"
    )
    reason = Reason(ReasonCode.UNDECIDED, message)
    return Row(
        run.name, limit.key, measured, limit.value, VerdictKind.INCONCLUSIVE, reason, open=True
    )


# --- baseline ----------------------------------------------------------------------------------------


def _baseline_rows(
    max_loss: float,
    rounds: Sequence[RunResult],
    base: Sequence[RunResult],
    *,
    comparisons: int,
) -> tuple[list[Row], list[str], list[str]]:
    """Compare one run with its baseline: rows, why a comparison makes no sense, other remarks."""
    if not rounds:
        return [], [], []
    name = rounds[0].run
    if not base:
        return [], [f"{name}: the last applied revision was not measured with this run"], []
    differing = _not_comparable(rounds, base)
    if differing:
        return [], [f"{name}: not comparable with the baseline: {differing}"], []
    names = ["decode_tps", "ttft"] if rounds[0].concurrency == 1 else ["output_tps", "ttft"]
    rows: list[Row] = []
    without: list[str] = []
    notes: list[str] = []
    for name in names:
        margin = max_loss * (TTFT_MARGIN_FACTOR if name == "ttft" else 1)
        row, note = _compared(name, margin, rounds, base, comparisons)
        rows += [row] if row else []
        if note:
            (notes if row else without).append(note)
    return rows, without, notes


def _not_comparable(rounds: Sequence[RunResult], base: Sequence[RunResult]) -> str:
    """Name what makes two measurements measurements of two things, or ""."""
    here, there = rounds[0].fingerprint, base[0].fingerprint
    keys = sorted(k for k in {*here, *there} if here.get(k) != there.get(k))
    if keys:
        return ", ".join(f"{k} was {there.get(k)}, is {here.get(k)}" for k in keys)
    lengths = [_pooled(r.output_tokens for r in group) for group in (rounds, base)]
    new, old = lengths[0].p50, lengths[1].p50
    if new and old and abs(new / old - 1) > COMPARABLE_LENGTH and _differ(*lengths):
        return f"answers were {old:g} tokens long (median), are {new:g}"
    cached = [mean_of(r.cached_prompt_share or 0.0 for r in group) for group in (rounds, base)]
    if abs(cached[0] - cached[1]) > COMPARABLE_CACHED_SHARE:
        return f"{cached[1]:.0%} of the prompts came from the prefix cache, now {cached[0]:.0%}"
    return ""


def _differ(a: Distribution, b: Distribution) -> bool:
    """Say whether two samples differ by more than their size explains (three standard errors)."""
    error = variance(a.values) / len(a.values) + variance(b.values) / len(b.values)
    return abs(mean_of(a.values) - mean_of(b.values)) > 3 * math.sqrt(error)


def _compared(
    name: str,
    margin: float,
    rounds: Sequence[RunResult],
    base: Sequence[RunResult],
    comparisons: int,
) -> tuple[Row | None, str]:
    """Test non-inferiority of one metric on logarithms: no worse than `margin`, with errors controlled.

    A loss is a lower speed or a longer wait. Passing needs no correction for several metrics (all must
    pass); failing is tested at a level divided by their number.
    """
    new = [math.log(v) for r in rounds if (v := _central(name, r))]
    old = [math.log(v) for r in base if (v := _central(name, r))]
    if len(new) < len(rounds) or not old:
        return None, f"{rounds[0].run}: {name} was not measured in both, so not compared"
    sign = -1 if name == "ttft" else 1
    gain = sign * (mean_of(new) - mean_of(old))
    # A loss of all of it is no margin that a logarithm knows.
    bound = math.log(max(1 - margin, 1e-3)) if sign > 0 else -math.log(1 + margin)
    measured = math.exp(mean_of(new) - mean_of(old))
    key = f"{name}_against_baseline"
    limit = math.exp(sign * bound)
    if len(new) < MIN_ROUNDS:
        return Row(rounds[0].run, key, measured, limit, VerdictKind.INCONCLUSIVE, open=True), ""
    error, freedom = _standard_error(new, old)
    message = (
        f"{rounds[0].run}: {name} is {math.exp(mean_of(new)):.4g}, the last applied revision had "
        f"{math.exp(mean_of(old)):.4g} ({measured - 1:+.1%}, allowed {limit - 1:+.1%})"
    )
    if gain - student_t(1 - LOOK_ALPHA, freedom) * error > bound:
        note = _implausible(name, measured, message) if sign > 0 else ""
        return Row(rounds[0].run, key, measured, limit, VerdictKind.PASS), note
    granted = [math.log(v) for r in rounds if (v := _central(name, _lag_granted(r)))]
    best = sign * (mean_of(granted) - mean_of(old)) if len(granted) == len(new) else gain
    sure = best + student_t(1 - LOOK_ALPHA / comparisons, freedom) * error < bound
    if sure and not _client_trouble(rounds):
        reason = Reason(ReasonCode.SLOWER, message)
        return Row(rounds[0].run, key, measured, limit, VerdictKind.FAIL, reason), ""
    reason = Reason(ReasonCode.UNDECIDED, f"{message}: too close to call in {_rounds(len(new))}")
    return Row(rounds[0].run, key, measured, limit, VerdictKind.INCONCLUSIVE, reason, open=True), ""


def _implausible(name: str, measured: float, message: str) -> str:
    return (
        f"{message}: {name} grew implausibly; look at the answers"
        if measured > IMPLAUSIBLE_SPEEDUP
        else ""
    )


def _standard_error(new: Sequence[float], old: Sequence[float]) -> tuple[float, int]:
    """Give the standard error of a difference of two means of rounds, and its degrees of freedom.

    Both deployments also carry the luck of their restart, which no number of rounds averages out.
    """
    freedom = len(new) + len(old) - 2
    pooled = ((len(new) - 1) * variance(new) + (len(old) - 1) * variance(old)) / freedom
    pooled = max(pooled, MIN_ROUND_SPREAD**2)
    return math.sqrt(pooled * (1 / len(new) + 1 / len(old)) + 2 * DEPLOY_SPREAD**2), freedom


def _pooled(parts: Iterable[Distribution]) -> Distribution:
    return Distribution.of(v for part in parts for v in part.values)


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4g}"


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"

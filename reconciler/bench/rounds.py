"""The gate as a sequence of rounds: warm up, ask for quality, measure, judge, and stop as soon as it is clear.

Runs take turns (1, 64, 1, 64, ...), so that a GPU that grows hot slows all of them alike. After each round the
judgement in `core/gate.py` says whether another is wanted; a definite fail ends the gate at once, since
the service is waiting for its old revision. The deadline is the spec's `timeouts.gate`.

Straight blocking code: the event loop is inside `load.collect`. `core/rollout.py` acts on the outcome.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reconciler.bench import quality
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress, Prompt
from reconciler.bench.meter import LOCAL, Meter
from reconciler.bench.warm_up import WARM_TOKENS, warm_up
from reconciler.bench.workloads import GREEDY_WARNING, mixed, prompt_set, sampling_for, warm_up_set
from reconciler.core.gate import MIN_ROUNDS, Reason, Verdict, VerdictKind, judge
from reconciler.core.measurement import Baseline, QualityResult, ReasonCode, RunResult

if TYPE_CHECKING:
    from reconciler.core.spec import Gate, GateRun

# An infrastructure error is measured again so often before it is the verdict.
_TRIES = 2
_ANSWER_LIMIT_S = 60.0
_IDLE_LIMIT_S = 30.0

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """How a gate ended, with everything that was measured."""

    verdict: Verdict
    results: tuple[RunResult, ...]
    rounds: int
    quality: QualityResult | None = None
    took_s: float = 0.0
    again: QualityResult | None = None
    speculative: str = ""

    def as_baseline(self, revision: str) -> Baseline:
        """Give what is to be stored with the revision, once it is applied."""
        measured = tuple(r for r in self.results if r.infrastructure is None)
        return Baseline(revision, measured, self.quality, self.speculative)


def run_gate(
    gate: Gate,
    endpoint: Endpoint,
    baseline: Baseline | None,
    *,
    server_info: Mapping[str, str] | None = None,
    deadline_s: float,
    on_progress: OnProgress | None = None,
    clock: Callable[[], float] = time.monotonic,
    meter: Meter = LOCAL,
    prompts: Sequence[Prompt] = (),
    speculative: str = "",
    go_on: Callable[[Sequence[RunResult]], bool] = lambda _results: False,
    runners: Mapping[str, Meter] | None = None,
) -> GateOutcome:
    """Measure a server until its gate has an answer or the time is over.

    `server_info` holds what a comparison with the baseline needs to be equal (GPU model, driver, power
    limit, model), `speculative` the revision's speculative decoding as JSON, `prompts` a user's own instead of
    those that are shipped. A server that would pass is measured further while `go_on` of its results says so. `runners` measure the runs that name them. Blocks; interrupting it
    (Ctrl-C) ends the requests in flight and raises.
    """
    endpoint = replace(endpoint, server=dict(server_info or endpoint.server))
    sequence = _Sequence(gate, endpoint, baseline, clock() + deadline_s, clock, on_progress, meter)
    sequence.speculative, sequence.go_on = speculative, go_on
    sequence.runners = runners or {}
    sequence.prompts = tuple(prompts) or _mixed(gate)
    return sequence.run()


@dataclass(slots=True)
class _Sequence:
    """One gate under way."""

    gate: Gate
    endpoint: Endpoint
    baseline: Baseline | None
    due: float
    clock: Callable[[], float]
    on_progress: OnProgress | None
    meter: Meter = LOCAL
    speculative: str = ""
    runners: Mapping[str, Meter] = field(default_factory=dict)
    prompts: tuple[Prompt, ...] = ()
    go_on: Callable[[Sequence[RunResult]], bool] = lambda _results: False
    again: QualityResult | None = None
    results: list[RunResult] = field(default_factory=list)
    quality: QualityResult | None = None
    took: dict[str, float] = field(default_factory=dict)
    salt: str = field(default_factory=lambda: secrets.token_hex(3))

    def run(self) -> GateOutcome:
        """Ask, measure, judge."""
        began = self.clock()
        verdict = self._asked()
        rounds = 0
        while (
            verdict is None
            or verdict.more_rounds_wanted
            or (verdict.kind is VerdictKind.PASS and self.go_on(self.results))
        ):
            rounds += 1
            verdict, whole = self._round(rounds)
            if not whole:
                break
        if verdict.kind is VerdictKind.PASS and verdict.implausible and self._left() > 0:
            verdict = self._asked_again()
        if any(self._workload(run) == "greedy" for run in self.gate.runs):
            verdict = replace(verdict, notes=(*verdict.notes, GREEDY_WARNING))
        took = self.clock() - began
        return GateOutcome(
            verdict, tuple(self.results), rounds, self.quality, took, self.again, self.speculative
        )

    def _judge(self) -> Verdict:
        return judge(
            self.gate,
            self.results,
            self.baseline,
            self.quality,
            speculative=self.speculative,
            again=self.again,
        )

    def _workload(self, run: GateRun) -> str:
        return run.workload or self.gate.workload

    def _asked_again(self) -> Verdict:
        """Ask other questions, since what was measured is too good; no answers leave it open."""
        self.again = quality.ask(
            self.endpoint,
            questions=quality.AGAIN,
            salt=f"{self.salt}a",
            deadline_s=self._left(),
            on_progress=self.on_progress,
            meter=self.meter,
        )
        verdict = self._judge()
        if self.again.infrastructure is None or verdict.kind is not VerdictKind.PASS:
            return verdict
        why = f"it is implausibly fast, and a second look was not possible: {self.again.infrastructure_message}"
        reason = Reason(ReasonCode.UNDECIDED, why)
        return replace(verdict, kind=VerdictKind.INCONCLUSIVE, reasons=(reason,))

    def _asked(self) -> Verdict | None:
        """Ask the quality questions first; a verdict only if they settle it."""
        if self.gate.quality == "off":
            return None
        for _ in range(_TRIES):
            self.quality = quality.ask(
                self.endpoint,
                salt=quality.SALT,
                streams=1 if self._texts_matter() else quality.STREAMS,
                deadline_s=self._left(),
                on_progress=self.on_progress,
                meter=self.meter,
            )
            if self.quality.infrastructure is None:
                break
        verdict = self._judge()
        if verdict.kind is VerdictKind.ERROR and self._left() <= 0:
            return _out_of_time(verdict, "while the quality prompts were asked")
        return verdict if verdict.kind in {VerdictKind.FAIL, VerdictKind.ERROR} else None

    def _texts_matter(self) -> bool:
        """Say whether greedy texts are, or may later be, compared with and without speculative decoding."""
        before = self.baseline.speculative if self.baseline is not None else ""
        return bool(self.speculative or before)

    def _round(self, number: int) -> tuple[Verdict, bool]:
        """Measure every run once; say what follows, and whether the round was whole."""
        verdict = self._judge()
        for run in self.gate.runs:
            if self._left() <= self.took.get(run.name, 0.0):
                return _out_of_time(verdict, f"in round {number}, before {run.name}"), False
            if number == 1 and run.runner is None:
                self._warm_up(run)
            began = self.clock()
            result = self._measured(run, number)
            self.took[run.name] = self.clock() - began
            if result.infrastructure is ReasonCode.DEADLINE:
                why = f"in round {number} of {run.name}: {result.infrastructure_message}"
                return _out_of_time(verdict, why), False
            self.results.append(result)
            verdict = self._judge()
            if verdict.kind in {VerdictKind.FAIL, VerdictKind.ERROR}:
                return verdict, False
        return verdict, True

    def _measured(self, run: GateRun, number: int) -> RunResult:
        """Measure a run, once more if the infrastructure was in the way."""
        plan = self._plan(run, number)
        meter = self.meter if run.runner is None else self.runners[run.runner]
        result = meter.measure(plan, self.endpoint, self.on_progress)
        for again in range(1, _TRIES):
            if result.infrastructure in {None, ReasonCode.DEADLINE} or self._left() <= 0:
                break
            plan = replace(plan, salt=f"{plan.salt}r{again}", deadline_s=self._left())
            result = meter.measure(plan, self.endpoint, self.on_progress)
        return result

    def _plan(self, run: GateRun, number: int) -> LoadPlan:
        count = round_requests(run)
        budget = int(self.gate.max_error_rate * count * MIN_ROUNDS)
        return LoadPlan(
            run=run.name,
            round=number,
            prompts=self.prompts,
            concurrency=run.concurrency,
            requests=count,
            max_tokens=run.max_tokens,
            workload=self._workload(run),
            sampling=sampling_for(self._workload(run), self.endpoint.engine),
            salt=f"{self.salt}{run.name[:8]}{number}.",
            ttft_limit_s=_ANSWER_LIMIT_S,
            idle_limit_s=_IDLE_LIMIT_S,
            deadline_s=self._left(),
            # One beyond the budget settles it; two more are kept as evidence.
            stop_after_failures=budget + 2,
        )

    def _warm_up(self, run: GateRun) -> None:
        """Send unmeasured requests at the run's concurrency until two rounds are alike; then empty the prefix cache."""
        plan = replace(
            self._plan(run, 0),
            prompts=warm_up_set(),
            requests=run.concurrency,
            max_tokens=min(run.max_tokens, WARM_TOKENS),
        )
        warm_up(plan, self.endpoint, self.meter, self.on_progress, left=self._left)
        self.meter.flush(self.endpoint)

    def _left(self) -> float:
        return max(0.0, self.due - self.clock())


def _mixed(gate: Gate) -> tuple[Prompt, ...]:
    """Give our own prompts in the gate's mix."""
    return mixed(prompt_set(), gate.mix) if gate.mix else prompt_set()


def round_requests(run: GateRun) -> int:
    """Give the requests of one round: the spec's number, spread over the fewest rounds that decide.

    A round of fewer than two answers a stream would be all ramp and drain.
    """
    spread = -(-run.requests // MIN_ROUNDS)
    return max(spread, min(run.requests, 2 * run.concurrency if run.concurrency > 1 else 1))


def _out_of_time(verdict: Verdict, where: str) -> Verdict:
    """Say that the time was over before there was an answer; what is proven stays."""
    if verdict.kind is VerdictKind.FAIL:
        return verdict
    message = f"the gate's time was over {where}; raise timeouts.gate, or ask for fewer requests or tokens"
    reasons = (Reason(ReasonCode.DEADLINE, message), *verdict.reasons)
    return replace(
        verdict, kind=VerdictKind.INCONCLUSIVE, reasons=reasons, more_rounds_wanted=False
    )

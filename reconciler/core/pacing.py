"""How often the daemon may act on one server: back-off, budget, flap limit. Pure; `now` is wall time, since it outlives a process.

A pass always looks; what is paced is acting. A refusal by the planner (rejected, drifted, held) is not ours to repeat or to
delay: nothing is done there anyway. What failed without such a verdict is tried again later and later, until what is wanted
changes or a person says `retry`. A half-way rollout is never kept waiting for a budget: leaving it is worse than going on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.plan import DISRUPTIVE, Action, ServerPlan

RESUME_LONGEST_S: Final = 60.0
"""A rollout that was left half-way is gone on with within one lease (L3)."""
CALM_S: Final = 600.0
"""How long a server must stay as wanted before its failures are forgotten: the first success after a flap proves nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The operator's bounds. `starts` and `heals` count within `window_s`."""

    first_s: float = 10.0
    factor: float = 2.0
    longest_s: float = 900.0
    window_s: float = 3600.0
    starts: int = 6
    heals: int = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """What is remembered of one server between passes.

    `wanted` is the revision that the failures are about; `token` the last request to try again that was honoured. `flapping`
    stands until what is wanted changes or somebody asks.
    """

    wanted: str = ""
    token: str = ""
    failures: int = 0
    due: float = 0.0
    well_since: float | None = None
    starts: tuple[float, ...] = ()
    heals: tuple[float, ...] = ()
    flapping: bool = False


FRESH: Final = Pace()


def renewed(pace: Pace, wanted: str, token: str) -> Pace:
    """Begin anew when something else is wanted, or a person asked to try again. Starts stay counted: commits can storm too."""
    if pace.wanted == wanted and pace.token == token:
        return pace
    asked = token != pace.token
    return replace(FRESH, wanted=wanted, token=token, starts=() if asked else pace.starts)


def admitted(plan: ServerPlan, pace: Pace, now: float, limits: Limits) -> ServerPlan:
    """Give the plan if it may be carried out now, else one that waits and says for what."""
    if not plan.acts:
        return plan
    retry = f"`reconcile retry {plan.wish.server}` tries at once"
    if now < pace.due <= now + limits.longest_s * 2:
        sentence = f"{plan.sentence}; failed {_times(pace.failures)}, next try in {_span(pace.due - now)}; {retry}"
        return _waiting(plan, Reason.BACK_OFF, sentence)
    if plan.action is Action.RESUME or not (plan.action in DISRUPTIVE or plan.aside):
        return plan
    if is_heal(plan) and (pace.flapping or len(_recent(pace.heals, now, limits)) >= limits.heals):
        sentence = f"{plan.sentence}; brought back {_times(limits.heals)} within {_span(limits.window_s)}, and left alone now, because that does not help; look for the cause, then {retry}"
        return _waiting(plan, Reason.FLAPPING, sentence)
    starts = _recent(pace.starts, now, limits) if plan.action in DISRUPTIVE else []
    if len(starts) >= limits.starts:
        free = starts[-limits.starts] + limits.window_s
        sentence = f"{plan.sentence}; {len(starts)} rollouts within {_span(limits.window_s)} are enough, the next may begin in {_span(free - now)}; {retry}"
        return _waiting(plan, Reason.BUDGET, sentence)
    return plan


def is_heal(plan: ServerPlan) -> bool:
    """Say whether the plan only brings back what was applied: the host moved, not the spec."""
    target = plan.wish.target
    return target is not None and target.revision == plan.applied and not plan.supersedes


def after(
    pace: Pace, plan: ServerPlan, result: ServerResult, now: float, limits: Limits, *, spread: float
) -> Pace:
    """Remember how a pass ended for a server. `spread` in [0, 1) keeps servers that failed together from trying together."""
    if plan.reason is Reason.FLAPPING:
        return replace(pace, flapping=True)
    if not plan.acts:
        return _quiet(pace, result, now)
    if result.reason is Reason.GROUP:
        # Two controllers wanted the same turn and both stood back: not at the same moment again.
        return replace(pace, due=now + limits.first_s * (0.5 + spread))
    if plan.action in DISRUPTIVE and result.outcome is not Outcome.REFUSED:
        # What preflight refused has touched nothing: it is tried again later and later, and uses nothing up (L9).
        pace = replace(pace, starts=(*_recent(pace.starts, now, limits), now))
    healed = plan.action in DISRUPTIVE or plan.aside
    if healed and is_heal(plan) and result.outcome is not Outcome.REFUSED:
        pace = replace(pace, heals=(*_recent(pace.heals, now, limits), now))
    if result.reason in {Reason.PREEMPTED, Reason.HANDED_OVER, Reason.SPEC_MOVED_ON}:
        return replace(pace, due=now)
    if result.outcome in {Outcome.APPLIED, Outcome.IN_SYNC, Outcome.STOPPED}:
        return replace(pace, due=0.0, well_since=now)
    longest = RESUME_LONGEST_S if plan.action is Action.RESUME else limits.longest_s
    pause = min(longest, limits.first_s * limits.factor ** min(pace.failures, 32))
    due = now + pause * (0.9 + 0.2 * spread)
    return replace(pace, failures=pace.failures + 1, due=due, well_since=None)


def due_at(pace: Pace, plan: ServerPlan, now: float, limits: Limits) -> float | None:
    """Say when a server wants to be looked at again, before the next regular pass; None when it need not."""
    match plan.reason:
        case Reason.BUDGET:
            starts = _recent(pace.starts, now, limits)
            return starts[-limits.starts] + limits.window_s if len(starts) >= limits.starts else now
        case Reason.FLAPPING:
            return None
        case _:
            return pace.due or None


def _quiet(pace: Pace, result: ServerResult, now: float) -> Pace:
    if result.outcome not in {Outcome.IN_SYNC, Outcome.STOPPED}:
        return replace(pace, well_since=None)
    since = now if pace.well_since is None else pace.well_since
    if now - since < CALM_S:
        return replace(pace, well_since=since)
    return replace(pace, well_since=since, failures=0, due=0.0)


def _waiting(plan: ServerPlan, reason: Reason, sentence: str) -> ServerPlan:
    return replace(
        plan, action=Action.BLOCKED, outcome=Outcome.WAITING, reason=reason, sentence=sentence
    )


def _recent(times: tuple[float, ...], now: float, limits: Limits) -> tuple[float, ...]:
    """Keep what lies within the window; a time in the future is a clock that was set back, and counts as now."""
    return tuple(min(t, now) for t in times if now - t < limits.window_s)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _span(seconds: float) -> str:
    whole = max(1, round(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{round(whole / 60)} min"

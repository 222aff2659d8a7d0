"""How often the daemon may act on one server, as values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.desired import Budgets, Target
from reconciler.core.pacing import CALM_S, FRESH, Limits, admitted, after, renewed
from reconciler.core.plan import Action, ServerPlan, Wish

LIMITS = Limits(first_s=10, factor=2, longest_s=100, window_s=3600, starts=3, heals=2)


def plan_of(action: Action, *, applied: str = "old") -> ServerPlan:
    """Give a plan that takes `qwen` to `new`."""
    wish = Wish(
        server="qwen", host="one", unit="qwen.service", target=Target(revision="new", unit_text=""), budgets=Budgets(), port=None,
        gated=False, on_failure="rollback", on_inconclusive="ask", drift="warn", suspend=False, policy_digest="",
    )  # fmt: skip
    return ServerPlan(wish, action, Outcome.IN_SYNC, Reason.NONE, "why", applied=applied)


def ended(outcome: Outcome, reason: Reason = Reason.NONE) -> ServerResult:
    """Give how a pass ended."""
    return ServerResult("qwen", outcome, reason, "")


def test_failures_wait_twice_as_long_each_time_up_to_the_longest() -> None:
    """S16: 10, 20, 40, 80, 100, 100 seconds; and until then the plan waits and says so."""
    pace, now, plan = renewed(FRESH, "new", ""), 1000.0, plan_of(Action.CHANGE)
    waits = []
    for _ in range(6):
        pace = after(pace, plan, ended(Outcome.UNKNOWN), now, LIMITS, spread=0.5)
        waits.append(round(pace.due - now))
        held = admitted(plan, pace, now + 1, replace(LIMITS, starts=99))
        assert (held.acts, held.outcome, held.reason) == (False, Outcome.WAITING, Reason.BACK_OFF)
        now = pace.due
        assert admitted(plan, pace, now, replace(LIMITS, starts=99)).acts
    assert waits == [10, 20, 40, 80, 100, 100]


@pytest.mark.parametrize(("wanted", "token"), [("newer", ""), ("new", "asked")])
def test_a_new_commit_or_a_retry_is_tried_at_once(wanted: str, token: str) -> None:
    """What is held against one revision is not held against the next; a person's word counts for the same one."""
    pace = after(
        renewed(FRESH, "new", ""), plan_of(Action.CHANGE), ended(Outcome.UNKNOWN), 0.0, LIMITS, spread=0.0
    )  # fmt: skip
    again = renewed(pace, wanted, token)
    assert (again.failures, again.due) == (0, 0.0)
    assert len(again.starts) == (0 if token else 1)


def test_one_success_forgets_nothing_and_a_calm_while_does() -> None:
    """A counter that is reset by the first success lets a flapping server flap for ever."""
    pace = renewed(FRESH, "new", "")
    pace = after(pace, plan_of(Action.CHANGE), ended(Outcome.UNKNOWN), 0.0, LIMITS, spread=0.0)
    pace = after(pace, plan_of(Action.CHANGE), ended(Outcome.APPLIED), 50.0, LIMITS, spread=0.0)
    assert (pace.failures, pace.due) == (1, 0.0)
    quiet = plan_of(Action.NOTHING)
    pace = after(pace, quiet, ended(Outcome.IN_SYNC), 60.0, LIMITS, spread=0.0)
    assert pace.failures == 1
    pace = after(pace, quiet, ended(Outcome.IN_SYNC), 51.0 + CALM_S, LIMITS, spread=0.0)
    assert pace.failures == 0


def test_budget_and_flap_limit_never_keep_a_half_way_rollout() -> None:
    """Leaving a server half-way is worse than one start too many (L3)."""
    full = replace(FRESH, starts=(0.0, 1.0, 2.0), heals=(0.0, 1.0), flapping=True)
    assert admitted(plan_of(Action.CHANGE), full, 3.0, LIMITS).reason is Reason.BUDGET
    assert (
        admitted(plan_of(Action.START, applied="new"), full, 3.0, LIMITS).reason is Reason.FLAPPING
    )
    assert admitted(plan_of(Action.RESUME), full, 3.0, LIMITS).acts
    assert admitted(plan_of(Action.CHANGE), full, 3700.0, LIMITS).acts


def test_a_clock_that_was_set_back_holds_nobody_for_ever() -> None:
    """Wall time may jump: a due time far away is no due time (F08)."""
    pace = replace(FRESH, due=1e9, failures=1)
    assert admitted(plan_of(Action.CHANGE), pace, 0.0, LIMITS).acts

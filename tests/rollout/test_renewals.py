"""The lease is renewed between two effects: the effect that had to wait for it is then sent, not taken as sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reconciler.core.attempt import Attempt, Member, Phase
from reconciler.core.conditions import Outcome
from reconciler.core.desired import Budgets, Target
from reconciler.core.effect import (
    Claim,
    Claimed,
    Done,
    Effect,
    Fence,
    Lost,
    Reply,
    Start,
    Unreachable,
    Wait,
    Waited,
    deadline_s,
)
from reconciler.core.rollout import MARGIN_S, PATIENCE_S, step

FENCE = Fence(3, "f" * 32)


def starting(lease_until: float) -> Attempt:
    """Give an attempt whose next effect is the start, with a lease that ends at this time."""
    target = Target("a" * 64, "[Unit]\n")
    member = Member("llm", "llm.service", target, None, Budgets(), fence=FENCE, boot_id="b", lease_until=lease_until)  # fmt: skip
    return Attempt("id", "host", (replace(member, previous="c" * 32),), phase=Phase.START)


@pytest.mark.parametrize("left_s", [0.5, 29.0, 59.0])
def test_a_start_that_waits_for_the_lease_is_sent_after_it(left_s: float) -> None:
    """Exactly one start is sent, whether or not the lease had to be renewed first (S9, S10)."""
    state, now, sent = starting(1000.0 + left_s), 1000.0, list[Effect]()
    reply: Waited | Claimed = Waited(now)
    for _ in range(3):
        state, effect = step(state, reply)
        sent.append(effect)
        if not isinstance(effect, Claim):
            break
        now += 0.1
        reply = Claimed(now, "llm", FENCE, effect.ttl_s, "b")
    renewals, last = sent[:-1], sent[-1]
    assert isinstance(last, Start)
    assert state.asked
    assert len(renewals) == (left_s < min(deadline_s(last) + MARGIN_S, 30.0))
    assert state.member.lease_until - now >= min(deadline_s(last) + MARGIN_S, 30.0)


@pytest.mark.parametrize("answers_claims", [True, False])
def test_a_host_that_answers_no_act_is_given_up_in_time(answers_claims: bool) -> None:
    """Also one that grants every lease: it is said, and the run ends (L6)."""
    state, now = starting(2000.0), 1000.0
    reply: Reply = Waited(now)
    for _ in range(500):
        state, effect = step(state, reply)
        if isinstance(effect, Done):
            break
        now += effect.seconds if isinstance(effect, Wait) else 1.0
        match effect:
            case Claim() if answers_claims:
                reply = Claimed(now, "llm", FENCE, effect.ttl_s, "b")
            case Wait():
                reply = Waited(now)
            case _:
                reply = Lost(now, "no answer") if answers_claims else Unreachable(now, "no way")
    assert isinstance(effect, Done)
    assert [row[1] for row in effect.results] == [Outcome.UNKNOWN]
    assert now < 1000.0 + 2 * PATIENCE_S

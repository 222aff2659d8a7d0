"""The one loop of a rollout: perform the effect, hand the reply to `step`, until it says that it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reconciler.core.attempt import Attempt
from reconciler.core.conditions import ServerResult
from reconciler.core.effect import (
    Began,
    Claimed,
    Done,
    Effect,
    Lost,
    Observed,
    Probed,
    Reply,
    Unreachable,
    Waited,
)
from reconciler.core.rollout import leavable, step
from reconciler.effects.perform import Performer
from reconciler.logs import log


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the loop, for whoever watches: the state, the effect that follows, the reply before it."""

    state: Attempt
    effect: Effect
    reply: Reply


def carry(
    state: Attempt, performer: Performer, on_turn: Callable[[Turn], None] = lambda _turn: None
) -> tuple[ServerResult, ...]:
    """Carry an attempt to its end, one effect at a time, and return how it ended for each server.

    This loop holds no opinions: what follows a reply (go on, retry, roll back, ask) is `step`'s to say, and is tested
    there without a host. The intent travels with each effect and is durable on the host before it acts, so that
    whoever finds this process dead can observe and go on from it (S11).
    """
    reply: Reply = Began(performer.ports.clock.now())
    asked = False
    while True:
        state, effect = step(state, reply)
        on_turn(Turn(state, effect, reply))
        if isinstance(effect, Done):
            return tuple(ServerResult(*row) for row in effect.results)
        began = performer.ports.clock.now()
        reply = performer.perform(state, effect)
        log.debug(
            "effect performed",
            host=state.host,
            attempt=state.id,
            step=state.phase.value,
            leg=state.leg.value,
            effect=type(effect).__name__,
            reply=type(reply).__name__,
            took_s=round(reply.now - began, 3),
        )
        if leavable(state) and isinstance(reply, Observed | Probed | Waited):
            reply = performer.ports.leaving(state, reply.now) or reply
        if (
            performer.ports.clock.stopping
            and not asked
            and not isinstance(reply, Claimed | Unreachable | Lost)
        ):
            # Steps look again instead of remembering, so a reply may be dropped for this one; a fence may not.
            asked, reply = True, Waited(reply.now, stop=True)

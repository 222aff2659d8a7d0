"""A rollout that was left half-way, and a newer commit since."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from reconciler.core.conditions import Outcome, Reason, ServerResult, exit_of
from reconciler.engines import custom
from reconciler.lab.schedule import HOST, ControllerDiedError, fleet_of, new_host
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import Effect, World
from reconciler.reconcile import act, survey

ENGINES = {"custom": custom}


def test_the_old_rollout_is_finished_and_the_newer_commit_is_still_owed() -> None:
    """S20, L4: only what was shown is done; the pass does not claim success for a spec that it did not apply."""
    world = World(1)
    host = new_host(world)
    controller = controller_world(world, {HOST: host}, ENGINES)
    killed = []

    def kill_once(effect: Effect) -> None:
        if (
            effect.kind == "call"
            and effect.detail == "start"
            and effect.stage == "after"
            and not killed
        ):
            killed.append(True)
            raise ControllerDiedError

    world.on_effect(kill_once)
    try:
        act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    except ControllerDiedError:
        world.advance(1.0)
    assert killed
    newer = fleet_of(2, ENGINES)
    (result,) = act(survey(newer, controller), controller, lambda _event: None)
    assert (result.outcome, result.reason) == (Outcome.WAITING, Reason.SPEC_MOVED_ON)
    assert exit_of(result).code == 9
    (result,) = act(survey(newer, controller), controller, lambda _event: None)
    assert result.outcome is Outcome.APPLIED
    (result,) = act(survey(newer, controller), controller, lambda _event: None)
    assert result.outcome is Outcome.IN_SYNC


def test_what_another_process_is_at_is_not_half_way() -> None:
    """S8: a rollout of a process that lives is not taken over by a second one of the same installation; a dead one's is."""
    world = World(1)
    host = new_host(world)
    controller = controller_world(world, {HOST: host}, ENGINES)
    second = replace(controller, exclusive=lambda _host: nullcontext(enter_result=False))
    found: list[tuple[ServerResult, ...]] = []

    def look_on(effect: Effect) -> None:
        if (effect.kind, effect.detail, effect.stage) == ("call", "start", "after") and not found:
            found.append(act(survey(fleet_of(1, ENGINES), second), second, lambda _event: None))

    world.on_effect(look_on)
    (first,) = act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    ((beside,),) = found
    assert (beside.outcome, beside.reason) == (Outcome.REFUSED, Reason.LEASE_HELD)
    assert "another process" in beside.sentence
    assert first.outcome is Outcome.APPLIED

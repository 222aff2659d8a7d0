"""A rollout that was left half-way, and a newer commit since."""

from __future__ import annotations

from reconciler.core.conditions import Outcome, Reason, exit_of
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

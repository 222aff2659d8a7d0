"""A release whose controller died: the same command goes on with it."""

from __future__ import annotations

import pytest
from release_stage import ENGINES, HOLD, Stage

from reconciler.core.conditions import Outcome
from reconciler.core.event import Event, StepStarted
from reconciler.lab.schedule import fleet_of
from reconciler.lab.simulated_ports import SimulatedPort
from reconciler.reconcile import act, survey
from reconciler.releasing import free


class DiedError(Exception):
    """The controller was killed."""


def left_at(stage: Stage, step: str) -> None:
    """Begin a release, and die when a step begins."""

    def emit(event: Event) -> None:
        if isinstance(event, StepStarted) and event.step == step:
            raise DiedError

    with pytest.raises(DiedError):
        free(stage.look("0", "1"), SimulatedPort(stage.host), stage.controller, HOLD, emit)


@pytest.mark.parametrize("step", ["drain", "stop", "release"])
def test_the_same_release_goes_on_where_it_was_left(step: str) -> None:
    """L3: whatever it had done, a second run is not refused, ends with the server down, held, and every card proven."""
    stage = Stage()
    left_at(stage, step)
    found = stage.look("0", "1")
    left = found.live.server("qwen").known_records
    assert left is not None
    assert left.intent is not None
    assert found.plan.objections == ()
    released = stage.free(found)
    assert [r.outcome for r in released.results] == [Outcome.STOPPED]
    assert [card["verdict"] for card in released.proof] == ["released", "released"]
    assert stage.running() == []
    records = stage.look("0", "1").live.server("qwen").known_records
    assert records is not None
    assert records.intent is None
    assert records.hold is not None
    assert records.hold.owner == "ann@desk"


def test_a_rollout_that_was_left_is_not_a_release() -> None:
    """It is somebody's change under way: the release is refused, and says what was left."""
    stage = Stage()

    def emit(event: Event) -> None:
        if isinstance(event, StepStarted) and event.step == "stop":
            raise DiedError

    with pytest.raises(DiedError):
        act(survey(fleet_of(2, ENGINES), stage.controller), stage.controller, emit)
    (objection,) = stage.look("0", "1").plan.objections
    assert objection.sentence.startswith("a rollout of qwen was left half-way")

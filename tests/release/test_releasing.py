"""Freeing GPUs of a simulated host: what is stopped, what is left alone, what is proven, and what is said of the rest."""

from __future__ import annotations

import pytest
from release_stage import Stage

from reconciler.core.conditions import Outcome, Reason, worst
from reconciler.effects.steer import write_records
from reconciler.lab.schedule import ControllerDiedError
from reconciler.lab.simulated_ports import SimulatedPort
from reconciler.lab.world import Effect


def test_a_released_server_is_stopped_held_and_proven() -> None:
    """The server on the GPUs is drained, stopped and held; each GPU is proven; the proof is kept; a pass leaves it down."""
    stage = Stage()
    before = {p.pid for p in stage.host.host.processes.values()}
    found = stage.look("0", "1")
    assert [one.server for one in found.plan.stop] == ["qwen"]
    assert found.plan.objections == ()
    released = stage.free(found)
    assert [r.outcome for r in released.results] == [Outcome.STOPPED]
    assert [card["verdict"] for card in released.proof] == ["released", "released"]
    card = released.proof[0]
    assert {h["pid"] for h in card["holders"]} == before
    assert all(h["class"] == "owned" and h["gone"] and h["done"] for h in card["holders"])
    assert card["baseline_mib"] == 4
    assert len(card["samples"]) >= 3
    assert released.not_kept == ""
    assert worst(released.verdicts).code == 0
    assert stage.running() == []
    kept = stage.host.execute(
        {"format": 1, "nonce": "0" * 32, "verb": "releases", "args": {"count": 1}}
    )["data"]["releases"]
    assert [c["verdict"] for c in kept[0]["gpus"]] == ["released", "released"]
    result = stage.run()
    assert (result.outcome, result.reason) == (Outcome.WAITING, Reason.HOLD)
    assert "ann@desk" in result.sentence
    stage.world.advance(300)
    assert stage.running() == []


def test_a_released_server_comes_back_after_resume() -> None:
    """`resume` ends the hold, and the next pass starts what its spec says."""
    stage = Stage()
    stage.free(stage.look("0"))
    write_records(SimulatedPort(stage.host), "qwen", "tester", [("hold", None)])
    assert stage.run().outcome is Outcome.APPLIED
    assert stage.running() == ["qwen.service"]


def test_slow_looks_are_waited_for() -> None:
    """Where a look takes seconds the proof still gets its three clean samples: slow is not the same as not free."""
    stage = Stage()
    found = stage.look("0")
    stage.world.call_takes_s = 2.5
    released = stage.free(found)
    assert [card["verdict"] for card in released.proof] == ["released"]


def test_a_controller_that_dies_half_way_leaves_no_hold() -> None:
    """L3: killed right after the stop, the release leaves a deadline and no hold: the host brings the server back by itself."""
    stage = Stage()
    found = stage.look("0")

    def die(effect: Effect) -> None:
        if (effect.kind, effect.detail, effect.stage) == ("call", "stop", "after"):
            stage.world.watchers.clear()
            raise ControllerDiedError

    stage.world.on_effect(die)
    with pytest.raises(ControllerDiedError):
        stage.free(found)
    stage.world.advance(400)
    assert stage.running() == ["qwen.service"]
    assert stage.run().reason is not Reason.HOLD

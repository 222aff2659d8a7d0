"""Who listens on the port is part of being ready."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.core.conditions import Outcome
from reconciler.engines import custom
from reconciler.lab.schedule import HOST, fleet_of, new_host
from reconciler.lab.simulated import SimulatedMachine
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import World
from reconciler.reconcile import act, survey

ENGINES = {"custom": custom}


def test_a_port_whose_listeners_cannot_be_read_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F65, S12: an answer on a port that anybody may have given proves nothing; unknown is never read as ours."""
    world = World(1)
    host = new_host(world)
    controller = controller_world(world, {HOST: host}, ENGINES)
    real = SimulatedMachine.listeners

    def unreadable_once_it_runs(self: SimulatedMachine, port: int, main_pid: int) -> Any:
        return {"unknown": "no answer"} if main_pid else real(self, port, main_pid)

    monkeypatch.setattr(SimulatedMachine, "listeners", unreadable_once_it_runs)
    (result,) = act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    assert result.outcome is Outcome.FAILED
    assert "cannot be read" in result.sentence

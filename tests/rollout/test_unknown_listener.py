"""Who listens on the port is part of being ready."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.core import steps
from reconciler.core.conditions import Outcome, ServerResult
from reconciler.engines import custom
from reconciler.lab.schedule import BEHAVIOURS, HOST, fleet_of, new_host
from reconciler.lab.simulated import SimulatedMachine
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import Effect, World
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


def beside() -> ServerResult:
    """Roll out while somebody else comes to listen on the server's port as well, as SO_REUSEPORT lets them."""
    world = World(1)
    host = new_host(world)
    controller = controller_world(world, {HOST: host}, ENGINES)

    def join(effect: Effect) -> None:
        if (effect.kind, effect.detail, effect.stage) == ("call", "start", "after"):
            other = host.host.add_process("/system.slice/other.service", port=30000)
            other.behaviour = BEHAVIOURS[1]

    world.on_effect(join)
    (result,) = act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    return result


def test_a_port_that_is_shared_is_not_ours() -> None:
    """F65: with two listeners some requests go elsewhere; that one of them is ours is not enough, and the other is named."""
    result = beside()
    assert result.outcome is Outcome.FAILED
    assert "not by qwen.service" in result.sentence


def test_without_the_look_at_every_listener_a_shared_port_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F65: switched off, a server is applied whose requests somebody else gets."""
    monkeypatch.setattr(steps, "_stranger", lambda _found: None)
    assert beside().outcome is Outcome.APPLIED


def test_a_listener_whom_nobody_holds_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """F65, S12: a proxy's port, or one of another pid namespace, has no process here: never ours."""
    real = SimulatedMachine.listeners

    def unheld(self: SimulatedMachine, port: int, main_pid: int) -> Any:
        seen = real(self, port, main_pid)
        more = {"address": "[::]:30000", "inode": 1, "pids": [], "units": []}
        return {"known": [*seen["known"], more]} if main_pid else seen

    monkeypatch.setattr(SimulatedMachine, "listeners", unheld)
    world = World(1)
    controller = controller_world(world, {HOST: new_host(world)}, ENGINES)
    (result,) = act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    assert result.outcome is Outcome.FAILED
    assert "cannot be seen" in result.sentence

"""What status and a plan say of a server that is down for a reason: under way, left half-way, held, without a spec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.text import Text
from steering_stage import Stage

from reconciler.core.conditions import Outcome, Reason
from reconciler.core.plan import ServerPlan
from reconciler.core.spec import Host
from reconciler.core.steps import LEASE_TTL_S
from reconciler.core.survey import Survey
from reconciler.effects.ports import Answer, Request
from reconciler.lab.simulated_ports import SimulatedPort
from reconciler.reconcile import survey
from reconciler.views.status import stand, status_lines
from reconciler.views.terminal import plan_lines

HOLD = b'{"at":1,"owner":"ann","reason":"her GPUs","until":null,"version":1}'


def seen(stage: Stage, text: str) -> tuple[Survey, ServerPlan, str]:
    """Give what a look finds, the plan of the server `a`, and its line of the status."""
    found = survey(stage.fleet(text), stage.controller)
    plan = next(p for h in found.hosts for p in h.plans if p.wish.server == "a")
    lines = [Text.from_markup(line).plain for line in status_lines(found, None)]
    return found, plan, next(line for line in lines if line.startswith("a "))


class Dies(SimulatedPort):
    """The way to a host on which the controller is killed as it is about to start something."""

    def call(self, request: Request, *, deadline_s: float) -> Answer:
        """Answer until then."""
        if request.verb == "start":
            raise ZeroDivisionError
        return super().call(request, deadline_s=deadline_s)


def killed(stage: Stage) -> str:
    """Kill a controller as it is about to start the new revision."""
    stage.apply(stage.text(a="one 0 1"))
    before = stage.controller

    @contextmanager
    def connect(host: Host) -> Iterator[SimulatedPort]:
        yield Dies(stage.hosts[host.name])

    stage.controller = replace(before, connect=connect)
    with pytest.raises(ZeroDivisionError):
        stage.apply(stage.text(a="one 0 2"))
    stage.controller = before
    return stage.text(a="one 0 2")


def test_while_its_lease_lives_a_rollout_is_under_way() -> None:
    """Whoever looks is told by whom and at which step, not that something was left or that a unit is inactive."""
    stage = Stage("one")
    text = killed(stage)
    _, _, line = seen(stage, text)
    assert f"a rollout by {stage.controller.holder} is under way (at install)" in line
    assert "left half-way" not in line
    assert "inactive" not in line


def test_when_its_lease_has_run_out_it_was_left_half_way() -> None:
    """Nobody is at it any more; the step is told."""
    stage = Stage("one")
    text = killed(stage)
    stage.controller = replace(stage.controller, holder="another")
    assert "is under way" in seen(stage, text)[2]
    stage.world.advance(LEASE_TTL_S + 1)
    _, plan, line = seen(stage, text)
    assert plan.sentence.startswith("a rollout was left half-way at install; ")
    assert plan.sentence in line


def test_a_lease_of_another_boot_or_fence_binds_nobody() -> None:
    """What the host itself would not honour is not told as somebody at work (S8)."""
    stage = Stage("one")
    text = killed(stage)
    path = "/run/reconciler/a.lease"
    files = stage.hosts["one"].host.files
    before = files.data[path]
    assert "under way" in stage.plans(text)["a"].sentence
    for old, new in ((b'"boot_id":"', b'"boot_id":"x'), (b'"nonce":"', b'"nonce":"x')):
        assert old in before
        files.put(path, before.replace(old, new))
        assert "left half-way at install" in stage.plans(text)["a"].sentence


def test_a_hold_does_not_hide_a_rollout() -> None:
    """A held server whose rollout was cut is told as both."""
    stage = Stage("one")
    text = killed(stage)
    stage.hosts["one"].host.files.put("/var/lib/reconciler/a/hold.json", HOLD)
    _, plan, line = seen(stage, text)
    assert plan.outcome is Outcome.WAITING
    assert "held by ann" in line
    assert "is under way (at install)" in line


def held_down(stage: Stage) -> str:
    """Give a server that a person holds and has stopped."""
    text = stage.text(b="one 1 1", a="one 0 1")
    stage.apply(text)
    stage.hosts["one"].host.files.put("/var/lib/reconciler/a/hold.json", HOLD)
    stage.hosts["one"].systemd.stop("a.service")
    stage.world.advance(60)
    return text


def test_a_server_that_is_held_down_has_not_drifted() -> None:
    """Down because somebody wants it so: it is told as on hold, and nobody reads that the host has moved away."""
    stage = Stage("one")
    text = held_down(stage)
    found, plan, line = seen(stage, text)
    assert (plan.reason, plan.drift) == (Reason.HOLD, ())
    assert line.split()[2:4] == ["OnHold", "down"]
    assert "held by ann: her GPUs" in line
    assert not any("moved away" in row for row in plan_lines(found.plan, command="reconcile"))


def test_a_held_server_that_somebody_edited_has_drifted() -> None:
    """A hold explains that a server is down, and nothing else."""
    stage = Stage("one")
    text = held_down(stage)
    stage.hosts["one"].host.files.put("/etc/systemd/system/a.service", b"[Service]\n")
    stage.hosts["one"].systemd.reload()
    _, plan, line = seen(stage, text)
    assert [d.what for d in plan.drift] == ["unit-edited"]
    assert "was edited on the host" in line


def test_an_orphan_that_is_down_is_not_in_sync() -> None:
    """What no spec names is told as on hold or down, whatever holds it."""
    stage = Stage("one")
    held_down(stage)
    text = stage.text(b="one 1 1")
    found, plan, line = seen(stage, text)
    assert (plan.outcome, plan.reason) == (Outcome.WAITING, Reason.HOLD)
    assert stand(plan, found.hosts[0].live).value == "OnHold"
    assert "held by ann" in line
    stage.hosts["one"].host.files.drop("/var/lib/reconciler/a/hold.json")
    _, plan, line = seen(stage, text)
    assert plan.reason is Reason.ORPHANED
    assert line.split()[2] == "Down"

"""A run that a person interrupts: what its last line says and what the process ends with are one thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from steering_stage import Stage

from reconciler.cli.context import PassOutput
from reconciler.cli.run import PassOptions, run_pass
from reconciler.core.plan import Permissions
from reconciler.lab.simulated_ports import VirtualClock
from reconciler.lab.world import World


class Impatient(VirtualClock):
    """Somebody presses Ctrl-C at the first wait."""

    def sleep(self, seconds: float) -> None:
        """Wait, and ask to stop."""
        super().sleep(seconds)
        self.stopped = True


def interrupted(output: PassOutput, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Interrupt a change of a serving server; give the exit code and the last line."""
    stage = Stage("one")
    stage.apply(stage.text(qwen="one 0 10"))
    world: World = stage.world
    controller = replace(stage.controller, clock=Impatient(world))
    options = PassOptions(Path("specs"), yes=True, output=output)
    fleet = stage.fleet(stage.text(qwen="one 0 11"))
    code = run_pass(fleet, controller, options, Permissions())
    assert stage.serving("qwen")
    return code, capsys.readouterr().out.rstrip().splitlines()[-1]


def test_the_last_line_tells_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """For people: exit 130, not the code of the rollback that an interruption leads to."""
    code, last = interrupted(PassOutput.TEXT, capsys)
    assert (code, last) == (130, "exit 130: interrupted")


def test_the_summary_tells_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: the same number in the stream's last line."""
    code, last = interrupted(PassOutput.JSON, capsys)
    summary = json.loads(last)
    assert (code, summary["type"], summary["exit_code"], summary["meaning"]) == (130, "summary", 130, "interrupted")  # fmt: skip

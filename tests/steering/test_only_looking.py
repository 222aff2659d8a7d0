"""A dry run asks the host for nothing but a look, whatever it finds; and its exit code counts every kind of difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from steering_stage import Stage

from reconciler.cli.run import PassOptions, run_pass
from reconciler.core.plan import Permissions
from reconciler.core.pruning import Pruning
from reconciler.core.spec import Host
from reconciler.effects.channel import MUTATING
from reconciler.effects.ports import Answer, Request
from reconciler.helper.acts import READ, VERBS
from reconciler.lab.simulated_ports import SimulatedPort

PLACE = "/etc/systemd/system/a.service"


class ReadOnly(SimulatedPort):
    """A host that answers looks; anything else is a failed test."""

    def call(self, request: Request, *, deadline_s: float) -> Answer:
        """Answer what changes nothing."""
        assert VERBS[request.verb][0] == READ, f"a dry run asked to {request.verb}"
        return super().call(request, deadline_s=deadline_s)


def nothing_there(_stage: Stage) -> str:
    """Give a server that was never deployed."""
    return _stage.text(a="one 0 1")


def changed(stage: Stage) -> str:
    """Give one that is to be restarted."""
    stage.apply(stage.text(a="one 0 1"))
    return stage.text(a="one 0 2")


def in_place(stage: Stage) -> str:
    """Give one whose unit alone changes, with no restart."""
    stage.apply(stage.text(a="one 0 1"))
    return stage.text(a="one 0 1").replace("stop: 20s", "stop: 25s")


def dropped_in(stage: Stage) -> str:
    """Give one to whose unit somebody added, which is healed."""
    text = stage.text(a="one 0 1\ndrift: heal")
    stage.apply(text)
    stage.hosts["one"].host.files.put(f"{PLACE}.d/9-mine.conf", b"[Service]\nMemoryMax=1G\n")
    stage.hosts["one"].systemd.reload()
    return text


def down(stage: Stage) -> str:
    """Give one that somebody stopped."""
    text = stage.text(a="one 0 1")
    stage.apply(text)
    stage.hosts["one"].systemd.stop("a.service")
    stage.world.advance(30)
    return text


def orphaned(stage: Stage) -> str:
    """Give one whose spec is gone, to be pruned."""
    stage.apply(stage.text(b="one 1 1", a="one 0 1"))
    stage.prune(Pruning("auto"))
    return stage.text(b="one 1 1")


def half_way(stage: Stage) -> str:
    """Give one whose rollout was left half-way."""
    stage.apply(stage.text(a="one 0 1"))
    with pytest.raises(ZeroDivisionError):
        _killed(stage, stage.text(a="one 0 2"))
    return stage.text(a="one 0 2")


def _killed(stage: Stage, text: str) -> None:
    class Dies(SimulatedPort):
        def call(self, request: Request, *, deadline_s: float) -> Answer:
            if request.verb == "start":
                raise ZeroDivisionError
            return super().call(request, deadline_s=deadline_s)

    with opened(stage, Dies):
        stage.apply(text)


@contextmanager
def opened(stage: Stage, port: type[SimulatedPort]) -> Iterator[None]:
    """Reach the hosts in another way."""
    before = stage.controller

    @contextmanager
    def connect(host: Host) -> Iterator[SimulatedPort]:
        yield port(stage.hosts[host.name])

    stage.controller = replace(before, connect=connect)
    try:
        yield
    finally:
        stage.controller = before


CASES = [nothing_there, changed, in_place, dropped_in, down, orphaned, half_way]


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_only_looks_and_its_code_counts_the_difference(
    case: Callable[[Stage], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a byte on the host is another one afterwards, and nothing that acted would have been let through; the code is 2."""
    stage = Stage()
    text = case(stage)
    files = stage.hosts["one"].host.files.data
    before, starts = dict(files), len(stage.hosts["one"].host.truth.starts)
    options = PassOptions(Path("specs"), dry_run=True, detailed=True)
    with opened(stage, ReadOnly):
        code = run_pass(stage.fleet(text), stage.controller, options, Permissions())
    assert code == 2, capsys.readouterr().out
    assert files == before
    assert len(stage.hosts["one"].host.truth.starts) == starts


def test_in_sync_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """The code is 0 where nothing would be done."""
    stage = Stage()
    stage.apply(stage.text(a="one 0 1"))
    options = PassOptions(Path("specs"), dry_run=True, detailed=True)
    with opened(stage, ReadOnly):
        fleet = stage.fleet(stage.text(a="one 0 1"))
        assert run_pass(fleet, stage.controller, options, Permissions()) == 0
    assert "in sync" in capsys.readouterr().out


def test_a_verb_that_acts_is_never_sent_twice_by_the_connection() -> None:
    """Every verb that needs a fence or takes a lease is known to the channel as one that acts."""
    acting = {verb for verb, (kind, _) in VERBS.items() if kind not in {READ, "host"}}
    assert acting <= MUTATING

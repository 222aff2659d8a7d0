"""A server whose spec is wrong runs on, and whoever asks how it stands is told both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text
from steering_stage import ENGINES, Stage

from reconciler import held_back
from reconciler.core.errors import HostUnreachableError
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.held import why_held
from reconciler.core.live import LiveHost
from reconciler.core.saved_state import read_state, state_of, state_text
from reconciler.core.spec import Host
from reconciler.effects.perform import observe
from reconciler.held_back import HeldBack, with_held
from reconciler.lab.simulated_ports import SimulatedPort
from reconciler.reconcile import survey
from reconciler.views.status import nowhere_lines, status_json, status_lines

WRONG = "one 1 1\nno_such_key: 1"


def fleet_of(text: str) -> Fleet:
    """Read a file a document: a mistake holds back what stands in its file."""
    files = {f"specs/{n}.yaml": part.encode() for n, part in enumerate(text.split("---\n"))}
    return load_fleet(files, engines=ENGINES)


def looked(stage: Stage, text: str, *names: str) -> HeldBack:
    """Look as `status` does."""
    fleet, only = fleet_of(text), frozenset(names)
    return with_held(fleet, survey(fleet, stage.controller, only=only), stage.controller, only)


def shown(held: HeldBack) -> list[str]:
    """Give what a person reads."""
    lines = [*status_lines(held.found, None), *nowhere_lines(held.nowhere)]
    return [Text.from_markup(line).plain for line in lines]


def serving() -> Stage:
    """Give two servers that serve."""
    stage = Stage("one")
    stage.apply(stage.text(a="one 0 1", b="one 1 1"))
    return stage


def test_a_running_server_whose_spec_is_wrong_has_a_row() -> None:
    """Its unit, its revision and its cards are those of the host; the other servers are shown as ever."""
    stage = serving()
    before = next(line for line in shown(looked(stage, stage.text(a="one 0 1", b="one 1 1"))) if line.startswith("b "))  # fmt: skip
    held = looked(stage, stage.text(a="one 0 1", b=WRONG))
    row = next(line for line in shown(held) if line.startswith("b "))
    assert row.split()[1:4] == ["one", "SpecWrong", "running"]
    assert row.split()[4:6] == before.split()[4:6]
    assert "spec is wrong: specs/2.yaml:" in row
    assert "no_such_key" in row
    assert any(line.split()[:4] == ["a", "one", "InSync", "running"] for line in shown(held))


def test_it_has_a_row_when_its_host_has_no_other_server() -> None:
    """Nothing else leads to its host, and it is looked at all the same; programs read it as well."""
    stage = Stage("one")
    stage.apply(stage.text(b="one 1 1"))
    held = looked(stage, stage.text(b=WRONG), "b")
    (server,) = status_json(held.found, held.nowhere)["servers"]
    assert (server["server"], server["status"], server["phase"]) == ("b", "SpecWrong", "running")
    assert server["sentence"].startswith("spec is wrong: ")
    stage.hosts["one"].systemd.stop("b.service")
    stage.world.advance(60)
    line = next(line for line in shown(looked(stage, stage.text(b=WRONG))) if line[:2] == "b ")
    assert line.split()[2:4] == ["SpecWrong", "down"]


def test_only_what_was_asked_for_is_shown() -> None:
    """`status a` does not speak of b."""
    stage = serving()
    assert not any(x.startswith("b ") for x in shown(looked(stage, stage.text(a="one 0 1", b=WRONG), "a")))  # fmt: skip


def test_a_server_that_no_host_has_is_told() -> None:
    """A wrong spec of something new is no row, and is not left out."""
    stage = serving()
    held = looked(stage, stage.text(a="one 0 1", b="one 1 1", c="one 2 1\nno_such_key: 1"))
    (line,) = [x for x in shown(held) if x.startswith("c")]
    assert "spec is wrong" in line
    assert line.endswith("no host has a server of this name")
    assert list(status_json(held.found, held.nowhere)["spec_wrong"]) == ["c"]


def test_of_a_silent_host_nothing_is_said_to_be_absent() -> None:
    """Unknown is never absent: the host that did not answer is named."""
    stage = serving()

    @contextmanager
    def connect(host: Host) -> Iterator[SimulatedPort]:
        raise HostUnreachableError(host.name, "no answer")
        yield

    stage.controller = replace(stage.controller, connect=connect)
    held = looked(stage, stage.text(b=WRONG))
    (line,) = [x for x in shown(held) if x.startswith("b")]
    assert line.endswith("not known whether it runs: not told by one")
    assert [h.host.name for h in held.found.hosts if h.silence] == ["one"]


def test_of_a_host_that_keeps_its_records_to_root_nothing_is_said_to_be_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S12: who may not read which servers a host is bound to learns nothing from an empty answer."""
    stage = serving()

    def without_privilege(*args: Any, **options: Any) -> LiveHost:
        live = observe(*args, **options)
        return replace(live, bound={}, raw={**live.raw, "bound": {"unknown": "not for you"}})

    monkeypatch.setattr(held_back, "observe", without_privilege)
    (line,) = [x for x in shown(looked(stage, stage.text(b=WRONG))) if x.startswith("b")]
    assert line.endswith("not known whether it runs: not told by one")


def test_a_saved_state_says_whose_spec_is_wrong() -> None:
    """Whoever plans against it does not take what it says of that server for what is wanted."""
    stage = serving()
    fleet = fleet_of(stage.text(a="one 0 1", b=WRONG))
    found = survey(fleet, stage.controller)
    text = state_text(state_of(found, taken_at=1.0, tool_version="1", spec_wrong=why_held(fleet)))
    wrong = read_state(text.encode(), "state.json").spec_wrong
    assert list(wrong) == ["b"]
    assert "no_such_key" in wrong["b"]

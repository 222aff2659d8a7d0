"""How the fleet stands, on terminals of any width and in a pipe."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.text import Text
from steering_stage import Stage

from reconciler.core.survey import Survey
from reconciler.reconcile import survey
from reconciler.views.status import TITLES, status_lines


@pytest.fixture(scope="module")
def found() -> Survey:
    """Give a fleet of which one server serves, one was never deployed and one is wanted down."""
    stage = Stage("one", "gpu-host-in-the-second-row")
    stage.apply(stage.text(first="one 0 10"))
    text = stage.text(
        first="one 0 10", second="gpu-host-in-the-second-row 0 10", third="one 1 10\nstate: stopped"
    )
    return survey(stage.fleet(text), stage.controller)


def shown(found: Survey, width: int | None) -> list[str]:
    """Give what a reader sees, without colour."""
    return [Text.from_markup(line).plain for line in status_lines(found, width)]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_no_line_is_wider_than_the_terminal(found: Survey, width: int) -> None:
    """A line that the terminal breaks is a table that nobody can read; no fact is dropped for it."""
    lines = shown(found, width)
    assert [line for line in lines if cell_len(line) > width] == []
    text = " ".join(" ".join(lines).split())
    for fact in (
        "first",
        "second",
        "third",
        "gpu-host-in-the-second-row",
        "InSync",
        "running",
        "/24576",
    ):
        assert fact in text


def test_a_wide_terminal_has_a_row_for_each_server(found: Survey) -> None:
    """The titles stand above their columns."""
    head, *rows = shown(found, 160)
    assert head.split() == list(TITLES)
    at = head.index("STATUS")
    assert {row[at:].split()[0] for row in rows if row[:1].strip()} >= {"InSync", "Absent"}


def test_a_narrow_one_has_a_paragraph_for_each(found: Survey) -> None:
    """Who, where and how it stands come first; the rest stands below, further in."""
    lines = shown(found, 60)
    at = lines.index("first on one: InSync")
    assert lines[at + 1].startswith("  unit running, applied ")
    assert lines[at + 2] == "  in sync"


def test_a_pipe_gets_one_line_a_server(found: Survey) -> None:
    """`grep` and `awk` are not to guess where a row ends."""
    lines = shown(found, None)
    assert len(lines) == 1 + 3
    assert [line.split()[0] for line in lines] == ["SERVER", "second", "first", "third"]

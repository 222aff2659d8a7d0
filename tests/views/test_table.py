"""Tables of every command, on terminals of any width and in a pipe."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from reconciler.views.release import proof_table
from reconciler.views.table import table_lines

UUID = "GPU-3f1c9a52-6d0e-4b7a-9c18-5e2ab0d4f701"
CARD = {
    "index": 0, "uuid": UUID, "verdict": "not_released", "used_mib": 81234, "limit_mib": 512, "baseline_mib": 3,
    "samples": [{"at_s": 0.0}, {"at_s": 2.0}, {"at_s": 4.1}], "holders": [{}, {}],
}  # fmt: skip
FACTS = (UUID, "VERDICT", "not_released", "81234 MiB", "512 MiB", "3 MiB", "3 over 4.1 s", "HOLDERS SEEN", "2")  # fmt: skip


def shown(table: Table, width: int | None) -> list[str]:
    """Give what a reader sees, without colour."""
    return [Text.from_markup(line).plain for line in table_lines(table, width)]


@pytest.mark.parametrize("width", [50, 60, 80, 100, 140, None])
def test_a_proof_loses_nothing_at_any_width(width: int | None) -> None:
    """Verdict, UUID and holders are there in full, each whole on its line, and no line is wider than the terminal."""
    lines = shown(proof_table([CARD]), width)
    for fact in FACTS:
        assert any(fact in line for line in lines), fact
    assert width is None or all(cell_len(line) <= width for line in lines)


def test_a_pipe_gets_a_line_a_row() -> None:
    """Without a width a row is one line, below its titles, however long."""
    head, *rows = shown(proof_table([CARD, {**CARD, "index": 1}]), None)
    assert len(rows) == 2
    assert rows[0].index(UUID) == head.index("UUID")


def test_numbers_stand_right_and_brackets_are_text() -> None:
    """A column keeps its side; what looks like markup in a cell is shown as it was written."""
    table = Table()
    table.add_column("POINT")
    table.add_column("TOK/S", justify="right")
    table.add_row("x=\\[1]", "9.5")
    table.add_row("[green]y[/]", "120.0")
    assert shown(table, 80) == ["POINT  TOK/S", "x=[1]    9.5", "y      120.0"]

"""A table for people that loses nothing: aligned rows where they fit, a paragraph a row where they do not. Pure.

A table library makes narrow what does not fit, down to one letter, or cuts it. What a person decides by must not depend on the
width of a window, and a pipe has none: there a row is one line, however long.
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

GAP = 2
"""Columns of space between two cells."""


def table_lines(table: Table, width: int | None) -> list[str]:
    """Show a table of strings as lines of markup, for a terminal of that many columns; without a width a row is one line."""
    titles = [str(column.header) for column in table.columns]
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    sizes = [max(map(_size, cells)) for cells in zip(titles, *rows, strict=True)]
    if width is not None and sum(sizes) + GAP * (len(sizes) - 1) > width:
        return [line for row in rows for line in _paragraph(titles, row, width)]
    right = [column.justify == "right" for column in table.columns]
    return [_aligned(row, sizes, right) for row in [tuple(titles), *rows]]


def _size(cell: str) -> int:
    return Text.from_markup(cell).cell_len


def _aligned(row: tuple[str, ...], sizes: list[int], right: list[bool]) -> str:
    cells = []
    for cell, size, to_right in zip(row, sizes, right, strict=True):
        space = " " * (size - _size(cell))
        cells.append(space + cell if to_right else cell + space)
    return (" " * GAP).join(cells).rstrip()


def _paragraph(titles: list[str], row: tuple[str, ...], width: int) -> list[str]:
    """Show one row below each other: what it is about, then its facts, as many to a line as there is room for."""
    lines = [f"[bold]{titles[0]}[/] {row[0]}"]
    used = 0
    for title, cell in zip(titles[1:], row[1:], strict=True):
        fact = f"{title}: {cell}" if title else cell
        if not cell:
            continue
        if used and used + len(", ") + _size(fact) <= width:
            lines[-1] += f", {fact}"
            used += len(", ") + _size(fact)
        else:
            lines.append(f"  {fact}")
            used = 2 + _size(fact)
    return lines

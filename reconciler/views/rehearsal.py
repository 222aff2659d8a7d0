"""How a rehearsal reads: what is played next and why, and at the end what came of each chapter. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from reconciler.core.conditions import Outcome, ServerResult
from reconciler.views.terminal import OUTCOME_COLOUR, safe


@dataclass(frozen=True, slots=True)
class ChapterEnd:
    """What came of one chapter. `outage_s` is None where nothing was taken out of service."""

    title: str
    results: tuple[ServerResult, ...]
    as_wanted: bool
    wanted: str
    outage_s: float | None
    forced: tuple[str, ...]
    passes: int
    took_s: float


def heading(number: int, of: int, title: str, why: str) -> list[str]:
    """Announce a chapter."""
    return ["", f"[bold reverse] {number}/{of} [/] [bold]{safe(title)}[/]", f"    {safe(why)}", ""]


def summary(ends: Sequence[ChapterEnd]) -> list[str]:
    """Show one line a chapter."""
    rows = [("CHAPTER", "ENDED", "OUT OF SERVICE", "ENDED BY FORCE")]
    rows += [
        (e.title, outcomes(e.results), _outage(e), "; ".join(e.forced) or "nothing") for e in ends
    ]
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    lines = [""]
    for number, row in enumerate(rows):
        cells = [safe(cell.ljust(width)) for cell, width in zip(row, widths, strict=False)]
        if number == 0:
            lines.append("  ".join(["[bold]    ", *cells, f"{row[3]}[/]"]))
            continue
        end = ends[number - 1]
        mark = "[green]ok  [/]" if end.as_wanted else "[red]NOT [/]"
        cells[1] = f"[{_colour(end.results)}]{cells[1]}[/]"
        lines.append("  ".join([mark, *cells, safe(row[3])]))
        if not end.as_wanted:
            lines.append(f"      [red]wanted: {safe(end.wanted)}[/]")
    return lines


def outcomes(results: Iterable[ServerResult]) -> str:
    """Give how the servers ended in few words."""
    named = {
        f"{r.outcome.value} ({r.reason.value})" if r.reason.value else r.outcome.value: None
        for r in results
    }
    return ", ".join(named) or "nothing to do"


def _colour(results: Iterable[ServerResult]) -> str:
    colours = {OUTCOME_COLOUR.get(r.outcome, "red") for r in results}
    return "red" if "red" in colours else "yellow" if "yellow" in colours else "green"


def _outage(end: ChapterEnd) -> str:
    return "not at all" if end.outage_s is None else f"{end.outage_s:.1f} s"


def chapter_json(number: int, of: int, title: str, why: str) -> dict[str, Any]:
    """Give the line that announces a chapter in the run stream."""
    return {"type": "chapter", "number": number, "of": of, "title": title, "why": why}


def rehearsal_json(backend: str, ends: Sequence[ChapterEnd]) -> dict[str, Any]:
    """Give the last line of a rehearsal's stream."""
    return {
        "type": "rehearsal",
        "backend": backend,
        "as_wanted": all(e.as_wanted for e in ends),
        "chapters": [
            {
                "title": e.title,
                "as_wanted": e.as_wanted,
                "wanted": e.wanted,
                "outcomes": [
                    {"server": r.server, "outcome": r.outcome.value, "reason": r.reason.value}
                    for r in e.results
                ],
                "outage_s": e.outage_s,
                "ended_by_force": list(e.forced),
                "passes": e.passes,
                "took_s": round(e.took_s, 1),
            }
            for e in ends
        ],
    }


def wish_words(ends: Outcome | None, reasons: Iterable[str]) -> str:
    """Say how a chapter has to end."""
    if ends is None:
        return "applied, in sync or stopped as asked"
    named = [r for r in reasons if r]
    return f"{ends.value} ({' or '.join(named)})" if named else ends.value

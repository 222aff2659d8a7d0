"""A sweep for people: a table of points, bars, a scatter of the two numbers, what is to be doubted. Pure.

The HTML page is one file without a script or anything from elsewhere; the commit's message is plain text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from reconciler.core.measurement import FORMAT_VERSION
from reconciler.core.tuning import (
    Choice,
    Objective,
    State,
    Tried,
    acceptance,
    greedy_of,
    mean_or_none,
    single_speeds,
    throughputs,
)
from reconciler.views.table import table_lines
from reconciler.views.terminal import safe, visible

BAR_WIDTH: Final = 24
LABEL_WIDTH: Final = 48
GREEDY_TITLES: Final = ("GREEDY tok/s", "ACCEPTED")
_STYLES: Final = {
    State.MEASURED: "green",
    State.DOMINATED: "yellow",
    State.UNFIT: "red",
    State.UNCLEAR: "yellow",
    State.FAILED: "red",
}


def numbers_of(tried: Tried) -> tuple[float | None, float | None]:
    """Give a point's two numbers: decode speed of one stream, throughput of all, in tokens a second."""
    return mean_or_none(single_speeds(tried.results)), mean_or_none(throughputs(tried.results))


def table(tried: Sequence[Tried], choice: Choice) -> Table:
    """Show a line a point, in the order in which they were tried."""
    found = Table(box=None, pad_edge=False)
    for title in ("POINT", "STATE"):
        found.add_column(title)
    greedy = any(greedy_of(one.results) for one in tried)
    numbers = ("ONE STREAM tok/s", "ALL STREAMS tok/s", "ACCEPTED")
    for title in (*numbers, *(GREEDY_TITLES if greedy else ()), "ROUNDS", "DOWN + UP"):
        found.add_column(title, justify="right")
    found.add_column("")
    winner = choice.winner.point if choice.winner is not None else None
    control = next((t for t in tried if not t.point.settings and not t.point.again), None)
    for one in tried:
        speed, through = numbers_of(one)
        marks = [
            *(["winner"] if one.point == winner else []),
            *(["front"] if one.point.label in choice.front and one.point != winner else []),
            *(["tie"] if one.point.label in choice.ties else []),
        ]
        found.add_row(
            safe(one.point.label),
            f"[{_STYLES[one.state]}]{one.state.value}[/]",
            _beside(speed, _of(control, 0)),
            _beside(through, _of(control, 1)),
            _number(acceptance(one.results)),
            *(_greedy(one, control) if greedy else ()),
            str(max((r.round for r in one.results), default=0) or "-"),
            f"{one.rollout_s:.0f} s" if one.rollout_s > 0 else "-",
            ", ".join(marks),
        )
    return found


def _greedy(one: Tried, control: Tried | None) -> tuple[str, str]:
    """Show what greedy runs gave beside what decides."""
    there = greedy_of(control.results) if control is not None else ()
    rounds = greedy_of(one.results)
    speed = _beside(mean_or_none(single_speeds(rounds)), mean_or_none(single_speeds(there)))
    return speed, _number(acceptance(rounds))


def _of(control: Tried | None, which: int) -> float | None:
    return None if control is None else numbers_of(control)[which]


def _beside(value: float | None, before: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ({value / before - 1:+.1%})" if before else f"{value:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def lines(tried: Sequence[Tried], choice: Choice, objective: Objective) -> Iterator[str]:
    """Give rich markup: bars of what the objective looks at, why points dropped out, and the choice."""
    yield ""
    yield from _bars(tried, objective)
    for one in tried:
        if one.state is not State.MEASURED and one.sentence:
            yield f"{safe(one.point.label)}: {safe(one.sentence)}"
    for note in choice.notes:
        yield f"[yellow]note:[/] {safe(note)}"
    yield ""
    yield f"[bold]{safe(choice.sentence)}[/]"
    if choice.ties:
        yield f"within {choice.margin:.1%} of it: {safe(', '.join(choice.ties))}"
    if choice.front:
        yield f"Pareto front (one stream against all): {safe('; '.join(choice.front))}"


def _bars(tried: Sequence[Tried], objective: Objective) -> Iterator[str]:
    which = 1 if objective is Objective.THROUGHPUT else 0
    values = [(one, numbers_of(one)[which]) for one in tried]
    most = max((value for _, value in values if value is not None), default=0.0)
    if not most:
        return
    yield "tokens a second of " + ("all streams" if which else "one stream")
    width = max(len(_short(one.point.label, LABEL_WIDTH)) for one in tried)
    for one, value in values:
        if value is not None:
            bar = "█" * max(1, round(BAR_WIDTH * value / most))
            label = safe(f"{_short(one.point.label, LABEL_WIDTH):<{width}}")
            yield f"  {label}  [{_STYLES[one.state]}]{bar}[/] {value:.1f}"


def page(title: str, tried: Sequence[Tried], choice: Choice, objective: Objective) -> str:
    """Give the report as one HTML file: the scatter, the table, the sentences."""
    console = Console(record=True, file=StringIO(), width=150, force_terminal=True, highlight=False)
    for line in (*table_lines(table(tried, choice), None), *lines(tried, choice, objective)):
        console.print(line, soft_wrap=True)
    body = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    head = html.escape(visible(title))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{head}</title>\n'
        "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2em;max-width:80em}"
        "pre{font:13px/1.4 ui-monospace,monospace;overflow-x:auto}svg{max-width:44em}</style></head>\n"
        f"<body><h1>{head}</h1>\n<p>{html.escape(visible(choice.sentence))}</p>\n{scatter(tried, choice)}\n{body}\n"
        "<p>One stream: median decode speed at the lowest concurrency. All streams: tokens a second at the highest, in the "
        "window in which every stream was busy. Means of rounds; tokens are the server's own usage.</p></body></html>\n"
    )


WIDTH, HEIGHT, EDGE = 640, 400, 60


def scatter(tried: Sequence[Tried], choice: Choice) -> str:
    """Draw the points by their two numbers as SVG; the front is filled, the winner ringed."""
    dots = [(one, *numbers_of(one)) for one in tried]
    known = [(one, x, y) for one, x, y in dots if x is not None and y is not None]
    if not known:
        return "<p>No point was measured.</p>"
    wide, high = max(x for _, x, _ in known) * 1.15, max(y for _, _, y in known) * 1.1
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="speed of one stream against all streams">',
        f'<path d="M{EDGE} 10V{HEIGHT - EDGE}H{WIDTH - 10}" fill="none" stroke="#888"/>',
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 20}" text-anchor="end" font-size="13">one stream, tok/s (to {wide:.0f})</text>',
        f'<text x="{EDGE + 6}" y="22" font-size="13">all streams, tok/s (to {high:.0f})</text>',
    ]
    winner = choice.winner.point if choice.winner is not None else None
    for one, x, y in known:
        left = EDGE + (WIDTH - EDGE - 10) * x / wide
        top = HEIGHT - EDGE - (HEIGHT - EDGE - 10) * y / high
        filled = "#2a6" if one.point.label in choice.front else "#bbb"
        ring = "#000" if one.point == winner else "#666"
        parts.append(
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="6" fill="{filled}" stroke="{ring}" '
            f'stroke-width="{3 if one.point == winner else 1}"/><text x="{left + 9:.1f}" y="{top + 4:.1f}" '
            f'font-size="12">{html.escape(visible(one.point.label))}</text>'
        )
    return "".join([*parts, "</svg>"])


def as_json(
    server: str, tried: Sequence[Tried], choice: Choice, objective: Objective, *, restored: bool
) -> str:
    """Give one JSON document, versioned."""
    winner = choice.winner
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "kind": "sweep",
        "server": server,
        "objective": objective.value,
        "margin": choice.margin,
        "drift": choice.drift,
        "winner": dict(winner.point.settings) if winner is not None else None,
        "winner_is_applied": winner is not None and not winner.point.settings,
        "sentence": choice.sentence,
        "front": list(choice.front),
        "ties": list(choice.ties),
        "notes": list(choice.notes),
        "restored": restored,
        "points": [one.to_json() for one in tried],
    }
    return json.dumps(document, indent=2)


def message(server: str, tried: Sequence[Tried], choice: Choice, objective: Objective) -> str:
    """Give the commit's message: the choice as its subject, the table as its body."""
    console = Console(file=StringIO(), width=120, no_color=True, highlight=False)
    for line in (*table_lines(table(tried, choice), None), *lines(tried, choice, objective)):
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    chosen = choice.winner.point.label if choice.winner is not None else "nothing"
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    return f"Tune {server}: {_short(chosen, 50)}\n\n{text}\n"


def _short(text: str, most: int) -> str:
    """Cut a label where a long value would push everything else away; the table has it whole."""
    seen = visible(text)
    return seen if len(seen) <= most else f"{seen[: most - 1]}…"


__all__ = ["as_json", "lines", "message", "numbers_of", "page", "scatter", "table"]

"""A benchmark for people: a table of levels, bars, acceptance by class of prompt, and what is to be doubted. Pure.

What the numbers mean is in `core/benchmark.METRICS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from reconciler.views.terminal import safe, visible

if TYPE_CHECKING:
    from reconciler.core.benchmark import Benchmark, Level

BAR_WIDTH = 40


def level_table(found: Benchmark) -> Table:
    """Show a line a concurrency."""
    table = Table(box=None, pad_edge=False)
    titles = ("STREAMS", "TOK/S", "TOK/S PER STREAM", "TTFT p50", "p95", "E2E p50", "GAP p50", "TOK/EVENT", "ACCEPTED", "OK/SENT")  # fmt: skip
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for level in found.levels:
        table.add_row(*_row(level))
    return table


def _row(level: Level) -> tuple[str, ...]:
    ttft, gap = level.pooled("ttft"), level.pooled("event_gap")
    doubt = "" if level.supports(95) else "~"
    return (
        str(level.concurrency),
        _with_spread(level, "output_tps"),
        _with_spread(level, "decode_tps"),
        _ms(ttft.p50),
        doubt + _ms(ttft.percentile(0.95)),
        _seconds(level.pooled("e2e").p50),
        _ms(gap.p50),
        _number(level.central("tokens_per_event")),
        _number(level.central("accept_length")),
        f"{level.completed}/{level.sent}",
    )


def _with_spread(level: Level, result: str) -> str:
    spread = level.spread(result)
    return _number(level.central(result)) + ("" if spread is None else f" ±{spread:.1%}")


def lines(found: Benchmark, *, colour: bool) -> Iterator[str]:
    """Show bars and remarks as lines of markup; without `colour` the bars are plain signs."""
    yield from _bars(found, "output_tps", "tokens a second, all streams", colour=colour)
    yield from _bars(found, "decode_tps", "tokens a second of one stream", colour=colour)
    yield from _classes(found)
    if any(not level.supports(95) for level in found.levels):
        yield "~ too few requests to tell this percentile with 95 % confidence (p95 takes 59, p99 takes 299)"
    source = next((r.accept_source for r in found.results if r.accept_source), "")
    if source:
        yield safe(f"acceptance: {source}")
    for note in found.notes:
        yield f"[dim]{safe(note)}[/]"
    for doubt in found.doubts:
        yield f"[yellow]{safe(doubt)}[/]"
    for fault in found.faults:
        yield f"[red]{safe(fault)}[/]"
    if found.broken:
        yield f"[red]{safe(f'not measured: {found.broken}')}[/]"


def _bars(found: Benchmark, result: str, title: str, *, colour: bool) -> Iterator[str]:
    values = [(level.concurrency, level.central(result)) for level in found.levels]
    top = max((v for _, v in values if v is not None), default=0.0)
    if top <= 0 or len(values) < 2:
        return
    yield ""
    yield title
    for streams, value in values:
        length = round((value or 0.0) / top * BAR_WIDTH)
        bar = f"[cyan]{'█' * length}[/]" if colour else "#" * length
        yield f"{streams:>6} {bar}{' ' * (BAR_WIDTH - length)} {_number(value)}"
    yield ""


def _classes(found: Benchmark) -> Iterator[str]:
    """Show the classes only where they differ in acceptance: what decides whether drafts pay."""
    rows = found.classes()
    if not any(row.get("accept_length") is not None for row in rows.values()):
        return
    yield "accepted tokens per pass, by class of prompt"
    for kind, row in rows.items():
        rate = row.get("accept_rate")
        share = "" if rate is None else f", {rate:.0%} of drafts"
        yield safe(
            f"  {kind:<12} {_number(row.get('accept_length'))}{share}, {_number(row.get('decode_tps'))} tok/s"
        )


def reading_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """Show the reading of a recorded stream, one key a line."""
    for key, value in told.items():
        if value not in (None, "", [], {}):
            yield visible(f"{key}: {value}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.4g} ms"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"

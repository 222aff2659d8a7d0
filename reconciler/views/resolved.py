"""A merged spec with the origin of each value, for people. Pure."""

from __future__ import annotations

import json
from typing import Any

from reconciler.core.origin import DEFAULT, Resolved
from reconciler.views.terminal import safe

WIDTH = 60
"""Of the column of values; what is longer pushes its origin out."""


def resolved_lines(name: str, revision: str, values: tuple[Resolved, ...]) -> list[str]:
    """Show what is written first, each with its place; then, dim, the defaults that are in force."""
    lines = [f"[bold]{safe(name)}[/] revision {revision[:12]}"]
    written = [v for v in values if v.origin != DEFAULT]
    width = min(WIDTH, max((len(_pair(v)) for v in written), default=0))
    for value in written:
        assert value.place is not None, "what is written stands somewhere"
        by = "" if value.origin == "server" else f" ({safe(value.origin)})"
        where = f"{safe(value.place.file)}:{value.place.line}{by}"
        pair = _pair(value)
        lines.append(f"  {safe(pair)}{' ' * max(0, width - len(pair))}  [dim]# {where}[/]")
    lines += [f"  [dim]{safe(_pair(v))}  # default[/]" for v in values if v.origin == DEFAULT and v.value not in (None, {}, [])]  # fmt: skip
    return lines


def _pair(value: Resolved) -> str:
    return f"{value.path}: {_text(value.value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

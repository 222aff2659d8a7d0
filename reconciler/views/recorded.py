"""How one recorded output is read, for people and for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reconciler.views.terminal import safe

COLOUR = {"good": "green", "unknown": "yellow", "fault": "red", "refused": "yellow"}
MEANING = {
    "good": "the facts hold",
    "unknown": "no evidence either way: nothing would be done on it",
    "fault": "proof that something is broken",
    "refused": "it did not run, or may not run there",
}


def recorded_json(kind: str, judged: Mapping[str, Any]) -> dict[str, Any]:
    """Give the reading as one document."""
    return {
        "format_version": "1.0",
        "type": "reading",
        "kind": kind,
        "verdict": judged["verdict"],
        "facts": judged["facts"],
    }


def recorded_lines(kind: str, judged: Mapping[str, Any]) -> list[str]:
    """Show the verdict, then a line a fact; what is not known says so."""
    verdict = str(judged["verdict"])
    facts: Mapping[str, Any] = judged["facts"]
    width = max((len(name) for name in facts), default=0)
    head = f"{safe(kind)}: [{COLOUR[verdict]}]{verdict}[/] ({MEANING[verdict]})"
    return [head, *(f"  {name:<{width}}  {safe(_fact(facts[name]))}" for name in sorted(facts))]


def _fact(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)

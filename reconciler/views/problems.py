"""Problems in specs for a reader: `file:line:column: message`, the line itself, and a caret under the place.

A source line is shown only as far as it cannot hold a secret: someone may have written a key where a file
belongs, and the output of a check ends up in the logs of a build.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Final

from reconciler.core.errors import Problem
from reconciler.core.grammar import URL_CREDENTIAL

WIDTH: Final = 110
"""Of the excerpt; a line of flow style may be far longer than a terminal."""

_KEY: Final = re.compile(
    r"(?<![\w.-])([\w.-]++)[\"']?+\s*+:\s*+(?!\{?\s*(?:file|age|sops|credential)\s*:)(?=[^\s{])"
)
"""A key with a value behind it. Begins at a word's begin and gives nothing back, so a line of one long word costs one look."""
_SECRET_WORD: Final = re.compile(
    r"key|token(?!s|iz)|secret|passw|credential|authorization", re.IGNORECASE
)
_ASSIGNED: Final = re.compile(
    r"(?<![\w-])[\w-]{0,60}?(?:key|token(?!s|iz)|secret|passw|credential|authorization)[\w-]{0,20}\s?=\s?(?=\S)",
    re.IGNORECASE,
)
"""The same with `=`, as in a variable or flag that stands where no key can be. Bounded, as above."""
_SECRET_VALUE: Final = re.compile(
    r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|eyJ|nvapi-)[\w.-]{4,}"
)
_ABOUT_SECRET: Final = re.compile(
    r"`[^`]*(?:key|token|secret|passw|credential)[^`]*`:", re.IGNORECASE
)


def report(problems: Iterable[Problem], files: Mapping[str, bytes]) -> str:
    """Write every problem with the line that it is about."""
    lines: dict[str, list[str]] = {}
    parts = []
    for problem in problems:
        parts.append(safe(str(problem)))
        if problem.line and problem.file in files:
            text = lines.setdefault(problem.file, _lines(files[problem.file]))
            if problem.line <= len(text):
                parts += excerpt(text[problem.line - 1], problem)
    return "\n".join(parts)


NAMED: Final = 3
"""Servers that a line names of all those that it is about."""


def remarks(warnings: Iterable[Problem]) -> list[str]:
    """Write every warning once: one that comes from a profile says how many servers it is about, and names the first."""
    servers: dict[str, list[str]] = {}
    for warning in warnings:
        servers.setdefault(str(warning), []).append(warning.server or "")
    lines = []
    for text, names in servers.items():
        more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
        about = f" ({len(names)} servers: {', '.join(names[:NAMED])}{more})"
        lines.append(safe(f"warning: {text}{about if len(names) > 1 else ''}"))
    return lines


def excerpt(line: str, problem: Problem) -> list[str]:
    """Give the line and the caret below it, indented by two."""
    line = _masked(safe(line.replace("\t", " ")), whole=bool(_ABOUT_SECRET.match(problem.message)))
    column = min(problem.column, len(line) + 1)
    first = max(0, column - WIDTH // 2) if len(line) > WIDTH else 0
    shown = line[first : first + WIDTH]
    before = sum(_cells(character) for character in shown[: column - 1 - first])
    return [f"  {shown}", f"  {' ' * before}^"]


def safe(text: str) -> str:
    """Replace what a terminal might obey or what cannot be seen."""
    return "".join(c if c == " " or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _lines(content: bytes) -> list[str]:
    text = content.decode("utf-8", "replace").removeprefix("\ufeff")
    return text.replace("\r\n", "\n").split("\n")


def _masked(line: str, *, whole: bool) -> str:
    """Hide what may be a secret; the length stays, so that the caret stays right."""
    if whole:
        start = re.match(r"[\s-]*(?:[\w.\"'-]+\s*:\s*)?", line)
        keep = start.end() if start else 0
        return line[:keep] + "*" * len(line[keep:])
    found = next((m for m in _KEY.finditer(line) if _SECRET_WORD.search(m.group(1))), None)
    found = found or _ASSIGNED.search(line)
    if found:
        line = line[: found.end()] + "*" * len(line[found.end() :])
    line = URL_CREDENTIAL.sub(lambda match: "://" + "*" * (len(match.group()) - 4) + "@", line)
    return _SECRET_VALUE.sub(lambda match: "*" * len(match.group()), line)


def _cells(character: str) -> int:
    """How many columns of a terminal a character takes."""
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1

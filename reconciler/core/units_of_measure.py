"""Durations, sizes and percentages as people write them, and back.

Each pair is exact: reading what was written gives the same number, and writing a number gives one spelling,
so that `60s` and `1m` are one value in a revision.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import Final

_DURATION = re.compile(
    r"(?:(\d{1,6}(?:\.\d+)?)d)?(?:(\d{1,8}(?:\.\d+)?)h)?(?:(\d{1,10}(?:\.\d+)?)m(?!s))?"
    r"(?:(\d{1,12}(?:\.\d+)?)s)?(?:(\d{1,15}(?:\.\d+)?)ms)?\Z",
    re.ASCII,
)
_MS: Final = (86_400_000, 3_600_000, 60_000, 1_000, 1)
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?(B|kB|KiB|MB|MiB|GB|GiB|TB|TiB)\Z", re.ASCII)
_BYTES: Final = {
    "B": 1, "kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40,
}  # fmt: skip
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%\Z", re.ASCII)


@lru_cache(maxsize=1000)
def duration(text: str) -> float:
    """Read `90s`, `10m`, `1h30m`, `250ms` as seconds; whole milliseconds only.

    Raises:
        ValueError: It is no duration; the message says how one is written.
    """
    match = _DURATION.match(text)
    if not match or not text:
        raise ValueError("write a duration with its unit, such as 90s, 10m, 1h30m or 250ms")
    total = sum(Decimal(n) * ms for n, ms in zip(match.groups(), _MS, strict=True) if n)
    if total != int(total):
        raise ValueError("a duration is a whole number of milliseconds")
    return int(total) / 1000


def duration_text(seconds: float) -> str:
    """Write seconds in the one spelling that a revision uses: `1h30m`, `2s500ms`, `0s`."""
    rest = round(seconds * 1000)
    parts = []
    for ms, unit in zip(_MS, ("d", "h", "m", "s", "ms"), strict=True):
        count, rest = divmod(rest, ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def size(text: str) -> int:
    """Read `512MiB` or `1.5GB` as bytes.

    Raises:
        ValueError: It is no size; the message says how one is written.
    """
    match = _SIZE.match(text)
    if not match:
        raise ValueError("write a size with its unit, such as 512MiB or 24GiB")
    total = Decimal(match[1]) * _BYTES[match[2]]
    if total != int(total):
        raise ValueError("a size is a whole number of bytes")
    return int(total)


@lru_cache(maxsize=1000)
def percentage(text: str) -> float:
    """Read `5%` or `0.5%` as a share of one.

    Raises:
        ValueError: It is no percentage from 0% to 100%.
    """
    match = _PERCENT.match(text)
    if not match or Decimal(match[1]) > 100:
        raise ValueError("write a percentage from 0% to 100%, such as 5%")
    return float(Decimal(match[1]) / 100)


def percentage_text(share: float) -> str:
    """Write a share of one as a percentage: `0.05` is `5%`."""
    return f"{format((Decimal(repr(share)) * 100).normalize(), 'f')}%"

"""When changes may begin: weekly slots and dates in a time zone, and the next moment at which they may. Pure; `now` is given.

A slot is written as people say it: `Mon-Fri 22:00-06:00` (over midnight), `Sat,Sun 00:00-24:00`, or `01:00-05:00` for every
day; what is denied may also be dates, `2026-12-24/2027-01-02`, both included. Local times follow the zone's summer time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from typing import Final
from zoneinfo import ZoneInfo

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
LOOK_AHEAD_DAYS: Final = 400
"""How far the next opening is searched: a freeze of a year and a month is a suspension."""

_TIME: Final = r"([01][0-9]|2[0-4]):([0-5][0-9])"
_SLOT: Final = re.compile(rf"(?:([A-Za-z,-]+)\s+)?{_TIME}-{_TIME}\Z", re.ASCII)
_DATES: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(?:/(\d{4}-\d{2}-\d{2}))?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Weekly:
    """A slot of every week: on these days, from so many minutes after midnight, for so many minutes."""

    days: frozenset[int]
    start_min: int
    length_min: int


@dataclass(frozen=True, slots=True)
class Dates:
    """Whole days, the first and the last included."""

    first: date
    last: date


Slot = Weekly | Dates


@dataclass(frozen=True, slots=True)
class Windows:
    """When changes may begin. Without `allow`: always, but for what is denied."""

    zone: str
    allow: tuple[Slot, ...] = ()
    deny: tuple[Slot, ...] = ()


def read_slot(text: str, *, dates: bool) -> Slot:
    """Read one slot.

    Raises:
        ValueError: It is none; the message says what one looks like.
    """
    if dates and (match := _DATES.match(text)):
        first = date.fromisoformat(match[1])
        last = date.fromisoformat(match[2]) if match[2] else first
        if last < first:
            raise ValueError("the last day comes before the first")
        return Dates(first, last)
    match = _SLOT.match(text)
    if match is None:
        also = ", or a date such as 2026-12-24 or 2026-12-24/2027-01-02" if dates else ""
        raise ValueError(f"write days and times, such as Mon-Fri 22:00-06:00 or 01:00-05:00{also}")
    start, end = int(match[2]) * 60 + int(match[3]), int(match[4]) * 60 + int(match[5])
    if start >= 24 * 60 or end > 24 * 60 or start == end:
        raise ValueError("begins before 24:00, ends at 24:00 or earlier, and not when it begins")
    return Weekly(_days(match[1]), start, end - start if end > start else end - start + 24 * 60)


def _days(text: str | None) -> frozenset[int]:
    if not text:
        return frozenset(range(7))
    found: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = part.partition("-")
        if first not in DAYS or (last and last not in DAYS):
            raise ValueError("days are Mon, Tue, Wed, Thu, Fri, Sat and Sun, with - and , between")
        at, until = DAYS.index(first), DAYS.index(last or first)
        while True:
            found.add(at)
            if at == until:
                break
            at = (at + 1) % 7
    return frozenset(found)


def is_open(windows: Windows, now: datetime) -> bool:
    """Say whether a change may begin at this moment."""
    allowed = not windows.allow or any(_covers(s, windows.zone, now) for s in windows.allow)
    return allowed and not any(_covers(s, windows.zone, now) for s in windows.deny)


def opens_at(windows: Windows, now: datetime) -> datetime | None:
    """Give the next moment, from now on, at which a change may begin; None where none is near."""
    if is_open(windows, now):
        return now
    edges = sorted(
        edge
        for slots, pick in ((windows.allow, 0), (windows.deny, 1))
        for slot in slots
        for edge in (span[pick] for span in _spans(slot, windows.zone, now, LOOK_AHEAD_DAYS))
        if edge > now
    )
    return next((edge for edge in edges if is_open(windows, edge)), None)


def _covers(slot: Slot, zone: str, now: datetime) -> bool:
    return any(start <= now < end for start, end in _spans(slot, zone, now, 1))


def _spans(slot: Slot, zone: str, now: datetime, ahead: int) -> Iterator[tuple[datetime, datetime]]:
    """Give when a slot begins and ends, around now and for some days ahead, in UTC."""
    here = ZoneInfo(zone)
    if isinstance(slot, Dates):
        after = slot.last + timedelta(days=1)
        yield _moment(slot.first, 0, here), _moment(after, 0, here)
        return
    today = now.astimezone(here).date()
    for offset in range(-2, ahead + 1):
        day = today + timedelta(days=offset)
        if day.weekday() in slot.days:
            ends = slot.start_min + slot.length_min
            yield _moment(day, slot.start_min, here), _moment(day, ends, here)


def _moment(day: date, minutes: int, here: ZoneInfo) -> datetime:
    """Give a wall time of a zone as a moment. One that summer time skips is the moment after the gap."""
    day += timedelta(days=minutes // (24 * 60))
    minutes %= 24 * 60
    local = datetime.combine(day, clock(minutes // 60, minutes % 60), tzinfo=here)
    return local.astimezone(UTC)


__all__ = ["Dates", "Slot", "Weekly", "Windows", "is_open", "opens_at", "read_slot"]

"""How one server stands: what the spec changes, and where the host has moved away from what was applied.

Two different questions, never mixed: *out of sync* means the spec moved, *drifted* means the host moved. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from reconciler.core.applied import Applied
from reconciler.core.desired import Target, text_sha256
from reconciler.core.live import Known, LiveServer, Unknown


class SyncStatus(StrEnum):
    """How one server stands against its spec, in one word."""

    IN_SYNC = "InSync"
    OUT_OF_SYNC = "OutOfSync"
    DRIFTED = "Drifted"
    UNVERIFIED = "Unverified"
    DOWN = "Down"
    ON_HOLD = "OnHold"
    SPEC_WRONG = "SpecWrong"
    ABSENT = "Absent"
    NOT_OURS = "NotOurs"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Divergence:
    """One field of which the running engine has another value than the spec asks for, and who says so."""

    field: str
    asked: str
    granted: str
    source: str


@dataclass(frozen=True, slots=True)
class Drift:
    """One way in which the host differs from what was applied there. `what` is a stable word."""

    what: str
    sentence: str
    fields: tuple[Divergence, ...] = ()


@dataclass(frozen=True, slots=True)
class RunningWith:
    """What is known of the flags that a server really runs with.

    `other`: it was started with other ones. `refused`: it was asked with ours and does otherwise. `unknown` says what could
    not be found out; what is unknown is neither in sync nor drift.
    """

    other: tuple[Divergence, ...] = ()
    refused: tuple[Divergence, ...] = ()
    unknown: str = ""
    source: str = ""

    def drift(self) -> tuple[Drift, ...]:
        """Give both as drift, field by field."""
        found = []
        if self.other:
            text = "; ".join(f"{d.field}: {d.granted}, not {d.asked}" for d in self.other)
            sentence = (
                f"it runs with other flags than were applied ({self.other[0].source}): {text}"
            )
            found.append(Drift("other-flags", sentence, self.other))
        if self.refused:
            text = "; ".join(f"{d.field}: {d.granted}, not {d.asked}" for d in self.refused)
            sentence = f"asked for and not granted by the engine ({self.refused[0].source}): {text}"
            found.append(Drift("not-granted", sentence, self.refused))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Excuse:
    """What others may change on the host, by the spec's `drift_ignore`: the rules, and whether they explain an edited unit."""

    rules: tuple[tuple[str, str], ...] = ()
    unit: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """Give the keys of the unit that are not ours to keep."""
        return frozenset(w.removeprefix("unit:") for w, _ in self.rules if w.startswith("unit:"))

    def drop_in(self, path: str) -> bool:
        """Say whether a drop-in is somebody else's by agreement."""
        return f"drop-in:{path.rpartition('/')[2]}" in dict(self.rules)

    @property
    def port(self) -> bool:
        """Say whether others may listen on the port as well."""
        return "port" in dict(self.rules)

    @property
    def gpu_taken(self) -> bool:
        """Say whether others may have its cards open while it serves; before a start no rule lets that pass."""
        return "gpu-taken" in dict(self.rules)


NO_EXCUSE = Excuse()

NOTHING_RUNS = RunningWith()
"""Of a server that does not run, or that was not made by us."""


def drift_of(
    live: LiveServer, applied: Applied | None, excuse: Excuse = NO_EXCUSE
) -> tuple[Drift, ...]:
    """List where the host has moved away from the applied revision. Empty also when nothing was ever applied."""
    if applied is None:
        return ()
    found: list[Drift] = []
    match live.permanent:
        case Known(value=None):
            found.append(Drift("unit-missing", f"{live.unit_name}'s file is gone from the host"))
        case Known(value=str() as text) if (
            applied.unit_sha256 and text_sha256(text) != applied.unit_sha256 and not excuse.unit
        ):
            found.append(
                Drift(
                    "unit-edited", f"{live.unit_name} was edited on the host since it was applied"
                )
            )
        case _:
            pass
    found += [
        Drift("drop-in", f"{path} changes the unit behind the spec's back")
        for path, _ in foreign_drop_ins(live, excuse)
    ]
    match live.unit:
        case Known(value=unit):
            if unit.phase in {"down", "not-found"}:
                found.append(
                    Drift("down", f"{live.unit_name} is {unit.active_state} (result {unit.result})")
                )
            elif unit.phase == "looping":
                found.append(
                    Drift(
                        "looping",
                        f"{live.unit_name} restarts in a loop ({unit.restarts} times so far)",
                    )
                )
            elif unit.invocation != applied.invocation:
                found.append(
                    Drift(
                        "unverified",
                        f"{live.unit_name} was restarted since it was applied; this run is not proven yet",
                    )
                )
        case _:
            pass
    found.extend([] if excuse.port else _port_drift(live))
    return tuple(found)


def foreign_drop_ins(live: LiveServer, excuse: Excuse = NO_EXCUSE) -> tuple[tuple[str, str], ...]:
    """Give the drop-ins of a unit that are somebody's: neither ours, nor everybody's, nor excused. Path and text each."""
    files = live.files.value.drop_ins if isinstance(live.files, Known) else ()
    return tuple(
        (path, text)
        for path, text in files
        if not excuse.drop_in(path)
        and not path.endswith("/zz-reconciler-disarm.conf")
        and "/service.d/" not in path
    )


_MOVABLE: Final = re.compile(
    r"/(?:etc|run)/systemd/system/(?P<unit>[^/]+)\.d/[A-Za-z0-9][A-Za-z0-9_.@:-]{0,120}\.conf\Z"
)

APPLIED_AT_ONCE: Final = frozenset(
    {"Description", "Documentation", "CPUQuota", "CPUQuotaPeriodSec", "CPUWeight", "StartupCPUWeight", "AllowedCPUs",
     "AllowedMemoryNodes", "IOWeight", "StartupIOWeight", "MemoryMin", "MemoryLow", "MemoryHigh", "MemoryMax", "MemorySwapMax", "TasksMax",
     "Restart", "RestartSec", "TimeoutStopSec", "KillMode", "KillSignal", "SendSIGKILL", "StartLimitBurst", "StartLimitIntervalSec"}
)  # fmt: skip
"""Settings of which no process has a copy: systemd uses those that it has read last, so a running server needs no restart for them."""


def movable(unit: str, path: str) -> bool:
    """Say whether a drop-in lies where people put them for this one unit; a package's, or one of many units, is left alone."""
    match = _MOVABLE.fullmatch(path)
    return match is not None and match["unit"] == unit


def settings_of(text: str) -> tuple[tuple[str, str], ...]:
    """Read what a drop-in sets: key and value of each line."""
    lines = text.replace("\\\n", " ").splitlines()
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith(("#", ";", "[")))
    return tuple((key.strip(), value.strip()) for key, eq, value in pairs if eq)


def wording_of(text: str) -> str:
    """Name what a drop-in sets: values only of settings that hold no secret and say something in a few characters."""
    said = [
        f"{key}={value}"
        if key in APPLIED_AT_ONCE and re.fullmatch(r"[A-Za-z0-9.%:, -]{1,40}", value)
        else key[:40]
        for key, value in settings_of(text)
    ]
    return ", ".join(dict.fromkeys(s for s in said if s.isprintable())) or "nothing"


def _port_drift(live: LiveServer) -> list[Drift]:
    if isinstance(live.listeners, Unknown) or isinstance(live.pids, Unknown):
        return []
    own = set(live.pids.value)
    return [
        Drift(
            "port",
            f"{listener.address} is listened on by {', '.join(listener.units) or 'an unknown process'} as well",
        )
        for listener in live.listeners.value
        if not listener.pids or not set(listener.pids) <= own
    ]


def sync_status(
    target: Target | None,
    live: LiveServer,
    applied: Applied | None,
    excuse: Excuse = NO_EXCUSE,
) -> SyncStatus:
    """Say how one server stands. The order of the cases is the policy.

    A server that runs something we never applied has drifted even when the spec moved on as well: someone was on the
    host, and the operator should read that before their work is overwritten.
    """
    if (
        isinstance(live.unit, Unknown)
        or isinstance(live.permanent, Unknown)
        or live.known_records is None
    ):
        return SyncStatus.UNKNOWN  # Never ABSENT: a silent host proves nothing.
    kinds = {d.what for d in drift_of(live, applied, excuse)}
    if applied is None:
        return (
            SyncStatus.ABSENT if live.unit.value.load_state == "not-found" else SyncStatus.NOT_OURS
        )
    if kinds & {"unit-missing", "unit-edited", "drop-in", "port"}:
        return SyncStatus.DRIFTED
    if target is not None and applied.revision != target.revision:
        return SyncStatus.OUT_OF_SYNC
    if target is None:
        return SyncStatus.IN_SYNC if "down" in kinds else SyncStatus.OUT_OF_SYNC
    if kinds & {"down", "looping"}:
        return SyncStatus.DOWN
    return SyncStatus.UNVERIFIED if "unverified" in kinds else SyncStatus.IN_SYNC

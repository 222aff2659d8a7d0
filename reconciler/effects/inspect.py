"""Ask a host what an engine will find there, before anything stops; what its answers mean is `core.checks`'s to say."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.core import checks
from reconciler.core.checks import Check
from reconciler.core.demands import request
from reconciler.core.effect import CheckFlags, Inspect, deadline_s
from reconciler.core.errors import HostError
from reconciler.effects.ports import Answer, FlagMemory, HostPort, Request

REMEMBERED = 200
"""Installations, and as many flags each as an engine has: some megabytes at the most."""


def inspect(host: HostPort, effect: Inspect) -> Answer:
    """Look at program, models, limits and devices."""
    args = request(effect.demands, effect.user, effect.cards)
    return host.call(Request("inspect", args), deadline_s=deadline_s(effect))


def known_flags(host: HostPort, effect: CheckFlags, memory: FlagMemory) -> bool:
    """Say whether this installation has said before that it knows all of these flags."""
    known = memory.known(_key(host, effect)) if effect.installed else frozenset()
    return bool(effect.installed) and set(effect.flags) <= known


def check_flags(host: HostPort, effect: CheckFlags, memory: FlagMemory) -> Answer:
    """Ask the engine's own help about its flags, and remember what it knows."""
    args = {"user": effect.user, "argv": list(effect.argv), "flags": list(effect.flags)}
    answer = host.call(Request("check-flags", args), deadline_s=deadline_s(effect))
    asked = answer.data.get("known") if answer.outcome == "done" else None
    known = asked.get("known") if isinstance(asked, Mapping) else None
    if effect.installed and isinstance(known, list):
        memory.remember(_key(host, effect), tuple(str(f) for f in known))
    return answer


def _key(host: HostPort, effect: CheckFlags) -> tuple[str, ...]:
    return (host.name, *effect.argv, effect.installed)


def engine_checks(
    host: HostPort, looked: Inspect, asked: CheckFlags | None, memory: FlagMemory
) -> tuple[Check, ...] | str:
    """Run every check on the engine for a plan; a text where the host would not tell. Changes nothing."""
    try:
        answer = inspect(host, looked)
        if answer.outcome != "done":
            return answer.message or answer.reason
        found = checks.judge(looked.demands, answer.data, looked.cards)
        if asked is None:
            return checks.unprivileged(found)
        asked = _of(asked, checks.installed(answer.data))
        if known_flags(host, asked, memory):
            return (*found, checks.flags_check(checks.ALL_FLAGS, host.name))
        said = check_flags(host, asked, memory)
    except HostError as error:
        return str(error)
    return checks.unprivileged((*found, checks.flags_check(said.data, host.name)))


def _of(asked: CheckFlags, installed: str) -> CheckFlags:
    return CheckFlags(asked.server, asked.argv, asked.flags, asked.user, installed)


@dataclass(frozen=True, slots=True)
class FlagFile:
    """Remembers in a file of this installation of the tool. What cannot be read or written is asked for again."""

    path: Path

    def known(self, key: tuple[str, ...]) -> frozenset[str]:
        """See `FlagMemory`."""
        flags = self._rows().get("\0".join(key))
        return frozenset(str(f) for f in flags) if isinstance(flags, list) else frozenset()

    def remember(self, key: tuple[str, ...], flags: tuple[str, ...]) -> None:
        """See `FlagMemory`. The newest installations are kept."""
        name = "\0".join(key)
        rows = self._rows()
        rows[name] = sorted({*rows.pop(name, []), *flags})
        kept = dict(list(rows.items())[-REMEMBERED:])
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            number, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".flags")
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(kept, file)
            Path(temporary).replace(self.path)

    def _rows(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            rows = json.loads(self.path.read_text(encoding="utf-8"))
            return rows if isinstance(rows, dict) else {}
        return {}

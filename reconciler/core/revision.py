"""The identity of what runs: canonical JSON, its digest, and what a change of each field needs.

A revision covers everything that decides what runs and nothing else: comments, order, files, defaults written
out and the version of this tool do not change it, and neither do the fields that only the controller reads
(they have a digest of their own). So an upgrade never restarts a fleet, and a changed gate no server.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NewType

from reconciler.core.findings import read_server
from reconciler.core.spec import EngineRules, Server

Revision = NewType("Revision", str)


class EffectClass(IntEnum):
    """What a change of a field needs on the host; the highest of all changed fields decides."""

    CONTROLLER = 1
    """Nothing: the next pass reads the new value."""
    RELOAD = 2
    """Install the unit, daemon-reload; the process is not touched."""
    RESTART = 3
    """The whole rollout."""


EFFECT_CLASSES: Final = {
    "timeouts.stop": EffectClass.RELOAD,
    "timeouts": EffectClass.CONTROLLER,
    "preflight": EffectClass.CONTROLLER,
    "gate": EffectClass.CONTROLLER,
    "on_failure": EffectClass.CONTROLLER,
    "drift": EffectClass.CONTROLLER,
    "suspend": EffectClass.CONTROLLER,
    "protect": EffectClass.CONTROLLER,
    "window": EffectClass.CONTROLLER,
    "depends_on": EffectClass.CONTROLLER,
    "group": EffectClass.CONTROLLER,
    "drift_ignore": EffectClass.CONTROLLER,
}
"""By field path; the longest that fits decides, and what is not here needs a restart."""

_NOT_CONTENT: Final = ("host", "state")
"""They say where and whether, not what: `state` down and up again is the same revision."""


def effect_class(path: str) -> EffectClass:
    """Say what a change of the field at a dotted path needs."""
    while path:
        if path in EFFECT_CLASSES:
            return EFFECT_CLASSES[path]
        path = path.rpartition(".")[0]
    return EffectClass.RESTART


def whole(server: Server) -> dict[str, Any]:
    """Give the merged server as plain JSON data, defaults left out: what is shown, recorded and read back."""
    return server.model_dump(mode="json", exclude_defaults=True)


def written(server: Server) -> dict[str, Any]:
    """Give the part that decides what runs, as plain JSON data."""
    return _part(whole(server), controller=False)


def revision(server: Server) -> Revision:
    """Digest what decides what runs, as 64 hex digits."""
    return Revision(digest(written(server)))


def policy_digest(server: Server) -> str:
    """Digest what only the controller reads: the gate, the waits, what to do about failure and drift."""
    return digest(_part(whole(server), controller=True))


def digest(data: Mapping[str, Any]) -> str:
    """Give the SHA-256 of canonical JSON, as hex."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()


def canonical(data: Mapping[str, Any]) -> str:
    """Write JSON in the one way that a digest covers: sorted keys, no spaces, ASCII."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def restored(data: Mapping[str, Any], engines: Mapping[str, EngineRules]) -> Server | None:
    """Make a Server again of what `whole` gave; None where this version of the tool cannot."""
    server, _ = read_server(frozen(data), engines)
    return server


@dataclass(frozen=True, slots=True)
class Change:
    """One field that differs; `old` or `new` is None where the field is not there."""

    path: str
    old: Any
    new: Any
    effect_class: EffectClass


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """List the fields that differ between two servers as `written` or `whole` gives them, sorted by path."""
    found = (_secret_change(c) for c in _changes(old, new, ""))
    return tuple(c for c in found if c is not None)


_DIGEST: Final = re.compile(r"(secrets\..+|listen\.api_key)\.sha256\Z")


def _secret_change(change: Change) -> Change | None:
    """Say of an encrypted secret that it is another one, and nothing of it where it comes or goes: its file's row says so."""
    found = _DIGEST.match(change.path)
    if found is None:
        return change
    if change.old is None or change.new is None:
        return None
    old, new = (f"the secret encrypted as {str(side)[:12]}" for side in (change.old, change.new))
    return Change(found[1], old, new, change.effect_class)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> list[Change]:
    found: list[Change] = []
    for key in sorted({*old, *new}):
        path = f"{prefix}{key}"
        before, after = old.get(key), new.get(key)
        sides = (before, after)
        if any(sides) and all(side is None or isinstance(side, Mapping) for side in sides):
            # Also where a whole map came or went: `timeouts` holds fields of two classes, and the fields decide.
            found += _changes(before or {}, after or {}, f"{path}.")
        elif not _same(before, after):
            found.append(Change(path, before, after, effect_class(path)))
    return found


def _same(before: Any, after: Any) -> bool:
    """Compare as the digest does: `1`, `1.0` and `true` are three values, a tuple and a list are one."""
    return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)


def _part(data: Mapping[str, Any], *, controller: bool, prefix: str = "") -> dict[str, Any]:
    """Keep the fields of one side of the border between content and policy."""
    part: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if path in _NOT_CONTENT:
            continue
        if isinstance(value, dict) and any(
            known.startswith(f"{path}.") for known in EFFECT_CLASSES
        ):
            inner = _part(value, controller=controller, prefix=f"{path}.")
            if inner:
                part[key] = inner
        elif (effect_class(path) is EffectClass.CONTROLLER) == controller:
            part[key] = value
    return part


def frozen(value: Any) -> Any:
    """Give plain data as the models take it: tuples for lists, all the way down."""
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    return value

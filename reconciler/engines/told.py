"""Asked against granted: what a running engine says about itself, compared with what the user wrote.

Pure, and shared by the family. Only fields that the spec sets are compared, against resolved values, through what each engine
is known to make of them (`Told.same`): a parser's default is not the value in force, and a value that the engine rewrites by a
rule is no drift. A field of which nothing is said is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from reconciler.core.spec import Server

_SIZES: Final = ("tp_size", "pp_size", "dp_size", "ep_size")
_NAMES: Final = ("model", "model_revision", "served_model_name")
_SHOWN: Final = 80

Same = Callable[[str, object, object], bool]


def plainly_same(_path: str, _asked: object, _granted: object) -> bool:
    """Know of no field that is written in two ways."""
    return False


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine says: values by the paths of a spec, and what it says that it was asked for, where it does.

    `same` knows the fields that read back otherwise than they were written.
    """

    source: str
    values: Mapping[str, object]
    asked: Mapping[str, object] = field(default_factory=dict)
    same: Same = plainly_same


def written(server: Server) -> dict[str, object]:
    """Return the fields of a spec that decide an engine's flags, by their paths, as the user wrote them."""
    found: dict[str, object] = {
        name: getattr(server, name) for name in _NAMES if getattr(server, name) is not None
    }
    found |= {name: getattr(server, name) for name in _SIZES if getattr(server, name) != 1}
    found["listen.port"] = server.listen.port
    found |= {f"speculative.{key}": value for key, value in (server.speculative or {}).items()}
    found |= {f"args.{key}": value for key, value in server.args.items()}
    return found


def flattened(read: Mapping[str, object]) -> dict[str, object]:
    """Return what `read_argv` gives by the same paths."""
    found: dict[str, object] = {}
    for key, value in read.items():
        if key in {"speculative", "args", "listen"} and isinstance(value, Mapping):
            found |= {f"{key}.{name}": item for name, item in value.items()}
        elif key in _NAMES or key in _SIZES:
            found[key] = value
    return found


def differences(asked: Mapping[str, object], told: Told) -> Iterator[tuple[str, object, object]]:
    """Yield (path, asked, granted) of every field that is told and is neither equal nor equivalent."""
    for path, wanted in sorted(asked.items()):
        if path not in told.values:
            continue
        granted = told.values[path]
        if not equal(wanted, granted) and not told.same(path, wanted, granted):
            yield path, wanted, granted


def equal(asked: object, granted: object) -> bool:
    """Compare two values as a command line would: `8` and `"8"`, a list and its only item, JSON and its text, are one."""
    if asked == granted and isinstance(asked, bool) == isinstance(granted, bool):
        return True
    if asked == "auto":
        return True  # The choice was left to the engine.
    if isinstance(asked, bool) or isinstance(granted, bool):
        return str(asked).lower() == str(granted).lower() or (
            asked is False and granted in (None, "")
        )
    if isinstance(asked, int | float) and isinstance(granted, int | float):
        return abs(asked - granted) <= 1e-6 * max(abs(asked), abs(granted))
    left, right = _plain(asked), _plain(granted)
    if isinstance(left, list) != isinstance(right, list):
        left = left if isinstance(left, list) else [left]
        right = right if isinstance(right, list) else [right]
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same_word, left, right))
    return left == right or _same_word(left, right)


def _same_word(left: object, right: object) -> bool:
    return left == right or str(left) == str(right)


def _plain(value: object) -> object:
    if isinstance(value, str) and value[:1] in {"{", "["}:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def shown(value: object) -> str:
    """Return a value for a sentence, bounded."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def same_model(asked: str, granted: object) -> bool:
    """Say whether a place on the host is where the hub's library keeps the model that was asked for by name."""
    if not isinstance(granted, str):
        return False
    return f"/models--{asked.replace('/', '--')}/" in granted or (
        asked.startswith("/") and asked.rstrip("/") == granted.rstrip("/")
    )

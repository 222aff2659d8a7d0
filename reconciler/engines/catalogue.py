"""The flags of an engine's version as data: check what a spec writes, write it, read it back.

The catalogues in `flags/` were made by each engine's own parser. They say which flags exist and what form
their values have; not what an engine makes of them. Everything here works offline, so that a wrong flag
costs a red line under a spec and not a server (a removed flag is exit status 2, after the old server is gone).
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from reconciler.engines.base import Finding, version_key

_SIZE = re.compile(r"\d+(?:\.\d+)?[kKmMgGtT]")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?|-?\.\d+")


TRUE_OR_FALSE = "true|false"
"""The type of a flag that is followed by the word (llama_cpp.server), where others are a bare switch."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of an engine's parser, by its full name (`flag`, dashes included)."""

    flag: str
    aliases: tuple[str, ...]
    negations: tuple[str, ...]
    action: str
    type: str
    choices: tuple[object, ...] | None
    nargs: str | int | None
    deprecated: bool

    @property
    def bare(self) -> bool:
        """Whether it takes no value at all."""
        return self.nargs == 0 or self.type in {"flag", "bool"}

    @property
    def many(self) -> bool:
        """Whether several values follow it."""
        return self.nargs in {"+", "*"}

    @property
    def json(self) -> bool:
        """Whether its value is written as JSON."""
        return "json" in self.type

    @property
    def off(self) -> str | None:
        """The spelling that turns it off; `--no-x` where there are several, since every version has it."""
        return next((n for n in self.negations if n.startswith("--no-")), None) or next(
            iter(self.negations), None
        )


@dataclass(frozen=True, slots=True)
class SpeculativeKey:
    """One key of vLLM's speculative JSON."""

    key: str
    type: str
    choices: tuple[object, ...] | None
    internal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """All flags of one version. `note` is set when it stands for another version than the asked one.

    One is itself and no other, so that what is derived from it can be kept by it.
    """

    engine: str
    version: str
    note: str | None
    flags: Mapping[str, Flag]
    spellings: Mapping[str, tuple[Flag, bool]]
    speculative_keys: Mapping[str, SpeculativeKey]

    def __contains__(self, flag: object) -> bool:
        return flag in self.spellings

    def resolve(self, token: str) -> tuple[Flag, bool] | None:
        """Find the flag that the engine's parser would take `token` for, and whether it turns it off.

        As argparse does it: an exact spelling first, then an unambiguous prefix.
        """
        exact = self.spellings.get(token)
        if exact is not None or not token.startswith("--"):
            return exact
        matches = {
            (flag.flag, negated): (flag, negated)
            for spelling, (flag, negated) in self.spellings.items()
            if spelling.startswith(token)
        }
        return next(iter(matches.values())) if len(matches) == 1 else None

    def canonical(self, named: Mapping[str, str]) -> dict[str, str]:
        """Rename keys that are any spelling to the one that this version has as its full name.

        The full name moved between versions (`--tensor-parallel-size`, `--tp-size`); both stayed accepted.
        """
        return {self.spellings[s][0].flag: v for s, v in named.items() if s in self.spellings}

    def candidates(self, token: str) -> tuple[str, ...]:
        """Return every full name that begins with `token`."""
        return tuple(
            sorted({f.flag for s, (f, _) in self.spellings.items() if s.startswith(token)})
        )


@functools.cache
def versions(engine: str) -> tuple[str, ...]:
    """Return the versions with a catalogue, oldest first."""
    names = (
        entry.name for entry in resources.files("reconciler.engines").joinpath("flags").iterdir()
    )
    found = (
        name.removeprefix(f"{engine}-").removesuffix(".json")
        for name in names
        if name.startswith(f"{engine}-") and name.endswith(".json")
    )
    return tuple(sorted(found, key=version_key))


def catalogue(engine: str, version: str | None) -> Catalogue:
    """Return the catalogue of a version, or of its nearest neighbour with a note that says so.

    The nearest is the newest one that is not newer: a flag that came later must not pass. With no
    version written, the newest of all.
    """
    known = versions(engine)
    if version is None:
        note = f"no engine.version is written; flags were checked against {engine} {known[-1]}"
        return _loaded(engine, known[-1], note)
    if version in known:
        return _loaded(engine, version, None)
    older = [v for v in known if version_key(v) <= version_key(version)]
    nearest = older[-1] if older else known[0]
    note = f"there is no catalogue of {engine} {version} here; flags were checked against {nearest}"
    return _loaded(engine, nearest, note)


@functools.cache
def _loaded(engine: str, version: str, note: str | None) -> Catalogue:
    file = resources.files("reconciler.engines").joinpath("flags", f"{engine}-{version}.json")
    return read_catalogue(file.read_bytes(), note)


def read_catalogue(data: bytes, note: str | None = None) -> Catalogue:
    """Read one catalogue file.

    Raises:
        ValueError: The file does not have the shape of a catalogue.
    """
    try:
        document = json.loads(data)
        rows = [_flag(row) for row in document["flags"] if not row.get("positional")]
        keys = [
            SpeculativeKey(row["key"], row["type"], _choices(row["choices"]), bool(row["internal"]))
            for row in document.get("speculative_config_keys") or ()
        ]
        engine, version = str(document["engine"]), str(document["version"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"this is no catalogue of flags: {type(error).__name__}: {error}"
        ) from error
    spellings: dict[str, tuple[Flag, bool]] = {}
    for flag in rows:
        spellings |= dict.fromkeys((flag.flag, *flag.aliases), (flag, False))
        spellings |= dict.fromkeys(flag.negations, (flag, True))
    return Catalogue(
        engine, version, note, {f.flag: f for f in rows}, spellings, {k.key: k for k in keys}
    )


def _flag(row: Mapping[str, object]) -> Flag:
    def spellings(key: str) -> tuple[str, ...]:
        value = row.get(key) or ()
        if not isinstance(value, list):
            if value == ():
                return ()
            raise TypeError(f"{key} is no list")
        return tuple(str(item) for item in value)

    nargs = row["nargs"]
    return Flag(
        flag=str(row["flag"]),
        aliases=spellings("aliases"),
        negations=spellings("negations"),
        action=str(row["action"]),
        type=str(row["type"]),
        choices=_choices(row["choices"]),
        nargs=nargs if isinstance(nargs, int | str) else None,
        deprecated=bool(row["deprecated"]),
    )


def _choices(value: object) -> tuple[object, ...] | None:
    return tuple(value) if isinstance(value, list) else None


def flag_history(engine: str, flag: str) -> str | None:
    """Say whether a flag is one of older versions of an engine ("older"), of the newest ("newer"), or of none that is known."""
    known = versions(engine)
    having = [version for version in known if flag in catalogue(engine, version)]
    if not having:
        return None
    return "newer" if having[-1] == known[-1] else "older"


# -- checking ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """What `args` of a spec came to: each flag with its value, and what is wrong or worth a look."""

    values: tuple[tuple[Flag, object], ...]
    problems: tuple[Finding, ...]
    warnings: tuple[Finding, ...]


def check_args(book: Catalogue, args: Mapping[str, object], owned: Mapping[str, str]) -> Checked:
    """Check the keys and values of `args` against a catalogue.

    `owned` maps flags, by this version's full names, to what decides them instead. Keys are full names or aliases, without
    dashes in front; a prefix or a spelling with underscores is refused although the engine might take
    it: it hides which flag is meant, from the reader and from the operator's policy.
    """
    values: dict[str, tuple[str, Flag, object]] = {}
    problems: list[Finding] = []
    warnings: list[Finding] = []
    for key in sorted(args):
        place, value = f"args.{key}", args[key]
        entry = book.spellings.get(f"--{key}")
        if entry is None:
            problems.append((place, _short_form(book, key, args, owned) or unknown_flag(book, key)))
            continue
        flag, negated = entry
        if flag.flag in owned:
            problems.append((place, f"is decided by {owned[flag.flag]}"))
            continue
        if flag.flag in values:
            problems.append((place, f"is given twice: `{values[flag.flag][0]}` is the same flag"))
            continue
        if negated:
            if not isinstance(value, bool):
                problems.append((place, "takes true or false, no value"))
                continue
            value = not value
        wrong = wrong_value(flag, value)
        if wrong is not None:
            problems.append((place, wrong))
            continue
        if flag.deprecated:
            warnings.append((place, f"is deprecated in {book.engine} {book.version}"))
        values[flag.flag] = (key, flag, value)
    ordered = tuple((flag, value) for _, (_, flag, value) in sorted(values.items()))
    return Checked(ordered, tuple(problems), tuple(warnings))


def _short_form(
    book: Catalogue, key: str, args: Mapping[str, object], owned: Mapping[str, str]
) -> str | None:
    """Say which flag a short form (`-tp`) stands for, and whether that one is given as well."""
    flag, _ = book.spellings.get(f"-{key}", (None, False))
    if flag is None:
        return None
    if flag.flag in owned:
        return f"is decided by {owned[flag.flag]}"
    twice = next((n[2:] for n in (flag.flag, *flag.aliases) if n[2:] in args), None)
    if twice is not None:
        return f"is given twice: `{twice}` is the same flag"
    return f"is a short form; write `{flag.flag[2:]}`"


def unknown_flag(book: Catalogue, key: str) -> str:
    """Say that a flag is unknown, and what was probably meant."""
    if key.startswith("-"):
        return "is written without the dashes in front"
    dashed = key.replace("_", "-")
    if f"--{dashed}" in book:
        return f"is written with dashes: `{dashed}`"
    here = f"{book.engine} {book.version}"
    meant = book.candidates(f"--{dashed}")
    if len(meant) == 1:
        return f"is only the beginning of a flag; write `{meant[0][2:]}`"
    if meant:
        names = ", ".join(f"`{name[2:]}`" for name in meant[:6])
        return f"is the beginning of several flags of {here}: {names}"
    elsewhere = [v for v in versions(book.engine) if f"--{dashed}" in catalogue(book.engine, v)]
    told = f" ({book.engine} {elsewhere[-1]} has it)" if elsewhere else ""
    near = difflib.get_close_matches(f"--{dashed}", list(book.spellings), n=1, cutoff=0.7)
    hint = f"; did you mean `{near[0][2:]}`?" if near else ""
    return f"is no flag of {here}{told}{hint}"


def wrong_value(flag: Flag, value: object) -> str | None:
    """Say what is wrong with a value, None where the engine's parser would take it."""
    if flag.bare:
        if not isinstance(value, bool):
            return "takes no value: write true" + (" or false" if flag.off else "")
        if value is False and flag.off is None:
            return "has no form that turns it off: leave it out instead"
        return None
    if isinstance(value, bool):
        if (flag.nargs == "?" and value) or flag.type == TRUE_OR_FALSE:
            return None
        return "takes a value, not true or false"
    if value is None:
        return "has no value"
    if flag.json:
        return _wrong_json(flag, value)
    if isinstance(value, Mapping):
        return "takes no map"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _wrong_list(flag, value)
    return _wrong_scalar(flag, value)


def _wrong_json(flag: Flag, value: object) -> str | None:
    if isinstance(value, str) and "str" not in flag.type:
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return "takes JSON: write a map, or JSON as text"
    return None


def _wrong_list(flag: Flag, values: Sequence[object]) -> str | None:
    if not flag.many and flag.action != "Append":
        return "takes one value, not a list"
    if not values and flag.nargs == "+":
        return "needs at least one value"
    for value in values:
        wrong = _wrong_scalar(flag, value)
        if wrong is not None:
            return wrong
        if flag.many and str(value).startswith("-") and not _NUMBER.fullmatch(str(value)):
            return "has a value that begins with a dash; the engine would read it as a flag"
    return None


def _wrong_scalar(flag: Flag, value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return "takes text or a number"
    text = scalar(value)
    accepts = _FORMS.get(flag.type)
    if accepts is not None and not accepts[1](text):
        return f"takes {accepts[0]}"
    # A null among the choices stands for "not given", which no text can say.
    choices = [str(choice) for choice in flag.choices or () if choice is not None]
    if choices and text not in choices:
        near = difflib.get_close_matches(text, choices, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        listed = ", ".join(choices[:12]) + (", …" if len(choices) > 12 else "")
        return f"takes one of {listed}{hint}"
    return None


def _is_int(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", text) is not None


def _is_float(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


_FORMS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "int": ("a whole number", _is_int),
    "float": ("a number", _is_float),
    TRUE_OR_FALSE: ("true or false", lambda text: text in {"true", "false"}),
    "int(k/M/G suffix)": (
        "a whole number, or one with k, M or G",
        lambda text: _is_int(text) or _SIZE.fullmatch(text) is not None,
    ),
    "int(k/M/G suffix)|auto": (
        "a whole number, one with k, M or G, or auto",
        lambda text: text in {"auto", "-1"} or _is_int(text) or _SIZE.fullmatch(text) is not None,
    ),
}


# -- writing -------------------------------------------------------------------------------------------


def scalar(value: object) -> str:
    """Return a number or text as a command line has it."""
    if isinstance(value, float):
        return repr(value)
    return str(value)


def compact_json(value: object) -> str:
    """Return JSON without blanks and in one order, so that equal specs give equal command lines."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def words(flag: Flag, value: object) -> tuple[str, ...]:
    """Write a flag whose value passed `wrong_value`, by its full name."""
    if isinstance(value, bool) and flag.type == TRUE_OR_FALSE:
        return (flag.flag, "true" if value else "false")
    if isinstance(value, bool):
        return (flag.flag,) if value else (flag.off or flag.flag,)
    if flag.json:
        return _valued(flag.flag, value if isinstance(value, str) else compact_json(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts = [scalar(item) for item in value]
        if flag.many:
            return (flag.flag, *texts)
        return tuple(word for text in texts for word in _valued(flag.flag, text))
    return _valued(flag.flag, scalar(value))


def _valued(flag: str, text: str) -> tuple[str, ...]:
    # argparse takes a word that begins with a dash for a flag, unless it is glued on.
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)


# -- reading -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """A command line by full flag names, what no flag of the catalogue is, and what stands alone."""

    values: dict[str, object]
    unknown: dict[str, object]
    positional: tuple[str, ...]


def read_words(book: Catalogue, argv: Iterable[str], *, underscores: bool = False) -> Read:
    """Read arguments as the engine's parser would, as far as it can be told; never raises.

    `underscores`: the engine takes `_` for `-` in names (vLLM), and `--x.y v` for one key of a JSON.
    """
    tokens = list(argv)
    values: dict[str, object] = {}
    unknown: dict[str, object] = {}
    positional: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not _is_flag(token):
            positional.append(token)
            continue
        name, glued, text = token.partition("=")
        if underscores:
            name = name[:2] + name[2:].replace("_", "-")
        name, _, path = name.partition(".") if underscores else (name, "", "")
        entry = book.resolve(name)
        count = _following(tokens, at, entry[0] if entry else None) if not glued else 0
        given = [text] if glued else tokens[at : at + count]
        at += count
        if entry is None:
            unknown[name] = _unknown_value(given)
        elif path:
            _set_in(values, entry[0].flag, path.split("."), _json_or_text(given))
        else:
            _add(values, entry[0], entry[1], given)
    return Read(values, unknown, tuple(positional))


def _is_flag(token: str) -> bool:
    return len(token) > 1 and token.startswith("-") and not _NUMBER.fullmatch(token)


def _following(tokens: Sequence[str], at: int, flag: Flag | None) -> int:
    run = 0
    while at + run < len(tokens) and not _is_flag(tokens[at + run]):
        run += 1
    if flag is None or flag.many:
        return run
    if flag.bare:
        return 0
    return min(run, 1)


def _unknown_value(given: Sequence[str]) -> object:
    if not given:
        return True
    return given[0] if len(given) == 1 else list(given)


def _json_or_text(given: Sequence[str]) -> object:
    if not given:
        return True
    try:
        value: object = json.loads(given[0])
    except (ValueError, RecursionError):
        return given[0]
    return value


def _set_in(values: dict[str, object], flag: str, path: Sequence[str], value: object) -> None:
    inner = values.setdefault(flag, {})
    for key in path[:-1]:
        inner = inner.setdefault(key.replace("-", "_"), {}) if isinstance(inner, dict) else {}
    if isinstance(inner, dict):
        inner[path[-1].replace("-", "_")] = value


def _add(values: dict[str, object], flag: Flag, negated: bool, given: Sequence[str]) -> None:  # noqa: FBT001  (a fact about the spelling, not a switch)
    if flag.bare:
        values[flag.flag] = not negated
    elif not given:
        values[flag.flag] = True
    elif flag.many:
        values[flag.flag] = [typed(flag, text) for text in given]
    elif flag.action == "Append":
        earlier = values.get(flag.flag)
        values[flag.flag] = [*(earlier if isinstance(earlier, list) else []), typed(flag, given[0])]
    else:
        values[flag.flag] = typed(flag, given[0])


def typed(flag: Flag, text: str) -> object:
    """Return a value as its flag's type has it; text that does not fit stays text."""
    if flag.json:
        return _json_or_text([text])
    if flag.type == TRUE_OR_FALSE and text in {"true", "false"}:
        return text == "true"
    if flag.type.startswith("int") and _is_int(text):
        return int(text)
    if flag.type == "float" and _is_float(text):
        return float(text)
    return text


__all__ = [
    "Catalogue",
    "Checked",
    "Flag",
    "Read",
    "SpeculativeKey",
    "catalogue",
    "check_args",
    "compact_json",
    "read_catalogue",
    "read_words",
    "scalar",
    "typed",
    "unknown_flag",
    "versions",
    "words",
    "wrong_value",
]

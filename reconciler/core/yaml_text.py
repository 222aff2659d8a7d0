"""From the bytes of a spec file to plain trees that know their places, by way of YAML events alone.

Nothing is constructed: no tag is resolved, no alias followed, no key merged. The event stream is read once
and everything that could mean more than it shows is refused there: tags, directives, anchors, aliases, merge
keys, keys that are no simple text, duplicates, and all that is too deep, too big or too many. A safe loader
is not enough: 586 bytes of merge keys took one 25 seconds, and a `%YAML 1.1` line brings `no` = false back.

Scalars follow the core schema of YAML 1.2: `no`, `off` and `12:30` are text. What a field may hold is
`spec.py`'s matter; this module knows no field names. `fleet.py` and `settings.py` call it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from sys import intern
from typing import Any, Final, NamedTuple

from reconciler.core.errors import Problem

MAX_BYTES: Final = 256 * 1024
"""Of a file. Forty servers take 50 kB, and parsing this much takes two seconds without libyaml."""
MAX_DEPTH: Final = 32
"""Of maps and lists in each other. The spec language itself needs six."""
MAX_NODES: Final = 30_000
"""Values of a file. 256 kB of servers hold 16,000, and as much of `a,a,a` 130,000."""
MAX_OPEN_BRACKETS: Final = 100
"""Before scanning. The scanner looks ahead, and takes a second for 100,000 of them; counted without regard to
quotes, hence far more than `MAX_DEPTH`."""
MAX_DOCUMENTS: Final = 1_000
"""Of a file."""
MAX_PROBLEMS: Final = 100
"""Of a file. Nobody reads more, and a file of nothing but mistakes should not fill a terminal."""
MAX_INTEGER: Final = 2**63 - 1
"""What every consumer of JSON, the helper and the engines can still hold."""


# Nodes are named tuples, since a fleet has a million of them and a frozen dataclass takes four times as long to make.


class Scalar(NamedTuple):
    """One value, its text as written, and its place (from 1)."""

    value: str | int | float | bool | None
    text: str
    file: str
    line: int
    column: int


class Sequence(NamedTuple):
    """A list and its place."""

    items: tuple[Node, ...]
    file: str
    line: int
    column: int


class Key(NamedTuple):
    """A key's place; its text is the key of the `Mapping`."""

    file: str
    line: int
    column: int


class Mapping(NamedTuple):
    """A map in written order, its keys' places and its own."""

    entries: dict[str, tuple[Key, Node]]
    file: str
    line: int
    column: int

    def get(self, key: str) -> Node | None:
        """Give the value under a key, or None where the key is not there."""
        entry = self.entries.get(key)
        return entry[1] if entry else None


Node = Scalar | Sequence | Mapping
Plain = str | int | float | bool | tuple["Plain", ...] | dict[str, "Plain"] | None


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file. `sound` is false when something in it was refused: do not judge it further."""

    root: Node
    sound: bool


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a file holds, and everything that is wrong with it as YAML."""

    documents: tuple[Document, ...]
    problems: tuple[Problem, ...]


def parse(content: bytes, file: str) -> Parsed:
    """Read a file's bytes; never raises for what is in them.

    Problems are collected, not thrown at the first: after one the reading goes on wherever what follows can
    still be understood, so that a person mends a file in one go.
    """
    problems = _Problems(file)
    text = _decode(content, problems)
    if text is None:
        return Parsed((), problems.found())
    text = _checked_characters(text, problems)
    text = _without_directives(text, problems)
    _refuse_towers(text, problems)
    if problems.fatal:
        return Parsed((), problems.found())
    documents = _build(text, file, problems)
    return Parsed(documents, problems.found())


def plain(node: Node) -> Plain:
    """Give a tree without places: dicts, tuples and scalars. A key whose value is null is left out.

    Null removes (`architecture.md` section 3): in a merged tree it has done its work, and in any other it
    says the same as not writing the key.
    """
    if type(node) is Scalar:
        return node.value
    if type(node) is Mapping:
        return {
            key: plain(value)
            for key, (_, value) in node.entries.items()
            if not (type(value) is Scalar and value.value is None)
        }
    assert type(node) is Sequence
    return tuple([plain(item) for item in node.items])


class _Problems:
    """Collects problems; `fatal` says that what follows cannot be understood."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.fatal = False
        self._found: dict[Problem, None] = {}

    def add(self, line: int, column: int, message: str, *, fatal: bool = False) -> None:
        self.fatal = self.fatal or fatal
        self._found[Problem(self.file, line, column, message)] = None
        if len(self._found) >= MAX_PROBLEMS:
            self.fatal = True  # Also so that a bomb of mistakes costs no more than these.

    def extend(self, others: _Problems) -> None:
        self.fatal = self.fatal or others.fatal
        self._found |= others._found

    def found(self) -> tuple[Problem, ...]:
        return tuple(sorted(self._found))


# -- bytes and characters --------------------------------------------------------------------------------


def _decode(content: bytes, problems: _Problems) -> str | None:
    if len(content) > MAX_BYTES:
        problems.add(
            1, 1, f"the file is larger than {MAX_BYTES // 1024} kB; split it into several files"
        )
        return None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        problems.add(1, 1, "the file is UTF-16 (by its byte order mark); save it as UTF-8")
        return None
    try:
        # One byte order mark at the very start is what some editors write, and means nothing in UTF-8.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        problems.add(
            line, column, f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8"
        )
        return None


_REFUSED = re.compile(
    "[\x00-\x08\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
    "\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _checked_characters(text: str, problems: _Problems) -> str:
    """Refuse what cannot be seen or reorders what is seen; give text that the scanner can still read."""
    text = text.replace("\r\n", "\n")
    if not _REFUSED.search(text):
        return text
    for number, line in enumerate(text.split("\n"), 1):
        indentation = len(line) - len(line.lstrip(" \t"))
        if "\t" in line[:indentation]:
            column = line.index("\t") + 1
            problems.add(number, column, "a tab in the indentation; use spaces", fatal=True)
        for match in _REFUSED.finditer(line, indentation):
            problems.add(number, match.start() + 1, _why_refused(match.group()))
    return _REFUSED.sub(lambda match: " " if match.group() == "\t" else "_", text)


def _why_refused(character: str) -> str:
    if character == "\t":
        return "a tab; use spaces"
    if _BIDI.match(character):
        return (
            f"U+{ord(character):04X} changes the order in which text is shown; "
            "what is read would not be what is meant"
        )
    return f"U+{ord(character):04X} is a control character; remove it"


def _without_directives(text: str, problems: _Problems) -> str:
    """Refuse lines such as `%YAML 1.1`, which change what every later line means."""
    if "%" not in text:
        return text
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if line.startswith("%"):
            problems.add(index + 1, 1, "a YAML directive; remove this line")
            lines[index] = ""
    return "\n".join(lines)


_BRACKETS = re.compile(r"[\[\]{}]")


def _refuse_towers(text: str, problems: _Problems) -> None:
    """Refuse what the scanner itself would spend too long on."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth = depth + 1 if match.group() in "[{" else max(0, depth - 1)
        if depth > MAX_OPEN_BRACKETS:
            before = text[: match.start()]
            column = match.start() - before.rfind("\n")
            problems.add(before.count("\n") + 1, column, _TOO_DEEP, fatal=True)
            return


_TOO_DEEP: Final = f"maps and lists are more than {MAX_DEPTH} deep"


# -- events ----------------------------------------------------------------------------------------------


def _build(text: str, file: str, problems: _Problems) -> tuple[Document, ...]:
    """Feed all events to a builder, or say where the text ends to be YAML."""
    quick = _built_by_libyaml(text, file)
    if quick is not None:
        problems.extend(quick.problems)
        return tuple(quick.documents)
    # Late, here and below: importing this package takes as long as checking a spec.
    from ruamel.yaml import YAML  # noqa: PLC0415
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415

    builder = _Builder(file, problems)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            if not builder.take(event):
                break
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        builder.abandon(line, column, _syntax_message(error.problem, error.context))
    except YAMLError:
        builder.abandon(1, 1, "this is not YAML")
    return tuple(builder.documents)


def _built_by_libyaml(text: str, file: str) -> _Builder | None:
    """Do it with libyaml (20 times as fast), where it is installed and has nothing to object.

    Both scanners give the same events for what both accept (compared on 100,000 random texts); the other one
    has the better words for mistakes, and accepts a little more.
    """
    try:
        scanner = import_module("_ruamel_yaml")
        from ruamel.yaml.error import YAMLError  # noqa: PLC0415
        from ruamel.yaml.events import ScalarEvent, StreamEndEvent  # noqa: PLC0415
    except ImportError:
        return None
    builder = _Builder(file, _Problems(file))
    try:
        builder.take_all(scanner.CParser(text).get_event, ScalarEvent, StreamEndEvent)
    except YAMLError:
        return None
    return builder


_SYNTAX: Final = (
    ("that cannot start any token", "this character cannot begin a value; put the value in quotes"),
    ("mapping values are not allowed here", "a `:` where no key can be; put the value in quotes, or check the indentation"),
    ("unexpected end of stream", "the closing quote is missing"),
    ("document separator", "the closing quote is missing"),
    ("expected ',' or '}'", "`,` or `}` is missing"),
    ("expected ',' or ']'", "`,` or `]` is missing"),
    ("expected the node content", "a value is missing, or a bracket is not closed"),
    ("expected <block end>", "the indentation does not fit the lines above"),
    ("could not find expected ':'", "`:` is missing after this key"),
    ("expected alphabetic or numeric character", "`&` and `*` begin anchors and aliases, which are refused; put the value in quotes"),
    ("unknown escape character", "an unknown escape after `\\`; use single quotes for text with backslashes"),
)  # fmt: skip


def _syntax_message(problem: str | None, context: str | None) -> str:
    """Say in plain words what the scanner found; its own words where we have none."""
    for part, message in _SYNTAX:
        if problem and part in problem:
            return message
    return "; ".join(part for part in (context, problem) if part) or "this is not YAML"


class _Open:
    """A map or list whose end has not come yet."""

    __slots__ = ("column", "entries", "items", "key", "line")

    def __init__(self, line: int, column: int, *, is_map: bool) -> None:
        self.line = line
        self.column = column
        self.entries: dict[str, tuple[Key, Node]] | None = {} if is_map else None
        self.items: list[Node] = []
        self.key: tuple[str, Key] | None = None


_new: Final = tuple.__new__
"""Makes a named tuple of a tuple: half the time of calling it by its name, which only sorts the arguments."""

KEYS_SEEN: Final = 4096
_KEYS_SEEN: Final[dict[str, str]] = {}
"""Keys that were judged before and are simple text, each interned once."""


class _Builder:
    """Builds trees from events, and refuses what a spec may not use."""

    def __init__(self, file: str, problems: _Problems) -> None:
        self.documents: list[Document] = []
        self._file = file
        self.problems = problems
        self._stack: list[_Open] = []
        self._root: Node | None = None
        self._nodes = 0
        self._sound = True

    def take(self, event: Any) -> bool:
        """Take one event; False ends the reading."""
        kind = type(event).__name__
        mark = event.start_mark
        line, column = mark.line + 1, mark.column + 1
        if kind == "ScalarEvent":
            if event.anchor is not None or event.tag is not None:
                self._decorations(event, line, column)
            self._scalar(event, line, column)
        elif kind in {"MappingStartEvent", "SequenceStartEvent"}:
            self._decorations(event, line, column)
            self._begin(line, column, is_map=kind == "MappingStartEvent")
        elif kind in {"MappingEndEvent", "SequenceEndEvent"}:
            self._end()
        elif kind == "AliasEvent":
            self._refuse(line, column, f"an alias (*{event.anchor}); use `extends:` instead")
            self._place(Scalar(None, "", self._file, line, column))
        elif kind == "DocumentStartEvent":
            self._start_document(line, column)
        elif kind == "DocumentEndEvent":
            self._end_document()
        return not self.problems.fatal

    def abandon(self, line: int, column: int, message: str) -> None:
        """Give up on the rest of the file; keep what was read of the open document, as not sound."""
        self.problems.add(line, column, message, fatal=True)
        self._sound = False
        while self._stack:
            self._end()
        if self._root is not None:
            self._end_document()

    def _refuse(self, line: int, column: int, message: str) -> None:
        self._sound = False
        self.problems.add(line, column, message)

    def _start_document(self, line: int, column: int) -> None:
        self._root, self._sound = None, True
        if len(self.documents) >= MAX_DOCUMENTS:
            self.abandon(line, column, f"more than {MAX_DOCUMENTS} documents in one file")

    def _end_document(self) -> None:
        root = self._root
        self._root = None
        if root is None or (type(root) is Scalar and root.value is None and root.text == ""):
            return  # Nothing between two `---`.
        self.documents.append(Document(root, self._sound))

    def _begin(self, line: int, column: int, *, is_map: bool) -> None:
        if self._stack and self._stack[-1].entries is not None and self._stack[-1].key is None:
            self._refuse(line, column, "a map or list as a key; keys are simple text")
        if len(self._stack) >= MAX_DEPTH:
            self.abandon(line, column, _TOO_DEEP)
            return
        self._stack.append(_Open(line, column, is_map=is_map))

    def _end(self) -> None:
        top = self._stack.pop()
        if top.entries is not None:
            self._place(Mapping(top.entries, self._file, top.line, top.column))
        else:
            self._place(Sequence(tuple(top.items), self._file, top.line, top.column))

    def take_all(self, get_event: Callable[[], Any], scalars: type, end: type) -> None:
        """Take events up to the last, or up to one after which nothing can be understood.

        Two events in three are plain keys and values of maps, and a fleet has millions of them: those are dealt with here, in
        the way in which `_key`, `_scalar` and `_place` deal with all.
        """
        stack, file, seen = self._stack, self._file, _KEYS_SEEN
        problems = self.problems
        while True:
            event = get_event()
            kind = type(event)
            if kind is scalars and stack and event.anchor is None and event.tag is None:
                top = stack[-1]
                entries, key = top.entries, top.key
                text, style = event.value, event.style
                if entries is not None and self._nodes < MAX_NODES:
                    mark = event.start_mark
                    if key is None:
                        known = seen.get(text)
                        if known is not None and not style and text not in entries:
                            place = (file, mark.line + 1, mark.column + 1)
                            top.key = (known, _new(Key, place))
                            continue
                    elif text and key[0] not in entries:
                        value, why = (
                            (text, None)
                            if style
                            else _short(text)
                            if len(text) < 40
                            else scalar(text)
                        )
                        if why is None:
                            node = (value, text, file, mark.line + 1, mark.column + 1)
                            entries[key[0]] = (key[1], _new(Scalar, node))
                            top.key = None
                            self._nodes += 1
                            continue
                line, column = event.start_mark.line + 1, event.start_mark.column + 1
                self._scalar(event, line, column)
                if problems.fatal:
                    return
            elif kind is end or not self.take(event):
                return

    def _scalar(self, event: Any, line: int, column: int) -> None:
        stack = self._stack
        if stack and stack[-1].entries is not None and stack[-1].key is None:
            self._key(event, line, column)
            return
        text = event.value
        if event.style:  # Quoted or a block: text, whatever it looks like.
            value: str | int | float | bool | None = text
        else:
            value, why = scalar(text)
            if why:
                self._refuse(line, column, why)
        if value is None and text == "" and stack and stack[-1].key is not None:
            key = stack[-1].key[1]  # Nothing is written; the scanners differ about where that is.
            line, column = key.line, key.column
        self._place(Scalar(value, text, self._file, line, column))

    def _key(self, event: Any, line: int, column: int) -> None:
        text = intern(event.value)  # A fleet has few keys, many times over.
        if text == "<<":
            self._refuse(line, column, "a merge key (<<); use `extends:` instead")
        elif event.style in {"|", ">"} or "\n" in text:
            self._refuse(line, column, "a key of several lines; keys are simple text")
        elif text == "":
            self._refuse(line, column, "an empty key")
        elif len(_KEYS_SEEN) < KEYS_SEEN:
            _KEYS_SEEN[text] = text
        top = self._stack[-1]
        assert top.entries is not None
        if text in top.entries:
            first = top.entries[text][0].line
            self._refuse(line, column, f"`{shown_key(text)}` is here twice; first in line {first}")
        top.key = (text, Key(self._file, line, column))

    def _decorations(self, event: Any, line: int, column: int) -> None:
        if event.anchor is not None:
            self._refuse(line, column, f"an anchor (&{event.anchor}); use `extends:` instead")
        if event.tag is not None:
            self._refuse(line, column, "a tag (!); write the plain value")

    def _place(self, node: Node) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES and not self.problems.fatal:
            message = f"more than {MAX_NODES} values in one file; split it"
            self.problems.add(node.line, node.column, message, fatal=True)
            self._sound = False
        if not self._stack:
            self._root = node
            return
        top = self._stack[-1]
        if top.entries is None:
            top.items.append(node)
        elif top.key is None:
            top.key = ("", Key(self._file, node.line, node.column))  # A complex key, refused above.
        else:
            text, key = top.key
            top.key = None
            if text not in top.entries:
                top.entries[text] = (key, node)


# -- scalars ---------------------------------------------------------------------------------------------

_NOT_TEXT = frozenset("+-.0123456789~nNtTfF")
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+\Z")
_BASED = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")


def scalar(text: str) -> tuple[str | int | float | bool | None, str | None]:
    """Give the value of a plain scalar by the YAML 1.2 core schema, and why it is refused, if it is."""
    if text == "":
        return None, None
    if text[0] not in _NOT_TEXT:
        return text, None
    if text in _NULL:
        return None, None
    if text in _BOOL:
        return _BOOL[text], None
    if _INT.match(text):
        return _bounded(int(text) if len(text) <= 20 else None, text)
    if _BASED.match(text):
        return _bounded(int(text, 0) if len(text) <= 24 else None, text)
    if _NOT_FINITE.match(text):
        return text, "infinity and NaN are no values; write a number"
    if _FLOAT.match(text):
        number = float(text) if len(text) <= 64 else math.inf
        if not math.isfinite(number):
            return text, "the number is too large; put it in quotes if it is text"
        return number, None
    return text, None


_short: Final = lru_cache(maxsize=4096)(scalar)
"""The same, remembered: numbers, sizes and switches of a fleet are few, many times over."""


def _bounded(number: int | None, text: str) -> tuple[str | int, str | None]:
    if number is None or abs(number) > MAX_INTEGER:
        return text, "the number is too large; put it in quotes if it is text"
    return number, None


_SECRET_IN_KEY: Final = re.compile(
    r"([\w-]{0,60}(?:key|token(?!s|iz)|secret|passw|credential|authorization)[\w-]{0,20}[\s=:]{1,8})\S.*",
    re.IGNORECASE | re.DOTALL,
)


def shown_key(text: str) -> str:
    """Show a key that a user wrote: bounded, without a secret in it, safe on a terminal."""
    seen = "".join(c if c.isprintable() else "�" for c in text[:60])
    return without_secret(seen) + ("…" if len(text) > 60 else "")


def without_secret(text: str) -> str:
    """Take away what follows a secret's name where a key or path should end: `password=…` was meant for somewhere else (S17)."""
    return _SECRET_IN_KEY.sub(r"\1***", text[:4096])

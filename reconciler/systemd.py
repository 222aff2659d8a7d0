"""Unit text: written from values, and read back to the same values.

One encoder writes every argument and every assignment, so that no byte of a spec is ever read by
systemd as syntax (S18): `argv_of(parse_unit(server_unit(x)))` is `x.argv` for every argv that can be
written at all, and what cannot be written is refused. The rules are those of systemd's own parser
(words, C escapes, `%` specifiers, `$` expansion), tried against systemd itself by the lab test.

Pure, and knows no engine: what to run comes as a `ServerUnit`. The guard's and the tick's units are in
`helper/acts.py`, which must be standard library alone.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reconciler.core.errors import ReconcilerError
from reconciler.core.masking import masked

LINE_MAX = 1024 * 1024 - 4096
"""systemd reads at most 1 MiB into one logical line (LONG_LINE_MAX); a longer one breaks the unit."""

STARTS_PER_WINDOW = 3
"""The first start and two retries: a crash at load is not cured by a fourth try, and each try may eat
what the one before left on the GPU."""

UNIT_NAME = re.compile(r"[A-Za-z0-9:_.@\\-]{1,240}\.service")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}\$?|[0-9]{1,10}")


class UnitTextError(ReconcilerError):
    """A value cannot be written into a unit, or a unit's text is not what this module writes."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a unit: its name, and its assignments in order (a key may come again)."""

    name: str
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A unit as text says it. Values are logical lines: still quoted, without continuations."""

    header: tuple[str, ...]
    sections: tuple[Section, ...]

    def values(self, section: str, key: str) -> tuple[str, ...]:
        """Return every value of a key, in order."""
        return tuple(
            value
            for part in self.sections
            if part.name == section
            for name, value in part.entries
            if name == key
        )


@dataclass(frozen=True, slots=True)
class ServerUnit:
    """All that decides the text of one server's unit.

    `ready_s` is how long a start may take before the controller gives up on it; here it only sizes the
    window of the start limit. `credentials` are files that systemd hands to the process as
    `/run/credentials/<unit>/<name>` whatever the user and whoever may read the original: so the
    state directory can stay closed to the engine's user.
    """

    server: str
    unit: str
    revision: str
    description: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    stop_s: float
    ready_s: float
    user: str | None = None
    working_directory: str | None = None
    environment_file: str | None = None
    credentials: Mapping[str, str] | None = None
    group_id: int | None = None
    restart_s: float = 5.0
    no_new_privileges: bool = True


# -- the server's unit ---------------------------------------------------------------------------------


def server_unit(unit: ServerUnit) -> str:
    """Return the text of a server's unit.

    Raises:
        UnitTextError: A value cannot be written so that systemd reads exactly it.
    """
    guard = f"reconciler-guard@{guard_instance(unit.unit)}.service"
    return render_unit(
        UnitFile(
            header=_header(unit),
            sections=(
                Section(
                    "Unit",
                    (
                        ("Description", plain_text(unit.description)),
                        # The guard proves that the GPUs are free before each start, also before those
                        # that systemd makes by itself; a guard that fails leaves this unit inactive.
                        ("Requires", guard),
                        ("After", f"{guard} network-online.target"),
                        ("Wants", "network-online.target"),
                        ("StartLimitIntervalSec", seconds(start_limit_window_s(unit))),
                        ("StartLimitBurst", str(STARTS_PER_WINDOW)),
                    ),
                ),
                Section("Service", tuple(_service(unit))),
                Section("Install", (("WantedBy", "multi-user.target"),)),
            ),
        )
    )


def unit_environment(unit: ServerUnit) -> tuple[str, ...]:
    """Return the unit's whole `Environment=` as systemd must report it, sorted: our marks included."""
    marks = {"RECONCILER_SERVER": unit.server, "SPT_NOENV": "1"}
    for name, value in marks.items():
        if unit.environment.get(name, value) != value:
            raise UnitTextError(
                f"{name} is this tool's own mark and cannot be set to something else"
            )
    return tuple(f"{k}={v}" for k, v in sorted({**unit.environment, **marks}.items()))


def start_limit_window_s(unit: ServerUnit) -> float:
    """Say how long the window of the start limit must be so that the limit can trip at all.

    A server that dies at the very end of loading starts anew every `ready + restart + stop` seconds:
    loading, the wait, and the slowest clean-up of what the dead main process left. The start that is to
    be refused (number STARTS_PER_WINDOW + 1) comes STARTS_PER_WINDOW such turns after the first, and
    must still lie inside the window. systemd's defaults (5 starts in 10 s) with RestartSec=10 never
    trip: that unit loops for ever.
    """
    turn = unit.ready_s + unit.restart_s + unit.stop_s
    return STARTS_PER_WINDOW * turn + 60.0


def guard_instance(unit: str) -> str:
    """Return the unit's name without `.service`, refusing what is no service's name."""
    if not UNIT_NAME.fullmatch(unit):
        raise UnitTextError(f"{unit!r} is not the name of a service unit")
    return unit.removesuffix(".service")


def unit_diff(old: str, new: str, *, old_name: str = "live", new_name: str = "desired") -> str:
    """Return the unified difference of two unit texts, empty when they are equal. Secrets are masked: a stranger's unit may hold some."""
    lines = difflib.unified_diff(
        masked(old).splitlines(),
        masked(new).splitlines(),
        fromfile=old_name,
        tofile=new_name,
        lineterm="",
    )
    return "\n".join(lines)


def _header(unit: ServerUnit) -> tuple[str, ...]:
    return (
        f"Made by reconcile for the server {plain_text(unit.server)}; do not edit.",
        f"Revision {plain_text(unit.revision)}.",
        "To change it, change the server's spec and run: reconcile",
    )


def _service(unit: ServerUnit) -> Iterable[tuple[str, str]]:
    yield "Type", "exec"
    if unit.user is not None:
        if not _USER_NAME.fullmatch(unit.user):
            raise UnitTextError(f"{unit.user!r} is not a user's name")
        yield "User", unit.user
    if unit.group_id is not None:
        # Survives setproctitle and setsid: with it an escaped worker can be proven ours.
        yield "SupplementaryGroups", str(unit.group_id)
    if unit.working_directory is not None:
        yield "WorkingDirectory", path_text(unit.working_directory)
    yield "ExecStart", exec_line(unit.argv)
    for assignment in unit_environment(unit):
        name, _, value = assignment.partition("=")
        yield "Environment", environment_line(name, value)
    if unit.environment_file is not None:
        # The dash: a missing file is no reason to fail here; the engine says that its key is missing.
        yield "EnvironmentFile", f"-{path_text(unit.environment_file)}"
    for name, source in sorted((unit.credentials or {}).items()):
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
            raise UnitTextError(f"{name!r} is not the name of a credential")
        # Without a path systemd looks for it by its name, and starts nothing where there is none.
        yield "LoadCredential", f"{name}:{path_text(source)}" if source else name
    # The second mark: the mount namespace of an escaped worker is the main process's, not the host's.
    yield "PrivateMounts", "yes"
    yield "Restart", "on-failure"
    yield "RestartSec", seconds(unit.restart_s)
    # Loading takes minutes and is watched by the controller's own deadline.
    yield "TimeoutStartSec", "infinity"
    yield "TimeoutStopSec", seconds(unit.stop_s)
    # TERM goes to the main process alone: engines drain with their workers alive, and a worker that is
    # told to end at once would cut the requests that the main process still waits for. The moment main
    # is gone, the rest of the group is killed, so no worker outlives its parent unseen.
    yield "KillMode", "mixed"
    yield "SendSIGKILL", "yes"
    # One rank killed for memory leaves the others waiting in a collective: the whole unit ends.
    yield "OOMPolicy", "stop"
    yield "LimitNOFILE", "1048576"
    yield "LimitMEMLOCK", "infinity"
    if unit.no_new_privileges:
        yield "NoNewPrivileges", "yes"


# -- one encoder ---------------------------------------------------------------------------------------

_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def quoted(text: str, *, dollar: str) -> str:
    """Return `text` in double quotes, as one word that systemd reads back exactly.

    `dollar` is what a `$` becomes: `$$` where variables are expanded (Exec lines), `$` where not
    (Environment).
    """
    _refuse_unwritable(text)
    out = []
    for char in text:
        if char == "$":
            out.append(dollar)
        elif char in _ESCAPES:
            out.append(_ESCAPES[char])
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            out.append(f"\\x{ord(char):02x}")
        else:
            out.append(char)
    return f'"{"".join(out)}"'


def exec_line(argv: Iterable[str]) -> str:
    """Return the value of an Exec key for this argv.

    The program's path must be absolute and plain, for two reasons: the prefixes `- @ + ! :` are then
    impossible, and systemd does not expand `$` in the path as it does in arguments.
    """
    words = tuple(argv)
    if not words:
        raise UnitTextError("an empty command cannot be started")
    program = path_text(words[0])
    if "$" in program or '"' in program or "'" in program:
        raise UnitTextError(f"the program's path {words[0]!r} holds a quote or a dollar sign")
    line = " ".join([f'"{program}"', *(quoted(word, dollar="$$") for word in words[1:])])
    if len(line.encode()) > LINE_MAX:
        raise UnitTextError("the command is longer than systemd reads in one line (1 MiB)")
    return line


def environment_line(name: str, value: str) -> str:
    """Return the value of `Environment=` for one variable."""
    if not VARIABLE_NAME.fullmatch(name):
        raise UnitTextError(f"{name!r} is not the name of an environment variable")
    line = quoted(f"{name}={value}", dollar="$")
    if len(line.encode()) > LINE_MAX:
        raise UnitTextError(f"the value of {name} is longer than systemd reads in one line (1 MiB)")
    return line


def path_text(path: str) -> str:
    """Return an absolute, plain path for a key that takes a path and no quotes."""
    _refuse_unwritable(path)
    if not path.startswith("/"):
        raise UnitTextError(f"{path!r} is not an absolute path")
    parts = path[1:].split("/")
    if path != "/" and any(part in {"", ".", ".."} for part in parts):
        raise UnitTextError(f"{path!r} is not a plain path (no //, no . or .., no / at its end)")
    if path != path.strip() or "\\" in path or any(ord(c) < 0x20 or ord(c) == 0x7F for c in path):
        raise UnitTextError(
            f"{path!r} holds a backslash, a control character or blanks at its ends"
        )
    return path.replace("%", "%%")


def plain_text(text: str) -> str:
    """Return text for people (a description, a comment) as one line without syntax."""
    _refuse_unwritable(text)
    printable = "".join(c if c.isprintable() and c != "\\" else "?" for c in text)
    return printable.strip().replace("%", "%%")


def seconds(value: float) -> str:
    """Return a time span; whole seconds where they suffice, milliseconds else."""
    if not math.isfinite(value) or value < 0:
        raise UnitTextError(f"{value!r} is not a time span")
    return f"{int(value)}s" if value == int(value) else f"{round(value * 1000)}ms"


def _refuse_unwritable(text: str) -> None:
    if "\0" in text:
        raise UnitTextError("a value holds a NUL byte, which no argument or variable can carry")
    for char in text:
        code = ord(char)
        # systemd drops a whole line that holds one of these: not valid, or not a character at all.
        if 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            raise UnitTextError(f"a value holds U+{code:04X}, which systemd does not read as text")


# -- text ----------------------------------------------------------------------------------------------


def render_unit(unit: UnitFile) -> str:
    """Return the text of a unit. A long command gets one line for each flag, so a diff shows the flag."""
    lines = [f"# {line}".rstrip() for line in unit.header]
    for section in unit.sections:
        lines += ["", f"[{section.name}]"]
        for key, value in section.entries:
            if "\n" in value or value.endswith("\\"):
                raise UnitTextError(f"the value of {key} is not one line")
            lines.append(f"{key}={_wrapped(value) if key.startswith('Exec') else value}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _wrapped(value: str) -> str:
    # Inside an encoded word a quote is always escaped, so quote, space, quote is always a border.
    # systemd turns the backslash into one space and drops the blanks that begin the next line.
    return value.replace('" "-', '"\\\n    "-')


def parse_unit(text: str) -> UnitFile:
    """Read a unit's text as systemd joins its lines: comments, continuations, sections.

    Raises:
        UnitTextError: An assignment stands outside a section, or a line is none.
    """
    header: list[str] = []
    sections: list[tuple[str, list[tuple[str, str]]]] = []
    for line in _logical_lines(text, header):
        if line.startswith("[") and line.endswith("]"):
            sections.append((line[1:-1], []))
            continue
        key, equals, value = line.partition("=")
        if not equals or not sections:
            raise UnitTextError(f"{line[:80]!r} is no assignment inside a section")
        sections[-1][1].append((key.rstrip(), value.strip(" \t\r")))
    return UnitFile(tuple(header), tuple(Section(name, tuple(items)) for name, items in sections))


def _logical_lines(text: str, header: list[str]) -> Iterable[str]:
    pending = ""
    begun = False
    for raw in text.split("\n"):
        line = raw.lstrip(" \t\r")
        if line[:1] in {"#", ";"}:
            if not begun and not pending:
                header.append(line[1:].strip())
            continue
        joined = pending + line
        backslashes = len(joined) - len(joined.rstrip("\\"))
        if backslashes % 2 == 1:
            pending = joined[:-1] + " "
            continue
        pending = ""
        if joined.strip():
            begun = True
            yield joined.strip(" \t\r")
    if pending.strip():
        yield pending.strip(" \t\r")


def carried_over(text: str, live: str, keys: Iterable[str]) -> str:
    """Return a unit's text with some keys as they stand in another text: there with its values, gone where it has none."""
    wanted = frozenset(keys)
    here, there = parse_unit(text), parse_unit(live)
    sections = []
    for section in here.sections:
        kept = [e for e in section.entries if e[0] not in wanted]
        others = [e for s in there.sections if s.name == section.name for e in s.entries]
        taken = [e for e in others if e[0] in wanted]
        sections.append(Section(section.name, (*kept, *taken)))
    return render_unit(UnitFile(here.header, tuple(sections)))


def same_but_for(one: str, other: str, keys: Iterable[str]) -> bool:
    """Say whether two texts differ in nothing but these keys; one that cannot be read is not the same."""
    wanted = frozenset(keys)
    try:
        sides = [
            [(s.name, [e for e in s.entries if e[0] not in wanted]) for s in parse_unit(t).sections]
            for t in (one, other)
        ]
    except UnitTextError:
        return False
    return sides[0] == sides[1]


def argv_of(unit: UnitFile) -> tuple[str, ...]:
    """Return the argv that the unit starts. Raises UnitTextError where it is not one plain command."""
    lines = unit.values("Service", "ExecStart")
    if len(lines) != 1:
        raise UnitTextError(f"the unit has {len(lines)} ExecStart lines, not one")
    return parse_exec(lines[0])


def environment_of(unit: UnitFile) -> dict[str, str]:
    """Return what the unit's `Environment=` lines set, later ones over earlier ones."""
    found: dict[str, str] = {}
    for line in unit.values("Service", "Environment"):
        if not line:
            found.clear()  # An empty assignment resets the list.
            continue
        for word in split_words(line):
            name, equals, value = _without_specifiers(word).partition("=")
            if not equals or not VARIABLE_NAME.fullmatch(name):
                raise UnitTextError(f"{word[:80]!r} sets no variable")
            found[name] = value
    return found


def parse_exec(line: str) -> tuple[str, ...]:
    """Read an Exec value to the argv that runs, where that does not hang on anything outside the line.

    Raises:
        UnitTextError: A prefix, a specifier, a variable or a second command.
    """
    if re.search(r"(?:^|\s);(?:\s|$)", _without_quoted(line)):
        raise UnitTextError("the line holds more than one command")
    words = split_words(line)
    if not words or not words[0].startswith("/"):
        raise UnitTextError("the command does not begin with an absolute path")
    return (
        _without_specifiers(words[0]),
        *(_without_variables(_without_specifiers(word)) for word in words[1:]),
    )


_C_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", '"': '"', "'": "'", "s": " ",
}  # fmt: skip
_CODED = re.compile(r"x([0-9A-Fa-f]{2})|([0-7]{3})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")


def split_words(line: str) -> tuple[str, ...]:
    """Split a value into words as systemd does: quotes of both kinds, C escapes inside and outside them.

    Raises:
        UnitTextError: An open quote or an unknown escape; systemd refuses the unit for either.
    """
    words: list[list[str]] = []
    inside = False
    quote = ""
    at = 0
    while at < len(line):
        char, width = line[at], 1
        if char in " \t\r\n" and not quote:
            inside = False
            at += 1
            continue
        if not inside:
            words.append([])
            inside = True
        if char == "\\":
            char, width = _escape(line[at + 1 :])
            width += 1
        elif char == quote or (not quote and char in "\"'"):
            quote = "" if quote else char
            char = ""
        words[-1].append(char)
        at += width
    if quote:
        raise UnitTextError("a quote is not closed")
    return tuple("".join(word) for word in words)


def _escape(rest: str) -> tuple[str, int]:
    if rest[:1] in _C_ESCAPES:
        return _C_ESCAPES[rest[:1]], 1
    match = _CODED.match(rest)
    if match is None:
        raise UnitTextError(f"\\{rest[:4]} is no escape that systemd knows")
    byte, octal, short, long = match.groups()
    code = int(octal, 8) if octal else int(byte or short or long, 16)
    if code == 0 or code > 0x10FFFF:
        raise UnitTextError(f"\\{match.group()} is no character")
    return chr(code), match.end()


def _without_quoted(line: str) -> str:
    return re.sub(r"\\.|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", "x", line)


def _without_specifiers(word: str) -> str:
    if re.search(r"%", word.replace("%%", "")):
        raise UnitTextError(f"{word[:80]!r} holds a specifier, whose value only systemd knows")
    return word.replace("%%", "%")


def _without_variables(word: str) -> str:
    if "$" in word.replace("$$", ""):
        raise UnitTextError(f"{word[:80]!r} holds a variable, whose value only systemd knows")
    return word.replace("$$", "$")

"""One line of a log taken apart: who said it, how loudly, and what was said.

A serving engine's line comes wrapped in whatever carried it: journald in any of its output forms, docker, podman, compose,
dmesg, then the engine's own time stamps, ranks and levels. Judging wants the words alone (`text`), and people want the line
as it stands in the file, without the carrier (`shown`). `core/diagnose.py` reads logs with this; nothing here judges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

LINE_MAX: Final = 16_384
"""How much of one line is looked at: what decides stands at its front, and a prompt of 10 MB is no line to read."""


PACKED_MAX: Final = 65_536
"""The same for a line that is packed as JSON, where journald may write each byte as a number."""


class Source(Enum):
    """Who wrote a line."""

    ENGINE = "engine"
    KERNEL = "kernel"
    SYSTEMD = "systemd"


class Level(Enum):
    """How a line calls itself; `NONE` where it does not say."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `errors` are the names of exceptions in front of `text`; `inner` lines belong to the one above."""

    number: int
    shown: str
    text: str
    errors: tuple[str, ...]
    level: Level
    source: Source
    inner: bool
    stamped: bool
    bracketed: bool

    @property
    def loud(self) -> bool:
        """Whether the line itself says that something went wrong."""
        return bool(self.errors) or self.level is Level.ERROR


_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def lines_of(number: int, raw: str) -> Iterator[Line]:
    """Read one physical line: most often one line, several where journald or docker packed them as JSON."""
    cut = raw[: PACKED_MAX if raw.startswith("{") else LINE_MAX]
    plain = _CONTROLS.sub(
        "", _ESCAPES.sub("", cut.rsplit("\r", 1)[-1] if "\r" in cut.rstrip("\r") else cut)
    )
    if plain.startswith("{") and plain.endswith("}") and (packed := _packed(plain)) is not None:
        source, message = packed
        for part in message.split("\n"):
            if part.strip():
                yield _line(
                    number,
                    source,
                    _CONTROLS.sub("", _ESCAPES.sub("", part[:LINE_MAX])),
                    certain=True,
                )
        return
    source, message, certain = _unwrapped(plain.rstrip())
    yield _line(number, source, message, certain=certain)


# -- what carried it ------------------------------------------------------------------------------------


def _packed(text: str) -> tuple[Source, str] | None:
    """Read `journalctl -o json`, or docker's file form; None for any other JSON."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, Mapping):
        return None
    message = entry.get("MESSAGE", entry.get("log") if "stream" in entry else None)
    if isinstance(message, list):
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode(
            "utf-8", "replace"
        )
    if not isinstance(message, str):
        return None
    ident = entry.get("SYSLOG_IDENTIFIER")
    if entry.get("_TRANSPORT") == "kernel" or ident == "kernel":
        return Source.KERNEL, message
    is_manager = ident == "systemd" and str(entry.get("_PID", "1")) == "1"
    return (Source.SYSTEMD if is_manager else Source.ENGINE), message


_DAY: Final = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK: Final = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_ISO: Final = rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?"
_IDENT: Final = r"(?P<ident>[^\s:\[\]]+)"
_SYSLOG: Final = re.compile(
    rf"{_MONTH} [ \d]\d (?:\d{{4}} )?{_CLOCK} \S+ {_IDENT}(?:\[(?P<pid>\d+)\])?: ?"
)
_JOURNAL: Final = re.compile(
    rf"(?:{_ISO}|{_DAY} \d{{4}}-\d\d-\d\d {_CLOCK} \S+|\[ *\d+\.\d+\]|\d{{9,}}\.\d+) [\w.-]+ "
    rf"{_IDENT}(?:\[(?P<pid>\d+)\]|(?<=kernel)): ?"
)
_DMESG: Final = re.compile(
    rf"(?:\[ *\d+\.\d{{6}}\]|\[{_DAY} {_MONTH} [ \d]\d {_CLOCK} \d{{4}}\]|kern  ?:\w+ *: \[ *\d+\.\d+\]) "
)
_CONTAINER: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?"
)
_COMPOSE: Final = re.compile(r"[a-z0-9][\w.-]* +\| ")


def _unwrapped(text: str) -> tuple[Source, str, bool]:
    """Take the carrier off. The last says whether the carrier names the writer, so that the words need not be asked."""
    for form in (_SYSLOG, _JOURNAL):
        if found := form.match(text):
            rest, ident = text[found.end() :], found["ident"]
            if ident == "kernel":
                dmesg = _DMESG.match(rest)
                return Source.KERNEL, rest[dmesg.end() :] if dmesg else rest, True
            manager = ident.rpartition("/")[2] == "systemd" and found["pid"] in {"1", None}
            return (Source.SYSTEMD if manager else Source.ENGINE), rest, True
    if found := _DMESG.match(text):
        return Source.KERNEL, text[found.end() :], True
    for form in (_COMPOSE, _CONTAINER):
        if found := form.match(text):
            text = text[found.end() :]
    return Source.ENGINE, text, False


# -- what the engine put in front -------------------------------------------------------------------------

_LEVELS: Final = {
    "D": Level.INFO, "I": Level.INFO, "DEBUG": Level.INFO, "INFO": Level.INFO, "TRACE": Level.INFO,
    "W": Level.WARNING, "WARN": Level.WARNING, "WARNING": Level.WARNING,
    "E": Level.ERROR, "F": Level.ERROR, "ERROR": Level.ERROR, "CRITICAL": Level.ERROR, "FATAL": Level.ERROR,
}  # fmt: skip
_WORD: Final = r"(?P<level>TRACE|DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
_FILE: Final = r"\[?[\w./<>-]+:\d+\]"
_STAMPS: Final = tuple(
    re.compile(form)
    for form in (
        rf"{_WORD} (?:\d\d-\d\d |{_ISO} )?(?:{_CLOCK} )?{_FILE} ?",  # vLLM
        rf"{_WORD}: +",  # uvicorn, logging.basicConfig
        rf"{_ISO}(?: - [\w.]+)? - {_WORD} - (?:[\w.]+: )?",  # logging's own
        rf"\[(?:\d{{4}}-)?(?:\d\d-\d\d[T ])?{_CLOCK}Z?(?: [A-Z]{{2,6}}\d+)*\] ?",  # SGLang
        rf"\[(?P<level>[DIWEF])\d{{3,4}} {_CLOCK} [\w./-]+:\d+\] ?(?:\[[\w ]{{1,40}}\] ?)?",  # glog: torch, c10d
        rf"{_ISO} ?",
        rf"{_CLOCK} ",
        r"\d+\.\d\d\.\d{3}\.\d{3} (?P<level>[DIWE]) ",  # llama.cpp
        r"(?:srv|slot|main|que|res|cmn|llama_\w+|common_\w+|ggml_\w+) +\w+: +(?=\S)",  # llama.cpp's parts
        r"\S{1,80}:\d+:\d+ \[\d+\] (?:[\w./-]+:\d+ )?NCCL (?P<level>WARN|INFO|TRACE) ",
        r"\[TRT-LLM\] (?:\[(?P<level>[DIWEF])\] )?",
        r"[\w./-]{1,200}\.py:\d+: ",  # warnings.warn
    )
)
_TAGS: Final = tuple(
    re.compile(form)
    for form in (
        r"\((?:[A-Za-z_][\w:.-]*)(?: rank=\d+)?(?:[ ,]+pid=\d+)?(?:, ip=[\d.a-f:]+)?\)(?: |(?=[A-Z]))",
        r"\[rank ?\d+\]:? ?",
        r"(?:rank|Rank) ?\d+: (?=\S)",
    )
)
_ERROR_NAME: Final = re.compile(
    r"(?:[A-Za-z_]\w*(?:::|\.))*(?P<name>[A-Z]\w*(?:Error|Exception|Warning|Exit|Interrupt)|Exception)(?:\([A-Z]\w*\))?: "
)
_BARE_NAME: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*Error)$")
_PYDANTIC: Final = re.compile(r" {1,4}Value error, |Value error, ")
_WHAT: Final = re.compile(r" {1,4}what\(\):\s+")


def _line(number: int, source: Source, message: str, *, certain: bool) -> Line:
    """Take the engine's own prefixes off, then the names of exceptions."""
    shown = message.strip()
    text, level, stamped, bracketed = message, Level.NONE, False, False
    for _ in range(6):
        if tag := next((found for form in _TAGS if (found := form.match(text))), None):
            text = text[tag.end() :]
            continue
        stamp = next((found for form in _STAMPS if (found := form.match(text))), None)
        if stamp is None:
            break
        stamped = True
        bracketed = bracketed or text.startswith("[")
        if word := stamp.groupdict().get("level"):
            level = _LEVELS[word]
        text = text[stamp.end() :]
    if source is Source.ENGINE and not certain and text.startswith("NVRM: "):
        source = Source.KERNEL  # Kernel lines that somebody pasted beside the engine's.
    inner = text[:2].isspace() if len(text) > 1 else False
    errors: list[str] = []
    for form in (_PYDANTIC, _WHAT):
        if found := form.match(text):
            text, inner = text[found.end() :], False
            errors.append("ValueError")
    text = text.strip()
    while found := _ERROR_NAME.match(text):
        errors.append(found["name"])
        text = text[found.end() :]
    if not errors and (found := _BARE_NAME.match(text)):
        errors.append(found["name"])
    if errors and all(name.endswith("Warning") for name in errors):
        errors, level = [], Level.WARNING if level is Level.NONE else level
    return Line(number, shown, text, tuple(errors), level, source, inner, stamped, bracketed)

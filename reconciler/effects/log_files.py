"""Read a log of any size line by line: a file, a pipe, standard input. Memory stays bounded whatever is in it."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from reconciler.core.errors import UsageError

CHUNK: Final = 1 << 20
LINE_MAX: Final = 1 << 16
"""More of one line is read and dropped: what decides stands at the front."""

SILENCE_S: Final = 60.0
"""How long a pipe may say nothing: a producer that is slower has died or waits for something else."""

_PACKED: Final = {b"\x1f\x8b": "zcat", b"BZ": "bzcat", b"\xfd7": "xzcat", b"\x28\xb5": "zstdcat"}


def log_lines(name: str) -> Iterator[bytes]:
    """Give the lines of a log, `-` for standard input, each without its end and cut at `LINE_MAX`.

    Raises:
        UsageError: There is no such log, it cannot be read, or it is not text.
    """
    descriptor = _opened(name)
    try:
        yield from _lines(_chunks(descriptor, name), name)
    finally:
        if descriptor != 0:
            os.close(descriptor)


def _opened(name: str) -> int:
    if name == "-":
        return sys.stdin.fileno()
    try:
        # A pipe without a writer must not hold us at the door.
        descriptor = os.open(Path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{name} cannot be read: {why}; nothing was diagnosed") from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return descriptor
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a device"
    raise UsageError(f"{name} is {kind}, not a log; nothing was diagnosed")


def _chunks(descriptor: int, name: str) -> Iterator[bytes]:
    patient = stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor)
    heard = False
    while True:
        if not patient and not select.select([descriptor], [], [], SILENCE_S)[0]:
            if heard:
                sys.stderr.write(
                    f"reconcile: {name} has said nothing for {SILENCE_S:.0f} s; judged by what came before\n"
                )
                return
            raise UsageError(
                f"{name} has said nothing for {SILENCE_S:.0f} s: nobody writes to it; nothing was diagnosed"
            )
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            continue
        except OSError as error:
            raise UsageError(
                f"{name} cannot be read: {error.strerror}; nothing was diagnosed"
            ) from error
        if not chunk:
            return
        heard = True
        yield chunk


def _lines(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    kept, first = b"", True
    for chunk in chunks:
        if first:
            _refuse_binary(chunk[:65_536], name)
            first = False
        *whole, rest = chunk.split(b"\n")
        if whole:
            yield (kept + whole[0])[:LINE_MAX]
            yield from (line[:LINE_MAX] for line in whole[1:])
            kept = rest[:LINE_MAX]
        else:
            kept = kept if len(kept) >= LINE_MAX else (kept + rest)[:LINE_MAX]
    if kept:
        yield kept


def _refuse_binary(head: bytes, name: str) -> None:
    """Refuse what is no text; a few stray zero bytes are what a crash leaves in a log, and are fine."""
    tool = _PACKED.get(head[:2])
    if tool is not None and head[2:3] and not head[2:3].isalnum():
        raise UsageError(f"{name} is compressed: try `{tool} {name} | reconcile diagnose -`")
    if head.count(0) * 20 > len(head):
        raise UsageError(f"{name} is not text; nothing was diagnosed")

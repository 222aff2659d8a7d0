"""Specs in a directory (or one file): read without following links, bounded, as one consistent snapshot.

Every `.yaml` and `.yml` file below the root counts, but for names that begin with a dot. A link is refused
rather than followed, also one that stays inside: what a commit shows should be what is read. The directory is
listed before and after; when something moved meanwhile (an editor saved, a checkout is under way) it is read
again, and in the end refused rather than mixed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reconciler.core.errors import Problem, SpecError
from reconciler.core.yaml_text import MAX_BYTES
from reconciler.sources.base import Snapshot, version_of

MAX_FILES: Final = 10_000
"""One server a file in the largest fleet that is measured (`architecture.md` section 7)."""
MAX_TOTAL_BYTES: Final = 128 * 1024 * 1024
"""Ten times what those files hold; what is read is kept in memory."""
MAX_ENTRIES: Final = 200_000
"""Looked at in all, so that a directory of something else ends in an error and not in an hour."""
MAX_DEPTH: Final = 32
ATTEMPTS: Final = 3
"""A save takes milliseconds; what changes three times over is being written all the time."""
PAUSE_S: Final = 0.05
"""Between two looks at a file that is being saved."""
SUFFIXES: Final = (".yaml", ".yml", ".age", ".sops.json")
"""Of specs, and of the encrypted files that they name (`core/sealed.py`)."""


@dataclass(frozen=True, slots=True)
class Directory:
    """The source for one directory or file.

    With `whole`, as a daemon reads that comes in the moment of a save, a file that somebody has open for writing is not read yet.
    """

    path: Path
    whole: bool = False

    def snapshot(self) -> Snapshot:
        """Read every spec file below the path.

        Raises:
            SpecError: The path is not there, holds no spec, is too large, or does not hold still.
        """
        for _ in range(ATTEMPTS):
            snapshot = _read_once(self.path, whole=self.whole)
            if snapshot is not None:
                return snapshot
            if self.whole:
                time.sleep(PAUSE_S)
        message = (
            "the files change while they are read; nothing was read. Try again when they hold still"
        )
        raise SpecError([Problem(str(self.path), 0, 0, message)])


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file as the listing shows it; two equal listings around a reading make it consistent."""

    path: Path
    identity: tuple[int, ...]
    refused: str | None = None


def _read_once(root: Path, *, whole: bool) -> Snapshot | None:
    before = _listing(root)
    files: dict[str, bytes] = {}
    unread: list[Problem] = []
    total = 0
    for entry in before:
        if entry.refused:
            unread.append(Problem(str(entry.path), 0, 0, entry.refused))
            continue
        content = _content(entry.path, whole=whole)
        if content is None:
            return None
        if isinstance(content, Problem):
            unread.append(content)
            continue
        total += len(content)
        if total > MAX_TOTAL_BYTES:
            raise _wrong(root, f"holds more than {MAX_TOTAL_BYTES // 2**20} MiB of specs")
        files[str(entry.path)] = content
    if _listing(root) != before:
        return None
    return Snapshot(str(root), files, tuple(unread), version_of(str(root), files))


def _listing(root: Path) -> list[_Entry]:
    """List what counts, sorted; the root itself may be a link, since the operator named it."""
    try:
        found = root.stat()
    except OSError as error:
        raise _wrong(root, f"cannot be read: {os.strerror(error.errno or 0)}") from error
    if stat.S_ISREG(found.st_mode):
        return [_Entry(root.resolve() if root.is_symlink() else root, _identity(found))]
    if not stat.S_ISDIR(found.st_mode):
        raise _wrong(root, "is neither a directory nor a file")
    entries = sorted(_walk(root, root), key=lambda entry: entry.path)
    if not entries:
        raise _wrong(
            root, "holds no .yaml or .yml file; nothing is planned, and nothing is removed"
        )
    return entries


def _walk(root: Path, top: Path) -> Iterator[_Entry]:
    """Yield the spec files below, and what stands in their place."""
    looked_at, specs = 0, 0
    waiting = [(top, 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(folder) as listing:
                for item in listing:
                    looked_at += 1
                    if looked_at > MAX_ENTRIES:
                        raise _wrong(
                            root,
                            f"holds more than {MAX_ENTRIES} files; name the folder of the specs",
                        )
                    entry = _entry(item)
                    if entry is not None:
                        specs += 1
                        yield entry
                    elif _is_folder(item):
                        waiting.append((Path(item.path), depth + 1))
        except OSError as error:
            yield _Entry(folder, (), f"cannot be read: {os.strerror(error.errno or 0)}")
        if specs > MAX_FILES:
            raise _wrong(root, f"holds more than {MAX_FILES} spec files")
        if depth > MAX_DEPTH:
            raise _wrong(root, f"is more than {MAX_DEPTH} folders deep")


def _entry(item: os.DirEntry[str]) -> _Entry | None:
    """Judge one name: a spec, something that stands in a spec's place, or neither."""
    if item.name.startswith("."):
        return None
    path = Path(item.path)
    is_spec = item.name.endswith(SUFFIXES)
    if item.is_symlink():
        if is_spec or item.is_dir():
            return _Entry(path, (), "is a link, which is not followed; put the file itself here")
        return None
    if not is_spec or item.is_dir(follow_symlinks=False):
        return None
    if not item.is_file(follow_symlinks=False):
        return _Entry(path, (), "is not a regular file")
    return _Entry(path, _identity(item.stat(follow_symlinks=False)))


def _is_folder(item: os.DirEntry[str]) -> bool:
    return not item.name.startswith(".") and item.is_dir(follow_symlinks=False)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _content(path: Path, *, whole: bool) -> bytes | Problem | None:
    """Read one file without following a link and without waiting on a pipe; at most a byte too many. None: being written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Problem(str(path), 0, 0, f"cannot be read: {os.strerror(error.errno or 0)}")
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return Problem(str(path), 0, 0, "is not a regular file")
        if whole and _being_written(descriptor):
            return None
        try:
            return file.read(MAX_BYTES + 1)
        except OSError as error:
            return Problem(str(path), 0, 0, f"cannot be read: {os.strerror(error.errno or 0)}")


def _being_written(descriptor: int) -> bool:
    """Say whether somebody has the file open for writing: then the kernel grants no read lease on it.

    A file system or user without leases says nothing, and the two listings have to do. The signal by which the kernel would
    tell us of a writer that comes in this instant is one that is ignored.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False


def _wrong(root: Path, message: str) -> SpecError:
    return SpecError([Problem(str(root), 0, 0, message)])

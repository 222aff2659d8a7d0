"""Files as the helper treats them: replaced whole or not at all, and never through a symbolic link.

Part of the shipped helper (see `outputs.py`); `host.py` is its only caller.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from reconciler.helper.machine import Busy

FILE_BYTES_MAX = 4 << 20
_WORLD_READABLE = ("/etc/", "/run/systemd/system", "/usr/local/lib/")
_LOCK_POLL_S = 0.02


def read_file(path: str) -> Optional[bytes]:
    """Return a regular file's content, None when it is missing; OSError for a link or one over 4 MiB."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return _read_capped(descriptor, path)
    finally:
        os.close(descriptor)


def kernel_text(path: str) -> str:
    """Return the first MiB of a file of the kernel's as text; nothing where it cannot be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read(1 << 20)
    return ""


def _read_capped(descriptor: int, path: str) -> bytes:
    chunks: List[bytes] = []
    size = 0
    while True:
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        size += len(chunk)
        if size > FILE_BYTES_MAX:
            raise OSError(f"{path} is larger than {FILE_BYTES_MAX} bytes")


def make_parents(path: str) -> None:
    """Make the missing directories above a path: 0755 where others must read, else 0700."""
    mode = 0o755 if path.startswith(_WORLD_READABLE) else 0o700
    parent = os.path.dirname(path)
    if os.path.isdir(parent):
        return
    make_parents(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(parent, mode)
        os.chmod(parent, mode)  # The umask is the caller's.


def replace_file(path: str, data: bytes, mode: int, uid: int, gid: int) -> None:
    """Replace a file atomically and durably; what was there stays when anything fails.

    The temporary name ends in no unit suffix, so that systemd never loads it.
    """
    make_parents(path)
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    name = os.path.basename(path)
    temporary = f".{name}.{os.urandom(6).hex()}.tmp"
    try:
        try:
            _write_new((temporary, directory), data, mode, (uid, gid))
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)
            raise
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_new(place: Tuple[str, int], data: bytes, mode: int, owner: Tuple[int, int]) -> None:
    name, directory = place
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        if owner != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, mode)
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: str, line: bytes) -> None:
    """Append one line and make it durable."""
    make_parents(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        data = line if line.endswith(b"\n") else line + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: str) -> None:
    """Remove a file durably; a missing one is fine."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)
        sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Make a directory's entries durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_directory(path: str, root: str) -> None:
    """Remove a directory that lies under `root`, following no link; a missing one is fine."""
    if os.path.normpath(path) != path or not path.startswith(root + "/"):
        raise OSError(f"{path} does not lie under {root}")
    if os.path.lexists(path):
        shutil.rmtree(path)
        sync_directory(os.path.dirname(path))


def list_directory(path: str) -> List[str]:
    """Return the sorted names in a directory; none when it is missing."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def kind_of(mode: int) -> str:
    """Return the word for a file mode: file, dir, link or other."""
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISREG(mode):
        return "file"
    return "dir" if stat.S_ISDIR(mode) else "other"


def file_kind(path: str) -> str:
    """Return what stands at a path, without following it; "missing" when nothing does."""
    try:
        return kind_of(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "missing"


def file_facts(path: str) -> Dict[str, Any]:
    """Return {kind, size, mode, uid, gid, executable, free_bytes} of what a path leads to."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"kind": "missing", "free_bytes": _free_bytes(os.path.dirname(path))}
    return {
        "kind": kind_of(found.st_mode),
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "executable": stat.S_ISREG(found.st_mode) and bool(found.st_mode & 0o111),
        "free_bytes": _free_bytes(path),
    }


def _free_bytes(path: str) -> Optional[int]:
    while path and path != "/" and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        room = os.statvfs(path or "/")
    except OSError:
        return None
    return 0 if room.f_flag & os.ST_RDONLY else room.f_bavail * room.f_frsize


@contextlib.contextmanager
def file_lock(path: str, timeout_s: float) -> Iterator[None]:
    """Hold a lock file; Busy when it is not had in time. The kernel gives it back if we die."""
    make_parents(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Busy(f"{path} is held by another") from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)

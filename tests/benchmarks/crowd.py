"""A crowd of processes, threads and open files, with holders of a card in it: `crowd.py PROCESSES THREADS DESCRIPTORS DEV`.

Prints a line once all stand, and stays. Run in a pid namespace of its own (`crowded.py` does), with which it ends. Imports
next to nothing, so that each process has some sixty mappings, as a shell or a small daemon has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CARD = os.makedev(1, 5)
"""A character device that can be opened, mapped, and read for ever: it stands for a card."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_EXIT_THREAD = {"x86_64": 60, "aarch64": 93}
_CLONE_FILES = 0x400


# -- the crowd -----------------------------------------------------------------------------------------


def crowd(processes: int, threads: int, descriptors: int, dev: str) -> None:
    """Start the crowd and the holders in it, and return once all stand."""
    ready, say = os.pipe()
    each, files = max(threads // processes, 1), max(descriptors // processes, 4)
    for _ in range(processes):
        if os.fork() == 0:
            os.close(ready)
            _member(each, files, say)
    makers = (_plain, _apart, _undead, _mapped, _renamed, _forked)
    for make in makers:
        if os.fork() == 0:
            os.close(ready)
            _holder(make, dev, say)
    os.close(say)
    said = b""
    want = processes + len(makers) + 1  # the forked one is two
    while len(said) < want:
        chunk = os.read(ready, 65536)
        assert chunk, f"only {len(said)} of {want} stood up; is there room for {threads} threads?"
        said += chunk


def _member(threads: int, files: int, say: int) -> None:
    """Be one process of the crowd: open files of all sorts, threads that sleep in the C library."""
    with contextlib.suppress(BaseException):
        kept: list[object] = []
        while len(os.listdir("/proc/self/fd")) - 1 < files:  # noqa: PTH208 - pathlib brings mappings along
            match len(kept) % 4:
                case 0:
                    kept.append(os.pipe())
                case 1:
                    kept.append(os.open(sys.executable, os.O_RDONLY))
                case 2:
                    kept.append(os.memfd_create("crowd"))
                case _:
                    kept.append(os.eventfd(0))
        _sleepers(threads - 1)
        os.write(say, b".")
        while True:
            signal.pause()
    os._exit(1)


def _sleepers(count: int) -> None:
    """Start threads without an interpreter: each is the C library's own `pause`."""
    attributes = ctypes.create_string_buffer(256)
    _LIBC.pthread_attr_init(attributes)
    _LIBC.pthread_attr_setstacksize(attributes, ctypes.c_size_t(32768))
    for _ in range(count):
        thread = ctypes.c_ulong()
        code = _LIBC.pthread_create(ctypes.byref(thread), attributes, _LIBC.pause, None)
        if code != 0:
            raise OSError(code, os.strerror(code))


def _holder(make: Callable[[str], None], dev: str, say: int) -> None:
    with contextlib.suppress(BaseException):
        make(f"{dev}/nvidia0")
        os.write(say, b".")
        if make is _undead:
            _sleepers(1)
            _LIBC.syscall(_EXIT_THREAD[os.uname().machine], 0)
        while True:
            signal.pause()
    os._exit(1)


def _plain(card: str) -> None:
    os.open(card, os.O_RDWR)


def _undead(card: str) -> None:
    os.open(card, os.O_RDWR)


def _forked(card: str) -> None:
    os.open(card, os.O_RDWR)
    os.fork()


def _renamed(card: str) -> None:
    os.mknod(f"{card}-elsewhere", stat.S_IFCHR | 0o666, CARD)
    os.open(f"{card}-elsewhere", os.O_RDWR)


def _apart(card: str) -> None:
    """Hold the card by a thread whose table the leader does not share: the leader unshares, its thread keeps it."""
    descriptor = os.open(card, os.O_RDWR)
    _sleepers(1)
    assert _LIBC.unshare(_CLONE_FILES) == 0
    os.close(descriptor)


def _mapped(card: str) -> None:
    descriptor = os.open(card, os.O_RDWR)
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    assert _LIBC.mmap(None, 4096, 3, 2, descriptor, 0) != ctypes.c_void_p(-1).value
    os.close(descriptor)


if __name__ == "__main__":
    *numbers, where = sys.argv[1:]
    crowd(int(numbers[0]), int(numbers[1]), int(numbers[2]), where)
    print("all stand", flush=True)  # noqa: T201 - the builder waits for it
    while True:
        signal.pause()

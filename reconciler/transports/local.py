"""Commands on this very machine, for a host that the controller runs on.

The same promises as over ssh: a session of its own (so that a deadline ends the whole process group),
both streams drained, caps, and a small fixed environment, because what the controller carries in its own
(tokens, the ssh agent) is nobody's business on a host, and would not have come along over ssh either.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import IO

from reconciler.core.errors import HostUnreachableError, OutcomeUnknownError, plain
from reconciler.transports.base import (
    OUTPUT_CAP_BYTES,
    STDERR_TAIL_BYTES,
    Address,
    Completed,
    Session,
)

CHUNK_BYTES = 64 * 1024
LINGER_S = 1.0
"""How long more output is awaited once the command has ended: what it left running may hold its streams."""

SEND_LIMIT_S = 30.0
"""For a kept command to take what is sent to it. Requests are small; one that does not fit is not read."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalTransport:
    """This machine, by subprocess."""

    @property
    def label(self) -> str:
        """Where this leads, for people."""
        return "this machine"

    def run(self, command: str, stdin: bytes, *, deadline_s: float) -> Completed:
        """Run `command` by sh; see `Transport.run`."""
        deadline = time.monotonic() + deadline_s
        with _started(command) as process:
            return _Exchange(process, stdin).finish(deadline, deadline_s)

    def open(self, command: str) -> Session:
        """Start `command` and keep it; see `Transport.open`."""
        return _LocalSession(_start(command))

    @contextlib.contextmanager
    def reach(self, port: int, *, address: str = "127.0.0.1") -> Iterator[Address]:
        """Give the address itself: it is here."""
        yield Address(address, port)

    def close(self) -> None:
        """Nothing is kept open."""

    def __enter__(self) -> LocalTransport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _environment() -> dict[str, str]:
    me = pwd.getpwuid(os.getuid())
    return {
        "HOME": me.pw_dir,
        "LOGNAME": me.pw_name,
        "USER": me.pw_name,
        "SHELL": me.pw_shell,
        "PATH": PATH,
    }


def _start(command: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603  the command is a constant of the product's own
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env=_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise HostUnreachableError(
            "this machine", f"no command can be started: {plain(error)}"
        ) from error


@contextlib.contextmanager
def _started(command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = _start(command)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the group if the command still runs, reap it, and close the pipes."""
    _kill(process)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            # A pipe whose reader is gone complains about what was never written.
            with contextlib.suppress(OSError):
                stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group and reap the command.

    A command that has ended by itself is left alone with what it started on purpose. Until it is reaped
    its pid, and with it the group's number, cannot be anybody else's.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "all three streams are pipes"
    return stream


class _Exchange:
    """One command's three streams, moved until its end."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes) -> None:
        self._process = process
        self._pending = memoryview(stdin)
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._selector = selectors.DefaultSelector()
        self._ended_at: float | None = None
        self._moved_at = time.monotonic()

    def finish(self, deadline: float, deadline_s: float) -> Completed:
        """Move bytes until the command has ended and its streams are at their end."""
        with self._selector, _pidfd(self._process.pid) as pidfd:
            self._register(pidfd)
            while self._selector.get_map():
                until = deadline
                if self._ended_at is not None:
                    until = min(until, max(self._ended_at, self._moved_at) + LINGER_S)
                now = time.monotonic()
                if now >= until:
                    if self._ended_at is not None:
                        return self._completed(self._process.wait(), truncated=True)
                    raise OutcomeUnknownError(
                        "this machine",
                        f"the command had not ended after {deadline_s:g} s; it was killed",
                    )
                for key, _ in self._selector.select(until - now):
                    self._move(key)
                    if self._is_full():
                        return self._completed(None, truncated=True)
            return self._completed(self._process.wait(), truncated=False)

    def _register(self, pidfd: int) -> None:
        stdin = _pipe(self._process.stdin)
        if self._pending:
            os.set_blocking(stdin.fileno(), False)
            self._selector.register(stdin, selectors.EVENT_WRITE, "stdin")
        else:
            stdin.close()
        for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            self._selector.register(_pipe(stream), selectors.EVENT_READ, name)
        self._selector.register(pidfd, selectors.EVENT_READ, "end")

    def _move(self, key: selectors.SelectorKey) -> None:
        if key.data == "stdin":
            self._write(key)
        elif key.data == "end":
            self._ended_at = time.monotonic()
            self._selector.unregister(key.fileobj)
        else:
            data = os.read(key.fd, CHUNK_BYTES)
            self._output[key.data] += data
            self._moved_at = time.monotonic()
            if not data:
                self._selector.unregister(key.fileobj)

    def _write(self, key: selectors.SelectorKey) -> None:
        try:
            self._pending = self._pending[os.write(key.fd, self._pending[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # It ended, or closed its input, before it had read everything: no error of ours.
            self._pending = self._pending[:0]
        if not self._pending:
            self._selector.unregister(key.fileobj)
            with contextlib.suppress(OSError):
                _pipe(self._process.stdin).close()

    def _is_full(self) -> bool:
        return any(len(output) > OUTPUT_CAP_BYTES for output in self._output.values())

    def _completed(self, status: int | None, *, truncated: bool) -> Completed:
        return Completed(
            stdout=bytes(self._output["stdout"][:OUTPUT_CAP_BYTES]),
            stderr=bytes(self._output["stderr"][:OUTPUT_CAP_BYTES]),
            exit_status=None if status is None or status < 0 else status,
            truncated=truncated,
        )


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


class _LocalSession:
    """A command that is kept; see `Session`. One thread may send while another receives."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._stdin = _pipe(process.stdin)
        self._stdout = _pipe(process.stdout)
        self._stderr = _pipe(process.stderr)
        os.set_blocking(self._stdin.fileno(), False)
        self._tail = bytearray()
        self._closed = False
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._reader = selectors.DefaultSelector()
        self._reader.register(self._stdout, selectors.EVENT_READ, "stdout")
        self._reader.register(self._stderr, selectors.EVENT_READ, "stderr")

    def send(self, data: bytes) -> None:
        """Write all of `data`."""
        pending = memoryview(data)
        deadline = time.monotonic() + SEND_LIMIT_S
        with self._sending, selectors.DefaultSelector() as writer:
            try:
                writer.register(self._stdin, selectors.EVENT_WRITE)
                while pending:
                    if not writer.select(deadline - time.monotonic()):
                        raise OutcomeUnknownError(
                            "this machine", f"the command read nothing for {SEND_LIMIT_S:g} s"
                        )
                    pending = pending[os.write(self._stdin.fileno(), pending[:CHUNK_BYTES]) :]
            except (OSError, ValueError) as error:
                raise OutcomeUnknownError("this machine", "the command has ended") from error

    def receive(self, deadline_s: float) -> bytes:
        """Return the next bytes of standard output; standard error is drained on the way."""
        with self._receiving:
            return self._receive(deadline_s)

    def _receive(self, deadline_s: float) -> bytes:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                ready = self._reader.select(max(0.0, deadline - time.monotonic()))
            except (OSError, ValueError, KeyError) as error:
                raise OutcomeUnknownError("this machine", "the session is closed") from error
            names = {key.data for key, _ in ready}
            if "stderr" in names:
                self._drain_stderr()
            if "stdout" in names:
                data = os.read(self._stdout.fileno(), CHUNK_BYTES)
                while not data and any(k.data == "stderr" for k, _ in self._reader.select(0)):
                    self._drain_stderr()
                return data
            if time.monotonic() >= deadline:
                raise OutcomeUnknownError("this machine", f"no answer within {deadline_s:g} s")

    def _drain_stderr(self) -> None:
        data = os.read(self._stderr.fileno(), CHUNK_BYTES)
        if not data:
            self._reader.unregister(self._stderr)
        self._tail += data
        del self._tail[:-STDERR_TAIL_BYTES]

    def stderr_tail(self) -> bytes:
        """Return the last bytes of standard error."""
        return bytes(self._tail)

    def close(self) -> None:
        """Kill what still runs."""
        if self._closed:
            return
        self._closed = True
        _kill(self._process)
        # Whoever waits in `receive` now sees the end; a descriptor must not be closed under a wait.
        if self._receiving.acquire(timeout=LINGER_S):
            self._reader.close()
            _end(self._process)
            self._receiving.release()


__all__ = ["LocalTransport"]

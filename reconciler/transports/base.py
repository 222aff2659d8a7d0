"""What a transport is: a way to run one fixed command on a host and to reach a port there.

Transports know nothing of helpers, servers or GPUs. A transport never formats data into a command:
commands are the constants of `effects/channel.py`, data travels on standard input. Members: `ssh`
(paramiko), `local`, `hop` (a container layer on top of another transport).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

OUTPUT_CAP_BYTES = 4 * 1024 * 1024
"""Per stream. An observation of a busy host with eight GPUs is some 100 kB; a flood is cut here."""

STDERR_TAIL_BYTES = 64 * 1024
"""What a kept session remembers of standard error: enough for a traceback."""


@dataclass(frozen=True, slots=True)
class Completed:
    """What came back from a command.

    `exit_status` is None when the channel closed without one (killed by a signal, or connection
    lost): unknown, never success. `truncated` says that there may be more output than this: a stream
    passed the cap, or what the command left running still held it when the command had ended.
    """

    stdout: bytes
    stderr: bytes
    exit_status: int | None
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address on this machine that leads to the port asked for."""

    host: str
    port: int


class Session(Protocol):
    """A command kept running, to which lines are written and from which bytes are read."""

    def send(self, data: bytes) -> None:
        """Write all of `data` to the command's standard input.

        Raises:
            OutcomeUnknownError: The channel is gone.
        """
        ...

    def receive(self, deadline_s: float) -> bytes:
        """Return the next bytes of standard output; empty at end of stream.

        Raises:
            OutcomeUnknownError: Nothing came within `deadline_s` seconds, or the channel broke.
        """
        ...

    def stderr_tail(self) -> bytes:
        """Return the last bytes (at most 64 KiB) that came on standard error so far."""
        ...

    def close(self) -> None:
        """End the session. Safe to repeat."""
        ...


class Transport(Protocol):
    """A connection to one layer of one host. Opened lazily, reused, closed once."""

    @property
    def label(self) -> str:
        """Where this leads, for people: `deploy@192.0.2.74:22`."""
        ...

    def run(self, command: str, stdin: bytes, *, deadline_s: float) -> Completed:
        """Run `command` with `stdin` (closed at its end) and wait for its end.

        `deadline_s` covers everything from writing the first byte; past it the channel is closed.

        Raises:
            HostUnreachableError: No connection; nothing was executed.
            HostIdentityError: The host's key is unknown or has changed; nothing was executed.
            OutcomeUnknownError: It was started and its end was not seen within the deadline.
        """
        ...

    def open(self, command: str) -> Session:
        """Start `command` and keep it running. Raises as `run` does."""
        ...

    def reach(self, port: int, *, address: str = "127.0.0.1") -> AbstractContextManager[Address]:
        """Give a local address that leads to `address:port` as seen from the host, while open."""
        ...

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        ...


__all__ = ["OUTPUT_CAP_BYTES", "STDERR_TAIL_BYTES", "Address", "Completed", "Session", "Transport"]

"""The near end of a hop's tunnel: many streams over one kept command. `relay_far.py` is the other end."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import resources

from reconciler.core.errors import HostError, HostUnreachableError, OutcomeUnknownError
from reconciler.transports.base import Session
from reconciler.transports.relay_far import (
    AMOUNT,
    CHUNK_BYTES,
    CONNECT_S,
    CREDIT,
    DATA,
    END,
    HEADER,
    OPEN,
    OPENED,
    RESET,
    WINDOW_BYTES,
)
from reconciler.transports.tunnel import Stream

COMMAND = (
    "exec /usr/bin/python3 -I -S -c "
    "'import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode())'"
)
"""Runs the program text that comes first on standard input. The far end greets once it has it, and only
then do frames follow, so that nothing of them is lost in the reading-ahead of this line."""

START_S = 30.0
IDLE_S = 24 * 3600.0
"""A tunnel through which nothing at all came for a day is given up."""

NOISE_BYTES = 64 * 1024
"""What login scripts may print before the greeting."""


class Relays:
    """Opens streams over one relay, and starts another when it has died."""

    def __init__(self, label: str, start: Callable[[], Session]) -> None:
        self._label = label
        self._start = start
        self._lock = threading.Lock()
        self._relay: _Relay | None = None

    def ready(self) -> None:
        """Start the relay now.

        Raises:
            HostError: As `Transport.open`, or there is no Python to run it.
        """
        self._current()

    def open_stream(self, address: str, port: int) -> Stream:
        """Open a stream to `address:port` as seen from the far end."""
        return self._current().open(address, port)

    def close(self) -> None:
        """End the relay and all its streams."""
        with self._lock:
            relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def _current(self) -> _Relay:
        with self._lock:
            if self._relay is None or self._relay.broken:
                if self._relay is not None:
                    self._relay.close()
                self._relay = _Relay(self._label, self._start())
            return self._relay


class _Relay:
    """One far end that runs, and the thread that sorts what comes from it."""

    def __init__(self, label: str, session: Session) -> None:
        self.broken = False
        self._label = label
        self._session = session
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._streams: dict[int, _RelayStream] = {}
        self._last = 0
        try:
            rest = self._greet()
        except BaseException:
            session.close()
            raise
        self._sorter = threading.Thread(target=self._sort, args=(rest,), name="relay", daemon=True)
        self._sorter.start()

    def _greet(self) -> bytes:
        greeting = f"@@reconciler-relay {secrets.token_hex(8)}"
        source = resources.files("reconciler.transports").joinpath("relay_far.py").read_bytes()
        program = source + f"\nmain({greeting!r})\n".encode()
        # Where it has ended already, what it said is read below.
        with contextlib.suppress(OutcomeUnknownError):
            self._session.send(f"{len(program)}\n".encode() + program)
        found = b""
        mark = f"\n{greeting}\n".encode()
        deadline = time.monotonic() + START_S
        while mark not in found:
            data = self._session.receive(max(0.1, deadline - time.monotonic()))
            found += data
            if not data or len(found) > NOISE_BYTES:
                tail = self._session.stderr_tail()[-500:].decode("utf-8", "replace").strip()
                raise HostUnreachableError(
                    self._label, f"no relay could be started there (python3): {tail or 'no output'}"
                )
        return found.partition(mark)[2]

    def open(self, address: str, port: int) -> Stream:
        with self._lock:
            self._last += 1
            stream = _RelayStream(self._last, self)
            self._streams[stream.number] = stream
        try:
            self.send(stream.number, OPEN, f"{address} {port}".encode("ascii"))
            stream.wait_open(CONNECT_S + 5.0, self._label)
        except BaseException:
            stream.close()
            raise
        return stream

    def send(self, number: int, kind: int, payload: bytes = b"") -> None:
        """Write one frame whole; ConnectionResetError when the relay is gone."""
        try:
            with self._sending:
                self._session.send(HEADER.pack(number, kind, len(payload)) + payload)
        except HostError as error:
            self._break(str(error))
            raise ConnectionResetError(str(error)) from error

    def forget(self, number: int) -> None:
        """Take a stream out; frames for it are dropped from now on."""
        with self._lock:
            self._streams.pop(number, None)

    def close(self) -> None:
        self._session.close()
        self._sorter.join(5.0)

    def _sort(self, rest: bytes) -> None:
        buffer = bytearray(rest)
        why = "the relay ended"
        try:
            while True:
                self._dispatch(buffer)
                data = self._session.receive(IDLE_S)
                if not data:
                    break
                buffer += data
        except HostError as error:
            why = str(error)
        self._break(why)

    def _dispatch(self, buffer: bytearray) -> None:
        """Hand out every frame that is complete."""
        start = 0
        while len(buffer) - start >= HEADER.size:
            number, kind, length = HEADER.unpack_from(buffer, start)
            end = start + HEADER.size + length
            if len(buffer) < end:
                break
            with self._lock:
                stream = self._streams.get(number)
            if stream is not None:
                stream.take(kind, bytes(buffer[start + HEADER.size : end]))
            start = end
        del buffer[:start]

    def _break(self, why: str) -> None:
        self.broken = True
        with self._lock:
            streams = tuple(self._streams.values())
        for stream in streams:
            stream.take(RESET, why.encode())


class _RelayStream:
    """One stream of a relay; see `tunnel.Stream`."""

    def __init__(self, number: int, relay: _Relay) -> None:
        self.number = number
        self._relay = relay
        self._changed = threading.Condition()
        self._opened = False
        self._arrived: deque[bytes] = deque()
        self._far_ended = False
        self._near_ended = False
        self._broken: str | None = None
        self._credit = WINDOW_BYTES

    def take(self, kind: int, payload: bytes) -> None:
        """Act on one frame. Called by the sorting thread."""
        with self._changed:
            if kind == OPENED:
                self._opened = True
            elif kind == DATA:
                self._arrived.append(payload)
            elif kind == END:
                self._far_ended = True
            elif kind == CREDIT:
                self._credit += AMOUNT.unpack(payload)[0]
            elif kind == RESET and not (self._far_ended and self._near_ended):
                self._broken = self._broken or payload.decode("utf-8", "replace")
            self._changed.notify_all()

    def wait_open(self, timeout_s: float, label: str) -> None:
        """Wait for the far end's word."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened or self._broken is not None, timeout_s)
            if not self._opened:
                why = self._broken or f"no answer within {timeout_s:g} s"
                raise HostUnreachableError(label, f"the port is not reached from there: {why}")

    def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            with self._changed:
                self._changed.wait_for(lambda: self._credit > 0 or self._broken is not None)
                if self._broken is not None:
                    raise ConnectionResetError(self._broken)
                size = min(len(rest), CHUNK_BYTES, self._credit)
                self._credit -= size
            self._relay.send(self.number, DATA, bytes(rest[:size]))
            rest = rest[size:]

    def receive(self) -> bytes:
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._arrived) or self._far_ended or self._broken is not None
            )
            if not self._arrived:
                if self._far_ended:
                    return b""
                raise ConnectionResetError(self._broken)
            data = self._arrived.popleft()
        self._relay.send(self.number, CREDIT, AMOUNT.pack(len(data)))
        return data

    def end(self) -> None:
        with self._changed:
            self._near_ended = True
        self._relay.send(self.number, END)

    def close(self) -> None:
        with self._changed:
            whole = self._far_ended and self._near_ended
            already = self._broken is not None
            self._broken = self._broken or "closed"
            self._changed.notify_all()
        self._relay.forget(self.number)
        if not whole and not already and not self._relay.broken:
            with contextlib.suppress(ConnectionError):
                self._relay.send(self.number, RESET)


__all__ = ["COMMAND", "Relays"]

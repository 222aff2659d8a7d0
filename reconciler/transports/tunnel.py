"""A local port whose connections come out somewhere else: the plain part of `reach`, for every transport.

A transport gives a function that opens one stream; here is the listener, and the copying of bytes both
ways with half-close and resets kept: a stream that broke must never look like one that ended, or half an
answer of a server is taken for a whole one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from reconciler.core.errors import HostError
from reconciler.transports.base import Address

STREAMS_LIMIT = 512
"""Connections at once through one tunnel; two threads each. More than twice the largest concurrency that
a gate asks for; what comes beyond it waits in the listener's queue."""

CHUNK_BYTES = 64 * 1024
CLOSE_WAIT_S = 5.0
"""For the threads of a tunnel to end once its sockets are shut. They only fail to when a link is dead."""


PUSH_WAIT_S = 0.5
"""Between looks whether the tunnel was taken down, while a reader takes nothing."""


class Stream(Protocol):
    """One connection to the far end."""

    def send(self, data: bytes) -> None:
        """Send all of `data`; OSError when the stream is broken."""
        ...

    def receive(self) -> bytes:
        """Wait for the next bytes; empty at a clean end; OSError when the stream is broken."""
        ...

    def end(self) -> None:
        """Say that nothing more will be sent."""
        ...

    def close(self) -> None:
        """Drop the stream. Wakes whoever waits in it. Safe to repeat."""
        ...


@contextlib.contextmanager
def listening(open_stream: Callable[[], Stream]) -> Iterator[Address]:
    """Listen on a free loopback port and connect each arrival to a stream, while open."""
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS_LIMIT) as listener:
        tunnel = _Tunnel(listener, open_stream)
        host, port = listener.getsockname()
        accepting = threading.Thread(target=tunnel.accept, name=f"tunnel-{port}", daemon=True)
        accepting.start()
        try:
            yield Address(host, port)
        finally:
            tunnel.close()
            accepting.join(CLOSE_WAIT_S)


class _Tunnel:
    """The listener and its live connections."""

    def __init__(self, listener: socket.socket, open_stream: Callable[[], Stream]) -> None:
        self._listener = listener
        self._open_stream = open_stream
        self._free = threading.Semaphore(STREAMS_LIMIT)
        self._lock = threading.Lock()
        self._closed = False
        self._links: set[_Link] = set()

    def accept(self) -> None:
        """Take connections until the listener is shut."""
        while True:
            self._free.acquire()
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            link = _Link(near, self._open_stream, self._forget)
            with self._lock:
                if self._closed:
                    reset(near)
                    return
                self._links.add(link)
                # Within the lock: `close` joins what it finds here, which must have been started.
                link.start()

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)
        self._free.release()

    def close(self) -> None:
        """Shut everything down and wait for the threads."""
        with self._lock:
            self._closed = True
            links = tuple(self._links)
        # shutdown wakes accept(); closing alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._free.release()
        for link in links:
            link.abort()
        for link in links:
            link.join(CLOSE_WAIT_S)


class _Link:
    """One accepted connection, its stream, and the two threads that copy."""

    def __init__(
        self,
        near: socket.socket,
        open_stream: Callable[[], Stream],
        ended: Callable[[_Link], None],
    ) -> None:
        self._near = near
        self._open_stream = open_stream
        self._ended = ended
        self._lock = threading.Lock()
        self._far: Stream | None = None
        self._aborted = False
        self._outward = threading.Thread(target=self._run, name="tunnel-out", daemon=True)

    def start(self) -> None:
        """Begin to open the far end and to copy."""
        self._outward.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._outward.join(timeout_s)

    def abort(self) -> None:
        """End both sides as broken."""
        with self._lock:
            self._aborted = True
            far = self._far
        if far is not None:
            far.close()
        # The thread that owns the socket resets it; this wakes it. Shutting the other direction as well
        # would tell whoever reads there that all is said.
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RD)

    def _run(self) -> None:
        try:
            self._near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                far = self._open_stream()
            except (HostError, OSError):
                # Whoever connected sees a reset, as from a port where nothing listens.
                reset(self._near)
                return
            with self._lock:
                self._far = far
                aborted = self._aborted
            if aborted:
                far.close()
                reset(self._near)
                return
            self._copy(far)
        finally:
            self._ended(self)

    def _copy(self, far: Stream) -> None:
        inward = threading.Thread(target=self._inward, args=(far,), name="tunnel-in", daemon=True)
        inward.start()
        try:
            while data := self._near.recv(CHUNK_BYTES):
                far.send(data)
            far.end()
        except OSError:
            self.abort()
        inward.join()
        far.close()
        if self._aborted:
            reset(self._near)
        else:
            self._near.close()

    def _inward(self, far: Stream) -> None:
        try:
            while data := far.receive():
                self._push(memoryview(data))
            self._near.shutdown(socket.SHUT_WR)
        except OSError:
            self.abort()

    def _push(self, rest: memoryview) -> None:
        """Send all to a reader that may be slow, and stop when the tunnel is taken down."""
        while rest:
            try:
                rest = rest[self._near.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                select.select((), (self._near,), (), PUSH_WAIT_S)
                if self._aborted:
                    raise ConnectionAbortedError from None


def reset(connection: socket.socket) -> None:
    """Close with a reset, so that the other side cannot take it for an end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


__all__ = ["STREAMS_LIMIT", "Stream", "listening", "reset"]

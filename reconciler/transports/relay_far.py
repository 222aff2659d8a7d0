"""The far end of a hop's tunnel: one process that carries many TCP connections over its standard streams.

`hop.py` sends this file's text to `python3 -I -S` inside the container, where no SSH server opens
connections for us. It runs there on Python 3.9, standard library only, and imports nothing of the
product; `relay.py` is the near end and shares the words of the wire below.

A frame is a header (stream, kind, length) and its payload. Each direction of a stream may have
WINDOW_BYTES under way until the other end says with CREDIT that they were passed on, so that one slow
reader holds up nobody else and memory is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys

HEADER = struct.Struct(">IBI")
AMOUNT = struct.Struct(">I")
OPEN, OPENED, DATA, END, RESET, CREDIT = range(1, 7)
CHUNK_BYTES = 32 * 1024
WINDOW_BYTES = 1024 * 1024
CONNECT_S = 10.0


class Link:
    """One connection: what may still be sent to the near end, and what waits to be written here."""

    def __init__(self) -> None:
        self.credit = WINDOW_BYTES
        self.more = asyncio.Event()
        self.waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.writer: asyncio.StreamWriter | None = None
        self.reset = False


class Relay:
    """All connections, and the way back to the near end."""

    def __init__(self, out: int) -> None:
        self.out = out
        self.turn = asyncio.Lock()
        self.links: dict[int, Link] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def send(self, number: int, kind: int, payload: bytes = b"") -> None:
        """Write one frame whole."""
        await self.write(HEADER.pack(number, kind, len(payload)) + payload)

    async def write(self, data: bytes) -> None:
        """Write to the near end.

        Not by asyncio's pipe transport: it takes a socket that becomes readable for one that was closed,
        and under sshd our output is the same socket as our input.
        """
        rest = memoryview(data)
        async with self.turn:
            while rest:
                try:
                    rest = rest[os.write(self.out, rest) :]
                except BlockingIOError:
                    await self.writable()

    async def writable(self) -> None:
        """Wait until the output takes something again."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self.out, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self.out)

    def take(self, number: int, kind: int, payload: bytes) -> None:
        """Act on one frame from the near end. Never waits, or one stream would hold up the others."""
        if kind == OPEN:
            self.links[number] = link = Link()
            task = asyncio.ensure_future(self.connect(number, link, payload))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            return
        known = self.links.get(number)
        if known is None:
            return  # It ended here while the frame was under way.
        if kind == CREDIT:
            known.credit += AMOUNT.unpack(payload)[0]
            known.more.set()
        elif kind == DATA:
            known.waiting.put_nowait(payload)
        elif kind == END:
            known.waiting.put_nowait(None)
        elif kind == RESET:
            known.reset = True
            known.more.set()
            known.waiting.put_nowait(None)
            if known.writer is not None:
                known.writer.transport.abort()

    async def connect(self, number: int, link: Link, payload: bytes) -> None:
        """Connect, copy both ways, and say how it ended."""
        try:
            host, port = payload.decode("ascii").rsplit(" ", 1)
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, int(port)), CONNECT_S
            )
            link.writer = writer
            if link.reset:
                return  # Given up while we connected.
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.send(number, OPENED)
            await self.copy(number, link, reader, writer)
        # Before Python 3.11 asyncio's TimeoutError is not the built-in one.
        except (OSError, ValueError, asyncio.TimeoutError) as error:  # noqa: UP041
            link.reset = True
            if link.writer is not None:
                link.writer.transport.abort()
            await self.send(number, RESET, (str(error) or type(error).__name__).encode()[:500])
        finally:
            self.links.pop(number, None)
            if link.writer is not None:
                link.writer.close()

    async def copy(
        self,
        number: int,
        link: Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Copy both ways until both are at their end, or one breaks."""
        ways = [
            asyncio.ensure_future(self.inward(number, link, reader)),
            asyncio.ensure_future(self.outward(number, link, writer)),
        ]
        try:
            await asyncio.gather(*ways)
        finally:
            for way in ways:
                way.cancel()

    async def inward(self, number: int, link: Link, reader: asyncio.StreamReader) -> None:
        """Copy from the server to the near end, as far as there is credit."""
        while not link.reset:
            if link.credit <= 0:
                link.more.clear()
                await link.more.wait()
                continue
            data = await reader.read(min(CHUNK_BYTES, link.credit))
            link.credit -= len(data)
            if not data:
                await self.send(number, END)
                return
            await self.send(number, DATA, data)

    async def outward(self, number: int, link: Link, writer: asyncio.StreamWriter) -> None:
        """Copy from the near end to the server, and give the credit back once it is written."""
        while True:
            data = await link.waiting.get()
            if link.reset:
                return
            if data is None:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            await self.send(number, CREDIT, AMOUNT.pack(len(data)))


async def serve(greeting: str) -> None:
    """Relay until the near end closes our input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2 * WINDOW_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    out = sys.stdout.fileno()
    os.set_blocking(out, False)
    relay = Relay(out)
    await relay.write(f"\n{greeting}\n".encode("ascii"))
    # The near end is gone without a goodbye: so are we.
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            number, kind, length = HEADER.unpack(await reader.readexactly(HEADER.size))
            relay.take(number, kind, await reader.readexactly(length))


def main(greeting: str) -> None:
    """Run the far end; `greeting` tells the near end where the noise of login scripts stops."""
    asyncio.run(serve(greeting))

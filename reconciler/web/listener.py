"""The daemon's small HTTP listener: `/healthz` (GET, HEAD), and `POST /hook` where a secret was set. Loopback unless told otherwise.

A hostile client can have: a few seconds, 16 KiB of header, a body below its cap that names its length, and one of a few
places, until somebody else needs it: then the one that took longest yields, so that many who say nothing keep nobody out.
Every answer closes the connection. Nothing that a client sends is logged or repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from reconciler.core.errors import UsageError
from reconciler.web.webhook import Hooks, Judgement

HEADER_BYTES: Final = 16 * 1024
BODY_BYTES: Final = 1 << 20
"""Forges cap theirs at 25 MiB, for pushes of thousands of commits; those are found by the interval."""
PATIENCE_S: Final = 10.0
PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        self.status = status


@dataclass
class Listener:
    """Serves in a thread of its own from `start` to `stop`."""

    host: str
    port: int
    health: Callable[[], dict[str, Any]]
    trigger: Callable[[], None]
    hooks: Hooks | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _server: asyncio.Server | None = None
    _held: dict[asyncio.Timeout, None] = field(default_factory=dict)
    """The limits of those that hold a place, in the order in which they came."""

    def start(self) -> tuple[str, int]:
        """Bind, serve, and give where.

        Raises:
            UsageError: The address cannot be had.
        """
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, self.host, self.port, limit=HEADER_BYTES)
            )
        except OSError as error:
            self._loop.close()
            # asyncio puts a sentence of its own where the system's word is; only a name that is not found has no number.
            number = error.errno or 0
            why = os.strerror(number) if number > 0 else error.strerror
            raise UsageError(
                f"--listen {self.host}:{self.port}: cannot be listened on ({why}); nothing was started: name another address, "
                "or end whoever has it"
            ) from error
        self._thread = threading.Thread(target=self._loop.run_forever, name="listener", daemon=True)
        self._thread.start()
        where = self._server.sockets[0].getsockname()
        return str(where[0]), int(where[1])

    def stop(self) -> None:
        """End serving; what is under way is cut."""
        if self._thread is None or self._server is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    async def _end(self) -> None:
        assert self._server is not None, "it was started"
        self._server.close()
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit = asyncio.timeout(PATIENCE_S)
        writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until all is out.
        self._make_room()
        self._held[limit] = None
        try:
            async with limit:
                writer.write(await self._reply(reader))
                await writer.drain()
        except TimeoutError:
            writer.write(_written(HTTPStatus.REQUEST_TIMEOUT, b""))
        except OSError:
            pass  # Whoever asked is gone.
        finally:
            self._held.pop(limit, None)
            # Closed, or dropped where it does not even take the answer: nothing may keep the descriptor.
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            writer.close()

    def _make_room(self) -> None:
        """Let the one that came first go where all places are taken: a request is there in milliseconds, or is none."""
        while len(self._held) >= PLACES:
            first = next(iter(self._held))
            del self._held[first]
            if not first.expired():
                first.reschedule(self._loop.time())

    async def _reply(self, reader: asyncio.StreamReader) -> bytes:
        try:
            request = await _read(reader)
            status, answer = self._answer(request)
        except _RefusedError as refused:
            return _written(refused.status, b"")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            return _written(HTTPStatus.BAD_REQUEST, b"")
        return _written(status, answer, body=request.method != "HEAD")

    def _answer(self, request: _Request) -> tuple[HTTPStatus, bytes]:
        match request.method, request.path:
            case "GET" | "HEAD", "/healthz":
                health = self.health()
                status = HTTPStatus.OK if health["ok"] else HTTPStatus.SERVICE_UNAVAILABLE
                return status, json.dumps(health).encode()
            case "POST", "/hook" if self.hooks is not None:
                judged = self.hooks.judge(
                    request.headers, request.body, monotonic=time.monotonic(), wall=time.time()
                )
                if judged is Judgement.ACCEPTED:
                    self.trigger()
                return HTTPStatus(judged.value), b""
            case _, "/healthz" | "/hook":
                return HTTPStatus.METHOD_NOT_ALLOWED, b""
            case _:
                return HTTPStatus.NOT_FOUND, b""


def _written(status: HTTPStatus, answer: bytes, *, body: bool = True) -> bytes:
    """Write an answer out; without `body` only its head, which is what HEAD asks for."""
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\nConnection: close\r\nCache-Control: no-store\r\n\r\n"
    return head.encode() + (answer if body else b"")


async def _read(reader: asyncio.StreamReader) -> _Request:
    """Read one request within its bounds; what is ambiguous (two lengths, chunks) is refused."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    method, path, version = first.split(" ")
    if version not in {"HTTP/1.1", "HTTP/1.0"}:
        raise _RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        key = name.lower()
        if not colon or not name or name != name.strip() or key in headers:
            raise _RefusedError(HTTPStatus.BAD_REQUEST)
        headers[key] = value.strip()
    if "transfer-encoding" in headers:
        raise _RefusedError(HTTPStatus.LENGTH_REQUIRED)
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdecimal() or len(length) > 12:
        raise _RefusedError(HTTPStatus.BAD_REQUEST)
    if int(length) > BODY_BYTES:
        raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return _Request(method, path.partition("?")[0], headers, await reader.readexactly(int(length)))

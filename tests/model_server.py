"""A small HTTP server for the client's tests: it plays prepared answers, with any fault, packet by packet.

Not a model of an engine: each answer is what a test says. Runs in a thread of its own; closed by leaving
the context. Nothing in it waits for time: a `Pause` ends when the test sets its event, or when the
connection ends.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pause:
    """Wait here until `event` is set (by anyone, in any thread) or the client goes away."""

    event: threading.Event = field(default_factory=threading.Event)


@dataclass
class Hang:
    """Never go on."""


@dataclass
class Drop:
    """Close the connection here, without ending anything."""


type_of_part = bytes | Pause | Hang | Drop


@dataclass
class Reply:
    """One answer: its parts are body bytes, each written as one packet, and what happens between them."""

    parts: Sequence[Any] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    framing: str = "chunked"  # chunked | length | eof | raw
    close: bool = False


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int


class ModelServer:
    """Answers each request by calling `answer` with it."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def refuse(self) -> None:
        """Stop listening and drop every connection."""
        asyncio.run_coroutine_threadsafe(self._refuse(), self._loop).result(10)

    async def _refuse(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        number = self.connections
        self.connections += 1
        try:
            while await self._one(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        asked = Asked(method, path, headers, json.loads(raw) if raw else {}, number)
        self.asked.append(asked)
        reply = self.answer(asked)
        return await self._play(reply, reader, writer)

    async def _play(
        self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        whole = b"".join(part for part in reply.parts if isinstance(part, bytes))
        if reply.framing != "raw":
            writer.write(_head(reply, len(whole)))
        for part in reply.parts:
            if isinstance(part, bytes):
                writer.write(_framed(reply, part))
                await writer.drain()
                await asyncio.sleep(0)
            elif isinstance(part, Drop):
                writer.transport.abort()
                return False
            elif isinstance(part, Hang):
                await reader.read()  # Ends when the client goes away.
                return False
            else:
                await asyncio.to_thread(part.event.wait, 10)
        if reply.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not reply.close and reply.framing not in {"eof", "raw"}


def _head(reply: Reply, length: int) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} X", f"Content-Type: {reply.content_type}"]
    if reply.framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
    elif reply.framing == "length":
        lines.append(f"Content-Length: {length}")
    if reply.close or reply.framing == "eof":
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode()


def _framed(reply: Reply, part: bytes) -> bytes:
    if reply.framing != "chunked":
        return part
    return f"{len(part):x}\r\n".encode() + part + b"\r\n"


def event(body: Any) -> bytes:
    text = body if isinstance(body, str) else json.dumps(body)
    return f"data: {text}\n\n".encode()


def chat_chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    return event(
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}
    )


def chat_parts(words: Sequence[str], *, prompt_tokens: int = 9, usage: bool = True) -> list[bytes]:
    """An ordinary chat answer of one token per word."""
    parts = [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})]
    parts += [chat_chunk(word) for word in words]
    parts.append(chat_chunk("", "length"))
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": len(words)}
    if usage:
        parts.append(event({"choices": [], "usage": counts}))
    return [*parts, event("[DONE]")]


def ordinary(asked: Asked) -> Reply:
    """Answer as a healthy server does: max_tokens words that differ from prompt to prompt."""
    if asked.path == "/metrics":
        return Reply([b""], content_type="text/plain", framing="length")
    prompt = asked.body.get("prompt") or asked.body["messages"][0]["content"]
    words = (prompt.split() or ["word"]) * asked.body["max_tokens"]
    return Reply(chat_parts([f" {w}" for w in words[: asked.body["max_tokens"]]]))


@contextmanager
def serving(answer: Callable[[Asked], Reply] = ordinary) -> Iterator[ModelServer]:
    server = ModelServer(answer)
    server.start()
    try:
        yield server
    finally:
        server.stop()

"""The load generator: so many streams at once against one server, timed where the bytes arrive.

Closed loop: each of `concurrency` streams sends its next request when its last answer is complete.
Connections are open before the round begins; t0 is when a request's bytes are written; the arrival time
is taken first thing in a read, before anything is parsed, and answers are parsed after the round. The
client watches itself: its share of a core and how late its event loop was are part of the result.

This is the one place outside `reconcile.py` with concurrency of its own. `collect` and `measure` block
their caller; the event loop (uvloop where it is installed) lives in a thread of its own meanwhile.
Standard library only, so that it can travel to a host. What the numbers mean is in `core/gate.py`, how
they are made from the records in `summary.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from reconciler.bench.answer import Answer, AnswerError
from reconciler.bench.load_plan import Api, Endpoint, LoadPlan, Progress, http_request, request_body
from reconciler.bench.stream import Request, read_stream
from reconciler.bench.summary import Collected, Record, summarise
from reconciler.core.measurement import RunResult

_PATHS: Mapping[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/generate",
}
# How often limits are looked at and the loop's own lateness is sampled.
_TICK_S = 0.01
_TICKS_PER_CHECK = 10
_TUNNEL_PROBES = 5
_CONNECT_LIMIT_S = 10.0
# An event is 200 to 600 bytes for one token; with log probabilities a few kB. Beyond this a server sends
# something else, and memory is worth more.
_BYTES_PER_TOKEN = 8 * 1024
_BYTES_AT_LEAST = 1 << 20
# What may be asked beyond the OpenAI fields, in the order in which it is given up on HTTP 400.
_EXTRAS = ("spec_tokens_details", "continuous_usage", "standard_extras")


def measure(
    plan: LoadPlan,
    endpoint: Endpoint,
    *,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunResult:
    """Run one round and give its result. Never raises for what the server or the network does."""
    return summarise(plan, endpoint, collect(plan, endpoint, on_progress=on_progress))


def collect(
    plan: LoadPlan,
    endpoint: Endpoint,
    *,
    on_progress: Callable[[Progress], None] | None = None,
) -> Collected:
    """Run one round in a thread of its own and give every request's record.

    `on_progress` is called here, in the caller's thread, a few times a second.
    """
    client = _Client(plan, endpoint)
    thread = threading.Thread(target=client.run, name=f"bench-{plan.run}", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.25)
            if on_progress is not None:
                on_progress(client.progress())
    finally:
        if thread.is_alive():  # Ctrl-C, or an exception of the callback.
            client.stop()
            thread.join()
    if client.crash is not None:
        raise client.crash
    return client.collected()


class _Exchange:
    """One request on its way: its answer so far, and a future that ends when nothing more will come."""

    __slots__ = ("answer", "done", "failure", "last_at", "message", "t0", "token_seen")

    def __init__(self, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        self.answer = Answer(max_bytes=max_bytes)
        self.done: asyncio.Future[None] = loop.create_future()
        self.failure = ""
        self.message = ""
        self.t0 = self.last_at = 0.0
        self.token_seen = False

    def finish(self, failure: str = "", message: str = "") -> None:
        """End the exchange, once; the first word stands."""
        if not self.done.done():
            self.failure, self.message = failure, message
            self.done.set_result(None)


class _Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    __slots__ = ("exchange", "open", "served", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.exchange: _Exchange | None = None
        self.open = False
        self.served = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's in all but their class.
        self.transport = cast("asyncio.Transport", transport)
        self.open = True

    def send(self, exchange: _Exchange, request: bytes) -> None:
        """Write a request; its time runs from here."""
        assert self.transport is not None
        self.exchange = exchange
        exchange.t0 = exchange.last_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        exchange = self.exchange
        if exchange is None:
            self.close()  # Nobody asked: whatever it is, the next answer would be read wrongly.
            return
        exchange.last_at = at
        try:
            complete = exchange.answer.feed(data, at)
        except AnswerError as error:
            self._end(error.kind, str(error))
            return
        if complete:
            self._end()

    def eof_received(self) -> None:
        self._lost("the server closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._lost(str(exc) if exc else "the connection was closed")

    def close(self) -> None:
        """Close at once, without waiting for what the peer still sends."""
        self.open = False
        if self.transport is not None:
            self.transport.abort()

    def give_up(self, failure: str, message: str) -> None:
        """End the exchange under way by our own decision."""
        self._end(failure, message)

    def _lost(self, why: str) -> None:
        self.open = False
        if self.exchange is not None:
            if self.exchange.answer.end():
                self._end()
            else:
                self._end("closed", why)

    def _end(self, failure: str = "", message: str = "") -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        self.served += 1
        if failure or not exchange.answer.reusable:
            self.close()
        exchange.finish(failure, message)


class _Client:
    """Carries one round: the streams, the limits, and the watch on itself."""

    def __init__(self, plan: LoadPlan, endpoint: Endpoint) -> None:
        self.plan = plan
        self.endpoint = endpoint
        self.crash: BaseException | None = None
        self._records: list[Record] = []
        self._completed = self._failed = 0
        self._given_up = plan.given_up
        self._stopping = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_name = ""
        self._connections: list[_Connection] = []
        self._lags: list[float] = []
        self._counters: list[str] = []
        self._tunnel_s: float | None = None
        self._began = self._ended = self._cpu_s = 0.0

    def run(self) -> None:
        """Do the round, in this thread, to its end."""
        factory, self._loop_name = _loop_factory()
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(self._round())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.crash = error

    def stop(self) -> None:
        """End the round early; safe to call from any thread and when it is over."""
        self._stopping = self._stopping or "stopped"
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._cut, "stopped", "the measurement was stopped")
            except RuntimeError:
                return  # The loop is closed: nothing is left to stop.

    def progress(self) -> Progress:
        """Say how far the round is."""
        plan = self.plan
        return Progress(plan.run, plan.round, plan.requests, self._completed, self._failed)

    def collected(self) -> Collected:
        """Give everything that the round left behind."""
        wall = self._ended - self._began
        lags = sorted(self._lags)
        return Collected(
            records=tuple(self._records),
            began=self._began,
            ended=self._ended,
            cut_short=self._stopping,
            cpu_share=self._cpu_s / wall if wall > 0 else 0.0,
            lag_p99_s=lags[int(len(lags) * 0.99)] if lags else 0.0,
            client=self._loop_name,
            given_up=self._given_up,
            counters_before=self._counters[0] if self._counters else "",
            counters_after=self._counters[1] if len(self._counters) > 1 else "",
            tunnel_ms=None if self._tunnel_s is None else self._tunnel_s * 1000,
        )

    async def _round(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._read_counters()
        await self._time_the_tunnel()
        streams = min(self.plan.concurrency, self.plan.requests)
        opened = await asyncio.gather(*(self._open() for _ in range(streams)))
        # What exists now lives through the round; the collector need not look at it again and again.
        gc.freeze()
        ticker = self._loop.create_task(self._tick())
        self._began = time.perf_counter()
        cpu = time.thread_time()
        numbers = iter(range(self.plan.requests))
        try:
            await asyncio.gather(
                *(self._stream(slot, numbers, opened[slot]) for slot in range(streams))
            )
        finally:
            self._ended = time.perf_counter()
            self._cpu_s = time.thread_time() - cpu
            ticker.cancel()
            for connection in self._connections:
                connection.close()
            gc.unfreeze()
        await self._read_counters()
        # Lets the transports notice that they are closed, before the loop is.
        await asyncio.sleep(0)

    async def _stream(
        self, slot: int, numbers: Iterator[int], connection: _Connection | str
    ) -> None:
        """Send one request after the other until none is left."""
        free_at = self._began
        duration = self.plan.duration_s
        for number in numbers:
            if self._stopping or (duration is not None and free_at - self._began >= duration):
                return
            record, connection = await self._ask(slot, number, connection, free_at)
            free_at = time.perf_counter()
            self._records.append(record)
            if record.failure:
                self._failed += 1
                self._judge_failure(record)
            else:
                self._completed += 1

    def _judge_failure(self, record: Record) -> None:
        """Stop the round where going on would tell nothing more."""
        limit = self.plan.stop_after_failures
        if record.failure == "connect" or record.status in {401, 403, 404}:
            self._stopping = self._stopping or "infrastructure"
        elif limit is not None and self._failed > limit:
            self._stopping = self._stopping or "failures"

    async def _ask(
        self, slot: int, number: int, connection: _Connection | str, free_at: float
    ) -> tuple[Record, _Connection | str]:
        """Send one request and wait for all of its answer.

        Sent again only where that can hide nothing of the server: a kept connection that was found dead
        before any byte came back, and extras that the server refuses with 400.
        """
        retried = 0
        while True:
            if isinstance(connection, str) or not connection.open:
                connection = await self._open()
            if isinstance(connection, str):
                now = time.perf_counter()
                record = Record(
                    number, slot, free_at, now, now, failure="connect", message=connection
                )
                return record, connection
            was_reused = connection.served > 0
            asked_with = self._given_up
            exchange = self._exchange(connection, number, asked_with)
            await exchange.done
            answer = exchange.answer
            if exchange.failure == "closed" and was_reused and not answer.status and not retried:
                retried += 1
                continue
            if answer.status in {400, 422} and self._give_up_an_extra(asked_with):
                continue
            break
        return self._record(slot, number, free_at, exchange, retried), connection

    def _exchange(
        self, connection: _Connection, number: int, given_up: frozenset[str]
    ) -> _Exchange:
        assert self._loop is not None
        max_bytes = max(_BYTES_AT_LEAST, self.plan.max_tokens * _BYTES_PER_TOKEN)
        exchange = _Exchange(self._loop, max_bytes)
        body = request_body(self.plan, self.endpoint, number, given_up)
        request = http_request(
            self.endpoint, "POST", _PATHS[self.endpoint.api], json.dumps(body).encode()
        )
        connection.send(exchange, request)
        return exchange

    def _give_up_an_extra(self, asked_with: frozenset[str]) -> bool:
        """Say whether asking again makes sense, with one extra less than that request had."""
        if asked_with != self._given_up:
            return True  # Another stream has learnt it meanwhile.
        for extra in _EXTRAS:
            if extra == "spec_tokens_details" and self.endpoint.engine != "sglang":
                continue
            if extra not in self._given_up:
                self._given_up |= {extra}
                return True
        return False

    def _record(
        self, slot: int, number: int, free_at: float, exchange: _Exchange, retried: int
    ) -> Record:
        answer = exchange.answer
        failure, message = exchange.failure, exchange.message
        if not failure and answer.status != 200:
            failure = f"http_{answer.status}"
            message = answer.body[:300].decode("utf-8", "replace")
        return Record(
            number=number,
            slot=slot,
            free_at=free_at,
            t0=exchange.t0,
            end=time.perf_counter(),
            status=answer.status,
            failure=failure,
            message=message,
            pieces=tuple(answer.pieces) if answer.status == 200 else (),
            content_type=answer.headers.get("content-type", "")[:200],
            location=answer.headers.get("location", "")[:200],
            retried=retried,
        )

    async def _open(self) -> _Connection | str:
        """Open a connection, or say why there is none."""
        assert self._loop is not None
        endpoint = self.endpoint
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                _, connection = await self._loop.create_connection(
                    _Connection, endpoint.host, endpoint.port, ssl=True if endpoint.tls else None
                )
        except TimeoutError:
            return f"no connection to {endpoint.host}:{endpoint.port} within {_CONNECT_LIMIT_S:g} s"
        except OSError as error:
            return f"no connection to {endpoint.host}:{endpoint.port}: {error}"
        self._connections.append(connection)
        return connection

    async def _tick(self) -> None:
        """Sample how late this loop is, and end what exceeds its limits."""
        assert self._loop is not None
        ticks = 0
        due = time.perf_counter() + _TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            self._lags.append(max(0.0, now - due))
            due = max(due + _TICK_S, now)
            ticks += 1
            if ticks % _TICKS_PER_CHECK == 0:
                self._check_limits(now)

    def _check_limits(self, now: float) -> None:
        deadline = self.plan.deadline_s
        if deadline is not None and now - self._began > deadline:
            self._cut("deadline", f"the round's {deadline:g} s were over")
            return
        for connection in self._connections:
            exchange = connection.exchange
            if exchange is not None:
                late = self._late(exchange, now)
                if late is not None:
                    connection.give_up(*late)

    def _late(self, exchange: _Exchange, now: float) -> tuple[str, str] | None:
        plan = self.plan
        if now - exchange.t0 > plan.total_s:
            return "total_timeout", f"no complete answer within {plan.total_s:g} s"
        if now - exchange.last_at > plan.idle_limit_s:
            return "idle_timeout", f"not a byte for {plan.idle_limit_s:g} s"
        if exchange.token_seen or now - exchange.t0 <= plan.ttft_limit_s:
            return None
        reading = read_stream(exchange.answer.pieces, Request(endpoint=self.endpoint.api))
        exchange.token_seen = reading.token_events > 0
        if exchange.token_seen:
            return None
        return "ttft_timeout", f"no first token within {plan.ttft_limit_s:g} s"

    def _cut(self, why: str, message: str) -> None:
        """End the whole round now; what is in flight is neither a success nor a failure."""
        self._stopping = self._stopping or why
        for connection in self._connections:
            if connection.exchange is not None:
                connection.give_up("cut", message)

    async def _read_counters(self) -> None:
        """Read vLLM's counters beside the round: its drafts are told nowhere else."""
        if self.endpoint.engine != "vllm":
            return
        connection = await self._open()
        if isinstance(connection, str):
            return
        answer = await self._get(connection, "/metrics")
        if answer is not None and answer.status == 200:
            self._counters.append(answer.body.decode("utf-8", "replace"))
        connection.close()

    async def _time_the_tunnel(self) -> None:
        """Time a few tiny requests through the tunnel, one after the other, and keep the slowest."""
        if not self.endpoint.tunnelled:
            return
        connection = await self._open()
        if isinstance(connection, str):
            return
        slowest = 0.0
        for _ in range(_TUNNEL_PROBES):
            began = time.perf_counter()
            answer = await self._get(connection, "/health")
            if answer is None or not connection.open:
                break
            slowest = max(slowest, time.perf_counter() - began)
        self._tunnel_s = slowest or None
        connection.close()

    async def _get(self, connection: _Connection, path: str) -> Answer | None:
        """Ask for something small beside the load; None when nothing came in time."""
        assert self._loop is not None
        exchange = _Exchange(self._loop, 16 << 20)
        connection.send(exchange, http_request(self.endpoint, "GET", path, b""))
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await exchange.done
        except TimeoutError:
            connection.close()
            return None
        return exchange.answer


def _loop_factory() -> tuple[Callable[[], asyncio.AbstractEventLoop], str]:
    """Choose uvloop where it is installed: a third of the processor time for each event."""
    try:
        import uvloop  # noqa: PLC0415 - optional, and only the client needs it
    except ImportError:
        return asyncio.new_event_loop, "asyncio"
    return uvloop.new_event_loop, "uvloop"

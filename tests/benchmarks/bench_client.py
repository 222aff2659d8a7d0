"""What the load generator costs: processor time per event, beside httpx, in one run.

    python tests/benchmarks/bench_client.py [--streams 64] [--rate 100] [--seconds 3]

A paced server in a process of its own writes one event a token to every stream and knows when it did.
Each client reads the same load: so many streams of so many events a second. Printed for each: µs of the
client thread's own CPU for each event (ours reads the answers after the round: given apart), whether it kept up, and how far its time to first token and its
last event are from the truth. Floors are in `bench-gate.md` section 7: 30 µs an event, 3 ms.

No asserts on time: a shared machine would make them lie. The ratio between the clients is the figure
that holds across machines.
"""

# ruff: noqa: T201 - a program that prints its table
from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from reconciler.bench.load import collect
from reconciler.bench.load_plan import Endpoint, LoadPlan, Prompt
from reconciler.bench.summary import outcomes

_PADDING = "chatcmpl-5f0c1e2ab3d94c0f8e77a1b2c3d4e5f6"


@dataclass(frozen=True)
class Told:
    """What one client did: its own cost, and its view of the times."""

    name: str
    cpu_s: float
    later_cpu_s: float
    wall_s: float
    events: int
    first: dict[int, float]
    last: dict[int, float]


def _chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    body = {"id": _PADDING, "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    return f"data: {json.dumps(body | more)}\n\n".encode()


def serve(pipe: Connection, events: int, rate: float, streams: int) -> None:
    """Write to every stream in steps, as an engine does, once all of them have asked."""
    asyncio.run(_serve(pipe, events, rate, streams))


async def _serve(pipe: Connection, events: int, rate: float, streams: int) -> None:
    truth: dict[int, tuple[float, float]] = {}
    waiting: dict[int, asyncio.StreamWriter] = {}
    full = asyncio.Event()
    told = asyncio.Event()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        body = json.loads(await reader.readexactly(length))
        number = int(body["messages"][0]["content"].split("#")[1])
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        waiting[number] = writer
        if len(waiting) == streams:
            full.set()
        await told.wait()
        writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    await full.wait()
    chunk = _chunk(" word")
    framed = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
    due = time.perf_counter()
    for step in range(events):
        due += 1 / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for number, writer in waiting.items():
            writer.write(framed)
            now = time.perf_counter()
            truth[number] = (truth[number][0] if step else now, now)
    usage = {"prompt_tokens": 4, "completion_tokens": events}
    tail = _chunk("", "length", usage=usage) + b"data: [DONE]\n\n"
    for writer in waiting.values():
        writer.write(f"{len(tail):x}\r\n".encode() + tail + b"\r\n0\r\n\r\n")
    pipe.send(truth)
    pipe.recv()
    told.set()


def ours(port: int, events: int, streams: int) -> Told:
    """Read the load with the gate's own client."""
    plan = LoadPlan(
        run="bench",
        prompts=tuple(Prompt("p", f"#{n}#") for n in range(streams)),
        concurrency=streams,
        requests=streams,
        max_tokens=events,
    )
    endpoint = Endpoint("127.0.0.1", port, "chat", "m")
    collected = collect(plan, endpoint)
    began = time.thread_time()
    read = outcomes(plan, endpoint, collected)
    parsing = time.thread_time() - began
    good = [(o.record.number, o.reading.token_times) for o in read if o.reading and not o.failure]
    wall = collected.ended - collected.began
    return Told(
        f"reconcile ({collected.client})",
        collected.cpu_share * wall,
        parsing,
        wall,
        sum(len(times) for _, times in good),
        {number: times[0] for number, times in good},
        {number: times[-1] for number, times in good},
    )


def with_httpx(port: int, events: int, streams: int) -> Told:
    """Read the load as most scripts do: httpx, lines, JSON of every event."""
    import httpx  # noqa: PLC0415 - only this benchmark needs it

    first: dict[int, float] = {}
    last: dict[int, float] = {}
    count = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal count
        body = {"messages": [{"role": "user", "content": f"#{number}#"}], "stream": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with client.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                if json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    now = time.perf_counter()
                    first.setdefault(number, now)
                    last[number] = now
                    count += 1

    async def every() -> None:
        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(limits=limits, timeout=120) as client:
            await asyncio.gather(*(one(client, n) for n in range(streams)))

    began, cpu = time.perf_counter(), time.thread_time()
    asyncio.run(every())
    return Told(
        "httpx", time.thread_time() - cpu, 0.0, time.perf_counter() - began, count, first, last
    )


def measure(
    client: Callable[[int, int, int], Told], events: int, rate: float, streams: int
) -> dict[str, Any]:
    """Play the load to one client and compare what it saw with the truth."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(there, events, rate, streams), daemon=True)
    process.start()
    told = client(here.recv(), events, streams)
    truth: dict[int, tuple[float, float]] = here.recv()
    here.send("done")
    process.join(10)
    first = [(told.first[n] - truth[n][0]) * 1000 for n in told.first]
    last = [(told.last[n] - truth[n][1]) * 1000 for n in told.last]
    return {
        "client": told.name,
        "us_per_event": told.cpu_s / told.events * 1e6,
        "us_later": told.later_cpu_s / told.events * 1e6,
        "first_token_late_ms_p50": statistics.median(first),
        "last_event_late_ms_p50": statistics.median(last),
        "core_share": told.cpu_s / told.wall_s,
        "events": told.events,
    }


def main() -> None:
    """Print a line for each client, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="events a second and stream")
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    events = int(asked.rate * asked.seconds)
    clients: list[Callable[[int, int, int], Told]] = [ours]
    try:
        import httpx  # noqa: F401, PLC0415 - is it there?
    except ImportError:
        print("httpx is not installed: no comparison")
    else:
        clients.append(with_httpx)
    found = [measure(client, events, asked.rate, asked.streams) for client in clients]
    print(f"{asked.streams} streams x {asked.rate:g} events/s, {events} events each")
    for row in found:
        print(
            f"  {row['client']:26} {row['us_per_event']:7.1f} µs CPU/event (floor 30) "
            f"+ {row['us_later']:4.1f} after the round   "
            f"first token late {row['first_token_late_ms_p50']:7.2f} ms (floor 3)   "
            f"last event late {row['last_event_late_ms_p50']:7.2f} ms   {row['core_share']:4.0%} of a core"
        )
    if len(found) > 1:
        theirs, own = found[1]["us_per_event"], found[0]["us_per_event"]
        ratio, whole = theirs / own, theirs / (own + found[0]["us_later"])
        print(
            f"  ratio httpx / ours: {ratio:.1f} during the round, {whole:.1f} with the reading after it"
        )


if __name__ == "__main__":
    main()

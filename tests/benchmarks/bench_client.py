"""What the load generator costs and how true it is, beside aiohttp and httpx, in one run.

    python tests/benchmarks/bench_client.py [--seconds 3] [--levels 1x100,64x100,256x50]

A paced server in a process of its own writes one event a token to every stream and knows when it did.
Each client reads the same load: so many streams of so many events a second. Printed for each: µs of the client
thread's own CPU for each event (ours reads the answers after the round: given apart), how late its stamps are
(median and p99 of all events; of first tokens), how wrong its decode speed is, and whether it kept up. Floors are
in `bench-gate.md` section 7: 30 µs an event, 3 ms; at 256 streams p99 below 5 ms; start-up below 0.3 s.

BENCH_ALONE=1 gives server and client a core each, in the real-time class. No asserts on time: a shared machine would make them lie. The ratio between the clients is the figure
that holds across machines.
"""

# ruff: noqa: T201 - a program that prints its table
from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from reconciler.bench.load import _loop_factory, collect
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
    times: dict[int, list[float]]
    decode_tps: float | None = None


def _chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    body = {"id": _PADDING, "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    return f"data: {json.dumps(body | more)}\n\n".encode()


def serve(pipe: Connection, events: int, rate: float, streams: int) -> None:
    """Write to every stream in steps, as an engine does, once all of them have asked."""
    _alone(1)
    asyncio.run(_serve(pipe, events, rate, streams))


async def _serve(pipe: Connection, events: int, rate: float, streams: int) -> None:
    truth: dict[int, list[float]] = {}
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
    for _ in range(events):
        due += 1 / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for number, writer in waiting.items():
            writer.write(framed)
            truth.setdefault(number, []).append(time.perf_counter())
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
    speeds = [
        1 / o.reading.decode_time_per_token
        for o in read
        if o.reading and o.reading.decode_time_per_token
    ]
    wall = collected.ended - collected.began
    return Told(
        f"reconcile ({collected.client})",
        collected.cpu_share * wall,
        parsing,
        wall,
        sum(len(times) for _, times in good),
        {number: list(times) for number, times in good},
        statistics.median(speeds),
    )


def with_httpx(port: int, events: int, streams: int) -> Told:
    """Read the load as most scripts do: httpx, lines, JSON of every event."""
    import httpx  # noqa: PLC0415 - only this benchmark needs it

    times: dict[int, list[float]] = {}

    async def one(client: httpx.AsyncClient, number: int) -> None:
        mine = times.setdefault(number, [])
        body = {"messages": [{"role": "user", "content": f"#{number}#"}], "stream": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with client.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                if json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    mine.append(time.perf_counter())

    async def every() -> None:
        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(limits=limits, timeout=120) as client:
            await asyncio.gather(*(one(client, n) for n in range(streams)))

    began, cpu = time.perf_counter(), time.thread_time()
    asyncio.run(every())
    return _told("httpx", times, began, cpu)


def with_aiohttp(port: int, events: int, streams: int) -> Told:
    """Read the load as the engines' own Python clients do: aiohttp on uvloop where it is, its lines, JSON of every event."""
    import aiohttp  # noqa: PLC0415 - only this benchmark needs it

    times: dict[int, list[float]] = {}

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        mine = times.setdefault(number, [])
        body = {"messages": [{"role": "user", "content": f"#{number}#"}], "stream": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with client.post(url, json=body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                if json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    mine.append(time.perf_counter())

    async def every() -> None:
        limits = aiohttp.TCPConnector(limit=streams)
        async with aiohttp.ClientSession(connector=limits) as client:
            await asyncio.gather(*(one(client, n) for n in range(streams)))

    factory, loop_name = _loop_factory()
    began, cpu = time.perf_counter(), time.thread_time()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(every())
    return _told(f"aiohttp ({loop_name})", times, began, cpu)


def _told(name: str, times: dict[int, list[float]], began: float, cpu: float) -> Told:
    spent, wall = time.thread_time() - cpu, time.perf_counter() - began
    speeds = [(len(t) - 1) / (t[-1] - t[0]) for t in times.values() if len(t) > 1]
    count = sum(len(t) for t in times.values())
    return Told(name, spent, 0.0, wall, count, times, statistics.median(speeds))


def _alone(core: int) -> None:
    """With BENCH_ALONE=1 (root): take a core for oneself, so that whatever else the machine does stays out of the numbers."""
    if os.environ.get("BENCH_ALONE") == "1":
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def measure(
    client: Callable[[int, int, int], Told], events: int, rate: float, streams: int
) -> dict[str, Any]:
    """Play the load to one client and compare what it saw with the truth."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(there, events, rate, streams), daemon=True)
    process.start()
    port = here.recv()
    _alone(0)
    told = client(port, events, streams)
    truth: dict[int, list[float]] = here.recv()
    here.send("done")
    process.join(10)
    lags = sorted(
        (seen - sent) * 1000
        for number, times in told.times.items()
        for seen, sent in zip(times, truth[number], strict=False)
    )
    first = [(told.times[n][0] - truth[n][0]) * 1000 for n in told.times]
    speed = statistics.median((len(t) - 1) / (t[-1] - t[0]) for t in truth.values())
    behind = max(told.times[n][-1] - truth[n][-1] for n in told.times)
    return {
        "client": told.name,
        "us_per_event": told.cpu_s / told.events * 1e6,
        "us_later": told.later_cpu_s / told.events * 1e6,
        "first_ms_p50": statistics.median(first),
        "lag_ms_p50": lags[len(lags) // 2],
        "lag_ms_p99": lags[int(len(lags) * 0.99)],
        "speed_error": (told.decode_tps or 0.0) / speed - 1,
        "kept_up": told.events == events * streams and behind < 0.1,
        "core_share": told.cpu_s / told.wall_s,
    }


def start_up() -> tuple[float, float]:
    """Give processor seconds until the client is ready in a new process, and until the whole command has said its help."""
    found = []
    for words in (["-c", "import reconciler.bench.load"], ["-m", "reconciler", "bench", "--help"]):
        took = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        found.append(min(took))
    return found[0], found[1]


def main() -> None:
    """Print a line for each client, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--levels", default="1x100,64x100,256x50", help="streams x events/s")
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    clients: list[Callable[[int, int, int], Told]] = [ours]
    for name, client in (("aiohttp", with_aiohttp), ("httpx", with_httpx)):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: no comparison")
        else:
            clients.append(client)
    ready, said = start_up()
    print(f"start-up, CPU: client ready {ready:.2f} s (floor 0.3), `bench --help` {said:.2f} s")
    for level in asked.levels.split(","):
        streams, rate = (float(part) for part in level.split("x"))
        events = int(rate * asked.seconds)
        found = [measure(client, events, rate, int(streams)) for client in clients]
        print(f"{streams:g} streams x {rate:g} events/s, {events} events each")
        for row in found:
            print(_line(row))
        for peer in found[1:]:
            own = found[0]["us_per_event"]
            whole = peer["us_per_event"] / (own + found[0]["us_later"])
            print(
                f"  ratio {peer['client']} / ours: {peer['us_per_event'] / own:.1f} in the round, {whole:.1f} with the reading after it"
            )


def _line(row: dict[str, Any]) -> str:
    return (
        f"  {row['client']:20} {row['us_per_event']:7.1f} µs/event + {row['us_later']:4.1f} later   "
        f"first token late {row['first_ms_p50']:7.2f} ms   stamps late {row['lag_ms_p50']:6.2f} / {row['lag_ms_p99']:6.2f} ms (p50/p99)   "
        f"speed {row['speed_error']:+.2%}   {row['core_share']:4.0%} of a core{'' if row['kept_up'] else '   DID NOT KEEP UP'}"
    )


if __name__ == "__main__":
    main()

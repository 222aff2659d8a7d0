"""What the load generator costs and how true it is, beside aiohttp, SGLang's two clients and guidellm, in one run.

    python tests/benchmarks/bench_client.py [--seconds 3] [--levels 1x100,64x100,256x50]
        [--sglang-python PYTHON] [--guidellm GUIDELLM] [--tokenizer FOLDER]

A paced server in a process of its own writes one event a token to every stream and knows when it did. Each client reads
the same load: so many streams of so many events a second, all begun at once. Two tables.

Clients in this process (ours, aiohttp; httpx where it is installed): µs of the client thread's own CPU for each event
(ours reads the answers after the round: given apart), how late its stamps are (median and p99 of all events; of first
tokens), how wrong its decode speed is, whether it kept up.

Whole tools, ours among them, by what they report at their end against the truth: median TTFT, time of a token, p99 of
the gaps; µs of CPU an event of all their processes, less that of a minimal run, which is the start-up beside it. They
live in environments of their own: `--sglang-python` is an interpreter that has `sglang` (its Python client and its Rust
one), `--guidellm` the program; both take a tokenizer from a folder. What is not given is said to be missing.

Targets: at most 30 µs an event and 3 ms of TTFT at 64 x 100; p99 late by less than 5 ms at 256 x 50; start-up below 0.3 s.

BENCH_ALONE=1 (root) gives the server and the clients of this process a core each, in the real-time class; the tools, ours
among them, run on both cores at nice -15, so that what else the machine does stays out of the numbers. The load of the machine is printed. No asserts on time: a shared machine would make them lie. The ratio between the
clients is the figure that holds across machines.
"""

# ruff: noqa: T201 - a program that prints its table
from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

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
    factory, _ = _loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(pipe, events, rate, streams))


class _Board:
    """Who asked and when, and what was written when."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.truth: dict[int, list[float]] = {}
        self.arrived: dict[int, float] = {}
        self.waiting: dict[int, asyncio.Transport] = {}
        self.full = asyncio.Event()

    def asked(self, transport: asyncio.Transport, at: float, head: bytes, body: bytes) -> None:
        """Take a request; by its number where the prompt has one, else by its turn."""
        if not head.startswith(b"POST"):
            listed = json.dumps(
                {"object": "list", "data": [{"id": "m", "object": "model"}]}
            ).encode()
            size = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(listed)}\r\n\r\n"
            transport.write(size.encode() + listed)
            return
        named = re.search(rb"#(\d+)#", body)
        number = int(named[1]) if named else len(self.waiting)
        self.arrived[number] = at
        self.waiting[number] = transport
        transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if len(self.waiting) == self.streams:
            self.full.set()


class _Connection(asyncio.Protocol):
    """One connection: stamps a request where its first bytes arrive."""

    transport: asyncio.Transport

    def __init__(self, board: _Board) -> None:
        self.board, self.held, self.at = board, b"", 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Stamp, and answer what is whole."""
        if not self.held:
            self.at = time.perf_counter()
        self.held += data
        head, blank, body = self.held.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head.lower())
        if blank and len(body) >= (int(length[1]) if length else 0):
            self.held = b""
            self.board.asked(self.transport, self.at, head, body)


async def _serve(pipe: Connection, events: int, rate: float, streams: int) -> None:
    board = _Board(streams)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(board), "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    await board.full.wait()
    chunk = _chunk(" word")
    framed = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
    due = time.perf_counter()
    for _ in range(events):
        due += 1 / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for number, transport in board.waiting.items():
            transport.write(framed)
            board.truth.setdefault(number, []).append(time.perf_counter())
    usage = {"prompt_tokens": 4, "completion_tokens": events, "total_tokens": events + 4}
    counted = json.dumps({"id": _PADDING, "choices": [], "usage": usage}).encode()
    tail = _chunk("", "length") + b"data: " + counted + b"\n\ndata: [DONE]\n\n"
    for transport in board.waiting.values():
        transport.write(f"{len(tail):x}\r\n".encode() + tail + b"\r\n0\r\n\r\n")
    pipe.send((board.truth, board.arrived))
    # A tool may still ask for this and that; its answer is the same.
    await asyncio.to_thread(pipe.recv)
    for transport in board.waiting.values():
        transport.close()


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
                if any(c["delta"].get("content") for c in json.loads(line[6:])["choices"]):
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
                if any(c["delta"].get("content") for c in json.loads(line[6:])["choices"]):
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
    truth: dict[int, list[float]]
    truth, _ = here.recv()
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


# -- whole tools -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A program that measures, and how to read its end: median TTFT, seconds a token, p99 of gaps."""

    name: str
    argv: Callable[[int, int, int, Path], list[str]]
    read: Callable[[dict[str, Any]], tuple[float, float, float | None]]


OURS = """
import dataclasses, json, sys
from reconciler.bench.load import measure
from reconciler.bench.load_plan import Endpoint, LoadPlan, Prompt
port, events, streams = map(int, sys.argv[1:4])
plan = LoadPlan("bench", tuple(Prompt("p", f"#{n}#") for n in range(streams)), streams, streams, events)
found = measure(plan, Endpoint("127.0.0.1", port, "chat", "m"))
told = {"ttft": found.ttft.p50, "token": 1 / found.decode_tps.p50, "gap": found.event_gap.percentile(0.99)}
open(sys.argv[4], "w").write(json.dumps(told))
"""


RUST = """
import importlib.util, pathlib, sys
package = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
(path,) = (package / "srt" / "rust_extensions").glob("_bench.*.so")
spec = importlib.util.spec_from_file_location("_bench", path)
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)
client.run_argv(["sglang-bench", *sys.argv[1:]])
"""
"""The extension itself: `-m sglang.benchmark.rust_client` imports the whole package first, ten seconds of torch."""


def _sglang_words(tokenizer: Path) -> Callable[[int, int, int, Path], list[str]]:
    def words(port: int, events: int, streams: int, output: Path) -> list[str]:
        usage = '{"stream_options": {"include_usage": true}}'
        return [
            "--backend", "sglang-oai-chat", "--base-url", f"http://127.0.0.1:{port}", "--dataset-name", "random-ids",
            "--random-input-len", "16", "--random-output-len", str(events), "--random-range-ratio", "1.0", "--model", "m",
            "--tokenizer", str(tokenizer), "--num-prompts", str(streams), "--max-concurrency", str(streams),
            "--warmup-requests", "0", "--extra-request-body", usage, "--disable-tqdm", "--output-file", str(output),
        ]  # fmt: skip

    return words


def _of_sglang(told: dict[str, Any]) -> tuple[float, float, float | None]:
    return told["median_ttft_ms"] / 1e3, told["median_tpot_ms"] / 1e3, told["p99_itl_ms"] / 1e3


def _of_guidellm(told: dict[str, Any]) -> tuple[float, float, float | None]:
    metrics = told["benchmarks"][-1]["metrics"]
    first, gap = (
        metrics[k]["successful"]["median"] / 1e3
        for k in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    return first, gap, None  # A mean for each request: no gaps.


def tools(asked: argparse.Namespace) -> list[Tool]:
    """Give the tools that are there, and say which are not."""
    found = [
        Tool(
            "reconcile",
            lambda port, events, streams, output: [
                sys.executable,
                "-c",
                OURS,
                *map(str, (port, events, streams)),
                str(output),
            ],
            lambda told: (told["ttft"], told["token"], told["gap"]),
        )
    ]
    if asked.sglang_python and asked.tokenizer:
        words = _sglang_words(asked.tokenizer)
        for name, start in (
            ("sglang, Rust", ["-c", RUST]),
            ("sglang, Python", ["-m", "sglang.bench_serving"]),
        ):
            run = [asked.sglang_python, *start]
            found.append(Tool(name, lambda *given, run=run: [*run, *words(*given)], _of_sglang))
    else:
        print("SGLang's clients are not compared: --sglang-python and --tokenizer name them")
    if asked.guidellm and asked.tokenizer:

        def guidellm(port: int, events: int, streams: int, output: Path) -> list[str]:
            return [
                asked.guidellm, "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model=m",
                "--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={streams}",
                "--tokenizer", f"kind=huggingface_auto,model={asked.tokenizer}",
                "--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={events}",
                "--output", f"kind=json,path={output}", "--disable-console",
            ]  # fmt: skip

        found.append(Tool("guidellm", guidellm, _of_guidellm))
    else:
        print("guidellm is not compared: --guidellm and --tokenizer name it")
    return found


def run_tool(tool: Tool, events: int, rate: float, streams: int) -> dict[str, Any]:
    """Let a tool measure the load from its start to its end, and compare what it says with the truth."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(there, events, rate, streams), daemon=True)
    process.start()
    port = here.recv()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        began = time.perf_counter()
        command = tool.argv(port, events, streams, output)
        child = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not here.poll(TOOL_LIMIT_S):
            child.kill()
            process.kill()
            raise SystemExit(
                f"{tool.name} did not send its {streams} requests: {' '.join(command)}"
            )
        truth, arrived = here.recv()
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        here.send("done")
        process.join(10)
        first, token, gap = tool.read(
            json.loads(
                output.read_text().splitlines()[-1] if "sglang" in tool.name else output.read_text()
            )
        )
    true_first = statistics.median(truth[n][0] - arrived[n] for n in truth)
    true_token = statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in truth.values())
    gaps = sorted(b - a for t in truth.values() for a, b in itertools.pairwise(t))
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": wall,
        "first_ms": (first - true_first) * 1000,
        "token_error": token / true_token - 1,
        "gap_ms": None if gap is None else (gap - gaps[int(len(gaps) * 0.99)]) * 1000,
    }


_FIRST = ("nice", "-n", "-15") if os.environ.get("BENCH_ALONE") == "1" else ()
TOOL_LIMIT_S = 120.0
"""Until all of a tool's requests are there: guidellm takes half a minute on an idle machine."""


def compare_tools(asked: argparse.Namespace) -> None:
    """Print a line for each tool and level."""
    there = tools(asked)
    least = {tool.name: run_tool(tool, 4, 50.0, 1) for tool in there}
    print(
        "whole tools, by what they report against the truth; CPU of all their processes less that of a run of four events"
    )
    for tool in there:
        print(
            f"  {tool.name:16} starts in {least[tool.name]['wall_s']:5.1f} s, {least[tool.name]['cpu_s']:5.1f} s of CPU"
        )
    for level in asked.levels.split(","):
        streams, rate = (float(part) for part in level.split("x"))
        events = int(rate * asked.seconds)
        print(f"{streams:g} streams x {rate:g} events/s, {events} events each   {_load()}")
        for tool in there:
            row = run_tool(tool, events, rate, int(streams))
            each = (row["cpu_s"] - least[tool.name]["cpu_s"]) / (events * streams) * 1e6
            gap = "gaps not told" if row["gap_ms"] is None else f"p99 gap {row['gap_ms']:+7.2f} ms"
            print(
                f"  {tool.name:16} {each:7.1f} µs/event   TTFT p50 {row['first_ms']:+8.2f} ms   token time {row['token_error']:+7.2%}   {gap}"
            )


def _load() -> str:
    return "load of the machine " + " ".join(f"{value:.1f}" for value in os.getloadavg())


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
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--levels", default="1x100,64x100,256x50", help="streams x events/s")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--sglang-python", help="an interpreter that has sglang")
    parser.add_argument("--guidellm", help="the program")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer, for the tools")
    asked = parser.parse_args()
    clients: list[Callable[[int, int, int], Told]] = [ours]
    for name, client in (("aiohttp", with_aiohttp), ("httpx", with_httpx)):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: no comparison")
        else:
            clients.append(client)
    ready, said = start_up()
    print(f"start-up, CPU: client ready {ready:.2f} s (floor 0.3), `bench --help` {said:.2f} s")
    print(_load())
    compare_tools(asked)
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

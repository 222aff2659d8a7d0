"""`reconcile bench`: measure a live server without touching it, or read a recorded stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli.context import (
    DEFAULT_SPECS,
    Format,
    Output,
    Specs,
    guarded,
    load_specs,
    one_server,
    out,
    out_markup,
    settings,
    terminal_width,
)
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from reconciler.bench.load_plan import Endpoint, Progress
    from reconciler.bench.meter import Meter
    from reconciler.core.benchmark import Benchmark

# A recording of the longest answer that the client itself would take is below this.
REPLAY_BYTES_LIMIT = 256 << 20
KEY_BYTES_LIMIT = 64 * 1024
STREAMS_LIMIT = 4096


class Origin(StrEnum):
    """Where the client runs."""

    HOST = "host"
    CONTROLLER = "controller"


class Route(StrEnum):
    """Which route of a server is asked."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"


class Kind(StrEnum):
    """How tokens are drawn."""

    REALISTIC = "realistic"
    GREEDY = "greedy"


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a measurement."""

    concurrencies: tuple[int, ...]
    requests: int | None
    duration_s: float | None
    workload: str
    mix: Mapping[str, float] | None
    max_tokens: int
    origin: Origin
    output: Output


def _help() -> str:
    from textwrap import wrap

    from reconciler.core.benchmark import METRICS

    words = []
    for name, meaning in METRICS.items():
        first, *rest = wrap(f"{name}: {meaning}", 74)
        words += [f"    {first}", *(f"        {line}" for line in rest)]
    return "\n".join(
        [
            "Measure a live server of the specs, or any by its URL, without touching it: no lease, no change.",
            "",
            "It sends load, so its users will notice. No verdict: that is the gate's. Levels take turns over three rounds after a warm-up; ± is the spread between rounds.",
            "",
            "\b",
            "Examples:",
            "    reconcile bench qwen                                  1 and 16 streams",
            "    reconcile bench qwen --concurrency 1,16,64 --duration 60 --from host",
            "    reconcile bench --url http://127.0.0.1:8000 --workload prompts.jsonl -o json",
            "    reconcile bench --replay recorded.sse -o json         read a recorded stream",
            "",
            "\b",
            "What the numbers mean (tokens are the server's own usage, events are never counted as tokens):",
            *words,
            "",
            "Exit codes: 0 measured, 1 requests failed or texts are garbled, 7 could not be measured, 8 inconclusive (this client was the bottleneck, or no usage), 64 usage. With --replay 0 whatever the stream says (`outcome` tells it), as `read` and `diagnose` do.",
        ]
    )


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command(help=_help())
    def bench(
        server: Annotated[str, typer.Argument(help="A server of the specs.")] = "",
        url: Annotated[
            str, typer.Option("--url", help="Any server, such as http://127.0.0.1:8000.")
        ] = "",
        replay: Annotated[
            Path | None, typer.Option("--replay", help="Read a recorded stream instead.")
        ] = None,
        request: Annotated[
            str,
            typer.Option(
                "--request",
                metavar="JSON",
                help='With --replay: what was asked, {"endpoint", "max_tokens", "ignore_eos", "n", …}.',
            ),
        ] = "",
        concurrency: Annotated[
            str, typer.Option("--concurrency", "-c", help="Streams at once, such as 1,16,64.")
        ] = "1,16",
        requests: Annotated[
            int | None,
            typer.Option("--requests", min=1, max=1_000_000, help="Requests of each level."),
        ] = None,
        duration: Annotated[
            float | None,
            typer.Option("--duration", min=0.1, max=86_400, help="Seconds of each level."),
        ] = None,
        workload: Annotated[
            str,
            typer.Option(
                "--workload",
                help="realistic, greedy, or a file of prompts (JSON lines or ShareGPT's form).",
            ),
        ] = "realistic",
        mix: Annotated[
            str, typer.Option("--mix", help="Shares of classes, such as code=3,story=1.")
        ] = "",
        max_tokens: Annotated[
            int, typer.Option("--max-tokens", min=1, max=131_072, help="Longest answer.")
        ] = 256,
        origin: Annotated[
            Origin,
            typer.Option("--from", help="Run the client on the server's host, or here."),
        ] = Origin.CONTROLLER,
        route: Annotated[
            Route | None, typer.Option("--api", help="With --url: which route; chat if left out.")
        ] = None,
        model: Annotated[
            str, typer.Option("--model", help="With --url: the model; else the first it lists.")
        ] = "",
        engine: Annotated[
            str,
            typer.Option("--engine", help="With --url: sglang, vllm, llamacpp; else as it says."),
        ] = "",
        api_key_file: Annotated[
            Path | None, typer.Option("--api-key-file", help="With --url: a file with the key.")
        ] = None,
        specs: Specs = DEFAULT_SPECS,
        output: Format = Output.TEXT,
    ) -> None:
        def work() -> int:
            _one_subject(server, url, replay)
            if replay is not None:
                return _replay(replay, request, output)
            asked = Asked(
                concurrencies=_streams(concurrency),
                requests=requests,
                duration_s=duration,
                workload=workload,
                mix=_mix(mix),
                max_tokens=max_tokens,
                origin=origin,
                output=output,
            )
            if url:
                if origin is Origin.HOST:
                    raise UsageError(
                        "--from host needs a server of the specs: a URL has no host to log in to"
                    )
                from reconciler.effects.bench import endpoint_at

                key = _key(api_key_file)
                found = endpoint_at(
                    url,
                    api=route.value if route else None,
                    model=model or None,
                    engine=engine or None,
                    bearer=key,
                )
                return _measured(url, found, asked)
            return _of_specs(server, specs, asked)

        guarded(work)


def _one_subject(server: str, url: str, replay: Path | None) -> None:
    given = [
        word for word, there in (("SERVER", server), ("--url", url), ("--replay", replay)) if there
    ]
    if len(given) != 1:
        what = f"{' and '.join(given)} exclude each other" if given else "nothing to measure"
        raise UsageError(f"{what}: name a server of the specs, --url or --replay")


def _streams(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(
        w.isascii() and w.isdigit() and len(w) < 6 and 1 <= int(w) <= STREAMS_LIMIT for w in words
    ):
        raise UsageError(
            f"--concurrency {text}: write numbers from 1 to {STREAMS_LIMIT}, such as 1,16,64"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def _mix(text: str) -> Mapping[str, float] | None:
    if not text:
        return None
    weights = {}
    for part in text.split(","):
        kind, equals, weight = part.partition("=")
        try:
            value = float(weight)
        except ValueError:
            value = -1.0
        if not equals or not 0 <= value < 1e6:
            raise UsageError(f"--mix {text}: write classes and weights, such as code=3,story=1")
        weights[kind.strip()] = value
    return weights


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            key = file.read(KEY_BYTES_LIMIT).decode("latin-1").strip()
    except OSError as error:
        raise UsageError(f"--api-key-file {path}: cannot be read ({error.strerror})") from None
    if not key or any(ord(c) <= 32 or ord(c) > 126 for c in key):
        raise UsageError(f"--api-key-file {path}: holds no key in one line")
    return key


# -- recorded streams ----------------------------------------------------------------------------------


def _replay(path: Path, request: str, output: Output) -> int:
    from reconciler.bench.stream import replay
    from reconciler.views.benchmark import reading_lines

    try:
        with path.open("rb") as file:
            recorded = file.read(REPLAY_BYTES_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"--replay {path}: cannot be read ({error.strerror})") from None
    if len(recorded) > REPLAY_BYTES_LIMIT:
        raise UsageError(f"--replay {path}: is larger than {REPLAY_BYTES_LIMIT >> 20} MiB")
    asked = _request(request)
    try:
        told = replay(recorded, asked)
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"--replay {path}: is neither a response body nor a JSON list of packets {{t_ms, b64}}"
        ) from None
    if output is Output.JSON:
        out(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        for line in reading_lines(told):
            out(line)
    return 0


def _request(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise UsageError("--request is no JSON object")
    kinds: dict[str, type] = {
        "endpoint": str, "max_tokens": int, "ignore_eos": bool, "include_usage": bool,
        "continuous_usage": bool, "n": int,
    }  # fmt: skip
    for key, value in asked.items():
        kind = kinds.get(key)
        if kind is not None and value is not None and type(value) is not kind:
            raise UsageError(f"--request: {key} must be of type {kind.__name__}")
    if asked.get("endpoint", "chat") not in {"chat", "completions", "generate"}:
        raise UsageError("--request: endpoint is chat, completions or generate")
    return {key: value for key, value in asked.items() if value is not None}


# -- measuring -----------------------------------------------------------------------------------------


def _of_specs(name: str, specs: Path, asked: Asked) -> int:
    from reconciler.effects.bench import bearer_of, endpoint_of, on_the_host
    from reconciler.effects.host_meter import HostMeter
    from reconciler.wiring import connected_host

    setup = settings()
    server, host = one_server(load_specs(specs, setup), name)
    connected = connected_host(host, Path(setup.state_dir), setup.ssh_config)
    try:
        if asked.origin is Origin.HOST:
            there = on_the_host(server, bearer=bearer_of(server, connected))
            with HostMeter(host.name, connected.inner.transport).running() as meter:
                return _measured(name, there, asked, meter)
        with endpoint_of(server, connected) as endpoint:
            return _measured(name, endpoint, asked)
    finally:
        connected.close()


def _measured(subject: str, endpoint: Endpoint, asked: Asked, meter: Meter | None = None) -> int:
    from reconciler.bench.ladder import Ladder, climb
    from reconciler.bench.meter import LOCAL
    from reconciler.bench.workloads import workload_named
    from reconciler.core.benchmark import Benchmark

    named = asked.workload in set(Kind)
    workload = workload_named(
        asked.workload if named else Kind.REALISTIC,
        endpoint.engine,
        prompts=None if named else Path(asked.workload),
        mix=asked.mix,
    )
    ladder = Ladder(
        workload,
        asked.concurrencies,
        requests=asked.requests,
        duration_s=asked.duration_s,
        max_tokens=asked.max_tokens,
    )
    with _progress() as on_progress:
        results = climb(ladder, endpoint, meter=meter or LOCAL, on_progress=on_progress)
    facts = {"model": endpoint.model or "", "engine": endpoint.engine, "api": endpoint.api}
    found = Benchmark(
        subject, asked.origin.value, workload.name, asked.max_tokens, results, facts, workload.notes
    )
    _show(found, asked.output)
    return _exit_code(found)


def _show(found: Benchmark, output: Output) -> None:
    if output is Output.JSON:
        out(json.dumps(found.to_json(), indent=2))
        return
    from rich.console import Console

    from reconciler.views.benchmark import level_table, lines
    from reconciler.views.table import table_lines

    if found.levels:
        out_markup(table_lines(level_table(found), terminal_width()))
    console = Console()
    out_markup(lines(found, colour=console.is_terminal and not console.no_color))


def _exit_code(found: Benchmark) -> int:
    from reconciler.core.conditions import HELD, UNKNOWN

    if found.broken or not found.levels:
        return UNKNOWN.code
    if found.faults:
        return 1
    return HELD.code if found.inconclusive else 0


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Say on standard error how far it is: on a terminal in one line, else a line a round."""
    said = ""

    def on_terminal(progress: Progress) -> None:
        sys.stderr.write(f"\r\x1b[2K{progress}")
        sys.stderr.flush()

    def in_a_log(progress: Progress) -> None:
        nonlocal said
        key = (
            f"{progress.run}, {'round ' + str(progress.round) if progress.round else 'warming up'}"
        )
        if key != said:
            said = key
            sys.stderr.write(f"{key}\n")

    yield on_terminal if sys.stderr.isatty() else in_a_log
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")

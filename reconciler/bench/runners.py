"""What other benchmark tools print, read into our words where the definitions agree, and left out where they do not. Pure.

The same word means different things (`bench-gate.md` section 1): TPOT of vLLM, guidellm and SGLang are three numbers,
none of them `decode_tps`; vLLM's TTFT may end with an empty event; tools that tokenize text again count other tokens.
So every member says which of its figures it maps, and the rest of a result stays empty: a limit on it is then
inconclusive, with the reason. Percentiles are kept out altogether: a printed p99 is no sample that could be judged.

Read tolerantly: unknown keys are ignored, what is missing or no finite number is not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reconciler.bench.load_plan import Endpoint, LoadPlan
from reconciler.core.measurement import Distribution, ReasonCode, RunResult

OUTPUT_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of a tool said, in our words. Times in seconds; None where it has no figure of this definition."""

    sent: int | None = None
    completed: int | None = None
    failed: int | None = None
    duration_s: float | None = None
    output_tps: float | None = None
    out_tok_s_wall: float | None = None
    decode_tps: float | None = None
    ttft: float | None = None
    e2e: float | None = None
    event_gap: float | None = None
    accept_length: float | None = None
    accept_rate: float | None = None


def _sglang(told: Mapping[str, Any]) -> Figures:
    """SGLang's clients, Python and Rust: TTFT agrees, throughput is over the whole run; failures count as successes there."""
    return Figures(
        completed=_count(told, "completed"),
        duration_s=_number(told, "duration"),
        out_tok_s_wall=_number(told, "output_throughput"),
        ttft=_ms(told, "median_ttft_ms"),
    )


def _vllm(told: Mapping[str, Any]) -> Figures:
    """`vllm bench serve`: E2E ends with the last token event as ours; its TTFT may be the role event's, so it is left out."""
    completed = _count(told, "completed")
    return Figures(
        sent=_count(told, "num_prompts"),
        completed=completed,
        failed=_count(told, "failed"),
        duration_s=_number(told, "duration"),
        out_tok_s_wall=_number(told, "output_throughput"),
        e2e=_ms(told, "median_e2el_ms"),
    )


def _guidellm(told: Mapping[str, Any]) -> Figures:
    """`guidellm`: TTFT agrees; its throughput is over a window cut by share, and its TPOT holds the first token."""
    runs = told.get("benchmarks")
    run = runs[-1] if isinstance(runs, list) and runs and isinstance(runs[-1], dict) else {}
    metrics = _inner(run, "metrics")
    totals = _inner(metrics, "request_totals")
    ttft = _inner(metrics, "time_to_first_token_ms", "successful")
    return Figures(
        sent=_count(totals, "total"),
        completed=_count(totals, "successful"),
        failed=_count(totals, "errored"),
        duration_s=_number(run, "duration"),
        ttft=_ms(ttft, "median"),
    )


def _aiperf(told: Mapping[str, Any]) -> Figures:
    """`aiperf`: first and last content agree; tokens are its own tokenizer's, so no speed is taken over."""
    completed = _count(_inner(told, "request_count"), "avg")
    if told.get("was_cancelled") is True or told.get("is_complete") is False:
        completed = None  # It was ended early, and counts what it had.
    errors = _count(_inner(told, "error_request_count"), "avg")  # Left out when there were none.
    return Figures(
        completed=completed,
        failed=errors or 0 if completed is not None else None,
        duration_s=_number(_inner(told, "benchmark_duration"), "avg"),
        ttft=_ms(_inner(told, "time_to_first_token"), "p50"),
        e2e=_ms(_inner(told, "request_latency"), "p50"),
    )


def _inference_perf(told: Mapping[str, Any]) -> Figures:
    """`inference-perf`: requests and failures; tokens are its own tokenizer's, and its TTFT misses reasoning."""
    return Figures(
        sent=_count(_inner(told, "load_summary"), "count"),
        completed=_count(_inner(told, "successes"), "count"),
        failed=_count(_inner(told, "failures"), "count"),
    )


def _own_words(told: Mapping[str, Any]) -> Figures:
    """Anything that prints one JSON object with our own names; whoever writes it vouches for the definitions."""
    numbers = ("duration_s", "output_tps", "out_tok_s_wall", "decode_tps", "ttft", "e2e", "event_gap", "accept_length", "accept_rate")  # fmt: skip
    return Figures(
        sent=_count(told, "sent"),
        completed=_count(told, "completed"),
        failed=_count(told, "failed"),
        **{name: _number(told, name) for name in numbers},
    )


READERS: Mapping[str, Callable[[Mapping[str, Any]], Figures]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "guidellm": _guidellm,
    "aiperf": _aiperf,
    "inference-perf": _inference_perf,
    "command": _own_words,
}
"""By the word under `kind:` of a runner in the operator's settings."""


def last_object(output: bytes) -> Mapping[str, Any] | None:
    """Find the last JSON object in what a tool wrote: the whole of it, or its last line (JSON lines, talk before it)."""
    text = output.decode("utf-8", "replace").strip()
    for part in _candidates(text):
        try:
            told = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(told, dict):
            return told
    return None


def _candidates(text: str) -> Iterable[str]:
    yield text
    yield from reversed(text.splitlines()[-50:])
    start = text.find("\n{")
    if start >= 0:  # Talk, and then an object over many lines.
        yield text[start:]


def result_of(kind: str, output: bytes, plan: LoadPlan, endpoint: Endpoint) -> RunResult:
    """Give the result of one round that a tool measured."""
    told = last_object(output)
    if told is None:
        return broken(plan, f"{kind} printed no JSON object")
    figures = READERS[kind](told)
    counts = _counts(figures, plan)
    if counts is None:
        return broken(plan, f"{kind} told no number of requests that can be believed")
    sent, completed = counts
    # A median stands for all its requests in the middle; nothing else can be judged by it.
    wall = figures.out_tok_s_wall
    return RunResult(
        run=plan.run,
        round=plan.round,
        workload=plan.workload,
        concurrency=plan.concurrency,
        max_tokens=plan.max_tokens,
        sent=sent,
        completed=completed,
        failures={"by_the_runner": sent - completed} if sent > completed else {},
        duration_s=figures.duration_s or 0.0,
        ttft=_middle(figures.ttft, completed),
        e2e=_middle(figures.e2e, completed),
        event_gap=_middle(figures.event_gap, completed),
        decode_tps=_middle(figures.decode_tps, completed),
        output_tps=wall if figures.output_tps is None else figures.output_tps,
        out_tok_s_wall=wall,
        accept_length=figures.accept_length,
        accept_rate=figures.accept_rate,
        accept_source=f"the runner ({kind})" if figures.accept_length is not None else "",
        client=f"runner {kind}",
        tunnelled=endpoint.tunnelled,
        fingerprint=_fingerprint(kind, plan, endpoint),
    )


def broken(plan: LoadPlan, why: str) -> RunResult:
    """Give the result of a round in which a tool measured nothing: no verdict about the server (S22)."""
    return RunResult(
        run=plan.run,
        round=plan.round,
        workload=plan.workload,
        concurrency=plan.concurrency,
        max_tokens=plan.max_tokens,
        infrastructure=ReasonCode.RUNNER,
        infrastructure_message=f"{plan.run}: {why}",
    )


def _counts(figures: Figures, plan: LoadPlan) -> tuple[int, int] | None:
    """Give sent and completed; what is not told is what was asked for, and what cannot be is None."""
    sent = plan.requests if figures.sent is None else figures.sent
    if figures.failed is not None and figures.sent is None and figures.completed is not None:
        sent = figures.completed + figures.failed
    completed = figures.completed
    if completed is None:
        completed = sent - figures.failed if figures.failed is not None else None
    if completed is None or not 0 <= completed <= sent or sent == 0:
        return None
    return sent, completed


def _fingerprint(kind: str, plan: LoadPlan, endpoint: Endpoint) -> Mapping[str, str]:
    return {
        "client": f"runner {kind}",
        "workload": plan.workload,
        "load": f"{plan.concurrency} streams, {plan.max_tokens} tokens",
        "measured": "through a tunnel" if endpoint.tunnelled else "directly",
        **{f"server.{key}": value for key, value in sorted(endpoint.server.items())},
    }


def _middle(value: float | None, count: int) -> Distribution:
    return Distribution() if value is None else Distribution((value,), count, value)


def _inner(told: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        value = told.get(key)
        told = value if isinstance(value, dict) else {}
    return told


def _number(told: Mapping[str, Any], key: str) -> float | None:
    value = told.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


def _ms(told: Mapping[str, Any], key: str) -> float | None:
    value = _number(told, key)
    return None if value is None else value / 1000


def _count(told: Mapping[str, Any], key: str) -> int | None:
    value = told.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value >= 0 and value == int(value) else None

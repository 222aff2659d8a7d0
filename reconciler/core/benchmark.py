"""What `reconcile bench` found: the rounds of several concurrencies, brought to one row each. Pure.

No verdict: a benchmark says what was measured and what is wrong with the measurement. The definitions are
`measurement.RunResult`'s. `bench/ladder.py` measures, `views/benchmark.py` shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reconciler.core.gate import CLIENT_CPU_LIMIT, CLIENT_LAG_LIMIT_MS
from reconciler.core.measurement import FORMAT_VERSION, Distribution, RunResult, short
from reconciler.core.significance import mean_of, requests_needed, variance

METRICS: Mapping[str, str] = {
    "ttft": "request written to first token event of any channel (text, reasoning, tool call)",
    "ttfv_ms": "request written to first visible text",
    "decode_tps": "per request: (tokens - tokens in the first token event) / (last - first token event); median",
    "event_gap": "time between token events of a stream; an event may hold several tokens: see tokens_per_event",
    "tokens_per_event": "tokens by the server's usage / token events",
    "e2e": "request written to last token event",
    "queue_ms": "what this client waited before it wrote a request; in no latency",
    "output_tps": "tokens a second of all streams, in the window in which all of them were busy",
    "out_tok_s_wall": "all tokens / first request to last token event, ramp and drain included",
    "error_rate": "failed / sent; a success is 2xx, no error in the stream, a finish_reason, and a token",
    "accept_length": "tokens per verify pass of speculative decoding; accept_rate: accepted / drafted tokens",
    "cached_prompt_share": "prompt tokens that the server took from its prefix cache",
    "client_cpu_share": "of one core, by this client; from 70 % on the run is inconclusive",
    "client_loop_lag_p99_ms": "how late this client's event loop was",
}
"""Tokens are always the server's `usage`; events are never counted as tokens."""


@dataclass(frozen=True, slots=True)
class Level:
    """One concurrency over all its rounds. Speeds are means of rounds, `spread` is their relative deviation."""

    concurrency: int
    rounds: tuple[RunResult, ...]

    @property
    def sent(self) -> int:
        """Count the requests of all rounds."""
        return sum(r.sent for r in self.rounds)

    @property
    def completed(self) -> int:
        """Count the successes of all rounds."""
        return sum(r.completed for r in self.rounds)

    @property
    def failed(self) -> int:
        """Count the failures of all rounds."""
        return sum(r.failed for r in self.rounds)

    def central(self, result: str) -> float | None:
        """Give the mean over rounds of a result's one number (its median where there is one per request)."""
        values = self._values(result)
        return mean_of(values) if values else None

    def spread(self, result: str) -> float | None:
        """Give the relative standard deviation between rounds; None of fewer than two."""
        values = self._values(result)
        if len(values) < 2 or not mean_of(values):
            return None
        return math.sqrt(variance(values)) / abs(mean_of(values))

    def pooled(self, result: str) -> Distribution:
        """Give a result's values of all rounds together."""
        parts = [getattr(r, result) for r in self.rounds]
        return Distribution.of(v for part in parts for v in part.values)

    def supports(self, percentile: float) -> bool:
        """Say whether so many successes can tell a percentile with 95 % confidence (59 for p95, 299 for p99)."""
        return self.completed >= requests_needed("max", percentile)

    def _values(self, result: str) -> list[float]:
        found = []
        for measured in self.rounds:
            value = getattr(measured, result)
            value = value.p50 if isinstance(value, Distribution) else value
            if value is not None:
                found.append(float(value))
        return found

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object: the row, without the rounds."""
        row: dict[str, Any] = {
            "concurrency": self.concurrency,
            "rounds": len(self.rounds),
            "sent": self.sent,
            "completed": self.completed,
            "failed": self.failed,
            "error_rate": short(self.failed / self.sent if self.sent else None),
            "empty": sum(r.empty for r in self.rounds),
        }
        for result in ("output_tps", "out_tok_s_wall", "decode_tps", "tokens_per_event"):
            row[result] = short(self.central(result))
        row["output_tps_spread"] = short(self.spread("output_tps"))
        row["decode_tps_spread"] = short(self.spread("decode_tps"))
        for result in ("ttft", "ttfv_ms", "e2e", "event_gap", "queue_ms"):
            values = self.pooled(result)
            marks = (50, 90, 95, 99)
            row[result] = {f"p{p}": short(values.percentile(p / 100)) for p in marks}
        row["percentiles_supported"] = [p for p in (50, 90, 95, 99) if self.supports(p)]
        for result in ("accept_length", "accept_rate", "cached_prompt_share"):
            row[result] = short(self.central(result))
        row["accept_source"] = next((r.accept_source for r in self.rounds if r.accept_source), "")
        row["client_cpu_share"] = short(max((r.client_cpu_share for r in self.rounds), default=0.0))
        lag = max((r.client_loop_lag_p99_ms for r in self.rounds), default=0.0)
        row["client_loop_lag_p99_ms"] = short(lag)
        return row


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A whole benchmark: what was asked of whom from where, and every round."""

    subject: str
    measured_from: str
    workload: str
    max_tokens: int
    results: tuple[RunResult, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def levels(self) -> tuple[Level, ...]:
        """Give the rounds that were measurements, by concurrency."""
        good = [r for r in self.results if r.infrastructure is None]
        steps = sorted({r.concurrency for r in good})
        return tuple(Level(c, tuple(r for r in good if r.concurrency == c)) for c in steps)

    @property
    def broken(self) -> str:
        """Say what kept us from measuring at the end, or ""."""
        last: dict[int, RunResult] = {r.concurrency: r for r in self.results}
        return next((r.infrastructure_message for r in last.values() if r.infrastructure), "")

    @property
    def doubts(self) -> tuple[str, ...]:
        """Name everything that makes the numbers less than they seem: inconclusive, with the reason."""
        return tuple(doubt for level in self.levels for doubt in _doubts(level))

    @property
    def inconclusive(self) -> bool:
        """Say whether the client was the bottleneck, or speed could not be told, at some level."""
        return any(
            any(r.client_cpu_share >= CLIENT_CPU_LIMIT or r.without_usage for r in level.rounds)
            for level in self.levels
        )

    @property
    def faults(self) -> tuple[str, ...]:
        """Name what is wrong with the server's answers."""
        return tuple(fault for level in self.levels for fault in _faults(level))

    def classes(self) -> dict[str, dict[str, float | None]]:
        """Give the first concurrency's speed and acceptance by class of prompt, as means of rounds."""
        rounds: Sequence[RunResult] = self.levels[0].rounds if self.levels else ()
        kinds = sorted({kind for r in rounds for kind in r.by_class})
        keys = ("decode_tps", "accept_length", "accept_rate", "output_tokens")
        table: dict[str, dict[str, float | None]] = {}
        for kind in kinds:
            rows = [r.by_class[kind] for r in rounds if kind in r.by_class]
            table[kind] = {"requests": math.fsum(row.get("requests") or 0.0 for row in rows)}
            for key in keys:
                values = [value for row in rows if (value := row.get(key)) is not None]
                table[kind][key] = short(mean_of(values)) if values else None
        return table

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object, with `format_version`."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": "benchmark",
            "subject": self.subject,
            "from": self.measured_from,
            "workload": self.workload,
            "max_tokens": self.max_tokens,
            **({"facts": dict(sorted(self.facts.items()))} if self.facts else {}),
            "levels": [level.to_json() for level in self.levels],
            "classes": self.classes(),
            "broken": self.broken,
            "inconclusive": self.inconclusive,
            "faults": list(self.faults),
            "doubts": list(self.doubts),
            "notes": list(self.notes),
            "results": [result.to_json() for result in self.results],
        }


def _doubts(level: Level) -> list[str]:
    at = f"{level.concurrency} streams"
    found = []
    share = max(r.client_cpu_share for r in level.rounds)
    lag = max(r.client_loop_lag_p99_ms for r in level.rounds)
    gap = level.pooled("event_gap").p50
    if share >= CLIENT_CPU_LIMIT:
        found.append(
            f"{at}: inconclusive, the measuring client used {share:.0%} of a core (limit {CLIENT_CPU_LIMIT:.0%})"
        )
    elif lag >= CLIENT_LAG_LIMIT_MS and (gap is None or lag / 1000 >= 0.05 * gap):
        found.append(
            f"{at}: the measuring client was up to {lag:.1f} ms late (p99), so first tokens and gaps may be too"
        )
    blind = sum(r.without_usage for r in level.rounds)
    if blind:
        found.append(
            f"{at}: {blind} of {level.completed} answers told no believable token count (usage), so speed is not measured"
        )
    cached = level.central("cached_prompt_share")
    if cached is not None and cached > 0.05:
        found.append(f"{at}: {cached:.0%} of the prompt tokens came from the prefix cache")
    if any(r.tunnelled for r in level.rounds):
        slowest = max((r.tunnel_ms or 0.0 for r in level.rounds), default=0.0)
        found.append(
            f"{at}: measured through a tunnel that adds up to {slowest:.1f} ms to each latency; --from host leaves it out"
        )
    return found


def _faults(level: Level) -> list[str]:
    at = f"{level.concurrency} streams"
    found = []
    if level.failed:
        classes: dict[str, int] = {}
        for name, count in (item for r in level.rounds for item in r.failures.items()):
            classes[name] = classes.get(name, 0) + count
        named = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
        example = next((text for r in level.rounds for text in r.failure_examples), "")
        found.append(f"{at}: {level.failed} of {level.sent} requests failed ({named}): {example}")
    garbage = sum(r.garbage for r in level.rounds)
    if garbage:
        found.append(f"{at}: {garbage} of {level.completed} texts are garbled")
    silent = sum(r.empty for r in level.rounds)
    if silent:
        found.append(f"{at}: {silent} of {level.sent} answers ended without a word")
    return found

"""What a measurement of a server is: one round of a run, the answers to quality prompts, a baseline. Pure.

`bench/summary.py` makes the results and `bench/quality.py` the answers, `core/gate.py` judges them, and
the records of a host keep them beside the revision that they proved. Only the standard library, so that
it can travel to a host with the client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

FORMAT_VERSION = "1.0"


class ReasonCode(StrEnum):
    """Why a verdict is what it is; stable words for output and records."""

    ERROR_BUDGET = "ErrorBudgetExceeded"
    LIMIT_MISSED = "LimitMissed"
    SLOWER = "SlowerThanBaseline"
    DEGENERATE = "DegenerateOutput"
    QUALITY_WORSE = "QualityWorse"
    TEXT_CHANGED = "SpeculationChangesText"
    FAKED = "FakedAcceptance"
    TUNNEL = "TunnelInTheWay"
    RUNNER = "RunnerFailed"
    CLIENT_BOTTLENECK = "ClientBottleneck"
    NO_USAGE = "NoUsage"
    NOT_MEASURED = "NotMeasured"
    TOO_FEW_ROUNDS = "TooFewRounds"
    UNDECIDED = "Undecided"
    NOT_COMPARABLE = "BaselineNotComparable"
    UNREACHABLE = "ServerUnreachable"
    REFUSED = "RequestRefused"
    UNAUTHORIZED = "Unauthorized"
    WRONG_MODEL = "WrongModel"
    DEADLINE = "GateDeadline"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of one quantity, sorted; thinned to evenly spaced ranks when there were very many.

    `count` and `mean` are those of all values, before thinning. Values have six significant digits, more
    than any measurement here, so that what is stored and read back is the same.
    """

    values: tuple[float, ...] = ()
    count: int = 0
    mean: float | None = None

    @classmethod
    def of(cls, values: Iterable[float], *, keep: int = 1000) -> Distribution:
        """Sort, and keep at most `keep` evenly spaced order statistics (the ends always)."""
        ranked = sorted(values)
        if not ranked:
            return cls()
        mean = math.fsum(ranked) / len(ranked)
        count = len(ranked)
        if count > keep:
            ranked = [ranked[round(i * (count - 1) / (keep - 1))] for i in range(keep)]
        return cls(tuple(_digits(v) for v in ranked), count, _digits(mean))

    def percentile(self, share: float) -> float | None:
        """Give the value below which `share` (0 to 1) of the values lie, linearly interpolated."""
        if not self.values:
            return None
        place = share * (len(self.values) - 1)
        low = math.floor(place)
        high = min(low + 1, len(self.values) - 1)
        return self.values[low] + (self.values[high] - self.values[low]) * (place - low)

    @property
    def p50(self) -> float | None:
        """Give the median."""
        return self.percentile(0.5)

    def to_json(self) -> dict[str, Any]:
        """Give percentiles for readers and the values for later comparisons."""
        marks = {f"p{p}": short(self.percentile(p / 100)) for p in (50, 90, 95, 99)}
        return {"count": self.count, "mean": self.mean, **marks, "values": list(self.values)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Distribution:
        """Read what `to_json` wrote."""
        mean = stored.get("mean")
        values = tuple(float(v) for v in stored.get("values", ()))
        return cls(values, int(stored["count"]), None if mean is None else float(mean))


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one round of one run measured. Times are in seconds unless the name says otherwise.

    t0 is when the request's bytes were written. A token event holds text, reasoning or a tool call.

    - `ttft`: t0 to the first token event of any channel, one value per successful request.
    - `ttfv_ms`: t0 to the first visible content.
    - `decode_tps`: per request, (tokens - tokens in the first token event) / (last - first token event).
      Tokens are the server's usage; a request without it has no value here.
    - `output_tps`: tokens of all streams per second of the steady window: from the moment the last of
      the streams has its first token, to the moment the first of them has nothing more to do. Where
      there was no such window it is `out_tok_s_wall`, which is never more; `output_tps_window_s` is 0.
    - `out_tok_s_wall`: all tokens / the time from the first request to the last token event.
    - `e2e`: t0 to the last token event.
    - `event_gap`: time between token events of one stream. An event may hold several tokens, so this is
      no time per token; `tokens_per_event` says how many.
    - `queue_ms`: what the client itself waited (for a connection) before t0; in no latency.
    - `error_rate`: failed / sent.
    - `empty`: answers in which the model ended at once, in good order (finish_reason stop) and without a
      word. They are neither successes, whose times they would flatter, nor failures of the server.
    - `accept_length`, `accept_rate`: tokens per verify pass, accepted / drafted; `accept_source` says
      where from.
    - `cached_prompt_share`: prompt tokens that the server took from its prefix cache.
    - `client_cpu_share`, `client_loop_lag_p99_ms`: how busy and how late the measuring client was.
    - `by_class`: for each class of prompt its `requests`, `decode_tps` and `output_tokens` (medians), `accept_length`
      and `accept_rate` (only where each request tells its own): speed with drafts follows the text.
    - `tunnelled`, `tunnel_ms`: the bytes went through a tunnel, and the slowest of a few tiny requests through it
      before the round: an upper bound of what the tunnel adds to a latency.
    - `infrastructure`: set when this is no measurement at all, with the reason.
    """

    run: str
    round: int
    workload: str
    concurrency: int
    max_tokens: int
    sent: int = 0
    completed: int = 0
    empty: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    failure_examples: tuple[str, ...] = ()
    duration_s: float = 0.0
    ttft: Distribution = Distribution()
    ttfv_ms: Distribution = Distribution()
    decode_tps: Distribution = Distribution()
    e2e: Distribution = Distribution()
    event_gap: Distribution = Distribution()
    queue_ms: Distribution = Distribution()
    output_tokens: Distribution = Distribution()
    prompt_tokens: Distribution = Distribution()
    tokens_per_event: float | None = None
    output_tps: float | None = None
    output_tps_window_s: float = 0.0
    out_tok_s_wall: float | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    accept_source: str = ""
    cached_prompt_share: float | None = None
    without_usage: int = 0
    garbage: int = 0
    looping: int = 0
    warnings: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0
    client: str = ""
    client_cpu_share: float = 0.0
    client_loop_lag_p99_ms: float = 0.0
    tunnelled: bool = False
    tunnel_ms: float | None = None
    by_class: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    infrastructure: ReasonCode | None = None
    infrastructure_message: str = ""

    @property
    def failed(self) -> int:
        """Count the requests that were sent and did not succeed."""
        return self.sent - self.completed - self.empty

    @property
    def error_rate(self) -> float:
        """Give failed / sent; 0 when nothing was sent."""
        return self.failed / self.sent if self.sent else 0.0

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object, with `format_version`."""
        told: dict[str, Any] = {"format_version": FORMAT_VERSION}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Distribution):
                value = value.to_json()
            elif isinstance(value, Mapping):
                value = dict(sorted(value.items()))
            elif isinstance(value, tuple):
                value = list(value)
            told[item.name] = short(value) if isinstance(value, float) else value
        return told | {"failed": self.failed, "error_rate": short(self.error_rate)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> RunResult:
        """Read what `to_json` wrote, or a later minor version of it (unknown keys are ignored)."""
        _check_version(stored)
        known = {}
        for item in fields(cls):
            if item.name not in stored:
                continue
            value = stored[item.name]
            if item.type == "Distribution":
                value = Distribution.from_json(value)
            elif isinstance(value, list):
                value = tuple(value)
            known[item.name] = value
        if known.get("infrastructure") is not None:
            known["infrastructure"] = ReasonCode(known["infrastructure"])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Answer:
    """One quality prompt: whether its answer was right, and what was strange about the text."""

    prompt: str
    right: bool
    fault: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class QualityResult:
    """The answers to the quality prompts."""

    answers: tuple[Answer, ...]
    garbage: int
    infrastructure: ReasonCode | None = None
    infrastructure_message: str = ""

    @property
    def asked(self) -> int:
        """Count the prompts."""
        return len(self.answers)

    @property
    def passed(self) -> int:
        """Count the right answers."""
        return sum(answer.right for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object; texts are kept, since a person will want to read them."""
        answers = [
            {"prompt": a.prompt, "right": a.right, "fault": a.fault, "text": a.text}
            for a in self.answers
        ]
        return {
            "passed": self.passed,
            "asked": self.asked,
            "garbage": self.garbage,
            "answers": answers,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> QualityResult:
        """Read what `to_json` wrote."""
        keys = ("prompt", "right", "fault", "text")
        answers = tuple(Answer(**{k: a[k] for k in keys}) for a in stored["answers"])
        return cls(answers, int(stored["garbage"]))


@dataclass(frozen=True, slots=True)
class Baseline:
    """The measurement stored with the last applied revision, which later gates compare with.

    `speculative` is that revision's speculative decoding as JSON, "" for none.
    """

    revision: str
    results: tuple[RunResult, ...]
    quality: QualityResult | None = None
    speculative: str = ""

    def rounds_of(self, run: str) -> tuple[RunResult, ...]:
        """Give the stored rounds of one run that were measurements."""
        return tuple(r for r in self.results if r.run == run and r.infrastructure is None)

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object, with `format_version`."""
        return {
            "format_version": FORMAT_VERSION,
            "revision": self.revision,
            "results": [result.to_json() for result in self.results],
            "quality": self.quality.to_json() if self.quality else None,
            "speculative": self.speculative,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Baseline:
        """Read what `to_json` wrote, or a later minor version of it."""
        _check_version(stored)
        results = tuple(RunResult.from_json(r) for r in stored["results"])
        quality = stored.get("quality")
        answers = QualityResult.from_json(quality) if quality else None
        return cls(stored["revision"], results, answers, str(stored.get("speculative") or ""))


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def short(value: float | None) -> float | None:
    """Round for storage."""
    return None if value is None else _digits(value)


def _check_version(stored: Mapping[str, Any]) -> None:
    major = str(stored.get("format_version", "")).partition(".")[0]
    if major != FORMAT_VERSION.partition(".")[0]:
        raise ValueError(f"a measurement of format {major!r} cannot be read by this version")

"""The records of one round in, its result out. Pure, standard library only.

Every definition of `core/gate.RunResult` is computed here and nowhere else. `load.py` calls it after a
round. Percentiles are over successes; what failed is in the error rate, which the gate looks at first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reconciler.bench.degeneracy import GARBAGE, TextFault, all_alike, text_fault
from reconciler.bench.load_plan import Endpoint, LoadPlan, digest_of
from reconciler.bench.stream import Reading, Request, read_stream
from reconciler.core.measurement import Distribution, ReasonCode, RunResult, short

# A change of how we measure must not be mistaken for a change of the server.
CLIENT_VERSION = "1"
_EXAMPLES = 3
# How engines say that prompt and answer do not fit: our asking is wrong then, not the server.
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|maximum (model |input )?length|max_model_len|too long|longer than|"
    r"exceeds? the (available )?context",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Record:
    """One request as it went. Times are of one monotonic clock; `failure` is "" for what HTTP calls a success."""

    number: int
    slot: int
    free_at: float
    t0: float
    end: float
    status: int = 0
    failure: str = ""
    message: str = ""
    pieces: tuple[tuple[float, bytes], ...] = ()
    content_type: str = ""
    location: str = ""
    retried: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """A round's records, and what the client noticed about itself."""

    records: tuple[Record, ...]
    began: float
    ended: float
    cut_short: str = ""
    cpu_share: float = 0.0
    lag_p99_s: float = 0.0
    client: str = ""
    given_up: frozenset[str] = frozenset()
    counters_before: str = ""
    counters_after: str = ""
    tunnel_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request with the reading of its answer; `failure` is "" for a success."""

    record: Record
    reading: Reading | None
    failure: str
    message: str


def outcomes(plan: LoadPlan, endpoint: Endpoint, collected: Collected) -> list[Outcome]:
    """Read every answer. Requests that we cut ourselves are neither success nor failure: left out."""
    request = Request(
        endpoint=endpoint.api, max_tokens=plan.max_tokens, ignore_eos=plan.sampling.ignore_eos
    )
    return [_outcome(r, request) for r in collected.records if r.failure != "cut"]


def _outcome(record: Record, request: Request) -> Outcome:
    if record.status != 200:
        return Outcome(record, None, record.failure, record.message)
    reading = read_stream(record.pieces, request)
    if reading.outcome == "ok" and record.failure in {"", "closed"}:
        # All was said and finished; that the connection then ended badly takes nothing away.
        return Outcome(record, reading, "", "")
    if record.failure and reading.failure != "server_error":
        failure = "truncated" if record.failure == "closed" else record.failure
        return Outcome(record, reading, failure, record.message)
    if not reading.data_events:
        start = b"".join(piece for _, piece in record.pieces)[:120]
        message = f"no event stream but {record.content_type or 'an unnamed type'}: {start!r}"
        return Outcome(record, reading, "malformed", message)
    return Outcome(record, reading, reading.failure or record.failure, reading.message)


def summarise(plan: LoadPlan, endpoint: Endpoint, collected: Collected) -> RunResult:
    """Make the result of one round."""
    every = outcomes(plan, endpoint, collected)
    good = [o for o in every if not o.failure]
    read = [(o.record, o.reading) for o in good if o.reading is not None]
    silent = [o for o in every if o.failure and _ended_at_once(o)]
    failed = [o for o in every if o.failure and not _ended_at_once(o)]
    reason, why = _infrastructure(plan, every, collected)
    texts = [reading.text or reading.reasoning_text for _, reading in read]
    faults = [
        text_fault(text) for text, (_, r) in zip(texts, read, strict=True) if not r.tool_events
    ]
    # With the end of sequence ignored every model runs into loops, of one word too.
    looping = {TextFault.LOOPING} | ({TextFault.ONE_WORD} if plan.sampling.ignore_eos else set())
    garbage = GARBAGE - looping
    tokens = [r.trusted_tokens for _, r in read if r.trusted_tokens is not None]
    window, in_window = _steady_window(plan, read, collected)
    last = max((r.token_times[-1] for _, r in read), default=collected.began)
    wall = last - collected.began
    complete = len(tokens) == len(read) and bool(tokens)
    wall_tps = sum(tokens) / wall if complete and wall > 0 else None
    return RunResult(
        run=plan.run,
        round=plan.round,
        workload=plan.workload,
        concurrency=plan.concurrency,
        max_tokens=plan.max_tokens,
        sent=len(every),
        completed=len(good),
        empty=len(silent),
        failures=dict(Counter(o.failure for o in failed)),
        failure_examples=tuple(f"{o.failure}: {o.message}"[:300] for o in failed[:_EXAMPLES]),
        duration_s=collected.ended - collected.began,
        ttft=Distribution.of(r.token_times[0] - record.t0 for record, r in read),
        ttfv_ms=Distribution.of(
            (r.first_content_time - record.t0) * 1000
            for record, r in read
            if r.first_content_time is not None
        ),
        decode_tps=Distribution.of(
            1 / r.decode_time_per_token for _, r in read if r.decode_time_per_token
        ),
        e2e=Distribution.of(r.token_times[-1] - record.t0 for record, r in read),
        event_gap=Distribution.of(
            after - before
            for _, r in read
            for before, after in zip(r.token_times, r.token_times[1:], strict=False)
        ),
        queue_ms=Distribution.of((o.record.t0 - o.record.free_at) * 1000 for o in every),
        output_tokens=Distribution.of(tokens),
        prompt_tokens=Distribution.of(r.prompt_tokens for _, r in read if r.prompt_tokens),
        tokens_per_event=_per_event(read),
        output_tps=(in_window / window if window and complete else wall_tps),
        output_tps_window_s=window if complete else 0.0,
        out_tok_s_wall=wall_tps,
        **_acceptance(read, collected),
        cached_prompt_share=_cached_share(read),
        without_usage=len(read) - len(tokens),
        garbage=len(texts) if all_alike(texts) else sum(f in garbage for f in faults),
        looping=sum(f in looping for f in faults),
        warnings=dict(Counter(word for _, r in read for word in r.warnings)),
        retried=sum(o.record.retried for o in every),
        client=f"{CLIENT_VERSION} ({collected.client})",
        client_cpu_share=collected.cpu_share,
        client_loop_lag_p99_ms=collected.lag_p99_s * 1000,
        tunnelled=endpoint.tunnelled,
        tunnel_ms=collected.tunnel_ms,
        by_class=_by_class(plan, read),
        fingerprint=_fingerprint(plan, endpoint),
        infrastructure=reason,
        infrastructure_message=why,
    )


def answers(
    plan: LoadPlan, endpoint: Endpoint, collected: Collected
) -> tuple[RunResult, Mapping[int, str]]:
    """Give the result of one round and the text of each success, by the number of its request."""
    texts = {
        o.record.number: o.reading.text or o.reading.reasoning_text
        for o in outcomes(plan, endpoint, collected)
        if o.reading is not None and not o.failure
    }
    return summarise(plan, endpoint, collected), texts


def _ended_at_once(outcome: Outcome) -> bool:
    """Say whether the model chose to say nothing, as opposed to a server that lost its words."""
    reading = outcome.reading
    return (
        outcome.failure == "empty"
        and reading is not None
        and set(reading.finish_reasons.values()) <= {"stop", "eos_token"}
        and bool(reading.finish_reasons)
    )


def _fingerprint(plan: LoadPlan, endpoint: Endpoint) -> Mapping[str, str]:
    """Say what must be equal for two measurements to be comparable."""
    return {
        "client": CLIENT_VERSION,
        "prompts": digest_of(plan.prompts),
        "workload": plan.workload,
        "sampling": str(plan.sampling),
        "load": f"{plan.concurrency} streams, {plan.max_tokens} tokens",
        "api": endpoint.api,
        "measured": "through a tunnel" if endpoint.tunnelled else "directly",
        **{f"server.{key}": value for key, value in sorted(endpoint.server.items())},
    }


def _infrastructure(
    plan: LoadPlan, every: Sequence[Outcome], collected: Collected
) -> tuple[ReasonCode | None, str]:
    """Say whether this was a measurement of the server at all, and what it was otherwise."""
    if collected.cut_short in {"deadline", "stopped"}:
        done = sum(not o.failure for o in every)
        message = (
            f"{plan.run}: {done} of {plan.requests} requests had finished when the time was over"
        )
        return ReasonCode.DEADLINE, message
    by_status = {
        401: ReasonCode.UNAUTHORIZED,
        403: ReasonCode.UNAUTHORIZED,
        404: ReasonCode.WRONG_MODEL,
    }
    for outcome in every:
        if outcome.failure == "connect":
            return ReasonCode.UNREACHABLE, outcome.message
        if outcome.record.status in by_status:
            message = f"HTTP {outcome.record.status}: {outcome.message}"
            return by_status[outcome.record.status], message
    unheard = [o for o in every if o.failure == "closed"]
    if every and len(unheard) == len(every):
        return ReasonCode.UNREACHABLE, "every connection was closed before a byte came back"
    last = sorted(every, key=lambda o: o.record.end)[-plan.concurrency :]
    if last and len(unheard) > 1 and all(o.failure == "closed" for o in last):
        return ReasonCode.UNREACHABLE, "the server went away: at last no request got an answer"
    moved = [o for o in every if 300 <= o.record.status < 400]
    if every and len(moved) == len(every):
        place = moved[0].record.location or "an unnamed place"
        return ReasonCode.REFUSED, f"every request was sent on to {place}; measure that address"
    refused = [o for o in every if o.failure in {"http_400", "http_422", "http_413"}]
    too_long = next((o for o in refused if _TOO_LONG.search(o.message)), None)
    if too_long is not None:
        number = too_long.record.number % len(plan.prompts) + 1
        message = f"prompt {number} of the workload with {plan.max_tokens} tokens of answer is longer than the server takes"
        return ReasonCode.REFUSED, f"{message}: {too_long.message}"
    if every and len(refused) == len(every):
        return ReasonCode.REFUSED, f"every request was refused: {refused[0].message}"
    return None, ""


# --- throughput --------------------------------------------------------------------------------------


def _steady_window(
    plan: LoadPlan, read: Sequence[tuple[Record, Reading]], collected: Collected
) -> tuple[float, float]:
    """Give the length of the steady window and the tokens made in it; (0, 0) where there was none.

    It begins when the last of the streams has its first token and ends when the first of them has
    nothing more to send. Shorter than a tenth of the round it says too little.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for record, reading in read:
        first, last = reading.token_times[0], reading.token_times[-1]
        starts[record.slot] = min(first, starts.get(record.slot, first))
        ends[record.slot] = max(last, ends.get(record.slot, last))
    if len(starts) < plan.concurrency:
        return 0.0, 0.0
    begin, end = max(starts.values()), min(ends.values())
    if end - begin < 0.1 * (collected.ended - collected.began):
        return 0.0, 0.0
    made = sum(_tokens_until(r, end) - _tokens_until(r, begin) for _, r in read)
    return end - begin, made


def _tokens_until(reading: Reading, moment: float) -> float:
    """Give the tokens that a stream had made at a moment, interpolated between its events."""
    times = reading.token_times
    total = float(reading.trusted_tokens or 0)
    if moment < times[0]:
        return 0.0
    if moment >= times[-1]:
        return total
    held = reading.per_event_tokens
    if held is None:
        # Without a running count: the first event holds one token, the rest is spread over the others.
        rest = max(0.0, total - 1) / (len(times) - 1)
        held_by = [min(1.0, total), *([rest] * (len(times) - 1))]
    else:
        held_by = [float(h) for h in held]
    made = held_by[0]
    for before, after, tokens in zip(times, times[1:], held_by[1:], strict=False):
        if moment >= after:
            made += tokens
        else:
            return made + tokens * (moment - before) / (after - before)
    return made


def _per_event(read: Sequence[tuple[Record, Reading]]) -> float | None:
    counted = [r for _, r in read if r.trusted_tokens is not None]
    events = sum(r.token_events for r in counted)
    return sum(r.trusted_tokens or 0 for r in counted) / events if events else None


def _cached_share(read: Sequence[tuple[Record, Reading]]) -> float | None:
    told = [(r.cached_tokens, r.prompt_tokens) for _, r in read if r.cached_tokens is not None]
    prompts = sum(prompt or 0 for _, prompt in told)
    return sum(cached or 0 for cached, _ in told) / prompts if prompts else None


# --- acceptance --------------------------------------------------------------------------------------


def _acceptance(read: Sequence[tuple[Record, Reading]], collected: Collected) -> dict[str, Any]:
    """Give tokens per verify pass and the accepted share of drafts, from the best source there is.

    Per request is exact; requests weigh by their passes. vLLM tells only counters of the whole server,
    so their growth over the round is taken.
    """
    told = [r for _, r in read if r.spec_verify_ct and r.spec_accept_length is not None]
    if told:
        sources = sorted({r.spec_source for r in told})
        return _acceptance_of(told) | {"accept_source": "; ".join(sources)}
    before, after = (
        vllm_counters(text) for text in (collected.counters_before, collected.counters_after)
    )
    grown = {key: after[key] - before.get(key, 0.0) for key in after}
    drafts = grown.get("drafts", 0.0)
    drafted, accepted = grown.get("draft_tokens", 0.0), grown.get("accepted_tokens", 0.0)
    if (
        drafts <= 0 or min(drafted, accepted) < 0
    ):  # Counters that fell are those of another process.
        return {}
    return {
        "accept_length": 1 + accepted / drafts,
        "accept_rate": accepted / drafted if drafted else None,
        "accept_source": "growth of the counters vllm:spec_decode_num_*_total at /metrics over the round (vLLM)",
    }


def _acceptance_of(told: Sequence[Reading]) -> dict[str, float | None]:
    """Give tokens per verify pass and the accepted share, weighted by passes, of answers that tell them."""
    passes = sum(r.spec_verify_ct or 0 for r in told)
    made = sum((r.spec_accept_length or 0) * (r.spec_verify_ct or 0) for r in told)
    drafted = sum(r.spec_drafted or 0 for r in told)
    accepted = sum(r.spec_accepted or 0 for r in told)
    return {
        "accept_length": made / passes if passes else None,
        "accept_rate": accepted / drafted if drafted else None,
    }


def _by_class(
    plan: LoadPlan, read: Sequence[tuple[Record, Reading]]
) -> Mapping[str, Mapping[str, float | None]]:
    """Give speed and acceptance of each class of prompt."""
    groups: dict[str, list[Reading]] = {}
    for record, reading in read:
        kind = plan.prompts[record.number % len(plan.prompts)].kind
        groups.setdefault(kind, []).append(reading)
    return {kind: _class_row(readings) for kind, readings in sorted(groups.items())}


def _class_row(readings: Sequence[Reading]) -> Mapping[str, float | None]:
    speeds = Distribution.of(
        1 / r.decode_time_per_token for r in readings if r.decode_time_per_token
    )
    lengths = Distribution.of(r.trusted_tokens for r in readings if r.trusted_tokens is not None)
    told = [r for r in readings if r.spec_verify_ct and r.spec_accept_length is not None]
    return {
        "requests": len(readings),
        "decode_tps": short(speeds.p50),
        "output_tokens": short(lengths.p50),
        **{key: short(value) for key, value in _acceptance_of(told).items()},
    }


_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{[^}]*\})?\s+(\S+)",
    re.MULTILINE,
)


def vllm_counters(text: str) -> dict[str, float]:
    """Sum vLLM's speculation counters over its engines, from the text of /metrics."""
    sums: dict[str, float] = {}
    for name, value in _COUNTER.findall(text):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return sums

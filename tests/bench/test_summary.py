"""How records become a result: throughput over the steady window, and nothing invented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reconciler.bench.load_plan import Endpoint, LoadPlan, Prompt
from reconciler.bench.summary import Collected, Record, summarise, vllm_counters

ENDPOINT = Endpoint("127.0.0.1", 1, "chat", "m")


def _answer(times: list[float], per_event: list[int], *, continuous: bool) -> tuple[Any, ...]:
    pieces = []
    total = 0
    for at, tokens in zip(times, per_event, strict=True):
        total += tokens
        body: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
        if continuous:
            body["usage"] = {"prompt_tokens": 3, "completion_tokens": total}
        pieces.append((at, f"data: {json.dumps(body)}\n\n".encode()))
    last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    last["usage"] = {"prompt_tokens": 3, "completion_tokens": total}
    pieces.append((times[-1], f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()))
    return tuple(pieces)


def _record(
    number: int,
    slot: int,
    times: list[float],
    per_event: list[int] | None = None,
    *,
    continuous: bool = True,
) -> Record:
    held = per_event or [1] * len(times)
    pieces = _answer(times, held, continuous=continuous)
    start = times[0] - 0.5
    return Record(number, slot, start, start, times[-1], 200, pieces=pieces)


def _summary(records: list[Record], streams: int) -> Any:
    plan = LoadPlan("r", (Prompt("p", "p"),), streams, len(records), 1000)
    ended = max(r.end for r in records)
    return summarise(plan, ENDPOINT, Collected(tuple(records), began=0.0, ended=ended))


def _steps(start: float, count: int, step: float = 0.1) -> list[float]:
    return [round(start + n * step, 6) for n in range(count)]


@pytest.mark.parametrize("continuous", [True, False])
def test_throughput_is_that_of_the_time_when_all_streams_run(continuous: bool) -> None:
    """Ramp and drain are cut: two streams of 10 tokens a second give 20, whatever their edges do."""
    records = [
        _record(0, 0, _steps(0.5, 51), continuous=continuous),
        _record(1, 1, _steps(2.5, 81), continuous=continuous),
    ]
    result = _summary(records, 2)
    assert result.output_tps_window_s == pytest.approx(3.0)
    assert result.output_tps == pytest.approx(20.0)
    assert result.out_tok_s_wall == pytest.approx(132 / 10.5)


def test_tokens_at_the_edges_are_interpolated() -> None:
    """An event of ten tokens that straddles the edge counts by the part of its time that is inside."""
    records = [
        _record(0, 0, [0.5, 1.5, 2.5, 3.5, 4.5], [1, 10, 10, 10, 10]),
        _record(1, 1, [2.0, 3.0, 4.0, 5.0], [1, 10, 10, 10]),
    ]
    result = _summary(records, 2)
    assert result.output_tps_window_s == pytest.approx(2.5)
    # The second stream's first token opens the window and is not inside it.
    assert result.output_tps == pytest.approx(20.0)


def test_without_a_time_of_all_streams_the_wall_clock_is_taken() -> None:
    """A server that serves one after the other never has two streams: the slower figure stands."""
    records = [_record(0, 0, _steps(0.5, 11)), _record(1, 1, _steps(2.0, 11))]
    result = _summary(records, 2)
    assert result.output_tps_window_s == 0.0
    assert result.output_tps == result.out_tok_s_wall == pytest.approx(22 / 3.0)


def test_a_first_event_of_many_tokens_does_not_speed_up_decoding() -> None:
    """The tokens of the first event belong to the prompt's time, not to decoding."""
    result = _summary([_record(0, 0, [1.0, 2.0, 3.0], [8, 2, 2])], 1)
    assert result.decode_tps.values == (2.0,)
    assert result.tokens_per_event == pytest.approx(4.0)


def test_queueing_of_the_client_is_in_no_latency() -> None:
    """What the client waited before it wrote is told apart from what the server took."""
    record = _record(0, 0, [1.0, 2.0])
    late = Record(0, 0, record.t0 - 0.25, record.t0, record.end, 200, pieces=record.pieces)
    result = _summary([late], 1)
    assert result.queue_ms.values == (250.0,)
    assert result.ttft.values == (0.5,)


def test_counters_of_other_metrics_are_not_taken() -> None:
    """Only the three totals count; values that are no numbers and `_created` samples do not."""
    text = (
        "# HELP vllm:spec_decode_num_drafts_total x\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 4.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 6\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3\n'
        "vllm:spec_decode_num_draft_tokens_total nonsense\n"
    )
    assert vllm_counters(text) == {"drafts": 4.0, "accepted_tokens": 6.0}

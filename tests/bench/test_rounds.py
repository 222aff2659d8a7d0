"""A gate from its first question to its verdict, against a server that plays what each test says."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from model_server import Asked, Drop, Hang, Reply, chat_chunk, chat_parts, event, ordinary, serving

from reconciler.bench import load, quality
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress, Prompt
from reconciler.bench.rounds import GateOutcome, round_requests, run_gate
from reconciler.core.gate import VerdictKind
from reconciler.core.measurement import Baseline, Distribution, ReasonCode, RunResult
from reconciler.core.spec import Gate, GateRun

SINGLE = {"name": "single", "concurrency": 1, "requests": 6, "max_tokens": 8}
BATCH = {"name": "batch", "concurrency": 4, "requests": 12, "max_tokens": 8}


def _gate(*runs: dict[str, Any], **fields: Any) -> Gate:
    return Gate.model_validate({"runs": list(runs or (SINGLE, BATCH)), **fields})


def _run(
    gate: Gate,
    answer: Callable[[Asked], Reply] = ordinary,
    baseline: Baseline | None = None,
    **changes: Any,
) -> tuple[GateOutcome, list[Asked]]:
    with serving(answer) as server:
        endpoint = Endpoint("127.0.0.1", server.port, "chat", "m")
        outcome = run_gate(gate, endpoint, baseline, **{"deadline_s": 60.0} | changes)
        return outcome, server.asked


def test_a_healthy_server_passes_and_becomes_the_baseline() -> None:
    """Three rounds of every run in turns, then a pass whose rounds are what the next gate compares with."""
    outcome, _ = _run(_gate(baseline={"max_loss": "90%"}))
    assert outcome.verdict.kind is VerdictKind.PASS
    assert [(r.run, r.round) for r in outcome.results] == [
        (run, number) for number in (1, 2, 3) for run in ("single", "batch")
    ]
    assert outcome.rounds == 3
    stored = Baseline.from_json(json.loads(json.dumps(outcome.as_baseline("r1").to_json())))
    assert (stored.revision, len(stored.rounds_of("batch"))) == ("r1", 3)
    again, _ = _run(_gate(baseline={"max_loss": "90%"}), baseline=stored)
    assert any(row.key.endswith("_against_baseline") for row in again.verdict.rows)


def test_no_prompt_is_sent_twice() -> None:
    """Questions, warm-up and all rounds have salts of their own: nothing is answered from a cache."""
    _, asked = _run(_gate())
    prompts = [a.body["messages"][0]["content"] for a in asked]
    starts = [prompt.split("]")[0] for prompt in prompts]
    assert len(set(starts)) == len(starts)


def test_quality_is_asked_first_and_settles_garbage() -> None:
    """A model that writes one character for ever fails before any speed is measured."""

    def broken(asked: Asked) -> Reply:
        return Reply(chat_parts(["!" * 8] * 8))

    outcome, asked = _run(_gate(), broken)
    assert outcome.verdict.kind is VerdictKind.FAIL
    assert outcome.verdict.reasons[0].code is ReasonCode.DEGENERATE
    assert (outcome.results, outcome.rounds) == ((), 0)
    assert {a.body["temperature"] for a in asked} == {0.0}


def test_quality_may_be_off() -> None:
    """Without quality no question is asked."""
    outcome, asked = _run(_gate(quality="off"))
    assert outcome.quality is None
    assert not [a for a in asked if "capital" in a.body["messages"][0]["content"]]


def test_a_clear_miss_ends_the_gate_in_its_first_round() -> None:
    """Far from its limit the gate fails after one run of one round."""
    outcome, _ = _run(_gate(SINGLE | {"min_output_tps": 1e8}, BATCH, quality="off"))
    assert outcome.verdict.kind is VerdictKind.FAIL
    assert [(r.run, r.round) for r in outcome.results] == [("single", 1)]


def test_failed_requests_end_the_gate_at_once() -> None:
    """With no errors allowed, a round stops soon after the first failures."""
    seen = itertools.count()

    def failing(asked: Asked) -> Reply:
        return Reply([chat_chunk("a"), Drop()]) if next(seen) > 20 else ordinary(asked)

    run = SINGLE | {"requests": 300}
    outcome, asked = _run(_gate(run, quality="off"), failing)
    assert outcome.verdict.reasons[0].code is ReasonCode.ERROR_BUDGET
    assert len(asked) < 40


def test_a_server_that_is_not_there_is_an_error() -> None:
    """S22: nothing was learnt about the revision, and nothing is said about it."""
    with serving() as server:
        endpoint = Endpoint("127.0.0.1", server.port, "chat", "m")
    outcome = run_gate(_gate(), endpoint, None, deadline_s=60)
    assert outcome.verdict.kind is VerdictKind.ERROR
    assert outcome.verdict.reasons[0].code is ReasonCode.UNREACHABLE


def test_an_infrastructure_error_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One broken round is repeated before it becomes the verdict."""
    tries = itertools.count()
    real = load.measure

    def sometimes(plan: LoadPlan, endpoint: Endpoint, **more: Any) -> RunResult:
        result = real(plan, endpoint, **more)
        if plan.round == 2 and next(tries) == 0:
            return RunResult("single", 2, "realistic", 1, 8, infrastructure=ReasonCode.UNREACHABLE)
        return result

    monkeypatch.setattr(load, "measure", sometimes)
    outcome, _ = _run(_gate(SINGLE, quality="off"))
    assert outcome.verdict.kind is VerdictKind.PASS
    assert next(tries) == 2


def test_a_close_call_is_measured_on_and_then_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds on both sides of a limit are repeated, eight times at most, and decide nothing."""

    def close(plan: LoadPlan, endpoint: Endpoint, **more: Any) -> RunResult:
        speed = Distribution.of([98.0 if plan.round % 2 else 102.0] * 10)
        return RunResult(
            plan.run, plan.round, "realistic", 1, 8, sent=10, completed=10, decode_tps=speed
        )

    monkeypatch.setattr(load, "measure", close)
    gate = _gate(SINGLE | {"min_decode_tps": 100}, quality="off")
    outcome, _ = _run(gate)
    assert (outcome.verdict.kind, outcome.rounds) == (VerdictKind.INCONCLUSIVE, 8)
    assert outcome.verdict.reasons[0].code is ReasonCode.UNDECIDED


def test_the_deadline_leaves_the_gate_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next run would not fit any more, the gate ends inconclusive and says what to change."""
    clock = itertools.count(0, 3)
    outcome, _ = _run(
        _gate(SINGLE, quality="off"), deadline_s=30.0, clock=lambda: float(next(clock))
    )
    assert outcome.verdict.kind is VerdictKind.INCONCLUSIVE
    assert outcome.verdict.reasons[0].code is ReasonCode.DEADLINE
    assert "timeouts.gate" in outcome.verdict.reasons[0].message


def test_a_hanging_server_ends_with_the_deadline() -> None:
    """A server that never finishes an answer cannot keep the gate longer than its time."""

    def hanging(asked: Asked) -> Reply:
        return Reply([chat_chunk("a"), Hang()])

    outcome, _ = _run(_gate(SINGLE, quality="off"), hanging, deadline_s=0.5)
    assert outcome.verdict.kind is VerdictKind.INCONCLUSIVE
    assert outcome.took_s < 10


def test_greedy_is_labelled() -> None:
    """The greedy workload asks for fixed lengths and carries its warning into the verdict."""
    outcome, asked = _run(_gate(SINGLE | {"workload": "greedy"}, BATCH, quality="off"))
    assert {a.body.get("ignore_eos", False) for a in asked} == {True, False}
    assert "flatter" in outcome.verdict.notes[-1]


def test_facts_about_the_server_are_in_the_fingerprint() -> None:
    """What the caller knows about the host makes two measurements comparable or not."""
    first, _ = _run(_gate(SINGLE, baseline={"max_loss": "90%"}), server_info={"gpu": "H100"})
    baseline = first.as_baseline("r1")
    second, _ = _run(
        _gate(SINGLE, baseline={"max_loss": "90%"}), baseline=baseline, server_info={"gpu": "H200"}
    )
    assert second.verdict.reasons[0].code is ReasonCode.NOT_COMPARABLE
    assert "server.gpu was H100, is H200" in second.verdict.reasons[0].message


def test_progress_is_told_in_a_line() -> None:
    """Progress names run, round and counts."""
    assert str(Progress("batch", 2, 12, 5, 1)) == "batch, round 2: 5 of 12 answers, 1 failed"
    assert str(Progress("batch", 0, 4, 1, 0)) == "batch, warming up: 1 of 4 answers"


@pytest.mark.parametrize(
    ("concurrency", "requests", "each"),
    [(1, 64, 22), (1, 1, 1), (64, 256, 128), (64, 64, 64), (2, 4, 4), (4, 300, 100)],
)
def test_a_rounds_share_of_the_requests(concurrency: int, requests: int, each: int) -> None:
    """Three rounds send what the spec asks for, and no round is only ramp and drain."""
    run = GateRun.model_validate(
        {"name": "r", "concurrency": concurrency, "requests": requests, "max_tokens": 8}
    )
    assert round_requests(run) == each
    assert 3 * round_requests(run) >= requests


def test_right_answers_are_counted() -> None:
    """A model that answers as asked passes the questions it can answer."""
    said = {"17 + 25": "42", "France": "Paris.", "opposite of hot": "Cold", "0.5 or 0.25": "0.5"}

    def knowing(asked: Asked) -> Reply:
        prompt = asked.body["messages"][0]["content"]
        answer = next((text for key, text in said.items() if key in prompt), "I do not know.")
        return Reply(
            [
                chat_chunk(answer, "stop", usage={"prompt_tokens": 5, "completion_tokens": 2}),
                event("[DONE]"),
            ]
        )

    outcome, _ = _run(_gate(SINGLE), knowing)
    assert outcome.quality is not None
    assert (outcome.quality.passed, outcome.quality.asked) == (4, 16)
    assert outcome.quality.garbage == 0


def test_an_implausible_speed_up_is_looked_at_again() -> None:
    """Far faster than the baseline: other questions are asked, and garbage there fails what had passed."""

    def learnt_by_heart(asked: Asked) -> Reply:
        text = asked.body["messages"][0]["content"]
        if "Rome" in text or "Italy" in text or "23 + 48" in text or "quillander" in text:
            return Reply(chat_parts(["!" * 8] * 8))
        if any(q.prompt in text for q in quality.AGAIN):
            return Reply(chat_parts(["!" * 8] * 8))
        return ordinary(asked)

    slow = [
        replace(r, decode_tps=Distribution.of([1.0]), output_tps=1.0, ttft=Distribution.of([9.0]))
        for r in _run(_gate(BATCH))[0].results
    ]
    gate = _gate(BATCH, baseline={"max_loss": "90%"})
    outcome, _ = _run(gate, learnt_by_heart, Baseline("r1", tuple(slow)))
    assert outcome.again is not None
    assert outcome.verdict.kind is VerdictKind.FAIL
    assert outcome.verdict.reasons[0].code is ReasonCode.DEGENERATE
    honest, _ = _run(gate, ordinary, Baseline("r1", tuple(slow)))
    assert honest.again is not None, honest.verdict
    assert honest.verdict.kind is VerdictKind.PASS
    ordinary_speed, _ = _run(_gate(BATCH))
    assert ordinary_speed.again is None


def test_the_prefix_cache_is_emptied_after_warming_up() -> None:
    """Where the engine can: once a run, before its first round; elsewhere nothing is asked."""

    def answer(asked: Asked) -> Reply:
        if asked.path == "/flush_cache":
            return Reply([b"ok"], framing="length")
        return ordinary(asked)

    with serving(answer) as server:
        for engine in ("sglang", "custom"):
            endpoint = Endpoint("127.0.0.1", server.port, "chat", "m", engine=engine)
            run_gate(_gate(SINGLE, quality="off"), endpoint, None, deadline_s=60)
    flushes = [a.method for a in server.asked if a.path == "/flush_cache"]
    assert flushes == ["POST"]


def test_greedy_answers_are_asked_one_at_a_time_where_drafts_change() -> None:
    """Kernels that depend on the batch change greedy text, so a comparison is made at one stream."""
    busy: list[int] = []
    lock = threading.Lock()
    flying = itertools.count()

    def answer(asked: Asked) -> Reply:
        with lock:
            busy.append(asked.connection)
            next(flying)
        return ordinary(asked)

    _run(_gate(SINGLE), answer, speculative='{"num_steps": 3}')
    assert len(set(busy[: len(quality.QUESTIONS)])) == 1


def test_an_own_prompt_set_and_a_mix_are_sent() -> None:
    """The prompts of the operator's file, or our classes in the gate's mix, and nothing else."""
    own = (Prompt("own", "Zebra facts please"),)
    _, asked = _run(_gate(SINGLE, quality="off"), prompts=own)
    texts = [a.body["messages"][0]["content"] for a in asked]
    assert any("Zebra" in text for text in texts)
    assert not any("lighthouse" in text for text in texts)
    outcome, _ = _run(_gate(SINGLE, quality="off", mix={"story": 1}))
    assert {kind for r in outcome.results for kind in r.by_class} == {"story"}

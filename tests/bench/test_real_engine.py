"""The client and the gate on real tokens: llama.cpp's own code with a small model."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from real_engine.engine import RealEngine, Running, ask, fetch, running

from reconciler.bench.load import measure
from reconciler.bench.load_plan import Endpoint, LoadPlan, Prompt
from reconciler.bench.rounds import run_gate
from reconciler.bench.workloads import SAMPLING, prompt_set
from reconciler.core.gate import VerdictKind
from reconciler.core.measurement import ReasonCode
from reconciler.core.spec import Gate

pytestmark = pytest.mark.real_engine

SHORT = (Prompt("a", "Rivers are"), Prompt("b", "The old clock"), Prompt("c", "Tea is made of"))


@pytest.fixture(scope="module")
def engine() -> RealEngine:
    """Install the engine once a machine."""
    return fetch()


@pytest.fixture(scope="module")
def server(engine: RealEngine) -> Iterator[Running]:
    """One server with two slots and drafts by lookup, for all tests here that do not end it."""
    with running(engine, "--parallel", "2", "--ctx", "1024", "--draft", "4") as started:
        yield started


def _plan(**changes: object) -> LoadPlan:
    fields: dict[str, object] = {
        "run": "real",
        "prompts": SHORT,
        "concurrency": 2,
        "requests": 4,
        "max_tokens": 12,
        "round": 1,
        "salt": "x",
    }
    return LoadPlan(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_real_tokens_are_measured(server: Running, api: str) -> None:
    """Counts are the server's own, speeds and times are those of real generation."""
    endpoint = Endpoint("127.0.0.1", server.port, api, "smollm2")  # type: ignore[arg-type]
    result = measure(_plan(), endpoint)
    assert (result.completed, result.failures, result.without_usage) == (4, {}, 0)
    assert max(result.output_tokens.values) <= 12
    assert result.decode_tps.p50 is not None
    assert 0.2 < result.decode_tps.p50 < 5000
    assert result.output_tps is not None
    assert result.ttft.p50 is not None
    assert result.garbage == 0


def test_the_speed_is_the_one_that_the_server_saw(server: Running) -> None:
    """Decode speed measured outside agrees with the engine's own timing of the same request."""
    endpoint = Endpoint("127.0.0.1", server.port, "completions", "smollm2")
    result = measure(_plan(concurrency=1, requests=1, max_tokens=32), endpoint)
    status, body = ask(
        server.port, "/v1/completions", {"prompt": "Rivers are", "max_tokens": 32, "seed": 0}
    )
    assert status == 200
    assert isinstance(body, dict)
    assert body["usage"]["completion_tokens"] <= 32
    # Another draw of tokens at another moment of a shared machine: the same order of magnitude.
    own = body["timings"]["predicted_per_second"]
    assert result.decode_tps.p50 == pytest.approx(own, rel=3.0)


def test_drafts_are_accepted_where_text_repeats(server: Running) -> None:
    """Copying a text lets drafts by lookup be accepted, and the acceptance reaches the result."""
    line = "The grey heron waits at the old mill, and the old mill waits for rain."
    plan = _plan(
        prompts=(Prompt("copy", f"Repeat this text exactly, word for word: {line}"),),
        concurrency=1,
        requests=1,
        max_tokens=24,
        sampling=SAMPLING["greedy"],
        salt="",
    )
    result = measure(plan, Endpoint("127.0.0.1", server.port, "chat", "smollm2"))
    assert result.completed == 1
    assert result.accept_length is not None
    assert result.accept_length > 1.0
    assert result.accept_rate is not None
    assert 0 < result.accept_rate <= 1
    assert "each answer" in result.accept_source


def test_a_prompt_beyond_the_context_is_refused_not_failed(server: Running) -> None:
    """The engine's real refusal of a too long answer is a wrong question, not a verdict."""
    endpoint = Endpoint("127.0.0.1", server.port, "completions", "smollm2")
    result = measure(_plan(max_tokens=5000), endpoint)
    assert result.infrastructure is ReasonCode.REFUSED
    assert "exceed the context" in result.infrastructure_message


def test_a_wrong_model_is_told(server: Running) -> None:
    """Another model's name is not a slow server."""
    endpoint = Endpoint("127.0.0.1", server.port, "completions", "another")
    assert measure(_plan(), endpoint).infrastructure is ReasonCode.WRONG_MODEL


def test_a_gate_passes_and_fails_on_real_tokens(server: Running) -> None:
    """One server, two gates: what it can do passes, what it cannot fails."""
    run = {"name": "single", "concurrency": 1, "requests": 3, "max_tokens": 8}
    endpoint = Endpoint("127.0.0.1", server.port, "completions", "smollm2")
    for limit, kind in ((0.1, VerdictKind.PASS), (100_000, VerdictKind.FAIL)):
        gate = Gate.model_validate({"runs": [run | {"min_decode_tps": limit}], "quality": "off"})
        outcome = run_gate(gate, endpoint, None, deadline_s=240)
        assert outcome.verdict.kind is kind, outcome.verdict


def test_a_loading_server_is_not_healthy_and_a_drained_one_ends(engine: RealEngine) -> None:
    """SIGTERM lets the answer under way end, and the process exits with 0."""
    with running(engine, "--parallel", "1", "--ctx", "512") as started:
        plan = _plan(concurrency=1, requests=1, max_tokens=24)
        endpoint = Endpoint("127.0.0.1", started.port, "completions", "smollm2")
        asked = []

        def end_it(progress: object) -> None:
            if not asked:
                asked.append(progress)
                started.process.send_signal(signal.SIGTERM)

        result = measure(plan, endpoint, on_progress=end_it)
        assert started.process.wait(60) == 0
    assert result.completed + result.failed <= 1


@pytest.mark.parametrize(
    ("options", "status"),
    [(("--kv-type", "q3_x"), 1), (("--no-such-flag",), 2), (("--ctx", "many"), 2)],
)
def test_a_server_that_cannot_load_exits(
    engine: RealEngine, options: tuple[str, ...], status: int
) -> None:
    """Bad flags end the process with a status, some at once and one only while loading."""
    with pytest.raises(AssertionError, match=f"ended with {status}|did not start"):  # noqa: SIM117
        with running(engine, *options):
            pass


def test_the_shipped_prompts_are_a_mix() -> None:
    """Any eight consecutive prompts come from at least four of the eight classes."""
    kinds = [p.kind for p in prompt_set()]
    assert len(kinds) == 48
    assert len(set(kinds)) == 8
    assert all(len(set(kinds[at : at + 8])) >= 4 for at in range(41))

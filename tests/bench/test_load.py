"""The load generator against a server that plays what each test says."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_server import (
    Asked,
    Drop,
    Hang,
    ModelServer,
    Pause,
    Reply,
    chat_chunk,
    chat_parts,
    event,
    ordinary,
    serving,
)

from reconciler.bench import load
from reconciler.bench.load import measure
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress, Prompt, Sampling
from reconciler.core.measurement import ReasonCode, RunResult

RECORDED = Path(__file__).parents[1] / "recorded" / "sse-streams"
PROMPTS = (Prompt("a", "Sing of rivers"), Prompt("b", "Speak of hills and of dales"))


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test here on both event loops."""
    if request.param == "asyncio":
        monkeypatch.setattr(load, "_loop_factory", lambda: (asyncio.new_event_loop, "asyncio"))
    else:
        pytest.importorskip("uvloop")
    return str(request.param)


@pytest.fixture
def serve() -> Iterator[Callable[..., ModelServer]]:
    """Start servers that end with the test."""
    started = []

    def start(answer: Callable[[Asked], Reply] = ordinary) -> ModelServer:
        context = serving(answer)
        server = context.__enter__()
        started.append(context)
        return server

    yield start
    for context in started:
        context.__exit__(None, None, None)


def _plan(**changes: Any) -> LoadPlan:
    fields: dict[str, Any] = {
        "run": "batch",
        "prompts": PROMPTS,
        "concurrency": 3,
        "requests": 9,
        "max_tokens": 4,
        "round": 1,
        "salt": "s1.",
    }
    return LoadPlan(**fields | changes)


def _endpoint(server: ModelServer, **changes: Any) -> Endpoint:
    fields: dict[str, Any] = {"host": "127.0.0.1", "port": server.port, "api": "chat", "model": "m"}
    return Endpoint(**fields | changes)


def _run(server: ModelServer, plan: LoadPlan | None = None, **endpoint: Any) -> RunResult:
    return measure(plan or _plan(), _endpoint(server, **endpoint))


def test_a_healthy_server_is_measured(
    serve: Callable[..., ModelServer], event_loop_kind: str
) -> None:
    """Every request succeeds, tokens are the server's count, and all the results have values."""
    result = _run(serve())
    assert (result.sent, result.completed, result.failures) == (9, 9, {})
    assert result.output_tokens.values == (4.0,) * 9
    assert result.ttft.count == result.e2e.count == 9
    assert result.event_gap.count == 27
    assert result.tokens_per_event == 1.0
    assert result.output_tps is not None
    assert result.output_tps > 0
    assert result.infrastructure is None
    assert event_loop_kind in result.client
    assert 0 < result.client_cpu_share <= 1.5


def test_a_result_survives_storage(serve: Callable[..., ModelServer]) -> None:
    """A result written as JSON and read back is the same, to the digits that are stored."""
    result = _run(serve())
    stored = json.loads(json.dumps(result.to_json()))
    again = RunResult.from_json(stored)
    assert again.to_json() == stored
    assert again.fingerprint == result.fingerprint
    later = RunResult.from_json(stored | {"invented_later": 1, "format_version": "1.9"})
    assert later.to_json() == stored
    with pytest.raises(ValueError, match="format"):
        RunResult.from_json(stored | {"format_version": "2.0"})


def test_prompts_are_salted_at_their_start(serve: Callable[..., ModelServer]) -> None:
    """No two requests of a gate begin alike, so no prefix cache can answer for the model."""
    server = serve()
    _run(server)
    starts = [a.body["messages"][0]["content"].split("]")[0] for a in server.asked]
    assert len(set(starts)) == 9
    assert all(start.startswith("[s1.") for start in starts)


def test_one_connection_a_stream_opened_before_the_round(
    serve: Callable[..., ModelServer],
) -> None:
    """As many connections as streams, kept over requests."""
    server = serve()
    result = _run(server)
    assert server.connections == 3
    assert max(result.queue_ms.values) < 1000


def test_a_loop_is_closed(serve: Callable[..., ModelServer]) -> None:
    """Never more requests in flight than the concurrency says."""
    lock, now, most = threading.Lock(), itertools.count(), []
    flying: set[int] = set()

    def answer(asked: Asked) -> Reply:
        with lock:
            flying.discard(asked.connection)
            flying.add(asked.connection)
            most.append(len(flying))
            next(now)
        return ordinary(asked)

    _run(serve(answer))
    assert max(most) <= 3


@pytest.mark.parametrize("framing", ["chunked", "length", "eof"])
def test_every_framing_is_read(serve: Callable[..., ModelServer], framing: str) -> None:
    """Chunked bodies, bodies with a length and bodies that end with the connection all succeed."""
    server = serve(lambda _: Reply(chat_parts([" a", " b", " c", " d"]), framing=framing))
    result = _run(server)
    assert (result.completed, result.failures) == (9, {})
    assert server.connections == (9 if framing == "eof" else 3)


def test_completions_and_generate_are_spoken(serve: Callable[..., ModelServer]) -> None:
    """The three routes are asked in their own words."""
    text = event({"choices": [{"index": 0, "text": " x", "finish_reason": "stop"}], "usage": None})
    server = serve(lambda _: Reply([text, event("[DONE]")]))
    assert _run(server, api="completions").completed == 9
    assert server.asked[0].path == "/v1/completions"
    assert "Sing of rivers" in server.asked[0].body["prompt"]
    assert server.asked[0].body["prompt"].endswith("answer:\n\n")
    meta = {"completion_tokens": 4, "prompt_tokens": 3, "finish_reason": {"type": "length"}}
    server = serve(lambda _: Reply([event({"text": " x y", "meta_info": meta}), event("[DONE]")]))
    result = _run(server, api="generate")
    assert result.output_tokens.values == (4.0,) * 9
    assert server.asked[0].body["sampling_params"]["max_new_tokens"] == 4


def test_the_bearer_token_is_sent_and_never_shown(serve: Callable[..., ModelServer]) -> None:
    """The key travels in its header and is in no representation (S17)."""
    server = serve()
    endpoint = _endpoint(server, bearer="sesame")
    result = measure(_plan(), endpoint)
    assert server.asked[0].headers["authorization"] == "Bearer sesame"
    assert "sesame" not in repr(endpoint) + json.dumps(result.to_json())


def test_extras_are_given_up_one_by_one_on_400(serve: Callable[..., ModelServer]) -> None:
    """A server that refuses what it does not know is asked again with less, and nothing counts as failed."""

    def strict(asked: Asked) -> Reply:
        options = asked.body.get("stream_options", {})
        if "return_spec_tokens_details" in asked.body or "continuous_usage_stats" in options:
            refusal = json.dumps({"error": {"message": "unknown field"}}).encode()
            return Reply([refusal], status=400, content_type="application/json", framing="length")
        return ordinary(asked)

    server = serve(strict)
    result = _run(server, engine="sglang")
    assert (result.completed, result.failed) == (9, 0)
    assert result.output_tokens.count == 9
    assert result.infrastructure is None


def test_a_request_that_is_refused_by_everyone_is_no_verdict(
    serve: Callable[..., ModelServer],
) -> None:
    """Where every request gets 400, the gate asked for something wrong: reported as such."""
    refusal = b'{"error": {"message": "max_tokens exceeds the context"}}'
    server = serve(lambda _: Reply([refusal], status=400, framing="length"))
    result = _run(server)
    assert result.infrastructure is ReasonCode.REFUSED
    assert "exceeds the context" in result.infrastructure_message


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, ReasonCode.UNAUTHORIZED),
        (403, ReasonCode.UNAUTHORIZED),
        (404, ReasonCode.WRONG_MODEL),
    ],
)
def test_a_wrong_key_or_model_ends_the_round_and_is_no_verdict(
    serve: Callable[..., ModelServer], status: int, reason: ReasonCode
) -> None:
    """What is wrong with our asking says nothing about the revision (S22), and is not asked 9 times."""
    server = serve(lambda _: Reply([b"no"], status=status, framing="length"))
    result = _run(server, _plan(requests=100))
    assert result.infrastructure is reason
    assert len(server.asked) <= 6


def test_no_server_is_no_verdict() -> None:
    """A refused connection is an infrastructure error (S22)."""
    with serving() as server:
        endpoint = _endpoint(server)
    result = measure(_plan(), endpoint)
    assert result.infrastructure is ReasonCode.UNREACHABLE
    assert str(endpoint.port) in result.infrastructure_message


def test_a_server_that_goes_away_is_no_verdict(serve: Callable[..., ModelServer]) -> None:
    """Death in the middle of a round is for the observer to explain, not for the gate."""
    seen = itertools.count()
    servers: list[ModelServer] = []

    def answer(asked: Asked) -> Reply:
        if next(seen) == 4:
            threading.Thread(target=servers[0].refuse).start()
            return Reply([chat_chunk("x"), Hang()])
        return ordinary(asked)

    servers.append(serve(answer))
    result = _run(servers[0], _plan(requests=60))
    assert result.infrastructure is ReasonCode.UNREACHABLE


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (Reply([chat_chunk(" a"), Drop()]), "truncated"),
        (
            Reply([chat_chunk(" a"), event({"error": {"message": "OOM", "code": 500}})]),
            "server_error",
        ),
        (Reply([chat_chunk(" a"), event("[DONE]")]), "truncated"),
        (Reply([chat_chunk(" a", "abort"), event("[DONE]")]), "aborted"),
        (Reply([event("[DONE]")]), "empty"),
        (Reply([b"<html>busy</html>"], content_type="text/html", framing="length"), "malformed"),
        (
            Reply([b'{"choices": []}'], content_type="application/json", framing="length"),
            "malformed",
        ),
        (Reply([b"overloaded"], status=503, framing="length"), "http_503"),
        (Reply([b"boom"], status=500, framing="length"), "http_500"),
        (Reply([b""], status=302, framing="length"), "http_302"),
        (Reply([b"what is this\r\n\r\n"], framing="raw"), "malformed"),
        (Reply([b"data: " + b"x" * (2 << 20)]), "oversized"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_way_to_fail_has_its_class(
    serve: Callable[..., ModelServer], reply: Reply, failure: str
) -> None:
    """Each failed request is counted under its name, and its tokens and times under nothing."""
    bad = iter([False, True, False, False, True, False])
    lock = threading.Lock()

    def answer(asked: Asked) -> Reply:
        with lock:
            return reply if next(bad) else ordinary(asked)

    result = _run(serve(answer), _plan(concurrency=1, requests=6))
    assert result.failures == {failure: 2}
    assert (result.completed, result.error_rate) == (4, pytest.approx(2 / 6))
    assert result.ttft.count == result.output_tokens.count == 4
    assert result.infrastructure is None
    assert result.failure_examples[0].startswith(failure)


def test_a_model_that_ends_at_once_is_neither_success_nor_failure(
    serve: Callable[..., ModelServer],
) -> None:
    """Finished in good order without a word: counted apart, and in no time and no speed."""
    said = iter([True, False, True, True])
    silence = [chat_chunk("", "stop", usage={"prompt_tokens": 4, "completion_tokens": 1})]
    server = serve(
        lambda asked: ordinary(asked) if next(said) else Reply([*silence, event("[DONE]")])
    )
    result = _run(server, _plan(concurrency=1, requests=4))
    assert (result.completed, result.empty, result.failed) == (3, 1, 0)
    assert result.ttft.count == result.output_tokens.count == 3


def test_a_dead_kept_connection_is_asked_again_once(serve: Callable[..., ModelServer]) -> None:
    """A socket that the server closed while idle costs no request, since not a byte of an answer had come."""
    seen = itertools.count()

    def answer(asked: Asked) -> Reply:
        return Reply([Drop()], framing="raw") if next(seen) == 1 else ordinary(asked)

    result = _run(serve(answer), _plan(concurrency=1, requests=4))
    assert (result.completed, result.failed, result.retried) == (4, 0, 1)


def test_a_fresh_connection_that_dies_is_a_failure(serve: Callable[..., ModelServer]) -> None:
    """On a connection that was never used, a death before any byte is the server's doing."""
    seen = itertools.count()

    def answer(asked: Asked) -> Reply:
        return Reply([Drop()], framing="raw") if next(seen) == 0 else ordinary(asked)

    result = _run(serve(answer), _plan(concurrency=1, requests=4))
    assert (result.completed, result.failures) == (3, {"closed": 1})


@pytest.mark.parametrize(
    ("parts", "limits", "failure"),
    [
        ([chat_chunk(" a"), Hang()], {"idle_limit_s": 0.2}, "idle_timeout"),
        ([event({"choices": []}), Hang()], {"ttft_limit_s": 0.2}, "ttft_timeout"),
        ([b": ping\n\n", Hang()], {"ttft_limit_s": 0.2}, "ttft_timeout"),
        ([chat_chunk(" a"), Hang()], {"total_limit_s": 0.2}, "total_timeout"),
    ],
)
def test_what_takes_too_long_is_ended_and_named(
    serve: Callable[..., ModelServer], parts: list[Any], limits: dict[str, float], failure: str
) -> None:
    """A server that hangs fails by the limit that it broke; pings and empty events are no first token."""
    server = serve(lambda _: Reply(parts))
    result = _run(server, _plan(requests=3, **limits))
    assert result.failures == {failure: 3}


def test_a_deadline_ends_the_round_without_a_verdict(serve: Callable[..., ModelServer]) -> None:
    """What was in flight when the time was over is neither success nor failure."""
    server = serve(lambda _: Reply([chat_chunk(" a"), Hang()]))
    result = _run(server, _plan(deadline_s=0.2))
    assert (result.infrastructure, result.sent) == (ReasonCode.DEADLINE, 0)


def test_a_round_stops_after_too_many_failures(serve: Callable[..., ModelServer]) -> None:
    """Once the error budget is gone, the rest of the requests is not sent: the service is waiting."""
    server = serve(lambda _: Reply([b"no"], status=500, framing="length"))
    result = _run(server, _plan(requests=200, stop_after_failures=2))
    assert 3 <= result.failed <= 6
    assert result.infrastructure is None


def test_an_interrupted_caller_leaves_nothing_behind(serve: Callable[..., ModelServer]) -> None:
    """Ctrl-C during a round ends the requests and the thread, and is raised to the caller."""
    server = serve(lambda _: Reply([chat_chunk(" a"), Hang()]))

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(_plan(), _endpoint(server), on_progress=interrupt)
    assert not [t for t in threading.enumerate() if t.name.startswith("bench-")]


def test_no_usage_gives_no_speed(serve: Callable[..., ModelServer]) -> None:
    """Events are never counted as tokens: without usage there is latency and no throughput."""
    server = serve(lambda _: Reply(chat_parts([" a", " b", " c", " d"], usage=False)))
    result = _run(server)
    assert result.without_usage == 9
    assert (result.output_tps, result.decode_tps.count) == (None, 0)
    assert result.ttft.count == 9


def test_the_time_of_the_first_token_is_its_own(serve: Callable[..., ModelServer]) -> None:
    """The role event does not end the time to the first token; a pause before the first word does count."""
    gate = Pause()
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    server = serve(lambda _: Reply([role, gate, *chat_parts([" a", " b"])[1:]]))
    seen: list[Progress] = []

    def let_go(progress: Progress) -> None:
        seen.append(progress)
        gate.event.set()

    result = measure(_plan(concurrency=1, requests=1), _endpoint(server), on_progress=let_go)
    # Progress is told four times a second: the pause lasted about one such interval.
    assert result.ttft.values[0] > 0.1
    assert seen[-1].of == 1


@pytest.mark.parametrize(
    "name", ["30-first-event-bundles-tokens", "28-several-events-in-one-packet"]
)
def test_recorded_packets_are_measured_over_a_socket(
    serve: Callable[..., ModelServer], name: str
) -> None:
    """A recorded stream played packet by packet gives its recorded counts through the whole client."""
    packets = [
        base64.b64decode(packet["b64"])
        for packet in json.loads((RECORDED / f"{name}.chunks.json").read_bytes())
    ]
    server = serve(lambda _: Reply(packets))
    result = _run(server, _plan(concurrency=1, requests=2, max_tokens=14))
    assert result.completed == 2
    assert result.output_tokens.values[0] in {6.0, 14.0}


def test_vllm_acceptance_is_the_growth_of_its_counters(
    serve: Callable[..., ModelServer],
) -> None:
    """Acceptance of a vLLM server is the difference of its counters over the round, summed over engines."""
    calls = itertools.count()

    def metrics(asked: Asked) -> Reply:
        if asked.path != "/metrics":
            return ordinary(asked)
        grown = next(calls)
        lines = [
            f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {base + grown * step}'
            for engine in (0, 1)
            for name, base, step in (
                ("drafts", 7, 10),
                ("draft_tokens", 9, 50),
                ("accepted_tokens", 3, 20),
            )
        ]
        lines.append('vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9')
        return Reply(["\n".join(lines).encode()], content_type="text/plain", framing="length")

    result = _run(serve(metrics), engine="vllm")
    assert result.accept_length == pytest.approx(3.0)
    assert result.accept_rate == pytest.approx(0.4)
    assert "counters" in result.accept_source


def test_greedy_asks_for_fixed_lengths(serve: Callable[..., ModelServer]) -> None:
    """The greedy workload asks for temperature 0 and ignores the end of sequence."""
    server = serve()
    _run(server, _plan(sampling=Sampling(0.0, 1.0, ignore_eos=True)))
    assert server.asked[0].body["ignore_eos"] is True
    assert server.asked[0].body["temperature"] == 0.0


def test_cached_prompts_are_told(serve: Callable[..., ModelServer]) -> None:
    """The share of prompt tokens that came from the prefix cache is part of the result."""
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    server = serve(lambda _: Reply([chat_chunk(" a", "stop", usage=usage), event("[DONE]")]))
    result = _run(server)
    assert result.cached_prompt_share == pytest.approx(0.25)
    assert result.warnings["prefix_cache_hit"] == 9

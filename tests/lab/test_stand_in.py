"""The stand-in server answers as an inference server does: what our gate measures must be honest."""

from __future__ import annotations

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab_engine import Rehearsal, events, rehearsal, wait_for

PROMPT = {"prompt": "say something", "max_tokens": 20}


def test_a_stream_is_chunked_events_with_usage_last(tmp_path: Path) -> None:
    """A streamed completion brings one event a token, the usage asked for, and `[DONE]`."""
    with rehearsal(tmp_path) as server:
        status, body = server.post(
            "/v1/completions", {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
        )
        *tokens, usage = events(body)
        assert status == 200
        assert len(tokens) == 20
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}
        assert tokens[-1]["choices"][0]["finish_reason"] == "length"


def test_chat_and_completions_give_the_same_words_each_time(tmp_path: Path) -> None:
    """At temperature 0 the same prompt gets the same text, streamed or not."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
    with rehearsal(tmp_path) as server:
        _, streamed = server.post("/v1/chat/completions", {**chat, "stream": True})
        _, whole = server.post("/v1/chat/completions", chat)
        text = "".join(
            event["choices"][0]["delta"].get("content", "") for event in events(streamed)
        )
        assert text.encode() in whole.replace(b"\\n", b"\n")


def test_speed_is_what_was_asked_for(tmp_path: Path) -> None:
    """A stream at 100 tokens a second takes a second for a hundred tokens, not a good deal more."""
    with rehearsal(tmp_path, "--speed", "100", "--ttft", "0.05") as server:
        began = time.monotonic()
        server.post("/v1/completions", {**PROMPT, "max_tokens": 101, "stream": True})
        assert 1.0 < time.monotonic() - began < 2.5


def test_streams_share_the_limit_for_all(tmp_path: Path) -> None:
    """With 200 tokens a second for all, four streams of a hundred tokens take two seconds together."""
    with (
        rehearsal(tmp_path, "--speed", "200", "--max-speed", "200") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        began = time.monotonic()
        bodies = list(
            pool.map(
                lambda _: server.post("/v1/completions", {**PROMPT, "max_tokens": 100}), range(4)
            )
        )
        assert [status for status, _ in bodies] == [200] * 4
        assert 1.5 < time.monotonic() - began < 4


def test_speculation_brings_several_tokens_an_event_and_says_so(tmp_path: Path) -> None:
    """With an acceptance length of 3 there are a third of the events, and /metrics agrees with them."""
    with rehearsal(tmp_path, "--accept-length", "3", "--engine", "vllm", "--speed", "0") as server:
        _, body = server.post("/v1/completions", {**PROMPT, "max_tokens": 300, "stream": True})
        assert len(events(body)) == 100
        lines = server.get("/metrics")[1].decode().splitlines()
        counters = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        drafts = next(
            float(v)
            for k, v in counters.items()
            if k.startswith("vllm:spec_decode_num_drafts_total")
        )
        accepted = next(
            float(v)
            for k, v in counters.items()
            if k.startswith("vllm:spec_decode_num_accepted_tokens_total")
        )
        assert 1 + accepted / drafts == 3


def test_an_engine_refuses_connections_while_it_loads(tmp_path: Path) -> None:
    """SGLang and vLLM bind their port when they are ready; before that it is refused."""
    with rehearsal(tmp_path, "--load", "60", wait=False) as server:
        wait_for(lambda: server.used_mib() > 8000)
        with pytest.raises(ConnectionRefusedError):
            server.get("/health")


def test_llamacpp_answers_503_while_it_loads(tmp_path: Path) -> None:
    """llama-server binds at once and says 503 until the model is there."""
    with rehearsal(tmp_path, "--load", "60", "--engine", "llamacpp", wait=False) as server:
        wait_for(lambda: _status(server) == 503)


def test_drain_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    """After SIGTERM a draining server ends its streams whole, refuses new ones, and exits 0."""
    with rehearsal(tmp_path, "--drain", "--speed", "50") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            server.post, "/v1/completions", {**PROMPT, "max_tokens": 60, "stream": True}
        )
        wait_for(
            lambda: (
                b'sglang:num_running_reqs{model_name="lab-model"} 1' in server.get("/metrics")[1]
            )
        )
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/health")[0] == 503)
        assert server.post("/v1/completions", PROMPT)[0] == 503
        assert len(events(running.result()[1])) == 60
        assert server.process.wait(10) == 0


def test_sigterm_can_be_ignored(tmp_path: Path) -> None:
    """The incident this product began with: a server that does not care about SIGTERM."""
    with rehearsal(tmp_path, "--on-term", "ignore") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.post("/v1/completions", PROMPT)[0] == 200


def test_a_second_holder_runs_out_of_memory(tmp_path: Path) -> None:
    """Where a left-over holds the board, the next server ends with CUDA's own words."""
    with rehearsal(tmp_path, mib=20000) as first:
        done = first.another("--mib", "20000")
        assert done.returncode == 1
        assert "CUDA out of memory" in done.stderr


def test_garbage_looks_like_broken_models(tmp_path: Path) -> None:
    """Each kind of broken answer is there to be found by the gate: loops, no text, no JSON, errors."""
    with rehearsal(tmp_path, "--garbage", "loops", "--speed", "0") as server:
        assert b"the the the the" in server.post("/v1/completions", PROMPT)[1]
        server.tell(garbage="empty")
        assert b'"text": ""' in server.post("/v1/completions", PROMPT)[1]
        server.tell(garbage="stream")
        with pytest.raises(json.JSONDecodeError):
            events(server.post("/v1/completions", {**PROMPT, "stream": True})[1])
        server.tell(garbage="errors")
        statuses = [server.post("/v1/completions", PROMPT)[0] for _ in range(8)]
        assert statuses.count(500) == 2


def test_the_wrong_model_is_told_from_the_right_one(tmp_path: Path) -> None:
    """A server of another model says so, and does not know the model that was asked for."""
    with rehearsal(tmp_path, "--model", "qwen", "--wrong-model") as server:
        assert b"some-other-model" in server.get("/v1/models")[1]
        assert server.post("/v1/completions", {**PROMPT, "model": "qwen"})[0] == 404


def test_a_key_is_wanted_where_one_was_given(tmp_path: Path) -> None:
    """With a key, health is open and completions want the bearer."""
    (tmp_path / "key").write_text("s3cret\n")
    with rehearsal(tmp_path, "--api-key-file", str(tmp_path / "key")) as server:
        assert server.post("/v1/completions", PROMPT)[0] == 401
        assert server.post("/v1/completions", PROMPT, {"Authorization": "Bearer s3cret"})[0] == 200


def test_sixty_four_streams_at_once(tmp_path: Path) -> None:
    """Sixty-four streams run beside each other: each ends whole, and the counter saw all of them."""
    most = 0
    with rehearsal(tmp_path, "--speed", "40") as server, ThreadPoolExecutor(64) as pool:
        done = threading.Event()
        answers = [
            pool.submit(
                server.post, "/v1/completions", {**PROMPT, "max_tokens": 40, "stream": True}
            )
            for _ in range(64)
        ]
        while not done.is_set():
            lines = server.get("/metrics")[1].decode().splitlines()
            most = max(
                most,
                *(
                    int(line.rsplit(" ", 1)[1])
                    for line in lines
                    if line.startswith("sglang:num_running_reqs")
                ),
            )
            if all(answer.done() for answer in answers):
                done.set()
        assert all(len(events(answer.result()[1])) == 40 for answer in answers)
    assert most == 64


def _status(server: Rehearsal) -> int:
    try:
        return server.get("/health")[0]
    except OSError:
        return 0

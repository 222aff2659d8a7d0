"""Servers that lie, drown, starve and wander: each ends within its limits and is told by its name.

The limits are short ones of the plan; nothing here waits for time but the client itself.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from model_server import Asked, Drop, Reply, chat_chunk, chat_parts, event, ordinary, serving

from reconciler.bench import load
from reconciler.bench.load import measure
from reconciler.bench.load_plan import Endpoint, LoadPlan, Prompt
from reconciler.core.gate import Verdict, VerdictKind, judge
from reconciler.core.measurement import ReasonCode, RunResult
from reconciler.core.spec import Gate

PROMPTS = (Prompt("a", "Sing of rivers"), Prompt("b", "Speak of hills"))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def _plan(**changes: Any) -> LoadPlan:
    fields: dict[str, Any] = {"concurrency": 2, "requests": 4, "max_tokens": 8}
    fields |= {"ttft_limit_s": 0.4, "idle_limit_s": 0.4, "total_limit_s": 1.0}
    return LoadPlan("bad", PROMPTS, **fields | changes)


@contextmanager
def _raw(play: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve every connection with `play`, after a request began to come; ends with the context."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve(connection: socket.socket) -> None:
            with closing(connection):
                try:
                    connection.recv(65536)
                    play(connection)
                except OSError:
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _measured(port: int, **changes: Any) -> tuple[RunResult, float]:
    began = time.monotonic()
    result = measure(_plan(**changes), Endpoint("127.0.0.1", port, "chat", "m"))
    return result, time.monotonic() - began


def _judged(result: RunResult) -> Verdict:
    run = {"name": "bad", "concurrency": 2, "requests": 4, "max_tokens": 8, "min_output_tps": 1}
    return judge(Gate.model_validate({"runs": [run]}), [result])


def _flood(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"data: ")
    while True:  # A line of as many bytes as are taken: a gigabyte, or more.
        connection.sendall(b"x" * 65536)


def _events_for_ever(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    while True:
        connection.sendall(chat_chunk("more ") * 200)


def _pings_for_ever(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    while True:
        connection.sendall(b": ping\n\n")
        time.sleep(0.02)


def _drip(connection: socket.socket) -> None:
    for byte in itertools.chain(HEAD, itertools.cycle(b"data: x\n\n")):
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def _headers_for_ever(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-Filler: " + b"y" * 4000 + b"\r\n")


def _interim_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 50)
        time.sleep(0.01)


def _chunk_sizes(connection: socket.socket) -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.sendall(head + b"-5\r\nhello\r\n")


def _no_http(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")


@pytest.mark.parametrize(
    ("play", "failure"),
    [
        (_flood, "oversized"),
        (_events_for_ever, "oversized"),
        (_pings_for_ever, "ttft_timeout"),
        (_drip, "ttft_timeout"),
        (_headers_for_ever, "malformed"),
        (_interim_for_ever, "ttft_timeout"),
        (_chunk_sizes, "malformed"),
        (_no_http, "malformed"),
    ],
)
def test_what_never_ends_is_ended(play: Callable[[socket.socket], None], failure: str) -> None:
    """Every request fails by the limit that was broken, within it, and the gate fails on its error budget."""
    with _raw(play) as port:
        result, took = _measured(port)
    assert result.failures == {failure: 4}
    assert took < 20
    verdict = _judged(result)
    assert verdict.kind is VerdictKind.FAIL
    assert verdict.reasons[0].code is ReasonCode.ERROR_BUDGET
    assert failure in verdict.reasons[0].message


def test_memory_is_bounded_by_what_a_server_may_say() -> None:
    """A flood is cut at a megabyte an answer, not when memory is gone."""
    collected = []
    with _raw(_flood) as port:
        plan = _plan(requests=2)
        collected = list(load.collect(plan, Endpoint("127.0.0.1", port, "chat", "m")).records)
    assert {r.failure for r in collected} == {"oversized"}
    assert max(sum(len(data) for _, data in r.pieces) for r in collected) < 4 << 20


def test_a_total_limit_ends_a_slow_answer() -> None:
    """A server that goes on saying a little is ended by the longest time one answer may take."""

    def slow(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        while True:
            connection.sendall(chat_chunk("a"))
            time.sleep(0.05)

    with _raw(slow) as port:
        result, took = _measured(port)
    assert result.failures == {"total_timeout": 4}
    assert took < 20


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_closing_at_random_is_a_failure_where_it_hurts(seed: int) -> None:
    """However a connection ends, an answer counts only if all of it came; the others are named."""
    draw, lock = random.Random(seed), threading.Lock()
    whole = []

    def answer(asked: Asked) -> Reply:
        parts: list[Any] = chat_parts([f" {n}" for n in range(8)])
        with lock:
            cut = draw.randrange(len(parts) + 4)
        whole.append(cut >= len(parts))
        return Reply(parts if whole[-1] else [*parts[:cut], Drop()])

    with serving(answer) as server:
        result, _ = _measured(server.port, requests=12)
    # An answer that lacks only the usage or [DONE] is complete in what it says; it tells no tokens then.
    assert sum(whole) <= result.completed < 12
    assert result.completed + result.failed == result.sent == 12
    assert set(result.failures) <= {"truncated", "closed", "malformed", "empty"}


def test_a_redirect_is_not_followed_and_said() -> None:
    """A server that sends us on was not measured, and another one must not be in its place (S22)."""
    reply = b"HTTP/1.1 307 X\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n"

    with _raw(lambda connection: connection.sendall(reply)) as port:
        result, _ = _measured(port)
    assert result.infrastructure is ReasonCode.REFUSED
    assert "http://192.0.2.1/" in result.infrastructure_message
    assert _judged(result).kind is VerdictKind.ERROR


def test_a_page_is_no_answer() -> None:
    """HTML with 200 is what a proxy says; it is shown."""
    page = Reply([b"<html>Sign in</html>"], content_type="text/html", framing="length")
    with serving(lambda _: page) as server:
        result, _ = _measured(server.port)
    assert result.failures == {"malformed": 4}
    assert "text/html: b'<html>Sign in" in result.failure_examples[0]


@pytest.mark.parametrize(
    "count", [-3, 0, 2, 10**12, 1.5, True, "8", None, [8]], ids=lambda c: repr(c)[:12]
)
def test_a_lying_usage_gives_no_speed(count: object) -> None:
    """Negative, huge, below the events seen, no whole number: no token is counted, the speed stays open."""

    def answer(asked: Asked) -> Reply:
        usage = event({"choices": [], "usage": {"completion_tokens": count}})
        about = asked.body["messages"][0]["content"].split()[-1]
        words = [chat_chunk(f" {about}{n}") for n in range(7)]
        return Reply([*words, chat_chunk(" 8", "length"), usage, event("[DONE]")])

    with serving(answer) as server:
        result, _ = _measured(server.port)
    assert (result.completed, result.without_usage, result.output_tps) == (4, 4, None)
    run = {"name": "bad", "concurrency": 2, "requests": 4, "max_tokens": 8, "min_output_tps": 1}
    verdict = judge(Gate.model_validate({"runs": [run]}), [result] * 3)
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    assert ReasonCode.NO_USAGE in {r.code for r in verdict.reasons}


def test_ten_thousand_choices_are_not_ten_thousand_answers() -> None:
    """More choices than were asked for is no success, whatever the usage says."""

    def answer(asked: Asked) -> Reply:
        choices = [
            {"index": n, "delta": {"content": "x"}, "finish_reason": "stop"} for n in range(10_000)
        ]
        usage = {"completion_tokens": 80_000}
        return Reply([event({"choices": choices, "usage": usage}), event("[DONE]")])

    with serving(answer) as server:
        result, took = _measured(server.port, total_limit_s=20.0, ttft_limit_s=20.0)
    assert result.failures == {"malformed": 4}
    assert "10000 choices came, 1 was asked for" in result.failure_examples[0]
    assert took < 20


def test_a_deep_or_endless_number_is_malformed() -> None:
    """JSON that would break a reader breaks an answer and nothing else."""
    for body in (b"[" * 100_000, b'{"a": ' + b"9" * 100_000 + b"}", b'{"choices": NaN}'):
        with serving(lambda _, b=body: Reply([b"data: " + b + b"\n\n"])) as server:
            result, _ = _measured(server.port)
        assert result.failures == {"malformed": 4}


def test_one_bad_prompt_is_the_workloads_fault() -> None:
    """A prompt longer than the context is refused by a good server: named by its number, and no verdict (S22)."""

    def answer(asked: Asked) -> Reply:
        if "hills" in asked.body["messages"][0]["content"]:
            why = "This model's maximum context length is 512 tokens. However, you requested 900."
            refusal = json.dumps({"error": {"message": why}}).encode()
            return Reply([refusal], status=400, framing="length")
        return ordinary(asked)

    with serving(answer) as server:
        result, _ = _measured(server.port)
    assert result.infrastructure is ReasonCode.REFUSED
    assert result.infrastructure_message.startswith("prompt 2 of the workload")
    assert "maximum context length is 512" in result.infrastructure_message

"""What all engines share: answers over HTTP, metrics, and secrets that must not show."""

from __future__ import annotations

import json

import pytest
from engine_servers import accepted
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.spec import Server
from reconciler.engines import custom
from reconciler.engines.base import (
    ANSWER_MAX_BYTES,
    Answer,
    NotYet,
    Ready,
    Wrong,
    completion_answer,
    credential_path,
    health_answer,
    json_object,
    metric_sum,
    models_answer,
    redacted,
    secrets_env_path,
    secrets_yaml_path,
    version_key,
    without_secrets,
)


def served(model: str | None = None, name: str | None = "qwen") -> Server:
    return accepted(
        {
            "name": "a",
            "host": "h",
            "gpus": [],
            "engine": {"name": "custom", "command": ["/x"]},
            "listen": {"port": 1},
            **({} if model is None else {"model": model}),
            **({} if name is None else {"served_model_name": name}),
        },
        custom,
    )


def judged(status: int | None, answer: object, server: Server | None = None) -> Answer:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return completion_answer(server or served(), status, body)


ONE = {
    "model": "qwen",
    "choices": [{"text": "!", "finish_reason": None}],
    "usage": {"completion_tokens": 1},
}


def test_a_token_of_the_right_model_is_ready() -> None:
    """A counted token is enough, or a reason why the text ended when nobody counts."""
    assert judged(200, ONE) == Ready()
    assert judged(200, {"choices": [{"text": "", "finish_reason": "stop"}]}) == Ready()


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (200, {**ONE, "model": "other"}, "'other'"),
        (200, {**ONE, "usage": {"completion_tokens": 0}}, "not one token"),
        (200, {**ONE, "choices": []}, "without a completion"),
        (200, {"error": {"message": "boom"}}, "it says: boom"),
        (200, {"error": None, "choices": []}, "an error inside"),
        (200, b"<html>", "without a JSON object"),
        (200, b"[]", "without a JSON object"),
        (401, b"", "refuses our key"),
        (403, {"error": "no"}, "refuses our key"),
        (404, {"object": "error", "message": "The model `qwen` does not exist."}, "does not exist"),
        (404, b"", "HTTP 404"),
        (400, {"error": {"message": "max_tokens"}}, "max_tokens"),
        (302, b"", "HTTP 302"),
    ],
)
def test_what_waiting_does_not_cure_is_wrong(status: int, answer: object, words: str) -> None:
    """Another model, a refused key, an error in a 200: definite, with the server's own words."""
    verdict = judged(status, answer)
    assert isinstance(verdict, Wrong)
    assert words in verdict.why


@pytest.mark.parametrize("status", [None, 408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_not_yet(status: int | None) -> None:
    """A server that loads or warms up is asked again; only the deadline ends that."""
    assert isinstance(judged(status, b""), NotYet)


def test_a_model_named_by_its_file_is_the_same_model() -> None:
    """llama.cpp answers with the file's name when no alias was given."""
    assert judged(200, {**ONE, "model": "m.gguf"}, served("/srv/m.gguf", None)) == Ready()
    assert judged(200, {**ONE, "model": "whatever"}, served(None, None)) == Ready()


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"1" * (ANSWER_MAX_BYTES + 1), b"\xff", b"", b"{"]
)
def test_no_answer_breaks_the_reader(body: bytes) -> None:
    """Depth, length and binary are no JSON object, and nothing worse."""
    assert json_object(body) is None


@given(st.binary(max_size=200), st.sampled_from([None, 200, 404, 503]))
def test_any_answer_is_judged(body: bytes, status: int | None) -> None:
    """Whatever a port says, there is an answer; noise is never Ready."""
    assert judged(status, body) != Ready()


def test_health_is_alive_also_without_the_key() -> None:
    """401 means alive, 503 loading, 404 another engine, no answer not yet."""
    assert health_answer(200) == Ready()
    assert health_answer(401) == Ready()
    assert isinstance(health_answer(503), NotYet)
    assert isinstance(health_answer(None), NotYet)
    assert isinstance(health_answer(500), NotYet)
    assert isinstance(health_answer(404), Wrong)


METRICS = b"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="a b\\"}"} 2.0
sglang:num_running_reqs{dp_rank="1"} 1.0 1712345678
sglang:num_running_reqs_offline_batch 9
garbage line
sglang:num_queue_reqs 1e0
"""


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (METRICS, 4),
        (b"sglang:num_queue_reqs 0.0\n", 0),
        (b"sglang:num_queue_reqs 0.4\n", 1),
        (b"sglang:num_queue_reqs NaN\n", None),
        (b"sglang:num_queue_reqs +Inf\n", None),
        (b"sglang:num_queue_reqs -1\n", None),
        (b"sglang:num_queue_reqs what\n", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_gauges_add_up_over_ranks(body: bytes, count: int | None) -> None:
    """Samples of the named gauges are added, others ignored; no sample or no count is unknown."""
    assert metric_sum(body, ("sglang:num_running_reqs", "sglang:num_queue_reqs")) == count


def test_secrets_are_taken_out_of_a_description() -> None:
    """S17: keys and tokens go, in maps, lists and argument lists; the rest stays as it was."""
    described = {
        "api_key": "CANARY",
        "admin_api_key": "CANARY",
        "hf_token": "CANARY",
        "api-key": None,
        "max_total_num_tokens": 5,
        "launch_command": [
            "--api-key",
            "CANARY",
            "CANARY",
            "--tp-size",
            "4",
            "--admin-api-key=CANARY",
        ],
        "internal_states": [{"nested": {"secret": "CANARY"}, "avg_spec_accept_length": 2.5}],
    }
    clean = redacted(described)
    assert "CANARY" not in json.dumps(clean)
    assert isinstance(clean, dict)
    assert clean["max_total_num_tokens"] == 5
    assert clean["api-key"] is None
    assert clean["launch_command"][3:5] == ["--tp-size", "4"]
    assert clean["internal_states"][0]["avg_spec_accept_length"] == 2.5
    assert without_secrets(["vllm", "--api-key", "K1", "K2", "--x"]) == (
        "vllm", "--api-key", "(redacted)", "(redacted)", "--x",
    )  # fmt: skip


def test_versions_compare_as_numbers() -> None:
    """0.5.10 is newer than 0.5.6, and a post-release newer than its release."""
    assert version_key("0.5.10") > version_key("0.5.6.post2")
    assert version_key("0.5.10.post1") > version_key("0.5.10")
    assert version_key("0.8.5+cu128") == (0, 8, 5)


def test_secrets_have_their_places() -> None:
    """The helper's files and the unit's credentials are where both sides look for them."""
    assert secrets_env_path("q") == "/var/lib/reconciler/q/secrets.env"
    assert secrets_yaml_path("q") == "/var/lib/reconciler/q/secrets.yaml"
    assert credential_path("q.service", "k") == "/run/credentials/q.service/k"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b'{"data":[{"id":"qwen"}]}', Ready),
        (200, b'{"data":[{"id":"other"},7]}', Wrong),
        (200, b'{"data":[]}', Wrong),
        (200, b"<html>", Wrong),
        (404, b"", Wrong),
        (401, b"", Wrong),
        (503, b"", NotYet),
        (None, b"", NotYet),
    ],
)
def test_a_list_of_models_tells_who_answers(status: int | None, body: bytes, kind: type) -> None:
    """The expected model is in it, or it is another server; no answer is none."""
    assert isinstance(models_answer(served(), status, body), kind)

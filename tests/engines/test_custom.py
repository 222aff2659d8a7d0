"""A server of any kind: its command as written, its answers by the usual forms."""

from __future__ import annotations

import json

import pytest
from engine_servers import accepted, validated

from reconciler.core.spec import Server
from reconciler.engines import custom
from reconciler.engines.base import NotYet, Ready, Wrong


def document(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "name": "tiny",
        "host": "lab",
        "gpus": [0],
        "engine": {"name": "custom", "command": ["/opt/serve", "--port", "8000"]},
        "listen": {"port": 8000},
        "served_model_name": "tiny",
    }
    return {**plain, **changes}


def server(**changes: object) -> Server:
    return accepted(document(**changes), custom)


def refusals(**changes: object) -> list[tuple[str, str]]:
    made = validated(document(**changes), custom)
    return custom.problems(made)


def engine(**options: object) -> dict[str, object]:
    return {"name": "custom", "command": ["/opt/serve"], **options}


def test_the_command_is_started_as_written() -> None:
    """No word of the command is changed; GPUs come by UUID, `args` behind."""
    launch = custom.render(
        server(
            args={"flag": True, "n": 3, "list": ["a", "b"], "map": {"b": 1, "a": [2]}, "t": "-x"},
            env={"A": "$B"},
            secrets={"TOKEN": {"file": "/etc/t"}},
            model="/srv/m.gguf",
        ),
        ["GPU-1", "GPU-2"],
    )
    assert launch.argv == (
        "/opt/serve", "--port", "8000", "--flag", "--list", "a", "b", "--map", '{"a":[2],"b":1}', "--n", "3", "--t=-x",
    )  # fmt: skip
    assert launch.environment == {"A": "$B", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert launch.secret_env == {"TOKEN": "/etc/t"}
    assert launch.paths == ("/opt/serve", "/srv/m.gguf")
    assert custom.read_argv(launch.argv, {}) == {
        "engine": {"name": "custom", "command": launch.argv}
    }


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"engine": {"name": "custom", "command": ["serve"]}}, "engine.command", "absolute path"),
        ({"speculative": {"algorithm": "NGRAM"}}, "speculative", "engine.command"),
        ({"runtime": {"python": "/opt/py"}}, "runtime.python", "engine.command"),
        ({"args": {"x": False}}, "args.x", "leave it out"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(
    changes: dict[str, object], place: str, words: str
) -> None:
    """A field that would silently do nothing is an error at its place."""
    found = dict(refusals(**changes))
    assert words in found[place]
    assert len(found) == 1


def test_a_generation_is_asked_for_in_the_form_that_the_spec_names() -> None:
    """Completions, chat or none, with the served name; the key goes along."""
    asked = custom.ready_requests(server()).generation
    assert asked is not None
    assert (asked.method, asked.path, asked.authorized) == ("POST", "/v1/completions", True)
    assert json.loads(asked.body or b"") == {
        "model": "tiny", "prompt": "Hello", "max_tokens": 1, "temperature": 0, "stream": False,
    }  # fmt: skip
    chat = custom.ready_requests(server(engine=engine(api="openai-chat"))).generation
    assert chat is not None
    assert chat.path == "/v1/chat/completions"
    silent = server(engine=engine(api="none", health="/up"))
    assert custom.ready_requests(silent).generation is None
    assert custom.ready_requests(silent).alive.path == "/up"
    assert custom.generation_ok(silent, None, b"") == Ready()


def test_health_and_generation_are_read_by_the_shared_rules() -> None:
    """503 is loading, a token is ready, another model's answer is wrong."""
    one = server()
    assert isinstance(custom.alive(one, 503, b""), NotYet)
    assert custom.alive(one, 200, b"") == Ready()
    good = {"model": "tiny", "choices": [{"text": " a", "finish_reason": "length"}]}
    assert custom.generation_ok(one, 200, json.dumps(good).encode()) == Ready()
    bad = {**good, "model": "other"}
    assert isinstance(custom.generation_ok(one, 200, json.dumps(bad).encode()), Wrong)


@pytest.mark.parametrize(
    ("status", "body", "count"),
    [
        (200, b"3", 3),
        (200, b'{"running": 2, "waiting": 1, "model": "x"}', 3),
        (200, b'{"num_running_reqs": 0, "in_flight": 0}', 0),
        (200, b'{"running": "2"}', None),
        (200, b'{"load": 2}', None),
        (200, b"vllm:num_requests_running 2.0\nvllm:num_requests_waiting 1.0\n", 3),
        (200, b"true", None),
        (200, b"-1", None),
        (200, b"<html>", None),
        (200, b"", None),
        (500, b"0", None),
        (None, b"", None),
    ],
)
def test_a_count_is_read_or_unknown(status: int | None, body: bytes, count: int | None) -> None:
    """What is no count is unknown, and unknown is never zero (S12)."""
    assert custom.in_flight(status, body) == count


def test_the_count_is_asked_where_the_spec_says() -> None:
    """Without a path the count is unknown and nothing is asked."""
    assert custom.in_flight_request(server()) is None
    asked = custom.in_flight_request(server(engine=engine(in_flight="/load")))
    assert asked is not None
    assert asked.path == "/load"
    assert custom.warnings(server()) == []


def test_options_of_another_engine_are_a_bug() -> None:
    """The spec language always hands an engine its own options; anything else stops here."""
    other = server().model_copy(
        update={"engine": server().engine.model_copy(update={"options": None})}
    )
    with pytest.raises(TypeError, match="NoneType"):
        custom.render(other, [])
    assert isinstance(custom.identity_ok(server(), 404, b""), Wrong)

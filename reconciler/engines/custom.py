"""Any other server that speaks HTTP: its command is written out, and nothing about it is guessed.

`engine: {name: custom, command: [/opt/x/serve, --port, "8000"], health: /health, api: openai}`. The command
must listen where `listen` says; `args` are appended to it in the plain GNU form. A key under
`listen.api_key` is what we send; the server gets it by its own `secrets`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from reconciler.engines.base import (
    Answer,
    Finding,
    HttpRequest,
    Launch,
    Ready,
    ReadyRequests,
    chat_request,
    completion_answer,
    completion_request,
    environment,
    health_answer,
    json_value,
    metric_sum,
    models_answer,
    read_environment,
    secret_environment,
)
from reconciler.engines.catalogue import compact_json, scalar
from reconciler.engines.told import Told

if TYPE_CHECKING:
    from reconciler.core.spec import Server

name: Final = "custom"
ready_path: Final = "/health"
drains_on_term: Final = False  # Not known of a server that we do not know.
stop_extra_s: Final = 0.0  # Not known of an unknown server: `timeouts.stop` alone decides.

LOAD_GAUGES: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "requests_running",
    "requests_waiting",
)
"""Gauges of requests that a metrics page may hold."""


class Options(BaseModel):
    """What a custom engine says about itself."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=()
    )

    command: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        max_length=1000,
        title="Command",
        description="The program's absolute path and its arguments, one item each; no shell reads them.",
        examples=[["/opt/serve/bin/serve", "--port", "8000"]],
    )
    health: str = Field(
        default="/health",
        pattern=r"^/[!-~]*$",
        title="Health path",
        description="Answers 200 when the server is up, 503 while it loads.",
        examples=["/health"],
    )
    api: Literal["openai", "openai-chat", "none"] = Field(
        default="openai",
        title="API",
        description="How a generation is asked for: completions, chat, or not at all (then health decides).",
        examples=["openai"],
    )
    in_flight: str | None = Field(
        default=None,
        pattern=r"^/[!-~]*$",
        title="In-flight path",
        description="Tells how many requests run and wait: a number, JSON with `running` and `waiting`, or metrics.",
        examples=["/metrics"],
    )


def problems(server: Server) -> list[Finding]:
    """Refuse what this engine has no way to pass on."""
    options, found = _options(server), list[Finding]()
    if not options.command[0].startswith("/"):
        found.append(("engine.command", "begins with the program's absolute path"))
    if server.speculative is not None:
        found.append(("speculative", "a custom engine takes it in `engine.command`"))
    for key in ("python", "binary", "container", "image"):
        if getattr(server.runtime, key) is not None:
            found.append((f"runtime.{key}", "a custom engine is started by `engine.command` alone"))
    found += [
        (f"args.{key}", "has no known form that turns it off: leave it out instead")
        for key, value in sorted(server.args.items())
        if value is False
    ]
    return found


def warnings(server: Server) -> list[Finding]:  # noqa: ARG001  (the family's signature)
    """Nothing is known of it that could be warned about."""
    return []


def render(server: Server, gpu_uuids: Sequence[str]) -> Launch:
    """Return the command as written, and `args` behind it."""
    options = _options(server)
    extra = [word for key, value in sorted(server.args.items()) for word in plain_words(key, value)]
    return Launch(
        argv=(*options.command, *extra),
        environment=environment(server, gpu_uuids),
        secret_env=secret_environment(server),
        paths=tuple(
            path
            for path in (options.command[0], server.model)
            if path is not None and path.startswith("/")
        ),
    )


def plain_words(key: str, value: object) -> tuple[str, ...]:
    """Write one flag in the form of most programs: bare, one value, several values, or JSON."""
    flag = f"--{key}"
    if value is True:
        return (flag,)
    if isinstance(value, Mapping):
        return (flag, compact_json(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (flag, *(scalar(item) for item in value))
    text = scalar(value)
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)


def recognises(argv: Sequence[str]) -> bool:
    """Take whatever is a program by its absolute path; whoever asks asks the engines that know more first."""
    return bool(argv) and argv[0].startswith("/")


def read_argv(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    version: str | None = None,  # noqa: ARG001  (the family's signature)
) -> dict[str, object]:
    """Return the command: no word of it is known to mean a field."""
    return {"engine": {"name": name, "command": tuple(argv)}, **read_environment(environment)}


def ready_requests(server: Server) -> ReadyRequests:
    """Ask the health path, then for a token in the form that `api` names."""
    options = _options(server)
    generation = None
    if options.api != "none":
        ask = completion_request if options.api == "openai" else chat_request
        generation = ask(server)
    return ReadyRequests(HttpRequest("GET", options.health), generation)


def alive(server: Server, status: int | None, body: bytes) -> Answer:  # noqa: ARG001  (the family's signature)
    """Read the health path's answer."""
    return health_answer(status)


def generation_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read the generation's answer; without an API there is none to wait for."""
    return Ready() if _options(server).api == "none" else completion_answer(server, status, body)


def identity_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read a list of models; nothing asks for one, since not every server has it."""
    return models_answer(server, status, body)


def about_requests(server: Server) -> tuple[HttpRequest, ...]:  # noqa: ARG001  (the family's signature)
    """Ask nothing: no answer of it is known to mean a field."""
    return ()


def about(
    server: Server,  # noqa: ARG001  (the family's signature)
    answers: Sequence[tuple[int | None, bytes]],  # noqa: ARG001
) -> tuple[Told, ...] | str:
    """Know nothing of what it runs with."""
    return ()


variables: Final[tuple[str, ...]] = ()


def startup_words(server: Server) -> tuple[str, ...]:  # noqa: ARG001  (the family's signature)
    """Look for none: nothing is known of its words."""
    return ()


def startup_told(server: Server, lines: Sequence[str]) -> tuple[Told, ...]:  # noqa: ARG001  (the family's signature)
    """Read none."""
    return ()


def in_flight_request(server: Server) -> HttpRequest | None:
    """Ask where the spec says."""
    path = _options(server).in_flight
    return None if path is None else HttpRequest("GET", path)


_COUNTS: Final = re.compile(
    r"(?:num_)?(?:requests?_)?(?:running|waiting|queued|in_flight)(?:_requests?|_reqs)?"
)


def in_flight(status: int | None, body: bytes) -> int | None:
    """Read a bare number, the counts of a JSON object, or known gauges; anything else is unknown."""
    if status != 200:
        return None
    value = json_value(body)
    if isinstance(value, dict):
        counts = [count for key, count in value.items() if _COUNTS.fullmatch(str(key))]
        return sum(counts) if counts and all(_is_count(count) for count in counts) else None
    if _is_count(value) and isinstance(value, int):
        return value
    return metric_sum(body, LOAD_GAUGES)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _options(server: Server) -> Options:
    options = server.engine.options
    if not isinstance(options, Options):
        raise TypeError(f"the engine's options are {type(options).__name__}, not those of {name}")
    return options

"""What a serving engine is to this product, and what its members share.

An engine says how a server is started, how its command line reads back, what its answers over HTTP mean,
and which combinations of fields it would refuse. It runs nothing: commands and requests are values, answers
come in as status and bytes. Members are modules (`sglang`, `vllm`, `llamacpp`, `custom`), named in one table
in `wiring`; each is a value of the Protocol `Engine`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel

from reconciler.core.demands import Demands, WantedModel
from reconciler.engines.told import Told, same_model

if TYPE_CHECKING:
    from reconciler.core.spec import Secret, Server

STATE_DIRECTORY = "/var/lib/reconciler"
"""Where the helper keeps a server's records and the secrets files that it makes (root only)."""

CREDENTIALS_DIRECTORY = "/run/credentials"
"""Where systemd (247 and newer) shows a unit its credentials, readable by the unit's user alone."""

ANSWER_MAX_BYTES = 1024 * 1024
"""More than any answer read here has: SGLang's description of itself is some 20 kB, its metrics 200 kB."""

Finding = tuple[str, str]
"""A dotted field path of the spec, and a sentence about it."""


# -- what an engine hands out --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that a unit and a preflight need to know to start a server.

    `secret_env` and `secret_config` name files on the host, never values: the helper reads them there and
    makes `secrets.env` (NAME=value, read by systemd) and `secrets.yaml` (key: value, read by the engine).
    `credentials` are files that systemd passes on under `credential_path`. `check_argv` is the command
    whose help lists the flags that this installation knows; None where there is no way to ask. `demands` is what
    else the host is asked about before anything stops; None where the engine says nothing of it.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    secret_env: Mapping[str, str] = field(default_factory=dict)
    secret_config: Mapping[str, str] | None = None
    credentials: Mapping[str, str] = field(default_factory=dict)
    flags_to_check: tuple[str, ...] = ()
    check_argv: tuple[str, ...] | None = None
    paths: tuple[str, ...] = ()
    no_new_privileges: bool = True
    demands: Demands | None = None


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request to the server. `authorized`: send the key of `listen.api_key` when there is one."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    authorized: bool = True
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ReadyRequests:
    """The rungs of readiness that are asked over HTTP, in order; None where an engine has none.

    `alive` tells loading from serving cheaply; `generation` asks for one real token and alone proves
    that the server can do its work. `identity` asks which models are served: most engines answer any name
    in a generation with that same name, so only this tells one server from another (its answer says
    nothing about being ready).
    """

    alive: HttpRequest
    generation: HttpRequest | None
    identity: HttpRequest | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The server did what was asked."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Not ready, and nothing says that it will not be: ask again until the deadline."""

    why: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that waiting does not cure: another model, another key, a request it cannot serve."""

    why: str


Answer = Ready | NotYet | Wrong


class Engine(Protocol):
    """One serving engine. `status` is None where no HTTP answer came (refused, timed out)."""

    @property
    def name(self) -> str:
        """The word under `engine:`."""

    @property
    def Options(self) -> type[BaseModel]:  # noqa: N802  (a type, not a value)
        """The model of the engine's own fields under `engine:`."""

    @property
    def ready_path(self) -> str:
        """The path whose 200 means most; for people and for documentation."""

    @property
    def drains_on_term(self) -> bool:
        """Whether SIGTERM lets requests in flight end (without a limit of its own)."""

    @property
    def stop_extra_s(self) -> float:
        """How long the engine may take to end after its last request, by its own constants."""

    def problems(self, server: Server) -> Sequence[Finding]:
        """Say what this engine would refuse, or silently do otherwise than written."""

    def warnings(self, server: Server) -> Sequence[Finding]:
        """Say what is accepted and still worth a look: deprecated, adjusted, checked with a neighbour."""

    def render(self, server: Server, gpu_uuids: Sequence[str]) -> Launch:
        """Return how this server is started on these GPUs. The spec has no `problems`."""

    def recognises(self, argv: Sequence[str]) -> bool:
        """Say whether a command line, ours or a stranger's, starts this engine."""

    def read_argv(
        self, argv: Sequence[str], environment: Mapping[str, str], *, version: str | None = None
    ) -> dict[str, object]:
        """Read a command line, ours or a stranger's, back into the words of a spec.

        Compare it with what the same function reads from a rendered argv: both sides are then
        normalised alike.
        """

    def ready_requests(self, server: Server) -> ReadyRequests:
        """Return what to ask a starting server."""

    def alive(self, server: Server, status: int | None, body: bytes) -> Answer:
        """Read the answer to `ready_requests().alive`."""

    def generation_ok(self, server: Server, status: int | None, body: bytes) -> Answer:
        """Read the answer to `ready_requests().generation`."""

    def identity_ok(self, server: Server, status: int | None, body: bytes) -> Answer:
        """Read the answer to `ready_requests().identity`."""

    def about_requests(self, server: Server) -> Sequence[HttpRequest]:
        """Return what to ask a running server about itself; all are harmless reads."""

    def about(
        self, server: Server, answers: Sequence[tuple[int | None, bytes]]
    ) -> tuple[Told, ...] | str:
        """Read the answers: what it says of its flags, or why that is not known; () where nothing is asked."""

    @property
    def variables(self) -> Sequence[str]:
        """How the names of the variables begin that change what this engine does."""

    def startup_words(self, server: Server) -> Sequence[str]:
        """Return phrases of the start-up lines that say what the engine says nowhere over HTTP; () where it says all there."""

    def startup_told(self, server: Server, lines: Sequence[str]) -> tuple[Told, ...]:
        """Read those lines; () where they are not there or not understood."""

    def in_flight_request(self, server: Server) -> HttpRequest | None:
        """Return how to ask for the number of requests running and waiting; None: it cannot be asked."""

    def in_flight(self, status: int | None, body: bytes) -> int | None:
        """Read that number. None is unknown, never zero."""


# -- what every engine does alike ----------------------------------------------------------------------


def environment(server: Server, gpu_uuids: Sequence[str]) -> dict[str, str]:
    """Return the plain environment: what the spec sets, and the GPUs by UUID.

    UUIDs and not indices, since an index counts anew in every container and at every boot. A server
    without GPUs sees none.
    """
    credentials = {
        name: credential_path(server.unit, secret.credential)
        for name, secret in sorted(server.secrets.items())
        if secret.credential is not None
    }
    return {**server.env, **credentials, "CUDA_VISIBLE_DEVICES": ",".join(gpu_uuids)}


def secret_environment(server: Server) -> dict[str, str]:
    """Return the spec's secrets: name → file on the host. What systemd hands over as a credential is not among them."""
    return {
        name: secret_path(server.name, secret)
        for name, secret in sorted(server.secrets.items())
        if secret.credential is None
    }


def secret_path(server_name: str, secret: Secret) -> str:
    """Return the file on the host that holds a secret, or will once it was brought there."""
    if secret.file is not None:
        return secret.file
    # Without a digest it is a bare engine's view of a spec that no fleet was read from; nothing runs from that.
    return sealed_path(server_name, secret.sha256 or "not-found")


def host_credentials(server: Server) -> dict[str, str]:
    """Return the credentials that systemd finds by their names alone."""
    names = {s.credential for s in server.secrets.values() if s.credential is not None}
    return dict.fromkeys(sorted(names), "")


_FROM_SYSTEMD = re.compile(
    r"HOME|LANG|LOGNAME|PATH|SHELL|USER|TERM|MAINPID|INVOCATION_ID|NOTIFY_SOCKET|JOURNAL_STREAM|MEMORY_PRESSURE_.*"
    r"|SYSTEMD_.*|XDG_.*|LISTEN_.*|CREDENTIALS_DIRECTORY|RECONCILER_SERVER|SPT_NOENV"
)


def read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Read a unit's or a process's environment back into `gpus` and `env`; secrets are left out."""
    gpus = environment.get("CUDA_VISIBLE_DEVICES")
    env = {
        name: value
        for name, value in sorted(environment.items())
        if name != "CUDA_VISIBLE_DEVICES"
        and not _FROM_SYSTEMD.fullmatch(name)
        and not _SECRET_KEY.search(name)
    }
    found: dict[str, object] = {} if gpus is None else {"gpus": [g for g in gpus.split(",") if g]}
    return {**found, **({"env": env} if env else {})}


CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
"""What of the environment decides where the hub's library keeps models."""


def wanted_models(
    server: Server, draft: object, revision: object = None, *, weights: bool = True
) -> tuple[WantedModel, ...]:
    """Return the models that a start loads: the spec's own, and a draft's where one is named."""
    found = []
    if server.model is not None:
        found.append(WantedModel("model", server.model, server.model_revision, weights))
    if isinstance(draft, str) and draft != server.model:
        pinned = revision if isinstance(revision, str) else None
        found.append(WantedModel("draft", draft, pinned, weights))
    return tuple(found)


def cache_variables(server: Server) -> tuple[tuple[str, str], ...]:
    """Return what of the spec's environment decides where the hub's library keeps models."""
    return tuple((name, server.env[name]) for name in CACHE_VARIABLES if name in server.env)


def places_of(server: Server) -> tuple[str, ...]:
    """Return where a start writes temporary files."""
    directory = server.runtime.working_directory
    return (server.env.get("TMPDIR", "/tmp"), *([directory] if directory else []))  # noqa: S108  (looked at)


def number_arg(server: Server, *keys: str) -> float | None:
    """Return the first of these flags that the spec sets to a number."""
    for key in keys:
        value = server.args.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None


def kv_bytes(server: Server) -> float:
    """Return the bytes of one number in the KV cache, as the spec's cache type says; 2 without one."""
    kind = str(server.args.get("kv-cache-dtype", "auto"))
    if kind.startswith(("fp8", "int8")):
        return 1.0
    return 0.5 if kind.startswith(("fp4", "nvfp4", "int4")) else 2.0


def sealed_path(server_name: str, digest: str) -> str:
    """Return where the helper keeps a secret that came encrypted with the specs, under the digest of what was encrypted."""
    return f"{STATE_DIRECTORY}/{server_name}/sealed/{digest}"


def secrets_env_path(server_name: str) -> str:
    """Return where the helper writes a server's secret environment."""
    return f"{STATE_DIRECTORY}/{server_name}/secrets.env"


def secrets_yaml_path(server_name: str) -> str:
    """Return where the helper writes a server's secret configuration."""
    return f"{STATE_DIRECTORY}/{server_name}/secrets.yaml"


def credential_path(unit: str, name: str) -> str:
    """Return where the unit's process finds the credential of this name."""
    return f"{CREDENTIALS_DIRECTORY}/{unit}/{name}"


def served_name(server: Server) -> str | None:
    """Return the model's name as clients ask for it; None where only the server knows."""
    return server.served_model_name or server.model


def is_path(model: str) -> bool:
    """Say whether a model is a place on the host and not a name at a hub."""
    return model.startswith("/")


def version_key(version: str) -> tuple[int, ...]:
    """Return a version as numbers to compare by: `0.5.10.post1` → (0, 5, 10, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:6])


# -- answers that several engines give -------------------------------------------------------------------


def completion_request(server: Server) -> HttpRequest:
    """Ask for one token, in the form that every engine here knows."""
    return post("/v1/completions", _question(server, prompt="Hello"))


def chat_request(server: Server) -> HttpRequest:
    """Ask for one token of an engine that only chats."""
    return post(
        "/v1/chat/completions", _question(server, messages=[{"role": "user", "content": "Hello"}])
    )


def _question(server: Server, **asked: object) -> dict[str, object]:
    name = served_name(server)
    model = {} if name is None else {"model": name}
    return {**model, **asked, "max_tokens": 1, "temperature": 0, "stream": False}


def post(path: str, question: Mapping[str, object]) -> HttpRequest:
    """Send JSON. A minute: the first token of a server that warms up may compile kernels."""
    body = json.dumps(question, separators=(",", ":")).encode()
    return HttpRequest("POST", path, (("Content-Type", "application/json"),), body, timeout_s=60.0)


def completion_answer(server: Server, status: int | None, body: bytes) -> Answer:
    """Judge the answer to `completion_request` (or its chat form).

    Ready needs a token, or a reason why the text ended, and no error object; a 200 alone is not enough,
    since some engines answer errors with it. A 5xx may pass while the server warms up.
    """
    if status is None:
        return NotYet("the port does not answer")
    if status in {401, 403}:
        return Wrong(f"it is up and refuses our key (HTTP {status}); see listen.api_key")
    answer = json_object(body)
    error = _error_text(answer)
    if status == 404:
        return Wrong(error or "it does not offer this model, or no completions (HTTP 404)")
    if status in {408, 425, 429} or status >= 500:
        return NotYet(error or f"HTTP {status}")
    if status != 200:
        return Wrong(error or f"HTTP {status}")
    if answer is None:
        return Wrong("HTTP 200 without a JSON object")
    if "error" in answer:
        return Wrong(error or "HTTP 200 with an error inside")
    return _model_answers(answer, served_name(server))


def _model_answers(answer: Mapping[str, object], expected: str | None) -> Answer:
    model = answer.get("model")
    if expected and isinstance(model, str) and not _same_model(model, expected):
        return Wrong(f"the model that answers is {model[:200]!r}, not {expected!r}")
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        return Wrong("HTTP 200 without a completion")
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if (isinstance(tokens, int) and tokens >= 1) or first.get("finish_reason"):
        return Ready()
    return Wrong("HTTP 200 and not one token")


def _same_model(model: str, expected: str) -> bool:
    # llama.cpp names a model by its file when no alias was given.
    return model == expected or (is_path(expected) and expected.endswith(f"/{model}"))


def _error_text(answer: Mapping[str, object] | None) -> str:
    error = (answer or {}).get("error")
    if isinstance(error, dict):
        error = error.get("message")
    text = error if isinstance(error, str) else (answer or {}).get("message")
    return f"it says: {text[:300]}" if isinstance(text, str) and text else ""


def models_request() -> HttpRequest:
    """Ask for the list of models, which every engine here keeps under one path."""
    return HttpRequest("GET", "/v1/models")


def models_answer(server: Server, status: int | None, body: bytes) -> Answer:
    """Judge the list of models: the expected one must be in it."""
    if status is None or status >= 500 or status in {408, 425, 429}:
        return NotYet("the port does not answer" if status is None else f"HTTP {status}")
    if status in {401, 403}:
        return Wrong(f"it is up and refuses our key (HTTP {status}); see listen.api_key")
    listed = (json_object(body) or {}).get("data")
    if status != 200 or not isinstance(listed, list):
        return Wrong(f"HTTP {status} without a list of models")
    names = [row.get("id") for row in listed if isinstance(row, dict)]
    expected = served_name(server)
    if expected is None or any(isinstance(n, str) and _same_model(n, expected) for n in names):
        return Ready()
    told = ", ".join(repr(str(n)[:100]) for n in names[:5]) or "none"
    return Wrong(f"the models that answer are {told}, not {expected!r}")


def models_told(server: Server, status: int | None, body: bytes) -> Told | str:
    """Read the list of models as what a server says of itself: the name it serves, perhaps its place and longest context."""
    listed = (json_object(body) or {}).get("data")
    rows = [r for r in listed if isinstance(r, dict)] if isinstance(listed, list) else []
    if status != 200 or not rows:
        return f"GET /v1/models: {_no_answer(status)}"
    name = server.served_model_name
    row = next((r for r in rows if r.get("id") == name), rows[0])
    values: dict[str, object] = {"served_model_name": row.get("id")} if "id" in row else {}
    if isinstance(row.get("root"), str):
        values["model"] = row["root"]
    if isinstance(row.get("max_model_len"), int):
        values["args.max-model-len"] = row["max_model_len"]
    return Told("GET /v1/models", values, same=_models_same)


def _models_same(path: str, asked: object, granted: object) -> bool:
    if path == "model":
        return isinstance(asked, str) and same_model(asked, granted)
    if path == "args.max-model-len":
        return asked == -1 or (isinstance(asked, str) and read_size(asked) == granted)
    return False


_SUFFIX = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def read_size(text: str) -> int | None:
    """Read a number as vLLM takes them: `32k` is 32,000 and `32K` is 32,768."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    return int(float(match[1]) * _SUFFIX.get(match[2], 1)) if match else None


def _no_answer(status: int | None) -> str:
    return "no answer" if status is None else f"HTTP {status}"


def health_answer(status: int | None, *, loading: Iterable[int] = (503,)) -> Answer:
    """Judge a plain health path. 401 and 403 are the words of a living server."""
    if status is None:
        return NotYet("the port does not answer")
    if status in {200, 401, 403}:
        return Ready()
    if status in set(loading):
        return NotYet(f"it is up and still loading (HTTP {status})")
    if status == 404:
        return Wrong(
            "it has no such health path (HTTP 404); is this the engine that the spec names?"
        )
    return NotYet(f"HTTP {status}")


def json_object(body: bytes) -> dict[str, object] | None:
    """Read a JSON object; None for anything else."""
    value = json_value(body)
    return value if isinstance(value, dict) else None


def json_value(body: bytes) -> object:
    """Read JSON of an answer; None where it is none, too long or too deep."""
    if len(body) > ANSWER_MAX_BYTES:
        return None
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value


_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+([^\s]+)(?:\s+-?\d+)?")


def metric_sum(body: bytes, names: Iterable[str]) -> int | None:
    """Add up all samples of the named gauges in Prometheus text; None when not one is there.

    Tolerant of lines that are none: only the asked-for names matter. Sums over label sets (ranks,
    engines), since each counts its own requests. A sample that is no finite count makes the sum unknown.
    """
    wanted = frozenset(names)
    total: float | None = None
    for line in body.decode(errors="replace").splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if match is None or match.group(1) not in wanted:
            continue
        try:
            value = float(match.group(2))
        except ValueError:
            return None
        if not math.isfinite(value) or value < 0:
            return None
        total = (total or 0.0) + value
    return None if total is None else math.ceil(total)


_SECRET_KEY = re.compile(
    r"api[-_]?key|token$|secret|password|credential|authorization", re.IGNORECASE
)


def redacted(value: object) -> object:
    """Return a copy of JSON without secrets: an engine's description of itself holds its keys in clear."""
    if isinstance(value, dict):
        return {
            key: "(redacted)" if _SECRET_KEY.search(str(key)) and inner else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return _without_secret_arguments(value)
    return value


_SECRET_FLAG = re.compile(
    r"--?(?:[a-z-]+[-_])?(?:api[-_]key|hf[-_]token)(=.*)?", re.IGNORECASE | re.DOTALL
)


def _without_secret_arguments(items: list[object]) -> list[object]:
    out: list[object] = []
    hiding = False  # vLLM takes several keys after one flag: hide up to the next flag.
    for item in items:
        flag = _SECRET_FLAG.fullmatch(item) if isinstance(item, str) else None
        if flag is not None and isinstance(item, str):
            out.append(f"{item.partition('=')[0]}=(redacted)" if flag.group(1) else item)
            hiding = not flag.group(1)
            continue
        hiding = hiding and not (isinstance(item, str) and item.startswith("--"))
        out.append("(redacted)" if hiding else redacted(item))
    return out


def without_secrets(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a stranger's argv fit to be shown: the values of key flags are taken out."""
    return tuple(str(item) for item in _without_secret_arguments(list(argv)))


__all__ = [
    "Answer",
    "Engine",
    "Finding",
    "HttpRequest",
    "Launch",
    "NotYet",
    "Ready",
    "ReadyRequests",
    "Wrong",
    "chat_request",
    "completion_answer",
    "completion_request",
    "credential_path",
    "environment",
    "health_answer",
    "host_credentials",
    "is_path",
    "json_object",
    "json_value",
    "metric_sum",
    "models_answer",
    "models_request",
    "post",
    "read_environment",
    "redacted",
    "sealed_path",
    "secret_environment",
    "secret_path",
    "secrets_env_path",
    "secrets_yaml_path",
    "served_name",
    "version_key",
    "without_secrets",
]

"""llama.cpp, in its two forms: the program `llama-server`, and `python -m llama_cpp.server`.

`runtime.binary` starts the first, `runtime.python` the second. They share a model format and little else:
flags are `--ctx-size` there and `--n_ctx` here, a switch is bare there and takes `true` here, `/health` is
there and not here. Neither has a catalogue of flags (llama-server has a build number for a version, and its
flags come and go with it), so flags are checked on the host alone, by asking the installed program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict

from reconciler.core.demands import Demands
from reconciler.engines import container
from reconciler.engines.base import (
    Answer,
    Finding,
    HttpRequest,
    Launch,
    ReadyRequests,
    completion_answer,
    completion_request,
    credential_path,
    environment,
    health_answer,
    is_path,
    json_value,
    metric_sum,
    models_answer,
    models_request,
    models_told,
    places_of,
    read_environment,
    secret_environment,
    secret_path,
    wanted_models,
)
from reconciler.engines.catalogue import compact_json, scalar
from reconciler.engines.llamacpp_speculative import (
    ALIASES,
    module_warnings,
    of_module,
    of_program,
    program_warnings,
)
from reconciler.engines.told import Told

if TYPE_CHECKING:
    from reconciler.core.spec import Server

name: Final = "llamacpp"
ready_path: Final = "/health"
drains_on_term: Final = (
    False  # llama-server ends its slots at once; the Python form waits for them.
)
stop_extra_s: Final = 30.0  # Its GPU teardown is the slow part (llama-swap#38, #927).

MODULE: Final = "llama_cpp.server"
IN_IMAGE: Final = "/app/llama-server"
"""Where the project's own images keep the program."""

SHORT: Final = {
    "m": "model",
    "a": "alias",
    "hf": "hf-repo",
    "c": "ctx-size",
    "np": "parallel",
    "ngl": "n-gpu-layers",
    "sm": "split-mode",
    "ts": "tensor-split",
    "mg": "main-gpu",
    "dev": "device",
    "t": "threads",
    "tb": "threads-batch",
    "b": "batch-size",
    "ub": "ubatch-size",
    "fa": "flash-attn",
    "ctk": "cache-type-k",
    "ctv": "cache-type-v",
    "cb": "cont-batching",
    "to": "timeout",
    "lm": "load-mode",
    "cmoe": "cpu-moe",
    "ncmoe": "n-cpu-moe",
    "ctxcp": "ctx-checkpoints",
    "n": "predict",
}
"""Short options of llama-server and their long names."""

LONG: Final = {
    "gpu-layers": "n-gpu-layers",
    "embeddings": "embedding",
    "reranking": "rerank",
    "n-predict": "predict",
}
"""Other long names of llama-server's options, and the one that is written here."""

_OWNED: Final = {
    "model": "model",
    "hf-repo": "model",
    "hf_model_repo_id": "model",
    "alias": "served_model_name",
    "model_alias": "served_model_name",
    "host": "listen.address",
    "port": "listen.port",
    "api-key": "listen.api_key",
    "api_key": "listen.api_key",
    "api-key-file": "listen.api_key",
    "draft_model": "speculative",
    "draft_model_num_pred_tokens": "speculative",
}
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SPLIT: Final = "llama.cpp splits by `args.split-mode` and `args.tensor-split`, over all `gpus`"


class Options(BaseModel):
    """llama.cpp has no fields of its own."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)


def problems(server: Server) -> list[Finding]:
    """Refuse what llama.cpp cannot do, or would do otherwise than written."""
    found = container.problems(server)
    runtime = server.runtime
    if not (runtime.python or runtime.binary or runtime.container):
        found.append(
            ("runtime", "needs `binary` (llama-server), `python` (llama_cpp.server) or an image")
        )
    if server.model is None:
        found.append(("model", "is missing"))
    elif _is_python(server) and not is_path(server.model):
        found.append(("model", "must be the path of a GGUF file on the host for llama_cpp.server"))
    if server.model_revision is not None:
        found.append(("model_revision", "cannot be pinned with llama.cpp: name a file in `model`"))
    found += [
        (f"{field}_size", f"has no meaning here: {_SPLIT}")
        for field in ("tp", "pp", "dp", "ep")
        if getattr(server, f"{field}_size") != 1
    ]
    for key in sorted(server.args):
        wrong = _wrong_key(server, key)
        if wrong is not None:
            found.append((f"args.{key}", wrong))
    found += [
        (f"env.{key}", _hidden(key))
        for key in sorted(server.env)
        if not _is_python(server) and key.startswith(_SPECULATIVE_ENV)
    ]
    if server.speculative is not None:
        found += _placed(
            of_module(server.speculative, server.args)
            if _is_python(server)
            else of_program(server.speculative)
        )
    return found


_SPECULATIVE_ENV: Final = ("LLAMA_ARG_SPEC_", "LLAMA_ARG_DRAFT_")


def _hidden(key: str) -> str:
    if key.startswith("LLAMA_ARG_SPEC_SYNTH"):
        return "fakes the acceptance of speculative decoding (common/arg.cpp)"
    return "is decided by `speculative`"


def _placed(complaints: Iterable[tuple[str, str]]) -> list[Finding]:
    return [(f"speculative.{key}" if key else "speculative", text) for key, text in complaints]


def _wrong_key(server: Server, key: str) -> str | None:
    if _is_python(server):
        owner = _OWNED.get(key.replace("-", "_")) or _OWNED.get(key)
        if owner is None and key.replace("-", "_") != key and key.replace("-", "_") in server.args:
            return f"is given twice: `{key.replace('-', '_')}` is the same flag"
        return None if owner is None else f"is decided by `{owner}`"
    if "_" in key:
        return f"is written with dashes: `{key.replace('_', '-')}`"
    if key in SHORT:
        return f"is a short form; write `{SHORT[key]}`"
    if key in LONG:
        twice = LONG[key] in server.args
        return f"is given twice: `{LONG[key]}` is the same flag" if twice else f"is written `{LONG[key]}`"  # fmt: skip
    if key.removeprefix("no-") != key and key.removeprefix("no-") in server.args:
        return f"contradicts `{key.removeprefix('no-')}`"
    if key.startswith(("spec-", "no-spec-")) or key in ALIASES:
        return "is decided by `speculative`"
    return f"is decided by `{_OWNED[key]}`" if key in _OWNED else None


def warnings(server: Server) -> list[Finding]:
    """Say that flags can only be checked on the host, and what llama-cpp-python's streams do not tell."""
    found: list[Finding] = []
    if server.speculative is not None:
        told = module_warnings if _is_python(server) else program_warnings
        found += _placed(told(server.speculative))
    if server.args or server.speculative is not None:
        found.append(
            (
                "args",
                "llama.cpp has no catalogue of flags: they are checked on the host, before anything stops",
            )
        )
    if server.gate is not None and _is_python(server):
        # Seen with 0.3.36, and in the recorded streams of older ones.
        speeds = [
            limit.key
            for run in server.gate.runs
            for limit in run.limits
            if limit.result.endswith("_tps")
        ]
        if speeds or server.gate.baseline is not None:
            what = ", ".join(dict.fromkeys(speeds)) or "a comparison of speeds"
            sentence = (
                f"llama-cpp-python's server tells no token counts in its streams, so {what} stays inconclusive; "
                "limit times (max_ttft_p50, max_e2e_p50), or serve with llama-server (`runtime.binary`)"
            )
            found.append(("gate", sentence))
    return found


# -- starting ------------------------------------------------------------------------------------------


def render(server: Server, gpu_uuids: Sequence[str]) -> Launch:
    """Return how llama.cpp is started, in the form that `runtime` asks for."""
    inside = _python_launch(server) if _is_python(server) else _binary_launch(server)
    launch = Launch(
        argv=inside.argv,
        environment=environment(server, gpu_uuids),
        secret_env=inside.secret_env,
        credentials=inside.credentials,
        flags_to_check=tuple(
            word.partition("=")[0] for word in inside.argv if word.startswith("--")
        ),
        check_argv=inside.check_argv,
        paths=inside.paths,
        demands=_demands(server),
    )
    return container.contained(server, launch, gpu_uuids)


def _demands(server: Server) -> Demands:
    python = server.runtime.python
    draft = None if _is_python(server) else (server.speculative or {}).get("draft_model")
    # A name at the hub is fetched by llama-server itself into a cache of its own form: that is not looked at here.
    models = tuple(m for m in wanted_models(server, draft) if m.is_path)
    layers = server.args.get("n-gpu-layers", server.args.get("n_gpu_layers"))
    return Demands(
        engine=name,
        version=server.engine.version,
        python=python,
        binary=None if python else server.runtime.binary,
        distributions=("llama_cpp_python",),
        models=models,
        places=places_of(server),
        reshaped=layers is not None,  # Only some layers are on the cards.
    )


def _python_launch(server: Server) -> Launch:
    base = (str(server.runtime.python), "-m", MODULE)
    argv = [*base, "--model", str(server.model), "--host", server.listen.address]
    argv += ["--port", str(server.listen.port)]
    if server.served_model_name is not None:
        argv += ["--model_alias", server.served_model_name]
    for key, value in sorted((server.speculative or {}).items()):
        argv += _python_words(key, value)
    for key, value in sorted(server.args.items()):
        argv += _python_words(key, value)
    secret = server.listen.api_key
    return Launch(
        argv=tuple(argv),
        environment={},
        secret_env=secret_environment(server)
        | ({} if secret is None else {"API_KEY": secret_path(server.name, secret)}),
        check_argv=base,
        paths=(base[0], str(server.model)),
    )


def _python_words(key: str, value: object) -> tuple[str, ...]:
    # Its parser is made from a settings model: underscores, and a switch takes true or false.
    flag = f"--{key.replace('-', '_')}"
    if isinstance(value, bool):
        return (flag, "true" if value else "false")
    if isinstance(value, Mapping):
        return (flag, compact_json(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (flag, *(scalar(item) for item in value))
    text = scalar(value)
    glued = text.startswith("-") and not _NUMBER.fullmatch(text)  # argparse would see a flag.
    return (f"{flag}={text}",) if glued else (flag, text)


def _binary_launch(server: Server) -> Launch:
    program = server.runtime.binary or IN_IMAGE
    model = str(server.model)
    argv = [program, "--model" if is_path(model) else "--hf-repo", model]
    argv += ["--host", server.listen.address, "--port", str(server.listen.port)]
    if server.served_model_name is not None:
        argv += ["--alias", server.served_model_name]
    credentials = {}
    if server.listen.api_key is not None:
        # The file may be closed to the engine's user: systemd reads it and hands it on.
        credentials["api-key"] = secret_path(server.name, server.listen.api_key)
        argv += ["--api-key-file", credential_path(server.unit, "api-key")]
    for key, value in sorted((server.speculative or {}).items()):
        argv += _binary_words(f"spec-{key.replace('_', '-')}", value)
    for key, value in sorted(server.args.items()):
        argv += _binary_words(key, value)
    draft = (server.speculative or {}).get("draft_model")
    places = [program, model, *([draft] if isinstance(draft, str) else [])]
    return Launch(
        argv=tuple(argv),
        environment={},
        secret_env=secret_environment(server),
        credentials=credentials,
        check_argv=(program,),
        paths=tuple(place for place in places if is_path(place)),
    )


def _binary_words(key: str, value: object) -> tuple[str, ...]:
    flag = f"--{key}"
    if isinstance(value, bool):
        return (flag,) if value else (f"--no-{key}",)
    if isinstance(value, Mapping):
        return (flag, compact_json(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(word for item in value for word in (flag, scalar(item)))
    return (flag, scalar(value))  # llama-server takes the next word whatever it begins with.


# -- reading back ----------------------------------------------------------------------------------------

_FIELDS: Final = {
    "model": "model",
    "hf-repo": "model",
    "alias": "served_model_name",
    "model-alias": "served_model_name",
}


def recognises(argv: Sequence[str]) -> bool:
    """Know the program by its name, the Python form by its module."""
    words = list(argv)[:6]
    return MODULE in words or (bool(words) and words[0].rpartition("/")[2] == "llama-server")


def read_argv(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    version: str | None = None,  # noqa: ARG001  (the family's signature)
) -> dict[str, object]:
    """Read a command line of either form; names come with dashes, numbers as numbers."""
    inside, runtime = container.unwrapped(argv)
    python = MODULE in inside[:4]
    found: dict[str, object] = {"engine": {"name": name}}
    if runtime:
        found["runtime"] = runtime
    elif inside:
        found["runtime"] = {"python" if python else "binary": inside[0]}
    listen: dict[str, object] = {}
    speculative: dict[str, object] = {}
    args: dict[str, object] = {}
    for key, value in _flags(inside[3:] if python else inside[1:], python=python):
        if key in _FIELDS:
            found[_FIELDS[key]] = str(value)
        elif key in {"host", "port"}:
            listen["address" if key == "host" else "port"] = value
        elif key in {"api-key", "api-key-file"}:
            listen["api_key"] = True
        elif python and key in {"draft-model", "draft-model-num-pred-tokens"}:
            speculative[key.replace("-", "_")] = value
        elif not python and key.startswith("spec-"):
            speculative[key.removeprefix("spec-").replace("-", "_")] = value
        elif key in args:
            earlier = args[key]
            args[key] = [*earlier, value] if isinstance(earlier, list) else [earlier, value]
        else:
            args[key] = value
    found |= {"listen": listen} if listen else {}
    found |= {"speculative": speculative} if speculative else {}
    return {**found, "args": args, **read_environment(environment)}


def _flags(tokens: Sequence[str], *, python: bool) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not token.startswith("-"):
            continue
        given = []
        while at < len(tokens) and (
            not tokens[at].startswith("-") or _NUMBER.fullmatch(tokens[at])
        ):
            given.append(tokens[at])
            at += 1
        plain = token.lstrip("-")
        if python:
            plain, _, glued = plain.partition("=")
            given = [*([glued] if glued else []), *given]
        key = plain.replace("_", "-")
        key = key if token.startswith("--") else SHORT.get(key, key)
        if not python:
            key = ALIASES.get(LONG.get(key, key), LONG.get(key, key))
        found.append(_valued_flag(key, given))
    return found


def _valued_flag(key: str, given: Sequence[str]) -> tuple[str, object]:
    if not given:
        return (key.removeprefix("no-"), False) if key.startswith("no-") else (key, True)
    values = [_typed(text) for text in given]
    return key, values[0] if len(values) == 1 else values


def _typed(text: str) -> object:
    if text in {"true", "false"}:
        return text == "true"
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


# -- over HTTP -------------------------------------------------------------------------------------------


def ready_requests(server: Server) -> ReadyRequests:
    """Ask for health (the Python form has only its list of models, which waits for the load), then a token."""
    path = "/v1/models" if _is_python(server) else ready_path
    return ReadyRequests(HttpRequest("GET", path), completion_request(server), models_request())


def alive(server: Server, status: int | None, body: bytes) -> Answer:  # noqa: ARG001  (the family's signature)
    """Read the answer: 503 is llama-server while it loads the model."""
    return health_answer(status)


def generation_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read the completion's answer."""
    return completion_answer(server, status, body)


def identity_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read the list of models, which llama-server gives out while it still loads."""
    return models_answer(server, status, body)


def about_requests(server: Server) -> tuple[HttpRequest, ...]:
    """Ask for the models; llama-server also for its properties."""
    if _is_python(server):
        return (models_request(),)
    return (models_request(), HttpRequest("GET", "/props"))


def about(server: Server, answers: Sequence[tuple[int | None, bytes]]) -> tuple[Told, ...] | str:
    """Read the models' names, and llama-server's file, slots and context."""
    listed = models_told(server, *answers[0])
    if isinstance(listed, str) or _is_python(server):
        return listed if isinstance(listed, str) else (listed,)
    status, body = answers[1]
    props = json_value(body)
    if status != 200 or not isinstance(props, dict):
        return (listed,)
    values: dict[str, object] = {}
    if isinstance(props.get("model_path"), str) and is_path(str(server.model)):
        values["model"] = props["model_path"]
    slots = props.get("total_slots")
    if isinstance(slots, int):
        values["args.parallel"] = slots
    settings = props.get("default_generation_settings")
    context = settings.get("n_ctx") if isinstance(settings, dict) else None
    if isinstance(context, int):
        values["args.ctx-size"] = context

    def same(path: str, asked: object, granted: object) -> bool:
        """The context is told of one slot, rounded up to 256; 0 takes the model's own; slots below 1 are chosen."""
        if not isinstance(asked, int) or not isinstance(granted, int):
            return False
        if path == "args.parallel":
            return asked < 1
        if path != "args.ctx-size":
            return False
        whole = granted * slots if isinstance(slots, int) else granted
        return asked == 0 or any(
            0 <= have - asked < 256 * max(slots or 1, 1) for have in (granted, whole)
        )

    return (listed, Told("GET /props", values, same=same))


variables: Final = ("LLAMA_ARG_", "GGML_", "LLAMA_SET_ROWS", "LLAMA_SPEC_")
_SAID: Final = re.compile(r"llama_context: (n_ctx|n_batch|n_ubatch)\s*= (\d+)")


def startup_words(server: Server) -> tuple[str, ...]:
    """Look for the sizes that llama_cpp.server prints when it makes its context; it tells none over HTTP."""
    wanted = ("n_ctx", "n_batch", "n_ubatch")
    asked = [key for key in wanted if _python_value(server, key) is not None]
    return tuple(f"llama_context: {key} " for key in asked) if _is_python(server) else ()


def startup_told(server: Server, lines: Sequence[str]) -> tuple[Told, ...]:
    """Read those sizes."""
    values: dict[str, object] = {}
    for line in lines:
        found = _SAID.search(line)
        if found is not None:
            spelled = found[1] if found[1] in server.args else found[1].replace("_", "-")
            values.setdefault(f"args.{spelled}", int(found[2]))

    def same(_path: str, asked: object, granted: object) -> bool:
        """A context of 0 is the model's own; others are rounded up to 256."""
        whole = isinstance(asked, int) and isinstance(granted, int)
        return whole and (asked == 0 or 0 <= granted - asked < 256)  # type: ignore[operator]

    return (Told("its start-up lines", values, same=same),) if values else ()


def _python_value(server: Server, key: str) -> object:
    return server.args.get(key, server.args.get(key.replace("_", "-")))


def in_flight_request(server: Server) -> HttpRequest | None:
    """Ask llama-server's metrics, or else its slots; the Python form cannot be asked."""
    if _is_python(server):
        return None
    if server.args.get("metrics") is True:
        return HttpRequest("GET", "/metrics")
    if server.args.get("slots") is False or server.args.get("no-slots") is True:
        return None
    return HttpRequest("GET", "/slots")


def in_flight(status: int | None, body: bytes) -> int | None:
    """Count busy slots, or read the gauges.

    Slots do not show the queue, but a request waits only while every slot is busy: none busy is none
    waiting, so zero is exact.
    """
    if status != 200:
        return None
    value = json_value(body)
    if isinstance(value, list):
        busy = [slot.get("is_processing") for slot in value if isinstance(slot, dict)]
        known = len(busy) == len(value) and all(isinstance(flag, bool) for flag in busy)
        return sum(bool(flag) for flag in busy) if known and busy else None
    return metric_sum(body, ("llamacpp:requests_processing", "llamacpp:requests_deferred"))


def _is_python(server: Server) -> bool:
    return server.runtime.python is not None

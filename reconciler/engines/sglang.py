"""SGLang, started as `python -m sglang.launch_server --model-path …` in every version.

The module form and not `sglang serve`: 0.4.10 has no other; 0.5.6 and 0.5.10 have traps in `serve` (it looks
for the literal `--model-path` before the configuration file is read); 0.5.23 prints that `serve` is preferred
and keeps the module form with the same flags. So one form fits all, it runs in exactly the interpreter that
the spec names, and its help lists the flags.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict

from reconciler.core.demands import Demands
from reconciler.engines import container, sglang_speculative
from reconciler.engines.base import (
    Answer,
    Finding,
    HttpRequest,
    Launch,
    ReadyRequests,
    cache_variables,
    completion_answer,
    completion_request,
    credential_path,
    environment,
    health_answer,
    is_path,
    json_value,
    kv_bytes,
    metric_sum,
    models_answer,
    models_request,
    number_arg,
    places_of,
    read_environment,
    secret_environment,
    secret_path,
    secrets_yaml_path,
    version_key,
    wanted_models,
)
from reconciler.engines.catalogue import (
    Catalogue,
    Checked,
    catalogue,
    check_args,
    read_words,
    words,
)
from reconciler.engines.sglang_speculative import FAKES, PREFIX, case_of, derived, flag_of
from reconciler.engines.told import Told, flattened, same_model

if TYPE_CHECKING:
    from reconciler.core.spec import Server

name: Final = "sglang"
ready_path: Final = "/health_generate"
drains_on_term: Final = True  # Without any limit: the stop timeout is ours to set.
stop_extra_s: Final = 90.0  # 0.5.23: a look every 5 s, 15 s for its schedulers, 60 s to reap them.

MODULE: Final = "sglang.launch_server"
SECRETS: Final = "secrets.yaml"

_SIZES: Final = {
    "--tp-size": "tp_size",
    "--pp-size": "pp_size",
    "--dp-size": "dp_size",
    "--ep-size": "ep_size",
}
_FIELDS: Final = {
    "--model-path": "model",
    "--revision": "model_revision",
    "--served-model-name": "served_model_name",
    **_SIZES,
}
_MORE_NODES: Final = "nothing yet: one server on several hosts is not supported"
OWNED: Final = {
    **{flag: f"`{field}`" for flag, field in _FIELDS.items()},
    "--host": "`listen.address`",
    "--port": "`listen.port`",
    "--api-key": "`listen.api_key`",
    "--config": "this tool: write the flags under `args`, so that the plan shows them",
    "--base-gpu-id": "`gpus`",
    "--gpu-id-step": "`gpus`",
    "--nnodes": _MORE_NODES,
    "--node-rank": _MORE_NODES,
    "--dist-init-addr": _MORE_NODES,
}


class Options(BaseModel):
    """SGLang has no fields of its own beside `name` and `version`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)


def problems(server: Server) -> list[Finding]:
    """Say what SGLang would refuse, or run otherwise than written."""
    book = _book(server)
    checked = _checked(server, book)
    args = _spelled(checked)
    found = [*container.problems(server), *_fields(server, book), *checked.problems]
    found += [
        (f"env.{key}", "fakes the acceptance of speculative decoding")
        for key in sorted(server.env)
        if FAKES.fullmatch(key)
    ]
    found += _parallel(server, args)
    if server.speculative is not None:
        found += sglang_speculative.problems(case_of(server, book, args), book)
    return found


def _fields(server: Server, book: Catalogue) -> list[Finding]:
    found: list[Finding] = []
    if not (server.runtime.python or server.runtime.binary or server.runtime.container):
        found.append(("runtime", "needs `python`, the interpreter that has SGLang, or an image"))
    if server.runtime.binary is not None:
        found.append(
            ("runtime.binary", "SGLang is started by its interpreter: write `runtime.python`")
        )
    if server.model is None:
        found.append(("model", "is missing"))
    if ":" in (server.served_model_name or ""):
        found.append(("served_model_name", "must hold no `:` (server_args.py)"))
    if server.listen.api_key is not None and "--config" not in book:
        why = "it reads its key from the command line alone, which everyone on the host can see"
        found.append(
            (
                "listen.api_key",
                f"cannot be kept secret with SGLang {book.version}: {why}; use 0.5.6 or newer",
            )
        )
    found += [
        (field, f"SGLang {book.version} has no {flag}")
        for flag, field in _SIZES.items()
        if getattr(server, field) != 1 and flag not in book
    ]
    chunk, page = server.args.get("chunked-prefill-size"), server.args.get("page-size")
    if isinstance(chunk, int) and isinstance(page, int) and chunk > 0 and page > 0 and chunk % page:
        found.append(
            (
                "args.chunked-prefill-size",
                f"must be a multiple of page-size, {page} (server_args.py)",
            )
        )
    return found


def _spelled(checked: Checked) -> dict[str, object]:
    """Return the accepted `args` under every spelling of their flags, so that no alias evades a rule."""
    return {
        spelling[2:]: value
        for flag, value in checked.values
        for spelling in (flag.flag, *flag.aliases)
    }


def _parallel(server: Server, args: Mapping[str, object]) -> list[Finding]:
    tp, found = server.tp_size, list[Finding]()
    sizes = {key: args.get(key, 1) for key in ("attn-dp-size", "attn-cp-size", "moe-dp-size")}
    for key, size in sizes.items():
        if isinstance(size, int) and size > 0 and tp % size:
            found.append((f"args.{key}", f"must divide tp_size, {tp}"))
    moe = sizes["moe-dp-size"]
    if server.ep_size * (moe if isinstance(moe, int) else 1) > tp:
        found.append(("ep_size", f"ep_size × moe-dp-size must not exceed tp_size, {tp}"))
    attention = args.get("enable-dp-attention") is True
    if attention and tp % server.dp_size:
        found.append(("dp_size", f"must divide tp_size, {tp}, with DP attention"))
    needed = tp * server.pp_size * (1 if attention else server.dp_size)
    if server.dp_size > 1 and len(server.gpus) < needed:
        found.append(
            (
                "gpus",
                f"tp_size × pp_size × dp_size needs {needed} GPUs; {len(server.gpus)} are listed",
            )
        )
    return found


def warnings(server: Server) -> list[Finding]:
    """Say what is accepted and worth a look."""
    book = _book(server)
    checked = _checked(server, book)
    found = [*checked.warnings]
    if book.note is not None:
        found.insert(0, ("engine.version", book.note))
    if server.model is not None and not is_path(server.model) and server.model_revision is None:
        found.append(
            ("model_revision", "is not pinned: the model of the day is taken, and a model is code")
        )
    found += _switched(server)
    if server.speculative is not None:
        found += sglang_speculative.warnings(case_of(server, book, _spelled(checked)))
    return found


def _switched(server: Server) -> list[Finding]:
    """Say what of the environment changes how it drains and how it calls itself healthy."""
    found: list[Finding] = []
    if server.env.get("SGL_FORCE_SHUTDOWN", "").lower() in {"1", "true"}:
        told = "cuts the requests in flight at a stop, where it would wait for them (tokenizer_manager.py)"
        found.append(("env.SGL_FORCE_SHUTDOWN", told))
    health = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
    if server.env.get(health, "1").lower() in {"0", "false"}:
        told = "lets /health say 200 without a token: who asks that alone is told too early (http_server.py)"
        found.append((f"env.{health}", told))
    return found


# -- starting ------------------------------------------------------------------------------------------


def render(server: Server, gpu_uuids: Sequence[str]) -> Launch:
    """Return the command, by full names and in one order; the key goes by a file."""
    book = _book(server)
    base = (server.runtime.python or "python3", "-m", MODULE)
    argv = [*base, "--model-path", str(server.model)]
    for flag, field in _FIELDS.items():
        value = getattr(server, field)
        if field != "model" and value is not None and (flag not in _SIZES or value != 1):
            argv += [flag, str(value)]
    argv += ["--host", server.listen.address, "--port", str(server.listen.port)]
    for key, value in sorted(derived(server.speculative or {}).items()):
        argv += words(book.spellings[flag_of(key)][0], value)
    for known, value in _checked(server, book).values:
        argv += words(known, value)
    secret, credentials = server.listen.api_key, {}
    if secret is not None:
        argv += ["--config", credential_path(server.unit, SECRETS)]
        credentials[SECRETS] = secrets_yaml_path(server.name)
    draft = (server.speculative or {}).get("draft_model_path")
    places = [base[0], str(server.model), *([draft] if isinstance(draft, str) else [])]
    launch = Launch(
        argv=tuple(argv),
        environment=environment(server, gpu_uuids),
        secret_env=secret_environment(server),
        secret_config=None if secret is None else {"api-key": secret_path(server.name, secret)},
        credentials=credentials,
        flags_to_check=tuple(word.partition("=")[0] for word in argv if word.startswith("--")),
        check_argv=base,
        paths=tuple(place for place in places if is_path(place)),
        demands=_demands(server),
    )
    return container.contained(server, launch, gpu_uuids)


MEMORY_SHARE: Final = 0.9
"""Of a card, weights and KV cache together, where the spec sets no mem-fraction-static: it is worked out from the cards then."""


def _demands(server: Server) -> Demands:
    args = server.args
    context = number_arg(server, "context-length")
    return Demands(
        engine=name,
        version=server.engine.version,
        python=server.runtime.python,
        distributions=("sglang",),
        kernels=True,
        models=wanted_models(
            server,
            (server.speculative or {}).get("draft_model_path"),
            (server.speculative or {}).get("draft_model_revision"),
            weights=args.get("load-format") != "dummy",
        ),
        cache=cache_variables(server),
        places=places_of(server),
        tp=server.tp_size,
        pp=server.pp_size,
        splits_heads=not args.get("enable-dp-attention"),
        context=None if context is None else int(context),
        kv_bytes=kv_bytes(server),
        memory_fraction=number_arg(server, "mem-fraction-static") or MEMORY_SHARE,
        reshaped=bool({"quantization", "torchao-config", "cpu-offload-gb", "dtype"} & set(args)),
    )


def recognises(argv: Sequence[str]) -> bool:
    """Know the module by its name, and the `sglang` command."""
    return MODULE in argv[:6] or any(
        word.rpartition("/")[2] == "sglang" and list(argv)[at + 1 : at + 2] == ["serve"]
        for at, word in enumerate(list(argv)[:3])
    )


def read_argv(
    argv: Sequence[str], environment: Mapping[str, str], *, version: str | None = None
) -> dict[str, object]:
    """Read a command line of `sglang.launch_server` or `sglang serve` back into the words of a spec."""
    inside, runtime = container.unwrapped(argv)
    book = catalogue(name, version)
    read, fields = read_words(book, _arguments(inside)), book.canonical(_FIELDS)
    found: dict[str, object] = {"engine": {"name": name}}
    if runtime:
        found["runtime"] = runtime
    elif inside and MODULE in inside:
        found["runtime"] = {"python": inside[0]}
    listen: dict[str, object] = {}
    speculative: dict[str, object] = {}
    args: dict[str, object] = {}
    for flag, value in read.values.items():
        if flag in fields:
            found[fields[flag]] = value
        elif flag in {"--host", "--port"}:
            listen["address" if flag == "--host" else "port"] = value
        elif flag == "--api-key" or (flag == "--config" and str(value).endswith(f"/{SECRETS}")):
            listen["api_key"] = True
        elif flag.startswith(PREFIX):
            speculative[flag.removeprefix(PREFIX).replace("-", "_")] = value
        elif flag == "--admin-api-key":
            continue  # A secret, and no field of a spec.
        else:
            args[flag[2:]] = value
    args |= {flag.lstrip("-"): value for flag, value in read.unknown.items()}
    if read.positional and "model" not in found:
        found["model"] = read.positional[0]
    found |= {"listen": listen} if listen else {}
    found |= {"speculative": speculative} if speculative else {}
    return {**found, "args": args, **read_environment(environment)}


def _arguments(argv: Sequence[str]) -> Sequence[str]:
    for at, word in enumerate(argv[:6]):
        if word == MODULE or (word == "serve" and at > 0):
            return argv[at + 1 :]
    return argv[1:]


# -- over HTTP -------------------------------------------------------------------------------------------


HEALTH_WAIT_S: Final = 20.0
"""How long its health path waits for its own token, where SGLANG_HEALTH_CHECK_TIMEOUT does not say."""


def ready_requests(server: Server) -> ReadyRequests:
    """Ask a health path that generates a token itself (in 0.4 `/health` does not), then for one of our own.

    `/v1/models` is a fixed list that answers while the server still warms up: it tells who answers, and
    nothing about being ready.
    """
    old = server.engine.version is not None and version_key(server.engine.version) < (0, 5, 6)
    wait = server.env.get("SGLANG_HEALTH_CHECK_TIMEOUT", "")
    own = float(wait) if wait.isdigit() else HEALTH_WAIT_S
    alive = HttpRequest("GET", ready_path if old else "/health", timeout_s=own + 5.0)
    return ReadyRequests(alive, completion_request(server), models_request())


def alive(server: Server, status: int | None, body: bytes) -> Answer:  # noqa: ARG001  (the family's signature)
    """Read the answer. No answer is normal for minutes: the port is bound after the weights are loaded."""
    return health_answer(status)


def generation_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read the completion's answer."""
    return completion_answer(server, status, body)


def identity_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read the list of models."""
    return models_answer(server, status, body)


def about_requests(server: Server) -> tuple[HttpRequest, ...]:
    """Ask for its description of itself; where the version is old or not known, by the old name too."""
    new, old = HttpRequest("GET", "/server_info"), HttpRequest("GET", "/get_server_info")
    version = version_key(server.engine.version) if server.engine.version else ()
    return (new,) if version >= (0, 5, 10) else (new, old)


def about(server: Server, answers: Sequence[tuple[int | None, bytes]]) -> tuple[Told, ...] | str:
    """Read all its arguments after it resolved them, and the command that it was started with where it says so."""
    at = next((i for i, (status, _) in enumerate(answers) if status == 200), 0)
    status, body = answers[at]
    path = about_requests(server)[at].path
    info = json_value(body)
    if status != 200 or not isinstance(info, dict):
        return f"GET {path}: {'no answer' if status is None else f'HTTP {status}'}"
    book = _book(server)
    values: dict[str, object] = {}
    for flag, field in (*_FIELDS.items(), ("--port", "listen.port")):
        key = flag[2:].replace("-", "_")
        if key in info:
            values[field] = info[key]
    values |= {
        f"speculative.{key.removeprefix('speculative_')}": value
        for key, value in info.items()
        if key.startswith("speculative_")
    }
    for key in server.args:
        known = book.spellings.get(f"--{key}")
        spellings = (known[0].flag, *known[0].aliases) if known is not None else (f"--{key}",)
        names = [s.lstrip("-").replace("-", "_") for s in (f"--{key}", *spellings)]
        found = next((name for name in names if name in info), None)
        if found is not None:
            values[f"args.{key}"] = info[found]
    command = info.get("launch_command")
    words_of = shlex.split(command) if isinstance(command, str) else command
    asked: dict[str, object] = {}
    if isinstance(words_of, list) and all(isinstance(w, str) for w in words_of):
        asked = flattened(read_argv(words_of, {}, version=server.engine.version))
    same = functools.partial(_reads_back, server, info)
    return (Told(f"GET {path}", values, asked, same),)


_EAGLES: Final = frozenset({"EAGLE", "NEXTN", "FROZEN_KV_MTP"})
_CHOSEN: Final = frozenset({"NGRAM", "DFLASH", "DSPARK", "UNO"})
"""Algorithms that set steps, topk and draft tokens by themselves (engines' rules; the linter says so beforehand)."""


def _reads_back(
    server: Server, info: Mapping[str, object], path: str, asked: object, granted: object
) -> bool:
    """Say whether the engine writes what was asked in this other form, by a rule of its own."""
    speculative = server.speculative or {}
    algorithm = str(speculative.get("algorithm", "")).upper()
    if path == "model":
        return isinstance(asked, str) and same_model(asked, granted)
    if path == "speculative.algorithm":
        pair = {str(asked).upper(), str(granted).upper()}
        return len(pair) == 1 or pair <= _EAGLES
    if path == "speculative.num_draft_tokens" and speculative.get("eagle_topk") == 1:
        steps = info.get("speculative_num_steps")
        return isinstance(steps, int) and granted == steps + 1
    if path.startswith("speculative."):
        return algorithm in _CHOSEN and isinstance(asked, int)
    if path == "args.disable-cuda-graph":
        return info.get("cuda_graph_backend_decode") == "disabled"
    if path == "args.enable-dp-attention":
        return info.get("attn_dp_size") == server.dp_size
    if path == "args.chunked-prefill-size" and isinstance(asked, int) and isinstance(granted, int):
        # Shared among the ranks of DP attention; and -1 is none.
        return granted * server.dp_size == asked or (asked < 0 and granted < 0)
    if path == "args.mem-fraction-static":  # Made smaller for models that see.
        return _is_share_of(granted, asked)
    return path in _REWRITTEN or path.startswith("args.cuda-graph")


def _is_share_of(granted: object, asked: object) -> bool:
    return (
        isinstance(granted, int | float)
        and isinstance(asked, int | float)
        and 0.8 * asked <= granted <= asked
    )


_REWRITTEN: Final = frozenset({"args.schedule-conservativeness", "args.random-seed"})
"""Scaled by the engine for DP attention; a seed that each rank has of its own."""


variables: Final[tuple[str, ...]] = ("SGLANG_", "SGL_", "SIMULATE_ACC_")


def startup_words(server: Server) -> tuple[str, ...]:  # noqa: ARG001  (the family's signature)
    """Look for none: it says everything over HTTP."""
    return ()


def startup_told(server: Server, lines: Sequence[str]) -> tuple[Told, ...]:  # noqa: ARG001  (the family's signature)
    """Read none."""
    return ()


def in_flight_request(server: Server) -> HttpRequest | None:
    """Ask the scheduler for its load where the version can; its gauges (which lag) where they are on."""
    version = version_key(server.engine.version) if server.engine.version else None
    if version is not None and version >= (0, 5, 10):
        return HttpRequest("GET", "/v1/loads")
    if server.args.get("enable-metrics") is True:
        return HttpRequest("GET", "/metrics")
    if version is not None and version >= (0, 5, 6):
        return HttpRequest("GET", "/get_load")
    # 0.4.10's load is counted in tokens and remembered from earlier: no answer to this question.
    return None if version is not None else HttpRequest("GET", "/v1/loads")


_GAUGES: Final = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_grammar_queue_reqs",
    "sglang:num_prefill_prealloc_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)


def in_flight(status: int | None, body: bytes) -> int | None:
    """Add up what runs and waits over all ranks, from whichever of the three answers it is."""
    if status != 200:
        return None
    value = json_value(body)
    ranks = value.get("loads") if isinstance(value, dict) else value
    if not isinstance(ranks, list):
        return metric_sum(body, _GAUGES) if value is None else None
    counts = [_rank_load(rank) for rank in ranks]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _rank_load(rank: object) -> int | None:
    if not isinstance(rank, dict):
        return None
    if _count(rank.get("num_reqs")) is not None:  # /get_load: waiting ones included
        return _count(rank["num_reqs"])
    running, waiting = _count(rank.get("num_running_reqs")), _count(rank.get("num_waiting_reqs"))
    return None if running is None or waiting is None else running + waiting


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _book(server: Server) -> Catalogue:
    return catalogue(name, server.engine.version)


def _checked(server: Server, book: Catalogue) -> Checked:
    return check_args(book, server.args, _owned(book))


@functools.cache
def _owned(book: Catalogue) -> Mapping[str, str]:
    """Return what decides flags instead of `args`, by this version's names. Once a version: fleets are large."""
    speculative = {flag: "`speculative`" for flag in book.flags if flag.startswith(PREFIX)}
    return book.canonical({**speculative, **OWNED})

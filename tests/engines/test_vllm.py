"""vLLM: started, refused, read back, asked; by version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_servers import accepted, validated
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.spec import Server
from reconciler.engines import vllm
from reconciler.engines.base import NotYet, Ready, Wrong
from reconciler.engines.told import differences, written

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


DRAFT = {"method": "draft_model", "model": "/d", "num_speculative_tokens": 3}


def document(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "name": "llama",
        "host": "llm-one",
        "gpus": [0, 1],
        "engine": {"name": "vllm", "version": "0.33.0"},
        "runtime": {"python": "/opt/vllm/bin/python", "user": "vllm"},
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "model_revision": "0e9e39f",
        "served_model_name": "llama",
        "tp_size": 2,
        "speculative": NGRAM,
        "listen": {
            "address": "0.0.0.0",
            "port": 8000,
            "api_key": {"file": "/etc/reconciler/llama.key"},
        },
        "args": {"max-model-len": "32k", "enable-prefix-caching": False, "shutdown-timeout": 60},
    }
    return {**plain, **changes}


def at(version: str | None, **changes: object) -> dict[str, object]:
    engine = {"name": "vllm"} if version is None else {"name": "vllm", "version": version}
    return {"engine": engine, "args": {}, **changes}


def server(**changes: object) -> Server:
    return accepted(document(**changes), vllm)


def refusals(**changes: object) -> list[tuple[str, str]]:
    return vllm.problems(validated(document(**changes), vllm))


def warned(**changes: object) -> dict[str, str]:
    return dict(vllm.warnings(server(**changes)))


def test_a_server_with_an_ngram_draft_is_started_so() -> None:
    """The model by position, full flag names in one order, speculation as one JSON, the key by environment."""
    launch = vllm.render(server(), ["GPU-a", "GPU-b"])
    assert launch.argv == (
        "/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "meta-llama/Llama-3.1-8B-Instruct",
        "--revision", "0e9e39f", "--served-model-name", "llama", "--tensor-parallel-size", "2",
        "--host", "0.0.0.0", "--port", "8000",
        "--speculative-config",
        '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}',
        "--no-enable-prefix-caching", "--max-model-len", "32k", "--shutdown-timeout", "60",
    )  # fmt: skip
    assert launch.secret_env == {"VLLM_API_KEY": "/etc/reconciler/llama.key"}
    assert launch.secret_config is None
    assert launch.environment == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert launch.check_argv == launch.argv[:4]
    assert launch.paths == ("/opt/vllm/bin/python",)


def test_experts_are_spread_over_all_ranks_or_none() -> None:
    """There is one switch for it in vLLM: a size means tp × dp."""
    launch = vllm.render(server(ep_size=2), [])
    assert "--enable-expert-parallel" in launch.argv
    assert vllm.read_argv(launch.argv, {})["ep_size"] == 2
    assert "--enable-expert-parallel" not in vllm.render(server(), []).argv


def test_a_container_runs_the_same_command_inside() -> None:
    """The key's variable is passed by name, and the command reads back through the container's own."""
    launch = vllm.render(server(runtime={"container": "podman", "image": "a/vllm:v1"}), ["GPU-a"])
    assert "--env=VLLM_API_KEY" in launch.argv
    assert launch.argv[launch.argv.index("a/vllm:v1") + 1 :][:3] == (
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
    )
    found = vllm.read_argv(launch.argv, {"VLLM_API_KEY": "CANARY"})
    assert found["runtime"] == {"container": "podman", "image": "a/vllm:v1"}
    assert found["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert "CANARY" not in json.dumps(found)


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"runtime": {}}, "runtime", "needs `python`"),
        ({"runtime": {"binary": "/x"}}, "runtime.binary", "runtime.python"),
        ({"model": None}, "model", "is missing"),
        ({"ep_size": 3}, "ep_size", "tp_size × dp_size = 2"),
        ({"dp_size": 2}, "gpus", "needs 4 GPUs; 2 are listed"),
        ({"env": {"VLLM_SERVER_DEV_MODE": "1"}}, "env.VLLM_SERVER_DEV_MODE", "run code"),
        ({"args": {"tensor-parallel-size": 2}}, "args.tensor-parallel-size", "`tp_size`"),
        ({"args": {"model": "x"}}, "args.model", "`model`"),
        ({"args": {"enable-expert-parallel": True}}, "args.enable-expert-parallel", "`ep_size`"),
        ({"args": {"disable-expert-parallel": True}}, "args.disable-expert-parallel", "`ep_size`"),
        ({"args": {"speculative-config": {}}}, "args.speculative-config", "`speculative`"),
        ({"args": {"spec-method": "ngram"}}, "args.spec-method", "`speculative`"),
        ({"args": {"device-ids": "0"}}, "args.device-ids", "`gpus`"),
        ({"args": {"max_model_len": 1}}, "args.max_model_len", "with dashes"),
        ({"args": {"swap-space": 4}}, "args.swap-space", "vllm 0.10.2 has it"),
        ({"args": {"omni": True}}, "args.omni", "is no flag of vllm 0.33.0"),
    ],
)
def test_what_vllm_would_refuse_is_refused_first(
    changes: dict[str, object], place: str, words: str
) -> None:
    """Each is one error at its field, before any server is touched."""
    found = refusals(**changes)
    assert [path for path, _ in found] == [place]
    assert words in found[0][1]


def test_the_development_mode_is_allowed_where_nobody_reaches_it() -> None:
    """On loopback it is the operator's own matter."""
    assert refusals(env={"VLLM_SERVER_DEV_MODE": "1"}, listen={"port": 8000}) == []


@pytest.mark.parametrize(
    ("version", "speculative", "place", "words"),
    [
        ("0.33.0", {**NGRAM, "promt_lookup_max": 3}, "promt_lookup_max", "did you mean `prompt_lookup_max`?"),
        ("0.33.0", {**NGRAM, "target_model_config": "x"}, "target_model_config", "is no key"),
        ("0.8.5", {**NGRAM, "enforce_eager": True}, "enforce_eager", "is no key"),
        ("0.8.5", {"method": "eagle3", "model": "/d", "num_speculative_tokens": 2}, "method", "none that vLLM 0.8.5 knows"),
        ("0.33.0", {**NGRAM, "method": "n-gram"}, "method", "did you mean `ngram`?"),
        ("0.33.0", {**NGRAM, "num_speculative_tokens": "4"}, "num_speculative_tokens", "takes int"),
        ("0.33.0", {**NGRAM, "enforce_eager": 1}, "enforce_eager", "takes bool"),
        ("0.33.0", {**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens", "takes int"),
        ("0.33.0", {**NGRAM, "num_speculative_tokens": 1.5}, "num_speculative_tokens", "takes int"),
        ("0.33.0", {**NGRAM, "num_speculative_tokens": [1]}, "num_speculative_tokens", "takes int"),
        ("0.33.0", {**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens", "at least 1"),
        ("0.33.0", {**NGRAM, "prompt_lookup_min": 5}, "prompt_lookup_min", "more than prompt_lookup_max, 4"),
        ("0.33.0", {"num_speculative_tokens": 4}, "method", "no `model` tells it"),
        ("0.33.0", {"method": "ngram"}, "num_speculative_tokens", "is missing"),
        ("0.33.0", {"method": "ngram", "model": "/d", "num_speculative_tokens": 2}, "model", "drafts without a model"),
        ("0.33.0", {"method": "eagle3", "num_speculative_tokens": 2}, "model", "is missing"),
        ("0.33.0", {"method": "mtp"}, "num_speculative_tokens", "is missing"),
        ("0.33.0", {"method": "mtp", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, "prompt_lookup_max", "no effect"),
        ("0.33.0", {"method": "mtp", "num_speculative_tokens": 2, "tensor_parallel_size": 2}, "tensor_parallel_size", "draft_tensor_parallel_size"),
        ("0.33.0", {"method": "eagle", "model": "/d", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 3}, "draft_tensor_parallel_size", "1 or tp_size, 2"),
        ("0.33.0", {**NGRAM, "rejection_sample_method": "synthetic"}, "rejection_sample_method", "fakes the acceptance"),
        ("0.19.1", {**NGRAM, "rejection_sample_method": "synthetic"}, "rejection_sample_method", "fakes the acceptance"),
        ("0.33.0", {**NGRAM, "synthetic_acceptance_length": 3.0}, "synthetic_acceptance_length", "fakes the acceptance"),
        ("0.33.0", {**NGRAM, "dspark_draft_topk": 4}, "dspark_draft_topk", "method dspark alone"),
        ("0.33.0", {**NGRAM, "index_share_for_mtp_iteration": True}, "index_share_for_mtp_iteration", "method mtp alone"),
        ("0.33.0", {**NGRAM, "use_heterogeneous_vocab": True}, "use_heterogeneous_vocab", "method draft_model alone"),
        ("0.33.0", {**NGRAM, "draft_lm_head_quantization": "fp8"}, "draft_lm_head_quantization", "eagle, eagle3, mtp alone"),
        ("0.33.0", {**DRAFT, "use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"}, "draft_sample_method", "must be greedy"),
        ("0.33.0", {**DRAFT, "use_heterogeneous_vocab": True, "use_local_argmax_reduction": True}, "use_local_argmax_reduction", "use_heterogeneous_vocab"),
        ("0.33.0", {**DRAFT, "enable_adaptive_verification": True, "use_local_argmax_reduction": True}, "use_local_argmax_reduction", "adaptive_verification"),
        ("0.33.0", {**NGRAM, "rejection_sample_method": "fly", "num_speculative_tokens": 1}, "num_speculative_tokens", "at least 2"),
        ("0.33.0", {**NGRAM, "rejection_sample_method": "fly", "fly_window_size": 4}, "fly_window_size", "less than num_speculative_tokens, 4"),
        ("0.33.0", {"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth", "at least 1"),
        ("0.33.0", {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob", "from 0 to 1"),
        ("0.19.1", {**NGRAM, "synthetic_acceptance_rate": 0.9}, "synthetic_acceptance_rate", "fakes the acceptance"),
    ],
)  # fmt: skip
def test_each_rule_of_speculation_is_told_at_its_key(
    version: str, speculative: dict[str, object], place: str, words: str
) -> None:
    """A configuration that vLLM would refuse, replace or fake is one error that names the rule."""
    found = refusals(**at(version, speculative=speculative))
    assert [path for path, _ in found] == [f"speculative.{place}"], found
    assert words in found[0][1]


@pytest.mark.parametrize(
    ("version", "speculative"),
    [
        ("0.33.0", {"method": "mtp", "num_speculative_tokens": 1}),
        ("0.33.0", {"model": "/d", "enforce_eager": True}),
        ("0.33.0", {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}),
        ("0.33.0", {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_spec_factor": 2}),
        ("0.33.0", {"method": "draft_model", "model": "/d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}),
        ("0.10.2", {"method": "qwen3_next_mtp", "num_speculative_tokens": 2}),
        ("0.8.5", NGRAM),
        ("0.33.0", {"method": "suffix"}),
        ("0.33.0", {"method": "qwen3_5_mtp", "num_speculative_tokens": 1, "index_share_for_mtp_iteration": True}),
        (None, {"method": "ngram", "num_speculative_tokens": 2}),
    ],
)  # fmt: skip
def test_what_vllm_takes_is_accepted(version: str | None, speculative: dict[str, object]) -> None:
    """The rules refuse nothing that works."""
    assert refusals(**at(version, speculative=speculative)) == []


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        (at("0.20.0"), "engine.version", "checked against 0.19.1"),
        (at(None), "engine.version", "no engine.version"),
        ({"model_revision": None}, "model_revision", "is not pinned"),
        ({"timeouts": {"ready": "30m"}}, "timeouts.ready", "600s after which vLLM itself gives up"),
        ({"timeouts": {"ready": "30m"}, "env": {"VLLM_ENGINE_READY_TIMEOUT_S": "900"}}, "timeouts.ready", "900s"),
        ({"args": {"shutdown-timeout": 100}, "timeouts": {"stop": "60s"}}, "timeouts.stop", "shutdown-timeout, 100s"),
        ({"speculative": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative.prompt_lookup_max", "both bounds to 5"),
        ({"speculative": {"method": "qwen3_5_mtp", "num_speculative_tokens": 2}}, "speculative.method", "write mtp"),
        ({"speculative": {"method": "suffix"}}, "speculative.num_speculative_tokens", "max_tree_depth, 24"),
        ({"speculative": {**NGRAM, "rejection_sample_method": "fly"}}, "speculative.rejection_sample_method", "would not have drawn"),
        ({"speculative": {"model": "/d"}}, "speculative.num_speculative_tokens", "draft model's own"),
        ({"speculative": {"method": "eagle", "model": "a/b", "num_speculative_tokens": 2}}, "speculative.revision", "not pinned"),
        (at("0.10.2", args={"disable-log-requests": True}), "args.disable-log-requests", "deprecated"),
    ],
)  # fmt: skip
def test_what_is_adjusted_or_uncertain_is_said(
    changes: dict[str, object], place: str, words: str
) -> None:
    """Accepted with a word: nobody finds out later what the engine did besides."""
    assert words in warned(**changes)[place]
    assert warned() == {}


ARGS = st.fixed_dictionaries(
    {},
    optional={
        "max-model-len": st.integers(1, 10**6),
        "gpu-memory-utilization": st.floats(0.1, 0.95),
        "chat-template": st.text("abc/{}%$\"' -", min_size=1, max_size=10),
        "enable-prefix-caching": st.booleans(),
        "limit-mm-per-prompt": st.dictionaries(
            st.sampled_from("abc"), st.integers(0, 9), max_size=3
        ),
        "cudagraph-capture-sizes": st.lists(st.integers(1, 64), min_size=1, max_size=3),
    },
)


@given(ARGS, st.integers(1, 2), st.integers(1, 9), st.booleans())
def test_a_rendered_server_reads_back_to_its_spec(
    args: dict[str, object], tp: int, tokens: int, key: bool
) -> None:
    """Rendering and reading agree on every field, so that a fresh deployment is in sync at once."""
    listen = {"address": "10.0.0.1", "port": 8000} | ({"api_key": {"file": "/k"}} if key else {})
    spec = {**NGRAM, "num_speculative_tokens": tokens}
    launch = vllm.render(server(tp_size=tp, speculative=spec, args=args, listen=listen), ["GPU-a"])
    environment = {**launch.environment, **dict.fromkeys(launch.secret_env, "CANARY")}
    assert vllm.read_argv(launch.argv, environment, version="0.33.0") == {
        "engine": {"name": "vllm"},
        "runtime": {"python": "/opt/vllm/bin/python"},
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "model_revision": "0e9e39f",
        "served_model_name": "llama",
        **({"tp_size": tp} if tp > 1 else {}),
        "listen": {"address": "10.0.0.1", "port": 8000} | ({"api_key": True} if key else {}),
        "speculative": spec,
        "args": args,
        "gpus": ["GPU-a"],
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["/opt/vllm/bin/vllm", "serve", "m/m", "-tp", "2", "--max_model_len=4096", "--spec-method", "mtp", "--spec-tokens", "2"],
        ["/opt/vllm/bin/python3", "/opt/vllm/bin/vllm", "serve", "m/m", "--tensor_parallel_size", "2", "--max-model-len", "4096",
         "--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "2"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m/m", "--tensor-parallel-size=2", "--max-model-len", "4096",
         "-sc", '{"method":"mtp","num_speculative_tokens":2}', "--api-key", "CANARY", "--hf-token", "CANARY"],
    ],
)  # fmt: skip
def test_a_strangers_command_line_is_read_by_the_same_names(argv: list[str]) -> None:
    """Scripts, the older module, short forms, underscores and dotted keys all say the same server."""
    found = vllm.read_argv(argv, {})
    assert found["model"] == "m/m"
    assert found["tp_size"] == 2
    assert found["speculative"] == {"method": "mtp", "num_speculative_tokens": 2}
    assert found["args"] == {"max-model-len": 4096}
    assert "CANARY" not in json.dumps(found)


def test_readiness_and_identity() -> None:
    """No answer is loading; 404 to a generation is another model; 503 is an engine that died behind."""
    one = server()
    asked = vllm.ready_requests(one)
    assert asked.alive.path == "/health"
    assert asked.generation is not None
    assert isinstance(vllm.alive(one, None, b""), NotYet)
    assert isinstance(vllm.alive(one, 503, b""), NotYet)
    gone = b'{"error":{"message":"The model `llama` does not exist.","code":404}}'
    assert isinstance(vllm.generation_ok(one, 404, gone), Wrong)
    token = {"model": "llama", "choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
    assert vllm.generation_ok(one, 200, json.dumps(token).encode()) == Ready()
    assert vllm.identity_ok(one, 200, b'{"data":[{"id":"llama"}]}') == Ready()


@pytest.mark.parametrize(
    ("status", "body", "count"),
    [
        (200, b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\nvllm:num_requests_waiting{engine="0"} 1.0\n', 4),
        (200, b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\nvllm:num_requests_waiting_by_reason{reason="x"} 5\n', 0),
        (200, b"# nothing\n", None),
        (401, b"vllm:num_requests_running 0.0\n", None),
        (None, b"", None),
    ],
)  # fmt: skip
def test_requests_in_flight_are_counted_over_all_engines(
    status: int | None, body: bytes, count: int | None
) -> None:
    """Data-parallel engines add up; what is not said is unknown (S12)."""
    assert vllm.in_flight(status, body) == count
    asked = vllm.in_flight_request(server())
    assert asked is not None
    assert asked.path == "/metrics"


START = Path(__file__).parents[1] / "recorded" / "start-lines" / "vllm-0.32.0.txt"


def test_the_lines_of_a_real_start_say_what_was_asked_and_what_is_in_force() -> None:
    """Recorded from 0.32.0: both lines are read, and nothing of what was written there differs."""
    lines = START.read_text().splitlines()
    made = server(
        engine={"name": "vllm", "version": "0.33.0"}, model="/srv/models/tiny", served_model_name="tiny", speculative=None, tp_size=1,
        model_revision=None, args={"load-format": "dummy", "dtype": "float32", "enforce-eager": True, "max-model-len": 1024},
    )  # fmt: skip
    (told,) = vllm.startup_told(made, lines)
    assert told.values == {
        "model": "/srv/models/tiny", "model_revision": None, "tp_size": 1, "pp_size": 1, "dp_size": 1,
        "args.load-format": "dummy", "args.dtype": "float32", "args.enforce-eager": True, "args.max-model-len": 1024,
        "speculative.method": None, "speculative.num_speculative_tokens": None,
    }  # fmt: skip
    assert told.asked["args.max-model-len"] == 1024
    assert not list(differences(written(made), told))


@given(st.lists(st.text(max_size=60), max_size=3))
def test_no_start_up_line_breaks_the_reader(texts: list[str]) -> None:
    """Whatever a line says, it is read or left out."""
    lines = [f"Initializing a V1 LLM engine with config: {t}" for t in texts]
    lines += [f"non-default args: {{{t}" for t in texts]
    vllm.startup_told(server(), lines)


def test_a_deadline_that_vllm_keeps_needs_no_word() -> None:
    """Not written, long enough for the engine's own, or of a version without one: nothing is said."""
    for changes in (
        {},
        {"timeouts": {"ready": "5m"}},
        {"timeouts": {"ready": "30m"}, "env": {"VLLM_ENGINE_READY_TIMEOUT_S": "1800"}},
        {"timeouts": {"ready": "30m"}, **at("0.10.2", args={}, speculative=None)},
    ):
        assert "timeouts.ready" not in warned(**changes)

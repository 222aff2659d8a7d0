"""SGLang: started, refused, read back, asked; by version."""

from __future__ import annotations

import json

import pytest
from engine_servers import accepted, validated
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.spec import Server
from reconciler.engines import sglang
from reconciler.engines.base import NotYet, Ready, Wrong

NEXTN = {"algorithm": "NEXTN", "num_steps": 4, "eagle_topk": 1}


def document(**changes: object) -> dict[str, object]:
    """The four-GPU deployment of the design."""
    plain: dict[str, object] = {
        "name": "qwen35-122b",
        "host": "llm-two",
        "unit": "sglang-qwen.service",
        "gpus": [0, 1, 2, 3],
        "engine": {"name": "sglang", "version": "0.5.23"},
        "runtime": {"python": "/opt/sglang/bin/python", "user": "sglang"},
        "model": "Qwen/Qwen3.5-122B-A10B",
        "model_revision": "3f1c9a5",
        "served_model_name": "qwen",
        "tp_size": 4,
        "speculative": NEXTN,
        "listen": {
            "address": "0.0.0.0",
            "port": 30000,
            "api_key": {"file": "/etc/reconciler/qwen.key"},
        },
        "args": {
            "context-length": 131072,
            "max-running-requests": 64,
            "mamba-radix-cache-strategy": "extra_buffer",
        },
        "env": {"NCCL_SOCKET_IFNAME": "eth0"},
        "secrets": {"HF_TOKEN": {"file": "/etc/reconciler/hf-token"}},
    }
    return {**plain, **changes}


def at(version: str | None, **changes: object) -> dict[str, object]:
    """The same on another version, without what came later."""
    engine = {"name": "sglang"} if version is None else {"name": "sglang", "version": version}
    return {"engine": engine, "args": {}, "listen": {"port": 30000}, **changes}


def server(**changes: object) -> Server:
    return accepted(document(**changes), sglang)


def refusals(**changes: object) -> list[tuple[str, str]]:
    return sglang.problems(validated(document(**changes), sglang))


def warned(**changes: object) -> dict[str, str]:
    return dict(sglang.warnings(server(**changes)))


def test_the_four_gpu_deployment_is_started_so() -> None:
    """Full flag names in one order, draft tokens derived, GPUs by UUID, no secret in any word."""
    launch = sglang.render(server(), ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    assert launch.argv == (
        "/opt/sglang/bin/python", "-m", "sglang.launch_server",
        "--model-path", "Qwen/Qwen3.5-122B-A10B", "--revision", "3f1c9a5", "--served-model-name", "qwen",
        "--tp-size", "4", "--host", "0.0.0.0", "--port", "30000",
        "--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "5", "--speculative-num-steps", "4",
        "--context-length", "131072", "--mamba-radix-cache-strategy", "extra_buffer", "--max-running-requests", "64",
        "--config", "/run/credentials/sglang-qwen.service/secrets.yaml",
    )  # fmt: skip
    assert launch.environment == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d",
    }
    assert launch.secret_env == {"HF_TOKEN": "/etc/reconciler/hf-token"}
    assert launch.secret_config == {"api-key": "/etc/reconciler/qwen.key"}
    assert launch.credentials == {"secrets.yaml": "/var/lib/reconciler/qwen35-122b/secrets.yaml"}
    assert launch.check_argv == ("/opt/sglang/bin/python", "-m", "sglang.launch_server")
    assert launch.flags_to_check[0] == "--model-path"
    assert all(flag.startswith("--") and "=" not in flag for flag in launch.flags_to_check)
    assert launch.paths == ("/opt/sglang/bin/python",)


def test_paths_that_must_exist_are_named() -> None:
    """The interpreter, a model and a draft that are paths; hub names are none."""
    launch = sglang.render(
        server(model="/srv/m", speculative={**NEXTN, "draft_model_path": "/srv/d"}), []
    )
    assert launch.paths == ("/opt/sglang/bin/python", "/srv/m", "/srv/d")


def test_the_order_in_the_spec_does_not_matter() -> None:
    """The revision ignores order, so the rendered command must too."""
    turned = {**document(), "args": dict(reversed(document()["args"].items()))}  # type: ignore[attr-defined]
    turned["speculative"] = dict(reversed(NEXTN.items()))
    assert sglang.render(accepted(turned, sglang), []) == sglang.render(server(), [])


def test_a_container_runs_the_same_command_inside() -> None:
    """Podman keeps the processes in the unit's group; devices by UUID, secrets by name, the rest unchanged."""
    boxed = server(runtime={"container": "podman", "image": "docker.io/lmsysorg/sglang:v0.5.23"})
    launch = sglang.render(boxed, ["GPU-a"])
    assert launch.argv[:3] == ("/usr/bin/podman", "run", "--rm")
    assert "--cgroups=split" in launch.argv
    assert "--device=nvidia.com/gpu=GPU-a" in launch.argv
    assert "--env=HF_TOKEN" in launch.argv
    assert "--env=RECONCILER_SERVER" in launch.argv
    assert "--env=CUDA_VISIBLE_DEVICES" not in launch.argv
    assert "--stop-timeout=115" in launch.argv
    mount = "/run/credentials/sglang-qwen.service/secrets.yaml"
    assert f"--volume={mount}:{mount}:ro" in launch.argv
    assert launch.check_argv is None
    assert launch.no_new_privileges is False
    assert launch.paths == ("/usr/bin/podman",)
    found = sglang.read_argv(launch.argv, {})
    assert found["runtime"] == {"container": "podman", "image": "docker.io/lmsysorg/sglang:v0.5.23"}
    assert found["model"] == "Qwen/Qwen3.5-122B-A10B"
    docker = sglang.render(
        server(runtime={"container": "docker", "image": "a/b:c"}), ["GPU-a", "GPU-b"]
    )
    assert '--gpus="device=GPU-a,GPU-b"' in docker.argv
    assert "--cgroups=split" not in docker.argv


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"runtime": {}}, "runtime", "needs `python`"),
        ({"runtime": {"binary": "/x"}}, "runtime.binary", "runtime.python"),
        ({"runtime": {"container": "podman", "image": "a/b", "user": "x"}}, "runtime.user", "container"),
        ({"model": None}, "model", "is missing"),
        ({"served_model_name": "a:b"}, "served_model_name", "no `:`"),
        (at("0.4.10", listen={"port": 1, "api_key": {"file": "/k"}}, speculative=None), "listen.api_key", "0.4.10"),
        ({"args": {"tp-size": 2}}, "args.tp-size", "`tp_size`"),
        ({"args": {"model": "x"}}, "args.model", "`model`"),
        ({"args": {"config": "/x"}}, "args.config", "under `args`"),
        ({"args": {"nnodes": 2}}, "args.nnodes", "several hosts"),
        ({"args": {"speculative-num-steps": 2}}, "args.speculative-num-steps", "`speculative`"),
        ({"args": {"chunked-prefill-size": 100, "page-size": 64}}, "args.chunked-prefill-size", "multiple of page-size, 64"),
        ({"args": {"attn-dp-size": 3}}, "args.attn-dp-size", "must divide tp_size, 4"),
        ({"ep_size": 8}, "ep_size", "must not exceed tp_size, 4"),
        ({"dp_size": 2}, "gpus", "needs 8 GPUs; 4 are listed"),
        ({"dp_size": 3, "args": {"enable-dp-attention": True}}, "dp_size", "must divide tp_size"),
        ({"env": {"SGLANG_SIMULATE_ACC_LEN": "3"}}, "env.SGLANG_SIMULATE_ACC_LEN", "fakes the acceptance"),
        ({"env": {"SIMULATE_ACC_LEN": "3"}}, "env.SIMULATE_ACC_LEN", "fakes the acceptance"),
    ],
)  # fmt: skip
def test_what_sglang_would_refuse_is_refused_first(
    changes: dict[str, object], place: str, words: str
) -> None:
    """Each is one error at its field, before any server is touched."""
    found = refusals(**changes)
    assert [path for path, _ in found] == [place]
    assert words in found[0][1]


EAGLE = {"algorithm": "EAGLE", "draft_model_path": "/d"}
WIDE = {**EAGLE, "num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16}
THREE = {**EAGLE, "num_steps": 3, "eagle_topk": 1}
UNO = {"algorithm": "UNO", "num_draft_tokens": 4}
ALONE = {"tp_size": 1, "args": {"uno-lora-path": "/l"}}


@pytest.mark.parametrize(
    ("version", "speculative", "more", "place", "words"),
    [
        ("0.5.23", {"num_steps": 3}, {}, "speculative.algorithm", "is missing"),
        ("0.5.23", {**NEXTN, "numsteps": 3}, {}, "speculative.numsteps", "did you mean"),
        ("0.5.23", {**NEXTN, "num_steps": "four"}, {}, "speculative.num_steps", "whole number"),
        ("0.5.23", {**NEXTN, "num_steps": 0}, {}, "speculative.num_steps", "at least 1"),
        ("0.5.6.post2", {"algorithm": "DFLASH"}, {}, "speculative.algorithm", "takes one of EAGLE"),
        ("0.4.10", {"algorithm": "NGRAM"}, {}, "speculative.algorithm", "takes one of EAGLE"),
        # rules 2 and 3: all three or none
        ("0.5.23", {**EAGLE, "eagle_topk": 1}, {}, "speculative.num_steps", "asserts"),
        ("0.5.23", {**EAGLE, "num_draft_tokens": 4}, {}, "speculative.num_steps", "asserts"),
        ("0.5.23", {**EAGLE, "num_steps": 3}, {}, "speculative.eagle_topk", "all three"),
        ("0.5.23", {**EAGLE, "num_steps": 3, "num_draft_tokens": 4}, {}, "speculative.eagle_topk", "all three"),
        ("0.5.23", {**EAGLE, "num_steps": 3, "eagle_topk": 2}, {}, "speculative.num_draft_tokens", "many numbers"),
        # rule 4: a number that would be silently replaced
        ("0.5.23", {**NEXTN, "num_draft_tokens": 4}, {}, "speculative.num_draft_tokens", "num_steps + 1 = 5"),
        # rules 5 and 6: wide trees and attention backends
        ("0.5.10.post1", WIDE, {"args": {"page-size": 64, "attention-backend": "triton"}}, "speculative.eagle_topk", "fa3, flashinfer"),
        ("0.5.23", WIDE, {"args": {"attention-backend": "trtllm_mha"}}, "speculative.eagle_topk", "trtllm_mha"),
        ("0.5.10.post1", WIDE, {"env": {"SGLANG_ENABLE_SPEC_V2": "1"}}, "speculative.eagle_topk", "SPEC_V2"),
        # rule 9
        ("0.5.10.post1", {"algorithm": "NGRAM"}, {"args": {"enable-dp-attention": True}}, "speculative.algorithm", "DP attention"),
        # rule 10
        ("0.5.10.post1", NEXTN, {"tp_size": 2, "pp_size": 2}, "speculative.algorithm", "exclude each other"),
        ("0.5.23", NEXTN, {"tp_size": 2, "pp_size": 2}, "speculative.algorithm", "SGLANG_ENABLE_PP_SPEC"),
        # rules 11, 12, 14
        ("0.5.23", {**WIDE, "use_rejection_sampling": True}, {}, "speculative.use_rejection_sampling", "eagle_topk 1"),
        ("0.5.23", {"algorithm": "NGRAM", "use_rejection_sampling": True}, {}, "speculative.use_rejection_sampling", "EAGLE, EAGLE3"),
        ("0.5.23", {**THREE, "use_rejection_sampling": True, "accept_threshold_acc": 0.9}, {}, "speculative.accept_threshold_acc", "1.0"),
        ("0.5.23", {"algorithm": "NGRAM", "use_block_verification": True}, {}, "speculative.use_block_verification", "alone"),
        ("0.5.10.post1", {**THREE, "moe_runner_backend": "flashinfer_trtllm"}, {}, "speculative.moe_runner_backend", "flashinfer_trtllm"),
        ("0.5.23", {**THREE, "draft_sink_size": 4}, {}, "speculative.draft_sink_size", "draft_window_size"),
        # draft models
        ("0.5.23", {"algorithm": "EAGLE3"}, {}, "speculative.draft_model_path", "is missing"),
        ("0.5.23", {"algorithm": "STANDALONE"}, {}, "speculative.draft_model_path", "is missing"),
        ("0.5.23", {"algorithm": "NGRAM", "draft_model_path": "/d"}, {}, "speculative.draft_model_path", "no draft model"),
        # the others
        ("0.5.23", {"algorithm": "NGRAM", "eagle_topk": 1}, {}, "speculative.eagle_topk", "replaces it"),
        ("0.5.6.post2", {"algorithm": "NGRAM", "num_steps": 3}, {}, "speculative.num_steps", "no effect with NGRAM before"),
        ("0.5.23", {"algorithm": "NGRAM", "ngram_external_corpus_path": "/c"}, {}, "speculative.ngram_external_sam_budget", "from 1 to num_draft_tokens - 1 = 11"),
        ("0.5.23", {"algorithm": "NGRAM", "ngram_external_corpus_path": "/c", "num_draft_tokens": 8, "ngram_external_sam_budget": 8}, {}, "speculative.ngram_external_sam_budget", "= 7"),
        ("0.5.23", {"algorithm": "NGRAM", "ngram_external_corpus_path": "/c", "ngram_external_sam_budget": 4, "ngram_external_corpus_max_tokens": 0}, {}, "speculative.ngram_external_corpus_max_tokens", "positive"),
        ("0.5.23", {"algorithm": "NGRAM"}, {"args": {"page-size": 2, "attention-backend": "fa3"}}, "speculative.algorithm", "flashinfer"),
        ("0.5.23", {"algorithm": "DFLASH"}, {}, "speculative.draft_model_path", "is missing"),
        ("0.5.23", {"algorithm": "DFLASH", "draft_model_path": "/d", "num_steps": 3}, {}, "speculative.num_steps", "forced to 1"),
        ("0.5.23", {"algorithm": "DFLASH", "draft_model_path": "/d", "dflash_block_size": 16, "num_draft_tokens": 8}, {}, "speculative.num_draft_tokens", "16"),
        ("0.5.23", {"algorithm": "DFLASH", "draft_model_path": "/d"}, {"args": {"enable-dp-attention": True}}, "speculative.algorithm", "enable-dp-lm-head"),
        ("0.5.23", {"algorithm": "DFLASH", "draft_model_path": "/d"}, {"tp_size": 2, "pp_size": 2}, "speculative.algorithm", "pp_size 1"),
        ("0.5.23", {"algorithm": "UNO", "num_draft_tokens": 4}, {"args": {"uno-lora-path": "/l"}}, "speculative.algorithm", "tp_size and pp_size 1"),
        ("0.5.23", {"algorithm": "UNO", "num_draft_tokens": 4}, {"tp_size": 1}, "speculative.algorithm", "uno-lora-path"),
        ("0.5.23", {"algorithm": "UNO"}, {"tp_size": 1, "args": {"uno-lora-path": "/l"}}, "speculative.num_draft_tokens", "is missing"),
        ("0.5.23", {"algorithm": "UNO", "num_draft_tokens": 4}, {"tp_size": 1, "args": {"uno-lora-path": "/l", "attention-backend": "triton"}}, "speculative.algorithm", "fa3"),
        # what DSPARK wants
        ("0.5.23", {"algorithm": "DSPARK", "dspark_block_size": 7, "num_draft_tokens": 7}, {}, "speculative.num_draft_tokens", "dspark_block_size + 1 = 8"),
        ("0.5.23", {"algorithm": "DSPARK", "num_draft_tokens": 1}, {}, "speculative.num_draft_tokens", "at least 2"),
        ("0.5.23", {"algorithm": "DSPARK", "dspark_block_size": 0}, {}, "speculative.dspark_block_size", "at least 1"),
        ("0.5.23", {"algorithm": "DSPARK", "num_steps": 3}, {}, "speculative.num_steps", "forced to 1"),
        ("0.5.23", {"algorithm": "DSPARK", "eagle_topk": 2}, {}, "speculative.eagle_topk", "forced to 1"),
        ("0.5.23", {"algorithm": "DSPARK"}, {"args": {"enable-dp-attention": True}}, "speculative.algorithm", "enable-dp-lm-head"),
        ("0.5.23", {"algorithm": "DSPARK"}, {"args": {"enable-dp-attention": True, "enable-dp-lm-head": True, "attn-cp-size": 2}}, "speculative.algorithm", "attn-cp-size"),
        ("0.5.23", {"algorithm": "DSPARK"}, {"tp_size": 2, "pp_size": 2}, "speculative.algorithm", "prefill node"),
        # adaptive steps
        ("0.5.23", {**THREE, "num_steps": 4, "adaptive": True}, {}, "speculative.num_steps", "0, 1, 3, 5, 7"),
        ("0.5.23", {**THREE, "num_draft_tokens": 6, "adaptive": True}, {}, "speculative.num_draft_tokens", "num_steps + 1"),
        ("0.5.23", {**EAGLE, "num_draft_tokens": 6, "adaptive": True}, {}, "speculative.num_draft_tokens", "num_steps + 1"),
        ("0.5.23", {**EAGLE, "num_draft_tokens": 6, "adaptive": True}, {"args": {"enable-pdmux": True}}, "speculative.num_steps", "asserts"),
        ("0.5.23", {**THREE, "adaptive": True}, {"tp_size": 2, "pp_size": 2, "env": {"SGLANG_ENABLE_PP_SPEC": "1"}}, "speculative.adaptive", "SGLANG_ENABLE_PP_SPEC"),
        # windows, nodes that decode alone, UNO's trees
        ("0.5.23", {"algorithm": "DFLASH", "draft_model_path": "/d", "num_draft_tokens": 16, "draft_window_size": 8}, {}, "speculative.draft_window_size", "at least num_draft_tokens, 16"),
        ("0.5.23", {**THREE, "draft_window_size": 0}, {}, "speculative.draft_window_size", "at least 1"),
        ("0.5.23", {"algorithm": "NGRAM"}, {"args": {"disaggregation-mode": "decode", "disaggregation-decode-enable-radix-cache": True}}, "speculative.algorithm", "decode-enable-radix-cache"),
        ("0.5.23", {**UNO, "eagle_topk": 2}, ALONE, "speculative.num_steps", "needs it"),
        ("0.5.23", {**UNO, "eagle_topk": 2, "num_steps": 3, "num_draft_tokens": 7}, ALONE, "speculative.num_draft_tokens", "from num_steps + 1 = 4 to 6"),
        ("0.5.23", {**UNO, "eagle_topk": 2, "num_steps": 3, "num_draft_tokens": 3}, ALONE, "speculative.num_draft_tokens", "from num_steps + 1 = 4 to 6"),
        ("0.5.23", {**UNO, "num_steps": 2}, ALONE, "speculative.num_steps", "forced to 1"),
        ("0.5.23", UNO, {"tp_size": 1, "args": {"uno-lora-path": "/l", "enable-lora": True}}, "speculative.algorithm", "excludes args.enable-lora"),
        ("0.5.23", UNO, {"tp_size": 1, "args": {"uno-lora-path": "/l", "enable-dp-attention": True}}, "speculative.algorithm", "excludes DP attention"),
        # hybrid models
        ("0.5.23", NEXTN, {"args": {"mamba-radix-cache-strategy": "extra_buffer", "disable-radix-cache": True}}, "args.mamba-radix-cache-strategy", "exclude each other"),
        ("0.5.23", NEXTN, {"args": {"mamba-radix-cache-strategy": "no_buffer", "page-size": 64}}, "args.mamba-radix-cache-strategy", "page-size 1"),
        ("0.5.10.post1", NEXTN, {"args": {"mamba-scheduler-strategy": "extra_buffer"}}, "args.mamba-scheduler-strategy", "SGLANG_ENABLE_SPEC_V2"),
        ("0.5.10.post1", NEXTN, {"args": {"mamba-scheduler-strategy": "no_buffer"}}, "args.mamba-scheduler-strategy", "radix cache"),
        ("0.5.23", NEXTN, {"args": {"mamba-track-interval": 4}}, "args.mamba-track-interval", "at least num_draft_tokens, 5"),
        ("0.5.23", NEXTN, {"args": {"mamba-track-interval": 100, "page-size": 64}}, "args.mamba-track-interval", "multiple of page-size"),
    ],
)  # fmt: skip
def test_each_rule_of_speculation_is_told_at_its_field(
    version: str, speculative: dict[str, object], more: dict[str, object], place: str, words: str
) -> None:
    """A combination that the engine would refuse or replace is one error that names the rule."""
    found = refusals(**at(version, speculative=speculative, **more))
    assert [path for path, _ in found] == [place], found
    assert words in found[0][1]


@pytest.mark.parametrize(
    ("version", "speculative", "more"),
    [
        ("0.5.23", EAGLE, {}),
        ("0.5.23", WIDE, {"args": {"page-size": 64, "attention-backend": "triton"}}),
        ("0.5.10.post1", WIDE, {"args": {"page-size": 64, "attention-backend": "fa3"}}),
        ("0.4.10", WIDE, {"args": {"page-size": 64, "attention-backend": "triton"}}),
        ("0.5.10.post1", NEXTN, {"args": {"mamba-scheduler-strategy": "extra_buffer"}, "env": {"SGLANG_ENABLE_SPEC_V2": "1"}}),
        ("0.5.10.post1", NEXTN, {"args": {"disable-radix-cache": True}}),
        ("0.5.23", NEXTN, {"tp_size": 2, "pp_size": 2, "env": {"SGLANG_ENABLE_PP_SPEC": "1"}}),
        ("0.5.23", {"algorithm": "ngram", "num_draft_tokens": 12}, {}),
        ("0.5.23", {"algorithm": "NGRAM", "num_draft_tokens": 12, "num_steps": 3}, {}),
        ("0.5.23", {"algorithm": "NGRAM", "ngram_max_bfs_breadth": 1}, {"args": {"page-size": 64, "attention-backend": "fa3"}}),
        ("0.5.23", {"algorithm": "MY_PLUGIN"}, {}),
        ("0.5.23", {**THREE, "use_rejection_sampling": True, "use_block_verification": True}, {}),
        (None, NEXTN, {}),
        ("0.5.23", {"algorithm": "DSPARK", "dspark_block_size": 7, "num_draft_tokens": 8}, {}),
        ("0.5.23", {"algorithm": "DSPARK"}, {"args": {"disaggregation-mode": "prefill"}, "tp_size": 2, "pp_size": 2}),
        ("0.5.23", {**EAGLE, "adaptive": True}, {}),
        ("0.5.23", {**EAGLE, "num_steps": 5, "adaptive": True}, {}),
        ("0.5.23", {**EAGLE, "num_steps": 4, "adaptive": True, "adaptive_config": "/c.json"}, {}),
        ("0.5.23", {**UNO, "eagle_topk": 2, "num_steps": 3, "num_draft_tokens": 6}, ALONE),
    ],
)  # fmt: skip
def test_what_the_engine_takes_is_accepted(
    version: str | None, speculative: dict[str, object], more: dict[str, object]
) -> None:
    """The rules refuse nothing that works."""
    assert refusals(**at(version, speculative=speculative, **more)) == []


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        (at("0.5.12"), "engine.version", "checked against 0.5.10.post1"),
        (at(None), "engine.version", "no engine.version"),
        ({"model_revision": None}, "model_revision", "is not pinned"),
        ({"args": {}}, "args.max-running-requests", "sets it to 48"),
        ({"args": {"enable-mixed-chunk": True}}, "args.enable-mixed-chunk", "switched off"),
        ({"args": {"enable-dp-attention": True}}, "args.enable-dp-attention", "deprecated"),
        ({"speculative": EAGLE}, "speculative", "to the engine"),
        ({}, "speculative.draft_model_path", "in the model itself"),
        ({"speculative": {**THREE, "draft_model_path": "a/b"}}, "speculative.draft_model_revision", "not pinned"),
        ({"speculative": {**WIDE, "adaptive": True}}, "speculative.adaptive", "falls back"),
        ({"speculative": {**WIDE, "num_draft_tokens": 64}}, "speculative.num_draft_tokens", "#12349"),
        ({"speculative": {"algorithm": "MY_PLUGIN"}}, "speculative.algorithm", "plugin"),
        ({"env": {"SGLANG_ENABLE_SPEC_V2": "1"}}, "env.SGLANG_ENABLE_SPEC_V2", "does nothing"),
        ({"speculative": {"algorithm": "DSPARK", "adaptive": True}}, "speculative.adaptive", "DSPARK is not EAGLE"),
        ({"speculative": {**THREE, "adaptive": True}, "args": {"enable-dp-attention": True}}, "speculative.adaptive", "attention is data parallel"),
        ({"speculative": {**THREE, "adaptive": True}, "args": {"enable-two-batch-overlap": True}}, "speculative.adaptive", "enable-two-batch-overlap is on"),
        ({"speculative": {"algorithm": "DSPARK"}, "args": {}}, "args.max-running-requests", "sets it to 48"),
        ({"env": {"SGL_FORCE_SHUTDOWN": "1"}}, "env.SGL_FORCE_SHUTDOWN", "cuts the requests"),
        ({"env": {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}}, "env.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "without a token"),
        ({"speculative": {"algorithm": "NGRAM"}}, "speculative.num_draft_tokens", "NGRAM takes 12"),
        ({"speculative": {"algorithm": "NGRAM"}}, "speculative.num_steps", "num_draft_tokens // ngram_max_bfs_breadth"),
        ({"speculative": {"algorithm": "NGRAM", "draft_window_size": 512}}, "speculative.draft_window_size", "no effect with NGRAM"),
        (at("0.5.6.post2", speculative=THREE), "speculative", "overlap scheduler off"),
        (at("0.5.10.post1"), "env.SGLANG_ENABLE_SPEC_V2", "overlap scheduler off"),
        (at("0.5.10.post1"), "args.mamba-scheduler-strategy", "should be extra_buffer"),
    ],
)  # fmt: skip
def test_what_is_adjusted_or_uncertain_is_said(
    changes: dict[str, object], place: str, words: str
) -> None:
    """Accepted with a word: nobody finds out later what the engine did besides."""
    assert words in warned(**changes)[place]


ARGS = st.fixed_dictionaries(
    {},
    optional={
        "context-length": st.integers(1, 10**6),
        "mem-fraction-static": st.floats(0.1, 0.95),
        "chat-template": st.text("abc/{}%$\"' -", min_size=1, max_size=10),
        "enable-metrics": st.just(True),
        "numa-node": st.lists(st.integers(0, 7), min_size=1, max_size=3),
        "preferred-sampling-params": st.dictionaries(
            st.sampled_from("abc"), st.integers(0, 9), max_size=3
        ),
    },
)


@given(ARGS, st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_a_rendered_server_reads_back_to_its_spec(
    args: dict[str, object], tp: int, steps: int, key: bool
) -> None:
    """Rendering and reading agree on every field, so that a fresh deployment is in sync at once."""
    listen = {"address": "10.0.0.1", "port": 30000} | ({"api_key": {"file": "/k"}} if key else {})
    one = server(tp_size=tp, speculative={**NEXTN, "num_steps": steps}, args=args, listen=listen)
    launch = sglang.render(one, ["GPU-a"])
    found = sglang.read_argv(launch.argv, launch.environment, version="0.5.23")
    assert found == {
        "engine": {"name": "sglang"},
        "runtime": {"python": "/opt/sglang/bin/python"},
        "model": one.model,
        "model_revision": "3f1c9a5",
        "served_model_name": "qwen",
        **({"tp_size": tp} if tp > 1 else {}),
        "listen": {"address": "10.0.0.1", "port": 30000} | ({"api_key": True} if key else {}),
        "speculative": {**NEXTN, "num_steps": steps, "num_draft_tokens": steps + 1},
        "args": args,
        "gpus": ["GPU-a"],
        "env": {"NCCL_SOCKET_IFNAME": "eth0"},
    }


def test_a_strangers_command_line_is_read_by_the_same_names() -> None:
    """`sglang serve`, positional models, prefixes and keys in argv: fields come out, secrets do not."""
    found = sglang.read_argv(
        ["/opt/x/bin/sglang", "serve", "Qwen/Q", "--tp", "2", "--api-key", "CANARY", "--admin-api-key=CANARY", "--no-such", "1"],
        {"HF_TOKEN": "CANARY", "NCCL_DEBUG": "INFO", "PATH": "/bin", "INVOCATION_ID": "x"},
    )  # fmt: skip
    assert found == {
        "engine": {"name": "sglang"},
        "model": "Qwen/Q",
        "tp_size": 2,
        "listen": {"api_key": True},
        "args": {"no-such": "1"},
        "env": {"NCCL_DEBUG": "INFO"},
    }
    assert sglang.read_argv([], {}) == {"engine": {"name": "sglang"}, "args": {}}


def test_readiness_by_version() -> None:
    """In 0.4 `/health` proves nothing; a list of models names the server and never proves it ready."""
    asked = sglang.ready_requests(server())
    assert asked.alive.path == "/health"
    assert asked.alive.timeout_s > 20
    slow = sglang.ready_requests(server(env={"SGLANG_HEALTH_CHECK_TIMEOUT": "60"}))
    assert slow.alive.timeout_s > 60
    assert asked.identity is not None
    assert asked.identity.path == "/v1/models"
    assert (
        sglang.ready_requests(server(**at("0.4.10", speculative=None))).alive.path
        == "/health_generate"
    )
    assert isinstance(sglang.alive(server(), None, b""), NotYet)
    assert isinstance(sglang.alive(server(), 503, b""), NotYet)
    assert sglang.alive(server(), 200, b"") == Ready()
    token = {"model": "qwen", "choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
    assert sglang.generation_ok(server(), 200, json.dumps(token).encode()) == Ready()
    assert isinstance(sglang.identity_ok(server(), 200, b'{"data":[{"id":"other"}]}'), Wrong)
    assert sglang.identity_ok(server(), 200, b'{"data":[{"id":"other"},{"id":"qwen"}]}') == Ready()


@pytest.mark.parametrize(
    ("version", "args", "path"),
    [
        ("0.5.23", {}, "/v1/loads"),
        ("0.5.10.post1", {"enable-metrics": True}, "/v1/loads"),
        ("0.5.6.post2", {"enable-metrics": True}, "/metrics"),
        ("0.5.6.post2", {}, "/get_load"),
        ("0.4.10", {"enable-metrics": True}, "/metrics"),
        ("0.4.10", {}, None),
        (None, {"enable-metrics": True}, "/metrics"),
        (None, {}, "/v1/loads"),
    ],
)
def test_requests_in_flight_are_asked_where_the_version_tells(
    version: str | None, args: dict[str, object], path: str | None
) -> None:
    """The scheduler's own load where there is one; 0.4.10 without metrics cannot be asked."""
    asked = sglang.in_flight_request(server(**at(version, speculative=None, args=args)))
    assert (asked.path if asked else None) == path


@pytest.mark.parametrize(
    ("status", "body", "count"),
    [
        (200, {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 0, "num_waiting_reqs": 0}]}, 3),
        (200, {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}, 0),
        (200, {"loads": [{"num_running_reqs": 2}]}, None),
        (200, {"loads": [{"num_running_reqs": True, "num_waiting_reqs": 0}]}, None),
        (200, {"loads": []}, None),
        (200, [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 9}], 3),
        (200, {"load": 812}, None),
        (200, [1], None),
        (401, {"loads": []}, None),
        (None, {}, None),
    ],
)  # fmt: skip
def test_loads_are_counted_or_unknown(status: int | None, body: object, count: int | None) -> None:
    """What runs and waits over all ranks; half an answer is unknown, never zero (S12)."""
    assert sglang.in_flight(status, json.dumps(body).encode()) == count


def test_gauges_are_counted_over_all_queues() -> None:
    """A request in a grammar or transfer queue is in flight as well."""
    text = b'sglang:num_running_reqs{x="y"} 1.0\nsglang:num_queue_reqs 2.0\nsglang:num_grammar_queue_reqs 1.0\n'
    assert sglang.in_flight(200, text) == 4
    assert sglang.in_flight(200, b"nothing here\n") is None

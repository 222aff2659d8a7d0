"""Stand-in engines take a real engine's command line on a lab host, and act on it."""

from __future__ import annotations

import json

import pytest
from lab_engine import hold_unit, start_unit

from reconciler.core.errors import UsageError
from reconciler.lab.engines import install_engine
from reconciler.lab.hosts import SystemdHost

pytestmark = pytest.mark.lab

SGLANG = "/opt/sglang/bin/python"


@pytest.fixture
def sglang(lab_host: SystemdHost) -> SystemdHost:
    """The shared host with a stand-in for SGLang 0.5.23."""
    install_engine(lab_host, "sglang", SGLANG, version="0.5.23")
    return lab_host


def _command(*words: str) -> list[str]:
    return [
        SGLANG,
        "-m",
        "sglang.launch_server",
        "--model-path",
        "Qwen/Qwen3-8B",
        "--port",
        "30000",
        *words,
    ]


def test_help_lists_the_flags_of_that_version(sglang: SystemdHost) -> None:
    """Preflight asks an installation which flags it knows: all of that version, and no others."""
    words = sglang.check([SGLANG, "-m", "sglang.launch_server", "--help"]).split()
    assert "--speculative-num-steps" in words
    assert "--no-such-flag" not in words


def test_an_unknown_flag_ends_it_as_argparse_does(sglang: SystemdHost) -> None:
    """The same words and exit status 2 as with the engine's own parser."""
    done = sglang.exec(_command("--no-such-flag", "1"))
    assert done.exit_status == 2
    assert b"unrecognized arguments: --no-such-flag" in done.stderr


def test_a_missing_model_ends_it_while_loading(sglang: SystemdHost) -> None:
    """A path that preflight could not judge: the server dies at load, exit status 1."""
    done = sglang.exec([SGLANG, "-m", "sglang.launch_server", "--model-path", "/no/model"])
    assert done.exit_status == 1
    assert b"/no/model" in done.stderr


def test_it_serves_on_the_gpus_that_it_sees(sglang: SystemdHost) -> None:
    """UUIDs in CUDA_VISIBLE_DEVICES, the memory share, the name and the speculation all arrive."""
    uuids = sglang.check(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]).split()
    environment = f"Environment=CUDA_VISIBLE_DEVICES={uuids[2]},{uuids[3]}"
    command = _command(
        "--tp-size",
        "2",
        "--mem-fraction-static",
        "0.5",
        "--served-model-name",
        "qwen",
        "--speculative-num-steps",
        "3",
    )
    start_unit(sglang, "llm.service", hold_unit(command, service=environment))
    used = sglang.check(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    ).split()
    assert used == ["1", "1", "12289", "12289"]
    models = json.loads(sglang.check(["curl", "-s", "http://127.0.0.1:30000/v1/models"]))
    assert models["data"][0]["id"] == "qwen"
    pid = sglang.check(["systemctl", "show", "llm", "-p", "MainPID", "--value"]).strip()
    assert sglang.check(["cat", f"/proc/{pid}/cmdline"]).split("\0")[:3] == command[:3]


@pytest.mark.parametrize(
    ("engine", "path", "command"),
    [
        (
            "vllm",
            "/opt/vllm/bin/python",
            ["-m", "vllm.entrypoints.cli.main", "serve", "Qwen/Qwen3-8B", "--port", "8000"],
        ),
        (
            "llamacpp",
            "/opt/llama/bin/llama-server",
            ["--hf-repo", "x/y", "--port", "8000", "-c", "4096"],
        ),
        (
            "llamacpp",
            "/opt/llama/bin/python3",
            ["-m", "llama_cpp.server", "--model", "x", "--port", "8000"],
        ),
    ],
)
def test_every_engine_starts_by_its_own_command(
    lab_host: SystemdHost, engine: str, path: str, command: list[str]
) -> None:
    """Also vLLM and both servers of llama.cpp too: health is 200 where the engine has it."""
    install_engine(lab_host, engine, path)
    start_unit(lab_host, "llm.service", hold_unit([path, *command]), port=8000)
    assert lab_host.check(["curl", "-sf", "http://127.0.0.1:8000/health"])


def test_an_engine_without_a_stand_in_is_refused(lab_host: SystemdHost) -> None:
    """The refusal names those that there are; a path that a shell would read is refused as well."""
    with pytest.raises(UsageError, match="sglang, vllm, llamacpp"):
        install_engine(lab_host, "tgi", "/opt/tgi/bin/python")
    with pytest.raises(UsageError, match="plain absolute path"):
        install_engine(lab_host, "vllm", "/opt/$(id)/bin/python")
    with pytest.raises(UsageError, match="no catalogue"):
        install_engine(lab_host, "vllm", "/opt/vllm/bin/python", version="0.0.1")

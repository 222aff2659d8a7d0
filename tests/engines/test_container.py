"""Containers: what cannot be passed in, and command lines taken apart again."""

from __future__ import annotations

import pytest
from engine_servers import accepted, validated

from reconciler.engines import container, llamacpp, vllm
from reconciler.helper.readings import classify_holder

DOCUMENT = {
    "name": "smol",
    "host": "lab",
    "gpus": [],
    "engine": "llamacpp",
    "runtime": {"container": "docker", "image": "ghcr.io/ggml-org/llama.cpp:server"},
    "model": "/srv/smol.gguf",
    "listen": {"port": 8080},
}


def test_the_images_own_program_is_started_and_read_back() -> None:
    """A model that is a path is mounted where it lies; a server without GPUs gets none."""
    launch = llamacpp.render(accepted(DOCUMENT, llamacpp), [])
    assert "--entrypoint=/app/llama-server" in launch.argv
    assert "--volume=/srv/smol.gguf:/srv/smol.gguf:ro" in launch.argv
    assert not [word for word in launch.argv if word.startswith(("--gpus", "--device"))]
    assert launch.paths == ("/usr/bin/docker", "/srv/smol.gguf")
    inside, runtime = container.unwrapped(launch.argv)
    assert inside[0] == "/app/llama-server"
    assert inside[1:3] == ("--model", "/srv/smol.gguf")
    assert runtime == DOCUMENT["runtime"]


def test_what_has_no_meaning_in_a_container_is_refused() -> None:
    """A user and a directory of the host are not those of the image."""
    runtime = {**DOCUMENT["runtime"], "user": "x", "working_directory": "/x"}  # type: ignore[dict-item]
    found = container.problems(validated({**DOCUMENT, "runtime": runtime}, llamacpp))
    assert [place for place, _ in found] == ["runtime.user", "runtime.working_directory"]


def test_a_command_that_is_no_container_comes_back_as_it_is() -> None:
    """Also one of the tools doing something else, or run without an image."""
    assert container.unwrapped(["/bin/x", "run"]) == (("/bin/x", "run"), {})
    assert container.unwrapped(["/usr/bin/podman", "ps"]) == (("/usr/bin/podman", "ps"), {})
    assert container.unwrapped(["/usr/bin/podman", "run", "--rm"]) == ((), {"container": "podman"})


UUIDS = ["GPU-0a", "GPU-1b"]


@pytest.mark.parametrize("tool", ["podman", "docker"])
def test_what_a_container_is_given_is_rendered_and_read_back(tool: str) -> None:
    """Devices by UUID (CDI or --gpus), the host's shared memory, mounts, variables by name alone: both ways."""
    document = {
        **DOCUMENT, "engine": {"name": "vllm", "version": "0.33.0"}, "gpus": [0, 1], "tp_size": 2, "model": "/srv/m",
        "runtime": {"container": tool, "image": "docker.io/vllm/vllm-openai@sha256:" + "0" * 64},
        "speculative": {"method": "draft_model", "model": "/srv/d", "num_speculative_tokens": 3},
        "env": {"NCCL_DEBUG": "WARN"}, "secrets": {"HF_TOKEN": {"file": "/etc/reconciler/hf"}},
    }  # fmt: skip
    launch = vllm.render(accepted(document, vllm), UUIDS)
    run = container.taken_apart(launch.argv)
    assert run is not None
    assert (run.tool, run.image) == (tool, "docker.io/vllm/vllm-openai@sha256:" + "0" * 64)
    assert (run.devices, run.ipc, run.mounts) == (
        tuple(UUIDS),
        "host",
        ("/srv/m:/srv/m:ro", "/srv/d:/srv/d:ro"),
    )
    assert {"HF_TOKEN", "NCCL_DEBUG", "INVOCATION_ID"} <= set(run.environment)
    assert not [name for name in run.environment if "=" in name]
    assert run.inside[:4] == ("python3", "-m", vllm.MODULE, "serve")
    read = vllm.read_argv(launch.argv, {}, version="0.33.0")
    assert (read["model"], read["tp_size"]) == ("/srv/m", 2)
    assert launch.paths == (container.PROGRAMS[tool], "/srv/m", "/srv/d")
    demands = launch.demands
    assert demands is not None
    assert demands.image == (container.PROGRAMS[tool], run.image)
    assert demands.models[0].mounted


def test_a_strangers_container_is_read_whatever_form_its_options_have() -> None:
    """Options with their value glued or apart, by short names, `--gpus all`, shared memory by size, a user."""
    argv = ["docker", "run", "-d", "--rm", "--gpus", "all", "-v", "/srv:/models:ro", "-e", "A=b", "--shm-size", "32g", "-u", "1000", "--name=x",
            "--ipc=private", "vllm/vllm-openai:v0.33.0", "--model", "/models/m", "--port", "8000"]  # fmt: skip
    run = container.taken_apart(argv)
    assert run is not None
    assert (run.devices, run.shm, run.user, run.ipc) == (("all",), "32g", "1000", "private")
    assert (run.mounts, run.environment) == (("/srv:/models:ro",), ("A=b",))
    assert (run.image, run.inside[:2]) == ("vllm/vllm-openai:v0.33.0", ("--model", "/models/m"))
    quoted = container.taken_apart(["docker", "run", '--gpus="device=0,1"', "image"])
    assert quoted is not None
    assert quoted.devices == ("0", "1")


ID = "4c01db0b339c6b9f8a7e5d2c1b0a9f8e7d6c5b4a39281706f5e4d3c2b1a09f8e"
UNIT_GROUP = "/system.slice/qwen.service"


@pytest.mark.parametrize(
    ("cgroup", "whose"),
    [
        # podman run --cgroups=split: conmon and the payload lie below the unit's own group.
        (f"{UNIT_GROUP}/libpod-payload-{ID}", "owned"),
        (f"{UNIT_GROUP}/runtime", "owned"),
        (f"{UNIT_GROUP}/libpod-payload-{ID}/container", "owned"),
        # podman without it, conmon apart: a scope of its own.
        (f"/machine.slice/libpod-{ID}.scope/container", "foreign"),
        (f"/machine.slice/libpod-conmon-{ID}.scope", "foreign"),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container", "foreign"),
        # docker: the client is in the unit, the engine is not; by the systemd driver, and by cgroupfs.
        (f"/system.slice/docker-{ID}.scope", "foreign"),
        (f"/docker/{ID}", "foreign"),
        ("/system.slice/docker.service", "foreign"),
        # A neighbour whose name only begins alike.
        ("/system.slice/qwen.service.d/x", "foreign"),
    ],
)  # fmt: skip
def test_only_what_lies_below_the_units_own_group_is_its_own(cgroup: str, whose: str) -> None:
    """S3: the shapes of control groups as the tools make them; docker's engine can never be proven ours, so it is never signalled."""
    process = {"pid": 7, "start_ticks": 1, "uid": 0, "gid": 0, "groups": [0], "cgroup": cgroup, "comm": "python3", "exe": "/usr/bin/python3"}  # fmt: skip
    context = {"server": "qwen", "unit": "qwen.service", "control_group": UNIT_GROUP, "uid": 0, "gid": 60706, "boot_id": "b"}  # fmt: skip
    assert classify_holder(process, context)[0] == whose

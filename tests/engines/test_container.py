"""Containers: what cannot be passed in, and command lines taken apart again."""

from __future__ import annotations

from engine_servers import accepted, validated

from reconciler.engines import container, llamacpp

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

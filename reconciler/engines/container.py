"""An engine inside a container that systemd starts: `podman run` or `docker run` as the unit's program.

Written after the tools' documentation and round-tripped by tests; no container was started by it here (podman
cannot run on the machines at hand). With podman the container's processes stay in the unit's own control
group (`--cgroups=split`), which is what the ownership proof needs. docker runs them under its daemon, in a
group of their own: the unit then holds the client alone, so nothing below it can be proven ours and the
ladder of release stops where it would have to kill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from reconciler.core.demands import Demands
from reconciler.engines.base import Finding, Launch, is_path

if TYPE_CHECKING:
    from reconciler.core.spec import Server

PROGRAMS: Final = {"podman": "/usr/bin/podman", "docker": "/usr/bin/docker"}


def problems(server: Server) -> list[Finding]:
    """Refuse what is not known to work in a container."""
    if server.runtime.container is None:
        return []
    found: list[Finding] = []
    if server.runtime.user is not None:
        found.append(
            ("runtime.user", "is the image's own matter with a container; the tool runs as root")
        )
    if server.runtime.working_directory is not None:
        found.append(("runtime.working_directory", "is not passed into a container"))
    return found


def contained(server: Server, inside: Launch, gpu_uuids: Sequence[str]) -> Launch:
    """Return the launch that runs `inside` (its argv begins with the program in the image)."""
    tool = server.runtime.container
    if tool is None or server.runtime.image is None:
        return inside
    # The devices are chosen by UUID below, and count anew inside. Our marks travel into the container.
    passed = {
        *inside.environment,
        *inside.secret_env,
        "RECONCILER_SERVER",
        "SPT_NOENV",
        "INVOCATION_ID",
    }
    names = sorted(passed - {"CUDA_VISIBLE_DEVICES"})
    command = (
        PROGRAMS[tool],
        "run",
        "--rm",
        f"--name=reconciler-{server.name}",
        *(("--cgroups=split",) if tool == "podman" else ()),
        "--init",
        "--network=host",
        "--ipc=host",
        "--ulimit=memlock=-1",
        "--ulimit=stack=67108864",
        f"--stop-timeout={max(1, int(server.timeouts.stop) - 5)}",
        *_devices(tool, gpu_uuids),
        *_mounts(server, inside),
        # By name alone: the value comes from the unit's environment and is not in argv (S17).
        *(f"--env={name}" for name in names),
        "--entrypoint=" + inside.argv[0],
        server.runtime.image,
        *inside.argv[1:],
    )
    return dataclasses.replace(
        inside,
        argv=command,
        # The tool of the image cannot be asked without starting it, and podman needs its setuid helpers.
        check_argv=None,
        paths=(PROGRAMS[tool], *(path for path in inside.paths if path == server.model)),
        demands=_outside(inside.demands, PROGRAMS[tool], server.runtime.image),
        no_new_privileges=False,
    )


def _outside(demands: Demands | None, program: str, image: str) -> Demands | None:
    """What a start asks of the host when the engine is in an image: its own cache of models is inside, and empty."""
    if demands is None:
        return None
    models = tuple(dataclasses.replace(m, mounted=m.is_path) for m in demands.models)
    return dataclasses.replace(
        demands,
        python=None,
        binary=None,
        kernels=False,
        image=(program, image),
        models=models,
        cache=(),
    )


def _devices(tool: str, gpu_uuids: Sequence[str]) -> tuple[str, ...]:
    if not gpu_uuids:
        return ()
    if tool == "podman":
        return tuple(f"--device=nvidia.com/gpu={uuid}" for uuid in gpu_uuids)
    # docker reads this value as CSV: the inner quotes keep the commas together.
    return (f'--gpus="device={",".join(gpu_uuids)}"',)


def _mounts(server: Server, inside: Launch) -> tuple[str, ...]:
    places = [server.model] if server.model is not None and is_path(server.model) else []
    places += [word for word in inside.argv if word.startswith("/run/credentials/")]
    return tuple(f"--volume={place}:{place}:ro" for place in places)


def unwrapped(argv: Sequence[str]) -> tuple[tuple[str, ...], dict[str, object]]:
    """Take a rendered `podman run` or `docker run` apart: the argv inside, and the words for `runtime`.

    An argv that is none comes back as it is, with nothing for `runtime`.
    """
    tool = next((tool for tool, path in PROGRAMS.items() if tuple(argv[:2]) == (path, "run")), None)
    if tool is None:
        return tuple(argv), {}
    entrypoint = ""
    for at, word in enumerate(argv[2:], 2):
        if word.startswith("--entrypoint="):
            entrypoint = word.partition("=")[2]
        if not word.startswith("-"):
            inside = (*((entrypoint,) if entrypoint else ()), *argv[at + 1 :])
            return inside, {"container": tool, "image": word}
    return (), {"container": tool}

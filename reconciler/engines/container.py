"""An engine inside a container that systemd starts: `podman run` or `docker run` as the unit's program.

Written after the tools' documentation and round-tripped by tests; no container was started by it here (podman
cannot run on the machines at hand). With podman the container's processes stay in the unit's own control
group (`--cgroups=split`), which is what the ownership proof needs. docker runs them under its daemon, in a
group of their own: the unit then holds the client alone, so nothing below it can be proven ours and the
ladder of release stops where it would have to kill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from reconciler.core.demands import Demands
from reconciler.engines.base import Finding, Launch, is_path

if TYPE_CHECKING:
    from reconciler.core.spec import Server

CDI: Final = "nvidia.com/gpu="
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
        paths=(PROGRAMS[tool], *_models(server, inside)),
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
        return tuple(f"--device={CDI}{uuid}" for uuid in gpu_uuids)
    # docker reads this value as CSV: the inner quotes keep the commas together.
    return (f'--gpus="device={",".join(gpu_uuids)}"',)


def _models(server: Server, inside: Launch) -> tuple[str, ...]:
    """Return the models that lie on the host, a draft's among them: mounted where they lie."""
    wanted = [m.source for m in inside.demands.models] if inside.demands is not None else []
    named = [server.model] if server.model is not None else []
    return tuple(dict.fromkeys(place for place in (*named, *wanted) if is_path(place)))


def _mounts(server: Server, inside: Launch) -> tuple[str, ...]:
    places = list(_models(server, inside))
    words = (*inside.argv, *inside.environment.values())
    places += dict.fromkeys(word for word in words if word.startswith("/run/credentials/"))
    return tuple(f"--volume={place}:{place}:ro" for place in places)


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerRun:
    """A `podman run` or `docker run`, taken apart: what it gives the container, and the argv inside."""

    tool: str
    image: str | None
    inside: tuple[str, ...]
    devices: tuple[str, ...] = ()
    ipc: str | None = None
    shm: str | None = None
    user: str | None = None
    mounts: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


_BARE: Final = frozenset({"--rm", "--init", "-d", "--detach", "-i", "-t", "-it", "--privileged", "--tty", "--interactive",
                          "--read-only", "--no-healthcheck", "--replace", "--tls-verify"})  # fmt: skip
"""Options of both tools that take no value; any other that is not glued to one takes the next word."""
_SHORT: Final = {"-v": "--volume", "-e": "--env", "-u": "--user", "--net": "--network"}


def taken_apart(argv: Sequence[str]) -> ContainerRun | None:
    """Read the command line of a container, ours or a stranger's; None for one that is none."""
    tool = next((tool for tool, path in PROGRAMS.items() if tuple(argv[:2]) in {(path, "run"), (tool, "run")}), None)  # fmt: skip
    if tool is None:
        return None
    found: dict[str, list[str]] = {}
    words = iter(argv[2:])
    image = None
    for word in words:
        if not word.startswith("-"):
            image = word
            break
        name, glued, value = word.partition("=")
        if not glued and name not in _BARE:
            value = next(words, "")
        found.setdefault(_SHORT.get(name, name), []).append(value)

    def last(name: str) -> str | None:
        return found[name][-1] if found.get(name) else None

    entrypoint = last("--entrypoint")
    return ContainerRun(
        tool=tool,
        image=image,
        inside=(*((entrypoint,) if entrypoint and image else ()), *words),
        devices=tuple(_named_devices(found)),
        ipc=last("--ipc"),
        shm=last("--shm-size"),
        user=last("--user"),
        mounts=tuple(found.get("--volume", ())),
        environment=tuple(found.get("--env", ())),
    )


def _named_devices(found: dict[str, list[str]]) -> Iterator[str]:
    """Give the GPUs by name: of CDI (`nvidia.com/gpu=UUID`), or of docker's `--gpus` (`"device=UUID,UUID"`, `all`)."""
    for device in found.get("--device", ()):
        if device.startswith(CDI):
            yield device.removeprefix(CDI)
    for gpus in found.get("--gpus", ()):
        text = gpus.strip('"').removeprefix("device=")
        yield from (name for name in text.split(",") if name)


def unwrapped(argv: Sequence[str]) -> tuple[tuple[str, ...], dict[str, object]]:
    """Take a `podman run` or `docker run` apart: the argv inside, and the words for `runtime`.

    An argv that is none comes back as it is, with nothing for `runtime`.
    """
    run = taken_apart(argv)
    if run is None:
        return tuple(argv), {}
    if run.image is None:
        return (), {"container": run.tool}
    return run.inside, {"container": run.tool, "image": run.image}

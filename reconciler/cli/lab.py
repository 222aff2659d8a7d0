"""`reconcile lab`: hosts for trying things by hand, with a real systemd and simulated GPUs.

A person boots a host, points specs at it, breaks it, and watches what the tool does, before any real
GPU host is involved. All the work is in `reconciler/lab/`; this words it. Needs root, and says so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from reconciler.cli.context import guarded
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from reconciler.lab.faults import LabHost
    from reconciler.lab.hosts import LabPaths, SystemdHost

DEFAULT_NAME: Final = "gpu1"
DEFAULT_PVE_NAME: Final = "pve"

Directory = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="DIR", help="The lab's directory [default: /run/reconciler-lab]."
    ),
]


def register(app: typer.Typer) -> None:
    """Mount `lab` and its commands."""
    lab = typer.Typer(
        no_args_is_help=True,
        help="Hosts with a real systemd and simulated GPUs, for trying things.",
    )
    app.add_typer(lab, name="lab")

    @lab.command()
    def up(
        names: Annotated[
            list[str] | None, typer.Argument(metavar="[NAME]…", help="Hosts to boot.")
        ] = None,
        gpus: Annotated[
            int, typer.Option("--gpus", min=0, help="Simulated GPUs of each host.")
        ] = 4,
        gpu_mib: Annotated[
            int, typer.Option("--gpu-mib", min=1, help="Memory of each GPU.")
        ] = 24576,
        *,
        user: Annotated[
            list[str] | None,
            typer.Option(
                "--user",
                metavar="USER",
                help="An ordinary user, whom servers run as (`runtime.user`) and who may log in; repeatable.",
            ),
        ] = None,
        engine: Annotated[
            list[str] | None,
            typer.Option(
                "--engine",
                metavar="NAME=PATH",
                help="A stand-in for sglang, vllm or llamacpp where specs look for it; repeatable.",
            ),
        ] = None,
        model: Annotated[
            list[str] | None,
            typer.Option(
                "--model",
                metavar="SOURCE",
                help="Files that look like a model: at a path, or in the hub caches of the host's users; repeatable.",
            ),
        ] = None,
        pve: Annotated[
            bool, typer.Option("--pve", help="Proxmox-like: servers live in a container.")
        ] = False,
        directory: Directory = None,
    ) -> None:
        """Boot lab hosts and write an inventory, their pinned keys and an ssh configuration.

        Takes 2 s a host. `--pve` needs a Debian tree for its container, built once in 2 to 4 minutes.
        A lab host is a container on this machine, with its own network: it cannot reach anything else.
        It has no GPU driver: nvidia-smi and the devices are stand-ins, with true bookkeeping.

        Examples:
            sudo reconcile lab up
            sudo reconcile lab up gpu1 gpu2 --gpus 8
            sudo reconcile lab up --engine sglang=/opt/sglang/bin/python --model Qwen/Qwen3-8B
            sudo reconcile lab up pve --pve
        """
        wanted = names or [DEFAULT_PVE_NAME if pve else DEFAULT_NAME]
        guarded(
            lambda: _up(
                _need(directory, pve=pve),
                wanted,
                gpus,
                gpu_mib,
                user or [],
                engine or [],
                model or [],
                pve=pve,
            )
        )

    @lab.command()
    def down(
        names: Annotated[
            list[str] | None, typer.Argument(metavar="[NAME]…", help="Hosts to end.")
        ] = None,
        *,
        every: Annotated[bool, typer.Option("--all", help="End every host of this lab.")] = False,
        directory: Directory = None,
    ) -> None:
        """End lab hosts and remove all that they left on this machine.

        Examples:
            sudo reconcile lab down gpu1
            sudo reconcile lab down --all
        """
        guarded(lambda: _down(_need(directory), names or [], every=every))

    @lab.command(name="break")
    def break_(
        case: Annotated[str | None, typer.Argument(help="What goes wrong; see --list.")] = None,
        host: Annotated[str | None, typer.Argument(help="On which host.")] = None,
        *,
        unit: Annotated[
            str, typer.Option("--unit", help="Which server, where there are several.")
        ] = "",
        listed: Annotated[
            bool, typer.Option("--list", help="Explain every case in a line.")
        ] = False,
        directory: Directory = None,
    ) -> None:
        """Make something go wrong on a lab host, for real; the case `heal` undoes what can be undone.

        Examples:
            reconcile lab break --list
            sudo reconcile lab break left-over gpu1
            sudo reconcile lab break heal gpu1
        """
        if listed:
            _list_cases()
            return
        guarded(lambda: _break(_need(directory), case, host, unit))

    @lab.command()
    def status(directory: Directory = None) -> None:
        """Show the lab's hosts, and how to reach them.

        Examples:
            sudo reconcile lab status
        """
        guarded(lambda: _status(_need(directory)))


def _up(
    lab: LabPaths,
    names: list[str],
    gpus: int,
    gpu_mib: int,
    users: list[str],
    engines: list[str],
    models: list[str],
    *,
    pve: bool,
) -> None:
    import shlex

    from reconciler.lab.engines import install_engine, install_model
    from reconciler.lab.hosts import DEFAULT_DIRECTORY

    wanted = [_engine_and_path(word) for word in engines]
    running = {host.name for host in lab.running()}
    for name in names:
        if name in running:
            _talk(f"{name} is up already; `reconcile lab down {name}` ends it")
        else:
            _boot(lab, name, gpus, gpu_mib, users, pve=pve)
        for engine, path in wanted:
            install_engine(_as_booted(_host(lab, name)), engine, path)
            _talk(f"{name}: a stand-in for {engine} at {path}")
        for model in models:
            install_model(_as_booted(_host(lab, name)), model, ["root", *users])
            _talk(f"{name}: files that look like {model}")
    _hand_over(lab)
    for line in _next_steps(lab, names):
        _talk(line)
    where = (
        "" if lab.directory == DEFAULT_DIRECTORY else f" --dir {shlex.quote(str(lab.directory))}"
    )
    _talk(f"break:  reconcile lab break left-over {names[0]}{where}   (--list shows all cases)")
    _talk(f"end:    reconcile lab down --all{where}")


def _next_steps(lab: LabPaths, names: list[str]) -> list[str]:
    """Give the commands that lead from a booted host to an enrolled one, to be pasted as they are."""
    import shlex

    config, inventory = shlex.quote(str(lab.ssh_config)), shlex.quote(str(lab.inventory))
    return [
        "next:   keys and host keys of the lab are in its ssh configuration; in the shell where you work:",
        f"          export RECONCILER_SSH_CONFIG={config}",
        f"          mkdir -p specs && cp {inventory} specs/lab-hosts.yaml",
        *(f"          reconcile enrol {name}" for name in names),
        f"login:  ssh -F {config} {names[0]}",
    ]


def _boot(
    lab: LabPaths, name: str, gpus: int, gpu_mib: int, users: list[str], *, pve: bool
) -> None:
    from reconciler.lab.hosts import ProxmoxHost, SystemdHost

    if pve:
        _talk(
            f"{name}: booting, with a container in it (its tree is built the first time: 2 to 4 min)"
        )
        container = ProxmoxHost.boot(name, lab=lab, gpus=gpus, gpu_mib=gpu_mib)
        inside = f"container {container.vmid} at {container.container_ip}"
        _talk(f"{name}: up at {container.ip}, {inside}, {gpus} GPUs of {gpu_mib} MiB")
    else:
        host = SystemdHost.boot(name, lab=lab, gpus=gpus, gpu_mib=gpu_mib, users=users)
        _talk(f"{name}: up at {host.ip}, {gpus} GPUs of {gpu_mib} MiB")


def _engine_and_path(word: str) -> tuple[str, str]:
    engine, equals, path = word.partition("=")
    if not equals:
        raise UsageError(
            f"lab: --engine wants NAME=PATH, as in sglang=/opt/sglang/bin/python, not {word!r}"
        )
    return engine, path


def _down(lab: LabPaths, names: list[str], *, every: bool) -> None:
    if every:
        lab.stop_all()
        _talk(f"every host of {lab.directory} is gone")
        return
    if not names:
        raise UsageError(f"lab: nothing was ended: name hosts ({_names(lab)}) or say --all")
    hosts = [_host(lab, name) for name in names]
    for host in hosts:
        host.stop()
        _talk(f"{host.name}: gone")


def _break(lab: LabPaths, case: str | None, name: str | None, unit: str) -> None:
    from reconciler.lab import faults

    if case is None or name is None:
        raise UsageError(
            "lab: say what goes wrong and where: `reconcile lab break left-over gpu1`; --list shows all cases"
        )
    host = _host(lab, name)
    _talk(f"{name}: {faults.break_(_as_booted(host), case, unit=unit)}")


def _status(lab: LabPaths) -> None:
    hosts = lab.running()
    if not hosts:
        _talk(f"no host runs in {lab.directory}; `reconcile lab up` boots one")
    for host in hosts:
        _print(
            f"{host.name:<10}  {host.ip:<15}  {_kind(host):<24}  ssh -F {lab.ssh_config} {host.name}"
        )


def _list_cases() -> None:
    from reconciler.lab.faults import CASES

    width = max(len(name) for name in CASES)
    for case in CASES.values():
        _print(f"{case.name:<{width}}  {case.about}")


def _host(lab: LabPaths, name: str) -> SystemdHost:
    for host in lab.running():
        if host.name == name:
            return host
    raise UsageError(
        f"lab: no host {name!r} runs in {lab.directory} (running: {_names(lab)}); `reconcile lab up {name}` boots it"
    )


def _as_booted(host: SystemdHost) -> LabHost:
    from reconciler.lab.hosts import ProxmoxHost

    container = host.container
    return host if container is None else ProxmoxHost(host, *container)


def _kind(host: SystemdHost) -> str:
    container = host.container
    return "systemd host" if container is None else f"Proxmox-like, container {container[0]}"


def _names(lab: LabPaths) -> str:
    return ", ".join(host.name for host in lab.running()) or "none"


def _need(directory: Path | None, *, pve: bool = False) -> LabPaths:
    """Return the lab, or say what this machine lacks to run one."""
    from reconciler.lab.hosts import DEFAULT_DIRECTORY, LabPaths, available

    missing = available(pve=pve)
    if missing:
        reasons = "".join(f"\n  - {reason}" for reason in missing)
        raise UsageError(
            f"lab: this machine cannot run lab hosts as it is; nothing was done:{reasons}\n"
            "Without root and packages, `reconcile rehearse` plays everything on a simulated host."
        )
    return LabPaths.at(directory or DEFAULT_DIRECTORY)


def _hand_over(lab: LabPaths) -> None:
    """Give keys and inventory to whoever called sudo, so that the tool can go on without root."""
    try:
        uid, gid = int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"])
    except (KeyError, ValueError):
        return
    for path in [
        lab.inventory,
        lab.known_hosts,
        lab.ssh_config,
        *(host.key_path for host in lab.running()),
    ]:
        os.chown(path, uid, gid)


def _talk(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")

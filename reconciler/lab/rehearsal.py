"""The stages on which a rehearsal is played: simulated hosts in this process, or lab hosts with a real systemd.

A `Stage` has a host for each of the specs, puts stand-ins where the specs expect engines, lets things go wrong, and takes
everything away again. The product's own code does all the rest: `cli/rehearse.py` runs the passes against
`Stage.world`. What is played is in `story.py`.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from reconciler.core.errors import UsageError
from reconciler.core.fleet import Fleet
from reconciler.core.spec import Server
from reconciler.effects import gate
from reconciler.effects.ports import Clock, HostPort
from reconciler.engines.base import Engine, Launch
from reconciler.lab.hosts import available
from reconciler.lab.real_time import Heart, RealTimeHost
from reconciler.lab.simulated import SimulatedHost, add_host
from reconciler.lab.stand_in import (
    KEY,
    LOAD_S,
    MEMORY_MIB,
    Fault,
    StandIn,
    help_text,
    needed_paths,
    secret_files,
    stand_in_of,
)
from reconciler.lab.story import Break
from reconciler.lab.world import KILL, Behaviour, Process, World
from reconciler.reconcile import World as ControllerWorld

GONE_S = 8.0
"""How long a passing trouble (a cut network, a stranger on a GPU) lasts."""

STRANGER_MIB = 4000


class Backend(StrEnum):
    """What plays the hosts."""

    AUTO = "auto"
    SYSTEMD = "systemd"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and why it was taken."""

    backend: Backend
    why: str


class Stage(Protocol):
    """Where a rehearsal is played."""

    @property
    def world(self) -> ControllerWorld:
        """Everything that a pass touches the world with."""
        ...

    def set_up(self, fleet: Fleet, faults: Mapping[str, Fault]) -> None:
        """Have on the hosts what this commit's servers need: stand-ins, models, users, secret files."""
        ...

    def play(self, case: Break, server: Server) -> str:
        """Let something go wrong with a server's host, and say what.

        Raises:
            UsageError: This stage cannot.
        """
        ...

    def forced(self, server: Server) -> tuple[str, ...]:
        """Say who was ended by force for a server, by whom, since this was asked last."""
        ...

    def left_alone(self) -> str:
        """Say what became of those that must not be touched; empty when there were none."""
        ...


def choose(wanted: Backend, fleet: Fleet, case: Break | None = None) -> Choice:
    """Choose a backend by what this machine and what is played allow.

    Raises:
        UsageError: Lab hosts are wanted, and they cannot be had here or cannot play this.
    """
    if wanted is Backend.SIMULATED:
        return Choice(Backend.SIMULATED, f"as asked: {SIMULATION}")
    missing = [*available(), *_beyond_systemd(fleet, case)]
    if wanted is Backend.SYSTEMD:
        if missing:
            raise UsageError(
                f"hosts with a real systemd cannot be used for this: {'; '.join(missing)}. Leave --backend out: the simulated one can"
            )
        return Choice(Backend.SYSTEMD, f"as asked: {CONTAINERS}")
    if missing:
        return Choice(
            Backend.SIMULATED, f"{SIMULATION}; no real systemd because: {'; '.join(missing)}"
        )
    return Choice(Backend.SYSTEMD, f"root and systemd-nspawn are here: {CONTAINERS}")


SIMULATION = "hosts simulated in this process, real HTTP for the gate"
CONTAINERS = "containers with a real systemd and sshd on this machine"


def _beyond_systemd(fleet: Fleet, case: Break | None) -> list[str]:
    """Say what a lab host cannot play of this."""
    reasons = [
        f"{server.name} names GPUs by UUID or bus id, and those of a lab host are its own"
        for server in fleet.servers
        if any(isinstance(gpu, str) for gpu in server.gpus)
    ]
    if case is not None and case.only_simulated:
        reasons.append(f"--break {case.name} is for simulated hosts only")
    return list(dict.fromkeys(reasons))


def stage(
    backend: Backend, fleet: Fleet, engines: Mapping[str, Engine], clock: Clock, *, keep: bool
) -> AbstractContextManager[Stage]:
    """Open a stage for the hosts of a fleet; leaving it takes everything away, whatever happened. `keep` leaves lab hosts up."""
    if backend is Backend.SYSTEMD:
        from reconciler.lab.rehearsal_hosts import systemd_stage  # noqa: PLC0415  (paramiko, only where it is used)

        return systemd_stage(fleet, engines, clock, keep=keep)
    return simulated_stage(fleet, engines, clock)


# -- the simulated stage ----------------------------------------------------------------------------------------


@contextmanager
def simulated_stage(fleet: Fleet, engines: Mapping[str, Engine], clock: Clock) -> Iterator[Stage]:
    """Play on simulated hosts in this process, in real time."""
    folder = Path(tempfile.mkdtemp(prefix="reconcile-rehearsal-"))
    hosts = {h.name: RealTimeHost(_new_host(h.name, fleet), folder) for h in fleet.hosts}
    heart = Heart(list(hosts.values()))
    try:
        yield SimulatedStage(hosts, engines, clock)
    finally:
        heart.stop()
        for host in hosts.values():
            host.close()
        shutil.rmtree(folder, ignore_errors=True)


def _new_host(name: str, fleet: Fleet) -> SimulatedHost:
    """Give a host that has every GPU that the specs name, in the names that they use."""
    names = [gpu for s in fleet.servers if s.host == name for gpu in s.gpus]
    indexes = {n for n in names if isinstance(n, int)}
    others = [n for n in dict.fromkeys(names) if isinstance(n, str)]
    count = max([3, *indexes]) + 1 + len(others)
    simulated = add_host(World(secrets.randbits(32)), name, gpus=count, enrolled=False)
    for gpu, written in zip(reversed(simulated.host.gpus), others, strict=False):
        if written.lower().startswith("gpu-"):
            gpu.uuid = written
        else:
            gpu.bus_id = written
    simulated.enrol()
    return simulated


@dataclass
class SimulatedStage:
    """`Stage` on simulated hosts."""

    hosts: Mapping[str, RealTimeHost]
    engines: Mapping[str, Engine]
    clock: Clock
    told: dict[str, int] = field(default_factory=dict)
    bystanders: list[tuple[str, Process]] = field(default_factory=list)

    @property
    def world(self) -> ControllerWorld:
        """See `Stage`."""

        @contextmanager
        def connect(host: object) -> Iterator[HostPort]:
            yield self.hosts[str(getattr(host, "name", host))]

        return ControllerWorld(
            connect=connect,
            clock=self.clock,
            engines=self.engines,
            gate=gate.measure,
            holder="rehearsal",
            new_id=lambda: secrets.token_hex(8),
            unseal=lambda _sealed: KEY,
        )

    def set_up(self, fleet: Fleet, faults: Mapping[str, Fault]) -> None:
        """See `Stage`."""
        for name, host in self.hosts.items():
            servers = [s for s in fleet.servers if s.host == name]
            launches = {s.name: self._launch(s) for s in servers}

            def change(
                simulated: SimulatedHost,
                servers: Sequence[Server] = servers,
                launches: Mapping[str, Launch] = launches,
            ) -> str:
                for server in servers:
                    _furnish(simulated, server, launches[server.name])
                    behave(
                        simulated, stand_in_of(server, faults.get(server.name)), len(server.gpus)
                    )
                _teach_flags(simulated, servers, launches)
                return ""

            host.act(change)

    def _launch(self, server: Server) -> Launch:
        uuids = [f"GPU-{n}" for n in range(len(server.gpus))]
        return self.engines[server.engine.name].render(server, uuids)

    def play(self, case: Break, server: Server) -> str:
        """See `Stage`."""
        act = CASES[case.name]
        before = set(self.hosts[server.host].simulated.host.processes)
        said = self.hosts[server.host].act(lambda simulated: act(simulated, server))
        for pid, process in self.hosts[server.host].simulated.host.processes.items():
            if pid not in before and process.unit is None:
                self.bystanders.append((case.name, process))
        return said

    def forced(self, server: Server) -> tuple[str, ...]:
        """See `Stage`."""
        host = self.hosts[server.host].simulated.host
        since = self.told.get(server.name, 0)
        self.told[server.name] = len(host.truth.signals)
        said = []
        for signal in host.truth.signals[since:]:
            if signal.unit != server.unit or (signal.by == "systemd" and signal.number != KILL):
                continue
            name = "SIGKILL" if signal.number == KILL else "SIGTERM"
            by = "reconcile" if signal.by == "helper" else signal.by
            said.append(f"pid {signal.pid} ({name} by {by})")
        return tuple(dict.fromkeys(said))

    def left_alone(self) -> str:
        """See `Stage`."""
        signals = {s.pid for host in self.hosts.values() for s in host.simulated.host.truth.signals}
        said = [
            f"pid {p.pid} ({p.exe}) {'WAS SIGNALLED' if p.pid in signals else 'was left alone'}"
            for _, p in self.bystanders
        ]
        return "; ".join(said)


def behave(simulated: SimulatedHost, stand_in: StandIn, gpus: int) -> None:
    """Let the unit of this revision start this stand-in."""
    crashes = stand_in.fault is Fault.CRASH
    wrong = stand_in.fault is Fault.WRONG_MODEL
    behaviour = Behaviour(
        load_s=LOAD_S,
        crash_at_s=LOAD_S / 2 if crashes else None,
        crash_line="torch.OutOfMemoryError: CUDA out of memory (simulated)",
        workers=max(0, gpus - 1),
        needs_mib=MEMORY_MIB,
        model="some-other-model" if wrong else stand_in.model,
        port=stand_in.port,
        http=stand_in.options(),
        http_key=stand_in.has_key,
    )
    simulated.host.behave(f"Revision {stand_in.revision}", behaviour)


def _furnish(simulated: SimulatedHost, server: Server, launch: Launch) -> None:
    """Make up what preflight looks for: user, interpreter, model, secret files."""
    host = simulated.host
    if server.runtime.user is not None and server.runtime.user not in host.users:
        number = 2000 + len(host.users)
        host.users[server.runtime.user] = {"uid": number, "gid": number, "groups": [number]}
    for path in needed_paths(server, launch):
        host.paths[path] = {
            "kind": "file", "size": 1, "mode": 0o755, "uid": 0, "gid": 0, "executable": True,
        }  # fmt: skip
    program = server.runtime.python or server.runtime.binary
    if program is not None and server.engine.version is not None:
        host.versions[program] = server.engine.version
    for path in secret_files(server, launch):
        if path not in host.files.data:
            host.files.put(path, f"{KEY}\n".encode())


def _teach_flags(
    simulated: SimulatedHost, servers: Sequence[Server], launches: Mapping[str, Launch]
) -> None:
    """Let each program answer `--help`."""
    asked: dict[tuple[str, ...], tuple[str, list[Launch]]] = {}
    for server in servers:
        launch = launches[server.name]
        if launch.check_argv is not None:
            asked.setdefault(tuple(launch.check_argv), (server.engine.name, []))[1].append(launch)
    for argv, (engine, those) in asked.items():
        simulated.host.programs[" ".join(argv)] = help_text(engine, those)


# -- what goes wrong on it --------------------------------------------------------------------------------------


def _main_of(simulated: SimulatedHost, server: Server) -> Process:
    main = simulated.systemd.unit(server.unit).main
    if main is None:
        raise UsageError(f"{server.unit} does not run, so nothing of it can go wrong")
    return main


def _first_gpu(simulated: SimulatedHost, server: Server) -> int:
    held = simulated.systemd.unit(server.unit).main
    if held is not None and held.gpus:
        return held.gpus[0]
    first = server.gpus[0]
    return first if isinstance(first, int) else 0


def _left_over(simulated: SimulatedHost, server: Server) -> str:
    main = _main_of(simulated, server)
    child = simulated.host.new_process("/")
    for name in (
        "argv",
        "behaviour",
        "exe",
        "gid",
        "gpus",
        "groups",
        "invocation",
        "mark",
        "mount_ns",
        "uid",
        "unit",
    ):
        setattr(child, name, getattr(main, name))
    child.comm, child.ppid, child.ignores_term, child.stays = "worker", main.pid, True, True
    main.mib //= 2
    child.mib = main.mib
    return f"pid {child.pid}, a worker of {server.unit}, has left its control group, ignores SIGTERM and holds {child.mib} MiB on each GPU"


def _foreign_holder(simulated: SimulatedHost, server: Server) -> str:
    gpu = _first_gpu(simulated, server)
    stranger = simulated.host.add_process(gpus=(gpu,), mib=STRANGER_MIB)
    return f"pid {stranger.pid} ({stranger.exe}), of another user, holds {STRANGER_MIB} MiB of GPU {gpu}"


def _monitor(simulated: SimulatedHost, server: Server) -> str:
    gpus = tuple(g.index for g in simulated.host.gpus)
    monitor = simulated.host.add_process(
        "/system.slice/dcgm-exporter.service", gpus=gpus, exe="/usr/bin/dcgm-exporter", uid=0
    )
    return f"pid {monitor.pid} ({monitor.exe}) has every GPU of {server.host} open, without memory"


def _ignore_term(simulated: SimulatedHost, server: Server) -> str:
    main = _main_of(simulated, server)
    main.ignores_term = True
    return f"pid {main.pid} of {server.unit} ignores SIGTERM from now on"


def _guard(simulated: SimulatedHost, server: Server) -> str:
    gpu = _first_gpu(simulated, server)
    stranger = simulated.host.add_process(gpus=(gpu,), mib=STRANGER_MIB)
    simulated.world.after(GONE_S, lambda: simulated.host.end(stranger))
    return f"pid {stranger.pid} ({stranger.exe}) has taken {STRANGER_MIB} MiB of GPU {gpu}, for {GONE_S:g} s"


def _cut(simulated: SimulatedHost, server: Server) -> str:
    simulated.host.up_at = simulated.world.now + GONE_S
    return f"no packet reaches {server.host} for {GONE_S:g} s; on it everything goes on"


def _reboot(simulated: SimulatedHost, server: Server) -> str:
    simulated.reboot()
    return f"{server.host} has lost power, and boots again"


def _nothing(_simulated: SimulatedHost, server: Server) -> str:
    return f"the new {server.name} is made to fail by itself"


CASES: Mapping[str, Callable[[SimulatedHost, Server], str]] = MappingProxyType(
    {
        "left-over": _left_over,
        "foreign-holder": _foreign_holder,
        "monitor": _monitor,
        "ignore-term": _ignore_term,
        "guard": _guard,
        "cut": _cut,
        "reboot": _reboot,
        "crash": _nothing,
        "slow": _nothing,
        "garbage": _nothing,
        "wrong-model": _nothing,
    }
)

__all__ = ["Backend", "Choice", "SimulatedStage", "Stage", "choose", "simulated_stage", "stage"]

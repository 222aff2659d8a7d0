"""The stage with a real systemd: one lab host for each host of the specs, enrolled and reached over ssh as a real one is.

Everything lives in a directory of this run alone: the lab, its keys and pins. The person's own ssh configuration, pins
and state are neither read nor written. See `rehearsal.py` for what a stage is.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from reconciler.core.errors import HostError
from reconciler.core.fleet import Fleet
from reconciler.core.spec import Host, Server
from reconciler.effects import gate
from reconciler.effects.channel import HelperChannel
from reconciler.effects.enrol import NeedsRoot, enrol
from reconciler.effects.host import ConnectedHost
from reconciler.effects.pins import Pin
from reconciler.effects.ports import Clock, HostPort
from reconciler.engines.base import Engine, Launch
from reconciler.lab import faults
from reconciler.lab.hosts import SCRIPTS, LabPaths, SystemdHost
from reconciler.lab.stand_in import (
    KEY,
    LOAD_S,
    MEMORY_MIB,
    Fault,
    StandIn,
    help_text,
    model_files,
    needed_paths,
    secret_files,
    stand_in_of,
)
from reconciler.lab.story import Break
from reconciler.reconcile import World as ControllerWorld
from reconciler.transports.host_keys import HostKeys
from reconciler.transports.ssh import SshTarget, SshTransport

GONE_S = 8.0
"""How long a passing trouble lasts."""

PLANS = "/run/rehearsal"
"""On a host: what each revision's stand-in does; see `scripts/stand-in`."""


@contextmanager
def systemd_stage(
    fleet: Fleet, engines: Mapping[str, Engine], clock: Clock, *, keep: bool
) -> Iterator[SystemdStage]:
    """Boot and enrol a lab host for each host of the specs; end them all afterwards, unless `keep`."""
    state = Path(tempfile.mkdtemp(prefix="reconcile-rehearsal-"))
    lab = LabPaths.at(Path(f"/run/reconciler-rehearsal/{os.getpid()}"))
    stage = SystemdStage(lab, state, engines, clock)
    try:
        for number, host in enumerate(fleet.hosts):
            servers = [s for s in fleet.servers if s.host == host.name]
            if servers:
                stage.boot(f"rh{number}", host, _gpu_count(servers))
        yield stage
    finally:
        stage.heal()
        if keep:
            sys.stderr.write(
                f"kept, as asked: ssh -F {lab.ssh_config} {' | '.join(h.name for h in stage.hosts.values())}; "
                f"end with: reconcile lab down --all --dir {lab.directory}\n"
            )
        else:
            lab.stop_all()
            shutil.rmtree(lab.directory, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)


def _gpu_count(servers: Sequence[Server]) -> int:
    return max([3, *(gpu for s in servers for gpu in s.gpus if isinstance(gpu, int))]) + 1


@dataclass
class SystemdStage:
    """`Stage` on lab hosts."""

    lab: LabPaths
    state: Path
    engines: Mapping[str, Engine]
    clock: Clock
    hosts: dict[str, SystemdHost] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    strangers: list[tuple[SystemdHost, str]] = field(default_factory=list)
    timers: list[threading.Timer] = field(default_factory=list)

    def boot(self, name: str, host: Host, gpus: int) -> None:
        """Boot a lab host for one of the specs, and enrol it by the product's own code."""
        sys.stderr.write(
            f"{host.name}: booting a host with a real systemd and {gpus} simulated GPUs\n"
        )
        booted = SystemdHost.boot(name, lab=self.lab, gpus=gpus)
        self.hosts[host.name] = booted
        booted.check(["mkdir", "-p", f"{PLANS}/flags", f"{PLANS}/versions"])
        connected = self._connected(host.name)
        try:
            done = enrol(
                host.name,
                connected.inner,
                None,
                login=booted.user,
                protect=host.protect,
                state_dir=self.state,
                at=time.time(),
            )
        finally:
            connected.close()
        if isinstance(done, NeedsRoot):
            raise HostError(host.name, f"could not be enrolled: {done.why}")
        self.pins[host.name] = done.pin

    def _connected(self, name: str) -> ConnectedHost:
        booted = self.hosts[name]
        pin = self.pins.get(name)
        transport = SshTransport(
            SshTarget(booted.ip, booted.user, booted.port),
            HostKeys((self.lab.known_hosts,)),
            self.lab.ssh_config,
        )
        inner = HelperChannel(name, transport, sudo=False, installed=pin.digest if pin else None)
        return ConnectedHost(name=name, inner=inner, pin=pin, transports=(transport,))

    @property
    def world(self) -> ControllerWorld:
        """See `Stage`."""

        @contextmanager
        def connect(host: Host) -> Iterator[HostPort]:
            connected = self._connected(host.name)
            try:
                yield connected
            finally:
                connected.close()

        return ControllerWorld(
            connect=connect,
            clock=self.clock,
            engines=self.engines,
            gate=gate.measure,
            holder="rehearsal",
            new_id=lambda: secrets.token_hex(8),
            unseal=lambda _sealed: KEY,
        )

    # -- stand-ins --------------------------------------------------------------------------------------------

    def set_up(self, fleet: Fleet, faults: Mapping[str, Fault]) -> None:
        """See `Stage`."""
        for name, host in self.hosts.items():
            servers = [s for s in fleet.servers if s.host == name]
            launches = {s.name: self._launch(s) for s in servers}
            for server in servers:
                launch = launches[server.name]
                _furnish(host, server, launch)
                _plan(host, server, stand_in_of(server, faults.get(server.name)))
                same = [
                    launches[s.name]
                    for s in servers
                    if launches[s.name].argv[:1] == launch.argv[:1]
                ]
                flags = f"{PLANS}/flags/{launch.argv[0].replace('/', '%')}"
                _write(host, flags, help_text(server.engine.name, same).encode(), mode="644")
                version = f"{PLANS}/versions/{launch.argv[0].replace('/', '%')}"
                _write(host, version, (server.engine.version or "").encode(), mode="644")

    def _launch(self, server: Server) -> Launch:
        uuids = [f"GPU-{n}" for n in range(len(server.gpus))]
        return self.engines[server.engine.name].render(server, uuids)

    # -- what goes wrong --------------------------------------------------------------------------------------

    def play(self, case: Break, server: Server) -> str:
        """See `Stage`."""
        return CASES[case.name](self, self.hosts[server.host], server)

    def heal(self) -> None:
        """Undo what passes by itself, now."""
        for timer in self.timers:
            timer.cancel()
        for host in self.hosts.values():
            if host.alive():
                host.network("heal")

    def later(self, act: Callable[[], object]) -> None:
        """Do something when the trouble is over."""
        timer = threading.Timer(GONE_S, act)
        timer.daemon = True
        self.timers.append(timer)
        timer.start()

    def forced(self, server: Server) -> tuple[str, ...]:
        """See `Stage`."""
        host = self.hosts[server.host]
        path = f"/var/lib/reconciler/{server.name}/journal.ndjson"
        text = host.exec(["cat", path]).stdout.decode(errors="replace")
        unit = ["journalctl", "-q", "-o", "cat", "-u", server.unit, "--grep", "Killing process"]
        killed = host.exec(unit).stdout.decode(errors="replace").splitlines()
        said = [row for line in text.splitlines() for row in _signalled(line)]
        said += [
            f"pid {match[1]} (SIGKILL by systemd)"
            for line in killed
            if (match := re.search(r"Killing process (\d+)", line))
        ]
        fresh = [row for row in said if f"{server.name} {row}" not in self.told]
        self.told.update({f"{server.name} {row}": 1 for row in fresh})
        return tuple(dict.fromkeys(fresh))

    def left_alone(self) -> str:
        """See `Stage`."""
        said = []
        for host, unit in self.strangers:
            state = host.exec(["systemctl", "is-active", unit]).stdout.decode().strip()
            said.append(
                f"{unit} {'was left alone' if state == 'active' else f'IS {state.upper()}'}"
            )
        return "; ".join(said)


def _signalled(line: str) -> list[str]:
    """Read who was signalled from one line of a server's journal on its host."""
    try:
        entry = json.loads(line)
    except ValueError:
        return []
    after = entry.get("after") or {}
    results = after.get("results") if isinstance(after, dict) else None
    return [
        f"pid {r.get('pid')} (signalled by reconcile)"
        for r in results or ()
        if isinstance(r, dict) and r.get("result") == "sent"
    ]


# -- furniture ------------------------------------------------------------------------------------------------


def _furnish(host: SystemdHost, server: Server, launch: Launch) -> None:
    """Make up what preflight looks for: user, program, model, secret files."""
    user = server.runtime.user
    if user is not None and user != "root":
        host.check(["bash", "-c", 'id -u -- "$1" >/dev/null 2>&1 || useradd -r -- "$1"', "_", user])
    program = (SCRIPTS / "stand-in").read_bytes()
    models = model_files(server, launch, _home(host, user))
    for path in sorted(needed_paths(server, launch)):
        if not any(file == path or file.startswith(f"{path}/") for file in models):
            _write(host, path, program if path == launch.argv[0] else b"", mode="755")
    for path, content in sorted(models.items()):
        _write(host, path, content, mode="644")
    for path in sorted(secret_files(server, launch)):
        _write(host, path, f"{KEY}\n".encode(), mode="600")
    directory = server.runtime.working_directory
    if directory is not None:
        host.check(["mkdir", "-p", directory])


def _home(host: SystemdHost, user: str | None) -> str:
    """Give where a user's caches are."""
    return host.check(
        ["bash", "-c", 'getent passwd -- "$1" | cut -d: -f6', "_", user or "root"]
    ).strip()


def _write(host: SystemdHost, path: str, content: bytes, *, mode: str) -> None:
    script = 'mkdir -p "${1%/*}" && rm -f "$1" && cat >"$1" && chmod "$2" "$1"'
    host.check(["bash", "-c", script, "_", path, mode], content)


def _plan(host: SystemdHost, server: Server, stand_in: StandIn) -> None:
    """Leave what this revision's stand-in is to do."""
    gpus = ",".join(str(gpu) for gpu in server.gpus)
    options = ["--gpu", gpus, "--mib", str(MEMORY_MIB if gpus else 0), "--load", str(LOAD_S)]
    options += ["--host", server.listen.address, "--serve", str(stand_in.port), *stand_in.options()]
    if stand_in.fault is Fault.CRASH:
        options += ["--fail-after", str(LOAD_S / 2)]
    environment = {"FAKEGPU_API_KEY": KEY} if stand_in.has_key else {}
    plan = json.dumps({"options": options, "environment": environment}).encode()
    _write(host, f"{PLANS}/{stand_in.revision}.json", plan, mode="644")


# -- cases ----------------------------------------------------------------------------------------------------


def _left_over(_stage: SystemdStage, host: SystemdHost, server: Server) -> str:
    main = host.check(["systemctl", "show", "-P", "MainPID", server.unit]).strip()
    order = json.dumps({"pid": int(main), "child": "setsid,ignore-term"})
    host.check([faults.HOLD, "--tell", order])
    pid = host.check(["bash", "-ec", _ESCAPE, "_", main]).strip()
    return f"pid {pid}, a child of {server.unit}, has left its control group, ignores SIGTERM and holds the GPUs"


_ESCAPE = """
pid=$(tr ' ' '\\n' </proc/$1/task/$1/children | grep . | tail -n 1)
mkdir -p /sys/fs/cgroup/lab-escaped
echo "$pid" >/sys/fs/cgroup/lab-escaped/cgroup.procs
echo "$pid"
"""


def _foreign_holder(stage: SystemdStage, host: SystemdHost, server: Server) -> str:
    said = faults.break_(host, "foreign-holder", unit=server.unit)
    stage.strangers.append((host, "lab-foreign.service"))
    return said


def _monitor(stage: SystemdStage, host: SystemdHost, server: Server) -> str:
    said = faults.break_(host, "dcgm-exporter", unit=server.unit)
    stage.strangers.append((host, "dcgm-exporter.service"))
    return said


def _ignore_term(_stage: SystemdStage, host: SystemdHost, server: Server) -> str:
    return faults.break_(host, "ignore-term", unit=server.unit)


def _guard(stage: SystemdStage, host: SystemdHost, server: Server) -> str:
    gpu = server.gpus[0]
    command = f"{faults.HOLD} --gpu {gpu} --mib {faults.FOREIGN_MIB} --no-oom"
    options = ["--quiet", "--unit=lab-guest", "--uid=nobody", "--collect"]
    host.check(["systemd-run", *options, *shlex.split(command)])
    wait = f"for i in $(seq 100); do ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q 'nvidia{gpu}$' && exit; sleep .05; done; exit 1"
    host.check(["bash", "-c", wait])
    stage.later(lambda: host.exec(["systemctl", "stop", "lab-guest"]))
    return f"lab-guest.service, of user nobody, has taken GPU {gpu}, for {GONE_S:g} s"


def _cut(stage: SystemdStage, host: SystemdHost, server: Server) -> str:
    said = faults.break_(host, "cut", unit=server.unit)
    stage.later(lambda: host.network("heal"))
    return f"{said.partition(',')[0]} for {GONE_S:g} s"


def _nothing(_stage: SystemdStage, _host: SystemdHost, server: Server) -> str:
    return f"the new {server.name} is made to fail by itself"


CASES: Mapping[str, Callable[[SystemdStage, SystemdHost, Server], str]] = MappingProxyType(
    {
        "left-over": _left_over,
        "foreign-holder": _foreign_holder,
        "monitor": _monitor,
        "ignore-term": _ignore_term,
        "guard": _guard,
        "cut": _cut,
        "crash": _nothing,
        "slow": _nothing,
        "garbage": _nothing,
        "wrong-model": _nothing,
    }
)

__all__ = ["SystemdStage", "systemd_stage"]

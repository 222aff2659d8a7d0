"""The composition root: names to members. The only module that imports members of families.

Everything is imported where it is needed: `--help` must not pay for paramiko.
"""

from __future__ import annotations

import getpass
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reconciler.bench.meter import Meter
    from reconciler.core.saved_state import SavedState
    from reconciler.core.spec import Host, Ssh
    from reconciler.effects.host import ConnectedHost
    from reconciler.effects.pins import Pin
    from reconciler.engines.base import Engine
    from reconciler.reconcile import World
    from reconciler.settings import Settings
    from reconciler.transports.base import Transport
    from reconciler.transports.ssh import SshTransport

MACHINE_ID = Path("/etc/machine-id")
"""systemd's own number of this installation of the operating system, see machine-id(5)."""


@cache
def engines() -> Mapping[str, Engine]:
    """Give every engine by the word under `engine:`. A new engine is one line here."""
    from reconciler.engines import custom, llamacpp, sglang, vllm

    members: tuple[Engine, ...] = (sglang, vllm, llamacpp, custom)
    return {member.name: member for member in members}


class RealClock:
    """This machine's monotonic clock. `stop` ends every wait at once and is seen at the next safe point."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def now(self) -> float:
        """Give seconds that never jump."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait, unless somebody asked us to stop."""
        if self._stop.is_set():
            time.sleep(min(seconds, 1.0))
        else:
            self._stop.wait(seconds)

    @property
    def stopping(self) -> bool:
        """Say whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask everything to end at its next safe point."""
        self._stop.set()


def world(settings: Settings, clock: RealClock) -> World:
    """Give the real world: ssh, this machine's clock, the benchmark client."""
    from reconciler.core.pruning import Pruning
    from reconciler.effects import gate
    from reconciler.effects.inspect import FlagFile
    from reconciler.reconcile import World
    from reconciler.sources.unseal import Unsealer

    state_dir = Path(settings.state_dir)

    @contextmanager
    def connect(host: Host) -> Iterator[ConnectedHost]:
        connected = connected_host(host, state_dir, settings.ssh_config)
        try:
            yield connected
        finally:
            connected.close()

    return World(
        connect=connect,
        clock=clock,
        engines=engines(),
        gate=partial(
            gate.measure,
            workloads=Path(settings.workloads) if settings.workloads else None,
            runners=runners(settings),
        ),
        holder=holder(settings),
        new_id=lambda: secrets.token_hex(8),
        exclusive=lambda host: alone_on(host, state_dir),
        flags=FlagFile(state_dir / "flags.json"),
        wall=time.time,
        pruning=Pruning(settings.prune, settings.prune_limit),
        hosts_at_once=settings.hosts_at_once,
        unseal=Unsealer(Path(settings.age_key_file) if settings.age_key_file else None),
    )


def saved_world(state: SavedState, members: Mapping[str, Engine]) -> World:
    """Give a world of saved hosts: it can be looked at, and nothing in it can be changed."""
    from reconciler.effects import gate
    from reconciler.effects.saved_host import SavedHostPort
    from reconciler.reconcile import World

    @contextmanager
    def connect(host: Host) -> Iterator[SavedHostPort]:
        yield SavedHostPort(host.name, state.hosts.get(host.name))

    return World(
        connect=connect,
        clock=RealClock(),
        engines=members,
        gate=gate.measure,
        holder="nobody",
        new_id=lambda: secrets.token_hex(8),
        hosts_at_once=1,
    )


def runners(settings: Settings) -> Mapping[str, Meter]:
    """Give the operator's other benchmark tools, by name."""
    import os

    from reconciler.effects.runner import Runner, RunnerMeter

    return {
        name: RunnerMeter(Runner(name, r.kind, r.argv, r.timeout_s), dict(os.environ))
        for name, r in settings.runners.items()
    }


def holder(settings: Settings) -> str:
    """Give this installation's name in leases: what the operator chose, else who runs it where; and from which state.

    State directory and machine are part of the name, because the lock that tells its processes apart lies there: another
    machine where the same user has a directory of the same name must never take a living lease over.
    """
    name = settings.holder or f"{getpass.getuser()}@{socket.gethostname()}"
    try:
        machine = MACHINE_ID.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        machine = ""
    place = f"{machine}:{settings.state_dir}"
    return f"{name}/{hashlib.sha256(place.encode()).hexdigest()[:8]}"


@contextmanager
def alone_on(host: str, state_dir: Path) -> Iterator[bool]:
    """Hold this installation's lock on a host while working there; it ends with the process, however that ends.

    Raises:
        StoreError: The state directory cannot be written: then nobody knows who else is at work.
    """
    import fcntl

    from reconciler.core.errors import StoreError, local_trouble

    path = state_dir / "locks" / f"{host}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.open("a")
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be opened {local_trouble(error)}. Nothing was changed"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def connected_host(host: Host, state_dir: Path, ssh_config: str) -> ConnectedHost:
    """Give a host, not yet connected: its inner layer, its outer one if it has one, and its pin."""
    from reconciler.effects.channel import HelperChannel
    from reconciler.effects.host import ConnectedHost
    from reconciler.effects.pins import load_pin

    pin = load_pin(state_dir, host.name)
    inner, outer, used = transports_of(host, state_dir, ssh_config)
    return ConnectedHost(
        name=host.name,
        inner=HelperChannel(
            host.name,
            inner,
            sudo=uses_sudo(host, pin),
            installed=pin.digest if pin is not None else None,
        ),
        outer=HelperChannel(host.name, outer, keep=True) if outer is not None else None,
        pin=pin,
        transports=used,
        vmid=host.proxmox.vmid if host.proxmox is not None else None,
    )


def uses_sudo(host: Host, pin: Pin | None) -> bool:
    """Say whether the helper is run through sudo: as enrolled, else whenever the login is not root's."""
    if pin is not None:
        return pin.sudo
    if host.ssh is None:
        return False
    return (host.ssh.user or getpass.getuser()) != "root"


def transports_of(
    host: Host, state_dir: Path, ssh_config: str
) -> tuple[Transport, Transport | None, tuple[Transport, ...]]:
    """Give the way to the units, the way to the GPUs where that is another, and everything that must be closed."""
    from reconciler.transports.hop import HopTransport, Layer
    from reconciler.transports.local import LocalTransport

    if host.proxmox is None:
        inner: Transport = (
            ssh_transport(host.ssh, state_dir, ssh_config)
            if host.ssh is not None
            else LocalTransport()
        )
        return inner, None, (inner,)
    outer = ssh_transport(host.proxmox.ssh, state_dir, ssh_config)
    if host.ssh is not None:
        inner = ssh_transport(host.ssh, state_dir, ssh_config)
        return inner, outer, (inner, outer)
    return HopTransport(outer, Layer.proxmox(host.proxmox.vmid)), outer, (outer,)


def ssh_transport(ssh: Ssh, state_dir: Path, ssh_config: str) -> SshTransport:
    """Give an SSH connection by the operator's own OpenSSH configuration, with our pins before their known_hosts.

    Raises:
        UsageError: The settings name a configuration that is not there.
    """
    from reconciler.core.errors import UsageError
    from reconciler.effects.pins import known_hosts_path
    from reconciler.transports.host_keys import HostKeys
    from reconciler.transports.ssh import SshTarget, SshTransport

    home = Path.home()
    keys = HostKeys(
        (known_hosts_path(state_dir),),
        (home / ".ssh" / "known_hosts",),
        (Path("/etc/ssh/ssh_known_hosts"),),
    )
    config = Path(ssh_config) if ssh_config else home / ".ssh" / "config"
    if ssh_config and not config.is_file():
        message = f"ssh_config: {ssh_config} is not there, so nobody knows how to reach {ssh.address}; nothing was done"
        raise UsageError(message)
    return SshTransport(
        SshTarget(ssh.address, ssh.user, ssh.port), keys, config if config.exists() else None
    )

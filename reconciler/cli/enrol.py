"""`reconcile enrol HOST`: install the helper, pin who the host is, learn its idle GPUs; or take it all away."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli.context import (
    DEFAULT_SPECS,
    Specs,
    guarded,
    is_terminal,
    load_specs,
    out,
    settings,
)
from reconciler.core.errors import HostIdentityError, UsageError

if TYPE_CHECKING:
    from reconciler.core.spec import Host, Ssh
    from reconciler.settings import Settings


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def enrol(
        host: Annotated[str, typer.Argument(help="A host of the specs.")],
        specs: Specs = DEFAULT_SPECS,
        host_key: Annotated[
            list[str] | None,
            typer.Option(
                "--host-key",
                metavar="SHA256:…",
                help="Accept exactly this key, without asking; repeat it for a Proxmox node.",
            ),
        ] = None,
        remove: Annotated[
            bool, typer.Option("--remove", help="Take the helper and its units away.")
        ] = False,
        purge: Annotated[
            bool,
            typer.Option("--purge", help="With --remove: forget the records on the host as well."),
        ] = False,
    ) -> None:
        """Install (or upgrade) the helper on a host, pin its key and identity, learn what its idle GPUs use.

        As root on the host it does everything; for another user it needs `sudo` once, and says what to run where it may not. Afterwards
        that user may run exactly one command as root, the helper, by one exact line in sudoers.

        Examples:
            reconcile enrol llm-two
            reconcile enrol llm-two --host-key SHA256:0c3f…
            reconcile enrol llm-two --remove
        """
        keys = tuple(host_key or ())
        guarded(lambda: _remove(host, specs, purge=purge) if remove else _enrol(host, specs, keys))


def _host(name: str, specs: Path, setup: Settings) -> Host:
    fleet = load_specs(specs, setup)
    for host in fleet.hosts:
        if host.name == name:
            return host
    message = f"there is no host {name!r} in {specs}; there are: {', '.join(h.name for h in fleet.hosts) or 'none'}"
    raise UsageError(message)


def _enrol(name: str, specs: Path, accepted: tuple[str, ...]) -> int:
    from reconciler.effects.enrol import NeedsRoot
    from reconciler.effects.enrol import enrol as do_enrol
    from reconciler.effects.pins import save_pin
    from reconciler.wiring import connected_host

    setup = settings()
    host = _host(name, specs, setup)
    state_dir = Path(setup.state_dir)
    for ssh in _logins(host):
        pin_key(host.name, ssh, state_dir, accepted, ssh_config=setup.ssh_config)
    connected = connected_host(host, state_dir, setup.ssh_config)
    try:
        done = do_enrol(
            host.name,
            connected.inner,
            connected.outer,
            login=_login(host),
            protect=host.protect,
            state_dir=state_dir,
            at=time.time(),
        )
    finally:
        connected.close()
    if isinstance(done, NeedsRoot):
        _say_needs_root(host, done.program, done.why)
        return 1
    save_pin(state_dir, done.pin)
    out(f"{host.name}: enrolled; helper {done.pin.digest}, machine {done.pin.machine_id[:12]}")
    for uuid, entry in sorted(done.baselines.items()):
        if isinstance(entry, dict):
            out(f"  {uuid}: idle at {entry.get('used_mib')} MiB of {entry.get('total_mib')} MiB")
    for note in done.notes:
        out(f"  note: {note}")
    return 0


def _remove(name: str, specs: Path, *, purge: bool) -> int:
    from reconciler.effects.enrol import unenrol
    from reconciler.effects.pins import forget_pin
    from reconciler.wiring import connected_host

    setup = settings()
    host = _host(name, specs, setup)
    connected = connected_host(host, Path(setup.state_dir), setup.ssh_config)
    try:
        unenrol(host.name, connected.inner, keep_records=not purge)
    finally:
        connected.close()
    forget_pin(Path(setup.state_dir), host.name)
    out(f"{host.name}: the helper and its units are gone; servers run on, unguarded")
    return 0


def _logins(host: Host) -> list[Ssh]:
    return [s for s in (host.ssh, host.proxmox.ssh if host.proxmox else None) if s is not None]


def _login(host: Host) -> str:
    import getpass

    return (host.ssh.user if host.ssh else None) or getpass.getuser()


def pin_key(
    host: str, ssh: Ssh, state_dir: Path, accepted: tuple[str, ...], *, ssh_config: str
) -> None:
    """Pin the host's key: one that is known already, one given by fingerprint, or one that a person confirms.

    Raises:
        HostIdentityError: The key is not the one that is pinned, or nobody confirmed it.
    """
    from reconciler.effects.pins import known_hosts_path
    from reconciler.transports.host_keys import pin
    from reconciler.wiring import ssh_transport

    transport = ssh_transport(ssh, state_dir, ssh_config)
    try:
        seen = transport.scan()
    finally:
        transport.close()
    known = seen.known
    fingerprint = seen.key.fingerprint
    if seen.key in known.revoked:
        raise HostIdentityError(
            host, f"its key {fingerprint} is marked as revoked; nothing was done"
        )
    if (
        seen.key not in known.keys
        and fingerprint not in accepted
        and not _trusted(host, seen.name, str(seen.key), changed=bool(known.keys))
    ):
        what = "is not the one that is pinned" if known.keys else "is not known"
        raise HostIdentityError(
            host,
            f"the key of {seen.name}, {seen.key}, {what}; compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the "
            f"host, then say --host-key {fingerprint}. Nothing was done",
        )
    pin(known_hosts_path(state_dir), seen.name, seen.port, [seen.key])


def _trusted(host: str, name: str, key: str, *, changed: bool) -> bool:
    """Ask a person whether this is the host's key. A changed key is never accepted by a yes alone."""
    if changed or not is_terminal():
        return False
    sys.stderr.write(f"{host}: {name} shows the key {key}. Is it the host's own? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _say_needs_root(host: Host, program: Path, why: str) -> None:
    user = f"{host.ssh.user}@" if host.ssh is not None and host.ssh.user is not None else ""
    address = f"{user}{host.ssh.address}" if host.ssh is not None else host.name
    sys.stderr.write(
        f"reconcile: {host.name}: nothing could be installed there ({why}).\n"
        "Nothing was changed. A person who may become root on it runs these two commands once:\n"
        f"  scp {program} {address}:reconcile-enrol.py\n"
        f"  ssh -t {address} 'sudo /usr/bin/python3 -I -S - < reconcile-enrol.py'\n"
        f"then `reconcile enrol {host.name}` again, to pin it.\n"
    )

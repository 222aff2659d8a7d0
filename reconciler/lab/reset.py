"""Put a lab host back to what it was when it had booted, in tenths of a second instead of a boot.

For tests and rehearsals, which play one case after another on one host. What a case did to the
network or the disk from outside is undone by `faults.heal`, called here first.
"""

from __future__ import annotations

from reconciler.lab.faults import heal
from reconciler.lab.hosts import SCRIPTS, ProxmoxHost, SystemdHost

RESET_DEADLINE_S = 60
"""Ending a dozen units that ignore SIGTERM takes some seconds on a loaded machine."""


def reset(host: SystemdHost | ProxmoxHost) -> tuple[str, ...]:
    """Remove units, processes, mounts, records and faults that came since the first call; say which.

    The first call on a host only takes the picture that later ones restore. Raises `HostError` when
    something cannot be undone: the host must be booted anew then.
    """
    heal(host)
    program = (SCRIPTS / "lab-reset").read_bytes()
    if isinstance(host, ProxmoxHost):
        removed = _run(host, program) + _run(host.outer, program)
    else:
        removed = _run(host, program)
    return tuple(removed)


def _run(host: SystemdHost | ProxmoxHost, program: bytes) -> list[str]:
    command = ["python3", "-I", "-", "lab-reset"]
    return host.check(command, program, deadline_s=RESET_DEADLINE_S).splitlines()

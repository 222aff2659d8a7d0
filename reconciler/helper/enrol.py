"""Installing the helper on a host, and taking it away again.

The texts of the guard's and the tick's units and the sudoers line are here, because the host must be
able to write them without anything but this program. Part of the shipped helper: Python 3.9, standard
library only.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional

from reconciler.helper.guard import learn_baselines
from reconciler.helper.machine import Machine, Refused
from reconciler.helper.observe import (
    HELPER_FILE,
    LAUNCHER_FILE,
    launcher_text,
    need_root,
)
from reconciler.helper.protocol import Act, holders_of_leases
from reconciler.helper.records import (
    LIB,
    PERMANENT,
    RECORD_VERSION,
    RUN,
    STATE,
    UNIT_NAME,
    USER_NAME,
    absolute_path,
    bad,
    encoded,
    helper_command,
    launcher_path,
    matching,
    read_json,
    servers_on,
    sha256_of,
    texts_of,
)

SUDOERS = "/etc/sudoers.d/reconciler"
GUARD_UNIT = "reconciler-guard@.service"
TICK_UNIT = "reconciler-tick.service"
TICK_TIMER = "reconciler-tick.timer"
DIGEST12 = re.compile(r"[0-9a-f]{12}")
PROGRAM_CAP = 2 * 1024 * 1024


def helper_path(digest12: str) -> str:
    """Return where the helper of this digest lies."""
    return f"{LIB}/helper-{digest12}.py"


def guard_unit_text(digest12: str) -> str:
    """Return the unit that each of our units requires.

    A oneshot without RemainAfterExit: it runs again at each start, also at systemd's own restarts, with a
    clean environment that no spec can reach. Its failure leaves the server's unit inactive, not failed
    and not in a loop.
    """
    return (
        "[Unit]\n"
        "Description=May %i.service use its GPUs now? (reconcile)\n"
        "StartLimitIntervalSec=0\n"
        "[Service]\n"
        "Type=oneshot\n"
        f"ExecStart={helper_command(digest12)} guard %i\n"
        "TimeoutStartSec=60s\n"
    )


def tick_unit_text(digest12: str) -> str:
    """Return the unit that the timer starts: it goes back when a rollout's deadline has passed."""
    return (
        "[Unit]\n"
        "Description=Go back where a rollout was left behind (reconcile)\n"
        "StartLimitIntervalSec=0\n"
        "[Service]\n"
        "Type=oneshot\n"
        f"ExecStart={helper_command(digest12)} tick\n"
        "TimeoutStartSec=120s\n"
    )


def tick_timer_text() -> str:
    """Return the timer. A calendar, because an interval is begun anew by each daemon-reload."""
    return (
        "[Unit]\n"
        "Description=Look after rollouts that were left behind (reconcile)\n"
        "[Timer]\n"
        "OnCalendar=*:*:0/15\n"
        "AccuracySec=1s\n"
        f"Unit={TICK_UNIT}\n"
        "[Install]\n"
        "WantedBy=timers.target\n"
    )


def sudoers_text(user: str, digest12: str) -> str:
    """Return the line that lets one user run exactly this helper without arguments of their own."""
    return f"{user} ALL=(root) NOPASSWD: {helper_command(digest12)}\n"


def enrol(act: Act) -> Dict[str, Any]:
    """Install or upgrade the helper, its guard and its tick, and learn what idle GPUs use."""
    machine, args, changes = act.machine, act.args, act.changes
    need_root(machine)
    digest = matching(DIGEST12, args.get("digest12"), "digest12")
    program = program_text(args.get("program"), digest)
    user = args.get("sudo_user")
    if user is not None:
        matching(USER_NAME, user, "sudo_user")
    protect = [protected(p) for p in texts_of(args.get("protect") or [], "protect")]
    changes.write(helper_path(digest), program, 0o644)
    changes.write(launcher_path(digest), launcher_text(digest).encode(), 0o644)
    changes.write(f"{PERMANENT}/{GUARD_UNIT}", guard_unit_text(digest).encode(), 0o644)
    changes.write(f"{PERMANENT}/{TICK_UNIT}", tick_unit_text(digest).encode(), 0o644)
    changes.write(f"{PERMANENT}/{TICK_TIMER}", tick_timer_text().encode(), 0o644)
    if user is not None:
        allow_sudo(act, user, digest)
    host = {
        "version": RECORD_VERSION,
        "helper": digest,
        "enrolled_at": machine.walltime(),
        "protect": protect,
        "sudo_user": user,
    }
    changes.write(f"{STATE}/host.json", encoded(host))
    baselines: Dict[str, Any] = {}
    if args.get("learn") is True:
        baselines = learn_baselines(machine, changes, None)
    changes.reload()
    changes.enable(TICK_TIMER)
    machine.start(TICK_TIMER)
    if not holders_of_leases(machine, servers_on(machine)):
        remove_other_helpers(machine, digest)
    return {
        "digest": digest,
        "baselines": baselines,
        "identity": machine.identity(),
        "gpus": machine.gpus(),
    }


def program_text(value: Any, digest: str) -> bytes:
    """Return the program's bytes if they are what their digest says."""
    if not isinstance(value, str) or len(value) > PROGRAM_CAP:
        raise bad("program is not a text of acceptable size")
    data = value.encode()
    if sha256_of(data)[:12] != digest:
        raise bad("the program does not have the digest that it is said to have")
    return data


def protected(value: str) -> str:
    """Return a unit name or an executable's path that must never be touched."""
    if value.startswith("/"):
        return absolute_path(value, "protected executable")
    return matching(UNIT_NAME, value, "protected unit")


def allow_sudo(act: Act, user: str, digest: str) -> None:
    """Install the sudoers line after sudo's own check of it.

    The scratch name has a dot in it: sudo reads no such file, so a bad line is never in force.
    """
    machine = act.machine
    data = sudoers_text(user, digest).encode()
    scratch = SUDOERS + ".new"
    visudo = machine.stat("/usr/sbin/visudo").get("known") or {}
    if visudo.get("kind") == "file":
        machine.write(scratch, data, 0o440)
        try:
            ran = machine.run_as(None, ["/usr/sbin/visudo", "-cf", scratch], 10.0)
        finally:
            machine.remove(scratch)
        result = ran.get("known") or {}
        if result.get("exit_status") != 0:
            said = str(result.get("stderr") or ran.get("unknown") or "")[-300:]
            raise Refused("SudoersRefused", f"visudo does not accept the line: {said}")
    act.changes.write(SUDOERS, data, 0o440)


def remove_other_helpers(machine: Machine, digest: Optional[str]) -> None:
    """Remove the helpers of other digests; while a lease stands somebody may still be using one."""
    for name in machine.listdir(LIB):
        match = HELPER_FILE.fullmatch(name) or LAUNCHER_FILE.fullmatch(name)
        if match and match.group(1) != digest:
            machine.remove(f"{LIB}/{name}")
    for name in machine.listdir(f"{LIB}/__pycache__"):
        if name.startswith("helper-") and not name.startswith(f"helper-{digest}."):
            machine.remove(f"{LIB}/__pycache__/{name}")


def unenrol(act: Act) -> Dict[str, Any]:
    """Take the helper, its units and its sudoers line away; servers keep running, unguarded.

    Refused while a lease stands, and while a unit requires the guard: without it that unit could not
    start again.
    """
    machine, args, changes = act.machine, act.args, act.changes
    need_root(machine)
    servers = servers_on(machine)
    standing = holders_of_leases(machine, servers)
    if standing:
        raise Refused("LeaseHeld", f"not while a rollout is under way: {', '.join(standing)}")
    needing = units_with_guard(machine)
    if needing:
        raise Refused(
            "GuardNeeded",
            f"{', '.join(needing)} cannot start without the guard; remove these servers first",
            units=needing,
        )
    if machine.kind(f"{PERMANENT}/{TICK_TIMER}") == "file":
        changes.disable(TICK_TIMER)
    for name in (TICK_TIMER, TICK_UNIT, GUARD_UNIT):
        changes.remove(f"{PERMANENT}/{name}", 0o644)
    changes.remove(SUDOERS, 0o440)
    changes.remove(f"{STATE}/host.json")
    changes.reload()
    if "known" in machine.unit(TICK_TIMER):
        machine.stop(TICK_TIMER)
    remove_other_helpers(machine, None)
    if args.get("keep_records", True) is not True:
        for server in servers:
            machine.remove_tree(f"{STATE}/{server}")
        machine.remove(f"{STATE}/baselines.json")
        machine.remove(f"{STATE}/journal.ndjson")
    for name in machine.listdir(f"{RUN}/gpu"):
        machine.remove(f"{RUN}/gpu/{name}")
    return {}


def units_with_guard(machine: Machine) -> List[str]:
    """Return the permanent units of servers on this host that require the guard."""
    found = []
    for server in servers_on(machine):
        bindings = read_json(machine, f"{STATE}/{server}/bindings.json") or {}
        unit = bindings.get("unit")
        if not isinstance(unit, str):
            continue
        text = (
            machine.read(f"{PERMANENT}/{unit}")
            if machine.kind(f"{PERMANENT}/{unit}") == "file"
            else None
        )
        if text is not None and b"reconciler-guard@" in text:
            found.append(unit)
    return found


__all__ = ["enrol", "helper_path", "sudoers_text", "unenrol"]

"""May this server start on its GPUs now? Asked at every start, also at those that systemd makes by itself.

`guard_main` is what `reconciler-guard@UNIT.service` runs; `check_start` is the judgement, also used inline
by `start` for units that do not require our guard, and by the tick before it retries. It fails closed:
whatever is not known refuses (S2, S12). Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from reconciler.helper.machine import Busy, Machine, Reading, Refused
from reconciler.helper.observe import need_root
from reconciler.helper.quarantine import refuse_quarantined
from reconciler.helper.readings import at_baseline, baseline_learnable, classify_holder
from reconciler.helper.records import (
    RECORD_VERSION,
    STATE,
    Changes,
    baselines_on,
    bound_gpus,
    claim_path,
    encoded,
    flag_path,
    known_value,
    read_json,
    read_record,
    record_path,
    refused_path,
    server_of_unit,
    sha256_of,
    state_path,
    unit_name,
)

GUARD_LOCK_WAIT_S = 20.0


def guard_main(machine: Machine, prefix: str, prepare: Callable[[Machine, str, str], None]) -> int:
    """Check one start, write the claims, and return the exit status: 0 lets the unit start.

    `prepare(machine, server, unit)` makes what the unit reads at its start, once nothing stands in the way.
    """
    try:
        unit = unit_name(f"{prefix}.service")
        with machine.lock(GUARD_LOCK_WAIT_S):
            server = server_bound_to(machine, unit)
            # Written first, so that a guard that is killed has refused, and the tick tries again.
            note_guard(machine, server, unit, "the guard did not come to an end")
            try:
                check_start(machine, server, unit)
                write_claims(machine, server, unit)
                prepare(machine, server, unit)
            except Refused as refused:
                note_guard(machine, server, unit, refused.message)
                raise
            note_guard(machine, server, unit, None)
    except (Refused, OSError, Busy) as error:
        machine_says(machine, prefix, why_not(error))
        return 1
    return 0


def server_bound_to(machine: Machine, unit: str) -> str:
    """Return the server that a unit belongs to; the GPUs of any other unit are not known."""
    server = server_of_unit(machine, unit)
    if server is None:
        raise Refused("NotBound", f"no server on this host is bound to {unit}")
    return server


def why_not(error: Exception) -> str:
    """Return the sentence of a refusal or an error."""
    return error.message if isinstance(error, Refused) else str(error)


def machine_says(machine: Machine, prefix: str, why: str) -> None:
    """Print the reason; systemd's journal keeps it beside the unit."""
    print(f"{prefix}.service may not start at {machine.boottime():.1f}: {why}", flush=True)  # noqa: T201  # a unit's only voice


def note_guard(machine: Machine, server: str, unit: str, why: Optional[str]) -> None:
    """Record how the guard decided. The tick retries only a start that this record says was refused."""
    record = {
        "version": RECORD_VERSION,
        "unit": unit,
        "outcome": "allowed" if why is None else "refused",
        "reason": why,
        "boot_id": machine.boot_id(),
        "at": machine.walltime(),
    }
    mark = refused_path(unit)
    try:
        machine.write(record_path(server, "guard"), encoded(record))
    except OSError:
        # A disk that takes no writes refuses the start; what lives in memory lets the tick try again.
        machine.write(mark, encoded(record))
        raise
    if why is None and machine.kind(mark) != "missing":
        machine.remove(mark)


def check_start(machine: Machine, server: str, unit: str) -> None:
    """Raise `Refused` unless nothing stands in the way of starting this server. The caller holds the lock."""
    if machine.kind(flag_path(unit)) != "missing":
        raise Refused("Disarmed", f"{unit} is disarmed by a rollout under way")
    check_intent(machine, server, unit)
    bindings = read_record(machine, server, "bindings")
    check_gpus(machine, server, unit, bindings)


def check_intent(machine: Machine, server: str, unit: str) -> None:
    """Refuse a revision whose rollout was cut off by a reboot: nobody watches it, and nothing proved it."""
    intent = read_record(machine, server, "intent")
    if intent is None or intent.get("boot_id") == machine.boot_id():
        return
    revision = intent.get("revision")
    applied = read_record(machine, server, "applied") or {}
    if not isinstance(revision, str) or applied.get("revision") == revision:
        return
    tried = machine.read(state_path(server, f"revisions/{revision}/unit.service"))
    if tried is not None and tried == loaded_text(machine, unit):
        raise Refused(
            "UnprovenRevision",
            f"{unit} would start revision {revision[:12]}, whose rollout a reboot has cut off",
        )


def loaded_text(machine: Machine, unit: str) -> Optional[bytes]:
    """Return the bytes of the unit file that systemd would start."""
    props = known_value(machine.unit(unit), unit)
    path = props.get("FragmentPath")
    return machine.read(path) if path else None


def check_gpus(
    machine: Machine, server: str, unit: str, bindings: Optional[Dict[str, Any]]
) -> None:
    """Refuse while anybody but housekeeping has one of the server's GPUs open, or its memory is in use."""
    wanted = bound_gpus(bindings)
    if bindings is None:
        raise Refused("NotBound", f"{server} has no bindings on this host")
    if not wanted:
        return
    refuse_quarantined(machine, wanted)
    for uuid in wanted:
        check_claim(machine, uuid, unit)
    gpus = {g["uuid"]: g for g in known_value(machine.gpus(), "what the GPUs say")["gpus"]}
    apps = known_value(machine.apps(), "which processes compute")
    minors = {}
    for uuid in wanted:
        if uuid not in gpus or gpus[uuid].get("minor") is None:
            raise Refused("GpuMissing", f"GPU {uuid} is not there")
        minors[gpus[uuid]["minor"]] = uuid
    check_holders(machine, server, unit, minors, apps)
    baselines = baselines_on(machine)
    for uuid in wanted:
        check_memory(gpus[uuid], baselines.get(uuid))


def check_claim(machine: Machine, uuid: str, unit: str) -> None:
    """Refuse a GPU that another unit has claimed and may still use.

    A claim is judged by the claiming unit's state and job, never by who has the device open: an engine
    opens it about a second after its start.
    """
    claim = read_json(machine, claim_path(uuid))
    if claim is None or claim.get("unit") == unit:
        return
    other = unit_name(claim.get("unit"))
    props = known_value(machine.unit(other), other)
    if props.get("ActiveState") not in ("inactive", "failed") or props.get("Job"):
        raise Refused(
            "GpuClaimed", f"GPU {uuid} is claimed by {other}, which is {props.get('ActiveState')}"
        )


def check_holders(
    machine: Machine, server: str, unit: str, minors: Dict[int, str], apps: List[Dict[str, Any]]
) -> None:
    """Refuse any holder that is not housekeeping; the server's own left-overs count as well (S1)."""
    scan = known_value(machine.holders(), "who holds the GPUs")
    if not scan.get("complete") or scan.get("unreadable"):
        raise Refused("Unknown", f"{scan.get('unreadable')} processes could not be looked into")
    context = holder_context(machine, server, unit, "")
    context["apps_pids"] = sorted(
        a["pid"] for a in apps if a["used_mib"] is None or a["used_mib"] > 0
    )
    for holder in scan["holders"]:
        cls, why = classify_holder(holder, context)
        theirs = set(holder["minors"])
        if cls == "infra" or (theirs and not theirs & set(minors)):
            continue
        where = ", ".join(sorted(minors[m] for m in theirs & set(minors))) or "a control node"
        raise Refused(
            "GpuHeld",
            f"{where} is held by {cls} pid {holder['pid']} ({holder.get('comm')}): {why}",
        )


def check_memory(gpu: Dict[str, Any], baseline: Optional[Dict[str, Any]]) -> None:
    """Refuse a GPU whose memory is above what it uses when idle.

    Without a learned baseline, as after adopting a host that was never idle, the bound is what may be
    learned as idle without asking: no model fits in it.
    """
    used, total = gpu.get("used_mib"), gpu.get("total_mib")
    if not isinstance(used, int) or not isinstance(total, int):
        raise Refused("Unknown", f"GPU {gpu['uuid']} does not say how much memory is in use")
    if baseline is None:
        idle = baseline_learnable(used, total)
    else:
        idle = at_baseline(used, int(baseline["used_mib"]), total)
    if not idle:
        raise Refused(
            "MemoryInUse", f"GPU {gpu['uuid']} still holds {used} MiB, held by nobody we see"
        )


def holder_context(machine: Machine, server: str, unit: str, control_group: str) -> Dict[str, Any]:
    """Return what `classify_holder` needs to know of a server."""
    bindings = read_record(machine, server, "bindings") or {}
    host = read_json(machine, f"{STATE}/host.json") or {}
    runs = read_record(machine, server, "invocations") or {}
    identity = machine.identity().get("known") or {}
    return {
        "server": server,
        "unit": unit,
        "control_group": control_group or None,
        "snapshot": read_record(machine, server, "snapshot"),
        "invocations": runs.get("invocations") or [],
        "uid": bindings.get("uid"),
        "gid": bindings.get("gid"),
        "boot_id": machine.boot_id(),
        "host_mount_ns": machine.mount_namespace(),
        "container": identity.get("container"),
        "protect": host.get("protect") or [],
        "apps_pids": [],
    }


def write_claims(machine: Machine, server: str, unit: str) -> None:
    """Claim the server's GPUs for its unit."""
    for uuid in bound_gpus(read_record(machine, server, "bindings")):
        claim = {
            "version": RECORD_VERSION,
            "unit": unit,
            "server": server,
            "boot_id": machine.boot_id(),
            "at": machine.walltime(),
        }
        machine.write(claim_path(uuid), encoded(claim))


def learn_baselines(
    machine: Machine, changes: Changes, uuids: Optional[List[str]], *, asked: bool = False
) -> Dict[str, Any]:
    """Record what idle GPUs use, for those that nobody holds; return all baselines.

    Only a card without any holder but housekeeping, in a complete scan, and with little memory in use is
    idle. A baseline of the same driver is kept: learning again would let a leak grow into it. Only where a person
    asks for it is it replaced, and then more may be learned; for what is not learned then, a refusal says why.
    """
    need_root(machine)
    state = known_value(machine.gpus(), "what the GPUs say")
    scan = known_value(machine.holders(), "who holds the GPUs")
    apps = known_value(machine.apps(), "which processes compute")
    learned = baselines_on(machine)
    if not scan.get("complete") or scan.get("unreadable"):
        return learned
    host = read_json(machine, f"{STATE}/host.json") or {}
    context = {"boot_id": machine.boot_id(), "protect": host.get("protect") or []}
    busy = {a["gpu_uuid"] for a in apps}
    held = set()
    for holder in scan["holders"]:
        if classify_holder(holder, context)[0] != "infra":
            held.update(holder["minors"])
    for gpu in state["gpus"]:
        uuid, used, total = gpu["uuid"], gpu.get("used_mib"), gpu.get("total_mib")
        if uuids is not None and uuid not in uuids:
            continue
        why = ""
        if uuid in busy or gpu.get("minor") in held or not isinstance(used, int):
            why = "somebody uses it, or it does not say what is in use"
        elif not isinstance(total, int) or not baseline_learnable(used, total, asked=asked):
            why = f"{used} MiB of {total} MiB is more than an idle card may use"
        if why and asked:
            raise Refused("NotIdle", f"GPU {uuid} cannot be learned as idle: {why}")
        old = learned.get(uuid)
        same = old is not None and old.get("driver") == state.get("driver")
        if why or (same and not asked):
            continue
        learned[uuid] = {
            "used_mib": used,
            "total_mib": total,
            "driver": state.get("driver"),
            "mig": gpu.get("mig"),
            "persistence": gpu.get("persistence"),
            "learned_at": machine.walltime(),
            "by": "person" if asked else "idle",
        }
    changes.write(f"{STATE}/baselines.json", encoded(dict(learned, version=RECORD_VERSION)))
    return learned


def same_bytes(data: Optional[bytes], digests: List[str]) -> bool:
    """Say whether a file's bytes are among recorded digests."""
    return data is not None and sha256_of(data) in digests


def phase_reading(reading: Reading, what: str) -> Dict[str, Any]:
    """Return a unit's properties, refusing to act without them."""
    props = known_value(reading, what)
    if not isinstance(props, dict):
        raise Refused("Unknown", f"{what} has no properties")
    return props


__all__ = ["check_start", "guard_main", "holder_context", "learn_baselines", "write_claims"]

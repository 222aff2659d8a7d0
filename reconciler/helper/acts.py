"""The verbs of the helper, one small function each, in one table; `answer` is the way in.

What is common to all mutations (lock, fence, lease, boot, time, intent, journal, answer) is in
`protocol.py`; what only looks is in `observe.py`, what places files in `install.py`. A verb here checks its
own precondition, changes files through `act.changes`, and makes anything that cannot be undone its last
act. Every verb can be done twice (S10). Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from reconciler.helper.consented import reset_named_gpus, restart_one_container
from reconciler.helper.enrol import enrol, unenrol
from reconciler.helper.guard import (
    check_start,
    holder_context,
    learn_baselines,
    phase_reading,
    write_claims,
)
from reconciler.helper.install import (
    check_ours,
    install_unit,
    refuse_links,
    refuse_masked,
    remember_produced,
    remove_files,
    renew_secrets,
    saved_digest,
    set_aside,
)
from reconciler.helper.machine import Machine, Refused
from reconciler.helper.observe import (
    check_flags,
    check_release,
    fetch_local,
    inspect_engine,
    observe_host,
    read_api_key,
    read_content,
    read_journal_lines,
)
from reconciler.helper.protocol import (
    CLAIM,
    FENCED,
    HOST,
    LEASE_TTL_CAP_S,
    READ,
    Act,
    current_fence,
    mutate,
    raise_fence,
    refusal,
    reply,
    write_lease,
)
from reconciler.helper.quarantine import (
    last_releases,
    note_release,
    quarantine_gpus,
    show_evidence,
)
from reconciler.helper.readings import classify_holder, is_mps, unit_phase
from reconciler.helper.records import (
    GPU_ID,
    INVOCATION,
    PERMANENT,
    RECORD_VERSION,
    REVISION_ID,
    STATE,
    TRIAL,
    WIRE_FORMAT,
    bad,
    bound_gpus,
    drop_in_path,
    encoded,
    flag_path,
    io_words,
    known_value,
    lease_path,
    living_lease,
    matching,
    number_of,
    read_json,
    record_of,
    record_path,
    refused_path,
    sealed_path,
    server_of_unit,
    state_path,
    text_of,
    texts_of,
    unit_name,
    whole_of,
)
from reconciler.helper.retire import retire_server

HISTORY_KEPT = 200
INVOCATIONS_KEPT = 20
REJECTED_KEPT = 50
GOOD_KEPT = 5  # Revisions that once passed and can be gone back to; the promise is at least three.
SNAPSHOT_CAP = 4096
SIGNALS = {"TERM": 15, "KILL": 9}
MPS_REFUSAL = "refused: MPS serves its GPU"


def answer(request: Dict[str, Any], machine: Machine, program: Optional[str]) -> Dict[str, Any]:
    """Do what a request asks, and return the answer. Nothing is raised for what a request can cause.

    `program` is the path of the installed helper, or None when it came over the wire: then it may only
    look, enrol, or take itself away.
    """
    if request.get("format") != WIRE_FORMAT:
        return refusal(request, machine, bad(f"this helper speaks format {WIRE_FORMAT}"))
    name = request.get("verb")
    entry = VERBS.get(name) if isinstance(name, str) else None
    if entry is None:
        return refusal(request, machine, bad(f"there is no verb {str(name)[:40]!r}"))
    kind, verb = entry
    if kind != READ:
        if program is None and kind != HOST:
            why = "the helper is not installed here; enrol the host first"
            return refusal(request, machine, Refused("NotInstalled", why))
        return mutate(request, machine, verb, kind)
    try:
        data = verb(machine, record_of(request.get("args"), "args"))
    except Refused as refused:
        return refusal(request, machine, refused)
    except OSError as error:
        return reply(request, machine, "failed", {}, ("OSError", io_words(error)))
    return reply(request, machine, "done", data)


# -- lease and records -------------------------------------------------------------------------------


def claim_lease(act: Act) -> Dict[str, Any]:
    """Take, renew or give back the lease on a server."""
    machine, args = act.machine, act.args
    ttl_s = number_of(args.get("ttl_s"), "ttl_s", 0, LEASE_TTL_CAP_S)
    if act.request.get("fence") is not None:
        return renew(act, ttl_s)
    holder = text_of(args.get("holder"), "holder")
    if not 1 <= len(holder) <= 200:
        raise bad("holder is empty or too long")
    lease = living_lease(machine, act.server)
    if lease is not None:
        mine = lease.get("holder") == holder and args.get("takeover") is True
        if not mine:
            left = lease["expires_boottime"] - machine.boottime()
            raise Refused(
                "LeaseHeld",
                f"{act.server} is being changed by {lease.get('holder')} for at most {left:.0f} s",
                holder=lease.get("holder"),
                expires_in_s=left,
            )
    return raise_fence(act, holder, ttl_s)


def renew(act: Act, ttl_s: float) -> Dict[str, Any]:
    """Give the current lease a new end, or give it back with `ttl_s` 0."""
    machine = act.machine
    fence = current_fence(act.request, machine, act.server)
    lease = living_lease(machine, act.server)
    if ttl_s == 0:
        act.changes.remove(lease_path(act.server))
        return {"fence": None, "boot_id": machine.boot_id(), "boottime": machine.boottime()}
    if lease is None:
        raise Refused("LeaseExpired", f"the lease on {act.server} has run out; claim it again")
    deadline = act.record("deadline")
    if deadline is not None and deadline.get("boot_id") == machine.boot_id():
        due = machine.boottime() + ttl_s + float(deadline.get("grace_s", 0))
        if due > float(deadline["due_boottime"]):
            act.changes.put_record(act.server, "deadline", dict(deadline, due_boottime=due))
    return write_lease(act, fence, ttl_s)


def write_record(act: Act) -> Dict[str, Any]:
    """Write or remove one of the records that the controller keeps on the host."""
    name, content = act.args.get("name"), act.args.get("content")
    if content is not None and not isinstance(content, dict):
        raise bad("content is neither an object nor null")
    if not isinstance(name, str):
        raise bad("name is not a text")
    if name == "history":
        return append_history(act, record_of(content, "content"))
    if name == "bindings":
        return bind(act, record_of(content, "content"))
    if name.startswith("revisions/") and name.endswith("/gate"):
        revision = matching(REVISION_ID, name[len("revisions/") : -len("/gate")], "revision")
        kept = f"revisions/{revision}/gate"
        act.changes.put_record(act.server, kept, {"gate": record_of(content, "content")})
        return {}
    if name.startswith("rejected/"):
        matching(REVISION_ID, name[len("rejected/") :], "revision")
        forget_rejections(act)
    elif name not in ("attempted", "hold", "intent", "protect", "request", "handled"):
        raise bad(f"there is no record {name[:80]!r} to write")
    if content is None:
        act.changes.drop_record(act.server, name)
        return {}
    if name == "intent":
        content = dict(content, boot_id=act.machine.boot_id(), at=act.machine.walltime())
    act.changes.put_record(act.server, name, content)
    return {}


def append_history(act: Act, entry: Dict[str, Any]) -> Dict[str, Any]:
    """Append one finished rollout; the newest HISTORY_KEPT stay."""
    path = state_path(act.server, "history.ndjson")
    lines = (act.machine.read(path) or b"").splitlines()
    line = encoded(dict(entry, version=RECORD_VERSION, at=act.machine.walltime()))
    kept = [*lines, line][-HISTORY_KEPT:]
    act.changes.write(path, b"\n".join(kept) + b"\n")
    return {}


def forget_rejections(act: Act) -> None:
    """Keep the number of remembered rejections bounded, whichever they are: retrying is safe, a full disk is not."""
    names = act.machine.listdir(state_path(act.server, "rejected"))
    for name in names[: max(0, len(names) - REJECTED_KEPT)]:
        act.changes.remove(state_path(act.server, f"rejected/{name}"))


def bind(act: Act, content: Dict[str, Any]) -> Dict[str, Any]:
    """Bind a server to its unit and GPUs on this host."""
    unit = unit_name(content.get("unit"))
    if not isinstance(content.get("gpus"), list):
        raise bad("gpus is not a list")
    uuids = bound_gpus(content)
    if content.get("gid") is not None:
        whole_of(content["gid"], "gid", 1, 2**31)
    other = server_of_unit(act.machine, unit)
    if other not in (None, act.server):
        raise Refused("UnitBound", f"{unit} belongs to {other} on this host", server=other)
    host = read_json(act.machine, f"{STATE}/host.json") or {}
    if unit in (host.get("protect") or []):
        raise Refused("Protected", f"{unit} is on this host's list of what is never touched")
    old = act.record("bindings")
    if old is not None and act.args.get("rebind") is not True:
        was = (old.get("unit"), sorted(bound_gpus(old)))
        if was != (unit, sorted(uuids)):
            raise Refused(
                "BindingChanged",
                f"{act.server} is bound to {was[0]} on {', '.join(was[1]) or 'no GPU'}",
                unit=was[0],
                gpus=was[1],
            )
    if content.get("gid") is not None:
        # systemd starts no unit with a supplementary group that has no entry.
        act.machine.ensure_group(content["gid"])
    act.changes.put_record(act.server, "bindings", content)
    return {}


def learn_idle(act: Act) -> Dict[str, Any]:
    """Learn what this server's idle GPUs use, for those without a baseline of this driver."""
    bindings = act.record("bindings")
    return {"baselines": learn_baselines(act.machine, act.changes, bound_gpus(bindings))}


def relearn_idle(act: Act) -> Dict[str, Any]:
    """Learn anew what idle GPUs use, because a person says that what is used now is their floor."""
    uuids = [matching(GPU_ID, u, "GPU UUID") for u in texts_of(act.args.get("gpus"), "gpus")]
    return {"baselines": learn_baselines(act.machine, act.changes, uuids, asked=True)}


# -- disarm, stop, signal ----------------------------------------------------------------------------


def disarm_unit(act: Act) -> Dict[str, Any]:
    """Make the unit stay down once it is stopped, and record what runs and until when it may stay so."""
    machine, args, changes = act.machine, act.args, act.changes
    unit = act.bound_unit()
    stop_s = number_of(args.get("stop_timeout_s"), "stop_timeout_s", 1, 86400)
    after_s = number_of(args.get("deadline_s"), "deadline_s", 1, 7 * 86400)
    grace_s = number_of(args.get("grace_s"), "grace_s", 0, 86400)
    props = phase_reading(machine.unit(unit), unit)
    refuse_masked(props, unit)
    refuse_links(machine, unit)
    act.before = state_of(props)
    set_deadline(act, unit, props, after_s, grace_s)
    take_snapshot(act, unit, props)
    flag = f"{act.server}\n".encode()
    changes.write(flag_path(unit), flag)
    changes.write(drop_in_path(unit), disarm_text(unit, stop_s).encode(), 0o644)
    changes.reload()
    now = phase_reading(machine.unit(unit), unit)
    want_us = round(stop_s * 1_000_000)
    effective = (
        now.get("Restart") == "no"
        and now.get("TimeoutStopUSec") == want_us
        and drop_in_path(unit) in (now.get("DropInPaths") or [])
    )
    absent = now.get("LoadState") == "not-found" and now.get("ActiveState") in (
        "inactive",
        "failed",
    )
    if not effective and not absent:
        raise Refused(
            "NotEffective",
            f"{unit} still has Restart={now.get('Restart')} and a stop timeout of "
            f"{now.get('TimeoutStopUSec')} us: another drop-in wins; ours was taken away again",
            restart=now.get("Restart"),
            timeout_stop_us=now.get("TimeoutStopUSec"),
            drop_ins=now.get("DropInPaths"),
        )
    act.after = state_of(now)
    return {
        "restart": now.get("Restart"),
        "timeout_stop_us": now.get("TimeoutStopUSec"),
        "invocation": now.get("InvocationID") or "",
        "main_pid": now.get("MainPID"),
    }


def disarm_text(unit: str, stop_s: float) -> str:
    """Return the drop-in that keeps a unit down: no restart, our stop timeout, and no start but ours."""
    return (
        "# Written by reconcile for the time of a rollout.\n"
        f"[Unit]\nConditionPathExists=!{flag_path(unit)}\n"
        f"[Service]\nRestart=no\nTimeoutStopSec={round(stop_s * 1_000_000)}us\n"
    )


def set_deadline(
    act: Act, unit: str, props: Dict[str, Any], after_s: float, grace_s: float
) -> None:
    """Record when the host goes back by itself. Whether the unit ran stays what the first disarm saw."""
    machine = act.machine
    old = act.record("deadline")
    applied = act.record("applied") or {}
    was_up = unit_phase(props) in ("running", "starting", "looping", "stopping")
    act.changes.put_record(
        act.server,
        "deadline",
        {
            "unit": unit,
            "boot_id": machine.boot_id(),
            "due_boottime": machine.boottime() + after_s,
            "grace_s": grace_s,
            "revision": applied.get("revision"),
            "was_up": was_up if old is None else bool(old.get("was_up")),
        },
    )


def take_snapshot(act: Act, unit: str, props: Dict[str, Any]) -> None:
    """Record the unit's processes, beside those recorded earlier in this rollout: they stay ours."""
    machine = act.machine
    group = props.get("ControlGroup") or ""
    found = known_value(machine.processes(group), "the unit's processes") if group else []
    old = act.record("snapshot") or {}
    kept = old.get("processes", []) if old.get("boot_id") == machine.boot_id() else []
    seen = {(p["pid"], p["start_ticks"]) for p in found}
    both = [p for p in kept if (p["pid"], p["start_ticks"]) not in seen]
    both += [
        {key: p.get(key) for key in ("pid", "start_ticks", "uid", "exe", "comm")} for p in found
    ]
    snapshot = {
        "unit": unit,
        "boot_id": machine.boot_id(),
        "invocation": props.get("InvocationID") or old.get("invocation") or "",
        "control_group": group or old.get("control_group") or "",
        "processes": both[-SNAPSHOT_CAP:],
    }
    act.changes.put_record(act.server, "snapshot", snapshot)
    remember_invocation(act, props, found)


def remember_invocation(act: Act, props: Dict[str, Any], processes: List[Dict[str, Any]]) -> None:
    """Record one run of the unit: what an escaped process of it can later be recognised by."""
    invocation, main = props.get("InvocationID"), props.get("MainPID")
    process = next((p for p in processes if p["pid"] == main), None)
    if not invocation or process is None:
        return
    record = act.record("invocations") or {}
    runs = [r for r in record.get("invocations") or [] if r.get("invocation") != invocation]
    runs.append(
        {
            "invocation": invocation,
            "boot_id": act.machine.boot_id(),
            "main_pid": main,
            "main_start_ticks": process["start_ticks"],
            "uid": process["uid"],
            "gid": process["gid"],
            "mount_ns": process["mount_ns"],
            "cgroup": props.get("ControlGroup"),
        }
    )
    act.changes.put_record(act.server, "invocations", {"invocations": runs[-INVOCATIONS_KEPT:]})


def stop_unit(act: Act) -> Dict[str, Any]:
    """Queue the stop of one run of the unit; done at once when it is down."""
    machine = act.machine
    unit = act.bound_unit()
    asked = act.args.get("invocation")
    props = phase_reading(machine.unit(unit), unit)
    phase = unit_phase(props)
    act.before = state_of(props)
    if phase in ("down", "not-found"):
        return {"stopping": False}
    if phase == "running" and props.get("InvocationID") != asked:
        raise Refused(
            "InvocationChanged",
            f"{unit} runs under another invocation than the one to stop",
            invocation=props.get("InvocationID"),
        )
    group = props.get("ControlGroup") or ""
    if group:
        remember_invocation(act, props, machine.processes(group).get("known") or [])
    machine.stop(unit)
    return {"stopping": True}


def signal_left_overs(act: Act) -> Dict[str, Any]:
    """Signal left-overs that are proven to be the server's own, one by one or as its control group (S3)."""
    machine, args = act.machine, act.args
    unit = act.bound_unit()
    name = args.get("signal")
    if name not in SIGNALS:
        raise bad("signal is neither TERM nor KILL")
    number = SIGNALS[name]
    targets = []
    for target in args.get("targets") or []:
        asked = record_of(target, "target")
        pid = whole_of(asked.get("pid"), "pid", 2, 2**31)
        targets.append((pid, whole_of(asked.get("start_ticks"), "start_ticks", 0, 2**63)))
    props = phase_reading(machine.unit(unit), unit)
    phase = unit_phase(props)
    if phase in ("running", "starting", "looping"):
        raise Refused("UnitActive", f"{unit} is {phase}: what runs in it is no left-over")
    act.before = state_of(props)
    group = left_over_group(act, unit, props)
    results = signal_owned(act, unit, group, targets, number)
    data: Dict[str, Any] = {"results": results}
    if args.get("group") is True:
        held_back = any(r["result"] == MPS_REFUSAL for r in results)
        data["group"] = MPS_REFUSAL if held_back else kill_left_over_group(act, phase, group, name)
    act.after = dict(data, signal=name)
    return data


def left_over_group(act: Act, unit: str, props: Dict[str, Any]) -> str:
    """Return the unit's control group, also after systemd has forgotten it."""
    snapshot = act.record("snapshot") or {}
    group = props.get("ControlGroup") or ""
    if not group and snapshot.get("boot_id") == act.machine.boot_id():
        group = snapshot.get("control_group") or ""
    return group if group.endswith(f"/{unit}") else ""


def signal_owned(
    act: Act, unit: str, group: str, targets: List[Tuple[int, int]], number: int
) -> List[Dict[str, Any]]:
    """Classify each target afresh and signal those that are owned at this instant."""
    machine = act.machine
    if not targets:
        return []
    scan = known_value(machine.holders(), "who holds the GPUs")
    inside = known_value(machine.processes(group), "the unit's processes") if group else []
    present = {(p["pid"], p["start_ticks"]): p for p in [*scan["holders"], *inside]}
    context = holder_context(machine, act.server, unit, group)
    served = {minor for h in scan["holders"] if is_mps(h) for minor in h["minors"]}
    results = []
    for pid, start_ticks in targets:
        process = present.get((pid, start_ticks))
        if process is None:
            results.append({"pid": pid, "result": "gone"})
            continue
        cls, why = classify_holder(process, context)
        if served & set(process.get("minors") or ()):
            # Ending a client with work in flight can leave the MPS server and its other clients undefined.
            result = MPS_REFUSAL
        elif cls == "owned":
            result = machine.signal(pid, start_ticks, number)
        else:
            result = f"refused: {cls}: {why}"
        results.append({"pid": pid, "result": result})
    return results


def kill_left_over_group(act: Act, phase: str, group: str, name: str) -> str:
    """Kill what is left in the control group of a unit that is down."""
    if name != "KILL" or phase not in ("down", "not-found"):
        return "refused: only KILL, and only when the unit is down"
    if not group:
        return "gone"
    if not known_value(act.machine.processes(group), "the unit's processes"):
        return "gone"
    return act.machine.kill_group(group)


# -- start ------------------------------------------------------------------------------------------


def start_unit(act: Act) -> Dict[str, Any]:
    """Queue the unit's start; a no-op when it runs already under another invocation than the previous."""
    machine = act.machine
    unit = act.bound_unit()
    previous = act.args.get("previous_invocation")
    if previous not in (None, ""):
        matching(INVOCATION, previous, "previous_invocation")
    props = phase_reading(machine.unit(unit), unit)
    phase = unit_phase(props)
    act.before = state_of(props)
    invocation = props.get("InvocationID") or ""
    if phase in ("running", "starting") and props.get("ActiveState") != "inactive":
        if invocation and invocation != (previous or ""):
            act.changes.remove(flag_path(unit))
            return {"started": False, "invocation": invocation}
        raise Refused("StillActive", f"{unit} still runs under the previous invocation")
    if phase not in ("down", "starting"):
        raise Refused("NotDown", f"{unit} is {phase}; it cannot be started now")
    act.changes.remove(flag_path(unit))
    if f"reconciler-guard@{unit[: -len('.service')]}.service" not in (props.get("Requires") or []):
        try:
            check_start(machine, act.server, unit)
        except Refused as refused:
            raise Refused("GuardRefused", refused.message, why=refused.reason) from refused
        write_claims(machine, act.server, unit)
    # Always: starts that we ask for count towards systemd's start limit as well, and the start of a
    # rollback would be refused exactly when it is needed (F54).
    machine.reset_failed(unit)
    renew_secrets(act, unit)
    machine.start(unit)
    return {"started": True, "invocation": invocation}


# -- deadline, commit, settle ------------------------------------------------------------------------


def move_deadline(act: Act) -> Dict[str, Any]:
    """Set or take away the moment at which the host goes back by itself."""
    after_s = act.args.get("after_s")
    if after_s is None:
        act.changes.drop_record(act.server, "deadline")
        return {"due_boottime": None}
    number_of(after_s, "after_s", 1, 7 * 86400)
    grace_s = number_of(act.args.get("grace_s"), "grace_s", 0, 86400)
    bindings = act.record("bindings")
    if bindings is None:
        raise Refused("NotBound", f"{act.server} has no bindings on this host; record them first")
    unit = str(bindings["unit"])
    set_deadline(act, unit, phase_reading(act.machine.unit(unit), unit), after_s, grace_s)
    return {"due_boottime": act.machine.boottime() + after_s}


def commit_revision(act: Act) -> Dict[str, Any]:
    """Make what runs the server's applied revision, in one transaction whose commit point is `applied.json`.

    Until that record is written, all that is undone is what was written before; from then on a repeat,
    or the tick, only finishes the clearing away.
    """
    machine, args, changes = act.machine, act.args, act.changes
    unit = act.bound_unit()
    revision = matching(REVISION_ID, args.get("revision"), "revision")
    invocation = matching(INVOCATION, args.get("invocation"), "invocation")
    data = text_of(args.get("text"), "text").encode()
    content = record_of(args.get("applied"), "applied")
    props = phase_reading(machine.unit(unit), unit)
    refuse_masked(props, unit)
    refuse_links(machine, unit)
    if unit_phase(props) != "running" or props.get("InvocationID") != invocation:
        raise Refused(
            "InvocationChanged",
            f"{unit} is {unit_phase(props)} under another invocation than the one that passed",
            invocation=props.get("InvocationID"),
        )
    if machine.read(props.get("FragmentPath") or "/nonexistent") != data:
        raise Refused("EffectiveDiffers", f"{unit} does not run from the text to be committed")
    old = act.record("applied") or {}
    act.before = {"revision": old.get("revision"), "invocation": old.get("invocation")}
    permanent = f"{PERMANENT}/{unit}"
    check_ours(act, unit, permanent, data, saved_digest(args))
    if args.get("gate") is not None:
        gate = {"gate": record_of(args["gate"], "gate")}
        changes.put_record(act.server, f"revisions/{revision}/gate", gate)
    remember_produced(act, data)
    changes.write(permanent, data, 0o644)
    changes.enable(unit)
    group = props.get("ControlGroup") or ""
    remember_invocation(act, props, machine.processes(group).get("known") or [] if group else [])
    good = [old.get("revision"), *(old.get("good") or [])]
    applied = dict(
        content,
        revision=revision,
        invocation=invocation,
        boot_id=machine.boot_id(),
        at=machine.walltime(),
        good=[g for i, g in enumerate(good) if g and g != revision and g not in good[:i]][
            :GOOD_KEPT
        ],
    )
    changes.put_record(act.server, "applied", applied)
    arm_again(act, unit)
    now = phase_reading(machine.unit(unit), unit)
    if now.get("FragmentPath") != permanent or now.get("InvocationID") != invocation:
        raise Refused(
            "EffectiveDiffers",
            f"systemd uses {now.get('FragmentPath')} for {unit}; the commit was put back",
            fragment=now.get("FragmentPath"),
        )
    drop_rollout(act)
    forget_revisions(act, applied)
    act.after = {"revision": revision, "invocation": invocation}
    return {"applied": dict(applied, version=RECORD_VERSION)}


def arm_again(act: Act, unit: str, *, keep_trial: bool = False) -> None:
    """Take away what a rollout keeps in force in systemd: trial, disarming drop-in and flag."""
    changes = act.changes
    trial = f"{TRIAL}/{unit}"
    if act.machine.kind(trial) == "file" and not keep_trial:
        changes.remove(trial, 0o644)
    changes.remove(drop_in_path(unit), 0o644)
    changes.remove(flag_path(unit))
    changes.reload()


def drop_rollout(act: Act, *, keep_intent: bool = False) -> None:
    """Take away the records of a rollout that has ended; the deadline last, so that a cut is looked after."""
    for name in ("intent", "snapshot", "revert", "deadline"):
        if name != "intent" or not keep_intent:
            act.changes.drop_record(act.server, name)


def forget_revisions(act: Act, applied: Dict[str, Any]) -> None:
    """Keep the content of the applied, the attempted and the last good revisions; forget the others."""
    machine = act.machine
    attempted = act.record("attempted") or {}
    kept = {applied["revision"], attempted.get("revision"), *applied["good"]}
    folder = state_path(act.server, "revisions")
    for name in machine.listdir(folder):
        if REVISION_ID.fullmatch(name) and name not in kept:
            machine.remove_tree(f"{folder}/{name}")
    forget_sealed(act, [name for name in machine.listdir(folder) if name in kept])


def forget_sealed(act: Act, revisions: List[str]) -> None:
    """Forget the secrets that none of these revisions names."""
    machine = act.machine
    records = [
        machine.read(record_path(act.server, f"revisions/{name}/server")) or b""
        for name in revisions
    ]
    for digest in machine.listdir(state_path(act.server, "sealed")):
        if not any(digest.encode() in record for record in records):
            machine.remove(sealed_path(act.server, digest))


def settle(act: Act) -> Dict[str, Any]:
    """End a rollout without a commit; what ran was never proven, or nothing is to run.

    `what`: "stopped" (down, and not started at boot), "undone" (the trial is taken away, whatever runs runs
    on), "kept" (the trial stays until a reboot), "held" (as kept, and the intent stays, to be gone on with).
    """
    unit = act.bound_unit()
    what = act.args.get("what")
    if what not in ("stopped", "undone", "kept", "held"):
        raise bad("what is none of stopped, undone, kept, held")
    props = phase_reading(act.machine.unit(unit), unit)
    act.before = state_of(props)
    if what == "stopped":
        if unit_phase(props) not in ("down", "not-found"):
            raise Refused("UnitActive", f"{unit} is {unit_phase(props)}")
        if act.machine.kind(f"{PERMANENT}/{unit}") == "file":
            act.changes.disable(unit)
        act.changes.remove(refused_path(unit))
    owed = what == "undone" and unit_phase(props) == "down" and is_wanted(act, props)
    if owed:
        # It ran before this rollout and could not be brought back: the tick starts it once its GPUs are free (L9).
        mark = {"version": RECORD_VERSION, "unit": unit, "outcome": "refused", "reason": "owed"}
        act.changes.write(refused_path(unit), encoded(mark))
    arm_again(act, unit, keep_trial=what in ("kept", "held"))
    drop_rollout(act, keep_intent=what == "held")
    if owed and props.get("ActiveState") == "failed":
        act.machine.reset_failed(unit)
    return {}


def is_wanted(act: Act, props: Dict[str, Any]) -> bool:
    """Say whether a unit should run when no rollout has a say: it ran before this one, or starts at boot."""
    deadline = act.record("deadline") or {}
    return deadline.get("was_up") is True or props.get("UnitFileState") == "enabled"


def state_of(props: Dict[str, Any]) -> Dict[str, Any]:
    """Return a unit's state in short, for the journal."""
    return {
        "state": f"{props.get('ActiveState')}/{props.get('SubState')}",
        "invocation": props.get("InvocationID") or "",
        "main_pid": props.get("MainPID"),
    }


VERBS: Dict[str, Tuple[str, Callable[..., Dict[str, Any]]]] = {
    "observe": (READ, observe_host),
    "fetch": (READ, fetch_local),
    "api-key": (READ, read_api_key),
    "journal": (READ, read_journal_lines),
    "read-record": (READ, read_content),
    "check-flags": (READ, check_flags),
    "inspect": (READ, inspect_engine),
    "release-check": (READ, check_release),
    "evidence": (READ, show_evidence),
    "releases": (READ, last_releases),
    "claim": (CLAIM, claim_lease),
    "record": (FENCED, write_record),
    "learn": (FENCED, learn_idle),
    "disarm": (FENCED, disarm_unit),
    "stop": (FENCED, stop_unit),
    "signal": (FENCED, signal_left_overs),
    "install": (FENCED, install_unit),
    "set-aside": (FENCED, set_aside),
    "remove": (FENCED, remove_files),
    "start": (FENCED, start_unit),
    "deadline": (FENCED, move_deadline),
    "commit": (FENCED, commit_revision),
    "settle": (FENCED, settle),
    "retire": (FENCED, retire_server),
    "quarantine": (FENCED, quarantine_gpus),
    "note-release": (HOST, note_release),
    "relearn": (HOST, relearn_idle),
    "restart-container": (HOST, restart_one_container),
    "reset-gpu": (HOST, reset_named_gpus),
    "enrol": (HOST, enrol),
    "unenrol": (HOST, unenrol),
}
"""Each verb with its kind: what a request must bring before it is let through (`protocol.py`)."""

__all__ = ["VERBS", "answer"]

"""The host's own way back, when a rollout was left behind: the verb `tick`, run by a timer every 15 s.

A rollout records a deadline before it disarms anything; the controller's renewals move it on. When it has
passed and no lease stands, the tick takes the server over (its fence is higher than the lost
controller's) and goes back to the permanent unit: stop, prove the GPUs released, trial and disarming
away, start. Each step looks at what is there, so a tick that was cut off is continued by the next.
It also retries a start that the guard refused. Part of the shipped helper: Python 3.9, standard library
only.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from reconciler.helper.acts import (
    MPS_REFUSAL,
    append_history,
    arm_again,
    drop_rollout,
    kill_left_over_group,
    left_over_group,
    remember_invocation,
    signal_owned,
    take_snapshot,
)
from reconciler.helper.guard import check_start, holder_context, learn_baselines, phase_reading
from reconciler.helper.install import renew_secrets
from reconciler.helper.machine import Busy, Machine, Refused
from reconciler.helper.observe import produced_by, release_sample
from reconciler.helper.protocol import HOST_REVERT, Act, append_journal, raise_fence
from reconciler.helper.quarantine import lift_proven
from reconciler.helper.readings import released, unit_phase
from reconciler.helper.records import (
    PERMANENT,
    REVISION_ID,
    TRIAL,
    baselines_on,
    bound_gpus,
    lease_path,
    living_lease,
    read_record,
    refused_path,
    servers_on,
    sha256_of,
    state_path,
    unit_name,
)

TICK_BUDGET_S = 10.0  # The timer comes again after 15 s; the lock is free in between.
REVERT_LEASE_S = 45.0  # Three ticks: a controller that comes back waits for no more than that.
KEEP_OUT_S = 120.0  # How long an unfinished revert keeps controllers out between two ticks.
POLL_S = 0.5
SETTLE_S = 2.0
TERM_AFTER_S = 20.0  # Left-overs first get the time that a driver takes to close.
KILL_AFTER_S = 40.0
UP = ("running", "starting", "looping")


def tick_main(machine: Machine) -> int:
    """Look after every server on this host once; return the exit status."""
    began = machine.boottime()
    status = 0
    try:
        lift_proven(machine)
    except (Refused, OSError) as error:
        print(f"quarantine: {error}", flush=True)  # noqa: T201  # a unit's only voice is its output
        status = 1
    for server in servers_on(machine):
        left = TICK_BUDGET_S - (machine.boottime() - began)
        try:
            tick_server(machine, server, max(left, 1.0))
        except Busy:
            continue  # Somebody acts on this host right now; the next tick looks again.
        except (Refused, OSError) as error:
            print(f"{server}: {error}", flush=True)  # noqa: T201  # a unit's only voice is its output
            status = 1
    return status


def tick_server(machine: Machine, server: str, budget_s: float) -> None:
    """Revert a server whose deadline has passed, or retry a start that the guard refused."""
    until = machine.boottime() + budget_s
    while True:
        with machine.lock(0):
            if not revert_due(machine, server):
                retry_start(machine, server)
                return
            act = Act(machine, server, {})
            try:
                finished = revert_step(act)
            except (Refused, OSError):
                # Nothing is put back here: each step is right by itself, and the next tick goes on.
                give_lease_back(act)
                raise
            if finished:
                return
            if machine.boottime() >= until:
                step_aside(act)
                return
        machine.sleep(POLL_S)


def revert_due(machine: Machine, server: str) -> bool:
    """Say whether the host must go back by itself now. The caller holds the lock."""
    deadline = read_record(machine, server, "deadline")
    if deadline is None:
        return False
    lease = living_lease(machine, server)
    if lease is not None:
        return bool(lease.get("holder") == HOST_REVERT)
    now = machine.boottime()
    if deadline.get("boot_id") == machine.boot_id():
        return now > float(deadline["due_boottime"])
    return now > float(deadline["grace_s"])


def revert_step(act: Act) -> bool:
    """Take the next step back; return whether the revert is finished."""
    machine = act.machine
    deadline = act.record("deadline") or {}
    unit = unit_name(deadline.get("unit"))
    state = take_over(act, unit, deadline)
    props = phase_reading(machine.unit(unit), unit)
    phase = unit_phase(props)
    applied = act.record("applied")
    if phase == "unknown":
        raise Refused("Unknown", f"{unit} is {props.get('ActiveState')}/{props.get('SubState')}")
    if committed(act, applied, props):
        # The commit had been reached; only its clearing away was cut off.
        arm_again(act, unit)
        drop_rollout(act)
        give_lease_back(act)
        return True
    if state.get("started") or never_left(act, unit, props, phase, applied):
        finish(act, unit, deadline, state, phase)
        return True
    if phase not in ("down", "not-found"):
        stop_again(act, unit, props, phase, state)
        return False
    if not released_again(act, unit, props, state):
        return False
    go_back(act, unit, applied)
    finish(act, unit, deadline, state, phase)
    return True


def take_over(act: Act, unit: str, deadline: Dict[str, Any]) -> Dict[str, Any]:
    """Raise the fence so that the lost controller's late effects are refused, and hold a lease of our own."""
    machine, server = act.machine, act.server
    lease = living_lease(machine, server)
    state = act.record("revert")
    fence = act.record("fence") or {}
    if lease is None:
        raise_fence(act, HOST_REVERT, REVERT_LEASE_S)
    ours = fence.get("holder") == HOST_REVERT
    if not ours or state is None or state.get("boot_id") != machine.boot_id():
        props = phase_reading(machine.unit(unit), unit)
        attempted = act.record("attempted") or {}
        state = {
            "unit": unit,
            "boot_id": machine.boot_id(),
            "began_boottime": machine.boottime(),
            "attempted": attempted.get("revision"),
            "other_boot": deadline.get("boot_id") != machine.boot_id(),
            "found": f"{props.get('ActiveState')}/{props.get('SubState')}",
            "tried": machine.kind(f"{TRIAL}/{unit}") != "missing",
            "invocation": props.get("InvocationID") or "",
            "result": props.get("Result"),
            "started": False,
            "stopped_boottime": None,
            "samples": [],
        }
        note(act, state)
        journal_step(act, "began", {"found": state["found"]})
    return state


def note(act: Act, state: Dict[str, Any]) -> None:
    """Keep how far the revert has come."""
    act.changes.put_record(act.server, "revert", state)


def step_aside(act: Act) -> None:
    """Let a controller in after a while: what blocks the way back may be something that it can cure."""
    state = act.record("revert") or {}
    if act.machine.boottime() - float(state.get("began_boottime", 0)) > KEEP_OUT_S:
        give_lease_back(act)


def journal_step(act: Act, outcome: str, after: Dict[str, Any]) -> None:
    """Write one step of the revert into the journal."""
    fence = act.record("fence") or {}
    append_journal(
        act.machine,
        act.server,
        {
            "verb": "revert",
            "server": act.server,
            "holder": HOST_REVERT,
            "epoch": fence.get("epoch", 0),
            "revision": str((act.record("attempted") or {}).get("revision") or ""),
            "outcome": outcome,
            "after": after,
        },
    )


def committed(act: Act, applied: Optional[Dict[str, Any]], props: Dict[str, Any]) -> bool:
    """Say whether what runs is the applied revision in the very process that was committed."""
    return (
        applied is not None
        and applied.get("boot_id") == act.machine.boot_id()
        and bool(props.get("InvocationID"))
        and applied.get("invocation") == props.get("InvocationID")
        and unit_phase(props) == "running"
        and loads_applied(act, props, applied)
    )


def loads_applied(act: Act, props: Dict[str, Any], applied: Dict[str, Any]) -> bool:
    """Say whether the loaded unit file has the applied revision's bytes."""
    path = props.get("FragmentPath")
    return path is not None and act.machine.read(path) == applied_text(act, applied)


def applied_text(act: Act, applied: Optional[Dict[str, Any]]) -> Optional[bytes]:
    """Return the recorded unit text of the applied revision, None where there is none."""
    revision = (applied or {}).get("revision")
    if not isinstance(revision, str) or REVISION_ID.fullmatch(revision) is None:
        return None
    return act.machine.read(state_path(act.server, f"revisions/{revision}/unit.service"))


def never_left(
    act: Act, unit: str, props: Dict[str, Any], phase: str, applied: Optional[Dict[str, Any]]
) -> bool:
    """Say whether the permanent unit is running already: then nothing that serves is stopped.

    So it is when the controller was lost before it stopped anything, and after a reboot, which has
    started the permanent unit by itself.
    """
    if phase not in UP or act.machine.kind(f"{TRIAL}/{unit}") != "missing":
        return False
    if props.get("FragmentPath") != f"{PERMANENT}/{unit}":
        return False
    return applied is None or loads_applied(act, props, applied)


def stop_again(
    act: Act, unit: str, props: Dict[str, Any], phase: str, state: Dict[str, Any]
) -> None:
    """Queue the stop of what the rollout left running, once."""
    if state.get("stopped_boottime") is not None and phase == "stopping":
        return
    take_snapshot(act, unit, props)
    group = props.get("ControlGroup") or ""
    if group:
        remember_invocation(act, props, act.machine.processes(group).get("known") or [])
    journal_step(act, "stopping", {"phase": phase, "invocation": props.get("InvocationID")})
    act.machine.stop(unit)
    state["stopped_boottime"] = act.machine.boottime()
    note(act, state)


def released_again(act: Act, unit: str, props: Dict[str, Any], state: Dict[str, Any]) -> bool:
    """Take one sample and say whether the GPUs are proven free; signal own left-overs that stay."""
    machine = act.machine
    uuids = bound_gpus(act.record("bindings"))
    group = left_over_group(act, unit, props)
    if not uuids:
        inside = machine.processes(group) if group else {"known": []}
        if "known" in inside and not inside["known"]:
            return True
    context = holder_context(machine, act.server, unit, group)
    since = state.get("down_boottime")
    if since is None:
        since = state["down_boottime"] = machine.boottime()
        state["cursor"] = (machine.kernel_log(None).get("known") or {}).get("cursor")
    sample = release_sample(machine, unit, state.get("cursor"))
    samples = [*state.get("samples", []), sample][-8:]
    if any(uuid not in baselines_on(machine) for uuid in uuids):
        learn_baselines(machine, act.changes, uuids)
    judged = released(samples, uuids, baselines_on(machine), context, SETTLE_S)
    state.update(samples=samples, verdict=judged["verdict"], reasons=judged["reasons"][:10])
    done: bool = judged["verdict"] == "released"
    if not done:
        press(act, unit, group, judged["holders"], state)
    note(act, state)
    return done


def press(
    act: Act,
    unit: str,
    group: str,
    holders: List[Dict[str, Any]],
    state: Dict[str, Any],
) -> None:
    """Signal own left-overs: TERM after a while, KILL after another. Anybody else's are left alone."""
    waited_s = act.machine.boottime() - float(state["down_boottime"])
    rung = 0 if waited_s < TERM_AFTER_S else 1 if waited_s < KILL_AFTER_S else 2
    if rung == 0 or state.get("rung") == rung:
        return
    inside = act.machine.processes(group).get("known") or [] if group else []
    owned = [h for h in holders if h["class"] == "owned"]
    targets = sorted({(p["pid"], p["start_ticks"]) for p in [*owned, *inside]})
    number = 15 if rung == 1 else 9
    results = signal_owned(act, unit, group, targets, number)
    mps = any(r["result"] == MPS_REFUSAL for r in results)
    if rung == 2 and inside and not mps:
        results.append({"group": kill_left_over_group(act, "down", group, "KILL")})
    state["rung"] = rung
    journal_step(act, "signalled", {"signal": number, "results": results})


def go_back(act: Act, unit: str, applied: Optional[Dict[str, Any]]) -> None:
    """Make the permanent unit the applied revision's again, and start it if it ran or should run."""
    machine, changes = act.machine, act.changes
    permanent = f"{PERMANENT}/{unit}"
    trial = f"{TRIAL}/{unit}"
    if machine.kind(trial) == "file":
        changes.remove(trial, 0o644)
    good = applied_text(act, applied)
    if good is not None and machine.kind(permanent) in ("file", "missing"):
        present = machine.read(permanent)
        ours = present is None or sha256_of(present) in produced_by(machine, act.server)
        # A commit that was cut off before its record has put the new text there already.
        if present != good and ours:
            changes.write(permanent, good, 0o644)
            changes.enable(unit)
    changes.reload()


def finish(
    act: Act, unit: str, deadline: Dict[str, Any], state: Dict[str, Any], phase: str
) -> None:
    """Arm the unit again, start it where there is something good to start, and write what happened."""
    machine, server = act.machine, act.server
    was_running = phase in UP and not state.get("started")
    applied = act.record("applied")
    attempted = state.get("attempted")
    hopeless = machine.kind(f"{PERMANENT}/{unit}") != "file"
    arm_again(act, unit)
    now = phase_reading(machine.unit(unit), unit)
    wanted = bool(deadline.get("was_up")) or now.get("UnitFileState") == "enabled"
    starting = not was_running and not hopeless and wanted
    ran = now.get("InvocationID") or ""
    tried_once = state.get("started") and ran != state.get("started_after")
    if starting and not tried_once and unit_phase(now) == "down":
        # Noted first: a tick that dies right after the start must not take it for something to stop.
        state.update(started=True, started_after=ran)
        note(act, state)
        if now.get("ActiveState") == "failed":
            machine.reset_failed(unit)
        renew_secrets(act, unit)
        machine.start(unit)
    good = (applied or {}).get("revision")
    named = isinstance(attempted, str) and REVISION_ID.fullmatch(attempted) is not None
    if state.get("tried") and named and attempted != good:
        act.changes.put_record(
            server, f"rejected/{attempted}", rejection(state, machine.walltime())
        )
    ending = (
        "hopeless" if hopeless else "kept" if was_running else "started" if starting else "stopped"
    )
    append_history(
        act,
        {
            "outcome": "Failed" if hopeless else "RolledBack",
            "reason": "NothingToReturnTo" if hopeless else "HostReverted",
            "by": HOST_REVERT,
            "revision": attempted or "",
            "previous": "" if hopeless else good or "",
            "took_s": machine.boottime() - float(state["began_boottime"]),
            "stopped": not (starting or was_running),
            "sentence": story(unit, ending, other_boot=bool(state.get("other_boot"))),
        },
    )
    journal_step(act, "finished", {"started": starting, "hopeless": hopeless})
    drop_rollout(act)
    give_lease_back(act)


def rejection(state: Dict[str, Any], at: float) -> Dict[str, Any]:
    """Return why the attempted revision was left: definite only when it had died by itself (S22)."""
    died = (
        str(state.get("found", "")).split("/")[0] == "failed" and state.get("result") != "success"
    )
    return {
        "reason": "HostReverted",
        "sentence": "no controller came back before the rollout's deadline",
        "at": at,
        "by": HOST_REVERT,
        "definite": died and not state.get("other_boot"),
        "found": state.get("found"),
        "result": state.get("result"),
    }


def story(unit: str, ending: str, *, other_boot: bool) -> str:
    """Return what the host did, in a sentence."""
    why = "the host had rebooted" if other_boot else "no controller came back in time"
    did = {
        "hopeless": "was stopped and stays down: there is no earlier revision to return to",
        "kept": "still ran from its permanent unit and was left running",
        "started": "was returned to its permanent unit and started",
        "stopped": "was returned to its permanent unit and left stopped, as it was before",
    }
    return f"{why}; {unit} {did[ending]}"


def give_lease_back(act: Act) -> None:
    """End our own lease, so that a controller can claim at once."""
    act.changes.remove(lease_path(act.server))


def retry_start(machine: Machine, server: str) -> None:
    """Start a unit again that the guard has refused, once nothing stands in its way any more.

    A mark says the same where the guard was never asked: a rollout that failed both ways left the server down.
    """
    guard = read_record(machine, server, "guard") or {}
    bindings = read_record(machine, server, "bindings") or {}
    unit = unit_name(bindings.get("unit"))
    marked = machine.kind(refused_path(unit)) != "missing"
    if not marked and read_record(machine, server, "applied") is None:
        return
    if living_lease(machine, server) is not None:
        return
    if any(read_record(machine, server, name) is not None for name in ("intent", "hold")):
        return
    props = phase_reading(machine.unit(unit), unit)
    if unit_phase(props) != "down" or (props.get("UnitFileState") != "enabled" and not marked):
        return
    if props.get("ActiveState") != "inactive":
        return
    # An enabled unit that was never active in this boot was not stopped by a person: its start failed.
    never_up = props.get("ActiveEnterTimestampMonotonic") == 0
    if guard.get("outcome") != "refused" and not marked and not never_up:
        return
    try:
        check_start(machine, server, unit)
    except Refused:
        return
    if marked:
        machine.remove(refused_path(unit))  # Owed once: what a person stops later stays down.
    machine.start(unit)


__all__ = ["revert_due", "tick_main"]

"""How one recorded output of a host program is read: a verdict and the facts in it; pure.

`read_recorded` serves `reconcile read KIND`: a person (or a test) brings what a program printed and sees what
this product would take it for. It stands on the same parsers as the live reading, and adds those for programs
that only people run (fuser, lsof, pct, rocm-smi). It is not shipped to hosts.

Verdicts: `good` (the facts hold), `unknown` (no evidence either way: fails closed), `fault` (trusted evidence
that something is broken), `refused` (it did not run, may not run there, or is off limits).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from reconciler.helper.outputs import (
    APP_FIELDS,
    GPU_FIELDS,
    cgroup_owner,
    in_control_group,
    process_is_dead,
    read_amd_memory,
    read_amd_processes,
    read_apps,
    read_cgroup,
    read_jobs,
    read_journal,
    read_proc_stat,
    read_proc_status,
    read_show,
    read_smi_table,
    read_timespan,
    read_xid_lines,
)
from reconciler.helper.readings import (
    at_baseline,
    baseline_tolerance_mib,
    unit_phase,
)

Facts = dict[str, Any]
Judged = dict[str, Any]  # {"verdict": …, "facts": …}: it is printed as it is.


def read_recorded(
    kind: str, exit_status: int, stdout: str, stderr: str, context: Mapping[str, Any]
) -> Judged:
    """Read one output of a kind of program: {"verdict", "facts"}.

    Args:
        kind: one of `KINDS`; KeyError for any other.
        exit_status: as seen by the caller; -1 for a channel that closed without one.
        stdout: what it printed.
        stderr: what it complained about.
        context: what must be known to judge it: `expected_uuids`, `baseline_mib`, `euid`, `command` and so on.
    """
    return KINDS[kind](exit_status, stdout, stderr, context)


def _judged(verdict: str, **facts: Any) -> Judged:
    return {"verdict": verdict, "facts": facts}


def _did_not_run(exit_status: int, stderr: str) -> bool:
    return exit_status in (126, 127) or "command not found" in stderr


# -- nvidia-smi ------------------------------------------------------------------------------------

# What was asked where nobody says: the columns tell these apart, and the first that fits every row counts.
_LAYOUTS: Final[tuple[tuple[str, ...], ...]] = (
    ("index", "uuid", "memory.used", "memory.total"),
    ("index", "uuid", "memory.used", "temperature.gpu", "utilization.gpu"),
    ("index", "uuid", "memory.used", "memory.total", "display_active"),
    GPU_FIELDS,
    ("uuid", "gpu_recovery_action"),
)


def _smi_fields(stdout: str, context: Mapping[str, Any]) -> Sequence[str]:
    asked = re.search(r"--query-gpu=(\S+)", str(context.get("command") or ""))
    if asked:
        return asked.group(1).split(",")
    first = (stdout.splitlines() or [""])[0]
    header = [cell.split(" [")[0] for cell in first.split(", ")]
    if {"uuid", "memory.used"} <= set(header):
        return header
    fits = (
        fields
        for fields in _LAYOUTS
        if (table := read_smi_table(0, stdout, fields))["rows"] and not table["bad_lines"]
    )
    return next(fits, _LAYOUTS[0])


def _smi_gpu(exit_status: int, stdout: str, _stderr: str, context: Mapping[str, Any]) -> Judged:
    fields = _smi_fields(stdout, context)
    table = read_smi_table(exit_status, stdout, fields)
    if table["field_unsupported"]:
        return _judged("unknown", field_unsupported=table["field_unsupported"])
    if "gpu_recovery_action" in fields:
        return _smi_recovery(table)
    facts = _smi_memory_facts(table, stdout, context)
    return {"verdict": _smi_verdict(table, facts), "facts": facts}


def _smi_recovery(table: Mapping[str, Any]) -> Judged:
    actions = {row["uuid"]: row["gpu_recovery_action"] for row in table["rows"]}
    if table["error"] or None in actions.values():
        return _judged("unknown", recovery=actions)
    blocked = any(action != "None" for action in actions.values())
    return _judged("fault" if blocked else "good", recovery=actions)


def _smi_memory_facts(table: Mapping[str, Any], stdout: str, context: Mapping[str, Any]) -> Facts:
    rows = {row["uuid"]: row for row in table["rows"]}
    expected = context.get("expected_uuids") or []
    facts: Facts = {
        "used_mib": {uuid: row.get("memory.used") for uuid, row in rows.items()},
        "missing": [uuid for uuid in expected if uuid not in rows],
        "lost": [uuid for uuid, row in rows.items() if row["fault"] == "lost"],
        "reset_required": [u for u, row in rows.items() if row["fault"] == "reset_required"],
        "bad_bus_ids": table["bad_bus_ids"],
        "warnings": len(table["warnings"]),
        "error": table["error"],
        "needs": "reboot" if "Reboot the system" in stdout else None,
    }
    facts["at_baseline"] = _idle(facts, rows, expected, context)
    targets = context.get("target")
    facts["target_at_baseline"] = _idle(facts, rows, targets, context) if targets else None
    return facts


def _idle(
    facts: Facts,
    rows: Mapping[str, Mapping[str, Any]],
    uuids: Sequence[str],
    context: Mapping[str, Any],
) -> bool | None:
    """Say whether all these cards are at their idle use; None when that is not known of one."""
    if facts["reset_required"]:
        return False
    if facts["error"] or facts["missing"] or facts["lost"] or not uuids:
        return None
    baselines = context.get("baseline_mib") or {}
    idle = []
    for uuid in uuids:
        row = rows[uuid]
        if uuid not in baselines or row.get("memory.used") is None:
            return None
        idle.append(at_baseline(row["memory.used"], baselines[uuid], row.get("memory.total") or 0))
    return all(idle)


def _smi_verdict(table: Mapping[str, Any], facts: Facts) -> str:
    if table["error"] == "container_lost_gpu":
        return "refused"
    if table["fault"] or facts["lost"] or facts["reset_required"]:
        return "fault"
    if table["error"]:
        return "unknown"
    if facts["missing"]:
        return "fault"
    return "unknown" if None in facts["used_mib"].values() else "good"


def _smi_list(exit_status: int, stdout: str, _stderr: str, _context: Mapping[str, Any]) -> Judged:
    gpus = re.findall(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)$", stdout, re.MULTILINE)
    mig = re.findall(r"^ +MIG .*\(UUID: (MIG-[0-9a-fA-F-]+)\)$", stdout, re.MULTILINE)
    whole = exit_status == 0 and len(gpus) + len(mig) == len(stdout.splitlines())
    return _judged(
        "good" if whole and gpus else "unknown", gpus=gpus, mig_devices=mig, mig_enabled=bool(mig)
    )


def _smi_apps(exit_status: int, stdout: str, _stderr: str, context: Mapping[str, Any]) -> Judged:
    reading = read_apps(exit_status, stdout)
    if "known" not in reading:
        fault = read_smi_table(exit_status, stdout, APP_FIELDS)["fault"]
        return _judged("fault" if fault else "unknown", apps=None)
    apps = [
        {"uuid": app["gpu_uuid"], **{key: app[key] for key in ("pid", "used_mib", "name")}}
        for app in reading["known"]
    ]
    hidden = any(app["used_mib"] is None or app["name"] is None for app in apps)
    proves = not apps and context.get("pid_namespace") == "host" and _context_idle(context)
    blind = not apps and not proves
    return _judged(
        "unknown" if hidden or blind else "good",
        apps=apps,
        pids=sorted({app["pid"] for app in apps}),
        pid_visible=all(app["name"] is not None for app in apps),
        mps=any("nvidia-cuda-mps-server" in (app["name"] or "") for app in apps),
        supports_release=proves,
    )


def _context_idle(context: Mapping[str, Any]) -> bool:
    used, idle = context.get("used_mib") or {}, context.get("baseline_mib") or {}
    return bool(used) and all(
        uuid in idle and used[uuid] <= idle[uuid] + baseline_tolerance_mib(0) for uuid in used
    )


def _gpu_reset(exit_status: int, stdout: str, _stderr: str, _context: Mapping[str, Any]) -> Judged:
    if exit_status == 0 and "was successfully reset" in stdout:
        return _judged("good", reset_done=True, blocked_by=None)
    if "In use by another client" in stdout:
        return _judged("refused", reset_done=False, blocked_by="client")
    if exit_status == 3 or "is the primary GPU" in stdout or "not supported" in stdout.lower():
        return _judged("refused", reset_done=False, blocked_by="unsupported")
    return _judged("unknown", reset_done=None, blocked_by=None)


# -- fuser, lsof, own scan -------------------------------------------------------------------------


def _fuser(exit_status: int, stdout: str, stderr: str, context: Mapping[str, Any]) -> Judged:
    if _did_not_run(exit_status, stderr):
        return _judged("refused", pids=None, supports_release=False)
    if "USER" in stdout and "ACCESS" in stdout:
        return _fuser_table(stdout, context)
    pids = sorted({int(word) for word in stdout.split() if word.isdigit()})
    missing = re.findall(r"Specified filename (\S+) does not exist", stderr)
    unread = sorted({int(pid) for pid in re.findall(r"Cannot stat file /proc/(\d+)/", stderr)})
    # Nobody, not root, no such node and not allowed to look all print nothing and exit 1.
    looked = context.get("euid") == 0 and bool(context.get("nodes_exist"))
    blind = bool(missing or unread) or (not pids and not looked)
    return _judged(
        "unknown" if blind else "good",
        pids=pids,
        missing_nodes=[name for name in missing if "*" not in name],
        unreadable_pids=unread,
        supports_release=not pids and not blind,
    )


def _fuser_table(stdout: str, context: Mapping[str, Any]) -> Judged:
    holders: dict[int, dict[str, Any]] = {}
    commands: dict[int, str] = {}
    row = re.compile(r"(?:\A|.*?\s)(\d+|kernel) ([.cefFrm]{5}|mount) (.*)\Z")
    for line in stdout.splitlines()[1:]:
        found = row.match(line)
        if not found:
            return _judged("unknown", holders=None, pids=None)
        if found.group(1) == "kernel":
            continue  # The node is a bind mount; no process.
        pid, letters = int(found.group(1)), found.group(2)
        one = holders.setdefault(pid, {"pid": pid, "access": "", "mmap": False})
        one["access"] = "".join(sorted({*one["access"], *letters} - {".", "m"}))
        one["mmap"] = one["mmap"] or "m" in letters
        commands[pid] = found.group(3)
    infra = context.get("infra") or []
    # The kernel cuts a name at 15 characters.
    others = [
        pid for pid in sorted(commands) if not any(commands[pid] == name[:15] for name in infra)
    ]
    return _judged(
        "good",
        holders=list(holders.values()),
        pids=sorted(holders),
        non_infra=others,
        supports_release=not others and _context_idle(context),
    )


def _lsof(exit_status: int, stdout: str, stderr: str, _context: Mapping[str, Any]) -> Judged:
    if _did_not_run(exit_status, stderr):
        return _judged("refused", pids=None)
    words = stdout.split()
    whole = exit_status == 0 and bool(words) and all(word.isdigit() for word in words)
    return _judged(
        "good" if whole else "unknown", pids=sorted({int(w) for w in words if w.isdigit()})
    )


def _fd_scan(_exit: int, stdout: str, _stderr: str, context: Mapping[str, Any]) -> Judged:
    rows = re.findall(r"^(\d+) \d+ \d+ \d+:\d+ .*$", stdout, re.MULTILINE)
    unread = re.search(r"^UNREADABLE (\d+)$", stdout, re.MULTILINE)
    pids = sorted({int(pid) for pid in rows})
    seen = set(context.get("fuser_pids") or pids)
    whole = unread is not None and unread.group(1) == "0"
    return _judged(
        "good" if whole else "unknown",
        pids=pids,
        missed_by_fuser=[pid for pid in pids if pid not in seen],
    )


# -- /proc ---------------------------------------------------------------------------------------------


def _proc_stat(_exit: int, stdout: str, _stderr: str, _context: Mapping[str, Any]) -> Judged:
    reading = read_proc_stat(stdout)
    if "known" not in reading:
        return _judged("unknown")
    stat = reading["known"]
    dead = process_is_dead(stat["state"], stat["threads"])
    code = stat["exit_code"]
    return _judged(
        "fault" if stat["state"] == "D" else "good",
        pid=stat["pid"],
        comm=stat["comm"],
        state=stat["state"],
        ppid=stat["ppid"],
        num_threads=stat["threads"],
        starttime=stat["start_ticks"],
        dead=dead,
        can_hold_gpu=not dead,
        killable=stat["state"] != "D",
        exit_signal=code & 0x7F if code is not None else None,
    )


def _proc_stack(_exit: int, stdout: str, _stderr: str, context: Mapping[str, Any]) -> Judged:
    frames = re.findall(r"^\[<\w+>\] (\w+)\+\S+(?: \[(\w+)\])?$", stdout, re.MULTILINE)
    pid = re.search(r"/proc/(\d+)/", str(context.get("command") or ""))
    modules = [module for _, module in frames if module]
    where = modules[0] if modules else frames[0][0] if frames else None
    stuck = bool(context.get("sigkill_sent")) and where is not None
    return _judged(
        "fault" if stuck else "good" if frames else "unknown",
        pid=int(pid.group(1)) if pid else None,
        unkillable=stuck,
        where=where,
    )


def _proc_status(_exit: int, stdout: str, _stderr: str, _context: Mapping[str, Any]) -> Judged:
    reading = read_proc_status(stdout)
    if "known" not in reading or not reading["known"]["nspid"]:
        return _judged("unknown")
    status = reading["known"]
    return _judged(
        "good",
        host_pid=status["tgid"],
        container_pid=status["nspid"][-1],
        state=status["state"],
        kill_pending=status["kill_pending"],
    )


def _proc_cgroup(_exit: int, stdout: str, _stderr: str, context: Mapping[str, Any]) -> Judged:
    reading = read_cgroup(stdout)
    if "known" not in reading:
        return _judged("unknown")
    owner = cgroup_owner(reading["known"])
    group = context.get("control_group")
    ours = in_control_group(reading["known"], group) if group else None
    if ours is None and owner["owner"] not in ("unit", "lxc-unit"):
        ours = False
    return _judged("good", **owner, ours=ours)


# -- systemd -------------------------------------------------------------------------------------------

# systemd.exec(5): what systemd itself exits with when it cannot set a process up.
_SYSTEMD_EXITS: Final[Mapping[int, str]] = {
    200: "CHDIR",
    202: "FDS",
    203: "EXEC",
    216: "GROUP",
    217: "USER",
    218: "CAPABILITIES",
    226: "NAMESPACE",
    228: "SECCOMP",
    238: "STATE_DIRECTORY",
}
_LOAD_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "masked": ("refused", "masked"),
    "bad-setting": ("fault", "bad_unit_file"),
    "error": ("fault", "bad_unit_file"),
}
_PHASE_WORDS: Final[Mapping[str, str]] = {"looping": "auto_restart", "not-found": "absent"}


def _systemd_show(exit_status: int, stdout: str, stderr: str, context: Mapping[str, Any]) -> Judged:
    if exit_status != 0:
        bus = "Failed to connect to bus" in stderr or "has not been booted with systemd" in stderr
        return _judged("refused" if bus else "unknown", state=None)
    values = read_show(stdout)
    if "ExecStart" in values or "ActiveState" not in values:
        # A newline in an argument makes a line that looks like a property: only the first one may count.
        first = re.match(r"MainPID=(\d+)$", stdout, re.MULTILINE)
        return _judged(
            "unknown", main_pid=int(first.group(1)) if first else None, argv_trustworthy=False
        )
    if missing := _show_gaps(values):
        return _judged("unknown", state=None, missing=missing)
    props: Facts = {**values, "Job": int(values["Job"] or 0)}
    phase = unit_phase(props)
    verdict, state = _LOAD_STATES.get(props["LoadState"], ("good", _PHASE_WORDS.get(phase, phase)))
    if state == "down":
        state = props["ActiveState"]
    if state in ("failed", "bad_unit_file", "masked", "absent", "inactive") and phase == "unknown":
        verdict = "unknown"
    return {"verdict": verdict, "facts": _unit_facts(props, state, context)}


_SHOW_TEXTS: Final = [
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "FragmentPath",
    "TimeoutStopUSec",
    "NeedDaemonReload",
]
_SHOW_NUMBERS: Final = [
    "Job",
    "ExecMainCode",
    "ExecMainStatus",
    "NRestarts",
    "StartLimitBurst",
    "MainPID",
    "ControlPID",
]


def _show_gaps(values: Mapping[str, str]) -> list[str]:
    """Name what an answer lacks that was cut short: unknown properties are left out by systemctl without a word."""
    numbers = [
        key for key in _SHOW_NUMBERS if not re.fullmatch(r"\d{1,18}", values.get(key) or "0")
    ]
    return [key for key in (*_SHOW_TEXTS, *_SHOW_NUMBERS) if key not in values] + numbers


def _unit_facts(props: Mapping[str, Any], state: str, context: Mapping[str, Any]) -> Facts:
    result, code = props["Result"], int(props["ExecMainCode"])
    status, restarts = int(props["ExecMainStatus"]), int(props["NRestarts"])
    limit_hit = result == "start-limit-hit" or (
        state == "failed" and restarts > 0 and restarts >= int(props["StartLimitBurst"])
    )
    span = read_timespan(props["TimeoutStopUSec"]).get("known")
    own = status if code == 1 and 200 <= status <= 243 else None
    leftovers = context.get("cgroup_procs") or []
    return {
        "state": state,
        "exists": props["LoadState"] != "not-found" or props["ActiveState"] != "inactive",
        "unit_file": props["FragmentPath"] or None,
        "can_start": props["LoadState"] == "loaded" and not limit_hit,
        "restart_loop": state == "auto_restart" or limit_hit,
        "start_limit": limit_hit,
        "main_pid": int(props["MainPID"]) or None,
        "control_pid": int(props["ControlPID"]) or None,
        "job": props["Job"] or None,
        "timeout_stop_s": span // 10**6 if span is not None else None,
        "last_exit": status if code == 1 else None,
        "signal": status if code in (2, 3) else None,
        "killed_by_stop_timeout": result == "timeout" and code == 2 and status == 9,
        "clean_stop": state == "inactive" and result == "success",
        "oom": result == "oom-kill",
        "systemd_exit": _SYSTEMD_EXITS.get(own, str(own)) if own else None,
        "model_server_ran": own is None and code != 0,
        "need_daemon_reload": props["NeedDaemonReload"] == "yes",
        "leftovers": leftovers,
        "released": False if leftovers else None,
    }


def _systemd_jobs(
    exit_status: int, stdout: str, _stderr: str, context: Mapping[str, Any]
) -> Judged:
    reading = read_jobs(stdout)
    if exit_status != 0 or "known" not in reading:
        return _judged("unknown", jobs=None)
    jobs = reading["known"]
    replaced = context.get("our_job") == "stop" and any(job["type"] != "stop" for job in jobs)
    return _judged("good", jobs=jobs, our_stop_cancelled=replaced)


def _journal(_exit: int, stdout: str, _stderr: str, _context: Mapping[str, Any]) -> Judged:
    reading = read_journal(stdout)
    if "known" not in reading:
        return _judged("unknown")
    messages = [entry["message"] for entry in reading["known"]]
    text = "\n".join(messages)
    left = re.findall(r"Unit process (\d+) \(.*\) remains running after unit stopped", text)
    left += re.findall(r"Found left-over process (\d+) \(", text)
    killed = "State 'stop-sigterm' timed out. Killing." in text
    return _judged(
        "good",
        killed_by_stop_timeout=killed,
        left_running=sorted({int(pid) for pid in left}),
    )


# -- Proxmox and transport -----------------------------------------------------------------------------


def _pct_status(exit_status: int, stdout: str, stderr: str, _context: Mapping[str, Any]) -> Judged:
    if "does not exist" in stderr and "Configuration file" in stderr:
        return _judged("refused", status=None, exists=False)
    values = dict(re.findall(r"^(\w+): (.*)$", stdout, re.MULTILINE))
    status = values.get("status")
    if exit_status != 0 or status is None:
        return _judged("refused", status=None, exists=None)
    pid = values.get("pid", "")
    return _judged(
        "refused"
        if "lock" in values
        else "good"
        if status in ("running", "stopped")
        else "unknown",
        status=status,
        exists=True,
        lock=values.get("lock"),
        init_pid=int(pid) if pid.isdigit() else None,
    )


def _transport(exit_status: int, stdout: str, stderr: str, context: Mapping[str, Any]) -> Judged:
    """Read a framed answer: only what stands between this call's two markers counts.

    No begin marker means that it never ran, whatever the exit code: sudo, pct, ssh and a missing
    program all use codes that a real answer can have.
    """
    nonce = re.escape(context.get("nonce", "")) or r"\S+"
    begin = re.search(rf"^@@begin {nonce}\n", stdout, re.MULTILINE)
    end = re.search(rf"^@@end {nonce} (\d+)$", stdout, re.MULTILINE)
    if not begin:
        fate = "refused" if stderr.strip() else "unknown"
        return _judged(fate, ran=False, completed=False)
    if not end or exit_status < 0:
        return _judged("unknown", ran=True, completed=False)
    return _judged(
        "good",
        ran=True,
        completed=True,
        payload=stdout[begin.end() : end.start()],
        exit=int(end.group(1)),
    )


# -- kernel log ----------------------------------------------------------------------------------------

_ACTIONS: Final = (
    ("host", "reboot_host"),
    ("fabric", "fabric_workflow"),
    ("reset", "reset_gpu"),
    ("unknown", "reset_gpu"),
    ("app", "restart_app"),
)


def _kernel_log(exit_status: int, stdout: str, stderr: str, _context: Mapping[str, Any]) -> Judged:
    if stderr.strip() or (exit_status != 0 and not stdout):
        return _judged("unknown", xids=None, action=None)
    events = read_xid_lines(stdout.splitlines())["known"]
    classes = {xid["class"] for xid in events["xids"]}
    action = next((word for name, word in _ACTIONS if name in classes), None)
    said = [xid["recovery"] for xid in events["xids"] if xid["recovery"]]
    blocking = bool(classes & {"host", "fabric", "reset", "unknown"}) or events["unbind"]
    return _judged(
        "fault" if blocking else "good",
        xids=events["xids"],
        action=action,
        recovery=said[-1] if said else None,
        unbind_in_progress=events["unbind"],
    )


# -- AMD -----------------------------------------------------------------------------------------------


def _amd_process(
    exit_status: int, stdout: str, _stderr: str, _context: Mapping[str, Any]
) -> Judged:
    reading = read_amd_processes(stdout)
    if exit_status != 0 or "known" not in reading:
        return _judged("unknown", apps=None)
    return _judged("good", **reading["known"])


def _amd_metric(exit_status: int, stdout: str, _stderr: str, context: Mapping[str, Any]) -> Judged:
    reading = read_amd_memory(stdout)
    if exit_status != 0 or "known" not in reading:
        return _judged("unknown", used_mb=None)
    used = {gpu: card["used_mb"] for gpu, card in reading["known"].items()}
    if None in used.values():
        return _judged("unknown", used_mb=used)
    idle = context.get("baseline_mib") or {}
    above = [
        gpu
        for gpu, card in reading["known"].items()
        if gpu in idle and not at_baseline(card["used_mb"], idle[gpu], card["total_mb"] or 0)
    ]
    stranded = above if context.get("holders") == [] else []
    return _judged("fault" if stranded else "good", used_mb=used, stranded=stranded)


def _rocm_smi(exit_status: int, stdout: str, _stderr: str, _context: Mapping[str, Any]) -> Judged:
    rows = re.findall(r"^(\d+)\t([^\t]*)\t(\d+) *\t(\d+) *\t", stdout, re.MULTILINE)
    if exit_status != 0 or "KFD Processes" not in stdout:
        return _judged("unknown", apps=None)
    apps = [
        {"pid": int(pid), "name": name.strip(), "gpus": int(gpus), "vram_bytes": int(vram)}
        for pid, name, gpus, vram in rows
    ]
    return _judged("good", apps=apps)


KINDS: Final[Mapping[str, Callable[[int, str, str, Mapping[str, Any]], Judged]]] = {
    "amd-smi-metric": _amd_metric,
    "amd-smi-process": _amd_process,
    "fd-scan": _fd_scan,
    "fuser": _fuser,
    "gpu-reset": _gpu_reset,
    "journal-json": _journal,
    "kernel-log": _kernel_log,
    "lsof": _lsof,
    "nvidia-smi-apps": _smi_apps,
    "nvidia-smi-gpu": _smi_gpu,
    "nvidia-smi-list": _smi_list,
    "pct-exec": _transport,
    "pct-status": _pct_status,
    "proc-cgroup": _proc_cgroup,
    "proc-stack": _proc_stack,
    "proc-stat": _proc_stat,
    "proc-status": _proc_status,
    "rocm-smi": _rocm_smi,
    "systemd-jobs": _systemd_jobs,
    "systemd-show": _systemd_show,
    "transport": _transport,
}

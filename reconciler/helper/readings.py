"""What a host's readings prove; pure, so that everybody judges alike.

Controller, guard and revert share this module, and so cannot disagree on what a unit does, who owns a
process, or whether a GPU is released. How text becomes a reading is `outputs.py`'s matter; its names are
offered here as well, so that a caller needs this module alone.

Part of the shipped helper: Python 3.9, standard library, and, because the helper is one joined file,
names that no sibling module uses.
"""

from __future__ import annotations

import re
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from reconciler.helper.machine import Reading
from reconciler.helper.outputs import (
    cgroup_owner,
    in_control_group,
    known,
    pci_address,
    process_is_dead,
    read_amd_memory,
    read_amd_processes,
    read_apps,
    read_cgroup,
    read_driver_version,
    read_gpu_information,
    read_gpu_rows,
    read_jobs,
    read_journal,
    read_optional_fields,
    read_proc_stat,
    read_proc_status,
    read_timespan,
    read_unit_properties,
    read_unit_show,
    read_xid_lines,
    unknown,
    xid_class,
)

__all__ = [
    "at_baseline",
    "baseline_learnable",
    "baseline_tolerance_mib",
    "cgroup_owner",
    "classify_holder",
    "in_control_group",
    "is_mps",
    "known",
    "pci_address",
    "process_is_dead",
    "read_amd_memory",
    "read_amd_processes",
    "read_apps",
    "read_cgroup",
    "read_driver_version",
    "read_gpu_information",
    "read_gpu_rows",
    "read_jobs",
    "read_journal",
    "read_optional_fields",
    "read_proc_stat",
    "read_proc_status",
    "read_timespan",
    "read_unit_properties",
    "read_unit_show",
    "read_xid_lines",
    "released",
    "unit_phase",
    "unknown",
    "xid_class",
]


# -- baselines ---------------------------------------------------------------------------------------


def baseline_tolerance_mib(total_mib: int) -> int:
    """Return how far above its idle use a released card may read: 64 MiB or 0.5 %, whichever is more."""
    return max(64, total_mib // 200)


def at_baseline(used_mib: int, baseline_mib: int, total_mib: int) -> bool:
    """Say whether a card's use is that of an idle card."""
    return used_mib <= baseline_mib + baseline_tolerance_mib(total_mib)


def baseline_learnable(used_mib: int, total_mib: int, *, asked: bool = False) -> bool:
    """Say whether a reading may be learned as idle: at most 1024 MiB or 2 % of the card; 10 % where a person asks.

    More than that is rather somebody's memory than a driver's, and would hide a left-over for ever.
    """
    return used_mib <= max(1024, total_mib // (10 if asked else 50))


# -- units --------------------------------------------------------------------------------

_PHASES: Mapping[str, Tuple[FrozenSet[str], str]] = {
    "active": (frozenset(("running",)), "running"),
    "activating": (frozenset(("condition", "start-pre", "start", "start-post")), "starting"),
    "deactivating": (
        frozenset(
            {
                "stop",
                "stop-watchdog",
                "stop-sigterm",
                "stop-sigkill",
                "stop-post",
                "final-watchdog",
                "final-sigterm",
                "final-sigkill",
            }
        ),
        "stopping",
    ),
    "failed": (frozenset(("failed",)), "down"),
    "inactive": (frozenset(("dead",)), "down"),
}
_LOOPING = frozenset(
    (
        "auto-restart",
        "auto-restart-queued",
        "dead-before-auto-restart",
        "failed-before-auto-restart",
    )
)


def unit_phase(unit_props: Mapping[str, Any]) -> str:
    """Say in one word what a unit does: running, starting, stopping, looping, down, not-found or unknown.

    A state that is not in the table is unknown, never down. `down` speaks of systemd alone: processes
    may be left in the control group, which `released` asks for.
    """
    active, sub = unit_props["ActiveState"], unit_props["SubState"]
    if sub in _LOOPING:
        return "looping"
    if active in ("reloading", "refreshing"):
        return "running"
    subs, phase = _PHASES.get(active, (frozenset(), "unknown"))
    if sub not in subs:
        return "unknown"
    if phase == "down" and unit_props["Job"]:
        return "starting"  # Something is queued on a unit that is down; whatever it is, it is not settled.
    if phase == "down" and unit_props["LoadState"] == "not-found":
        return "not-found"
    return phase


# -- who is who ----------------------------------------------------------------------------------------

# Housekeeping that keeps device nodes open for ever: (executable's name, the unit or slice that it runs in).
# Both must match, because a name alone is the workload's to choose.
_HOUSEKEEPING: Tuple[Tuple[str, str], ...] = (
    (r"nvidia-persistenced", r"nvidia-persistenced\.service"),
    (r"nv-hostengine|nvhostengine", r"(nvidia-)?dcgm\.service|nv-hostengine\.service"),
    (r"dcgm-exporter", r"dcgm-exporter\.service|kubepods.*|docker.*"),
    (r"nv-fabricmanager", r"nvidia-fabricmanager\.service"),
    (r"nvidia-imex", r"nvidia-imex\.service"),
    (r"nvsm.*", r"nvsm.*\.service"),
    (r"nvidia-powerd", r"nvidia-powerd\.service"),
    (r"nvidia-gridd", r"nvidia-gridd\.service"),
    (r"nvidia-vgpu-mgr", r"nvidia-vgpu-mgr\.service"),
    (r"nvidia-cuda-mps-(control|server)", r".*mps.*\.service"),
    (r"nvtop|nvidia-smi", r".*"),
    (r".*exporter", r".*exporter.*\.service"),
    (r"(datadog-)?agent|telegraf", r"(datadog-agent|telegraf).*\.service"),
    (
        r"Xorg|Xwayland|gnome-shell|kwin_(x11|wayland)|gdm.*|sddm.*",
        r"user\.slice|(gdm|gdm3|sddm|lightdm|display-manager)\.service",
    ),
    (r"dockerd|containerd.*|crio|conmon", r"(docker|containerd|crio)\.service"),
    (r"rdcd|gpuagent", r"(rdc|gpuagent)\.service"),
)
_SYSTEM_DIRECTORIES = (
    "/usr/",
    "/bin/",
    "/sbin/",
    "/opt/nvidia/",
    "/opt/datadog-agent/",
    "/opt/rocm",
)
_MPS_PROGRAMS = ("/nvidia-cuda-mps-server", "/nvidia-cuda-mps-control")


def classify_holder(process: Mapping[str, Any], context: Mapping[str, Any]) -> Tuple[str, str]:
    """Say whose a process is: ("owned" | "infra" | "foreign" | "unknown", why).

    Only `owned` may ever be signalled, so it is proven and never guessed: in the unit's control group now,
    or recorded there in this rollout, or carrying marks that only the server's own processes carry. A
    process that resembles ours without the proof is `unknown`: it is reported and left alone.

    `context`: {server, unit, control_group, snapshot: {boot_id, processes}, invocations: [{invocation,
    boot_id, main_start_ticks, uid, gid, mount_ns, cgroup}], uid, gid, boot_id, host_mount_ns, protect,
    apps_pids: pids that hold GPU memory}; a missing key is not known.
    """
    why = _owned_by_group(process, context) or _owned_by_record(process, context)
    if why:
        return "owned", why
    if process.get("uid") is None or process.get("cgroup") is None:
        return "unknown", "its user or control group cannot be read"
    marks, why = _marks(process, context)
    if marks:
        return marks, why
    return _stranger(process, context)


def _owned_by_group(process: Mapping[str, Any], context: Mapping[str, Any]) -> Optional[str]:
    groups = [context.get("control_group")]
    groups += [entry.get("cgroup") for entry in _invocations(context)]
    if any(in_control_group(process.get("cgroup"), group) for group in groups):
        return "in the unit's control group"
    return None


def _owned_by_record(process: Mapping[str, Any], context: Mapping[str, Any]) -> Optional[str]:
    snapshot = context.get("snapshot") or {}
    if not snapshot or snapshot.get("boot_id") != context.get("boot_id"):
        return None
    if process.get("layer") == "outer":
        return None  # Its numbers are of another pid namespace than those that were recorded.
    for recorded in snapshot.get("processes") or []:
        if all(
            process.get(key) == recorded.get(key) is not None
            for key in ("pid", "start_ticks", "uid")
        ):
            return "recorded in the unit's control group earlier in this rollout"
    return None


def _invocations(context: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """Return what is recorded of the unit's runs in this boot; another boot's pids and namespaces mean nothing."""
    boot = context.get("boot_id")
    return [
        entry for entry in context.get("invocations") or [] if boot and entry.get("boot_id") == boot
    ]


def _marks(process: Mapping[str, Any], context: Mapping[str, Any]) -> Tuple[str, str]:
    ours = _invocations(context)
    gid, uids = context.get("gid"), {context.get("uid")} | {entry.get("uid") for entry in ours}
    has_uid = process.get("uid") in uids - {None}
    has_group = gid is not None and gid in [process.get("gid"), *(process.get("groups") or [])]
    has_mark = bool(context.get("server")) and process.get("mark") == context.get("server")
    run = process.get("invocation")
    has_run = run is not None and run in [
        entry.get("invocation") for entry in context.get("invocations") or []
    ]
    if has_uid and has_group and has_mark and has_run:
        return "owned", "left the control group, and carries the server's user, group and marks"
    if has_uid and has_group and _in_recorded_namespace(process, context, ours):
        return (
            "owned",
            "left the control group, and has the server's user, group and mount namespace",
        )
    if has_group or has_mark or has_run:
        return "unknown", "resembles the server's processes, but the proof is not complete"
    if has_uid and gid is None and process.get("uid") != 0:
        return "unknown", "runs as the server's user, and the unit carries no marks"
    return "", ""


def _in_recorded_namespace(
    process: Mapping[str, Any], context: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]
) -> bool:
    namespace = process.get("mount_ns")
    if namespace is None or namespace == context.get("host_mount_ns"):
        return False
    for entry in ours:
        since = entry.get("main_start_ticks")
        if (
            entry.get("mount_ns") == namespace
            and since is not None
            and process["start_ticks"] >= since
        ):
            return True
    return False


def _stranger(process: Mapping[str, Any], context: Mapping[str, Any]) -> Tuple[str, str]:
    infra = _infra_why(process, context)
    if infra and not is_mps(process) and process.get("pid") in (context.get("apps_pids") or ()):
        return "foreign", f"{infra}, but it holds GPU memory"
    if infra:
        return "infra", infra
    owner = cgroup_owner(process["cgroup"])
    return "foreign", f"belongs to {owner['unit'] or owner['container_id'] or process['cgroup']}"


def is_mps(process: Mapping[str, Any]) -> bool:
    """Say whether a process is MPS's: it has a card open for others, whose end with work in flight it may not survive."""
    return (process.get("exe") or "").endswith(_MPS_PROGRAMS)


def _infra_why(process: Mapping[str, Any], context: Mapping[str, Any]) -> Optional[str]:
    exe, groups = process.get("exe") or "", process["cgroup"].split("/")
    for protected in context.get("protect") or ():
        if protected == exe or protected in groups:
            return f"protected by the host's settings ({protected})"
    if not exe.startswith(_SYSTEM_DIRECTORIES):
        return None
    name = exe.rsplit("/", 1)[-1]
    for program, group in _HOUSEKEEPING:
        if re.fullmatch(program, name) and any(re.fullmatch(group, part) for part in groups):
            return f"housekeeping ({name})"
    return None


# -- released ------------------------------------------------------------------------------------------

_BLOCKING_XIDS = frozenset(("reset", "host", "fabric", "unknown"))
# amdgpu has no codes; these are the lines after which a card is not to be trusted before a person has looked.
_AMD_TROUBLE = re.compile(
    r"amdgpu .*(GPU reset begin|GPU Recovery Failed|ring \S+ timeout|device lost from bus|uncorrectable hardware errors)"
)
SETTLE_SAMPLES_MIN = 3  # Two equal readings can mean "not begun yet".
SPREAD_MIB_MAX = 16
WEDGED_AFTER_S = 30.0  # A process with a SIGKILL pending for so long will not die; memory without a holder neither.


def released(
    samples: Sequence[Mapping[str, Any]],
    expected_uuids: Sequence[str],
    baselines: Mapping[str, Mapping[str, Any]],
    context: Mapping[str, Any],
    settle_s: float,
) -> Dict[str, Any]:
    """Judge whether the expected GPUs are free: {verdict, reasons, holders}.

    Verdicts: released, not-released (waiting or signals may help), wedged (they will not), fault (a person
    is needed), unknown. There is no "probably": released wants the last samples, at least three over the
    settle window, to be clean in every respect. A sample is {at, boot_id?, gpus, apps, holders, unit,
    kernel, processes?}, each a reading but `at` and `boot_id`; `unit` may be absent when context names no unit.
    """
    if not samples:
        return {"verdict": "unknown", "reasons": ["no sample"], "holders": []}
    judged = [_judge_sample(sample, expected_uuids, baselines, context) for sample in samples]
    last = judged[-1]
    for verdict in ("fault", "unknown"):
        if last[verdict]:
            return {"verdict": verdict, "reasons": last[verdict], "holders": last["holders"]}
    if last["held"]:
        stuck = _stuck(samples, judged, float(context.get("dies_within_s") or WEDGED_AFTER_S))
        verdict = "wedged" if stuck else "not-released"
        return {"verdict": verdict, "reasons": stuck + last["held"], "holders": last["holders"]}
    waiting = _settling(samples, judged, settle_s)
    return {
        "verdict": "not-released" if waiting else "released",
        "reasons": waiting,
        "holders": last["holders"],
    }


def _judge_sample(
    sample: Mapping[str, Any],
    expected: Sequence[str],
    baselines: Mapping[str, Mapping[str, Any]],
    context: Mapping[str, Any],
) -> Dict[str, Any]:
    judged: Dict[str, Any] = {
        "at": sample["at"],
        "fault": [],
        "unknown": [],
        "held": [],
        "holders": [],
        "used": {},
        "leak": False,
    }
    if sample.get("boot_id", context.get("boot_id")) != context.get("boot_id"):
        judged["unknown"].append("the host has rebooted since")
    gpus = _judge_gpus(
        sample.get("gpus") or unknown("GPUs were not read"), expected, baselines, context, judged
    )
    _judge_kernel(sample.get("kernel") or unknown("the kernel log was not read"), gpus, judged)
    _judge_holders(sample, gpus, expected, context, judged)
    _judge_unit(sample, context, judged)
    return judged


def _judge_gpus(
    reading: Reading,
    expected: Sequence[str],
    baselines: Mapping[str, Mapping[str, Any]],
    context: Mapping[str, Any],
    judged: Dict[str, Any],
) -> Dict[str, Mapping[str, Any]]:
    if "known" not in reading:
        judged["fault" if reading.get("fault") else "unknown"].append(
            reading.get("unknown", "GPUs not read")
        )
        return {}
    value = reading["known"]
    gpus = {gpu["uuid"]: gpu for gpu in value["gpus"] if gpu["uuid"] in expected}
    for uuid in expected:
        if uuid not in gpus:
            judged["fault"].append(f"{uuid} is missing")
        else:
            _judge_gpu(gpus[uuid], value.get("driver"), baselines.get(uuid), context, judged)
    return gpus


def _judge_gpu(
    gpu: Mapping[str, Any],
    driver: Optional[str],
    baseline: Optional[Mapping[str, Any]],
    context: Mapping[str, Any],
    judged: Dict[str, Any],
) -> None:
    uuid, used = gpu["uuid"], gpu["used_mib"]
    judged["used"][uuid] = used
    if gpu.get("fault"):
        judged["fault"].append(f"{uuid}: {gpu['fault']}")
    if gpu.get("recovery_action") not in (None, "None"):
        judged["fault"].append(f"{uuid}: the driver asks for {gpu['recovery_action']}")
    if gpu.get("mig") == "Enabled" and not context.get("mig"):
        judged["unknown"].append(f"{uuid}: MIG is on, and the spec does not say so")
    cells = ("used_mib", "total_mib", "temperature_c", "utilization_pct", "minor")
    blind = [cell for cell in cells if gpu.get(cell) is None]
    if blind:
        judged["unknown"].append(f"{uuid}: no {', '.join(blind)}")
        return
    if baseline is None:
        judged["unknown"].append(f"{uuid}: no idle baseline was learned")
        return
    changed = _baseline_changed(gpu, driver, baseline)
    if changed:
        judged["unknown"].append(f"{uuid}: the idle baseline was learned under another {changed}")
    elif not at_baseline(used, baseline["used_mib"], gpu["total_mib"]):
        limit = baseline["used_mib"] + baseline_tolerance_mib(gpu["total_mib"])
        judged["leak"] = True
        judged["held"].append(f"{uuid} still holds {used} MiB (limit {limit} MiB)")


def _baseline_changed(
    gpu: Mapping[str, Any], driver: Optional[str], baseline: Mapping[str, Any]
) -> Optional[str]:
    now = {"driver": driver, "mig": gpu.get("mig"), "persistence": gpu.get("persistence")}
    for key, value in now.items():
        if value is not None and baseline.get(key) is not None and baseline[key] != value:
            return f"{key} ({baseline[key]}, now {value})"
    return None


def _judge_kernel(
    reading: Reading, gpus: Mapping[str, Mapping[str, Any]], judged: Dict[str, Any]
) -> None:
    if reading.get("elsewhere"):
        return  # A container has no kernel log; life signs, baseline and recovery action stand.
    if "known" not in reading:
        judged["unknown"].append(f"kernel log: {reading['unknown']}")
        return
    addresses = {pci_address(gpu.get("bus_id")) for gpu in gpus.values()}
    events = read_xid_lines(reading["known"]["lines"])["known"]
    for xid in events["xids"]:
        ours = not gpus or None in addresses or pci_address(xid["bus"]) in addresses
        if xid["class"] in _BLOCKING_XIDS and (ours or xid["class"] == "fabric"):
            judged["fault"].append(
                f"Xid {xid['code']} ({xid['class']}) on {xid['bus']}: {xid['text']}"
            )
    for line in reading["known"]["lines"]:
        if _AMD_TROUBLE.search(line):
            judged["fault"].append(f"the kernel says: {line.strip()[:200]}")
    if events["unbind"]:
        judged["fault"].append("somebody unbinds a GPU that is in use")


def _judge_holders(
    sample: Mapping[str, Any],
    gpus: Mapping[str, Mapping[str, Any]],
    expected: Sequence[str],
    context: Mapping[str, Any],
    judged: Dict[str, Any],
) -> None:
    apps = sample.get("apps") or unknown("not read")
    scan = sample.get("holders") or unknown("not read")
    for name, reading in (("compute apps", apps), ("holders", scan)):
        if "known" not in reading:
            where = "fault" if reading.get("fault") else "unknown"
            judged[where].append(f"{name}: {reading.get('unknown')}")
    if "known" not in apps or "known" not in scan:
        return
    if not scan["known"]["complete"] or scan["known"]["unreadable"]:
        judged["unknown"].append(f"{scan['known']['unreadable']} processes could not be inspected")
    with_memory = {
        app["pid"] for app in apps["known"] if app["used_mib"] is None or app["used_mib"] > 0
    }
    here = dict(context, apps_pids=sorted(with_memory))
    infra = _judge_holder_list(
        scan["known"]["holders"], {gpu.get("minor") for gpu in gpus.values()}, here, judged
    )
    for app in apps["known"]:
        if app["gpu_uuid"] in expected and app["pid"] not in infra:
            judged["held"].append(f"{app['gpu_uuid']}: compute app {app['pid']} ({app['name']})")
    if judged["leak"] and not judged["holders"] and context.get("container"):
        judged["unknown"].append("memory is in use, and a container does not see who uses it")


def _judge_holder_list(
    holders: Sequence[Mapping[str, Any]],
    minors: Set[Any],
    context: Mapping[str, Any],
    judged: Dict[str, Any],
) -> Set[int]:
    infra: Set[int] = set()
    for holder in holders:
        cls, why = classify_holder(holder, context)
        if cls == "infra":
            infra.add(holder["pid"])
        # One that has only control nodes open cannot be pinned to other cards, so it counts for ours.
        elif not holder["minors"] or minors & set(holder["minors"]):
            judged["holders"].append(dict(holder, **{"class": cls, "why": why}))
            judged["held"].append(
                f"held by {cls} pid {holder['pid']} ({holder.get('comm')}): {why}"
            )
    return infra


def _judge_unit(
    sample: Mapping[str, Any], context: Mapping[str, Any], judged: Dict[str, Any]
) -> None:
    if context.get("unit") is None and sample.get("unit") is None:
        return
    reading = sample.get("unit") or unknown("not read")
    if "known" not in reading:
        judged["unknown"].append(f"unit: {reading.get('unknown')}")
        return
    phase = unit_phase(reading["known"])
    if phase == "unknown":
        state = f"{reading['known']['ActiveState']}/{reading['known']['SubState']}"
        judged["unknown"].append(f"the unit is {state}, which is in no table")
    elif phase not in ("down", "not-found"):
        judged["held"].append(f"the unit is {phase}")
    inside = sample.get("processes")
    if inside is not None and "known" not in inside:
        judged["unknown"].append(f"control group: {inside.get('unknown')}")
    elif inside is not None and inside["known"]:
        pids = ", ".join(str(process["pid"]) for process in inside["known"][:10])
        judged["held"].append(f"the unit's control group still has {pids}")
    elif inside is None and phase == "down" and reading["known"]["ControlGroup"]:
        judged["held"].append("the unit's control group still exists")


def _stuck(
    samples: Sequence[Mapping[str, Any]],
    judged: Sequence[Mapping[str, Any]],
    dies_within_s: float,
) -> List[str]:
    """Say why waiting will not help: what has been so in every sample of the last WEDGED_AFTER_S.

    One with a SIGKILL pending is given `dies_within_s` where the caller has no more time than that.
    """
    end, seen_s = samples[-1]["at"], samples[-1]["at"] - samples[0]["at"]
    reasons = []
    window = [one for one in judged if end - one["at"] <= WEDGED_AFTER_S]
    if seen_s >= WEDGED_AFTER_S and all(one["leak"] and not one["holders"] for one in window):
        reasons.append("memory is in use, and no process holds the card")
    window = [one for one in judged if end - one["at"] <= dies_within_s]
    for holder in judged[-1]["holders"]:
        identity = (holder["pid"], holder["start_ticks"])
        if seen_s >= dies_within_s and all(identity in _unkillable(one) for one in window):
            reasons.append(
                f"pid {holder['pid']} does not die: state {holder.get('state')}, SIGKILL pending"
            )
    return reasons


def _unkillable(judged: Mapping[str, Any]) -> Set[Tuple[int, int]]:
    return {
        (one["pid"], one["start_ticks"]) for one in judged["holders"] if one.get("kill_pending")
    }


def _settling(
    samples: Sequence[Mapping[str, Any]], judged: Sequence[Mapping[str, Any]], settle_s: float
) -> List[str]:
    """Say what is missing of the settle window, looking back over the clean samples at the end."""
    clean = 0
    for one in reversed(judged):
        if one["fault"] or one["unknown"] or one["held"]:
            break
        clean += 1
    span = samples[-1]["at"] - samples[-clean]["at"]
    if clean < SETTLE_SAMPLES_MIN or span < settle_s:
        return [f"settling: {clean} clean samples over {span:.1f} s of {settle_s:.1f} s"]
    reasons = []
    window = [one for one in judged[-clean:] if samples[-1]["at"] - one["at"] <= settle_s]
    for uuid in judged[-1]["used"]:
        values = [one["used"][uuid] for one in window]
        if max(values) - min(values) > SPREAD_MIB_MAX:
            reasons.append(f"{uuid} still moves: {min(values)} to {max(values)} MiB")
    return reasons

"""Who owns a process and when a GPU is released: the judgements that everybody shares."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.helper import outputs, readings
from reconciler.helper.readings import classify_holder, known, released, unit_phase, unknown

UUID = "GPU-3f1c9a52-6d0e-4b7a-9c18-5e2ab0d4f701"
OTHER = "GPU-8a24d7be-11c3-4e95-b6f0-92c4e7a1d3b2"
BOOT = "b0"
RUN = "4787b9bd068341efb3ce3b4a6e6af592"


def process(**changed: Any) -> dict[str, Any]:
    """Return a process that nobody owns."""
    return {
        "pid": 700,
        "start_ticks": 5000,
        "state": "S",
        "threads": 3,
        "ppid": 1,
        "uid": 990,
        "gid": 990,
        "groups": [60800],
        "exe": "/srv/venv/bin/python3",
        "comm": "VLLM::EngineCor",
        "cgroup": "/lab-escaped",
        "nspid": [700],
        "mount_ns": 77,
        "argv": [],
        "invocation": None,
        "mark": None,
        "environ_readable": False,
        "kill_pending": False,
        "wchan": None,
        "minors": [0],
        "devices": ["/dev/nvidia0"],
        "via": "fd",
        **changed,
    }


def context(**changed: Any) -> dict[str, Any]:
    """Return what is recorded of a server whose unit is down."""
    return {
        "server": "llm",
        "unit": "llm.service",
        "control_group": "",
        "snapshot": None,
        "invocations": [
            {
                "invocation": RUN,
                "boot_id": BOOT,
                "main_start_ticks": 4000,
                "uid": 990,
                "gid": 990,
                "mount_ns": 77,
                "cgroup": "/system.slice/llm.service",
            }
        ],
        "uid": 990,
        "gid": 60800,
        "boot_id": BOOT,
        "host_mount_ns": 1,
        "protect": [],
        "apps_pids": [],
        **changed,
    }


SNAPSHOT = {"boot_id": BOOT, "processes": [{"pid": 700, "start_ticks": 5000, "uid": 990}]}
OWNED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("in the group", {"cgroup": "/system.slice/llm.service/sub"}, {"invocations": [],
        "control_group": "/system.slice/llm.service"}),
    ("in the recorded group", {"cgroup": "/system.slice/llm.service"}, {}),
    ("recorded earlier", {"groups": [], "mount_ns": 1}, {"snapshot": SNAPSHOT, "invocations": []}),
    ("marks", {"mark": "llm", "invocation": RUN, "mount_ns": None}, {}),
    ("mount namespace", {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "known_of"), [case[1:] for case in OWNED], ids=[c[0] for c in OWNED]
)
def test_ownership_is_proven_by_group_record_or_marks(
    changed: dict[str, Any], known_of: dict[str, Any]
) -> None:
    """Each accepted proof alone makes a process owned."""
    assert classify_holder(process(**changed), context(**known_of))[0] == "owned"


NOT_OWNED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("another uid with our namespace", {"uid": 1000}, {}),
    ("no server group", {"groups": []}, {}),
    ("another server's mark", {"mark": "other", "invocation": RUN, "mount_ns": 5}, {}),
    ("our mark, a run that nobody recorded", {"mark": "llm", "invocation": "f" * 32, "mount_ns": 5}, {}),
    ("the host's own mount namespace", {"mount_ns": 77}, {"host_mount_ns": 77}),
    ("started before the run", {"start_ticks": 3999}, {}),
    ("a namespace of another boot", {}, {"boot_id": "b1"}),
    ("a wiped environment", {"mount_ns": None}, {}),
    ("a snapshot of another boot", {"groups": [], "mount_ns": 1},
        {"snapshot": {**SNAPSHOT, "boot_id": "b1"}}),
    ("the number of a dead one", {"start_ticks": 9999, "groups": [], "mount_ns": 1}, {"snapshot": SNAPSHOT}),
    ("a number of the outer layer", {"groups": [], "mount_ns": 1, "layer": "outer"},
        {"snapshot": SNAPSHOT, "invocations": []}),
    ("the root group", {"cgroup": "/x", "groups": [], "uid": 0}, {"control_group": "/"}),
    ("a group whose name only begins alike", {"cgroup": "/system.slice/llm.service2", "groups": [], "uid": 5},
        {"control_group": "/system.slice/llm.service"}),
    ("nothing readable", {"uid": None, "cgroup": None}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "known_of"), [case[1:] for case in NOT_OWNED], ids=[c[0] for c in NOT_OWNED]
)
def test_nothing_less_than_proof_is_owned(
    changed: dict[str, Any], known_of: dict[str, Any]
) -> None:
    """What resembles the server's processes without the whole proof may never be signalled."""
    assert classify_holder(process(**changed), context(**known_of))[0] in ("unknown", "foreign")


def test_housekeeping_is_told_by_program_and_unit_together() -> None:
    """A persistence daemon in its own unit is infra; the same name started by somebody is foreign."""
    daemon = process(
        uid=0,
        groups=[],
        exe="/usr/bin/nvidia-persistenced",
        cgroup="/system.slice/nvidia-persistenced.service",
    )
    assert classify_holder(daemon, context())[0] == "infra"
    assert classify_holder({**daemon, "cgroup": "/user.slice/x"}, context())[0] == "foreign"
    assert (
        classify_holder({**daemon, "exe": "/home/x/nvidia-persistenced"}, context())[0] == "foreign"
    )


def test_an_exporter_with_gpu_memory_is_a_stranger() -> None:
    """Housekeeping and protected programs count as such only while they hold no GPU memory."""
    exporter = process(
        uid=0,
        groups=[],
        exe="/usr/bin/dcgm-exporter",
        cgroup="/system.slice/dcgm-exporter.service",
    )
    assert classify_holder(exporter, context())[0] == "infra"
    assert classify_holder(exporter, context(apps_pids=[700]))[0] == "foreign"
    mine = process(uid=0, groups=[], cgroup="/system.slice/mine.service")
    assert classify_holder(mine, context(protect=["mine.service"]))[0] == "infra"
    assert classify_holder(mine, context(protect=["mine.service"], apps_pids=[700]))[0] == "foreign"


# -- released ------------------------------------------------------------------------------------------


def unit(**changed: Any) -> dict[str, Any]:
    """Return the properties of a unit that is down."""
    return {
        "LoadState": "loaded",
        "ActiveState": "inactive",
        "SubState": "dead",
        "Job": 0,
        "ControlGroup": "",
        **changed,
    }


def gpu(**changed: Any) -> dict[str, Any]:
    """Return an idle card."""
    return {
        "uuid": UUID,
        "index": 0,
        "bus_id": "00000000:41:00.0",
        "minor": 0,
        "used_mib": 4,
        "total_mib": 81559,
        "temperature_c": 30,
        "utilization_pct": 0,
        "mig": None,
        "persistence": "Enabled",
        "recovery_action": "None",
        "fault": None,
        **changed,
    }


def sample(at: float, **changed: Any) -> dict[str, Any]:
    """Return a clean sample."""
    return {
        "at": at,
        "boot_id": BOOT,
        "gpus": known({"driver": "580.1", "gpus": [gpu()]}),
        "apps": known([]),
        "holders": holding(),
        "unit": known(unit()),
        "kernel": known({"cursor": "c", "lines": []}),
        "processes": known([]),
        **changed,
    }


def holding(*processes: dict[str, Any], unreadable: int = 0) -> dict[str, Any]:
    """Return the reading of a holder scan."""
    value = {"complete": not unreadable, "unreadable": unreadable, "holders": list(processes)}
    return known(value)


def cards(**changed: Any) -> dict[str, Any]:
    """Return the reading of one card."""
    return known({"driver": "580.1", "gpus": [gpu(**changed)]})


BASELINES = {
    UUID: {
        "used_mib": 4,
        "total_mib": 81559,
        "driver": "580.1",
        "mig": None,
        "persistence": "Enabled",
    }
}


def judge(*changes: dict[str, Any], **of: Any) -> dict[str, Any]:
    """Judge three samples over two seconds, all with the last change when there is only one."""
    each = changes if len(changes) > 1 else changes * 3
    samples = [sample(float(at), **change) for at, change in enumerate(each)]
    return released(samples, [UUID], of.pop("baselines", BASELINES), context(**of), 2.0)


def test_three_clean_samples_over_the_window_are_released() -> None:
    """Idle memory, life signs, no holder, unit down, quiet kernel: released, and only then."""
    assert judge({})["verdict"] == "released"


NOT_RELEASED: list[tuple[str, dict[str, Any], str]] = [
    ("memory above baseline", {"gpus": cards(used_mib=900)}, "not-released"),
    ("a holder that is ours", {"holders": holding(process())}, "not-released"),
    ("a foreign holder", {"holders": holding(process(uid=5, groups=[]))}, "not-released"),
    ("a holder that cannot be pinned", {"holders": holding(process(minors=[]))}, "not-released"),
    ("an app", {"apps": known([{"gpu_uuid": UUID, "pid": 9, "used_mib": 10, "name": "x"}])}, "not-released"),
    ("unit stopping", {"unit": known(unit(ActiveState="deactivating", SubState="stop-sigterm"))}, "not-released"),
    ("unit looping", {"unit": known(unit(ActiveState="activating", SubState="auto-restart"))}, "not-released"),
    ("a job queued", {"unit": known(unit(Job=7))}, "not-released"),
    ("left-over in the group", {"processes": known([process()])}, "not-released"),
    ("no memory number", {"gpus": cards(used_mib=None)}, "unknown"),
    ("no life sign", {"gpus": cards(temperature_c=None)}, "unknown"),
    ("no minor", {"gpus": cards(minor=None)}, "unknown"),
    ("MIG not declared", {"gpus": cards(mig="Enabled")}, "unknown"),
    ("gpus unread", {"gpus": unknown("hung")}, "unknown"),
    ("apps unread", {"apps": unknown("hung")}, "unknown"),
    ("scan unread", {"holders": unknown("no")}, "unknown"),
    ("a process unreadable", {"holders": holding(unreadable=1)}, "unknown"),
    ("kernel log unread", {"kernel": unknown("not permitted")}, "unknown"),
    ("unit unread", {"unit": unknown("no bus")}, "unknown"),
    ("a sub-state in no table", {"unit": known(unit(SubState="dead-resources-pinned"))}, "unknown"),
    ("rebooted", {"boot_id": "b1"}, "unknown"),
    ("card missing", {"gpus": known({"driver": "580.1", "gpus": []})}, "fault"),
    ("card lost", {"gpus": cards(fault="lost")}, "fault"),
    ("recovery wanted", {"gpus": cards(recovery_action="Drain and Reset")}, "fault"),
    ("a recovery word that is new", {"gpus": cards(recovery_action="Dance")}, "fault"),
    ("version mismatch", {"gpus": unknown("x", "version_mismatch")}, "fault"),
    ("off the bus", {"kernel": known({"cursor": "c", "lines": [
        "NVRM: GPU 0000:41:00.0: GPU has fallen off the bus."]})}, "fault"),
    ("an Xid newer than the table", {"kernel": known({"cursor": "c", "lines": [
        "NVRM: Xid (PCI:0000:41:00): 999, pid=1, name=x, new"]})}, "fault"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "verdict"), [case[1:] for case in NOT_RELEASED], ids=[c[0] for c in NOT_RELEASED]
)
def test_anything_else_is_not_released(changed: dict[str, Any], verdict: str) -> None:
    """Each condition alone keeps the verdict from released, and says why."""
    judged = judge(changed)
    assert judged["verdict"] == verdict
    assert judged["reasons"]


def test_what_is_elsewhere_does_not_block() -> None:
    """A neighbour on another card, an Xid of another card and an application's Xid change nothing."""
    neighbour = process(uid=5, groups=[], minors=[1], devices=["/dev/nvidia1", "/dev/nvidia-uvm"])
    lines = [
        "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:41:00): 13, pid=48213, name=VLLM, Graphics Exception",
    ]
    quiet = {
        "holders": holding(neighbour),
        "apps": known([{"gpu_uuid": OTHER, "pid": 700, "used_mib": 10, "name": "x"}]),
        "kernel": known({"cursor": "c", "lines": lines}),
    }
    assert judge(quiet)["verdict"] == "released"


def test_no_baseline_or_one_of_another_driver_is_unknown() -> None:
    """Idle is measured, never assumed; a new driver can have another floor."""
    assert judge({}, baselines={})["verdict"] == "unknown"
    old = {UUID: {**BASELINES[UUID], "driver": "535.1"}}
    assert judge({}, baselines=old)["verdict"] == "unknown"


def test_a_single_bad_sample_restarts_the_window() -> None:
    """Clean samples count from the last bad one; still is not settled."""
    assert judge({}, {"gpus": unknown("late")}, {}, {})["verdict"] == "not-released"
    assert judge({"gpus": unknown("late")}, {}, {}, {})["verdict"] == "released"


def test_moving_memory_is_not_settled() -> None:
    """A spread above 16 MiB within the window is not released, even below the limit."""
    moving = [{"gpus": cards(used_mib=mib)} for mib in (60, 30, 10)]
    assert judge(*moving)["verdict"] == "not-released"


def test_a_container_cannot_tell_free_from_unseen() -> None:
    """Memory above the baseline and nobody to see, from inside a container, is unknown (S: checklist 7)."""
    used = {"gpus": cards(used_mib=900)}
    assert judge(used, container="lxc")["verdict"] == "unknown"
    without_log = {"kernel": {"unknown": "no kernel messages here", "elsewhere": True}}
    assert judge(without_log, container="lxc")["verdict"] == "released"


def test_what_no_wait_will_end_is_wedged() -> None:
    """A pending SIGKILL for 30 s, or memory that nobody holds for 30 s, is wedged and not merely slow."""

    def over(seconds: float, **changed: Any) -> str:
        samples = [sample(at * seconds / 3, **changed) for at in range(4)]
        return str(released(samples, [UUID], BASELINES, context(), 2.0)["verdict"])

    dying = {"holders": holding(process(kill_pending=True, state="D"))}
    assert over(10, **dying) == "not-released"
    assert over(40, **dying) == "wedged"
    assert over(40, gpus=cards(used_mib=900)) == "wedged"
    assert over(40, holders=holding(process())) == "not-released"


@pytest.mark.parametrize(
    ("load", "active", "sub", "phase"),
    [
        ("loaded", "active", "running", "running"),
        ("not-found", "active", "running", "running"),
        ("loaded", "active", "exited", "unknown"),
        ("loaded", "activating", "start-pre", "starting"),
        ("loaded", "activating", "auto-restart", "looping"),
        ("loaded", "inactive", "dead-before-auto-restart", "looping"),
        ("loaded", "deactivating", "final-sigkill", "stopping"),
        ("loaded", "reloading", "reload", "running"),
        ("loaded", "failed", "failed", "down"),
        ("masked", "inactive", "dead", "down"),
        ("not-found", "inactive", "dead", "not-found"),
        ("loaded", "maintenance", "maintenance", "unknown"),
    ],
)
def test_a_state_in_no_table_is_never_down(load: str, active: str, sub: str, phase: str) -> None:
    """Every pair of states has one word, and what systemd may invent is unknown."""
    assert unit_phase(unit(LoadState=load, ActiveState=active, SubState=sub)) == phase


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("1min 30s", 90_000_000),
        ("infinity", None),
        ("200ms", 200_000),
        ("0", 0),
        ("1d 2h", 93_600_000_000),
    ],
)
def test_time_spans_are_read_to_the_microsecond(text: str, microseconds: int | None) -> None:
    """What systemd prints for people becomes a number, and infinity becomes null."""
    assert readings.read_timespan(text) == known(microseconds)
    assert "unknown" in readings.read_timespan("[not set]")


def test_a_unit_text_without_one_key_is_unknown() -> None:
    """Property names that systemctl does not know are left out without a word, so every key is demanded."""
    assert "unknown" in readings.read_unit_show("ActiveState=active\nSubState=running\n")


def test_a_property_that_comes_twice_is_not_trusted() -> None:
    """An argument with a newline can print a line that looks like another property (S: never guess)."""
    text = "MainPID=5\nExecStart={ argv[]=x\nMainPID=1 ; }\n"
    assert "MainPID" not in outputs.read_show(text)

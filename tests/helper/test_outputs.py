"""How single outputs are read, where no recorded case says it."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.helper.outputs import (
    GPU_FIELDS,
    UNIT_PROPERTIES,
    UNIT_PROPERTIES_ASKED,
    known,
    pci_address,
    read_amd_memory,
    read_amd_processes,
    read_apps,
    read_cgroup,
    read_driver_version,
    read_exec_start,
    read_gpu_information,
    read_gpu_rows,
    read_jobs,
    read_journal,
    read_listening_sockets,
    read_local_addresses,
    read_optional_fields,
    read_proc_stat,
    read_proc_status,
    read_smi_table,
    read_unit_properties,
    read_unit_show,
    read_xid_lines,
    started_argv,
    xid_class,
)

UUID = "GPU-3f1c9a52-6d0e-4b7a-9c18-5e2ab0d4f701"
ROW = f"{UUID}, 0, 00000000:41:00.0, 4, 81559, 30, 0\n"


def test_a_row_of_the_needed_query_has_every_cell_by_name() -> None:
    """Numbers are numbers, and what is no number is null beside the fault that it names."""
    assert read_gpu_rows(0, ROW)["known"] == [
        {
            "uuid": UUID,
            "index": 0,
            "bus_id": "00000000:41:00.0",
            "used_mib": 4,
            "total_mib": 81559,
            "temperature_c": 30,
            "utilization_pct": 0,
            "fault": None,
        }
    ]
    dead = ROW.replace(" 30, 0", " [GPU requires reset], [N/A]")
    (row,) = read_gpu_rows(0, dead)["known"]
    assert (row["temperature_c"], row["utilization_pct"]) == (None, None)
    assert row["fault"] == "reset_required"


@pytest.mark.parametrize(
    "stdout",
    [
        "",
        ROW + ROW,
        ROW + "something else\n",
        ROW.replace(", 4,", ", many,"),
        ROW.replace("GPU-3f", "GPU-zz"),
        ROW.replace("00000000:41", "nowhere"),
        ROW + "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n",
    ],
)
def test_a_sample_with_one_bad_line_is_bad(stdout: str) -> None:
    """No row, a row twice, a line that is no row and a cell that is no number spoil the whole sample."""
    assert "unknown" in read_gpu_rows(0, stdout)


def test_an_exit_code_is_read_when_the_text_says_nothing() -> None:
    """The man page's codes tell a fault from a failure, and good rows do not excuse them."""
    assert read_gpu_rows(15, ROW)["fault"] == "gpu_lost"
    assert "fault" not in read_gpu_rows(4, ROW)
    assert "fault" not in read_gpu_rows(124, ROW)
    assert read_smi_table(77, ROW, GPU_FIELDS)["error"] == "failed"


def test_an_unsupported_field_is_named_so_that_it_can_be_left_out() -> None:
    """One field that the driver does not know fails the query, and the answer says which."""
    text = 'Field "gpu_recovery_action" is not a valid field to query.\n'
    reading = read_optional_fields(2, text, ["gpu_recovery_action"])
    assert reading["unsupported"] == "gpu_recovery_action"
    good = read_optional_fields(0, f"{UUID}, [N/A]\n", ["mig.mode.current"])
    assert good == known({UUID: {"mig.mode.current": None}})
    assert read_optional_fields(9, "couldn't communicate with the NVIDIA driver", [])["fault"]


@pytest.mark.parametrize(
    "line", ["x, 1, 2, n", f"{UUID}, pid, 2, n", f"{UUID}, 1, lots, n", "text"]
)
def test_a_line_that_is_no_app_is_not_skipped(line: str) -> None:
    """A line that cannot be read could be a holder, so the list is unknown."""
    assert "unknown" in read_apps(0, line + "\n")


def test_apps_fail_as_their_program_does() -> None:
    """A limit is unknown, a missing driver a fault, and the plain sentence is an empty list."""
    assert "fault" not in read_apps(124, "")
    assert read_apps(9, "couldn't communicate with the NVIDIA driver")["fault"]
    assert read_apps(0, "No running processes found\n") == known([])


def test_the_drivers_files_join_uuid_and_minor() -> None:
    """The information file names a card's UUID and minor; anything else is unknown."""
    text = f"Model: \t\t H100\nGPU UUID: \t {UUID}\nBus Location: \t 0000:41:00.0\nDevice Minor: \t 3\n"
    found = read_gpu_information(text)["known"]
    assert found == {"uuid": UUID, "minor": 3, "bus_id": "0000:41:00.0"}
    assert "unknown" in read_gpu_information("Device Minor: \t 3\nGPU UUID: \t ????\n")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Thu", "535.261.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release", "570.86"),
        ("", None),
    ],
)
def test_the_modules_version_is_found_in_both_wordings(text: str, version: str | None) -> None:
    """Closed and open modules word the line differently."""
    assert read_driver_version(text) == version


def test_bus_addresses_compare_whatever_their_width() -> None:
    """The kernel log's short form and nvidia-smi's long one name one card."""
    assert pci_address("0000:41:00") == pci_address("00000000:41:00.0") == (0, 0x41, 0)
    assert pci_address("41:00") is None
    assert pci_address(None) is None


@pytest.mark.parametrize("text", ["", "1 (x) S 1", "1 (x) S a b", "x (y) S " + "1 " * 30])
def test_a_cut_stat_record_is_unknown(text: str) -> None:
    """A record without all its numbers is no process."""
    assert "unknown" in read_proc_stat(text)


def test_a_status_record_tells_rights_and_a_pending_kill() -> None:
    """Effective user, groups, and SIGKILL in either mask."""
    text = (
        "Name:\tx\nState:\tD (disk sleep)\nTgid:\t7\nNSpid:\t7\nThreads:\t2\nUid:\t1\t2\t3\t4\n"
        "Gid:\t5\t6\t7\t8\nGroups:\t60800 4 \nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n"
    )
    found = read_proc_status(text)["known"]
    assert (found["uid"], found["gid"], found["groups"]) == (2, 6, [60800, 4])
    assert found["kill_pending"]
    assert "unknown" in read_proc_status("Name:\tx\n")


def test_a_control_group_is_the_line_that_this_hosts_systemd_uses() -> None:
    """On a v2 host only its own line counts; a v1 line that says `/` says nothing; no line is unknown."""
    text = "5:pids:/\n1:name=systemd:/docker/x\n0::/system.slice/a.service (deleted)\n"
    assert read_cgroup(text) == known("/docker/x")
    assert read_cgroup(text, unified=True) == known("/system.slice/a.service")
    assert read_cgroup(text.replace("/docker/x", "/")) == known("/system.slice/a.service")
    assert "unknown" in read_cgroup("")


TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0
"""


def test_listeners_are_told_from_connections_and_other_ports() -> None:
    """State 0A on that port, with the address in its usual form, for both families."""
    assert read_listening_sockets(TCP, 8080) == known([{"address": "127.0.0.1", "inode": 4711}])
    six = TCP.replace("0100007F:1F90 00000000", "00000000000000000000000001000000:1F90 00000000")
    assert read_listening_sockets(six, 8080)["known"][0]["address"] == "::1"
    assert "unknown" in read_listening_sockets("head\n 0: broken\n", 80)


def test_only_local_routes_are_own_addresses() -> None:
    """Broadcast and network entries are none, and v6 comes from its own file."""
    trie = (
        "     |-- 10.0.0.0\n        /32 link BROADCAST\n     |-- 10.0.0.5\n        /32 host LOCAL\n"
    )
    six = "fe800000000000000000000000000001 02 40 20 80     eth0\n"
    assert read_local_addresses(trie, six) == {"10.0.0.5", "fe80::1"}


SHOWN: dict[str, str] = {
    **dict.fromkeys(UNIT_PROPERTIES, ""),
    **dict.fromkeys(("MainPID", "ControlPID", "NRestarts", "ExecMainCode", "ExecMainStatus"), "0"),
    **dict.fromkeys(("SendSIGKILL", "NeedDaemonReload", "ConditionResult"), "yes"),
    **dict.fromkeys((name for name in UNIT_PROPERTIES if name.endswith("Monotonic")), "5"),
    "RemainAfterExit": "no",
    "StartLimitBurst": "5",
    "TimeoutStopUSec": "infinity",
    "RestartUSec": "100ms",
    "StartLimitIntervalUSec": "10s",
    "Job": "7",
    "Requires": "a.service b.slice",
}


def show(**changed: str) -> str:
    """Return the text of `systemctl show`."""
    return "".join(f"{key}={value}\n" for key, value in {**SHOWN, **changed}.items())


def test_a_shown_unit_has_types_and_microseconds() -> None:
    """Every key is there, with infinity as null and an empty job as none; what an old systemd does not tell is empty."""
    unit = read_unit_show(show())["known"]
    assert set(unit) == set(UNIT_PROPERTIES_ASKED)
    assert unit["OnFailureOf"] == []
    assert read_unit_show(show(OnFailureOf="a.service b.service"))["known"]["OnFailureOf"] == [
        "a.service",
        "b.service",
    ]
    assert (unit["TimeoutStopUSec"], unit["RestartUSec"], unit["Job"]) == (None, 100_000, 7)
    assert unit["Requires"] == ["a.service", "b.slice"]
    assert read_unit_show(show(Job=""))["known"]["Job"] == 0
    for bad in ({"MainPID": "x"}, {"SendSIGKILL": "?"}, {"TimeoutStopUSec": "[not set]"}):
        assert "unknown" in read_unit_show(show(**bad))
    assert "unknown" in read_unit_show("", 1, "Failed to connect to bus")


def test_the_buss_answer_says_the_same() -> None:
    """Bytes, job pairs and the largest number become what the text form gives."""
    data: dict[str, Any] = {
        **dict.fromkeys(UNIT_PROPERTIES, ""),
        "Job": [7, "/x"],
        "InvocationID": [0xAB, 1],
        "TimeoutStopUSec": 2**64 - 1,
    }
    unit = read_unit_properties(data)["known"]
    assert (unit["Job"], unit["InvocationID"], unit["TimeoutStopUSec"]) == (7, "ab01", None)
    assert "unknown" in read_unit_properties({"Job": [0, "/"]})


def test_argv_with_variables_is_not_known_before_the_start() -> None:
    """`$$` is a dollar; a lone one is a variable, which the start resolves."""
    assert started_argv(["a", "$$HOME"]) == ["a", "$HOME"]
    assert started_argv(["a", "${HOME}"]) is None
    assert read_exec_start([["/bin/x", ["/bin/x", "a"], False]]) == known(["/bin/x", "a"])
    assert "unknown" in read_exec_start([])


def test_jobs_and_journal_lines_that_cannot_be_read_are_unknown() -> None:
    """No jobs is a sentence; anything else must be a row."""
    assert read_jobs("No jobs running.\n\n") == known([])
    assert "unknown" in read_jobs("what\n")
    assert "unknown" in read_journal("{broken\n")


def test_a_journal_message_may_be_bytes_or_nothing() -> None:
    """Colours come as an array of bytes, what is too long as null."""
    text = '{"MESSAGE":[104,105],"PRIORITY":"3","__REALTIME_TIMESTAMP":"1500000"}\n\n{"MESSAGE":null}\n'
    one, two = read_journal(text)["known"]
    assert (one["message"], one["priority"], one["at"]) == ("hi", 3, 1.5)
    assert (two["message"], two["priority"]) == ("", 6)


def test_xids_have_a_class_and_the_new_ones_block() -> None:
    """What stands in no class is unknown, and of several recovery lines the last one counts."""
    assert [xid_class(code) for code in (13, 45, 119, 79, 74, 154, 999)] == [
        "app",
        "note",
        "reset",
        "host",
        "fabric",
        "state",
        "unknown",
    ]
    lines = [
        "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
        "NVRM: Xid (0000:03:00): 14, Channel 00000001",
    ]
    xids = read_xid_lines(lines)["known"]["xids"]
    assert [xid["class"] for xid in xids] == ["note", "note", "note"]
    assert read_xid_lines(lines[:1])["known"]["xids"][0]["class"] == "host"


def test_amd_answers_that_are_not_understood_are_unknown() -> None:
    """Broken JSON and an unknown unit are no numbers; N/A is null."""
    assert "unknown" in read_amd_processes("{")
    assert "unknown" in read_amd_memory("[{}]")
    card = '[{"gpu":0,"process_list":[{"process_info":{"pid":"7","memory_usage":{"vram_mem":"N/A"}}}]}]'
    assert read_amd_processes(card)["known"]["apps"][0]["vram_bytes"] is None
    memory = '[{"gpu":0,"mem_usage":{"used_vram":"N/A","total_vram":{"value":9,"unit":"MB"}}}]'
    assert read_amd_memory(memory) == known({"0": {"used_mb": None, "total_mb": 9}})

"""`RealMachine` on a lab host: a real systemd, real processes, simulated GPUs."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from on_host import ask

from reconciler.helper.outputs import started_argv
from reconciler.lab.hosts import SystemdHost

pytestmark = pytest.mark.lab

HOLD = "/usr/local/bin/fakegpu-hold"


def install(host: SystemdHost, name: str, text: str, *, start: bool = True) -> None:
    """Write a unit, load it, and start it."""
    host.check(["sh", "-c", f"cat > /etc/systemd/system/{name}"], text.encode())
    host.check(["systemctl", "daemon-reload"])
    if start:
        host.check(["systemctl", "start", name])


def background(host: SystemdHost, name: str, code: str, **properties: str) -> int:
    """Run python code in a unit of its own until it says that it is ready; return its main pid."""
    text = "[Service]\nType=notify\nNotifyAccess=all\n"
    text += "".join(f"{key}={value}\n" for key, value in properties.items())
    program = f"/tmp/{name}.py"
    ready = "import ctypes, os, sys, time, threading, socket\ndef ready(): os.system('systemd-notify --ready')\n"
    host.check(["sh", "-c", f"cat > {program}"], (ready + code).encode())
    install(host, f"{name}.service", text + f"ExecStart=/usr/bin/python3 {program}\n")
    shown = host.check(["systemctl", "show", "-P", "MainPID", f"{name}.service"])
    return int(shown)


HOLDER = "fd = os.open('/dev/nvidia{gpu}', os.O_RDWR)\n"
SLEEP = "ready()\ntime.sleep(600)\n"


def held(host: SystemdHost) -> dict[int, dict[str, Any]]:
    """Return the holders by pid; the scan must be complete."""
    scan = ask(host, "answer = m.holders()")["known"]
    assert scan["complete"], scan
    assert scan["unreadable"] == 0
    return {one["pid"]: one for one in scan["holders"]}


def test_an_idle_host_has_no_holder_and_every_card(lab_host: SystemdHost) -> None:
    """Nothing holds a card on a fresh host, and each card has its UUID, minor and node (S: 1.1)."""
    answer = ask(lab_host, "answer = [m.gpus(), m.apps(), m.holders()]")
    gpus, apps, holders = (one["known"] for one in answer)
    assert [(gpu["minor"], gpu["node"]) for gpu in gpus["gpus"]] == [
        (minor, f"/dev/nvidia{minor}") for minor in range(4)
    ]
    assert len({gpu["uuid"] for gpu in gpus["gpus"]}) == 4
    assert gpus["driver"]
    assert gpus["gpus"][0]["recovery_action"] == "None"  # The driver's own word for: nothing to do.
    assert gpus["gpus"][0]["persistence"] == "Enabled"
    assert apps == []
    assert holders == {"complete": True, "unreadable": 0, "holders": []}


def test_a_field_that_the_driver_refuses_is_left_out_and_remembered(lab_host: SystemdHost) -> None:
    """An older driver fails a whole query for one name: the cards are told all the same, and the next helper does not ask again."""
    code = """
m._gpu_fields = ["persistence_mode", "no.such.field"]
cards = m.gpus()
answer = [cards, m._gpu_fields, host.RealMachine()._remembered_fields(m._driver({}))]
m.remove("/run/reconciler/gpu-fields.json")
"""
    cards, asked, remembered = ask(lab_host, code)
    assert [card["persistence"] for card in cards["known"]["gpus"]] == ["Enabled"] * 4
    assert asked == remembered == ["persistence_mode"]


def test_a_holder_is_told_by_device_number_whatever_its_path(lab_host: SystemdHost) -> None:
    """A node of another name and directory with the card's number is that card, and no other card."""
    number = lab_host.check(["stat", "-c", "%Hr %Lr", "/dev/nvidia2"]).split()
    leader = str(lab_host.leader)
    subprocess.run(
        ["nsenter", "-t", leader, "-m", "mknod", "/dev/other-name", "c", *number], check=True
    )
    try:
        pid = background(lab_host, "byname", "fd = os.open('/dev/other-name', os.O_RDWR)\n" + SLEEP)
        assert held(lab_host)[pid]["minors"] == [2]
    finally:
        subprocess.run(["nsenter", "-t", leader, "-m", "rm", "/dev/other-name"], check=True)


def test_a_forked_child_and_an_escaped_one_are_seen(lab_host: SystemdHost) -> None:
    """Inherited descriptors hold the card too, also outside the unit's group; its group says which is which."""
    install(
        lab_host,
        "llm.service",
        "[Service]\nEnvironment=RECONCILER_SERVER=llm SPT_NOENV=1\nPrivateMounts=yes\n"
        f"ExecStart={HOLD} --gpu 1 --mib 1000 --child ignore-term --child escape,setsid,ignore-term\n",
    )
    code = """
import time
def groups(): return sorted(one["cgroup"] for one in m.holders()["known"]["holders"])
while len(groups()) < 3 or groups()[0] != "/lab-escaped": time.sleep(0.1)
answer = [m.holders()["known"]["holders"], m.unit("llm.service")["known"], m.mount_namespace()]
"""
    found, unit, namespace = ask(lab_host, code)
    assert [one["minors"] for one in found] == [[1], [1], [1]]
    groups = sorted(one["cgroup"] for one in found)
    assert groups == ["/lab-escaped", "/system.slice/llm.service", "/system.slice/llm.service"]
    assert {one["mark"] for one in found} == {"llm"}
    assert {one["invocation"] for one in found} == {unit["InvocationID"]}
    assert {one["mount_ns"] for one in found} != {namespace}
    assert len({one["mount_ns"] for one in found}) == 1


def test_a_zombie_leader_with_a_living_thread_is_a_holder(lab_host: SystemdHost) -> None:
    """A dead leader's /proc entry has no files; its threads' has, and its group and mark are found too."""
    code = HOLDER.format(gpu=0) + (
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ready()\n"
        "number = {'x86_64': 60, 'aarch64': 93}[os.uname().machine]\n"
        "ctypes.CDLL(None).syscall(number, 0)\n"
    )
    pid = background(lab_host, "undead", code, Environment="RECONCILER_SERVER=undead")
    assert lab_host.exec(["fuser", "/dev/nvidia0"]).exit_status == 1
    one = held(lab_host)[pid]
    assert (one["state"], one["minors"], one["mark"]) == ("Z", [0], "undead")
    assert one["cgroup"] == "/system.slice/undead.service"
    assert one["threads"] > 1
    assert one["exe"].startswith("/usr/bin/python3")
    inside = ask(lab_host, "answer = m.processes('/system.slice/undead.service')")["known"]
    assert [process["pid"] for process in inside] == [pid]


def test_a_thread_with_a_table_of_its_own_is_looked_into(lab_host: SystemdHost) -> None:
    """A thread that unshared its descriptors can hold a card that the leader's table does not show."""
    code = (
        "def own():\n"
        "    assert ctypes.CDLL(None).unshare(0x400) == 0\n"
        "    fd = os.open('/dev/nvidia3', os.O_RDWR)\n"
        "    ready()\n"
        "    time.sleep(600)\n"
        "threading.Thread(target=own).start()\n"
    )
    pid = background(lab_host, "apart", code)
    assert held(lab_host)[pid]["minors"] == [3]


def test_a_mapping_without_a_descriptor_is_a_holder(lab_host: SystemdHost) -> None:
    """A process may close the node and keep the mapping; the mapped file itself tells the number."""
    leader = str(lab_host.leader)
    subprocess.run(
        ["nsenter", "-t", leader, "-m", "sh", "-c", "umask 0; mknod /dev/nvidia9 c 1 5"],
        check=True,
    )
    code = (
        "libc = ctypes.CDLL(None)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]\n"
        "fd = os.open('/dev/nvidia9', os.O_RDWR)\n"
        "assert libc.mmap(None, 4096, 3, 2, fd, 0) not in (None, ctypes.c_void_p(-1).value)\n"
        "os.close(fd)\n"
    )
    try:
        pid = background(lab_host, "mapped", code + SLEEP)
        one = held(lab_host)[pid]
    finally:
        subprocess.run(["nsenter", "-t", leader, "-m", "rm", "-f", "/dev/nvidia9"], check=True)
    assert (one["minors"], one["via"]) == ([9], "map")


def test_what_cannot_be_looked_into_is_counted(lab_host: SystemdHost) -> None:
    """An ordinary user's scan proves nothing: unreadable processes are counted, complete is false (S: never free)."""
    background(lab_host, "hidden", HOLDER.format(gpu=0) + SLEEP)
    scan = ask(lab_host, "answer = m.holders()", user="deploy")["known"]
    assert scan["unreadable"] > 0
    assert not scan["complete"]


def test_every_listener_of_a_port_is_found_with_its_unit(lab_host: SystemdHost) -> None:
    """Two units may share a port by SO_REUSEPORT, in v4 and v6: all listeners are named (S: whose port)."""
    code = (
        "s = socket.socket(socket.AF_INET{six})\n"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('{address}', 8123))\ns.listen()\n"
    )
    one = background(lab_host, "ours", code.format(six="", address="0.0.0.0") + SLEEP)
    two = background(lab_host, "theirs", code.format(six="", address="0.0.0.0") + SLEEP)
    six = background(lab_host, "six", code.format(six="6", address="::1") + SLEEP)
    found = ask(lab_host, f"answer = m.listeners(8123, {one})")["known"]
    seen = sorted((one["address"], one["units"], one["pids"]) for one in found)
    assert seen == [
        ("0.0.0.0", ["ours.service"], [one]),
        ("0.0.0.0", ["theirs.service"], [two]),
        ("::1", ["six.service"], [six]),
    ]
    assert ask(lab_host, "answer = m.listeners(8124, 0)") == {"known": []}


def test_a_listener_in_the_servers_own_network_namespace_is_found(lab_host: SystemdHost) -> None:
    """A server with PrivateNetwork= listens where this layer's own table does not show it."""
    code = "s = socket.socket()\ns.bind(('127.0.0.1', 8125))\ns.listen()\n"
    pid = background(lab_host, "apartnet", code + SLEEP, PrivateNetwork="yes")
    found = ask(lab_host, f"answer = [m.listeners(8125, 0), m.listeners(8125, {pid})]")
    assert found[0] == {"known": []}
    assert [one["pids"] for one in found[1]["known"]] == [[pid]]


def test_a_signal_goes_to_the_same_process_or_to_nobody(lab_host: SystemdHost) -> None:
    """A start time that differs is a stranger with the number, and is refused; the dead are gone."""
    pid = background(lab_host, "target", SLEEP)
    code = f"""
import signal, time
start = processes.process_stat({pid})["start_ticks"]
answer = [m.signal({pid}, start + 1, signal.SIGKILL), m.signal(1, 0, signal.SIGTERM)]
answer.append(processes.process_stat({pid}) is not None)
answer.append(m.signal({pid}, start, signal.SIGKILL))
while processes.process_stat({pid}): time.sleep(0.02)
answer.append(m.signal({pid}, start, signal.SIGKILL))
"""
    stranger, init, alive, ours, dead = ask(lab_host, code)
    assert stranger.startswith("refused: another process")
    assert init.startswith("refused")
    assert alive
    assert (ours, dead) == ("sent", "gone")


def test_one_units_group_is_killed_whole_and_no_other(lab_host: SystemdHost) -> None:
    """cgroup.kill ends all left-overs of a unit that is down, and refuses what is no unit's group."""
    install(
        lab_host,
        "left.service",
        f"[Service]\nKillMode=process\nExecStart={HOLD} --gpu 0 --mib 10 --no-oom --child ignore-term,setsid\n",
    )
    code = """
import time
group = "/system.slice/left.service"
while len(m.holders()["known"]["holders"]) < 2: time.sleep(0.05)
m.stop("left.service")
while m.unit("left.service")["known"]["ActiveState"] != "inactive": time.sleep(0.05)
before = m.processes(group)["known"]
answer = [readings.unit_phase(m.unit("left.service")["known"]), len(before), m.kill_group(group)]
while m.processes(group)["known"]: time.sleep(0.05)
time.sleep(0.2)
answer += [m.kill_group("/system.slice"), m.kill_group("/"), m.kill_group("/system.slice/../x.service")]
answer.append(m.holders()["known"]["holders"])
"""
    phase, left, result, *refused, holders = ask(lab_host, code)
    assert (phase, left, result) == ("down", 1, "sent")
    assert all(word.startswith("refused") for word in refused)
    assert holders == []


def test_a_card_is_released_when_its_last_holder_is_gone_and_not_before(
    lab_host: SystemdHost,
) -> None:
    """The shared judgement on real samples: held while a left-over lives, released after it ended."""
    install(
        lab_host,
        "gone.service",
        f"[Service]\nKillMode=process\nExecStart={HOLD} --gpu 2 --mib 900 --no-oom --child setsid,ignore-term\n",
    )
    code = """
import time
group, cards = "/system.slice/gone.service", m.gpus()["known"]["gpus"]
uuid = next(card["uuid"] for card in cards if card["minor"] == 2)
baselines = {uuid: {"used_mib": 1, "total_mib": 24576}}
context = {"unit": "gone.service", "control_group": group, "boot_id": m.boot_id(), "container": "x"}
def sample():
    return {"at": m.boottime(), "boot_id": m.boot_id(), "gpus": m.gpus(), "apps": m.apps(), "holders": m.holders(),
            "unit": m.unit("gone.service"), "kernel": m.kernel_log(None), "processes": m.processes(group)}
def judge():
    samples = []
    while len(samples) < 3:
        samples.append(sample())
    return readings.released(samples, [uuid], baselines, context, 0.1)
while len(m.holders()["known"]["holders"]) < 2: time.sleep(0.05)
m.stop("gone.service")
while m.unit("gone.service")["known"]["ActiveState"] != "inactive": time.sleep(0.05)
held = judge()
m.kill_group(group)
while m.processes(group)["known"]: time.sleep(0.05)
answer = [held["verdict"], [one["class"] for one in held["holders"]], judge()]
"""
    verdict, owners, after = ask(lab_host, code)
    assert (verdict, owners) == ("not-released", ["owned"])
    assert after == {"verdict": "released", "reasons": [], "holders": []}


def test_a_hung_nvidia_smi_does_not_pile_up(lab_host: SystemdHost) -> None:
    """A probe that does not answer is ended at its limit, and its card is unknown, not free; the look waits for it once."""
    lab_host.check(["sh", "-c", 'echo \'{"mode": "hang"}\' > /run/fakegpu/fault.json'])
    code = """
m = host.RealMachine(probe_limit_s=3)
began = m.boottime()
answer = [m.gpus(), m.apps(), m.boottime() - began, m.listdir('/run/reconciler')]
"""
    gpus, apps, took_s, names = ask(lab_host, code)
    assert took_s < 5, "a look has 40 s, and a probe 25"
    assert "in time" in gpus["unknown"]
    assert "in time" in apps["unknown"]
    assert "probe.json" not in names
    assert lab_host.exec(["pgrep", "-f", "bin/nvidia-smi"]).exit_status == 1


def test_a_descriptor_into_a_hung_file_system_does_not_hang_the_scan(lab_host: SystemdHost) -> None:
    """A plain stat of it waits for ever, with the lock held; asked as the scan asks, it is answered, and its holder is found."""
    install(lab_host, "hang.service", "[Service]\nExecStart=fakegpu-fuse /dev/lab-hang\n")
    wait = "import time\nwhile not os.path.ismount('/dev/lab-hang'): time.sleep(0.05)\n"
    opened = wait + "hung = os.open('/dev/lab-hang', os.O_RDWR)\n" + HOLDER.format(gpu=2)
    pid = background(lab_host, "in-hung", opened + SLEEP)
    lab_host.check(["systemctl", "kill", "--signal=STOP", "hang.service"])
    try:
        plain = f"for fd in /proc/{pid}/fd/*; do timeout -k1 1 stat -L $fd || exit 7; done"
        assert lab_host.exec(["bash", "-c", plain]).exit_status == 7
        code = "began = m.boottime()\nanswer = [m.holders(), m.boottime() - began]"
        scan, took_s = ask(lab_host, code)
    finally:
        lab_host.check(["systemctl", "kill", "--signal=KILL", "hang.service"])
    assert took_s < 5
    assert scan["known"]["complete"]
    assert [one["minors"] for one in scan["known"]["holders"] if one["pid"] == pid] == [[2]]


@pytest.fixture
def thaw(lab_host: SystemdHost) -> Iterator[list[str]]:
    """Free the processes that a test froze."""
    frozen: list[str] = []
    yield frozen
    for pid in frozen:
        lab_host.lab.script("stuck.sh", lab_host.name, pid, "off", deadline_s=20)


def test_no_second_probe_beside_one_that_cannot_die(lab_host: SystemdHost, thaw: list[str]) -> None:
    """While an nvidia-smi in D state lives, with SIGKILL pending, no other is started; afterwards one is."""
    lab_host.check(["sh", "-c", 'echo \'{"mode": "hang"}\' > /run/fakegpu/fault.json'])
    answers: list[Any] = []
    code = "m = host.RealMachine(probe_limit_s=6)\nanswer = m.gpus()"
    first = threading.Thread(target=lambda: answers.append(ask(lab_host, code)))
    first.start()
    wait = "import time\nwhile m.read('/run/reconciler/probe.json') is None: time.sleep(0.05)\n"
    pid = ask(
        lab_host,
        wait + "answer = __import__('json').loads(m.read('/run/reconciler/probe.json'))['pid']",
    )
    lab_host.lab.script("stuck.sh", lab_host.name, str(pid), "on", deadline_s=20)
    thaw.append(str(pid))
    first.join()
    assert "in time" in answers[0]["unknown"]
    code = "t = m.boottime()\nanswer = [m.gpus(), m.apps(), m.boottime() - t]"
    gpus, apps, took_s = ask(lab_host, code)
    assert f"pid {pid}" in gpus["unknown"]
    assert f"pid {pid}" in apps["unknown"]
    assert took_s < 2
    lab_host.check(["rm", "/run/fakegpu/fault.json"])
    lab_host.lab.script("stuck.sh", lab_host.name, thaw.pop(), "off", deadline_s=20)
    code = f"import time\nwhile processes.process_stat({pid}): time.sleep(0.05)\nanswer = m.gpus()"
    assert len(ask(lab_host, code)["known"]["gpus"]) == 4


ARGV = [
    "/bin/sleep",
    "600",
    "a b",
    'quo"te',
    "it's",
    "new\nline",
    "$HOME",
    "${X}",
    "$(id)",
    "%n",
    "\\t",
    "",
    ";",
    "ü",
]


def quoted(word: str) -> str:
    """Quote one argument by the safe recipe of systemd's own syntax."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("$", "$$"), ("%", "%%"), ("\n", "\\n")):
        word = word.replace(plain, escaped)
    return f'"{word}"'


def test_argv_and_environment_are_read_exactly(lab_host: SystemdHost) -> None:
    """Quotes, newlines, dollars and percent signs come back as the process gets them."""
    install(
        lab_host,
        "exact.service",
        '[Service]\nUser=deploy\nEnvironment="A=x y" \'B=q"q\' C=$HOME\nEnvironmentFile=-/etc/nope.env\n'
        f"ExecStart=/bin/true {' '.join(quoted(word) for word in ARGV[2:])}\n",
        start=False,
    )
    found = ask(lab_host, "answer = m.unit_command('exact.service')")["known"]
    assert started_argv(found["argv"]) == ["/bin/true", *ARGV[2:]]
    assert found["environment"] == ["A=x y", 'B=q"q', "C=$HOME"]
    assert found["environment_files"] == ["/etc/nope.env"]
    assert found["user"] == "deploy"


def test_the_effective_stop_limit_is_read_to_the_microsecond(lab_host: SystemdHost) -> None:
    """A drop-in in /run changes the running unit's effective values, from the bus and from text alike."""
    background(lab_host, "limits", SLEEP)
    drop_in = "/run/systemd/system/limits.service.d/zz-test.conf"
    code = f"""
before = m.unit("limits.service")["known"]
m.write("{drop_in}", b"[Service]\\nTimeoutStopSec=61500250us\\nRestart=no\\n", 0o644)
m.reload()
after = m.unit("limits.service")["known"]
host._unit_properties = lambda name: readings.unknown("no busctl")
answer = [before["TimeoutStopUSec"], after, m.unit("limits.service")["known"], before["InvocationID"]]
"""
    before, after, by_text, invocation = ask(lab_host, code)
    assert before == 90_000_000
    assert after["TimeoutStopUSec"] == 61_500_250
    assert after["InvocationID"] == invocation
    assert after["DropInPaths"] == [drop_in]
    assert by_text == after


def test_unit_files_are_read_as_they_are_on_disk(lab_host: SystemdHost) -> None:
    """Texts of fragment and drop-ins, a masked unit and one that is not there are told apart."""
    install(lab_host, "plain.service", "[Service]\nExecStart=/bin/true\n", start=False)
    lab_host.check(["ln", "-s", "/dev/null", "/etc/systemd/system/masked.service"])
    code = """
m.write("/run/systemd/system/plain.service.d/zz.conf", b"[Service]\\nRestart=no\\n", 0o644)
m.reload()
answer = [m.unit_files(name + ".service")["known"] for name in ("plain", "masked", "absent")]
"""
    plain, masked, absent = ask(lab_host, code)
    assert plain["text"] == "[Service]\nExecStart=/bin/true\n"
    assert [one["text"] for one in plain["drop_ins"]] == ["[Service]\nRestart=no\n"]
    assert (plain["link"], plain["package"]) == (False, None)
    assert (masked["text"], masked["link"]) == (None, True)
    assert (absent["fragment"], absent["text"]) == (None, None)


def test_systemd_judges_a_unit_before_it_is_installed(lab_host: SystemdHost) -> None:
    """A bad specifier and a missing program are complaints; a good unit has none; nothing is left behind."""
    code = """
texts = ["[Service]\\nExecStart=/bin/true %Z\\n", "[Service]\\nExecStart=/nope\\n", "[Service]\\nExecStart=/bin/true\\n"]
answer = [m.verify_unit("judged.service", text)["known"] for text in texts] + [m.listdir("/run/reconciler")]
"""
    specifier, missing, good, left = ask(lab_host, code)
    assert specifier
    assert missing
    assert good == []
    assert not [name for name in left if name.startswith("verify-")]


def test_a_unit_is_started_enabled_and_stopped_without_waiting(lab_host: SystemdHost) -> None:
    """Jobs are queued; enabling is a link that also a trial in /run does not divert; both can be undone."""
    text = "[Service]\nExecStart=/bin/sleep 600\n[Install]\nWantedBy=multi-user.target\n"
    install(lab_host, "job.service", text, start=False)
    code = """
import time
def phase(): return readings.unit_phase(m.unit("job.service")["known"])
m.write("/run/systemd/system.control/job.service", b"[Service]\\nExecStart=/bin/sleep 601\\n[Install]\\nWantedBy=multi-user.target\\n", 0o644)
m.reload()
m.start("job.service")
while phase() != "running": time.sleep(0.05)
m.enable("job.service"); m.enable("job.service")
answer = [m.unit("job.service")["known"]["FragmentPath"], host.os.readlink(host._WANTS + "/job.service")]
m.remove("/run/systemd/system.control/job.service")
m.reload()
answer += [m.unit("job.service")["known"][key] for key in ("FragmentPath", "UnitFileState")]
m.disable("job.service"); m.disable("job.service")
m.reload()  # systemd remembers the enabled state until then.
answer.append(m.unit("job.service")["known"]["UnitFileState"])
m.stop("job.service")
while phase() != "down": time.sleep(0.05)
m.reset_failed("job.service"); m.reset_failed("nope.service")
try:
    m.start("nope.service")
except OSError as error:
    answer.append(str(error))
"""
    assert ask(lab_host, code) == [
        "/run/systemd/system.control/job.service",
        "/etc/systemd/system/job.service",
        "/etc/systemd/system/job.service",
        "enabled",
        "disabled",
        "systemctl start: Failed to start nope.service: Unit nope.service not found.",
    ]


def test_a_journal_is_read_of_one_run(lab_host: SystemdHost) -> None:
    """The lines of one invocation, systemd's own about it included, oldest first."""
    text = "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo run $$INVOCATION_ID; exit 3'\n"
    install(lab_host, "said.service", text, start=False)
    for _ in range(2):
        lab_host.exec(["systemctl", "start", "said.service"])
    lab_host.check(["journalctl", "--sync"])
    code = """
run = m.unit("said.service")["known"]["InvocationID"]
answer = [run, m.journal("said.service", run, 50)["known"], m.journal("said.service", None, 50)["known"]]
"""
    run, of_run, of_unit = ask(lab_host, code)
    messages = [entry["message"] for entry in of_run]
    assert f"run {run}" in messages
    assert sum(message.startswith("run ") for message in messages) == 1
    assert any("status=3" in message for message in messages)
    assert sum(entry["message"].startswith("run ") for entry in of_unit) == 2


def test_a_container_says_that_its_kernel_log_is_elsewhere(lab_host: SystemdHost) -> None:
    """No kernel message in a container is not "no Xid": the outer layer must be asked."""
    answer = ask(lab_host, "answer = [m.kernel_log(None), m.identity(), m.boot_id()]")
    assert answer[0]["elsewhere"]
    assert answer[1]["known"]["container"] == "systemd-nspawn"
    assert answer[2] == answer[1]["known"]["boot_id"]


SERVER = """
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/go":
            self.send_response(302); self.send_header("Location", "http://10.0.0.1/"); self.end_headers()
            return
        if self.path == "/drip":
            self.send_response(200); self.send_header("Content-Length", "1000"); self.end_headers()
            while True: self.wfile.write(b"."); time.sleep(0.2)
        body = (self.headers.get("Authorization") or "none").encode() * (100 if self.path == "/big" else 1)
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
class Server(http.server.ThreadingHTTPServer):
    def server_bind(self):  # The base class asks a name server, which a lab host has none of.
        http.server.socketserver.TCPServer.server_bind(self)
server = Server(("0.0.0.0", 8200), H)
ready()
server.serve_forever()
"""


def test_a_fetch_stays_on_this_machine_and_within_its_limits(lab_host: SystemdHost) -> None:
    """Only own addresses, no redirect, a cap on bytes, a cap on the whole time, the token from its file."""
    background(lab_host, "web", SERVER)
    code = f"""
import base64
m.write("/etc/key", b"s3cret\\n")
def get(path, address="127.0.0.1", port=8200, **more):
    request = dict(method="GET", address=address, port=port, path=path, headers={{}}, body=None,
                   timeout_s=1.0, max_bytes=64, bearer_file=None)
    request.update(more)
    return m.fetch(request)
answer = dict(
    plain=get("/"), own=get("/", {lab_host.ip!r}), key=get("/", bearer_file="/etc/key"), big=get("/big"),
    go=get("/go"), drip=get("/drip"), refused=get("/", port=8299),
    foreign=get("/", "10.213.99.99"), name=get("/", "localhost"), nokey=get("/", bearer_file="/etc/none"),
)
"""
    found = ask(lab_host, code)
    assert found["plain"]["known"]["body"] == "bm9uZQ=="
    assert found["own"]["known"]["status"] == 200
    assert found["key"]["known"]["body"] == "QmVhcmVyIHMzY3JldA=="
    assert found["big"]["known"]["truncated"]
    assert found["go"]["known"]["status"] == 302
    assert found["drip"] == {"unknown": "timed out"}
    assert "ConnectionRefused" in found["refused"]["unknown"]
    assert "not an address of this machine" in found["foreign"]["unknown"]
    assert "not an address" in found["name"]["unknown"]
    assert "key file" in found["nokey"]["unknown"]
    assert "s3cret" not in json.dumps(found)


def test_a_program_runs_as_the_user_without_a_card_in_sight(lab_host: SystemdHost) -> None:
    """User, groups and home are the user's; output is returned; a limit ends it and its children."""
    code = """
import time
script = "id -un; id -Gn; echo $HOME $CUDA_VISIBLE_DEVICES end; umask; exit 3"
answer = [m.run_as("deploy", ["/bin/sh", "-c", script], 10)["known"], m.run_as("nobody-here", ["/bin/true"], 5)]
began = time.monotonic()
answer.append(m.run_as("deploy", ["/bin/sh", "-c", "sleep 77 & sleep 77"], 0.5))
answer.append(time.monotonic() - began)
answer.append(m.run_as(None, ["/no/such"], 1))
"""
    ran, nobody, slow, took_s, missing = ask(lab_host, code)
    assert ran["exit_status"] == 3
    assert ran["stdout"].splitlines()[0] == "deploy"
    assert ran["stdout"].splitlines()[-1] == "0077"
    assert "end" in ran["stdout"]
    assert "no user" in nobody["unknown"]
    assert "within 0.5 s" in slow["unknown"]
    assert took_s < 3
    assert "could not be run" in missing["unknown"]
    assert lab_host.exec(["pgrep", "-f", "sleep 77"]).exit_status == 1


def test_a_servers_group_gets_an_entry_once(lab_host: SystemdHost) -> None:
    """A unit with a bare group number fails with 216/GROUP; with the entry it starts with that group."""
    text = "[Service]\nSupplementaryGroups=60999\nExecStart=/bin/sleep 600\n"
    install(lab_host, "grouped.service", text)
    code = """
import time
while m.unit("grouped.service")["known"]["ExecMainStatus"] != 216: time.sleep(0.05)
m.ensure_group(60999); m.ensure_group(60999)
m.start("grouped.service")
while readings.unit_phase(m.unit("grouped.service")["known"]) != "running": time.sleep(0.05)
answer = m.processes("/system.slice/grouped.service")["known"][0]["groups"]
"""
    assert ask(lab_host, code) == [60999]


RESET = """
consented, protocol, machine = (sys.modules["reconciler.helper." + name] for name in ("consented", "protocol", "machine"))
class Bare(host.RealMachine):  # A lab host is a container, whose kernel log is elsewhere: there a reset is refused.
    def identity(self):
        return {"known": dict(super().identity()["known"], container=None)}
    def kernel_log(self, cursor):
        return {"known": {"cursor": "now", "lines": []}}
def reset(m):
    try:
        return consented.reset_named_gpus(protocol.Act(m, "", {"gpus": [GPU]}))["problems"]
    except machine.Refused as refused:
        return refused.reason
GPU = m.gpus()["known"]["gpus"][0]["uuid"]
answer = [reset(m), reset(Bare())]
"""


@pytest.mark.nightly
def test_a_card_is_reset_only_while_nobody_uses_it(lab_host: SystemdHost) -> None:
    """Rung 9 by the tool's own words: in a container, without a need, beside work or a holder refused; else done, persistence as before."""

    def seen(fault: str = "", *holders: str) -> tuple[Any, str]:
        if fault:
            lab_host.check(["sh", "-c", "cat >/run/fakegpu/fault.json"], fault.encode())
        for gpu in holders:
            background(lab_host, "resets", f"fd = os.open('/dev/nvidia{gpu}', os.O_RDWR)\nmem = os.memfd_create('fakegpu-1-500-ab')\n{SLEEP}")  # fmt: skip
        in_container, bare = ask(lab_host, RESET, last="consented")
        assert in_container == "InContainer"
        if holders:
            lab_host.check(["systemctl", "stop", "resets"])
        asked = "--query-gpu=memory.used,persistence_mode,gpu_recovery_action"
        return bare, lab_host.check(["nvidia-smi", asked, "--format=csv,noheader,nounits", "-i", "0"])  # fmt: skip

    broken = '{"recovery": {"0": "Reset"}, "leak_mib": {"0": 3000}}'
    assert seen() == ("NoNeed", "1, Enabled, None\n")
    assert seen(broken, "1") == ("Computing", "3001, Enabled, Reset\n")
    assert seen("", "0") == ("GpuHeld", "3001, Enabled, Reset\n")
    assert seen() == ([], "1, Enabled, None\n")

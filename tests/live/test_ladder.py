"""Every way in which a server is known to leave a GPU held, on a real systemd, by the product's own ladder (gpu-release.md 6).

After each, the witness vouches from outside: nobody foreign was signalled, nothing of ours began on a held card.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from lab_engine import wait_for
from ladder import BUDGETS, LEASE, Ladder, Outcome, Phase, Reason, Row

from reconciler.effects.ports import Request
from reconciler.helper import build
from reconciler.helper.enrol import helper_command
from reconciler.lab.faults import HOLD, _v1_freezer
from reconciler.lab.hosts import LabPaths, SystemdHost

pytestmark = pytest.mark.lab

LEFT = ("--child", "setsid,ignore-term")


@pytest.fixture(scope="module")
def _ladder(lab: LabPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ladder]:
    host = SystemdHost.boot("rows", lab=lab, gpus=2)
    ladder = Ladder.on(host, lab, Path(tmp_path_factory.mktemp("rows")))
    yield ladder
    ladder.close()
    host.stop(hard=True)


@pytest.fixture
def ladder(_ladder: Ladder) -> Iterator[Ladder]:
    """Give the ladder on the host that all rows share, and have the witness vouch after each."""
    yield _ladder
    _ladder.witness.vouch()
    _ladder.clear()
    _ladder.witness.vouch()


def not_started_beside(ladder: Ladder, row: Row) -> None:
    """Assert that a start by hand, while the card is held, is kept out."""
    before = ladder.witness.now()
    assert before
    ladder.host.check(["rm", "-f", f"/run/reconciler/{row.unit}.disarmed"])
    ladder.host.exec(["systemctl", "start", row.unit])
    assert ladder.state(row) in {"inactive", "failed"}
    assert ladder.witness.now() == before


# -- what a stop leaves behind ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "signals"),
    [("control-group", []), ("mixed", []), ("process", ["TERM", "KILL"]), ("none", ["TERM", "KILL"])],
)  # fmt: skip
def test_a_left_over_by_kill_mode(ladder: Ladder, mode: str, signals: list[str]) -> None:
    """A child that ignores SIGTERM: systemd ends it or leaves it, by KillMode; what is left is proven own, and ended (S3)."""
    row = ladder.up(*LEFT, settings={"KillMode": mode})
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.signals == signals
    assert ladder.witness.now() == set()


def test_a_child_that_left_the_control_group(ladder: Ladder) -> None:
    """Its user, group, marks and mount namespace prove it own; systemd knows nothing of it."""
    row = ladder.up("--child", "escape,setsid,ignore-term")
    ladder.remember(row)
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.signals == ["TERM", "KILL"]


def test_a_worker_that_left_and_wiped_its_environment(ladder: Ladder) -> None:
    """A wiped environment (setproctitle) leaves no mark in the environment: the server's group and the recorded mount namespace prove it."""
    row = ladder.up(command=["/usr/bin/python3", "-c", WIPED], settings={"SendSIGKILL": "yes"})
    wait_for(lambda: len(ladder.witness.now()) == 2)
    wait_for(lambda: any(one.group == "/lab-escaped" for one in ladder.witness.holding()[-1]))
    (wiped,) = [one for one in ladder.witness.holding()[-1] if one.group == "/lab-escaped"]
    wait_for(lambda: not ladder.host.check(["cat", f"/proc/{wiped.pid}/environ"]).strip("\0"))
    ladder.remember(row)
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.signals


WIPED = """
import ctypes, os, signal
os.open('/dev/nvidia0', os.O_RDWR)
if os.fork() == 0:
    os.setsid()
    os.makedirs('/sys/fs/cgroup/lab-escaped', exist_ok=True)
    open('/sys/fs/cgroup/lab-escaped/cgroup.procs', 'w').write(str(os.getpid()))
    first, last = [int(w) for w in open('/proc/self/stat').read().rpartition(')')[2].split()[47:49]]
    ctypes.memset(first, 0, last - first)
signal.pause()
"""


def test_a_zombie_leader_with_living_threads(ladder: Ladder) -> None:
    """The main thread is dead, /proc/PID/fd is empty, and the card is held: found, and ended."""
    row = ladder.up(command=["/usr/bin/python3", "-c", UNDEAD], settings={"KillMode": "none"})
    wait_for(lambda: "Z" in ladder.host.check(["cut", "-d)", "-f2", f"/proc/{ladder.show(row, 'MainPID')}/stat"]))  # fmt: skip
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.signals[:1] == ["TERM"]


UNDEAD = """
import ctypes, os, threading, time
os.open('/dev/nvidia0', os.O_RDWR)
threading.Thread(target=time.sleep, args=(900,)).start()
ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
"""


@pytest.mark.parametrize("child", ["zombie", "vfork"])
def test_a_parent_of_the_dead_and_one_in_vfork(ladder: Ladder, child: str) -> None:
    """A zombie child holds nothing; a parent in D state by vfork can be killed: both are released without our signal."""
    row = ladder.up("--child", child)
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.signals == []


def test_a_server_that_ignores_sigterm(ladder: Ladder) -> None:
    """It is ended by systemd after the stop timeout that the disarming wrote."""
    row = ladder.up("--on-term", "ignore")
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ladder.show(row, "Result") == "timeout"
    assert ended.signals == []


def test_disarming_never_shortens_what_our_unit_gives_its_engine(ladder: Ladder) -> None:
    """The unit has the engine's own time to end on top of `timeouts.stop`: a server that needs it ends by itself."""
    row = ladder.up("--on-term", "slow:2.5", settings={"TimeoutStopSec": "6s"})
    ladder.produced(row)
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ladder.show(row, "Result") == "success"


def test_a_server_that_systemd_may_not_kill(ladder: Ladder) -> None:
    """SendSIGKILL=no: the stop ends with everything still there; it is in the unit's group, and ended by us."""
    row = ladder.up("--on-term", "ignore", settings={"SendSIGKILL": "no"})
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.signals == ["TERM", "KILL"]


# -- what cannot be ended --------------------------------------------------------------------------------------


@contextmanager
def frozen(ladder: Ladder, row: Row) -> Iterator[None]:
    """Have the server in D state by the freezer of this machine."""
    pid = ladder.show(row, "MainPID")
    ladder.host.lab.script("stuck.sh", ladder.host.name, pid, "on", deadline_s=20)
    try:
        yield
    finally:
        ladder.host.lab.script("stuck.sh", ladder.host.name, pid, "off", deadline_s=20)


@contextmanager
def hung_in_a_driver(ladder: Ladder, row: Row) -> Iterator[None]:
    """Have the server wait for a device that never answers: in D state from the first signal on."""
    ladder.host.check(
        ["systemd-run", "--quiet", "--unit=lab-hang", "fakegpu-fuse", "/dev/lab-hang"]
    )
    wait_for(lambda: ladder.host.exec(["mountpoint", "-q", "/dev/lab-hang"]).exit_status == 0)
    order = {"touch": "/dev/lab-hang", "pid": int(ladder.show(row, "MainPID"))}
    ladder.host.check([HOLD, "--tell", json.dumps(order)])
    try:
        yield
    finally:
        ladder.host.check(["systemctl", "stop", "lab-hang"])


@pytest.mark.parametrize("stuck", [frozen, hung_in_a_driver])
def test_a_process_in_d_state(ladder: Ladder, stuck: object) -> None:
    """Not even SIGKILL ends it: a stated end that names it, the unit held down, no start beside it; thawed, it goes by itself (F56)."""
    if stuck is frozen and not _v1_freezer():
        pytest.skip("no v1 freezer on this machine")
    assert callable(stuck)
    row = ladder.up("--on-term", "ignore")
    pid = ladder.show(row, "MainPID")
    with stuck(ladder, row):
        ended = ladder.down(row)
        assert ended.result.reason in {Reason.NOT_RELEASED, Reason.WEDGED, Reason.STOP_TIMED_OUT}
        assert f"pid {pid}" in ended.result.sentence or ended.result.reason is Reason.STOP_TIMED_OUT
        not_started_beside(ladder, row)
    wait_for(lambda: not ladder.witness.now())
    again = ladder.down(row)
    assert again.released, again.result


# -- restarts and races ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [("--crash-on-start",), ("--fail-after", "0.4"), ("--crash-after-ready", "0.2")]
)
def test_a_restart_loop_is_ended(ladder: Ladder, options: tuple[str, ...]) -> None:
    """A unit that dies at the start, at load or when ready, and is started again each second: down, and it stays down (S16)."""
    limits = {"StartLimitIntervalSec": "0", "Restart": "always"}
    row = ladder.up(*options, settings=limits, waits=False)
    wait_for(lambda: int(ladder.show(row, "NRestarts")) >= 1)
    ended = ladder.down(row)
    assert ended.released, ended.result
    run = ladder.show(row, "InvocationID")
    ladder.host.exec(["sleep", "1.5"])
    assert ladder.state(row) in {"inactive", "failed"}
    assert ladder.show(row, "InvocationID") == run


@pytest.mark.parametrize("phase", [Phase.STOP, Phase.RELEASE])
def test_a_start_that_races_our_stop(ladder: Ladder, phase: Phase) -> None:
    """Somebody starts the unit while we stop it, or while we wait: the disarming keeps it down, and it is released."""
    row = ladder.up("--on-term", "slow:0.6")
    start = ["systemctl", "start", "--no-block", row.unit]
    ended = ladder.down(row, at={phase: lambda: (None, ladder.host.check(start))[0]})
    assert ended.released, ended.result
    assert ladder.state(row) in {"inactive", "failed"}


@pytest.mark.parametrize("how", ["OnFailure=", "OnSuccess=", "Upholds="])
def test_a_unit_that_another_would_start_again(ladder: Ladder, how: str) -> None:
    """By another's end, or by a unit that keeps it up: refused before anything is stopped, the other one named."""
    row = ladder.up()
    main = ladder.show(row, "MainPID")
    other = f"row-other-{how.strip('=').lower()}.service"
    text = f"[Unit]\n{how}{row.unit}\n[Service]\nExecStart=/bin/sleep 600\n"
    path = f"/etc/systemd/system/{other}"
    ladder.host.check(["sh", "-c", f"cat >{path} && systemctl daemon-reload"], text.encode())
    ladder.host.check(["systemctl", "start", other])
    ended = ladder.down(row)
    ladder.host.check(["sh", "-c", f"systemctl stop {other}; rm {path}; systemctl daemon-reload"])
    assert ended.result.reason is Reason.PREFLIGHT, ended.result
    assert other in ended.result.sentence
    assert ladder.show(row, "MainPID") == main


def test_a_unit_that_a_socket_a_timer_or_a_path_would_start_again(ladder: Ladder) -> None:
    """By a connection, a time or a file: refused before anything is stopped, all of them named.

    systemd forgets a unit that nothing needs: one that never became active triggers nothing, and is told by nobody. So the
    socket listens first, and it is a connection that starts the server.
    """
    row = ladder.up(starts=False)
    others = {
        "row-other.socket": "[Socket]\nListenStream=/run/row-other.sock\nService={unit}",
        "row-other.timer": "[Timer]\nOnCalendar=2099-01-01\nUnit={unit}",
        "row-other.path": "[Path]\nPathExists=/run/row-other.never\nUnit={unit}",
    }
    for name, text in others.items():
        ladder.host.check(["sh", "-c", f"cat >/etc/systemd/system/{name}"], text.format(unit=row.unit).encode())  # fmt: skip
    ladder.host.check(["sh", "-c", f"systemctl daemon-reload && systemctl start {' '.join(others)}"])  # fmt: skip
    ladder.host.check(["python3", "-c", "import socket; socket.socket(socket.AF_UNIX).connect('/run/row-other.sock')"])  # fmt: skip
    wait_for(lambda: ladder.state(row) == "active" and bool(ladder.witness.now()), 20)
    main = ladder.show(row, "MainPID")
    ended = ladder.down(row)
    assert ended.result.reason is Reason.PREFLIGHT, ended.result
    assert all(name in ended.result.sentence for name in others), ended.result.sentence
    assert (ladder.state(row), ladder.show(row, "MainPID")) == ("active", main)
    ladder.host.check(["sh", "-c", f"systemctl stop {' '.join(others)}; cd /etc/systemd/system && rm {' '.join(others)}; systemctl daemon-reload"])  # fmt: skip


# -- others, and the driver -------------------------------------------------------------------------------------


def test_a_foreign_python_on_our_gpu(ladder: Ladder) -> None:
    """Somebody else's process on the card: refused before anything is stopped, its pid named (F59)."""
    row = ladder.up()
    main = ladder.show(row, "MainPID")
    pid = ladder.witness.bystander("lab-foreign", "/dev/nvidia0", "fakegpu-0-500-f0")
    ended = ladder.down(row)
    assert (ended.result.outcome, ended.result.reason) == (Outcome.REFUSED, Reason.FOREIGN_HOLDER)
    assert f"pid {pid}" in ended.result.sentence
    assert ladder.show(row, "MainPID") == main
    ladder.witness.dismiss("lab-foreign")


def test_a_holder_that_appears_while_we_wait(ladder: Ladder) -> None:
    """It came after the server was down: named, left alone, and nothing starts beside it."""
    row = ladder.up()
    came: list[int] = []

    def come() -> None:
        came.append(ladder.witness.bystander("lab-late", "/dev/nvidia0", "fakegpu-0-500-f1"))

    ended = ladder.down(row, at={Phase.RELEASE: come})
    assert ended.result.reason is Reason.NOT_RELEASED, ended.result
    assert f"pid {came[0]}" in ended.result.sentence
    assert ended.signals == []
    not_started_beside(ladder, row)
    ladder.witness.dismiss("lab-late")


def test_a_bystander_with_a_control_node_only(ladder: Ladder) -> None:
    """It cannot be pinned to another card, so nothing could be proven after a stop: refused before it, its pid named."""
    row = ladder.up()
    main = ladder.show(row, "MainPID")
    pid = ladder.witness.bystander("lab-control", "/dev/nvidiactl")
    ended = ladder.down(row)
    assert (ended.result.outcome, ended.result.reason) == (Outcome.REFUSED, Reason.FOREIGN_HOLDER)
    assert f"pid {pid}" in ended.result.sentence
    assert ladder.show(row, "MainPID") == main
    ladder.witness.dismiss("lab-control")


def test_memory_that_lags_is_waited_for(ladder: Ladder) -> None:
    """Memory stays visible for 2 s after the last process: released when it is gone, not before."""
    row = ladder.up()
    fault(ladder, lag_seconds=2)
    ladder.host.check(["nvidia-smi"])  # so that there is a reading to lag behind
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.took_s > 2


def test_memory_that_nobody_holds_is_never_free(ladder: Ladder) -> None:
    """A leak without a holder: said so, the server held down, nothing started."""
    row = ladder.up()
    ended = ladder.down(row, at={Phase.RELEASE: lambda: fault(ladder, leak_mib={"0": 3000})})
    assert ended.result.reason in {Reason.NOT_RELEASED, Reason.WEDGED}, ended.result
    assert "memory is in use" in ended.result.sentence
    assert ended.signals == []
    ladder.host.check(["rm", "-f", f"/run/reconciler/{row.unit}.disarmed"])
    ladder.host.exec(["systemctl", "start", row.unit])
    assert ladder.state(row) == "inactive"


def test_a_gpu_that_is_lost(ladder: Ladder) -> None:
    """It falls off the bus while we wait: a fault, never free."""
    row = ladder.up()
    ended = ladder.down(row, at={Phase.RELEASE: lambda: fault(ladder, mode="lost", gpu=0)})
    assert ended.result.reason in {Reason.NOT_RELEASED, Reason.WEDGED}, ended.result
    assert "lost" in ended.result.sentence


@pytest.mark.nightly
def test_an_nvidia_smi_that_hangs(ladder: Ladder) -> None:
    """A probe that never answers is unknown, and never are there two of them."""
    row = ladder.up()
    count = "while :; do pgrep -fc '[b]in/nvidia-smi'; sleep 0.1; done >/run/lab-probes"
    ladder.host.check(["systemd-run", "--quiet", "--unit=lab-count", "bash", "-c", count])
    ended = ladder.down(
        row, at={Phase.RELEASE: lambda: fault(ladder, mode="hang")}, budgets=replace(BUDGETS, release_s=30)
    )  # fmt: skip
    ladder.host.check(["systemctl", "stop", "lab-count"])
    assert ended.result.reason is Reason.NOT_RELEASED, ended.result
    assert "in time" in ended.result.sentence
    assert max(int(word) for word in ladder.host.check(["cat", "/run/lab-probes"]).split()) == 1


def fault(ladder: Ladder, **what: object) -> None:
    """Have the simulated driver show a fault."""
    ladder.host.check(["sh", "-c", "cat >/run/fakegpu/fault.json"], json.dumps(what).encode())


# -- the guard and the timer -----------------------------------------------------------------------------------


def test_two_units_that_start_at_once_on_one_gpu(ladder: Ladder) -> None:
    """Both are asked for in the same instant, again and again: one runs, the guard keeps the other out (S1)."""
    rows = [ladder.up(settings={"Restart": "no"}, waits=False, starts=False) for _ in range(2)]
    units = [row.unit for row in rows]
    for _ in range(3):
        ladder.host.check(["systemctl", "start", "--no-block", *units])
        wait_for(lambda: sorted(map(ladder.state, rows)) == ["active", "inactive"])
        wait_for(lambda: len(ladder.witness.now()) == 1)
        ladder.host.check(["systemctl", "stop", *units])
        wait_for(lambda: not ladder.witness.now())


def test_systemds_own_restart_beside_a_left_over_is_kept_out(ladder: Ladder) -> None:
    """The main process dies, its child keeps the card: the restart that systemd makes by itself is refused, and does not loop."""
    row = ladder.up(*LEFT, settings={"KillMode": "process", "Restart": "always"})
    wait_for(lambda: len(ladder.witness.now()) == 2)
    main = int(ladder.show(row, "MainPID"))
    ladder.host.check([HOLD, "--tell", json.dumps({"exit": 1, "pid": main})])
    guard = ["cat", f"/var/lib/reconciler/{row.server}/guard.json"]
    wait_for(lambda: json.loads(ladder.host.check(guard))["outcome"] == "refused")
    wait_for(lambda: ladder.state(row) in {"inactive", "failed"})
    assert len(ladder.witness.now()) == 1
    ended = ladder.down(row)
    assert ended.released, ended.result
    assert ended.signals == ["TERM", "KILL"]


def test_a_helper_whose_connection_died_finishes_and_keeps_its_answer(ladder: Ladder) -> None:
    """Hung up on and with nobody to read its answer, it does its act once; asked again by the same nonce, it says what it said (F36)."""
    row = ladder.up(starts=False)
    claimed = ladder.connected.call(Request("claim", {**LEASE, "ttl_s": 60}, server=row.server), deadline_s=30)  # fmt: skip
    request = {
        "format": 1, "nonce": "5" * 32, "verb": "record", "args": {"name": "attempted", "content": {"revision": "a" * 64}}, "server": row.server,
        "fence": claimed.data["fence"], "boot_id": claimed.data["boot_id"], "not_after": claimed.data["boottime"] + 60,
    }  # fmt: skip
    line, helper = json.dumps(request) + "\n", helper_command(build.digest()).split()
    ended = ladder.host.check(["python3", "-c", HUNG_UP, line, *helper])
    assert int(ended) >= 0, "ended by a signal"
    again = ladder.host.check(helper, line.encode())
    assert '"outcome":"done"' in again.replace('": "', '":"')
    written = ladder.host.check(["cat", f"/var/lib/reconciler/{row.server}/attempted.json"])
    assert json.loads(written)["revision"] == "a" * 64
    journal = ladder.host.check(["cat", f"/var/lib/reconciler/{row.server}/journal.ndjson"])
    lines = [json.loads(x) for x in journal.splitlines() if "5" * 32 in x]
    assert [x["outcome"] for x in lines] == ["begun", "done"]


HUNG_UP = """
import fcntl, signal, subprocess, sys, time
lock = open('/run/reconciler/lock', 'a')
fcntl.flock(lock, fcntl.LOCK_EX)
helper = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
helper.stdin.write(sys.argv[1].encode())
helper.stdin.close()
helper.stdout.close()
ignored = (1 << signal.SIGHUP - 1) | (1 << signal.SIGPIPE - 1)
while True:
    shown = open(f'/proc/{helper.pid}/status').read().partition('SigIgn:')[2].split()[0]
    if int(shown, 16) & ignored == ignored: break
    time.sleep(0.02)
helper.send_signal(signal.SIGHUP)
fcntl.flock(lock, fcntl.LOCK_UN)
print(helper.wait(20))
"""


def test_the_environment_of_a_server_never_reaches_the_guard(ladder: Ladder) -> None:
    """LD_PRELOAD in a unit is loaded by the server alone: what runs as root beside it has an environment of its own."""
    evil = '"LD_PRELOAD=/nonexistent/evil.so"'
    row = ladder.up(settings={"Restart": f"no\nEnvironment={evil}"})
    ladder.host.check(["journalctl", "--sync"])

    def said(unit: str) -> str:
        return ladder.host.check(["journalctl", "--output=cat", "--unit", unit])

    assert "evil.so" in said(row.unit)
    assert "evil.so" not in said(f"reconciler-guard@{row.server}.service")
    assert ladder.down(row).released


def test_a_storm_of_reloads_does_not_move_the_dead_mans_deadline(ladder: Ladder) -> None:
    """Nobody renews, and systemd reads its files twice a second: the host still takes the server back in time (L3)."""
    row = ladder.up()
    before = ladder.show(row, "InvocationID")
    ladder.left_behind(row, deadline_s=4)
    storm = "while :; do systemctl daemon-reload; sleep 0.5; done"
    ladder.host.check(["systemd-run", "--quiet", "--unit=lab-storm", "bash", "-c", storm])
    try:
        wait_for(lambda: ladder.state(row) == "active", 60)
    finally:
        ladder.host.check(["systemctl", "stop", "lab-storm"])
    assert ladder.show(row, "InvocationID") not in {"", before}
    assert (
        ladder.host.exec(["cat", f"/var/lib/reconciler/{row.server}/deadline.json"]).stdout == b""
    )
    assert ladder.down(row).released

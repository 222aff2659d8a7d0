"""One suite of what a `Machine` does, run on the simulated host always and on a real systemd in the lab.

Each case is a piece of code that has `m` (a Machine) and sets `answer`; the same text runs in this process on
`SimulatedMachine`, and inside a lab host on `RealMachine`. So the simulated host is held to the truth.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from on_host import ask

from reconciler.helper.machine import Busy
from reconciler.lab.hosts import SystemdHost
from reconciler.lab.simulated import Behaviour, World, add_host

Run = Callable[[str], Any]

PRELUDE = r"""
UNIT = "contract.service"
PERMANENT, TRIAL = "/etc/systemd/system/" + UNIT, "/run/systemd/system.control/" + UNIT
HOLD = "/usr/local/bin/fakegpu-hold --gpu 0 --mib 8000 --serve 30000 --model m"

def unit(command=HOLD, service="", install="", unit=""):
    return ("[Unit]\nStartLimitIntervalSec=0\n%s[Service]\nType=exec\nExecStart=%s\n"
            "Environment=RECONCILER_SERVER=contract SPT_NOENV=1\nPrivateMounts=yes\nTimeoutStopSec=20s\n%s"
            "[Install]\nWantedBy=multi-user.target\n" % (unit, command, service)).encode()

def place(path, data):
    m.write(path, data, 0o644)
    m.reload()

def props():
    return m.unit(UNIT)["known"]

def until(condition, limit=30):
    for _ in range(limit * 5):
        if condition():
            return True
        m.sleep(0.2)
    return False

def up():
    m.start(UNIT)
    assert until(lambda: props()["ActiveState"] == "active"), props()
    return props()

def down():
    m.stop(UNIT)
    assert until(lambda: props()["ActiveState"] in ("inactive", "failed")), props()
    return props()
"""


def simulated_run() -> Run:
    """Return a way to run a case on a simulated host."""
    host = add_host(World(), "contract", gpus=2, enrolled=False)
    behaviours = {
        "fakegpu-hold": Behaviour(
            load_s=0.5, listens_after_s=0.1, needs_mib=8000, gpus=(0,), model="m"
        ),
        "--on-term ignore": Behaviour(ignores_term=True, needs_mib=8000, gpus=(0,)),
        "--crash-on-start": Behaviour(crash_at_s=0.05),
        "/bin/sleep": Behaviour(gpus=(), needs_mib=0),
    }
    for words, behaviour in behaviours.items():
        host.host.behave(words, behaviour)
    host.host.files.put("/etc/real", b"x")
    host.host.files.link("/etc/contract-link", "/etc/real")

    def run(code: str) -> Any:
        names: dict[str, Any] = {"m": host.machine(), "Busy": Busy}
        exec(compile(PRELUDE + textwrap.dedent(code), "case", "exec"), names)
        return names["answer"]

    return run


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.lab)])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a way to run a case on each kind of machine."""
    if request.param == "simulated":
        return simulated_run()
    host: SystemdHost = request.getfixturevalue("lab_host")
    host.check(["ln", "-sf", "/etc/hostname", "/etc/contract-link"])
    busy = 'Busy = sys.modules["reconciler.helper.machine"].Busy\n'
    return lambda code: ask(host, busy + PRELUDE + textwrap.dedent(code))


def test_files_are_replaced_read_and_removed(run: Run) -> None:
    """A write makes its directories, replaces whole, and removing twice is fine."""
    answer = run("""
        path = "/var/lib/reconciler/contract/a.json"
        before = m.read(path)
        m.write(path, b"one")
        m.write(path, b"two")
        middle, names = m.read(path), m.listdir("/var/lib/reconciler/contract")
        m.append(path, b"three")
        joined = m.read(path)
        m.remove(path)
        m.remove(path)
        answer = [before, middle.decode(), names, joined.decode(), m.read(path), m.kind(path), m.listdir("/nowhere")]
    """)
    assert answer == [None, "two", ["a.json"], "twothree\n", None, "missing", []]


def test_a_symbolic_link_is_not_followed(run: Run) -> None:
    """Reading through a link is an error, and its kind says what it is."""
    answer = run("""
        try:
            m.read("/etc/contract-link")
            answer = "followed"
        except OSError:
            answer = m.kind("/etc/contract-link")
    """)
    assert answer == "link"


def test_a_tree_is_removed_only_below_the_state_directory(run: Run) -> None:
    """Whole directories go only where they are ours."""
    answer = run("""
        m.write("/var/lib/reconciler/contract/revisions/a/b", b"x")
        m.remove_tree("/var/lib/reconciler/contract/revisions/a")
        m.remove_tree("/var/lib/reconciler/contract/revisions/a")
        try:
            m.remove_tree("/etc/contract")
            answer = "removed"
        except OSError:
            answer = m.kind("/var/lib/reconciler/contract/revisions/a")
    """)
    assert answer == "missing"


def test_the_lock_is_had_by_one(run: Run) -> None:
    """A second taker is told that it is busy, and gets it afterwards."""
    answer = run("""
        with m.lock(1):
            try:
                with m.lock(0):
                    first = "twice"
            except Busy:
                first = "busy"
        with m.lock(0):
            answer = [first, "free"]
    """)
    assert answer == ["busy", "free"]


def test_a_unit_that_is_not_there_is_known_not_to_be(run: Run) -> None:
    """not-found is a known value with every property."""
    answer = run("""
        found = m.unit("no-such-thing.service")["known"]
        answer = [found["LoadState"], found["ActiveState"], found["MainPID"], found["Job"], sorted(found)]
    """)
    assert answer[:4] == ["not-found", "inactive", 0, 0]
    ours = simulated_run()('answer = sorted(m.unit("x.service")["known"])')
    assert set(answer[4]) >= set(ours)


def test_a_started_unit_runs_with_its_marks(run: Run) -> None:
    """Invocation, control group, mark and own mount namespace identify what runs."""
    answer = run("""
        place(PERMANENT, unit())
        found = up()
        process = next(p for p in m.processes(found["ControlGroup"])["known"] if p["pid"] == found["MainPID"])
        answer = {
            "sub": found["SubState"], "same_run": process["invocation"] == found["InvocationID"],
            "mark": process["mark"], "own_namespace": process["mount_ns"] != m.mount_namespace(),
            "group": found["ControlGroup"], "cgroup": process["cgroup"].endswith(UNIT),
            "digits": len(found["InvocationID"]), "file": found["FragmentPath"],
        }
        down()
    """)
    assert answer == {
        "sub": "running",
        "same_run": True,
        "mark": "contract",
        "own_namespace": True,
        "group": "/system.slice/contract.service",
        "cgroup": True,
        "digits": 32,
        "file": "/etc/systemd/system/contract.service",
    }


def test_a_running_server_holds_its_gpu_and_gives_it_back(run: Run) -> None:
    """Memory, holder and app are those of the process, and gone with it."""
    answer = run("""
        place(PERMANENT, unit())
        card = lambda: m.gpus()["known"]["gpus"][0]
        idle = card()["used_mib"]
        pid = up()["MainPID"]
        until(lambda: card()["used_mib"] > idle)
        holders = m.holders()["known"]
        mine = [h for h in holders["holders"] if h["pid"] == pid]
        apps = [a["pid"] for a in m.apps()["known"]]
        busy = card()
        down()
        until(lambda: card()["used_mib"] == idle)
        answer = [busy["used_mib"] - idle, mine[0]["minors"] == [busy["minor"]], pid in apps, holders["complete"],
                  card()["used_mib"] - idle, m.holders()["known"]["holders"], m.apps()["known"]]
    """)
    assert answer == [8000, True, True, True, 0, [], []]


def test_a_server_refuses_then_answers(run: Run) -> None:
    """Connection refused is unknown; a ready server answers, and its listener is the unit's."""
    answer = run("""
        request = {"method": "GET", "address": "127.0.0.1", "port": 30000, "path": "/v1/models", "headers": {},
                   "body": None, "timeout_s": 3, "max_bytes": 10000, "bearer_file": None}
        place(PERMANENT, unit())
        closed = m.fetch(request)
        found = up()
        until(lambda: m.fetch(request).get("known", {}).get("status") == 200)
        listeners = m.listeners(30000, found["MainPID"])["known"]
        answer = ["unknown" in closed, m.fetch(request)["known"]["status"], [l["units"] for l in listeners],
                  [l["pids"] == [found["MainPID"]] for l in listeners]]
        down()
    """)
    assert answer == [True, 200, [["contract.service"]], [True]]


def test_a_trial_outranks_and_falls_back_without_touching_the_process(run: Run) -> None:
    """The trial's place wins; taking it away and reloading returns to /etc with the same process."""
    answer = run("""
        place(PERMANENT, unit())
        pid = up()["MainPID"]
        place(TRIAL, unit(service="RestartSec=7s\\n"))
        over = props()["FragmentPath"]
        m.remove(TRIAL)
        m.reload()
        answer = [over == TRIAL, props()["FragmentPath"] == PERMANENT, props()["MainPID"] == pid]
        down()
    """)
    assert answer == [True, True, True]


def test_drop_ins_merge_by_name_across_places(run: Run) -> None:
    """A later name in /etc beats ours in /run; without it ours is effective at once."""
    answer = run("""
        place(PERMANENT, unit())
        up()
        ours = "/run/systemd/system/" + UNIT + ".d/zz-reconciler-disarm.conf"
        theirs = "/etc/systemd/system/" + UNIT + ".d/zzz-operator.conf"
        place(ours, b"[Service]\\nTimeoutStopSec=9000000us\\nRestart=no\\n")
        first = props()
        place(theirs, b"[Service]\\nTimeoutStopSec=7s\\n")
        second = props()
        m.remove(theirs)
        m.remove(ours)
        m.reload()
        answer = [first["TimeoutStopUSec"], ours in first["DropInPaths"], second["TimeoutStopUSec"], props()["TimeoutStopUSec"]]
        down()
    """)
    assert answer == [9_000_000, True, 7_000_000, 20_000_000]


def test_a_condition_keeps_a_unit_down_and_says_so(run: Run) -> None:
    """A start against the condition ends inactive with ConditionResult false and no new invocation."""
    answer = run("""
        place(PERMANENT, unit(unit="ConditionPathExists=!/run/reconciler/contract.disarmed\\n"))
        m.write("/run/reconciler/contract.disarmed", b"x")
        m.start(UNIT)
        m.sleep(1)
        blocked = props()
        m.remove("/run/reconciler/contract.disarmed")
        free = up()
        answer = [blocked["ActiveState"], blocked["ConditionResult"], blocked["MainPID"], free["ConditionResult"]]
        down()
    """)
    assert answer == ["inactive", False, 0, True]


def test_the_loaded_command_is_told_exactly(run: Run) -> None:
    """Quotes, blanks and escapes are resolved, `%%` is a per cent, and `$$` stays doubled."""
    answer = run(r"""
        place(PERMANENT, unit(command='/bin/sleep "a b" "{\\"x\\":1}" "50%%" "a$$b" "c\\td"'))
        found = m.unit_command(UNIT)["known"]
        answer = [found["argv"], sorted(found["environment"])]
    """)
    assert answer == [
        ["/bin/sleep", "a b", '{"x":1}', "50%", "a$$b", "c\td"],
        ["RECONCILER_SERVER=contract", "SPT_NOENV=1"],
    ]


def test_a_server_that_ignores_term_is_killed_at_its_timeout(run: Run) -> None:
    """The stop takes as long as TimeoutStopSec, then the unit has failed by timeout, and the GPU is free."""
    answer = run("""
        place(PERMANENT, unit(command=HOLD + " --on-term ignore", service="TimeoutStopSec=3s\\n"))
        up()
        m.sleep(2)
        began = m.boottime()
        found = down()
        took = m.boottime() - began
        answer = [found["ActiveState"], found["Result"], 2.5 < took < 8, m.processes("/system.slice/" + UNIT)["known"]]
        m.reset_failed(UNIT)
        answer.append(props()["ActiveState"])
    """)
    assert answer == ["failed", "timeout", True, [], "inactive"]


def test_a_crash_is_restarted_under_a_new_invocation_up_to_the_limit(run: Run) -> None:
    """Restarts by systemd have their own invocations, and the start limit ends them."""
    answer = run("""
        text = unit(command=HOLD + " --crash-on-start", service="Restart=on-failure\\nRestartSec=200ms\\n")
        place(PERMANENT, text.replace(b"StartLimitIntervalSec=0", b"StartLimitIntervalSec=60\\nStartLimitBurst=3"))
        m.start(UNIT)
        until(lambda: props()["ActiveState"] == "failed" and props()["NRestarts"] >= 2)
        m.sleep(1)
        found = props()
        lines = [l["message"] for l in m.journal(UNIT, None, 100)["known"]]
        answer = [found["ActiveState"], found["NRestarts"], found["Result"], any("too quickly" in l for l in lines)]
        m.reset_failed(UNIT)
    """)
    assert answer[0] == "failed"
    assert answer[1] in (2, 3)  # Whether the refused one counts differs between systemd's versions.
    assert answer[2:] == ["exit-code", True]


def test_what_a_process_was_started_with_is_read_and_old_lines_are_told_apart(run: Run) -> None:
    """The environment is the unit's with its invocation; of nobody it is unknown; nothing was written before anything was."""
    answer = run("""
        place(PERMANENT, unit())
        found = up()
        own = m.environment(found["MainPID"])["known"]
        early = m.journal(UNIT, None, 100, 1.0)
        answer = [own["RECONCILER_SERVER"], own["INVOCATION_ID"] == found["InvocationID"], early, list(m.environment(0))]
        down()
    """)
    assert answer == ["contract", True, {"known": []}, ["unknown"]]


def test_a_unit_with_a_missing_guard_cannot_be_started(run: Run) -> None:
    """Without the guard's unit file a start is refused at once."""
    answer = run("""
        place(PERMANENT, unit(unit="Requires=reconciler-guard@contract.service\\n"))
        try:
            m.start(UNIT)
            m.sleep(1)
            answer = props()["ActiveState"]
        except OSError:
            answer = "refused"
    """)
    assert answer == "refused"


def test_a_reused_pid_is_gone_and_the_right_one_is_signalled(run: Run) -> None:
    """Pid and start time identify a process together."""
    answer = run("""
        place(PERMANENT, unit(command="/bin/sleep 1000"))
        found = up()
        process = next(p for p in m.processes(found["ControlGroup"])["known"])
        wrong = m.signal(process["pid"], process["start_ticks"] + 1, 15)
        right = m.signal(process["pid"], process["start_ticks"], 15)
        until(lambda: props()["ActiveState"] != "active")
        answer = [wrong, right, props()["ActiveState"], m.signal(process["pid"], process["start_ticks"], 15)]
    """)
    assert answer[0].startswith("refused")
    assert answer[1:] == ["sent", "inactive", "gone"]


def test_enabling_is_told_and_undone(run: Run) -> None:
    """UnitFileState says whether a boot starts it."""
    answer = run("""
        place(PERMANENT, unit())
        states = [props()["UnitFileState"]]
        m.enable(UNIT)
        m.enable(UNIT)
        states.append(props()["UnitFileState"])
        m.disable(UNIT)
        m.disable(UNIT)
        answer = states + [props()["UnitFileState"]]
    """)
    assert answer == ["disabled", "enabled", "disabled"]


def test_times_only_grow_and_the_boot_is_one(run: Run) -> None:
    """The boot clock moves with sleeping, and the boot id stays."""
    answer = run("""
        first, boot = m.boottime(), m.boot_id()
        m.sleep(0.3)
        answer = [0.2 < m.boottime() - first < 3, boot == m.boot_id(), len(m.nonce()), m.nonce() != m.nonce()]
    """)
    assert answer == [True, True, 32, True]


def test_the_kernel_log_is_read_after_a_cursor(run: Run) -> None:
    """A first question gives the cursor of now and no lines. A layer without a kernel log says unknown."""
    answer = run("""
        first = m.kernel_log(None)
        answer = "unknown" if "unknown" in first else [first["known"]["lines"], m.kernel_log(first["known"]["cursor"])["known"]["lines"]]
    """)
    assert answer in ("unknown", [[], []])


def test_what_an_engine_will_find_is_told_in_the_same_parts(run: Run) -> None:
    """Each part a reading: models in the order of the question, nodes by path, the room of each place."""
    answer = run("""
        asked = {"user": "root", "python": None, "distributions": [], "kernels": False, "binary": None, "image": None,
                 "models": [{"role": "model", "source": "/", "revision": None, "environment": {}}],
                 "nodes": ["/dev/null"], "places": ["/tmp"]}
        facts = m.engine_facts(asked)
        limits = facts["limits"]["known"]
        (model,) = facts["models"]["known"]
        answer = [sorted(facts), sorted(limits), list(limits["disks"]), model["known"]["form"], facts["nodes"]["known"]]
    """)
    assert answer == [
        ["limits", "models", "nodes"],
        ["disks", "files", "memory", "shm"],
        ["/tmp"],
        "directory",
        {"/dev/null": "usable"},
    ]

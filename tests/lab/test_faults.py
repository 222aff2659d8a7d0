"""Every case of `reconcile lab break` shows the symptom that it promises, on a real systemd."""

from __future__ import annotations

import subprocess

import pytest
from lab_engine import hold_command, hold_unit, start_unit, wait_for

from reconciler.core.errors import HostError, UsageError
from reconciler.lab.faults import CASES, break_, heal
from reconciler.lab.hosts import ProxmoxHost, SystemdHost

pytestmark = pytest.mark.lab


@pytest.fixture
def server(lab_host: SystemdHost) -> SystemdHost:
    """The shared host with a stand-in server `llm.service` on GPU 1."""
    start_unit(
        lab_host, "llm.service", hold_unit(hold_command(gpus=[1]), service="TimeoutStopSec=1")
    )
    return lab_host


def _used(host: SystemdHost | ProxmoxHost, gpu: int = 1) -> int:
    return int(
        host.check(
            [
                "nvidia-smi",
                "-i",
                str(gpu),
                "--query-gpu=memory.used",
                "--format=csv,noheader,nounits",
            ]
        )
    )


def _stop(host: SystemdHost) -> str:
    host.check(["systemctl", "stop", "llm"])
    return (
        host.check(["systemctl", "show", "llm", "-p", "ActiveState,Result", "--value"])
        .replace("\n", " ")
        .strip()
    )


@pytest.mark.parametrize("case", ["left-over", "escaped"])
def test_a_clean_stop_that_leaves_the_memory_held(server: SystemdHost, case: str) -> None:
    """Systemd says success, and the GPU is not free: the reason why this product exists."""
    break_(server, case)
    assert sorted(_stop(server).split()) == ["inactive", "success"]
    assert _used(server) == 8001


def test_a_server_that_ignores_sigterm_is_killed_at_the_timeout(server: SystemdHost) -> None:
    """ignore-term: systemd waits for its timeout, kills, and calls the unit failed."""
    break_(server, "ignore-term")
    assert "failed" in _stop(server)
    assert _used(server) == 1


def test_without_sigkill_a_stubborn_server_stays(server: SystemdHost) -> None:
    """no-sigkill: the stop ends, the process does not."""
    break_(server, "no-sigkill")
    assert "failed" in _stop(server)
    assert _used(server) == 8001


def test_kill_mode_process_alone_does_no_harm(server: SystemdHost) -> None:
    """kill-mode-process: without a stubborn child, the drop-in changes nothing."""
    break_(server, "kill-mode-process")
    assert server.check(["systemctl", "show", "llm", "-p", "KillMode", "--value"]) == "process\n"
    _stop(server)
    assert _used(server) == 1


def test_a_process_in_d_state_survives_sigkill_until_healed(server: SystemdHost) -> None:
    """d-state: the memory is held after SIGKILL; once healed, the pending signal takes effect."""
    break_(server, "d-state")
    assert "failed" in _stop(server)
    assert _used(server) == 8001
    heal(server)
    wait_for(lambda: _used(server) == 1)


@pytest.mark.parametrize(
    ("case", "unit", "mib"),
    [
        ("foreign-holder", "lab-foreign", 12001),
        ("dcgm-exporter", "dcgm-exporter", 8001),
        ("python", "lab-python", 8001),
    ],
)
def test_bystanders_run_beside_the_server(
    server: SystemdHost, case: str, unit: str, mib: int
) -> None:
    """A bystander is a unit of its own, with the memory that its case says, on the server's GPU."""
    break_(server, case)
    wait_for(lambda: _used(server) == mib)
    assert server.check(["systemctl", "is-active", unit]) == "active\n"
    if case == "dcgm-exporter":
        wait_for(lambda: server.exec(["pgrep", "-x", "dcgm-exporter"]).exit_status == 0)


@pytest.mark.parametrize(("case", "status"), [("no-driver", 9), ("lost", 15)])
def test_a_broken_driver_says_so(server: SystemdHost, case: str, status: int) -> None:
    """nvidia-smi ends with the driver's own exit status, until healed."""
    break_(server, case)
    assert server.exec(["nvidia-smi"]).exit_status == status
    heal(server)
    assert server.exec(["nvidia-smi"]).exit_status == 0


def test_nvidia_smi_hangs(server: SystemdHost) -> None:
    """hang-smi: a call that never answers."""
    break_(server, "hang-smi")
    assert server.exec(["timeout", "1", "nvidia-smi"]).exit_status == 124


def test_leaked_memory_stays_when_the_server_is_gone(server: SystemdHost) -> None:
    """leak: memory above the baseline that no process accounts for."""
    break_(server, "leak")
    _stop(server)
    assert _used(server) == 3001


def test_a_cut_network_heals(server: SystemdHost) -> None:
    """cut: nothing gets through from this machine; heal: everything does."""
    probe = ["bash", "-c", f"exec 3<>/dev/tcp/{server.ip}/22"]
    break_(server, "cut")
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(probe, timeout=1, check=False)
    heal(server)
    subprocess.run(probe, timeout=5, check=True)


@pytest.mark.parametrize(
    ("case", "words"),
    [("full-disk", b"No space left"), ("read-only-etc", b"Read-only file system")],
)
def test_a_disk_that_takes_nothing(server: SystemdHost, case: str, words: bytes) -> None:
    """A write to /etc fails with the kernel's own error, and works once healed."""
    write = ["bash", "-c", "head -c 100000 /dev/zero >/etc/lab-probe"]
    break_(server, case)
    assert words in server.exec(write).stderr
    heal(server)
    assert server.exec(write).exit_status == 0


def test_a_slow_server_and_a_crash(server: SystemdHost) -> None:
    """Slow and crash change the running server: its speed, then its life."""
    break_(server, "slow")
    break_(server, "crash")
    wait_for(lambda: "failed" in server.exec(["systemctl", "is-active", "llm"]).stdout.decode())


def test_a_case_without_a_server_says_what_to_do(lab_host: SystemdHost) -> None:
    """Without a server to break, the answer names what runs and what to do; nothing happens."""
    with pytest.raises(UsageError, match="needs one server"):
        break_(lab_host, "escaped")
    with pytest.raises(UsageError, match="--list"):
        break_(lab_host, "no-such-case")
    with pytest.raises(UsageError, match="Proxmox"):
        break_(lab_host, "locked")


@pytest.mark.lab_pve
def test_cases_in_a_container(pve_host: ProxmoxHost) -> None:
    """In a container too: an escaped child keeps the GPU, a D state survives, a lock refuses."""
    start_unit(
        pve_host, "llm.service", hold_unit(hold_command(gpus=[1]), service="TimeoutStopSec=1")
    )
    break_(pve_host, "d-state")
    pve_host.check(["systemctl", "stop", "llm"])
    assert _used(pve_host) == 8001
    heal(pve_host)
    wait_for(lambda: _used(pve_host) == 1)
    break_(pve_host, "locked")
    with pytest.raises(HostError, match="locked"):
        pve_host.outer.check(["pct", "shutdown", "101"])


def test_every_case_has_a_line_for_people() -> None:
    """`lab break --list` explains each case in one line that starts small and has no full stop."""
    for case in CASES.values():
        assert case.about.strip() == case.about
        assert not case.about.endswith(".")

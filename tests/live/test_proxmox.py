"""The main job in a container of a Proxmox-like node: units inside, GPUs and whoever holds them seen from the node.

Each story is told once with everything through `pct`, and the first one also with a login on the container itself.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab_engine import hold_unit, wait_for
from live_controller import PORT, Controller, HostView, Run, eventually

from reconciler.lab.faults import HOLD, break_, heal
from reconciler.lab.hosts import ProxmoxHost

pytestmark = pytest.mark.lab_pve

HOST = "ct"
LOOPBACK: dict[str, Any] = {"listen": {"address": "127.0.0.1", "port": PORT}}
"""Nobody but a process in the container reaches this: probes, gate and drain have to go through it."""

SLOW = ("--host", "127.0.0.1", "--speed", "20")
QUICK = ("--host", "127.0.0.1")

ASK = f"""
import json, urllib.request
print(json.load(urllib.request.urlopen("http://127.0.0.1:{PORT}/v1/models", timeout=10))["data"][0]["id"])
"""


@dataclass(frozen=True, slots=True)
class ContainerView(HostView):
    """Look into the container by `pct`; its loopback is asked from inside."""

    def model(self, port: int = PORT) -> str:
        """Ask which model is served; empty when nobody answers."""
        assert port == PORT
        return self.host.exec(["python3", "-c", ASK]).stdout.decode().strip()


@pytest.fixture
def view(pve_host: ProxmoxHost) -> ContainerView:
    """Look into the container."""
    return ContainerView(pve_host)  # type: ignore[arg-type]


def enrolled(
    pve: ProxmoxHost, directory: Path, *, login: bool = False, protect: tuple[str, ...] = ()
) -> Controller:
    """Give a controller that has enrolled the container, by way of the node alone or with a login of its own."""
    directory.mkdir()
    controller = Controller(pve.outer, directory)
    controller.write("host", {
        "apiVersion": "reconciler/v1", "kind": "Host", "name": HOST, "protect": list(protect),
        "proxmox": {"vmid": pve.vmid, "ssh": {"address": pve.ip, "user": "root"}},
        **({"ssh": {"address": pve.container_ip, "user": "root"}} if login else {}),
    })  # fmt: skip
    keys = [pve.host_key]
    if login:
        keys.append(pve.check(["cat", "/etc/ssh/ssh_host_ed25519_key.pub"]))
    words = [word for key in keys for word in ("--host-key", fingerprint_of(key))]
    done = controller.run("enrol", HOST, *words)
    assert done.code == 0, done.err
    assert done.out.count("idle at 1 MiB") == 2, done.out
    return controller


def fingerprint_of(key: str) -> str:
    """Give a public key's fingerprint as `ssh-keygen -l` prints it."""
    command = ["ssh-keygen", "-lf", "-"]
    done = subprocess.run(command, input=key, capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


@pytest.fixture
def controller(pve_host: ProxmoxHost, tmp_path: Path) -> Controller:
    """Give a controller that reaches the container through the node only."""
    return enrolled(pve_host, tmp_path / "controller")


def deploy(controller: Controller, model: str, *options: str, **fields: Any) -> Run:
    """Commit a server that listens on the container's loopback, and apply it."""
    controller.commit(model, *(options or QUICK), host=HOST, **{**LOOPBACK, **fields})
    return controller.apply()


@pytest.mark.parametrize("login", [False, True], ids=["pct", "pct-and-ssh"])
def test_deploy_change_and_rollback_in_a_container(
    pve_host: ProxmoxHost, view: ContainerView, tmp_path: Path, login: bool
) -> None:
    """A loopback-only server is deployed, gated, changed, and comes back when its change fails the gate (S5)."""
    controller = enrolled(pve_host, tmp_path / "controller", login=login)
    first = deploy(controller, "one")
    assert first.ended == (0, "Applied", ""), first.err + first.out
    view.serves("one")
    assert controller.apply().ended == (0, "InSync", "")
    second = deploy(controller, "two")
    assert second.ended == (0, "Applied", ""), second.err + second.out
    view.serves("two")
    third = deploy(controller, "three", *SLOW)
    assert third.ended == (3, "RolledBack", "GateFailed"), third.err + third.out
    assert third.outcome["revision"] == second.outcome["revision"]
    view.serves("two")
    assert pve_host.outer.exec(["systemctl", "cat", view.unit]).exit_status != 0


def test_a_left_over_child_in_a_container_is_ended_and_nobody_else(
    pve_host: ProxmoxHost, view: ContainerView, tmp_path: Path
) -> None:
    """The incident through `pct`: SIGTERM ignored, a child outside the unit keeps the GPU; it is ours and ends (S3, L4).

    A python inside, and an exporter on the node that has the GPUs open, live on.
    """
    controller = enrolled(pve_host, tmp_path / "controller", protect=("dcgm-exporter.service",))
    assert deploy(controller, "one").ended == (0, "Applied", "")
    break_(pve_host.outer, "dcgm-exporter")
    break_(pve_host, "python")
    eventually(
        lambda: bool(gpu_holders(pve_host, "dcgm-exporter")), "the exporter has the GPUs open"
    )
    break_(pve_host, "ignore-term", unit=view.unit)
    break_(pve_host, "escaped", unit=view.unit)
    child = [found for pid, _ in view.children(view.pid()) if (found := view.process(pid))]
    assert child
    bystanders = [outside(pve_host, "dcgm-exporter"), view.server("lab-python.service")]
    done = deploy(controller, "two")
    assert done.ended == (0, "Applied", ""), done.err + done.out
    view.serves("two")
    assert view.process(child[0][0]) != child[0]
    assert [outside(pve_host, "dcgm-exporter"), view.server("lab-python.service")] == bystanders
    assert None not in bystanders
    signals = [m for m in view.mutations() if m["verb"] == "signal"]
    assert signals


def test_holders_that_only_the_node_sees_are_foreign(
    pve_host: ProxmoxHost, view: ContainerView, controller: Controller
) -> None:
    """Another container's process, and a unit of the node that is called as ours is, refuse the rollout and live on (S1, S3)."""
    assert deploy(controller, "one").ended == (0, "Applied", "")
    server = view.server()
    for begin in (another_container, namesake_on_the_node):
        with begin(pve_host, view.unit) as pids:
            before = [node_process(pve_host, pid) for pid in pids]
            assert None not in before
            done = deploy(controller, "two")
            assert done.ended == (1, "Refused", "ForeignHolder"), done.err + done.out
            assert "outer:" in done.outcome["sentence"]
            assert view.server() == server
            assert view.model() == "one"
            assert [node_process(pve_host, pid) for pid in pids] == before
    assert deploy(controller, "two").ended == (0, "Applied", "")
    view.serves("two")


@contextmanager
def another_container(pve: ProxmoxHost, unit: str) -> Iterator[list[int]]:
    """Have a process with a pid namespace of its own in the control group that a container 102 would have."""
    group = f"/sys/fs/cgroup/lxc.payload.102/system.slice/{unit}"
    script = (
        f"mkdir -p {group} && echo 0 >{group}/cgroup.procs && "
        f"exec setsid unshare --pid --fork --kill-child {HOLD} --gpu 0 --mib 300 --no-oom"
    )
    pve.outer.check(["bash", "-c", f"({script}) </dev/null >/dev/null 2>&1 &"])
    yield from _while_held(pve, group, [])
    pve.outer.check(
        ["bash", "-c", f"cd /sys/fs/cgroup && rmdir -p lxc.payload.102/system.slice/{unit} || true"]
    )


@contextmanager
def namesake_on_the_node(pve: ProxmoxHost, unit: str) -> Iterator[list[int]]:
    """Have a unit of the same name as ours run on the node and hold the server's GPU."""
    text = hold_unit([HOLD, "--gpu", "0", "--mib", "300", "--no-oom"])
    script = f"cat >/etc/systemd/system/{unit} && systemctl daemon-reload && systemctl start {unit}"
    pve.outer.check(["bash", "-c", script], text.encode())
    yield from _while_held(pve, f"/sys/fs/cgroup/system.slice/{unit}", [unit])


def _while_held(pve: ProxmoxHost, group: str, units: list[str]) -> Iterator[list[int]]:
    def pids() -> list[int]:
        return [int(pid) for pid in pve.outer.exec(["cat", f"{group}/cgroup.procs"]).stdout.split()]

    def held() -> bool:
        return any(pid in gpu_holders(pve) for pid in pids())

    try:
        eventually(held, f"somebody in {group} holds the GPU")
        yield [pid for pid in pids() if pid in gpu_holders(pve)]
    finally:
        for unit in units:
            pve.outer.check(["systemctl", "stop", unit])
        pve.outer.exec(["bash", "-c", f"echo 1 >{group}/cgroup.kill"])
        wait_for(lambda: not any(pid in gpu_holders(pve) for pid in pids()))


def gpu_holders(pve: ProxmoxHost, name: str = "") -> list[int]:
    """Give the node's pids of those that have GPU 0 open, by name."""
    script = (
        "for d in /proc/[0-9]*; do readlink $d/fd/* 2>/dev/null | grep -qx /dev/nvidia0 && "
        f'grep -q "{name}" $d/comm && echo ${{d#/proc/}}; done; true'
    )
    return [int(pid) for pid in pve.outer.check(["bash", "-c", script]).split()]


def node_process(pve: ProxmoxHost, pid: int) -> tuple[int, str] | None:
    """Give a process of the node by pid and start time."""
    return HostView(pve.outer).process(pid)


def outside(pve: ProxmoxHost, unit: str) -> tuple[int, str] | None:
    """Give the main process of a unit of the node."""
    return HostView(pve.outer).server(f"{unit}.service")


def test_a_locked_or_stopped_container_is_unknown_and_nothing_is_decided(
    pve_host: ProxmoxHost, view: ContainerView, controller: Controller
) -> None:
    """Exit 7 with the node's own word for it; the server is as it was, and once the container is back it is looked over, not restarted (S12)."""
    assert deploy(controller, "one").ended == (0, "Applied", "")
    before = (view.server(), view.mutations(), view.record("fence"))
    controller.commit("two", *QUICK, host=HOST, **LOOPBACK)
    break_(pve_host, "locked")
    locked = controller.apply()
    assert locked.ended == (7, "Unknown", "Unreachable"), locked.err + locked.out
    assert "locked (backup)" in locked.outcome["sentence"]
    heal(pve_host)
    assert (view.server(), view.mutations(), view.record("fence")) == before
    pve_host.outer.check(["pct", "stop", str(pve_host.vmid)])
    try:
        stopped = controller.apply()
        assert stopped.ended == (7, "Unknown", "Unreachable"), stopped.err + stopped.out
        assert "cannot be entered" in stopped.outcome["sentence"]
        status = controller.run("status", "-o", "json")
        assert status.code == 7, status.err + status.out
        assert json.loads(status.out)
    finally:
        pve_host.outer.check(["pct", "start", str(pve_host.vmid)])
        wait_for(
            lambda: pve_host.exec(["systemctl", "is-system-running", "--wait"]).exit_status == 0
        )
    view.wait_until_active()
    server = view.server()
    controller.commit("one", *QUICK, host=HOST, **LOOPBACK)
    back = controller.apply()
    assert back.ended == (0, "Applied", ""), back.err + back.out
    assert "start" not in back.steps
    assert view.server() == server
    assert controller.apply().ended == (0, "InSync", "")
    view.serves("one")


def test_a_busy_gpu_outside_is_no_floor(pve_host: ProxmoxHost, tmp_path: Path) -> None:
    """Enrolment learns no idle baseline while the node shows somebody with a GPU, though the container sees nobody (S2)."""
    with namesake_on_the_node(pve_host, "other.service"):
        directory = tmp_path / "controller"
        with pytest.raises(AssertionError, match="no baseline was learned"):
            enrolled(pve_host, directory)


def test_the_gpus_of_a_container_are_released_as_the_node_sees_them(
    pve_host: ProxmoxHost, view: ContainerView, controller: Controller
) -> None:
    """`release`: a holder outside the container refuses it and lives on (S3); without it the server is stopped, held and proven free."""
    assert deploy(controller, "one").ended == (0, "Applied", "")
    break_(pve_host.outer, "foreign-holder")
    refused = controller.run("release", HOST, "--yes")
    assert refused.code == 1, refused.out + refused.err
    assert "ForeignHolder" in refused.out
    assert view.state() == "active"
    assert pve_host.outer.exec(["systemctl", "is-active", "lab-foreign"]).exit_status == 0
    pve_host.outer.check(["systemctl", "stop", "lab-foreign"])
    released = controller.run("release", HOST, "--yes", "-o", "json")
    assert released.code == 0, released.out + released.err
    lines = [json.loads(line) for line in released.out.splitlines()]
    (proof,) = [line for line in lines if line["type"] == "proof"]
    assert {card["verdict"] for card in proof["gpus"]} == {"released"}
    assert proof["kept_on_host"] is True
    assert view.state() == "inactive"


@pytest.mark.nightly
def test_a_container_is_restarted_only_by_a_consent_that_names_it(
    pve_host: ProxmoxHost, view: ContainerView, controller: Controller
) -> None:
    """Rung 8: another number does nothing, somebody else's unit inside forbids it; alone in it, what SIGKILL does not end ends with the container.

    The server hangs as in a driver, which lets go of it once its container is being shut down.
    """
    assert deploy(controller, "one").ended == (0, "Applied", "")
    server = view.server()
    release = ("release", HOST, "--yes", "-o", "json", "--allow-container-restart")
    wrong = controller.run(*release, str(pve_host.vmid + 1))
    assert wrong.code == 1, wrong.out + wrong.err
    assert "nothing was done" in wrong.out
    assert view.server() == server
    break_(pve_host, "ignore-term", unit=view.unit)
    break_(pve_host, "d-state", unit=view.unit)
    break_(pve_host, "python")
    shared = controller.run(*release, str(pve_host.vmid))
    assert shared.code != 0, shared.out + shared.err
    assert "lab-python.service: it is not restarted" in str(proof_of(shared)["consented"]), (
        proof_of(shared)
    )
    assert view.server("lab-python.service") is not None
    assert {card["verdict"] for card in proof_of(shared)["gpus"]} == {"wedged", "released"}
    pve_host.check(["systemctl", "stop", "lab-python.service"])
    begun = controller.begin(*release, str(pve_host.vmid))
    stops = ["pgrep", "-f", f"^lxc-stop -n {pve_host.vmid}"]
    wait_for(lambda: pve_host.outer.exec(stops).exit_status == 0, 120)
    heal(pve_host)
    done = begun.end()
    assert done.code == 0, done.out + done.err
    assert proof_of(done)["consented"] == [f"container {pve_host.vmid} was restarted"]
    assert {card["verdict"] for card in proof_of(done)["gpus"]} == {"released"}
    assert view.state() in {"inactive", "failed"}
    assert controller.run("resume", "llm").code == 0
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("one")


def proof_of(run: Run) -> dict[str, Any]:
    """Give the proof of a release."""
    (proof,) = [line for text in run.out.splitlines() if (line := json.loads(text))["type"] == "proof"]  # fmt: skip
    assert isinstance(proof, dict)
    return proof

"""Lab hosts are what they say: reachable by their pinned key only, put back by a reset, gone after a stop."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from lab_engine import hold_command, hold_unit, start_unit, wait_for
from lab_hosts import BootHost
from ruamel.yaml import YAML

from reconciler.core.errors import HostError, UsageError
from reconciler.lab.hosts import LabPaths, ProxmoxHost, SystemdHost
from reconciler.lab.reset import reset

SMI = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]


def _ssh(host: SystemdHost, target: str, *command: str) -> subprocess.CompletedProcess[str]:
    options = ["-F", str(host.lab.ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    return subprocess.run(
        ["ssh", *options, target, *command], capture_output=True, text=True, timeout=30, check=False
    )


def test_a_directory_always_gives_the_same_lab_and_another_one_another(tmp_path: Path) -> None:
    """Two labs never share a bridge, a subnet, a control group or a namespace."""
    one, two = LabPaths.at(tmp_path / "one"), LabPaths.at(tmp_path / "two")
    assert one == LabPaths.at(tmp_path / "one")
    assert one.cgroup != two.cgroup


@pytest.mark.parametrize("name", ["", "Gpu", "a" * 11, "-a", "a/b", "a b", "a\n"])
def test_a_bad_host_name_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    """A name goes into paths and interface names: only short, plain ones are taken."""
    with pytest.raises(UsageError, match="at most ten"):
        SystemdHost.boot(name, lab=LabPaths.at(tmp_path / "lab"))
    assert not (tmp_path / "lab").exists()


@pytest.mark.lab
def test_a_host_runs_systemd_and_lets_in_by_its_pinned_key(lab_host: SystemdHost) -> None:
    """The ssh configuration that a boot writes is all that one needs to log in, as root or as `deploy`."""
    assert _ssh(lab_host, lab_host.name, "systemctl", "is-system-running").stdout == "running\n"
    assert _ssh(lab_host, f"deploy@{lab_host.ip}", "id", "-un").stdout == "deploy\n"
    assert _ssh(lab_host, f"deploy@{lab_host.ip}", "sudo", "-n", "true").returncode == 1


@pytest.mark.lab
def test_a_host_with_another_key_is_refused(boot_host: BootHost) -> None:
    """A host that comes back with a new key is not the host that was pinned."""
    host = boot_host()
    pinned = host.lab.known_hosts.read_text()
    host.stop(hard=True)
    again = boot_host(host.name)
    assert again.ip == host.ip
    again.lab.known_hosts.write_text(pinned)
    assert "HOST IDENTIFICATION HAS CHANGED" in _ssh(again, again.name, "true").stderr


@pytest.mark.lab
def test_the_inventory_names_every_running_host(lab_host: SystemdHost, boot_host: BootHost) -> None:
    """Specs can be pointed at the lab: one `Host` document for each host."""
    host = boot_host(gpus=1)
    documents = {d["name"]: d for d in YAML(typ="safe").load_all(host.lab.inventory.read_text())}
    assert documents[host.name]["ssh"] == {"address": host.ip, "user": "root", "port": 22}
    assert lab_host.name in documents


@pytest.mark.lab
def test_a_stopped_host_leaves_nothing_behind(boot_host: BootHost) -> None:
    """No process, mount, link, namespace or control group of a host outlives it."""
    host = boot_host()
    name, tag = host.name, host.lab.tag
    host.check(["systemd-run", "--quiet", "--unit=x", "fakegpu-hold", "--on-term", "ignore"])
    host.stop()
    assert not host.directory.exists()
    groups = _control_groups()
    # A zombie that nobody has reaped yet is in no group any more: its line says so.
    assert not [g for g in groups if f"{host.lab.cgroup}/{name}" in g and "(deleted)" not in g]
    assert str(host.directory) not in Path("/proc/self/mountinfo").read_text()
    assert not Path(f"/run/netns/lab-{tag}-{name}").exists()
    assert not Path(f"/sys/class/net/v{tag}-{name}").exists()


@pytest.mark.lab
def test_what_an_unclean_end_left_is_cleared_at_the_next_boot(boot_host: BootHost) -> None:
    """A host whose PID 1 was killed, or whose owner was, does not stand in the way of the next."""
    host = boot_host()
    subprocess.run(["kill", "-9", str(host.leader)], check=True)
    wait_for(lambda: not host.alive())
    again = boot_host(host.name)
    assert again.check(["systemctl", "is-system-running"]) == "running\n"


@pytest.mark.lab
def test_more_gpus_than_the_machine_has_numbers_for_are_refused(lab: LabPaths) -> None:
    """The refusal says how many there can be, and leaves nothing of the host."""
    with pytest.raises(HostError, match="at most"):
        SystemdHost.boot("many", lab=lab, gpus=200)
    assert not lab.host_directory("many").exists()


@pytest.mark.lab
def test_a_reset_ends_units_strays_and_faults_and_restores_etc(lab_host: SystemdHost) -> None:
    """After a reset the host is as it booted, whatever a case did to it."""
    command = hold_command("--on-term", "ignore", "--child", "escape,setsid,ignore-term")
    start_unit(
        lab_host, "llm.service", hold_unit(command, service="Restart=always\nKillMode=process")
    )
    lab_host.check(
        ["bash", "-c", "setsid sleep 1000 >/dev/null 2>&1 & useradd -m someone; rm /etc/profile"]
    )
    lab_host.check(
        ["bash", "-c", "mkdir -p /var/lib/reconciler/x; echo 1 >/var/lib/reconciler/x/y"]
    )
    lab_host.check(["systemctl", "stop", "ssh"])
    removed = reset(lab_host)
    assert any("llm.service" in entry for entry in removed)
    assert lab_host.check(SMI).split() == ["1"] * 4
    assert lab_host.exec(["systemctl", "cat", "llm.service"]).exit_status == 1
    assert lab_host.exec(["id", "someone"]).exit_status == 1
    assert lab_host.exec(["pgrep", "-x", "sleep"]).exit_status == 1
    for path in ("/var/lib/reconciler", "/etc/systemd/system/llm.service"):
        assert lab_host.exec(["test", "-e", path]).exit_status == 1
    assert lab_host.exec(["test", "-e", "/etc/profile"]).exit_status == 0
    assert _ssh(lab_host, lab_host.name, "true").returncode == 0
    assert reset(lab_host) == ()


@pytest.mark.lab_pve
def test_a_container_runs_servers_that_its_proxmox_host_sees(pve_host: ProxmoxHost) -> None:
    """A holder inside the container is a holder outside: one process, two pids, one device."""
    start_unit(pve_host, "llm.service", hold_unit(hold_command()))
    assert pve_host.check(SMI).split() == ["8001", "1"]
    assert pve_host.outer.check(SMI).split() == ["8001", "1"]
    assert "llm.service" in reset(pve_host)
    assert pve_host.outer.check(SMI).split() == ["1", "1"]


def _control_groups() -> list[str]:
    """What /proc says of every process; those that end meanwhile are left out."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):
                found.append((directory / "cgroup").read_text())
    return found

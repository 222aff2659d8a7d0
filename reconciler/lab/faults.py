"""What can go wrong on a GPU host, played for real on a lab host: the cases of `reconcile lab break`.

Each case is a row of `CASES`: a name, one line for people, and a function that plays it and says
what it did. `heal` undoes what is not undone by ending a process. For tests, rehearsals and the
command line; knows hosts and the stand-in server (`scripts/fakegpu-hold`), nothing of specs or rollouts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from reconciler.core.errors import HostError, UsageError
from reconciler.lab.hosts import BOOT_DEADLINE_S, ProxmoxHost, SystemdHost

LabHost = SystemdHost | ProxmoxHost

HOLD = "/usr/local/bin/fakegpu-hold"
"""Where a lab host has the stand-in server."""

FOREIGN_MIB = 4000
"""What a bystander takes: little enough to start beside a server, too much to be a rounding error."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a case is played: a host, and the unit meant there ("": the only one with a server)."""

    host: LabHost
    unit: str


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that goes wrong; `play` does it and says what was done."""

    name: str
    about: str
    play: Callable[[Scene], str]


def break_(host: LabHost, case: str, *, unit: str = "") -> str:
    """Play `case` on `host` and say what was done; `unit` where several servers hold GPUs there."""
    if case not in CASES:
        raise UsageError(f"lab: no case {case!r}; `reconcile lab break --list` shows all")
    return CASES[case].play(Scene(host, unit))


def heal(host: LabHost) -> str:
    """Undo faults of network, disk, GPUs, driver and container; leaves units and processes alone."""
    outer = _outer(host)
    outer.network("heal")
    outer.lab.script("disk-fault.sh", outer.name, "heal", deadline_s=20)
    for pid in _frozen(outer):
        outer.lab.script("stuck.sh", outer.name, pid, "off", deadline_s=20)
    host.check(["bash", "-c", _HEAL])
    outer.check(["bash", "-c", _HEAL])
    return "network, disk, GPUs and driver answer as before; processes and units are as they are"


_HEAL = """
rm -f /run/fakegpu/fault.json /run/fakegpu/lag-state.json /run/fakegpu/persistence.json /run/pct-fault
for f in /etc/pve/lxc/*.conf; do [ ! -e $f ] || sed -i /^lock:/d $f; done
if systemctl --quiet is-active lab-hang; then systemctl stop lab-hang; fi
if findmnt --noheadings --output OPTIONS --mountpoint /etc | grep -q ^ro; then umount /etc; fi
"""


# --- the server's own processes ----------------------------------------------------------------


def _left_over(at: Scene) -> str:
    unit, pid = _server(at)
    _drop_in(at.host, unit, "[Service]\nKillMode=process\n")
    _tell(at.host, pid, {"child": "setsid,ignore-term"})
    return f"{unit} has a child that ignores SIGTERM, and KillMode=process: a stop will leave it with the GPUs"


def _escaped(at: Scene) -> str:
    unit, pid = _server(at)
    _tell(at.host, pid, {"child": "escape,setsid,ignore-term"})
    return f"a child of {unit} holds its GPUs in a control group of its own (/lab-escaped)"


def _ignore_term(at: Scene) -> str:
    unit, pid = _server(at)
    _tell(at.host, pid, {"on_term": "ignore", "drain": False})
    return f"{unit} ignores SIGTERM from now on"


def _kill_mode_process(at: Scene) -> str:
    unit, _ = _server(at)
    _drop_in(at.host, unit, "[Service]\nKillMode=process\n")
    return f"a drop-in gives {unit} KillMode=process"


def _no_sigkill(at: Scene) -> str:
    unit, pid = _server(at)
    _drop_in(at.host, unit, "[Service]\nSendSIGKILL=no\n")
    _tell(at.host, pid, {"on_term": "ignore", "drain": False})
    return f"{unit} ignores SIGTERM, and a drop-in gives it SendSIGKILL=no"


def _d_state(at: Scene) -> str:
    unit, pid = _server(at)
    outer = _outer(at.host)
    if _v1_freezer():
        seen = pid if isinstance(at.host, SystemdHost) else _pid_outside(at.host, pid)
        outer.lab.script("stuck.sh", outer.name, str(seen), "on", deadline_s=20)
    else:
        at.host.check(
            ["systemd-run", "--quiet", "--unit=lab-hang", "fakegpu-fuse", "/dev/lab-hang"]
        )
        wait = "for i in $(seq 50); do mountpoint -q /dev/lab-hang && exit; sleep .1; done; exit 1"
        at.host.check(["bash", "-c", wait])
        _tell(at.host, pid, {"touch": "/dev/lab-hang"})
    return f"process {pid} of {unit} is in D state: SIGKILL stays pending until `heal`"


def _crash(at: Scene) -> str:
    unit, pid = _server(at)
    _tell(at.host, pid, {"exit": 1})
    return f"{unit} exits with status 1"


def _slow(at: Scene) -> str:
    unit, pid = _server(at)
    _tell(at.host, pid, {"speed": 5})
    return f"{unit} now gives five tokens a second"


def _garbage(at: Scene) -> str:
    unit, pid = _server(at)
    _tell(at.host, pid, {"garbage": "loops"})
    return f"{unit} answers with one word, again and again"


# --- others on the host ------------------------------------------------------------------------


def _foreign_holder(at: Scene) -> str:
    gpu = _gpu(at)
    _bystander(
        at.host, "lab-foreign", f"{HOLD} --gpu {gpu} --mib {FOREIGN_MIB} --no-oom", user="nobody"
    )
    return f"lab-foreign.service, of user nobody, holds {FOREIGN_MIB} MiB of GPU {gpu}: not ours, never to be touched"


def _dcgm_exporter(at: Scene) -> str:
    # The interpreter under another name: a monitor is known by its executable, not by what it calls itself.
    at.host.check(["cp", "--dereference", "/usr/bin/python3", "/usr/local/bin/dcgm-exporter"])
    gpus = ",".join(_indexes(at.host))
    command = f"/usr/local/bin/dcgm-exporter {HOLD} --gpu {gpus} --mib 0 --no-oom"
    _bystander(at.host, "dcgm-exporter", f"/usr/bin/env PYTHONHOME=/usr {command}")
    return f"dcgm-exporter.service has GPUs {gpus} open, as monitors do, without memory"


def _python(at: Scene) -> str:
    command = "/usr/bin/python3 -c 'import signal; signal.pause()'"
    _bystander(at.host, "lab-python", command)
    return "lab-python.service is a python3 of its own that holds no GPU"


# --- GPUs and driver -----------------------------------------------------------------------------


def _hang_smi(at: Scene) -> str:
    return _gpu_fault(at.host, {"mode": "hang"}, "nvidia-smi never answers")


def _no_driver(at: Scene) -> str:
    return _gpu_fault(at.host, {"mode": "no-driver"}, "nvidia-smi cannot reach the driver (exit 9)")


def _lost(at: Scene) -> str:
    gpu = _gpu(at)
    return _gpu_fault(at.host, {"mode": "lost", "gpu": int(gpu)}, f"GPU {gpu} is lost (exit 15)")


def _leak(at: Scene) -> str:
    gpu = _gpu(at)
    return _gpu_fault(
        at.host, {"leak_mib": {gpu: 3000}}, f"GPU {gpu} shows 3000 MiB that no process has"
    )


def _lag(at: Scene) -> str:
    return _gpu_fault(at.host, {"lag_seconds": 5}, "freed GPU memory stays visible for 5 s")


def _hidden(at: Scene) -> str:
    return _gpu_fault(
        at.host, {"hide_processes": True}, "nvidia-smi lists no process, as in a container"
    )


# --- the machine ---------------------------------------------------------------------------------


def _cut(at: Scene) -> str:
    _outer(at.host).network("cut", "all")
    return "every packet to the host is dropped, until `heal`"


def _reset(at: Scene) -> str:
    _outer(at.host).network("reset")
    return "connections to port 22 are reset, until `heal`"


def _loss(at: Scene) -> str:
    _outer(at.host).network("loss", "20")
    return "one packet in five to port 22 is lost, until `heal`"


def _heal(at: Scene) -> str:
    return heal(at.host)


def _full_disk(at: Scene) -> str:
    outer = _outer(at.host)
    outer.lab.script("disk-fault.sh", outer.name, "full", deadline_s=20)
    return "nothing can be written to / (so /etc and /var), until `heal`; /run has room"


def _read_only_etc(at: Scene) -> str:
    at.host.check(["bash", "-c", "mount --bind /etc /etc && mount -o remount,bind,ro /etc"])
    return "/etc is read-only, until `heal`"


def _reboot(at: Scene) -> str:
    if isinstance(at.host, ProxmoxHost):
        at.host.outer.check(["pct", "stop", str(at.host.vmid)], deadline_s=BOOT_DEADLINE_S)
        at.host.outer.check(["pct", "start", str(at.host.vmid)], deadline_s=BOOT_DEADLINE_S)
        return f"container {at.host.vmid} was cut off and started again"
    raise UsageError(
        "lab: only a container of a Proxmox-like host can be rebooted; use `lab down` and `lab up`"
    )


def _locked(at: Scene) -> str:
    if not isinstance(at.host, ProxmoxHost):
        raise UsageError(
            f"lab: {at.host.name} is no Proxmox-like host; boot one with `lab up --pve`"
        )
    script = f"sed -i '1i lock: backup' /etc/pve/lxc/{at.host.vmid}.conf"
    at.host.outer.check(["bash", "-c", script])
    return f"container {at.host.vmid} is locked (backup), until `heal`"


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case(
                "left-over",
                "a stop leaves a child of the server behind, with the GPU memory",
                _left_over,
            ),
            Case(
                "escaped",
                "a child of the server left the unit's control group and keeps the GPUs",
                _escaped,
            ),
            Case("ignore-term", "the server ignores SIGTERM", _ignore_term),
            Case(
                "kill-mode-process",
                "a drop-in makes systemd end the main process only",
                _kill_mode_process,
            ),
            Case(
                "no-sigkill",
                "the server ignores SIGTERM and systemd may not send SIGKILL",
                _no_sigkill,
            ),
            Case("d-state", "the server hangs in the driver: not even SIGKILL ends it", _d_state),
            Case("crash", "the server exits with status 1", _crash),
            Case("slow", "the server becomes slow: five tokens a second", _slow),
            Case("garbage", "the server answers with one word, again and again", _garbage),
            Case(
                "foreign-holder",
                "somebody else's process takes memory on the server's GPU",
                _foreign_holder,
            ),
            Case(
                "dcgm-exporter",
                "a monitor has the GPUs open; it must be left alone",
                _dcgm_exporter,
            ),
            Case("python", "a python3 that is not ours runs; it must be left alone", _python),
            Case("hang-smi", "nvidia-smi never answers", _hang_smi),
            Case("no-driver", "nvidia-smi cannot reach the driver", _no_driver),
            Case("lost", "a GPU has fallen off the bus", _lost),
            Case("leak", "GPU memory is used that no process accounts for", _leak),
            Case("lag", "freed GPU memory stays visible for 5 s", _lag),
            Case("hidden", "nvidia-smi lists no process, as in a container", _hidden),
            Case("cut", "the network to the host drops every packet", _cut),
            Case("reset", "ssh connections to the host are reset", _reset),
            Case("loss", "one ssh packet in five is lost", _loss),
            Case("full-disk", "nothing can be written to the host's disk", _full_disk),
            Case("read-only-etc", "/etc is read-only", _read_only_etc),
            Case("locked", "the container is locked by a backup (Proxmox-like hosts)", _locked),
            Case(
                "reboot", "the container is cut off and started again (Proxmox-like hosts)", _reboot
            ),
            Case("heal", "undo faults of network, disk, GPUs and container", _heal),
        )
    }
)


# --- parts -----------------------------------------------------------------------------------------


def _outer(host: LabHost) -> SystemdHost:
    return host.outer if isinstance(host, ProxmoxHost) else host


def _server(at: Scene) -> tuple[str, int]:
    """Return the unit of the stand-in server that is meant, and its main process."""
    host, unit = at.host, at.unit
    found = _stand_ins(host)
    if unit:
        name = unit if unit.endswith(".service") else f"{unit}.service"
        if name not in found:
            raise UsageError(
                f"lab: {name} on {host.name} runs no stand-in server (running: {_names(found)})"
            )
        return name, found[name]
    if len(found) != 1:
        raise UsageError(
            f"lab: this case needs one server that runs on {host.name}; there are {len(found)}: "
            f"{_names(found)}. Apply a spec there first, or name one with --unit"
        )
    return next(iter(found.items()))


def _names(found: Mapping[str, int]) -> str:
    return ", ".join(sorted(found)) or "none"


_FIND = """
for pid in $(sed -n 's|.*@fakegpu-hold/||p' /proc/net/unix | sort -un); do
  unit=$(sed -n 's|^0::.*/\\([^/]*\\.service\\)$|\\1|p' /proc/$pid/cgroup 2>/dev/null)
  [ -z "$unit" ] || echo "$unit $pid"
done
"""


def _stand_ins(host: LabHost) -> dict[str, int]:
    """Return unit and main pid of every stand-in server that is up, bystanders of ours left out."""
    rows = [line.split() for line in host.check(["bash", "-c", _FIND]).splitlines()]
    ours = {"lab-foreign.service", "dcgm-exporter.service"}
    return {unit: int(pid) for unit, pid in rows if unit not in ours}


def _tell(host: LabHost, pid: int, order: Mapping[str, object]) -> None:
    said = host.check([HOLD, "--tell", json.dumps({"pid": pid, **order})])
    if not said.strip().endswith("ok"):
        raise HostError(
            host.name, f"the stand-in server did not obey {dict(order)}: {said.strip()}"
        )


def _drop_in(host: LabHost, unit: str, text: str) -> None:
    directory = f"/etc/systemd/system/{unit}.d"
    script = f"mkdir -p {directory} && cat >{directory}/50-lab.conf && systemctl daemon-reload"
    host.check(["bash", "-c", script], text.encode())


def _indexes(host: LabHost) -> list[str]:
    command = ["bash", "-c", "ls /dev | sed -n 's/^nvidia\\([0-9][0-9]*\\)$/\\1/p' | sort -n"]
    return host.check(command).split()


def _gpu(at: Scene) -> str:
    """Return the first GPU that the server holds; GPU 0 where none runs."""
    if not at.unit and not _stand_ins(at.host):
        return "0"
    _, pid = _server(at)
    links = at.host.check(["bash", "-c", f"readlink /proc/{pid}/fd/* || true"])
    held = sorted(int(index) for index in re.findall(r"^/dev/nvidia(\d+)$", links, re.MULTILINE))
    return str(held[0]) if held else "0"


def _gpu_fault(host: LabHost, fault: Mapping[str, object], said: str) -> str:
    host.check(["bash", "-c", "cat >/run/fakegpu/fault.json"], json.dumps(fault).encode())
    return f"{said}, until `heal`"


def _bystander(host: LabHost, unit: str, command: str, *, user: str = "root") -> None:
    options = ["--quiet", f"--unit={unit}", f"--uid={user}", "--collect"]
    host.check(["systemd-run", *options, *shlex.split(command)])


def _v1_freezer() -> bool:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(" - cgroup " in line and "freezer" in line.rpartition(" - ")[2] for line in lines)


def _pid_outside(host: ProxmoxHost, pid: int) -> int:
    """Translate a pid of the container to the one that its Proxmox host sees."""
    script = (
        f'ns=$(readlink "/proc/$(lxc-info -n {host.vmid} -pH)/ns/pid"); for d in /proc/[0-9]*; do '
        f'[ "$(readlink $d/ns/pid 2>/dev/null)" = "$ns" ] || continue; '
        f"[ \"$(awk '/^NSpid/{{print $NF}}' $d/status)\" = {pid} ] && echo ${{d#/proc/}}; done; true"
    )
    return int(host.outer.check(["bash", "-c", script]).split()[0])


def _frozen(host: SystemdHost) -> list[str]:
    """Return the pids (as the host numbers them) that `stuck.sh` froze."""
    try:
        lines = (host.directory / "cgroups").read_text().splitlines()
    except OSError:
        return []
    mark = f"/{host.lab.cgroup}-{host.name}-"
    return [
        line.rpartition("-")[2]
        for line in lines
        if mark in line and "freezer" in line and Path(line).exists()
    ]

"""AMD GPUs as sysfs and /dev show them, without a tool: cards, who has memory on them, and their device numbers.

The driver's own files are the ground truth: `amd-smi` numbers cards by itself, has listed dead processes, and reads N/A
for memory on some cards. A holder of /dev/kfd alone says nothing about which card, so it counts for each. Not yet seen on
hardware: the layout is that of the kernel's documentation. Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import Any, Dict, List, Optional, Tuple

from reconciler.helper.machine import Reading
from reconciler.helper.outputs import known, unknown
from reconciler.helper.processes import Device, Devices

AMD_VENDOR = "0x1002"
_MIB = 1 << 20


class AmdDevices(Devices):
    """The device numbers of AMD cards, in the place of NVIDIA's."""

    def __init__(self, sys_root: str = "/sys", dev_root: str = "/dev", proc: str = "/proc") -> None:
        self._numbers = {}
        self._majors = {}
        for card in _card_directories(sys_root):
            for node in (card["render"], card["card"]):
                number = _device_number(f"{sys_root}/class/drm/{node}/dev")
                if number is not None:
                    self._numbers[number] = Device(f"{dev_root}/dri/{node}", card["minor"])
        self._kfd = {m for m, name in _char_majors(f"{proc}/devices").items() if name == "kfd"}
        with contextlib.suppress(OSError):
            found = os.stat(f"{dev_root}/kfd")
            if stat.S_ISCHR(found.st_mode):
                number = (os.major(found.st_rdev), os.minor(found.st_rdev))
                self._numbers[number] = Device(f"{dev_root}/kfd", None)

    def find(self, number: Tuple[int, int]) -> Optional[Device]:
        """Return the GPU device with that number, None for any other device."""
        found = self._numbers.get(number)
        if found is None and number[0] in self._kfd:
            return Device(f"kfd {number[0]}:{number[1]}", None)
        return found


def amd_present(dev_root: str = "/dev") -> bool:
    """Say whether the AMD compute driver is there."""
    return os.path.exists(f"{dev_root}/kfd")


def amd_gpus(sys_root: str = "/sys", dev_root: str = "/dev") -> Reading:
    """Return the cards in the words of `Machine.gpus`. A cell that cannot be read is null: neither zero nor free."""
    cards = []
    for index, card in enumerate(_card_directories(sys_root)):
        base = card["device"]
        unique = _sysfs_line(f"{base}/unique_id")
        if not unique or not re.fullmatch(r"(0x)?[0-9a-f]{1,16}", unique):
            return unknown(f"{base} has no unique_id: its card cannot be told from another one")
        used, total = (_sysfs_number(f"{base}/mem_info_vram_{w}") for w in ("used", "total"))
        heat = [_sysfs_number(path) for path in _hwmon_files(base, "temp1_input")]
        cards.append(
            {
                "uuid": f"GPU-{int(unique, 16):016x}",
                "index": index,
                "bus_id": card["bus"],
                "minor": card["minor"],
                "node": f"{dev_root}/dri/{card['render']}",
                "used_mib": None if used is None else -(-used // _MIB),
                "total_mib": None if total is None else total // _MIB,
                "temperature_c": next((h // 1000 for h in heat if h is not None), None),
                "utilization_pct": _sysfs_number(f"{base}/gpu_busy_percent"),
                "mig": None,
                "persistence": None,
                "recovery_action": None,
                "fault": None,
            }
        )
    if not cards:
        return unknown("/dev/kfd is there, and sysfs shows no AMD card", "no_devices")
    if len({card["uuid"] for card in cards}) != len(cards):
        return unknown("two AMD cards have one unique_id")
    driver = _sysfs_line(f"{sys_root}/module/amdgpu/version") or os.uname().release
    return known({"driver": f"amdgpu {driver}", "gpus": cards})


def amd_apps(sys_root: str = "/sys") -> Reading:
    """Return who has memory on which card, zombies included: the driver's own account, in `Machine.apps`' words."""
    root = f"{sys_root}/class/kfd/kfd"
    cards = _gpu_ids(sys_root)
    if cards is None:
        return unknown("the topology of /dev/kfd cannot be read")
    apps: List[Dict[str, Any]] = []
    try:
        pids = sorted(int(name) for name in os.listdir(f"{root}/proc") if name.isdigit())
    except OSError as error:
        return unknown(f"{root}/proc cannot be read ({error.strerror})")
    for pid in pids:
        try:
            names = os.listdir(f"{root}/proc/{pid}")
        except OSError:
            continue  # It has gone since.
        for name in names:
            match = re.fullmatch(r"vram_(\d+)", name)
            if not match:
                continue
            used = _sysfs_number(f"{root}/proc/{pid}/{name}")
            if used == 0:
                continue
            if int(match.group(1)) not in cards:
                return unknown(f"pid {pid} has memory on a card ({name}) that the topology lacks")
            uuid = cards[int(match.group(1))]
            mib = None if used is None else -(-used // _MIB)
            apps.append({"gpu_uuid": uuid, "pid": pid, "used_mib": mib, "name": None})
    return known(apps)


def _gpu_ids(sys_root: str) -> Optional[Dict[int, str]]:
    """Return {the number by which kfd calls a card: its UUID}."""
    found: Dict[int, str] = {}
    nodes = f"{sys_root}/class/kfd/kfd/topology/nodes"
    try:
        names = os.listdir(nodes)
    except OSError:
        return None
    for name in names:
        gpu_id = _sysfs_number(f"{nodes}/{name}/gpu_id")
        if not gpu_id:
            continue  # A processor.
        text = "\n".join(_sysfs_lines(f"{nodes}/{name}/properties"))
        unique = re.search(r"^unique_id (\d+)$", text, re.MULTILINE)
        if not unique:
            return None
        found[gpu_id] = f"GPU-{int(unique.group(1)):016x}"
    return found


def _card_directories(sys_root: str) -> List[Dict[str, Any]]:
    """Return AMD's cards in the order of their PCI addresses; `minor` is the number of the render node."""
    found = []
    drm = f"{sys_root}/class/drm"
    try:
        names = os.listdir(drm)
    except OSError:
        return []
    for name in names:
        device = os.path.realpath(f"{drm}/{name}/device")
        if not re.fullmatch(r"renderD\d+", name) or _sysfs_line(f"{device}/vendor") != AMD_VENDOR:
            continue
        cards = [n for n in _names_in(f"{device}/drm") if re.fullmatch(r"card\d+", n)]
        found.append(
            {
                "render": name,
                "card": cards[0] if cards else name,
                "minor": int(name[len("renderD") :]),
                "device": device,
                "bus": os.path.basename(device),
            }
        )
    return sorted(found, key=lambda card: str(card["bus"]))


def _names_in(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _hwmon_files(device: str, name: str) -> List[str]:
    return [f"{device}/hwmon/{one}/{name}" for one in _names_in(f"{device}/hwmon")]


def _sysfs_lines(path: str) -> List[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read(1 << 16).splitlines()
    except OSError:
        return []


def _sysfs_line(path: str) -> str:
    return next(iter(_sysfs_lines(path)), "").strip()


def _sysfs_number(path: str) -> Optional[int]:
    text = _sysfs_line(path)
    return int(text) if text.isdigit() else None


def _device_number(path: str) -> Optional[Tuple[int, int]]:
    found = re.fullmatch(r"(\d+):(\d+)", _sysfs_line(path))
    return (int(found.group(1)), int(found.group(2))) if found else None


def _char_majors(path: str) -> Dict[int, str]:
    majors = {}
    for line in _sysfs_lines(path):
        if line.startswith("Block devices"):
            break
        words = line.split()
        if len(words) == 2 and words[0].isdigit():
            majors[int(words[0])] = words[1]
    return majors


__all__ = ["AmdDevices", "amd_apps", "amd_gpus", "amd_present"]

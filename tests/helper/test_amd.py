"""AMD cards by sysfs: what is read of them, who holds them, and that the same judgement says released."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.helper.amd import AmdDevices, amd_apps, amd_gpus
from reconciler.helper.processes import scan_holders
from reconciler.helper.readings import released

ONE, TWO = "GPU-5c88007efa1b2c3d", "GPU-00000000000000ab"
ZERO = "1:5"
"""/dev/zero's number: a process that has it open plays the holder of the first card's render node."""


def put(path: Path, text: str) -> None:
    """Write one file of the tree."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def card(sys_root: Path, number: int, unique: str, used: str, node: str) -> None:
    """Lay out one card as the kernel documents it."""
    device = sys_root / f"devices/0000:0{number}:00.0"
    render, primary = f"renderD{128 + number}", f"card{number}"
    for name, text in {
        "vendor": "0x1002",
        "unique_id": unique,
        "mem_info_vram_used": used,
        "mem_info_vram_total": str(192 << 30),
        "gpu_busy_percent": "0",
        "hwmon/hwmon3/temp1_input": "41000",
    }.items():
        put(device / name, text)
    for name, number_of_node in ((render, node), (primary, f"226:{number}")):
        (device / "drm" / name).mkdir(parents=True)
        put(sys_root / f"class/drm/{name}/dev", number_of_node)
        (sys_root / f"class/drm/{name}/device").symlink_to(device)
    node_dir = sys_root / f"class/kfd/kfd/topology/nodes/{number + 1}"
    put(node_dir / "gpu_id", str(50000 + number))
    put(node_dir / "properties", f"simd_count 1\nunique_id {int(unique, 16)}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Give a /sys with two AMD cards, a processor, and a display chip of another maker."""
    sys_root = tmp_path / "sys"
    card(sys_root, 0, "5c88007efa1b2c3d", str(300 << 20), ZERO)
    card(sys_root, 1, "00000000000000ab", str(300 << 20), "226:129")
    put(sys_root / "class/kfd/kfd/topology/nodes/0/gpu_id", "0")
    (sys_root / "class/kfd/kfd/proc").mkdir()
    other = sys_root / "devices/0000:07:00.0"
    put(other / "vendor", "0x1a03")
    (sys_root / "class/drm/renderD140").mkdir()
    (sys_root / "class/drm/renderD140/device").symlink_to(other)
    return sys_root


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """Have a process that has the first card's node open."""
    code = "import sys; f = open('/dev/zero'); print('open', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.communicate()


def gpus(tree: Path) -> list[dict[str, Any]]:
    """Give the cards."""
    found: list[dict[str, Any]] = amd_gpus(str(tree))["known"]["gpus"]
    return found


def test_cards_are_told_by_their_unique_id_in_the_order_of_their_buses(tree: Path) -> None:
    """Each card has a UUID, its render node's number, memory in MiB, and life signs; another maker's chip is none."""
    first, second = gpus(tree)
    assert (first["uuid"], second["uuid"]) == (ONE, TWO)
    assert (first["minor"], second["minor"]) == (128, 129)
    assert first["bus_id"] == "0000:00:00.0"
    assert (first["used_mib"], first["total_mib"]) == (300, 192 << 10)
    assert (first["temperature_c"], first["utilization_pct"]) == (41, 0)


def test_what_cannot_be_read_is_null_and_never_zero(tree: Path) -> None:
    """A card without a memory reading or life sign is unknown, not free; one without an identity makes all unknown."""
    device = tree / "devices/0000:00:00.0"
    (device / "mem_info_vram_used").unlink()
    (device / "hwmon/hwmon3/temp1_input").unlink()
    first = gpus(tree)[0]
    assert first["used_mib"] is None
    assert first["temperature_c"] is None
    (device / "unique_id").unlink()
    assert "unknown" in amd_gpus(str(tree))


def test_memory_is_told_by_process_and_card_zombies_included(tree: Path) -> None:
    """The driver's own account names pid and card; a pid without memory is no app; an unknown card makes all unknown."""
    proc = tree / "class/kfd/kfd/proc"
    put(proc / "4711/vram_50001", str(5 << 30))
    put(proc / "4711/vram_50000", "0")
    put(proc / "4712/vram_50000", "0")
    assert amd_apps(str(tree))["known"] == [
        {"gpu_uuid": TWO, "pid": 4711, "used_mib": 5120, "name": None}
    ]
    put(proc / "4713/vram_60000", "1")
    assert "unknown" in amd_apps(str(tree))
    assert "unknown" in amd_apps(str(tree / "nowhere"))


def test_a_holder_is_pinned_to_its_card_by_device_number(
    tree: Path, holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A process with the render node open holds that card; by number, so a node of a container's own counts as well."""
    devices = AmdDevices(str(tree), str(tmp_path / "no-dev"))
    scan = scan_holders(devices)["known"]
    (found,) = [h for h in scan["holders"] if h["pid"] == holder.pid]
    assert found["minors"] == [128]
    assert os.getpid() not in {h["pid"] for h in scan["holders"]}


def sample(tree: Path, at: float, holders: list[dict[str, Any]]) -> dict[str, Any]:
    """Give one sample of the judgement."""
    return {
        "at": at,
        "gpus": amd_gpus(str(tree)),
        "apps": amd_apps(str(tree)),
        "holders": {"known": {"complete": True, "unreadable": 0, "holders": holders}},
        "kernel": {"known": {"cursor": "c", "lines": []}},
    }


def judged(samples: list[dict[str, Any]], tree: Path) -> dict[str, Any]:
    """Judge the first card, idle at 300 MiB."""
    driver = amd_gpus(str(tree))["known"]["driver"]
    baselines = {ONE: {"used_mib": 300, "driver": driver, "mig": None, "persistence": None}}
    return released(samples, [ONE], baselines, {"container": None}, 2.0)


def test_the_same_judgement_says_released(tree: Path) -> None:
    """Three clean samples over the window release an AMD card; stranded memory, a kfd-only holder or a GPU reset do not."""
    clean = [sample(tree, t, []) for t in (0.0, 1.0, 2.0)]
    assert judged(clean, tree)["verdict"] == "released"
    lone = {
        "pid": 9, "start_ticks": 1, "minors": [], "devices": ["/dev/kfd"], "comm": "x", "exe": "/x", "uid": 1, "gid": 1,
        "groups": [], "cgroup": "/user.slice", "state": "S", "kill_pending": False,
    }  # fmt: skip
    held = [sample(tree, t, [lone]) for t in (0.0, 1.0, 2.0)]
    assert judged(held, tree)["verdict"] == "not-released"
    reset = [dict(one) for one in clean]
    reset[-1]["kernel"] = {
        "known": {"cursor": "c", "lines": ["amdgpu 0000:00:00.0: amdgpu: GPU reset begin!"]}
    }
    assert judged(reset, tree)["verdict"] == "fault"
    put(tree / "devices/0000:00:00.0/mem_info_vram_used", str(46 << 30))
    stranded = [sample(tree, float(t), []) for t in range(0, 35, 5)]
    assert judged(stranded, tree)["verdict"] == "wedged"

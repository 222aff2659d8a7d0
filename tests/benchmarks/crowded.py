"""Two scans for holders over a crowd (`crowd.py`), each in a process of its own: what they find and what they cost.

    python crowded.py build PROCESSES THREADS DESCRIPTORS [SCAN...]    as PID 1 of a fresh pid namespace
    python crowded.py scan ours|every-thread DEV

Both print one line of JSON. `in_a_namespace` does it all, for the benchmark and for a test.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from reconciler.helper import processes
from reconciler.helper.processes import Devices, process_pids, process_stat, scan_holders

CARD = os.makedev(1, 5)
"""As in `crowd.py`: a character device that can be opened and mapped stands for a card."""

CROWD = Path(__file__).with_name("crowd.py")

# -- two scans -----------------------------------------------------------------------------------------


def every_thread(devices: Devices) -> set[int]:
    """Find the holders the plain way: each descriptor and mapping of each thread is asked for its number."""
    found = set()
    for pid in process_pids():
        facts = process_stat(pid)
        if pid == os.getpid() or facts is None or facts["kernel_thread"]:
            continue
        for tid in _names(f"/proc/{pid}/task"):
            for place in ("fd", "map_files"):
                base = f"/proc/{tid}/{place}"
                if any(_is_card(devices, f"{base}/{name}") for name in _names(base)):
                    found.add(pid)
    return found


def _names(where: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [path.name for path in Path(where).iterdir()]
    return []


def _is_card(devices: Devices, path: str) -> bool:
    with contextlib.suppress(OSError):
        seen = Path(path).stat()
        number = (os.major(seen.st_rdev), os.minor(seen.st_rdev))
        return stat.S_ISCHR(seen.st_mode) and devices.find(number) is not None
    return False


def ours(devices: Devices) -> set[int]:
    """Find the holders as the product does; the scan must be complete."""
    scan = scan_holders(devices)["known"]
    assert scan["complete"], scan
    return {holder["pid"] for holder in scan["holders"]}


def on_an_old_kernel(devices: Devices) -> set[int]:
    """Find the holders without kcmp and without the kernel's answers about single mappings."""

    def no_query(*_: object) -> set[tuple[int, int]]:
        raise OSError(errno.ENOTTY, "no such request")

    with patch.multiple(processes, _KCMP=None, _queried_devices=no_query):
        return ours(devices)


def leaders_only(devices: Devices) -> set[int]:
    """Find the holders as if every thread had its leader's table: what a careless scan would report."""
    with patch.object(processes, "_shares_table", lambda *_: True):
        return ours(devices)


def measured(scan: Callable[[Devices], set[int]], dev: str) -> dict[str, Any]:
    """Run one scan and say what it found and cost, its children's share included."""
    devices = Devices(dev=dev)
    before, began = _cpu_s(), time.perf_counter()
    held = scan(devices)
    took_s = time.perf_counter() - began
    user_s, kernel_s = (now - then for now, then in zip(_cpu_s(), before, strict=True))
    peak = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {
        "held": sorted(held),
        "took_s": took_s,
        "cpu_s": user_s + kernel_s,
        "kernel_s": kernel_s,
        "mib": peak / 1024,
    }


def _cpu_s() -> tuple[float, float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime for one in used), sum(one.ru_stime for one in used)


# -- running -------------------------------------------------------------------------------------------

SCANS: dict[str, Callable[[Devices], set[int]]] = {
    "ours": ours,
    "every-thread": every_thread,
    "old-kernel": on_an_old_kernel,
    "leaders-only": leaders_only,
}


def build(people: int, threads: int, descriptors: int, names: Sequence[str]) -> dict[str, Any]:
    """Have the crowd stand, and scan it in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="crowd-") as dev:
        os.mknod(f"{dev}/nvidia0", stat.S_IFCHR | 0o666, CARD)
        numbers = [str(number) for number in (people, threads, descriptors)]
        standing = subprocess.Popen(
            [sys.executable, "-I", "-S", CROWD, *numbers, dev],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert standing.stdout is not None
        assert standing.stdout.readline(), standing.communicate()[1].decode()
        pids = process_pids()
        result: dict[str, Any] = {
            "load": os.getloadavg()[0],
            "processes": len(pids),
            "threads": sum(len(_names(f"/proc/{pid}/task")) for pid in pids),
            "descriptors": sum(len(_names(f"/proc/{pid}/fd")) for pid in pids),
        }
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for name in names:
            command = [sys.executable, "-S", __file__, "scan", name, dev]
            said = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
            assert said.returncode == 0, said.stderr
            result[name] = json.loads(said.stdout)
        return result


def in_a_namespace(
    people: int, threads: int, descriptors: int, names: Sequence[str] = ("ours", "every-thread")
) -> dict[str, Any]:
    """Build a crowd in a fresh pid namespace, return what the scans found and cost, and end it all."""
    numbers = [str(number) for number in (people, threads, descriptors)]
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    said = subprocess.run(
        [*command, sys.executable, __file__, "build", *numbers, *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def main() -> None:
    """Do what the words of the command line say."""
    match sys.argv[1:]:
        case ["build", people, threads, descriptors, *names]:
            result = build(int(people), int(threads), int(descriptors), names)
        case ["scan", name, dev]:
            result = measured(SCANS[name], dev)
        case _:
            sys.exit(__doc__)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # With PID 1 the crowd ends.


if __name__ == "__main__":
    main()

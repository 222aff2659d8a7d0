"""What it costs to find every holder of a GPU on a crowded host, beside the scan that looks at every thread.

Run as root:  python tests/benchmarks/bench_scan.py [--processes 5000] [--threads 50000] [--descriptors 100000]

The crowd is real: processes, threads and open files in a pid namespace of their own, which ends with this program. Among
them stand holders of a card by the leader's table, by a thread with a table of its own, behind a dead leader, by a mapping
alone, under another path, and as a forked child; both scans must find the same. The kernel's `pid_max` bounds how many
threads there can be: fewer are built then, and said, or `--raise-pid-max` raises it for the time being.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from crowded import in_a_namespace

SPARE_PIDS = 3000
"""What the machine itself has, and what comes and goes while we measure."""

PID_MAX = Path("/proc/sys/kernel/pid_max")


@contextlib.contextmanager
def pid_max(wanted: int, *, may_raise: bool) -> Iterator[int]:
    """Give how many pids there may be; raised for the time being where that was asked for."""
    there = int(PID_MAX.read_text())
    if there >= wanted or not may_raise:
        yield there
        return
    PID_MAX.write_text(str(wanted))
    try:
        yield wanted
    finally:
        PID_MAX.write_text(str(there))


def main() -> None:
    """Build the crowd, scan it both ways, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("processes", 5000), ("threads", 50_000), ("descriptors", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--raise-pid-max", action="store_true")
    parser.add_argument(
        "--ours-only", action="store_true", help="the other one takes minutes with a large crowd"
    )
    asked = parser.parse_args()
    with pid_max(asked.threads + SPARE_PIDS, may_raise=asked.raise_pid_max) as there:
        threads = min(asked.threads, there - SPARE_PIDS)
        names = ("ours",) if asked.ours_only else ("ours", "every-thread")
        found = in_a_namespace(asked.processes, threads, asked.descriptors, names)
    held = [found[name]["held"] for name in names]
    assert all(one == held[0] and len(one) == 7 for one in held), held
    counts = ", ".join(
        f"{found[name]:,} {name}" for name in ("processes", "threads", "descriptors")
    )
    title = f"{counts}; all {len(held[0])} holders found; load {found['load']:.1f}"
    table = Table("scan", "CPU s", "of it kernel", "took s", "peak MiB", "target", title=title)
    for name in names:
        cost, target = found[name], "1.5 s CPU, 64 MiB" if name == "ours" else ""
        table.add_row(
            name,
            f"{cost['cpu_s']:.2f}",
            f"{cost['kernel_s']:.2f}",
            f"{cost['took_s']:.2f}",
            f"{cost['mib']:.0f}",
            target,
        )
    Console().print(table)


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("needs root: it makes a pid namespace and a device node")
    main()

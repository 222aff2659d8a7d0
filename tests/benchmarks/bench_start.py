"""What it costs to begin: `reconcile --help` and `reconcile validate` beside `python -c pass`. CPU seconds, best of ten.

    python tests/benchmarks/bench_start.py

Prints a table; the ratio is to the floor, which no Python program can go below.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent.parent
RUNS = 10


def cpu_s(command: list[str]) -> float:
    """Give the CPU seconds of a command, user and system, the best of several runs; bytecode is kept, as pip keeps it."""
    best = float("inf")
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def main() -> None:
    """Measure and print."""
    python = sys.executable
    floor = cpu_s([python, "-c", "pass"])
    rows = [
        ("python -c pass", floor, ""),
        ("reconcile --help", cpu_s([python, "-m", "reconciler", "--help"]), "9"),
        (
            "reconcile validate (1 spec)",
            cpu_s([python, "-m", "reconciler", "validate", "examples/quickstart.yaml"]),
            "25",
        ),
        ("import pydantic, typer", cpu_s([python, "-c", "import pydantic.main, typer"]), ""),
    ]
    table = Table("what", "CPU ms", "ratio", "target", title="to begin")
    for name, seconds, target in rows:
        table.add_row(name, f"{seconds * 1000:.0f}", f"{seconds / floor:.1f}", target)
    Console().print(table)


if __name__ == "__main__":
    main()

"""What proving a GPU free adds to a stop, and what the guard adds to a start, on a lab host with a real systemd.

Run as root, with the package installed:  python tests/benchmarks/bench_release.py [--times N]

Floor of the first: the settle window itself (2 s by default), which the proof has to watch. Floor of the second: an
empty unit (`/bin/true`) that is started in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import bench_rollout

from reconciler.lab.hosts import LabPaths, SystemdHost, available
from reconciler.lab.reset import reset

SETTLE_S = 2.0
GUARD = "reconciler-guard@llm.service"


def rollout_steps(bench: bench_rollout.Bench, model: str) -> dict[str, float]:
    """Roll out once, and give how long each step took in seconds."""
    words = [
        "reconcile",
        "--specs",
        str(bench_rollout._specs(bench, model, ())),
        "--yes",
        "-o",
        "json",
    ]
    environment = {**os.environ, "HOME": str(bench.work / "home")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return {e["step"]: e["took_s"] for e in events if e["type"] == "step_finished"}


def guard_s(host: SystemdHost, unit: str) -> float:
    """Start a oneshot unit and give the time from its start job to its end in seconds, by systemd's own clock."""
    host.check(["systemctl", "start", unit])
    names = ("InactiveExitTimestampMonotonic", "InactiveEnterTimestampMonotonic")
    said = str(host.check(["systemctl", "show", unit, "-p", ",".join(names)]))
    found = dict(line.split("=", 1) for line in said.split())
    return (int(found[names[1]]) - int(found[names[0]])) / 1e6


def shown(name: str, values: list[float], floor: float) -> str:
    """Give one line of the table."""
    middle = statistics.median(values)
    return f"{name:<42} {middle:8.3f} s   worst {max(values):.3f}   floor {floor:.3f}   beyond {middle - floor:.3f}\n"


def main() -> None:
    """Boot a host, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5)
    chosen = parser.parse_args()
    missing = available()
    if missing:
        sys.exit(f"no lab on this machine: {'; '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/run") as directory:
        lab = LabPaths.at(Path(directory) / "lab")
        try:
            bench = bench_rollout.Bench(
                SystemdHost.boot("bench", lab=lab, gpus=2), Path(directory) / "work"
            )
            reset(bench.host)
            bench.work.mkdir()
            bench_rollout.by_spec(bench)
            steps = [rollout_steps(bench, f"model-{n}") for n in range(chosen.times)]
            sys.stdout.write(f"load {os.getloadavg()[0]:.1f}\n")
            sys.stdout.write(
                shown(
                    "release of a server that stopped by itself",
                    [s["release"] for s in steps],
                    SETTLE_S,
                )
            )
            bench.host.check(["systemctl", "stop", "llm.service"])
            bench.host.check(
                ["sh", "-c", "printf '[Service]\\nType=oneshot\\nExecStart=/bin/true\\n' >/run/systemd/system/empty.service; systemctl daemon-reload"]
            )  # fmt: skip
            floor = statistics.median(
                guard_s(bench.host, "empty.service") for _ in range(chosen.times)
            )
            sys.stdout.write(
                shown(
                    "guard before a start",
                    [guard_s(bench.host, GUARD) for _ in range(chosen.times)],
                    floor,
                )
            )
        finally:
            lab.stop_all()


if __name__ == "__main__":
    main()

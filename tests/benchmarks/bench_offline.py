"""How long a review of a large fleet takes, and how much memory: `python tests/benchmarks/bench_offline.py [SERVERS]`.

Three changes of a fleet of so many servers (10,000 by default), each by the command line as a build runs it: one server, a
hundred, and a profile that all of them extend. Beside them `validate`, which reads the same specs once, as the floor.
Eight servers a file, hosts in files of their own: a base file that holds a host or a profile is always read again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PER_HOST = 8
HOSTS_A_FILE = 200
PROFILE = """apiVersion: reconciler/v1
kind: Profile
name: common
engine: {name: vllm, version: 0.33.0}
runtime: {python: /opt/vllm/bin/python, user: vllm}
timeouts: {drain: 60s, stop: 120s, ready: 10m}
gate:
  max_error_rate: 0%
"""
HOST = """apiVersion: reconciler/v1
kind: Host
name: host-%d
ssh: {address: 192.0.2.10, user: deploy}
"""
SERVER = """---
apiVersion: reconciler/v1
kind: Server
name: s%(number)d
extends: common
host: host-%(host)d
gpus: [%(gpu)d]
model: Qwen/Qwen3-8B
model_revision: 3f1c9a5
listen: {port: %(port)d}
args: {max-model-len: %(length)d}
gate:
  runs:
    - {name: single, concurrency: 1, requests: 64, max_tokens: 128, min_decode_tps: 40, max_ttft_p95: 1s}
"""


def write(folder: Path, servers: int, *, changed: int = 0, drain: str = "60s") -> None:
    """Write a fleet in which the first `changed` servers have another argument."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "common.yaml").write_text(PROFILE.replace("60s", drain))
    count = (servers + PER_HOST - 1) // PER_HOST
    for first in range(0, count, HOSTS_A_FILE):
        names = range(first, min(count, first + HOSTS_A_FILE))
        (folder / f"hosts-{first}.yaml").write_text("---\n".join(HOST % host for host in names))
    for host in range(count):
        text = ""
        for number in range(host * PER_HOST, min(servers, (host + 1) * PER_HOST)):
            gpu = number % PER_HOST
            length = 16384 if number < changed else 32768
            text += SERVER % {
                "number": number, "host": host, "gpu": gpu, "port": 30000 + gpu, "length": length,
            }  # fmt: skip
        (folder / f"servers-{host}.yaml").write_text(text)


def run(work: Path, *words: str) -> tuple[float, float, float]:
    """Run a command line; give seconds, CPU seconds and MiB at most."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "reconciler", *words], cwd=work, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    assert os.waitstatus_to_exitcode(status) == 0, words
    return took, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def git(work: Path, *words: str) -> None:
    """Run git in the fleet's repository."""
    subprocess.run(
        ["git", "-C", str(work), "-c", "user.name=B", "-c", "user.email=b@example.org", *words],
        check=True,
        capture_output=True,
    )


def main() -> None:
    """Print the table."""
    servers = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    cases: dict[str, dict[str, Any]] = {
        "one server changed": {"changed": 1},
        "100 servers changed": {"changed": 100},
        "a profile of all changed": {"drain": "90s"},
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write(work / "specs", servers)
        git(work, "init", "-q")
        git(work, "add", "-A")
        git(work, "commit", "-qm", "base")
        table = Table(title=f"{servers} servers on {(servers + PER_HOST - 1) // PER_HOST} hosts")
        for column in ("what", "s", "CPU s", "MiB", "CPU of validate"):
            table.add_column(column)
        took, floor, memory = run(work, "validate")
        table.add_row("validate", f"{took:.1f}", f"{floor:.1f}", f"{memory:.0f}", "1.0 ×")
        for name, change in cases.items():
            write(work / "specs", servers, **change)
            took, cpu, memory = run(
                work, "--dry-run", "--offline", "--base", "HEAD", "-o", "markdown"
            )
            row = (f"{took:.1f}", f"{cpu:.1f}", f"{memory:.0f}", f"{cpu / floor:.1f} ×")
            table.add_row(name, *row)
    Console().print(table)


if __name__ == "__main__":
    main()

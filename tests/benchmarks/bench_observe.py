"""What it costs to look at one host: on a kept helper, cold, and a whole no-op pass. On a lab host, as root.

    python tests/benchmarks/bench_observe.py

Beside each the floor: `true` over the same connection, and the scan alone, run on the host itself.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from reconciler.effects.channel import HelperChannel
from reconciler.effects.enrol import EVERYTHING, Enrolled, enrol
from reconciler.effects.ports import Request
from reconciler.lab.hosts import LabPaths, SystemdHost
from reconciler.transports.host_keys import HostKeys
from reconciler.transports.ssh import SshTarget, SshTransport

RUNS = 15


def median_ms(work: Callable[[], object]) -> float:
    """Give the median time of some work in milliseconds."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def main() -> None:
    """Boot a host, enrol it, measure, print."""
    with tempfile.TemporaryDirectory() as directory:
        lab = LabPaths.at(Path(directory) / "lab")
        host = SystemdHost.boot("bench", gpus=4, lab=lab)
        try:
            lab.write_inventory()
            measure(host, lab, Path(directory))
        finally:
            host.stop()


def measure(host: SystemdHost, lab: LabPaths, directory: Path) -> None:
    """Measure on one host."""
    transport = SshTransport(
        SshTarget(host.ip, host.user, host.port), HostKeys((lab.known_hosts,)), lab.ssh_config
    )
    channel = HelperChannel("bench", transport)
    done = enrol(
        "bench", channel, None, login=host.user, protect=(), state_dir=directory, at=time.time()
    )
    assert isinstance(done, Enrolled), done
    kept = HelperChannel("bench", transport, installed=done.pin.digest)
    nothing = Request("observe", {**EVERYTHING, "gpus": False})
    everything = Request("observe", EVERYTHING)
    text = "[Service]\\nExecStart=/usr/bin/sleep infinity\\n"
    place = f"printf '{text}' >/etc/systemd/system/llm.service && systemctl daemon-reload && systemctl start llm"
    host.check(["sh", "-c", place])
    one = {"server": "none", "unit": "llm.service", "port": 22, "invocation_lines": 20}
    server = Request("observe", {**EVERYTHING, "servers": [one], "gpus": False})

    def cold() -> None:
        fresh = HelperChannel("bench", transport, installed=done.pin.digest)
        fresh.call(everything, deadline_s=60)
        fresh.close()

    kept.call(everything, deadline_s=60)
    rows = [
        (
            "true over the open connection",
            median_ms(lambda: transport.run("exec true", b"", deadline_s=10)),
            "",
        ),
        ("kept helper, identity only", median_ms(lambda: kept.call(nothing, deadline_s=60)), ""),
        (
            "kept helper, one server without cards",
            median_ms(lambda: kept.call(server, deadline_s=60)),
            "50 + scan",
        ),
        (
            "kept helper, cards and holders",
            median_ms(lambda: kept.call(everything, deadline_s=60)),
            "50 + scan",
        ),
        ("fresh helper, cards and holders", median_ms(cold), ""),
        (
            "nvidia-smi once, on the host",
            median_ms(lambda: host.check(["nvidia-smi", "--query-gpu=uuid", "--format=csv"])),
            "",
        ),
    ]
    table = Table(
        "what", "ms (median)", "target", title="to look at one host with four simulated GPUs"
    )
    for name, value, target in rows:
        table.add_row(name, f"{value:.0f}", target)
    Console().print(table)
    kept.close()
    transport.close()


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("needs root: it boots a lab host")
    main()

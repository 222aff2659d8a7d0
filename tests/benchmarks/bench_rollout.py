"""One rollout by hand, with Ansible and with reconcile: how long, and what each leaves behind.

Run as root, with the package installed:  python tests/benchmarks/bench_rollout.py [--way hand]… [--case plain]…
Ansible is taken from PATH where it is there (`pip install ansible-core`, in an environment of its own).

Every row begins with a lab host as it booted and an old server that answers. Then the case is
played, the way is asked to bring the new server, and the host is looked at. The loading time of the
stand-in server (0.5 s) and its time to end (none) are the floor that no way can go below.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from lab_engine import hold_command, hold_unit, start_unit

from reconciler.lab.faults import break_
from reconciler.lab.hosts import LabPaths, SystemdHost, available
from reconciler.lab.reset import reset

HERE = Path(__file__).parent
UNIT = "llm.service"
PORT = 30000
GPU = 1
LOAD_S = 0.5
STOP_S = 5
"""Of the old unit: a minute in the incident that this product began with, scaled down."""

PROBE_EVERY_S = 0.02

LOG = "BENCH_LOG"
"""The environment variable with a file for what failing commands printed."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a way gets to work with."""

    host: SystemdHost
    work: Path


@dataclass(frozen=True, slots=True)
class Way:
    """How a rollout is done: `prepare` brings the old server up, `roll` is timed, `noop` changes nothing."""

    name: str
    prepare: Callable[[Bench], None]
    roll: Callable[[Bench, Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Case:
    """What is wrong before the rollout, and the new server's own options."""

    name: str
    fault: str = ""
    options: tuple[str, ...] = ()


BYSTANDERS = {"dcgm-exporter": "dcgm-exporter", "foreign-holder": "lab-foreign"}
"""Faults that bring a unit which is none of ours: it must be alive afterwards."""

CASES = (
    Case("plain"),
    Case("ignores SIGTERM", "ignore-term"),
    Case("left-over child", "left-over"),
    Case("escaped child", "escaped"),
    Case("monitor on the GPU", "dcgm-exporter"),
    Case("another's job there", "foreign-holder"),
    Case("new one crashes", options=("--crash-on-start",)),
)


def command(model: str, *options: str) -> list[str]:
    """Return the command of the server that calls itself `model`."""
    return hold_command(
        "--model", model, "--load", str(LOAD_S), *options, gpus=[GPU], mib=16000, port=PORT
    )


def unit_text(model: str, *options: str) -> str:
    """Return the unit that people write by hand for it."""
    return hold_unit(
        command(model, *options), service=f"Restart=always\nRestartSec=1\nTimeoutStopSec={STOP_S}"
    )


# --- by hand, and with Ansible --------------------------------------------------------------------


def by_unit(bench: Bench) -> None:
    """Bring the old server up as a unit that somebody wrote."""
    start_unit(bench.host, UNIT, unit_text("old"), port=PORT)


def by_hand(bench: Bench, options: Sequence[str]) -> int:
    """Roll out with `hand_procedure.sh`."""
    file = bench.work / UNIT
    file.write_text(unit_text("new", *options))
    script = [
        "bash",
        str(HERE / "hand_procedure.sh"),
        str(bench.host.lab.ssh_config),
        bench.host.name,
    ]
    return _status([*script, UNIT, str(file), str(PORT), str(GPU)])


def with_ansible(bench: Bench, options: Sequence[str]) -> int:
    """Roll out with `rollout.playbook.yaml`."""
    file = bench.work / UNIT
    file.write_text(unit_text("new", *options))
    facts = json.dumps({"unit": UNIT, "unit_file": str(file), "server_port": PORT, "gpu": GPU})
    ssh = f"-F {bench.host.lab.ssh_config} -o ControlMaster=auto -o ControlPersist=60s"
    environment = {
        **os.environ,
        "ANSIBLE_SSH_ARGS": ssh,
        "ANSIBLE_PIPELINING": "1",
        "LC_ALL": "C.UTF-8",
    }
    environment |= {
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        "ANSIBLE_LOCAL_TEMP": str(bench.work),
    }
    play = [
        "ansible-playbook",
        "-i",
        f"{bench.host.name},",
        "-e",
        facts,
        str(HERE / "rollout.playbook.yaml"),
    ]
    return _status(play, environment)


# --- with reconcile -------------------------------------------------------------------------------


def _specs(bench: Bench, model: str, options: Sequence[str]) -> Path:
    specs = bench.work / "specs"
    specs.mkdir(exist_ok=True)
    (specs / "hosts.yaml").write_text(bench.host.lab.inventory.read_text())
    server = {
        "apiVersion": "reconciler/v1",
        "kind": "Server",
        "name": "llm",
        "host": bench.host.name,
        "unit": UNIT,
        "gpus": [GPU],
        "engine": {"name": "custom", "command": command(model, *options)},
        "served_model_name": model,
        "model": model,
        "listen": {"address": "0.0.0.0", "port": PORT},
        "timeouts": {"drain": "2s", "stop": f"{STOP_S}s", "ready": "60s"},
    }
    (specs / "llm.yaml").write_text(json.dumps(server, indent=1))  # JSON is YAML
    return specs


def _reconcile(bench: Bench, *words: str) -> int:
    home = bench.work / "home"
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    (home / ".ssh" / "config").write_text(f"Host *\n  IdentityFile {bench.host.key_path}\n")
    return _status(["reconcile", *words], {**os.environ, "HOME": str(home)})


def by_spec(bench: Bench) -> None:
    """Enrol the host and bring the old server up by a spec."""
    specs = _specs(bench, "old", ())
    key = subprocess.run(
        ["ssh-keygen", "-lf", str(bench.host.directory / "ssh_host_ed25519_key.pub")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[1]
    assert (
        _reconcile(bench, "enrol", bench.host.name, "--specs", str(specs), "--host-key", key) == 0
    )
    assert _reconcile(bench, "--specs", str(specs), "--yes") == 0


def with_reconcile(bench: Bench, options: Sequence[str]) -> int:
    """Roll out by changing the spec and applying it."""
    return _reconcile(bench, "--specs", str(_specs(bench, "new", options)), "--yes")


WAYS = (
    Way("hand", by_unit, by_hand),
    Way("ansible", by_unit, with_ansible),
    Way("reconcile", by_spec, with_reconcile),
)


# --- measuring ------------------------------------------------------------------------------------


def _status(argv: Sequence[str], environment: dict[str, str] | None = None) -> int:
    done = subprocess.run(
        list(argv), env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if (
        done.returncode != 0 and LOG in os.environ
    ):  # why a way failed is worth reading, and is not the table
        with Path(os.environ[LOG]).open("a") as log:
            log.write(f"$ {' '.join(argv)}\n{done.stdout}{done.stderr}\n")
    return done.returncode


@dataclass(slots=True)
class Probe:
    """Asks the server for its model, fifty times a second, and remembers when who answered."""

    address: str
    answers: list[tuple[float, str]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask until `stop`."""
        while not self._over.wait(PROBE_EVERY_S):
            model = self.model()
            if model:
                self.answers.append((time.monotonic(), model))

    def model(self) -> str:
        """Return the model that answers now; empty when nobody does."""
        connection = http.client.HTTPConnection(self.address, PORT, timeout=1)
        try:
            connection.request("GET", "/v1/models")
            return str(json.loads(connection.getresponse().read())["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return ""
        finally:
            connection.close()

    def stop(self) -> None:
        """End `run`."""
        self._over.set()

    def outage_s(self) -> float | None:
        """Return the longest time without an answer; None when it has not ended."""
        if not self.model():
            return None
        gaps = [after[0] - before[0] for before, after in pairwise(self.answers)]
        return max(gaps, default=0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one way in one case."""

    way: str
    case: str
    exit_status: int
    took_s: float
    outage_s: float | None
    serving: str
    left_mib: int
    bystander: str


def measure(bench: Bench, way: Way, case: Case) -> Row:
    """Play one case with one way on a fresh host."""
    reset(bench.host)
    shutil.rmtree(bench.work, ignore_errors=True)
    bench.work.mkdir()
    way.prepare(bench)
    if case.fault:
        break_(bench.host, case.fault, unit=UNIT)
    probe = Probe(bench.host.ip)
    prober = threading.Thread(target=probe.run)
    prober.start()
    began = time.monotonic()
    try:
        status = way.roll(bench, case.options)
        took = time.monotonic() - began
        time.sleep(1.5)  # a restart loop shows itself; the new server's first answers are seen
    finally:
        probe.stop()
        prober.join()
    return Row(
        way.name,
        case.name,
        status,
        took,
        probe.outage_s(),
        probe.model() or "nothing",
        _left(bench.host),
        _bystander(bench.host, case),
    )


def _left(host: SystemdHost) -> int:
    """Return the memory on the GPU that the unit's own processes do not have."""
    used = host.check(
        ["nvidia-smi", "-i", str(GPU), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    )
    group = f"/sys/fs/cgroup/system.slice/{UNIT}/cgroup.procs"
    pids = host.exec(["cat", group]).stdout.decode().split()
    apps = host.check(
        [
            "nvidia-smi",
            "-i",
            str(GPU),
            "--query-compute-apps=pid,used_memory",
            "--format=csv,noheader,nounits",
        ]
    )
    own = sum(int(line.split(",")[1]) for line in apps.splitlines() if line.split(",")[0] in pids)
    return int(used) - own - 1


def _bystander(host: SystemdHost, case: Case) -> str:
    if case.fault not in BYSTANDERS:
        return "-"
    state = host.exec(["systemctl", "is-active", BYSTANDERS[case.fault]]).stdout.decode().strip()
    return "alive" if state == "active" else "KILLED"


HEADINGS = ("way", "case", "exit", "took s", "outage s", "serving", "left MiB", "bystander")


def line(words: Sequence[object]) -> str:
    """Return one line of the table."""
    widths = (-10, -20, 4, 7, 8, -8, 8, -9)
    cells = [
        str(word).ljust(-width) if width < 0 else str(word).rjust(width)
        for word, width in zip(words, widths, strict=True)
    ]
    return "  ".join(cells).rstrip() + "\n"


def main() -> None:
    """Boot a host, measure every way in every case, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", action="append", choices=[way.name for way in WAYS])
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    chosen = parser.parse_args()
    missing = available()
    if missing:
        sys.exit(f"no lab on this machine: {'; '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/run") as directory:
        lab = LabPaths.at(Path(directory) / "lab")
        try:
            bench = Bench(SystemdHost.boot("bench", lab=lab, gpus=2), Path(directory) / "work")
            sys.stdout.write(line(HEADINGS))
            for case in CASES:
                for way in WAYS:
                    if (chosen.way and way.name not in chosen.way) or (
                        chosen.case and case.name not in chosen.case
                    ):
                        continue
                    if way.name == "ansible" and not shutil.which("ansible-playbook"):
                        continue
                    row = measure(bench, way, case)
                    outage = "lasts" if row.outage_s is None else f"{row.outage_s:.2f}"
                    cells = (row.way, row.case, row.exit_status, f"{row.took_s:.2f}", outage)
                    sys.stdout.write(line((*cells, row.serving, row.left_mib, row.bystander)))
                    sys.stdout.flush()
        finally:
            lab.stop_all()


if __name__ == "__main__":
    main()

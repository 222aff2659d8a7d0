"""A controller as a person has one: the installed command line, a home, its state, a git repository of specs.

`Controller` runs `reconcile` in a process of its own against lab hosts, and gives back what a person or a script gets to see:
exit code, standard output and error, the run stream. `HostView` looks at a lab host from the side, by the lab's own way in.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab_engine import hold_command

from reconciler.lab.hosts import SystemdHost

RUN_LIMIT_S = 300.0
"""No run of these tests takes a minute on an idle machine; one that hangs fails here with its output."""

WAIT_LIMIT_S = 120.0
"""How long a test waits for what must come: four times what it takes on a loaded machine."""

RECONCILE = Path(sys.executable).with_name("reconcile")
KILLER = Path(__file__).with_name("live_killer.py")

TIMEOUTS = {
    "drain": "2s",
    "stop": "3s",
    "release": "20s",
    "settle": "300ms",
    "ready": "30s",
    "gate": "60s",
}
GATE = {
    "quality": "off",
    "runs": [
        {"name": "single", "concurrency": 1, "requests": 8, "max_tokens": 8, "min_decode_tps": 60}
    ],
}
PORT = 30000
GPU_MIB = 16000
"""Of 24 GiB: two of these do not fit on one GPU, as in life."""


@dataclass(frozen=True, slots=True)
class Run:
    """How one run of the command line ended, and everything it said."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """Give the lines of the run stream; the whole output must be one."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def outcome(self) -> dict[str, Any]:
        """Give the outcome of the only server that has a spec."""
        (found,) = [e for e in self.events if e["type"] == "outcome" and e["reason"] != "Orphaned"]
        return found

    @property
    def ended(self) -> tuple[int, str, str]:
        """Give exit code, outcome and reason in the order in which a test states them."""
        outcome = self.outcome
        return self.code, outcome["outcome"], outcome["reason"]

    @property
    def steps(self) -> list[str]:
        """Give the steps that were begun, in order."""
        return [e["step"] for e in self.events if e["type"] == "step_started"]

    def json(self) -> Any:
        """Give the one document that was printed."""
        return json.loads(self.out)


@dataclass
class Begun:
    """A run that goes on while the test does something else. Its stream is read as it comes."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    grown: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, step: str, *, after: int = 0) -> None:
        """Return when `step` has begun, in what was said after so many lines."""
        self._wait(
            lambda: any(
                '"type":"step_started"' in line and f'"step":"{step}"' in line
                for line in self.lines[after:]
            ),
            step,
        )

    def wait_for_error(self, text: str) -> None:
        """Return when standard error says `text`."""
        self._wait(lambda: any(text in line for line in self.errors), text)

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WAIT_LIMIT_S
        with self.grown:
            while not is_so():
                assert self.process.poll() is None, self.text()
                assert self.grown.wait(until - time.monotonic()), (
                    f"not so in time: {what}: {self.text()}"
                )

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self, limit_s: float = RUN_LIMIT_S) -> Run:
        """Wait for its end."""
        code = self.process.wait(limit_s)
        for reader in self.readers:
            reader.join(10)
        return Run(code, "".join(self.lines), "".join(self.errors))

    def text(self) -> str:
        """Give what it has said so far."""
        return "".join(self.lines[-40:]) + "".join(self.errors[-40:])

    def read(self, stream: Any, into: list[str]) -> None:
        """Take lines as they come, and say so."""
        with stream:
            for line in stream:
                with self.grown:
                    into.append(line)
                    self.grown.notify_all()
        with self.grown:
            self.grown.notify_all()


@dataclass
class Controller:
    """One installation of the tool: what is in its home decides whom it knows and trusts."""

    host: SystemdHost
    directory: Path
    user: str = "root"
    name: str = "llm"
    document: dict[str, Any] = field(default_factory=dict)
    runs: list[Begun] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Make the home and an empty repository of specs with the host in it."""
        (self.home / ".ssh").mkdir(parents=True)
        self.ssh_config(f"Host *\n  IdentityFile {self.host.key_path}\n  IdentitiesOnly yes\n")
        self.specs.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "A test")
        self.git("config", "user.email", "test@localhost")
        self.write("host", {
            "apiVersion": "reconciler/v1", "kind": "Host", "name": self.host.name,
            "ssh": {"address": self.host.ip, "user": self.user},
        })  # fmt: skip

    @property
    def home(self) -> Path:
        """Its home: nothing of the machine's own user is seen."""
        return self.directory / "home"

    @property
    def specs(self) -> Path:
        """The repository of specs."""
        return self.directory / "specs"

    @property
    def environment(self) -> dict[str, str]:
        """Give the environment of its runs: its own places, and where this interpreter finds its packages."""
        kept = {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
        return {
            **kept,
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "LC_ALL": "C.UTF-8",
            "RECONCILER_HOLDER": f"test@{self.directory.name}",
        }

    def ssh_config(self, text: str) -> None:
        """Write `~/.ssh/config`."""
        (self.home / ".ssh" / "config").write_text(text)

    # -- the repository --------------------------------------------------------------------------------

    def git(self, *words: str) -> None:
        """Run git in the repository."""
        subprocess.run(
            ["git", *words], cwd=self.specs, check=True, env=self.environment, capture_output=True
        )

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write one file of specs and commit it. JSON is YAML."""
        (self.specs / f"{name}.yaml").write_text(json.dumps(document, indent=1) + "\n")
        self.git("add", "-A")
        self.git("commit", "--quiet", "--allow-empty", "-m", f"Change {name}")

    def commit(
        self,
        model: str,
        *options: str,
        gpus: Sequence[int] = (0,),
        port: int = PORT,
        gate: bool = True,
        **fields: Any,
    ) -> None:
        """Commit a server that calls itself `model`; `options` are the stand-in's, `fields` are set in the spec, None removes one."""
        command = hold_command(
            "--model", model, "--load", "0.1", *options, gpus=gpus, mib=GPU_MIB, port=port
        )
        document: dict[str, Any] = {
            "apiVersion": "reconciler/v1", "kind": "Server", "name": self.name, "host": self.host.name,
            "gpus": list(gpus), "engine": {"name": "custom", "command": command}, "model": model, "served_model_name": model,
            "listen": {"address": "0.0.0.0", "port": port}, "timeouts": TIMEOUTS,
        }  # fmt: skip
        if gate:
            document["gate"] = GATE
        document |= fields
        self.document = {k: v for k, v in document.items() if v is not None}
        self.write(self.name, self.document)

    def set(self, **fields: Any) -> None:
        """Commit the last server again with some fields set."""
        self.document |= fields
        self.write(self.name, self.document)

    # -- running ---------------------------------------------------------------------------------------------

    def begin(self, *words: str, program: Sequence[str] = ()) -> Begun:
        """Start the command line and come back at once."""
        process = subprocess.Popen(
            [*(program or [str(RECONCILE)]), *words], cwd=self.directory, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        begun = Begun(process)
        for stream, into in ((process.stdout, begun.lines), (process.stderr, begun.errors)):
            reader = threading.Thread(target=begun.read, args=(stream, into), daemon=True)
            reader.start()
            begun.readers.append(reader)
        self.runs.append(begun)
        return begun

    def close(self) -> None:
        """End what a test that failed has left running."""
        for begun in self.runs:
            if begun.process.poll() is None:
                begun.process.kill()
            begun.end()

    def run(self, *words: str) -> Run:
        """Run the command line to its end."""
        return self.begin(*words).end()

    def enrol(self, *words: str) -> Run:
        """Enrol the host, its key given by fingerprint as a person reads it off the host's console."""
        return self.run("enrol", self.host.name, "--host-key", fingerprint(self.host), *words)

    def apply(self, *words: str) -> Run:
        """Carry the specs out without asking; the run stream comes on standard output."""
        return self.run("--yes", "--output", "json", *words)

    def begin_apply(self, *words: str) -> Begun:
        """Begin what `apply` does."""
        return self.begin("--yes", "--output", "json", *words)

    def killed(self, *options: str) -> Run:
        """Run what `apply` does in a process that dies by SIGKILL; `options` are those of `live_killer.py`."""
        program = [sys.executable, str(KILLER), *options, "--"]
        return self.begin("--yes", "--output", "json", program=program).end()


def fingerprint(host: SystemdHost) -> str:
    """Give the fingerprint of a host's key as `ssh-keygen -l` prints it."""
    said = subprocess.run(
        ["ssh-keygen", "-lf", str(host.directory / "ssh_host_ed25519_key.pub")], capture_output=True, text=True, check=True
    )  # fmt: skip
    return said.stdout.split()[1]


def eventually(is_so: Callable[[], bool], what: str, limit_s: float = WAIT_LIMIT_S) -> None:
    """Look again until `is_so()`; fail with `what` when it is not in time."""
    until = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until, f"not within {limit_s:g} s: {what}"
        threading.Event().wait(0.1)


@contextmanager
def requests_in_flight(
    view: HostView, count: int, model: str, port: int = PORT
) -> Iterator[list[socket.socket]]:
    """Have `count` requests served that take as long as the server lives; what is left of them is hung up in the end."""
    body = json.dumps({"model": model, "prompt": "say", "max_tokens": 1_000_000, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: lab\r\nContent-Length: {len(body)}\r\n\r\n"
    with ExitStack() as open_ones:
        callers = [
            open_ones.enter_context(socket.create_connection((view.host.ip, port), timeout=30))
            for _ in range(count)
        ]
        for caller in callers:
            caller.sendall((head + body).encode())
        eventually(lambda: view.in_flight(port) == count, f"{count} requests are served")
        yield callers


@dataclass(frozen=True, slots=True)
class HostView:
    """What a person on the host would see, without the tool."""

    host: SystemdHost
    unit: str = "llm.service"

    def show(self, *names: str, unit: str = "") -> dict[str, str]:
        """Give properties of a unit."""
        said = self.host.check(
            ["systemctl", "show", unit or self.unit, f"--property={','.join(names)}"]
        )
        return dict(line.split("=", 1) for line in said.splitlines())

    def state(self, unit: str = "") -> str:
        """Give `ActiveState`."""
        return self.show("ActiveState", unit=unit)["ActiveState"]

    def pid(self, unit: str = "") -> int:
        """Give the main process; 0 when there is none."""
        return int(self.show("MainPID", unit=unit)["MainPID"])

    def process(self, pid: int) -> tuple[int, str] | None:
        """Give a process by what stays the same for its whole life: pid and start time. None: it is gone, or a zombie."""
        stat = self.host.exec(["cat", f"/proc/{pid}/stat"]).stdout.decode()
        if not stat:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else (pid, fields[19])

    def server(self, unit: str = "") -> tuple[int, str] | None:
        """Give the server's main process."""
        return self.process(self.pid(unit))

    def wait_until_active(self) -> None:
        """Wait until the unit runs and its port answers, with whatever process."""
        eventually(lambda: self.state() == "active" and self.model() != "", f"{self.unit} is up")

    def model(self, port: int = PORT) -> str:
        """Ask the port, from outside, which model it serves; empty when nobody answers."""
        connection = http.client.HTTPConnection(self.host.ip, port, timeout=10)
        try:
            connection.request("GET", "/v1/models")
            return str(json.loads(connection.getresponse().read())["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError):
            return ""
        finally:
            connection.close()

    def in_flight(self, port: int = PORT) -> int:
        """Ask the server how many requests it serves."""
        connection = http.client.HTTPConnection(self.host.ip, port, timeout=10)
        with closing(connection):
            connection.request("GET", "/get_load")
            return int(json.loads(connection.getresponse().read())[0]["num_running_reqs"])

    def children(self, pid: int) -> list[tuple[int, str]]:
        """Give the children of a process."""
        said = self.host.exec(["cat", f"/proc/{pid}/task/{pid}/children"]).stdout.decode().split()
        return [found for child in said if (found := self.process(int(child))) is not None]

    def used_mib(self, gpu: int = 0) -> int:
        """Give what nvidia-smi says of one GPU."""
        query = [
            "nvidia-smi",
            "-i",
            str(gpu),
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        return int(self.host.check(query))

    def holders(self) -> dict[int, int]:
        """Give who has GPU memory: MiB by pid."""
        query = [
            "nvidia-smi",
            "--query-compute-apps=pid,used_memory",
            "--format=csv,noheader,nounits",
        ]
        rows = [line.split(", ") for line in self.host.check(query).splitlines() if line.strip()]
        return {int(pid): int(mib) for pid, mib in rows}

    def text(self, path: str) -> str:
        """Read a file; empty when there is none."""
        return self.host.exec(["cat", path]).stdout.decode()

    def mutations(self, server: str = "llm") -> list[dict[str, Any]]:
        """Give the record of every mutation that the host keeps."""
        return [
            json.loads(line)
            for line in self.text(f"/var/lib/reconciler/{server}/journal.ndjson").splitlines()
        ]

    def record(self, name: str, server: str = "llm") -> dict[str, Any]:
        """Read one record of the host's; empty when there is none."""
        text = self.text(f"/var/lib/reconciler/{server}/{name}.json")
        return dict(json.loads(text)) if text else {}

    def starts(self) -> int:
        """Count how often systemd has started the unit in this boot, in earlier tests as well."""
        said = self.host.exec(
            ["journalctl", "--unit", self.unit, "--output=cat", "--grep=^Started ", "--no-pager"]
        )
        return len(said.stdout.decode().splitlines())

    def left(self, server: str = "llm") -> list[str]:
        """Name what a finished rollout must not leave: rollout records, trial unit, disarming, temporary files."""
        script = (
            f"ls -d /var/lib/reconciler/{server}/intent.json /var/lib/reconciler/{server}/deadline.json"
            f" /var/lib/reconciler/{server}/revert.json"
            f" /run/reconciler/{self.unit}.disarmed /run/systemd/system.control/{self.unit}"
            f" /run/systemd/system/{self.unit}.d/zz-reconciler-disarm.conf 2>/dev/null;"
            " find /etc/systemd /var/lib/reconciler /run/reconciler /run/systemd/system.control -name '*.tmp*' -o -name '.*.new' 2>/dev/null"
        )
        return self.host.exec(["bash", "-c", script]).stdout.decode().split()

    def serves(self, model: str, *, gpu: int = 0) -> None:
        """Assert that the unit is up, that its own process answers for `model`, and that nobody else holds the GPU."""
        state = self.show(
            "ActiveState", "SubState", "MainPID", "NRestarts", "FragmentPath", "DropInPaths"
        )
        assert (state["ActiveState"], state["SubState"]) == ("active", "running"), state
        assert self.model() == model
        assert state["FragmentPath"] == f"/etc/systemd/system/{self.unit}"
        assert "zz-reconciler-disarm" not in state["DropInPaths"]
        assert self.left() == []
        assert {pid for pid, mib in self.holders().items() if mib == GPU_MIB} == {
            int(state["MainPID"])
        }
        assert GPU_MIB <= self.used_mib(gpu) < GPU_MIB + 300

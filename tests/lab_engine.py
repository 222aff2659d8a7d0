"""The stand-in inference server on a lab host, or beside the test without root, and how to ask it.

`fakegpu-hold` is a script of the lab (`reconciler/lab/scripts`): it holds simulated GPUs and speaks
OpenAI's API honestly, fast or slow, well or badly. These are the units, commands and requests that
tests need again and again.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from reconciler.lab.faults import HOLD
from reconciler.lab.hosts import SCRIPTS, ProxmoxHost, SystemdHost

START_DEADLINE_S = 30
"""A stand-in without --load is up in 0.3 s; a loaded CI machine may take ten times that."""


def hold_command(
    *options: str, gpus: Sequence[int] = (0,), mib: int = 8000, port: int = 30000
) -> list[str]:
    """Return the argv of a stand-in server on a lab host, as an `ExecStart=` or a custom engine's command."""
    held = ",".join(str(gpu) for gpu in gpus)
    return [HOLD, "--gpu", held, "--mib", str(mib), "--serve", str(port), *options]


def hold_unit(command: Sequence[str], *, service: str = "") -> str:
    """Return a unit like the ones people write by hand; `service` is more lines of `[Service]`."""
    return (
        "[Unit]\nDescription=stand-in inference server\n"
        f"[Service]\nExecStart={' '.join(command)}\n{service}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def start_unit(
    host: SystemdHost | ProxmoxHost, name: str, text: str, *, port: int | None = 30000
) -> None:
    """Install and start a unit behind the product's back, and wait until its port answers."""
    path = f"/etc/systemd/system/{name}"
    host.check(
        ["bash", "-c", f"cat >{path} && systemctl daemon-reload && systemctl restart {name}"],
        text.encode(),
    )
    if port is not None:
        wait_for(lambda: _listens(host, name, port))


def _listens(host: SystemdHost | ProxmoxHost, unit: str, port: int) -> bool:
    if host.exec(["systemctl", "is-failed", "--quiet", unit]).exit_status == 0:
        raise AssertionError(host.check(["journalctl", "-u", unit, "-n", "20", "--no-pager"]))
    return host.exec(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"]).exit_status == 0


def wait_for(is_so: Callable[[], bool], deadline_s: float = START_DEADLINE_S) -> None:
    """Poll until `is_so()` is true; `AssertionError` when it is not in time."""
    until = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < until, f"not so within {deadline_s:g} s"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A stand-in server on loopback, started without root, with GPUs that are sparse files."""

    port: int
    process: subprocess.Popen[bytes]
    directory: Path

    def used_mib(self) -> int:
        """Return what the lab's nvidia-smi says that GPU 0 has in use."""
        command = [
            sys.executable,
            str(SCRIPTS / "nvidia-smi"),
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        said = subprocess.run(
            command, env=_environment(self.directory), capture_output=True, text=True, check=True
        )
        return int(said.stdout.splitlines()[0])

    def tell(self, **order: object) -> None:
        """Change how it behaves from now on, as `reconcile lab break` does."""
        self.another("--tell", json.dumps({"pid": self.process.pid, **order})).check_returncode()

    def another(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run one more of it on the same GPU, to its end."""
        command = [sys.executable, str(SCRIPTS / "fakegpu-hold"), *options]
        environment = _environment(self.directory)
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
            check=False,
        )

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Ask for `path`; return status and body."""
        return self._ask("GET", path, None, headers or {})

    def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Post `body` as JSON; return status and body, a stream's whole text."""
        return self._ask("POST", path, json.dumps(body), headers or {})

    def _ask(
        self, method: str, path: str, body: str | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_DEADLINE_S)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def events(stream: bytes) -> list[dict[str, object]]:
    """Return the JSON of every event of an SSE stream, without its `[DONE]`."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def rehearsal(
    directory: Path, *options: str, mib: int = 8000, wait: bool = True
) -> Iterator[Rehearsal]:
    """Run a stand-in server on a free loopback port, with one simulated GPU of 24 GiB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    binaries = directory / "bin"
    binaries.mkdir()
    shutil.copy(SCRIPTS / "nvidia-smi", binaries / "nvidia-smi")
    (binaries / "nvidia-smi").chmod(0o755)
    with (directory / "nvidia0").open("wb") as board:
        board.truncate(24 << 30)
    subprocess.run(
        ["bash", str(SCRIPTS / "fakegpu-conf"), str(directory / "run"), "rehearsal", "1", "24576"],
        check=True,
    )
    command = [
        sys.executable,
        str(SCRIPTS / "fakegpu-hold"),
        "--mib",
        str(mib),
        "--serve",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    with subprocess.Popen([*command, *options], env=_environment(directory)) as process:
        running = Rehearsal(port, process, directory)
        try:
            if wait:
                wait_for(lambda: _answers(running))
            yield running
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def _answers(running: Rehearsal) -> bool:
    assert running.process.poll() is None, (
        f"the stand-in server ended with {running.process.returncode}"
    )
    try:
        return running.get("/health")[0] == 200
    except OSError:
        return False


def _environment(directory: Path) -> dict[str, str]:
    path = f"{directory / 'bin'}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "FAKEGPU_DEV": str(directory),
        "FAKEGPU_DIR": str(directory / "run"),
    }

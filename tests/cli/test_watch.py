"""The daemon as a process: it follows a branch, holds a force-push until somebody accepts it, reloads, and ends when told."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from git_repository import Repository

from reconciler.cli.watch import _show_source
from reconciler.effects.service_manager import ServiceManager

SECRET = "0123456789abcdef-hook"
HOST = "apiVersion: reconciler/v1\nkind: Host\nname: {name}\n"


def environment(home: Path) -> dict[str, str]:
    """Give the environment of an operator whose settings are below `home`."""
    return {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "RECONCILER_WEBHOOK_SECRET_FILE": str(home / "secret")}  # fmt: skip


@dataclass
class Watching:
    """A daemon that runs, and what it says."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    grown: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        """Note each line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.grown:
                self.lines.append(line)
                self.grown.notify_all()

    def says(self, text: str) -> str:
        """Give the first line that holds `text`, when it comes."""
        with self.grown:
            assert self.grown.wait_for(lambda: any(text in line for line in self.lines), 60), (
                self.lines
            )
            return next(line for line in self.lines if text in line)

    def hook(self, port: int, body: bytes) -> int:
        """Say that something was pushed, as a forge does."""
        signed = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        talk = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        talk.request("POST", "/hook", body, {"X-Hub-Signature-256": f"sha256={signed}"})
        status = talk.getresponse().status
        talk.close()
        return status


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.new(tmp_path / "remote.git")


@pytest.fixture
def watching(repository: Repository, tmp_path: Path) -> Iterator[Watching]:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    repository.commit({"specs/a.yaml": HOST.format(name="one").encode()})
    words = ["--watch", "--git", str(repository.path), "--interval", "1h", "--listen", "127.0.0.1:0"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "reconciler", *words], env=environment(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    found = Watching(process)
    reader = threading.Thread(target=found.read)
    reader.start()
    yield found
    if process.poll() is None:
        process.kill()
    process.wait(30)
    reader.join(30)
    assert process.stderr is not None
    process.stderr.close()


def test_a_daemon_follows_its_branch(
    watching: Watching, repository: Repository, tmp_path: Path
) -> None:
    """Push and hook: the commit is in force; a force-push is held until exactly it is accepted; SIGTERM ends with 0."""
    port = int(re.search(r":(\d+) ", watching.says("listening on"))[1])  # type: ignore[index]
    first = repository.git("rev-parse", "main")
    watching.says(first[:12])
    second = repository.commit({"specs/a.yaml": HOST.format(name="two").encode()})
    assert watching.hook(port, b"two") == 202
    watching.says(second[:12])
    repository.point(first)
    assert watching.hook(port, b"back") == 202
    watching.says(f"commit {first[:12]} is held: the branch was rewound")
    talk = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    talk.request("GET", "/healthz")
    health = json.loads(talk.getresponse().read())
    talk.close()
    assert (health["ok"], health["commit"]) == (True, second)
    accept = [sys.executable, "-m", "reconciler", "accept", first, "--git", str(repository.path)]
    done = subprocess.run(accept, env=environment(tmp_path), capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    watching.lines.clear()
    watching.process.send_signal(signal.SIGHUP)
    watching.says(f"commit {first[:12]} by")
    watching.process.send_signal(signal.SIGTERM)
    assert watching.process.wait(30) == 0


def test_a_permission_that_nobody_looks_at_is_refused(tmp_path: Path) -> None:
    """`--watch --overwrite` would replace people's edits for ever."""
    done = subprocess.run(
        [sys.executable, "-m", "reconciler", "--watch", "--overwrite"], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 64
    assert "--overwrite does not go with --watch" in done.stderr


@pytest.mark.parametrize(("count", "said"), [(0, "0 servers"), (1, "1 server\n"), (2, "2 servers")])
def test_one_server_is_told_as_one(
    count: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a daemon says of a commit is a sentence for each number of servers."""
    fleet = SimpleNamespace(servers=(None,) * count, problems=())
    _show_source(SimpleNamespace(snapshot=None, trouble="", fleet=fleet), ServiceManager.of({}))
    assert f"the specs: {said}" in capsys.readouterr().err

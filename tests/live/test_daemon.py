"""A commit is the only command: a real bare repository over ssh, the daemon as a process, a forge that keeps statuses, a lab host.

The daemon looks by itself once a day here, so that whatever happens soon was asked for by a webhook.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forge_server import TOKEN, FakeForge, forge_server
from lab_engine import hold_command
from live_controller import (
    GATE,
    GPU_MIB,
    PORT,
    Begun,
    Controller,
    HostView,
    eventually,
    requests_in_flight,
)
from transports.loopback import Keys, Servers, Sshd
from witness import SIGNALS, Witness

from reconciler.cli.context import load_snapshot
from reconciler.core.perf_drift import PerfHeld
from reconciler.lab.hosts import SystemdHost
from reconciler.probing import probed
from reconciler.reconcile import survey
from reconciler.settings import load_settings
from reconciler.wiring import RealClock, world

pytestmark = pytest.mark.lab

SERVER = "row-llm"
"""The witness judges units that are called so."""

SLOW = ("--speed", "20")
"""A third of what the gate asks for."""

BURST = 50 if os.environ.get("RECONCILER_NIGHTLY") else 10
"""Pushes in a row. Each is a signed commit of its own, which costs more than what is tested."""

SECRET = "0123456789abcdef-of-the-test"


@dataclass
class Operator:
    """Somebody who has a repository, a forge and a daemon, and who never types a command about a server."""

    controller: Controller
    view: HostView
    forge: FakeForge
    url: str
    bare: Path
    daemon: Begun | None = None
    hooks: Iterator[int] = field(default_factory=itertools.count)

    def start(self) -> None:
        """Start the daemon, as the unit of `install-daemon` would."""
        words = ["--watch", "--git", self.url, "--path", ".", "--interval", "1d"]
        self.daemon = self.controller.begin(*words, "--listen", "127.0.0.1:0", "-o", "json")
        self.daemon.wait_for_error("listening on")

    def get(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """Ask the daemon's listener."""
        assert self.daemon is not None
        port = int(re.findall(r"listening on 127\.0\.0\.1:(\d+)", "".join(self.daemon.errors))[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def hook(self) -> None:
        """Do what the forge does after a push. What the hook says of commits is believed by nobody."""
        body = json.dumps({"ref": "refs/heads/main", "number": next(self.hooks)}).encode()
        signed = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        status, _ = self.get("POST", "/hook", body, **{"X-Gitea-Signature": signed})
        assert status == 202

    def health(self) -> Any:
        """Ask how the daemon is."""
        return json.loads(self.get("GET", "/healthz")[1])

    def push(self, *words: str, hook: bool = True) -> str:
        """Push what is committed, and give the commit."""
        self.controller.git("push", "--quiet", *words, str(self.bare), "HEAD:main")
        if hook:
            self.hook()
        return self.head()

    def head(self, name: str = "HEAD") -> str:
        """Name a commit of the working copy."""
        words = ["git", "rev-parse", name]
        done = subprocess.run(
            words, cwd=self.controller.specs, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def said(self, commit: str, context: str) -> list[tuple[str, str]]:
        """Give the states that the forge was told of a commit, in order, each with its words."""
        pairs = zip(list(self.forge.commits), list(self.forge.statuses), strict=False)
        return [
            (str(s["state"]), str(s["description"]))
            for at, s in pairs
            if at == commit and s["context"] == context
        ]

    def contexts(self, commit: str) -> set[str]:
        """Name the statuses beside a commit."""
        pairs = zip(list(self.forge.commits), list(self.forge.statuses), strict=False)
        return {str(s["context"]) for at, s in pairs if at == commit}

    def until(self, commit: str, state: str, words: str = "") -> list[str]:
        """Wait until the server's status and the aggregate beside a commit are `state`; give all states of the server's."""

        def so() -> bool:
            last = [self.said(commit, c)[-1:] for c in (SERVER_STATUS, AGGREGATE)]
            return all(s and s[0][0] == state for s in last) and words in last[0][0][1]

        try:
            eventually(so, f"{commit[:12]} is {state} {words}")
        except AssertionError as error:
            assert self.daemon is not None
            about = {c: self.said(commit, c) for c in self.contexts(commit)}
            raise AssertionError(f"{error}; {about}\n{self.daemon.text()}") from error
        return [s for s, _ in self.said(commit, SERVER_STATUS)]

    def note(self, commit: str) -> str:
        """Read the note that the daemon keeps of a commit in its mirror."""
        (head,) = (self.controller.home / "state").rglob("HEAD")
        words = ["git", f"--git-dir={head.parent}", "notes", "--ref=reconcile", "show", commit]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def is_held(self, words: str) -> None:
        """Wait until the daemon says that a commit is held."""
        eventually(lambda: words in str(self.health()["stale"]), f"held: {words}")


SERVER_STATUS = f"reconcile/{SERVER}"
AGGREGATE = "reconcile"


def secret_file(path: Path, content: str) -> str:
    """Write a file that its owner alone reads."""
    path.write_text(content + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[Sshd, Keys]]:
    """Serve git over ssh on loopback."""
    keys = Keys(tmp_path)
    servers = Servers(tmp_path, keys)
    try:
        yield servers.start(), keys
    finally:
        servers.stop()


@pytest.fixture
def operator(
    controller: Controller, lab_host: SystemdHost, sshd: tuple[Sshd, Keys], tmp_path: Path
) -> Iterator[Operator]:
    """Give an operator whose commits are all signed, with an enrolled host and a daemon that waits for the first commit."""
    server, keys = sshd
    controller.name = SERVER
    signing = keys.make("release")
    for words in (("gpg.format", "ssh"), ("user.signingkey", str(signing)), ("commit.gpgsign", "true")):  # fmt: skip
        controller.git("config", *words)
    bare = tmp_path / "models.git"
    controller.git("init", "--quiet", "--bare", "--initial-branch=main", str(bare))
    known = tmp_path / "known_hosts"
    host_key = server.host_key.with_suffix(".pub").read_text()
    known.write_text(f"[127.0.0.1]:{server.port} {host_key}")
    with forge_server("gitea") as forge:
        settings = {
            "git_key": str(keys.make("user")), "git_known_hosts": str(known), "signing_keys": [f"{signing}.pub"],
            "webhook_secret_file": secret_file(tmp_path / "hook", SECRET), "starts_per_hour": 100,
            "report_forge": "gitea", "report_api": forge.url, "report_repository": "ops/models",
            "report_token_file": secret_file(tmp_path / "token", TOKEN),
            "state_file": str(tmp_path / "state.json"), "report_notes": True,
        }  # fmt: skip
        place = controller.home / "config" / "reconciler"
        place.mkdir(parents=True)
        (place / "settings.yaml").write_text(json.dumps(settings))
        url = f"ssh://root@127.0.0.1:{server.port}{bare}"
        view = HostView(lab_host, f"{SERVER}.service")
        yield Operator(controller, view, forge, url, bare)


@pytest.fixture(autouse=True)
def witness(operator: Operator, lab_host: SystemdHost) -> Iterator[Witness]:
    """Have somebody vouch from outside that no bystander was touched, and that no two runs had a card."""
    assert operator.controller.host is lab_host
    lab_host.check(["rm", "-f", SIGNALS])
    watching = Witness.begin(lab_host)
    yield watching
    watching.vouch()


def serves(operator: Operator, model: str) -> None:
    """Assert that the server is up with `model`, and that nothing of a rollout is left."""
    assert operator.view.state() == "active"
    assert operator.view.model() == model
    assert operator.view.left(SERVER) == []


def test_a_push_becomes_a_server_a_bad_one_goes_back_and_a_revert_is_in_sync(
    operator: Operator,
) -> None:
    """L1, L2: the forge is told pending, then success; of a commit that fails its gate, failure with the numbers; of the revert, success.

    Killed by SIGKILL while a server loads, the next daemon goes on with what was begun (L3, S11).
    """
    controller, view = operator.controller, operator.view
    controller.commit("one")
    first = operator.push(hook=False)
    operator.start()
    assert operator.until(first, "success")[0] == "pending"
    serves(operator, "one")
    controller.commit("slow", *SLOW)
    bad = operator.push()
    states = operator.until(bad, "failure")
    assert states[0] == "pending"
    reason = operator.said(bad, SERVER_STATUS)[-1][1]
    assert "GateFailed" in reason or "RejectedBefore" in reason, reason
    assert re.search(r"min_decode_tps is 60, measured (19|20)", reason), reason
    serves(operator, "one")
    before = view.server(), view.starts()
    controller.git("revert", "--no-edit", "HEAD")
    operator.until(operator.push(), "success")
    assert (view.server(), view.starts()) == before
    controller.commit("two", "--load", "4")
    assert operator.daemon is not None
    said = len(operator.daemon.lines)
    second = operator.push()
    operator.daemon.wait_for("ready", after=said)
    operator.daemon.process.send_signal(signal.SIGKILL)
    operator.daemon.end()
    starts = view.starts()
    operator.start()
    operator.until(second, "success")
    serves(operator, "two")
    assert view.starts() == starts
    state = json.loads((controller.directory.parent / "state.json").read_text())
    assert state["commit"] == second
    assert "GateFailed" in operator.note(bad)
    assert f"{SERVER_STATUS}: success" in operator.note(second)


def test_what_was_not_meant_is_held_and_of_a_burst_only_the_last_is_rolled_out(
    operator: Operator,
) -> None:
    """S14: an unsigned commit in the middle, and a push by force, change nothing until a person accepts; a burst of pushes is few rollouts."""
    controller, view = operator.controller, operator.view
    controller.commit("one")
    base = operator.push(hook=False)
    operator.start()
    operator.until(base, "success")
    controller.git("config", "commit.gpgsign", "false")
    controller.commit("unsigned")
    controller.git("config", "commit.gpgsign", "true")
    controller.commit("signed-on-top")
    operator.push()
    operator.is_held("it has no signature")
    before = view.server(), view.mutations(SERVER)
    controller.git("reset", "--quiet", "--hard", "HEAD~2")
    controller.git("commit", "--quiet", "--amend", "-m", "Told differently")
    controller.commit("forced")
    forced = operator.push("--force")
    operator.is_held("pushed by force")
    assert (view.server(), view.mutations(SERVER)) == before
    assert operator.health()["commit"] == base
    accepted = controller.run("accept", forced, "--git", operator.url, "--path", ".")
    assert accepted.code == 0, accepted.err
    operator.hook()
    operator.until(forced, "success")
    serves(operator, "forced")
    starts, last = view.starts(), ""
    for number in range(BURST):
        controller.commit(f"burst-{number}")
        last = operator.push()
    operator.until(last, "success")
    serves(operator, f"burst-{BURST - 1}")
    # The first of the burst may have begun; what came while it waited took its place.
    assert 1 <= view.starts() - starts <= 6


@pytest.mark.nightly
def test_a_light_probe_measures_a_real_server_only_while_nobody_uses_it(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured against the record of its own gate: as fast as then, and in use it is left alone."""
    controller, view = operator.controller, operator.view
    for name, value in controller.environment.items():
        monkeypatch.setenv(name, value)
    command = hold_command("--model", "one", "--load", "0.1", gpus=(0,), mib=GPU_MIB, port=PORT)
    engine = {"name": "custom", "command": command, "in_flight": "/metrics"}
    controller.commit("one", engine=engine)
    controller.set(gate={**GATE, "baseline": {"max_loss": "50%"}})  # The machine is shared.
    assert controller.apply().ended == (0, "Applied", "")
    setup = load_settings(controller.environment, home=controller.home, uid=os.getuid())
    fleet, _ = load_snapshot(controller.specs, setup)
    far = world(setup, RealClock())
    (found,) = survey(fleet, far).hosts
    with far.connect(found.host) as port:
        assert isinstance(probed(found.plans[0], port, far, lambda: False), PerfHeld)
        with requests_in_flight(view, 1, "one"):
            assert "in use" in probed(found.plans[0], port, far, lambda: False).sentence

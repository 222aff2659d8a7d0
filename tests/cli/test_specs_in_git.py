"""Commands that see and steer find their specs where the daemon does: `--git`, `--branch`, `--path`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from git_repository import Repository
from typer.testing import CliRunner, Result

from reconciler.cli.main import mounted

SPEC = """apiVersion: reconciler/v1
kind: Host
name: h
ssh: {address: 127.0.0.1, port: 1}
---
apiVersion: reconciler/v1
kind: Server
name: s
host: h
gpus: [0]
engine: {name: custom, command: [/usr/bin/serve]}
model: m
listen: {port: 30000}
"""
COMMANDS = ("status", "history", "show", "logs", "suspend", "resume", "retry", "rollback", "restart")  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line in an empty folder, as somebody with a home of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return lambda *words: CliRunner().invoke(mounted(words), list(words))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Give a bare repository with one server on its branch `live`, under `fleet/`."""
    made = Repository.new(tmp_path / "remote.git")
    made.commit({"fleet/s.yaml": SPEC.encode()}, branch="live")
    return made


def test_a_spec_is_shown_from_the_branch_without_a_folder(
    run: Callable[..., Result], repository: Repository
) -> None:
    """The values come from the commit, with their place in it."""
    place = ("--git", str(repository.path), "--branch", "live", "--path", "fleet")
    shown = run("show", "s", "--resolved", "-o", "json", *place)
    assert shown.exit_code == 0, shown.stderr
    assert "fleet/s.yaml" in json.dumps(json.loads(shown.stdout))
    assert run("history", "other", *place).exit_code == 64


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_the_branch_and_accepts_nothing(
    run: Callable[..., Result], repository: Repository, tmp_path: Path, command: str
) -> None:
    """Each gets as far as the host, which is away here; what the daemon has accepted is not its to move (S14)."""
    place = ("--git", str(repository.path), "--branch", "live", "--path", "fleet")
    ended = run(command, "s", *place)
    assert ended.exit_code == 7, ended.stderr
    assert not list((tmp_path / "state").rglob("accepted.json"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_branch_without_a_repository_is_refused(run: Callable[..., Result], command: str) -> None:
    """It would be dropped in silence, and the folder's specs taken."""
    ended = run(command, "s", "--branch", "live")
    assert (ended.exit_code, ended.stderr) == (64, "reconcile: --branch and --path belong to --git\n")  # fmt: skip

"""`reconcile lab` boots, breaks and ends hosts, and every error says what to do."""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import typer
from lab_engine import hold_command, hold_unit, start_unit
from typer.testing import CliRunner, Result
from unprivileged import as_nobody

from reconciler.cli import lab as command
from reconciler.lab.faults import CASES
from reconciler.lab.hosts import LabPaths, SystemdHost

APP = typer.Typer()
command.register(APP)


def _run(*words: str) -> Result:
    return CliRunner().invoke(APP, ["lab", *words])


def test_every_case_is_listed_with_a_line() -> None:
    """`lab break --list` needs no root and explains each case."""
    done = _run("break", "--list")
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(CASES)


def test_without_root_it_says_so_and_does_nothing(tmp_path: Path) -> None:
    """What is missing is named, and what works without it."""

    def up() -> tuple[int, str]:
        done = _run("up", "--dir", str(tmp_path / "lab"))
        return done.exit_code, done.stderr

    _run("break", "--list")  # Imports what the command needs, while it may be read.
    code, said = as_nobody(up)
    assert code == 64
    assert "needs root" in said
    assert "rehearse" in said
    assert not (tmp_path / "lab").exists()


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing program is named with its package; nothing is made."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = _run("up", "--dir", str(tmp_path / "lab"))
    assert done.exit_code == 64
    assert "systemd-container" in done.stderr
    assert not (tmp_path / "lab").exists()


def test_a_lab_without_hosts_leaves_no_empty_files(tmp_path: Path) -> None:
    """With its last host go the inventory, the pinned keys and the ssh configuration."""
    lab = LabPaths.at(tmp_path)
    files = (lab.inventory, lab.known_hosts, lab.ssh_config)
    for file in files:
        file.write_text("of a host that is gone")
    lab.write_inventory()
    assert not any(file.exists() for file in files)


@pytest.mark.lab
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["down"], "--all"),
        (["down", "nobody"], "no host 'nobody'"),
        (["break", "left-over"], "--list"),
        (["break", "left-over", "nobody"], "lab up nobody"),
        (["up", "Bad_Name"], "at most ten"),
        (["up", "shared", "--engine", "sglang"], "NAME=PATH"),
        (["up", "shared", "--engine", "tgi=/opt/tgi/bin/python"], "no stand-in"),
    ],
)
def test_a_wrong_call_is_a_usage_error_that_says_what_to_do(
    lab: LabPaths, lab_host: SystemdHost, words: list[str], said: str
) -> None:
    """Exit 64, and the way out in the message."""
    done = _run(*words, "--dir", str(lab.directory))
    assert done.exit_code == 64
    assert said in done.stderr


@pytest.mark.lab
def test_up_break_status_down(lab: LabPaths, tmp_path: Path) -> None:
    """The whole life of a host by commands alone."""
    where = ["--dir", str(lab.directory)]
    done = _run("up", "hand", "--gpus", "1", "--engine", "sglang=/opt/sglang/bin/python", *where)
    assert done.exit_code == 0, done.stderr
    assert "ssh -F" in done.stderr
    host = SystemdHost("hand", lab)
    try:
        enrols_as_printed(done.stderr, tmp_path)
        assert "up already" in _run("up", "hand", *where).stderr
        assert host.ip in _run("status", *where).stdout
        assert host.check(["/opt/sglang/bin/python", "-m", "sglang.launch_server", "--help"])
        start_unit(host, "llm.service", hold_unit(hold_command()))
        assert "KillMode=process" in _run("break", "left-over", "hand", *where).stderr
        assert _run("break", "no-such", "hand", *where).exit_code == 64
        assert _run("break", "heal", "hand", *where).exit_code == 0
    finally:
        done = _run("down", "hand", *where)
    assert done.exit_code == 0
    assert not host.directory.exists()


def enrols_as_printed(said: str, home: Path) -> None:
    """Paste what was printed below `next:` into a shell of somebody who has no configuration: it ends with an enrolled host."""
    lines = said.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("next:")) + 1
    pasted = list(takewhile(lambda line: line.startswith("   "), lines[first:]))
    assert pasted[-1].split() == ["reconcile", "enrol", "hand"]
    environment = {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-ec", "\n".join(pasted)], cwd=home, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hand: enrolled" in done.stdout

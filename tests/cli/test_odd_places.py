"""The command line where something around it is odd: its state, its home, its terminal, its output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
LEAKS = ("Traceback", "Errno", "Exception ignored", "pydantic", "Input should", "This is a bug")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `reconcile` in a folder with specs, with a home and nothing else in the environment but what is given."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.yaml").write_text(SPEC)

    def done(*words: str, prefix: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "reconciler", *words]
        ended = subprocess.run(
            ["/bin/sh", "-c", f'"$@" {prefix}', "sh", *command],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home")} | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )  # fmt: skip
        said = ended.stdout + ended.stderr
        assert [leak for leak in LEAKS if leak in said] == []
        return ended

    return done


def _is_file(state: Path) -> None:
    state.write_text("")


def _pin_is_folder(state: Path) -> None:
    (state / "hosts" / "h.json").mkdir(parents=True)


def _pin_is_torn(state: Path) -> None:
    (state / "hosts").mkdir(parents=True)
    (state / "hosts" / "h.json").write_text('{"version": 1, "ho')


@pytest.mark.parametrize(
    ("make", "words", "cure"),
    [
        (
            _is_file,
            ("--yes",),
            "a part of this path is a file and no directory: remove that file, or name another",
        ),
        (_is_file, ("--dry-run",), "a part of this path is a file and no directory"),
        (_pin_is_folder, ("status",), "(Is a directory): remove it"),
        (_pin_is_torn, ("retry", "s"), "enrol h again"),
    ],
)
def test_a_state_that_cannot_be_read_is_said_once(
    run: Run, tmp_path: Path, make: Callable[[Path], None], words: tuple[str, ...], cure: str
) -> None:
    """Exit 1, since no host is at fault; the file by name, and what to do; nothing is guessed, and no host is asked."""
    make(tmp_path / "state")
    ended = run(*words, RECONCILER_STATE_DIR=str(tmp_path / "state"))
    assert ended.returncode == 1
    said = " ".join((ended.stdout + ended.stderr).split())
    assert str(tmp_path / "state" / "hosts" / "h.json") in said
    assert cure in said
    assert "Unreachable" not in said
    assert "a host could not be reached" not in said


@pytest.mark.parametrize(
    ("content", "why"), [(b"state_dir: [1", "missing"), (None, "cannot be read")]
)  # fmt: skip
def test_settings_that_cannot_be_read_are_a_spec_error(
    run: Run, tmp_path: Path, content: bytes | None, why: str
) -> None:
    """Whether a file, a folder or nonsense: exit 65 with the place."""
    place = tmp_path / "settings.yaml"
    if content is None:
        place.mkdir()
    else:
        place.write_bytes(content)
    ended = run("validate", RECONCILER_SETTINGS=str(place))
    assert ended.returncode == 65
    assert str(place) in ended.stderr
    assert why in ended.stderr


@pytest.mark.parametrize(
    "environment",
    [{"TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "nonsense"}, {"LC_ALL": "C", "HOME": ""}],
)
def test_an_odd_environment_changes_no_answer(run: Run, environment: dict[str, str]) -> None:
    """The same words, without an escape sequence, whatever the terminal and the locale are."""
    shown = run("status", **environment)
    assert shown.returncode == 7
    assert "\x1b" not in shown.stdout
    assert "Connection refused" in shown.stdout


@pytest.mark.parametrize("words", [("status",), ("--help",)])
def test_a_full_disk_behind_the_output_is_said(run: Run, words: tuple[str, ...]) -> None:
    """Exit 1 and a sentence: a build that lost its report must not be green."""
    ended = run(*words, prefix=">/dev/full")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "reconcile: the output could not be written: no space left where it goes"
    )


@pytest.mark.parametrize(("prefix", "code"), [("<&- >&- 2>&-", 7), ("| head -n 1", 0)])
def test_closed_streams_end_nothing(run: Run, prefix: str, code: int) -> None:
    """Who closed a stream wants to hear nothing there."""
    assert run("--yes", prefix=prefix).returncode == code


def test_a_path_given_twice_is_usage(run: Run) -> None:
    """Two folders where one is meant: nothing is done with either."""
    assert run("validate", "specs", "specs").returncode == 64

"""The command line as a whole: help, mistakes, exit codes of usage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import reconciler.cli
from reconciler.cli.main import COMMANDS, mounted

HELP = Path(reconciler.cli.__file__).parent / "help.txt"


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the installed command line as a user would, on a terminal of 100 columns."""
    environment = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "reconciler", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )


def test_the_kept_help_is_the_real_one() -> None:
    """What `reconcile --help` prints from a file is what the commands say of themselves.

    `RECONCILER_UPDATE_GOLDEN=1` writes the file anew.
    """
    code = "import sys; sys.argv = ['reconcile', '--help']; from reconciler.cli.main import main; main()"
    environment = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    real = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    ).stdout
    if os.environ.get("RECONCILER_UPDATE_GOLDEN") == "1":
        HELP.write_text(real)
    assert real == HELP.read_text()
    assert run("--help").stdout == real


@pytest.mark.parametrize(
    "args",
    [
        ["--bogus"],
        ["frob"],
        ["validate", "--bogus"],
        ["logs"],
        ["enrol"],
        ["--server"],
        ["status", "-o", "xml"],
    ],
)
def test_a_wrong_command_line_is_usage(args: list[str], tmp_path: Path) -> None:
    """Exit 64, a sentence on standard error, nothing on standard output, and no talk of a bug."""
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 64
    assert done.stdout == ""
    assert "Error:" in done.stderr
    assert "bug" not in done.stderr


def test_every_command_has_help_with_an_example() -> None:
    """A person who asks a command for help is shown how it is used."""
    without = [
        c
        for c in COMMANDS
        if c != "lab" and "reconcile " + c not in run(c, "--help").stdout.split("Options", 1)[0]
    ]
    assert without == []


def test_a_missing_folder_of_specs_is_a_spec_error(tmp_path: Path) -> None:
    """S13: no specs is never "delete all"; it is said and ends with 65."""
    done = run("--dry-run", "--specs", str(tmp_path / "none"))
    assert done.returncode == 65
    assert "none" in done.stderr


def test_a_server_that_no_spec_has_is_usage(tmp_path: Path) -> None:
    """The names that exist are said."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.yaml").write_text("apiVersion: reconciler/v1\nkind: Host\nname: one\n")
    done = run("--dry-run", "--server", "nope", cwd=tmp_path)
    assert done.returncode == 64
    assert "no server 'nope'" in done.stderr


@pytest.mark.parametrize(
    "before",
    [["--dry-run"], ["--server", "a"], ["--specs", "elsewhere"], ["-o", "json"], ["--yes"]],
)
def test_options_of_a_pass_before_a_command_are_refused(before: list[str], tmp_path: Path) -> None:
    """`reconcile --dry-run restart x` must not restart x: what would be dropped in silence is refused."""
    done = run(*before, "restart", "x", "--yes", cwd=tmp_path)
    assert done.returncode == 64
    assert "belongs to a pass" in done.stderr


def test_a_value_that_is_called_like_a_command_is_a_value(tmp_path: Path) -> None:
    """`--specs lab` names a folder, whatever commands there are."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "a.yaml").write_text("apiVersion: reconciler/v1\nkind: Host\nname: one\n")
    done = run("status", "--specs", "lab", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_hash_that_can_be_none_is_usage(tmp_path: Path) -> None:
    """A typing mistake is not "something changed"."""
    done = run("--expect", "zzz", cwd=tmp_path)
    assert done.returncode == 64
    assert "plan hash" in done.stderr


def test_an_output_without_our_signs_does_not_end_a_run(tmp_path: Path) -> None:
    """What a terminal cannot show is escaped."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.yaml").write_text(
        'apiVersion: reconciler/v1\nkind: Host\nname: "\u00b1"\n', encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "reconciler", "validate"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 65
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_does_not_end_a_run() -> None:
    """A rollout goes on to its end when `| head` has seen enough; only then is nothing left half-way."""
    code = (
        "import sys; from reconciler.cli.context import out, out_markup\n"
        "for n in range(20000): out(f'line {n}'); out_markup([f'row {n}']) if n % 1000 == 0 else None\n"
        "sys.stderr.write('came to its end')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read().endswith("came to its end")
    assert child.wait(timeout=60) == 0
    child.stderr.close()


def test_a_pass_after_a_command_is_a_pass(tmp_path: Path) -> None:
    """The options of a pass are left out for a command alone, not for what is run next in the same process."""
    missing = str(tmp_path / "none")
    for words in (["validate", missing], ["--dry-run", "--specs", missing]):
        assert CliRunner().invoke(mounted(words), words).exit_code == 65


def test_examples_of_a_group_stand_line_by_line() -> None:
    """The examples of `lab` commands can be pasted: none is wrapped into the one before it."""
    lines = [line.strip() for line in run("lab", "up", "--help").stdout.splitlines()]
    assert "sudo reconcile lab up" in lines
    assert "sudo reconcile lab up pve --pve" in lines


def test_nothing_to_do_is_not_the_last_word_where_a_spec_is_wrong(tmp_path: Path) -> None:
    """One server is told as one; the line before exit 65 says why there is nothing to do."""
    host = "apiVersion: reconciler/v1\nkind: Host\nname: a\n"
    (tmp_path / "a.yaml").write_text(
        f"{host}---\napiVersion: reconciler/v1\nkind: Server\nname: s\nhost: a\n"
    )
    done = run("--specs", str(tmp_path), "--dry-run")
    assert done.returncode == 65
    assert "1 server is held back, because its spec is wrong" in done.stderr
    assert done.stdout.startswith("Nothing to do; some specs are wrong (see above).")

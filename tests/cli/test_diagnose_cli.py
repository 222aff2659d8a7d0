"""`reconcile diagnose` as a person meets it: recorded logs, pipes, and files that are no logs."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from reconciler.cli import diagnose
from reconciler.effects import log_files

RECORDED = Path(__file__).parents[1] / "recorded" / "engine-logs"
CASES: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(RECORDED / "cases.yaml")["cases"]
BUSY = RECORDED / "vllm-free-memory-gpu-occupied.log"


def run(*arguments: str) -> Result:
    app = typer.Typer()
    diagnose.register(app)
    return CliRunner().invoke(app, arguments)


def run_alone(*arguments: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the installed command line, which has real streams."""
    command = [sys.executable, "-m", "reconciler", "diagnose", *arguments]
    return subprocess.run(command, capture_output=True, check=False, timeout=120, **more)


@pytest.mark.parametrize("case", CASES, ids=[case["file"] for case in CASES])
def test_the_document_has_the_words_of_the_cases(case: dict[str, Any]) -> None:
    """`-o json` says class, code, reaction and key_line as the recorded cases do; exit code 0."""
    status = [] if case.get("exit_status") is None else ["--exit-status", str(case["exit_status"])]
    result = run(str(RECORDED / case["file"]), "-o", "json", *status)
    assert (result.exit_code, result.stderr) == (0, "")
    said = json.loads(result.stdout)
    got = (said["class"], said["code"], said["reaction"], said["also"])
    assert got == (case["class"], case["code"], case["reaction"], case.get("also"))
    assert (case["key_line"] or "") in (said["key_line"] or "")
    assert (said["key_line"] is None) == (case["key_line"] is None)


def test_people_are_told_cause_line_cure_and_reaction() -> None:
    """The text says all that is needed to act."""
    result = run(str(BUSY))
    for part in (
        "Resource busy",
        "gpu_memory_held, certain",
        "line 4",
        "0.49/79.32",
        "change",
        "reaction",
    ):
        assert part in result.stdout


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    """No guess, no key line, and what to do all the same."""
    log = tmp_path / "x.log"
    log.write_text("ValueError: the frobnicator is out of grease\n")
    text = run(str(log)).stdout
    assert "Unknown\n" in text
    assert "frobnicator" in text
    said = json.loads(run(str(log), "-o", "json").stdout)
    assert (said["class"], said["code"], said["key_line"]) == ("unknown", "unknown", None)


def test_a_log_comes_by_standard_input_and_by_a_pipe(tmp_path: Path) -> None:
    """`-`, and a named pipe as a shell's `<(…)` gives, are read to their end."""
    by_input = run_alone("-", "-o", "json", input=BUSY.read_bytes())
    assert json.loads(by_input.stdout)["code"] == "gpu_memory_held"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["/bin/sh", "-c", 'exec cat "$0" > "$1"', str(BUSY), str(pipe)]):
        by_pipe = run_alone(str(pipe), "-o", "json")
    assert json.loads(by_pipe.stdout)["code"] == "gpu_memory_held"


def test_a_pipe_that_nobody_writes_to_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a writer, or one that falls silent, never holds the command for ever."""
    monkeypatch.setattr(log_files, "SILENCE_S", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        silent = run(str(pipe))
        assert (silent.exit_code, silent.stdout) == (64, "")
        assert "nothing was diagnosed" in silent.stderr
        os.write(writer, BUSY.read_bytes())
        spoken = run(str(pipe), "-o", "json")
        assert json.loads(spoken.stdout)["code"] == "gpu_memory_held"
        assert "judged by what came before" in spoken.stderr
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: path.write_bytes(gzip.compress(BUSY.read_bytes())), "zcat"),
        (lambda path: path.write_bytes(bytes(range(256)) * 10 + bytes(4000)), "is not text"),
    ],
    ids=["missing", "folder", "device", "loop", "compressed", "binary"],
)
def test_what_is_no_log_is_said_to_be_none(tmp_path: Path, make: Any, told: str) -> None:
    """Exit 64 and one sentence, never a diagnosis of rubbish."""
    path = tmp_path / "odd"
    make(path)
    result = run(str(path))
    assert (result.exit_code, result.stdout) == (64, "")
    assert told in result.stderr


def test_an_empty_log_is_unknown(tmp_path: Path) -> None:
    """Nothing said is nothing known."""
    (tmp_path / "empty").write_bytes(b"")
    assert "the log is empty" in run(str(tmp_path / "empty")).stdout


def test_an_engine_that_does_not_exist_is_usage() -> None:
    """The names are those of specs."""
    assert run(str(BUSY), "--engine", "triton").exit_code == 64


@pytest.mark.parametrize("kind", ["one line", "many lines"])
def test_a_huge_log_is_read_in_bounded_memory(tmp_path: Path, kind: str) -> None:
    """Fifty megabytes, of one line or of many, cost no more memory than the interpreter and a few buffers."""
    log = tmp_path / "huge.log"
    dull = b'[2026-05-02 11:04:43] INFO:     127.0.0.1:55012 - "GET /metrics HTTP/1.1" 200 OK'
    with log.open("wb") as file:
        for _ in range(50):
            file.write(
                (dull + (b" " if kind == "one line" else b"\n")) * (1_000_000 // (len(dull) + 1))
            )
        file.write(b"\nValueError: No available memory for the cache blocks.\n")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (150 << 20, 150 << 20))

    result = run_alone(str(log), "-o", "json", preexec_fn=limit)
    assert json.loads(result.stdout)["code"] == "kv_pool_too_small", result.stderr


def test_an_empty_log_is_told_as_one(tmp_path: Path) -> None:
    """Nobody is sent to read lines that are not there."""
    (tmp_path / "empty.log").write_text("")
    said = run(str(tmp_path / "empty.log"), "--exit-status", "1").stdout
    assert "the log is empty" in said
    assert "look whether it is the log of the right unit" in said
    assert "lines above" not in said


@pytest.mark.parametrize("status", ["99999", "256", "-65"])
def test_an_exit_status_that_no_process_has_is_refused(tmp_path: Path, status: str) -> None:
    """0 to 255, or the negative number of a signal."""
    (tmp_path / "empty.log").write_text("")
    assert run(str(tmp_path / "empty.log"), "--exit-status", status).exit_code == 2

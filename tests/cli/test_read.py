"""`reconcile read`: the recorded outputs, through the command that a person uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from reconciler.cli import read
from reconciler.helper.recorded import KINDS, read_recorded

CASES_DIRECTORY = Path(__file__).parents[1] / "recorded" / "host-outputs"
CASES = YAML(typ="safe").load((CASES_DIRECTORY / "cases.yaml").read_text())["cases"]


def command() -> typer.Typer:
    """Give a command line with this command only."""
    app = typer.Typer()
    app.callback()(lambda: None)
    read.register(app)
    return app


def run(*args: str, given: bytes = b"") -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(command(), ["read", *args], input=given)


def holds(expected: Any, found: Any) -> bool:
    """Say whether the found facts say what is expected; they may say more."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return all(key in found and holds(value, found[key]) for key, value in expected.items())
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(holds, expected, found))
    return type(expected) is type(found) and expected == found


def arguments(case: dict[str, Any], folder: Path, *, command_known: bool) -> list[str]:
    """Write a case as a command line."""
    context = dict(case.get("context") or {})
    if command_known:
        context["command"] = case["command"]
    args = [case["kind"], "--exit", str(case["exit"]), "-o", "json"]
    args += ["--stdout", str(CASES_DIRECTORY / case["stdout"])]
    if case["stderr"]:
        args += ["--stderr", str(CASES_DIRECTORY / case["stderr"])]
    if context:
        path = folder / "context.json"
        path.write_text(json.dumps(context))
        args += ["--context", str(path)]
    return args


@pytest.mark.parametrize("command_known", [True, False])
def test_every_recorded_output_is_read_as_its_case_says(
    tmp_path: Path, *, command_known: bool
) -> None:
    """All 102 cases: verdict and facts are printed as the case has them, also where nobody says which command it was."""
    wrong = []
    for case in CASES:
        done = run(*arguments(case, tmp_path, command_known=command_known))
        assert done.exit_code == 0, (case["id"], done.output)
        found = json.loads(done.stdout)
        facts = dict(case["facts"])
        if not command_known and case["kind"] == "proc-stack":
            facts.pop("pid")  # Only the command names it.
        missing = [n for n, v in facts.items() if not holds(v, found["facts"].get(n, "no fact"))]
        if found["verdict"] != case["verdict"] or missing:
            wrong.append((case["id"], found["verdict"], missing))
    assert wrong == []
    assert len(CASES) == 102


def test_a_probe_that_hung_is_said_by_its_exit_status() -> None:
    """A probe that was cut off at its limit is no evidence, whatever it had printed by then (L6)."""
    done = run("nvidia-smi-gpu", "--exit", "124", "--stdout", "/dev/null", "-o", "json")
    assert json.loads(done.stdout)["verdict"] == "unknown"
    assert json.loads(done.stdout)["facts"]["error"] == "timeout"


def test_an_output_comes_by_a_pipe_and_is_shown_to_people() -> None:
    """`nvidia-smi … | reconcile read … --stdout -` prints the verdict, what it means, and a line a fact."""
    given = b"0, GPU-3f1c9a52-6d0e-4b7a-9c18-5e2ab0d4f701, 4, 81559\n"
    done = run("nvidia-smi-gpu", "--stdout", "-", given=given)
    assert done.exit_code == 0
    assert done.stdout.startswith("nvidia-smi-gpu: good (the facts hold)\n")
    assert "at_baseline" in done.stdout
    assert "not known" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["nvidia-smi-gpus", "--stdout", "/dev/null"], 64, "there is no kind 'nvidia-smi-gpus'"),
        (["fuser"], 64, "--stdout is missing"),
        (["fuser", "--stdout", "/nonexistent"], 64, "/nonexistent: cannot be read"),
        (["fuser", "--stdout", "-", "--stderr", "-"], 64, "only one of"),
        (["fuser", "--stdout", "/dev/null", "--context", "{tmp}/list.yaml"], 65, "not a map"),
        (["fuser", "--stdout", "/dev/null", "--context", "{tmp}/broken.yaml"], 65, "not YAML"),
        (
            ["nvidia-smi-gpu", "--stdout", "/dev/null", "--context", "{tmp}/wrong.yaml"],
            65,
            "does not fit a nvidia-smi-gpu",
        ),
    ],
)
def test_what_cannot_be_read_is_said(args: list[str], code: int, said: str, tmp_path: Path) -> None:
    """A wrong kind, a missing file, a context that is none: one sentence, the table's exit code, no traceback."""
    (tmp_path / "list.yaml").write_text("- one\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "wrong.yaml").write_text("expected_uuids: 5\n")
    done = run(*(a.replace("{tmp}", str(tmp_path)) for a in args))
    assert done.exit_code == code, done.output
    assert said in done.output
    assert "Traceback" not in done.output


def test_the_kinds_are_listed() -> None:
    """`reconcile read list` names every kind, one a line."""
    assert run("list").stdout.split() == sorted(KINDS)


def test_no_bytes_of_a_program_crash_the_reading() -> None:
    """Cut, doubled and garbled outputs get a verdict and never an error of ours: they come from hosts in trouble."""
    for case in CASES:
        data = (CASES_DIRECTORY / case["stdout"]).read_bytes()
        for broken in (data[: len(data) // 2], data * 2, data.replace(b"0", b"\xff"), b"\x00" * 9):
            text = broken.decode("utf-8", "surrogateescape")
            judged = read_recorded(case["kind"], 0, text, "", {})
            assert judged["verdict"] in {"good", "unknown", "fault", "refused"}, case["id"]

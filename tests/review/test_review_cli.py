"""The command line of reviews: exit codes, what goes together, and what is printed where."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rollout_stage import Stage

from reconciler.cli.context import PassOutput
from reconciler.cli.review import check_options, offline
from reconciler.cli.run import PassOptions, run_pass
from reconciler.core.errors import UsageError
from reconciler.core.plan import Permissions
from reconciler.core.review import read_review
from reconciler.core.saved_state import state_of, state_text
from reconciler.lab.schedule import DOCUMENT
from reconciler.reconcile import survey
from reconciler.settings import Settings


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """Give a repository with one commit, and the folder of its specs."""
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "fleet.yaml").write_text(DOCUMENT.format(steps=1))
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run(
            [
                "git",
                "-C",
                str(tmp_path),
                "-c",
                "user.name=T",
                "-c",
                "user.email=t@example.org",
                *words,
            ],
            check=True,
            capture_output=True,
        )
    return folder


def asked(specs: Path, **more: object) -> PassOptions:
    """Give what the command line says."""
    values: dict[str, object] = {"specs": specs, "dry_run": True, "offline": True, "base": "HEAD"}
    return PassOptions(**{**values, **more})  # type: ignore[arg-type]


def test_exit_codes(specs: Path) -> None:
    """0 with and without differences, 2 for them where it is asked for, 65 for a mistake, also then."""
    detailed = asked(specs, detailed=True)
    assert offline(asked(specs), Settings()) == 0
    assert offline(detailed, Settings()) == 0
    (specs / "fleet.yaml").write_text(DOCUMENT.format(steps=2))
    assert offline(asked(specs), Settings()) == 0
    assert offline(detailed, Settings()) == 2
    (specs / "fleet.yaml").write_text(DOCUMENT.format(steps=2) + "typo: 1\n")
    assert offline(detailed, Settings()) == 65


def test_standard_output_is_one_document(specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON that can be read back; mistakes are talk, on standard error, and in the document as well."""
    (specs / "fleet.yaml").write_text(DOCUMENT.format(steps=2) + "typo: 1\n")
    offline(asked(specs, output=PassOutput.JSON), Settings())
    said = capsys.readouterr()
    found = read_review(said.out.encode())
    assert "typo" in found.problems[0]
    assert "typo" in said.err
    assert json.loads(said.out)["format_version"] == "1.0"


def test_a_base_and_a_state_together(
    specs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the change does, what is live, how long it took before, and the cards' own names in the unit."""
    at = Stage()
    at.apply(2)
    at.apply(1)
    found = survey(at.fleet(1), at.controller)
    state = tmp_path / "state.json"
    state.write_text(state_text(state_of(found, taken_at=0.0, tool_version="1")))
    (specs / "fleet.yaml").write_text(DOCUMENT.format(steps=2))
    assert offline(asked(specs, against=state, output=PassOutput.JSON), Settings()) == 0
    review = read_review(capsys.readouterr().out.encode())
    (server,) = review.servers
    assert server.outage_runs == 1
    assert server.live is not None
    assert server.live.action == "change"
    assert "GPU-00000000-one" in server.unit_diff
    assert review.against is not None
    assert review.against.stale
    only = asked(specs, offline=False, base=None, against=state, output=PassOutput.JSON)
    assert offline(only, Settings()) == 0
    planned = read_review(capsys.readouterr().out.encode())
    assert planned.against is not None
    assert planned.against.plan_hash == survey(at.fleet(2), at.controller).plan.hash


def test_a_plan_of_real_hosts_is_a_comment_too(capsys: pytest.CaptureFixture[str]) -> None:
    """`--dry-run -o markdown` without --offline asks the hosts."""
    at = Stage()
    at.apply(1)
    capsys.readouterr()
    options = PassOptions(specs=Path("specs"), dry_run=True, output=PassOutput.MARKDOWN)
    assert run_pass(at.fleet(2), at.controller, options, Permissions()) == 0
    text = capsys.readouterr().out
    assert text.startswith("<!-- reconcile:plan:1 -->")
    assert "**restart**" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"offline": False},
        {"dry_run": False},
        {"dry_run": False, "offline": False, "base": None, "output": PassOutput.MARKDOWN},
        {"dry_run": False, "offline": False, "base": None, "against": Path("x")},
        {"dry_run": False, "offline": False, "base": None, "out": Path("x")},
        {"out": Path("x")},
        {"offline": False, "base": None, "against": Path("x"), "out": Path("y")},
        {"adopt": True},
        {"offline": False, "base": None, "against": Path("x"), "overwrite": True},
    ],
)
def test_what_makes_no_sense_together_is_usage(wrong: dict[str, object]) -> None:
    """Nothing is dropped in silence."""
    with pytest.raises(UsageError):
        check_options(asked(Path("specs"), **wrong))
    check_options(asked(Path("specs")))


def test_a_server_is_looked_for_on_both_sides(specs: Path) -> None:
    """One that the change removes can be asked for; one that never was cannot."""
    (specs / "fleet.yaml").write_text(DOCUMENT.format(steps=1).split("---\n")[0])
    assert offline(asked(specs, servers=("qwen",), detailed=True), Settings()) == 2
    with pytest.raises(UsageError, match="no server 'other'"):
        offline(asked(specs, servers=("other",)), Settings())

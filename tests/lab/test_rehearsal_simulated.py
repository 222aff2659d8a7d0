"""Rehearsals on the simulated backend, end to end, as a person starts them: the story, `--set`, every `--break` case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rehearsals import COMMAND, Rehearsed, rehearse, rehearse_all

from reconciler.lab.story import BREAKS

REPOSITORY = Path(__file__).parent.parent.parent
SPECS = [*sorted((REPOSITORY / "examples").glob("*.yaml")), REPOSITORY / "specs"]

SMALL = """apiVersion: reconciler/v1
kind: Host
name: one
---
apiVersion: reconciler/v1
kind: Server
name: small
host: one
gpus: [0]
engine: {name: vllm, version: 0.33.0}
runtime: {python: /opt/vllm/bin/python}
model: org/small
listen: {port: 30000}
timeouts: {drain: 2s, stop: 2s, release: 20s, settle: 1s, ready: 60s, gate: 60s}
gate:
  runs:
    - {name: single, concurrency: 1, requests: 6, max_tokens: 32, min_decode_tps: 100}
"""


def ordinary_user(folder: Path) -> str | None:
    """Name a user without rights who may use this Python and write here; None: whoever we are."""
    if os.geteuid() != 0:
        return None
    folder.chmod(0o777)
    command = ["test", "-x", sys.executable, "-a", "-r", str(REPOSITORY), "-a", "-w", str(folder)]
    return None if subprocess.run(command, user="nobody", check=False).returncode else "nobody"


def test_the_story_ends_as_it_should_without_root(tmp_path: Path) -> None:
    """An ordinary user sees four chapters, the left-over ended by us, nothing left behind, in well under two minutes."""
    home = tmp_path
    began = time.monotonic()
    done = rehearse("-o", "json", home=home, user=ordinary_user(home))
    took = time.monotonic() - began
    assert done.code == 0, done.errors + done.text[-3000:]
    chapters = done.end["chapters"]
    ended = [c["outcomes"][0]["outcome"] for c in chapters]
    assert ended == ["Applied", "Applied", "RolledBack", "Applied"]
    assert chapters[2]["outcomes"][0]["reason"] == "GateFailed"
    assert chapters[0]["outage_s"] is None
    assert all(c["outage_s"] > 0 for c in chapters[1:])
    assert [bool(c["ended_by_force"]) for c in chapters] == [False, False, False, True]
    assert all("by reconcile" in said for said in chapters[3]["ended_by_force"])
    assert took < 115
    assert list(home.iterdir()) == []


def test_ctrl_c_takes_everything_away(tmp_path: Path) -> None:
    """Interrupted while a stand-in answers the gate, a rehearsal ends with 130, and no process or file is left."""
    specs = tmp_path / "small.yaml"
    specs.write_text(SMALL.replace("requests: 6", "requests: 600"))
    home = tmp_path / "home"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)}
    with subprocess.Popen(
        [*COMMAND, str(specs), "--backend", "simulated"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "round 1" in line:
                break
        assert stand_ins(home)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
        assert running.returncode == 130
    assert stand_ins(home) == []
    assert list(home.iterdir()) == []


def stand_ins(folder: Path) -> list[str]:
    """Find the processes that run in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.resolve(strict=True).is_relative_to(folder):
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


# -- failures, and second commits


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, ...], Rehearsed]:
    """Play everything that the tests of this module look at."""
    folder = tmp_path_factory.mktemp("rehearsals")
    specs = folder / "small.yaml"
    specs.write_text(SMALL)
    small = [("-o", "json", str(specs), *words) for words in SETS]
    cases = [("-o", "json", str(specs), "--break", case) for case in BREAKS]
    files = [("-o", "json", str(path)) for path in SPECS]
    done = rehearse_all([*cases, *small, *files], folder)
    return {
        tuple(w for w in words if w not in {"-o", "json", str(specs)}): d
        for words, d in done.items()
    }


SETS = (
    ("--set", "small.args.max-model-len=4096"),
    (
        "--set",
        "small.args.max-model-len=4096",
        "--set",
        "small.gate.runs.single.max_ttft_p50=1ms",
    ),
)


@pytest.mark.parametrize("case", BREAKS)
def test_each_failure_ends_as_its_case_says(
    played: Mapping[tuple[str, ...], Rehearsed], case: str
) -> None:
    """The tool is run until it has settled, ends as the table says, and bystanders are left alone."""
    done = played["--break", case]
    assert done.code == 0, done.errors + done.text[-3000:]
    last = done.end["chapters"][-1]["outcomes"][0]
    assert last["outcome"] in {BREAKS[case].ends.value, "InSync" if BREAKS[case].at else ""}
    forced = done.end["chapters"][-1]["ended_by_force"]
    assert bool(forced) == (case in {"left-over", "ignore-term"}), forced
    if case == "ignore-term":
        assert all("by systemd" in said for said in forced)
    assert "WAS SIGNALLED" not in done.text


def test_set_plays_a_second_commit(played: Mapping[tuple[str, ...], Rehearsed]) -> None:
    """The change is planned, shown with its field, and applied."""
    done = played[SETS[0]]
    assert done.code == 0, done.errors
    assert [c["outcomes"][0]["outcome"] for c in done.end["chapters"]] == ["Applied", "Applied"]
    plans = [line for line in done.lines if line["type"] == "plan"]
    assert "max-model-len" in str(plans[-1]["servers"][0]["changes"])


def test_several_sets_are_one_commit_and_its_exit_code_is_the_tools(
    played: Mapping[tuple[str, ...], Rehearsed],
) -> None:
    """A commit that nobody expected to fail ends as `reconcile` would: rolled back is 3."""
    done = played[SETS[1]]
    assert done.code == 3, done.errors
    assert len(done.end["chapters"]) == 2
    assert done.end["chapters"][1]["outcomes"][0]["outcome"] == "RolledBack"


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.name)
def test_every_spec_of_this_repository_is_rehearsed(
    played: Mapping[tuple[str, ...], Rehearsed], path: Path
) -> None:
    """Examples are not only valid: they are deployed, answered and measured."""
    done = played[(str(path),)]
    assert done.code == 0, done.errors + done.text[-3000:]
    assert {o["outcome"] for o in done.end["chapters"][0]["outcomes"]} == {"Applied"}


# -- wrong command lines


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--set", "small.tp_sise=2"], 65, "did you mean `tp_size`"),
        (["--set", "small.tp_size=x"], 65, "`tp_size`: expected a whole number"),
        (["--set", "smal.tp_size=2"], 64, "there is no server 'smal'"),
        (["--break", "earthquake"], 64, "there is no case 'earthquake'"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    """The field or the case is named; no host is made."""
    specs = tmp_path / "small.yaml"
    specs.write_text(SMALL)
    done = rehearse(str(specs), *words, home=tmp_path)
    assert done.code == code
    assert said in done.errors
    assert done.text == ""


def test_wrong_specs_are_said_and_not_rehearsed(tmp_path: Path) -> None:
    """All problems at once, with their places, and exit 65."""
    specs = tmp_path / "small.yaml"
    specs.write_text(SMALL.replace("gpus: [0]", "gpsu: [0]").replace("port: 30000", "prot: 1"))
    done = rehearse(str(specs), home=tmp_path)
    assert done.code == 65
    assert "small.yaml:9:1: unknown key `gpsu`" in done.errors
    assert "small.yaml:13:10: unknown key `prot`" in done.errors


def test_the_cases_are_listed(tmp_path: Path) -> None:
    """`--break list` explains each in a line and starts nothing."""
    done = rehearse("--break", "list", home=tmp_path)
    assert done.code == 0
    assert [line.split()[0] for line in done.text.splitlines()] == list(BREAKS)

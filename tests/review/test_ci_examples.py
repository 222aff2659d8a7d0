"""The ready-made builds do what they say: their scripts are run here, against a repository and a forge on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forge_server import TOKEN, FakeForge, forge_server
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
HOST = "apiVersion: reconciler/v1\nkind: Host\nname: one\n"
SERVER = """apiVersion: reconciler/v1
kind: Server
name: qwen
host: one
gpus: [0]
engine: {name: custom, command: [/usr/bin/serve, --steps, "1"]}
model: some/model
listen: {port: 30000}
"""


def read(path: Path) -> Any:
    """Read YAML as a forge would."""
    return YAML(typ="safe", pure=True).load(path.read_text())


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Give a clone in which the newest commit changes a server."""
    work = tmp_path / "clone"
    (work / "specs").mkdir(parents=True)
    for number in ("1", "2"):
        (work / "specs" / "hosts.yaml").write_text(HOST)
        (work / "specs" / "a.yaml").write_text(SERVER.replace('"1"', f'"{number}"'))
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", number]):
            subprocess.run(
                [
                    "git",
                    "-C",
                    str(work),
                    "-c",
                    "user.name=T",
                    "-c",
                    "user.email=t@example.org",
                    *words,
                ],
                check=True,
                capture_output=True,
            )
    return work


def commit_of(clone: Path, revision: str) -> str:
    """Give a full commit id."""
    done = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", revision], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def bash(script: str, clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a runner does, with `reconcile` of this very interpreter on the path."""
    tool = clone.parent / "bin"
    tool.mkdir(exist_ok=True)
    (tool / "reconcile").write_text(f'#!/bin/sh\nexec {sys.executable} -m reconciler "$@"\n')
    (tool / "reconcile").chmod(0o755)
    environment = {
        "PATH": f"{tool}:{os.environ['PATH']}", "HOME": str(clone.parent), "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **variables,
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def on_github(clone: Path, forge: FakeForge) -> tuple[int, str]:
    """Run the steps of the composite action, and give the last exit code and the summary."""
    steps = {
        s["name"]: s["run"] for s in read(ROOT / "examples/ci/github/action.yml")["runs"]["steps"]
    }
    out, summary, event = (clone.parent / n for n in ("output", "summary", "event.json"))
    for file in (out, summary):
        file.write_text("")
    head = commit_of(clone, "HEAD")
    event.write_text(json.dumps({"pull_request": {"number": 7, "head": {"sha": head}}}))
    common = {
        "SPECS": "specs", "BASE": "HEAD^1", "STATE": "", "RUNNER_TEMP": str(clone.parent),
        "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(out), "GITHUB_ACTIONS": "true",
        "GITHUB_REPOSITORY": "ops/llm", "GITHUB_API_URL": forge.url, "GITHUB_EVENT_PATH": str(event),
        "GITHUB_SHA": "b" * 40, "GITHUB_TOKEN": TOKEN,
    }  # fmt: skip
    planned = bash(steps["Plan"], clone, **common)
    assert planned.returncode == 0, planned.stderr
    commented = bash(steps["Comment"], clone, **common)
    assert commented.returncode == 0, commented.stderr
    code = out.read_text().strip().removeprefix("code=")
    return bash(steps["Result"], clone, CODE=code).returncode, summary.read_text()


def test_the_github_action_comments_and_fails_on_mistakes(clone: Path) -> None:
    """The comment and the status are there in both cases; with a mistake in a spec the job ends with 65."""
    with forge_server("github") as forge:
        code, summary = on_github(clone, forge)
        assert code == 0
        assert "1 server restarts" in forge.bodies()[0]
        assert "1 server restarts" in summary
        assert forge.statuses[-1]["state"] == "success"
        assert forge.asked[-1][1].endswith(commit_of(clone, "HEAD"))
        (clone / "specs" / "a.yaml").write_text(SERVER + "typo: 1\n")
        code, _ = on_github(clone, forge)
        assert code == 65
        assert len(forge.bodies()) == 1
        assert "typo" in forge.bodies()[0]
        assert forge.statuses[-1]["state"] == "failure"


def test_nothing_of_a_pull_request_is_part_of_a_script() -> None:
    """Expressions of GitHub stand in `env:` and `if:` alone, where no shell reads them."""
    action = read(ROOT / "examples/ci/github/action.yml")
    assert not [s["name"] for s in action["runs"]["steps"] if "${{" in s["run"]]
    workflow = read(ROOT / "examples/ci/github/workflow.yml")
    assert workflow["permissions"] == {
        "contents": "read", "pull-requests": "write", "statuses": "write",
    }  # fmt: skip


def test_the_gitlab_template_writes_a_note(clone: Path) -> None:
    """From the merge request's base, with the project's own token."""
    job = read(ROOT / "examples/ci/gitlab/reconcile.yml")["reconcile-plan"]
    with forge_server("gitlab") as forge:
        done = bash(
            "\n".join(job["script"]),
            clone,
            RECONCILE_SPECS="specs",
            RECONCILE_STATE="",
            CI_MERGE_REQUEST_DIFF_BASE_SHA=commit_of(clone, "HEAD^1"),
            GITLAB_CI="true",
            CI_API_V4_URL=forge.url,
            CI_PROJECT_ID="42",
            CI_MERGE_REQUEST_IID="7",
            CI_COMMIT_SHA=commit_of(clone, "HEAD"),
            CI_JOB_URL="https://ci.example.org/1",
            GITLAB_TOKEN=TOKEN,
        )
        assert done.returncode == 0, done.stderr
        assert "1 server restarts" in forge.bodies()[0]
        assert forge.statuses[-1]["target_url"] == "https://ci.example.org/1"
        assert "engine.command" in done.stdout


def test_the_hook_validates(clone: Path) -> None:
    """What pre-commit would run says that all is well, or what is not."""
    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    command = " ".join([hook["entry"], *hook["args"]])
    assert bash(command, clone).returncode == 0
    (clone / "specs" / "a.yaml").write_text(SERVER + "typo: 1\n")
    assert bash(command, clone).returncode == 65

"""A commit on a new branch of a real repository: the working tree, the index and the current branch are not touched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from reconciler.core.errors import UsageError
from reconciler.sources.branch import commit_on_branch

MESSAGE = "Tune qwen: speculative.num_steps=3\n\n# a table\n"


def git(folder: Path, *words: str) -> str:
    """Run git as a person would."""
    identity = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a repository with a spec, a hook that would fail, and somebody's staged change."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Ann")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "ann@example.org")
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.yaml").write_text("a: 1\n")
    (tmp_path / "other").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "other").write_text("2")
    git(tmp_path, "add", "other")
    hook = tmp_path / ".git/hooks/reference-transaction"
    hook.write_text("#!/bin/sh\ntouch hook-ran\nexit 1\n")
    hook.chmod(0o755)
    return tmp_path


def test_the_branch_has_one_change_and_nothing_else_moved(repository: Path) -> None:
    """Somebody's staged change does not come along, no hook runs, HEAD stays."""
    file = repository / "specs" / "a.yaml"
    before = git(repository, "status", "--porcelain=v2", "--branch")
    commit = commit_on_branch(file, b"a: 1\n", b"a: 2\n", "tune/qwen", MESSAGE)
    assert git(repository, "rev-parse", "tune/qwen").strip() == commit
    assert git(repository, "diff", "--stat", "main", "tune/qwen").count("|") == 1
    assert git(repository, "show", "tune/qwen:specs/a.yaml") == "a: 2\n"
    assert git(repository, "log", "-1", "--format=%B", "tune/qwen").strip() == MESSAGE.strip()
    assert git(repository, "status", "--porcelain=v2", "--branch") == before
    assert file.read_text() == "a: 1\n"
    assert not (repository / "hook-ran").exists()


@pytest.mark.parametrize(
    ("branch", "content", "why"),
    [
        ("main", b"a: 1\n", "exists already"),
        ("--force", b"a: 1\n", "no name of a branch"),
        ("a..b", b"a: 1\n", "no name of a branch"),
        ("tune/qwen", b"a: 9\n", "not committed"),
    ],
)
def test_what_would_overwrite_or_mix_is_refused(
    repository: Path, branch: str, content: bytes, why: str
) -> None:
    """An existing branch, a name that is an option, a file with changes that are not committed."""
    with pytest.raises(UsageError, match=why):
        commit_on_branch(repository / "specs" / "a.yaml", content, b"a: 2\n", branch, MESSAGE)


def test_a_folder_that_is_no_repository_is_said(tmp_path: Path) -> None:
    """There is nothing to commit to."""
    (tmp_path / "a.yaml").write_text("a: 1\n")
    with pytest.raises(UsageError, match="no git repository"):
        commit_on_branch(tmp_path / "a.yaml", b"a: 1\n", b"a: 2\n", "x", MESSAGE)

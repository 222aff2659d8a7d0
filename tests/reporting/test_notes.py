"""Git notes say what became of a commit, in the mirror and, where it is asked for, at the remote."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from reconciler.core.conditions import CommitStatus
from reconciler.reporting.base import ForgeError, Status
from reconciler.reporting.notes import GitNotes
from reconciler.sources.git_binary import Git, GitError


def git(*words: str) -> str:
    """Run git as a person does."""
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_note_says_what_became_of_a_commit(tmp_path: Path) -> None:
    """A line a status, the newest of each; control characters do not reach a terminal that shows the log."""
    remote, mirror = tmp_path / "remote.git", tmp_path / "mirror.git"
    work = tmp_path / "work"
    git("init", "-q", "--bare", str(remote))
    git("init", "-q", str(work))
    git("-C", str(work), "commit", "-q", "--allow-empty", "-m", "one")
    git("-C", str(work), "push", "-q", str(remote), "HEAD:refs/heads/main")
    commit = git("-C", str(work), "rev-parse", "HEAD")
    ours = Git(mirror)
    ours.init()
    ours.fetch(f"file://{remote}", "main", "refs/heads/seen")
    notes = GitNotes(ours, f"file://{remote}")
    notes.send_status(commit, Status("reconcile", CommitStatus.PENDING, "under way"))
    notes.send_status(commit, Status("reconcile/qwen", CommitStatus.FAILURE, "RolledBack \x1b[31m"))
    notes.send_status(commit, Status("reconcile", CommitStatus.FAILURE, "1 failed (qwen)"))
    shown = git("-C", str(remote), "notes", "--ref=reconcile", "show", commit)
    assert shown.splitlines() == [
        "reconcile: failure, 1 failed (qwen)",
        "reconcile/qwen: failure, RolledBack ?[31m",
    ]
    with pytest.raises(ForgeError, match="no full commit"):
        notes.send_status("--help", Status("reconcile", CommitStatus.PENDING, "x"))
    with pytest.raises(GitError):
        notes.send_status("f" * 40, Status("reconcile", CommitStatus.PENDING, "x"))
    with pytest.raises(GitError):
        GitNotes(ours, f"file://{tmp_path}/gone.git").send_status(
            commit, Status("reconcile", CommitStatus.SUCCESS, "x")
        )

"""What this installation publishes on a branch of its own: one commit, one file, nobody else's work written over."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from reconciler.core.conditions import CommitStatus
from reconciler.core.errors import UsageError
from reconciler.effects.state_branch import MESSAGE, StateBranch
from reconciler.reporting.base import ForgeError, Status
from reconciler.reporting.notes import STATUS_FILE, BranchStatuses
from reconciler.sources.git_binary import Credentials, Git, GitError
from reconciler.sources.own_branch import OwnBranch, own_branch


def git(*words: str) -> str:
    """Run git as a person does."""
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """Give a bare repository with specs on main."""
    work, bare = tmp_path / "work", tmp_path / "remote.git"
    git("init", "-q", "--bare", str(bare))
    git("init", "-q", str(work))
    (work / "qwen.yaml").write_text("kind: Server\n")
    git("-C", str(work), "add", "-A")
    git("-C", str(work), "commit", "-qm", "specs")
    git("-C", str(work), "push", "-q", str(bare), "HEAD:refs/heads/main")
    return bare


def branch_at(tmp_path: Path, remote: Path, name: str = "state", mirror: str = "m") -> OwnBranch:
    """Give a branch, written from a mirror of its own."""
    return own_branch(tmp_path / f"{mirror}.git", Credentials(), str(remote), name, "state.json")


def shown(remote: Path, name: str = "state") -> str:
    """Give the file as a build reads it."""
    return git("-C", str(remote), "show", f"{name}:state.json")


def test_the_branch_is_one_commit_with_the_newest_file(tmp_path: Path, remote: Path) -> None:
    """It does not grow: each writing takes the place of the one before, from whatever mirror."""
    for number, mirror in enumerate(["m", "m", "elsewhere"]):
        commit = branch_at(tmp_path, remote, mirror=mirror).write(b"%d\n" % number, MESSAGE)
        assert shown(remote) == f"{number}\n"
        assert git("-C", str(remote), "rev-list", "state").split() == [commit]


def test_a_branch_of_something_else_is_left_as_it_is(tmp_path: Path, remote: Path) -> None:
    """A name of a branch with specs, mistyped into the settings, loses nobody's work."""
    before = git("-C", str(remote), "rev-parse", "main")
    with pytest.raises(GitError, match=r"holds other files \('qwen.yaml'\); nothing was written"):
        branch_at(tmp_path, remote, "main").write(b"1\n", MESSAGE)
    assert git("-C", str(remote), "rev-parse", "main") == before


def test_what_somebody_pushes_meanwhile_is_not_written_over(
    tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushed with a lease on what was there when it was looked at; without it the other's commit would be gone."""
    ours = branch_at(tmp_path, remote)
    ours.write(b"1\n", MESSAGE)
    push, plain = Git.push_leased, git

    def late(self: Git, url: str, commit: str, ref: str, *, expected: str) -> None:
        plain("-C", str(remote), "update-ref", "refs/heads/state", "main")
        push(self, url, commit, ref, expected=expected)

    monkeypatch.setattr(Git, "push_leased", late)
    with pytest.raises(GitError, match="push"):
        ours.write(b"2\n", MESSAGE)
    assert git("-C", str(remote), "ls-tree", "--name-only", "state") == "qwen.yaml\n"


@pytest.mark.parametrize("name", ["--mirror", "a..b", "x.lock", "refs/../main", "a b"])
def test_a_name_that_could_be_something_else_is_refused(
    tmp_path: Path, remote: Path, name: str
) -> None:
    """It reaches git only as a name of a branch."""
    with pytest.raises(UsageError, match="no branch name"):
        branch_at(tmp_path, remote, name)


def test_a_remote_that_is_away_is_tried_again_with_the_newest_state(
    tmp_path: Path, remote: Path
) -> None:
    """What could not be pushed is not lost, and an older state never comes after a newer one."""
    ours = branch_at(tmp_path, remote)
    away, written = [True], threading.Event()

    def write(content: bytes, message: str) -> None:
        if away[0]:
            away[0] = False
            pushing.offer("newest")
            raise GitError("the remote is away")
        ours.write(content, message)
        written.set()

    pushing = StateBranch(write, pause_s=0.0)
    pushing.offer("older")
    assert written.wait(30)
    pushing.stop(30)
    assert shown(remote) == "newest"


def test_what_is_left_is_pushed_when_the_daemon_ends(tmp_path: Path, remote: Path) -> None:
    """A pause is not waited for then."""
    pushed: list[bytes] = []
    first = threading.Event()

    def write(content: bytes, _message: str) -> None:
        pushed.append(content)
        first.set()

    pushing = StateBranch(write, pause_s=3600.0)
    pushing.offer("1")
    assert first.wait(30)
    pushing.offer("2")
    pushing.stop(30)
    assert pushed == [b"1", b"2"]


def test_statuses_are_kept_as_a_file_with_the_newest_commit_first(
    tmp_path: Path, remote: Path
) -> None:
    """The same lines as in a note, for forges that show none."""
    branch = own_branch(tmp_path / "s.git", Credentials(), str(remote), "status", STATUS_FILE)
    statuses = BranchStatuses(branch)
    for commit in ("a" * 40, "b" * 40):
        statuses.send_status(commit, Status("reconcile", CommitStatus.PENDING, "under way"))
    statuses.send_status("b" * 40, Status("reconcile/qwen", CommitStatus.FAILURE, "bad \x1b[31m"))
    assert git("-C", str(remote), "show", f"status:{STATUS_FILE}").splitlines() == [
        "b" * 40,
        "    reconcile: pending, under way",
        "    reconcile/qwen: failure, bad ?[31m",
        "a" * 40,
        "    reconcile: pending, under way",
    ]
    with pytest.raises(ForgeError, match="no full commit"):
        statuses.send_status("--help", Status("reconcile", CommitStatus.PENDING, "x"))

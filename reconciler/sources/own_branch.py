"""A branch that this installation alone writes: what it publishes, always one commit without a past.

Made by git's plumbing in a bare mirror of its own and pushed with a lease, so that what somebody else pushed meanwhile is never
written over. A branch that holds anything else is refused: a branch of specs named by mistake stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reconciler.sources.git_binary import Credentials, Git, GitError, checked_branch, checked_url

IDENTITY: Final = {"user.name": "reconcile", "user.email": "reconcile@localhost"}
THEIRS: Final = "refs/reconciler/theirs"
OURS: Final = "refs/reconciler/ours"
NAMES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class OwnBranch:
    """One branch of one remote, and the only file that it may hold."""

    git: Git
    url: str
    branch: str
    file: str

    def write(self, content: bytes, message: str) -> str:
        """Make the branch one commit with this file, and give the commit.

        Raises:
            GitError: The remote is away or lets nobody write, somebody else pushed there just now, or the branch is not ours.
        """
        git, ref = self.git, f"refs/heads/{self.branch}"
        git.init()
        tip = git.tip(self.url, ref)
        self._refuse_what_is_not_ours(tip)
        blob = git.read("hash-object", "-w", "--stdin", "--no-filters", stdin=content)
        entry = f"100644 blob {blob.decode().strip()}\t{self.file}\0".encode()
        tree = git.read("mktree", "-z", stdin=entry).decode().strip()
        commit = (
            git.read("commit-tree", tree, "-F", "-", stdin=message.encode(), extra=IDENTITY)
            .decode()
            .strip()
        )
        git.read("update-ref", OURS, commit)
        git.push_leased(self.url, commit, ref, expected=tip)
        # What was published before is of no use to anybody; an hour is more than another run of ours takes.
        git.read("prune", "--expire=1.hour.ago")
        return commit

    def _refuse_what_is_not_ours(self, tip: str) -> None:
        if not tip or tip == self._last():
            return
        self.git.fetch(self.url, self.branch, THEIRS)
        listed = self.git.read("ls-tree", "--name-only", "-z", "--end-of-options", THEIRS)
        names = [n for n in listed.decode("utf-8", "replace").split("\0") if n]
        others = [n for n in names if n != self.file]
        if others:
            shown = ", ".join(repr(n) for n in others[:NAMES_SHOWN])
            message = f"the branch {self.branch} of {self.url} holds other files ({shown}); nothing was written: name a branch that is for {self.file} alone"
            raise GitError(message)

    def _last(self) -> str:
        return self.git.read("for-each-ref", "--format=%(objectname)", OURS).decode().strip()


def own_branch(
    mirror: Path, credentials: Credentials, url: str, branch: str, file: str
) -> OwnBranch:
    """Give the branch.

    Raises:
        UsageError: The URL or the name is none that is used here.
    """
    return OwnBranch(Git(mirror, credentials), checked_url(url), checked_branch(branch), file)


__all__ = ["OwnBranch", "own_branch"]

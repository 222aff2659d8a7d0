"""Statuses in git, with no forge at all: as notes (`git log --notes=reconcile`), or as one file on a branch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from reconciler.reporting.base import COMMIT, ForgeError, Status
from reconciler.sources.git_binary import Git, checked_url
from reconciler.sources.own_branch import OwnBranch

REF: Final = "refs/notes/reconcile"
IDENTITY: Final = {"user.name": "reconcile", "user.email": "reconcile@localhost"}
MAX_COMMITS: Final = 32
MAX_LINE: Final = 400


@dataclass
class GitNotes:
    """One note a commit, with a line a status. The ref is ours alone: what others wrote to it is written over.

    `git` is the mirror that the specs are read from: it has the commits. With a `url` the notes are pushed there, which needs
    credentials that may write.
    """

    git: Git
    url: str = ""
    _lines: OrderedDict[str, dict[str, str]] = field(default_factory=OrderedDict)

    def send_status(self, commit: str, status: Status) -> None:
        """Write the commit's note anew.

        Raises:
            ForgeError: There is no such commit.
            GitError: It cannot be written or pushed.
        """
        if not COMMIT.match(commit):
            raise ForgeError(f"{commit!r} is no full commit id; no note was written")
        self.git.read(
            "cat-file", "-e", f"{commit}^{{commit}}"
        )  # A note on nothing would be kept for ever.
        lines = noted(self._lines, commit, status)
        text = "\n".join(lines[context] for context in sorted(lines)) + "\n"
        self.git.read(
            "notes", f"--ref={REF}", "add", "--force", "--file=-", "--end-of-options", commit,
            stdin=text.encode("utf-8", "replace"), extra=IDENTITY,
        )  # fmt: skip
        if self.url:
            self.git.push(checked_url(self.url), REF)


def noted(kept: OrderedDict[str, dict[str, str]], commit: str, status: Status) -> dict[str, str]:
    """Keep a status among those of the newest commits, and give its commit's lines."""
    lines = kept.setdefault(commit, {})
    line = f"{status.context}: {status.state.value}, {status.description}"
    lines[status.context] = "".join(c if c.isprintable() else "?" for c in line)[:MAX_LINE]
    while len(kept) > MAX_COMMITS:
        kept.popitem(last=False)
    return lines


STATUS_FILE: Final = "statuses.txt"


@dataclass
class BranchStatuses:
    """The statuses of the newest commits as one file on a branch, newest first."""

    branch: OwnBranch
    _lines: OrderedDict[str, dict[str, str]] = field(default_factory=OrderedDict)

    def send_status(self, commit: str, status: Status) -> None:
        """Write the file anew.

        Raises:
            ForgeError: It is no commit.
            GitError: It cannot be pushed.
        """
        if not COMMIT.match(commit):
            raise ForgeError(f"{commit!r} is no full commit id; no status was written")
        noted(self._lines, commit, status)
        parts = [
            "\n".join([name, *(f"    {lines[context]}" for context in sorted(lines))])
            for name, lines in reversed(self._lines.items())
        ]
        self.branch.write(("\n".join(parts) + "\n").encode("utf-8", "replace"), "Statuses\n")

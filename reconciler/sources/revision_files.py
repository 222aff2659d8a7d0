"""Specs as they were at a commit of the working tree's own repository, read from the commit's tree, never from a checkout.

For comparing, not for deciding what runs: `git.py` is the source of that. What is equal to a file at hand is not read
again: a repository of ten thousand specs of which three changed costs one listing and three blobs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reconciler.core.errors import Problem, UsageError
from reconciler.core.yaml_text import MAX_BYTES
from reconciler.sources.directory import MAX_FILES, MAX_TOTAL_BYTES, SUFFIXES
from reconciler.sources.git_binary import Git, GitError

MAX_REVISION: Final = 200
REGULAR: Final = frozenset({b"100644", b"100755", b"100664"})


@dataclass(frozen=True, slots=True)
class RevisionFiles:
    """The spec files of one commit by the path under which the working tree's are shown.

    `same` are those that are byte for byte what the working tree holds.
    """

    commit: str
    files: Mapping[str, bytes]
    same: frozenset[str]
    unread: tuple[Problem, ...] = ()


def files_at(path: Path, revision: str, at_hand: Mapping[str, bytes]) -> RevisionFiles:
    """Read the specs below a path as they were at a revision; a path that was not there then is empty.

    Raises:
        UsageError: There is no repository around the path, or no such revision in it.
        GitError: git cannot read what is there.
    """
    git_dir, inside = repository_of(path)
    git = Git(git_dir)
    commit = commit_of(git, revision)
    listing = git.read(
        "ls-tree", "-r", "-z", "-l", "--full-tree", "--end-of-options", commit,
        *([inside] if inside else []),
    )  # fmt: skip
    wanted: dict[str, str] = {}
    files: dict[str, bytes] = {}
    unread: list[Problem] = []
    ids = _blob_ids(at_hand, len(commit))
    total = 0
    for record in filter(None, listing.split(b"\0")):
        head, _, name = record.partition(b"\t")
        mode, _kind, blob, size = head.split()
        shown = _shown(path, inside, os.fsdecode(name))
        if shown is None:
            continue
        if mode not in REGULAR:
            unread.append(Problem(shown, 0, 0, "is not a regular file; links are not followed"))
        elif ids.get(shown) == blob.decode():
            files[shown] = at_hand[shown]
        elif int(size) > MAX_BYTES:
            unread.append(Problem(shown, 0, 0, f"is larger than {MAX_BYTES // 1024} kB"))
        else:
            wanted[shown] = blob.decode()
            total += int(size)
        if len(files) + len(wanted) > MAX_FILES or total > MAX_TOTAL_BYTES:
            message = f"{path} at {revision} holds more than {MAX_FILES} files or {MAX_TOTAL_BYTES >> 20} MiB of specs"
            raise UsageError(message)
    same = frozenset(files)
    files |= _blobs(git, wanted)
    return RevisionFiles(commit, files, same, tuple(unread))


def head_of(path: Path) -> str:
    """Give the commit that is checked out around a path; empty where there is none, or no repository.

    What is not committed is not in it: callers say so beside it.
    """
    try:
        git_dir, _ = repository_of(path)
        return commit_of(Git(git_dir), "HEAD")
    except (UsageError, GitError):
        return ""


def repository_of(path: Path) -> tuple[Path, str]:
    """Find the repository around a path, and the path inside it. Looks at files only: git is not asked.

    Raises:
        UsageError: There is none.
    """
    whole = Path(os.path.realpath(path))
    for folder in (whole, *whole.parents):
        mark = folder / ".git"
        if mark.is_dir():
            return mark, whole.relative_to(folder).as_posix().removeprefix(".")
        if mark.is_file():
            text = mark.read_bytes()[:4096].decode("utf-8", "replace")
            if text.startswith("gitdir:"):
                target = Path(text.removeprefix("gitdir:").strip())
                return folder / target, whole.relative_to(folder).as_posix().removeprefix(".")
    message = (
        f"{path} is in no git repository, so that there is nothing to compare it with by --base"
    )
    raise UsageError(message)


def commit_of(git: Git, revision: str) -> str:
    """Give the full id of the commit that a person named.

    Raises:
        UsageError: There is none of that name here.
    """
    if (
        not revision
        or len(revision) > MAX_REVISION
        or revision.startswith("-")
        or ":" in revision
        or not revision.isprintable()
        or " " in revision
    ):
        message = f"{revision!r} is no revision that can be compared with"
        raise UsageError(message)
    try:
        found = git.read(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )
    except GitError as error:
        message = f"there is no commit {revision!r} in this clone; in CI, fetch it first (fetch-depth: 0, or GIT_DEPTH: 0)"
        raise UsageError(message) from error
    return found.decode().strip()


def _shown(path: Path, inside: str, name: str) -> str | None:
    """Give the path as the directory source shows it; None for what it would not read."""
    if inside and name == inside:
        return str(path) if name.endswith(SUFFIXES) else None
    below = name.removeprefix(f"{inside}/") if inside else name
    if inside and below == name:
        return None
    parts = below.split("/")
    if not below.endswith(SUFFIXES) or any(part.startswith(".") for part in parts):
        return None
    return str(path / below)


def _blob_ids(files: Mapping[str, bytes], digits: int) -> dict[str, str]:
    """Name contents as git does, by the repository's own digest."""
    digest = hashlib.sha256 if digits == 64 else _sha1
    return {
        name: digest(b"blob %d\0" % len(content) + content).hexdigest()
        for name, content in files.items()
    }


def _sha1(data: bytes) -> hashlib._Hash:
    return hashlib.sha1(data, usedforsecurity=False)


def _blobs(git: Git, wanted: Mapping[str, str]) -> dict[str, bytes]:
    """Read many blobs in one run; git answers in the order of the questions."""
    if not wanted:
        return {}
    answer = git.read(
        "cat-file", "--batch", stdin="".join(f"{b}\n" for b in wanted.values()).encode()
    )
    found: dict[str, bytes] = {}
    at = 0
    for name, blob in wanted.items():
        end = answer.index(b"\n", at)
        words = answer[at:end].split()
        if len(words) != 3 or words[1] != b"blob":
            message = f"the blob {blob[:12]} of {name} is not in this clone; fetch it whole (no partial clone)"
            raise GitError(message)
        start = end + 1
        at = start + int(words[2]) + 1
        found[name] = answer[start : at - 1]
    return found

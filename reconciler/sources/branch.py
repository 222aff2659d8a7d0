"""One commit on a new branch of the repository that a spec file lies in, without touching its working tree or index.

By git's plumbing: no hook runs, nothing is checked out, nobody's half-made changes come along.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from reconciler.core.errors import UsageError
from reconciler.sources.git_binary import GitError

LIMIT_S: Final = 60.0


def commit_on_branch(path: Path, before: bytes, content: bytes, branch: str, message: str) -> str:
    """Commit new content of one file on top of HEAD as a new branch, and give the commit.

    Args:
        path: The file in the working tree.
        before: What the new content was made from: HEAD must have the same.
        content: The new content.
        branch: A name that no branch has yet.
        message: The whole commit message.

    Raises:
        UsageError: It lies in no repository, HEAD has other content, or the branch exists or cannot be named so.
        GitError: git failed.
    """
    folder = path.resolve().parent
    top = Path(_git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
    inside = path.resolve().relative_to(top).as_posix()
    head = _git(top, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    if branch.startswith("-") or _status(top, "check-ref-format", "--branch", branch) != 0:
        raise UsageError(f"{branch!r} is no name of a branch")
    reference = f"refs/heads/{branch}"
    if _status(top, "show-ref", "--verify", "--quiet", reference) == 0:
        raise UsageError(f"the branch {branch} exists already; nothing was written")
    entry = _git(top, "ls-tree", "-z", head, "--", inside).decode("utf-8", "replace")
    if not entry or _git(top, "cat-file", "blob", f"{head}:{inside}") != before:
        raise UsageError(
            f"{path}: has changes that are not committed; commit them first, so that the branch shows one change"
        )
    blob = _git(top, "hash-object", "-w", "--stdin", "--no-filters", stdin=content).decode().strip()
    with tempfile.TemporaryDirectory(prefix="reconcile-") as directory:
        index = {"GIT_INDEX_FILE": str(Path(directory) / "index")}
        _git(top, "read-tree", head, environment=index)
        mode = entry.split(" ", 1)[0]
        _git(top, "update-index", "--cacheinfo", f"{mode},{blob},{inside}", environment=index)
        tree = _git(top, "write-tree", environment=index).decode().strip()
    commit = (
        _git(top, "commit-tree", tree, "-p", head, "-F", "-", stdin=message.encode())
        .decode()
        .strip()
    )
    _git(top, "update-ref", reference, commit, "0" * len(commit))
    return commit


def _run(
    folder: Path, words: tuple[str, ...], stdin: bytes, environment: dict[str, str]
) -> subprocess.CompletedProcess[bytes]:
    argv = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", *words]
    try:
        return subprocess.run(  # noqa: S603  (a fixed argv; what varies stands behind names of options)
            argv,
            cwd=folder,
            input=stdin,
            env={**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **environment},
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise GitError(
            "there is no git on this machine; install it, or leave --branch out"
        ) from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {words[0]} did not end within {LIMIT_S:g} s") from None


def _git(
    folder: Path, *words: str, stdin: bytes = b"", environment: dict[str, str] | None = None
) -> bytes:
    done = _run(folder, words, stdin, environment or {})
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode("utf-8", "replace").strip()[:500]
    if words[:2] == ("rev-parse", "--show-toplevel"):
        raise UsageError(
            f"{folder} lies in no git repository; leave --branch out, or write the spec there"
        )
    raise GitError(
        f"git {words[0]}: {said or f'exit status {done.returncode}'}; nothing was committed"
    )


def _status(folder: Path, *words: str) -> int:
    return _run(folder, words, b"", {}).returncode


__all__ = ["commit_on_branch"]

"""Where specs come from. A source gives one consistent snapshot of files; what is in them is others' matter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from reconciler.core.errors import Problem


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that a snapshot is of: what reporters name, and where they put their statuses."""

    id: str
    author: str
    at: float
    subject: str
    branch: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All spec files as they were at one moment.

    `files` holds their content by the path to show people; `root` is what those paths begin with. `unread` is
    what was found and refused: with any of it the snapshot does not say everything, and nothing may be taken
    for removed because it is not here. `version` names the content, whoever asks and whenever. `commit` is None for files
    that no repository answers for. `stale` says why something newer could not be had or may not be used; the files are
    then those of the last accepted commit.
    """

    root: str
    files: Mapping[str, bytes]
    unread: tuple[Problem, ...]
    version: str
    commit: Commit | None = None
    stale: str = ""


class Source(Protocol):
    """One place that specs are read from."""

    def snapshot(self) -> Snapshot:
        """Read everything once.

        Raises:
            SpecError: There is nothing to read; never the same as "no servers wanted".
        """
        ...


def version_of(root: str, files: Mapping[str, bytes]) -> str:
    """Digest names and content, names relative to the root, so that a moved checkout is the same version."""
    total = hashlib.sha256()
    for name in sorted(files):
        relative = name.removeprefix(root).encode("utf-8", "surrogateescape")
        total.update(b"%d:%b%d:" % (len(relative), relative, len(files[name])))
        total.update(files[name])
    return total.hexdigest()

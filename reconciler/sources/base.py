"""Where specs come from. A source gives one consistent snapshot of files; what is in them is others' matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from reconciler.core.errors import Problem


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All spec files as they were at one moment.

    `files` holds their content by the path to show people; `root` is what those paths begin with. `unread` is
    what was found and refused: with any of it the snapshot does not say everything, and nothing may be taken
    for removed because it is not here. `version` names the content, whoever asks and whenever.
    """

    root: str
    files: Mapping[str, bytes]
    unread: tuple[Problem, ...]
    version: str


class Source(Protocol):
    """One place that specs are read from."""

    def snapshot(self) -> Snapshot:
        """Read everything once.

        Raises:
            SpecError: There is nothing to read; never the same as "no servers wanted".
        """
        ...

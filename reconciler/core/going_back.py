"""Which revision a person means who says "the one before". Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reconciler.core.conditions import Outcome
from reconciler.core.live import Records

SWEPT = "Swept"
"""The outcome in the line of history that a sweep leaves; `swept` in it names the revisions that it tried."""


def good_before(records: Records, history: Sequence[Mapping[str, Any]]) -> str:
    """Give the last revision that was applied here before the applied one, is kept and was not rejected; "" where none is.

    The host's history says in which order; names of revisions are digests and have none. Where the history does not reach
    so far back, a single kept one is taken, and of several none is guessed. What a sweep tried was never chosen by anybody.
    """
    applied = records.applied.revision if records.applied else ""
    rejected = {r.revision for r in records.rejected}
    good = [r for r in records.revisions if r != applied and r not in rejected]
    swept: set[str] = set()
    for line in reversed(history):
        if line.get("outcome") == SWEPT:
            swept.update(map(str, line.get("swept") or ()))
        elif line.get("revision") in swept:
            continue
        elif line.get("outcome") == Outcome.APPLIED.value and line.get("revision") in good:
            return str(line["revision"])
    left = [r for r in good if r not in swept]
    return left[0] if len(left) == 1 else ""

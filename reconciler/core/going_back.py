"""Which revision a person means who says "the one before". Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reconciler.core.conditions import Outcome
from reconciler.core.live import Records


def good_before(records: Records, history: Sequence[Mapping[str, Any]]) -> str:
    """Give the last revision that was applied here before the applied one, is kept and was not rejected; "" where none is.

    The host's history says in which order; names of revisions are digests and have none. Where the history does not reach
    so far back, a single kept one is taken, and of several none is guessed.
    """
    applied = records.applied.revision if records.applied else ""
    rejected = {r.revision for r in records.rejected}
    good = [r for r in records.revisions if r != applied and r not in rejected]
    for line in reversed(history):
        if line.get("outcome") == Outcome.APPLIED.value and line.get("revision") in good:
            return str(line["revision"])
    return good[0] if len(good) == 1 else ""

"""Which revision `rollback` goes to: the one that was applied before, whatever its digest sorts as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from reconciler.core.going_back import good_before
from reconciler.core.live import Records

A, B, C = "a" * 64, "b" * 64, "c" * 64


def records(applied: str, *rejected: str, kept: tuple[str, ...] = (A, B, C)) -> Records:
    """Give what the host keeps; names are sorted, as it lists them."""
    found = SimpleNamespace(
        applied=SimpleNamespace(revision=applied),
        rejected=tuple(SimpleNamespace(revision=r) for r in rejected),
        revisions=kept,
    )
    return cast("Records", found)


def line(revision: str, outcome: str = "Applied") -> dict[str, Any]:
    """Give a line of the history."""
    return {"outcome": outcome, "revision": revision}


@pytest.mark.parametrize(
    ("history", "rejected", "expected"),
    [
        ([line(C), line(A), line(B)], (), A),
        ([line(A), line(C), line(B)], (), C),
        ([line(C), line(A), line(B)], (A,), C),
        ([line(A), line(C, "RolledBack"), line(B)], (), A),
        ([line(A), line(B), line(A), line(B)], (), A),
        ([line(B)], (), ""),
        ([], (A,), C),
        ([line(A), line(B), line(C), line(B), {"outcome": "Swept", "revision": B, "swept": [C]}], (), A),
        ([line(B), line(C), line(B), {"outcome": "Swept", "revision": B, "swept": [C]}, line(C), line(B)], (), C),
    ],
    ids=["by time", "not by name", "not a rejected one", "not a failed one", "back and forth", "never a guess", "the only one", "not a point of a sweep", "unless it was chosen later"],
)  # fmt: skip
def test_going_back_follows_the_history(
    history: list[dict[str, Any]], rejected: tuple[str, ...], expected: str
) -> None:
    """B is applied; what the host's history says was applied before it comes back."""
    assert good_before(records(B, *rejected), history) == expected

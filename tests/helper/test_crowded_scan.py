"""The scan for holders on a crowd of real processes, beside one that looks at every descriptor of every thread."""

from __future__ import annotations

import pytest
from benchmarks.crowded import in_a_namespace

pytestmark = pytest.mark.lab

HOLDERS = 7
"""Of `crowd.py`: by the leader's table, by a thread's own table, behind a dead leader, by a mapping, by another path, forked."""


def test_a_leaders_table_is_enough_where_kcmp_says_so(lab: object) -> None:
    """Looking at one table where the threads share it finds every holder that looking at each thread finds (S1).

    On a kernel that cannot compare tables as well; and a scan of the leaders alone misses some, so the comparison is needed.
    """
    assert lab
    scans = ("ours", "every-thread", "old-kernel", "leaders-only")
    found = in_a_namespace(40, 200, 400, scans)
    assert found["threads"] >= 200
    assert len(found["every-thread"]["held"]) == HOLDERS
    assert found["ours"]["held"] == found["every-thread"]["held"]
    assert found["old-kernel"]["held"] == found["every-thread"]["held"]
    assert set(found["leaders-only"]["held"]) < set(found["ours"]["held"])

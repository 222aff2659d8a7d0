"""Every single fault at every request of three rollouts: the rules hold at each instant, and the end is the undisturbed one."""

from __future__ import annotations

from functools import cache

import pytest

from reconciler.engines import custom
from reconciler.lab.oracle import ViolationError
from reconciler.lab.schedule import STORIES, Ended, Fault, run

ENGINES = {"custom": custom}
FAULTS = [fault for fault in Fault if fault is not Fault.NONE]


@cache
def undisturbed(story: str) -> Ended:
    """Give the run without a fault, which every other must end like."""
    return run(STORIES[story], Fault.NONE, 0, ENGINES)


@pytest.mark.parametrize("story", sorted(STORIES))
def test_the_undisturbed_story_ends_as_told(story: str) -> None:
    """S1 to S13 hold without any fault, the story has its end, and the good revision is what runs (L1, L2)."""
    ended = undisturbed(story)
    assert ended.state["left"] == []
    assert ended.state["applied"] is not None
    assert len(ended.state["rejected"]) == (1 if story == "gate-fails" else 0)
    assert ended.starts == (2 if story == "gate-fails" else 1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("story", sorted(STORIES))
def test_a_fault_at_any_request_changes_nothing_in_the_end(story: str, fault: Fault) -> None:
    """S1 to S13 hold after every event, and the fleet settles where it would have without the fault (L1, L2, L3, L5)."""
    expected = undisturbed(story)
    wrong = []
    for index in range(1, expected.requests + 1):
        try:
            ended = run(STORIES[story], fault, index, ENGINES)
        except ViolationError as violation:
            wrong.append(f"{violation}")
        else:
            if ended.state == expected.state:
                continue
            wrong.append(f"ended otherwise: {ended.results}")
        wrong.append(f"  replay: python -m reconciler.lab.schedule {story} {fault.value} {index}")
    assert not wrong, "\n".join(wrong)

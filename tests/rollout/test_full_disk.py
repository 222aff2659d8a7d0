"""A host whose disk is full, or read-only, from some moment of a rollout on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
from steering_stage import Stage

from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.event import Event
from reconciler.reconcile import act, survey

Kind = Literal["full", "read_only"]
RECORDS, LEASES = "/var/lib/reconciler", "/run/reconciler"


def rolled(
    kind: Kind, place: str, *, events: int
) -> tuple[Stage, Mapping[str, ServerResult], float]:
    """Change a server that serves; after so many events nothing can be written under `place` any more."""
    stage = Stage()
    stage.apply(stage.text(llm="one 0 10"))
    files, seen = stage.hosts["one"].host.files, list[Event]()

    def watch(event: Event) -> None:
        seen.append(event)
        if len(seen) == events:
            getattr(files, kind).append(place)

    if not events:
        getattr(files, kind).append(place)
    found = survey(stage.fleet(stage.text(llm="one 0 11")), stage.controller)
    began = stage.controller.clock.now()
    results = {r.server: r for r in act(found, stage.controller, watch)}
    return stage, results, stage.controller.clock.now() - began


@pytest.mark.parametrize("kind", ["full", "read_only"])
@pytest.mark.parametrize("place", [RECORDS, LEASES])
def test_a_host_that_can_keep_no_lease_refuses_at_once(kind: Kind, place: str) -> None:
    """Nothing is begun and nothing waited for: it asked for the lease again and again (L6). The server serves on."""
    stage, results, took_s = rolled(kind, place, events=0)
    ended = results["llm"]
    assert (ended.outcome, ended.reason) == (Outcome.REFUSED, Reason.PREFLIGHT)
    words = {"full": "the disk is full", "read_only": "the file system is read-only"}
    assert words[kind] in ended.sentence
    assert "; nothing was changed" in ended.sentence
    assert "Errno" not in ended.sentence
    assert took_s < 5
    assert stage.serving("llm")


@pytest.mark.parametrize("events", [*range(2, 22)])
def test_a_disk_that_fills_up_on_the_way_ends_the_rollout_in_time(events: int) -> None:
    """However far it came, it ends, says why in words of ours, and the host's own timer is left to bring the server back (L3, L6)."""
    stage, results, took_s = rolled("full", RECORDS, events=events)
    ended = results["llm"]
    assert took_s < 600
    if ended.outcome is Outcome.APPLIED:
        return
    assert "disk is full" in ended.sentence
    assert "Errno" not in ended.sentence
    stage.hosts["one"].host.files.full.clear()
    stage.settle(stage.text(llm="one 0 11"), passes=4)
    assert stage.serving("llm")

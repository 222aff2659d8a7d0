"""`reconcile release` on a lab host, as a person runs it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_controller import Controller, HostView

from reconciler.lab.faults import break_

pytestmark = pytest.mark.lab


def proof_in(out: str) -> dict[str, Any]:
    """Give the proof of a run stream."""
    (found,) = [line for text in out.splitlines() if (line := json.loads(text))["type"] == "proof"]
    assert isinstance(found, dict)
    return found


def test_a_server_is_released_held_and_comes_back(controller: Controller, view: HostView) -> None:
    """A dry run leaves no trace; the release ends even an escaped child that ignores TERM, and nobody else; `resume` ends the hold."""
    controller.commit("one")
    assert controller.apply().ended == (0, "Applied", "")
    before = view.server()
    files = view.text("/var/lib/reconciler/llm/journal.ndjson")
    plan = controller.run("release", controller.host.name, "--gpus", "0", "--dry-run", "-o", "json")
    assert plan.code == 0, plan.err
    assert [s["server"] for s in plan.json()["would_stop"]] == ["llm"]
    assert view.server() == before
    assert view.text("/var/lib/reconciler/llm/journal.ndjson") == files
    break_(controller.host, "escaped", unit=view.unit)
    released = controller.run(
        "release", controller.host.name, "--gpus", "0", "--yes", "--reason", "a test", "-o", "json"
    )
    assert released.code == 0, released.out + released.err
    (card,) = proof_in(released.out)["gpus"]
    assert card["verdict"] == "released"
    assert card["used_mib"] <= card["limit_mib"]
    assert {h["class"] for h in card["holders"]} == {"owned"}
    assert any("SIGTERM" in word for h in card["holders"] for word in h["done"])
    assert view.state() == "inactive"
    assert view.holders() == {}
    assert controller.apply().ended == (9, "Waiting", "Hold")
    status = controller.run("status", "-o", "json")
    assert "a test" in status.json()["servers"][0]["sentence"]
    assert controller.run("resume", "llm").code == 0
    assert controller.apply().ended == (0, "Applied", "")

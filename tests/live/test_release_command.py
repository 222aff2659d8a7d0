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


@pytest.mark.nightly
def test_a_card_that_asks_for_a_reset_is_offered_one_and_refused_it_in_a_container(
    controller: Controller, view: HostView
) -> None:
    """Rung 9: named wrong, nothing is done; not named, it is only offered; named right, this host, a container, refuses it all the same."""
    controller.commit("one")
    assert controller.apply().ended == (0, "Applied", "")
    uuid = view.record("bindings")["gpus"][0]
    release = ("release", controller.host.name, "--gpus", "0", "--yes", "-o", "json")
    wrong = controller.run(
        *release, "--allow-gpu-reset", "GPU-00000000-0000-4000-8000-000000000000"
    )
    assert wrong.code == 1, wrong.out + wrong.err
    assert "nothing was done" in wrong.out + wrong.err
    assert view.state() == "active"
    fault = json.dumps({"recovery": {"0": "Reset"}, "leak_mib": {"0": 3000}})
    controller.host.check(["sh", "-c", "cat >/run/fakegpu/fault.json"], fault.encode())
    offered = controller.run(*release)
    assert offered.code in {1, 4}, offered.out + offered.err
    (card,) = proof_in(offered.out)["gpus"]
    assert card["verdict"] == "fault", card
    assert card["next"]["rung"] == 9
    assert view.state() in {"inactive", "failed"}
    done = controller.run(*release, "--allow-gpu-reset", uuid)
    assert done.code == offered.code, done.out + done.err
    assert "not in a container" in done.out + done.err
    assert b"3000" in controller.host.exec(["cat", "/run/fakegpu/fault.json"]).stdout

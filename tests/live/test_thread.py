"""The main job from commit to host, as a person does it: deploy, change, stop, steer, fail, go back."""

from __future__ import annotations

import json

import pytest
from live_controller import Controller, HostView

pytestmark = pytest.mark.lab

SLOW = ("--speed", "20")
"""A third of what the gate asks for."""


def test_a_committed_spec_becomes_a_server_and_a_second_pass_changes_nothing(
    controller: Controller, view: HostView
) -> None:
    """Deploy ends Applied with the server answering; the pass after it is in sync and leaves no trace (L10, S10)."""
    controller.commit("one")
    first = controller.apply()
    assert first.ended == (0, "Applied", ""), first.err
    assert [e["type"] for e in first.events][:2] == ["version", "plan"]
    assert first.events[-1]["type"] == "summary"
    shown = [step for step in first.steps if step not in {"drain", "stop"}]
    assert shown == [
        "preflight",
        "acquire",
        "disarm",
        "release",
        "install",
        "start",
        "ready",
        "gate",
        "commit",
    ]
    view.serves("one")
    assert view.text("/run/reconciler/llm.lease") == ""
    applied = view.record("applied")
    assert applied["revision"] == first.outcome["revision"]
    assert view.show("UnitFileState")["UnitFileState"] == "enabled"
    before = (view.server(), view.mutations(), view.record("fence"))
    second = controller.apply()
    assert second.ended == (0, "InSync", "")
    assert (view.server(), view.mutations(), view.record("fence")) == before


def test_a_changed_spec_replaces_the_server(controller: Controller, view: HostView) -> None:
    """A second commit ends Applied with the new process only, and history tells both."""
    controller.commit("one")
    assert controller.apply().ended == (0, "Applied", "")
    old = view.server()
    controller.commit("two")
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")
    assert old is not None
    assert view.process(old[0]) != old
    assert view.show("NRestarts")["NRestarts"] == "0"
    told = controller.run("history", "llm", "-o", "json").json()
    assert [r["outcome"] for r in told["rollouts"]] == ["Applied", "Applied"]
    assert len({r["revision"] for r in told["rollouts"]}) == 2


def test_a_dry_run_changes_nothing_and_a_stale_hash_is_refused(
    controller: Controller, view: HostView
) -> None:
    """`--dry-run` leaves host and records as they are (S20); `--expect` with another hash exits 5, with its own it acts."""
    controller.commit("one")
    assert controller.apply().code == 0
    controller.commit("two")
    before = (view.server(), view.mutations(), view.record("fence"))
    plan = controller.run("--dry-run", "-o", "json")
    assert plan.code == 0
    assert plan.json()["changes"] is True
    assert controller.run("--dry-run", "--detailed-exitcode").code == 2
    stale = controller.run("--expect", "0" * 12, "--yes")
    assert stale.code == 5
    assert plan.json()["hash"] in stale.err
    assert (view.server(), view.mutations(), view.record("fence")) == before
    done = controller.run("--expect", plan.json()["hash"], "-o", "json")
    assert done.ended == (0, "Applied", "")
    view.serves("two")


def test_nobody_says_yes_so_nothing_is_done(controller: Controller, view: HostView) -> None:
    """Without a terminal, `--yes` or `--expect` the plan is shown and not carried out."""
    controller.commit("one")
    done = controller.run()
    assert done.code == 2
    assert "nothing was done" in done.err
    assert view.show("LoadState")["LoadState"] == "not-found"
    assert view.mutations() == []


def test_a_server_is_stopped_and_comes_back(controller: Controller, view: HostView) -> None:
    """`state: stopped` ends with free GPUs and a unit that stays down; `running` brings the same revision back."""
    controller.commit("one")
    assert controller.apply().code == 0
    controller.set(state="stopped")
    assert controller.apply().ended == (0, "Stopped", "")
    assert (view.state(), view.model()) == ("inactive", "")
    assert view.used_mib() < 100
    assert view.show("UnitFileState")["UnitFileState"] == "disabled"
    assert view.left() == []
    before = view.mutations()
    assert controller.apply().ended == (0, "Stopped", "")
    assert view.mutations() == before
    controller.set(state="running")
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("one")
    assert view.show("UnitFileState")["UnitFileState"] == "enabled"


def test_a_suspended_server_is_left_alone(controller: Controller, view: HostView) -> None:
    """`suspend: true` exits 9 and touches nothing, whatever else the commit changes (S6, L11)."""
    controller.commit("one")
    assert controller.apply().code == 0
    before = (view.server(), view.mutations())
    controller.commit("two", suspend=True)
    assert controller.apply().ended == (9, "Waiting", "Suspended")
    assert (view.server(), view.mutations()) == before
    controller.commit("two")
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")


def test_a_failed_gate_brings_the_old_revision_back_and_is_remembered(
    controller: Controller, view: HostView
) -> None:
    """Exit 3 with the old revision serving and applied; the next pass refuses the bad one; `retry` tries it once more (L2)."""
    controller.commit("one")
    good = controller.apply().outcome["revision"]
    controller.commit("slow", *SLOW)
    failed = controller.apply()
    assert failed.ended == (3, "RolledBack", "GateFailed"), failed.err
    assert [e["verdict"] for e in failed.events if e["type"] == "verdict"] == ["fail"]
    view.serves("one")
    assert view.record("applied")["revision"] == good
    before = (view.server(), view.mutations())
    again = controller.apply()
    assert again.ended == (1, "Refused", "RejectedBefore"), again.err
    assert (view.server(), view.mutations()) == before
    assert controller.run("retry", "llm").code == 0
    assert controller.apply().ended == (3, "RolledBack", "GateFailed")
    view.serves("one")
    told = controller.run("history", "llm", "-o", "json").json()
    assert [r["outcome"] for r in told["rollouts"]] == ["Applied", "RolledBack", "RolledBack"]


def test_a_server_that_dies_at_load_is_rolled_back(controller: Controller, view: HostView) -> None:
    """A flag that passes preflight and ends the process while it loads: exit 3, the old revision serving, no restart loop."""
    controller.commit("one")
    assert controller.apply().code == 0
    controller.commit("two", "--crash-on-start")
    before = view.starts()
    failed = controller.apply()
    assert failed.code == 3, failed.err
    assert failed.outcome["outcome"] == "RolledBack"
    assert failed.outcome["reason"] in {"DiedBeforeReady", "RestartLoop"}
    assert "out of memory" in failed.outcome["sentence"]
    view.serves("one")
    assert view.starts() - before == 2
    assert controller.apply().ended == (1, "Refused", "RejectedBefore")


def test_a_first_deployment_that_fails_ends_down_and_says_so(
    controller: Controller, view: HostView
) -> None:
    """With nothing good to go back to the server is stopped, its GPUs are free, and the exit code is 4 (S23)."""
    controller.commit("one", "--crash-on-start")
    before = view.starts()
    failed = controller.apply()
    assert failed.ended == (4, "Failed", "NoGoodRevision"), failed.err
    assert view.state() in {"inactive", "failed"}
    assert view.used_mib() < 100
    assert view.starts() - before == 1
    controller.commit("one")
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("one")


def test_a_model_that_is_not_there_is_refused_before_anything_stops(
    controller: Controller, view: HostView
) -> None:
    """A model path that does not exist: exit 1 from preflight, the old process untouched."""
    controller.commit("one")
    assert controller.apply().code == 0
    before = (view.server(), view.record("applied"))
    controller.set(model="/srv/models/missing.gguf")
    refused = controller.apply()
    assert refused.ended == (1, "Refused", "Preflight"), refused.err
    assert "/srv/models/missing.gguf does not exist" in refused.outcome["sentence"]
    assert (view.server(), view.record("applied")) == before
    view.serves("one")


def test_a_person_goes_back_restarts_and_holds(controller: Controller, view: HostView) -> None:
    """`rollback` brings the revision before, `restart` a new process of it, `suspend` and `resume` a pause that others see."""
    controller.commit("one")
    first = controller.apply().outcome["revision"]
    controller.commit("two")
    second = controller.apply().outcome["revision"]
    assert controller.run("rollback", "llm", "--yes").code == 0
    view.serves("one")
    assert view.record("applied")["revision"] == first
    assert controller.apply().ended == (1, "Refused", "RejectedBefore")
    old = view.server()
    assert controller.run("restart", "llm", "--yes").code == 0
    view.serves("one")
    assert view.server() != old
    assert controller.run("retry", "llm").code == 0
    assert controller.run("suspend", "llm", "--reason", "profiling").code == 0
    before = view.server()
    held = controller.apply()
    assert held.ended == (9, "Waiting", "Hold")
    assert "profiling" in held.outcome["sentence"]
    assert view.server() == before
    assert controller.run("resume", "llm").code == 0
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")
    assert view.record("applied")["revision"] == second


def test_a_person_sees_status_revision_and_log(controller: Controller, view: HostView) -> None:
    """`status`, `show`, `logs` tell what runs, in text and as JSON, and change nothing."""
    controller.commit("one")
    revision = controller.apply().outcome["revision"]
    before = (view.server(), view.mutations())
    status = controller.run("status", "-o", "json")
    assert status.code == 0
    assert "InSync" in json.dumps(status.json())
    assert "llm" in controller.run("status").out
    shown = controller.run("show", "llm", "-o", "json").json()
    assert (shown["revision"], shown["applied"]) == (revision, True)
    assert shown["text"] == view.text("/etc/systemd/system/llm.service")
    assert shown["gate"]["verdict"] == "pass"
    assert "ExecStart=" in controller.run("show", "llm", revision[:10]).out
    assert "fired up and ready" in controller.run("logs", "llm", "-n", "20").out
    assert controller.run("show", "llm", "ffffffff").code == 64
    assert (view.server(), view.mutations()) == before


def test_a_server_that_systemd_restarted_is_proven_again_without_being_touched(
    controller: Controller, view: HostView
) -> None:
    """After a crash systemd starts it again: the pass says Applied for the new run and leaves the process alone (S4)."""
    controller.commit("one")
    assert controller.apply().code == 0
    pid = view.pid()
    view.host.check(["kill", "-9", str(pid)])
    view.wait_until_active()
    before = view.server()
    proven = controller.apply()
    assert proven.ended == (0, "Applied", ""), proven.err
    assert view.server() == before
    view.serves("one")
    assert controller.apply().ended == (0, "InSync", "")

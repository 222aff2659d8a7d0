"""The tool is killed between any two effects of a rollout. Whoever runs it again ends where an undisturbed run ends; and if nobody does, the host goes back by itself."""

from __future__ import annotations

import signal

import pytest
from live_controller import Controller, HostView, Run, eventually

pytestmark = pytest.mark.lab

STEPS = (
    "acquire",
    "disarm",
    "drain",
    "release",
    "install",
    "start",
    "ready",
    "gate",
    "commit",
    "finished",
)
SLOW = ("--speed", "20")

EFFECTS_MAX = 40
"""No rollout has so many effects that act: one that does not come to an end fails here."""


def again(controller: Controller) -> Run:
    """Run until the killed process's lease has run out: one lease period at most, and nothing to unlock (L3)."""
    last = controller.apply()

    def free() -> bool:
        nonlocal last
        last = controller.apply() if last.code == 6 else last
        return last.code != 6

    eventually(free, "the lease of the killed process runs out")
    return last


def test_a_rollout_that_is_killed_in_any_step_is_gone_on_with(
    controller: Controller, view: HostView
) -> None:
    """Killed at the begin of each step, run again: Applied, one new process, nothing left behind (S10, S11, L3)."""
    controller.commit("model-0")
    assert controller.apply().code == 0
    for number, step in enumerate(STEPS, start=1):
        model = f"model-{number}"
        controller.commit(model)
        starts = view.starts()
        killed = controller.killed(f"--step={step}")
        assert killed.code == -signal.SIGKILL, (step, killed.code, killed.err)
        done = again(controller)
        assert done.code == 0, (step, done.outcome, done.err)
        view.serves(model)
        assert view.starts() - starts == 1, step
        assert view.record("applied")["revision"] == done.outcome["revision"]


def test_the_host_goes_back_by_itself_when_nobody_comes_again(
    controller: Controller, view: HostView
) -> None:
    """Killed while the new server loads, never run again: the host's dead-man timer brings the old one back and says so (L3)."""
    controller.commit("one")
    good = controller.apply().outcome["revision"]
    controller.commit("two", "--load", "600")
    assert controller.killed("--step=ready", "--lease=9").code == -signal.SIGKILL
    assert view.left() != []
    eventually(lambda: view.model() == "one", "the host brings the old server back")
    eventually(lambda: view.left() == [], "the host clears up")
    view.serves("one")
    assert view.record("applied")["revision"] == good
    told = controller.run("history", "llm", "-o", "json").json()["rollouts"][-1]
    assert (told["outcome"], told["reason"], told["by"]) == (
        "RolledBack",
        "HostReverted",
        "host-revert",
    )


def test_the_host_ends_a_first_deployment_that_nobody_comes_back_for(
    controller: Controller, view: HostView
) -> None:
    """With nothing to go back to, the host stops what was tried, and the GPUs are free (S23)."""
    controller.commit("one")
    assert controller.killed("--step=ready", "--lease=9").code == -signal.SIGKILL
    eventually(lambda: view.left() == [] and view.state() != "active", "the host ends the rollout")
    eventually(lambda: view.used_mib() < 100, "the GPU is free")
    assert view.model() == ""
    assert controller.apply().code in {0, 1}


@pytest.mark.nightly
@pytest.mark.parametrize("rollout", ["deploy", "change", "failing"])
def test_a_rollout_that_is_killed_after_any_effect_ends_like_an_undisturbed_one(
    controller: Controller, view: HostView, rollout: str
) -> None:
    """Killed after its n-th acting effect, for every n, and run again: the same server, record and files as without the kill."""
    if rollout != "deploy":
        controller.commit("model-0")
        assert controller.apply().code == 0
    for number in range(1, EFFECTS_MAX):
        if rollout == "deploy":
            controller.name = f"llm-{number}"
        at = HostView(view.host, f"{controller.name}.service")
        before = "model-0" if rollout == "failing" else f"model-{number}"
        controller.commit(f"model-{number}", *(SLOW if rollout == "failing" else ()))
        killed = controller.killed(f"--after={number}")
        if killed.code != -signal.SIGKILL:
            assert number > 8, "a rollout has more effects than that"
            return
        done = again(controller)
        if rollout == "failing":
            assert done.ended in {
                (3, "RolledBack", "GateFailed"),
                (1, "Refused", "RejectedBefore"),
            }, (number, done.outcome)
            assert controller.apply().ended == (1, "Refused", "RejectedBefore")
        else:
            assert done.code == 0, (number, done.outcome, done.err)
            assert controller.apply().ended == (0, "InSync", "")
        at.serves(before)
        if rollout == "deploy":
            controller.set(state="stopped")
            assert controller.apply().ended == (0, "Stopped", "")
            (controller.specs / f"{controller.name}.yaml").unlink()
    pytest.fail("the rollout does not come to an end")

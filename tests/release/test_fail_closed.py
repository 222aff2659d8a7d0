"""What stops everything, line by line of the checklist (gpu-release.md 8), and where each line is shown.

1 a cell missing, 2 another set of cards, 3 another boot, 6 a process unreadable, 8 an unknown sub-state, 12 an Xid or recovery action, 13 driver
and library differ: `helper/test_readings.py`, NOT_RELEASED. 4 another invocation: `helper/test_acts.py`, another_invocation and was_restarted.
5 a foreign or unknown holder: `test_shared_cards.py`, `live/test_ladder.py`. 7 inside a container: `helper/test_readings.py`,
cannot_tell_free_from_unseen. 9 a start that takes our stop's place: `live/test_ladder.py`, races_our_stop. 10 locks: `helper/test_acts_protocol.py`,
busy_lock and another_holder; `live/test_proxmox.py`, locked. 11 a probe that hangs: `helper/test_host_lab.py`, no_second_probe. 14 MPS and MIG:
`test_shared_cards.py`. 15 no pidfd: here. 16 another effective setting: `helper/test_acts.py`, later_drop_in_wins. 17 a transport without an end:
`transports/` and `helper/test_build.py`, was_cut. 18 more output than the cap: `helper/test_programs.py`, output_is_capped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from release_stage import Stage

from reconciler.core.conditions import Outcome
from reconciler.core.plan import Permissions
from reconciler.lab.schedule import fleet_of
from reconciler.lab.simulated import SimulatedMachine
from reconciler.reconcile import act, survey


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a kernel older than 5.3."""
    real = SimulatedMachine.identity

    def without(self: SimulatedMachine) -> Any:
        return {"known": {**real(self)["known"], "pidfd": False}}

    monkeypatch.setattr(SimulatedMachine, "identity", without)


@pytest.mark.parametrize("allowed", [False, True])
def test_without_pidfd_nothing_is_released_unless_the_operator_allows_it(
    allowed: bool, request: pytest.FixtureRequest
) -> None:
    """Line 15: refused before anything stops, with the setting named; allowed, the server is stopped by systemd and proven gone."""
    stage = Stage()
    request.getfixturevalue("old_kernel")
    released = stage.free(replace(stage.look("0"), no_pidfd=allowed))
    (result,) = released.results
    if allowed:
        assert result.outcome is Outcome.STOPPED
        assert stage.running() == []
    else:
        assert result.outcome is Outcome.REFUSED
        assert "allow_no_pidfd" in result.sentence
        assert stage.running() == ["qwen.service"]


@pytest.mark.parametrize("allowed", [False, True])
def test_without_pidfd_nothing_is_rolled_out_unless_the_operator_allows_it(
    allowed: bool, request: pytest.FixtureRequest
) -> None:
    """Line 15, in a rollout: the old server runs on."""
    stage = Stage()
    request.getfixturevalue("old_kernel")
    found = survey(
        fleet_of(2, stage.controller.engines), stage.controller, allow=Permissions(no_pidfd=allowed)
    )
    (result,) = act(found, stage.controller, lambda _e: None)
    assert result.outcome is (Outcome.APPLIED if allowed else Outcome.REFUSED)
    assert allowed or "allow_no_pidfd" in result.sentence
    assert stage.running() == ["qwen.service"]

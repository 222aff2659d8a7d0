"""A rollout that was left half-way, and a newer commit since."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from reconciler.core import rollout
from reconciler.core.attempt import Attempt, Member, Phase
from reconciler.core.conditions import Outcome, Reason, ServerResult, exit_of
from reconciler.core.desired import Budgets
from reconciler.core.effect import Claim, Reply, Turned, Waited
from reconciler.core.steps import LEASE_TTL_S
from reconciler.engines import custom
from reconciler.lab.schedule import HOST, ControllerDiedError, fleet_of, new_host
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import Effect, World
from reconciler.reconcile import act, survey

ENGINES = {"custom": custom}


def test_the_old_rollout_is_finished_and_the_newer_commit_is_still_owed() -> None:
    """S20, L4: only what was shown is done; the pass does not claim success for a spec that it did not apply."""
    world = World(1)
    host = new_host(world)
    controller = controller_world(world, {HOST: host}, ENGINES)
    killed: list[bool] = []

    def kill_once(effect: Effect) -> None:
        if (
            effect.kind == "call"
            and effect.detail == "start"
            and effect.stage == "after"
            and not killed
        ):
            killed.append(True)
            raise ControllerDiedError

    world.on_effect(kill_once)
    try:
        act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    except ControllerDiedError:
        world.advance(1.0)
    assert killed
    newer = fleet_of(2, ENGINES)
    (result,) = act(survey(newer, controller), controller, lambda _event: None)
    assert (result.outcome, result.reason) == (Outcome.WAITING, Reason.SPEC_MOVED_ON)
    assert exit_of(result).code == 9
    (result,) = act(survey(newer, controller), controller, lambda _event: None)
    assert result.outcome is Outcome.APPLIED
    (result,) = act(survey(newer, controller), controller, lambda _event: None)
    assert result.outcome is Outcome.IN_SYNC


def beside(*, lapsed: bool = False) -> tuple[ServerResult, ServerResult | None, int]:
    """Have a second process of the same installation come while the first starts the server; give how both ended, and the starts."""
    world = World(1)
    host = new_host(world)
    controller = controller_world(world, {HOST: host}, ENGINES)
    second = replace(controller, exclusive=lambda _host: nullcontext(enter_result=False))
    found: list[tuple[ServerResult, ...]] = []

    def look_on(effect: Effect) -> None:
        if (effect.kind, effect.detail, effect.stage) == ("call", "start", "after") and not found:
            found.append(())
            if lapsed:
                world.advance(LEASE_TTL_S + 1)
            found.append(act(survey(fleet_of(1, ENGINES), second), second, lambda _event: None))

    world.on_effect(look_on)
    (first,) = act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    return first, found[1][0] if found[1:] else None, len(host.host.truth.starts)


@pytest.mark.parametrize("lapsed", [False, True])
def test_what_another_process_is_at_is_not_half_way(lapsed: bool) -> None:
    """S8: a rollout of a process that lives is not taken over by a second one of the same installation, whatever its lease says."""
    first, second, starts = beside(lapsed=lapsed)
    assert second is not None
    assert (second.outcome, second.reason) == (Outcome.REFUSED, Reason.LEASE_HELD)
    assert "another process" in second.sentence
    assert first.outcome is Outcome.APPLIED
    assert starts == 1


def test_the_host_keeps_a_living_lease_where_nobody_asks_whose_attempt_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S8: with the machine's first line off, a claim that asks for no take-over is refused by the host."""
    monkeypatch.setattr(rollout, "_of_another_process", lambda _state: False)
    first, second, starts = beside()
    assert second is not None
    assert second.reason is Reason.LEASE_HELD
    assert "another process" not in second.sentence
    assert (first.outcome, starts) == (Outcome.APPLIED, 1)


def test_without_both_lines_a_living_rollout_is_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S8: an attempt that is taken for a dead process's is carried out beside the process that lives, and that is seen."""
    monkeypatch.setattr(rollout, "_of_another_process", lambda _state: False)
    monkeypatch.setattr(rollout, "_claim_wanted", _takes_over_whatever_it_resumes)
    _, second, _ = beside()
    assert second is not None
    assert second.outcome is Outcome.APPLIED


def _takes_over_whatever_it_resumes(state: Attempt) -> Claim | None:
    if state.phase is Phase.PREFLIGHT:
        return None
    wanted = next((m.server for m in state.members if m.fence is None), None)
    return Claim(wanted, LEASE_TTL_S, takeover=True) if wanted is not None else None


def test_one_that_lost_its_lease_to_who_is_alone_does_not_take_it_back() -> None:
    """S8, L5: two that answer to one name never win from each other in turn."""
    member = Member("qwen", "qwen.service", None, None, Budgets(), boot_id="b" * 32)
    state = Attempt("a", HOST, (member,), phase=Phase.START, began=0.0, entered=0.0)
    for alone in (False, True):
        _, effect = rollout.step(replace(state, alone=alone), Turned(1.0, "StaleFence", "", {}))
        assert effect == Claim("qwen", LEASE_TTL_S, takeover=alone)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("reply", [Waited(1.0), Turned(1.0, "StaleFence", "", {})])
def test_the_end_of_a_rollout_takes_no_lease_from_a_living_process(
    reply: Reply, alone: bool
) -> None:
    """S8: what is left to settle is settled under a lease that this process may have, also where it was lost at the very end."""
    member = Member("qwen", "qwen.service", None, None, Budgets(), settle="stopped")
    state = Attempt("a", HOST, (member,), phase=Phase.FINISHED, began=0.0, entered=0.0, alone=alone)
    _, effect = rollout.step(state, reply)
    assert effect == Claim("qwen", LEASE_TTL_S, takeover=alone)

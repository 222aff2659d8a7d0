"""A guard that can be switched off unnoticed is no guard: each wrong version here must be caught by the rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from reconciler.core import release, rollout, steps
from reconciler.core.attempt import Attempt, Member
from reconciler.core.desired import Budgets
from reconciler.core.effect import Began, Measured, Unreachable
from reconciler.effects import perform
from reconciler.engines import custom
from reconciler.helper import acts, guard, protocol, readings
from reconciler.lab import schedule
from reconciler.lab.oracle import ViolationError
from reconciler.lab.schedule import STORIES, Fault, Striker, run
from reconciler.lab.simulated import SimulatedHost
from reconciler.lab.world import Effect

ENGINES = {"custom": custom}


def first_violation(story: str, fault: Fault, indexes: range) -> str:
    """Give the rule that is broken first when a story is played with a fault at one of these requests."""
    for index in indexes:
        try:
            run(STORIES[story], fault, index, ENGINES)
        except ViolationError as violation:
            return str(violation).split()[0]
    return "nothing"


def test_without_an_intent_s11_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: an effect whose intent is not durable is seen at once."""
    monkeypatch.setattr(perform, "carries_intent", lambda _state: False)
    assert first_violation("change", Fault.NONE, range(1)) == "S11"


def test_without_a_claim_after_a_lost_reply_s12_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """S12: going on after an unknown outcome without a claim is seen."""
    monkeypatch.setattr(
        rollout,
        "_lost",
        lambda state, reply: rollout._unreachable(state, Unreachable(reply.now, "lost")),
    )
    assert first_violation("change", Fault.LOST_AFTER, range(8, 30)) == "S12"


def test_without_renewals_s9_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """S9: an effect that its lease does not outlast is seen."""
    monkeypatch.setattr(rollout, "_guarded", lambda state, effect, _reply: (state, effect))
    monkeypatch.setattr(steps, "LEASE_TTL_S", 12.0)
    monkeypatch.setattr(rollout, "LEASE_TTL_S", 12.0)
    assert first_violation("change", Fault.NONE, range(1)) == "S9"


def test_without_the_fence_on_the_host_s8_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """S8: the controller's own late effect, let through by a host that does not compare fences, is seen."""
    monkeypatch.setattr(
        protocol, "admit", lambda request, _machine, _server: dict(request["fence"])
    )
    assert first_violation("change", Fault.LATE, range(8, 40)) == "S8"


def _nobody_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off both lines: the controller's proof of release and the guard inside the start."""
    monkeypatch.setattr(SimulatedHost, "run_guard", lambda _self, _prefix: 0)
    free = release.Verdict("released", (), (), ())
    monkeypatch.setattr(release, "judge", lambda *_args: free)


def test_without_proof_of_release_and_guard_s2_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: a start beside somebody who holds the card is seen."""
    _nobody_is_checked(monkeypatch)
    with_stranger(monkeypatch)
    assert first_violation("change", Fault.NONE, range(1)) == "S2"


def test_the_guard_alone_holds_s2(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: with the controller's check off, the guard on the host still refuses the start."""
    free = release.Verdict("released", (), (), ())
    monkeypatch.setattr(release, "judge", lambda *_args: free)
    with_stranger(monkeypatch)
    assert first_violation("change", Fault.NONE, range(1)) == "nothing"


def test_the_controller_alone_holds_s2(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: with the guard off, the proof of release still keeps the start back."""
    monkeypatch.setattr(SimulatedHost, "run_guard", lambda _self, _prefix: 0)
    with_stranger(monkeypatch)
    assert first_violation("change", Fault.NONE, range(1)) == "nothing"


def test_killing_whatever_holds_the_card_breaks_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: a stranger on our card who is taken for ours is seen when he is signalled."""

    def everybody_is_ours(_process: Any, _context: Any) -> tuple[str, str]:
        return "owned", "it holds the card"

    for module in (readings, guard):
        monkeypatch.setattr(module, "classify_holder", everybody_is_ours, raising=False)

    monkeypatch.setattr(acts, "classify_holder", everybody_is_ours, raising=False)
    with_stranger(monkeypatch)
    assert first_violation("change", Fault.NONE, range(1)) == "S3"


def test_an_infrastructure_error_taken_for_a_verdict_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S22: a gate that could not measure must not reject the revision; a version that does so ends elsewhere."""
    expected = run(STORIES["change"], Fault.NONE, 0, ENGINES).state
    real = steps.gate

    def harsh(state: Any, reply: Any) -> Any:
        if isinstance(reply, Measured) and reply.verdict == "error":
            reply = Measured(reply.now, "fail", reply.message, reply.evidence)
        return real(state, reply)

    monkeypatch.setitem(steps.STEPS, steps.Phase.GATE, harsh)  # type: ignore[arg-type]
    reboot_in_the_gate(monkeypatch)
    assert run(STORIES["change"], Fault.NONE, 0, ENGINES).state != expected


def test_a_reboot_in_the_gate_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """S22, F49: the same reboot with the real gate ends where the undisturbed run does."""
    expected = run(STORIES["change"], Fault.NONE, 0, ENGINES).state
    reboot_in_the_gate(monkeypatch)
    assert run(STORIES["change"], Fault.NONE, 0, ENGINES).state == expected


def with_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stranger take one of our cards just after the old server was stopped."""
    real = Striker.watch

    def watch(self: Striker, effect: Effect) -> None:
        real(self, effect)
        if effect.kind == "stop" and effect.stage == "after":
            self.simulated.host.add_process(gpus=(0,), mib=500)

    monkeypatch.setattr(Striker, "watch", watch)


def reboot_in_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host lose power once while the gate measures."""
    real: Callable[..., Any] = schedule.controller_world
    done: list[bool] = []

    def world(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        gate = made.gate

        def measured(target: Any, engine: Any, host: Any, baseline: Any, **more: Any) -> Any:
            if not done and json.loads(target.spec)["engine"]["command"][-1] == "2":
                done.append(True)
                host.simulated.reboot()
            return gate(target, engine, host, baseline, **more)

        return dataclasses.replace(made, gate=measured)

    monkeypatch.setattr(schedule, "controller_world", world)


def test_a_step_machine_always_answers() -> None:
    """L6: the first step of any attempt is an effect, never an exception."""
    member = Member("s", "s.service", None, None, Budgets())
    _, effect = rollout.step(Attempt("a", "h", (member,)), Began(0.0))
    assert effect is not None

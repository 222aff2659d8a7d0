"""Two controllers that know nothing of each other and one group: its bounds hold whenever the second one comes (S25)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from steering_stage import Stage

from reconciler import reconcile
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.event import Event
from reconciler.reconcile import Turns, act, survey

RULES = "group: {name: chat, at_once: 1, min_available: 1}"


def fleet(stage: Stage, a: int, b: int) -> str:
    """Give two members, each on a host of its own."""
    return stage.text(a=f"a 0 {a}\n{RULES}", b=f"b 0 {b}\n{RULES}")


def meeting(moment: int) -> tuple[ServerResult, ServerResult, int] | None:
    """Let one controller change `a`, and another `b` at its so-manieth sign of life, both by plans from before; None past the end.

    Gives both results, and how many members served at worst while the second was at it.
    """
    stage = Stage("a", "b")
    stage.settle(fleet(stage, 1, 1), 3)
    ids = count(1)
    other = replace(
        stage.controller, holder="elsewhere", turns=Turns(), new_id=lambda: f"other-{next(ids)}"
    )
    found = survey(stage.fleet(fleet(stage, 2, 1)), stage.controller, host="a")
    theirs = survey(stage.fleet(fleet(stage, 1, 2)), other, host="b")
    assert [p.acts for p in theirs.plan.servers] == [True]
    signs, met = count(), list[tuple[ServerResult, int]]()

    def second(_event: Event) -> None:
        if next(signs) == moment:
            worst = [2]

            def watch(_event: Event) -> None:
                worst.append(stage.serving("a", "a") + stage.serving("b", "b"))

            results = {r.server: r for r in act(theirs, other, watch)}
            met.append((results["b"], min(worst)))

    results = {r.server: r for r in act(found, stage.controller, second)}
    return (results["a"], *met[0]) if met else None


def meetings() -> Iterator[tuple[ServerResult, ServerResult, int]]:
    """Let them meet at every moment."""
    for moment in count():
        found = meeting(moment)
        if found is None:
            assert moment > 8
            return
        yield found


def test_whenever_the_second_comes_one_member_goes_on_serving() -> None:
    """S25: a plan from before the other began does not count; who stands back says so and has touched nothing."""
    ends = set()
    for first, second, worst in meetings():
        assert worst >= 1
        assert first.outcome is Outcome.APPLIED
        ends.add(second.outcome)
        if second.outcome is Outcome.WAITING:
            assert second.reason is Reason.GROUP
            assert "a of group chat is under change by now" in second.sentence
    assert Outcome.WAITING in ends


def test_without_the_second_look_both_are_down_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look after the lease switched off: somewhere the group has nobody that serves."""
    monkeypatch.setattr(reconcile, "crowded", lambda *_: None)
    assert any(worst == 0 for _, _, worst in meetings())

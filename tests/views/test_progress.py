"""What a person reads while a rollout goes on, and of a gate that passed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.text import Text
from steering_stage import Stage

from reconciler.core.attempt import Attempt, Phase
from reconciler.core.conditions import Reason
from reconciler.core.effect import Leave
from reconciler.core.event import Event, StepFinished
from reconciler.core.gate import Row, VerdictKind
from reconciler.effects.gate import row_words
from reconciler.reconcile import act, survey
from reconciler.views.terminal import event_line


def told(stage: Stage, text: str) -> str:
    """Make a pass, and give its lines as a person reads them."""
    seen = list[Event]()
    act(survey(stage.fleet(text), stage.controller), stage.controller, seen.append)
    lines = [line for event in seen if (line := event_line(event)) is not None]
    return "\n".join(Text.from_markup(line).plain for line in lines)


def test_a_first_deployment_says_that_there_was_nothing_to_stop() -> None:
    """A step that is shown there says why it took no time; of a server that serves it does not say so."""
    stage = Stage()
    first = told(stage, stage.text(llm="one 0 10"))
    assert "nothing to drain: no server of this name runs" in first
    assert "stop done" not in first
    again = told(stage, stage.text(llm="one 0 11"))
    assert "stop done" in again
    assert "nothing to" not in again


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (Reason.PREEMPTED, "gate superseded after "),
        (Reason.HANDED_OVER, "gate left after "),
        (Reason.INTERRUPTED, "gate interrupted after "),
        (Reason.GATE_FAILED, "gate failed after "),
    ],
)
def test_a_step_that_is_cut_short_has_not_failed(reason: Reason, word: str) -> None:
    """A gate that a newer commit, a stop or Ctrl-C ends is told by that word; only one that failed is called failed."""
    event = StepFinished(9.0, "h", "llm", "gate", 5.8, ok=False, detail="why", reason=reason.value)
    line = Text.from_markup(event_line(event) or "").plain
    assert f"{word}5.8 s: why" in line
    assert ("failed" in line) is (reason is Reason.GATE_FAILED)


def test_a_superseded_rollout_says_so_where_it_stood() -> None:
    """The reason of the rollout's end is that of its step, in the stream and in words."""

    def leaving(state: Attempt, now: float) -> Leave | None:
        gating = state.phase is Phase.GATE
        return Leave(now, Reason.PREEMPTED, "c8 wants 14 by now") if gating else None

    stage = Stage()
    told(stage, stage.text(llm="one 0 10"))
    stage.controller = replace(stage.controller, leaving=leaving)
    seen = list[Event]()
    act(
        survey(stage.fleet(stage.text(llm="one 0 11")), stage.controller),
        stage.controller,
        seen.append,
    )
    (last,) = [e for e in seen if isinstance(e, StepFinished) and not e.ok]
    assert (last.step, last.reason, last.detail) == ("gate", "Preempted", "c8 wants 14 by now")


def test_a_result_of_a_gate_says_what_its_limit_means() -> None:
    """`0 (limit 0)` told nobody whether that is good."""
    passed = VerdictKind.PASS
    assert row_words(Row("single", "min_decode_tps", 103.5, 60.0, passed)) == (
        "single min_decode_tps 103.5 (at least 60)"
    )
    assert row_words(Row("batch", "max_ttft_p95", 0.2, 0.8, passed)) == (
        "batch max_ttft_p95 0.2 (at most 0.8)"
    )
    assert row_words(Row("all", "max_error_rate", 0.0, 0.0, passed)) == (
        "no request failed (none may)"
    )
    assert row_words(Row("batch", "max_error_rate", 0.005, 0.01, passed)) == (
        "batch 0.50% of requests failed (1.00% may)"
    )

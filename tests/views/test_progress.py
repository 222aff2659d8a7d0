"""What a person reads while a rollout goes on, and of a gate that passed."""

from __future__ import annotations

from rich.text import Text
from steering_stage import Stage

from reconciler.core.event import Event
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

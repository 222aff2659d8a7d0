"""Which texts show a broken model, and which do not."""

from __future__ import annotations

import pytest

from reconciler.bench.degeneracy import TextFault, all_alike, is_garbage, text_fault
from reconciler.bench.workloads import prompt_set

HEALTHY = {
    "a table": "| a | b |\n|---|---|\n| 1 | 2 |\n" * 2,
    "a rule": "Heading\n" + "=" * 20 + "\nSome text under the heading, long enough to matter here.",
    "a short refrain": "row, row, row your boat, gently down the stream",
    "a number": "42",
    "a chant": "we will, we will rock you, we will, we will rock you, said the crowd",
    "a short list": "no no no no no no no",
    "rows of a table": "| 1 | a | 2 | b | 3 | c | 4 | d | 5 | e | 6 | f |",
    "other scripts": "今日は良い天気です。明日も晴れるでしょう。",
    "one cut character": "It costs five \ufffd",
}


@pytest.mark.parametrize("text", HEALTHY.values(), ids=HEALTHY)
def test_healthy_texts_have_no_fault(text: str) -> None:
    """Ordinary forms that repeat a little are no fault."""
    assert text_fault(text) is None


def test_our_own_prompts_have_no_fault() -> None:
    """Prose, code and tables of some length pass."""
    assert [p.text for p in prompt_set() if text_fault(p.text)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", TextFault.EMPTY),
        (" \n\t ", TextFault.EMPTY),
        ("!" * 64, TextFault.ONE_CHARACTER),
        ("The answer is " + "0" * 200, TextFault.ONE_CHARACTER),
        ("\ufffd\ufffd a \ufffd", TextFault.UNDECODABLE),
        ("\x00\x01\x02 abc", TextFault.UNDECODABLE),
        ("the cat sat on " * 20, TextFault.LOOPING),
        ("word " * 60, TextFault.ONE_WORD),
        ("the " * 8, TextFault.ONE_WORD),
        ("the cat " * 16, TextFault.ONE_WORD),
        ("Well: " + "the " * 30, TextFault.ONE_WORD),
        ("over and over again, " * 4, TextFault.LOOPING),
        ("the cat sat on a mat " * 5, TextFault.LOOPING),
        ("This begins well enough, and then: " + "over and over again, " * 30, TextFault.LOOPING),
    ],
)
def test_faults_are_named(text: str, fault: TextFault) -> None:
    """Each kind of degenerate text has its name; only garbage condemns a model by itself."""
    assert text_fault(text) is fault
    assert is_garbage(text) == (fault is not TextFault.LOOPING)


def test_one_answer_to_all_prompts_is_no_answer() -> None:
    """Different prompts that all draw the same words show a model that does not read them."""
    assert all_alike(["yes", "yes ", "yes", " yes"])
    assert not all_alike(["yes", "yes", "yes"])
    assert not all_alike(["yes", "no", "yes", "yes"])

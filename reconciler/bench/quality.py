"""Prompts whose answers show a broken model, and how an answer is checked.

Asked at temperature 0 with the end of sequence respected. The share of right answers is compared with
the share that the last applied revision had: a small model misses many of them, and misses the same ones
next time. Garbage (see `degeneracy.py`) is judged without a baseline. `core/gate.py` judges; here is
only asked and checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reconciler.bench.degeneracy import GARBAGE, all_alike, text_fault
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress, Prompt, Sampling
from reconciler.bench.meter import LOCAL, Meter
from reconciler.core.measurement import Answer, QualityResult

_MAX_TOKENS = 48
# The same in every gate: greedy answers are compared with those of earlier gates, so the prompts must be equal.
SALT = "q"
STREAMS = 4
_KEPT_TEXT = 400


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and the check of its answer."""

    prompt: str
    right: Callable[[str], bool]


def _says(*words: str) -> Callable[[str], bool]:
    """Accept an answer that holds one of the words, as a word."""
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(w)}(?!\w)" for w in words), re.IGNORECASE)
    return lambda text: bool(pattern.search(text))


def _begins_with(pattern: str) -> Callable[[str], bool]:
    return lambda text: bool(re.match(pattern, text))


def _in_order(*words: str) -> Callable[[str], bool]:
    pattern = re.compile(r".*?".join(re.escape(w) for w in words), re.IGNORECASE | re.DOTALL)
    return lambda text: bool(pattern.search(text))


def _json_with(keys: Sequence[str]) -> Callable[[str], bool]:
    def right(text: str) -> bool:
        start, end = text.find("{"), text.rfind("}")
        try:
            body = json.loads(text[start : end + 1])
        except ValueError:
            return False
        return isinstance(body, dict) and set(keys) <= set(body)

    return right


QUESTIONS: tuple[Question, ...] = (
    Question("What is 17 + 25? Answer with the number only.", _says("42")),
    Question("What is 9 times 8? Answer with the number only.", _says("72")),
    Question("What is half of 130? Answer with the number only.", _says("65")),
    Question("Copy this word exactly: zephyrine", _says("zephyrine")),
    Question("Copy this code exactly: K7-QM-2049", _says("K7-QM-2049")),
    Question("Copy this sentence: The grey heron waits.", _says("The grey heron waits")),
    Question("What is the capital of France? Answer in one word.", _says("Paris")),
    Question("What is the capital of Japan? Answer in one word.", _says("Tokyo")),
    Question("How many days has a week? Answer with the number only.", _says("7", "seven")),
    Question("How many minutes are two hours? Answer with the number only.", _says("120")),
    Question("What is the opposite of hot? Answer in one word.", _says("cold")),
    Question(
        "Which is larger, 0.5 or 0.25? Answer with the number only.", _begins_with(r"\W*0?\.5\b")
    ),
    Question("Sort these in ascending order: 31, 4, 15, 9", _in_order("4", "9", "15", "31")),
    Question(
        'Answer with a JSON object with the keys "name" and "age" for Ada, who is 36.',
        _json_with(("name", "age")),
    ),
    Question("Translate 'good morning' into German.", _says("Guten Morgen")),
    Question("Complete: one, two, three, four,", _says("five")),
)


AGAIN: tuple[Question, ...] = (
    Question("What is 23 + 48? Answer with the number only.", _says("71")),
    Question("What is 7 times 6? Answer with the number only.", _says("42")),
    Question("What is 100 minus 37? Answer with the number only.", _says("63")),
    Question("Copy this word exactly: quillander", _says("quillander")),
    Question("Copy this code exactly: R4-TB-7716", _says("R4-TB-7716")),
    Question("Copy this sentence: A red kite turns slowly.", _says("A red kite turns slowly")),
    Question("What is the capital of Italy? Answer in one word.", _says("Rome")),
    Question("What is the capital of Spain? Answer in one word.", _says("Madrid")),
    Question("How many months has a year? Answer with the number only.", _says("12", "twelve")),
    Question("What is the opposite of up? Answer in one word.", _says("down")),
    Question("Sort these in ascending order: 52, 8, 27, 13", _in_order("8", "13", "27", "52")),
    Question(
        'Answer with a JSON object with the keys "city" and "country" for Lyon in France.',
        _json_with(("city", "country")),
    ),
)
"""Asked when a server is faster than anything explains: an answer that was learnt by heart does not help twice."""


def ask(
    endpoint: Endpoint,
    *,
    questions: Sequence[Question] = QUESTIONS,
    streams: int = STREAMS,
    salt: str = "",
    deadline_s: float | None = None,
    given_up: frozenset[str] = frozenset(),
    meter: Meter = LOCAL,
    on_progress: Callable[[Progress], None] | None = None,
) -> QualityResult:
    """Ask all questions and check the answers.

    One at a time where greedy texts are to be compared: kernels that depend on the batch change them.
    A request that fails is a wrong answer here; whether requests fail is the error budget's business.
    """
    plan = LoadPlan(
        run="quality",
        prompts=tuple(Prompt("quality", question.prompt) for question in questions),
        concurrency=streams,
        requests=len(questions),
        max_tokens=_MAX_TOKENS,
        workload="quality",
        sampling=Sampling(temperature=0.0, top_p=1.0),
        salt=salt,
        deadline_s=deadline_s,
        given_up=given_up,
    )
    result, heard_of = meter.ask(plan, endpoint, on_progress)
    texts = dict.fromkeys(range(len(questions)), "") | dict(heard_of)
    answers = tuple(_answer(q, texts[number]) for number, q in enumerate(questions))
    heard = [text for text in texts.values() if text]
    return QualityResult(
        answers=answers,
        garbage=_garbage(heard),
        infrastructure=result.infrastructure,
        infrastructure_message=result.infrastructure_message,
    )


def _answer(question: Question, text: str) -> Answer:
    fault = text_fault(text)
    right = bool(question.right(text)) and fault not in GARBAGE
    return Answer(question.prompt, right, fault.value if fault else "", text[:_KEPT_TEXT])


def _garbage(heard: Sequence[str]) -> int:
    if all_alike(heard):
        return len(heard)
    return sum(text_fault(text) in GARBAGE for text in heard)

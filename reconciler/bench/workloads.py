"""The prompts that a gate sends, and how it lets tokens be drawn.

The prompt set is our own: eight classes of work by six prompts, since acceptance of drafts, and with it
speed, depends on the text (copying a file is easy to guess, a story is not). Lists are shuffled with a
fixed seed, so that any few consecutive prompts are a mix and every round sends the same ones.
"""

from __future__ import annotations

import json
import random
from functools import cache
from importlib.resources import files
from typing import Literal

from reconciler.bench.load_plan import Prompt, Sampling

Workload = Literal["realistic", "greedy"]

# What users do. `greedy` with the end of sequence ignored runs into loops that any draft predicts: on one
# and the same server it shows 100 % acceptance where sampling shows none (bench-gate.md section 4).
SAMPLING: dict[str, Sampling] = {
    "realistic": Sampling(temperature=0.7, top_p=0.95),
    "greedy": Sampling(temperature=0.0, top_p=1.0, ignore_eos=True),
}
GREEDY_WARNING = (
    "workload greedy: fixed lengths at temperature 0 flatter speculative decoding; its acceptance is not "
    "what users get"
)


@cache
def prompt_set() -> tuple[Prompt, ...]:
    """Give the shipped prompts, mixed."""
    text = files("reconciler.bench").joinpath("prompts.json").read_text("utf-8")
    prompts = [Prompt(kind, line) for kind, lines in json.loads(text).items() for line in lines]
    random.Random(20_260_101).shuffle(prompts)  # noqa: S311 - an order, no secret
    return tuple(prompts)


@cache
def warm_up_set() -> tuple[Prompt, ...]:
    """Give prompts that no measurement sends, so that warming up fills no cache for it."""
    subjects = ("bridges", "clouds", "printing", "glass", "salt", "maps", "kites", "harbours")
    return tuple(
        Prompt("warm-up", f"Tell me at length about the history of {s}.") for s in subjects
    )

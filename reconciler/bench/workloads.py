"""The prompts that a gate or a benchmark sends, and how it lets tokens be drawn.

The prompt set is our own: eight classes of work by six prompts, since acceptance of drafts, and with it
speed, depends on the text (copying a file is easy to guess, a story is not). Lists are shuffled with a
fixed seed, so that any few consecutive prompts are a mix and every round sends the same ones. A user's
own file takes its place: JSON lines, or the form that ShareGPT made common. It is read with limits and
judged before anything is sent, since a wrong workload looks like a wrong server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from reconciler.bench.load_plan import Prompt, Sampling
from reconciler.core.errors import UsageError

# What users do. `greedy` with the end of sequence ignored runs into loops that any draft predicts: on one
# and the same server it shows 100 % acceptance where sampling shows none (bench-gate.md section 4).
SAMPLING: dict[str, Sampling] = {
    "realistic": Sampling(temperature=0.7, top_p=0.95),
    "greedy": Sampling(temperature=0.0, top_p=1.0, ignore_eos=True),
}
# These fill what a request leaves out from the model's own generation_config.json.
_KNOW_THE_MODELS_SAMPLING = frozenset({"sglang", "vllm"})
GREEDY_WARNING = (
    "workload greedy: fixed lengths at temperature 0 flatter speculative decoding; its acceptance is not "
    "what users get"
)

# A file of every conversation that people share has some 90,000 of them in 700 MB: more than a round sends.
FILE_BYTES_LIMIT = 64 << 20
PROMPTS_LIMIT = 10_000
# A million characters are some 250,000 tokens: longer than any context that is served.
PROMPT_CHARACTERS_LIMIT = 1_000_000
_SEED = 20_260_101


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent: a name for output, the prompts, and how tokens are drawn."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    notes: tuple[str, ...] = ()


def sampling_for(workload: str, engine: str) -> Sampling:
    """Give how tokens are drawn: `realistic` as the model's own generation config says, where the engine applies it."""
    if workload == "realistic" and engine in _KNOW_THE_MODELS_SAMPLING:
        return Sampling(temperature=None, top_p=None)
    return SAMPLING[workload]


def workload_named(
    name: str, engine: str, *, prompts: Path | None = None, mix: Mapping[str, float] | None = None
) -> Workload:
    """Give a workload: our prompts or a user's file, in the mix that was asked for.

    Raises:
        UsageError: The file, or a class of the mix, is not usable.
    """
    chosen = prompt_set() if prompts is None else load_prompts(prompts)
    label = name if prompts is None else f"{name}, {prompts.name}"
    notes = (GREEDY_WARNING,) if name == "greedy" else ()
    return Workload(label, mixed(chosen, mix) if mix else chosen, sampling_for(name, engine), notes)


@cache
def prompt_set() -> tuple[Prompt, ...]:
    """Give the shipped prompts, mixed."""
    text = files("reconciler.bench").joinpath("prompts.json").read_text("utf-8")
    prompts = [Prompt(kind, line) for kind, lines in json.loads(text).items() for line in lines]
    random.Random(_SEED).shuffle(prompts)  # noqa: S311 - an order, no secret
    return tuple(prompts)


@cache
def warm_up_set() -> tuple[Prompt, ...]:
    """Give prompts that no measurement sends, so that warming up fills no cache for it."""
    subjects = ("bridges", "clouds", "printing", "glass", "salt", "maps", "kites", "harbours")
    return tuple(
        Prompt("warm-up", f"Tell me at length about the history of {s}.") for s in subjects
    )


def mixed(prompts: Sequence[Prompt], mix: Mapping[str, float]) -> tuple[Prompt, ...]:
    """Give prompts in the shares that `mix` asks for, class by class; classes it does not name are left out.

    Raises:
        UsageError: A class has no prompts.
    """
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    wanted = {kind: weight for kind, weight in mix.items() if weight > 0}
    missing = sorted(set(wanted) - set(by_kind))
    if missing or not wanted:
        known = ", ".join(sorted(by_kind))
        what = f"no prompt is of class {', '.join(missing)}" if missing else "no class has a weight"
        raise UsageError(f"the mix of the workload: {what}; there are: {known}")
    # Smooth weighted round robin: any stretch of the list has the mix, to one prompt.
    credit = dict.fromkeys(wanted, 0.0)
    total = sum(wanted.values())
    taken = dict.fromkeys(wanted, 0)
    chosen = []
    for _ in range(min(PROMPTS_LIMIT, 2 * len(prompts))):
        for kind, weight in wanted.items():
            credit[kind] += weight
        kind = max(sorted(credit), key=lambda k: credit[k])
        credit[kind] -= total
        chosen.append(by_kind[kind][taken[kind] % len(by_kind[kind])])
        taken[kind] += 1
    return tuple(chosen)


# -- a user's own file ---------------------------------------------------------------------------------


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a user's prompts: JSON lines of {"prompt": …} or {"messages": […]}, or a ShareGPT list.

    A line's `class` (or `kind`, `category`) is kept for the report. More than are useful are thinned
    evenly; the order is shuffled with a fixed seed, as ours is.

    Raises:
        UsageError: It cannot be read, is empty, binary or of another form; it says where.
    """
    data = _read(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start} is no UTF-8; a workload is text, JSON lines or a ShareGPT list. Nothing was sent"
        ) from None
    if "\0" in text:
        raise UsageError(f"{path}: holds NUL bytes, so it is no text. Nothing was sent")
    prompts = list(_from_list(path, text) if text.lstrip()[:1] == "[" else _from_lines(path, text))
    if not prompts:
        raise UsageError(f"{path}: holds no prompt. Nothing was sent")
    if len(prompts) > PROMPTS_LIMIT:
        step = len(prompts) / PROMPTS_LIMIT
        prompts = [prompts[int(i * step)] for i in range(PROMPTS_LIMIT)]
    random.Random(_SEED).shuffle(prompts)  # noqa: S311 - an order, no secret
    return tuple(prompts)


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():  # A pipe or a device may never end.
            raise UsageError(f"{path}: is no file. Nothing was sent")
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Nothing was sent") from None
    if len(data) > FILE_BYTES_LIMIT:
        mib = FILE_BYTES_LIMIT >> 20
        raise UsageError(f"{path}: is larger than {mib} MiB; take a part of it. Nothing was sent")
    return data


def _from_lines(path: Path, text: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _prompt(f"{path}:{number}", _json(f"{path}:{number}", line))


def _from_list(path: Path, text: str) -> Iterator[Prompt]:
    whole = _json(str(path), text)
    for number, item in enumerate(whole if isinstance(whole, list) else [], 1):
        if isinstance(item, dict) and "conversations" in item and not _first_turn(item):
            continue  # A conversation that a model began, or that is empty: ShareGPT has many.
        yield _prompt(f"{path}: item {number}", item)


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "too deep"
        raise UsageError(f"{place}: is no JSON ({why}). Nothing was sent") from None


def _prompt(place: str, item: Any) -> Prompt:
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        raise UsageError(f"{place}: is neither an object nor a string. Nothing was sent")
    kind = next((item[k] for k in ("class", "kind", "category") if k in item), "own")
    messages = _messages(place, item["messages"]) if "messages" in item else ()
    text = item.get("prompt", item.get("text"))
    if "conversations" in item:
        text = _first_turn(item)
    if messages:
        text = "\n\n".join(content for _, content in messages)
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            f'{place}: has no prompt: write {{"prompt": "…"}}, {{"messages": […]}} or a ShareGPT conversation. Nothing was sent'
        )
    if len(text) > PROMPT_CHARACTERS_LIMIT:
        raise UsageError(
            f"{place}: the prompt has {len(text)} characters, more than {PROMPT_CHARACTERS_LIMIT}. Nothing was sent"
        )
    return Prompt(str(kind)[:40], text, messages)


def _messages(place: str, messages: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(messages, list):
        raise UsageError(f"{place}: `messages` is no list. Nothing was sent")
    found = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in {"system", "user", "assistant"} or not isinstance(content, str):
            raise UsageError(
                f"{place}: a message needs a role (system, user, assistant) and text as content. Nothing was sent"
            )
        found.append((str(role), content))
    if not found or found[-1][0] != "user":
        raise UsageError(f"{place}: the last message must be the user's. Nothing was sent")
    return tuple(found)


def _first_turn(item: Mapping[str, Any]) -> str:
    turns = item.get("conversations")
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict) or first.get("from") not in {"human", "user"}:
        return ""
    value = first.get("value")
    return value if isinstance(value, str) else ""

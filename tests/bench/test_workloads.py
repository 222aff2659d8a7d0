"""Prompts: ours in any mix, a user's file in two forms, and files that are none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from reconciler.bench import workloads
from reconciler.bench.load_plan import Endpoint, LoadPlan, Prompt, Sampling, request_body
from reconciler.bench.workloads import load_prompts, mixed, prompt_set, sampling_for, workload_named
from reconciler.core.errors import UsageError


def test_eight_classes_are_shipped() -> None:
    """Eight classes of six prompts each, all different."""
    kinds = Counter(p.kind for p in prompt_set())
    assert len(kinds) == 8
    assert set(kinds.values()) == {6}
    assert len({p.text for p in prompt_set()}) == 48


def test_a_mix_holds_in_any_stretch() -> None:
    """Three code prompts to one story, in the first eight as in all; classes that are not named are left out."""
    chosen = mixed(prompt_set(), {"code": 3, "story": 1, "maths": 0})
    assert Counter(p.kind for p in chosen[:8]) == {"code": 6, "story": 2}
    assert {p.kind for p in chosen} == {"code", "story"}


@pytest.mark.parametrize("mix", [{"poems": 1.0}, {"code": 0.0}])
def test_a_mix_of_nothing_is_refused(mix: dict[str, float]) -> None:
    """A class without prompts, or no weight at all, is said with the classes that there are."""
    with pytest.raises(UsageError, match="there are: code"):
        mixed(prompt_set(), mix)


def test_json_lines_are_read_in_their_forms(tmp_path: Path) -> None:
    """Prompts, texts, conversations and bare strings; a class is kept, blank lines and a BOM are not."""
    lines = [
        {"prompt": "one", "class": "code"},
        {"text": "two"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3"}]},
        "four",
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\ufeff" + "\n\n".join(json.dumps(line) for line in lines) + "\n")
    found = {p.text: p for p in load_prompts(path)}
    assert found["one"].kind == "code"
    assert {"two", "four"} <= set(found)
    assert found["be brief\n\n3"].messages == (("system", "be brief"), ("user", "3"))


def test_the_form_of_sharegpt_is_read(tmp_path: Path) -> None:
    """The first human turn is the prompt; conversations that a model began are passed over."""
    items = [
        {"id": "a", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "x"}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "unasked"}]},
        {"id": "c", "conversations": []},
    ]  # fmt: skip
    path = tmp_path / "share.json"
    path.write_text(json.dumps(items))
    assert [p.text for p in load_prompts(path)] == ["hello"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no prompt"),
        (b"\n\n", "holds no prompt"),
        (b"[]", "holds no prompt"),
        (b"\x89PNG\r\n\xff\xfe", "byte 0 is no UTF-8"),
        (b'{"prompt": "a"}\n\0\0', "NUL"),
        (b'{"prompt": "a"}\nnot json', "own.jsonl:2: is no JSON"),
        (b'{"prompt": 7}', "own.jsonl:1: has no prompt"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "the last message must be"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "needs a role"),
        (b"[" * 100_000, "is no JSON"),
        (b'[{"x": 1}]', "item 1: has no prompt"),
    ],
)
def test_files_that_are_no_workload_are_said(tmp_path: Path, content: bytes, said: str) -> None:
    """Each is refused before anything is sent, with its place."""
    path = tmp_path / "own.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="Nothing was sent") as refused:
        load_prompts(path)
    assert said in str(refused.value)


def test_files_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large, too long and too many: refused, refused, thinned evenly. A directory is no file."""
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{n}"}) for n in range(100)))
    monkeypatch.setattr(workloads, "PROMPTS_LIMIT", 10)
    assert {p.text for p in load_prompts(path)} == {f"p{n}" for n in range(0, 100, 10)}
    monkeypatch.setattr(workloads, "PROMPT_CHARACTERS_LIMIT", 2)
    with pytest.raises(UsageError, match="has 3 characters"):
        load_prompts(path)
    monkeypatch.setattr(workloads, "FILE_BYTES_LIMIT", 100)
    with pytest.raises(UsageError, match="is larger than"):
        load_prompts(path)
    with pytest.raises(UsageError, match="is no file"):
        load_prompts(tmp_path)


def test_realistic_leaves_sampling_to_the_models_own_config() -> None:
    """Where the engine fills it in; elsewhere 0.7 and 0.95. Greedy is always said, and labelled."""
    assert sampling_for("realistic", "vllm") == Sampling(None, None)
    assert sampling_for("realistic", "llamacpp") == Sampling(0.7, 0.95)
    assert sampling_for("greedy", "sglang") == Sampling(0.0, 1.0, ignore_eos=True)
    assert "flatter" in workload_named("greedy", "sglang").notes[0]


def test_a_conversation_is_sent_as_one_with_the_salt_first() -> None:
    """Chat gets its messages, completions their text; the salt opens both, so that no prefix cache answers."""
    turns = (("system", "be brief"), ("user", "hi"))
    prompts = (Prompt("own", "be brief\n\nhi", turns),)
    plan = LoadPlan("r", prompts, 1, 1, 8, salt="s.")
    chat = request_body(plan, Endpoint("h", 1, "chat", "m"), 3, frozenset())
    assert [m["role"] for m in chat["messages"]] == ["system", "user"]
    assert chat["messages"][0]["content"] == "[s.3] be brief"
    plain = request_body(plan, Endpoint("h", 1, "completions", "m"), 3, frozenset())
    assert plain["prompt"].startswith("[s.3] Task: be brief")

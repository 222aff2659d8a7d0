"""Writing values into a person's spec file: what was not asked for stays, byte for byte."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from reconciler.core.errors import StoreError, UsageError
from reconciler.sources.edit import replace_file, with_settings

TEXT = """\
# the hosts
apiVersion: reconciler/v1
kind: Host
name: one   # odd   spacing
---
# why four
apiVersion: reconciler/v1
kind: Server
name: qwen
gpus: [0, 1]
speculative: {algorithm: NEXTN, num_steps: 4, eagle_topk: 1} # measured in May
args:
  context-length: 131072
  "quoted-key": 'x'
---
kind: Server
name: other
speculative: {num_steps: 4}
"""


def changed(settings: dict[str, object], server: str = "qwen") -> list[str]:
    """Give the lines that differ."""
    after = with_settings(TEXT.encode(), server, settings).decode()
    lines = difflib.unified_diff(TEXT.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if line[:2] not in {"--", "++", "@@"}]


def test_a_value_is_changed_in_its_own_document_only() -> None:
    """The comment behind it, the quotes and the other documents stay."""
    assert changed({"speculative.num_steps": 7}) == [
        "-speculative: {algorithm: NEXTN, num_steps: 4, eagle_topk: 1} # measured in May",
        "+speculative: {algorithm: NEXTN, num_steps: 7, eagle_topk: 1} # measured in May",
    ]


def test_a_field_is_added_and_taken_out() -> None:
    """None takes a field out; a map that is not there yet is made."""
    assert changed({"args.new": (1, 2), "env.K": "v", "args.context-length": None}) == [
        "-  context-length: 131072",
        "+  new:",
        "+    - 1",
        "+    - 2",
        "+env:",
        "+  K: v",
    ]
    assert changed({"nothing.here": None}) == []


def test_a_server_that_is_not_in_the_file_or_a_path_through_a_value_is_refused() -> None:
    """Nothing is written where it would not mean what was asked."""
    with pytest.raises(UsageError, match="no document of the server third"):
        with_settings(TEXT.encode(), "third", {"args.x": 1})
    with pytest.raises(UsageError, match="`gpus` is no map"):
        with_settings(TEXT.encode(), "qwen", {"gpus.x": 1})


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """With its mode; and where there is no place for it, the old one is still there."""
    file = tmp_path / "a.yaml"
    file.write_bytes(b"old")
    file.chmod(0o640)
    replace_file(file, b"new")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o640)
    with pytest.raises(StoreError, match="as it was"):
        replace_file(tmp_path / "missing" / "a.yaml", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]


@pytest.mark.parametrize("offset", [0, 2, 4])
@pytest.mark.parametrize("mapping", [2, 3, 4])
def test_a_file_is_indented_as_its_author_did(offset: int, mapping: int) -> None:
    """One value changes one line, however deep lists and maps stand."""
    pad, dash = " " * mapping, " " * offset
    text = (
        f"kind: Server\nname: qwen\ngpus:\n{dash}- 0\n{dash}- 1\nargs:\n{pad}a: 1\n{pad}b: 2\n"
        f"gate:\n{pad}runs:\n{pad}{dash}- name: one\n{pad}{dash}  requests: 8\n"
    )
    after = with_settings(text.encode(), "qwen", {"args.a": 5}).decode()
    assert after == text.replace("a: 1", "a: 5")

"""What programs read of a server's journal."""

from __future__ import annotations

import json

from reconciler.views.machine import log_json
from reconciler.views.terminal import log_line

HOSTILE = "\x1b[2Jup\u202e \u00b1\nnext"


def test_a_line_of_a_journal_is_one_object_on_one_line() -> None:
    """Whatever an engine writes, a reader of NDJSON gets its bytes back, and no second line."""
    text = log_json("qwen", 1_790_000_000.25, HOSTILE)
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text) == {
        "format_version": "1.0", "type": "log", "server": "qwen", "at": 1_790_000_000.25, "message": HOSTILE,
    }  # fmt: skip


def test_a_line_of_a_journal_moves_no_cursor() -> None:
    """For people control and bidi characters are escapes (T19); the time is UTC."""
    shown = log_line("qwen", 1_790_000_000.25, HOSTILE)
    assert shown == "2026-09-21T14:13:20Z \\u001b[2Jup\\u202e \u00b1\\u000anext"

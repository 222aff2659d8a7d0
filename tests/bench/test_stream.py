"""The recorded streams, and the grammar under every cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from reconciler.bench.stream import EventParser, Request, read_stream, replay

RECORDED = Path(__file__).parents[1] / "recorded" / "sse-streams"
CASES: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(RECORDED / "cases.yaml")["cases"]


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_every_recorded_stream_reads_as_written_down(case: dict[str, Any]) -> None:
    """Each recorded stream gives exactly the outcome, counts, times and warnings of its case."""
    told = replay((RECORDED / case["file"]).read_bytes(), case["request"])
    expected = case["expect"]
    assert {key: told.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["file"].endswith(".sse")], ids=lambda c: c["id"]
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_a_stream_reads_the_same_however_it_is_cut(case: dict[str, Any], size: int) -> None:
    """Packets cut every few bytes change nothing in the reading."""
    body = (RECORDED / case["file"]).read_bytes()
    request = Request.of(case["request"])
    cut = [(0.0, body[at : at + size]) for at in range(0, len(body), size)]
    assert read_stream(cut, request) == read_stream([(0.0, body)], request)


LINES = st.lists(
    st.sampled_from(
        [
            b"data: a",
            b"data:b",
            b"data",
            b"data:",
            b"data:  c",
            b": note",
            b"event: x",
            b"id: 4",
            b"",
        ]
    ),
    max_size=12,
)


@given(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_line_ends_and_cuts_never_change_the_events(
    lines: list[bytes], end: bytes, data: st.DataObject
) -> None:
    """LF, CRLF and CR end a line alike, wherever the packets are cut."""
    whole = EventParser()
    want = [(e.name, e.data) for e in whole.feed(b"".join(line + b"\n" for line in lines))]
    body = b"\xef\xbb\xbf" + b"".join(line + end for line in lines)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)))))
    parser = EventParser()
    got = [
        (e.name, e.data)
        for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True)
        for e in parser.feed(body[start:stop])
    ]
    assert got == want
    assert parser.comments == whole.comments
    assert parser.unfinished == whole.unfinished


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(body: bytes) -> None:
    """Whatever a server sends, the reader gives a reading and no exception."""
    reading = read_stream([(0.0, b"data: " + body + b"\n\n"), (1.0, body)])
    assert reading.outcome == "failed"


def _events(*bodies: object) -> bytes:
    lines = (b if isinstance(b, str) else json.dumps(b) for b in bodies)
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def _chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


@pytest.mark.parametrize(
    ("count", "source"),
    [
        (0, "usage_inconsistent"),
        (1, "usage_inconsistent"),
        (10**9, "usage_inconsistent"),
        (-4, "none"),
        (True, "none"),
        ("7", "none"),
        (2, "usage"),
    ],
)
def test_a_lying_count_is_not_believed(count: object, source: str) -> None:
    """A count that is negative, no number, below the events seen or above what was asked is not trusted."""
    body = _events(_chunk("a"), _chunk("b", "stop", usage={"completion_tokens": count}), "[DONE]")
    reading = read_stream([(0.0, body)], Request(max_tokens=8))
    assert (reading.token_source, reading.outcome) == (source, "ok")
    assert reading.trusted_tokens == (count if source == "usage" else None)


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b"<html><body>502 Bad Gateway</body></html>", "truncated"),
        (_events("not json"), "malformed"),
        (_events([1, 2]), "malformed"),
        (_events({"choices": 7}), "malformed"),
        (_events({"choices": [7]}), "malformed"),
        (_events("[" * 200_000), "malformed"),
        (_events({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}), "empty"),
        (_events("[DONE]"), "empty"),
        (_events(_chunk("a", "content_filter"), "[DONE]"), "aborted"),
        (_events({"object": "error", "message": "no", "code": "503"}), "server_error"),
        (b"event: error\ndata: overloaded\n\n", "server_error"),
        (b"", "truncated"),
    ],
)
def test_bad_answers_are_named(body: bytes, failure: str) -> None:
    """Every way an answer can be no answer has its failure class."""
    assert read_stream([(0.0, body)]).failure == failure


def test_ten_thousand_choices_are_one_event() -> None:
    """A server that sends absurdly many choices is read, and said to have sent several."""
    choices = [
        {"index": i, "delta": {"content": "x"}, "finish_reason": "stop"} for i in range(10_000)
    ]
    reading = read_stream([(0.0, _events({"choices": choices}, "[DONE]"))])
    assert reading.token_events == 1
    assert "several_choices" in reading.warnings


def test_sglang_generate_texts_are_cumulative() -> None:
    """SGLang's own route repeats the text so far; tokens and acceptance come from meta_info."""
    meta = {"prompt_tokens": 5, "cached_tokens": 0, "spec_verify_ct": 2}
    body = _events(
        {"text": " one", "meta_info": {**meta, "completion_tokens": 2, "finish_reason": None}},
        {
            "text": " one two three",
            "meta_info": {**meta, "completion_tokens": 6, "finish_reason": {"type": "length"}},
        },
        "[DONE]",
    )
    reading = read_stream([(0.0, body)], Request(endpoint="generate", max_tokens=6))
    assert (reading.outcome, reading.text) == ("ok", " one two three")
    assert reading.per_event_tokens == (2, 4)
    assert reading.spec_accept_length == 3.0


def test_llamacpp_drafts_give_an_acceptance() -> None:
    """llama.cpp's timings tell drafted and accepted tokens, from which the verify passes follow."""
    timings = {
        "predicted_n": 12,
        "draft_n": 10,
        "draft_n_accepted": 8,
        "predicted_per_second": 50.0,
    }
    body = _events(
        _chunk("a"),
        _chunk("b", "stop", usage={"completion_tokens": 12}, timings=timings),
        "[DONE]",
    )
    reading = read_stream([(0.0, body)])
    assert (reading.spec_verify_ct, reading.spec_accept_length) == (4, 3.0)
    assert (reading.spec_drafted, reading.spec_accepted) == (10, 8)

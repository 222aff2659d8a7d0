"""The HTTP reader: every framing, cut anywhere, and what is no answer."""

from __future__ import annotations

import pytest

from reconciler.bench.answer import Answer, AnswerError

BODY = b"data: one\n\ndata: two and a half\n\ndata: [DONE]\n\n"


def _chunked(*parts: bytes, trailer: bytes = b"") -> bytes:
    chunks = b"".join(f"{len(p):X};x=y\r\n".encode() + p + b"\r\n" for p in parts)
    return (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


def _length(extra: bytes = b"") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n".encode()
    return head + extra + b"\r\n" + BODY


ENDING_BY_THEMSELVES = {
    "chunked": _chunked(BODY[:7], BODY[7:8], BODY[8:]),
    "chunked with a trailer": _chunked(BODY, trailer=b"X-Took: 5\r\n"),
    "content length": _length(),
    "after an interim response": b"HTTP/1.1 100 Continue\r\n\r\n" + _length(),
}


@pytest.mark.parametrize("raw", ENDING_BY_THEMSELVES.values(), ids=ENDING_BY_THEMSELVES)
@pytest.mark.parametrize("size", [1, 2, 3, 10, 10_000])
def test_a_framed_body_is_whole_however_it_is_cut(raw: bytes, size: int) -> None:
    """A response that says where it ends is complete exactly with its last byte, and leaves a usable connection."""
    answer = Answer()
    packets = [raw[at : at + size] for at in range(0, len(raw), size)]
    done = [answer.feed(packet, float(at)) for at, packet in enumerate(packets)]
    assert done == [False] * (len(packets) - 1) + [True]
    assert (answer.status, answer.body, answer.reusable) == (200, BODY, True)


def test_a_piece_has_the_time_of_its_read() -> None:
    """Body bytes carry the arrival time of the read that brought them, one piece a read."""
    answer = Answer()
    raw = _chunked(b"first", b"second", b"third")
    middle = raw.index(b"second")
    answer.feed(raw[:middle], 1.0)
    answer.feed(raw[middle:], 2.0)
    assert answer.pieces == [(1.0, b"first"), (2.0, b"secondthird")]


def test_a_body_without_length_ends_with_the_connection() -> None:
    """Without any framing the end of file is the end of the body."""
    answer = Answer()
    assert not answer.feed(b"HTTP/1.1 200 OK\r\n\r\n" + BODY, 0.0)
    assert answer.end()
    assert (answer.body, answer.reusable) == (BODY, False)


@pytest.mark.parametrize("framing", ["chunked", "content length"])
def test_an_end_of_file_inside_a_framed_body_completes_nothing(framing: str) -> None:
    """A framed body that breaks off is not complete."""
    answer = Answer()
    answer.feed(ENDING_BY_THEMSELVES[framing][:-4], 0.0)
    assert not answer.end()


def test_connection_close_is_honoured() -> None:
    """A server that closes afterwards is not asked again on the same connection."""
    answer = Answer()
    assert answer.feed(_length(b"Connection: close\r\n"), 0.0)
    assert not answer.reusable


def test_bytes_after_the_end_make_the_connection_useless() -> None:
    """What nobody asked for would be taken for the next answer."""
    answer = Answer()
    assert answer.feed(_length() + b"HTTP/1.1 200", 0.0)
    assert not answer.reusable


def test_no_content_is_complete_with_its_head() -> None:
    """204 has no body, whatever the headers say."""
    answer = Answer()
    assert answer.feed(b"HTTP/1.1 204 No Content\r\n\r\n", 0.0)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "malformed"),
        (b"HTTP/2 200 OK\r\n\r\n", "malformed"),
        (b"HTTP/1.1 abc\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 9000, "malformed"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, "malformed"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2_000, "oversized"),
    ],
)
def test_what_is_no_answer_is_named(raw: bytes, kind: str) -> None:
    """Every kind of nonsense ends in an error with its failure class, not in waiting or in memory."""
    answer = Answer(max_bytes=1_000)
    with pytest.raises(AnswerError) as caught:
        answer.feed(raw, 0.0)
    assert caught.value.kind == kind

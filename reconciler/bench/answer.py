"""One HTTP/1.1 response, from bytes to body pieces with their arrival times. Pure.

Written by hand because a general client costs several times more per event than the event is worth
(`bench-gate.md` section 7 has the figures), and because arrival times must be those of the reads. Knows
what inference servers and their proxies send: chunked bodies, Content-Length, bodies that end with the
connection, interim 1xx responses. Knows no request, no connection and no clock.
"""

from __future__ import annotations

_HEAD_LIMIT = 64 * 1024
_LINE_LIMIT = 8 * 1024


class AnswerError(Exception):
    """The bytes are no HTTP response that can be read; `kind` is the failure class."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class Answer:
    """Reads one response, packet by packet.

    `feed` says whether the response is complete; `end` is the connection's end of file. `pieces` are the
    body as (arrival time, bytes), one for each read that held some of it.
    """

    __slots__ = (
        "_chunked",
        "_ends_with_connection",
        "_held",
        "_in_trailer",
        "_left",
        "_max_bytes",
        "complete",
        "headers",
        "pieces",
        "reusable",
        "size",
        "status",
    )

    def __init__(self, *, max_bytes: int = 1 << 20) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []
        self.size = 0
        self.complete = False
        self.reusable = False
        self._max_bytes = max_bytes
        self._held = b""
        self._left = 0
        self._chunked = False
        self._in_trailer = False
        self._ends_with_connection = False

    @property
    def body(self) -> bytes:
        """Give the body so far."""
        return b"".join(piece for _, piece in self.pieces)

    def feed(self, packet: bytes, at: float) -> bool:
        """Take one read; say whether the response is complete now.

        Raises:
            AnswerError: these bytes are no response, or more than this reader takes.
        """
        if not self.status:
            packet = self._take_head(packet)
            if not self.status:
                return False
        if self.complete:
            self.reusable = self.reusable and not packet
            return True
        if self._chunked:
            self._take_chunks(packet, at)
        else:
            self._take_plain(packet, at)
        if self.size > self._max_bytes:
            raise AnswerError("oversized", f"the answer is longer than {self._max_bytes} bytes")
        return self.complete

    def end(self) -> bool:
        """Note the connection's end of file; say whether that completed the response."""
        if self.status and self._ends_with_connection:
            self.complete = True
        self.reusable = False
        return self.complete

    def _take_head(self, packet: bytes) -> bytes:
        """Parse status line and headers once they are all there; return what follows them."""
        held = self._held + packet
        while True:
            head, blank, rest = held.partition(b"\r\n\r\n")
            if not blank:
                if len(held) > _HEAD_LIMIT:
                    raise AnswerError("malformed", f"more than {_HEAD_LIMIT} bytes of headers")
                if held[:5] != b"HTTP/"[: len(held[:5])]:
                    raise AnswerError("malformed", f"no HTTP response: {held[:80]!r}")
                self._held = held
                return b""
            status = _status(head)
            if status >= 200:
                break
            held = rest  # An interim response; the real one follows.
        self._held = b""
        self.status = status
        self._take_headers(head)
        return rest

    def _take_headers(self, head: bytes) -> None:
        version, *lines = head.decode("latin-1").split("\r\n")
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.reusable = "close" not in connection and (
            version.startswith("HTTP/1.1") or "keep-alive" in connection
        )
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self.status in {204, 304}:
            self.complete = True
        elif self._chunked:
            pass
        elif length is None:
            self._ends_with_connection = True
            self.reusable = False
        elif length.isascii() and length.isdigit() and len(length) < 16:
            self._left = int(length)
            self.complete = self._left == 0
        else:
            raise AnswerError("malformed", f"Content-Length is {length[:40]!r}")

    def _take_plain(self, packet: bytes, at: float) -> None:
        if not self._ends_with_connection:
            if len(packet) >= self._left:
                self.complete = True
                self.reusable = self.reusable and len(packet) == self._left
                packet = packet[: self._left]
            self._left -= len(packet)
        if packet:
            self.pieces.append((at, packet))
            self.size += len(packet)

    def _take_chunks(self, packet: bytes, at: float) -> None:
        data = self._held + packet if self._held else packet
        self._held = b""
        place = 0
        parts = []
        while place < len(data):
            if self._left:
                # _left counts the CRLF behind the chunk as well, which is no body.
                taken = min(self._left, len(data) - place)
                body = min(taken, self._left - 2)
                if body > 0:
                    parts.append(data[place : place + body])
                self._left -= taken
                place += taken
                continue
            end = data.find(b"\r\n", place)
            if end < 0:
                self._held = data[place:]
                if len(self._held) > _LINE_LIMIT:
                    raise AnswerError("malformed", "a chunk size without an end")
                break
            line = data[place:end]
            place = end + 2
            if self._in_trailer:
                if not line:
                    self.complete = True
                    self.reusable = self.reusable and place == len(data)
                    break
                continue
            self._left = _chunk_size(line)
            if self._left:
                self._left += 2
            else:
                self._in_trailer = True
        if parts:
            body_bytes = parts[0] if len(parts) == 1 else b"".join(parts)
            self.pieces.append((at, body_bytes))
            self.size += len(body_bytes)


def _status(head: bytes) -> int:
    line = head.split(b"\r\n", 1)[0]
    words = line.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise AnswerError("malformed", f"no HTTP/1 status line: {line[:80]!r}")
    return int(words[1][:3])


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        size = int(digits, 16) if digits[:1] not in {b"-", b"+"} else -1
    except ValueError:
        size = -1
    if size < 0:
        raise AnswerError("malformed", f"no chunk size: {line[:40]!r}")
    return size

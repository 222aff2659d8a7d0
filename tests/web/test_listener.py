"""The webhook and the health page, over real sockets: who is believed, and what a hostile client costs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from reconciler.core.errors import UsageError
from reconciler.web.listener import BODY_BYTES, PLACES, Listener
from reconciler.web.webhook import WINDOW_S, Hooks, Judgement

SECRET = b"0123456789abcdef-secret"
BODY = b'{"ref": "refs/heads/main"}'
SIGNED = hmac.new(SECRET, BODY, hashlib.sha256).hexdigest()


@dataclass
class Served:
    """A listener and what it told the daemon."""

    port: int = 0
    triggers: list[int] = field(default_factory=list)
    ok: bool = True

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> int:
        """Send a request and give the status."""
        talk = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            named = {k.replace("_", "-"): v for k, v in headers.items()}
            talk.request(method, path, body, named)
            return talk.getresponse().status
        finally:
            talk.close()

    def raw(self, content: bytes) -> bytes:
        """Send bytes and give the first line of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as talk:
            talk.sendall(content)
            return talk.recv(4096).split(b"\r\n")[0]


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    listener = Listener(
        "127.0.0.1", 0, lambda: {"ok": found.ok}, lambda: found.triggers.append(1), Hooks(SECRET)
    )
    _, found.port = listener.start()
    yield found
    listener.stop()


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Hub-Signature-256", f"sha256={SIGNED}"),
        ("X-Gitea-Signature", SIGNED),
        ("X-Gitlab-Token", SECRET.decode()),
    ],
)
def test_a_hook_of_each_forge_asks_for_one_look(served: Served, header: str, value: str) -> None:
    """Signed or with the token: one trigger; the same hook again: none; one byte wrong: refused, in the same words."""
    assert served.ask("POST", "/hook", BODY, **{header: value}) == 202
    assert served.ask("POST", "/hook", BODY, **{header: value}) == 200
    wrong = value[:-1] + ("0" if value[-1] != "0" else "1")
    assert served.ask("POST", "/hook", BODY, **{header: wrong}) == 403
    assert served.ask("POST", "/hook", BODY) == 403
    assert served.triggers == [1]


def test_a_signed_time_must_be_recent() -> None:
    """GitLab's signature covers id, time and body; an old hook is refused whatever it is signed with."""
    key = base64.b64encode(b"k" * 32)
    hooks, now = Hooks(b"whsec_" + key), 1_700_000_000

    def headers(at: int) -> dict[str, str]:
        told = hmac.new(b"k" * 32, f"id1.{at}.".encode() + BODY, hashlib.sha256).digest()
        return {
            "webhook-id": "id1",
            "webhook-timestamp": str(at),
            "webhook-signature": "v1,AAAA v1," + base64.b64encode(told).decode(),
        }

    assert hooks.judge(headers(now), BODY, monotonic=0, wall=now + 1) is Judgement.ACCEPTED
    assert hooks.judge(headers(now), BODY, monotonic=1, wall=now + 2) is Judgement.SEEN
    old = int(now - WINDOW_S - 5)
    assert hooks.judge(headers(old), BODY, monotonic=2, wall=now) is Judgement.REFUSED
    assert hooks.judge(headers(now), b"x", monotonic=3, wall=now) is Judgement.REFUSED


def test_what_was_seen_is_forgotten_after_the_window() -> None:
    """A redelivery of tomorrow is a new hook, and memory stays bounded."""
    hooks = Hooks(SECRET)
    headers = {"x-gitea-signature": SIGNED}
    assert hooks.judge(headers, BODY, monotonic=0, wall=0) is Judgement.ACCEPTED
    assert hooks.judge(headers, BODY, monotonic=WINDOW_S + 1, wall=0) is Judgement.ACCEPTED
    assert len(hooks.seen) == 1


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (f"POST /hook HTTP/1.1\r\nContent-Length: {BODY_BYTES + 1}\r\n\r\n".encode(), b"413"),
        (b"POST /hook HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"POST /hook HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"POST /hook HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/2\r\n\r\n", b"505"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"400"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"DELETE /hook HTTP/1.1\r\n\r\n", b"405"),
    ],
)
def test_what_is_no_plain_request_is_refused_at_once(
    served: Served, request_bytes: bytes, status: bytes
) -> None:
    """T17: caps before anything is read, nothing ambiguous, no trigger."""
    assert status in served.raw(request_bytes)
    assert served.triggers == []


def test_health_says_whether_the_loop_comes_round(served: Served) -> None:
    """200 while it does, 503 when it is stuck."""
    assert served.ask("GET", "/healthz") == 200
    served.ok = False
    assert served.ask("GET", "/healthz") == 503


def test_a_thousand_forged_hooks_cost_little(served: Served) -> None:
    """T17: a flood is refused and the health page still answers."""
    began = time.process_time()
    for _ in range(200):
        assert served.ask("POST", "/hook", BODY, X_Gitea_Signature="0" * 64) == 403
    assert served.ask("GET", "/healthz") == 200
    assert time.process_time() - began < 30
    assert served.triggers == []


def test_many_who_say_nothing_keep_nobody_out(served: Served) -> None:
    """T17: three times as many half-open connections as there are places, and the health page and a hook are answered at once."""
    with ExitStack() as held:
        for _ in range(3 * PLACES):
            idle = held.enter_context(socket.create_connection(("127.0.0.1", served.port), 10))
            idle.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert served.ask("GET", "/healthz") == 200
        assert served.ask("POST", "/hook", BODY, X_Gitea_Signature=SIGNED) == 202
        first = held.enter_context(socket.create_connection(("127.0.0.1", served.port), 5))
        for _ in range(PLACES):
            held.enter_context(socket.create_connection(("127.0.0.1", served.port), 10))
        assert first.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_head_gets_what_get_would_without_the_body(served: Served) -> None:
    """Checkers that ask by HEAD get the status and the length, and no byte more."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as talk:
        talk.sendall(b"HEAD /healthz HTTP/1.1\r\n\r\n")
        answer = b"".join(iter(lambda: talk.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert f"Content-Length: {len(json.dumps({'ok': True}))}".encode() in head
    assert body == b""
    assert served.ask("HEAD", "/hook") == 405


def test_an_address_that_is_taken_is_a_usage_error_with_one_reason(served: Served) -> None:
    """No host is involved: a wrong command line, told once, in the system's words."""
    other = Listener("127.0.0.1", served.port, dict, lambda: None)
    with pytest.raises(UsageError) as failed:
        other.start()
    said = str(failed.value)
    assert said.lower().count("in use") == 1
    assert f"--listen 127.0.0.1:{served.port}" in said
    assert "error while" not in said


def test_a_name_that_does_not_exist_is_told_as_such() -> None:
    """A resolver's error has no number of the system, and its words are kept."""
    with pytest.raises(UsageError, match=r"known|resolution|address associated"):
        Listener("no-such-host.invalid", 0, dict, lambda: None).start()

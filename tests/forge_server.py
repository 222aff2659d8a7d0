"""A forge on loopback that keeps comments and statuses and answers as GitHub, GitLab and Gitea do, also when they fail.

The shapes are those of the forges' own API documentation, with the fields that are read and some that are not.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ME = {"github": "ci-bot", "gitlab": "ci-bot", "gitea": "ci-bot"}
TOKEN = "t0ken-of-the-test"


@dataclass
class Kept:
    """One comment as the forge keeps it."""

    id: int
    body: str
    author: str
    bot: bool = False


Fault = Callable[["ForgeHandler"], bool]
"""Called with each request before it is answered; true when it answered in its own way."""


@dataclass
class FakeForge:
    """What the forge has, and what it was asked."""

    kind: str
    url: str = ""
    comments: list[Kept] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """Of each status, the commit that it stands beside."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    after: list[Fault] = field(default_factory=list)
    may_ask_who: bool = True
    per_page: int = 2

    @property
    def root(self) -> str:
        """Give where the API begins."""
        return {"github": "", "gitlab": "/api/v4", "gitea": "/api/v1"}[self.kind]

    def bodies(self) -> list[str]:
        """Give what stands there."""
        return [c.body for c in self.comments]

    def add(self, body: str, author: str = "ci-bot", *, bot: bool = False) -> Kept:
        """Keep a comment."""
        kept = Kept(len(self.asked) + len(self.comments) + 100, body, author, bot)
        self.comments.append(kept)
        return kept

    def shape(self, kept: Kept) -> dict[str, Any]:
        """Give a comment as this forge shows it."""
        common = {"id": kept.id, "body": kept.body, "created_at": "2026-08-01T12:00:00Z"}
        if self.kind == "gitlab":
            return {
                **common, "type": None, "system": kept.author == "", "resolvable": False,
                "author": {"id": 7, "username": kept.author, "state": "active"},
            }  # fmt: skip
        kind = {"type": "Bot" if kept.bot else "User"} if self.kind == "github" else {}
        return {**common, "user": {"login": kept.author, "id": 7, **kind}, "html_url": "x"}


class ForgeHandler(BaseHTTPRequestHandler):
    """One request."""

    forge: FakeForge
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        """Say nothing."""

    def answer(self, code: int, data: Any = None, **headers: str) -> None:
        """Send JSON."""
        body = b"" if data is None else json.dumps(data).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do(self) -> None:
        """Answer as the forge would."""
        length = int(self.headers.get("Content-Length") or 0)
        self.sent = json.loads(self.rfile.read(length)) if length else None
        parts = urlsplit(self.path)
        self.forge.asked.append((self.command, unquote(parts.path)))
        if self.forge.faults and self.forge.faults.pop(0)(self):
            return
        shown = {"github": "Authorization", "gitlab": "PRIVATE-TOKEN", "gitea": "Authorization"}
        if TOKEN not in (self.headers.get(shown[self.forge.kind]) or ""):
            self.answer(401, {"message": "Bad credentials"})
            return
        self.route(unquote(parts.path).removeprefix(self.forge.root), parse_qs(parts.query))

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = do  # noqa: N815  (the names that http.server calls)

    def route(self, path: str, query: dict[str, list[str]]) -> None:
        """Find what is asked for."""
        forge = self.forge
        if path == "/user":
            if not forge.may_ask_who:
                self.answer(403, {"message": "Resource not accessible by integration"})
                return
            self.answer(200, {"id": 7, "login": "ci-bot", "username": "ci-bot"})
        elif re.search(r"/statuses/[0-9a-f]{40}$", path) and self.command == "POST":
            self.status()
        elif re.search(r"/(issues|merge_requests)/7/(comments|notes)$", path):
            self.listing(query) if self.command == "GET" else self.create()
        elif match := re.search(r"/(?:comments|notes)/(\d+)$", path):
            self.one(int(match[1]))
        else:
            self.answer(404, {"message": "Not Found"})

    def listing(self, query: dict[str, list[str]]) -> None:
        """Give comments: in pages on GitHub and GitLab, all at once on Gitea."""
        forge = self.forge
        if forge.kind == "gitea":
            self.answer(200, [forge.shape(c) for c in forge.comments])
            return
        page = int(query["page"][0])
        first = (page - 1) * forge.per_page
        shown = [forge.shape(c) for c in forge.comments[first : first + forge.per_page]]
        more = len(forge.comments) > first + forge.per_page
        link = f'<https://elsewhere.example/x?page={page + 1}>; rel="next"' if more else ""
        self.answer(200, shown, **({"Link": link} if link else {}))

    def create(self) -> None:
        """Keep a new comment; an `after` fault strikes when it is kept and not yet answered."""
        assert self.sent is not None
        kept = self.forge.add(self.sent["body"])
        if self.forge.after and self.forge.after.pop(0)(self):
            return
        self.answer(201, self.forge.shape(kept))

    def one(self, number: int) -> None:
        """Change or remove a comment."""
        kept = next((c for c in self.forge.comments if c.id == number), None)
        if kept is None:
            self.answer(404, {"message": "Not Found"})
        elif self.command == "DELETE":
            self.forge.comments.remove(kept)
            self.answer(204)
        else:
            assert self.sent is not None
            kept.body = self.sent["body"]
            self.answer(200, self.forge.shape(kept))

    def status(self) -> None:
        """Keep a status; GitLab refuses the same state again."""
        assert self.sent is not None
        name = self.sent.get("context") or self.sent.get("name")
        last = next(
            (
                s
                for s in reversed(self.forge.statuses)
                if (s.get("context") or s.get("name")) == name
            ),
            None,
        )
        if self.forge.kind == "gitlab" and last and last["state"] == self.sent["state"]:
            why = f'Cannot transition status via :enqueue from :{last["state"]} (Reason(s): Status cannot transition via "enqueue")'
            self.answer(400, {"message": why})
            return
        self.forge.statuses.append(self.sent)
        self.forge.commits.append(self.path.partition("/statuses/")[2][:40])
        self.answer(201, {"id": len(self.forge.statuses), **self.sent})


@contextmanager
def forge_server(kind: str) -> Iterator[FakeForge]:
    """Serve one forge for the time of a test."""
    forge = FakeForge(kind)
    handler = type("Handler", (ForgeHandler,), {"forge": forge})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    forge.url = f"http://127.0.0.1:{server.server_address[1]}{forge.root}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield forge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -- faults -------------------------------------------------------------------------------------------------------


def limited(handler: ForgeHandler) -> bool:
    """Too many requests."""
    handler.answer(429, {"message": "slow down"}, Retry_After="3")
    return True


def limited_as_forbidden(handler: ForgeHandler) -> bool:
    """GitHub's second way of saying so."""
    handler.answer(403, {"message": "secondary rate limit"}, Retry_After="7")
    return True


def broken(handler: ForgeHandler) -> bool:
    """The forge is being restarted."""
    handler.answer(502, {"message": "bad gateway"})
    return True


def hangs_up(handler: ForgeHandler) -> bool:
    """The connection ends without an answer."""
    handler.close_connection = True
    return True


def elsewhere(handler: ForgeHandler) -> bool:
    """It has moved to another host."""
    handler.answer(307, None, Location="http://127.0.0.1:9/steal")
    return True


def flood(handler: ForgeHandler) -> bool:
    """An answer without an end."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    chunk = b"x" * 65536
    try:
        while True:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
    except OSError:
        handler.close_connection = True
    return True


def echoes_the_token(handler: ForgeHandler) -> bool:
    """A proxy quotes what it was sent."""
    handler.answer(400, {"message": f"bad header {TOKEN}"})
    return True

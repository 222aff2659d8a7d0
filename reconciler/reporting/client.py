"""Asks a forge: bounded, patient, and with the token for one address alone.

Needs httpx (`pip install 'inference-reconciler[forge]'`), imported when used. A question that does no harm twice is asked
again after a failure; writing a comment is not, as it may have been written: the comments are read again first.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from reconciler.reporting.base import (
    Call,
    Comment,
    Forge,
    ForgeError,
    Place,
    Status,
    checked_place,
    mine,
)

if TYPE_CHECKING:
    import httpx

ATTEMPTS: Final = 5
WAITS_S: Final = (1.0, 2.0, 4.0, 8.0)
MAX_WAIT_S: Final = 60.0
"""A forge that asks for more is given up on: a build waits for us."""
TIMEOUT_S: Final = 20.0
MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
"""Fifty comments of GitHub's longest are an eighth of this."""
MAX_PAGES: Final = 60
RETRIED: Final = frozenset({429, 500, 502, 503, 504})
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class _UnsureError(Exception):
    """It may have been done, and nobody said so."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a forge said."""

    code: int
    headers: Mapping[str, str]
    data: Any


class ForgeClient:
    """One forge, one place, one token."""

    def __init__(
        self,
        forge: Forge,
        place: Place,
        token: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.forge = forge
        self.place = checked_place(place)
        self._sleep = sleep
        self._token = token
        self._api = checked_api(place.api)
        self._client = _http(forge.headers(token))
        self._me: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    # -- what is done ------------------------------------------------------------------------------------

    def put_comments(
        self, bodies: Sequence[str], part_of: Callable[[str], int | None], *, create: bool = True
    ) -> str:
        """Make our comments these, and no others: written over, added, or taken away. Says what was done.

        Args:
            bodies: The parts, in order.
            part_of: Which part of ours a body is, None for anybody else's.
            create: Whether to write a first comment where there is none of ours.

        Raises:
            ForgeError: The forge refuses, or cannot be reached.
        """
        for _ in range(ATTEMPTS):
            try:
                return self._put(bodies, part_of, create=create)
            except _UnsureError:
                continue
        raise ForgeError(
            f"{self._api}: a comment was sent {ATTEMPTS} times and never confirmed; it may stand there"
        )

    def set_status(self, status: Status) -> None:
        """Say how the commit stands.

        Raises:
            ForgeError: The forge refuses, or cannot be reached.
        """
        answer = self._ask(self.forge.set_status(self.place, status))
        if answer.code >= 300 and not self.forge.is_set_already(answer.code, answer.data):
            raise self._refused("the status could not be set", answer)

    def _put(
        self, bodies: Sequence[str], part_of: Callable[[str], int | None], *, create: bool
    ) -> str:
        there: dict[int, Comment] = {}
        surplus: list[Comment] = []
        for comment in self._ours(part_of):
            part = part_of(comment.body)
            assert part is not None, "only ours are given"
            if part in there or part > len(bodies):
                surplus.append(comment)
            else:
                there[part] = comment
        if not there and not create:
            return "nothing to say, and nothing said before"
        done = []
        for part, body in enumerate(bodies, 1):
            old = there.get(part)
            if old is None:
                self._write(self.forge.create_comment(self.place, body))
                done.append("written")
            elif not _same(old.body, body):
                self._write(self.forge.update_comment(self.place, old.id, body))
                done.append("updated")
        for comment in surplus:
            self._write(self.forge.delete_comment(self.place, comment.id), gone_is_fine=True)
            done.append("removed")
        return ", ".join(f"{done.count(w)} {w}" for w in dict.fromkeys(done)) or "as it was"

    def _ours(self, part_of: Callable[[str], int | None]) -> list[Comment]:
        found: list[Comment] = []
        for page in range(1, MAX_PAGES + 1):
            answer = self._ask(self.forge.list_comments(self.place, page))
            if answer.code != 200 or not isinstance(answer.data, list):
                raise self._refused("the comments could not be read", answer)
            try:
                found += self.forge.comments(answer.data)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                message = (
                    f"{self._api}: the comments have an unexpected shape ({type(error).__name__})"
                )
                raise ForgeError(message) from error
            if not _has_next(answer.headers):
                break
        marked = [c for c in found if part_of(c.body) is not None]
        if not marked:
            return []
        me = self._who()
        return [c for c in marked if mine(c, me)]

    def _who(self) -> str:
        """Give whose token it is; empty where it may not ask (a workflow's own)."""
        if self._me is None:
            answer = self._ask(self.forge.whoami())
            try:
                self._me = self.forge.identity(answer.data) if answer.code == 200 else ""
            except (KeyError, TypeError, ValueError):
                self._me = ""
        return self._me

    def _write(self, call: Call, *, gone_is_fine: bool = False) -> None:
        answer = self._ask(call)
        if answer.code >= 300 and not (gone_is_fine and answer.code == 404):
            raise self._refused("the comment could not be written", answer)

    # -- how it is asked ---------------------------------------------------------------------------------

    def _ask(self, call: Call) -> Answer:
        """Ask, again where that helps and does no harm.

        Raises:
            ForgeError: No answer came, or one that leads elsewhere.
            _UnsureError: It may have been done; look first.
        """
        import httpx  # noqa: PLC0415  (an extra)

        why = ""
        for attempt in range(ATTEMPTS):
            try:
                answer = self._once(call)
            except httpx.ConnectError as error:
                why, answer = self._plain(error), None  # Nothing was sent.
            except httpx.TransportError as error:
                if not call.repeatable:
                    self._sleep(WAITS_S[0])
                    raise _UnsureError from error
                why, answer = self._plain(error), None
            if answer is not None:
                if answer.code not in RETRIED and not _is_limited(answer):
                    return self._not_elsewhere(answer)
                if answer.code >= 500 and not call.repeatable:
                    self._sleep(WAITS_S[0])
                    raise _UnsureError
                why = f"HTTP {answer.code}"
            if attempt + 1 < ATTEMPTS:
                self._sleep(_wait_s(answer, attempt))
        raise ForgeError(f"{self._api}: no answer after {ATTEMPTS} tries ({why})")

    def _once(self, call: Call) -> Answer:
        url = f"{self._api}{call.path}"
        with self._client.stream(
            call.method, url, params=dict(call.query) or None, json=call.body
        ) as answer:
            content = bytearray()
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    message = f"{self._api}: the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB"
                    raise ForgeError(message)
            try:
                data = json.loads(content) if content else None
            except (ValueError, RecursionError):
                data = None
            return Answer(answer.status_code, dict(answer.headers), data)

    def _not_elsewhere(self, answer: Answer) -> Answer:
        if 300 <= answer.code < 400:
            where = urlsplit(answer.headers.get("location", "")).netloc or "elsewhere"
            message = f"{self._api}: answers that it has moved to {self._clean(where)[:100]}; not followed, as the token is for one address. Name the new one"
            raise ForgeError(message)
        return answer

    def _refused(self, what: str, answer: Answer) -> ForgeError:
        said = answer.data.get("message", "") if isinstance(answer.data, Mapping) else ""
        hint = {401: "; is the token valid?", 403: "; may the token write here?", 404: "; no such place, or the token may not see it"}  # fmt: skip
        return ForgeError(
            f"{self._api}: {what}: HTTP {answer.code} {self._clean(str(said))[:200]}{hint.get(answer.code, '')}"
        )

    def _plain(self, error: Exception) -> str:
        return self._clean(f"{type(error).__name__}: {error}")[:200]

    def _clean(self, text: str) -> str:
        """Never print a token, whoever quotes it, nor what could move a cursor."""
        text = text.replace(self._token, "***") if self._token else text
        return "".join(c if c.isprintable() else "?" for c in text)


def _http(headers: Mapping[str, str]) -> httpx.Client:
    try:
        import httpx  # noqa: PLC0415  (an extra)
    except ImportError:
        message = "posting to a forge needs httpx: pip install 'inference-reconciler[forge]'"
        raise ForgeError(message) from None

    class Ours(httpx.Auth):
        """Our headers, so that no netrc file answers in their place."""

        def auth_flow(self, request: httpx.Request) -> Any:
            request.headers.update(headers)
            yield request

    return httpx.Client(auth=Ours(), timeout=TIMEOUT_S, follow_redirects=False)


def checked_api(url: str) -> str:
    """Give an API's address.

    Raises:
        ForgeError: It would show the token to anybody on the way, or is no address.
    """
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
        raise ForgeError(
            "the address of the API must be https://host/path, and hold no user or query"
        )
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        message = f"{url!r}: anybody on the way could read the token; use https"
        raise ForgeError(message)
    return url.rstrip("/")


def _has_next(headers: Mapping[str, str]) -> bool:
    """Say whether there is one more page; where it is said to be is not looked at."""
    return re.search(r'rel="?next"?', headers.get("link", "")) is not None


def _is_limited(answer: Answer) -> bool:
    """Say whether a 403 is GitHub's way of saying 429."""
    return answer.code == 403 and (
        "retry-after" in answer.headers or answer.headers.get("x-ratelimit-remaining") == "0"
    )


def _wait_s(answer: Answer | None, attempt: int) -> float:
    asked = answer.headers.get("retry-after", "") if answer is not None else ""
    if asked.isdecimal():
        return min(float(asked), MAX_WAIT_S)
    return WAITS_S[min(attempt, len(WAITS_S) - 1)]


def _same(old: str, new: str) -> bool:
    """Compare as forges keep text: their line ends and the last empty lines are their own."""
    return old.replace("\r\n", "\n").rstrip() == new.rstrip()

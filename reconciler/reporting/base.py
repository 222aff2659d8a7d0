"""A forge: what to ask of its HTTP API and how to read what it answers. Pure; `client.py` does the asking.

A family: one module per forge, and this is what they have in common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from reconciler.core.conditions import CommitStatus
from reconciler.core.errors import ReconcilerError

REPOSITORY: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,99}){1,19}\Z"
)
COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")


class ForgeError(ReconcilerError):
    """A forge did not do what was asked of it; the message never holds a token."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to write: a repository, and in it a pull request and a commit, where there are any."""

    forge: str
    api: str
    repository: str
    request: int | None = None
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One question. `repeatable` says whether asking it twice does no more than asking once."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: tuple[tuple[str, str], ...] = ()
    repeatable: bool = True


@dataclass(frozen=True, slots=True)
class Comment:
    """One comment under a pull request. `author` is empty where the forge does not say."""

    id: int
    body: str
    author: str
    bot: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """What stands beside a commit: one line for each context, the newest counts."""

    context: str
    state: CommitStatus
    description: str
    url: str = ""


class Forge(Protocol):
    """What one forge's API looks like."""

    @property
    def name(self) -> str:
        """The word under `--forge`."""

    @property
    def comment_limit(self) -> int:
        """How long a comment may be."""

    def headers(self, token: str) -> Mapping[str, str]:
        """Say who we are."""

    def whoami(self) -> Call:
        """Ask whose token it is."""

    def identity(self, answer: Any) -> str:
        """Read whose token it is."""

    def list_comments(self, place: Place, page: int) -> Call:
        """Ask for one page of comments."""

    def comments(self, answer: Any) -> Sequence[Comment]:
        """Read one page of comments."""

    def create_comment(self, place: Place, body: str) -> Call:
        """Write a comment."""

    def update_comment(self, place: Place, number: int, body: str) -> Call:
        """Write a comment anew."""

    def delete_comment(self, place: Place, number: int) -> Call:
        """Take a comment away."""

    def set_status(self, place: Place, status: Status) -> Call:
        """Say how a commit stands."""

    def is_set_already(self, code: int, answer: Any) -> bool:
        """Say whether a refusal of `set_status` means that the status was that already."""


def mine(comment: Comment, me: str) -> bool:
    """Say whether a comment is ours to write over: by its author, or, for a token that may not ask who it is, any bot's.

    Anybody can copy our hidden mark into a comment of their own; written over, it would speak for us and stay theirs.
    """
    return comment.author == me if me else comment.bot


def checked_place(place: Place) -> Place:
    """Give the place if every part of it is what it should be.

    Raises:
        ForgeError: A part is missing, or could lead elsewhere.
    """
    wrong = ""
    name = place.repository
    if not name.isdecimal() and (not REPOSITORY.match(name) or ".." in name):
        wrong = f"{place.repository!r} is no repository (owner/name)"
    elif place.commit and not COMMIT.match(place.commit):
        wrong = f"{place.commit!r} is no full commit id"
    elif place.request is not None and place.request < 1:
        wrong = f"{place.request} is no number of a pull request"
    if wrong:
        raise ForgeError(f"{wrong}; nothing was posted")
    return place


def clipped(text: str, limit: int) -> str:
    """Cut a line to what a forge takes."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"

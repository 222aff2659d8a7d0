"""Gitea's and Forgejo's REST API: much like GitHub's, with comments in one piece and a way of its own to show a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reconciler.reporting.base import Call, Comment, Place, Status
from reconciler.reporting.issue_calls import (
    author_of,
    comments_path,
    create_comment,
    delete_comment,
    identity,
    is_set_already,
    status_call,
    update_comment,
    whoami,
)

name: Final = "gitea"
comment_limit: Final = 65_536
DESCRIPTION: Final = 255


def headers(token: str) -> Mapping[str, str]:
    """Say who we are."""
    return {"Authorization": f"token {token}", "Accept": "application/json"}


def list_comments(place: Place, page: int) -> Call:  # noqa: ARG001  (there are no pages: all come at once)
    """Ask for the comments."""
    return Call("GET", comments_path(place))


def comments(answer: Any) -> Sequence[Comment]:
    """Read the comments."""
    return [Comment(int(c["id"]), str(c.get("body") or ""), author_of(c)) for c in answer or ()]


def set_status(place: Place, status: Status) -> Call:
    """Say how a commit stands."""
    return status_call(place, status, limit=DESCRIPTION, link={"target_url": status.url})


__all__ = [
    "comment_limit",
    "comments",
    "create_comment",
    "delete_comment",
    "headers",
    "identity",
    "is_set_already",
    "list_comments",
    "name",
    "set_status",
    "update_comment",
    "whoami",
]

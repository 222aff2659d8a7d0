"""GitHub's REST API: issue comments, and commit statuses."""

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

name: Final = "github"
comment_limit: Final = 65_536
PER_PAGE: Final = 50
DESCRIPTION: Final = 140


def headers(token: str) -> Mapping[str, str]:
    """Say who we are, and which version of the API we speak."""
    return {
        "Authorization": f"Bearer {token}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }


def list_comments(place: Place, page: int) -> Call:
    """Ask for one page of comments."""
    query = (("per_page", str(PER_PAGE)), ("page", str(page)))
    return Call("GET", comments_path(place), query=query)


def comments(answer: Any) -> Sequence[Comment]:
    """Read one page of comments."""
    return [
        Comment(
            int(c["id"]),
            str(c.get("body") or ""),
            author_of(c),
            (c.get("user") or {}).get("type") == "Bot",
        )
        for c in answer
    ]


def set_status(place: Place, status: Status) -> Call:
    """Say how a commit stands; an empty link would be refused."""
    link = {"target_url": status.url} if status.url else {}
    return status_call(place, status, limit=DESCRIPTION, link=link)


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

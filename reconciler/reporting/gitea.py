"""Gitea's and Forgejo's REST API: much like GitHub's, with comments in one piece and a way of its own to show a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reconciler.reporting.base import Call, Comment, Place, Status, clipped

name: Final = "gitea"
comment_limit: Final = 65_536
DESCRIPTION: Final = 255


def headers(token: str) -> Mapping[str, str]:
    """Say who we are."""
    return {"Authorization": f"token {token}", "Accept": "application/json"}


def whoami() -> Call:
    """Ask whose token it is."""
    return Call("GET", "/user")


def identity(answer: Any) -> str:
    """Read whose token it is."""
    return str(answer["login"])


def list_comments(place: Place, page: int) -> Call:  # noqa: ARG001  (there are no pages: all come at once)
    """Ask for the comments."""
    return Call("GET", f"/repos/{place.repository}/issues/{place.request}/comments")


def comments(answer: Any) -> Sequence[Comment]:
    """Read the comments."""
    return [
        Comment(
            int(c["id"]), str(c.get("body") or ""), str((c.get("user") or {}).get("login") or "")
        )
        for c in answer or ()
    ]


def create_comment(place: Place, body: str) -> Call:
    """Write a comment."""
    path = f"/repos/{place.repository}/issues/{place.request}/comments"
    return Call("POST", path, {"body": body}, repeatable=False)


def update_comment(place: Place, number: int, body: str) -> Call:
    """Write a comment anew."""
    return Call("PATCH", f"/repos/{place.repository}/issues/comments/{number}", {"body": body})


def delete_comment(place: Place, number: int) -> Call:
    """Take a comment away."""
    return Call("DELETE", f"/repos/{place.repository}/issues/comments/{number}")


def set_status(place: Place, status: Status) -> Call:
    """Say how a commit stands."""
    body = {
        "state": status.state.value,
        "context": status.context,
        "description": clipped(status.description, DESCRIPTION),
        "target_url": status.url,
    }
    return Call("POST", f"/repos/{place.repository}/statuses/{place.commit}", body)


def is_set_already(code: int, answer: Any) -> bool:  # noqa: ARG001  (the protocol's)
    """Gitea takes the same status again."""
    return False

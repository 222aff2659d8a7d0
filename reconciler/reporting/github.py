"""GitHub's REST API: issue comments, and commit statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reconciler.reporting.base import Call, Comment, Place, Status, clipped

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


def whoami() -> Call:
    """Ask whose token it is; the token of a workflow may not ask."""
    return Call("GET", "/user")


def identity(answer: Any) -> str:
    """Read whose token it is."""
    return str(answer["login"])


def list_comments(place: Place, page: int) -> Call:
    """Ask for one page of comments."""
    query = (("per_page", str(PER_PAGE)), ("page", str(page)))
    return Call("GET", f"/repos/{place.repository}/issues/{place.request}/comments", query=query)


def comments(answer: Any) -> Sequence[Comment]:
    """Read one page of comments; an account that is gone has no author."""
    return [
        Comment(
            int(c["id"]),
            str(c.get("body") or ""),
            str((c.get("user") or {}).get("login") or ""),
            (c.get("user") or {}).get("type") == "Bot",
        )
        for c in answer
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
        **({"target_url": status.url} if status.url else {}),
    }
    return Call("POST", f"/repos/{place.repository}/statuses/{place.commit}", body)


def is_set_already(code: int, answer: Any) -> bool:  # noqa: ARG001  (the protocol's)
    """GitHub takes the same status again."""
    return False

"""The calls that GitHub's API and Gitea's have in common; each forge's module names those that it takes over in its `__all__`."""

from __future__ import annotations

from typing import Any

from reconciler.reporting.base import Call, Place, Status, clipped


def whoami() -> Call:
    """Ask whose token it is; the token of a workflow may not ask."""
    return Call("GET", "/user")


def identity(answer: Any) -> str:
    """Read whose token it is."""
    return str(answer["login"])


def author_of(comment: Any) -> str:
    """Read who wrote a comment; an account that is gone has no name."""
    return str((comment.get("user") or {}).get("login") or "")


def comments_path(place: Place) -> str:
    """Give where the comments of a pull request are."""
    return f"/repos/{place.repository}/issues/{place.request}/comments"


def create_comment(place: Place, body: str) -> Call:
    """Write a comment."""
    return Call("POST", comments_path(place), {"body": body}, repeatable=False)


def update_comment(place: Place, number: int, body: str) -> Call:
    """Write a comment anew."""
    return Call("PATCH", f"/repos/{place.repository}/issues/comments/{number}", {"body": body})


def delete_comment(place: Place, number: int) -> Call:
    """Take a comment away."""
    return Call("DELETE", f"/repos/{place.repository}/issues/comments/{number}")


def status_call(place: Place, status: Status, *, limit: int, link: dict[str, str]) -> Call:
    """Say how a commit stands, in so many characters; `link` is how this forge is told of a page."""
    body = {
        "state": status.state.value,
        "context": status.context,
        "description": clipped(status.description, limit),
        **link,
    }
    return Call("POST", f"/repos/{place.repository}/statuses/{place.commit}", body)


def is_set_already(code: int, answer: Any) -> bool:  # noqa: ARG001  (the protocol's)
    """Say that no refusal means that the status was that already: both take the same one again."""
    return False

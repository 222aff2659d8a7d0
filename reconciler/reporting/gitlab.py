"""GitLab's REST API: notes of merge requests, and commit statuses (external jobs of a pipeline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from reconciler.core.conditions import CommitStatus
from reconciler.reporting.base import Call, Comment, Place, Status, clipped

name: Final = "gitlab"
comment_limit: Final = 1_000_000
PER_PAGE: Final = 50
DESCRIPTION: Final = 255
STATES: Final = {
    CommitStatus.SUCCESS: "success",
    CommitStatus.PENDING: "pending",
    CommitStatus.FAILURE: "failed",
    CommitStatus.ERROR: "failed",
}


def headers(token: str) -> Mapping[str, str]:
    """Say who we are."""
    return {"PRIVATE-TOKEN": token}


def whoami() -> Call:
    """Ask whose token it is."""
    return Call("GET", "/user")


def identity(answer: Any) -> str:
    """Read whose token it is."""
    return str(answer["username"])


def _project(place: Place) -> str:
    return f"/projects/{quote(place.repository, safe='')}"


def list_comments(place: Place, page: int) -> Call:
    """Ask for one page of notes, oldest first."""
    query = (
        ("per_page", str(PER_PAGE)), ("page", str(page)), ("sort", "asc"), ("order_by", "created_at"),
    )  # fmt: skip
    return Call("GET", f"{_project(place)}/merge_requests/{place.request}/notes", query=query)


def comments(answer: Any) -> Sequence[Comment]:
    """Read one page of notes; what GitLab writes itself is none of ours."""
    return [
        Comment(
            int(n["id"]), str(n.get("body") or ""), str((n.get("author") or {}).get("username") or "")
        )
        for n in answer
        if not n.get("system")
    ]  # fmt: skip


def create_comment(place: Place, body: str) -> Call:
    """Write a note."""
    path = f"{_project(place)}/merge_requests/{place.request}/notes"
    return Call("POST", path, {"body": body}, repeatable=False)


def update_comment(place: Place, number: int, body: str) -> Call:
    """Write a note anew."""
    path = f"{_project(place)}/merge_requests/{place.request}/notes/{number}"
    return Call("PUT", path, {"body": body})


def delete_comment(place: Place, number: int) -> Call:
    """Take a note away."""
    return Call("DELETE", f"{_project(place)}/merge_requests/{place.request}/notes/{number}")


def set_status(place: Place, status: Status) -> Call:
    """Say how a commit stands."""
    body = {
        "state": STATES[status.state],
        "name": status.context,
        "description": clipped(status.description, DESCRIPTION),
        **({"target_url": status.url} if status.url else {}),
    }
    return Call("POST", f"{_project(place)}/statuses/{place.commit}", body)


def is_set_already(code: int, answer: Any) -> bool:
    """GitLab refuses the step from a state to itself: `Cannot transition status via :enqueue from :pending`."""
    message = str(answer.get("message") if isinstance(answer, Mapping) else "")
    return code == 400 and "Cannot transition status" in message

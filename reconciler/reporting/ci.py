"""Where a build runs, by the variables that its forge sets: which repository, pull request and commit it is about. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from reconciler.core.errors import plain
from reconciler.reporting.base import ForgeError, Place

TOKENS: Final = {
    "github": ("GITHUB_TOKEN", "GH_TOKEN"),
    "gitlab": ("GITLAB_TOKEN",),
    "gitea": ("GITEA_TOKEN", "GITHUB_TOKEN"),
}
"""GitLab's CI_JOB_TOKEN may write neither notes nor statuses, so it is not among them."""


def place_of(environ: Mapping[str, str], read: Callable[[str], bytes]) -> Place | None:
    """Read the place from the build's variables; None where no known forge runs this.

    Args:
        environ: The variables.
        read: Reads the file that describes the event.
    """
    if environ.get("GITLAB_CI") == "true":
        request = environ.get("CI_MERGE_REQUEST_IID", "")
        return Place(
            "gitlab",
            environ.get("CI_API_V4_URL", ""),
            environ.get("CI_PROJECT_ID", ""),
            int(request) if request.isdecimal() else None,
            environ.get("CI_COMMIT_SHA", ""),
        )
    if environ.get("GITHUB_ACTIONS") != "true" and environ.get("GITEA_ACTIONS") != "true":
        return None
    forge = "gitea" if environ.get("GITEA_ACTIONS") == "true" else "github"
    event = _event(environ.get("GITHUB_EVENT_PATH", ""), read)
    pull = event.get("pull_request")
    pull = pull if isinstance(pull, Mapping) else {}
    number = pull.get("number")
    head = pull.get("head")
    sha = head.get("sha") if isinstance(head, Mapping) else None
    return Place(
        forge,
        environ.get("GITHUB_API_URL", ""),
        environ.get("GITHUB_REPOSITORY", ""),
        number if isinstance(number, int) else None,
        str(sha or environ.get("GITHUB_SHA", "")),
    )


def _event(path: str, read: Callable[[str], bytes]) -> Mapping[str, Any]:
    if not path:
        return {}
    try:
        data = json.loads(read(path))
    except (OSError, ValueError) as error:
        message = f"{path}: the event of this build cannot be read ({plain(error)})"
        raise ForgeError(message) from error
    return data if isinstance(data, dict) else {}


def token_in(environ: Mapping[str, str], forge: str) -> str:
    """Give the token that the build has for its forge; empty where it has none."""
    return next((environ[name] for name in TOKENS[forge] if environ.get(name)), "")

"""Makes the reporter that an operator asked for; `wiring.py` calls it with what the settings say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from reconciler.core.errors import UsageError
from reconciler.core.standing import REPEAT_S
from reconciler.reporting.base import Place, checked_place
from reconciler.reporting.client import checked_api
from reconciler.reporting.forges import FORGES
from reconciler.reporting.notes import STATUS_FILE, BranchStatuses, GitNotes
from reconciler.reporting.reporter import MessageSink, Reporter, StatusSink
from reconciler.reporting.sinks import AppriseMessages, ForgeStatuses
from reconciler.sources.git_binary import Credentials, Git, read_secret
from reconciler.sources.own_branch import own_branch


@dataclass(frozen=True, slots=True)
class ReportTo:
    """Where an operator wants reports; what is empty is not reported to."""

    state_dir: Path
    forge: str = ""
    api: str = ""
    repository: str = ""
    token_file: Path | None = None
    messages_file: Path | None = None
    """Apprise addresses, one a line, in a file that only its owner reads."""
    url: str = ""
    """Of a page about this fleet, for statuses to link to."""
    repeat_s: float = REPEAT_S
    notes_mirror: Path | None = None
    """The mirror that specs are read from, where a note is to be kept for each commit."""
    notes_url: str = ""
    """Where notes are pushed to, with credentials that may write there."""
    status_branch: tuple[str, str] = ("", "")
    """A repository and a branch of it where statuses are kept as a file."""
    credentials: Credentials = field(default_factory=Credentials)


def reporter_of(to: ReportTo, wall: Callable[[], float] = time.time) -> Reporter | None:
    """Give the reporter, not yet started; None where nothing is reported to.

    Raises:
        UsageError: What is said does not name a place.
        ForgeError: The address would show the token, or leads elsewhere.
    """
    statuses: list[StatusSink] = [_forge(to)] if to.forge else []
    if to.notes_mirror is not None:
        statuses.append(GitNotes(Git(to.notes_mirror, to.credentials), to.notes_url))
    url, branch = to.status_branch
    if branch:
        mirror = to.state_dir / "statuses.git"
        statuses.append(
            BranchStatuses(own_branch(mirror, to.credentials, url, branch, STATUS_FILE))
        )
    messages: list[MessageSink] = [AppriseMessages(to.messages_file)] if to.messages_file else []
    if not statuses and not messages:
        return None
    memory = to.state_dir / "told.json"
    return Reporter(statuses, messages, memory, wall, url=to.url, repeat_s=to.repeat_s)


def _forge(to: ReportTo) -> ForgeStatuses:
    token_file = to.token_file
    if to.forge not in FORGES or token_file is None:
        message = f"statuses need a forge ({', '.join(FORGES)}), and a file with its token"
        raise UsageError(message)
    checked_api(to.api)
    place = checked_place(Place(to.forge, to.api, to.repository))
    return ForgeStatuses(FORGES[to.forge], place, lambda: read_secret(token_file))

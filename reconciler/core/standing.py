"""How servers stand against a commit, for whoever is told: a status beside the commit, a message to people. Pure.

A status is a level: the newest counts, and saying it again does no harm. A message is an event: once for each change, again
after a while if it is still bad, and once more when it is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from reconciler.core.conditions import CommitStatus, Outcome, Reason, ServerResult, exit_of
from reconciler.core.plan import ServerPlan

REPEAT_S: Final = 6 * 3_600.0
"""Of a message about what is still bad: often enough for each shift to hear of it."""
ROLLING: Final = "Rolling"
UNSEEN: Final = "NotLookedAt"


@dataclass(frozen=True, slots=True)
class Standing:
    """How one server stands. `wanted` is the revision that its spec wants; `what` an outcome's word, or `Rolling`."""

    server: str
    host: str
    wanted: str
    status: CommitStatus
    what: str
    reason: str
    sentence: str


def unseen(server: str, host: str, wanted: str) -> Standing:
    """Give how a server stands that a new commit speaks of and no pass has looked at yet."""
    return Standing(server, host, wanted, CommitStatus.PENDING, UNSEEN, "", "waits to be looked at")


def begun(plan: ServerPlan, result: ServerResult) -> Standing:
    """Give how a server stands when a pass begins; `result` is how it would end if nothing were done."""
    if not plan.acts:
        return ended(plan, result)
    sentence = f"{plan.action.value}: {plan.sentence}"
    return Standing(
        plan.wish.server, plan.wish.host, _wanted(plan), CommitStatus.PENDING, ROLLING, "", sentence
    )


def ended(plan: ServerPlan, result: ServerResult, verdict: str = "") -> Standing:
    """Give how a server stands when its pass has ended; `verdict` is what its gate measured, in words and numbers."""
    sentence = result.sentence
    if verdict and verdict not in sentence:
        sentence = f"{sentence}; gate: {verdict}"
    return Standing(
        plan.wish.server,
        plan.wish.host,
        _wanted(plan),
        exit_of(result).status,
        result.outcome.value,
        result.reason.value,
        sentence,
    )


def _wanted(plan: ServerPlan) -> str:
    return plan.wish.target.revision if plan.wish.target is not None else ""


_WORST_FIRST: Final = (
    CommitStatus.FAILURE, CommitStatus.ERROR, CommitStatus.PENDING, CommitStatus.SUCCESS,
)  # fmt: skip


def aggregate(standings: Iterable[Standing], *, spec_problems: int = 0) -> tuple[CommitStatus, str]:
    """Give one status for all servers: the worst of them, and how many stand so. Mistakes in specs are a failure."""
    found = list(standings)
    names = {s: sorted(x.server for x in found if x.status is s) for s in _WORST_FIRST}
    state = next((s for s in _WORST_FIRST if names[s]), CommitStatus.SUCCESS)
    words = {
        CommitStatus.FAILURE: "failed", CommitStatus.ERROR: "cannot be said", CommitStatus.PENDING: "under way or waiting",
        CommitStatus.SUCCESS: "as wanted",
    }  # fmt: skip
    parts = [
        f"{len(names[s])} {words[s]}" + (f" ({', '.join(names[s][:3])})" if s is not CommitStatus.SUCCESS else "")
        for s in _WORST_FIRST
        if names[s]
    ]  # fmt: skip
    if spec_problems:
        state = CommitStatus.FAILURE
        parts.insert(0, "1 mistake in the specs" if spec_problems == 1 else f"{spec_problems} mistakes in the specs")  # fmt: skip
    return state, "; ".join(parts) or "no servers"


# -- messages -----------------------------------------------------------------------------------------------------


class Urgency(StrEnum):
    """How a message is to be taken; the words of notification services."""

    INFO = "info"
    SUCCESS = "success"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Message:
    """One message to people."""

    urgency: Urgency
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Told:
    """What people were told last of one server. `about` names the trouble; empty where all was well."""

    about: str = ""
    at: float = 0.0


NOTHING_TOLD: Final = Told()


def message_due(
    now_stands: Standing, told: Told, now: float, *, repeat_s: float = REPEAT_S
) -> tuple[Message | None, Told]:
    """Say what people should hear now, and what they have been told once they have.

    What one rollback leads to (it was rolled back; it is refused, since it failed before) is one trouble, by the revision
    that is wanted. A rollout under way, or a server that waits because somebody said so, changes nothing that was told.
    """
    trouble = _trouble(now_stands)
    if trouble is None:
        return None, told
    if not trouble:
        if told.about:
            text = f"{now_stands.what}: {now_stands.sentence}"
            return Message(Urgency.SUCCESS, f"{_who(now_stands)}: well again", text), Told("", now)
        if now_stands.what == Outcome.APPLIED.value:
            text = f"{now_stands.wanted[:12]}: {now_stands.sentence}"
            return Message(Urgency.INFO, f"{_who(now_stands)}: applied", text), Told("", now)
        return None, told
    again = told.about == trouble
    if again and 0 <= now - told.at < repeat_s:
        return None, told
    urgency = Urgency.FAILURE if now_stands.status is CommitStatus.FAILURE else Urgency.WARNING
    reason = f" ({now_stands.reason})" if now_stands.reason else ""
    still = "still " if again else ""
    title = f"{_who(now_stands)}: {still}{now_stands.what}{reason}"
    return Message(urgency, title, now_stands.sentence), Told(trouble, now)


def _trouble(stands: Standing) -> str | None:
    """Name the trouble a server is in, empty for none; None where this says neither."""
    if stands.what in {ROLLING, UNSEEN, Outcome.WAITING.value}:
        return None
    if stands.reason == Reason.PERF_DRIFTED.value:
        return f"{stands.reason}:{stands.wanted}"
    if stands.status is CommitStatus.SUCCESS:
        return ""
    return f"{stands.status.value}:{stands.wanted}"


def _who(stands: Standing) -> str:
    return f"{stands.server} on {stands.host}"

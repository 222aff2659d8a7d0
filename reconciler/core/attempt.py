"""One attempt to bring servers of one host to new revisions: its state, frozen, hashable and serialisable.

Several members are one attempt when they take over each other's GPUs: all are released before any starts.
The state is what the host keeps as the intent, so it holds everything that is needed to go on after a crash:
targets in full bytes, never a reference to git.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from reconciler.core.conditions import Reason
from reconciler.core.demands import Card
from reconciler.core.demands import load as load_demands
from reconciler.core.desired import Budgets, SecretsFile, Target
from reconciler.core.effect import Fence


class Leg(StrEnum):
    """Which way the attempt is going."""

    FORWARD = "forward"
    BACK = "back"
    DOWN = "down"
    VERIFY = "verify"
    TAKE_OVER = "take-over"


BARE = frozenset({Leg.VERIFY, Leg.TAKE_OVER})
"""Legs that touch no process: nothing is disarmed, and nothing is left to go back to when they fail."""


class Phase(StrEnum):
    """The steps of a rollout, in order. `architecture.md` section 4 has the table."""

    PREFLIGHT = "preflight"
    ACQUIRE = "acquire"
    DISARM = "disarm"
    DRAIN = "drain"
    STOP = "stop"
    RELEASE = "release"
    INSTALL = "install"
    START = "start"
    READY = "ready"
    GATE = "gate"
    COMMIT = "commit"
    FINISHED = "finished"


P = Phase
ORDER: Mapping[Leg, tuple[Phase, ...]] = {
    Leg.FORWARD: tuple(Phase),
    # The way back drains nobody: what it stops has not been proven, and its engine still drains on SIGTERM.
    Leg.BACK: (P.DISARM, P.STOP, P.RELEASE, P.INSTALL, P.START, P.READY, P.COMMIT, P.FINISHED),
    # `on_failure: stop`, and failures with nothing good to return to.
    Leg.DOWN: (P.DISARM, P.STOP, P.RELEASE, P.INSTALL, P.COMMIT, P.FINISHED),
    # A process that is not touched: restarted by itself since it was applied, or only settings of its unit change.
    Leg.VERIFY: (P.ACQUIRE, P.INSTALL, P.READY, P.COMMIT, P.FINISHED),
    # A process that was here before us and is what is wanted: proven first, so that a failure has changed nothing.
    Leg.TAKE_OVER: (P.ACQUIRE, P.READY, P.GATE, P.INSTALL, P.COMMIT, P.FINISHED),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the way forward ended. `rejects` says that the evidence is definite and about the revision (S22).

    `code` is the diagnosed cause, empty where none is known.
    """

    phase: Phase
    reason: Reason
    sentence: str
    server: str
    rejects: bool = False
    code: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """One server of the attempt: where it comes from, where it goes, and what we know of it so far.

    `new` is None for `state: stopped`; `old` is None when nothing good exists to return to. `invocation` is
    the process that ran when we came; `previous` the last one seen before our start; `started` ours. `supersedes`
    names the attempt whose intent may stand on the host, because this one takes its place. `planned_on` is
    the applied revision that the plan was made on: if it is another one by now, the plan is stale. `waived` names the
    checks of preflight that did not hold and that `waivers` (id, reason) let pass. `hold` is the record (JSON) under which the
    server stays down when its GPUs were to be freed and nothing else: empty in a rollout. `drop_ins` are those (path, digest) that
    are moved out of the way first.
    """

    server: str
    unit: str
    new: Target | None
    old: Target | None
    budgets: Budgets
    on_failure: str = "rollback"
    on_inconclusive: str = "ask"
    gated: bool = False
    port: int | None = None
    saved_sha: str | None = None
    adopt: bool = False
    planned_on: str = ""
    supersedes: str = ""
    allow_no_pidfd: bool = False
    policy_digest: str = ""
    fence: Fence | None = None
    lease_until: float = 0.0
    boot_id: str = ""
    invocation: str = ""
    previous: str = ""
    started: str = ""
    disarmed: bool = False
    stopped: bool = False
    committed: bool = False
    zeros: int = 0
    cut: int | None = None
    evidence: str = ""
    settle: str = ""
    flags_checked: bool = False
    inspected: bool = False
    installed: str = ""
    cards: tuple[Card, ...] = ()
    waivers: tuple[tuple[str, str], ...] = ()
    waived: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    measures: int = 0
    rejection_recorded: bool = False
    finished: int = 0
    hold: str = ""
    drop_ins: tuple[tuple[str, str], ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """Give every GPU of the old and the new set: all must be free before anything starts."""
        sets = [t.gpu_uuids for t in (self.old, self.new) if t is not None]
        return tuple(sorted({uuid for uuids in sets for uuid in uuids}))


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the GPUs during release. Compared by time only: the readings are evidence, not state."""

    at: float
    raw: Mapping[str, Any] = field(compare=False, hash=False, repr=False)


@dataclass(frozen=True, slots=True)
class Wedge:
    """GPUs that a release could not prove free, though waiting and signals were done with: to be quarantined."""

    server: str
    gpus: tuple[str, ...]
    kind: str
    reasons: tuple[str, ...]
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """The whole state of the step machine between two effects.

    `alone`: no other living process of this installation works on these servers, so a lease that stands in our own name
    is a dead process's and may be taken over at once (L3); kept by nobody, each process finds it out for itself. `kernel_cursor` says where the kernel log stood when the attempt began:
    what the GPU drivers said since counts against a release. `idle_mib` is what each GPU used when it was proven free.
    """

    id: str
    host: str
    members: tuple[Member, ...]
    leg: Leg = Leg.FORWARD
    phase: Phase = Phase.PREFLIGHT
    cursor: int = 0
    entered: float | None = None
    failure: Failure | None = None
    resumed: bool = False
    alone: bool = False
    reboots: int = 0
    tries: int = 0
    asked: bool = False
    aside: bool = False
    trouble_since: float | None = None
    held: bool = False
    samples: tuple[Sample, ...] = ()
    escalated: tuple[tuple[str, float], ...] = ()
    began: float | None = None
    down_at: float | None = None
    outage_s: float | None = None
    timings: tuple[tuple[str, float], ...] = ()
    back_failure: Failure | None = None
    explaining: Failure | None = None
    wedges: tuple[Wedge, ...] = ()
    kernel_cursor: str = ""
    idle_mib: tuple[tuple[str, int], ...] = ()

    @property
    def member(self) -> Member:
        """Give the member that the cursor stands on."""
        return self.members[self.cursor]

    def with_member(self, **changes: Any) -> Attempt:
        """Give the state with the cursor's member changed."""
        return self.with_members({self.cursor: changes})

    def with_members(self, changes: Mapping[int, Mapping[str, Any]]) -> Attempt:
        """Give the state with several members changed, by index."""
        members = tuple(
            replace(m, **changes[i]) if i in changes else m for i, m in enumerate(self.members)
        )
        return replace(self, members=members)

    def every_member(self, **changes: Any) -> Attempt:
        """Give the state with every member changed alike."""
        return replace(self, members=tuple(replace(m, **changes) for m in self.members))


def dump(attempt: Attempt) -> dict[str, Any]:
    """Give the state as plain JSON for the host's intent record.

    Times of this controller's monotonic clock, samples and fences stay behind: none of them means anything
    to whoever picks the attempt up.
    """
    data = asdict(
        replace(
            attempt,
            samples=(),
            escalated=(),
            wedges=(),
            idle_mib=(),
            entered=None,
            trouble_since=None,
            began=None,
            down_at=None,
        )
    )
    for member in data["members"]:
        member["fence"] = None
        member["lease_until"] = 0.0
        member["boot_id"] = member["boot_id"] or ""
    return data


def load(data: Mapping[str, Any]) -> Attempt:
    """Read a state back from an intent record, ready to be resumed.

    Raises:
        ValueError: It is not a state that this version understands (F10): refuse, do not guess.
    """
    try:
        return Attempt(
            id=str(data["id"]),
            host=str(data["host"]),
            members=tuple(_member(m) for m in data["members"]),
            leg=Leg(data["leg"]),
            phase=Phase(data["phase"]),
            cursor=int(data["cursor"]),
            failure=_failure(data["failure"]),
            resumed=True,
            reboots=int(data["reboots"]),
            held=bool(data["held"]),
            outage_s=data["outage_s"],
            timings=tuple((str(k), float(v)) for k, v in data["timings"]),
            back_failure=_failure(data["back_failure"]),
            kernel_cursor=str(data.get("kernel_cursor") or ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        message = f"the host's intent record is not one that this version understands ({error!r})"
        raise ValueError(message) from error


def _failure(data: Mapping[str, Any] | None) -> Failure | None:
    if data is None:
        return None
    return Failure(
        phase=Phase(data["phase"]),
        reason=Reason(data["reason"]),
        sentence=str(data["sentence"]),
        server=str(data["server"]),
        rejects=bool(data["rejects"]),
        code=str(data.get("code") or ""),
    )


def _target(data: Mapping[str, Any] | None) -> Target | None:
    if data is None:
        return None
    return Target(
        revision=str(data["revision"]),
        unit_text=str(data["unit_text"]),
        argv=tuple(data["argv"]),
        environment=tuple(data["environment"]),
        secrets=tuple(
            SecretsFile(
                form=str(s["form"]),
                entries=tuple((str(k), str(v)) for k, v in s["entries"]),
                user=str(s["user"]),
            )
            for s in data["secrets"]
        ),
        spec=str(data["spec"]),
        gpu_uuids=tuple(data["gpu_uuids"]),
        port=data["port"],
        user=data["user"],
        paths=tuple(data["paths"]),
        flags=tuple(data["flags"]),
        flag_history=tuple((str(f), str(told)) for f, told in data.get("flag_history") or ()),
        check_argv=tuple(data["check_argv"]),
        demands=load_demands(data.get("demands")),
    )


def _member(data: Mapping[str, Any]) -> Member:
    rebuilt = {
        "new",
        "old",
        "budgets",
        "fence",
        "lease_until",
        "cards",
        "waivers",
        "waived",
        "ignored",
        "drop_ins",
    }
    plain = {k: v for k, v in data.items() if k not in rebuilt}
    return Member(
        new=_target(data["new"]),
        old=_target(data["old"]),
        budgets=Budgets(**data["budgets"]),
        waivers=tuple((str(k), str(v)) for k, v in data.get("waivers", ())),
        waived=tuple(str(v) for v in data.get("waived", ())),
        ignored=tuple(str(v) for v in data.get("ignored", ())),
        drop_ins=tuple((str(p), str(d)) for p, d in data.get("drop_ins", ())),
        **plain,
    )

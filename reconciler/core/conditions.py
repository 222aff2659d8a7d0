"""How one server's pass ended, in words that stay the same, and what that means for exit codes.

One table serves the exit code, the commit status and the documentation. The order of `Outcome`'s rows in
`EXITS` is the order of badness: the worst of a fleet decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How one server's pass ended. Stable: scripts match on these words."""

    IN_SYNC = "InSync"
    APPLIED = "Applied"
    STOPPED = "Stopped"
    ROLLED_BACK = "RolledBack"
    ROLLBACK_FAILED = "RollbackFailed"
    FAILED = "Failed"
    REFUSED = "Refused"
    HELD = "Held"
    WAITING = "Waiting"
    UNKNOWN = "Unknown"


class Reason(StrEnum):
    """Why. Stable CamelCase words beside a sentence for people."""

    NONE = ""
    # nothing was changed
    PREFLIGHT = "Preflight"
    NOT_ENROLLED = "NotEnrolled"
    NOT_OURS = "NotOurs"
    DRIFTED = "Drifted"
    REJECTED = "RejectedBefore"
    QUARANTINED = "GpuQuarantined"
    POLICY = "Policy"
    BINDING_CHANGED = "BindingChanged"
    FOREIGN_HOLDER = "ForeignHolder"
    PLAN_STALE = "PlanStale"
    LEASE_HELD = "LeaseHeld"
    HOST_IDENTITY = "HostIdentity"
    # in sync, and yet
    PERF_DRIFTED = "PerfDrifted"
    # waiting
    ORPHANED = "Orphaned"
    SUSPENDED = "Suspended"
    HOLD = "Hold"
    WINDOW = "Window"
    DEPENDENCY = "Dependency"
    GROUP = "Group"
    CANARY = "Canary"
    GROUP_STOPPED = "GroupStopped"
    GATE_CHANGED = "GateChanged"
    SPEC_MOVED_ON = "SpecMovedOn"
    PREEMPTED = "Preempted"
    HANDED_OVER = "HandedOver"
    BACK_OFF = "BackOff"
    BUDGET = "Budget"
    FLAPPING = "Flapping"
    # not known
    UNREACHABLE = "Unreachable"
    UNREADABLE = "Unreadable"
    OUTCOME_UNKNOWN = "OutcomeUnknown"
    LOCAL_STATE = "LocalState"
    # a rollout that went wrong
    STOP_TIMED_OUT = "StopTimedOut"
    NOT_RELEASED = "NotReleased"
    WEDGED = "Wedged"
    INSTALL_REFUSED = "InstallRefused"
    START_REFUSED = "StartRefused"
    GUARD_REFUSED = "GuardRefused"
    DIED = "DiedBeforeReady"
    DIED_LATER = "DiedAfterReady"
    RESTART_LOOP = "RestartLoop"
    READY_TIMEOUT = "ReadyTimeout"
    PORT_TAKEN = "PortTaken"
    WRONG_ANSWER = "WrongAnswer"
    GATE_FAILED = "GateFailed"
    GATE_INCONCLUSIVE = "GateInconclusive"
    GATE_ERROR = "GateError"
    REBOOTED = "HostRebooted"
    DISARM_REFUSED = "DisarmRefused"
    COMMIT_REFUSED = "CommitRefused"
    INTERRUPTED = "Interrupted"
    NO_GOOD_REVISION = "NoGoodRevision"
    SPEC_INVALID = "SpecInvalid"


class CommitStatus(StrEnum):
    """What a forge shows beside the commit."""

    SUCCESS = "success"
    PENDING = "pending"
    FAILURE = "failure"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Exit:
    """One row of the table of `architecture.md` section 6."""

    code: int
    status: CommitStatus
    meaning: str


BUG = Exit(70, CommitStatus.ERROR, "our own bug")
ROLLBACK_FAILED = Exit(
    4, CommitStatus.FAILURE, "the server is down and nothing good could be restored"
)
ROLLED_BACK = Exit(3, CommitStatus.FAILURE, "rolled back to the last good revision")
FAILED = Exit(1, CommitStatus.FAILURE, "failed; the new server was left or stopped by on_failure")
REFUSED = Exit(1, CommitStatus.FAILURE, "refused; nothing was changed")
LOCAL = Exit(
    1, CommitStatus.ERROR, "this tool's own files on this machine cannot be read or written"
)
UNKNOWN = Exit(7, CommitStatus.ERROR, "a host could not be reached or read")
HELD = Exit(8, CommitStatus.PENDING, "the gate was inconclusive; the new server is up and unproven")
STALE = Exit(5, CommitStatus.PENDING, "the plan is no longer the one that was shown")
LEASE = Exit(6, CommitStatus.PENDING, "another controller holds the lease")
WAITING = Exit(9, CommitStatus.PENDING, "waiting for a suspension, a hold or a dependency")
DIFFERENCES = Exit(2, CommitStatus.PENDING, "differences found (--detailed-exitcode)")
SUCCESS = Exit(0, CommitStatus.SUCCESS, "applied, in sync, or stopped as asked")
SPEC_ERROR = Exit(65, CommitStatus.FAILURE, "a spec is wrong; other servers were still handled")
USAGE = Exit(64, CommitStatus.ERROR, "wrong command line")
INTERRUPTED = Exit(130, CommitStatus.ERROR, "interrupted")

WORST_FIRST = (
    BUG, ROLLBACK_FAILED, ROLLED_BACK, FAILED, REFUSED, LOCAL, UNKNOWN, HELD, STALE, LEASE, WAITING, DIFFERENCES, SUCCESS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerResult:
    """How one server's pass ended: the words of the run stream's `outcome` line."""

    server: str
    outcome: Outcome
    reason: Reason
    sentence: str
    revision: str = ""


def exit_of(result: ServerResult) -> Exit:
    """Give the row of the table for one server."""
    match result.outcome:
        case Outcome.ROLLBACK_FAILED:
            return ROLLBACK_FAILED
        case Outcome.ROLLED_BACK:
            return ROLLED_BACK
        case Outcome.FAILED:
            return ROLLBACK_FAILED if result.reason is Reason.NO_GOOD_REVISION else FAILED
        case Outcome.UNKNOWN:
            return LOCAL if result.reason is Reason.LOCAL_STATE else UNKNOWN
        case Outcome.HELD:
            return HELD
        case Outcome.WAITING:
            return WAITING
        case Outcome.REFUSED:
            if result.reason is Reason.PLAN_STALE:
                return STALE
            return LEASE if result.reason is Reason.LEASE_HELD else REFUSED
        case Outcome.IN_SYNC | Outcome.APPLIED | Outcome.STOPPED:
            return SUCCESS


def worst(results: Iterable[ServerResult], *, spec_errors: bool = False) -> Exit:
    """Give the row that decides for a fleet: the worst one; spec errors count as worse than `UNKNOWN`'s successors.

    Exit 65 unless something above it in the table (worse than 7) happened as well.
    """
    rows = {exit_of(r) for r in results}
    decided = next((row for row in WORST_FIRST if row in rows), SUCCESS)
    if spec_errors and WORST_FIRST.index(decided) >= WORST_FIRST.index(UNKNOWN):
        return SPEC_ERROR
    return decided

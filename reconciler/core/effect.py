"""What a rollout may ask of the world, and what the world may answer. Data only.

`step` yields effects, `effects/perform.py` carries them out, and nothing else touches the world. An effect that
changes a host is a `Mutation`: it travels with the fence, a time after which it must not act, and the intent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from reconciler.core.conditions import Outcome, Reason
    from reconciler.core.demands import Card, Demands
    from reconciler.core.desired import Target
    from reconciler.core.live import LiveHost


@dataclass(frozen=True, slots=True)
class Fence:
    """The right to change one server: effects act only while the host holds exactly this pair (S8)."""

    epoch: int
    nonce: str


# -- effects -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """Take the lease and raise the fence in one critical section; with `renew`, only move the expiry.

    `takeover` lets the same installation take over a lease that an earlier process of it left.
    """

    server: str
    ttl_s: float
    takeover: bool = False
    renew: Fence | None = None


@dataclass(frozen=True, slots=True)
class GiveBack:
    """End the lease early. Losing this costs the next controller one lease period, nothing else."""

    server: str
    fence: Fence


@dataclass(frozen=True, slots=True)
class Look:
    """Observe the host: one round trip per layer.

    `gpus`: also the cards and everybody who holds them. It costs two calls into the driver and a scan of all
    processes, so it is asked for where somebody judges by it and nowhere else. `journal`: the last lines of each run.
    `deep`: all lines of the run that the helper gives, to find out why it failed.
    `kernel_cursor`: since when the GPU drivers' kernel lines are wanted; empty: only where the log stands now.
    """

    servers: tuple[str, ...]
    paths: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    gpus: bool = True
    journal: bool = True
    kernel_cursor: str = ""
    deep: bool = False


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look at what the engine will find on the host: program, models, limits, devices."""

    server: str
    demands: Demands
    user: str | None
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class CheckFlags:
    """Ask the installed engine whether it knows every flag that would be rendered.

    `installed` tells this installation from any other, so that an answer can be remembered; empty where that is not known.
    """

    server: str
    argv: tuple[str, ...]
    flags: tuple[str, ...]
    user: str | None
    installed: str = ""


@dataclass(frozen=True, slots=True)
class PollLoad:
    """Ask the engine how many requests it has, running and waiting."""

    server: str
    target: Target


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the server for a real generation of one token."""

    server: str
    target: Target
    invocation: str


@dataclass(frozen=True, slots=True)
class Measure:
    """Run the gate's benchmark and quality stage against the server."""

    server: str
    target: Target
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Let time pass. `why` is shown to people."""

    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """The rollout has ended: one (server, outcome, reason, sentence, revision) each."""

    results: tuple[tuple[str, Outcome, Reason, str, str], ...]


# -- mutations: fenced, with an intent ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """Write one of the server's records. `content` is JSON text; None takes the record away.

    `rebind` says that changed bindings are what the spec asks for, not a renumbered card.
    """

    server: str
    name: str
    content: str | None
    rebind: bool = False


@dataclass(frozen=True, slots=True)
class Disarm:
    """No restart, a stop timeout that fits, no start but ours, and the host's deadline set."""

    server: str
    unit: str
    stop_timeout_s: float
    deadline_s: float
    grace_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Queue the stop of exactly this invocation."""

    server: str
    unit: str
    invocation: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal processes that the host proves, again, to be this server's own (S3)."""

    server: str
    unit: str
    signal: str
    group: bool
    targets: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Install:
    """Put a unit in its trial or permanent place and verify what systemd will run."""

    server: str
    unit: str
    place: str
    target: Target
    saved_sha: str | None = None


@dataclass(frozen=True, slots=True)
class SetAside:
    """Move somebody's drop-ins out of systemd's sight, each only with the bytes that were seen; they are kept on the host (S7)."""

    server: str
    unit: str
    drop_ins: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Remove:
    """Take away what we put there: "trial", "disarm", "flag", "permanent"."""

    server: str
    unit: str
    what: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Queue the start; the guard checks the GPUs again inside it (S2)."""

    server: str
    unit: str
    previous_invocation: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Make the revision permanent and record it as applied, in one transaction on the host (S4, S5)."""

    server: str
    unit: str
    target: Target
    invocation: str
    evidence: str
    saved_sha: str | None = None


@dataclass(frozen=True, slots=True)
class Learn:
    """Record what the server's idle GPUs use, for those that have no baseline yet; the host checks that they are idle."""

    server: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Mark GPUs that cannot be proven usable: no server starts on them until a proof of release passes.

    `kind` is "wedged" (it may free itself) or "fault" (it will not); `pids` are who is to be looked at as evidence.
    """

    server: str
    gpus: tuple[str, ...]
    kind: str
    reasons: tuple[str, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """End a rollout without a commit: "stopped" (stays down) or "left" (runs on as it is)."""

    server: str
    unit: str
    what: str


Mutation = (
    Record
    | Disarm
    | Stop
    | Signal
    | Learn
    | Install
    | SetAside
    | Remove
    | Start
    | Commit
    | Quarantine
    | Settle
)
Effect = (
    Claim
    | GiveBack
    | Look
    | Inspect
    | CheckFlags
    | PollLoad
    | Probe
    | Measure
    | Wait
    | Done
    | Mutation
)


def deadline_s(effect: Effect) -> float:
    """Give how long an effect may take on its way and on the host, in seconds.

    The largest is a daemon-reload behind a busy host lock (10 s for the lock, 15 s for systemd); a look at a host
    whose driver initialises eight GPUs for every client may take 30 s.
    """
    match effect:
        case Measure(deadline_s=limit):
            return limit
        case CheckFlags():
            return 260.0  # An engine imports torch for its help, and may be asked twice (`--help=all`).
        case Inspect():
            return 150.0  # An interpreter that imports torch (60 s), and models on a slow disk (30 s each).
        case Look() | Start():
            return 40.0
        case Probe() | PollLoad():
            return 20.0
        case Wait(seconds=seconds):
            return seconds
        case Done():
            return 0.0
        case _:
            return 30.0


# -- replies ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """The rollout begins, or goes on after a crash. `now` is the controller's monotonic clock."""

    now: float


@dataclass(frozen=True, slots=True)
class Claimed:
    """The host gave the lease."""

    now: float
    server: str
    fence: Fence
    ttl_s: float
    boot_id: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What was found."""

    now: float
    live: LiveHost


@dataclass(frozen=True, slots=True)
class Acted:
    """The host says that the effect is done, and what it read back."""

    now: float
    data: Mapping[str, object]


LEASE_UNWRITTEN: Final = "LeaseUnwritten"
"""The reason of a `Turned` for a claim that the host would grant and could not write: its disk is full, say."""


@dataclass(frozen=True, slots=True)
class Turned:
    """The host refused or failed: nothing was changed. `reason` is the helper's word."""

    now: float
    reason: str
    message: str
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Lost:
    """No complete answer: it may have happened, may happen later, or never."""

    now: float
    message: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The host could not be reached: this effect did not happen."""

    now: float
    message: str
    identity: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in flight; None when the engine does not tell."""

    now: float
    in_flight: int | None


@dataclass(frozen=True, slots=True)
class Probed:
    """How the readiness probe ended: "ready", "not-yet" or "wrong"."""

    now: float
    state: str
    message: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The gate's verdict: pass, fail, inconclusive or error; `evidence` is JSON text for the record."""

    now: float
    verdict: str
    message: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The attempt is to end where it stands, to be gone on with or superseded: a newer wish, or a controller that goes down."""

    now: float
    reason: Reason
    sentence: str


@dataclass(frozen=True, slots=True)
class Waited:
    """Time has passed. `stop` says that somebody asked us to end at the next safe point."""

    now: float
    stop: bool = False


Reply = (
    Began
    | Claimed
    | Observed
    | Acted
    | Turned
    | Lost
    | Unreachable
    | Load
    | Probed
    | Measured
    | Leave
    | Waited
)

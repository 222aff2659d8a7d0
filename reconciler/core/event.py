"""What a run tells its watchers, one value a line: the run stream of `architecture.md` section 6.

`views/machine.py` writes each as JSON, `views/terminal.py` as a line for people. Times are seconds since the run began.
"""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.core.conditions import ServerResult


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step of a rollout begins."""

    at_s: float
    host: str
    server: str
    step: str
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What a step is waiting for."""

    at_s: float
    host: str
    server: str
    step: str
    waiting_for: str


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step has reached its postcondition, or not: `reason` is then a word of `Reason`, and not each of them is a failure."""

    at_s: float
    host: str
    server: str
    step: str
    took_s: float
    ok: bool
    detail: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VerdictGiven:
    """A gate has judged."""

    at_s: float
    host: str
    server: str
    verdict: str
    message: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something worth saying that is no step: a warning, a retry, a host that went silent."""

    at_s: float
    host: str
    server: str
    level: str
    message: str


@dataclass(frozen=True, slots=True)
class OutcomeReached:
    """How one server's pass ended."""

    at_s: float
    result: ServerResult


Event = StepStarted | StepProgress | StepFinished | VerdictGiven | Diagnostic | OutcomeReached

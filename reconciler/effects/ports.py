"""What carrying out an effect needs of the world, as protocols: the real ones are made by `wiring.py`, the simulated by `lab`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from reconciler.core.attempt import Attempt
from reconciler.core.desired import Target
from reconciler.core.effect import Leave
from reconciler.engines.base import Engine
from reconciler.transports.base import Address


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a helper, before it has a nonce. The words are those of `helper/acts.py`."""

    verb: str
    args: Mapping[str, Any] = field(repr=False)
    server: str | None = None
    fence: Mapping[str, Any] | None = None
    boot_id: str | None = None
    not_after: float | None = None
    intent: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer of a helper. `outcome` is done, refused or failed."""

    outcome: str
    reason: str
    message: str
    data: Mapping[str, Any]
    boot_id: str
    boottime: float


class HostPort(Protocol):
    """One host: its helper on each layer, and a way to its ports."""

    @property
    def name(self) -> str:
        """Give the host's name as the specs have it."""
        ...

    def call(self, request: Request, *, deadline_s: float) -> Answer:
        """Ask the helper beside the units.

        Raises:
            HostUnreachableError: Nothing was executed.
            HostIdentityError: It is not the machine that was enrolled; nothing was executed.
            CommandFailedError: The helper could not be run (sudo, python3); nothing was executed.
            OutcomeUnknownError: It may have been executed.
        """
        ...

    def observe_outer(
        self, args: Mapping[str, Any], *, deadline_s: float
    ) -> Mapping[str, Any] | None:
        """Observe the outermost layer; None where it is the same as the inner one."""
        ...

    def ask_outer(self, request: Request, *, deadline_s: float) -> Answer | None:
        """Ask the helper on the outermost layer, where it is not installed; None where there is one layer only.

        Raises:
            HostError: As `call`.
        """
        ...

    def reach(self, port: int) -> AbstractContextManager[Address]:
        """Give a local address that leads to the server's port, also a loopback-only one."""
        ...


class Clock(Protocol):
    """The controller's own time: monotonic seconds, and waiting."""

    def now(self) -> float:
        """Give seconds on a clock that never jumps (F08)."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait; shorter when somebody asks us to stop."""
        ...

    @property
    def stopping(self) -> bool:
        """Say whether somebody asked us to stop at the next safe point."""
        ...


@dataclass(frozen=True, slots=True)
class GateReport:
    """How a gate ended: pass, fail, inconclusive or error; `evidence` is plain JSON for the record."""

    verdict: str
    message: str
    evidence: Mapping[str, Any]


class GateRunner(Protocol):
    """Whoever measures: the benchmark client, or the simulated world."""

    def __call__(
        self,
        target: Target,
        engine: Engine,
        host: HostPort,
        baseline: Mapping[str, Any] | None,
        *,
        deadline_s: float,
        on_progress: Callable[[str], None],
    ) -> GateReport:
        """Measure the server that runs `target` and judge it. Raises only `HostError`s."""
        ...


class FlagMemory(Protocol):
    """What an installation of an engine has said of its flags before: asking it again costs an import of torch."""

    def known(self, key: tuple[str, ...]) -> frozenset[str]:
        """Give the flags that this installation is known to know."""
        ...

    def remember(self, key: tuple[str, ...], flags: tuple[str, ...]) -> None:
        """Note that it knows these."""
        ...


@dataclass
class PassMemory:
    """Remembers for as long as this process lives."""

    said: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)

    def known(self, key: tuple[str, ...]) -> frozenset[str]:
        """See `FlagMemory`."""
        return self.said.get(key, frozenset())

    def remember(self, key: tuple[str, ...], flags: tuple[str, ...]) -> None:
        """See `FlagMemory`."""
        self.said[key] = self.known(key) | frozenset(flags)


class Leaving(Protocol):
    """Whoever knows why an attempt should end where it stands: a newer commit, a controller that goes down."""

    def __call__(self, state: Attempt, now: float) -> Leave | None:
        """Say so, or None; asked after each effect and while a gate measures, only where an attempt may be left."""
        ...


class LeftError(Exception):
    """A measurement was given up, because its attempt is to be left. Never leaves `perform.py`."""

    def __init__(self, leave: Leave) -> None:
        super().__init__(leave.sentence)
        self.leave = leave


def never(state: Attempt, now: float) -> Leave | None:  # noqa: ARG001
    """Leave no attempt: a run of one pass finishes what it begins."""
    return None


@dataclass(frozen=True, slots=True)
class Ports:
    """All that a rollout's effects are carried out with. `holder` names this installation in leases."""

    host: HostPort
    clock: Clock
    engines: Mapping[str, Engine]
    gate: GateRunner
    holder: str
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    leaving: Leaving = never
    on_progress: Callable[[str], None] = lambda _line: None
    flags: FlagMemory = field(default_factory=PassMemory)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Opened secrets by the digest of what is encrypted, for the time of one attempt and in memory alone."""

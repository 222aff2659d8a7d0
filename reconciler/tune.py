"""A sweep: one server, one rollout a point, each measured under the same gate; then what was applied comes back.

Every point goes the way of any other change (plan, drain, stop, proven release, trial, one real generation), so a
point that does not come up is rolled back like any other. A hold in this sweep's name keeps other controllers
off the server from the first rollout to the last. `core/tuning.py` says what is tried and how it is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from reconciler.bench.rounds import GateOutcome
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.errors import HostError, ReconcilerError, UsageError
from reconciler.core.event import Event
from reconciler.core.fleet import Fleet
from reconciler.core.gate import VerdictKind
from reconciler.core.going_back import SWEPT
from reconciler.core.measurement import Baseline, RunResult
from reconciler.core.plan import Action, Permissions, ServerPlan
from reconciler.core.revision import revision
from reconciler.core.spec import Gate, Server
from reconciler.core.survey import Survey
from reconciler.core.tuning import (
    RACE_AFTER,
    Choice,
    Objective,
    Point,
    State,
    Tried,
    choose,
    dominated_by,
    estimate_s,
    same_as_applied,
    variant,
    with_state,
)
from reconciler.effects.ports import Clock, HostPort
from reconciler.effects.steer import write_records
from reconciler.effects.sweep_journal import SweepJournal
from reconciler.reconcile import World, act, survey

SERVES: Final = frozenset({Outcome.APPLIED, Outcome.IN_SYNC})
"""A point is up."""

OLD_SERVES: Final = frozenset({Outcome.ROLLED_BACK, Outcome.REFUSED})
"""A point is not, and what was there before serves: the sweep goes on."""


class Measure(Protocol):
    """Measures a server that is up. The real one is `effects/gate.py: outcome_of`."""

    def __call__(
        self,
        server: Server,
        gate: Gate,
        host: HostPort,
        baseline: Baseline | None,
        *,
        deadline_s: float,
        on_progress: Callable[[str], None],
        go_on: Callable[[Sequence[RunResult]], bool],
    ) -> GateOutcome:
        """Run the gate's rounds; what keeps it from measuring is in the outcome, or a HostError."""
        ...


class Listener(Protocol):
    """Whoever shows how far it is."""

    def point(self, number: int, count: int, point: Point, left_s: float | None) -> None:
        """Hear that a point begins; `left_s` is the time for all that is left, None while nothing is known."""
        ...

    def progress(self, sentence: str) -> None:
        """Hear how the measurement goes."""
        ...

    def event(self, event: Event) -> None:
        """Hear an event of a rollout."""
        ...

    def tried(self, tried: Tried) -> None:
        """Hear what came of a point."""
        ...


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is to be tried, and under which rules. `rounds` is the most that a point is measured."""

    server: Server
    points: tuple[Point, ...]
    gate: Gate
    objective: Objective
    margin: float
    rounds: int

    def header(self) -> dict[str, object]:
        """Give what has to be the same for a journal to be gone on with."""
        return {
            "server": self.server.name,
            "revision": str(revision(self.server)),
            "points": [point.label for point in self.points],
            "gate": self.gate.model_dump(mode="json"),
            "rounds": self.rounds,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sweep ended. `restored` says that what was applied before serves again."""

    tried: tuple[Tried, ...]
    choice: Choice
    restored: bool
    sentence: str
    stopped: bool = False


def plan_of(sweep: Sweep, fleet: Fleet, world: World, *, owner: str = "") -> ServerPlan:
    """Look at the server, and give its plan. A sweep begins at what is applied, and at nothing else.

    Raises:
        UsageError: It is not in sync with its spec, or its host cannot be read.
    """
    found = survey(
        fleet,
        world,
        only=frozenset({sweep.server.name}),
        allow=Permissions(through_hold=owner),
    )
    plan = found.plan.servers[0]
    if plan.action is not Action.NOTHING or plan.outcome is not Outcome.IN_SYNC:
        raise UsageError(
            f"{sweep.server.name} is not in sync ({plan.sentence}); a sweep compares with what is applied: run `reconcile` first"
        )
    return plan


def run_sweep(
    sweep: Sweep,
    fleet: Fleet,
    world: World,
    journal: SweepJournal,
    *,
    measure: Measure,
    listener: Listener,
    resume: bool = False,
) -> Ended:
    """Try every point, bring back what was applied, and choose.

    Raises:
        UsageError: The server is not in sync, or the journal is of another sweep.
        StoreError: The journal cannot be written: then nothing is begun.
        HostError: The host cannot be told that the server is being tuned.
    """
    return _Run(sweep, fleet, world, measure, journal, listener).run(resume=resume)


def _ungated(found: Survey) -> Survey:
    """Leave the gate out of the rollouts: a sweep measures by itself, and what comes back has passed it before.

    The servers keep their gates, so that what is applied at the end is what the spec says, policy and all.
    """
    hosts = (
        replace(h, plans=tuple(replace(p, wish=replace(p.wish, gated=False)) for p in h.plans))
        for h in found.hosts
    )
    return Survey(tuple(hosts))


@dataclass(frozen=True, slots=True)
class _Patient:
    """A clock that nobody stops."""

    clock: Clock
    stopping: bool = False

    def now(self) -> float:
        """Give its time."""
        return self.clock.now()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.clock.sleep(seconds)


@dataclass(slots=True)
class _Run:
    """A sweep under way."""

    sweep: Sweep
    fleet: Fleet
    world: World
    measure: Measure
    journal: SweepJournal
    listener: Listener
    done: list[Tried] = field(default_factory=list)
    up: Server | None = None
    """What serves now, as far as is known: a point that is up need not be rolled out."""

    @property
    def owner(self) -> str:
        """Name the hold."""
        return f"tune/{self.world.holder}"

    def _stopping(self) -> bool:
        return self.world.clock.stopping

    def run(self, *, resume: bool) -> Ended:
        """Hold, try, restore, let go, choose."""
        first = None
        if not resume:
            first = plan_of(self.sweep, self.fleet, self.world)
        self.done = list(self.journal.begin(self.sweep.header(), resume=resume))
        self._hold()
        self.up = None if resume else self.sweep.server
        sentence = ""
        try:
            sentence = self._all(first.outage_s if first is not None else None)
        finally:
            restored, said = self._restore()
        choice = choose(self.done, self.sweep.objective, self.sweep.margin)
        stopped = self._stopping()
        if restored:
            self._let_go()
        ended = "; ".join(part for part in (sentence, said) if part)
        if restored and not stopped and not sentence:
            self.journal.end(choice.sentence)
        return Ended(tuple(self.done), choice, restored, ended, stopped)

    def _all(self, outage_s: float | None) -> str:
        """Try what is not in the journal yet; a sentence when that had to end early."""
        order = (Point(), *(p for p in self.sweep.points if p.settings), Point(again=True))
        known = {tried.point for tried in self.done}
        todo = [point for point in order if point not in known]
        for number, point in enumerate(todo):
            if self._stopping():
                return "stopped as asked; --resume goes on with it"
            left = estimate_s(len(todo) - number, outage_s, self.done)
            self.listener.point(len(order) - len(todo) + number + 1, len(order), point, left)
            tried, stuck = self._try(point)
            if self._stopping() and tried.state in {State.FAILED, State.UNCLEAR}:
                return "stopped as asked; --resume goes on with it"
            self.done.append(tried)
            self.journal.add(tried)
            self.listener.tried(tried)
            if stuck:
                return f"ended at {point.label}: {stuck}"
            if not point.settings and not tried.results:
                return f"ended: what is applied was not measured ({tried.sentence})"
        return ""

    def _try(self, point: Point) -> tuple[Tried, str]:
        """Bring one point up and measure it; also why the sweep cannot go on, or ""."""
        server, why = variant(self.sweep.server, point, self.world.engines)
        if server is None:
            return Tried(point, State.FAILED, f"refused by its engine's rules: {why}"), ""
        twin = self._twin(server) if point.settings else None
        if twin is not None:
            same = with_state(twin, twin.state, f"the same as {twin.point.label}")
            return replace(same, point=point, rollout_s=0.0, measured_s=0.0), ""
        began = self.world.clock.now()
        stuck = ""
        if self.up is None or not same_as_applied(self.up, server):
            result = self._roll(server)
            if result.outcome not in SERVES:
                if result.outcome not in OLD_SERVES:
                    stuck = f"{result.outcome.value}: {result.sentence}"
                    self.up = None
                failed = Tried(
                    point, State.FAILED, result.sentence, rollout_s=self.world.clock.now() - began
                )
                return replace(failed, revision=str(revision(server))), stuck
            self.up = server
        rolled = self.world.clock.now()
        tried = self._measured(point, server)
        return (
            replace(
                tried,
                revision=str(revision(server)),
                rollout_s=rolled - began,
                measured_s=self.world.clock.now() - rolled,
            ),
            "",
        )

    def _twin(self, server: Server) -> Tried | None:
        """Find a point that runs exactly the same."""
        wanted = str(revision(server))
        return next((t for t in self.done if t.revision == wanted and not t.point.again), None)

    def _measured(self, point: Point, server: Server) -> Tried:
        control = next((t for t in self.done if not t.point.settings and not t.point.again), None)
        baseline = Baseline(control.revision, (), control.quality) if control is not None else None
        rivals = [t for t in self.done if not t.point.again]

        def go_on(results: Sequence[RunResult]) -> bool:
            rounds = min(
                (sum(r.run == run.name for r in results) for run in self.sweep.gate.runs), default=0
            )
            if rounds >= self.sweep.rounds:
                return False
            raced = point.settings and rounds >= RACE_AFTER
            return not (raced and dominated_by(results, rivals, self.sweep.margin))

        deadline = server.timeouts.gate * max(1.0, self.sweep.rounds / RACE_AFTER)
        try:
            with self.world.connect(self.fleet.host(server.host)) as port:
                outcome = self.measure(
                    server,
                    self.sweep.gate,
                    port,
                    baseline,
                    deadline_s=deadline,
                    on_progress=self.listener.progress,
                    go_on=go_on,
                )
        except (HostError, UsageError) as error:
            return Tried(point, State.UNCLEAR, f"not measured: {error}")
        return self._judged(point, outcome, rivals)

    def _judged(self, point: Point, outcome: GateOutcome, rivals: Sequence[Tried]) -> Tried:
        said = "; ".join(reason.message for reason in outcome.verdict.reasons)
        state = {
            VerdictKind.PASS: State.MEASURED,
            VerdictKind.FAIL: State.UNFIT,
        }.get(outcome.verdict.kind, State.UNCLEAR)
        if state is State.MEASURED and point.settings:
            better = dominated_by(outcome.results, rivals, self.sweep.margin)
            if better is not None:
                state, said = State.DOMINATED, f"slower in every way than {better.point.label}"
        return Tried(point, state, said, results=outcome.results, quality=outcome.quality)

    # -- rollouts, and the hold around them ------------------------------------------------------------------

    def _roll(self, server: Server, *, patient: bool = False) -> ServerResult:
        """Roll one variant out, as a pass would; a rollout that was left half-way is finished first.

        `patient` does it although somebody asked to stop: what was applied before is owed all the same.
        """
        world = replace(self.world, clock=_Patient(self.world.clock)) if patient else self.world
        result = self._pass(server, world)
        if result.reason is Reason.SPEC_MOVED_ON:
            result = self._pass(server, world)
        return result

    def _pass(self, server: Server, world: World) -> ServerResult:
        servers = tuple(server if s.name == server.name else s for s in self.fleet.servers)
        fleet = replace(self.fleet, servers=servers)
        found = survey(
            fleet,
            world,
            only=frozenset({server.name}),
            allow=Permissions(retry=True, supersede=True, through_hold=self.owner),
        )
        return act(_ungated(found), world, self.listener.event)[0]

    def _restore(self) -> tuple[bool, str]:
        """Bring back what was applied; whether it serves, and what is to be said otherwise."""
        server, _ = variant(self.sweep.server, Point(), self.world.engines)
        if self.up is not None and server is not None and same_as_applied(self.up, server):
            return True, ""
        try:
            result = self._roll(server or self.sweep.server, patient=True)
        except ReconcilerError as error:
            return False, self._not_restored(str(error))
        if result.outcome in SERVES:
            return True, ""
        return False, self._not_restored(result.sentence)

    def _not_restored(self, why: str) -> str:
        name = self.sweep.server.name
        return (
            f"what was applied before did not come back ({why}). {name} stays on hold; "
            f"`reconcile resume {name}` and `reconcile --server {name}` bring back what its spec says"
        )

    def _hold(self) -> None:
        record = {
            "version": 1,
            "owner": self.owner,
            "reason": f"a sweep of {len(self.sweep.points)} points is under way; journal {self.journal.path.name}",
            "at": time.time(),
            "until": None,
        }
        self._write([("hold", record)])

    def _let_go(self) -> None:
        """End the hold, and leave in the host's history which revisions were only tried."""
        tried = sorted({t.revision for t in self.done if t.point.settings and t.rollout_s > 0})
        line = {
            "version": 1,
            "outcome": SWEPT,
            "revision": str(revision(self.sweep.server)),
            "sentence": f"a sweep tried {len(tried)} revisions; what was applied before is back",
            "swept": tried,
            "by": self.owner,
        }
        self._write([("history", line), ("hold", None)])

    def _write(self, records: list[tuple[str, dict[str, object] | None]]) -> None:
        with self.world.connect(self.fleet.host(self.sweep.server.host)) as port:
            write_records(port, self.sweep.server.name, self.world.holder, records)


__all__ = ["Ended", "Listener", "Measure", "Sweep", "plan_of", "run_sweep"]

"""When to run: the source is read when something says that it changed and at intervals, and each host gets its passes.

A host's passes follow each other and are independent of every other host's (L7); each is `reconcile.py`'s own pass, with the
plans that are not due yet made to wait (`core/pacing.py`). A commit that comes while a rollout only waits (ready, gate) takes
its place; one that comes at another time is the next pass. What a stop leaves half-way is gone on with by the next daemon,
and if none comes, the host goes back by itself.

Reporters subscribe to events: the source was read, a pass began, did something, ended. They are called from the threads
that work and must only note what they are told; one that fails is logged and not asked to hold anything up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from reconciler.core.attempt import Attempt, Leg, Phase
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.effect import Leave
from reconciler.core.errors import ReconcilerError, SpecError
from reconciler.core.event import Diagnostic, Event
from reconciler.core.fleet import Fleet
from reconciler.core.held import held_result, why_held
from reconciler.core.pacing import FRESH, Limits, Pace, admitted, after, due_at, renewed
from reconciler.core.plan import Permissions
from reconciler.core.revision import revision
from reconciler.core.spec import Server
from reconciler.core.survey import HostSurvey, Survey
from reconciler.logs import log
from reconciler.probing import Performance
from reconciler.reconcile import World, act, survey
from reconciler.sources.base import Commit, Snapshot, Source

BURST_S: Final = 1.0
"""Between two readings of a source that are asked for one after the other: the first is read at once, a burst is joined."""
SOONEST_S: Final = 0.05
STUCK_S: Final = 300.0
"""A loop that has not come round for so long is stuck: longer than any fetch may take."""
RETRY_SOURCE_S: Final = 5.0
"""After a source could not be read, for one because a file was still being written."""


# -- what reporters are told -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceRead:
    """The source was read and says something else than before, or could not be read (`trouble`)."""

    snapshot: Snapshot | None
    fleet: Fleet
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class PassBegan:
    """A host was looked at and planned for; what acts is about to be carried out."""

    host: str
    found: Survey
    commit: Commit | None


@dataclass(frozen=True, slots=True)
class PassEvent:
    """Something happened in a pass."""

    host: str
    event: Event
    commit: Commit | None


@dataclass(frozen=True, slots=True)
class PassEnded:
    """A pass ended. `commit` is the one whose specs were in force when it began."""

    host: str
    found: Survey
    results: tuple[ServerResult, ...]
    commit: Commit | None


Notice = SourceRead | PassBegan | PassEvent | PassEnded


class Published(Protocol):
    """Where what passes see is kept for others."""

    def saw(self, found: Survey, at: float) -> None:
        """Note what was found at a time; from any thread."""
        ...

    def write_if_due(self, fleet: Fleet, commit: str, now: float) -> float | None:
        """Write what is new, but not too often. Give the seconds until it is due; None when nothing is new."""
        ...


# -- what it is made of ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """What the operator decides; read anew when the daemon is told to reload."""

    source: Source
    load: Callable[[Snapshot], Fleet]
    world: World
    limits: Limits
    interval_s: float = 60.0
    only: frozenset[str] = frozenset()
    no_pidfd: bool = False
    probe_every_s: float = 0.0
    """How often servers that nobody uses are probed for their speed; 0: never."""


class Memory(Protocol):
    """Where paces outlive the process, and where a person's `retry` is found."""

    def load(self) -> Mapping[str, Pace]:
        """Give what was saved; empty when nothing was, or it cannot be understood."""
        ...

    def save(self, paces: Mapping[str, Pace]) -> None:
        """Keep it. Not being able to is logged, not raised: the hosts' own records are the truth."""
        ...

    def token(self, server: str) -> str:
        """Name the last request to try a server again; empty when there was none."""
        ...


@dataclass
class HostState:
    """What the loop knows of one host's passes."""

    busy: Future[None] | None = None
    due: float = 0.0
    seen: str = ""
    wanted: Mapping[str, str] = field(default_factory=dict)
    ended: float | None = None
    results: Mapping[str, ServerResult] = field(default_factory=dict)


@dataclass
class Daemon:
    """The loop, and what it remembers between turns. `turn` does everything that is due and says how long nothing will be."""

    read_setup: Callable[[], Setup]
    memory: Memory
    pool: Executor
    wall: Callable[[], float]
    random: Callable[[], float]
    subscribers: list[Callable[[Notice], None]] = field(default_factory=list)
    published: Published | None = None
    performance: Performance = field(default_factory=Performance)
    setup: Setup = field(init=False)
    fleet: Fleet = field(default_factory=Fleet)
    snapshot: Snapshot | None = None
    trouble: str = ""
    hosts: dict[str, HostState] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)
    stopping: bool = False
    beat: float | None = None
    _asked: bool = True
    _reload: bool = False
    _read_at: float | None = None
    _next_read: float = 0.0
    _said: tuple[str, str] = ("", "")
    _wake: threading.Condition = field(
        default_factory=lambda: threading.Condition(threading.RLock())
    )

    def __post_init__(self) -> None:
        """Read what the operator decides; what is wrong there keeps a daemon from starting."""
        self.setup = self.read_setup()
        self.paces = dict(self.memory.load())

    # -- from outside, from any thread ----------------------------------------------------------------------------

    def trigger(self) -> None:
        """Say that the source may have changed."""
        self._notify("_asked")

    def reload(self) -> None:
        """Read the operator's settings anew, at the next turn."""
        self._notify("_reload")

    def stop(self) -> None:
        """Begin nothing more; what only waits is handed over, what is in the middle is finished first."""
        self._notify("stopping")

    def _notify(self, flag: str) -> None:
        with self._wake:
            setattr(self, flag, True)
            self._wake.notify_all()

    def health(self) -> dict[str, Any]:
        """Say how the daemon is: what is in force, what each server's last pass said, whether the loop comes round."""
        now = self.setup.world.clock.now()
        with self._wake:
            commit = self.snapshot.commit if self.snapshot else None
            late = self.beat is not None and now - self.beat > STUCK_S
            wrong = why_held(self.fleet)
            return {
                "format_version": "1.0",
                "ok": not late and not self.stopping,
                "stopping": self.stopping,
                "commit": commit.id if commit else None,
                "version": self.snapshot.version if self.snapshot else None,
                "stale": self.trouble or None,
                "read_s_ago": None if self._read_at is None else round(now - self._read_at, 1),
                "spec_problems": len(self.fleet.problems),
                "hosts": {
                    name: {
                        "busy": state.busy is not None,
                        "ended_s_ago": None if state.ended is None else round(now - state.ended, 1),
                        "servers": {
                            r.server: {"outcome": r.outcome.value, "reason": r.reason.value, "sentence": r.sentence, "revision": r.revision}
                            for r in (
                                held_result(r.server, wrong[r.server]) if r.server in wrong else r
                                for r in state.results.values()
                            )
                        },
                    }
                    for name, state in sorted(self.hosts.items())
                },
                "spec_wrong": wrong,
            }  # fmt: skip

    def alive(self) -> bool:
        """Say whether the loop still comes round: what the service manager's watchdog is told."""
        return self.beat is None or self.setup.world.clock.now() - self.beat <= STUCK_S

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn until stopped, then wait for what is under way. One broken turn is logged and does not end the loop."""
        while not self.stopping:
            try:
                pause = self.turn()
            except Exception:  # noqa: BLE001 - logged with its place; the daemon goes on
                log.exception("turn failed")
                pause = RETRY_SOURCE_S
            self.wait(pause)
        self.drain()

    def turn(self) -> float:
        """Do what is due: reload, read the source, begin passes. Give the seconds until something is due again."""
        clock = self.setup.world.clock
        self.beat = clock.now()
        if self._reload:
            self._reload = False
            self._reread_setup()
        self.read_if_due()
        self._collect()
        now = clock.now()
        pause = self._next_read_at() - now
        for name in self._host_names():
            state = self.hosts.setdefault(name, HostState())
            if (
                state.busy is None
                and not self.stopping
                and (state.due <= now or state.seen != self._version())
            ):
                self._begin(name, state)
            if state.busy is None:
                pause = min(pause, state.due - clock.now())
        return max(SOONEST_S, min(pause, self._publish()))

    def _publish(self) -> float:
        """Let what passes saw be written, and give the seconds until that is due."""
        if self.published is None:
            return STUCK_S
        commit = self.snapshot.commit if self.snapshot else None
        due = self.published.write_if_due(self.fleet, commit.id if commit else "", self.wall())
        return STUCK_S if due is None else due

    def wait(self, seconds: float) -> None:
        """Wait until something is due, or somebody says that something happened."""
        with self._wake:
            if not (self._asked and self._may_read()) and not self._reload and not self.stopping:
                self._wake.wait(seconds)

    def drain(self) -> None:
        """Wait for passes under way. Each is handed over where it only waits, and finished where it does not."""
        for state in self.hosts.values():
            while state.busy is not None and not state.busy.done():
                self.beat = self.setup.world.clock.now()
                wait_for([state.busy], timeout=5.0)
        self._collect()
        self._publish()

    def _reread_setup(self) -> None:
        try:
            fresh, turns = self.read_setup(), self.setup.world.turns
            # Passes under way hold turns of their groups: whoever comes next must see them.
            self.setup = replace(fresh, world=replace(fresh.world, turns=turns))
            log.info("settings reloaded")
        except ReconcilerError as error:
            log.warning("settings are wrong, the old ones stay", error=str(error))
            return
        self._asked, self._said = True, ("", "")

    # -- the source --------------------------------------------------------------------------------------------------

    def _may_read(self) -> bool:
        return self._read_at is None or self.setup.world.clock.now() - self._read_at >= BURST_S

    def _next_read_at(self) -> float:
        if self._asked and self._read_at is not None:
            return self._read_at + BURST_S
        return self._next_read

    def read_if_due(self) -> None:
        """Read the source when somebody said that it changed, or when the interval is over."""
        now = self.setup.world.clock.now()
        if not (self._asked and self._may_read()) and now < self._next_read:
            return
        self._asked = False
        self._read_at = now
        jitter = 0.9 + 0.2 * self.random()
        self._next_read = now + self.setup.interval_s * jitter
        try:
            snapshot = self.setup.source.snapshot()
        except SpecError as error:
            self._unread(str(error), now)
            return
        except ReconcilerError as error:
            self._unread(f"{type(error).__name__}: {error}", now)
            return
        self._take(snapshot)

    def _unread(self, why: str, now: float) -> None:
        """Keep what is in force: a source that cannot be read says nothing about what is wanted (S13)."""
        self.trouble = why
        self._next_read = min(self._next_read, now + RETRY_SOURCE_S)
        self._say_source()

    def _take(self, snapshot: Snapshot) -> None:
        fleet = self.fleet
        if self.snapshot is None or snapshot.version != self.snapshot.version or snapshot.unread != self.snapshot.unread or self._said == ("", ""):  # fmt: skip
            fleet = self.setup.load(snapshot)
        with self._wake:
            self.snapshot, self.fleet, self.trouble = snapshot, fleet, snapshot.stale
        self._say_source()

    def _say_source(self) -> None:
        said = (self._version(), self.trouble)
        if said != self._said:
            self._said = said
            if self.trouble:
                log.info("source is stale", why=self.trouble)  # Every subscriber hears it below.
            self._tell(SourceRead(self.snapshot, self.fleet, self.trouble))

    def _version(self) -> str:
        if self.snapshot is None:
            return ""
        commit = self.snapshot.commit
        return f"{self.snapshot.version}{commit.id if commit else ''}"

    def _host_names(self) -> list[str]:
        only = self.setup.only
        named = {s.host for s in self.fleet.servers if not only or s.name in only}
        if not only and self.fleet.complete:
            named |= {
                h.name for h in self.fleet.hosts
            }  # Such as have servers that the specs no longer have.
        return sorted(named)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _begin(self, name: str, state: HostState) -> None:
        """Begin a pass of one host, in a thread of the pool."""
        state.seen, state.wanted = self._version(), wanted_of(self.fleet, name)
        state.due = self.setup.world.clock.now() + self.setup.interval_s
        servers = frozenset(
            s.name
            for s in self.fleet.servers
            if s.host == name and (not self.setup.only or s.name in self.setup.only)
        )
        fleet, setup, commit = (
            self.fleet,
            self.setup,
            self.snapshot.commit if self.snapshot else None,
        )
        state.busy = self.pool.submit(self._pass, name, servers, fleet, setup, commit)
        state.busy.add_done_callback(lambda _done: self._notify_ended())

    def _notify_ended(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _collect(self) -> None:
        """Take note of passes that ended; a pass that broke is our own bug, is logged, and is tried again later."""
        now = self.setup.world.clock.now()
        for name, state in list(self.hosts.items()):
            if state.busy is None or not state.busy.done():
                continue
            broken = state.busy.exception()
            state.busy, state.ended = None, now
            if broken is not None:
                log.error("pass failed", host=name, exc_info=broken)
                state.due = now + self.setup.limits.longest_s

    def _pass(
        self, name: str, servers: frozenset[str], fleet: Fleet, setup: Setup, commit: Commit | None
    ) -> None:
        world = replace(setup.world, leaving=self.leaving)
        allow = Permissions(supersede=True, no_pidfd=setup.no_pidfd)
        only = servers if setup.only else frozenset[str]()
        found = survey(fleet, world, only=only, host=name, allow=allow)
        wanted = wanted_of(fleet, name)
        found = Survey(tuple(self._admitted(h, wanted, setup.limits) for h in found.hosts))
        self._tell(PassBegan(name, found, commit))
        results = act(found, world, lambda event: self._tell(PassEvent(name, event, commit)))
        if self.published is not None:
            acted = any(p.acts for p in found.plan.servers)
            # What was found before a rollout is no longer there after it.
            seen = survey(fleet, world, only=only, host=name, allow=allow) if acted else found
            self.published.saw(seen, self.wall())
        self._remember(name, found, results, setup)
        if setup.probe_every_s:
            results = self._probed(name, found, results, world, setup)
        self._tell(PassEnded(name, found, results, commit))

    def _probed(
        self,
        name: str,
        found: Survey,
        results: tuple[ServerResult, ...],
        world: World,
        setup: Setup,
    ) -> tuple[ServerResult, ...]:
        """Probe what is due and idle, and say what is new; a commit that comes meanwhile ends it."""
        state, commit = self.hosts[name], self.snapshot.commit if self.snapshot else None

        def wanted_elsewhere() -> bool:
            return self.stopping or state.seen != self._version()

        for host in found.hosts:
            results, news = self.performance.judged(
                host, results, world, every_s=setup.probe_every_s, busy=wanted_elsewhere
            )
            for server, sentence in news:
                said = Diagnostic(0.0, name, server, "warning", sentence)
                self._tell(PassEvent(name, said, commit))
        with self._wake:
            state.results = {r.server: r for r in results}
        return results

    def _admitted(self, found: HostSurvey, wanted: Mapping[str, str], limits: Limits) -> HostSurvey:
        """Let wait what is not due yet; hold everything when the daemon is about to end."""
        now, plans = self.wall(), []
        for plan in found.plans:
            server = plan.wish.server
            with self._wake:
                pace = renewed(
                    self.paces.get(server, FRESH), wanted.get(server, ""), self.memory.token(server)
                )
                self.paces[server] = pace
            plans.append(admitted(plan, pace, now, limits))
        return replace(found, plans=tuple(plans))

    def _remember(
        self, name: str, found: Survey, results: tuple[ServerResult, ...], setup: Setup
    ) -> None:
        now, clock = self.wall(), self.setup.world.clock
        by_server = {r.server: r for r in results}
        with self._wake:
            state = self.hosts[name]
            state.results = by_server
            for plan in found.plan.servers:
                server = plan.wish.server
                pace = after(
                    self.paces[server],
                    plan,
                    by_server[server],
                    now,
                    setup.limits,
                    spread=self.random(),
                )
                self.paces[server] = pace
                due = due_at(pace, plan, now, setup.limits)
                if due is not None and (due > now or by_server[server].outcome is Outcome.WAITING):
                    state.due = min(state.due, clock.now() + max(0.0, due - now))
            self.memory.save(dict(self.paces))

    def leaving(self, state: Attempt, now: float) -> Leave | None:
        """Say why an attempt that only waits should end where it stands: we go down, or a newer commit wants something else."""
        if self.stopping:
            sentence = f"the controller was stopped at {state.phase.value}; the next one goes on from there, and if none comes, the host goes back by itself"
            return Leave(now, Reason.HANDED_OVER, sentence)
        begun = state.phase not in {Phase.PREFLIGHT, Phase.ACQUIRE}
        if state.leg is not Leg.FORWARD or (begun and len(state.members) > 1):
            return None
        with self._wake:
            host = self.hosts.get(state.host)
            if host is None or host.seen == self._version():
                return None
            then, newest = host.wanted, self.fleet
            by = (
                self.snapshot.commit.id[:12]
                if self.snapshot and self.snapshot.commit
                else "the specs"
            )
        wanted = wanted_of(newest, state.host)
        for member in state.members:
            revision_now = wanted.get(member.server)
            if revision_now is not None and revision_now != then.get(member.server):
                return Leave(
                    now,
                    Reason.PREEMPTED,
                    f"{by} wants {revision_now[:12] or 'it stopped'} by now; the rollout was at {state.phase.value}",
                )
        return None

    def _tell(self, notice: Notice) -> None:
        for subscriber in self.subscribers:
            try:
                subscriber(notice)
            except Exception:  # noqa: BLE001 - logged with its place; the daemon goes on
                log.exception("a reporter failed", notice=type(notice).__name__)


def wanted_of(fleet: Fleet, host: str) -> dict[str, str]:
    """Name what each server of a host should be: its revision, or nothing where it should be stopped."""
    return {s.name: wanted_revision(s) for s in fleet.servers if s.host == host}


def wanted_revision(server: Server) -> str:
    """Give the revision that a spec wants; empty for a server that should be stopped."""
    return revision(server) if server.state == "running" else ""

"""A daemon over one simulated host, on virtual time and in one thread: what a push does, what a kill leaves, is played in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from reconciler.core.errors import Problem, ReconcilerError, SpecError
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.pacing import Limits, Pace
from reconciler.daemon import Daemon, Notice, PassEnded, Setup
from reconciler.engines import custom
from reconciler.lab.schedule import DOCUMENT, HOST, SERVER, new_host
from reconciler.lab.simulated_ports import VirtualClock, controller_world
from reconciler.lab.world import Effect, World
from reconciler.sources.base import Commit, Snapshot, version_of

ENGINES = {"custom": custom}


class Inline(Executor):
    """A pool that does each thing at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (a future keeps whatever it was)
            done.set_exception(error)
        return done


@dataclass
class Pushed:
    """A source whose content is what was pushed last. `wrong` is raised instead while it stands."""

    text: str = ""
    commits: int = 0
    reads: int = 0
    stale: str = ""
    wrong: ReconcilerError | None = None

    def push(self, steps: int, **changes: str) -> None:
        """Commit the fleet that wants this revision; `changes` are replaced in its text."""
        self.text = DOCUMENT.format(steps=steps)
        for old, new in changes.items():
            self.text = self.text.replace(f"{old}:", f"{new}:")
        self.commits += 1

    def write(self, text: str) -> None:
        """Commit any text."""
        self.text, self.commits = text, self.commits + 1

    def snapshot(self) -> Snapshot:
        """Give it."""
        self.reads += 1
        if self.wrong is not None:
            raise self.wrong
        if not self.text:
            raise SpecError([Problem("specs", 0, 0, "nothing was pushed")])
        files = {"specs/fleet.yaml": self.text.encode()}
        commit = Commit(f"{self.commits:040x}", "Ada", 0.0, "a change", "main")
        return Snapshot("specs", files, (), version_of("specs", files), commit, self.stale)


@dataclass
class Kept:
    """A memory that outlives a daemon within a test."""

    paces: Mapping[str, Pace] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    def load(self) -> Mapping[str, Pace]:
        """Give what was saved."""
        return self.paces

    def save(self, paces: Mapping[str, Pace]) -> None:
        """Keep it."""
        self.paces = paces

    def token(self, server: str) -> str:
        """Name the last request."""
        return self.tokens.get(server, "")


@dataclass
class Stage:
    """A host, a source, and the daemon that stands between them."""

    limits: Limits = field(default_factory=Limits)
    interval_s: float = 60.0
    probe_every_s: float = 0.0
    world: World = field(default_factory=lambda: World(1))
    source: Pushed = field(default_factory=Pushed)
    memory: Kept = field(default_factory=Kept)
    notices: list[Notice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = new_host(self.world)
        self.pool: Executor = Inline()
        self.daemon = self.new_daemon()

    def new_daemon(self) -> Daemon:
        """Start a daemon, as after the one before was killed."""
        controller = controller_world(
            self.world, {HOST: self.host}, ENGINES, clock=VirtualClock(self.world), holder="daemon"
        )

        def setup() -> Setup:
            return Setup(
                self.source,
                load,
                controller,
                self.limits,
                self.interval_s,
                probe_every_s=self.probe_every_s,
            )

        self.daemon = Daemon(
            setup,
            self.memory,
            self.pool,
            wall=lambda: self.world.now,
            random=lambda: 0.5,
            subscribers=[self.notices.append],
        )
        return self.daemon

    def run(self, seconds: float) -> None:
        """Let the daemon go round for so long."""
        until = self.world.now + seconds
        while self.world.now < until and not self.daemon.stopping:
            pause = self.daemon.turn()
            self.world.advance(min(pause, until - self.world.now))

    def push(self, steps: int, **changes: str) -> None:
        """Push, and let the webhook say so."""
        self.source.push(steps, **changes)
        self.daemon.trigger()

    def when(
        self, verb: str, do: Callable[[], None], *, stage: str = "after", skip: int = 0
    ) -> None:
        """Do something once when the controller has sent `verb`, after `skip` earlier ones."""
        left = [skip + 1]

        def watch(effect: Effect) -> None:
            if effect.kind == "call" and effect.detail == verb and effect.stage == stage:
                left[0] -= 1
                if left[0] == 0:
                    do()

        self.world.on_effect(watch)

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        """Give outcome and reason of every pass, in order, without repetitions."""
        found: list[tuple[str, str]] = []
        for notice in self.notices:
            if isinstance(notice, PassEnded):
                found += [(r.outcome.value, r.reason.value) for r in notice.results]
        return [o for i, o in enumerate(found) if i == 0 or o != found[i - 1]]

    @property
    def sentence(self) -> str:
        """Give what the last pass said."""
        return (
            next(n for n in reversed(self.notices) if isinstance(n, PassEnded)).results[0].sentence
        )

    @property
    def starts(self) -> int:
        """Count what was started."""
        return len(self.host.host.truth.starts)

    def argv(self) -> str:
        """Give the command line that serves."""
        running = [p for p in self.host.host.processes.values() if p.argv and "--steps" in p.argv]
        return " ".join(running[0].argv) if running else ""

    def kill_server(self) -> None:
        """End the server's main process, as a person would by hand."""
        props = self.host.machine().unit(f"{SERVER}.service")["known"]
        main = self.host.host.processes[int(props["MainPID"])]
        self.host.systemd.deliver(main, 9, "somebody")


def load(snapshot: Snapshot) -> Fleet:
    """Read a snapshot as the product does."""
    return load_fleet(snapshot.files, engines=ENGINES, root=snapshot.root, unread=snapshot.unread)

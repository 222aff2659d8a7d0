"""Tells others what the daemon's passes did: statuses beside the commit, messages to people. Never in a rollout's way.

`Reporter` is a subscriber of `daemon.py`: called from the threads that work, it only notes what it is told. One thread of its
own does the telling, as slow as it may be; when it falls behind, the oldest notes go, and that is said. A sink that fails is
logged: a status is said again with the next pass, and a message counts as told only when it was.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Protocol

from reconciler.core.conditions import CommitStatus
from reconciler.core.event import VerdictGiven
from reconciler.core.fleet import Fleet
from reconciler.core.standing import (
    NOTHING_TOLD,
    REPEAT_S,
    Message,
    Standing,
    Told,
    aggregate,
    begun,
    ended,
    message_due,
    unseen,
)
from reconciler.daemon import Notice, PassBegan, PassEnded, PassEvent, SourceRead, wanted_revision
from reconciler.logs import log
from reconciler.reconcile import still
from reconciler.reporting.base import Status

CAPACITY: Final = 2_000
"""Notes that wait to be told: ten passes of two hundred servers."""
CONTEXT: Final = "reconcile"
MAX_COMMITS: Final = 32
"""Whose standings are kept; what is older is nobody's status any more."""


class StatusSink(Protocol):
    """Whoever shows statuses: a forge, or notes in git."""

    def send_status(self, commit: str, status: Status) -> None:
        """Show it. May raise anything; it is logged, and said again later."""
        ...


class MessageSink(Protocol):
    """Whoever brings messages to people."""

    def send_message(self, message: Message) -> None:
        """Bring it. May raise anything; it is logged, and tried again with the next pass."""
        ...


@dataclass(frozen=True, slots=True)
class _Note:
    """How servers stand by now, against one commit; `whole` says that the commit speaks of these and no others."""

    commit: str
    standings: tuple[Standing, ...]
    whole: bool = False
    problems: int | None = None


@dataclass
class Reporter:
    """Subscribes to the daemon; `start` its thread, `stop` it at the end."""

    statuses: Sequence[StatusSink] = ()
    messages: Sequence[MessageSink] = ()
    memory: Path | None = None
    wall: Callable[[], float] = lambda: 0.0
    url: str = ""
    repeat_s: float = REPEAT_S
    capacity: int = CAPACITY
    dropped: int = 0
    failed: int = 0
    _notes: deque[_Note] = field(default_factory=deque)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _stopping: bool = False
    _busy: bool = False
    _thread: threading.Thread | None = None
    _verdicts: dict[str, str] = field(default_factory=dict)
    _stand: dict[str, dict[str, Standing]] = field(default_factory=dict)
    _problems: dict[str, int] = field(default_factory=dict)
    _shown: dict[tuple[int, str, str], tuple[CommitStatus, str]] = field(default_factory=dict)
    _told: dict[str, Told] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Remember what people were told before: a restart is no news."""
        self._told = _read_told(self.memory)

    # -- from the threads that work: note, and nothing else -----------------------------------------------------

    def __call__(self, notice: Notice) -> None:
        """Take note of what the daemon says."""
        match notice:
            case PassEvent(event=VerdictGiven(server=server, verdict=verdict, message=message)):
                self._verdicts[server] = f"{verdict}: {message}" if message else verdict
            case PassEvent():
                pass
            case SourceRead(snapshot=snapshot, fleet=fleet):
                commit = snapshot.commit.id if snapshot is not None and snapshot.commit else ""
                self._note(_Note(commit, _unseen(fleet), whole=True, problems=len(fleet.problems)))
            case PassBegan(found=found, commit=commit):
                now = tuple(begun(p, still(p)) for p in found.plan.servers)
                self._note(_Note(commit.id if commit else "", now))
            case PassEnded(found=found, results=results, commit=commit):
                by_server = {r.server: r for r in results}
                now = tuple(
                    ended(p, by_server[p.wish.server], self._verdicts.pop(p.wish.server, ""))
                    for p in found.plan.servers
                    if p.wish.server in by_server
                )
                self._note(_Note(commit.id if commit else "", now))

    def _note(self, note: _Note) -> None:
        with self._wake:
            if len(self._notes) >= self.capacity:
                self._notes.popleft()
                self.dropped += 1
                if self.dropped & (self.dropped - 1) == 0:  # Said at 1, 2, 4, 8 ...
                    log.warning("reports were dropped", dropped=self.dropped)
            self._notes.append(note)
            self._wake.notify_all()

    # -- the thread that tells ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to tell."""
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Tell what is left, for so long; then leave it. Says whether all was told."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was noted is told; for tests, and for a run that ends."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._notes and not self._busy, timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._notes or self._stopping)
                if not self._notes:
                    return
                note = self._notes.popleft()
                self._busy = True
            self.tell(note)

    def tell(self, note: _Note) -> None:
        """Tell one note, to everybody."""
        stand = self._take(note)
        if note.commit:
            for standing in note.standings:
                context = f"{CONTEXT}/{standing.server}"
                self._show(note.commit, context, standing.status, _described(standing))
            state, words = aggregate(
                stand.values(), spec_problems=self._problems.get(note.commit, 0)
            )
            self._show(note.commit, CONTEXT, state, words)
        for standing in note.standings:
            self._bring(standing)

    def _take(self, note: _Note) -> Mapping[str, Standing]:
        stand = self._stand.pop(note.commit, {})
        if note.whole:
            names = {s.server for s in note.standings}
            stand = {n: s for n, s in stand.items() if n in names}
            for standing in note.standings:
                stand.setdefault(standing.server, standing)
        else:
            stand |= {s.server: s for s in note.standings}
        self._stand[note.commit] = stand
        if note.problems is not None:
            self._problems[note.commit] = note.problems
        while len(self._stand) > MAX_COMMITS:
            gone = next(iter(self._stand))
            del self._stand[gone]
            self._problems.pop(gone, None)
            self._shown = {k: v for k, v in self._shown.items() if k[1] != gone}
        return stand

    def _show(self, commit: str, context: str, state: CommitStatus, words: str) -> None:
        for number, sink in enumerate(self.statuses):
            key = (number, commit, context)
            if self._shown.get(key) == (state, words):
                continue
            try:
                sink.send_status(commit, Status(context, state, words, self.url))
            except Exception as error:  # noqa: BLE001  (whatever a sink does, rollouts go on)
                self._fail("a status was not shown", sink, error)
            else:
                self._shown[key] = (state, words)

    def _bring(self, standing: Standing) -> None:
        if not self.messages:
            return
        before = self._told.get(standing.server, NOTHING_TOLD)
        message, after = message_due(standing, before, self.wall(), repeat_s=self.repeat_s)
        if message is None:
            return
        brought = 0
        for sink in self.messages:
            try:
                sink.send_message(message)
            except Exception as error:  # noqa: BLE001  (as above)
                self._fail("a message was not brought", sink, error)
            else:
                brought += 1
        if brought:
            self._told[standing.server] = after
            self._save_told()

    def _fail(self, what: str, sink: object, error: Exception) -> None:
        self.failed += 1
        log.warning(what, sink=type(sink).__name__, error=f"{type(error).__name__}: {error}"[:300])

    def _save_told(self) -> None:
        if self.memory is None:
            return
        data = {"version": 1, "told": {k: asdict(v) for k, v in self._told.items()}}
        fresh = self.memory.with_name(f".{self.memory.name}.new")
        try:
            self.memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh.write_text(json.dumps(data, sort_keys=True), encoding="utf-8")
            fresh.replace(self.memory)
        except OSError as error:
            log.warning("what was told cannot be remembered", error=str(error))


def _unseen(fleet: Fleet) -> tuple[Standing, ...]:
    return tuple(unseen(s.name, s.host, wanted_revision(s)) for s in fleet.servers)


def _described(standing: Standing) -> str:
    reason = f" ({standing.reason})" if standing.reason else ""
    return f"{standing.what}{reason}: {standing.sentence}"


def _read_told(path: Path | None) -> dict[str, Told]:
    """Read what was told; what cannot be read is told again, which is the lesser evil."""
    if path is None:
        return {}
    try:
        data = json.loads(path.read_bytes())
        return {str(k): Told(str(v["about"]), float(v["at"])) for k, v in data["told"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("what was told before cannot be read", path=str(path), error=str(error))
        return {}

"""The state of a fleet as a daemon last saw it, kept in a file for builds that may not reach the hosts (`--dry-run --against`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reconciler.core.fleet import Fleet
from reconciler.core.held import why_held
from reconciler.core.saved_state import state_of, state_text
from reconciler.core.survey import HostSurvey, Survey
from reconciler.logs import log

PAUSE_S: Final = 5.0
"""Between two writings: of a thousand hosts one is seen every few milliseconds."""
UNSEEN: Final = "the daemon has not looked at it yet"


@dataclass
class StateFile:
    """Collects what passes see, host by host, and writes it as one state, whole or not at all.

    A host that was not seen since the daemon began is in it as silent. The state is as old as the oldest part of it.
    """

    path: Path
    tool_version: str
    seen: dict[str, tuple[float, HostSurvey]] = field(default_factory=dict)
    written: float | None = None
    changed: bool = False
    wrong: Mapping[str, str] = field(default_factory=dict)
    also: Callable[[str], None] = lambda _text: None
    """Whoever publishes the text elsewhere as well; it must not wait."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, found: Survey, at: float) -> None:
        """Note what was found at a time; from any thread."""
        with self._lock:
            self.seen |= {h.host.name: (at, h) for h in found.hosts}
            self.changed = True

    def write_if_due(self, fleet: Fleet, commit: str, now: float) -> float | None:
        """Write what is new, but not too often. Give the seconds until it is due; None when nothing is new."""
        wrong = why_held(fleet)
        with self._lock:
            waits = fleet.servers and not self.seen  # The first pass has yet to tell something.
            if not self.changed and (wrong == self.wrong or waits):
                return None
            if self.written is not None and 0 <= now - self.written < PAUSE_S:
                return PAUSE_S - (now - self.written)
            self.changed, self.written, self.wrong = False, now, wrong
            names = {h.name for h in fleet.hosts}
            if fleet.complete:
                self.seen = {name: part for name, part in self.seen.items() if name in names}
            seen = dict(self.seen)
        taken_at = min((at for at, _ in seen.values()), default=now)
        self._write(_whole(seen, fleet), taken_at, commit, wrong)
        return None

    def _write(
        self, found: Survey, taken_at: float, commit: str, spec_wrong: Mapping[str, str]
    ) -> None:
        state = state_of(
            found,
            taken_at=taken_at,
            tool_version=self.tool_version,
            commit=commit,
            spec_wrong=spec_wrong,
        )
        text = state_text(state)
        self.also(text)
        fresh = self.path.with_name(f".{self.path.name}.new")
        try:
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.path)
        except OSError as error:
            log.warning("the state cannot be published", path=str(self.path), error=error.strerror)


def _whole(seen: Mapping[str, tuple[float, HostSurvey]], fleet: Fleet) -> Survey:
    used = {s.host for s in fleet.servers}
    silent = [HostSurvey(h, (), silence=UNSEEN) for h in fleet.hosts if h.name in used and h.name not in seen]  # fmt: skip
    hosts = [*silent, *(part for _, part in seen.values())]
    return Survey(tuple(sorted(hosts, key=lambda h: h.host.name)))

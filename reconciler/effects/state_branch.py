"""Pushes the newest state of a fleet to a branch, from a thread of its own: a slow remote holds up no rollout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from reconciler.core.errors import ReconcilerError
from reconciler.logs import log

PAUSE_S: Final = 60.0
"""Between two pushes: a build that plans against a state of a minute ago is told how old it is."""


@dataclass
class StateBranch:
    """Keeps the newest text that was offered, and pushes it when the last push is long enough ago. What fails is tried again."""

    write: Callable[[bytes, str], object]
    pause_s: float = PAUSE_S
    clock: Callable[[], float] = time.monotonic
    _text: str | None = None
    _stopping: bool = False
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def offer(self, text: str) -> None:
        """Note a newer state; from any thread, at once."""
        with self._wake:
            self._text = text
            if self._thread is None:
                self._thread = threading.Thread(target=self._push, name="state-branch", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Push what is left, for so long; then leave it."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _push(self) -> None:
        due = self.clock()
        while True:
            with self._wake:
                while self._text is None and not self._stopping:
                    self._wake.wait()
                while not self._stopping and (left := due - self.clock()) > 0:
                    self._wake.wait(left)
                text, self._text = self._text, None
                if text is None:
                    return
            try:
                self.write(text.encode(), MESSAGE)
            except ReconcilerError as error:
                log.warning("the state cannot be pushed", error=str(error))
                self._keep(text)
            due = self.clock() + self.pause_s

    def _keep(self, text: str) -> None:
        """Keep what could not be pushed, unless there is something newer by now."""
        with self._wake:
            if self._text is None and not self._stopping:
                self._text = text


MESSAGE: Final = "State of the hosts as last seen\n"

__all__ = ["StateBranch"]

"""Say when files below a folder change, soon and once for a burst of changes. Reading them is `directory.py`'s."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from reconciler.logs import log

QUIET_MS: Final = 40
"""A save is over when nothing has moved for so long; an editor's rename, write and chmod are within a few."""
LONGEST_MS: Final = 400
"""A folder that never rests is read after so long all the same, and read again later."""
AGAIN_S: Final = 2.0


def watch_folder(
    path: Path, on_change: Callable[[], None], ended: threading.Event
) -> threading.Thread:
    """Call `on_change` from a thread of its own whenever something below `path` changed, until `ended` is set.

    A folder that goes and comes back is watched again; while it is gone, changes are found by the interval alone.
    """
    thread = threading.Thread(
        target=_watch, args=(path, on_change, ended), name="watch", daemon=True
    )
    thread.start()
    return thread


def _watch(path: Path, on_change: Callable[[], None], ended: threading.Event) -> None:
    from watchfiles import watch  # noqa: PLC0415  (only a daemon on a folder pays for it)

    while not ended.is_set():
        try:
            for _changes in watch(
                path, debounce=LONGEST_MS, step=QUIET_MS, stop_event=ended, raise_interrupt=False
            ):
                on_change()
        except (OSError, RuntimeError) as error:
            log.warning(
                "the folder cannot be watched, only read at intervals",
                path=str(path),
                error=str(error),
            )
        if not ended.wait(AGAIN_S):
            on_change()

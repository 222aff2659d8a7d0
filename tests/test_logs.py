"""The log: it is written where standard error is now, and where nobody can read it, work goes on."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest

from reconciler.logs import configure, log


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    """Leave the log as the other tests want it."""
    yield
    configure({"RECONCILER_LOG": "error"})


def test_a_log_that_nobody_can_read_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reporter's thread or a rollout does not end because standard error was closed or is full."""
    gone = io.StringIO()
    monkeypatch.setattr(sys, "stderr", gone)
    configure({"RECONCILER_LOG": "warning"})
    log.warning("first")
    gone.close()
    log.warning("nobody hears this")
    again = io.StringIO()
    monkeypatch.setattr(sys, "stderr", again)
    log.warning("second")
    assert "second" in again.getvalue()


def test_what_was_caught_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon's line about a defect says where it happened, also where the log is read by machines."""
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    configure({"RECONCILER_LOG": "warning"})
    try:
        {}["here"]
    except KeyError:
        log.exception("defect", pass_number=3)
    said = json.loads(heard.getvalue())
    assert (said["event"], said["pass_number"], said["level"]) == ("defect", 3, "error")
    assert "test_logs.py" in said["exception"]


def test_the_level_decides_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet unless the environment says otherwise."""
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    for level, count in (("error", 1), ("warning", 2), ("info", 3), ("debug", 4), ("what", 2)):
        heard.truncate(0)
        configure({"RECONCILER_LOG": level})
        for say in (log.debug, log.info, log.warning, log.error):
            say("event")
        assert heard.getvalue().count("\n") == count, level

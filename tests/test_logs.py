"""The log: it is written where standard error is now, and where nobody can read it, work goes on."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest
import structlog

from reconciler.logs import configure


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
    log = structlog.get_logger()
    log.warning("first")
    gone.close()
    log.warning("nobody hears this")
    again = io.StringIO()
    monkeypatch.setattr(sys, "stderr", again)
    log.warning("second")
    assert "second" in again.getvalue()

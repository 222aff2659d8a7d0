"""A controller for each test, on the host that the session's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_controller import Controller, HostView

from reconciler.lab.hosts import SystemdHost


@pytest.fixture
def stranger(lab_host: SystemdHost, tmp_path: Path) -> Controller:
    """Give a controller that has never seen the host."""
    directory = tmp_path / "controller"
    directory.mkdir()
    return Controller(lab_host, directory)


@pytest.fixture
def controller(stranger: Controller) -> Controller:
    """Give a controller that has enrolled the host."""
    done = stranger.enrol()
    assert done.code == 0, done.err
    return stranger


@pytest.fixture
def view(lab_host: SystemdHost) -> HostView:
    """Look at the host without the tool."""
    return HostView(lab_host)

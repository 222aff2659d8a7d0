"""A controller for each test, on the host that the session's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_controller import Controller, HostView

from reconciler.lab.hosts import SystemdHost

NewController = Callable[..., Controller]


@pytest.fixture
def new_controller(lab_host: SystemdHost, tmp_path: Path) -> Iterator[NewController]:
    """Give a function that makes controllers by name; what they left running ends with the test."""
    made: list[Controller] = []

    def make(name: str, user: str = "root") -> Controller:
        directory = tmp_path / name
        directory.mkdir()
        made.append(Controller(lab_host, directory, user))
        return made[-1]

    yield make
    for controller in made:
        controller.close()


@pytest.fixture
def stranger(new_controller: NewController) -> Controller:
    """Give a controller that has never seen the host."""
    return new_controller("controller")


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

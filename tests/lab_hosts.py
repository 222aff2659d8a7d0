"""Fixtures that lend tests a lab host: a real systemd and sshd with simulated GPUs.

`lab_host`   one host for the whole session, put back to its first state before each test
`pve_host`   the same, Proxmox-like: servers live in a container behind `pct`
`boot_host`  boots a host of the test's own, ended with the test
`lab`        where they live

A test that uses one is marked `lab` (or `lab_pve`) by hand. Where the machine cannot run a lab the
test is skipped with the reason, but with CI=true it fails: a green run must have tested something.
Hosts are ended with the session, also on Ctrl-C and SIGTERM; what a killed session left is cleared
by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.lab.faults import heal
from reconciler.lab.hosts import LabPaths, ProxmoxHost, SystemdHost, available
from reconciler.lab.reset import reset

LABS = Path("/run/reconciler-tests")
"""One directory a session at a time; which is free tells the lock beside it."""

BootHost = Callable[..., SystemdHost]


def pytest_configure() -> None:
    """Let SIGTERM end a session as Ctrl-C does: with the fixtures' finalizers."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[LabPaths]:
    """Give this session's own lab, empty, and end all its hosts afterwards."""
    _need_lab(pve=False)
    LABS.mkdir(parents=True, exist_ok=True)
    clear_dead_labs()
    checkout = hashlib.sha256(str(request.config.rootpath).encode()).hexdigest()[:6]
    for number in itertools.count():
        directory = LABS / f"{checkout}-{number}"
        lock = _lock(directory)
        if lock is None:  # another session of this checkout is using it
            continue
        paths = LabPaths.at(directory)
        try:
            yield paths
        finally:
            paths.stop_all()
            os.close(lock)
        return


def clear_dead_labs() -> None:
    """End the hosts of sessions that were killed: their lab is there and nobody holds its lock."""
    for directory in sorted(path for path in LABS.glob("*") if path.is_dir()):
        lock = _lock(directory)
        if lock is not None:
            try:
                LabPaths.at(directory).stop_all()
            finally:
                os.close(lock)


def _lock(directory: Path) -> int | None:
    """Take the lock of a lab; None when a live session has it. The kernel frees it with its owner."""
    lock = os.open(f"{directory}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


@pytest.fixture(scope="session")
def _shared_host(lab: LabPaths) -> SystemdHost:
    """Boot the host that all tests share: four GPUs, root and an ordinary user `deploy`."""
    return SystemdHost.boot("shared", lab=lab, gpus=4, users=["deploy"])


@pytest.fixture
def lab_host(_shared_host: SystemdHost) -> Iterator[SystemdHost]:
    """Give the shared host as it was when it had booted: no unit of ours, no record, no fault."""
    reset(_shared_host)
    yield _shared_host
    heal(_shared_host)


@pytest.fixture(scope="session")
def _shared_pve(lab: LabPaths) -> ProxmoxHost:
    """Boot the Proxmox-like host that all tests share; its tree comes from the machine's cache."""
    _need_lab(pve=True)
    return ProxmoxHost.boot("pve", lab=lab, gpus=2)


@pytest.fixture
def pve_host(_shared_pve: ProxmoxHost) -> Iterator[ProxmoxHost]:
    """Give the shared Proxmox-like host with nothing of ours in its container, and no fault."""
    reset(_shared_pve)
    yield _shared_pve
    heal(_shared_pve.outer)


@pytest.fixture
def boot_host(lab: LabPaths) -> Iterator[BootHost]:
    """Give a function that boots hosts of this test's own: `boot_host(gpus=1)`; 2 s each."""
    booted: list[SystemdHost] = []

    def boot(name: str | None = None, **options: Any) -> SystemdHost:
        host = SystemdHost.boot(name or f"own{len(booted)}", lab=lab, **options)
        booted.append(host)
        return host

    yield boot
    for host in booted:
        host.stop(hard=True)


def _need_lab(*, pve: bool) -> None:
    missing = available(pve=pve)
    if not missing:
        return
    reason = "no lab on this machine: " + "; ".join(missing)
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)

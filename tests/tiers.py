"""In which order tests run, and which of them: fast ones first, then the lab, nightly ones on demand.

`RECONCILER_NIGHTLY=1` adds the tests marked `nightly`; `RECONCILER_SHARD=2/3` keeps the second of
three parts, by test name, so that several machines can share a run.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

import reconciler


def pytest_report_header() -> str:
    """Say which copy of the package is tested: in CI it must be the installed wheel."""
    assert reconciler.__file__ is not None
    return f"reconciler: {Path(reconciler.__file__).parent}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip or drop what this run does not want, and put the slow tiers last.

    Last of all hooks, so that the random order holds within each tier.
    """
    if os.environ.get("RECONCILER_NIGHTLY") != "1":
        skip = pytest.mark.skip(reason="nightly: set RECONCILER_NIGHTLY=1")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(skip)
    if shard := os.environ.get("RECONCILER_SHARD"):
        number, of = (int(word) for word in shard.split("/"))
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % of == number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    items.sort(key=_place)


LONGEST_FIRST = (
    "test_bad_hosts.py", "test_thread.py", "test_proxmox.py", "test_kill.py", "test_incident.py", "test_ladder.py",
    "test_real_engine.py", "test_daemon.py", "test_acts_lab.py", "test_tune.py", "test_host_lab.py",
    "test_release_command.py", "test_rehearsal_systemd.py", "test_faults.py",
)  # fmt: skip
"""A file stays on one worker. These take minutes, so they begin first of the lab: else one worker ends long after the others."""


def _place(item: pytest.Item) -> int:
    if not (item.get_closest_marker("lab") or item.get_closest_marker("lab_pve")):
        return 0
    name = item.path.name
    return 1 + (LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST))

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
    items.sort(key=_tier)


def _tier(item: pytest.Item) -> int:
    if item.get_closest_marker("lab_pve"):
        return 2
    return 1 if item.get_closest_marker("lab") else 0

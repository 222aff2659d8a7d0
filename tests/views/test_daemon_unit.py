"""The daemon's own unit: as hard as it says, and started with exactly the words that were given."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reconciler.views.daemon_unit import daemon_unit

ARGV = ["/usr/bin/reconcile", "--watch", "--git", "git@example.org:team/models.git", "--listen", "127.0.0.1:9180"]  # fmt: skip


def test_words_reach_the_daemon_as_they_are() -> None:
    """S18: no specifier, variable or quote of a URL means anything to systemd."""
    assert 'ExecStart="/a b" "%%h" "$$HOME" "\\"" "\\\\"\n' in daemon_unit(
        ["/a b", "%h", "$HOME", '"', "\\"]
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_itself_finds_little_exposed(tmp_path: Path) -> None:
    """T31: below 2.5 of 10, by systemd's own reckoning."""
    unit = tmp_path / "reconciler.service"
    unit.write_text(daemon_unit(ARGV))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level is not None, done.stdout + done.stderr
    assert float(level[1]) < 2.5

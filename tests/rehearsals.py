"""Runs `reconcile rehearse` as a person does, several at once: a rehearsal is mostly waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AT_ONCE = 5
"""More would make the stand-in servers slower than their gates allow."""

COMMAND = (sys.executable, "-c", "from reconciler.cli.main import main; main()", "rehearse")


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal printed, and how it ended."""

    code: int
    text: str
    errors: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The run stream; only with `-o json`."""
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def end(self) -> dict[str, Any]:
        """The stream's last line."""
        last = self.lines[-1]
        assert last["type"] == "rehearsal", self.errors
        return last


def rehearse(
    *words: str,
    home: Path,
    backend: str = "simulated",
    user: str | None = None,
    limit_s: float = 240,
) -> Rehearsed:
    """Run one rehearsal to its end."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)}
    done = subprocess.run(
        [*COMMAND, "--backend", backend, *words],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        user=user,
        check=False,
    )
    return Rehearsed(done.returncode, done.stdout, done.stderr)


def rehearse_all(
    commands: Iterable[Sequence[str]], home: Path
) -> Mapping[tuple[str, ...], Rehearsed]:
    """Run several, a few at a time, and give each by its words."""
    todo = [tuple(c) for c in commands]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(
            zip(todo, pool.map(lambda words: rehearse(*words, home=home), todo), strict=True)
        )

"""This machine's own files that cannot be used: told as such, and never as a host that is away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from steering_stage import Stage

from reconciler.cli.context import guarded
from reconciler.cli.run import PassOptions, run_pass
from reconciler.core.conditions import CommitStatus, Outcome, Reason, ServerResult, exit_of, worst
from reconciler.core.errors import StoreError
from reconciler.core.plan import Permissions


@contextmanager
def _closed(_place: str) -> Iterator[bool]:
    raise StoreError("/state/locks/h/qwen.lock: cannot be opened (Read-only file system)")
    yield True


def test_a_lock_that_cannot_be_taken_is_local_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    """F07: nothing is begun, the host is not blamed, and the exit code is not that of a silent host."""
    stage = Stage("one")
    stage.apply(stage.text(qwen="one 0 10"))
    controller = replace(stage.controller, exclusive=_closed)
    options = PassOptions(Path("specs"), yes=True)
    code = run_pass(stage.fleet(stage.text(qwen="one 0 11")), controller, options, Permissions())
    *_, outcome, last = capsys.readouterr().out.rstrip().splitlines()
    assert code == 1
    assert outcome.startswith("Unknown (LocalState) qwen: /state/locks/h/qwen.lock: cannot be")
    assert last == "exit 1: this tool's own files on this machine cannot be read or written"
    assert stage.serving("qwen")


def test_local_trouble_is_no_verdict_about_a_commit() -> None:
    """S22: the status beside the commit is an error, not a failure; and it outranks a host that is silent."""
    local = ServerResult("a", Outcome.UNKNOWN, Reason.LOCAL_STATE, "")
    silent = ServerResult("b", Outcome.UNKNOWN, Reason.UNREACHABLE, "")
    assert exit_of(local).status is CommitStatus.ERROR
    assert (worst([silent]).code, worst([local, silent]).code) == (7, 1)


def test_a_command_that_cannot_use_its_files_ends_with_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Outside a pass as well."""

    def work() -> int:
        raise StoreError("/state/retries: cannot be written (No space left on device)")

    with pytest.raises(BaseException) as ended:
        guarded(work)
    assert getattr(ended.value, "exit_code", None) == 1
    assert "No space left on device" in capsys.readouterr().err

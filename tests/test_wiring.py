"""The real world's own parts: who is at work on a host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from unprivileged import as_nobody

from reconciler import wiring
from reconciler.core.errors import StoreError
from reconciler.settings import Settings
from reconciler.wiring import alone_on, holder


def test_two_processes_of_one_installation_know_of_each_other(tmp_path: Path) -> None:
    """L3, F11: a lease in our own name may be taken over only while no other process of ours works on that server of that host."""
    code = "import sys; from pathlib import Path; from reconciler.wiring import alone_on\nwith alone_on('one/llm', Path(sys.argv[1])) as alone: print(alone)"
    with alone_on("one/llm", tmp_path) as alone:
        assert alone
        said = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert said.stdout == "False\n"
        for elsewhere in ("two/llm", "one/other"):
            with alone_on(elsewhere, tmp_path) as other:
                assert other
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert said.stdout == "True\n"


def test_a_state_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    """F07: without the lock nobody knows who else is at work, so nothing is begun."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Nothing was changed"), alone_on("one", tmp_path / "file"):
        pass


def test_a_state_directory_without_rights_says_whose_they_are(tmp_path: Path) -> None:
    """The cure is for this machine, not for the host."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)

    def tried() -> str:
        try:
            with alone_on("one/llm", tmp_path / "state"):
                return "held"
        except StoreError as error:
            return str(error)

    tmp_path.chmod(0o555)
    said = as_nobody(tried)
    assert (
        f"{tmp_path}/state/locks/one/llm.lock: cannot be opened (Permission denied): let this user"
        in said
    )


def test_another_state_directory_is_another_holder() -> None:
    """The lock lies in the state directory, so two of them must not share a name in leases."""
    assert holder(Settings(state_dir="/a", holder="ci")) != holder(
        Settings(state_dir="/b", holder="ci")
    )


def test_another_machine_is_another_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same user with a state directory of the same name elsewhere never takes a living lease over (S8)."""
    names = set()
    for machine in ("a" * 32, "b" * 32, None):
        file = tmp_path / f"{machine}"
        if machine:
            file.write_text(machine + "\n")
        monkeypatch.setattr(wiring, "MACHINE_ID", file)
        names.add(holder(Settings(state_dir="/a", holder="ci")))
    assert len(names) == 3

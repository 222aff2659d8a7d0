"""What is committed about packages holds: the lock covers the project and names no place, scripts are shipped."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from reconciler.lab.hosts import SCRIPTS

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _wanted() -> list[str]:
    groups = PROJECT["dependency-groups"]
    named = [item for group in groups.values() for item in group if isinstance(item, str)]
    extras = PROJECT["project"]["optional-dependencies"]["fast"]
    return [
        *PROJECT["project"]["dependencies"],
        *extras,
        *named,
        *PROJECT["build-system"]["requires"],
    ]


@pytest.mark.parametrize("requirement", sorted(_wanted()))
def test_the_lock_has_every_requirement(requirement: str) -> None:
    """A requirement added to pyproject.toml is in the lock as well: run `.ci/lock` after a change."""
    name = re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()  # type: ignore[index]
    assert re.search(rf"^{re.escape(name)}==", LOCK, re.MULTILINE)


def test_every_locked_package_has_hashes_and_no_place() -> None:
    """No index, host or path stands in the lock, and no package without a hash."""
    assert "://" not in LOCK
    assert not re.search(r"^-", LOCK, re.MULTILINE)
    for block in re.split(r"^(?=[a-z0-9])", LOCK, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block


def test_the_lab_scripts_are_in_the_package() -> None:
    """What the lab runs is package data: an installed wheel has it."""
    text = (SCRIPTS / "README.md").read_text()
    named = set(re.findall(r"`([a-z0-9-]+(?:\.sh)?)`", text)) - {"reconcile"}
    assert {path.name for path in SCRIPTS.iterdir()} - {"README.md"} >= named - {"lab"}
    assert (SCRIPTS / "boot-host.sh").is_file()


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_every_shell_script_parses(script: Path) -> None:
    """Bash reads each script to its end without a complaint."""
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_ci_refuses_what_it_does_not_know() -> None:
    """A wrong word is a usage error at once, before anything is installed."""
    for words in (["fastest"], ["nightly", "3"], ["fast", "1/2"]):
        done = subprocess.run(
            ["bash", str(ROOT / ".ci" / "run"), *words],
            capture_output=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 64

"""A saved plan is carried out exactly, or not at all: also the very first one, on a host with nothing on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_stage import Stage

from reconciler.cli.run import PassOptions, run_pass, specs_and_origin
from reconciler.core.errors import SpecError
from reconciler.core.fleet import Fleet
from reconciler.core.plan import Permissions
from reconciler.core.saved_plan import SavedPlan, moved, plan_text, read_plan
from reconciler.lab.schedule import DOCUMENT, UNIT
from reconciler.settings import Settings

STALE = 5


class Clerk:
    """Saves a plan of one stage, and applies it."""

    def __init__(self, at: Stage, folder: Path) -> None:
        self.at = at
        self.specs = folder / "specs"
        self.file = folder / "plan.json"
        self.specs.mkdir()
        self.write(1)

    def write(self, steps: int) -> None:
        """Write the specs."""
        (self.specs / "fleet.yaml").write_text(DOCUMENT.format(steps=steps))

    def save(self) -> SavedPlan:
        """Dry-run, with --out."""
        options = PassOptions(specs=self.specs, dry_run=True, out=self.file)
        _, options = specs_and_origin(options, Settings())
        code = run_pass(self.fleet(), self.at.controller, options, Permissions())
        assert code == 0
        return read_plan(self.file.read_bytes(), "plan.json")

    def fleet(self) -> Fleet:
        """Read what is written."""
        return self.at.read((self.specs / "fleet.yaml").read_text())

    def apply(self, **changes: object) -> int:
        """Carry the file out, as `reconcile apply` does."""
        saved = read_plan(self.file.read_bytes(), "plan.json").model_copy(update=changes)
        options = PassOptions(specs=self.specs, yes=True, expect=saved.hash, saved=saved)
        _, options = specs_and_origin(options, Settings())
        return run_pass(self.fleet(), self.at.controller, options, Permissions())


@pytest.fixture
def clerk(tmp_path: Path) -> Clerk:
    """Give an enrolled host that runs nothing, and specs for it."""
    return Clerk(Stage(), tmp_path)


def test_what_was_shown_is_what_happens(clerk: Clerk) -> None:
    """S20: saved, applied, and the second time it is stale, because the first changed the host."""
    clerk.save()
    assert clerk.file.stat().st_mode & 0o777 == 0o600
    assert clerk.apply() == 0
    assert clerk.at.host.machine().unit(UNIT)["known"]["ActiveState"] == "active"
    assert clerk.apply() == STALE


def edit_the_specs(clerk: Clerk) -> None:
    """Somebody pushed."""
    clerk.write(2)


def deploy_something_else(clerk: Clerk) -> None:
    """Somebody else was quicker."""
    clerk.at.apply(2)


def put_a_unit_there(clerk: Clerk) -> None:
    """Somebody made a unit of that name by hand, before the very first apply."""
    clerk.at.host.host.files.put(
        f"/etc/systemd/system/{UNIT}", b"[Service]\nExecStart=/usr/bin/serve --mine\n"
    )
    clerk.at.host.systemd.reload()


def exchange_the_machine(clerk: Clerk) -> None:
    """The name leads to another machine, as empty as the first was."""
    clerk.at.host.host.machine_id = "ab" * 16


def renumber_the_cards(clerk: Clerk) -> None:
    """The cards of the spec are others by now."""
    cards = clerk.at.host.host.gpus
    cards[0].uuid, cards[1].uuid = cards[1].uuid, cards[0].uuid


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "move", [edit_the_specs, deploy_something_else, put_a_unit_there, exchange_the_machine, renumber_the_cards]
)  # fmt: skip
def test_whatever_moved_it_is_refused_and_nothing_is_done(
    before: bool, move: Callable[[Clerk], None], clerk: Clerk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 5, with what moved, and not one mutation; `before` is whether anything was ever applied here."""
    if before:
        clerk.at.apply(1)
        clerk.write(3)
    clerk.save()
    move(clerk)
    starts = len(clerk.at.host.host.truth.starts)
    capsys.readouterr()
    assert clerk.apply() == STALE
    assert len(clerk.at.host.host.truth.starts) == starts
    assert "stale" in capsys.readouterr().err


def test_a_file_that_shows_another_plan_than_its_own_is_refused(
    clerk: Clerk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever reviewed an edited file approved something else: exit 5, and nothing is started."""
    clerk.save()
    whole = clerk.file.read_text()
    edited = whole.replace("--steps", "--stepz")
    assert edited != whole
    clerk.file.write_text(edited)
    assert clerk.apply() == STALE
    assert "edited" in capsys.readouterr().err
    assert clerk.at.host.host.truth.starts == []
    clerk.file.write_text(whole)
    assert clerk.apply() == 0


def test_another_version_or_commit_is_refused(
    clerk: Clerk, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another version may render another unit; another commit was reviewed by nobody."""
    clerk.save()
    assert clerk.apply(tool_version="0.0.1") == STALE
    assert "version 0.0.1" in capsys.readouterr().err
    assert clerk.apply(commit="a" * 40) == STALE
    assert "commit" in capsys.readouterr().err
    assert clerk.apply() == 0


def plan(**changes: object) -> SavedPlan:
    """Give a plan's record."""
    values = {
        "hash": "0" * 12, "tool_version": "1", "created_at": 1.0, "specs": "specs", "specs_version": "v",
        "hosts": {"one": "m"},
    }  # fmt: skip
    return SavedPlan.model_validate({**values, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hash": "1" * 12}, "live"),
        ({"tool_version": "2"}, "version"),
        ({"commit": "c" * 40}, "commit"),
        ({"specs_version": "w"}, "specs"),
        ({"hosts": {"one": "n"}}, "another machine"),
        ({"hosts": {"one": ""}}, "cannot be asked"),
        ({"hosts": {"one": "m", "two": "x"}}, "two"),
        ({"hosts": {}}, "cannot be asked"),
    ],
)
def test_each_thing_is_compared(changes: dict[str, object], says: str) -> None:
    """Switch one comparison off and its case goes red; what is not known is not the same (S12)."""
    assert moved(plan(), plan()) == ()
    (why,) = moved(plan(), plan(**changes))
    assert says in why
    assert moved(plan(hosts={"one": ""}), plan(hosts={"one": ""}))
    # Other specs make another plan: that says nothing of the host.
    told = moved(plan(), plan(specs_version="f" * 64, hash="0" * 12))
    assert not any("live" in why for why in told)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"type": "review"}', plan_text(plan(format_version="2.0"))]
)
def test_a_file_that_is_no_plan_is_refused(text: str) -> None:
    """Never half understood."""
    with pytest.raises(SpecError, match=r"p\.json"):
        read_plan(text.encode(), "p.json")
    data = json.loads(plan_text(plan()))
    del data["hosts"]
    with pytest.raises(SpecError, match="damaged at hosts"):
        read_plan(json.dumps(data).encode(), "p.json")


def test_the_plan_names_what_it_was_asked_for(clerk: Clerk) -> None:
    """`apply` needs nothing but the file."""
    saved = clerk.save()
    assert saved.specs == clerk.specs.as_posix()
    assert saved.plan["hash"] == saved.hash
    assert saved.hosts["one"]

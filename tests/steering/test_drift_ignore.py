"""What others may change on a host: ignored by detector, plan and apply alike, shown with its reason, and carried over."""

from __future__ import annotations

import pytest
from steering_stage import Stage

from reconciler.core.conditions import Outcome, Reason
from reconciler.core.diff import SyncStatus
from reconciler.core.plan import Action
from reconciler.reconcile import survey
from reconciler.views.status import stand

PLACE = "/etc/systemd/system/a.service"
RULES = 'drift_ignore: {"unit:Nice": "kept by the site\'s own tool", "drop-in:50-site.conf": "memory limits by Puppet"}'


def edit(stage: Stage, old: bytes, new: bytes) -> None:
    """Edit the unit as a person on the host would."""
    files = stage.hosts["one"].host.files
    text = files.data[PLACE]
    assert old in text
    files.put(PLACE, text.replace(old, new))
    stage.hosts["one"].systemd.reload()


def status(stage: Stage, text: str) -> SyncStatus:
    """Say how the server stands, as `reconcile status` does."""
    found = survey(stage.fleet(text), stage.controller)
    return stand(found.plan.servers[0], found.hosts[0].live)


def test_an_ignored_key_is_no_drift_and_is_carried_over() -> None:
    """The value that stands on the host is in whatever is installed next, also on the way back; the reason is shown."""
    stage = Stage()
    stage.apply(stage.text(a=f"one 0 1\n{RULES}"))
    edit(stage, b"[Service]\n", b"[Service]\nNice=-5\n")
    text = stage.text(a=f"one 0 1\n{RULES}")
    plan = stage.plans(text)["a"]
    assert (plan.action, plan.outcome) == (Action.NOTHING, Outcome.IN_SYNC)
    assert any("kept by the site's own tool" in note for note in plan.notes)
    assert status(stage, text) is SyncStatus.IN_SYNC
    assert stage.apply(stage.text(a=f"one 0 2\n{RULES}"))["a"].outcome is Outcome.APPLIED
    assert b"Nice=-5\n" in stage.hosts["one"].host.files.data[PLACE]
    assert stage.apply(stage.text(a=f"one 0 3\n{RULES}"))["a"].outcome is Outcome.ROLLED_BACK
    assert b"Nice=-5\n" in stage.hosts["one"].host.files.data[PLACE]
    assert stage.plans(stage.text(a=f"one 0 2\n{RULES}"))["a"].outcome is Outcome.IN_SYNC


def test_an_edit_of_anything_else_is_drift_all_the_same() -> None:
    """S7: a rule covers what it names and nothing beside it."""
    stage = Stage()
    stage.apply(stage.text(a=f"one 0 1\n{RULES}"))
    edit(stage, b"RestartSec=5s", b"RestartSec=1s\nNice=-5")
    text = stage.text(a=f"one 0 2\n{RULES}")
    plan = stage.plans(text)["a"]
    assert (plan.action, plan.reason) == (Action.BLOCKED, Reason.DRIFTED)
    assert status(stage, text) is SyncStatus.DRIFTED


def test_without_a_rule_the_same_edit_is_kept_and_named() -> None:
    """A person's change is kept by default: a new commit does not overwrite it."""
    stage = Stage()
    stage.apply(stage.text(a="one 0 1"))
    edit(stage, b"[Service]\n", b"[Service]\nNice=-5\n")
    result = stage.apply(stage.text(a="one 0 2"))["a"]
    assert (result.outcome, result.reason) == (Outcome.REFUSED, Reason.DRIFTED)
    before = stage.hosts["one"].host.files.data[PLACE]
    assert stage.apply(stage.text(a="one 0 2"), overwrite=True)["a"].outcome is Outcome.APPLIED
    kept = stage.hosts["one"].host.files.data["/var/lib/reconciler/a/original/unit.service"]
    assert kept == before


def test_an_ignored_drop_in_stops_neither_plan_nor_rollout() -> None:
    """The same rule for detector, plan and preflight; another drop-in beside it still counts."""
    stage = Stage()
    text = stage.text(a=f"one 0 1\n{RULES}")
    stage.apply(text)
    files = stage.hosts["one"].host.files
    files.put(f"{PLACE}.d/50-site.conf", b"[Service]\nMemoryHigh=64G\n")
    stage.hosts["one"].systemd.reload()
    plan = stage.plans(text)["a"]
    assert plan.outcome is Outcome.IN_SYNC
    assert any("memory limits by Puppet" in note for note in plan.notes)
    assert stage.apply(stage.text(a=f"one 0 2\n{RULES}"))["a"].outcome is Outcome.APPLIED
    files.put(f"{PLACE}.d/60-other.conf", b"[Service]\nMemoryHigh=1G\n")
    stage.hosts["one"].systemd.reload()
    assert stage.plans(stage.text(a=f"one 0 2\n{RULES}"))["a"].reason is Reason.DRIFTED


@pytest.mark.parametrize(
    "rules",
    [
        '{"unit:ExecStart": "kept by somebody else"}',
        '{"unit:Nicce": "kept by somebody else"}',
        '{"drop-in:../x.conf": "kept by somebody else"}',
        '{"args.context-length": "kept by somebody else"}',
        '{"unit:Nice": "no"}',
    ],
)
def test_what_may_not_be_ignored_is_a_spec_error(rules: str) -> None:
    """Unknown paths, what decides what runs, and rules without a reason are refused where they stand."""
    fleet = Stage().fleet(Stage().text(a=f"one 0 1\ndrift_ignore: {rules}"))
    assert fleet.held == {"a"}

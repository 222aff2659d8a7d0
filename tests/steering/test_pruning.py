"""A spec that is gone: a notice by default, an end only where somebody decided so, and never by a reading that failed."""

from __future__ import annotations

from steering_stage import Stage

from reconciler.core.conditions import Outcome, Reason, exit_of
from reconciler.core.fleet import Fleet
from reconciler.core.plan import Action
from reconciler.core.pruning import Pruning
from reconciler.reconcile import act, survey

AUTO = Pruning("auto")


def two(stage: Stage) -> tuple[str, str]:
    """Apply two servers; give the text with both, and with one of them gone."""
    both = stage.text(keep="one 0 1", old="one 1 1")
    assert {r.outcome for r in stage.apply(both).values()} == {Outcome.APPLIED}
    return both, stage.text(keep="one 0 1")


def test_by_default_an_orphan_is_left_alone_and_named() -> None:
    """S13: a spec that is gone stops nothing; the pass says so and is still a success."""
    stage = Stage()
    _, rest = two(stage)
    result = stage.apply(rest)["old"]
    assert (result.outcome, result.reason) == (Outcome.IN_SYNC, Reason.ORPHANED)
    assert exit_of(result).code == 0
    assert stage.serving("old")
    assert "reconcile prune old" in result.sentence


def test_confirm_waits_for_a_person() -> None:
    """With `prune: confirm` nothing ends until somebody says which."""
    stage = Stage(pruning=Pruning("confirm"))
    _, rest = two(stage)
    assert stage.apply(rest)["old"].outcome is Outcome.WAITING
    assert stage.serving("old")
    found = survey(stage.fleet(rest), stage.controller, prune=frozenset({"old"}))
    results = {r.server: r for r in act(found, stage.controller, lambda _event: None)}
    assert (results["old"].outcome, results["old"].reason) == (Outcome.STOPPED, Reason.ORPHANED)
    assert not stage.serving("old")
    assert stage.serving("keep")


def test_auto_drains_stops_proves_free_and_keeps_the_bytes() -> None:
    """The unit and the bindings go, what the host remembers stays, and the next pass knows of nothing to do (L10)."""
    stage = Stage()
    both, rest = two(stage)
    stage.prune(AUTO)
    assert stage.plans(rest)["old"].action is Action.PRUNE
    assert stage.apply(rest)["old"].outcome is Outcome.STOPPED
    files = stage.hosts["one"].host.files.data
    assert "/etc/systemd/system/old.service" not in files
    assert "/var/lib/reconciler/old/bindings.json" not in files
    assert any(p.startswith("/var/lib/reconciler/old/revisions/") for p in files)
    assert set(stage.plans(rest)) == {"keep"}
    assert stage.apply(both)["old"].outcome is Outcome.APPLIED
    assert stage.serving("old")


def test_a_pass_ends_only_so_many() -> None:
    """A bound per pass: what is beyond it waits and says for what."""
    stage = Stage()
    stage.apply(stage.text(keep="one 0 1", a="one 1 1", b="one 2 1"))
    stage.prune(AUTO)
    rest = stage.text(keep="one 0 1")
    results = stage.apply(rest)
    assert sorted(results[n].outcome.value for n in ("a", "b")) == ["Stopped", "Waiting"]
    assert stage.apply(rest)["b"].outcome is Outcome.STOPPED


def test_protection_outlives_its_spec() -> None:
    """What was protected stays protected when the text that said so is gone; the host itself refuses as well."""
    stage = Stage()
    both = stage.text(keep="one 0 1", old="one 1 1\nprotect: true")
    stage.apply(both)
    stage.prune(AUTO)
    result = stage.apply(stage.text(keep="one 0 1"))["old"]
    assert (result.outcome, result.reason) == (Outcome.IN_SYNC, Reason.ORPHANED)
    assert "protected" in result.sentence
    assert stage.serving("old")
    journal = stage.hosts["one"].host.files.data["/var/lib/reconciler/old/journal.ndjson"]
    before = len(journal.splitlines())
    stage.apply(both)
    now = stage.hosts["one"].host.files.data["/var/lib/reconciler/old/journal.ndjson"]
    assert len(now.splitlines()) == before


def test_a_reading_that_failed_never_looks_like_a_removal() -> None:
    """S13: with any problem in the specs, or none at all, nobody is an orphan."""
    stage = Stage()
    _, rest = two(stage)
    stage.prune(Pruning("auto", limit=10))
    for text in (f"{rest}---\nkind: Serv er\n", rest.replace("gpus: [0]", "gpus: 0"), ""):
        fleet = stage.fleet(text)
        assert not fleet.complete
        found = survey(fleet, stage.controller)
        act(found, stage.controller, lambda _event: None)
    act(survey(Fleet(), stage.controller), stage.controller, lambda _event: None)
    assert stage.serving("old")
    assert stage.serving("keep")


def test_when_no_server_is_left_auto_asks() -> None:
    """A complete fleet of hosts alone is more likely a mistake than a wish."""
    stage = Stage()
    two(stage)
    stage.prune(Pruning("auto", limit=10))
    results = stage.apply(stage.text())
    assert {r.outcome for r in results.values()} == {Outcome.WAITING}
    assert stage.serving("old")


def test_a_hold_keeps_an_orphan() -> None:
    """S6: a person's hold counts also when the spec is gone."""
    stage = Stage()
    _, rest = two(stage)
    record = b'{"at":1,"owner":"ann","reason":"looking","until":null,"version":1}'
    stage.hosts["one"].host.files.put("/var/lib/reconciler/old/hold.json", record)
    stage.prune(AUTO)
    assert stage.apply(rest)["old"].reason is Reason.HOLD
    assert stage.serving("old")


def test_asked_for_by_name_no_orphan_is_looked_at() -> None:
    """`--server keep` is about keep."""
    stage = Stage()
    _, rest = two(stage)
    stage.prune(AUTO)
    found = survey(stage.fleet(rest), stage.controller, only=frozenset({"keep"}))
    assert [p.wish.server for p in found.plan.servers] == ["keep"]

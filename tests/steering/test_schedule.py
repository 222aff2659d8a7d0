"""Windows, dependencies, groups and canaries: who may begin in a pass, who waits, and that it is said."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from steering_stage import Stage

from reconciler.cli.run import PassOptions, run_pass
from reconciler.core.conditions import Outcome, Reason, exit_of
from reconciler.core.plan import Action, Permissions
from reconciler.core.schedule import scheduled
from reconciler.core.windows import Windows, is_open, opens_at, read_slot
from reconciler.reconcile import survey

GROUP = "group: {name: chat, at_once: 1, min_available: 1, canary: a, soak: 30m, max_failures: 1}"
NOW = 1_800_000_000
"""When the simulated world begins: Friday 2027-01-15, 08:00 UTC."""


def group(stage: Stage, steps: int, rules: str = GROUP, **own: int) -> str:
    """Give a group of three, each on a host of its own."""
    return stage.text(**{n: f"{n} 0 {own.get(n, steps)}\n{rules}" for n in ("a", "b", "c")})


# -- windows ---------------------------------------------------------------------------------------------


def test_a_change_outside_of_its_window_waits_and_says_until_when() -> None:
    """The plan names the opening in the window's own zone; the exit code is that of waiting; nothing is touched."""
    stage = Stage()
    window = 'window: {zone: Europe/Berlin, allow: ["Mon-Fri 22:00-06:00"]}'
    stage.apply(stage.text(a="one 0 1"))
    text = stage.text(a=f"one 0 2\n{window}")
    plan = stage.plans(text)["a"]
    assert (plan.outcome, plan.reason) == (Outcome.WAITING, Reason.WINDOW)
    assert "2027-01-15 22:00 Europe/Berlin (2027-01-15T21:00Z)" in plan.sentence
    assert exit_of(stage.apply(text)["a"]).code == 9
    stage.world.advance(13 * 3600)
    assert stage.apply(text)["a"].outcome is Outcome.APPLIED


def test_an_override_is_said_and_recorded_with_its_reason() -> None:
    """S26: who began outside of the window, and why, stands in the host's own history."""
    stage = Stage()
    stage.apply(stage.text(a="one 0 1"))
    text = stage.text(a='one 0 2\nwindow: {allow: ["22:00-23:00"]}')
    plan = stage.plans(text, override="customers are down")["a"]
    assert any("customers are down" in note for note in plan.notes)
    assert stage.apply(text, override="customers are down")["a"].outcome is Outcome.APPLIED
    history = stage.hosts["one"].host.files.data["/var/lib/reconciler/a/history.ndjson"].decode()
    assert "change window overridden by rehearsal: customers are down" in history


def test_a_server_that_is_down_is_brought_back_at_any_time() -> None:
    """A window is about changes: what was wanted before is restored without waiting (L2)."""
    stage = Stage()
    text = stage.text(a='one 0 1\nwindow: {deny: ["2027-01-15"]}')
    assert stage.apply(text)["a"].reason is Reason.WINDOW
    stage.apply(text, override="first deployment")
    stage.hosts["one"].systemd.stop("a.service")
    stage.world.advance(30)
    assert stage.plans(text)["a"].action is Action.START
    assert stage.apply(text)["a"].outcome is Outcome.APPLIED


@pytest.mark.parametrize(
    ("allow", "deny", "now", "opens"),
    [
        (["Mon-Fri 22:00-06:00"], [], "2027-01-16T04:30", "2027-01-16T04:30"),  # Saturday morning of Friday's night
        (["Mon-Fri 22:00-06:00"], [], "2027-01-16T05:00", "2027-01-18T21:00"),
        (["Sat,Sun 00:00-24:00"], [], "2027-01-15T22:59", "2027-01-15T23:00"),
        ([], ["2026-12-24/2027-01-02"], "2026-12-31T00:00", "2027-01-02T23:00"),
        (["01:00-02:00"], ["Sun 00:00-24:00"], "2027-01-16T12:00", "2027-01-18T00:00"),
        (["02:30-03:00"], [], "2027-03-28T00:00", "2027-03-29T00:30"),  # summer time skips 02:30
        (["02:00-03:00"], [], "2027-10-31T00:30", "2027-10-31T00:30"),  # summer time has it twice
    ],
)  # fmt: skip
def test_windows_follow_the_wall_clock_of_their_zone(
    allow: list[str], deny: list[str], now: str, opens: str
) -> None:
    """Over midnight, at the change to and from summer time, and around a freeze; given in UTC, meant in Berlin."""
    windows = Windows(
        "Europe/Berlin",
        tuple(read_slot(t, dates=False) for t in allow),
        tuple(read_slot(t, dates=True) for t in deny),
    )
    at = datetime.fromisoformat(now).replace(tzinfo=UTC)
    found = opens_at(windows, at)
    assert found is not None
    if "02:30-03:00" not in allow:
        assert found == datetime.fromisoformat(opens).replace(tzinfo=UTC)
    assert is_open(windows, found)


def test_without_a_clock_no_window_is_open() -> None:
    """What is not known is never taken as permission."""
    stage = Stage()
    text = stage.text(a='one 0 1\nwindow: {allow: ["00:00-24:00"]}')
    plans = stage.plans(text)
    assert plans["a"].acts
    (server,) = stage.fleet(text).servers
    assert scheduled({"a": server}, plans, {}, None)["a"].reason is Reason.WINDOW


@pytest.mark.parametrize(
    "window",
    [
        "{zone: Mars/Olympus, allow: ['01:00-02:00']}",
        "{zone: ../../etc/passwd, allow: ['01:00-02:00']}",
        "{allow: ['25:00-26:00']}",
        "{allow: ['Mun 01:00-02:00']}",
        "{allow: ['01:00-01:00']}",
        "{deny: ['2027-02-30']}",
        "{deny: ['2027-02-03/2027-02-01']}",
        "{}",
    ],
)
def test_a_window_that_says_nothing_is_a_spec_error(window: str) -> None:
    """A typing mistake must not become a window that is always open."""
    stage = Stage()
    fleet = stage.fleet(stage.text(a=f"one 0 1\nwindow: {window}"))
    assert fleet.held == {"a"}
    assert fleet.problems[0].line > 0


# -- dependencies ----------------------------------------------------------------------------------------


def test_a_server_waits_for_what_it_depends_on() -> None:
    """The dependency goes first, also on another host; a waiting server is not a failing one."""
    stage = Stage("one", "two")
    text = stage.text(a="one 0 1\ndepends_on: [b]", b="two 0 1")
    results = stage.apply(text)
    assert results["b"].outcome is Outcome.APPLIED
    assert (results["a"].outcome, results["a"].reason) == (Outcome.WAITING, Reason.DEPENDENCY)
    assert "waits for b, which is changed first" in results["a"].sentence
    assert stage.apply(text)["a"].outcome is Outcome.APPLIED


def test_a_dependency_that_failed_is_waited_for() -> None:
    """What leans on a server that is not in sync is left as it is."""
    stage = Stage("one", "two")
    stage.settle(stage.text(a="one 0 1\ndepends_on: [b]", b="two 0 1"), 2)
    results = stage.settle(stage.text(a="one 0 2\ndepends_on: [b]", b="two 0 3"), 3)
    assert results["a"].reason is Reason.DEPENDENCY
    assert "not in sync" in results["a"].sentence


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ("depends_on: [nobody]", "", "there is no server `nobody`"),
        ("depends_on: [b]", "depends_on: [a]", "in a circle"),
        ("depends_on: [a]", "", "in a circle"),
        ("group: {name: g, at_once: 2}", "group: {name: g}", "says something else"),
        ("group: {name: g, canary: zoe}", "", "is no member"),
    ],
)
def test_relations_that_cannot_be_are_spec_errors(a: str, b: str, said: str) -> None:
    """A wrong name must not become a wait without an end."""
    stage = Stage()
    fleet = stage.fleet(stage.text(a=f"one 0 1\n{a}", b=f"one 1 1\n{b}" if b else "one 1 1"))
    assert any(said in str(p) for p in fleet.problems), [str(p) for p in fleet.problems]
    assert "a" in fleet.held


# -- groups and canaries ---------------------------------------------------------------------------------


def test_the_canary_goes_first_soaks_and_then_the_others_follow_one_by_one() -> None:
    """One takes the revision and soaks by its host's clock; then the rest, never more at once than allowed."""
    stage = Stage("a", "b", "c")
    stage.settle(group(stage, 1, "group: {name: chat}"), 3)
    text = group(stage, 2)
    results = stage.apply(text)
    assert results["a"].outcome is Outcome.APPLIED
    assert {results[n].reason for n in "bc"} == {Reason.CANARY}
    results = stage.apply(text)
    assert "waits for canary a to soak for another 30m" in results["b"].sentence
    stage.world.advance(30 * 60)
    results = stage.apply(text)
    assert (results["b"].outcome, results["c"].reason) == (Outcome.APPLIED, Reason.GROUP)
    assert stage.apply(text)["c"].outcome is Outcome.APPLIED


def test_the_last_that_serves_is_not_taken_away() -> None:
    """S25: below the minimum nobody stops, whoever is down for whatever reason."""
    stage = Stage("a", "b", "c")
    rules = "group: {name: chat, at_once: 3, min_available: 2}"
    stage.settle(group(stage, 1, rules), 3)
    plans = stage.plans(group(stage, 2, rules))
    assert sorted(n for n, p in plans.items() if p.acts) == ["a"]
    stage.hosts["c"].systemd.stop("c.service")
    stage.world.advance(30)
    plans = stage.plans(group(stage, 2, rules, c=1))
    assert not plans["a"].acts
    assert "2 of group chat serve, and 2 must go on" in plans["a"].sentence
    assert plans["c"].action is Action.START


def test_after_k_failures_the_group_stands_still_until_somebody_acts() -> None:
    """S27: a bad revision costs as many rollouts as allowed, and no more; another spec goes on by itself."""
    stage = Stage("a", "b", "c")
    rules = "group: {name: chat, at_once: 1, max_failures: 1}"
    stage.settle(group(stage, 1, rules), 3)
    bad = group(stage, 3, rules)
    starts = {n: len(stage.hosts[n].host.truth.starts) for n in "abc"}
    assert stage.apply(bad)["a"].outcome is Outcome.ROLLED_BACK
    results = stage.settle(bad, 4)
    assert {results[n].reason for n in "bc"} == {Reason.GROUP_STOPPED}
    assert all(len(stage.hosts[n].host.truth.starts) == starts[n] for n in "bc")
    good = stage.settle(group(stage, 2, rules), 4)
    assert {r.outcome for r in good.values()} == {Outcome.IN_SYNC}


def test_asked_for_one_member_the_others_are_still_counted() -> None:
    """A pass over one host or one server sees its group all the same."""
    stage = Stage("a", "b", "c")
    stage.settle(group(stage, 1, "group: {name: chat}"), 3)
    fleet = stage.fleet(group(stage, 2))
    found = survey(fleet, stage.controller, host="b", allow=Permissions())
    (plan,) = found.plan.servers
    assert (plan.wish.server, plan.reason) == ("b", Reason.CANARY)


def test_two_passes_at_once_do_not_take_two_turns() -> None:
    """What another pass of this process has under way counts, though it was not there when this one looked."""
    stage = Stage("a", "b", "c")
    stage.settle(group(stage, 1, "group: {name: chat}"), 3)
    rules = "group: {name: chat, min_available: 2}"
    plans = stage.plans(group(stage, 2, rules))
    turns = stage.controller.turns
    assert turns.begin([plans["a"]])
    results = stage.apply(group(stage, 2, rules))
    assert (results["a"].outcome, results["a"].reason) == (Outcome.WAITING, Reason.GROUP)
    turns.end([plans["a"]])
    assert stage.apply(group(stage, 2, rules))["a"].outcome is Outcome.APPLIED


# -- holds and requests ----------------------------------------------------------------------------------


def test_a_hold_that_ran_out_reminds_and_binds_nobody() -> None:
    """A hold with an end is shown with it; after it the server is changed again, and the reminder stays."""
    stage = Stage()
    stage.apply(stage.text(a="one 0 1"))
    hold = f'{{"at":1,"owner":"ann","reason":"demo","until":{NOW + 3600}.0,"version":1}}'
    stage.hosts["one"].host.files.put("/var/lib/reconciler/a/hold.json", hold.encode())
    text = stage.text(a="one 0 2")
    assert stage.apply(text)["a"].sentence.startswith("held by ann until 2027-01-15T09:00Z: demo")
    stage.world.advance(3600)
    plan = stage.plans(text)["a"]
    assert plan.acts
    assert any("ran out at 2027-01-15T09:00Z" in note for note in plan.notes)
    assert stage.apply(text)["a"].outcome is Outcome.APPLIED


def test_a_request_is_answered_once_by_the_pass_that_decided() -> None:
    """A script finds its own token with how that pass ended; a second pass writes nothing (L10)."""
    stage = Stage()
    stage.apply(stage.text(a="one 0 1"))
    files = stage.hosts["one"].host.files
    files.put("/var/lib/reconciler/a/request.json", b'{"at":1,"token":"t-1","version":1}')
    stage.apply(stage.text(a="one 0 2"))
    handled = json.loads(files.data["/var/lib/reconciler/a/handled.json"])
    assert (handled["token"], handled["outcome"]) == ("t-1", "Applied")
    journal = files.data["/var/lib/reconciler/a/journal.ndjson"]
    stage.apply(stage.text(a="one 0 2"))
    assert files.data["/var/lib/reconciler/a/journal.ndjson"] == journal


def test_one_run_goes_on_with_those_that_waited_for_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Who waits for another server of the same run has its turn in it, from a plan that is shown anew; each result is kept."""
    stage = Stage("one", "two")
    fleet = stage.fleet(
        stage.text(a="one 0 1\ndepends_on: [b]", b="two 0 1\ndepends_on: [c]", c="one 1 1")
    )
    code = run_pass(fleet, stage.controller, PassOptions(Path("specs"), yes=True), Permissions())
    said = capsys.readouterr().out
    assert code == 0
    assert [f"Applied {n}:" in said for n in "abc"] == [True] * 3
    assert said.index("waits for b") < said.index("Applied a:")

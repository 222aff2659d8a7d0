"""A saved state plans as its host would, holds nothing that it may not, and never makes the unknown look known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rollout_stage import Stage

from reconciler.core.errors import SpecError
from reconciler.core.plan import Action
from reconciler.core.saved_state import STALE_AFTER_S, read_state, state_of, state_text
from reconciler.effects.ports import Request
from reconciler.effects.saved_host import SavedHostPort
from reconciler.lab.schedule import BEHAVIOURS, DOCUMENT, HOST, UNIT
from reconciler.offline import review_of_survey
from reconciler.reconcile import act, survey
from reconciler.views.markdown import pages


def untouched(at: Stage) -> None:
    """Nothing was ever deployed."""


def in_sync(at: Stage) -> None:
    """The first revision runs."""
    at.apply(1)


def twice(at: Stage) -> None:
    """There was a rollout with an outage."""
    at.apply(2)
    at.apply(1)


def rejected(at: Stage) -> None:
    """The slow revision failed here."""
    at.apply(1)
    at.apply(3)


def edited(at: Stage) -> None:
    """Somebody was on the host."""
    at.apply(1)
    path = f"/etc/systemd/system/{UNIT}"
    text = at.host.host.files.data[path]
    at.host.host.files.put(path, text.replace(b"RestartSec=5s", b"RestartSec=1s"))


def down(at: Stage) -> None:
    """It was stopped by hand."""
    at.apply(1)
    at.host.machine().stop(UNIT)
    at.world.advance(30.0)


def not_ours(at: Stage) -> None:
    """A unit of that name was there before, with a secret in it."""
    text = b"[Service]\nExecStart=/usr/bin/serve\nEnvironment=API_KEY=hunter2secret\n"
    at.host.host.files.put(f"/etc/systemd/system/{UNIT}", text)
    at.host.systemd.reload()


@pytest.mark.parametrize("begin", [untouched, in_sync, twice, rejected, edited, down, not_ours])
@pytest.mark.parametrize("steps", sorted(BEHAVIOURS)[:3])
def test_a_saved_state_plans_as_its_host_does(begin: Callable[[Stage], None], steps: int) -> None:
    """S20: the plan that a pull request shows has the hash of the plan that is carried out, if nothing moves."""
    at = Stage()
    begin(at)
    state = at.saved(steps)
    live = survey(at.fleet(steps), at.controller).plan
    from_file = survey(at.fleet(steps), at.from_state(state)).plan
    assert [(p.action, p.reason, p.sentence) for p in from_file.servers] == [
        (p.action, p.reason, p.sentence) for p in live.servers
    ]
    assert [p.outage_s for p in from_file.servers] == [p.outage_s for p in live.servers]
    if begin not in {edited, not_ours}:  # Where the text is not kept, what stood before is another.
        assert from_file.hash == live.hash


def test_nothing_secret_and_no_right_is_kept() -> None:
    """S17, S8: no fence, no environment, no argv, no text that others wrote, no token that a sentence quotes."""
    at = Stage()
    not_ours(at)
    text = state_text(at.saved())
    assert "hunter2secret" not in text
    at = Stage()
    at.apply(1)
    raw = survey(at.fleet(1), at.controller)
    live = raw.hosts[0].live
    assert live is not None
    records = live.raw["servers"]["qwen"]["records"]["known"]
    nonce = records["fence"]["nonce"]
    records["rejected"] = [
        {"version": 1, "revision": "ab", "reason": "Died", "sentence": "said hf_abcdefgh and left"}
    ]
    text = state_text(state_of(raw, taken_at=1.0, tool_version="1"))
    assert nonce not in text
    assert "hf_abcdefgh" not in text
    assert live.raw["identity"]["known"]["machine_id"] not in text
    for word in ('"environment"', '"argv"', '"environ', '"boot_id": "1'):
        assert word not in text


def test_a_rollout_under_way_is_unknown() -> None:
    """Its intent is not kept, and without it nobody can say what comes next."""
    at = Stage()
    at.apply(1)
    raw = survey(at.fleet(1), at.controller)
    live = raw.hosts[0].live
    assert live is not None
    live.raw["servers"]["qwen"]["records"]["known"]["intent"] = {"version": 1, "state": {"a": 1}}
    state = state_of(raw, taken_at=1.0, tool_version="1")
    (plan,) = survey(at.fleet(2), at.from_state(state)).plan.servers
    assert plan.action is Action.BLOCKED
    assert "under way" in plan.sentence


def test_a_server_that_was_not_there_is_unknown_and_not_absent() -> None:
    """A new spec's unit may exist on the host already: nobody looked."""
    at = Stage()
    at.apply(1)
    state = at.saved()
    more = DOCUMENT.format(steps=2).split("---\n")[1].replace("name: qwen\n", "name: other\n", 1)
    more = more.replace("[0, 1]", "[2]").replace("30000", "31000")
    found = survey(at.fleet(1, f"---\n{more}"), at.from_state(state))
    other = next(p for p in found.plan.servers if p.wish.server == "other")
    assert other.action is Action.BLOCKED
    assert other.outcome.value == "Unknown"
    assert "no spec when the state was saved" in other.sentence


def test_a_host_that_the_state_lacks_is_unreachable() -> None:
    """Also one that was silent when it was saved; the review says which."""
    at = Stage()
    at.apply(1)
    state = at.saved()
    empty = state.model_copy(update={"hosts": {}})
    (plan,) = survey(at.fleet(2), at.from_state(empty)).plan.servers
    assert plan.outcome.value == "Unknown"
    assert "does not have this host" in plan.sentence
    at.host.reboot()
    silent = at.saved()
    assert silent.hosts[HOST].silence
    (plan,) = survey(at.fleet(2), at.from_state(silent)).plan.servers
    assert "could not be observed" in plan.sentence


def test_nothing_can_be_done_to_a_saved_host() -> None:
    """S20: whatever is asked of it but a look is refused."""
    at = Stage()
    at.apply(1)
    port = SavedHostPort(HOST, at.saved().hosts[HOST])
    for verb in ("claim", "stop", "install", "start", "record", "read-record"):
        assert port.call(Request(verb, {}), deadline_s=1.0).outcome == "refused"
    results = act(
        survey(at.fleet(2), at.from_state(at.saved())), at.from_state(at.saved()), lambda _e: None
    )
    assert all(r.outcome.value != "Applied" for r in results)


def test_age_is_said() -> None:
    """Old, or from a clock that is ahead: both are stale."""
    state = Stage().saved()
    assert not state.is_stale(1000.0 + STALE_AFTER_S)
    assert state.is_stale(1001.0 + STALE_AFTER_S)
    assert state.is_stale(1000.0 - 400.0)
    assert state.age_s(900.0) == 0.0


@pytest.mark.parametrize("where", ["hosts", "digest", "format_version", "type", "taken_at"])
def test_a_damaged_state_is_refused(where: str) -> None:
    """F10, F14: a file that was cut, edited or written by a newer version is never half believed."""
    data = json.loads(state_text(Stage().saved()))
    data[where] = {"hosts": {"x": {"silence": "y"}}, "digest": "0", "format_version": "2.0"}.get(
        where, "z"
    )
    with pytest.raises(SpecError, match=r"state\.json"):
        read_state(json.dumps(data).encode(), "state.json")
    with pytest.raises(SpecError):
        read_state(b"{", "state.json")


def test_the_plan_against_a_state_is_a_comment_too() -> None:
    """What would be done, how long it took before, and that nothing else is touched."""
    at = Stage()
    twice(at)
    state = at.saved()
    found = survey(at.fleet(2), at.from_state(state))
    page = pages(review_of_survey(found, replace(at.fleet(2))))[0]
    assert "**restart**" in page
    assert "about 2 s (1 rollout)" in page

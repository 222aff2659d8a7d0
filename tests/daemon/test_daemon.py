"""The daemon over a simulated host: what a push, a kill, a stop, a failure and a person's edit lead to."""

from __future__ import annotations

import pytest
from simulated_daemon import Stage

from reconciler.core.errors import HostUnreachableError, StoreError
from reconciler.core.pacing import Limits
from reconciler.daemon import PassBegan, PassEnded, PassEvent, SourceRead
from reconciler.lab.schedule import DOCUMENT, SERVER, ControllerDiedError

GOOD = [("Applied", ""), ("InSync", "")]


def test_a_push_becomes_what_runs_and_then_nothing_is_touched() -> None:
    """L1, L10: deployed, in sync, and from then on not one mutation."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    assert stage.outcomes == GOOD
    mutations: list[str] = []
    stage.world.on_effect(lambda e: mutations.append(e.detail) if e.kind == "write" else None)
    stage.run(600)
    assert (mutations, stage.starts) == ([], 1)


@pytest.mark.parametrize("verb", ["fetch", "claim", "observe"])
def test_a_newer_commit_takes_the_place_of_a_rollout_that_only_waits(verb: str) -> None:
    """L4: the server that was loading never serves; the newest commit does, by one more start, and the history says so."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.push(3)
    stage.when("start", lambda: stage.when(verb, push_two))

    def push_two() -> None:
        stage.push(2)
        stage.world.advance(2.0)
        stage.daemon.read_if_due()

    stage.run(300)
    assert stage.outcomes[2:] == [("Waiting", "Preempted"), ("Applied", ""), ("InSync", "")]
    assert "--steps 2" in stage.argv()
    assert stage.starts == 3


def test_from_disarm_to_start_nothing_is_preempted() -> None:
    """A commit that comes while the old server is being stopped is the next rollout's."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.push(2)
    seen: list[str] = []

    def push_one() -> None:
        stage.push(1)
        stage.world.advance(1.5)
        stage.daemon.read_if_due()
        stage.world.on_effect(
            lambda e: seen.append(e.detail) if e.kind == "call" and e.stage == "after" else None
        )

    stage.when("stop", push_one)
    stage.run(400)
    assert (
        "start" in seen[: seen.index("claim", seen.index("start") - 1) if "claim" in seen else None]
    )
    assert stage.outcomes[-1] == ("InSync", "")
    assert "--steps 1" in stage.argv()


def test_a_revert_while_the_new_one_loads_brings_the_applied_revision_back() -> None:
    """What runs is not the applied revision, so it is replaced, not merely called in sync."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.push(2)

    def revert() -> None:
        stage.push(1)
        stage.world.advance(2.0)
        stage.daemon.read_if_due()

    stage.when("start", revert)
    stage.run(300)
    assert stage.outcomes[2:] == [("Waiting", "Preempted"), ("Applied", ""), ("InSync", "")]
    assert "--steps 1" in stage.argv()


def test_fifty_pushes_in_a_burst_are_one_rollout_of_the_newest() -> None:
    """T17: each push asks for a look; readings are joined, and nothing in between is ever started."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    reads = stage.source.reads
    for number in range(50):
        stage.push(2 if number % 2 else 3)
        stage.daemon.wait(0.0)
        if number % 10 == 0:
            stage.world.advance(0.01)
    stage.run(300)
    assert "--steps 2" in stage.argv()
    assert stage.starts == 2
    assert stage.source.reads - reads <= 7


def test_a_rejected_revision_is_left_alone_until_it_changes() -> None:
    """L2, S16: it failed its gate once; no interval tries it again, and a newer commit is tried at once."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.push(3)
    stage.run(3600)
    assert stage.outcomes[2:] == [("RolledBack", "GateFailed"), ("Refused", "RejectedBefore")]
    starts = stage.starts
    stage.push(2)
    stage.run(120)
    assert stage.outcomes[-1] == ("InSync", "")
    assert stage.starts == starts + 1


def test_a_host_that_cannot_be_reached_is_asked_at_the_interval_and_not_more_often() -> None:
    """Not knowing is no failure of the server: no back-off is built up, nothing is decided."""
    stage = Stage()
    stage.push(1)
    stage.run(120)

    def away(_request: object) -> None:
        raise HostUnreachableError("one", "no route")

    stage.host.call = away  # type: ignore[assignment,method-assign]
    stage.run(600)
    assert stage.outcomes[-1][0] == "Unknown"
    assert stage.memory.paces[SERVER].failures == 0


def test_no_more_rollouts_begin_within_a_window_than_the_operator_allows() -> None:
    """S16, L5: commits that storm are bounded too; the newest is applied when the window moves on."""
    stage = Stage(limits=Limits(starts=3, window_s=3600))
    for number in range(8):
        stage.push(1 + number % 2, drain="drain")
        stage.source.write(stage.source.text.replace("stop: 20s", f"stop: {20 + number}s"))
        stage.daemon.trigger()
        stage.run(90)
    assert stage.starts == 3
    assert stage.outcomes[-1] == ("Waiting", "Budget")
    assert "3 rollouts within 60 min" in stage.sentence
    stage.run(3600)
    assert stage.outcomes[-1] == ("InSync", "")
    assert stage.starts == 4


def test_a_server_that_keeps_going_down_is_brought_back_so_often_and_no_more() -> None:
    """The flap limit: then it is left alone and said, until a person asks or the spec changes."""
    stage = Stage(limits=Limits(heals=2, starts=100))
    stage.push(1)
    stage.run(120)
    machine = stage.host.machine()
    for _ in range(4):
        machine.stop(f"{SERVER}.service")
        stage.run(180)
    assert stage.outcomes[-1] == ("Waiting", "Flapping")
    assert stage.starts == 3
    assert "look for the cause" in stage.sentence
    stage.run(7200)
    assert stage.starts == 3
    stage.memory.tokens[SERVER] = "again"
    stage.run(240)
    assert stage.outcomes[-1] == ("InSync", "")
    assert stage.starts == 4


def test_paces_outlive_the_daemon() -> None:
    """A restart does not reset what a server was held back for."""
    stage = Stage(limits=Limits(heals=1, starts=100))
    stage.push(1)
    stage.run(120)
    for _ in range(2):
        stage.host.machine().stop(f"{SERVER}.service")
        stage.run(180)
    assert stage.outcomes[-1] == ("Waiting", "Flapping")
    stage.new_daemon()
    stage.run(600)
    assert stage.starts == 2


def edit_unit(stage: Stage) -> str:
    """Change the unit on the host, as a person would, and give the text that was there."""
    path = f"/etc/systemd/system/{SERVER}.service"
    files = stage.host.host.files
    before = files.data[path]
    files.put(path, before.replace(b"[Service]", b"[Service]\nNice=5"))
    stage.host.systemd.reload()
    return before.decode()


@pytest.mark.parametrize(
    ("mode", "ends"), [("off", "InSync"), ("warn", "Refused"), ("heal", "InSync")]
)
def test_an_edit_on_the_host_is_kept_shown_or_healed_as_the_spec_says(mode: str, ends: str) -> None:
    """S7: kept by default; healed only where the spec says so, saved first, and to what was applied."""
    stage = Stage()
    stage.source.write(_with_drift(1, mode))
    stage.run(120)
    before = edit_unit(stage)
    stage.run(300)
    assert stage.outcomes[-1][0] == ends
    now = stage.host.host.files.data[f"/etc/systemd/system/{SERVER}.service"].decode()
    assert (now == before) is (mode == "heal")
    assert stage.starts == (2 if mode == "heal" else 1)


def test_healing_takes_no_newer_commit() -> None:
    """A newer commit that was rejected stays out; the edit is healed back to what was applied."""
    stage = Stage()
    stage.source.write(_with_drift(1, "heal"))
    stage.run(120)
    stage.source.write(_with_drift(3, "heal"))
    stage.daemon.trigger()
    stage.run(120)
    assert stage.outcomes[-1] == ("Refused", "RejectedBefore")
    before = edit_unit(stage)
    stage.run(300)
    assert stage.host.host.files.data[f"/etc/systemd/system/{SERVER}.service"].decode() == before
    assert "--steps 1" in stage.argv()


def _with_drift(steps: int, mode: str) -> str:

    return DOCUMENT.format(steps=steps).replace("model: qwen", f'model: qwen\ndrift: "{mode}"')


def test_a_source_that_is_away_leaves_everything_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S13: stale is said once, the hosts are still looked after, and what was wanted stays wanted."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.source.wrong = StoreError("git is away")
    stage.run(300)
    told = [n for n in stage.notices if isinstance(n, SourceRead)]
    assert [n.trouble for n in told] == ["", "StoreError: git is away"]
    assert stage.daemon.health()["stale"] == "StoreError: git is away"
    assert "stale" not in capsys.readouterr().err, "who listens prints it; the log repeats nothing"
    stage.host.machine().stop(f"{SERVER}.service")
    stage.run(180)
    assert stage.starts == 2


def test_without_any_specs_nothing_is_done_until_there_are_some() -> None:
    """S13: a first reading that fails is no wish."""
    stage = Stage()
    stage.run(100)
    assert stage.outcomes == []
    stage.source.push(1)
    stage.run(100)
    assert stage.outcomes == GOOD


def test_a_stop_hands_a_waiting_rollout_over_and_the_next_daemon_finishes_it() -> None:
    """SIGTERM at ready: no start is spent, nothing goes back, the next daemon proves what was started (L11)."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.push(2)
    stage.when("start", stage.daemon.stop)
    stage.run(120)
    stage.daemon.drain()
    assert stage.outcomes[-1] == ("Waiting", "HandedOver")
    assert stage.starts == 2
    stage.new_daemon()
    stage.run(120)
    assert stage.outcomes[-2:] == GOOD
    assert stage.starts == 2
    assert "--steps 2" in stage.argv()


def test_a_stop_before_the_old_server_is_touched_leaves_it_alone() -> None:
    """SIGTERM in preflight or acquire: nothing was changed, and nothing begins."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.push(2)
    stage.when("claim", stage.daemon.stop)
    stage.run(120)
    assert stage.outcomes[-1] == ("Waiting", "HandedOver")
    assert "--steps 1" in stage.argv()
    assert stage.starts == 1


def test_a_rollout_that_was_handed_over_to_nobody_goes_back_by_itself() -> None:
    """L3: the host's own timer is the net."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.push(2)
    stage.when("start", stage.daemon.stop)
    stage.run(60)
    stage.world.advance(1200)
    assert "--steps 1" in stage.argv()


def test_a_daemon_that_is_killed_at_any_request_is_gone_on_with() -> None:
    """L3, S11: kill -9 after each request of a change, start again: applied, and at most one start more than undisturbed."""
    number = 0
    while True:
        stage = Stage()
        stage.push(1)
        stage.run(120)
        count = [0]
        died: list[bool] = []

        def die(
            effect: object, count: list[int] = count, at: int = number, died: list[bool] = died
        ) -> None:
            if (
                getattr(effect, "kind", "") == "call"
                and getattr(effect, "stage", "") == "after"
                and not died
            ):
                if count[0] == at:
                    died.append(True)
                    raise ControllerDiedError
                count[0] += 1

        stage.world.on_effect(die)
        stage.push(2)
        for _ in range(30):
            if not died:
                stage.run(5)
        if died:
            stage.new_daemon()
            stage.run(600)
        assert stage.outcomes[-1] == ("InSync", ""), (number, stage.outcomes, stage.sentence)
        assert "--steps 2" in stage.argv(), number
        assert stage.starts <= 3, number
        if not died:
            assert number > 20, "a change is made of more requests than that"
            return
        number += 3


def test_settings_are_read_anew_and_wrong_ones_change_nothing() -> None:
    """SIGHUP: a new limit holds from the next turn on; a mistake in the file leaves the old ones in force."""
    stage = Stage()
    stage.push(1)
    stage.run(120)
    stage.interval_s = 5.0
    stage.daemon.reload()
    stage.run(10)
    assert stage.daemon.setup.interval_s == 5.0
    good = stage.daemon.setup

    def wrong() -> None:
        raise StoreError("no such setting")

    stage.daemon.read_setup = wrong  # type: ignore[assignment]
    stage.daemon.reload()
    stage.run(10)
    assert stage.daemon.setup is good


def test_reporters_hear_everything_in_order_and_cannot_hold_it_up() -> None:
    """Seams for statuses and comments: the commit travels with each event; a reporter that fails is no trouble of the rollout."""
    stage = Stage()

    def broken(_notice: object) -> None:
        raise ValueError("the forge is away")

    stage.daemon.subscribers.insert(0, broken)
    stage.push(1)
    stage.run(30)
    assert stage.outcomes == GOOD or stage.outcomes == GOOD[:1]
    kinds = [type(n) for n in stage.notices]
    assert kinds[:2] == [SourceRead, PassBegan]
    assert kinds.index(PassEnded) > kinds.index(PassEvent)
    began = next(n for n in stage.notices if isinstance(n, PassBegan))
    assert began.commit is not None
    assert began.commit.id == f"{1:040x}"


def test_a_loop_that_no_longer_comes_round_says_so() -> None:
    """The watchdog is only told what is true."""
    stage = Stage()
    stage.push(1)
    stage.run(30)
    assert stage.daemon.alive()
    stage.world.advance(600)
    assert not stage.daemon.alive()
    assert stage.daemon.health()["ok"] is False

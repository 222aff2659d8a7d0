"""What somebody does on a host, and what the daemon makes of it under `drift: off`, `warn` and `heal`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from simulated_daemon import Stage

from reconciler.core.pacing import Limits
from reconciler.daemon import PassEnded
from reconciler.engines import custom
from reconciler.lab.schedule import DOCUMENT, SERVER
from reconciler.lab.world import Process

UNIT = f"{SERVER}.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/10-mine.conf"
DRIFTED = ("Refused", "Drifted")
IN_SYNC = ("InSync", "")


def spec(mode: str, steps: int = 1) -> str:
    """Give the fleet under a mode."""
    return DOCUMENT.format(steps=steps).replace("model: qwen", f'model: qwen\ndrift: "{mode}"')


def applied(mode: str, **options: object) -> Stage:
    """Give a stage whose server is applied under a mode."""
    stage = Stage(**options)  # type: ignore[arg-type]
    stage.source.write(spec(mode))
    stage.run(120)
    assert stage.outcomes == [("Applied", ""), IN_SYNC]
    return stage


def main_process(stage: Stage) -> Process:
    """Give the server's main process."""
    props = stage.host.machine().unit(UNIT)["known"]
    return stage.host.host.processes[int(props["MainPID"])]


def drop_in(stage: Stage) -> Callable[[], bool]:
    """Add a drop-in by hand."""
    stage.host.host.files.put(DROP_IN, b"[Service]\nMemoryMax=200G\n")
    stage.host.systemd.reload()
    return lambda: DROP_IN in stage.host.host.files.data


@pytest.fixture
def named_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine know its flags by name, as those that are not custom do."""

    def read_argv(argv: Sequence[str], *_: object, **__: object) -> dict[str, object]:
        pairs = pairwise(argv)
        return {"args": {a.lstrip("-"): b for a, b in pairs if a.startswith("--")}}

    monkeypatch.setattr(custom, "read_argv", read_argv)


def other_flags(stage: Stage) -> Callable[[], bool]:
    """Start the server with a flag more, as somebody would by a wrapper."""
    process = main_process(stage)
    process.argv = [*process.argv, "--max-model-len", "8"]
    return lambda: "--max-model-len" in main_process(stage).argv


def listener(stage: Stage) -> Callable[[], bool]:
    """Listen on the server's port as well."""
    process = stage.host.host.add_process(port=30000)
    return lambda: process.alive


def gpu_taken(stage: Stage) -> Callable[[], bool]:
    """Train on the server's first card."""
    process = stage.host.host.add_process(gpus=(0,), mib=500)
    return lambda: process.alive


def drift_of(stage: Stage) -> set[str]:
    """Name the drift that the last pass saw."""
    ended = next(n for n in reversed(stage.notices) if isinstance(n, PassEnded))
    return {d.what for d in ended.found.plan.servers[0].drift}


KINDS = [(drop_in, "drop-in"), (listener, "port"), (gpu_taken, "gpu-taken")]


@pytest.mark.parametrize(("do", "what"), KINDS)
@pytest.mark.parametrize("mode", ["off", "warn", "heal"])
def test_what_is_not_ours_to_take_away_is_said_and_never_touched(
    do: Callable[[Stage], Callable[[], bool]], what: str, mode: str
) -> None:
    """L8, S3, S7: said within one observation, nothing started or ended; `off` says nothing; `heal` says that a person must."""
    stage = applied(mode)
    still_there = do(stage)
    stage.run(90)
    assert stage.outcomes[-1] == (IN_SYNC if mode == "off" else DRIFTED)
    assert drift_of(stage) == (set() if mode == "off" else {what})
    assert ("cannot be healed from here" in stage.sentence) is (mode == "heal")
    stage.run(1200)
    assert still_there()
    assert stage.starts == 1


def test_when_the_stranger_goes_the_server_is_in_sync_again() -> None:
    """L9: what blocks is left by itself when its cause goes."""
    stage = applied("warn")
    process = stage.host.host.add_process(gpus=(1,), mib=500)
    stage.run(90)
    assert stage.outcomes[-1] == DRIFTED
    assert f"pid {process.pid}" in stage.sentence
    stage.host.host.end(process)
    stage.run(90)
    assert stage.outcomes[-1] == IN_SYNC


def test_a_stranger_on_another_card_and_one_that_cannot_be_judged_are_no_drift() -> None:
    """Only who is provably somebody else's is named; a neighbour's card is the neighbour's."""
    stage = applied("warn")
    stage.host.host.add_process(gpus=(3,), mib=500)
    stage.run(90)
    assert (stage.outcomes[-1], drift_of(stage)) == (IN_SYNC, set())


@pytest.mark.parametrize("mode", ["off", "warn", "heal"])
def test_a_server_that_is_down_is_brought_back_in_every_mode(mode: str) -> None:
    """That it runs is the spec's own wish, not somebody's edit."""
    stage = applied(mode)
    stage.host.machine().stop(UNIT)
    stage.run(180)
    assert stage.outcomes[-1] == IN_SYNC
    assert stage.starts == 2
    assert "--steps 1" in stage.argv()


@pytest.mark.parametrize("mode", ["off", "warn", "heal"])
def test_a_server_that_is_down_is_not_started_beside_a_stranger(mode: str) -> None:
    """S1, S2: the card was taken while it was down; that is said, and the next start waits until it is free."""
    stage = applied(mode)
    stage.host.machine().stop(UNIT)
    stage.world.advance(3)
    stranger = stage.host.host.add_process(gpus=(0,), mib=9000)
    stage.run(300)
    assert stage.starts == 1
    assert stage.outcomes[-1][0] not in {"InSync", "Applied"}
    assert stranger.alive
    stage.host.host.end(stranger)
    stage.run(1200)
    assert stage.outcomes[-1] == IN_SYNC
    assert stage.starts == 2


@pytest.mark.usefixtures("named_flags")
@pytest.mark.parametrize(("mode", "ends"), [("off", IN_SYNC), ("warn", DRIFTED), ("heal", IN_SYNC)])
def test_other_flags_are_kept_shown_or_healed_as_the_spec_says(
    mode: str, ends: tuple[str, str]
) -> None:
    """The running command line is compared with the unit's; healing brings the applied revision back by a rollout."""
    stage = applied(mode)
    still_there = other_flags(stage)
    stage.run(240)
    assert stage.outcomes[-1] == ends
    assert still_there() is (mode != "heal")
    assert stage.starts == (2 if mode == "heal" else 1)


@pytest.mark.usefixtures("named_flags")
def test_healing_flags_takes_no_newer_commit_and_has_a_flap_limit() -> None:
    """A rejected commit stays out; what comes again and again is healed so often, then left alone and said."""
    stage = applied("heal", limits=Limits(heals=2, starts=100))
    stage.source.write(spec("heal", 3))
    stage.daemon.trigger()
    stage.run(120)
    assert stage.outcomes[-1] == ("Refused", "RejectedBefore")
    starts = stage.starts
    for _ in range(4):
        other_flags(stage)
        stage.run(240)
        assert "--steps 1" in stage.argv()
    assert stage.starts <= starts + 2

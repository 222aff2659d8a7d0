"""What somebody does on a host, and what the daemon makes of it under `drift: off`, `warn` and `heal`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise

import pytest
from simulated_daemon import Stage

from reconciler.core.diff import wording_of
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
STRANGERS = KINDS[1:]


@pytest.mark.parametrize(
    ("do", "what", "mode"),
    [
        *((do, what, mode) for do, what in KINDS for mode in ("off", "warn")),
        *((*s, "heal") for s in STRANGERS),
    ],
)
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


def kept(stage: Stage) -> list[bytes]:
    """Give the bytes that were moved aside."""
    files = stage.host.host.files.data
    return [data for path, data in files.items() if f"/{SERVER}/aside/" in path]


def history(stage: Stage) -> list[dict[str, object]]:
    """Give what the host recorded of what moved something aside."""
    data = stage.host.host.files.data[f"/var/lib/reconciler/{SERVER}/history.ndjson"]
    read = [json.loads(line) for line in data.decode().splitlines()]
    return [r for r in read if r.get("moved_aside")]


def put(stage: Stage, text: bytes, name: str = "10-mine") -> str:
    """Add a drop-in by hand, as an editor and a daemon-reload do."""
    path = f"/etc/systemd/system/{UNIT}.d/{name}.conf"
    stage.host.host.files.put(path, text)
    stage.host.systemd.reload()
    return path


ENVIRONMENT = b"[Service]\nEnvironment=HF_TOKEN=hf_verysecret\n"


@pytest.mark.parametrize("text", [b"[Service]\nMemoryMax=200G\n", ENVIRONMENT])
def test_a_drop_in_is_moved_aside_and_what_never_read_it_is_not_restarted(text: bytes) -> None:
    """`heal`: the bytes are kept and named in the history; the run that was applied began without it, so it goes on."""
    stage = applied("heal")
    before = main_process(stage).pid
    path = put(stage, text)
    stage.run(120)
    assert stage.outcomes[-1] == IN_SYNC
    assert path not in stage.host.host.files.data
    assert kept(stage) == [text]
    assert history(stage)[-1]["moved_aside"] == {path: sha256(text).hexdigest()}
    assert path not in stage.host.machine().unit(UNIT)["known"]["DropInPaths"]
    assert (stage.starts, main_process(stage).pid) == (1, before)
    assert wording_of(text.decode()) in {"MemoryMax=200G", "Environment"}


@pytest.mark.parametrize(
    ("text", "starts"), [(b"[Service]\nMemoryMax=200G\n", 2), (ENVIRONMENT, 3)]
)
def test_a_server_is_restarted_only_where_it_began_with_what_is_moved_away(
    text: bytes, starts: int
) -> None:
    """Somebody adds a drop-in and restarts: an environment is in the process, a limit of memory is not."""
    stage = applied("heal")
    put(stage, text)
    stage.host.machine().stop(UNIT)
    stage.host.machine().start(UNIT)
    stage.run(300)
    assert stage.outcomes[-1] == IN_SYNC
    assert kept(stage) == [text]
    assert stage.starts == starts


def test_a_drop_in_that_comes_back_again_and_again_is_left_alone_and_said() -> None:
    """The flap limit holds for what is moved aside as for a restart: two tools do not fight for ever."""
    stage = applied("heal", limits=Limits(heals=2))
    for number in range(2):
        path = put(stage, b"[Service]\nMemoryMax=%dG\n" % number)
        stage.run(120)
        assert path not in stage.host.host.files.data
    path = put(stage, b"[Service]\nMemoryMax=9G\n")
    stage.run(900)
    assert path in stage.host.host.files.data
    assert stage.outcomes[-1] == ("Waiting", "Flapping")
    assert stage.starts == 1


def test_an_ignored_drop_in_and_one_of_a_package_stay_where_they_are() -> None:
    """A rule with a reason excuses; what lies where packages put things is a person's to take away, and is named."""
    stage = applied("heal")
    rule = 'drift: "heal"\ndrift_ignore: {"drop-in:10-mine.conf": "memory limits by Puppet"}'
    stage.source.write(spec("heal").replace('drift: "heal"', rule))
    path = put(stage, b"[Service]\nMemoryMax=1G\n")
    stage.run(120)
    assert stage.outcomes[-1][0] == "InSync"
    assert path in stage.host.host.files.data
    theirs = f"/usr/lib/systemd/system/{UNIT}.d/20-vendor.conf"
    stage.host.host.files.put(theirs, b"[Service]\nMemoryMax=2G\n")
    stage.host.systemd.reload()
    stage.run(120)
    assert stage.outcomes[-1] == DRIFTED
    assert theirs in stage.sentence
    assert {path, theirs} <= set(stage.host.host.files.data)
    assert kept(stage) == []


def test_a_stranger_on_a_card_is_ignored_by_a_rule_with_a_reason() -> None:
    """`gpu-taken` in `drift_ignore`: in sync, with the reason shown; no rule lets a start begin beside a stranger (S1)."""
    stage = applied("warn")
    rule = 'drift: "warn"\ndrift_ignore: {"gpu-taken": "the exporter samples every card"}'
    stage.source.write(spec("warn").replace('drift: "warn"', rule))
    stage.host.host.add_process(gpus=(0,), mib=500)
    stage.run(120)
    assert stage.outcomes[-1][0] == "InSync"
    ended = next(n for n in reversed(stage.notices) if isinstance(n, PassEnded))
    assert "the exporter samples every card" in str(ended.found.plan.servers[0].notes)
    stage.host.machine().stop(UNIT)
    stage.run(300)
    assert stage.starts == 1

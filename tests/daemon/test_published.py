"""What the daemon keeps for others after its passes: the state of the hosts, and whether servers became slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated_daemon import ENGINES, Stage

from reconciler import probing
from reconciler.core.conditions import CommitStatus
from reconciler.core.fleet import load_fleet
from reconciler.core.perf_drift import NotProbed, PerfDrifted, PerfFinding, PerfHeld
from reconciler.core.revision import revision
from reconciler.core.saved_state import SavedState, read_state
from reconciler.core.standing import NOTHING_TOLD, ended, message_due
from reconciler.daemon import Daemon, PassEnded, PassEvent
from reconciler.effects.state_file import PAUSE_S, UNSEEN, StateFile
from reconciler.engines import custom
from reconciler.lab.schedule import DOCUMENT, HOST, SERVER
from reconciler.probing import Performance
from reconciler.reconcile import survey
from reconciler.wiring import saved_world


def state_at(path: Path) -> SavedState:
    """Read the state that was published."""
    return read_state(path.read_bytes(), "state.json")


def publishing(stage: Stage, path: Path) -> Daemon:
    """Give the stage a daemon that publishes."""
    stage.daemon.published = StateFile(path, "1")
    return stage.daemon


def test_the_state_is_published_after_each_pass_and_plans_as_the_hosts_do(tmp_path: Path) -> None:
    """After a rollout the file holds what is there now, with its commit; a build that plans against it finds nothing to do."""
    path = tmp_path / "state.json"
    stage = Stage()
    publishing(stage, path)
    stage.push(1)
    stage.run(10)
    state = state_at(path)
    assert (state.commit, set(state.hosts)) == (f"{1:040x}", {HOST})
    fleet = load_fleet({"specs/fleet.yaml": DOCUMENT.format(steps=1).encode()}, engines=ENGINES)
    (plan,) = survey(fleet, saved_world(state, ENGINES)).plan.servers
    assert (plan.acts, plan.sentence) == (False, "in sync")
    later = load_fleet({"specs/fleet.yaml": DOCUMENT.format(steps=2).encode()}, engines=ENGINES)
    assert survey(later, saved_world(state, ENGINES)).plan.acts
    assert not list(tmp_path.glob(".*"))


def test_the_state_is_written_no_more_often_than_a_pause_and_never_lost(tmp_path: Path) -> None:
    """What comes within the pause is written when it is over; what is not new is not written again."""
    path = tmp_path / "state.json"
    stage = Stage(interval_s=1.0)
    publishing(stage, path)
    stage.push(1)
    stage.run(60)
    first = state_at(path).taken_at
    stage.run(PAUSE_S - 1)
    seen = {first, state_at(path).taken_at}
    stage.run(2 * PAUSE_S)
    assert len(seen) == 2 or state_at(path).taken_at not in seen
    at = state_at(path).taken_at
    assert stage.world.now - at <= PAUSE_S + 1


def test_a_host_that_was_not_seen_yet_is_silent_in_the_state_not_absent(tmp_path: Path) -> None:
    """Half a state must not read as a fleet with half the hosts."""
    text = DOCUMENT.format(steps=1)
    other = text.replace("name: one", "name: two").replace("host: one", "host: two")
    other = other.replace("name: qwen", "name: other")
    fleet = load_fleet({"a.yaml": text.encode(), "b.yaml": other.encode()}, engines=ENGINES)
    stage = Stage()
    stage.push(1)
    stage.run(60)
    found = next(n.found for n in stage.notices if isinstance(n, PassEnded))
    file = StateFile(tmp_path / "state.json", "1")
    file.saw(found, 5.0)
    assert file.write_if_due(fleet, "", 9.0) is None
    state = state_at(file.path)
    assert (state.hosts["two"].silence, state.taken_at) == (UNSEEN, 5.0)
    assert file.write_if_due(fleet, "", 10.0) is None
    file.saw(found, 11.0)
    assert file.write_if_due(fleet, "", 11.0) == PAUSE_S - 2.0


def test_a_state_that_cannot_be_written_holds_nothing_up(tmp_path: Path) -> None:
    """A full disk, or a folder that is gone, is logged; rollouts go on."""
    stage = Stage()
    publishing(stage, tmp_path / "gone" / "state.json")
    stage.push(1)
    stage.run(120)
    assert stage.outcomes == [("Applied", ""), ("InSync", "")]


# -- performance ----------------------------------------------------------------------------------------------------

SLOWER = PerfDrifted("qwen: PerfDrifted: single: 20 instead of 100", {"revision": "r"})
EVERY_S = 1000.0


class Probes:
    """Stands for the measurement: gives one finding after the other, the last for ever."""

    def __init__(self, stage: Stage, *findings: PerfFinding) -> None:
        self.stage, self.findings, self.at = stage, list(findings), list[float]()

    def __call__(self, *_asked: object) -> PerfFinding:
        self.at.append(self.stage.world.now)
        return self.findings.pop(0) if len(self.findings) > 1 else self.findings[0]


def with_probes(stage: Stage, *findings: PerfFinding, every_s: float = EVERY_S) -> Probes:
    """Give the stage a daemon that probes."""
    probes = Probes(stage, *findings)
    stage.probe_every_s = every_s
    stage.daemon = stage.new_daemon()
    stage.daemon.performance = Performance(probes)
    return probes


def test_a_server_that_became_slower_is_told_with_numbers_and_left_alone() -> None:
    """An event once, the reason in each pass's result until a probe says otherwise; no start, no mutation, no failure."""
    stage = Stage()
    with_probes(stage, SLOWER, SLOWER, PerfHeld("qwen: as fast as when it was applied"))
    stage.push(1)
    stage.run(EVERY_S)
    assert stage.outcomes == [("Applied", ""), ("InSync", "")]
    mutations: list[str] = []
    stage.world.on_effect(lambda e: mutations.append(e.detail) if e.kind == "write" else None)
    stage.run(1.5 * EVERY_S)
    assert stage.outcomes[-1] == ("InSync", "PerfDrifted")
    assert stage.sentence == SLOWER.sentence
    told = [n.event for n in stage.notices if isinstance(n, PassEvent)]
    assert SLOWER.sentence in str(told)
    health = stage.daemon.health()["hosts"][HOST]["servers"][SERVER]
    assert health["reason"] == "PerfDrifted"
    stage.run(2 * EVERY_S)
    assert stage.outcomes[-1] == ("InSync", "")
    assert (mutations, stage.starts) == ([], 1)


def test_probes_come_at_their_interval_and_sooner_where_nothing_was_learnt() -> None:
    """A server in use is asked again after an eighth of the interval; nothing known is forgotten meanwhile."""
    stage = Stage(interval_s=10.0)
    probes = with_probes(stage, SLOWER, NotProbed("in use"), NotProbed("in use"), SLOWER)
    stage.push(1)
    stage.run(3.5 * EVERY_S)
    gaps = [round(b - a, -2) for a, b in zip(probes.at, probes.at[1:], strict=False)]
    assert gaps[:3] == [EVERY_S, 100.0, 100.0]
    assert stage.outcomes[-1] == ("InSync", "PerfDrifted")
    assert stage.outcomes.count(("InSync", "PerfDrifted")) == 1


def test_another_revision_has_not_become_slower() -> None:
    """What was found belongs to the revision that it was found of."""
    stage = Stage()
    with_probes(stage, SLOWER, every_s=5 * EVERY_S)
    stage.push(1)
    stage.run(5.5 * EVERY_S)
    assert stage.outcomes[-1] == ("InSync", "PerfDrifted")
    stage.push(2)
    stage.run(200)
    assert stage.outcomes[-2:] == [("Applied", ""), ("InSync", "")]


def test_without_the_setting_nothing_is_probed() -> None:
    """Measuring costs users something: only an operator asks for it."""
    stage = Stage()
    probes = with_probes(stage, SLOWER, every_s=0.0)
    stage.push(1)
    stage.run(10 * EVERY_S)
    assert probes.at == []


def test_a_probe_gives_way_to_a_commit() -> None:
    """Somebody waits for this host's next pass: the probe is asked whether to go on, and is told no."""
    stage = Stage()
    asked: list[bool] = []

    def probe(_plan: object, _port: object, _world: object, busy: object) -> PerfFinding:
        assert callable(busy)
        asked.append(busy())
        stage.push(2)
        stage.world.advance(1.5)
        stage.daemon.read_if_due()
        asked.append(busy())
        return NotProbed("in use")

    with_probes(stage, SLOWER)
    stage.daemon.performance = Performance(probe)
    stage.push(1)
    stage.run(EVERY_S + 100)
    assert asked[:2] == [False, True]


def test_people_are_told_of_a_slower_server_once_and_of_its_recovery() -> None:
    """The commit's status stays success, since what runs is what is wanted; its words say PerfDrifted."""
    stage = Stage()
    with_probes(stage, SLOWER)
    stage.push(1)
    stage.run(2 * EVERY_S)
    notice = next(n for n in reversed(stage.notices) if isinstance(n, PassEnded))
    stands = ended(notice.found.plan.servers[0], notice.results[0])
    assert (stands.status, stands.reason) == (CommitStatus.SUCCESS, "PerfDrifted")
    message, told = message_due(stands, NOTHING_TOLD, 0.0)
    assert message is not None
    assert message.urgency.value == "warning"
    assert message_due(stands, told, 1.0)[0] is None
    first = next(n for n in stage.notices if isinstance(n, PassEnded) and n.results[0].outcome == "InSync")  # fmt: skip
    well = ended(first.found.plan.servers[0], first.results[0])
    recovered, _ = message_due(well, told, 2.0)
    assert recovered is not None
    assert recovered.urgency.value == "success"


TELLS_USE = DOCUMENT.format(steps=1).replace(
    "engine: {name: custom,", "engine: {name: custom, in_flight: /metrics,"
)


def test_what_is_probed_is_what_is_applied_not_what_the_specs_say_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spec, GPUs and evidence come from the host's record; somebody waiting reads as unknown use, which is not idle."""
    stage = Stage()
    stage.source.write(TELLS_USE)
    stage.run(120)
    ended_pass = next(n for n in reversed(stage.notices) if isinstance(n, PassEnded))
    (host,) = ended_pass.found.hosts
    waiting: list[str] = []
    asked: list[tuple[Any, ...]] = []

    def measure(server: Any, _port: object, evidence: Any, in_use: Any, **more: Any) -> PerfFinding:
        asked.append((server, evidence, in_use, more))
        return NotProbed("a test")

    monkeypatch.setattr(probing, "probe_performance", measure)
    world = stage.daemon.setup.world
    with world.connect(host.host) as port:
        assert probing.probed(host.plans[0], port, world, lambda: bool(waiting)) == NotProbed(
            "a test"
        )
    ((server, evidence, in_use, more),) = asked
    assert revision(server) == host.plans[0].applied
    assert evidence["kind"] == "gate"
    assert len(more["facts"]["gpus"].split(",")) == 2
    assert in_use() == 0
    waiting.append("a commit")
    assert in_use() is None


def test_how_many_requests_a_server_has_is_asked_of_itself() -> None:
    """By the engine's own request over the host's loopback; what it does not say is unknown."""
    stage = Stage()
    stage.source.write(TELLS_USE)
    stage.run(120)
    fleet = load_fleet({"a.yaml": TELLS_USE.encode()}, engines=ENGINES)
    (server,) = fleet.servers
    world = stage.daemon.setup.world
    with world.connect(fleet.hosts[0]) as port:
        assert probing.in_flight(server, custom, port) == 0
        stage.host.machine().stop(f"{SERVER}.service")
        stage.world.advance(5)
        assert probing.in_flight(server, custom, port) is None
        assert probing.in_flight(load_fleet({"a.yaml": DOCUMENT.format(steps=1).encode()}, engines=ENGINES).servers[0], custom, port) is None  # fmt: skip


def test_a_wrong_spec_is_told_of_its_server_though_no_pass_looks_at_it(tmp_path: Path) -> None:
    """A mistake ends the passes of its server, and neither health nor state go on saying that it is in sync."""
    path = tmp_path / "state.json"
    stage = Stage()
    publishing(stage, path)
    stage.push(1)
    stage.run(120)
    assert state_at(path).spec_wrong == {}
    stage.source.write(DOCUMENT.format(steps=1) + "no_such_key: 1\n")
    stage.run(120)
    health = stage.daemon.health()
    said = health["hosts"][HOST]["servers"][SERVER]
    assert (said["outcome"], said["reason"]) == ("Refused", "SpecInvalid")
    assert said["sentence"].startswith("spec is wrong: specs/fleet.yaml:")
    assert health["spec_wrong"] == {SERVER: said["sentence"]}
    assert state_at(path).spec_wrong == {SERVER: said["sentence"]}
    stage.push(1)
    stage.run(120)
    assert stage.daemon.health()["spec_wrong"] == state_at(path).spec_wrong == {}

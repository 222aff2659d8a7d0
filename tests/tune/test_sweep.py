"""A sweep on a simulated host: each point is a real rollout, the truth of each point is known, and the right one wins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from speculation import Speculating

from reconciler import tune
from reconciler.bench.load_plan import Endpoint, LoadPlan
from reconciler.bench.rounds import GateOutcome, run_gate
from reconciler.core.conditions import Outcome, Reason
from reconciler.core.errors import UsageError
from reconciler.core.event import Event
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.going_back import good_before
from reconciler.core.measurement import Baseline, Distribution, RunResult
from reconciler.core.revision import revision
from reconciler.core.spec import Gate, Server
from reconciler.core.tuning import Objective, Point, State, Tried, axis_of, gate_of, points_of
from reconciler.effects.ports import HostPort
from reconciler.effects.sweep_journal import SweepJournal
from reconciler.engines import custom
from reconciler.lab.schedule import DOCUMENT, HOST, new_host
from reconciler.lab.simulated import server_on
from reconciler.lab.simulated_ports import SimulatedPort, VirtualClock, controller_world
from reconciler.lab.world import Behaviour, World
from reconciler.reconcile import act, survey
from reconciler.tune import Ended, Sweep, run_sweep
from reconciler.views.tuning import message

ENGINES = {"custom": custom}
COMMAND = '["/usr/bin/serve","--port","30000","--steps","{}"]'

# Tokens a second of one stream and of sixteen, by value of K; None for what is applied.
TRUTH: Mapping[str | None, tuple[float, float]] = {
    None: (100.0, 1000.0),
    "1": (120.0, 1100.0),
    "2": (121.0, 1105.0),
    "3": (80.0, 700.0),
    "4": (150.0, 800.0),
}
NOISE = (0.0, 0.004, -0.004, 0.002, -0.002, 0.003, -0.003, 0.001)


@dataclass
class Truth:
    """A meter that knows how fast each point is."""

    server: Server
    truth: Mapping[str | None, tuple[float, float]]
    clock: VirtualClock
    rounds: int = 0

    def measure(self, plan: LoadPlan, endpoint: Endpoint, on_progress: object) -> RunResult:
        """Give a round as fast as the truth says, with a little noise."""
        single, batch = self.truth[self.server.env.get("K")]
        self.clock.sleep(0.5)
        factor = 1 + NOISE[plan.round % len(NOISE)]
        self.rounds = max(self.rounds, plan.round)
        return RunResult(
            run=plan.run,
            round=plan.round,
            workload=plan.workload,
            concurrency=plan.concurrency,
            max_tokens=plan.max_tokens,
            sent=plan.requests,
            completed=plan.requests,
            decode_tps=Distribution.of([single * factor] * plan.requests),
            output_tps=(single if plan.concurrency == 1 else batch) * factor,
        )

    def flush(self, _endpoint: Endpoint) -> bool:
        """Have no prefix cache."""
        return False

    def ask(self, plan: LoadPlan, endpoint: Endpoint, on_progress: object) -> Any:
        """Answer no questions."""
        return self.measure(plan, endpoint, on_progress), {}


@dataclass
class Bench:
    """A simulated host that serves what `document` says, and everything to tune it with."""

    tmp: Path
    document: str = DOCUMENT.format(steps=1).replace("min_decode_tps: 100", "min_decode_tps: 50")
    truth: Mapping[str | None, tuple[float, float]] = field(default_factory=lambda: dict(TRUTH))
    said: list[str] = field(default_factory=list)
    rounds: dict[str | None, int] = field(default_factory=dict)
    after: Callable[[Tried], None] = lambda _tried: None
    meter: Callable[[Server], Any] | None = None

    def __post_init__(self) -> None:
        self.world = World(1)
        self.host = new_host(self.world)
        self.stranger = self.host.host.add_process(gpus=(3,), mib=4000)
        self.clock = VirtualClock(self.world)
        self.controller = controller_world(self.world, {HOST: self.host}, ENGINES, clock=self.clock)
        act(survey(self.fleet, self.controller), self.controller, lambda _event: None)

    @property
    def fleet(self) -> Fleet:
        """Give the fleet of the document."""
        loaded = load_fleet({"specs/fleet.yaml": self.document.encode()}, engines=ENGINES)
        assert not loaded.problems, loaded.problems
        return loaded

    @property
    def server(self) -> Server:
        """Give the only server."""
        return self.fleet.servers[0]

    def sweep(self, *sets: str, require: Sequence[str] = (), **other: Any) -> Sweep:
        """Give a sweep over these fields."""
        return Sweep(
            self.server,
            points_of([axis_of(text) for text in sets]),
            gate_of(self.server, require),
            other.get("objective", Objective.BALANCED),
            other.get("margin", 0.02),
            other.get("rounds", 6),
        )

    def run(self, sweep: Sweep, *, resume: bool = False) -> Ended:
        """Play it."""
        journal = SweepJournal(self.tmp / "qwen.ndjson")
        return run_sweep(
            sweep,
            self.fleet,
            self.controller,
            journal,
            measure=self.measure,
            listener=self,
            resume=resume,
        )

    def measure(
        self,
        server: Server,
        gate: Gate,
        host: HostPort,
        baseline: Baseline | None,
        *,
        deadline_s: float,
        on_progress: Callable[[str], None],
        go_on: Callable[[Sequence[RunResult]], bool],
    ) -> GateOutcome:
        """Measure what really runs on the simulated host."""
        assert isinstance(host, SimulatedPort)
        assert server_on(self.host.host, server.listen.port) is not None, (
            "measured while nothing serves"
        )
        on_progress("measuring")
        truth = self.meter(server) if self.meter else Truth(server, self.truth, self.clock)
        outcome = run_gate(
            gate,
            Endpoint("127.0.0.1", 1, "completions", None),
            baseline,
            deadline_s=deadline_s,
            clock=self.clock.now,
            meter=truth,
            go_on=go_on,
        )
        self.rounds[server.env.get("K")] = outcome.rounds
        return outcome

    def point(self, number: int, count: int, point: Point, left_s: float | None) -> None:
        """Note it."""
        left = "?" if left_s is None else f"{left_s:.0f}"
        self.said.append(f"{number}/{count} {point.label} {left}")

    def progress(self, sentence: str) -> None:
        """Hear it."""

    def event(self, event: Event) -> None:
        """Hear it."""

    def tried(self, tried: Tried) -> None:
        """Hear it, and do what the test wants then."""
        self.after(tried)

    def settled(self) -> Outcome:
        """Run a pass as anybody would afterwards; a sweep leaves nothing to be said of the gate either."""
        found = survey(self.fleet, self.controller)
        (result,) = act(found, self.controller, lambda _event: None)
        assert result.reason in {Reason.NONE, Reason.HOLD}
        return result.outcome

    def served_steps(self) -> str | None:
        """Say which K serves now."""
        assert server_on(self.host.host, 30000) is not None
        unit = self.host.host.files.data["/etc/systemd/system/qwen.service"].decode()
        found = re.search(r'^Environment="K=(.*)"$', unit, re.MULTILINE)
        return found[1] if found else None


def states(ended: Ended) -> dict[str, State]:
    """Give what came of each point, by its label."""
    return {tried.point.label: tried.state for tried in ended.tried}


def test_the_best_point_wins_and_the_smaller_of_equals(tmp_path: Path) -> None:
    """1 and 2 are within the margin: 1 wins; 4 is fast for one stream only; what was applied serves again, without a hold."""
    bench = Bench(tmp_path)
    ended = bench.run(bench.sweep("env.K=1,2,3,4"))
    assert ended.restored
    assert ended.choice.winner is not None
    assert ended.choice.winner.point.label == "env.K=1"
    assert ended.choice.ties == ("env.K=2",)
    assert set(ended.choice.front) == {"env.K=2", "env.K=4"}
    assert bench.served_steps() is None
    assert bench.settled() is Outcome.IN_SYNC
    assert bench.host.host.processes[bench.stranger.pid].alive


def test_a_point_that_is_worse_in_every_way_is_measured_no_longer_than_it_takes(
    tmp_path: Path,
) -> None:
    """After three rounds it is clear that 3 is slower than what is applied; the others get all six."""
    bench = Bench(tmp_path)
    ended = bench.run(bench.sweep("env.K=1,3"))
    assert states(ended)["env.K=3"] is State.DOMINATED
    assert bench.rounds["3"] == 3
    assert bench.rounds["1"] == 6


def test_going_back_after_a_sweep_is_no_point_of_it(tmp_path: Path) -> None:
    """Two revisions were applied by people; the points between them were chosen by nobody."""
    bench = Bench(tmp_path)
    first = str(revision(bench.server))
    bench.document = bench.document.replace('--steps, "1"', '--steps, "2"')
    assert bench.settled() is Outcome.APPLIED
    bench.run(bench.sweep("env.K=1,2"))
    live = survey(bench.fleet, bench.controller).hosts[0].live
    assert live is not None
    found = live.server("qwen")
    assert found.known_records is not None
    assert good_before(found.known_records, found.history) == first


def test_the_objective_decides(tmp_path: Path) -> None:
    """For one stream alone, 4 is the best."""
    bench = Bench(tmp_path)
    ended = bench.run(bench.sweep("env.K=1,4", objective=Objective.SPEED))
    assert ended.choice.winner is not None
    assert ended.choice.winner.point.label == "env.K=4"


def test_a_requirement_that_is_missed_keeps_a_point_from_winning(tmp_path: Path) -> None:
    """4 is the fastest for one stream, and gives too little in all."""
    bench = Bench(tmp_path)
    sweep = bench.sweep(
        "env.K=1,4", objective=Objective.SPEED, require=["batch:min_output_tps=900"]
    )
    ended = bench.run(sweep)
    assert states(ended)["env.K=4"] is State.UNFIT
    assert ended.choice.winner is not None
    assert ended.choice.winner.point.label == "env.K=1"


WITH_GREEDY = DOCUMENT.format(steps=1).replace(
    "    - {name: single, concurrency: 1, requests: 64, max_tokens: 64, min_decode_tps: 100}\n",
    """    - {name: single, concurrency: 1, requests: 6, max_tokens: 128}
    - {name: batch, concurrency: 4, requests: 12, max_tokens: 128}
    - {name: loops, concurrency: 1, requests: 6, max_tokens: 128, workload: greedy}
""",
)
STEPS = "env.K=1,3,5,10"


def speculating(bench: Bench, **how: Any) -> Bench:
    """Let the simulated server draft K tokens a pass."""
    bench.meter = lambda server: Speculating(
        int(server.env.get("K", "0")), bench.clock.sleep, **how
    )
    return bench


def test_greedy_says_ten_drafts_sampling_says_none_and_users_get_none(tmp_path: Path) -> None:
    """One server, five values: greedy text makes ten drafts five times as fast, sampled text only slower; the latter decides.

    The figures are those that were measured on a real vLLM, within what a model of two lines can give.
    """
    bench = speculating(Bench(tmp_path, WITH_GREEDY))
    ended = bench.run(bench.sweep(STEPS, objective=Objective.SPEED))
    table = {
        int(dict(t.point.settings).get("env.K", 0)): (t.to_json()["greedy_tps"], t.to_json()["single_tps"])
        for t in ended.tried
        if not t.point.again
    }  # fmt: skip
    assert sorted(table) == [0, 1, 3, 5, 10]
    greedy, sampled = ({k: row[i] for k, row in table.items()} for i in (0, 1))
    assert max(greedy, key=greedy.__getitem__) == 10
    assert greedy[10] / greedy[0] > 4
    assert max(sampled, key=sampled.__getitem__) == 0
    measured = {0: 129, 1: 81, 3: 80, 5: 79, 10: 76}
    assert sampled == pytest.approx(measured, rel=0.1)
    ten = next(t for t in ended.tried if t.point.label == "env.K=10")
    assert ten.to_json()["greedy_accept_length"] > 6
    assert ten.to_json()["accept_length"] == 1
    assert ended.choice.winner is not None
    assert ended.choice.winner.point == Point()
    (note,) = (n for n in ended.choice.notes if "greedy" in n)
    assert "would have chosen env.K=10 (+" in note
    assert "GREEDY tok/s" in message("qwen", ended.tried, ended.choice, Objective.SPEED)


def test_drafts_that_users_profit_from_are_chosen(tmp_path: Path) -> None:
    """Where sampled text is guessed as well as greedy text, ten drafts win, and there is nothing to note."""
    bench = speculating(Bench(tmp_path, WITH_GREEDY), accepts=lambda _greedy, made: made >= 5)
    ended = bench.run(bench.sweep(STEPS, objective=Objective.SPEED))
    assert ended.choice.winner is not None
    assert ended.choice.winner.point.label == "env.K=10"
    assert ended.choice.notes == ()


def test_what_is_applied_stays_when_nothing_is_better(tmp_path: Path) -> None:
    """A difference within the margin is no reason to change anything."""
    bench = Bench(tmp_path, truth={**TRUTH, "1": (101.0, 1008.0)})
    ended = bench.run(bench.sweep("env.K=1"))
    assert ended.choice.winner is not None
    assert ended.choice.winner.point == Point()
    assert "stays" in ended.choice.sentence


def test_a_point_that_does_not_come_up_is_kept_and_skipped(tmp_path: Path) -> None:
    """It is rolled back like any change, said with its reason, and the sweep goes on."""
    bench = Bench(tmp_path)
    bench.host.host.behave("--steps 9", Behaviour(crash_at_s=0.5))
    commands = f"engine.command={COMMAND.format(9)},{COMMAND.format(3)}"
    ended = bench.run(bench.sweep(commands))
    failed = next(t for t in ended.tried if t.state is State.FAILED)
    assert "9" in failed.point.label
    assert failed.sentence
    assert len(ended.tried) == 4
    assert ended.restored
    assert bench.settled() is Outcome.IN_SYNC


def test_a_value_that_the_spec_language_refuses_costs_no_restart(tmp_path: Path) -> None:
    """The engine's rules judge each point before anything is stopped."""
    bench = Bench(tmp_path)
    ended = bench.run(bench.sweep("tp_size=0,1"))
    failed = next(t for t in ended.tried if t.state is State.FAILED)
    assert failed.point.label == "tp_size=0"
    assert "tp_size" in failed.sentence
    assert failed.rollout_s == 0


def test_two_points_that_run_the_same_are_measured_once(tmp_path: Path) -> None:
    """`tp_size: 1` is the default and so what is applied."""
    bench = Bench(tmp_path)
    ended = bench.run(bench.sweep("tp_size=1"))
    same = next(t for t in ended.tried if t.point.settings)
    assert same.sentence == "the same as applied"
    assert same.rollout_s == 0


def test_a_sweep_that_was_stopped_is_gone_on_with(tmp_path: Path) -> None:
    """Stopped after two points: what was applied serves, nobody holds it; --resume measures only what is left."""
    bench = Bench(tmp_path)

    def stop(tried: Tried) -> None:
        bench.clock.stopped = tried.point.label == "env.K=1"

    bench.after = stop
    first = bench.run(bench.sweep("env.K=1,2"))
    assert first.stopped
    assert first.restored
    assert bench.served_steps() is None
    bench.clock.stopped, bench.after = False, lambda _tried: None
    with pytest.raises(UsageError, match="--resume"):
        bench.run(bench.sweep("env.K=1,2"))
    with pytest.raises(UsageError, match="another sweep"):
        bench.run(bench.sweep("env.K=1,4"), resume=True)
    bench.said.clear()
    ended = bench.run(bench.sweep("env.K=1,2"), resume=True)
    assert [line.split()[1] for line in bench.said] == ["env.K=2", "applied,"]
    assert len(ended.tried) == 4
    assert ended.choice.winner is not None
    assert ended.choice.winner.point.label == "env.K=1"


def test_a_sweep_that_was_killed_in_a_rollout_is_gone_on_with(tmp_path: Path) -> None:
    """Killed with a point up: the hold keeps passes off; --resume ends it, and what was applied is back."""
    bench = Bench(tmp_path)

    def die(tried: Tried) -> None:
        if tried.point.label == "env.K=1":
            raise KeyboardInterrupt

    class Killed(Exception):  # noqa: N818  (no error: a kill)
        pass

    def killed(*_args: object, **_more: object) -> None:
        raise Killed

    bench.after = die
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune._Run, "_restore", killed)  # A killed process restores nothing.
        with pytest.raises(Killed):
            bench.run(bench.sweep("env.K=1,2"))
    assert bench.served_steps() == "1"
    assert bench.settled() is Outcome.WAITING
    bench.after = lambda _tried: None
    ended = bench.run(bench.sweep("env.K=1,2"), resume=True)
    assert ended.restored
    assert bench.served_steps() is None
    assert bench.settled() is Outcome.IN_SYNC


def test_a_sweep_begins_at_what_is_applied(tmp_path: Path) -> None:
    """Where the spec has moved on there is nothing to compare with: nothing is begun."""
    bench = Bench(tmp_path)
    bench.document = DOCUMENT.format(steps=3)
    with pytest.raises(UsageError, match="not in sync"):
        bench.run(bench.sweep("env.K=1"))
    assert not (tmp_path / "qwen.ndjson").exists()


def test_a_host_that_drifts_widens_the_margin(tmp_path: Path) -> None:
    """The control is 8 % slower at the end: 5 % more than it means nothing."""
    bench = Bench(tmp_path, truth={**TRUTH, "1": (105.0, 1050.0)})

    def cool(tried: Tried) -> None:
        if tried.point.settings:
            bench.truth = {**TRUTH, None: (92.0, 920.0)}

    bench.after = cool
    ended = bench.run(bench.sweep("env.K=1"))
    assert ended.choice.winner is not None
    assert ended.choice.winner.point == Point()
    assert ended.choice.drift is not None
    assert "changed by 8" in " ".join(ended.choice.notes)


def test_the_estimate_follows_what_was_measured(tmp_path: Path) -> None:
    """Nothing is known before the first rollout of a host; afterwards it is."""
    bench = Bench(tmp_path)
    bench.run(bench.sweep("env.K=1,2"))
    assert bench.said[0].endswith("?")
    assert all(not line.endswith("?") for line in bench.said[2:])

"""One rollout under one fault, on the simulated host: does every safety rule hold, and is the end the undisturbed one?

    python -m reconciler.lab.schedule STORY FAULT INDEX      replays one schedule and prints its trace

A fault strikes one of the requests that a controller sends, by its number. The controller that dies is run again, as a
person or systemd would, until the fleet has settled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from reconciler.core.conditions import Outcome, ServerResult
from reconciler.core.errors import OutcomeUnknownError
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.engines import custom
from reconciler.engines.base import Engine
from reconciler.lab.oracle import Oracle, end_state
from reconciler.lab.simulated import SimulatedHost, add_host
from reconciler.lab.simulated_ports import VirtualClock, controller_world
from reconciler.lab.world import Behaviour, Effect, World
from reconciler.logs import configure
from reconciler.reconcile import act, survey

SERVER, UNIT, HOST = "qwen", "qwen.service", "one"
PASSES = 8
"""How often the controller is run again before the schedule counts as one that never settles (L5)."""
SETTLE_S = 240.0
"""Two leases and the dead-man timer's grace, between passes."""

DOCUMENT = """apiVersion: reconciler/v1
kind: Host
name: one
---
apiVersion: reconciler/v1
kind: Server
name: qwen
host: one
gpus: [0, 1]
engine: {{name: custom, command: [/usr/bin/serve, --port, "30000", --steps, "{steps}"]}}
model: qwen
listen: {{address: 127.0.0.1, port: 30000}}
timeouts: {{drain: 5s, stop: 20s, release: 30s, ready: 60s, gate: 60s}}
gate:
  quality: "off"
  runs:
    - {{name: single, concurrency: 1, requests: 64, max_tokens: 64, min_decode_tps: 100}}
"""


class Fault(StrEnum):
    """What strikes a request. `none` is the undisturbed run."""

    NONE = "none"
    CRASH_BEFORE = "crash-before"
    CRASH_AFTER = "crash-after"
    LOST_BEFORE = "lost-before"
    LOST_AFTER = "lost-after"
    LATE = "late"
    REBOOT_BEFORE = "reboot-before"
    REBOOT_AFTER = "reboot-after"


class ControllerDiedError(Exception):
    """The controller was killed at this point."""


@dataclass(frozen=True, slots=True)
class Story:
    """A rollout: revisions (by their number of steps) applied before, and the one that is rolled out under faults."""

    name: str
    before: tuple[int, ...]
    steps: int
    ends: Outcome


STORIES: Mapping[str, Story] = {
    s.name: s
    for s in (
        Story("first-deploy", (), 1, Outcome.APPLIED),
        Story("change", (1,), 2, Outcome.APPLIED),
        Story("gate-fails", (1,), 3, Outcome.ROLLED_BACK),
    )
}

BEHAVIOURS = {
    1: Behaviour(model="qwen", workers=1, speeds={"decode_tps": 150.0}),
    2: Behaviour(model="qwen", workers=1, speeds={"decode_tps": 180.0}, leaves_child=True),
    3: Behaviour(model="qwen", workers=1, speeds={"decode_tps": 50.0}),
}


@dataclass
class Striker:
    """Lets one fault strike one request."""

    simulated: SimulatedHost
    oracle: Oracle
    fault: Fault
    index: int
    count: int = 0
    trace: list[str] = field(default_factory=list)
    struck: bool = False

    def watch(self, effect: Effect) -> None:
        """See one effect; strike when it is the request's turn."""
        if effect.kind != "call":
            self.trace.append(
                f"{self.simulated.world.now:8.2f}     {effect.stage} {effect.kind} {effect.detail}"
            )
            return
        if effect.stage == "before":
            self.count += 1
            self.trace.append(f"{self.simulated.world.now:8.2f} {self.count:4d} {effect.detail}")
        if self.count == self.index and not self.struck:
            self._strike(effect)

    def _strike(self, effect: Effect) -> None:
        before = effect.stage == "before"
        wanted = self.fault in {
            Fault.CRASH_BEFORE,
            Fault.LOST_BEFORE,
            Fault.LATE,
            Fault.REBOOT_BEFORE,
        }
        if before != wanted or self.fault is Fault.NONE:
            return
        self.struck = True
        self.trace.append(f"         >>>> {self.fault.value}")
        match self.fault:
            case Fault.CRASH_BEFORE | Fault.CRASH_AFTER:
                raise ControllerDiedError
            case Fault.REBOOT_BEFORE | Fault.REBOOT_AFTER:
                self.simulated.reboot()
            case Fault.LATE:
                request = dict(effect.request or {})
                self.simulated.world.after(2.0, lambda: _ignore(self.simulated.execute, request))
            case Fault.LOST_BEFORE | Fault.LOST_AFTER:
                pass
        self.oracle.unknown_outcome = True
        raise OutcomeUnknownError(HOST, f"the reply was lost ({self.fault.value})")


def _ignore(execute: Callable[[Mapping[str, Any]], Any], request: Mapping[str, Any]) -> None:
    try:
        execute(request)
    except OutcomeUnknownError:
        return


@dataclass(frozen=True, slots=True)
class Ended:
    """How a schedule ended."""

    state: dict[str, Any]
    results: tuple[ServerResult, ...]
    requests: int
    starts: int
    trace: tuple[str, ...]


def fleet_of(steps: int, engines: Mapping[str, Engine]) -> Fleet:
    """Give the fleet that wants this revision."""
    fleet = load_fleet({"specs/fleet.yaml": DOCUMENT.format(steps=steps).encode()}, engines=engines)
    assert not fleet.problems, fleet.problems
    return fleet


def new_host(world: World) -> SimulatedHost:
    """Give a host with four GPUs, a stranger on the third, and every revision's behaviour."""
    simulated = add_host(world, HOST, gpus=4)
    for steps, behaviour in BEHAVIOURS.items():
        simulated.host.behave(f"--steps {steps}", behaviour)
    simulated.host.paths["/usr/bin/serve"] = {
        "kind": "file", "size": 1, "mode": 0o755, "uid": 0, "gid": 0, "executable": True,
    }  # fmt: skip
    return simulated


def run(
    story: Story, fault: Fault, index: int, engines: Mapping[str, Engine], *, seed: int = 1
) -> Ended:
    """Play a story with one fault and give how it ended.

    Raises:
        ViolationError: A safety rule was broken, or the fleet never settled.
    """
    world = World(seed)
    simulated = new_host(world)
    stranger = simulated.host.add_process(gpus=(3,), mib=4000)
    clock = VirtualClock(world)
    controller = controller_world(world, {HOST: simulated}, engines, clock=clock)
    for steps in story.before:
        act(survey(fleet_of(steps, engines), controller), controller, lambda _event: None)
    oracle = Oracle(simulated, {SERVER: UNIT}, bystanders=(stranger.pid,))
    oracle.check()
    striker = Striker(simulated, oracle, fault, index)
    world.on_effect(oracle.watch)
    world.on_effect(striker.watch)
    fleet = fleet_of(story.steps, engines)
    starts_before = len(simulated.host.truth.starts)
    results: tuple[ServerResult, ...] = ()
    first: tuple[ServerResult, ...] = ()
    for _ in range(PASSES):
        try:
            results = act(survey(fleet, controller), controller, lambda _event: None)
        except ControllerDiedError:
            world.advance(1.0)
            continue
        first = first or results
        if all(_settled(r) for r in results):
            break
        world.advance(SETTLE_S)
    oracle.check()
    return Ended(
        state=end_state(simulated, SERVER, UNIT),
        results=results,
        requests=striker.count,
        starts=len(simulated.host.truth.starts) - starts_before,
        trace=tuple(striker.trace),
    )


def _settled(result: ServerResult) -> bool:
    """Say whether another pass would change nothing: in sync, or stalled on a rejected revision."""
    return result.outcome is Outcome.IN_SYNC or (
        result.outcome is Outcome.REFUSED and result.reason.value == "RejectedBefore"
    )


def main(argv: list[str]) -> int:
    """Replay one schedule and print its trace."""
    configure(os.environ)
    story, fault, index = STORIES[argv[0]], Fault(argv[1]), int(argv[2])
    ended = run(story, fault, index, {"custom": custom})
    sys.stdout.write("\n".join(ended.trace) + f"\n{ended.results}\n{ended.state}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

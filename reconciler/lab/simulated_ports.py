"""The controller's ports over simulated hosts: the real step machine and interpreter, on a virtual clock, in one process.

What stands in for the network is a function call, for the benchmark client the speeds that a server's behaviour names.
Everything between is the product's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from reconciler.core.desired import Target
from reconciler.core.errors import HostUnreachableError
from reconciler.core.pruning import Pruning
from reconciler.core.revision import restored
from reconciler.core.spec import Gate, Host
from reconciler.effects.channel import as_answer, wire
from reconciler.effects.ports import Answer, GateReport, HostPort, Request
from reconciler.engines.base import Engine
from reconciler.lab.simulated import SimulatedHost, server_on
from reconciler.lab.world import World
from reconciler.reconcile import World as ControllerWorld
from reconciler.transports.base import Address


class VirtualClock:
    """Time that passes only when somebody waits."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stopped = False

    def now(self) -> float:
        """Give virtual seconds."""
        return self.world.now

    def sleep(self, seconds: float) -> None:
        """Let the world go on for so long."""
        self.world.advance(seconds)

    @property
    def stopping(self) -> bool:
        """Say whether somebody asked the controller to stop."""
        return self.stopped


class SimulatedPort:
    """`HostPort` to one simulated host."""

    def __init__(self, host: SimulatedHost) -> None:
        self.simulated = host

    @property
    def name(self) -> str:
        """Give the host's name."""
        return self.simulated.name

    def call(self, request: Request, *, deadline_s: float) -> Answer:  # noqa: ARG002  (nothing is slow here)
        """Ask the helper on the host."""
        return as_answer(self.simulated.call(wire(request, self.simulated.world.hex(32))))

    def observe_outer(
        self,
        args: Mapping[str, Any],  # noqa: ARG002  (there is one layer)
        *,
        deadline_s: float,  # noqa: ARG002
    ) -> Mapping[str, Any] | None:
        """Say that there is one layer."""
        return None

    def ask_outer(self, request: Request, *, deadline_s: float) -> Answer | None:  # noqa: ARG002
        """Say that there is one layer."""
        return None

    def reach(self, port: int) -> AbstractContextManager[Address]:
        """Refuse: the simulated world has no sockets; its gate reads the world instead."""
        raise HostUnreachableError(self.name, f"port {port} of a simulated host has no socket")


def simulated_gate(
    target: Target,
    engine: Engine,
    host: HostPort,
    baseline: Mapping[str, Any] | None,
    *,
    deadline_s: float,
    on_progress: Callable[[str], None],
) -> GateReport:
    """Judge the speeds that the running server's behaviour names against the spec's limits."""
    assert isinstance(host, SimulatedPort), "the simulated gate reads the simulated world"
    server = restored(json.loads(target.spec), {engine.name: engine})
    assert server is not None, "a simulated target was made from a valid spec"
    assert server.gate is not None, "only a gated server is measured"
    world = host.simulated.world
    world.advance(min(10.0, deadline_s))
    on_progress("measuring")
    process = server_on(host.simulated.host, server.listen.port)
    if process is None or not host.simulated.host.is_up():
        return GateReport("error", "the server did not answer the gate", {"kind": "gate"})
    speeds = dict(process.behaviour.speeds)
    failures, missing = judged(server.gate, speeds, (baseline or {}).get("speeds"))
    evidence = {"version": 1, "kind": "gate", "speeds": speeds}
    if failures:
        return GateReport("fail", "; ".join(failures), {**evidence, "message": "; ".join(failures)})
    if missing:
        return GateReport(
            "inconclusive", "; ".join(missing), {**evidence, "message": "; ".join(missing)}
        )
    return GateReport("pass", "every limit held", {**evidence, "message": "every limit held"})


def judged(
    gate: Gate, speeds: Mapping[str, float], before: Mapping[str, float] | None
) -> tuple[list[str], list[str]]:
    """Give the limits that were missed, and those that could not be measured."""
    failures, missing = [], []
    for run in gate.runs:
        for limit in run.limits:
            name = limit.key.split("_", 1)[1]
            measured = speeds.get(name)
            if measured is None:
                missing.append(f"{run.name}: {name} was not measured")
            elif (measured < limit.value) if limit.bound == "min" else (measured > limit.value):
                failures.append(
                    f"{run.name}: {limit.key} is {limit.value:g}, measured {measured:g}"
                )
    if gate.baseline is not None and before:
        for name, old in before.items():
            new = speeds.get(name)
            if (
                new is not None
                and name.endswith("_tps")
                and new < old * (1 - gate.baseline.max_loss)
            ):
                failures.append(
                    f"{name} fell from {old:g} to {new:g}, more than the allowed {gate.baseline.max_loss:.0%}"
                )
    return failures, missing


def controller_world(
    world: World,
    hosts: Mapping[str, SimulatedHost],
    engines: Mapping[str, Engine],
    *,
    clock: VirtualClock | None = None,
    holder: str = "rehearsal",
    pruning: Pruning = Pruning(),  # noqa: B008  (frozen)
) -> ControllerWorld:
    """Give the controller its world: these hosts, this clock."""

    @contextmanager
    def connect(host: Host) -> Iterator[HostPort]:
        yield SimulatedPort(hosts[host.name])

    return ControllerWorld(
        connect=connect,
        clock=clock or VirtualClock(world),
        engines=engines,
        gate=simulated_gate,
        holder=holder,
        new_id=lambda: world.hex(16),
        wall=lambda: 1_800_000_000.0 + world.now,
        pruning=pruning,
    )

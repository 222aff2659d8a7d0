"""A simulated host with a server on two of its GPUs, for the tests of a release."""

from __future__ import annotations

from typing import Any

from reconciler.core.fleet import Fleet
from reconciler.core.release_plan import Released
from reconciler.effects.steer import write_records
from reconciler.engines import custom
from reconciler.helper.records import QUARANTINE, encoded
from reconciler.lab.schedule import HOST, fleet_of, new_host
from reconciler.lab.simulated import SimulatedHost
from reconciler.lab.simulated_ports import SimulatedPort, controller_world
from reconciler.lab.world import Behaviour, World
from reconciler.reconcile import World as ControllerWorld
from reconciler.reconcile import act, survey
from reconciler.releasing import Found, free, look

ENGINES = {"custom": custom}
HOLD = {"version": 1, "owner": "ann@desk", "reason": "another job", "at": 1.0, "until": None}


class Stage:
    """One simulated host with a server on GPUs 0 and 1, and a controller."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.world = World(3)
        self.host: SimulatedHost = new_host(self.world)
        if behaviour is not None:
            self.host.host.behave("--steps 1", behaviour)
        self.controller: ControllerWorld = controller_world(self.world, {HOST: self.host}, ENGINES)
        self.fleet: Fleet = fleet_of(1, ENGINES)
        self.run()

    def run(self) -> Any:
        """Make one pass."""
        (result,) = act(survey(self.fleet, self.controller), self.controller, lambda _e: None)
        return result

    def look(self, *gpus: str) -> Found:
        """Plan a release."""
        return look(
            self.fleet, self.fleet.host(HOST), SimulatedPort(self.host), self.controller, gpus
        )

    def free(self, found: Found) -> Released:
        """Carry a release out."""
        return free(found, SimulatedPort(self.host), self.controller, HOLD, lambda _e: None)

    def running(self) -> list[str]:
        """Name the units with processes: ground truth."""
        return sorted({p.unit for p in self.host.host.processes.values() if p.unit})

    def uuid(self, index: int) -> str:
        """Give a card's UUID."""
        return self.host.host.gpus[index].uuid

    def resume(self) -> None:
        """End the hold on the server."""
        write_records(SimulatedPort(self.host), "qwen", "tester", [("hold", None)])

    def quarantine(self, index: int) -> None:
        """Mark a card by hand."""
        mark = {
            "kind": "fault",
            "reasons": ["by hand"],
            "boot_id": self.host.host.boot_id,
            "minor": index,
        }
        self.host.host.files.put(QUARANTINE, encoded({self.uuid(index): mark, "version": 1}))

"""One simulated host, a controller that looks at it, and its saved state: what tests of reviews and reports begin with."""

from __future__ import annotations

from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.saved_state import SavedState, read_state, state_of, state_text
from reconciler.engines import custom
from reconciler.lab.schedule import DOCUMENT, HOST, new_host
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import World
from reconciler.reconcile import World as Controller
from reconciler.reconcile import act, survey
from reconciler.wiring import saved_world

ENGINES = {"custom": custom}


class Stage:
    """One simulated host, what looks at it, and its state as a file."""

    def __init__(self) -> None:
        self.world = World(1)
        self.host = new_host(self.world)
        self.controller = controller_world(self.world, {HOST: self.host}, ENGINES)

    def fleet(self, steps: int = 1, more: str = "") -> Fleet:
        """Read the fleet's text."""
        return self.read(DOCUMENT.format(steps=steps) + more)

    def read(self, text: str) -> Fleet:
        """Read any fleet's text; a test's own specs are right."""
        loaded = load_fleet({"specs/fleet.yaml": text.encode()}, engines=ENGINES)
        assert not loaded.problems, loaded.problems
        return loaded

    def apply(self, steps: int) -> None:
        """Make the host run a revision."""
        act(survey(self.fleet(steps), self.controller), self.controller, lambda _event: None)

    def saved(self, steps: int = 1) -> SavedState:
        """Save the state and read it back, as another machine would."""
        found = survey(self.fleet(steps), self.controller)
        text = state_text(state_of(found, taken_at=1000.0, tool_version="1"))
        return read_state(text.encode(), "state.json")

    def from_state(self, state: SavedState) -> Controller:
        """Give a world in which only the saved state is there."""
        return saved_world(state, ENGINES)

"""What a person reads before anything happens: fleet and host state in, the plan as text out.

The texts are in `golden/`; `RECONCILER_UPDATE_GOLDEN=1 pytest tests/scenarios` writes them anew, to be read before they are
committed. Each scenario is played on the simulated host by the product's own code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.text import Text

from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.plan import Permissions
from reconciler.engines import custom
from reconciler.lab.schedule import BEHAVIOURS, DOCUMENT, HOST, UNIT, new_host
from reconciler.lab.simulated import SimulatedHost
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import World
from reconciler.reconcile import World as Controller
from reconciler.reconcile import act, pinned_survey, survey
from reconciler.views.terminal import plan_lines

GOLDEN = Path(__file__).parent / "golden"
ENGINES = {"custom": custom}
FIRST, SECOND, SLOW = 1, 2, 3


@dataclass
class Stage:
    """A simulated host and the controller that looks at it."""

    world: World
    host: SimulatedHost
    controller: Controller

    def apply(self, text: str) -> None:
        """Make the host run what the text says."""
        results = act(survey(fleet(text), self.controller), self.controller, lambda _event: None)
        assert results

    @property
    def unit_path(self) -> str:
        """Give where the permanent unit lies."""
        return f"/etc/systemd/system/{UNIT}"


def stage() -> Stage:
    """Give an enrolled host that runs nothing yet."""
    world = World(1)
    host = new_host(world)
    return Stage(world, host, controller_world(world, {HOST: host}, ENGINES))


def document(steps: int = FIRST, **changes: str) -> str:
    """Give the fleet's text, with lines replaced or added."""
    text = DOCUMENT.format(steps=steps)
    for old, new in changes.items():
        text = text.replace(old, new) if old in text else text + f"{old}: {new}\n"
    return text


def fleet(text: str) -> Fleet:
    """Read a fleet's text; the scenarios' own specs are right."""
    loaded = load_fleet({"specs/fleet.yaml": text.encode()}, engines=ENGINES)
    assert not loaded.problems, loaded.problems
    return loaded


def shown(at: Stage, text: str, allow: Permissions | None = None) -> str:
    """Give the plan as a person reads it, without colours."""
    found = survey(fleet(text), at.controller, allow=allow or Permissions())
    return (
        "\n".join(
            Text.from_markup(line).plain for line in plan_lines(found.plan, command="reconcile")
        )
        + "\n"
    )


def first_deploy(at: Stage) -> str:
    """Nothing is there yet."""
    return shown(at, document())


def in_sync(at: Stage) -> str:
    """What is wanted is what runs."""
    at.apply(document())
    return shown(at, document())


def change(at: Stage) -> str:
    """One argument changes, and there is a rollout to estimate by."""
    at.apply(document())
    at.apply(document(SECOND))
    return shown(at, document(FIRST))


def only_the_gate_changed(at: Stage) -> str:
    """A stricter limit touches nothing now."""
    at.apply(document())
    return shown(at, document().replace("min_decode_tps: 100", "min_decode_tps: 120"))


def only_the_stop_timeout_changed(at: Stage) -> str:
    """A setting of the unit needs a reload and no restart."""
    at.apply(document())
    return shown(at, document().replace("stop: 20s", "stop: 40s"))


def rejected_before(at: Stage) -> str:
    """A revision that failed its gate here is not tried again."""
    at.apply(document())
    at.apply(document(SLOW))
    return shown(at, document(SLOW))


def edited_by_hand(at: Stage) -> str:
    """Somebody was on the host; a newer commit does not overwrite their work."""
    at.apply(document())
    text = at.host.host.files.data[at.unit_path]
    at.host.host.files.put(at.unit_path, text.replace(b"RestartSec=5s", b"RestartSec=1s"))
    return shown(at, document(SECOND))


def edited_by_hand_and_allowed(at: Stage) -> str:
    """The same, and the person in charge says --overwrite."""
    at.apply(document())
    text = at.host.host.files.data[at.unit_path]
    at.host.host.files.put(at.unit_path, text.replace(b"RestartSec=5s", b"RestartSec=1s"))
    return shown(at, document(SECOND), Permissions(overwrite=True))


def not_ours(at: Stage) -> str:
    """A unit of the same name was there before."""
    at.host.host.files.put(at.unit_path, b"[Service]\nExecStart=/usr/bin/serve --by-hand\n")
    at.host.systemd.reload()
    return shown(at, document())


def adopted(at: Stage) -> str:
    """The same, and the person in charge says --adopt."""
    at.host.host.files.put(at.unit_path, b"[Service]\nExecStart=/usr/bin/serve --by-hand\n")
    at.host.systemd.reload()
    return shown(at, document(), Permissions(adopt=True))


def suspended(at: Stage) -> str:
    """The spec says to leave it alone."""
    at.apply(document())
    return shown(at, document(SECOND) + "suspend: true\n")


def stopped(at: Stage) -> str:
    """The spec says that it should not run."""
    at.apply(document())
    return shown(at, document() + "state: stopped\n")


def down(at: Stage) -> str:
    """It was applied and is not running."""
    at.apply(document())
    at.host.machine().stop(UNIT)
    at.world.advance(30.0)
    return shown(at, document())


def restarted_by_itself(at: Stage) -> str:
    """After a reboot the same revision runs in a process that was never proven."""
    at.apply(document())
    at.host.reboot()
    at.world.advance(120.0)
    return shown(at, document())


def host_is_silent(at: Stage) -> str:
    """A host that cannot be reached is unknown, never absent."""
    at.apply(document())
    at.host.reboot()
    return shown(at, document(SECOND))


def card_renumbered(at: Stage) -> str:
    """GPU 0 is another card than the one that was bound."""
    at.apply(document())
    at.host.host.gpus[0].uuid, at.host.host.gpus[1].uuid = (
        at.host.host.gpus[1].uuid,
        at.host.host.gpus[0].uuid,
    )
    return shown(at, document(SECOND))


def restart_asked_for(at: Stage) -> str:
    """A person asks for the same revision again."""
    at.apply(document())
    loaded = fleet(document())

    def applied(records: object, _history: object) -> str:
        return str(records.applied.revision)  # type: ignore[attr-defined]

    found = pinned_survey(
        loaded, loaded.servers[0], at.controller, applied, "a person asked for a restart"
    )
    return (
        "\n".join(
            Text.from_markup(line).plain for line in plan_lines(found.plan, command="reconcile")
        )
        + "\n"
    )


def two_servers_swap_cards(at: Stage) -> str:
    """Two servers take over each other's cards: both are released before either starts."""
    for steps in BEHAVIOURS:
        at.host.host.behave(f"31000 --steps {steps}", replace(BEHAVIOURS[steps], port=31000))
    at.apply(pair("[0, 1]", "[2]"))
    return shown(at, pair("[2]", "[0, 1]"))


def pair(first: str, second: str) -> str:
    """Give a fleet of two servers on these cards."""
    host, server = document().split("---\n")
    one = server.replace("gpus: [0, 1]", f"gpus: {first}")
    two = (
        server.replace("name: qwen\n", "name: zephyr\n", 1)
        .replace("gpus: [0, 1]", f"gpus: {second}")
        .replace("30000", "31000")
    )
    return f"{host}---\n{one}---\n{two}"


SCENARIOS: list[Callable[[Stage], str]] = [
    first_deploy,
    in_sync,
    change,
    only_the_gate_changed,
    only_the_stop_timeout_changed,
    rejected_before,
    edited_by_hand,
    edited_by_hand_and_allowed,
    not_ours,
    adopted,
    suspended,
    stopped,
    down,
    restarted_by_itself,
    host_is_silent,
    card_renumbered,
    restart_asked_for,
    two_servers_swap_cards,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_the_plan_reads_as_agreed(scenario: Callable[[Stage], str]) -> None:
    """The same specs on the same host give the same plan, byte for byte, and it says what a person needs."""
    text = scenario(stage())
    path = GOLDEN / f"{scenario.__name__}.txt"
    if os.environ.get("RECONCILER_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()
    assert scenario(stage()) == text

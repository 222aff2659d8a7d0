"""GPUs that cannot be freed: what is said of them, that nothing starts on them, that others go on, and how it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from release_stage import HOLD, Stage

from reconciler.core.conditions import Outcome, Reason, worst
from reconciler.core.event import Event, StepProgress
from reconciler.core.fleet import load_fleet
from reconciler.engines import custom
from reconciler.helper import guard
from reconciler.lab.schedule import DOCUMENT
from reconciler.lab.simulated_ports import SimulatedPort
from reconciler.lab.world import Behaviour, Effect
from reconciler.reconcile import act, survey
from reconciler.releasing import free
from reconciler.views.status import quarantine_lines, status_json

WEDGES = Behaviour(
    model="qwen",
    workers=1,
    speeds={"decode_tps": 150.0},
    leaves_child=True,
    unkillable_child=True,
)
NEIGHBOUR = (
    DOCUMENT.format(steps=1)
    + """---
apiVersion: reconciler/v1
kind: Server
name: phi
host: one
gpus: [2]
engine: {name: custom, command: [/usr/bin/serve, --port, "30001", --steps, "2"]}
model: qwen
listen: {address: 127.0.0.1, port: 30001}
timeouts: {drain: 5s, stop: 20s, release: 30s, ready: 60s, gate: 60s}
"""
)


def marks(stage: Stage) -> dict[str, str]:
    """Give the status of every GPU as `status -o json` has it."""
    (host,) = status_json(survey(stage.fleet, stage.controller))["hosts"]
    return {gpu["uuid"]: gpu["status"] for gpu in host["gpus"]}


@pytest.mark.parametrize("settle_s", [0.4, 2.0, 10.0])
def test_a_process_that_does_not_die_ends_as_a_report(settle_s: float) -> None:
    """The report names the process, its state, where it hangs, what is pending, the next rung and its cost, however short the settle window; the server is held."""
    stage = Stage(WEDGES)
    released = stage.free(replace(stage.look("0", "1"), settle_s=settle_s))
    (result,) = released.results
    assert (result.outcome, result.reason) == (Outcome.FAILED, Reason.WEDGED)
    assert "down and on hold" in result.sentence
    assert worst(released.verdicts).code == 1
    for card in released.proof:
        assert card["verdict"] == "wedged"
        assert card["next"]["rung"] == 10
        assert "reboot" in card["next"]["what"]
        (stuck,) = card["evidence"]["inner"]["known"]["processes"]
        assert stuck["wchan"] == "uvm_spin_loop"
        assert stuck["pending"] == [9]
        assert stuck["stack"]
        (holder,) = [h for h in card["holders"] if not h["gone"]]
        assert [word for word in holder["done"] if word.startswith("SIGTERM")]
        assert [word for word in holder["done"] if word.startswith("SIGKILL")]
    starts = len(stage.host.host.truth.starts)
    stage.world.advance(1200)
    assert len(stage.host.host.truth.starts) == starts, "held down, not looping"


def test_a_quarantined_gpu_is_shown_and_refused_while_a_neighbour_goes_on() -> None:
    """`Quarantined` stands in text and JSON; a pass for it is refused; the server on another GPU of the host is deployed."""
    stage = Stage(WEDGES)
    stage.free(stage.look("0", "1"))
    assert marks(stage)[stage.uuid(0)] == marks(stage)[stage.uuid(1)] == "Quarantined"
    assert marks(stage)[stage.uuid(2)] == "Ok"
    text = "\n".join(quarantine_lines(survey(stage.fleet, stage.controller)))
    assert "Quarantined" in text
    assert "uvm_spin_loop" in text
    assert "reconcile release one --gpus" in text
    stage.resume()
    refused = stage.run()
    assert (refused.outcome, refused.reason) == (Outcome.REFUSED, Reason.QUARANTINED)
    fleet = load_fleet({"specs/fleet.yaml": NEIGHBOUR.encode()}, engines={"custom": custom})
    results = act(survey(fleet, stage.controller), stage.controller, lambda _e: None)
    assert {r.server: r.outcome for r in results}["phi"] is Outcome.APPLIED
    assert stage.running().count("phi.service") == 1


def test_a_passing_proof_lifts_the_quarantine() -> None:
    """Once the process is gone, `release` proves the GPUs free, lifts the mark, and the server can be deployed again."""
    stage = Stage(WEDGES)
    stage.free(stage.look("0", "1"))
    for process in list(stage.host.host.processes.values()):
        stage.host.host.end(process)
    again = stage.free(stage.look("0", "1"))
    assert [card["verdict"] for card in again.proof] == ["released", "released"]
    assert set(again.lifted) == {stage.uuid(0), stage.uuid(1)}
    assert marks(stage)[stage.uuid(0)] == "Ok"
    stage.resume()
    assert stage.run().outcome is Outcome.APPLIED


def test_the_host_lifts_a_wedge_that_frees_itself() -> None:
    """L9: a wedge that ends by itself is proven gone by the host's own timer; nobody has to come."""
    stage = Stage(WEDGES)
    stage.free(stage.look("0", "1"))
    stage.world.advance(600)
    assert marks(stage)[stage.uuid(0)] == "Quarantined", "somebody still holds it"
    for process in list(stage.host.host.processes.values()):
        stage.host.host.end(process)
    stage.world.advance(600)
    assert marks(stage)[stage.uuid(0)] == "Ok"


def test_an_xid_that_asks_for_a_reset_is_lifted_by_no_waiting() -> None:
    """A fault that the kernel log tells during the release quarantines; time does not lift it, a boot and a proof do."""
    stage = Stage()
    bus = "PCI:0000:01:00"
    found = stage.look("0", "1")
    stage.world.after(
        1.0,
        lambda: stage.host.host.kernel_line(
            f"NVRM: Xid ({bus}): 119, pid=1, name=x, Timeout waiting for RPC from GSP"
        ),
    )
    released = stage.free(found)
    verdicts = {card["index"]: card["verdict"] for card in released.proof}
    assert verdicts == {0: "fault", 1: "released"}
    stage.world.advance(900)
    assert marks(stage)[stage.uuid(0)] == "Quarantined"
    stage.host.reboot()
    stage.world.advance(300)
    assert marks(stage)[stage.uuid(0)] == "Ok"


def test_without_the_guards_check_a_quarantined_gpu_would_be_started_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard refuses a start on a quarantined card by itself; with its check off the start goes through."""
    stage = Stage()
    host = stage.host
    stage.free(stage.look("0", "1"))
    stage.quarantine(0)
    machine = host.machine()
    with pytest.raises(Exception, match="quarantined"):
        guard.check_start(machine, "qwen", "qwen.service")
    monkeypatch.setattr(guard, "refuse_quarantined", lambda _machine, _uuids: None)
    guard.check_start(machine, "qwen", "qwen.service")


@pytest.mark.parametrize("wait_s", [0.0, 300.0])
def test_a_card_is_watched_for_as_long_as_a_person_wants(wait_s: float) -> None:
    """Rung 7: memory that comes free after two minutes is proven by who waits, is a wedge to who does not, and is looked at rarely."""
    stage = Stage()
    stage.host.host.gpus[0].leak_mib = 9000
    began = stage.world.now
    stage.world.after(120.0, lambda: setattr(stage.host.host.gpus[0], "leak_mib", 0))
    looks: list[float] = []

    def note(effect: Effect) -> None:
        if (effect.kind, effect.detail, effect.stage) == ("call", "observe", "before"):
            looks.append(stage.world.now - began)

    stage.world.on_effect(note)
    events: list[Event] = []
    found = replace(stage.look("0"), wait_s=wait_s)
    released = free(found, SimulatedPort(stage.host), stage.controller, HOLD, events.append)
    (card,) = released.proof
    assert card["verdict"] == ("released" if wait_s else "wedged")
    assert released.lifted == ((stage.uuid(0),) if wait_s else ())
    said = [e.waiting_for for e in events if isinstance(e, StepProgress) and e.step == "proof"]
    assert any(f"at most {wait_s or 35:.0f} s" in text for text in said), said
    late = [at for at in looks if 80 < at < 120]
    assert len(late) < 20, "growing gaps: each look is one more client of a driver in trouble"
    assert stage.running() == []

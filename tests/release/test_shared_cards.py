"""Cards that are not one server's alone: MPS, MIG, monitors, neighbours; and the floor of an idle card."""

from __future__ import annotations

import pytest
from release_stage import Stage

from reconciler.core.conditions import Outcome, worst
from reconciler.core.errors import CommandFailedError
from reconciler.helper import acts
from reconciler.lab.simulated_ports import SimulatedPort
from reconciler.lab.world import Behaviour
from reconciler.reconcile import survey
from reconciler.releasing import free
from reconciler.views.status import quarantine_lines, status_json

MPS = "/usr/bin/nvidia-cuda-mps-server"
LEAVES = Behaviour(
    model="qwen", workers=1, speeds={"decode_tps": 150.0}, leaves_child=True, escapes=True
)


def test_mps_on_the_card_refuses_before_anything_stops() -> None:
    """MPS has the card open for its clients: the release is refused with a sentence, the server runs on, MPS is left alone."""
    stage = Stage()
    mps = stage.host.host.add_process("/system.slice/nvidia-mps.service", gpus=(0,), exe=MPS)
    released = stage.free(stage.look("0"))
    (result,) = released.results
    assert result.outcome is Outcome.REFUSED
    assert "MPS serves one of the GPUs" in result.sentence
    assert mps.alive
    assert stage.running() == ["qwen.service"]
    assert stage.host.host.truth.signals == []


def test_mps_that_appears_during_a_release_forbids_every_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S3: with an MPS server on the card the host refuses to signal even the server's own left-over; with its check off it would."""
    stage = Stage(LEAVES)
    host = stage.host.host

    def appear() -> None:
        host.add_process("/system.slice/nvidia-mps.service", gpus=(0, 1), exe=MPS)

    stage.world.after(0.5, appear)
    released = stage.free(stage.look("0"))
    assert {card["verdict"] for card in released.proof} == {"not-released"}
    assert [s for s in host.truth.signals if s.by == "helper"] == []
    assert stage.running() == ["qwen.service"], "the left-over lives; systemd ended the rest"
    left = next(p for p in host.processes.values() if p.unit == "qwen.service")
    act = acts.Act(stage.host.machine(), "qwen", {})
    targets = [(left.pid, left.start_ticks)]
    group = "/system.slice/qwen.service"
    (answer,) = acts.signal_owned(act, "qwen.service", group, targets, 15)
    assert answer["result"] == "refused: MPS serves its GPU"
    monkeypatch.setattr(acts, "is_mps", lambda _holder: False)
    (answer,) = acts.signal_owned(act, "qwen.service", group, targets, 15)
    assert answer["result"] == "sent"


def test_mig_is_refused_with_a_sentence() -> None:
    """A card that is cut into instances is nobody's whole card: refused before anything stops."""
    stage = Stage()
    stage.host.host.gpus[1].mig = "Enabled"
    (result,) = stage.free(stage.look("0", "1")).results
    assert result.outcome is Outcome.REFUSED
    assert "MIG is on" in result.sentence
    assert stage.running() == ["qwen.service"]


def test_a_monitor_lives_through_a_release() -> None:
    """Housekeeping that has every card open is shown as infra, left alone, and does not keep a card from being free."""
    stage = Stage()
    monitor = stage.host.host.add_process(
        "/system.slice/nvidia-dcgm.service", gpus=(0, 1, 2, 3), exe="/usr/bin/nv-hostengine"
    )
    released = stage.free(stage.look("0", "1"))
    assert worst(released.verdicts).code == 0
    (seen,) = [h for h in released.proof[0]["holders"] if h["pid"] == monitor.pid]
    assert (seen["class"], seen["done"], seen["gone"]) == ("infra", ["left alone"], False)
    assert monitor.alive


def test_a_stranger_that_appears_during_a_release_is_never_signalled() -> None:
    """S3: it comes while the server stops; the release ends as not released, names it, and the server is held down."""
    stage = Stage()
    came = []
    stage.world.after(
        0.3, lambda: came.append(stage.host.host.add_process(gpus=(0,), mib=700, exe="/home/eve/x"))
    )
    released = stage.free(stage.look("0", "1"))
    assert released.proof[0]["verdict"] == "not-released"
    assert released.proof[1]["verdict"] == "released"
    assert "/home/eve/x" in str(released.proof[0]["holders"])
    assert came[0].alive
    assert [s for s in stage.host.host.truth.signals if s.pid == came[0].pid] == []
    assert stage.running() == []
    assert "on hold" in stage.run().sentence or "held by" in stage.run().sentence


def test_a_risen_floor_is_shown_and_learned_only_when_asked() -> None:
    """The floor rose within the tolerance: the release passes, the drift is shown, the baseline stays until a person says --learn."""
    stage = Stage()
    stage.host.host.gpus[0].baseline_mib = 44
    released = stage.free(stage.look("0", "1"))
    assert released.proof[0]["drift_mib"] == 40
    found = survey(stage.fleet, stage.controller)
    assert status_json(found)["hosts"][0]["gpus"][0]["drift_mib"] == 40
    assert "floor" in "\n".join(quarantine_lines(found))
    again = stage.free(stage.look("0", "1"))
    assert again.proof[0]["baseline_mib"] == 4
    learned = free(
        stage.look("0"),
        SimulatedPort(stage.host),
        stage.controller,
        {},
        lambda _e: None,
        learn=True,
    )
    assert learned.proof[0]["baseline_mib"] == 44
    assert learned.proof[0]["drift_mib"] == 0


def test_what_somebody_uses_is_never_learned_as_idle() -> None:
    """`--learn` while a process is on the card, or with more in use than any idle card has, changes no baseline."""
    stage = Stage()
    stage.free(stage.look("0"))
    stage.host.host.gpus[0].leak_mib = 9000
    found = stage.look("0")
    with pytest.raises(CommandFailedError, match="more than an idle card may use"):
        free(found, SimulatedPort(stage.host), stage.controller, {}, lambda _e: None, learn=True)
    assert stage.look("0").plan.cards[0].baseline_mib == 4

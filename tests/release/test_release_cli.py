"""`reconcile release` as a person runs it, against a simulated host: what is printed and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from release_stage import Stage

from reconciler.cli.context import Output
from reconciler.cli.release import ReleaseOptions, run_release
from reconciler.core.errors import CommandFailedError, UsageError
from reconciler.effects.steer import write_records
from reconciler.helper.quarantine import RELEASES
from reconciler.lab.simulated_ports import SimulatedPort

Printed = Callable[[], str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Give what was printed on standard output since asked last."""
    return lambda: capsys.readouterr().out


def run(stage: Stage, **options: Any) -> int:
    """Run the command."""
    return run_release(
        stage.fleet, stage.fleet.host("one"), stage.controller, ReleaseOptions(**options)
    )


def test_a_dry_run_changes_nothing_and_names_everybody(printed: Printed) -> None:
    """S20: no byte on the host changes, no signal is sent; the servers, holders and what would become of each are shown."""
    stage = Stage()
    stage.host.host.add_process(
        "/system.slice/nvidia-persistenced.service",
        gpus=(0, 1, 2, 3),
        exe="/usr/bin/nvidia-persistenced",
    )
    files = dict(stage.host.host.files.data)
    signals = list(stage.host.host.truth.signals)
    assert run(stage, gpus=("0",), dry_run=True, output=Output.JSON) == 0
    plan = json.loads(printed())
    assert plan["type"] == "release-plan"
    assert [s["server"] for s in plan["would_stop"]] == ["qwen"]
    holders = plan["gpus"][0]["holders"]
    assert {h["class"] for h in holders} == {"owned", "infra"}
    assert {h["would"] for h in holders if h["class"] == "infra"} == {"leave it alone"}
    assert run(stage, gpus=("0",), dry_run=True) == 0
    assert "then on hold until `reconcile resume qwen`" in printed()
    assert stage.host.host.files.data == files
    assert stage.host.host.truth.signals == signals
    assert stage.running() == ["qwen.service"]


def test_a_stranger_on_the_gpu_refuses_before_anything_stops(printed: Printed) -> None:
    """S3: a foreign holder is named and never signalled, and the server runs on; exit 1."""
    stage = Stage()
    stranger = stage.host.host.add_process(gpus=(1,), mib=900, exe="/home/eve/train.py")
    assert run(stage, gpus=("1",), yes=True) == 1
    said = printed()
    assert f"pid {stranger.pid}" in said
    assert "/home/eve/train.py" in said
    assert "ForeignHolder" in said
    assert stranger.alive
    assert stage.running() == ["qwen.service"]


def test_nobody_says_yes_so_nothing_is_done(printed: Printed) -> None:
    """Without a terminal and without --yes the plan is shown and nothing is stopped; exit 2."""
    stage = Stage()
    assert run(stage, gpus=("0",)) == 2
    assert "qwen" in printed()
    assert stage.running() == ["qwen.service"]


def test_a_run_prints_a_stream_that_ends_with_the_proof(printed: Printed) -> None:
    """The stream: version, plan, steps, outcome, proof, summary; the proof names pid, start time, class and what was done."""
    stage = Stage()
    assert run(stage, gpus=("0", "1"), yes=True, output=Output.JSON) == 0
    lines = [json.loads(line) for line in printed().splitlines()]
    kinds = [line["type"] for line in lines]
    assert kinds[:2] == ["version", "release-plan"]
    assert kinds[-2:] == ["proof", "summary"]
    assert {"step_started", "step_finished", "outcome"} <= set(kinds)
    proof = lines[-2]
    assert proof["kept_on_host"] is True
    for card in proof["gpus"]:
        assert card["verdict"] == "released"
        assert card["used_mib"] <= card["limit_mib"]
        assert all(
            {"pid", "start_ticks", "class", "why", "done"} <= set(h) for h in card["holders"]
        )


def test_a_run_prints_a_table_for_people(printed: Printed) -> None:
    """The table has a line a GPU with verdict and numbers; below stands each holder and what was done to it."""
    stage = Stage()
    assert run(stage, gpus=("0",), yes=True, reason="moving house") == 0
    said = printed()
    assert "VERDICT" in said
    assert "released" in said
    assert "qwen.service was stopped at" in said
    assert stage.run().sentence.endswith("`reconcile resume qwen` ends it")


def test_a_hold_of_somebody_else_is_respected(printed: Printed) -> None:
    """A server that a person asked to be left alone is not stopped: exit 9, with the owner's name."""
    stage = Stage()
    hold = {"version": 1, "owner": "bob@desk", "reason": "profiling", "at": 1.0, "until": None}
    write_records(SimulatedPort(stage.host), "qwen", "tester", [("hold", hold)])
    assert run(stage, gpus=("0",), yes=True) == 9
    assert "bob@desk" in printed()
    assert stage.running() == ["qwen.service"]


def test_a_gpu_that_nobody_is_bound_to_is_proven_as_well(printed: Printed) -> None:
    """A card without a server is judged like the others, nothing is stopped for it, and no consent is needed to look."""
    stage = Stage()
    assert run(stage, gpus=("3",), output=Output.JSON) == 0
    proof = json.loads(printed().splitlines()[-2])
    assert [c["verdict"] for c in proof["gpus"]] == ["released"]
    assert stage.running() == ["qwen.service"]


@pytest.mark.parametrize(
    "options", [{"restart_container": 129}, {"reset_gpus": ("GPU-somewhere-else",)}]
)
def test_a_consent_that_names_something_else_is_refused_first(
    options: dict[str, Any], printed: Printed
) -> None:
    """A typing mistake in a consent stops nothing: exit 1, and what is there is said."""
    stage = Stage()
    assert run(stage, gpus=("0",), yes=True, **options) == 1
    assert "nothing was done" in printed()
    assert stage.running() == ["qwen.service"]


def test_the_last_proof_is_shown_again(printed: Printed) -> None:
    """S20: what the host keeps is what the release printed, and looking at it does nothing."""
    stage = Stage()
    assert run(stage, last=True) == 0
    assert "keeps no proof" in printed()
    assert run(stage, gpus=("0",), yes=True, output=Output.JSON) == 0
    (shown,) = [json.loads(x) for x in printed().splitlines() if '"type":"proof"' in x]
    before = dict(stage.host.host.files.data)
    assert run(stage, last=True, output=Output.JSON) == 0
    kept = json.loads(printed())["proof"]
    assert kept["gpus"] == shown["gpus"]
    assert [s["outcome"] for s in kept["servers"]] == ["Stopped"]
    assert run(stage, last=True) == 0
    text = printed()
    assert "qwen Stopped" in text
    assert stage.uuid(0) in text
    assert stage.host.host.files.data == before
    with pytest.raises(UsageError, match="only shows"):
        run(stage, last=True, yes=True)


@pytest.mark.parametrize(
    "kept",
    [
        b'{"at": 1, "gpus": [{}], "servers": []}',
        b'{"gpus": 7}',
        b'{"at": 1, "gpus": [], "servers": [1]}',
    ],
)
def test_a_kept_proof_of_another_shape_is_said(kept: bytes) -> None:
    """What a host keeps is not believed to be well-formed: one sentence, no traceback (S12)."""
    stage = Stage()
    stage.host.host.files.put(RELEASES, kept + b"\n")
    with pytest.raises(CommandFailedError, match="not one that this version understands"):
        run(stage, last=True)

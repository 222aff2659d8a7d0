"""A sweep on a lab host with a real systemd: real rollouts, real streams, and a commit at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from lab_engine import hold_command
from live_controller import GPU_MIB, PORT, Controller, HostView
from ruamel.yaml import YAML

pytestmark = pytest.mark.lab

# One long answer a round, not three short ones: what a busy machine adds is late stamps of the first and the last token, a
# few milliseconds whatever the length. Seen at a load of ten on two cores: three of 24 tokens 5 % off, one of 72 tokens 1.5 %.
RUNS = [
    {"name": "single", "concurrency": 1, "requests": 3, "max_tokens": 72},
    {"name": "batch", "concurrency": 4, "requests": 24, "max_tokens": 24},
]


def command(speed: int, most: int) -> list[str]:
    """Give the stand-in's command with a speed of one stream and of all."""
    options = (
        "--model",
        "one",
        "--load",
        "0.1",
        "--speed",
        str(speed),
        "--max-speed",
        str(most),
        "--host",
        "127.0.0.1",
    )
    return hold_command(*options, gpus=(0,), mib=GPU_MIB)


def measured_directly(rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether there are rounds, and all were measured where the server is."""
    return bool(rounds) and {r["fingerprint"]["measured"] for r in rounds} == {"directly"}


def test_a_sweep_ends_in_a_commit_and_the_applied_server_is_back(
    controller: Controller, view: HostView
) -> None:
    """The faster command wins, the slower one is told; a branch has the winner, the host what was applied before.

    The server listens on the host's loopback alone and the gate is measured from there: no round went through a tunnel.
    """
    loopback = {"address": "127.0.0.1", "port": PORT}
    engine = {"name": "custom", "command": command(100, 300)}
    gate = {"quality": "off", "runs": RUNS, "from": "host"}
    controller.commit("one", gate=False, engine=engine, listen=loopback)
    controller.set(gate=gate)
    assert controller.apply().ended == (0, "Applied", "")
    measured = controller.run(
        "bench", "llm", "--from", "host", "--concurrency", "1", "--requests", "3", "--max-tokens", "72", "--output", "json"
    )  # fmt: skip
    assert measured.code == 0, measured.err
    assert measured_directly(measured.json()["results"])
    applied = view.record("applied")["revision"]
    fast, slow = json.dumps(command(160, 480)), json.dumps(command(60, 150))
    done = controller.run(
        "tune", "llm", "--set", f"engine.command={slow},{fast}", "--rounds", "3", "--margin", "5%", "--yes",
        "--branch", "tune/llm", "--report", str(controller.directory / "report.html"), "--output", "json",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = done.json()
    assert found["winner"] == {"engine.command": command(160, 480)}
    states = {str(p["label"]): p["state"] for p in found["points"]}
    assert list(states.values()) == ["measured", "dominated", "measured", "measured"]
    by_label = [p["single_tps"] for p in found["points"]]
    assert by_label == pytest.approx([100, 60, 160, 100], rel=0.05)
    assert all(measured_directly(p["results"]) for p in found["points"])
    assert found["restored"]
    assert view.holders() == {view.pid(): GPU_MIB}
    assert view.left() == []
    assert view.record("applied")["revision"] == applied
    assert controller.apply().ended == (0, "InSync", "")
    controller.git("checkout", "--quiet", "tune/llm")
    written = YAML(typ="safe").load((controller.specs / "llm.yaml").read_text())
    assert written["engine"]["command"] == command(160, 480)
    assert "<svg" in (controller.directory / "report.html").read_text()

"""The client on a host: carried as one program, run by the host's own Python, and gone with its asker."""

from __future__ import annotations

import ast
import dataclasses
import json
from importlib import resources
from pathlib import Path

import pytest
from model_server import Asked, Reply, chat_parts, ordinary, serving

from reconciler.bench import carried
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress, Prompt
from reconciler.bench.meter import LOCAL
from reconciler.bench.rounds import run_gate
from reconciler.core.gate import VerdictKind
from reconciler.core.measurement import ReasonCode
from reconciler.core.spec import Gate
from reconciler.effects import host_meter
from reconciler.effects.host_meter import COMMAND, HostMeter
from reconciler.transports.local import LocalTransport

PROMPTS = (Prompt("a", "Sing of rivers"), Prompt("b", "Speak of hills"))
PYTHONS = sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3"))


def _plan(**changes: object) -> LoadPlan:
    return dataclasses.replace(LoadPlan("r", PROMPTS, 2, 4, 4, salt="s"), **changes)


def test_all_that_the_client_imports_is_carried() -> None:
    """The carried modules import each other and the standard library, nothing else."""
    names = {f"reconciler.{name}" for name in carried.MODULES}
    for name in carried.MODULES:
        folder, _, module = name.partition(".")
        text = resources.files("reconciler").joinpath(folder, f"{module}.py").read_text("utf-8")
        tree = ast.parse(text, feature_version=(3, 9))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith(
                "reconciler"
            ):
                continue
            imported = (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "reconciler.bench"
                else {node.module}
            )
            assert imported <= names, name


def test_rounds_run_there_as_they_do_here() -> None:
    """The same counts and the same fingerprint as the client in this process; progress is heard; the prompts travel once."""
    heard: list[Progress] = []
    with serving(ordinary) as server, HostMeter("h", LocalTransport()).running() as meter:
        endpoint = Endpoint("127.0.0.1", server.port, "chat", "m", bearer="sesame")
        there = meter.measure(_plan(), endpoint, heard.append)
        result, texts = meter.ask(_plan(salt="t"), endpoint, None)
        here = LOCAL.measure(_plan(salt="u"), endpoint, None)
    assert (there.completed, there.infrastructure) == (4, None)
    assert there.fingerprint == here.fingerprint
    assert result.completed == len(texts) == 4
    assert "rivers" in texts[0]
    assert {a.headers["authorization"] for a in server.asked} == {"Bearer sesame"}


@pytest.mark.skipif(not PYTHONS, reason="no other Python is installed here")
@pytest.mark.parametrize("version", ["3.9", "3.10", "3.13"])
def test_older_pythons_measure_too(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client runs on what hosts have: Python 3.9 and newer."""
    python = next((p for p in PYTHONS if f"/{version}." in str(p)), None)
    if python is None:
        pytest.skip(f"no Python {version} here")
    monkeypatch.setattr(host_meter, "COMMAND", COMMAND.replace(host_meter.PYTHON, str(python)))
    with serving(ordinary) as server, HostMeter("h", LocalTransport()).running() as meter:
        endpoint = Endpoint("127.0.0.1", server.port, "chat", "m")
        there = meter.measure(_plan(requests=8), endpoint, None)
    assert (there.completed, there.infrastructure_message) == (8, "")
    assert there.ttft.count == 8


def test_a_host_without_a_client_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """S22: a Python that is not there, or ends, is an infrastructure error with its own words."""
    for command in ("exec /no/such/python", "echo sorry >&2; exit 3"):
        monkeypatch.setattr(host_meter, "COMMAND", command)
        with HostMeter("h", LocalTransport()).running() as meter:
            result = meter.measure(_plan(), Endpoint("127.0.0.1", 1, "chat", "m"), None)
        assert result.infrastructure is ReasonCode.UNREACHABLE
        assert "measuring on the host did not work" in result.infrastructure_message


def test_a_whole_gate_runs_on_the_host() -> None:
    """Questions, warm-up and rounds are carried out there, and judged here."""

    def garbled(asked: Asked) -> Reply:
        return Reply(chat_parts(["!" * 8] * 8))

    run = {"name": "one", "concurrency": 2, "requests": 6, "max_tokens": 8}
    gate = Gate.model_validate({"runs": [run]})
    for answer, kind in ((ordinary, VerdictKind.PASS), (garbled, VerdictKind.FAIL)):
        with serving(answer) as server, HostMeter("h", LocalTransport()).running() as meter:
            endpoint = Endpoint("127.0.0.1", server.port, "chat", "m")
            outcome = run_gate(gate, endpoint, None, deadline_s=60, meter=meter)
        assert outcome.verdict.kind is kind
        assert json.dumps(outcome.verdict.to_json())

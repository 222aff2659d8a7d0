"""The light probe: drift is reported with evidence, idle is waited for, and nothing is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from model_server import Asked, Reply, ordinary, serving

from reconciler import wiring
from reconciler.bench.load_plan import Endpoint
from reconciler.bench.rounds import run_gate
from reconciler.core.measurement import Baseline, RunResult
from reconciler.core.perf_drift import NotProbed, PerfDrifted, PerfHeld, light_gate
from reconciler.core.spec import Gate, Server
from reconciler.effects.perf_probe import probe_performance
from reconciler.transports.base import Address

GATE = {
    "runs": [
        {"name": "wide", "concurrency": 4, "requests": 60, "max_tokens": 8, "min_output_tps": 1},
        {"name": "slim", "concurrency": 2, "requests": 300, "max_tokens": 8, "max_ttft_p99": "9s"},
    ],
    "baseline": {"max_loss": "50%"},
}


class Host:
    """A host whose port is this machine's."""

    name = "h"

    def __init__(self, port: int) -> None:
        self.port = port

    @contextmanager
    def reach(self, port: int) -> Iterator[Address]:
        yield Address("127.0.0.1", self.port)


def _server(port: int) -> Server:
    fields = {
        "name": "s", "host": "h", "gpus": [], "engine": {"name": "custom", "command": ["/bin/x"], "health": "/h", "api": "openai-chat"},
        "model": "m", "listen": {"port": port}, "gate": GATE,
    }  # fmt: skip
    return Server.model_validate(fields, context={"engines": wiring.engines()})


def test_a_light_gate_is_the_smallest_run_without_limits() -> None:
    """Few requests, no questions, no limits; the margin is the gate's, else five percent."""
    light = light_gate(Gate.model_validate(GATE))
    assert [(r.name, r.requests, r.limits) for r in light.runs] == [("slim", 18, ())]
    assert (light.quality, light.baseline and light.baseline.max_loss) == ("off", 0.5)
    bare = light_gate(Gate.model_validate({"runs": GATE["runs"]}))
    assert bare.baseline is not None
    assert bare.baseline.max_loss == 0.05


@pytest.fixture
def probe() -> Callable[..., Any]:
    """Probe a server whose baseline was faster by a factor, with so many requests of others in flight."""

    def run(faster: float, in_flight: int | None = 0) -> Any:
        with serving(ordinary) as server:
            spec = _server(server.port)
            endpoint = Endpoint("127.0.0.1", server.port, "chat", "m", server={"gpus": "g"})
            assert spec.gate is not None
            measured = run_gate(light_gate(spec.gate), endpoint, None, deadline_s=60).results
            assert measured
            stored = Baseline("r1234567890ab", tuple(_scaled(r, faster) for r in measured))
            server.asked.clear()
            finding = probe_performance(
                spec,
                Host(server.port),  # type: ignore[arg-type]
                {"baseline": stored.to_json()},
                lambda: in_flight,
                facts={"gpus": "g"},
            )
            return finding, list(server.asked)

    return run


def _scaled(result: RunResult, by: float) -> RunResult:
    assert result.output_tps is not None
    return replace(result, output_tps=result.output_tps * by)


def test_a_slower_server_has_drifted_with_evidence(probe: Callable[..., Any]) -> None:
    """A hundred times slower than when it was applied: PerfDrifted, the numbers and the revision."""
    finding, asked = probe(100.0)
    assert isinstance(finding, PerfDrifted)
    assert "PerfDrifted" in finding.sentence
    assert "output_tps" in finding.sentence
    assert finding.evidence["revision"] == "r1234567890ab"
    assert {a.path for a in asked} == {"/v1/chat/completions"}


def test_a_faster_server_has_not(probe: Callable[..., Any]) -> None:
    """What became faster is held, whatever the reason."""
    assert isinstance(probe(0.01)[0], PerfHeld | NotProbed)


@pytest.mark.parametrize("others", [1, None])
def test_a_server_in_use_is_left_alone(probe: Callable[..., Any], others: int | None) -> None:
    """Somebody's requests, or not knowing whether there are any: nothing is sent."""
    finding, asked = probe(1.0, others)
    assert isinstance(finding, NotProbed)
    assert "in use" in finding.sentence
    assert asked == []


def test_without_a_baseline_nothing_is_sent() -> None:
    """No stored measurement, no probe."""

    def never(asked: Asked) -> Reply:
        raise AssertionError(asked.path)

    with serving(never) as server:
        finding = probe_performance(_server(server.port), Host(server.port), None, lambda: 0, facts={})  # type: ignore[arg-type]  # fmt: skip
    assert isinstance(finding, NotProbed)

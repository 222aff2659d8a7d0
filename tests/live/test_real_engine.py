"""Real tokens on a host with a real systemd and sshd: llama.cpp's own code, deployed, gated, changed and broken by commits.

The engine, its model and its Node are bound into the host as they lie in this machine's cache. The GPU is held by the lab's
holder, which becomes the server.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import BootHost
from live_controller import PORT, Controller, HostView
from real_engine.engine import HERE, RealEngine, fetch

from reconciler.lab.faults import HOLD
from reconciler.lab.hosts import SystemdHost

pytestmark = [pytest.mark.lab, pytest.mark.real_engine]

ENGINE = "/opt/real-engine"
SERVER = "/opt/real-engine-server"
NODE = "/opt/node"
MODEL = f"{ENGINE}/model.gguf"
USER = "deploy"
GPU_MIB = 600

ANSWER_LIMIT_S = 120
"""For one short answer beside other work on every core."""


@pytest.fixture(scope="module")
def engine() -> RealEngine:
    """Install the engine once a machine."""
    return fetch()


@pytest.fixture
def host(engine: RealEngine, boot_host: BootHost) -> SystemdHost:
    """Boot a host that has the engine."""
    node = engine.node.resolve()
    binds = [f"{engine.directory}:{ENGINE}", f"{HERE}:{SERVER}", f"{node.parent}:{NODE}"]
    return boot_host("engine", gpus=1, users=[USER], binds=binds)


def commit(
    controller: Controller, node: str, options: dict[str, int | str], model: str = MODEL
) -> None:
    """Commit the server with these options of `server.mjs`."""
    command = [HOLD, "--gpu", "0", "--mib", str(GPU_MIB), "--exec", f"{NODE}/{node}", f"{SERVER}/server.mjs"]  # fmt: skip
    command += ["--modules", ENGINE, "--model", model, "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--parallel", "2", "--threads", "1", "--drain-s", "5"]
    limits = {"min_decode_tps": 0.5}
    controller.write("llm", {
        "apiVersion": "reconciler/v1", "kind": "Server", "name": "llm", "host": controller.host.name, "gpus": [0],
        "engine": {"name": "custom", "command": command, "in_flight": "/stats"},
        "runtime": {"user": USER}, "model": model, "served_model_name": "smollm2", "args": options,
        "listen": {"address": "0.0.0.0", "port": PORT},
        "timeouts": {"drain": "10s", "stop": "15s", "release": "30s", "settle": "300ms", "ready": "90s", "gate": "240s"},
        "gate": {"quality": "off", "runs": [{"name": "two", "concurrency": 2, "requests": 6, "max_tokens": 12, **limits}]},
    })  # fmt: skip


def tokens(host: SystemdHost) -> dict[str, Any]:
    """Ask the server, from outside, for a real answer; the model's own counts come with it."""
    connection = http.client.HTTPConnection(host.ip, PORT, timeout=ANSWER_LIMIT_S)
    body = {"model": "smollm2", "prompt": "Rivers run to the sea, and the sea", "max_tokens": 8}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, answer
    assert answer["choices"][0]["text"].strip()
    assert 0 < answer["usage"]["completion_tokens"] <= 8
    assert answer["usage"]["prompt_tokens"] >= 8
    return answer


def loaded(view: HostView) -> str:
    """Give what the running server said when it had loaded."""
    invocation = view.show("InvocationID")["InvocationID"]
    said = view.host.check(
        ["journalctl", f"_SYSTEMD_INVOCATION_ID={invocation}", "--output=cat", "--grep=^loaded"]
    )
    return said.splitlines()[-1]


def test_real_tokens_from_commit_to_commit(
    engine: RealEngine, host: SystemdHost, tmp_path: Path
) -> None:
    """Deployed, gated and changed with real tokens; a model that is not there stops nothing; a flag that dies at load goes back.

    S5, L2; the refused commit costs the old server nothing.
    """
    node = engine.node.resolve().name
    (tmp_path / "controller").mkdir()
    controller, view = Controller(host, tmp_path / "controller"), HostView(host)
    assert controller.enrol().code == 0

    options: dict[str, int | str] = {"ctx": 1024, "batch": 128}
    commit(controller, node, options)
    first = controller.apply()
    assert first.ended == (0, "Applied", ""), first.err + first.out
    assert "ctx 1024, batch 128, 2 slots" in loaded(view)
    tokens(host)
    assert view.holders() == {view.pid(): GPU_MIB}
    (verdict,) = [e for e in first.events if e["type"] == "verdict"]
    assert (verdict["verdict"], "min_decode_tps" in verdict["message"]) == ("pass", True), verdict

    options["ctx"] = 2048
    commit(controller, node, options)
    assert controller.apply().ended == (0, "Applied", "")
    assert "ctx 2048, batch 128, 2 slots" in loaded(view)
    tokens(host)

    options |= {"batch": 256, "draft": 4}
    commit(controller, node, options)
    third = controller.apply()
    assert third.ended == (0, "Applied", ""), third.err + third.out
    assert "batch 256, 2 slots, 1 threads, draft 4" in loaded(view)
    assert "draft_n" in tokens(host)["timings"]
    server, mutations = view.server(), view.mutations()

    commit(controller, node, options, model=f"{ENGINE}/no-such-model.gguf")
    missing = controller.apply()
    assert missing.ended == (1, "Refused", "Preflight"), missing.err + missing.out
    assert f"{ENGINE}/no-such-model.gguf does not exist" in missing.outcome["sentence"]
    assert (view.server(), view.mutations()) == (server, mutations)
    tokens(host)

    commit(controller, node, options | {"kv-type": "q3_x"})
    broken = controller.apply()
    assert broken.code == 3, broken.err + broken.out
    assert broken.outcome["outcome"] == "RolledBack"
    assert broken.outcome["reason"] in {"DiedBeforeReady", "RestartLoop"}
    assert "unknown KV cache type q3_x" in broken.outcome["sentence"]
    assert broken.outcome["revision"] == third.outcome["revision"]
    assert view.server() != server
    assert "batch 256, 2 slots, 1 threads, draft 4" in loaded(view)
    tokens(host)
    assert view.holders() == {view.pid(): GPU_MIB}
    assert view.left() == []

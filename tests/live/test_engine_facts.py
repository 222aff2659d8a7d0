"""Preflight and the live comparison on a host with a real systemd and sshd: real files, users, interpreters and /proc."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_hosts import BootHost
from live_controller import PORT, TIMEOUTS, Controller, HostView

from reconciler.lab.engines import install_engine, install_model

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

PYTHON = "/opt/sglang/bin/python"
MODEL = "/srv/models/small"
USER = "deploy"
KEY = "lab-key-in-clear-0001"


def commit(controller: Controller, **fields: object) -> None:
    """Commit the server."""
    controller.set(**{
        "apiVersion": "reconciler/v1", "kind": "Server", "name": "llm", "host": controller.host.name, "gpus": [0, 1],
        "engine": {"name": "sglang", "version": "0.5.23"}, "runtime": {"python": PYTHON, "user": USER},
        "model": MODEL, "served_model_name": "small", "tp_size": 2, "timeouts": TIMEOUTS,
        "listen": {"address": "0.0.0.0", "port": PORT, "api_key": {"file": "/etc/reconciler/llm.key"}},
        "args": {"context-length": 4096, "mem-fraction-static": 0.2}, **fields,
    })  # fmt: skip


def refused(controller: Controller, check: str) -> str:
    """Be refused in the dry run, by this check alone."""
    planned = controller.run("--dry-run", "-o", "json")
    (server,) = json.loads(planned.out)["servers"]
    assert [c["id"] for c in server["checks"] if c["verdict"] == "refused"] == [check], server
    sentence: str = server["sentence"]
    return sentence


def test_what_a_start_would_find_is_found_before_anything_stops(
    boot_host: BootHost, tmp_path: Path
) -> None:
    """A cut shard, a model closed to its user, heads, another version: refused with the old server serving; then drift by hand."""
    host = boot_host("facts", gpus=2, users=[USER])
    install_engine(host, "sglang", PYTHON, version="0.5.23")
    install_model(host, MODEL, [USER])
    host.check(
        ["bash", "-ec", "mkdir -p /etc/reconciler; umask 077; cat >/etc/reconciler/llm.key"],
        KEY.encode(),
    )
    controller, view = Controller(host, tmp_path), HostView(host)
    assert controller.enrol().code == 0
    commit(controller)
    first = controller.apply()
    assert first.ended == (0, "Applied", ""), first.err + first.out
    second = controller.apply()
    assert second.ended == (0, "InSync", ""), second.err + second.out

    changed = {"args": {"context-length": 2048, "mem-fraction-static": 0.2}}
    commit(controller, **changed)
    weights = f"{MODEL}/model.safetensors"
    host.check(["truncate", "-s", "-1", weights])
    assert "where its header promises" in refused(controller, "model.weights")
    host.check(["truncate", "-s", "+1", weights])
    host.check(["chmod", "600", weights])
    assert "may not be read by the server's user" in refused(controller, "model.weights")
    before = view.server()
    done = controller.apply()
    assert done.ended == (1, "Refused", "Preflight"), done.err + done.out
    assert view.server() == before
    host.check(["chmod", "644", weights])
    host.check(
        [
            "sed",
            "-i",
            's/"num_attention_heads": 64/"num_attention_heads": 7/',
            f"{MODEL}/config.json",
        ]
    )
    assert "7 attention heads cannot be split over tp_size 2" in refused(
        controller, "parallel.heads"
    )
    host.check(
        [
            "sed",
            "-i",
            's/"num_attention_heads": 7/"num_attention_heads": 64/',
            f"{MODEL}/config.json",
        ]
    )
    install_engine(host, "sglang", PYTHON, version="0.5.10.post1")
    host.check(
        ["bash", "-c", "rm -rf /opt/sglang/lib/python3*/site-packages/sglang-0.5.23.dist-info"]
    )
    assert "0.5.10.post1 is installed where the spec says 0.5.23" in refused(
        controller, "engine.version"
    )
    install_engine(host, "sglang", PYTHON, version="0.5.23")
    host.check(
        ["bash", "-c", "rm -rf /opt/sglang/lib/python3*/site-packages/sglang-0.5.10*.dist-info"]
    )

    # Somebody starts it with other flags than its unit's file says by the time we look.
    commit(controller)
    unit = "/etc/systemd/system/llm.service"
    host.check(["cp", "-p", unit, "/root/llm.service"])
    host.check(["sed", "-i", 's/"4096"/"1024"/', unit])
    host.check(["systemctl", "daemon-reload"])
    host.check(["systemctl", "restart", "llm.service"])
    host.check(["cp", "-p", "/root/llm.service", unit])
    host.check(["systemctl", "daemon-reload"])
    status = controller.run("status", "-o", "json")
    (row,) = json.loads(status.out)["servers"]
    (drift,) = [d for d in row["drift"] if d["what"] == "other-flags"]
    assert [(f["field"], f["asked"], f["granted"]) for f in drift["fields"]] == [
        ("args.context-length", "4096", "1024")
    ]
    commit(controller, drift="heal")
    healed = controller.apply()
    assert healed.ended == (0, "Applied", ""), healed.err + healed.out
    assert controller.apply().ended[:2] == (0, "InSync")

    kept = host.check(["grep", "-rl", "--", KEY, "/var/lib/reconciler"])
    assert kept.split() == ["/var/lib/reconciler/llm/secrets.yaml"]
    for run in (first, second, healed, status):
        assert KEY not in run.out + run.err
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]

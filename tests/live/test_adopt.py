"""A server that somebody started by hand, under a real systemd: its spec is written, and it is taken over while it serves."""

from __future__ import annotations

import pytest
from lab_engine import hold_command, hold_unit, start_unit
from live_controller import GPU_MIB, Controller, HostView

pytestmark = pytest.mark.lab

PLACE = "/etc/systemd/system/llm.service"


def test_a_hand_made_server_is_taken_over_without_a_restart(
    controller: Controller, view: HostView
) -> None:
    """`adopt` writes a spec without the unit's secret, `--adopt` then touches no process, and the next commit rolls out as ever."""
    command = hold_command("--model", "one", "--load", "0.1", mib=GPU_MIB)
    service = (
        "Environment=CUDA_VISIBLE_DEVICES=0 NCCL_DEBUG=INFO\nEnvironment=HF_TOKEN=hf_abcdefghijklmnopqrstuv\n"
        "TimeoutStopSec=7\nNice=3\nRestart=always"
    )
    text = hold_unit(command, service=service)
    start_unit(controller.host, "llm.service", text)
    view.wait_until_active()
    before = view.server()

    spec = controller.specs / "llm.yaml"
    done = controller.run("adopt", controller.host.name, "llm.service", "--write", str(spec))
    assert done.code == 0, done.out + done.err
    written = spec.read_text()
    assert "hf_abc" not in written + done.out + done.err
    assert "Nice=3" in written
    assert "Taking over would restart it" not in done.out
    assert (
        controller.run("adopt", controller.host.name, "llm.service", "--write", str(spec)).code
        == 64
    )

    refused = controller.apply()
    assert refused.ended == (1, "Refused", "NotOurs")
    token = "install -D -m 600 /dev/stdin /etc/reconciler/llm/HF_TOKEN"
    controller.host.check(["bash", "-c", token], b"hf_abcdefghijklmnopqrstuv")
    taken = controller.apply("--adopt")
    assert taken.ended == (0, "Applied", ""), taken.out + taken.err
    assert taken.steps == ["acquire", "ready", "install", "commit"]
    assert view.server() == before
    assert "Made by reconcile" in view.text(PLACE)
    assert view.text("/var/lib/reconciler/llm/original/unit.service") == text
    assert controller.apply().ended == (0, "InSync", "")

    controller.commit("two")
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")
    assert view.server() != before

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
    """`adopt` writes a spec without a secret, `--adopt` touches no process, nor does healing a drop-in; the next commit rolls out."""
    command = hold_command("--model", "one", "--load", "0.1", mib=GPU_MIB)
    variables = b'# by hand\nNCCL_DEBUG="INFO"\nHF_TOKEN=hf_abcdefghijklmnopqrstuv\n'
    controller.host.check(
        ["install", "-D", "-m", "600", "/dev/stdin", "/etc/default/llm"], variables
    )
    service = (
        "Environment=CUDA_VISIBLE_DEVICES=0\nEnvironmentFile=-/etc/default/llm\n"
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
    assert "NCCL_DEBUG: INFO" in written
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

    spec.write_text(f"{written}drift: heal\n")
    drop_in = f"{PLACE}.d/10-mine.conf"
    put = f"install -D -m 644 /dev/stdin {drop_in} && systemctl daemon-reload"
    controller.host.check(["bash", "-c", put], b"[Service]\nMemoryMax=64G\n")
    healed = controller.apply()
    assert healed.ended == (0, "Applied", ""), healed.out + healed.err
    assert view.server() == before
    gone = f"! test -e {drop_in} && grep -r MemoryMax=64G /var/lib/reconciler/llm/aside/"
    controller.host.check(["bash", "-c", gone])
    assert controller.apply().ended[:2] == (0, "InSync")

    controller.commit("two")
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")
    assert view.server() != before

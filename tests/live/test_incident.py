"""The incident that the product began with, and the stops that return 0 while GPU memory is still held.

Played with a real systemd. What must hold in each: only what is provably the server's own is ended, bystanders live on, nothing
starts beside a holder, nothing loops.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lab_engine import hold_command, hold_unit, start_unit
from live_controller import (
    GPU_MIB,
    PORT,
    TIMEOUTS,
    Controller,
    HostView,
    eventually,
    requests_in_flight,
)

from reconciler.lab.faults import HOLD, break_, heal
from reconciler.lab.hosts import SystemdHost

pytestmark = pytest.mark.lab

UNIT = "sglang-qwen.service"

LONG = {**TIMEOUTS, "release": "45s"}
"""A left-over gets SIGTERM after 3 s and SIGKILL a third of this later; then the idle card's floor is learned."""


@pytest.fixture
def view(lab_host: SystemdHost) -> HostView:
    """Look at the unit that somebody wrote by hand."""
    return HostView(lab_host, UNIT)


def by_hand(host: SystemdHost, *options: str, service: Sequence[str] = ()) -> None:
    """Install and start the unit as the operator of the incident had it."""
    command = hold_command("--model", "old", *options, mib=GPU_MIB, port=PORT)
    start_unit(
        host,
        UNIT,
        hold_unit(
            command,
            service="\n".join(["Restart=always", "RestartSec=1", "TimeoutStopSec=2", *service]),
        ),
    )


def tell(host: SystemdHost, pid: int, order: str) -> None:
    """Change how a running stand-in behaves."""
    host.check([HOLD, "--tell", order.replace("PID", str(pid))])


def test_the_incident_ends_applied_without_a_person(stranger: Controller, view: HostView) -> None:
    """A hand-made unit that ignores SIGTERM with 16 requests in flight and leaves a child on the GPU is taken over and replaced."""
    host = view.host
    by_hand(
        host,
        "--on-term",
        "ignore",
        "--child",
        "setsid,ignore-term",
        "--speed",
        "5",
        service=["KillMode=process"],
    )
    break_(host, "python")
    break_(host, "dcgm-exporter")
    bystanders = [view.server("lab-python.service"), view.server("dcgm-exporter.service")]
    assert None not in bystanders
    old = view.server()
    assert old is not None
    (child,) = view.children(old[0])
    assert stranger.enrol().code == 0
    stranger.commit("new", unit=UNIT, timeouts=LONG)
    refused = stranger.apply()
    assert refused.ended == (1, "Refused", "NotOurs"), refused.err
    assert "--adopt" in refused.outcome["sentence"]
    assert view.server() == old
    starts = view.starts()
    with requests_in_flight(view, 16, "old"):
        done = stranger.apply("--adopt")
    assert done.ended == (0, "Applied", ""), (done.outcome["sentence"], done.err)
    view.serves("new")
    assert view.process(old[0]) != old
    assert view.process(child[0]) != child
    assert [view.server("lab-python.service"), view.server("dcgm-exporter.service")] == bystanders
    assert view.starts() - starts == 1
    assert view.show("NRestarts")["NRestarts"] == "0"
    assert "KillMode=process" in view.text("/var/lib/reconciler/llm/original/unit.service")
    assert stranger.apply().ended == (0, "InSync", "")


def test_a_bystander_on_the_gpu_is_named_and_never_touched(
    controller: Controller, lab_host: SystemdHost
) -> None:
    """Somebody else's process on the GPU: refused before anything stops, with its pid in the sentence; gone, the change goes through (F59, L9)."""
    view = HostView(lab_host)
    controller.commit("one")
    assert controller.apply().code == 0
    break_(lab_host, "foreign-holder")
    foreign, old = view.server("lab-foreign.service"), view.server()
    assert foreign is not None
    controller.commit("two")
    refused = controller.apply()
    assert refused.ended == (1, "Refused", "ForeignHolder"), refused.err
    assert str(foreign[0]) in refused.outcome["sentence"]
    assert (view.server("lab-foreign.service"), view.server()) == (foreign, old)
    lab_host.check(["systemctl", "stop", "lab-foreign"])
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")


def test_a_left_over_of_a_unit_with_kill_mode_process_is_ended(
    stranger: Controller, view: HostView
) -> None:
    """KillMode=process: systemd says inactive and success, the child keeps the memory; it is proven own, and ended."""
    by_hand(view.host, "--child", "setsid,ignore-term", service=["KillMode=process"])
    old = view.server()
    assert old is not None
    (child,) = view.children(old[0])
    assert stranger.enrol().code == 0
    stranger.commit("new", unit=UNIT, timeouts=LONG)
    done = stranger.apply("--adopt")
    assert done.ended == (0, "Applied", ""), (done.outcome["sentence"], done.err)
    assert view.process(child[0]) != child
    view.serves("new")


def test_a_child_that_left_the_control_group_of_our_unit_is_ended(
    controller: Controller, lab_host: SystemdHost
) -> None:
    """A child in a control group of its own carries our marks: proven own, and ended; a python beside it lives on."""
    view = HostView(lab_host)
    controller.commit("one")
    assert controller.apply().code == 0
    break_(lab_host, "escaped")
    break_(lab_host, "python")
    bystander = view.server("lab-python.service")
    (child,) = view.children(view.pid())
    controller.commit("two", timeouts=LONG)
    done = controller.apply()
    assert done.ended == (0, "Applied", ""), (done.outcome["sentence"], done.err)
    assert view.process(child[0]) != child
    assert view.server("lab-python.service") == bystander
    view.serves("two")


def test_a_child_that_left_a_unit_which_was_never_ours_is_not_touched(
    stranger: Controller, view: HostView
) -> None:
    """The same child of a hand-made unit cannot be proven: refused before anything stops, its pid named."""
    by_hand(view.host, "--child", "escape,setsid,ignore-term")
    old = view.server()
    assert old is not None
    (child,) = view.children(old[0])
    assert stranger.enrol().code == 0
    stranger.commit("new", unit=UNIT, timeouts=LONG)
    refused = stranger.apply("--adopt")
    assert refused.ended == (1, "Refused", "ForeignHolder"), (
        refused.outcome["sentence"],
        refused.err,
    )
    assert str(child[0]) in refused.outcome["sentence"]
    assert (view.server(), view.process(child[0])) == (old, child)
    assert view.model() == "old"


def test_a_server_that_systemd_may_not_kill_is_ended(stranger: Controller, view: HostView) -> None:
    """SendSIGKILL=no and SIGTERM ignored: the stop returns 0 with everything still there; it is proven own, and ended."""
    by_hand(view.host, "--on-term", "ignore", service=["SendSIGKILL=no"])
    old = view.server()
    assert old is not None
    assert stranger.enrol().code == 0
    stranger.commit("new", unit=UNIT, timeouts=LONG)
    done = stranger.apply("--adopt")
    assert done.ended == (0, "Applied", ""), (done.outcome["sentence"], done.err)
    assert view.process(old[0]) != old
    view.serves("new")


def test_a_process_that_nothing_can_end_is_a_stated_stop_that_ends_by_itself(
    controller: Controller, lab_host: SystemdHost
) -> None:
    """In D state not even SIGKILL ends it: exit 4, its pid named, nothing started beside it; thawed, the host brings the old one back (F56, L9)."""
    view = HostView(lab_host)
    controller.commit("one", timeouts={**TIMEOUTS, "release": "6s"})
    assert controller.apply().code == 0
    old = view.server()
    assert old is not None
    break_(lab_host, "d-state")
    controller.commit("two", timeouts={**TIMEOUTS, "release": "6s"})
    starts = view.starts()
    stuck = controller.apply()
    assert stuck.ended[:2] == (4, "RollbackFailed"), (stuck.outcome["sentence"], stuck.err)
    assert stuck.outcome["reason"] in {"NotReleased", "Wedged", "StopTimedOut"}
    assert f"pid {old[0]}" in stuck.outcome["sentence"]
    assert view.starts() == starts
    assert view.state() in {"failed", "inactive"}
    assert view.process(old[0]) == old
    heal(lab_host)
    eventually(
        lambda: view.model() == "one", "the host brings the last good revision back by itself"
    )
    eventually(lambda: view.left() == [], "the host clears up")
    view.serves("one")
    assert view.starts() - starts == 1

"""Rungs 8 and 9: a container's restart and a GPU's reset, each only with consent, and refused whenever somebody could be hurt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from release_stage import Stage

from reconciler.core.conditions import Outcome, worst
from reconciler.helper import consented
from reconciler.lab.simulated import SimulatedHost, add_host
from reconciler.lab.world import Process, World
from reconciler.releasing import Consent

PERSISTENCED = "/system.slice/nvidia-persistenced.service"


def ask(host: SimulatedHost, verb: str, **args: Any) -> dict[str, Any]:
    """Ask a node for one of the two acts."""
    return host.execute({"format": 1, "nonce": host.world.hex(32), "verb": verb, "args": args})


# -- reset ---------------------------------------------------------------------------------------------------


def stranded() -> Stage:
    """Give a host whose GPUs keep memory that nobody holds, once its server is down."""
    stage = Stage()
    stage.host.host.gpus[0].leak_mib = 9000
    return stage


def test_a_reset_needs_consent_and_then_frees_stranded_memory() -> None:
    """Without consent the report names rung 9; with the UUID named the card is reset and proven, persistence is as before."""
    stage = stranded()
    gpu = stage.host.host.gpus[0]
    gpu.persistence = "Enabled"
    baseline = stage.host.host.files.data["/var/lib/reconciler/baselines.json"]
    stage.host.host.files.put(
        "/var/lib/reconciler/baselines.json", baseline.replace(b'"Disabled"', b'"Enabled"', 1)
    )
    without = stage.free(stage.look("0"))
    assert without.proof[0]["verdict"] == "wedged"
    assert without.proof[0]["next"]["rung"] == 9
    assert gpu.leak_mib == 9000
    found = replace(stage.look("0"), consent=Consent(gpus=(stage.uuid(0),)))
    released = stage.free(found)
    assert released.notes == (f"{stage.uuid(0)} was reset",)
    assert released.proof[0]["verdict"] == "released"
    assert worst(released.verdicts).code == 0
    assert released.lifted == (stage.uuid(0),)
    assert gpu.persistence == "Enabled"


def prepared() -> SimulatedHost:
    """Give a host whose first card asks for a reset, and that nobody uses."""
    host = add_host(World(5), "one", gpus=4)
    host.host.gpus[0].recovery_action = "Reset"
    return host


def computes_elsewhere(host: SimulatedHost) -> None:
    host.host.add_process(gpus=(3,), mib=500)


def holds_without_memory(host: SimulatedHost) -> None:
    host.host.add_process(gpus=(0,))


def monitor_on_the_card(host: SimulatedHost) -> None:
    host.host.add_process(
        "/system.slice/nvidia-dcgm.service", gpus=(0,), exe="/usr/bin/nv-hostengine"
    )


def unreadable(host: SimulatedHost) -> None:
    host.host.holders_fault = "may not look"


def mig(host: SimulatedHost) -> None:
    host.host.gpus[0].mig = "Enabled"


def linked(host: SimulatedHost) -> None:
    host.host.gpus[0].links = host.host.gpus[1].links = 4


def links_unknown(host: SimulatedHost) -> None:
    host.host.gpus[0].links = None


def display(host: SimulatedHost) -> None:
    host.host.gpus[0].display = "Enabled"


def no_need(host: SimulatedHost) -> None:
    host.host.gpus[0].recovery_action = None


def container(host: SimulatedHost) -> None:
    host.host.container = "lxc"


def refused_by_driver(host: SimulatedHost) -> None:
    host.host.gpus[0].reset_says = "GPU Reset couldn't run because GPU is the primary GPU."


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (computes_elsewhere, "Computing"),
        (holds_without_memory, "GpuHeld"),
        (monitor_on_the_card, "GpuHeld"),
        (unreadable, "Unknown"),
        (mig, "Mig"),
        (linked, "NvlinkPeers"),
        (links_unknown, "Unknown"),
        (display, "Display"),
        (no_need, "NoNeed"),
        (container, "InContainer"),
        (refused_by_driver, "ResetRefused"),
    ],
)
def test_a_reset_is_refused_whenever_somebody_could_be_hurt(spoil: Any, reason: str) -> None:
    """Each precondition of rung 9 by itself refuses, and nobody's process is touched."""
    host = prepared()
    spoil(host)
    processes = list(host.host.processes.values())
    answer = ask(host, "reset-gpu", gpus=[host.host.gpus[0].uuid])
    assert (answer["outcome"], answer["reason"]) == ("refused", reason)
    assert all(p.alive for p in processes)
    assert host.host.truth.signals == []


def test_only_the_persistence_daemon_may_have_the_card_open() -> None:
    """Its mode is toggled for the reset and restored; the daemon itself is left alone."""
    host = prepared()
    daemon = host.host.add_process(PERSISTENCED, gpus=(0, 1), exe="/usr/bin/nvidia-persistenced")
    host.host.gpus[0].persistence = "Enabled"
    answer = ask(host, "reset-gpu", gpus=[host.host.gpus[0].uuid])
    assert answer["outcome"] == "done", answer
    assert answer["data"]["problems"] == []
    assert host.host.gpus[0].persistence == "Enabled"
    assert host.host.gpus[0].recovery_action is None
    assert daemon.alive


def test_without_the_check_for_others_a_reset_would_hit_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check that nobody uses the card is what refuses: with it off the reset is carried out."""
    host = prepared()
    holds_without_memory(host)
    monkeypatch.setattr(consented, "check_nobody", lambda *_args: None)
    assert ask(host, "reset-gpu", gpus=[host.host.gpus[0].uuid])["outcome"] == "done"


# -- restart of a container ----------------------------------------------------------------------------------


def node() -> tuple[SimulatedHost, Process]:
    """Give a node with a container whose only worker hangs on a GPU."""
    host = add_host(World(6), "pve", gpus=2)
    host.host.containers[129] = {"status": "running", "lock": None}
    stuck = host.host.add_process(
        "/lxc/129/ns/system.slice/qwen.service", gpus=(0,), mib=9000, exe="/opt/serve"
    )
    host.host.add_process("/lxc/129/ns/system.slice/ssh.service", exe="/usr/sbin/sshd")
    return host, stuck


def restart(host: SimulatedHost) -> dict[str, Any]:
    """Ask the node to restart the container."""
    return ask(
        host,
        "restart-container",
        vmid=129,
        gpus=[host.host.gpus[0].uuid],
        units=["qwen.service"],
    )


def test_a_dedicated_container_is_restarted() -> None:
    """Where only our unit and base services run in it, and nobody else holds the card, it is restarted."""
    host, stuck = node()
    answer = restart(host)
    assert answer["outcome"] == "done", answer
    assert not stuck.alive


def locked(host: SimulatedHost) -> None:
    host.host.containers[129]["lock"] = "backup"


def down(host: SimulatedHost) -> None:
    host.host.containers[129]["status"] = "stopped"


def other(host: SimulatedHost) -> None:
    del host.host.containers[129]


def shared(host: SimulatedHost) -> None:
    host.host.add_process("/lxc/129/ns/system.slice/postgresql.service", exe="/usr/bin/postgres")


def neighbour(host: SimulatedHost) -> None:
    host.host.add_process("/lxc/130/ns/system.slice/serve.service", gpus=(0,), exe="/opt/serve")


def lookalike(host: SimulatedHost) -> None:
    host.host.add_process("/lxc/1290/ns/system.slice/serve.service", gpus=(0,), exe="/opt/serve")


def blind(host: SimulatedHost) -> None:
    host.host.holders_fault = "may not look"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (locked, "ContainerLocked"),
        (down, "ContainerNotRunning"),
        (other, "Unknown"),
        (shared, "ContainerShared"),
        (neighbour, "ForeignHolder"),
        (lookalike, "ForeignHolder"),
        (blind, "Unknown"),
    ],
)
def test_a_container_with_anybody_else_in_it_is_not_restarted(spoil: Any, reason: str) -> None:
    """Each precondition of rung 8 by itself refuses, and nothing in the container ends."""
    host, stuck = node()
    spoil(host)
    answer = restart(host)
    assert (answer["outcome"], answer["reason"]) == ("refused", reason)
    assert stuck.alive


def test_a_container_that_does_not_come_back_is_said() -> None:
    """A process in the kernel survives the restart: pct's own words are reported, no force is used."""
    host, stuck = node()
    stuck.unkillable = True
    answer = restart(host)
    assert answer["reason"] == "RestartFailed"
    assert "unable to shut down" in answer["message"]


def test_a_shared_container_is_refused_by_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check for other services off, a neighbour's database would be ended."""
    host, _ = node()
    shared(host)
    assert "postgresql" in restart(host)["message"]
    monkeypatch.setattr(consented, "other_units", lambda *_args: [])
    assert restart(host)["outcome"] == "done"


@pytest.mark.parametrize("helps", [True, False])
def test_one_run_with_consent_ends_as_what_it_proved(helps: bool) -> None:
    """A server that failed to be released on the way is stopped as asked once its cards are proven free, on hold as before; else it stays failed."""
    stage = stranded()
    if not helps:
        stage.host.host.gpus[
            0
        ].reset_says = "GPU Reset couldn't run because GPU 0 is the primary GPU."
    found = replace(stage.look("0", "1"), consent=Consent(gpus=(stage.uuid(0),)))
    released = stage.free(found)
    (result,) = released.results
    assert worst(released.verdicts).code == (0 if helps else 1)
    assert (result.outcome is Outcome.STOPPED) is helps
    assert stage.running() == []
    assert stage.run().outcome is Outcome.WAITING, "on hold either way"

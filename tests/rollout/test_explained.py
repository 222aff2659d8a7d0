"""A rollout that fails says why, by the server's own journal and the kernel's lines, and judges the revision by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reconciler.core.attempt import Failure, Phase
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.desired import Target
from reconciler.core.explain import explained
from reconciler.core.live import Known, LiveHost, Unknown
from reconciler.engines import custom
from reconciler.lab.schedule import HOST, SERVER, fleet_of, new_host
from reconciler.lab.simulated import SimulatedHost
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import Behaviour, Effect, World
from reconciler.reconcile import act, survey

ENGINES = {"custom": custom}
RECORDED = Path(__file__).parents[1] / "recorded" / "engine-logs"
ECC = "NVRM: Xid (PCI:0000:41:00): 48, pid=1, An uncorrectable double bit error (DBE) has been detected"

GONE = "NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus."


def roll_out(
    behaviour: Behaviour, kernel: tuple[str, ...] = ()
) -> tuple[SimulatedHost, ServerResult]:
    """Apply a good revision, then try one that behaves so; the kernel says its lines when that one starts."""
    world = World(1)
    host = new_host(world)
    controller = controller_world(world, {HOST: host}, ENGINES)
    act(survey(fleet_of(1, ENGINES), controller), controller, lambda _event: None)
    host.host.behave("--steps 7", behaviour)

    def speak(effect: Effect) -> None:
        if (effect.kind, effect.stage) == ("start", "after"):
            host.host.kernel.extend(line for line in kernel if line not in host.host.kernel)

    world.on_effect(speak)
    (result,) = act(survey(fleet_of(7, ENGINES), controller), controller, lambda _event: None)
    return host, result


def records(host: SimulatedHost) -> tuple[list[Any], list[Any]]:
    """Give the rejections and the history that the host keeps of the server."""
    kept = {path: data for path, data in host.host.files.data.items() if f"/{SERVER}/" in path}
    rejected = [json.loads(data) for path, data in kept.items() if "/rejected/" in path]
    (lines,) = (data for path, data in kept.items() if path.endswith("/history.ndjson"))
    return rejected, [json.loads(line) for line in lines.splitlines()]


def log(name: str) -> str:
    return (RECORDED / f"{name}.log").read_text()


def dies(line: str, status: int = 1) -> Behaviour:
    return Behaviour(load_s=30.0, crash_at_s=3.0, exit_status=status, crash_line=line)


STORIES: dict[str, tuple[Behaviour, tuple[str, ...], str, bool]] = {
    "a flag that is gone": (
        dies("serve: error: unrecognized arguments: --steps 7", 2),
        (), "unknown_flag (config error, certain)", True,
    ),
    "weights that do not fit": (
        dies(log("sglang-oom-weights-too-big")), (), "oom_weights", True,
    ),
    "memory that is missing on cards that were proven free": (
        dies("torch.AcceleratorError: CUDA error: out of memory"), (), "oom_unclear", True,
    ),
    "a port that is taken": (
        dies(log("trtllm-port-busy")), (), "port_in_use (resource busy", False,
    ),
    "a card that is broken": (
        dies(log("sglang-spec-illegal-access-at-capture")), (ECC,), "gpu_ecc (host fault", False,
    ),
    "the same crash on sound cards": (
        dies(log("sglang-spec-illegal-access-at-capture")), (), "illegal_memory_access", True,
    ),
    "no memory on the host": (
        dies("Killed"),
        ("Memory cgroup out of memory: Killed process 70440 (sglang::detoken) total-vm:1kB",), "host_memory_limit", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_failed_start_says_its_cause_and_what_to_change(story: str) -> None:
    """S22: the cause stands in the outcome, the history and beside the rejection; a host's fault rejects nothing."""
    behaviour, kernel, cause, rejects = STORIES[story]
    host, result = roll_out(behaviour, kernel)
    assert result.outcome is Outcome.ROLLED_BACK
    assert f"Cause: {cause}" in result.sentence
    assert "What to do: " in result.sentence
    rejected, history = records(host)
    assert bool(rejected) is rejects
    assert all(cause.partition(" ")[0] in one["sentence"] for one in rejected)
    assert history[-1]["cause"] == cause.partition(" ")[0]


def test_an_unknown_end_is_told_as_before() -> None:
    """Nothing is guessed: the sentence has the last line and no cause, and the unit's own status decides."""
    host, result = roll_out(
        Behaviour(load_s=30, crash_at_s=3.0, crash_line="the frobnicator broke")
    )
    assert "Cause:" not in result.sentence
    assert "frobnicator" in result.sentence
    rejected, history = records(host)
    assert len(rejected) == 1
    assert "cause" not in history[-1]


def test_a_kill_without_a_word_of_the_kernel_is_no_lack_of_memory() -> None:
    """Exit 137 alone never becomes "out of memory"."""
    _, result = roll_out(Behaviour(load_s=30, crash_at_s=3.0, exit_status=137, crash_line="Killed"))
    assert "memory" not in result.sentence.lower()
    _, other = roll_out(
        Behaviour(load_s=30, crash_at_s=3.0, exit_status=137, crash_line="Killed"),
        ("Out of memory: Killed process 70440 (chromium) total-vm:1kB",),
    )
    assert "memory" not in other.sentence.lower()


@pytest.mark.parametrize(("kernel", "cause"), [((), None), ((GONE,), "gpu_lost")])
def test_numbers_of_a_broken_card_are_no_verdict(
    kernel: tuple[str, ...], cause: str | None
) -> None:
    """S22: a gate that fails rejects the revision, unless the kernel says that the card fell off meanwhile."""
    slow = Behaviour(model="qwen", speeds={"decode_tps": 10.0})
    host, result = roll_out(slow, kernel)
    assert result.outcome is Outcome.ROLLED_BACK
    assert len(records(host)[0]) == (0 if cause else 1)
    assert ("Cause: " in result.sentence) is (cause is not None)


def test_a_flag_that_newer_engines_lost_is_called_removed() -> None:
    """The history of the flags travels with the revision: a removed one is told from one that never was."""
    flags = ("--mamba-scheduler-strategy", "--model-path")
    target = Target("r", "", flags=flags, flag_history=((flags[0], "older"), (flags[1], "newer")))
    failure = Failure(Phase.START, Reason.DIED, "it died", "chat", rejects=True)

    def code(flag: str, one: Target | None) -> str:
        line = f"launch_server.py: error: unrecognized arguments: {flag} x"
        found = SimpleNamespace(journal=Known((line,)), unit=Unknown("not asked"), unit_name="c")
        spec = '{"engine":{"name":"sglang"}}'
        given = None if one is None else dataclasses.replace(one, spec=spec)
        live = cast(LiveHost, SimpleNamespace(server=lambda _name: found, raw={}))
        return explained(failure, given, live).code

    assert code(flags[0], target) == "removed_flag"
    assert code("--no-such", target) == "unknown_flag"
    assert code(flags[0], None) == "unknown_flag"

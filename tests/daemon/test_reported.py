"""What a forge shows beside each commit while the daemon works: pending while it rolls out or waits, the worst of all servers in one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forge_server import TOKEN, FakeForge, forge_server
from simulated_daemon import Stage

from reconciler.lab.schedule import DOCUMENT, SERVER
from reconciler.reporting import gitea
from reconciler.reporting.base import Place
from reconciler.reporting.reporter import Reporter
from reconciler.reporting.sinks import ForgeStatuses

ONE, ALL = f"reconcile/{SERVER}", "reconcile"


class Reported(Stage):
    """A stage whose daemon reports to a forge."""

    def __init__(self, forge: FakeForge) -> None:
        super().__init__()
        self.forge = forge
        sink = ForgeStatuses(gitea, Place("gitea", forge.url, "ops/llm"), lambda: TOKEN)
        self.reporter = Reporter([sink], wall=lambda: self.world.now)
        self.daemon.subscribers.append(self.reporter)
        self.reporter.start()

    def shown(self, commit: int, context: str) -> list[str]:
        """Give the states of a status, in order."""
        assert self.reporter.settle(10)
        rows = zip(self.forge.commits, self.forge.statuses, strict=True)
        return [s["state"] for c, s in rows if (c, s["context"]) == (f"{commit:040x}", context)]

    def words(self) -> str:
        """Give what was said last of the server."""
        assert self.reporter.settle(10)
        said = [s["description"] for s in self.forge.statuses if s["context"] == ONE]
        return str(said[-1])


@pytest.fixture
def stage() -> Iterator[Reported]:
    """Give a stage that reports."""
    with forge_server("gitea") as forge:
        stage = Reported(forge)
        yield stage
        assert stage.reporter.stop()


def test_pending_while_it_rolls_out_then_success_for_the_server_and_for_all(
    stage: Reported,
) -> None:
    """The aggregate is a status of its own; a pass that finds nothing new says nothing again."""
    stage.push(1)
    stage.run(600)
    for context in (ONE, ALL):
        states = stage.shown(1, context)
        assert (states[0], states[-1]) == ("pending", "success")
        assert states.count("success") <= 2  # When it is applied, and in sync from then on.


def test_pending_while_the_change_waits_for_a_person(stage: Reported) -> None:
    """A suspended server has not become what the commit says, and nobody failed."""
    stage.push(1)
    stage.run(120)
    suspended = DOCUMENT.format(steps=2).replace("model: qwen", "model: qwen\nsuspend: true")
    stage.source.write(suspended)
    stage.daemon.trigger()
    stage.run(200)
    assert {*stage.shown(2, ONE), *stage.shown(2, ALL)} == {"pending"}
    assert "Suspended" in stage.words()
    stage.push(2)
    stage.run(200)
    assert (stage.shown(3, ONE)[-1], stage.shown(3, ALL)[-1]) == ("success", "success")


def test_a_commit_whose_place_was_taken_never_reads_as_success(stage: Reported) -> None:
    """L4: it stays pending and says which commit wants something else; the newer one ends in success."""
    stage.push(1)
    stage.run(120)
    stage.push(3)

    def push_two() -> None:
        stage.push(2)
        stage.world.advance(2.0)
        stage.daemon.read_if_due()

    stage.when("start", lambda: stage.when("claim", push_two))
    stage.run(300)
    assert ("Waiting", "Preempted") in stage.outcomes
    assert set(stage.shown(2, ONE)) == {"pending"}
    assert stage.shown(3, ONE)[-1] == stage.shown(3, ALL)[-1] == "success"


def test_a_rollback_is_a_failure_of_the_server_and_of_all_and_the_way_on_is_success(
    stage: Reported,
) -> None:
    """With the gate's numbers in its words; the next good commit is not held against it."""
    stage.push(1)
    stage.run(120)
    stage.push(3)
    stage.run(300)
    assert (stage.shown(2, ONE)[-1], stage.shown(2, ALL)[-1]) == ("failure", "failure")
    assert "min_decode_tps is 100" in stage.words()
    stage.push(1)
    stage.run(300)
    assert (stage.shown(3, ONE)[-1], stage.shown(3, ALL)[-1]) == ("success", "success")

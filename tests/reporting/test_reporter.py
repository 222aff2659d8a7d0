"""What passes did is told: the newest status counts, a change is said once, and nothing of it is ever in a rollout's way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from forge_server import TOKEN, forge_server
from rollout_stage import Stage

from reconciler.core.conditions import CommitStatus
from reconciler.core.errors import UsageError
from reconciler.core.standing import (
    Message,
    Standing,
    Told,
    Urgency,
    aggregate,
    message_due,
    unseen,
)
from reconciler.daemon import Notice, PassBegan, PassEnded, PassEvent, SourceRead
from reconciler.lab.schedule import HOST
from reconciler.reconcile import act, survey
from reconciler.reporting import github
from reconciler.reporting.base import ForgeError, Place, Status
from reconciler.reporting.reporter import Reporter
from reconciler.reporting.setup import ReportTo, reporter_of
from reconciler.reporting.sinks import AppriseMessages, ForgeStatuses, NotBroughtError, seen
from reconciler.sources.base import Commit, Snapshot

GOOD, SLOW = 1, 3


@dataclass
class Wall:
    """A clock that a test sets."""

    time: float = 1_000.0
    shown: list[tuple[str, Status]] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    broken: bool = False

    def send_status(self, commit: str, status: Status) -> None:
        """Keep it."""
        if self.broken:
            message = "the forge is away"
            raise OSError(message)
        self.shown.append((commit, status))

    def send_message(self, message: Message) -> None:
        """Keep it."""
        if self.broken:
            why = "the service is away"
            raise OSError(why)
        self.said.append(message)

    def states(self, commit: str, context: str = "reconcile/qwen") -> list[str]:
        """Give the states that one status went through."""
        return [s.state.value for c, s in self.shown if c == commit and s.context == context]

    def newest(self, context: str = "reconcile/qwen") -> Status:
        """Give what counts."""
        return next(s for _, s in reversed(self.shown) if s.context == context)


def commit(number: int) -> Commit:
    """Give a commit."""
    return Commit(f"{number:040x}", "somebody", 0.0, "subject", "main")


class Passes:
    """Plays the daemon's passes on one simulated host, and tells a reporter."""

    def __init__(self, reporter: Reporter) -> None:
        self.at = Stage()
        self.reporter = reporter

    def source(self, steps: int, number: int) -> None:
        """The source was read."""
        snapshot = Snapshot("specs", {}, (), str(number), commit=commit(number))
        self.tell(SourceRead(snapshot, self.at.fleet(steps)))

    def run(self, steps: int, number: int) -> None:
        """One pass."""
        found = survey(self.at.fleet(steps), self.at.controller)
        by = commit(number)
        self.tell(PassBegan(HOST, found, by))
        results = act(found, self.at.controller, lambda e: self.tell(PassEvent(HOST, e, by)))
        self.tell(PassEnded(HOST, found, results, by))

    def tell(self, notice: Notice) -> None:
        """Tell it, and let it be told."""
        self.reporter(notice)
        assert self.reporter.settle(10.0)


@pytest.fixture
def wall() -> Wall:
    """Give whoever is told, and the time."""
    return Wall()


@pytest.fixture
def passes(wall: Wall, tmp_path: Path) -> Iterator[Passes]:
    """Give passes that are reported."""
    reporter = Reporter([wall], [wall], tmp_path / "told.json", lambda: wall.time)
    reporter.start()
    yield Passes(reporter)
    assert reporter.stop()


def test_a_rollout_is_pending_and_then_success(passes: Passes, wall: Wall) -> None:
    """From the push on: waiting, rolling out, applied; for the server and for all of them."""
    passes.source(GOOD, 1)
    passes.run(GOOD, 1)
    assert wall.states(commit(1).id) == ["pending", "pending", "success"]
    assert wall.states(commit(1).id, "reconcile")[-1] == "success"
    assert [s.description.split(":")[0] for _, s in wall.shown if s.context == "reconcile/qwen"] == [
        "NotLookedAt", "Rolling", "Applied",
    ]  # fmt: skip
    assert [(m.urgency, m.title) for m in wall.said] == [(Urgency.INFO, "qwen on one: applied")]


def test_nothing_new_is_not_said_again(passes: Passes, wall: Wall) -> None:
    """L10: a pass in sync shows and says nothing that stands there already."""
    passes.source(GOOD, 1)
    passes.run(GOOD, 1)
    passes.run(GOOD, 1)
    shown, said = len(wall.shown), len(wall.said)
    for _ in range(3):
        passes.run(GOOD, 1)
    assert (len(wall.shown), len(wall.said)) == (shown, said)


def test_a_rollback_is_a_failure_with_the_gates_numbers(passes: Passes, wall: Wall) -> None:
    """Never success after a rollback; said once, also when the next passes refuse the revision; then that it is over."""
    passes.source(GOOD, 1)
    passes.run(GOOD, 1)
    wall.said.clear()
    passes.source(SLOW, 2)
    for _ in range(4):
        passes.run(SLOW, 2)
    assert set(wall.states(commit(2).id)[2:]) == {"failure"}
    assert wall.states(commit(1).id)[-1] == "success"
    assert wall.newest("reconcile").state is CommitStatus.FAILURE
    rolled = next(
        s for c, s in wall.shown if c == commit(2).id and s.description.startswith("RolledBack")
    )
    assert "min_decode_tps is 100, measured" in rolled.description
    assert [m.urgency for m in wall.said] == [Urgency.FAILURE]
    assert "RolledBack" in wall.said[0].title
    wall.time += 7 * 3600
    passes.run(SLOW, 2)
    assert "still" in wall.said[-1].title
    passes.source(GOOD, 3)
    passes.run(GOOD, 3)
    assert [m.urgency for m in wall.said] == [Urgency.FAILURE, Urgency.FAILURE, Urgency.SUCCESS]
    assert wall.states(commit(3).id)[-1] == "success"


def test_a_restart_of_the_daemon_is_no_news(passes: Passes, wall: Wall, tmp_path: Path) -> None:
    """What people were told outlives the process."""
    passes.run(GOOD, 1)
    passes.run(SLOW, 2)
    said = len(wall.said)
    again = Reporter([wall], [wall], tmp_path / "told.json", lambda: wall.time)
    again.start()
    passes.reporter, first = again, passes.reporter
    passes.run(SLOW, 2)
    assert len(wall.said) == said
    assert again.stop()
    passes.reporter = first


def test_what_fails_is_said_with_the_next_pass(passes: Passes, wall: Wall) -> None:
    """F76: a forge or a service that is away costs no rollout, and no message is lost by it."""
    wall.broken = True
    passes.run(GOOD, 1)
    assert passes.at.host.host.truth.starts
    assert passes.reporter.failed
    assert wall.shown == []
    passes.run(SLOW, 2)
    wall.broken = False
    passes.run(SLOW, 2)
    assert wall.newest().state is CommitStatus.FAILURE
    assert [m.urgency for m in wall.said] == [Urgency.FAILURE]


def test_a_sink_that_hangs_holds_nobody_up() -> None:
    """F76: notes are bounded, what is dropped is counted, and the end does not wait for it."""
    hanging, entered = threading.Event(), threading.Event()

    class Stuck:
        def send_status(self, commit: str, status: Status) -> None:
            entered.set()
            hanging.wait()

    reporter = Reporter([Stuck()], capacity=5)
    reporter.start()
    at = Stage()
    snapshot = Snapshot("specs", {}, (), "1", commit=commit(1))
    reporter(SourceRead(snapshot, at.fleet(GOOD)))
    assert entered.wait(10.0)
    for _ in range(20):
        reporter(SourceRead(snapshot, at.fleet(GOOD)))
    assert reporter.dropped == 15
    assert not reporter.stop(timeout_s=0.05)
    hanging.set()
    assert reporter.stop()


@pytest.mark.parametrize("text", ["{", "[]", '{"told": {"a": 1}}'])
def test_a_memory_that_cannot_be_read_is_begun_anew(text: str, tmp_path: Path) -> None:
    """To be told twice is the lesser evil."""
    path = tmp_path / "told.json"
    path.write_text(text)
    assert Reporter(memory=path).stop()


# -- the rules, by themselves ------------------------------------------------------------------------------------


def stands(what: str, status: CommitStatus, wanted: str = "abc", reason: str = "") -> Standing:
    """Give how a server stands."""
    return Standing("qwen", "one", wanted, status, what, reason, "because")


FAILED = stands("RolledBack", CommitStatus.FAILURE)


def test_the_worst_server_decides() -> None:
    """Failure before error before pending before success, and mistakes in specs are a failure."""
    good = stands("Applied", CommitStatus.SUCCESS)
    lost = stands("Unknown", CommitStatus.ERROR)
    new = unseen("x", "one", "abc")
    assert aggregate([])[0] is CommitStatus.SUCCESS
    assert aggregate([good])[0] is CommitStatus.SUCCESS
    assert aggregate([good, new])[0] is CommitStatus.PENDING
    assert aggregate([good, new, lost])[0] is CommitStatus.ERROR
    assert aggregate([good, new, lost, FAILED])[0] is CommitStatus.FAILURE
    assert aggregate([good], spec_problems=2) == (
        CommitStatus.FAILURE, "2 mistakes in the specs; 1 as wanted",
    )  # fmt: skip


def test_once_for_each_change() -> None:
    """The same trouble again is silent until the interval is over; another revision's is news; the end of it is said once."""
    first, told = message_due(FAILED, Told(), 0.0, repeat_s=100.0)
    assert first is not None
    refused = stands("Refused", CommitStatus.FAILURE, reason="RejectedBefore")
    assert message_due(refused, told, 99.0, repeat_s=100.0) == (None, told)
    again, later = message_due(refused, told, 100.0, repeat_s=100.0)
    assert again is not None
    assert "still" in again.title
    assert message_due(refused, later, 199.0, repeat_s=100.0)[0] is None
    other, _ = message_due(stands("RolledBack", CommitStatus.FAILURE, "def"), told, 1.0)
    assert other is not None
    rolling = stands("Rolling", CommitStatus.PENDING)
    waiting = stands("Waiting", CommitStatus.PENDING)
    assert message_due(rolling, told, 1.0) == (None, told)
    assert message_due(waiting, told, 1.0) == (None, told)
    over, fine = message_due(stands("InSync", CommitStatus.SUCCESS), told, 1.0)
    assert over is not None
    assert over.urgency is Urgency.SUCCESS
    assert message_due(stands("InSync", CommitStatus.SUCCESS), fine, 2.0) == (None, fine)
    assert (
        message_due(FAILED, told, -50.0, repeat_s=100.0)[0] is not None
    )  # F08: the clock was set back.


# -- where it goes ------------------------------------------------------------------------------------------------


def test_statuses_reach_a_forge(wall: Wall) -> None:
    """Each beside its own commit, by the API."""
    with forge_server("github") as forge:
        sink = ForgeStatuses(github, Place("github", forge.url, "ops/llm"), lambda: TOKEN)
        reporter = Reporter([sink], wall=lambda: wall.time)
        reporter.start()
        played = Passes(reporter)
        played.run(GOOD, 1)
        played.run(SLOW, 2)
        assert reporter.stop()
        assert forge.statuses[-1]["context"] == "reconcile"
        assert forge.statuses[-1]["state"] == "failure"
        assert {p.rpartition("/")[2] for m, p in forge.asked} == {commit(1).id, commit(2).id}


class Box(BaseHTTPRequestHandler):
    """Takes messages."""

    taken: list[dict[str, str]]

    def log_message(self, *_args: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Keep one."""
        self.taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Apprise imports
def test_messages_go_through_apprise(tmp_path: Path) -> None:
    """To the addresses of a file that only its owner reads; what a spec says mentions nobody."""
    pytest.importorskip("apprise", reason="an extra: pip install 'inference-reconciler[notify]'")
    taken: list[dict[str, str]] = []
    handler = type("Handler", (Box,), {"taken": taken})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    file = tmp_path / "addresses"
    file.write_text(f"# ours\njson://127.0.0.1:{server.server_address[1]}/x\n")
    sink = AppriseMessages(file)
    message = Message(Urgency.FAILURE, "qwen: failed", "@everyone <!here> \x1b[31m")
    try:
        file.chmod(0o644)
        with pytest.raises(NotBroughtError, match="others may read"):
            sink.send_message(message)
        file.chmod(0o600)
        sink.send_message(message)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert taken[0]["type"] == "failure"
    assert "@everyone" not in taken[0]["message"]
    assert "\x1b" not in taken[0]["message"]
    file.write_text("nothing://that?is=known\n")
    with pytest.raises(NotBroughtError, match="line 1") as wrong:
        sink.send_message(message)
    assert "that" not in str(wrong.value).replace("that Apprise", "")
    assert len(seen("x" * 5000, 1500)) == 1500


def test_the_operators_wishes_make_a_reporter(tmp_path: Path) -> None:
    """Nothing asked for is no reporter; what is asked for and cannot be is said at the start, not at the first rollback."""
    assert reporter_of(ReportTo(tmp_path)) is None
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with forge_server("gitea") as forge:
        asked = ReportTo(
            tmp_path, forge="gitea", api=forge.url, repository="ops/llm", token_file=token
        )
        reporter = reporter_of(asked, lambda: 0.0)
        assert reporter is not None
        reporter.start()
        Passes(reporter).run(GOOD, 1)
        assert reporter.stop()
        assert [s["context"] for s in forge.statuses][-1] == "reconcile"
    with pytest.raises(UsageError, match="need a forge"):
        reporter_of(ReportTo(tmp_path, forge="svn"))
    with pytest.raises(ForgeError, match="https"):
        reporter_of(
            ReportTo(
                tmp_path, forge="github", api="http://x.example", repository="a/b", token_file=token
            )
        )

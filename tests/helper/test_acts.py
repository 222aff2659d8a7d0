"""Every verb on the simulated host: what it does, what it refuses, and that doing it twice is doing it once."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from simulated_controller import (
    ARGV,
    UNIT,
    Controller,
    argv_for,
    new_controller,
    revision_of,
    unit_text,
)

from reconciler.lab.simulated import Behaviour, World, add_host

TRIAL = f"/run/systemd/system.control/{UNIT}"
PERMANENT = f"/etc/systemd/system/{UNIT}"
FLAG = f"/run/reconciler/{UNIT}.disarmed"
DROP_IN = f"/run/systemd/system/{UNIT}.d/zz-reconciler-disarm.conf"


@pytest.fixture
def tester() -> Controller:
    """Return a controller that holds the lease of a bound server."""
    controller = new_controller()
    controller.claim()
    controller.bind()
    return controller


@pytest.fixture
def running() -> Controller:
    """Return a controller whose server runs an applied revision."""
    controller = new_controller()
    controller.deploy("qwen")
    return controller


def files_of(controller: Controller) -> dict[str, bytes]:
    """Return the host's files without journals and answers, which only grow."""
    growing = ("/run/reconciler/answers", "journal")
    return {
        path: data
        for path, data in controller.host.host.files.data.items()
        if not any(word in path for word in growing)
    }


def adopted(controller: Controller, text: str) -> str:
    """Put a foreign permanent unit on the host and return its digest."""
    controller.host.host.files.put(PERMANENT, text.encode())
    controller.host.systemd.reload()
    return hashlib.sha256(text.encode()).hexdigest()


class TestARollout:
    """The normal path, from nothing to an applied revision and to the next one."""

    def test_a_first_deploy_ends_applied(self, running: Controller) -> None:
        """After a commit the permanent unit has the bytes, runs under the committed invocation, and nothing temporary is left."""
        files = running.host.host.files.data
        applied = json.loads(running.read("applied.json"))
        assert files[PERMANENT] == unit_text("qwen").encode()
        assert applied["revision"] == revision_of("qwen")
        assert applied["invocation"] == running.props()["InvocationID"]
        assert applied["boot_id"] == running.host.host.boot_id
        assert running.props()["UnitFileState"] == "enabled"
        for gone in (TRIAL, FLAG, DROP_IN):
            assert gone not in files
        for name in ("deadline", "intent", "snapshot"):
            assert running.read(f"{name}.json") is None

    def test_the_process_survives_its_commit(self, running: Controller) -> None:
        """A commit touches files only: the process that passed its gate is the one that goes on."""
        starts = running.host.host.truth.starts
        assert len(starts) == 1
        assert starts[0].invocation == running.props()["InvocationID"]

    def test_the_second_rollout_keeps_the_first_as_good(self, running: Controller) -> None:
        """The content of the revision before stays on the host, so that it can be gone back to (S5)."""
        running.deploy("other")
        assert json.loads(running.read("applied.json"))["good"] == [revision_of("qwen")]
        answer = running.done("read-record", server="qwen", name=f"revisions/{revision_of('qwen')}")
        assert answer["content"]["text"] == unit_text("qwen")
        assert answer["content"]["gate"] == {"verdict": "pass"}

    def test_no_gpu_had_a_holder_at_any_start(self, running: Controller) -> None:
        """The ground truth shows no holder on the unit's GPUs at the instant of each start (S1, S2)."""
        running.deploy("other")
        assert [start.holders for start in running.host.host.truth.starts] == [(), ()]

    def test_nothing_foreign_was_overwritten(self, running: Controller) -> None:
        """A rollout of our own units never replaces bytes that we did not produce (S7)."""
        running.deploy("other")
        assert running.host.host.truth.overwritten == []

    def test_every_mutation_is_in_the_journal_and_the_chain_holds(
        self, running: Controller
    ) -> None:
        """Each mutation has a begun and an ended line, each line the hash of the one before (S26)."""
        lines = [json.loads(line) for line in running.read("journal.ndjson").splitlines()]
        previous = ""
        for line in lines:
            digest = line.pop("hash")
            assert line["prev"] == previous
            assert (
                hashlib.sha256(
                    json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
                ).hexdigest()
                == digest
            )
            previous = digest
        assert [x["outcome"] for x in lines].count("begun") * 2 == len(lines)
        assert {x["verb"] for x in lines} >= {
            "claim",
            "record",
            "disarm",
            "install",
            "start",
            "commit",
        }


class TestRecord:
    """The records that the controller keeps on the host."""

    @pytest.mark.parametrize("name", ["attempted", "hold", "intent", f"rejected/{'a' * 64}"])
    def test_a_record_is_written_with_its_version_and_removed(
        self, tester: Controller, name: str
    ) -> None:
        """What is recorded can be read in an observation, and null removes it."""
        tester.done("record", name=name, content={"revision": "a" * 64})
        assert json.loads(tester.read(f"{name}.json"))["version"] == 1
        tester.done("record", name=name, content=None)
        assert tester.read(f"{name}.json") is None

    @pytest.mark.parametrize(
        "name",
        [
            "applied",
            "fence",
            "../fence",
            "rejected/../fence",
            "rejected/xyz",
            "revisions/x/gate",
            "produced",
            "",
            5,
        ],
    )
    def test_other_names_are_refused(self, tester: Controller, name: object) -> None:
        """Nothing but the named records can be written this way (S19)."""
        before = files_of(tester)
        assert tester.refused("record", name=name, content={"x": 1}) == "BadRequest"
        assert files_of(tester) == before

    def test_history_keeps_the_newest_two_hundred(self, tester: Controller) -> None:
        """History is bounded."""
        for number in range(205):
            tester.done("record", name="history", content={"number": number})
        lines = tester.read("history.ndjson").splitlines()
        assert len(lines) == 200
        assert json.loads(lines[-1])["number"] == 204

    def test_changed_bindings_are_refused_without_rebind(self, tester: Controller) -> None:
        """A server's GPUs do not change behind a person's back."""
        other = {"unit": UNIT, "gpus": [tester.host.host.gpus[3].uuid], "gid": 60706}
        assert tester.refused("record", name="bindings", content=other) == "BindingChanged"
        tester.done("record", name="bindings", content=other, rebind=True)

    def test_a_unit_belongs_to_one_server(self, tester: Controller) -> None:
        """Two servers cannot be bound to one unit."""
        second = Controller(tester.host, server="second")
        second.claim()
        content = {"unit": UNIT, "gpus": []}
        assert second.refused("record", name="bindings", content=content) == "UnitBound"

    def test_a_protected_unit_cannot_be_bound(self, tester: Controller) -> None:
        """The host's list of what is never touched holds."""
        host = tester.host.host.files.data["/var/lib/reconciler/host.json"]
        record = json.loads(host)
        record["protect"] = ["dcgm-exporter.service"]
        tester.host.host.files.put("/var/lib/reconciler/host.json", json.dumps(record).encode())
        content = {"unit": "dcgm-exporter.service", "gpus": []}
        assert (
            tester.refused("record", name="bindings", content=content, rebind=True) == "Protected"
        )


class TestDisarm:
    """Nothing starts the unit any more but we, and the old process is remembered."""

    def test_effective_values_are_read_back(self, running: Controller) -> None:
        """Restart=no and our stop timeout are in force, and the process was not touched."""
        before = running.props()
        running.claim(takeover=True)
        data = running.disarm()
        assert data["restart"] == "no"
        assert data["timeout_stop_us"] == 60_000_000
        assert data["invocation"] == before["InvocationID"]
        assert running.props()["MainPID"] == before["MainPID"]

    def test_it_records_whom_a_left_over_can_be_recognised_by(self, running: Controller) -> None:
        """Snapshot and invocation hold pid, start time, user and mount namespace of this boot."""
        running.claim(takeover=True)
        running.disarm()
        snapshot = json.loads(running.read("snapshot.json"))
        run = json.loads(running.read("invocations.json"))["invocations"][-1]
        assert snapshot["boot_id"] == running.host.host.boot_id
        assert [p["pid"] for p in snapshot["processes"]] == [running.props()["MainPID"]]
        assert run["invocation"] == running.props()["InvocationID"]
        assert run["mount_ns"] != 4026531840

    def test_a_start_by_hand_does_not_start_a_disarmed_unit(self, running: Controller) -> None:
        """The flag keeps the unit down, whoever asks systemd to start it."""
        running.claim(takeover=True)
        running.disarm()
        running.done("stop", unit=UNIT, invocation=running.props()["InvocationID"])
        running.host.world.advance(3)
        running.host.systemd.start(UNIT)
        running.host.world.advance(3)
        assert running.props()["ActiveState"] == "inactive"
        assert len(running.host.host.truth.starts) == 1

    def test_an_operators_later_drop_in_wins_and_we_say_so(self, running: Controller) -> None:
        """Where our values do not take effect, disarming is refused and leaves no trace."""
        files = running.host.host.files
        files.put(
            f"/etc/systemd/system/{UNIT}.d/zzz-operator.conf", b"[Service]\nTimeoutStopSec=7s\n"
        )
        running.claim(takeover=True)
        before = files_of(running)
        answer = running.ask("disarm", unit=UNIT, stop_timeout_s=60, deadline_s=600, grace_s=60)
        assert answer["reason"] == "NotEffective"
        assert answer["data"]["timeout_stop_us"] == 7_000_000
        assert files_of(running) == before
        assert running.props()["ActiveState"] == "active"

    def test_twice_is_once(self, running: Controller) -> None:
        """Disarming again, after the stop, keeps what the first time saw (S10)."""
        running.claim(takeover=True)
        running.disarm()
        first = json.loads(running.read("snapshot.json"))["processes"]
        running.done("stop", unit=UNIT, invocation=running.props()["InvocationID"])
        running.host.world.advance(3)
        running.disarm()
        assert json.loads(running.read("snapshot.json"))["processes"] == first
        assert json.loads(running.read("deadline.json"))["was_up"] is True

    def test_a_masked_unit_is_somebodys_decision(self, tester: Controller) -> None:
        """A masked unit is refused (F63)."""
        tester.host.host.files.link(PERMANENT, "/dev/null")
        tester.host.systemd.reload()
        answer = tester.refused("disarm", unit=UNIT, stop_timeout_s=60, deadline_s=600, grace_s=60)
        assert answer == "MaskedUnit"

    def test_only_the_bound_unit_can_be_acted_on(self, tester: Controller) -> None:
        """A request for another unit is refused, whatever it names (S19)."""
        for unit, reason in (
            ("sshd.service", "BindingChanged"),
            ("../x.service", "BadRequest"),
            ("reconciler-tick.service", "BadRequest"),
        ):
            assert tester.refused("stop", unit=unit, invocation=None) == reason


class TestStopAndSignal:
    """What ends processes, and what it refuses to end."""

    def test_stop_does_not_wait(self, running: Controller) -> None:
        """The verb queues the stop; the unit is down a little later."""
        running.claim(takeover=True)
        running.done("stop", unit=UNIT, invocation=running.props()["InvocationID"])
        assert running.props()["ActiveState"] == "deactivating"
        running.host.world.advance(2)
        assert running.props()["ActiveState"] == "inactive"
        assert running.done("stop", unit=UNIT, invocation=None) == {"stopping": False}

    def test_another_invocation_is_not_stopped(self, running: Controller) -> None:
        """A server that was restarted since it was looked at is left alone (F52, F74)."""
        running.claim(takeover=True)
        assert running.refused("stop", unit=UNIT, invocation="0" * 32) == "InvocationChanged"
        assert running.props()["ActiveState"] == "active"

    def test_only_proven_left_overs_are_signalled(self) -> None:
        """An escaped worker with our marks is ended; a stranger on the same GPU is not (S3)."""
        tester = new_controller()
        tester.host.host.behave("qwen", Behaviour(escapes=True, child_ignores_term=True))
        tester.deploy("qwen")
        stranger = tester.host.host.add_process(gpus=(0,), mib=100)
        tester.claim(takeover=True)
        tester.disarm()
        tester.done("stop", unit=UNIT, invocation=tester.props()["InvocationID"])
        tester.host.world.advance(3)
        holders = tester.host.machine().holders()["known"]["holders"]
        targets = [{"pid": h["pid"], "start_ticks": h["start_ticks"]} for h in holders]
        assert len(targets) == 2
        results = {
            r["pid"]: r["result"]
            for r in tester.done("signal", unit=UNIT, signal="KILL", group=False, targets=targets)[
                "results"
            ]
        }
        assert results.pop(stranger.pid).startswith("refused: foreign")
        assert list(results.values()) == ["sent"]
        tester.host.world.advance(1)
        assert stranger.alive
        assert [h.pid for h in tester.host.host.holders_of(0)] == [stranger.pid]

    def test_a_reused_pid_is_no_target(self, tester: Controller) -> None:
        """Pid and start time identify a process together (F57)."""
        process = tester.host.host.add_process(gpus=(0,))
        targets = [{"pid": process.pid, "start_ticks": process.start_ticks + 1}]
        data = tester.done("signal", unit=UNIT, signal="TERM", group=False, targets=targets)
        assert data["results"] == [{"pid": process.pid, "result": "gone"}]
        assert tester.host.host.truth.signals == []

    def test_a_running_servers_processes_are_no_left_overs(self, running: Controller) -> None:
        """While the unit runs nothing of it is signalled."""
        running.claim(takeover=True)
        assert (
            running.refused("signal", unit=UNIT, signal="KILL", group=True, targets=[])
            == "UnitActive"
        )

    def test_a_left_over_in_the_group_is_killed_as_a_group(self) -> None:
        """With the unit down, what is left in its control group is the server's own."""
        tester = new_controller()
        tester.host.host.behave("qwen", Behaviour(leaves_child=True))
        tester.deploy("qwen")
        tester.host.host.files.put(
            f"/etc/systemd/system/{UNIT}.d/10-kill.conf", b"[Service]\nKillMode=process\n"
        )
        tester.claim(takeover=True)
        tester.disarm()
        tester.done("stop", unit=UNIT, invocation=tester.props()["InvocationID"])
        tester.host.world.advance(3)
        assert tester.host.host.holders_of(0)
        data = tester.done("signal", unit=UNIT, signal="KILL", group=True, targets=[])
        assert data["group"] == "sent"
        tester.host.world.advance(1)
        assert not tester.host.host.holders_of(0)


class TestInstall:
    """A unit is put in place only if systemd will run exactly what was rendered."""

    def test_a_trial_outranks_the_permanent_unit(self, running: Controller) -> None:
        """The trial is what systemd loads, and the permanent file is untouched."""
        running.claim(takeover=True)
        assert running.done("install", **running.install_args("other")) == {"fragment": TRIAL}
        assert running.props()["FragmentPath"] == TRIAL
        assert running.host.host.files.data[PERMANENT] == unit_text("qwen").encode()

    def test_a_foreign_file_is_not_overwritten(self, tester: Controller) -> None:
        """Bytes that we did not write are refused with their digest (S7)."""
        digest = adopted(tester, "[Service]\nExecStart=/bin/theirs\n")
        answer = tester.ask("install", **tester.install_args(place="permanent"))
        assert (answer["reason"], answer["data"]["sha"]) == ("NotOurs", digest)

    def test_a_foreign_file_that_a_person_named_is_saved_first(self, tester: Controller) -> None:
        """With its digest the file is replaced, and its bytes can be read back (S7)."""
        text = "[Service]\nExecStart=/bin/theirs\n"
        digest = adopted(tester, text)
        tester.done("install", **tester.install_args(place="permanent", saved_sha=digest))
        content = tester.done("read-record", server="qwen", name="original")["content"]
        assert content["text"] == text

    def test_a_symbolic_link_is_not_written_through(self, tester: Controller) -> None:
        """A linked unit file is refused (S19)."""
        tester.host.host.files.put("/opt/unit", b"[Service]\nExecStart=/bin/x\n")
        tester.host.host.files.link(PERMANENT, "/opt/unit")
        tester.host.systemd.reload()
        assert tester.refused("install", **tester.install_args()) == "SymlinkedUnit"

    def test_a_packages_unit_is_refused(self, tester: Controller) -> None:
        """What a package installed is not ours to shadow (F63)."""
        tester.host.host.files.put(
            f"/usr/lib/systemd/system/{UNIT}", b"[Service]\nExecStart=/bin/x\n"
        )
        tester.host.systemd.reload()
        assert tester.refused("install", **tester.install_args()) == "PackagedUnit"

    def test_an_operators_drop_in_that_changes_the_command_is_found(
        self, tester: Controller
    ) -> None:
        """When systemd would run something else, all is put back and the difference is said (S24)."""
        tester.host.host.files.put(
            f"/etc/systemd/system/{UNIT}.d/x.conf", b"[Service]\nExecStart=\nExecStart=/bin/other\n"
        )
        before = files_of(tester)
        answer = tester.ask("install", **tester.install_args())
        assert answer["reason"] == "EffectiveDiffers"
        assert answer["data"]["argv"] == ["/bin/other"]
        assert files_of(tester) == before

    def test_a_literal_dollar_is_expected_doubled(self, tester: Controller) -> None:
        """Systemd keeps `$$` in what it has loaded; a single dollar there would be a variable (S18)."""
        text = unit_text().replace('"--port"', '"a$$b" "--port"')
        argv = [*ARGV[:-2], "a$b", *ARGV[-2:]]
        tester.done("install", **tester.install_args(text=text, argv=argv))
        wrong = tester.install_args(text=text.replace("$$", "$"), argv=argv)
        assert tester.refused("install", **wrong) == "EffectiveDiffers"

    def test_a_full_disk_leaves_everything_as_it_was(self, running: Controller) -> None:
        """A write that fails in the middle is undone to the byte (F61)."""
        running.claim(takeover=True)
        before = files_of(running)
        running.host.host.files.full.append("/run/systemd")
        answer = running.ask("install", **running.install_args("other"))
        assert answer["outcome"] == "failed"
        assert "the disk is full" in answer["message"]
        running.host.host.files.full.clear()
        assert files_of(running) == before

    def test_a_failed_reload_leaves_everything_as_it_was(self, tester: Controller) -> None:
        """When systemd cannot be told, the file is taken away again (F50)."""
        before = files_of(tester)
        tester.host.systemd.reload_fails = True
        answer = tester.ask("install", **tester.install_args())
        assert answer["outcome"] == "failed"
        assert files_of(tester) == before

    def test_twice_is_once(self, tester: Controller) -> None:
        """Installing again changes no byte (S10)."""
        tester.done("install", **tester.install_args())
        before = files_of(tester)
        tester.done("install", **tester.install_args())
        assert files_of(tester) == before

    @pytest.mark.parametrize(
        "change",
        [
            {"revision": "abc"},
            {"revision": "../" + "a" * 61},
            {"place": "elsewhere"},
            {"text": "x\0y"},
            {"text": 5},
            {"argv": "not a list"},
            {"saved_sha": "short"},
            {"server_json": None},
            {"secrets": [{"form": "env", "entries": {"A B": "/etc/reconciler/x"}, "user": None}]},
            {
                "secrets": [
                    {"form": "env", "entries": {"A": "/etc/reconciler/../shadow"}, "user": None}
                ]
            },
        ],
    )
    def test_what_breaks_the_grammar_is_refused(
        self, tester: Controller, change: dict[str, object]
    ) -> None:
        """The helper trusts no argument (S19)."""
        before = files_of(tester)
        assert tester.refused("install", **tester.install_args(**change)) == "BadRequest"
        assert files_of(tester) == before


class TestSecrets:
    """Secrets are made on the host from files on the host."""

    def test_values_are_quoted_for_systemd_and_appear_in_no_answer(
        self, tester: Controller
    ) -> None:
        """The environment file has the escaped value, root's alone; no answer or journal has it (S17)."""
        value = 'can"ary$x`y\\z'
        tester.host.host.files.put("/etc/reconciler/token", f"{value}\n".encode())
        secrets = [{"form": "env", "entries": {"HF_TOKEN": "/etc/reconciler/token"}, "user": None}]
        answer = tester.ask("install", **tester.install_args(secrets=secrets))
        path = "/var/lib/reconciler/qwen/secrets.env"
        assert tester.host.host.files.data[path] == b'HF_TOKEN="can\\"ary\\$x\\`y\\\\z"\n'
        assert tester.host.host.files.meta[path][0] == 0o600
        assert "canary" not in json.dumps(answer).replace('\\"', "").replace('"', "")
        assert b"ary$x" not in tester.read("journal.ndjson")

    def test_a_root_file_outside_the_operators_places_is_refused(self, tester: Controller) -> None:
        """The repository cannot have root read any file it names."""
        tester.host.host.files.put("/etc/shadow", b"root:x\n")
        secrets = [{"form": "env", "entries": {"X": "/etc/shadow"}, "user": "sglang"}]
        assert tester.refused("install", **tester.install_args(secrets=secrets)) == "SecretPlace"

    def test_a_file_of_the_servers_own_user_is_fine(self, tester: Controller) -> None:
        """What the server's user can read anyway may be its secret; YAML goes to that user."""
        tester.host.host.files.put("/home/sglang/key", b"abc\n")
        tester.host.host.files.meta["/home/sglang/key"] = (0o600, 990, 990)
        secrets = [{"form": "yaml", "entries": {"api-key": "/home/sglang/key"}, "user": "sglang"}]
        tester.done("install", **tester.install_args(secrets=secrets))
        path = "/var/lib/reconciler/qwen/secrets.yaml"
        assert tester.host.host.files.data[path] == b'api-key: "abc"\n'
        assert tester.host.host.files.meta[path] == (0o600, 990, 990)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(None, "SecretMissing"), (b"", "SecretUnusable"), (b"a\nb\n", "SecretUnusable")],
    )
    def test_a_missing_or_odd_secret_is_refused(
        self, tester: Controller, content: bytes | None, reason: str
    ) -> None:
        """Nothing is installed with half of its secrets."""
        if content is not None:
            tester.host.host.files.put("/etc/reconciler/token", content)
        secrets = [{"form": "env", "entries": {"T": "/etc/reconciler/token"}, "user": None}]
        assert tester.refused("install", **tester.install_args(secrets=secrets)) == reason
        assert TRIAL not in tester.host.host.files.data


class TestStart:
    """A start is queued once, and only on free GPUs."""

    def test_a_start_that_is_repeated_starts_once(self, tester: Controller) -> None:
        """With the server up under a new invocation, a second start does nothing (S10)."""
        tester.done("install", **tester.install_args())
        assert tester.start()["started"] is True
        assert tester.start()["started"] is False
        assert len(tester.host.host.truth.starts) == 1

    def test_the_previous_process_must_be_gone(self, running: Controller) -> None:
        """A start over the process that should have been stopped is refused."""
        running.claim(takeover=True)
        previous = running.props()["InvocationID"]
        assert running.refused("start", unit=UNIT, previous_invocation=previous) == "StillActive"

    def test_a_unit_without_our_guard_is_guarded_inline(self, tester: Controller) -> None:
        """An adopted unit does not require the guard; the start itself checks the GPUs then."""
        text = unit_text(guard=False)
        tester.done("install", **tester.install_args(text=text))
        tester.host.host.add_process(gpus=(0,), mib=500)
        answer = tester.ask("start", unit=UNIT, previous_invocation=None)
        assert (answer["reason"], answer["data"]["why"]) == ("GuardRefused", "GpuHeld")
        assert tester.host.host.truth.starts == []

    def test_a_refused_start_leaves_the_unit_disarmed(self, tester: Controller) -> None:
        """The flag is put back when the guard refuses inline: nobody else may start it meanwhile."""
        tester.done("install", **tester.install_args(text=unit_text(guard=False)))
        tester.disarm()
        tester.host.host.add_process(gpus=(0,), mib=500)
        tester.refused("start", unit=UNIT, previous_invocation=None)
        assert FLAG in tester.host.host.files.data

    def test_a_failed_unit_is_reset_once(self, tester: Controller) -> None:
        """A unit at its start limit is started after its failed state was cleared (F54)."""
        tester.host.host.behave("qwen", Behaviour(crash_at_s=0.1))
        tester.done("install", **tester.install_args())
        tester.disarm()
        tester.start()
        assert tester.props()["ActiveState"] == "failed"
        tester.start(tester.props()["InvocationID"])
        assert len(tester.host.host.truth.starts) == 2


class TestCommit:
    """One transaction: what runs becomes the applied revision, or nothing changed."""

    @pytest.fixture
    def trial(self, running: Controller) -> Controller:
        """Return a controller whose next revision runs as a trial."""
        running.claim(takeover=True)
        old = running.props()["InvocationID"]
        running.disarm()
        running.done("stop", unit=UNIT, invocation=old)
        running.host.world.advance(3)
        running.done("install", **running.install_args("other"))
        running.start(old)
        return running

    def test_a_process_that_was_restarted_is_not_committed(self, trial: Controller) -> None:
        """Only the invocation that passed its gate becomes applied (S4, F67)."""
        before = files_of(trial)
        assert (
            trial.refused("commit", **trial.commit_args("other", invocation="0" * 32))
            == "InvocationChanged"
        )
        assert files_of(trial) == before

    def test_other_bytes_than_those_that_run_are_not_committed(self, trial: Controller) -> None:
        """The text to keep is the text that the process was started from (S24)."""
        assert (
            trial.refused("commit", **trial.commit_args("other", text=unit_text("third")))
            == "EffectiveDiffers"
        )

    def test_a_disk_that_fills_in_the_middle_leaves_the_old_applied(
        self, trial: Controller
    ) -> None:
        """Old or new, never half (F04, F61)."""
        before = files_of(trial)
        host = trial.host.host

        def fill(effect: object) -> None:
            if (
                getattr(effect, "detail", "").endswith("applied.json")
                and getattr(effect, "stage", "") == "before"
            ):
                raise OSError(28, "No space left on device")

        trial.host.world.on_effect(fill)
        answer = trial.ask("commit", **trial.commit_args("other"))
        assert answer["outcome"] == "failed"
        assert files_of(trial) == before
        assert host.files.data[PERMANENT] == unit_text("qwen").encode()

    def test_twice_is_once(self, trial: Controller) -> None:
        """A commit whose reply was lost can be repeated, and moves nothing (S10)."""
        args = trial.commit_args("other")
        trial.done("commit", **args)
        first = json.loads(trial.read("applied.json"))
        trial.done("commit", **args)
        again = json.loads(trial.read("applied.json"))
        assert {**again, "at": 0} == {**first, "at": 0}
        assert trial.props()["FragmentPath"] == PERMANENT

    def test_a_foreign_permanent_unit_is_not_replaced(self) -> None:
        """The rule of install holds for the permanent place at the commit as well (S7)."""
        tester = new_controller()
        tester.claim()
        tester.bind()
        text = "[Service]\nExecStart=/bin/theirs\n"
        digest = adopted(tester, text)
        tester.done("install", **tester.install_args())
        tester.start()
        assert tester.refused("commit", **tester.commit_args()) == "NotOurs"
        tester.done("commit", **tester.commit_args(saved_sha=digest))
        assert tester.read("original/unit.service") == text.encode()


class TestSettleRemoveDeadline:
    """The smaller ends."""

    def test_settle_leaves_a_stopped_server_that_nothing_starts(self, running: Controller) -> None:
        """`state: stopped` keeps the content, disables the unit and clears the rollout."""
        running.claim(takeover=True)
        running.disarm()
        running.done("stop", unit=UNIT, invocation=running.props()["InvocationID"])
        running.host.world.advance(3)
        running.done("settle", unit=UNIT, what="stopped")
        assert running.props()["UnitFileState"] == "disabled"
        assert PERMANENT in running.host.host.files.data
        assert running.read("deadline.json") is None
        running.host.reboot()
        running.host.world.advance(120)
        assert running.props()["ActiveState"] == "inactive"

    def test_settle_refuses_a_running_unit(self, running: Controller) -> None:
        """Nothing is called stopped that runs."""
        running.claim(takeover=True)
        assert running.refused("settle", unit=UNIT, what="stopped") == "UnitActive"

    def test_remove_takes_only_our_bytes(self, tester: Controller) -> None:
        """A file that somebody else wrote stays (S7)."""
        adopted(tester, "[Service]\nExecStart=/bin/theirs\n")
        assert tester.refused("remove", unit=UNIT, what=["permanent"]) == "NotOurs"
        assert PERMANENT in tester.host.host.files.data

    def test_a_drop_in_is_moved_aside_by_its_bytes_and_nothing_else_is(
        self, tester: Controller
    ) -> None:
        """S7: only a plain file of this unit's own folder, with the bytes that were seen; they are kept; a repeat is fine."""
        tester.deploy("qwen")
        tester.claim(takeover=True)
        files = tester.host.host.files
        text = b"[Service]\nMemoryMax=1G\n"
        path = f"{PERMANENT}.d/10-mine.conf"
        elsewhere = "/usr/lib/systemd/system/other.service.d/10-mine.conf"
        for place in (path, elsewhere):
            files.put(place, text)
        sha = hashlib.sha256(text).hexdigest()

        def asked(place: str, digest: str = sha) -> dict[str, object]:
            return {"unit": UNIT, "drop_ins": [{"path": place, "sha": digest}]}

        assert tester.refused("set-aside", **asked(path, "0" * 64)) == "NotOurs"
        assert tester.refused("set-aside", **asked(elsewhere)) == "NotOurs"
        assert tester.refused("set-aside", **asked(f"{PERMANENT}.d/../x.conf")) == "NotOurs"
        assert tester.refused("set-aside", **asked(f"{PERMANENT}.d/.conf")) == "BadRequest"
        assert files.data[path] == files.data[elsewhere] == text
        kept = tester.done("set-aside", **asked(path))["kept"]
        assert files.data[kept[path]] == text
        assert path not in files.data
        assert tester.done("set-aside", **asked(path))["kept"] == {}
        assert files.data[kept[path]] == text

    def test_disarming_can_be_taken_back(self, running: Controller) -> None:
        """Drop-in and flag away, and the unit restarts by itself as before."""
        running.claim(takeover=True)
        running.disarm()
        running.done("remove", unit=UNIT, what=["disarm", "flag"])
        running.done("deadline", after_s=None, grace_s=0)
        assert running.props()["Restart"] == "on-failure"
        assert running.read("deadline.json") is None

    def test_a_deadline_can_be_set(self, tester: Controller) -> None:
        """The deadline is in the host's own boot clock."""
        due = tester.done("deadline", after_s=100, grace_s=10)["due_boottime"]
        assert json.loads(tester.read("deadline.json"))["due_boottime"] == pytest.approx(due)


class TestReading:
    """The verbs that change nothing."""

    def test_observe_tells_what_a_rollout_needs(self, running: Controller) -> None:
        """Each section is there and known."""
        args = {
            "servers": [{"server": "qwen", "unit": UNIT, "port": 30000, "invocation_lines": 10}],
            "kernel_cursor": None,
            "paths": ["/etc/passwd"],
            "users": ["sglang", "nobody"],
            "gpus": True,
        }
        data = running.done("observe", **args)
        for name in (
            "identity",
            "installed",
            "gpus",
            "apps",
            "holders",
            "baselines",
            "kernel",
            "host",
            "disk",
        ):
            assert "known" in data[name], name
        server = data["servers"]["qwen"]
        assert server["unit"]["known"]["ActiveState"] == "active"
        assert server["command"]["known"]["argv"] == argv_for("qwen")
        assert server["permanent"]["known"]["text"] == unit_text("qwen")
        assert server["trial"] == {"known": None}
        assert server["listeners"]["known"][0]["units"] == [UNIT]
        assert server["records"]["known"]["applied"]["revision"] == revision_of("qwen")
        assert server["journal"]["known"][-1]["message"] == f"Started {UNIT}."

    def test_observing_changes_nothing(self, running: Controller) -> None:
        """A dry run is an observation, and writes not a byte (S20)."""
        before = dict(running.host.host.files.data)
        running.done(
            "observe",
            servers=[{"server": "qwen", "unit": UNIT, "port": None, "invocation_lines": 0}],
            gpus=True,
        )
        assert running.host.host.files.data == before

    def test_flags_are_looked_for_as_words(self, tester: Controller) -> None:
        """`--tp` is not known because `--tp-size` is."""
        tester.host.host.programs["/opt/x/bin/python -m sglang.launch_server"] = (
            "usage: [--tp-size N] [--port PORT]"
        )
        data = tester.done(
            "check-flags",
            user="sglang",
            argv=["/opt/x/bin/python", "-m", "sglang.launch_server"],
            flags=["--tp", "--port"],
        )
        assert data == {"known": {"known": ["--port"]}, "unknown": ["--tp"]}

    def test_flags_that_the_short_help_leaves_out_are_found_in_the_long_one(
        self, tester: Controller
    ) -> None:
        """A program that hides most flags behind --help=all still knows them, and only them."""
        serve = "/opt/x/bin/python -m vllm.entrypoints.cli.main serve"
        tester.host.host.programs[serve] = "usage: [--headless]"
        tester.host.host.programs[f"{serve} --help=all"] = "usage: [--headless] [--port PORT]"
        data = tester.done(
            "check-flags", user=None, argv=serve.split(), flags=["--port", "--headless", "--gone"]
        )
        assert data == {"known": {"known": ["--port", "--headless"]}, "unknown": ["--gone"]}

    @pytest.mark.parametrize(
        "asked",
        [
            {"environment": {"names": ["A=B"]}},
            {"environment": {"starts": ["x y"]}},
            {"environment": ["A"]},
            {"environment": {"names": [f"N{i}" for i in range(300)]}},
            {"startup": ["short"]},
            {"startup": ["non-default args"] * 4},
        ],
    )
    def test_what_is_asked_of_a_process_is_checked(
        self, running: Controller, asked: dict[str, Any]
    ) -> None:
        """Names are names, phrases are a few and no single letters: no way to read a whole environment or journal (S18)."""
        server = {"server": "qwen", "unit": "qwen.service", "port": 30000, **asked}
        assert running.refused("observe", servers=[server], kernel_cursor=None, paths=[], users=[]) == "BadRequest"  # fmt: skip

    def test_a_flag_that_the_help_calls_removed_is_not_known(self, tester: Controller) -> None:
        """llama-server lists flags that it refuses; the help's line about them is no word for them."""
        tester.host.host.programs["/opt/llama-server"] = (
            "--spec-draft-n-max N     number of tokens to draft\n"
            "--draft, --draft-max N   the argument has been removed. use --spec-draft-n-max or\n"
        )
        flags = ["--spec-draft-n-max", "--draft-max"]
        data = tester.done("check-flags", user=None, argv=["/opt/llama-server"], flags=flags)
        assert data == {"known": {"known": ["--spec-draft-n-max"]}, "unknown": ["--draft-max"]}

    def test_flags_of_a_program_that_does_not_run_are_unknown(self, tester: Controller) -> None:
        """No help is no answer, never "knows none" (S12)."""
        data = tester.done("check-flags", user=None, argv=["/opt/none"], flags=["--x"])
        assert "unknown" in data["known"]

    @pytest.mark.parametrize(
        "argv", [["relative"], ["/bin/sh", "-c", "id; rm"], ["/bin/sh", "--x"], []]
    )
    def test_no_other_command_can_be_run(self, tester: Controller, argv: list[str]) -> None:
        """check-flags is no way to run anything (S18)."""
        assert tester.refused("check-flags", user=None, argv=argv, flags=[]) == "BadRequest"

    def test_a_server_that_loads_says_503(self, tester: Controller) -> None:
        """Fetch gives the reading of one local request."""
        tester.done("install", **tester.install_args())
        request = {
            "method": "GET",
            "address": "127.0.0.1",
            "port": 30000,
            "path": "/health",
            "headers": {},
            "body": None,
            "timeout_s": 5,
            "max_bytes": 1000,
            "bearer_file": None,
        }
        assert tester.done("fetch", **request) == {"unknown": "connection refused"}
        tester.done("start", unit=UNIT, previous_invocation=None)
        tester.host.world.advance(3)
        assert tester.done("fetch", **request)["known"]["status"] == 503
        tester.host.world.advance(5)
        assert tester.done("fetch", **request)["known"]["status"] == 200


class TestLearn:
    """Baselines are learned from cards that nobody holds."""

    def test_only_an_idle_card_is_learned(self) -> None:
        """A held card is left out, and learned once it is free."""
        tester = new_controller()
        tester.host.host.files.drop("/var/lib/reconciler/baselines.json")
        tester.claim()
        tester.bind()
        holder = tester.host.host.add_process(gpus=(0,), mib=3)
        uuids = [gpu.uuid for gpu in tester.host.host.gpus]
        assert sorted(tester.done("learn")["baselines"]) == [uuids[1]]
        tester.host.host.end(holder)
        assert sorted(tester.done("learn")["baselines"]) == uuids[:2]

    def test_a_known_baseline_is_not_raised(self, tester: Controller) -> None:
        """A leak does not become the new idle."""
        tester.host.host.gpus[0].leak_mib = 300
        uuid = tester.host.host.gpus[0].uuid
        assert tester.done("learn")["baselines"][uuid]["used_mib"] == 4


def test_a_simulated_world_is_the_same_for_the_same_seed() -> None:
    """Two runs of one seed end with the same bytes, so that any run can be replayed."""
    ends = []
    for _ in range(2):
        controller = Controller(add_host(World(7), "one"))
        controller.deploy("qwen")
        controller.deploy("other")
        ends.append(dict(controller.host.host.files.data))
    assert ends[0] == ends[1]

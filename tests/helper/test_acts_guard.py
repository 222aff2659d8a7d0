"""The guard at each start, and the host's own way back when a rollout is left behind."""

from __future__ import annotations

import json

import pytest
from simulated_controller import UNIT, Controller, new_controller, revision_of, unit_text

from reconciler.core.errors import OutcomeUnknownError
from reconciler.lab.simulated import Behaviour
from reconciler.lab.world import Effect

PERMANENT = f"/etc/systemd/system/{UNIT}"
TRIAL = f"/run/systemd/system.control/{UNIT}"


@pytest.fixture
def running() -> Controller:
    """Return a controller whose server runs an applied revision."""
    controller = new_controller()
    controller.deploy("qwen")
    controller.done("claim", holder="tester", ttl_s=0, takeover=False)
    return controller


@pytest.fixture
def installed() -> Controller:
    """Return a controller whose first revision is installed as a trial, and not started."""
    controller = new_controller()
    controller.claim()
    controller.bind()
    controller.done("install", **controller.install_args())
    return controller


def guard_of(controller: Controller) -> dict[str, object]:
    """Return the guard's last record."""
    record: dict[str, object] = json.loads(controller.read("guard.json"))
    return record


def history(controller: Controller) -> list[dict[str, object]]:
    """Return the finished rollouts."""
    return [json.loads(line) for line in (controller.read("history.ndjson") or b"").splitlines()]


def start_trial(controller: Controller, model: str = "other") -> None:
    """Bring the next revision up as a trial and leave it there."""
    controller.claim(60, takeover=True)
    controller.done("record", name="attempted", content={"revision": revision_of(model)})
    old = controller.props()["InvocationID"]
    controller.disarm(deadline_s=120)
    controller.done("stop", unit=UNIT, invocation=old)
    controller.host.world.advance(3)
    intent = {"state": {}, "revision": revision_of(model)}
    controller.done("install", intent=intent, **controller.install_args(model))
    controller.start(old)
    controller.host.world.advance(6)


class TestGuard:
    """One GPU, one server, at every start (S1, S2)."""

    def test_free_gpus_are_claimed(self, installed: Controller) -> None:
        """A start on free GPUs is allowed, and each GPU has its claim."""
        installed.start()
        assert installed.props()["ActiveState"] == "active"
        assert guard_of(installed)["outcome"] == "allowed"
        assert len(installed.host.host.files.names("/run/reconciler/gpu")) == 2

    @pytest.mark.parametrize("mib", [0, 500])
    def test_a_foreign_holder_refuses(self, installed: Controller, mib: int) -> None:
        """A process that has the device open is a holder, also without memory (F59)."""
        installed.host.host.add_process(gpus=(1,), mib=mib)
        installed.start()
        assert installed.props()["ActiveState"] == "inactive"
        assert installed.host.host.truth.starts == []
        assert "foreign" in str(guard_of(installed)["reason"])

    def test_a_holder_of_another_gpu_does_not_matter(self, installed: Controller) -> None:
        """Holders count by device number: a neighbour on GPU 3 is none of ours."""
        installed.host.host.add_process(gpus=(3,), mib=500)
        installed.start()
        assert installed.props()["ActiveState"] == "active"

    def test_memory_that_nobody_holds_refuses(self, installed: Controller) -> None:
        """Memory above the learned baseline is not free, whoever has it."""
        installed.host.host.gpus[0].leak_mib = 3000
        installed.start()
        assert "still holds" in str(guard_of(installed)["reason"])
        assert installed.host.host.truth.starts == []

    @pytest.mark.parametrize("fault", ["gpu_fault", "holders_fault", "apps_fault"])
    def test_a_reading_that_is_unknown_refuses(self, installed: Controller, fault: str) -> None:
        """Unknown is never free (S12, F60)."""
        setattr(installed.host.host, fault, "timed out")
        installed.start()
        assert installed.props()["ActiveState"] == "inactive"
        assert installed.host.host.truth.starts == []

    def test_a_gpu_that_is_gone_refuses(self, installed: Controller) -> None:
        """A bound GPU must be there."""
        installed.host.host.gpus[1].lost = True
        installed.start()
        assert "is not there" in str(guard_of(installed)["reason"])

    def test_left_overs_of_the_same_unit_refuse(self) -> None:
        """A worker that escaped an earlier run holds the GPU against the next (S1)."""
        tester = new_controller()
        tester.host.host.behave("qwen", Behaviour(escapes=True))
        tester.deploy("qwen")
        old = tester.props()["InvocationID"]
        tester.claim(takeover=True)
        tester.disarm()
        tester.done("stop", unit=UNIT, invocation=old)
        tester.host.world.advance(3)
        tester.start(old)
        assert tester.props()["ActiveState"] == "inactive"
        assert "owned" in str(guard_of(tester)["reason"])
        assert len(tester.host.host.truth.starts) == 1

    def test_systemds_own_restart_is_guarded(self) -> None:
        """A server that dies and leaves a worker behind is not restarted onto it (F53)."""
        tester = new_controller()
        tester.host.host.behave("qwen", Behaviour(escapes=True, crash_at_s=20))
        tester.deploy("qwen")
        tester.host.world.advance(40)
        assert len(tester.host.host.truth.starts) == 1
        assert tester.props()["ActiveState"] == "inactive"
        assert guard_of(tester)["outcome"] == "refused"

    def test_two_units_that_start_together_do_not_share_a_gpu(self, installed: Controller) -> None:
        """An engine opens its device a second after its start; the claim speaks for it until then."""
        second = Controller(installed.host, server="second", holder="two")
        second.claim()
        gpus = [installed.host.host.gpus[1].uuid]
        second.done("record", name="bindings", content={"unit": "second.service", "gpus": gpus})
        text = unit_text().replace("reconciler-guard@qwen", "reconciler-guard@second")
        installed.host.host.files.put("/etc/systemd/system/second.service", text.encode())
        installed.done("start", unit=UNIT, previous_invocation=None)
        installed.host.systemd.start("second.service")
        installed.host.world.advance(5)
        assert [s.unit for s in installed.host.host.truth.starts] == [UNIT]
        installed.done("stop", unit=UNIT, invocation=installed.props()["InvocationID"])
        installed.host.world.advance(3)
        installed.host.systemd.start("second.service")
        installed.host.world.advance(3)
        assert [s.unit for s in installed.host.host.truth.starts] == [UNIT, "second.service"]

    def test_a_unit_that_no_server_is_bound_to_is_refused(self, installed: Controller) -> None:
        """Whose GPUs are not known cannot be proven free."""
        assert installed.host.run_guard("stranger") == 1
        assert installed.host.run_guard("../x") == 1

    def test_a_disarmed_unit_is_refused(self, installed: Controller) -> None:
        """During a rollout only the controller's own start gets through."""
        installed.disarm()
        assert installed.host.run_guard("qwen") == 1
        assert "disarmed" in str(guard_of(installed)["reason"])

    def test_an_unproven_revision_does_not_start_after_a_reboot(self, running: Controller) -> None:
        """A commit that the power cut in the middle has no applied record: its bytes are not started (F04, F49)."""
        start_trial(running)

        def cut(effect: Effect) -> None:
            if effect.detail.endswith("applied.json") and effect.stage == "before":
                running.host.reboot()

        running.host.world.on_effect(cut)
        with pytest.raises(OutcomeUnknownError):
            running.ask("commit", **running.commit_args("other"))
        running.host.world.watchers.clear()
        assert running.host.host.files.data[PERMANENT] == unit_text("other").encode()
        running.host.world.advance(40)
        assert running.props()["ActiveState"] == "inactive"
        assert "reboot" in str(guard_of(running)["reason"])
        running.host.world.advance(120)
        assert running.host.host.files.data[PERMANENT] == unit_text("qwen").encode()
        assert running.props()["ActiveState"] == "active"
        assert running.host.host.truth.starts[-1].text == unit_text("qwen").encode()


class TestRetry:
    """A start that the guard refused is tried again by the tick."""

    def test_the_server_comes_back_when_the_cause_has_gone(self, running: Controller) -> None:
        """Blocked is left by itself (L9)."""
        host = running.host.host
        running.host.reboot()
        stranger = host.add_process(gpus=(0,), mib=500)
        running.host.world.advance(120)
        assert running.props()["ActiveState"] == "inactive"
        assert host.processes[stranger.pid].alive
        host.end(stranger)
        running.host.world.advance(16)
        assert running.props()["ActiveState"] == "active"

    def test_a_server_that_a_person_stopped_stays_down(self, running: Controller) -> None:
        """The tick starts only what the guard had refused (F74)."""
        running.host.systemd.stop(UNIT)
        running.host.world.advance(120)
        assert running.props()["ActiveState"] == "inactive"

    def test_a_rollout_that_failed_both_ways_leaves_a_server_that_comes_back(
        self, running: Controller
    ) -> None:
        """Stopped, its GPU held by somebody, undone: down until the GPU is free, then up again, once (L9)."""
        host = running.host.host
        running.claim(takeover=True)
        running.disarm()
        running.done("stop", unit=UNIT, invocation=running.props()["InvocationID"])
        running.host.world.advance(3)
        stranger = host.add_process(gpus=(0,), mib=500)
        running.done("settle", unit=UNIT, what="undone")
        running.done("claim", holder="tester", ttl_s=0, takeover=False)
        running.host.world.advance(200)
        assert running.props()["ActiveState"] == "inactive"
        host.end(stranger)
        running.host.world.advance(100)
        assert running.props()["ActiveState"] == "active"
        running.host.systemd.stop(UNIT)
        running.host.world.advance(120)
        assert running.props()["ActiveState"] == "inactive"

    @pytest.mark.parametrize("record", ["hold", "intent"])
    def test_a_hold_or_a_rollout_keeps_the_tick_away(
        self, running: Controller, record: str
    ) -> None:
        """Where a person or a controller has the say, the tick has none (S6)."""
        host = running.host.host
        content = {"version": 1, "revision": "x", "boot_id": host.boot_id}
        host.files.put(f"/var/lib/reconciler/qwen/{record}.json", json.dumps(content).encode())
        running.host.reboot()
        stranger = host.add_process(gpus=(0,))
        running.host.world.advance(60)
        host.end(stranger)
        running.host.world.advance(120)
        assert running.props()["ActiveState"] == "inactive"


class TestRevert:
    """No controller, no network, no power: the host still comes back."""

    def test_a_due_deadline_returns_the_last_good_revision(self, running: Controller) -> None:
        """The trial is stopped, the permanent unit runs, and it is said (L2, L3)."""
        start_trial(running)
        assert running.host.host.truth.starts[-1].text == unit_text("other").encode()
        running.host.world.advance(400)
        assert running.props()["ActiveState"] == "active"
        assert running.props()["FragmentPath"] == PERMANENT
        assert running.host.host.truth.starts[-1].text == unit_text("qwen").encode()
        assert [s.holders for s in running.host.host.truth.starts] == [(), (), ()]
        line = history(running)[-1]
        assert (line["outcome"], line["by"]) == ("RolledBack", "host-revert")
        assert running.read(f"rejected/{revision_of('other')}.json") is not None
        for name in ("intent", "deadline", "revert", "snapshot"):
            assert running.read(f"{name}.json") is None
        assert running.props()["Restart"] == "on-failure"

    def test_it_happens_once(self, running: Controller) -> None:
        """At the fixpoint the tick does nothing more (L10)."""
        start_trial(running)
        running.host.world.advance(400)
        files = dict(running.host.host.files.data)
        running.host.world.advance(600)
        assert running.host.host.files.data == files
        assert len(running.host.host.truth.starts) == 3

    def test_the_lost_controllers_late_effect_is_refused(self, running: Controller) -> None:
        """The host has raised the fence: a controller that comes back must claim and look (S8)."""
        start_trial(running)
        late = running.request("commit", **running.commit_args("other"))
        late["not_after"] = 1e9
        running.host.world.advance(400)
        assert running.host.call(late)["reason"] == "StaleFence"

    def test_a_living_lease_prevents_it(self, running: Controller) -> None:
        """While a controller renews, the host leaves everything to it (L5)."""
        start_trial(running)
        for _ in range(20):
            running.done("claim", holder="tester", ttl_s=60, takeover=False)
            running.host.world.advance(30)
        assert history(running) == []
        assert running.props()["FragmentPath"] == TRIAL

    def test_a_deadline_that_was_taken_away_never_comes(self, running: Controller) -> None:
        """After a passed gate the new server may stay, even if the controller goes."""
        start_trial(running)
        running.done("deadline", after_s=None, grace_s=0)
        running.host.world.advance(1000)
        assert running.props()["FragmentPath"] == TRIAL
        assert running.props()["ActiveState"] == "active"

    def test_a_server_that_was_not_yet_stopped_is_left_running(self, running: Controller) -> None:
        """A controller that dies after disarming costs nobody anything: the old process goes on."""
        old = running.props()["MainPID"]
        running.claim(60, takeover=True)
        running.done("record", name="attempted", content={"revision": revision_of("other")})
        running.disarm(deadline_s=60)
        running.host.world.advance(400)
        assert running.props()["MainPID"] == old
        assert running.props()["Restart"] == "on-failure"
        assert running.read("deadline.json") is None
        assert running.read(f"rejected/{revision_of('other')}.json") is None

    def test_a_reboot_starts_the_last_good_and_clears_up(self, running: Controller) -> None:
        """The trial is gone with the boot; the permanent unit starts by itself; after the grace the records are cleared (F49)."""
        start_trial(running)
        running.host.reboot()
        running.host.world.advance(50)
        assert running.props()["FragmentPath"] == PERMANENT
        assert running.props()["ActiveState"] == "active"
        assert running.read("deadline.json") is not None
        pid = running.props()["MainPID"]
        running.host.world.advance(120)
        assert running.read("deadline.json") is None
        assert running.props()["MainPID"] == pid
        assert running.read(f"rejected/{revision_of('other')}.json") is None

    def test_a_first_deploy_stays_down(self, installed: Controller) -> None:
        """With nothing to go back to, the server is stopped and the history says so (S23)."""
        installed.done("record", name="attempted", content={"revision": revision_of("qwen")})
        installed.disarm(deadline_s=60)
        installed.start()
        installed.done("claim", holder="tester", ttl_s=60, takeover=False)
        installed.host.world.advance(600)
        assert installed.props()["ActiveState"] == "inactive"
        assert installed.props()["LoadState"] == "not-found"
        line = history(installed)[-1]
        assert (line["outcome"], line["reason"], line["stopped"]) == (
            "Failed",
            "NothingToReturnTo",
            True,
        )
        assert TRIAL not in installed.host.host.files.data

    def test_left_overs_are_ended_and_strangers_waited_for(self, running: Controller) -> None:
        """The revert signals what is proven ours, and starts only on free GPUs (S2, S3)."""
        running.host.host.behave("other", Behaviour(escapes=True))
        start_trial(running)
        stranger = running.host.host.add_process(gpus=(0,), mib=200)
        running.host.world.advance(600)
        assert running.props()["ActiveState"] in ("inactive", "failed")
        assert [p.pid for p in running.host.host.holders_of(0)] == [stranger.pid]
        helper = [s for s in running.host.host.truth.signals if s.by == "helper"]
        assert helper
        assert all(s.unit == UNIT for s in helper)
        running.host.host.end(stranger)
        running.host.world.advance(120)
        assert running.props()["ActiveState"] == "active"
        assert running.host.host.truth.starts[-1].holders == ()

    def test_a_controller_can_take_over_a_blocked_revert(self, running: Controller) -> None:
        """A revert that waits for a stranger does not lock controllers out for good (L3)."""
        start_trial(running)
        running.host.host.add_process(gpus=(0,), mib=200)
        running.host.world.advance(600)
        claimed = False
        for _ in range(40):
            running.fence = None
            claimed = (
                running.ask("claim", holder="tester", ttl_s=60, takeover=True)["outcome"] == "done"
            )
            if claimed:
                break
            running.host.world.advance(1)
        assert claimed

    @pytest.mark.parametrize("number", range(1, 40))
    def test_a_power_cut_at_any_effect_of_the_revert_is_recovered(
        self, running: Controller, number: int
    ) -> None:
        """Each step looks at what is there: wherever the tick is cut off, the end is the same (S10, L3)."""
        start_trial(running)
        seen = 0

        def cut(effect: Effect) -> None:
            nonlocal seen
            if effect.kind != "call" and effect.stage == "before" and effect.request is None:
                seen += 1
                if seen == number:
                    running.host.reboot()

        running.host.world.on_effect(cut)
        running.host.world.advance(900)
        assert running.props()["ActiveState"] == "active"
        assert running.host.host.truth.starts[-1].text == unit_text("qwen").encode()
        assert running.read("deadline.json") is None
        assert all(s.holders == () for s in running.host.host.truth.starts)

    @pytest.mark.parametrize("number", range(1, 40))
    def test_a_tick_that_dies_anywhere_is_continued_by_the_next(
        self, running: Controller, number: int
    ) -> None:
        """A killed tick on a living host ends the same way, without a needless start."""
        start_trial(running)
        seen = 0

        def die(effect: Effect) -> None:
            nonlocal seen
            if effect.kind != "call" and effect.stage == "before" and effect.request is None:
                seen += 1
                if seen == number:
                    raise OSError(5, "Input/output error")

        running.host.world.on_effect(die)
        running.host.world.advance(900)
        assert running.props()["ActiveState"] == "active"
        assert running.host.host.truth.starts[-1].text == unit_text("qwen").encode()
        assert running.read("deadline.json") is None
        assert len(running.host.host.truth.starts) == 3

    def test_a_commit_that_was_reached_is_not_reverted(self, running: Controller) -> None:
        """When only the clearing away was cut off, the tick finishes it and the new server stays (F04)."""
        start_trial(running)

        def die(effect: Effect) -> None:
            if effect.kind == "remove" and effect.detail == TRIAL and effect.stage == "before":
                raise KeyboardInterrupt

        running.host.world.on_effect(die)
        with pytest.raises(KeyboardInterrupt):
            running.ask("commit", **running.commit_args("other"))
        running.host.world.watchers.clear()
        assert TRIAL in running.host.host.files.data
        pid = running.props()["MainPID"]
        running.host.world.advance(400)
        assert running.props()["MainPID"] == pid
        assert running.props()["FragmentPath"] == PERMANENT
        assert running.read("deadline.json") is None
        assert running.read(f"rejected/{revision_of('other')}.json") is None

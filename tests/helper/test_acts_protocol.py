"""What every mutation must pass: fence, lease, boot, time, nonce; and what a fault leaves behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from simulated_controller import SERVER, UNIT, Controller, new_controller

from reconciler.core.errors import HostUnreachableError, OutcomeUnknownError
from reconciler.helper import acts
from reconciler.helper.machine import Busy
from reconciler.helper.protocol import ANSWERS_KEPT, frame
from reconciler.lab.world import Effect, PowerLost


@pytest.fixture
def tester() -> Controller:
    """Return a controller with the lease of a bound server."""
    controller = new_controller()
    controller.claim()
    controller.bind()
    return controller


def note(tester: Controller, number: int = 1) -> dict[str, Any]:
    """Return a small mutation."""
    return tester.request("record", name="attempted", content={"revision": f"{number:064x}"})


def attempted(tester: Controller) -> int | None:
    """Return the number that `note` left on the host."""
    data = tester.read("attempted.json")
    return None if data is None else int(json.loads(data)["revision"], 16)


class TestFence:
    """An effect executes only under exactly the host's fence (S8)."""

    def test_another_nonce_of_the_same_epoch_is_refused(self, tester: Controller) -> None:
        """Epoch and nonce must both be the host's."""
        request = note(tester)
        request["fence"] = {**request["fence"], "nonce": "f" * 32}
        answer = tester.host.call(request)
        assert (answer["outcome"], answer["reason"]) == ("refused", "StaleFence")
        assert attempted(tester) is None

    @pytest.mark.parametrize("epoch", [0, -1, 2, 10**6, True, "1", None])
    def test_another_epoch_is_refused(self, tester: Controller, epoch: object) -> None:
        """Neither a smaller nor a greater epoch passes, nor what is no number."""
        request = note(tester)
        request["fence"] = {**request["fence"], "epoch": epoch}
        assert tester.host.call(request)["outcome"] == "refused"
        assert attempted(tester) is None

    def test_ones_own_late_effect_is_refused_after_claiming_again(self, tester: Controller) -> None:
        """A request that was lost on its way and lands after the next claim does nothing (S8, F37)."""
        late = note(tester, 1)
        tester.claim(takeover=True)
        tester.host.call(note(tester, 2))
        answer = tester.host.execute(late)
        assert answer["reason"] == "StaleFence"
        assert attempted(tester) == 2

    def test_a_late_effect_under_a_standing_fence_is_refused_by_time(
        self, tester: Controller
    ) -> None:
        """`not_after` is on the host's clock and checked after the lock is had."""
        late = note(tester)
        tester.host.world.advance(31)
        assert tester.host.call(late)["reason"] == "TooLate"
        assert attempted(tester) is None

    def test_without_a_fence_nothing_happens(self, tester: Controller) -> None:
        """A mutation without the words of the protocol is refused."""
        for missing in ("fence", "boot_id", "not_after", "server", "nonce", "args"):
            request = note(tester)
            del request[missing]
            assert tester.host.call(request)["outcome"] == "refused", missing
        assert attempted(tester) is None

    def test_claims_only_raise_the_epoch(self, tester: Controller) -> None:
        """Each claim has the next epoch and a nonce of its own."""
        fences = []
        for _ in range(3):
            tester.claim(takeover=True)
            fences.append((tester.fence or {})["epoch"])
        assert fences == [2, 3, 4]


class TestLease:
    """Who may change a server, and for how long."""

    def test_another_holder_waits_for_the_end_of_the_lease(self, tester: Controller) -> None:
        """While a lease stands nobody else gets it, not even by takeover (F09, F11)."""
        other = Controller(tester.host, holder="other")
        answer = other.ask("claim", holder="other", ttl_s=60, takeover=True)
        assert answer["reason"] == "LeaseHeld"
        assert answer["data"]["holder"] == "tester"
        assert 0 < answer["data"]["expires_in_s"] <= 300
        tester.host.world.advance(301)
        other.claim()
        assert tester.host.call(note(tester))["reason"] == "StaleFence"

    def test_the_same_holder_needs_takeover(self, tester: Controller) -> None:
        """A second process of the same controller does not slip in unawares (F11)."""
        answer = tester.ask("claim", holder="tester", ttl_s=60, takeover=False)
        assert answer["outcome"] == "done"  # With its fence it is a renewal.
        tester.fence = None
        assert tester.refused("claim", holder="tester", ttl_s=60, takeover=False) == "LeaseHeld"
        tester.claim(takeover=True)

    def test_an_expired_lease_lets_nothing_through(self, tester: Controller) -> None:
        """A controller that was paused past its lease is refused (F05, S9)."""
        tester.host.world.advance(301)
        assert tester.host.call(note(tester))["reason"] == "LeaseExpired"
        assert tester.refused("claim", holder="tester", ttl_s=60, takeover=False) == "LeaseExpired"

    def test_a_renewal_keeps_the_fence_and_moves_the_deadline(self, tester: Controller) -> None:
        """A living controller keeps the host from going back by itself."""
        tester.disarm(deadline_s=50)
        due = json.loads(tester.read("deadline.json"))["due_boottime"]
        data = tester.done("claim", holder="tester", ttl_s=200, takeover=False)
        assert data["fence"] == tester.fence
        later = json.loads(tester.read("deadline.json"))["due_boottime"]
        assert later == pytest.approx(data["boottime"] + 200 + 60)
        assert later > due

    def test_a_short_renewal_never_moves_the_deadline_back(self, tester: Controller) -> None:
        """The deadline only moves forward."""
        tester.disarm(deadline_s=5000)
        due = json.loads(tester.read("deadline.json"))["due_boottime"]
        tester.done("claim", holder="tester", ttl_s=10, takeover=False)
        assert json.loads(tester.read("deadline.json"))["due_boottime"] == due

    def test_a_lease_that_was_given_back_is_free(self, tester: Controller) -> None:
        """A ttl of 0 ends the lease; giving it back twice is fine; the next holder claims at once."""
        for _ in range(2):
            tester.done("claim", holder="tester", ttl_s=0, takeover=False)
        Controller(tester.host, holder="other").claim()

    def test_a_stale_fence_cannot_give_the_lease_back(self, tester: Controller) -> None:
        """Only the current holder can end its lease."""
        old = tester.fence
        tester.claim(takeover=True)
        tester.fence = old
        assert tester.refused("claim", holder="tester", ttl_s=0, takeover=False) == "StaleFence"

    @pytest.mark.parametrize("ttl_s", [-1, 1801, "60", None, True, float("nan")])
    def test_a_lease_is_bounded(self, tester: Controller, ttl_s: object) -> None:
        """No lease is longer than half an hour (L3)."""
        tester.fence = None
        assert tester.refused("claim", holder="tester", ttl_s=ttl_s, takeover=True) == "BadRequest"

    def test_dying_between_fence_and_lease_leaves_the_server_free(self, tester: Controller) -> None:
        """A claim that was cut off after its first write blocks nobody (L3)."""
        cut_at(tester, "write", f"/run/reconciler/{SERVER}.lease")
        tester.fence = None
        with pytest.raises(OutcomeUnknownError):
            tester.ask("claim", holder="tester", ttl_s=300, takeover=True)
        tester.host.world.watchers.clear()
        assert tester.host.host.is_up()
        Controller(tester.host, holder="other").claim()

    def test_a_failed_claim_leaves_fence_and_lease_as_they_were(self, tester: Controller) -> None:
        """A full disk does not cost the holder its lease (F61)."""
        tester.host.host.files.full.append("/run/reconciler/qwen.lease")
        answer = claim_again(tester)
        assert answer["outcome"] == "failed"
        tester.host.host.files.full.clear()
        assert tester.host.call(note(tester))["outcome"] == "done"


def claim_again(tester: Controller) -> dict[str, Any]:
    """Claim with takeover and return the answer; the controller keeps its fence."""
    request = tester.request("claim", holder="tester", ttl_s=60, takeover=True)
    del request["fence"]
    return tester.host.call(request)


def cut_at(tester: Controller, kind: str, detail: str, stage: str = "before") -> None:
    """Kill the helper's process at one of its effects; the host lives on."""

    def watch(effect: Effect) -> None:
        if (effect.stage, effect.kind, effect.detail) == (stage, kind, detail):
            raise PowerLost

    tester.host.world.on_effect(watch)


class TestBoot:
    """A reboot voids what was known before it."""

    def test_a_request_of_another_boot_is_refused(self, tester: Controller) -> None:
        """The boot id is compared before anything is done (S2, S21)."""
        request = note(tester)
        request["boot_id"] = "00000000-0000-0000-0000-000000000000"
        assert tester.host.call(request)["reason"] == "OtherBoot"

    def test_a_host_that_boots_cannot_be_reached(self, tester: Controller) -> None:
        """While it boots nothing is executed."""
        tester.host.reboot()
        with pytest.raises(HostUnreachableError):
            tester.host.call(note(tester))
        tester.host.world.advance(30)
        assert tester.host.call(note(tester))["reason"] == "OtherBoot"

    def test_a_power_cut_in_the_middle_of_a_verb_is_an_unknown_outcome(
        self, tester: Controller
    ) -> None:
        """The caller learns nothing, and what was written durably before is there after the boot (F49)."""

        def cut(effect: Effect) -> None:
            if effect.kind == "reload" and effect.stage == "before":
                tester.host.reboot()

        tester.host.world.on_effect(cut)
        with pytest.raises(OutcomeUnknownError):
            tester.disarm()
        tester.host.world.watchers.clear()
        tester.host.world.advance(30)
        assert tester.read("deadline.json") is not None
        assert not any(p.startswith("/run/") for p in tester.host.host.files.data)


class TestAnswers:
    """A reply that was lost can be asked for again."""

    def test_the_same_nonce_gets_the_same_answer_and_nothing_is_done_again(
        self, tester: Controller
    ) -> None:
        """Replaying a request changes nothing, even when something else has happened since (S10)."""
        first = note(tester, 1)
        answer = tester.host.call(first)
        tester.host.call(note(tester, 2))
        assert tester.host.call(first) == answer
        assert attempted(tester) == 2

    def test_a_claim_whose_reply_was_lost_gives_the_same_fence(self, tester: Controller) -> None:
        """Asking again with the nonce returns the fence that was issued."""
        request = tester.request("claim", holder="tester", ttl_s=60, takeover=True)
        del request["fence"]
        answer = tester.host.call(request)
        assert tester.host.call(request) == answer

    def test_a_nonce_is_of_one_request(self, tester: Controller) -> None:
        """A nonce that was used for another verb is refused."""
        request = note(tester)
        tester.host.call(request)
        other = {**tester.request("deadline", after_s=None, grace_s=0), "nonce": request["nonce"]}
        assert tester.host.call(other)["reason"] == "NonceReused"

    def test_answers_are_bounded(self, tester: Controller) -> None:
        """The newest answers are kept, the others go."""
        for number in range(ANSWERS_KEPT + 10):
            tester.host.call(note(tester, number))
        assert len(tester.host.host.files.names("/run/reconciler/answers")) == ANSWERS_KEPT

    def test_an_answer_that_cannot_be_kept_is_still_given(self, tester: Controller) -> None:
        """The act stands; losing the copy is said and costs an observation."""
        tester.host.host.files.full.append("/run/reconciler/answers")
        answer = tester.host.call(note(tester))
        assert answer["outcome"] == "done"
        assert "not kept" in answer["message"]

    def test_the_frame_counts_bytes_and_carries_a_digest(self) -> None:
        """Length and digest let the reader tell a cut answer from a whole one (F39)."""
        framed = frame("ab" * 16, b'{"a":1}')
        assert framed.startswith(b"\n@@reconciler-begin " + b"ab" * 16 + b" 7\n")
        assert framed.endswith(b"\n")
        assert framed.count(b"@@reconciler-end") == 1


class TestIntent:
    """The intent is durable before the effect (S11)."""

    def test_the_intent_is_there_when_the_act_is_cut_off(self, tester: Controller) -> None:
        """Whoever finds the host after a crash finds what was about to happen (F02)."""
        cut_at(tester, "write", "/var/lib/reconciler/qwen/attempted.json")
        request = note(tester)
        request["intent"] = {"state": {"phase": "x"}, "revision": "a" * 64}
        with pytest.raises(OutcomeUnknownError):
            tester.host.call(request)
        intent = json.loads(tester.read("intent.json"))
        assert intent["state"] == {"phase": "x"}
        assert intent["boot_id"] == tester.host.host.boot_id
        last = json.loads(tester.read("journal.ndjson").splitlines()[-1])
        assert (last["verb"], last["outcome"]) == ("record", "begun")

    def test_without_a_durable_intent_nothing_is_done(self, tester: Controller) -> None:
        """A full disk stops before the effect (F15)."""
        tester.host.host.files.full.append("/var/lib/reconciler/qwen/intent")
        request = note(tester)
        request["intent"] = {"state": {}}
        assert tester.host.call(request)["outcome"] == "failed"
        assert attempted(tester) is None

    def test_without_a_journal_line_nothing_is_done(self, tester: Controller) -> None:
        """A mutation that cannot be recorded is not made (S26)."""
        tester.host.host.files.full.append("/var/lib/reconciler/qwen/journal")
        assert tester.host.call(note(tester))["outcome"] == "failed"
        assert attempted(tester) is None

    def test_a_cut_journal_line_does_not_stop_the_chain(self, tester: Controller) -> None:
        """A torn last line is shown in the chain and the next mutation goes on (F62)."""
        path = "/var/lib/reconciler/qwen/journal.ndjson"
        tester.host.host.files.put(path, tester.host.host.files.data[path] + b'{"cut')
        assert tester.host.call(note(tester))["outcome"] == "done"
        lines = tester.read("journal.ndjson").splitlines()
        assert json.loads(lines[-2])["prev"] == "unreadable"
        assert json.loads(lines[-1])["prev"] == json.loads(lines[-2])["hash"]


class TestRefusals:
    """Whatever is not understood is refused, and never half done."""

    @pytest.mark.parametrize(
        "request_",
        [
            {},
            {"format": 2, "verb": "observe"},
            {"format": 1},
            {"format": 1, "verb": "rm"},
            {"format": 1, "verb": 5},
            {"format": 1, "verb": "observe", "args": []},
        ],
    )
    def test_a_request_that_is_none(self, tester: Controller, request_: dict[str, Any]) -> None:
        """Unknown formats, verbs and shapes are refused."""
        assert acts.answer(request_, tester.host.machine(), None)["reason"] == "BadRequest"

    def test_a_carried_helper_changes_nothing(self, tester: Controller) -> None:
        """Only the installed helper mutates; the carried one looks and enrols."""
        answer = acts.answer(note(tester), tester.host.machine(), None)
        assert answer["reason"] == "NotInstalled"

    def test_a_busy_lock_is_a_refusal(self, tester: Controller) -> None:
        """While somebody else acts on the host, a request is refused, not queued for ever."""
        machine = tester.host.machine()
        request = note(tester)
        with machine.lock(1):
            assert acts.answer(request, tester.host.machine(), "installed")["reason"] == "Busy"
            with pytest.raises(Busy), machine.lock(0):
                pass
        assert tester.host.call(request)["outcome"] == "done"

    @pytest.mark.parametrize(
        "content", [b"{cut", b"[]", b'{"version": 99, "epoch": 1, "nonce": "x"}', b'{"epoch": 1}']
    )
    def test_an_unreadable_or_newer_record_is_not_an_empty_one(
        self, tester: Controller, content: bytes
    ) -> None:
        """A record that is not understood stops us (F10, F14, S12)."""
        tester.host.host.files.put("/var/lib/reconciler/qwen/fence.json", content)
        answer = tester.host.call(note(tester))
        assert answer["outcome"] == "refused"
        assert answer["reason"] in ("RecordUnreadable", "RecordTooNew")
        tester.fence = None
        assert claim_again_without_fence(tester)["outcome"] == "refused"

    def test_an_unknown_unit_state_stops_every_act(self, tester: Controller) -> None:
        """When systemd does not answer, nothing is done on the guess (S12)."""
        tester.host.host.systemd_fault = "systemctl show: timed out"
        for verb, args in (
            ("stop", {"invocation": None}),
            ("start", {"previous_invocation": None}),
            ("settle", {"what": "stopped"}),
            ("disarm", {"stop_timeout_s": 5, "deadline_s": 60, "grace_s": 60}),
        ):
            assert tester.refused(verb, unit=UNIT, **args) == "Unknown", verb


def claim_again_without_fence(tester: Controller) -> dict[str, Any]:
    """Claim as a stranger would."""
    return tester.host.call(tester.request("claim", holder="x", ttl_s=60, takeover=False))

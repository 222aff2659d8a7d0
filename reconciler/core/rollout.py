"""The step machine: `step(state, reply) -> (state, effect)`. The only thing that decides what a rollout does next.

`steps.py` and `preflight.py` know what each step wants; here is what holds for all of them: the order, the lease, the
way back, and what becomes of a reply that is no answer. Nothing here touches the world, a clock or a log.

How odd replies are read, since everything hangs on it:

- `Lost`: the effect may have happened, may still happen, or never will. The fence is raised by a new claim before
  anything is observed, so that our own late effect finds a fence that is no longer its own (`host-mechanisms.md`).
- `Unreachable`: it did not happen. Tried again with growing pauses, then the pass ends as Unknown, leaving the intent
  and the host's deadline: whoever comes next goes on, or the host goes back by itself.
- `StaleFence`, `LeaseExpired`: somebody else may have come. Claim again; if they hold the lease, this attempt is theirs.
- `OtherBoot`: the host rebooted. What ran is gone and every proof with it; start again at disarm (F49).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from reconciler.core.attempt import BARE, ORDER, Attempt, Failure, Leg, Member, Phase, Wedge
from reconciler.core.conditions import Outcome, Reason
from reconciler.core.effect import (
    LEASE_UNWRITTEN,
    Acted,
    Began,
    Claim,
    Claimed,
    Commit,
    Disarm,
    Done,
    Effect,
    GiveBack,
    Install,
    Leave,
    Look,
    Lost,
    Measure,
    Observed,
    Quarantine,
    Record,
    Remove,
    Reply,
    SetAside,
    Settle,
    Signal,
    Start,
    Stop,
    Turned,
    Unreachable,
    Wait,
    Waited,
    deadline_s,
)
from reconciler.core.explain import explained, explicable
from reconciler.core.live import Known
from reconciler.core.preflight import preflight
from reconciler.core.steps import LEASE_TTL_S, STEPS, Do, Fail, Move, Next, Step, target_of

MUTATIONS = (Record, Disarm, Stop, Signal, Install, SetAside, Remove, Start, Commit, Settle)

MARGIN_S = 5.0
"""No effect begins when the rest of the lease is shorter than the effect's deadline plus this (S9)."""

PATIENCE_S = 90.0
"""How long a host may stay unreachable before the pass ends as Unknown: a switch that reboots is back by then."""

BUSY_TRIES = 30
MAX_REBOOTS = 2

FINE = frozenset({"Busy", "TooLate"})
FENCED_OFF = frozenset({"StaleFence", "LeaseExpired"})


def step(state: Attempt, reply: Reply) -> tuple[Attempt, Effect]:
    """Decide what comes next. Total: every reply in every state gives an effect, at the end `Done`."""
    if state.began is None and _of_another_process(state):
        why = f"another process of this installation works on this server on {state.host} right now; nothing was done here. Run it again when that has ended"
        return _taken(state, why)
    state = _begun(state, reply.now)
    if state.phase is Phase.FINISHED:
        return _finish(state, reply)
    match reply:
        case Unreachable():
            return _unreachable(state, reply)
        case Lost():
            return _lost(state, reply)
        case Turned(reason=reason) if reason in FENCED_OFF:
            return _advance(replace(state, asked=False).with_member(fence=None), Waited(reply.now))
        case Turned(reason="OtherBoot"):
            return _rebooted(state, reply.now)
        case Turned(reason="LeaseHeld" | "LeaseUnwritten"):
            return _ungranted(state, reply)
        case Turned(reason=reason) if reason in FINE and state.tries < BUSY_TRIES:
            return replace(state, tries=state.tries + 1, asked=False), Wait(0.5, reply.message)
        case Claimed():
            return _claimed(state, reply)
        case Acted() | Turned() if state.aside:
            # The answer to an effect that was not the step's own says nothing about the step.
            return _advance(replace(state, aside=False, trouble_since=None), Waited(reply.now))
        case Leave():
            return _left(state, reply)
        case Waited(stop=True) if state.leg is Leg.FORWARD and state.phase is not Phase.COMMIT:
            return _failed(Fail(state, Reason.INTERRUPTED, "interrupted"), reply)
        case _:
            # Waiting is no sign of life.
            trouble = state.trouble_since if isinstance(reply, Waited) else None
            return _advance(replace(state, trouble_since=trouble), reply)


def _begun(state: Attempt, now: float) -> Attempt:
    began = now if state.began is None else state.began
    entered = now if state.entered is None else state.entered
    return replace(state, began=began, entered=entered)


# -- moving along ---------------------------------------------------------------------------------------


def _advance(state: Attempt, reply: Reply) -> tuple[Attempt, Effect]:
    """Hand the reply to the step that the attempt is in, and carry out its move."""
    while True:
        if (claim := _claim_wanted(state)) is not None:
            return state, claim
        if state.explaining is not None:
            return _explained(state, state.explaining, reply)
        if (rejection := _rejection_wanted(state)) is not None and not isinstance(reply, Turned):
            index, record = rejection
            marked = state.with_members({index: {"rejection_recorded": True}})
            marked, effect = _guarded(replace(marked, aside=True), record, reply)
            return (marked if effect is record else state), effect
        if (wedge := _quarantine_wanted(state)) is not None:
            rest = tuple(w for w in state.wedges if w is not wedge)
            mark: Effect = quarantine(wedge)
            marked, first = _guarded(replace(state, wedges=rest, aside=True), mark, reply)
            return (marked if first is mark else state), first
        if isinstance(reply, Observed) and _reboot_seen(state, reply):
            return _rebooted(state, reply.now)
        move = _step_of(state.phase)(state, reply)
        match move:
            case Do(effect=effect, state=after):
                after, first = _guarded(after, effect, reply)
                if first is not effect:
                    # The lease is renewed first; what the step notes as sent has not been sent yet.
                    after = replace(after, asked=state.asked, escalated=state.escalated)
                return after, first
            case Fail():
                return _failed(move, reply)
            case Next(state=after):
                state, finished = _next(after, reply)
                if finished:
                    return _finish(state, reply)
                reply = Waited(reply.now) if not _keeps(reply, state) else reply


def _keeps(reply: Reply, state: Attempt) -> bool:
    """An observation serves the next step as well, unless time or an effect lies between.

    INSTALL and START act on entry; RELEASE needs the cards, which only a quick STOP looks at; COMMIT looks for itself.
    """
    if isinstance(reply, Observed) and state.phase is Phase.RELEASE:
        return isinstance(reply.live.gpus, Known)
    return isinstance(reply, Observed) and state.phase in {
        Phase.ACQUIRE,
        Phase.DISARM,
        Phase.DRAIN,
        Phase.STOP,
    }


def _step_of(phase: Phase) -> Step:
    return preflight if phase is Phase.PREFLIGHT else STEPS[phase]


def _next(state: Attempt, reply: Reply) -> tuple[Attempt, bool]:
    """Go to the next member in this step, or to the next step. Release takes all members at once."""
    if state.phase is not Phase.RELEASE and state.cursor + 1 < len(state.members):
        return replace(
            state, cursor=state.cursor + 1, entered=reply.now, tries=0, asked=False
        ), False
    order = ORDER[state.leg]
    following = order[order.index(state.phase) + 1]
    spent = reply.now - (state.entered or reply.now)
    state = replace(
        state,
        phase=following,
        cursor=0,
        entered=reply.now,
        tries=0,
        asked=False,
        resumed=False,
        timings=(*state.timings, (_key(state), round(spent, 3))),
    )
    return state, following is Phase.FINISHED


def _key(state: Attempt) -> str:
    return (
        state.phase.value if state.leg is Leg.FORWARD else f"{state.leg.value}-{state.phase.value}"
    )


# -- the lease --------------------------------------------------------------------------------------------


def _claim_wanted(state: Attempt) -> Claim | None:
    """Claim for every member before anything else; a member without a fence may not be acted on (S8).

    A lease that stands in our own name may be another process's, also where this one had it before: only who is
    alone takes it over.
    """
    if state.phase is Phase.PREFLIGHT:
        return None
    for member in state.members:
        if member.fence is None:
            return Claim(member.server, LEASE_TTL_S, takeover=state.alone)
    return None


def _of_another_process(state: Attempt) -> bool:
    """Say whether an attempt that was read back from its host belongs to a process that lives, whatever its lease says (S8)."""
    return state.resumed and not state.alone


def _guarded(state: Attempt, effect: Effect, reply: Reply) -> tuple[Attempt, Effect]:
    """Let the effect go, unless the lease would not outlast it (S9): then renew first and look again after."""
    if state.phase is Phase.PREFLIGHT:
        return state, effect
    need = deadline_s(effect) + MARGIN_S
    for member in state.members:
        if member.fence is not None and member.lease_until - reply.now < min(need, LEASE_TTL_S / 2):
            ttl = max(LEASE_TTL_S, need) if isinstance(effect, Measure) else LEASE_TTL_S
            return state, Claim(member.server, ttl, renew=member.fence)
        if (
            isinstance(effect, Measure)
            and member.fence is not None
            and member.lease_until - reply.now < need
        ):
            return state, Claim(member.server, need + MARGIN_S, renew=member.fence)
    return state, effect


def _claimed(state: Attempt, reply: Claimed) -> tuple[Attempt, Effect]:
    index = next(i for i, m in enumerate(state.members) if m.server == reply.server)
    before = state.members[index]
    state = state.with_members(
        {
            index: {
                "fence": reply.fence,
                "lease_until": reply.now + reply.ttl_s,
                "boot_id": reply.boot_id,
            }
        }
    )
    # A lease that is granted again is no sign of progress: whose acts go on being lost gives up in time all the same (L6).
    if before.boot_id and before.boot_id != reply.boot_id:
        return _rebooted(state, reply.now, fenced=True)
    return _advance(state, Waited(reply.now))


def _taken(state: Attempt, message: str) -> tuple[Attempt, Effect]:
    """Somebody else holds the lease: this attempt is theirs to finish or to leave."""
    results = tuple(
        (m.server, Outcome.REFUSED, Reason.LEASE_HELD, message, _revision(m)) for m in state.members
    )
    return replace(state, phase=Phase.FINISHED), Done(results)


def _ungranted(state: Attempt, reply: Turned) -> tuple[Attempt, Effect]:
    """No lease: somebody has it, or the host cannot keep one. Then refuse where nothing was done yet, else hope as for an answer."""
    if reply.reason != LEASE_UNWRITTEN:
        return _taken(state, reply.message)
    what = f"{state.host} cannot keep the lease: {reply.message}"
    if state.phase is Phase.ACQUIRE:
        sentence = f"{what}; nothing was changed. Mend that on the host, then run again"
        return _failed(Fail(state, Reason.PREFLIGHT, sentence), reply)
    return _unreachable(state, Unreachable(reply.now, what))


# -- replies that are no answer -------------------------------------------------------------------------------


def _lost(state: Attempt, reply: Lost) -> tuple[Attempt, Effect]:
    if state.phase is Phase.PREFLIGHT:
        return _unreachable(state, Unreachable(reply.now, reply.message))
    state = replace(state, asked=False, aside=False).every_member(
        fence=None, rejection_recorded=False
    )
    return _unreachable(state, Unreachable(reply.now, reply.message))


def _unreachable(state: Attempt, reply: Unreachable) -> tuple[Attempt, Effect]:
    since = reply.now if state.trouble_since is None else state.trouble_since
    state = replace(state, trouble_since=since)
    if reply.identity or reply.now - since >= PATIENCE_S:
        reason = Reason.HOST_IDENTITY if reply.identity else Reason.UNREACHABLE
        if state.phase in {Phase.PREFLIGHT, Phase.ACQUIRE}:
            sentence = f"{reply.message}; nothing was changed"
        else:
            sentence = (
                f"{reply.message}; the rollout stands at {state.phase.value} and the host's own deadline goes on: it returns to the "
                "last good revision unless a controller comes back first. Run again to go on"
            )
        results = tuple(
            (m.server, Outcome.UNKNOWN, reason, sentence, _revision(m)) for m in state.members
        )
        return replace(state, phase=Phase.FINISHED), Done(results)
    pause = min(10.0, 0.5 + (reply.now - since) / 4)
    return state, Wait(pause, reply.message)


def _reboot_seen(state: Attempt, reply: Observed) -> bool:
    """Say whether the boot that was just observed is not the one that was claimed."""
    boot = reply.live.boot_id
    return bool(boot) and any(
        m.fence is not None and m.boot_id and m.boot_id != boot for m in state.members
    )


def _rebooted(state: Attempt, now: float, *, fenced: bool = False) -> tuple[Attempt, Effect]:
    """Start again at disarm: what ran is gone, the trial with it, and no proof from before counts.

    A failure that was being explained is one all the same.
    """
    if state.explaining is not None:
        state, effect = _after_failure(state, state.explaining, Waited(now))
        if state.phase is Phase.FINISHED:
            return state, effect
    kept = {} if fenced else {"fence": None, "boot_id": ""}
    state = state.every_member(
        disarmed=False,
        stopped=False,
        started="",
        previous="",
        invocation="",
        zeros=0,
        evidence="",
        rejection_recorded=False,
        **kept,
    )
    if not fenced:
        state = replace(state, resumed=True)
    state = replace(
        state,
        reboots=state.reboots + 1,
        samples=(),
        escalated=(),
        kernel_cursor="",
        down_at=None,
        tries=0,
        asked=False,
    )
    if state.phase not in {Phase.PREFLIGHT, Phase.ACQUIRE}:
        state = replace(state, phase=Phase.DISARM, cursor=0, entered=now)
    if state.reboots > MAX_REBOOTS and state.leg is Leg.FORWARD:
        fail = Fail(
            state,
            Reason.REBOOTED,
            f"{state.host} rebooted {state.reboots} times during the rollout",
        )
        return _failed(fail, Waited(now))
    return _advance(state, Waited(now))


# -- when a step fails --------------------------------------------------------------------------------------


def _failed(fail: Fail, reply: Reply) -> tuple[Attempt, Effect]:
    """Look once more, for the whole journal and the kernel's lines, where they can tell why; then choose the way on."""
    state = fail.state
    failure = Failure(state.phase, fail.reason, fail.sentence, state.member.server, fail.rejects)
    if explicable(failure):
        return _explained(state, failure, Waited(reply.now))
    return _after_failure(state, failure, reply)


def _explained(state: Attempt, failure: Failure, reply: Reply) -> tuple[Attempt, Effect]:
    """Go on from a failure once that look has been answered, whatever had to be done again for it; never judge anew."""
    if isinstance(reply, Turned):
        return _after_failure(state, failure, Waited(reply.now))
    if not isinstance(reply, Observed):
        servers = (failure.server,)
        deep = Look(servers, gpus=True, kernel_cursor=state.kernel_cursor, deep=True)
        return replace(state, explaining=failure), deep
    if not _reboot_seen(state, reply):
        failure = explained(failure, target_of(state, state.member), reply.live)
    return _after_failure(state, failure, Waited(reply.now))


def _after_failure(state: Attempt, failure: Failure, reply: Reply) -> tuple[Attempt, Effect]:
    """Choose the way on after a failure: nothing to undo, back, down, or stand still and say so."""
    state = replace(state, explaining=None)
    if state.leg in BARE or state.phase in {Phase.PREFLIGHT, Phase.ACQUIRE}:
        return _end(state, failure, reply)
    if state.leg is not Leg.FORWARD:
        return _back_failed(state, failure, reply)
    state = replace(state, failure=failure, samples=(), escalated=())
    if (
        failure.reason in {Reason.GATE_INCONCLUSIVE, Reason.GATE_ERROR}
        and state.member.on_inconclusive == "ask"
    ):
        return _settle_all(replace(state, held=True), "held", reply)
    touched = any(m.stopped for m in state.members)
    if touched and failure.reason is not Reason.INTERRUPTED and all(m.hold for m in state.members):
        # Its GPUs were to be freed, and it is down: it is held there and does not loop.
        stays = failure.phase is not Phase.STOP
        state = replace(state, phase=Phase.FINISHED, cursor=0, entered=reply.now)
        ways = {
            i: {"settle": "stopped" if m.stopped and stays else "undone", "finished": 0}
            for i, m in enumerate(state.members)
        }
        return _finish(state.with_members(ways), Waited(reply.now))
    interrupted = failure.reason is Reason.INTERRUPTED
    mode = (
        state.member.on_failure if touched and _started(state) and not interrupted else "rollback"
    )
    if mode == "leave":
        return _settle_all(state, "kept", reply)
    if mode == "stop":
        return _turn(state, Leg.DOWN, reply)
    if not touched:
        return _settle_all(state, "undone", reply)
    return _turn(state, Leg.BACK, reply)


LEAVABLE = frozenset({Phase.PREFLIGHT, Phase.ACQUIRE, Phase.READY, Phase.GATE})
"""Where an attempt may be left: before anything was done, or while it only waits. From disarm to start nothing preempts."""


def leavable(state: Attempt) -> bool:
    """Say whether the attempt may end where it stands; its intent and the host's deadline stay behind."""
    return state.phase in LEAVABLE and state.leg in {Leg.FORWARD, Leg.BACK}


def _left(state: Attempt, reply: Leave) -> tuple[Attempt, Effect]:
    """End without settling: whoever comes next goes on or supersedes, and if nobody does, the host goes back by itself."""
    if not leavable(state):
        return _advance(state, Waited(reply.now))
    return _end(
        state, Failure(state.phase, reply.reason, reply.sentence, state.member.server), reply
    )


def _started(state: Attempt) -> bool:
    return state.phase in {Phase.START, Phase.READY, Phase.GATE, Phase.COMMIT}


def _turn(state: Attempt, leg: Leg, reply: Reply) -> tuple[Attempt, Effect]:
    """Begin another leg at its first step. A member with nothing good to return to ends down."""
    if leg is Leg.BACK and all(m.old is None for m in state.members):
        leg = Leg.DOWN
    state = replace(
        state, leg=leg, phase=ORDER[leg][0], cursor=0, entered=reply.now, tries=0, asked=False
    )
    state = state.every_member(started="", evidence="", zeros=0)
    return _advance(state, Waited(reply.now))


def _back_failed(state: Attempt, failure: Failure, reply: Reply) -> tuple[Attempt, Effect]:
    """The way back failed too. Disarm is taken away, so that the tick starts the last good revision when the GPUs are free (L9)."""
    if state.back_failure is not None:
        return _finish(replace(state, phase=Phase.FINISHED), reply)
    state = replace(state, back_failure=failure)
    return _settle_all(state, "undone", reply)


def _settle_all(state: Attempt, what: str, reply: Reply) -> tuple[Attempt, Effect]:
    """End the attempt on the host for each member, one effect after the other, by way of the finishing step."""
    state = replace(state, phase=Phase.FINISHED, cursor=0, entered=reply.now)
    state = state.every_member(settle=what, finished=0)
    return _finish(state, Waited(reply.now))


def _rejection_wanted(state: Attempt) -> tuple[int, Record] | None:
    """Remember a bad revision before anything is undone, so that no crash makes it be tried again (L2)."""
    failure = state.failure
    if failure is None or not failure.rejects or state.leg is Leg.FORWARD:
        return None
    for index, member in enumerate(state.members):
        if (
            member.server == failure.server
            and member.new is not None
            and not member.rejection_recorded
        ):
            return index, _rejection(member, failure)
    return None


def _quarantine_wanted(state: Attempt) -> Wedge | None:
    """Mark a GPU that was not proven free before anything else is tried with it."""
    return next(iter(state.wedges), None) if state.leg is not Leg.FORWARD else None


def _rejection(member: Member, failure: Failure) -> Record:
    assert member.new is not None, "only a revision can be rejected"
    content = {
        "version": 1,
        "revision": member.new.revision,
        "reason": failure.reason.value,
        "sentence": failure.sentence,
    }
    return Record(
        member.server, f"rejected/{member.new.revision}", json.dumps(content, sort_keys=True)
    )


# -- the end ------------------------------------------------------------------------------------------------

WHEN_FREE = "The server is down; the host starts the last good revision by itself once its GPUs are proven free"
UNPROVEN = "What runs now, if anything does, is not proven; `reconcile status` shows it"
DOWN_FOR_GPUS = frozenset({Reason.NOT_RELEASED, Reason.WEDGED, Reason.GUARD_REFUSED})

QUARANTINED, HELD, SETTLED, REJECTED, NOTED, GIVEN_BACK = 1, 2, 3, 4, 5, 6
"""How far a member has come in the finishing step: each effect once, in this order."""


def _finish(state: Attempt, reply: Reply) -> tuple[Attempt, Effect]:
    """Settle what is unsettled, write the history, give the leases back, and say how it ended.

    From here on an unanswered effect is not insisted on, except that settling is tried again: everything else is a
    convenience that the next pass does without.
    """
    if isinstance(reply, Claimed):
        index = next(i for i, m in enumerate(state.members) if m.server == reply.server)
        state = state.with_members({index: {"fence": reply.fence, "boot_id": reply.boot_id}})
    elif isinstance(reply, Lost | Unreachable) or (
        isinstance(reply, Turned) and reply.reason in FENCED_OFF | {"OtherBoot"}
    ):
        since = reply.now if state.trouble_since is None else state.trouble_since
        state = replace(state, trouble_since=since)
        index = min(state.cursor, len(state.members) - 1)
        unsettled = bool(state.members[index].settle) and state.members[index].finished <= SETTLED
        if unsettled and reply.now - since < PATIENCE_S:
            member = state.members[index]
            state = state.with_members({index: {"fence": None, "finished": 0}})
            if isinstance(reply, Unreachable | Lost) and reply.now != since:
                return replace(state, entered=None), Wait(1.0, "the host does not answer")
            return state, Claim(member.server, LEASE_TTL_S, takeover=state.alone)
    while state.cursor < len(state.members):
        member = state.member
        stage = member.finished + 1
        effect = _last_effect(state, member, stage, reply.now)
        if effect is not None and member.fence is None:
            if stage <= SETTLED and not isinstance(reply, Turned):
                return state, Claim(member.server, LEASE_TTL_S, takeover=state.alone)
            effect = None
        if stage > GIVEN_BACK:
            state = replace(state, cursor=state.cursor + 1)
            continue
        state = state.with_member(finished=stage)
        if effect is not None:
            return state, effect
    return state, Done(tuple(_result(state, m) for m in state.members))


def _last_effect(state: Attempt, member: Member, stage: int, now: float) -> Effect | None:
    match stage:
        case 1 if wedge := next((w for w in state.wedges if w.server == member.server), None):
            return quarantine(wedge)
        case 2 if member.hold and member.settle == "stopped":
            return Record(member.server, "hold", member.hold)
        case 3 if member.settle:
            return Settle(member.server, member.unit, member.settle)
        case 4 if state.failure and state.failure.rejects and state.failure.server == member.server:
            return (
                _rejection(member, state.failure)
                if member.new and not member.rejection_recorded
                else None
            )
        case 5 if state.failure is None or state.failure.phase not in {
            Phase.PREFLIGHT,
            Phase.ACQUIRE,
        }:
            return Record(
                member.server, "history", json.dumps(_history(state, member, now), sort_keys=True)
            )
        case 6 if member.fence is not None:
            return GiveBack(member.server, member.fence)
        case _:
            return None


def _history(state: Attempt, member: Member, now: float) -> Mapping[str, object]:
    _, outcome, reason, sentence, revision = _result(state, member)
    return {
        "version": 1,
        "outcome": outcome.value,
        "reason": reason.value,
        "sentence": sentence,
        "revision": revision,
        "previous": member.old.revision if member.old else "",
        "took_s": round(now - (state.began or now), 3),
        "outage_s": None if state.outage_s is None else round(state.outage_s, 3),
        "steps": dict(state.timings),
        "attempt": state.id,
        **({"cause": state.failure.code} if state.failure and state.failure.code else {}),
        "idle_mib": dict(state.idle_mib),
        **({"moved_aside": dict(member.drop_ins)} if member.drop_ins else {}),
    }


def quarantine(wedge: Wedge) -> Quarantine:
    """Phrase the mark on GPUs that were not proven free."""
    return Quarantine(wedge.server, wedge.gpus, wedge.kind, wedge.reasons, wedge.pids)


def _end(state: Attempt, failure: Failure, reply: Reply) -> tuple[Attempt, Effect]:
    """End before anything was changed: only leases are to be given back."""
    state = replace(state, failure=failure, phase=Phase.FINISHED, cursor=0)
    return _finish(state, Waited(reply.now))


def _stands(failure: Failure) -> str:
    """Say what a way back that failed leaves behind."""
    return WHEN_FREE if failure.reason in DOWN_FOR_GPUS else UNPROVEN


def _revision(member: Member) -> str:
    return member.new.revision if member.new else ""


def _result(state: Attempt, member: Member) -> tuple[str, Outcome, Reason, str, str]:
    """Say how it ended for one member, in the words of the table of `architecture.md` section 6."""
    revision = _revision(member)
    failure = state.failure
    if failure is None:
        if member.new is None:
            stopped = "stopped as asked; the GPUs are proven free"
            return member.server, Outcome.STOPPED, Reason.NONE, stopped, ""
        proof = "its gate passed" if member.gated else "a real generation was answered"
        sentence = f"{revision[:12]} runs, and {proof}"
        return member.server, Outcome.APPLIED, Reason.NONE, sentence, revision
    outcome, added = _ended(state, member, failure)
    own = failure.server in {member.server, ""}
    sentence = failure.sentence if own else f"{failure.server}: {failure.sentence}"
    reason = failure.reason
    if outcome in {Outcome.ROLLED_BACK, Outcome.ROLLBACK_FAILED}:
        revision = member.old.revision if member.old else ""
    elif state.leg is Leg.DOWN and member.old is None and outcome is Outcome.FAILED:
        reason = Reason.NO_GOOD_REVISION
    return member.server, outcome, reason, f"{sentence}{added}", revision


def _ended(state: Attempt, member: Member, failure: Failure) -> tuple[Outcome, str]:
    """Give the outcome of a member after a failure, and what is to be said of its server. The first that holds counts."""
    left_running = Outcome.REFUSED, ". The old server was left running"
    if failure.reason in {Reason.PREEMPTED, Reason.HANDED_OVER, Reason.GROUP}:
        return Outcome.WAITING, ""
    if failure.phase in {Phase.PREFLIGHT, Phase.ACQUIRE}:
        return Outcome.REFUSED, ""
    if state.leg is Leg.VERIFY:
        return Outcome.FAILED, ". It was left running, unproven"
    if state.leg is Leg.TAKE_OVER:
        return Outcome.REFUSED, ". What was here runs on; it is not taken over"
    if state.held:
        return Outcome.HELD, ". The new server is up and unproven; run again to measure again"
    if (again := state.back_failure) is not None:
        added = f". Going back failed as well: {again.sentence}. {_stands(again)}"
        return Outcome.ROLLBACK_FAILED, added
    if state.leg is Leg.BACK:
        if not member.stopped and failure.phase in {Phase.DISARM, Phase.DRAIN, Phase.STOP}:
            return left_running
        return Outcome.ROLLED_BACK, ". The last good revision is back"
    if member.hold and member.stopped and state.leg is Leg.FORWARD:
        return Outcome.FAILED, ". The server is down and on hold"
    if state.leg is Leg.DOWN:
        return Outcome.FAILED, ". The server is stopped"
    if member.settle == "undone":
        return left_running
    return Outcome.FAILED, ". The new server was left running, unproven"


def resume(state: Attempt) -> Attempt:
    """Prepare a state that was read back from a host: claim first, then look, then go on where it stood.

    Who is not `alone` leaves it to the process that began it.
    """
    return replace(state, resumed=True, entered=None, began=None).every_member(
        fence=None, lease_until=0.0
    )


__all__ = ["MUTATIONS", "Began", "Move", "resume", "step"]

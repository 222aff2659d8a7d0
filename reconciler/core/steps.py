"""The steps of a rollout, one pure function each: what was seen in, the next move out.

Each step is level-based: it looks, and asks of the world only what its postcondition still lacks. So a step that is
entered again after a crash, a lost reply or a reboot does nothing twice (S10), and its success is what the next
observation says. `rollout.py` owns the order of the steps, the lease, and what happens to every odd reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from reconciler.core import release
from reconciler.core.attempt import BARE, Attempt, Leg, Member, Phase
from reconciler.core.conditions import Reason
from reconciler.core.desired import Target, text_sha256
from reconciler.core.effect import (
    Acted,
    Commit,
    Disarm,
    Effect,
    Install,
    Learn,
    Load,
    Look,
    Measure,
    Measured,
    Observed,
    PollLoad,
    Probe,
    Probed,
    Record,
    Remove,
    Reply,
    SetAside,
    Settle,
    Signal,
    Start,
    Stop,
    Turned,
    Wait,
)
from reconciler.core.live import Known, LiveHost, LiveServer, Unknown

LEASE_TTL_S = 60.0
"""One lease period. Long enough for a round trip to a slow host, short enough that a crash costs a minute (L3)."""

REVERT_GRACE_S = 60.0
"""How long after the lease the host waits before its dead-man timer acts: one more period for a controller to return."""

STOP_MARGIN_S = 15.0
"""How long systemd may take beyond the stop timeout for its own SIGKILL and ExecStopPost."""

START_BUDGET_S = 60.0
"""From the start job to a process: the guard's probe of a cold driver takes up to 30 s."""

POLL_S = 0.1
"""Between two looks at a unit that is stopping. A look itself costs some 100 ms; polling is all this adds to an outage."""


@dataclass(frozen=True, slots=True)
class Do:
    """Ask the world for this."""

    effect: Effect
    state: Attempt


@dataclass(frozen=True, slots=True)
class Next:
    """This member's step is done."""

    state: Attempt


@dataclass(frozen=True, slots=True)
class Fail:
    """The step cannot be done. `rejects`: the evidence is definite and about the revision itself."""

    state: Attempt
    reason: Reason
    sentence: str
    rejects: bool = False


Move = Do | Next | Fail
Step = Callable[[Attempt, Reply], Move]


def look(state: Attempt, *, cards: bool = False) -> Do:
    """Observe all members of the attempt in one round trip; the cards only where they are judged, or when asked for."""
    gpus = cards or state.phase is Phase.RELEASE
    journal = state.phase in {Phase.START, Phase.READY, Phase.GATE, Phase.COMMIT}
    return Do(
        Look(
            tuple(m.server for m in state.members),
            gpus=gpus,
            journal=journal,
            kernel_cursor=state.kernel_cursor,
        ),
        state,
    )


def wait(state: Attempt, seconds: float, why: str) -> Do:
    """Let a little time pass."""
    return Do(Wait(seconds, why), state)


def here(state: Attempt, reply: Observed) -> tuple[Member, LiveServer, float]:
    """Give the member that the cursor stands on, what was found of it, and how long the step has run."""
    member = state.member
    return member, reply.live.server(member.server), reply.now - (state.entered or reply.now)


def target_of(state: Attempt, member: Member) -> Target | None:
    """Give the revision that this leg brings up; None when it ends with the server down."""
    match state.leg:
        case Leg.FORWARD | Leg.VERIFY | Leg.TAKE_OVER:
            return member.new
        case Leg.BACK:
            return member.old
        case Leg.DOWN:
            return None


def untouched(state: Attempt, member: Member, found: LiveServer) -> bool:
    """Say whether the way back finds the old process still running, never stopped by us."""
    return state.leg is Leg.BACK and not member.stopped and found.phase == "running"


# -- acquire: the host carries our fence, the bindings and the attempt --------------------------------


def acquire(state: Attempt, reply: Reply) -> Move:
    """Record what this server is bound to and what is being tried."""
    if not isinstance(reply, Observed):
        if isinstance(reply, Turned):
            reason = (
                Reason.BINDING_CHANGED if reply.reason == "BindingChanged" else Reason.PREFLIGHT
            )
            return Fail(state, reason, reply.message)
        return look(state)
    member, found, _ = here(state, reply)
    records = found.known_records
    if records is None:
        return Fail(
            state,
            Reason.UNREADABLE,
            f"the host's records of {member.server} cannot be read; nothing was changed",
        )
    if records.intent is not None and records.intent.state.get("id") not in {
        state.id,
        member.supersedes or state.id,
    }:
        return Fail(
            state,
            Reason.LEASE_HELD,
            f"another rollout of {member.server} is under way on the host; nothing was changed. Run again to go on with it",
        )
    applied = records.applied.revision if records.applied else ""
    if applied != member.planned_on and not state.resumed:
        sentence = f"{member.server} has {applied[:12] or 'nothing'} applied by now, the plan was made on {member.planned_on[:12] or 'nothing'}; nothing was changed"
        return Fail(state, Reason.PLAN_STALE, sentence)
    state = state.with_member(invocation=member.invocation or found.invocation)
    if state.leg in BARE:
        state = state.with_member(started=found.invocation)
    if member.new is not None:
        if records.bindings is None or list(records.bindings.get("gpus") or ()) != list(
            member.new.gpu_uuids
        ):
            return Do(Record(member.server, "bindings", bindings_json(member), rebind=True), state)
        attempted = records.attempted
        if attempted is None or attempted.attempt != state.id:
            content = {"version": 1, "revision": member.new.revision, "attempt": state.id}
            if member.waived:
                reasons = dict(member.waivers)
                content["waived"] = {check: reasons[check] for check in member.waived}
            return Do(
                Record(member.server, "attempted", json.dumps(content, sort_keys=True)), state
            )
    return _set_aside(state, member, found)


def _set_aside(state: Attempt, member: Member, found: LiveServer) -> Move:
    """Move drop-ins away before anything is stopped: one may decide how the process ends."""
    if not member.drop_ins:
        return Next(state)
    if isinstance(found.files, Unknown):
        sentence = f"the drop-ins of {member.unit} cannot be read ({found.files.reason}); nothing was changed"
        return Fail(state, Reason.UNREADABLE, sentence)
    here_still = {path for path, _ in found.files.value.drop_ins}
    left = tuple((path, sha) for path, sha in member.drop_ins if path in here_still)
    return Do(SetAside(member.server, member.unit, left), state) if left else Next(state)


def bindings_json(member: Member) -> str:
    """Say which unit, GPUs and marks belong to the server: what the guard and the dead-man timer go by."""
    spec = json.loads(member.new.spec) if member.new and member.new.spec else {}
    user = (spec.get("runtime") or {}).get("user")
    content = {
        "version": 1,
        "server": member.server,
        "unit": member.unit,
        "gpus": list(member.new.gpu_uuids) if member.new else [],
        "names": _names(spec, member.new),
        "gid": group_number(member.server),
        "user": user,
        "port": member.port,
    }
    return json.dumps(content, sort_keys=True)


def _names(spec: Mapping[str, object], target: Target | None) -> dict[str, str]:
    """Pair each GPU as the spec writes it with the UUID it stood for: a card that answers to the name later must be the same."""
    written = spec.get("gpus")
    if target is None or not isinstance(written, list) or len(written) != len(target.gpu_uuids):
        return {}
    return {str(name): uuid for name, uuid in zip(written, target.gpu_uuids, strict=True)}


def group_number(server: str) -> int:
    """Give the number of the server's own supplementary group, a mark that workers cannot wipe.

    From 60706–61183, which systemd's table of uid and gid ranges leaves unused, so no entry in a group
    database is needed; derived from the name, so that every controller derives the same. Two servers of a host may share
    a number by chance: the group alone proves nothing (`host-mechanisms.md`, Ownership marks).
    """
    total = 0
    for byte in server.encode():
        total = (total * 131 + byte) % 4294967291
    return 60706 + total % 478


# -- disarm -----------------------------------------------------------------------------------------------


def disarm(state: Attempt, reply: Reply) -> Move:
    """Turn off restarts, stretch the stop timeout, block foreign starts, set the host's deadline."""
    if isinstance(reply, Turned):
        return Fail(state, Reason.DISARM_REFUSED, reply.message)
    if isinstance(reply, Acted):
        invocation = str(reply.data.get("invocation") or "")
        state = state.with_member(disarmed=True, previous=invocation or state.member.previous)
        return Next(state)
    if not isinstance(reply, Observed):
        return look(state)
    member, found, _ = here(state, reply)
    if isinstance(found.unit, Unknown):
        return Fail(state, Reason.UNREADABLE, f"{member.unit} cannot be read: {found.unit.reason}")
    state = state.with_member(
        invocation=member.invocation or found.invocation,
        previous=found.invocation or member.previous,
    )
    return Do(
        Disarm(
            server=member.server,
            unit=member.unit,
            stop_timeout_s=max(member.budgets.stop_s, _own_stop_s(found)),
            deadline_s=LEASE_TTL_S + REVERT_GRACE_S,
            grace_s=REVERT_GRACE_S,
        ),
        state,
    )


def _own_stop_s(found: LiveServer) -> float:
    """Give the stop timeout of a unit that we wrote: it has the engine's own time to end on top, and is never made shorter."""
    records = found.known_records
    if records is None or isinstance(found.unit, Unknown) or isinstance(found.permanent, Unknown):
        return 0.0
    text = found.permanent.value
    if text is None or text_sha256(text) not in records.produced:
        return 0.0
    return (found.unit.value.stop_timeout_us or 0) / 1e6


# -- drain ------------------------------------------------------------------------------------------------


def drain(state: Attempt, reply: Reply) -> Move:
    """Wait until nobody is being served, or the budget is spent; record how many are cut."""
    member = state.member
    if isinstance(reply, Observed):
        _, found, _ = here(state, reply)
        asked = _drained_as(member)
        if found.phase != "running" or asked is None:
            return Next(state)
        return Do(PollLoad(member.server, asked), state)
    if isinstance(reply, Load):
        waited = reply.now - (state.entered or reply.now)
        if reply.in_flight is None:
            return Next(state.with_member(cut=None))
        if reply.in_flight > 0 and waited >= member.budgets.drain_s:
            return Next(state.with_member(cut=reply.in_flight))
        zeros = member.zeros + 1 if reply.in_flight == 0 else 0
        state = state.with_member(zeros=zeros)
        if zeros >= 3:
            return Next(state.with_member(cut=0))
        pause = 0.2 if reply.in_flight == 0 else 1.0
        return wait(state, pause, f"{reply.in_flight} requests in flight")
    return look(state)


def _drained_as(member: Member) -> Target | None:
    """Give the revision whose engine knows how to count the old server's requests.

    Of a unit that was here before us nothing is recorded; if the new one listens on the same port, its engine's question is
    the best there is, and an answer that it cannot read counts as unknown.
    """
    if member.old is not None and member.old.spec:
        return member.old
    return member.new if member.old is not None else None


# -- stop -------------------------------------------------------------------------------------------------


def stop(state: Attempt, reply: Reply) -> Move:
    """Stop exactly the invocation that was seen; done when the unit is down and no job is left."""
    if isinstance(reply, Turned) and reply.reason != "InvocationChanged":
        return Fail(state, Reason.STOP_TIMED_OUT, reply.message)
    if not isinstance(reply, Observed):
        # A server that ends at once is found down by the look that is also the first sample of its release.
        return look(state, cards=isinstance(reply, Acted))
    member, found, waited = here(state, reply)
    if isinstance(found.unit, Unknown):
        return _patience(
            state,
            waited,
            member.budgets.stop_s,
            Reason.UNREADABLE,
            f"{member.unit}: {found.unit.reason}",
        )
    if untouched(state, member, found):
        return Next(state)
    unit = found.unit.value
    if unit.phase in {"down", "not-found"} and unit.job == 0:
        if state.down_at is None and member.stopped:
            state = replace(state, down_at=reply.now)
        state = state.with_member(previous=unit.invocation or member.previous, stopped=True)
        return Next(state)
    limit = max(member.budgets.stop_s, _own_stop_s(found)) * 3 + STOP_MARGIN_S
    if waited >= limit:
        sentence = f"{member.unit} is still {unit.active_state}/{unit.sub_state} {waited:.0f} s after its stop (limit {limit:.0f} s)"
        return Fail(state, Reason.STOP_TIMED_OUT, sentence)
    if unit.phase == "stopping" or (unit.job != 0 and member.stopped and unit.phase != "running"):
        return wait(state, POLL_S, f"{member.unit} is {unit.active_state}/{unit.sub_state}")
    state = state.with_member(stopped=True, previous=unit.invocation or member.previous)
    if unit.job != 0:
        return wait(state, POLL_S, f"job {unit.job} of {member.unit}")
    return Do(Stop(member.server, member.unit, unit.invocation), state)


def _patience(state: Attempt, waited: float, limit: float, reason: Reason, sentence: str) -> Move:
    """Look again for a while at what cannot be read, then give up: unknown is no answer (S12)."""
    if waited >= limit:
        return Fail(state, reason, sentence)
    return wait(state, 1.0, sentence)


# -- release: all members at once, for every GPU of the old and the new sets -------------------------------


def release_gpus(state: Attempt, reply: Reply) -> Move:
    """Climb the ladder until every GPU is proven free, or say who holds it."""
    if not isinstance(reply, Observed):
        if isinstance(reply, Acted | Turned):
            state = replace(state, samples=())
        return look(state)
    members = [m for m in state.members if not untouched(state, m, reply.live.server(m.server))]
    waited = reply.now - (state.entered or reply.now)
    state = replace(
        state,
        samples=(*state.samples[-SAMPLES_KEPT:], release.sample_of(reply.live, reply.now)),
        kernel_cursor=state.kernel_cursor or release.cursor_of(reply.live),
    )
    if (learn := _baseline_wanted(state, members, reply.live, waited)) is not None:
        noted = (*state.escalated, (f"{learn.server}/{LEARN}", waited))
        return Do(learn, replace(state, samples=(), escalated=noted))
    blocked: list[str] = []
    worst = "released"
    for member in members:
        if not member.gpus:
            continue
        verdict = release.judge(state.samples, member, reply.live, member.budgets.settle_s)
        if verdict.state == "released":
            continue
        worst = verdict.state if worst == "released" else worst
        act = release.rung(verdict, waited, _escalations(state, member), member.budgets.release_s)
        if act != "wait":
            return Do(
                _signal(member, act, verdict, reply.live), _escalate(state, member, act, waited)
            )
        blocked.extend(f"{member.server}: {why}" for why in (*verdict.others, *verdict.reasons))
    if worst == "released":
        gpus = sorted({uuid for m in state.members for uuid in m.gpus})
        idle = release.idle_use(reply.live, gpus)
        return Next(replace(state, samples=(), escalated=(), idle_mib=idle))
    limit = max(m.budgets.release_s for m in state.members)
    if waited >= limit:
        reason = Reason.WEDGED if worst in {"wedged", "fault"} else Reason.NOT_RELEASED
        named = ", ".join(uuid for m in members for uuid in m.gpus)
        shown = "; ".join(dict.fromkeys(blocked)) or worst
        wedges = [w for m in members for w in release.wedges_of(state.samples, m, reply.live)]
        if wedges:
            reason = Reason.WEDGED
        return Fail(
            replace(state, wedges=tuple(wedges)),
            reason,
            f"not released after {waited:.0f} s (limit {limit:.0f} s): {shown}. GPUs: {named}. Nothing was started",
        )
    settle = min(m.budgets.settle_s for m in state.members)
    pause = max(0.05, settle / 4) if waited < 10 else 1.0
    return wait(state, pause, blocked[0] if blocked else "letting the GPUs settle")


LEARN_AFTER_S = 3.0
"""A card whose server has just ended goes on giving memory back for seconds; what it uses only then is its floor."""


LEARN_EVERY_S = 2.0
"""Between two askings. In between the ladder is looked at at least once, however slow a look is: its limit must be seen."""

LEARN = "LEARN"


def _baseline_wanted(
    state: Attempt, members: Sequence[Member], live: LiveHost, waited: float
) -> Learn | None:
    """Have the idle use of a card learned that was busy at enrolment, once its server is down.

    The host learns only what nobody but housekeeping holds and what is small enough to be a floor; asked again each few
    seconds until it has, or the release's limit ends the wait.
    """
    if len(state.samples) < 2:
        return None
    for member in members:
        unlearned = [uuid for uuid in member.gpus if not live.has_baseline(uuid)]
        asked = dict(_escalations(state, member)).get(LEARN, -LEARN_EVERY_S)
        if unlearned and waited >= LEARN_AFTER_S and waited - asked >= LEARN_EVERY_S:
            return Learn(member.server)
    return None


def _escalations(state: Attempt, member: Member) -> list[tuple[str, float]]:
    prefix = f"{member.server}/"
    return [(key.removeprefix(prefix), at) for key, at in state.escalated if key.startswith(prefix)]


def _escalate(state: Attempt, member: Member, act: str, waited: float) -> Attempt:
    return replace(
        state, escalated=(*state.escalated, (f"{member.server}/{act.upper()}", waited)), samples=()
    )


def _signal(member: Member, act: str, verdict: release.Verdict, live: LiveHost) -> Signal:
    """Phrase the signal: KILL goes to the unit's own control group where every own left-over sits in it."""
    pids = live.server(member.server).pids
    inside = isinstance(pids, Known) and {pid for pid, _ in verdict.owned} <= set(pids.value)
    return Signal(
        member.server,
        member.unit,
        act.upper(),
        group=act == "kill" and inside,
        targets=verdict.owned,
    )


SAMPLES_KEPT = 60
"""Of one release: half a minute and more at the pace of a settle window of two seconds, which is what shows a wedge."""


# -- install ----------------------------------------------------------------------------------------------


def install(state: Attempt, reply: Reply) -> Move:
    """Put the unit of this leg where systemd will find it, and have what it loaded compared with what was rendered."""
    member = state.member
    target = target_of(state, member)
    if isinstance(reply, Turned):
        return Fail(
            state, Reason.INSTALL_REFUSED, reply.message, rejects=reply.reason == "EffectiveDiffers"
        )
    if isinstance(reply, Acted):
        return Next(state)
    if state.leg is Leg.FORWARD and target is not None:
        return Do(Install(member.server, member.unit, "trial", target), state)
    if not isinstance(reply, Observed):
        if state.leg is Leg.FORWARD:
            return Next(state)
        return look(state)
    _, found, _ = here(state, reply)
    if isinstance(found.permanent, Unknown) or isinstance(found.trial, Unknown):
        return Fail(state, Reason.UNREADABLE, f"the unit files of {member.unit} cannot be read")
    if untouched(state, member, found):
        return Next(state)
    if found.trial.value is not None and state.leg is not Leg.VERIFY:
        return Do(Remove(member.server, member.unit, ("trial",)), state)
    if target is not None and not target.is_original and found.permanent.value != target.unit_text:
        return Do(Install(member.server, member.unit, "permanent", target, member.saved_sha), state)
    return Next(state)


# -- start ------------------------------------------------------------------------------------------------


def start(state: Attempt, reply: Reply) -> Move:
    """Start, and see a process of ours that was not there before."""
    member = state.member
    target = target_of(state, member)
    if target is None:
        return Next(state)
    if isinstance(reply, Turned):
        reason = Reason.GUARD_REFUSED if reply.reason == "GuardRefused" else Reason.START_REFUSED
        return Fail(state, reason, reply.message)
    if not isinstance(reply, Observed):
        if state.asked or state.resumed or state.leg is not Leg.FORWARD:
            return look(state)
        return Do(Start(member.server, member.unit, member.previous), replace(state, asked=True))
    _, found, waited = here(state, reply)
    if isinstance(found.unit, Unknown):
        return _patience(
            state, waited, START_BUDGET_S, Reason.UNREADABLE, f"{member.unit}: {found.unit.reason}"
        )
    if untouched(state, member, found):
        return Next(state)
    unit = found.unit.value
    fresh = unit.invocation not in {"", member.previous}
    if fresh and unit.phase == "running":
        down_at = state.down_at
        if down_at is not None:
            state = replace(
                state, outage_s=(state.outage_s or 0.0) + reply.now - down_at, down_at=None
            )
        return Next(state.with_member(started=unit.invocation))
    if fresh and unit.phase == "down":
        return Fail(
            state.with_member(started=unit.invocation),
            Reason.DIED,
            _how_it_ended(found),
            rejects=_own_fault(found),
        )
    if not state.asked and unit.job == 0:
        return Do(Start(member.server, member.unit, member.previous), replace(state, asked=True))
    refusal = found.known_records.guard_refusal if found.known_records else None
    if refusal and unit.phase in {"down", "not-found"} and unit.job == 0 and waited > 1.0:
        return Fail(
            state, Reason.GUARD_REFUSED, f"the guard on the host refused the start: {refusal}"
        )
    if waited >= START_BUDGET_S:
        return Fail(
            state,
            Reason.START_REFUSED,
            f"{member.unit} did not start within {waited:.0f} s: {_how_it_ended(found)}",
        )
    return wait(state, POLL_S, f"{member.unit} is {unit.active_state}/{unit.sub_state}")


def _how_it_ended(found: LiveServer) -> str:
    if not isinstance(found.unit, Known):
        return "its unit cannot be read"
    unit = found.unit.value
    lines = found.journal.value if isinstance(found.journal, Known) else ()
    lines = tuple(
        text for text in lines if text.strip() and not text.startswith(f"{found.unit_name}: ")
    )
    how = {1: "exited with status", 2: "was killed by signal", 3: "dumped core on signal"}.get(
        unit.exec_main_code
    )
    end = f"{how} {unit.exec_main_status}" if how else f"is {unit.active_state}/{unit.sub_state}"
    last = f'; last line: "{lines[-1][:200]}"' if lines else ""
    return f"{found.unit_name} {end} (result {unit.result}){last}"


def _own_fault(found: LiveServer) -> bool:
    """Say whether the unit's own result is definite evidence against the revision (S22, F66)."""
    unit = found.unit.value if isinstance(found.unit, Known) else None
    return unit is not None and unit.result in {
        "exit-code",
        "oom-kill",
        "watchdog",
        "core-dump",
        "protocol",
    }


# -- ready ------------------------------------------------------------------------------------------------


def ready(state: Attempt, reply: Reply) -> Move:
    """Wait until this invocation answers a real generation and every listener on its port is its own."""
    member = state.member
    target = target_of(state, member)
    if target is None:
        return Next(state)
    waited = reply.now - (state.entered or reply.now)
    if isinstance(reply, Probed):
        match reply.state:
            case "ready":
                return Next(replace(state, tries=0))
            case "wrong":
                return Fail(state, Reason.WRONG_ANSWER, reply.message, rejects=True)
            case _:
                return _until_ready(state, waited, reply.message)
    if not isinstance(reply, Observed):
        return look(state)
    _, found, _ = here(state, reply)
    if isinstance(found.unit, Unknown):
        return _until_ready(state, waited, f"{member.unit}: {found.unit.reason}")
    if untouched(state, member, found):
        return Next(state)
    if (gone := _gone(state, found, Reason.DIED)) is not None:
        return gone
    if target.is_original or not target.spec:
        settled = waited >= member.budgets.settle_s
        return (
            Next(state)
            if settled
            else wait(state, 0.5, f"{member.unit} runs; it is not ours to probe")
        )
    if (stranger := _stranger(found)) is not None:
        return _until_ready(state, waited, stranger, Reason.PORT_TAKEN)
    if found.effective_text != target.unit_text and state.leg is not Leg.TAKE_OVER:
        sentence = (
            f"{member.unit}'s file is no longer the one that was installed: somebody edits it"
        )
        return Fail(state, Reason.INSTALL_REFUSED, sentence)
    return Do(Probe(member.server, target, member.started), state)


def _gone(state: Attempt, found: LiveServer, reason: Reason) -> Fail | None:
    """Fail when the process that we started no longer runs; definite only by the unit's own result."""
    unit = found.unit.value if isinstance(found.unit, Known) else None
    if unit is None:
        return None
    if unit.phase == "looping":
        return Fail(
            state,
            Reason.RESTART_LOOP,
            f"{found.unit_name} restarts in a loop: {_how_it_ended(found)}",
            rejects=True,
        )
    if unit.phase in {"down", "not-found"}:
        return Fail(state, reason, _how_it_ended(found), rejects=_own_fault(found))
    if unit.invocation != state.member.started and unit.phase in {"running", "starting"}:
        return Fail(
            state,
            reason,
            f"{found.unit_name} was restarted by somebody else (invocation {unit.invocation[:8]})",
        )
    return None


def _stranger(found: LiveServer) -> str | None:
    """Name a listener on the port that is not the server's own (F65); None while all are, or none is there yet."""
    if isinstance(found.listeners, Unknown):
        return f"who listens on the port cannot be read ({found.listeners.reason})"
    if isinstance(found.pids, Unknown):
        return f"the processes of {found.unit_name} cannot be read ({found.pids.reason})"
    own = set(found.pids.value)
    for listener in found.listeners.value:
        if not listener.pids:
            return f"{listener.address} is listened on by a process that cannot be seen"
        if strangers := [pid for pid in listener.pids if pid not in own]:
            units = ", ".join(listener.units) or "no unit"
            return f"{listener.address} is listened on by pid {strangers[0]} ({units}), not by {found.unit_name}"
    return None


def _until_ready(
    state: Attempt, waited: float, why: str, reason: Reason = Reason.READY_TIMEOUT
) -> Move:
    limit = state.member.budgets.ready_s
    if waited >= limit:
        definite = reason is Reason.READY_TIMEOUT
        return Fail(
            state,
            reason,
            f"not ready after {waited:.0f} s (limit {limit:.0f} s): {why}",
            rejects=definite,
        )
    pause = min(5.0, 0.2 * 1.5 ** min(state.tries, 10))
    return wait(replace(state, tries=state.tries + 1), min(pause, max(0.05, limit - waited)), why)


# -- gate -------------------------------------------------------------------------------------------------


def gate(state: Attempt, reply: Reply) -> Move:
    """Measure; a fail is sticky, an inconclusive one is measured again within its budget, then asked about."""
    member = state.member
    if not member.gated or member.new is None:
        evidence = json.dumps({"verdict": "pass", "kind": "smoke"}, sort_keys=True)
        return Next(state.with_member(evidence=evidence))
    waited = reply.now - (state.entered or reply.now)
    if isinstance(reply, Measured):
        state = state.with_member(evidence=reply.evidence, measures=member.measures + 1)
        match reply.verdict:
            case "pass":
                return Next(state)
            case "fail":
                return Fail(state, Reason.GATE_FAILED, reply.message, rejects=True)
            case verdict:
                if state.member.measures < 2 and waited < member.budgets.gate_s:
                    return look(state)
                reason = (
                    Reason.GATE_INCONCLUSIVE if verdict == "inconclusive" else Reason.GATE_ERROR
                )
                return Fail(state, reason, reply.message)
    if not isinstance(reply, Observed):
        return look(state)
    _, found, _ = here(state, reply)
    if (gone := _gone(state, found, Reason.DIED_LATER)) is not None:
        return gone
    left = max(10.0, member.budgets.gate_s - waited)
    return Do(Measure(member.server, member.new, left), state)


# -- commit -----------------------------------------------------------------------------------------------


def commit(state: Attempt, reply: Reply) -> Move:
    """Make it permanent and record it; or end without a process where none is wanted."""
    member = state.member
    target = target_of(state, member)
    if isinstance(reply, Acted):
        return Next(state.with_member(committed=True))
    if isinstance(reply, Turned):
        return Fail(state, Reason.COMMIT_REFUSED, reply.message)
    if not isinstance(reply, Observed):
        return look(state)
    _, found, _ = here(state, reply)
    records = found.known_records
    if (
        state.leg not in BARE
        and records is not None
        and records.intent is None
        and not records.disarmed
    ):
        return _ended_before(state, found, target)
    if untouched(state, member, found) or (
        state.leg is Leg.BACK and target is not None and target.is_original
    ):
        return Do(Settle(member.server, member.unit, "undone"), state)
    if target is None:
        if member.hold and not is_held(found, member.hold) and state.tries < HOLD_TRIES:
            # First, so that no pass finds a server that is down without knowing that it is meant to be.
            noted = replace(state, aside=True, tries=state.tries + 1)
            return Do(Record(member.server, "hold", member.hold), noted)
        return Do(Settle(member.server, member.unit, "stopped"), state)
    if (gone := _gone(state, found, Reason.DIED_LATER)) is not None:
        return gone
    evidence = member.evidence or json.dumps({"verdict": "pass", "kind": "smoke"}, sort_keys=True)
    return Do(
        Commit(member.server, member.unit, target, member.started, evidence, member.saved_sha),
        state,
    )


HOLD_TRIES = 3


def is_held(found: LiveServer, hold: str) -> bool:
    """Say whether exactly this hold stands on the host."""
    records = found.known_records
    wanted = json.loads(hold)
    return (
        records is not None
        and records.hold is not None
        and (records.hold.owner, records.hold.reason, records.hold.at)
        == (wanted["owner"], wanted["reason"], wanted["at"])
    )


def _ended_before(state: Attempt, found: LiveServer, target: Target | None) -> Move:
    """Read a host without an intent: our own commit landed though its reply was lost, or the host reverted by itself."""
    records = found.known_records
    applied = records.applied if records else None
    if target is None or target.is_original:
        return Next(state.with_member(committed=True))
    if (
        applied is not None
        and applied.revision == target.revision
        and applied.invocation == found.invocation
    ):
        return Next(state.with_member(committed=True))
    return Fail(
        state,
        Reason.COMMIT_REFUSED,
        f"the host's dead-man timer took {found.unit_name} back to the last good revision while nobody answered for the rollout",
    )


STEPS: Mapping[Phase, Step] = {
    Phase.ACQUIRE: acquire,
    Phase.DISARM: disarm,
    Phase.DRAIN: drain,
    Phase.STOP: stop,
    Phase.RELEASE: release_gpus,
    Phase.INSTALL: install,
    Phase.START: start,
    Phase.READY: ready,
    Phase.GATE: gate,
    Phase.COMMIT: commit,
}

__all__ = ["LEASE_TTL_S", "REVERT_GRACE_S", "STEPS", "Do", "Fail", "Move", "Next", "look", "wait"]

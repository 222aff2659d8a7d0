"""What would be done to one server, and why, with nothing left to decide. Pure; same input, same plan, byte for byte.

All judgement is spent here, where the dry run shows it. What is executed is the plan that was shown (same hash), or it
is planned again (S20). A plan also says what it does *not* do, and what that waits for.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from reconciler.core import attempt as attempts
from reconciler.core.applied import Applied, Hold
from reconciler.core.attempt import Attempt, Leg, Member, Phase
from reconciler.core.checks import Check, Verdict, refused
from reconciler.core.conditions import Outcome, Reason
from reconciler.core.desired import ORIGINAL, Budgets, Target, text_sha256
from reconciler.core.diff import (
    APPLIED_AT_ONCE,
    NO_EXCUSE,
    NOTHING_RUNS,
    Drift,
    Excuse,
    RunningWith,
    drift_of,
    foreign_drop_ins,
    movable,
    settings_of,
    wording_of,
)
from reconciler.core.live import Known, LiveServer, Records, Unknown
from reconciler.core.preflight import ownership_refusal, unit_refusal
from reconciler.core.revision import Change, EffectClass
from reconciler.core.spec import Host


class Action(StrEnum):
    """What a plan does to one server."""

    NOTHING = "nothing"
    DEPLOY = "deploy"
    ADOPT = "adopt"
    TAKE_OVER = "take-over"
    CHANGE = "change"
    RELOAD = "reload"
    START = "start"
    STOP = "stop"
    PRUNE = "prune"
    VERIFY = "verify"
    RESUME = "resume"
    BLOCKED = "blocked"


LIFECYCLE = frozenset({"down", "looping", "unit-missing", "unverified"})
"""Drift that is about whether the server runs, not about somebody's edits: `drift: off` does not hide it."""

DISRUPTIVE = frozenset(
    {Action.DEPLOY, Action.ADOPT, Action.CHANGE, Action.START, Action.STOP, Action.PRUNE}
)
SYMBOL = {
    Action.NOTHING: " ",
    Action.DEPLOY: "+",
    Action.ADOPT: "±",
    Action.TAKE_OVER: "~",
    Action.CHANGE: "±",
    Action.RELOAD: "~",
    Action.START: "+",
    Action.STOP: "-",
    Action.PRUNE: "-",
    Action.VERIFY: "~",
    Action.RESUME: "±",
    Action.BLOCKED: "!",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for one server: the resolved target (None: stopped), and how its rollout is to be handled."""

    server: str
    host: str
    unit: str
    target: Target | None
    budgets: Budgets
    port: int | None
    gated: bool
    on_failure: str
    on_inconclusive: str
    drift: str
    suspend: bool
    policy_digest: str
    waivers: tuple[tuple[str, str], ...] = ()
    running_with: RunningWith = NOTHING_RUNS
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()
    problem: tuple[Reason, str] | None = None
    protect: bool = False
    excuse: Excuse = NO_EXCUSE
    strangers: tuple[str, ...] = ()
    """Who else has one of its GPUs open while it serves."""
    stranger_differs: tuple[str, ...] | None = None
    """How a running server that was not made by this tool differs from what is wanted; None where none runs."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another member of a group, and where it is."""

    server: str
    unit: str
    host: Host


@dataclass(frozen=True, slots=True)
class Turn:
    """A member's turn in its group: how many may be under change, and how many that serve may stop serving.

    `needed` members must go on serving; `peers` are looked at again once the member's own lease is held.
    """

    group: str
    at_once: int
    room: int
    serves: bool
    needed: int = 0
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Permissions:
    """What the person in charge allows in this run, beyond the specs."""

    adopt: bool = False
    overwrite: bool = False
    retry: bool = False
    no_pidfd: bool = False
    supersede: bool = False
    at: float = 0.0
    """The time in seconds since the epoch; 0 where it is not known, and then no hold has run out."""
    override: str = ""
    """Why changes may begin outside of their windows."""
    unscheduled: bool = False
    """A rehearsal: windows, dependencies and groups make nobody wait."""
    through_hold: str = ""
    """The owner of a hold that this run itself has put on: a sweep keeps everybody else off its server."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The plan for one server. `state` is how it would end now if nothing is done (for NOTHING and BLOCKED)."""

    wish: Wish
    action: Action
    outcome: Outcome
    reason: Reason
    sentence: str
    applied: str = ""
    drift: tuple[Drift, ...] = ()
    unit_before: str = ""
    steps: tuple[str, ...] = ()
    may_be_killed: tuple[str, ...] = ()
    outage_s: float | None = None
    outage_runs: int = 0
    old: Target | None = None
    saved_sha: str | None = None
    intent: Attempt | None = None
    supersedes: str = ""
    no_pidfd: bool = False
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    turn: Turn | None = None
    overrides: str = ""
    aside: tuple[tuple[str, str], ...] = ()
    """Drop-ins that are moved aside (`drift: heal`), with the digest of the bytes that were seen."""
    aside_restarts: bool = False
    """Whether one of them sets what only a start reads."""
    left_in_place: bool = False
    """Whether there are others that only a person can take away."""

    @property
    def acts(self) -> bool:
        """Say whether carrying the plan out would change anything."""
        return self.action not in {Action.NOTHING, Action.BLOCKED}


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for a fleet: servers in order of host and name."""

    servers: tuple[ServerPlan, ...]

    @property
    def hash(self) -> str:
        """Give the digest by which `--expect` knows the plan again: 12 hex digits."""
        return hashlib.sha256(
            json.dumps([_essence(p) for p in self.servers], sort_keys=True).encode()
        ).hexdigest()[:12]

    @property
    def acts(self) -> bool:
        """Say whether carrying the plan out would change anything."""
        return any(p.acts for p in self.servers)


def _essence(plan: ServerPlan) -> dict[str, Any]:
    """Give what makes two plans the same plan: what is done, from what, to what."""
    target = plan.wish.target
    return {
        "server": plan.wish.server,
        "host": plan.wish.host,
        "action": plan.action.value,
        "reason": plan.reason.value,
        "applied": plan.applied,
        "target": target.revision if target else "",
        "unit": target.text_sha256 if target else "",
        "before": text_sha256(plan.unit_before),
        "gpus": list(target.gpu_uuids) if target else [],
        **({"aside": dict(plan.aside)} if plan.aside else {}),
    }


def plan_server(
    wish: Wish, live: LiveServer, recorded: Mapping[str, Target], allow: Permissions
) -> ServerPlan:
    """Decide what is done to one server. The order of the cases is the policy.

    `recorded` holds targets of revisions that the host keeps, at least of the applied one.
    """
    if (refusal := unit_refusal(live)) is not None:
        return _still(wish, Action.BLOCKED, Outcome.REFUSED, refusal.reason, refusal.sentence)
    records = live.known_records
    if isinstance(live.unit, Unknown) or records is None or isinstance(live.permanent, Unknown):
        why = next(
            r.reason for r in (live.unit, live.records, live.permanent) if isinstance(r, Unknown)
        )
        return _still(
            wish,
            Action.BLOCKED,
            Outcome.UNKNOWN,
            Reason.UNREADABLE,
            f"{live.unit_name} cannot be read: {why}",
        )
    applied = records.applied
    base = _still(
        wish,
        Action.NOTHING,
        Outcome.IN_SYNC,
        Reason.NONE,
        "in sync",
        applied=applied.revision if applied else "",
    )
    base = replace(
        base,
        drift=tuple(
            d
            for d in (
                *drift_of(live, applied, wish.excuse),
                *wish.running_with.drift(),
                *(Drift("gpu-taken", s) for s in wish.strangers if not wish.excuse.gpu_taken),
            )
            if wish.drift != "off" or d.what in LIFECYCLE
        ),
        unit_before=live.permanent.value or "",
        **_history(live),
    )
    base = replace(
        base,
        may_be_killed=_may_be_killed(live),
        old=_old_target(live, recorded),
        no_pidfd=allow.no_pidfd,
        notes=(*base.notes, *_excused(wish, live, applied)),
    )
    if wish.drift == "heal" and applied is not None:
        base = _setting_aside(base, live)
    if wish.problem is not None:
        reason, sentence = wish.problem
        outcome = Outcome.UNKNOWN if reason is Reason.UNREADABLE else Outcome.REFUSED
        return replace(
            base, action=Action.BLOCKED, outcome=outcome, reason=reason, sentence=sentence
        )
    if records.hold is not None and expired(records.hold, allow.at):
        base = replace(base, notes=(*base.notes, reminder(wish.server, records.hold)))
        records = replace(records, hold=None)
        live = replace(live, records=Known(records))
    held = records.hold is not None and records.hold.owner != (allow.through_hold or None)
    if wish.suspend or held:
        # Down because somebody wants it so is no drift.
        kept = tuple(d for d in base.drift if d.what != "down")
        waits = _waiting(wish, live)
        if records.intent is not None:
            half = _resumed(base, records.intent.state, records).sentence
            waits["sentence"] = f"{waits['sentence']}; {half}"
        return replace(
            base, action=Action.BLOCKED, outcome=Outcome.WAITING, **{**waits, "drift": kept}
        )
    if records.intent is not None:
        resumed = _resumed(base, records.intent.state, records)
        newer = _superseding(base, resumed.intent, live, allow) if allow.supersede else None
        return newer if newer is not None else resumed
    if wish.target is None:
        return _stopped(base, live)
    return _running(base, wish.target, live, allow)


def _still(
    wish: Wish, action: Action, outcome: Outcome, reason: Reason, sentence: str, **more: Any
) -> ServerPlan:
    return ServerPlan(wish, action, outcome, reason, sentence, **more)


def blocked(wish: Wish, outcome: Outcome, reason: Reason, sentence: str) -> ServerPlan:
    """Give the plan for a server that nothing can be said of: its host is silent, or its spec is wrong."""
    return _still(wish, Action.BLOCKED, outcome, reason, sentence)


def _waiting(wish: Wish, live: LiveServer) -> dict[str, Any]:
    hold = live.known_records.hold if live.known_records else None
    if hold is None:
        return {
            "reason": Reason.SUSPENDED,
            "sentence": f"suspended by its spec; observed, not touched ({wish.server})",
        }
    return {
        "reason": Reason.HOLD,
        "sentence": f"held by {hold.owner or 'somebody'}{_until(hold)}: {hold.reason or 'no reason given'}; `reconcile resume {wish.server}` ends it",
    }


def expired(hold: Hold, now: float) -> bool:
    """Say whether a hold has run out. Where the time is not known none has."""
    return hold.until is not None and 0 < hold.until <= now


def reminder(server: str, hold: Hold) -> str:
    """Say that a hold has run out: it binds nobody any more, and is shown until somebody takes it away."""
    return f"the hold of {hold.owner or 'somebody'} ({hold.reason or 'no reason given'}) ran out at {_moment(hold.until)}; `reconcile resume {server}` takes the reminder away"


def _until(hold: Hold) -> str:
    return "" if hold.until is None else f" until {_moment(hold.until)}"


def _moment(at: float | None) -> str:
    return datetime.fromtimestamp(at or 0.0, tz=UTC).strftime("%Y-%m-%dT%H:%MZ")


def _resumed(base: ServerPlan, state: Mapping[str, Any], records: Records) -> ServerPlan:
    """Go on with a rollout that was left half-way; an intent that cannot be read is refused, never guessed at (F10).

    While its lease lives it is somebody's, as far as anybody can see from here; claiming finds out whether they live.
    """
    try:
        intent = attempts.load(state)
    except ValueError as error:
        return replace(
            base,
            action=Action.BLOCKED,
            outcome=Outcome.REFUSED,
            reason=Reason.UNREADABLE,
            sentence=str(error),
        )
    stands = f"{intent.leg.value}, at {intent.phase.value}"
    at = f"at {intent.phase.value}"
    if intent.leg is not Leg.FORWARD:
        at += f", {intent.leg.value}"
    if records.lease_lives:
        by = records.lease_holder or "somebody"
        sentence = f"a rollout by {by} is under way ({at}); it is gone on with if that ends without finishing it"
    else:
        sentence = f"a rollout was left half-way {at}; it is gone on with"
    return replace(
        base,
        action=Action.RESUME,
        sentence=sentence,
        drift=tuple(
            d for d in base.drift if d.what not in {"down", "unverified"}
        ),  # Its own doing.
        intent=intent,
        steps=("claim the host", "observe", f"go on {stands}"),
    )


def _superseding(
    base: ServerPlan, intent: Attempt | None, live: LiveServer, allow: Permissions
) -> ServerPlan | None:
    """Plan what is wanted by now in the place of a rollout that was left half-way; None where that one is to be gone on with.

    Only the way forward of one server is superseded, and only by a plan that acts: a rollout of several that take over each
    other's GPUs is one thing, and a way back is finished first.
    """
    if intent is None or intent.leg is not Leg.FORWARD or len(intent.members) != 1:
        return None
    under_way, target = intent.member.new, base.wish.target
    if under_way is None or (target is not None and target.revision == under_way.revision):
        return None
    if target is None:
        plan = _stopped(base, live)
    elif target.revision == base.applied:
        wish = replace(base.wish, target=base.old or target)
        plan = forced(replace(base, wish=wish), "the applied revision is wanted again")
    else:
        plan = _running(base, target, live, allow)
    if not plan.acts:
        return None
    sentence = f"{plan.sentence}; takes the place of the rollout of {under_way.revision[:12]} that was left half-way"
    return replace(plan, sentence=sentence, supersedes=intent.id)


def _stopped(base: ServerPlan, live: LiveServer) -> ServerPlan:
    unit = live.unit.value if isinstance(live.unit, Known) else None
    down = unit is not None and unit.phase in {"down", "not-found"}
    if down and unit is not None and unit.unit_file_state not in {"enabled", "enabled-runtime"}:
        return replace(base, outcome=Outcome.STOPPED, sentence="stopped as asked", drift=())
    if not base.applied and not down:
        return replace(
            base,
            action=Action.BLOCKED,
            outcome=Outcome.REFUSED,
            reason=Reason.NOT_OURS,
            sentence=f"{live.unit_name} was not made by this tool; it is not stopped",
        )
    steps = _steps(base, Action.STOP)
    return replace(base, action=Action.STOP, sentence="its spec says stopped", steps=steps)


def _running(base: ServerPlan, target: Target, live: LiveServer, allow: Permissions) -> ServerPlan:
    records = live.known_records
    assert records is not None, "plan_server has looked"
    refusal = ownership_refusal(
        live,
        adopt=allow.adopt,
        overwrite=allow.overwrite or base.wish.excuse.unit or base.wish.drift in {"heal", "off"},
    )
    if refusal is not None:
        return replace(
            base,
            action=Action.BLOCKED,
            outcome=Outcome.REFUSED,
            reason=refusal.reason,
            sentence=refusal.sentence,
        )
    if not base.applied and not allow.adopt and _stranger_runs(base.wish, live):
        sentence = f"{live.unit_name} runs and was not made by this tool: `--adopt` takes it over (`reconcile adopt` writes its spec)"
        return replace(
            base,
            action=Action.BLOCKED,
            outcome=Outcome.REFUSED,
            reason=Reason.NOT_OURS,
            sentence=sentence,
        )
    saved = _saved_sha(live)
    base = replace(base, saved_sha=saved)
    rejected = next(
        (r for r in records.rejected if r.revision == target.revision and r.definite), None
    )
    if rejected is not None and not allow.retry and base.applied != target.revision:
        sentence = f"this revision failed here before ({rejected.reason}: {rejected.sentence}); change it, or `reconcile retry {base.wish.server}`"
        owed = LIFECYCLE | ({"unit-edited"} if base.wish.drift == "heal" else set())
        owed |= {"drop-in"} if base.aside else set()
        if base.old is not None and {d.what for d in base.drift} & owed:
            # The wish is refused, but the last good revision is still owed (L2).
            back = _same_revision(base)
            return replace(back, sentence=f"{sentence}; the last good revision: {back.sentence}")
        return replace(
            base,
            action=Action.BLOCKED,
            outcome=Outcome.REFUSED,
            reason=Reason.REJECTED,
            sentence=sentence,
        )
    if base.applied == target.revision:
        return _same_revision(base)
    if not base.applied and base.wish.stranger_differs == ():
        return replace(
            base,
            action=Action.TAKE_OVER,
            sentence="what runs already is what is wanted; it is taken over without a restart",
            steps=_steps(base, Action.TAKE_OVER),
        )
    if not base.applied and saved and base.wish.stranger_differs:
        notes = tuple(f"taking over takes a restart: {d}" for d in base.wish.stranger_differs)
        base = replace(base, notes=(*base.notes, *notes))
    if not base.applied:
        action = Action.ADOPT if saved else Action.DEPLOY
        sentence = (
            "takes over a unit that was here before; it is saved first"
            if saved
            else "first deployment"
        )
        return replace(base, action=action, sentence=sentence, steps=_steps(base, action))
    worst = max((c.effect_class for c in base.wish.changes), default=EffectClass.RESTART)
    kinds = {d.what for d in base.drift}
    stays = not kinds & {"down", "looping", "unverified", "unit-edited", "unit-missing"}
    if worst is EffectClass.RELOAD and stays:
        return replace(
            base,
            action=Action.RELOAD,
            sentence="only settings of the unit change; the process is not touched",
            steps=_steps(base, Action.RELOAD),
        )
    return replace(
        base,
        action=Action.CHANGE,
        sentence="the spec changed",
        steps=_steps(base, Action.CHANGE),
    )


def _setting_aside(base: ServerPlan, live: LiveServer) -> ServerPlan:
    """Note which drop-ins are moved aside, and show what they set: a person's change is never gone without a word."""
    foreign = foreign_drop_ins(live, base.wish.excuse)
    moved = [(path, text) for path, text in foreign if movable(base.wish.unit, path)]
    notes = tuple(
        f"{path} (sets {wording_of(text)}) is moved aside; its bytes stay on the host"
        for path, text in moved
    )
    return replace(
        base,
        aside=tuple((path, text_sha256(text)) for path, text in moved),
        notes=(*base.notes, *notes),
        left_in_place=len(moved) < len(foreign),
        aside_restarts=any(
            key not in APPLIED_AT_ONCE for _, text in moved for key, _ in settings_of(text)
        ),
    )


def _excused(wish: Wish, live: LiveServer, applied: Applied | None) -> list[str]:
    """Show what is ignored, and why: a rule that hides something without a word is soon forgotten."""
    excuse = wish.excuse
    if not excuse.rules or applied is None:
        return []
    seen = {d.sentence for d in drift_of(live, applied)} - {
        d.sentence for d in drift_of(live, applied, excuse)
    }
    reasons = dict(excuse.rules)
    found = [
        f"ignored: {s} (gpu-taken: {reasons['gpu-taken']})"
        for s in (wish.strangers if excuse.gpu_taken else ())
    ]
    for sentence in sorted(seen):
        names = [w for w in reasons if w.startswith("drop-in:") and w[8:] in sentence]
        if not names:
            is_unit = "was edited" in sentence
            names = (
                [w for w in reasons if w.startswith("unit:") == is_unit and ":" in w]
                if is_unit
                else ["port"]
            )
        why = "; ".join(f"{w}: {reasons[w]}" for w in names if w in reasons)
        found.append(f"ignored: {sentence} ({why})")
    return found


def _stranger_runs(wish: Wish, live: LiveServer) -> bool:
    """Say whether a unit runs whose text we did not write, wherever its file lies."""
    records, text = live.known_records, live.effective_text
    if isinstance(live.files, Known) and text is None:
        text = live.files.value.text
    return (
        wish.stranger_differs is not None
        and records is not None
        and text is not None
        and text_sha256(text) not in records.produced
    )


def _same_revision(base: ServerPlan) -> ServerPlan:
    """The spec is what was applied: is the host still there?

    What comes back is what the host recorded, byte for byte, not what this version would render today: an upgrade of the
    tool restarts nobody.
    """
    kinds = {d.what for d in base.drift}
    if base.old is not None:
        base = replace(base, wish=replace(base.wish, target=base.old))
    if kinds & {"down", "looping", "unit-missing"}:
        return replace(
            base,
            action=Action.START,
            sentence="applied, but not running as it should",
            steps=_steps(base, Action.START),
        )
    if kinds & {"unit-edited", "other-flags"} and base.wish.drift == "heal":
        how = "edited on the host" if "unit-edited" in kinds else "started with other flags"
        return replace(
            base,
            action=Action.CHANGE,
            sentence=f"{how}; the applied revision comes back (drift: heal)",
            steps=_steps(base, Action.CHANGE),
        )
    if base.aside and not base.left_in_place and not kinds & {"port", "gpu-taken", "other-flags"}:
        # The run that was applied began without them; a run since then read them if it had to.
        again = "unverified" in kinds and base.aside_restarts
        action = Action.CHANGE if again else Action.RELOAD
        which = ", ".join(path for path, _ in base.aside)
        how = "the applied revision comes back" if again else "the process is not touched"
        return replace(
            base,
            action=action,
            sentence=f"{which} changes the unit behind the spec's back; moved aside, {how} (drift: heal)",
            steps=_steps(base, action),
        )
    if "unverified" in kinds:
        return replace(
            base,
            action=Action.VERIFY,
            sentence="restarted since it was applied; proven again without touching it",
            steps=_steps(base, Action.VERIFY),
        )
    if kinds & {"drop-in", "port", "other-flags", "gpu-taken"} and base.wish.drift != "off":
        sentences = "; ".join(d.sentence for d in base.drift)
        if base.wish.drift == "heal":
            sentences += ". This cannot be healed from here, since it is not this unit's own: take it away on the host"
        return replace(
            base,
            action=Action.BLOCKED,
            outcome=Outcome.REFUSED,
            reason=Reason.DRIFTED,
            sentence=sentences,
        )
    policy = [c.path for c in base.wish.changes if c.effect_class is EffectClass.CONTROLLER]
    if policy:
        sentence = f"in sync; {', '.join(policy)} changed since it was applied, which counts from the next rollout on"
        return replace(base, reason=Reason.GATE_CHANGED, sentence=sentence)
    return replace(base, sentence="in sync")


def checked(plan: ServerPlan, checks: Sequence[Check]) -> ServerPlan:
    """Give the plan with what preflight would find now; what would refuse is refused here, where nobody has waited for it."""
    plan = replace(plan, checks=tuple(checks))
    wrong = refused(checks)
    if not wrong:
        return plan
    sentence = "; ".join(f"{c.sentence} [{c.id}]" for c in wrong)
    return replace(
        plan,
        action=Action.BLOCKED,
        outcome=Outcome.REFUSED,
        reason=Reason.PREFLIGHT,
        sentence=f"{sentence}. Nothing was stopped",
    )


def waived_ids(plan: ServerPlan) -> tuple[str, ...]:
    """Name the checks that did not hold and are waived by the spec."""
    return tuple(c.id for c in plan.checks if c.verdict is Verdict.WAIVED)


def forced(plan: ServerPlan, sentence: str) -> ServerPlan:
    """Give the plan that rolls out again what is there already, because a person asks for it."""
    return replace(plan, action=Action.CHANGE, sentence=sentence, steps=_steps(plan, Action.CHANGE))


def _saved_sha(live: LiveServer) -> str | None:
    """Give the digest of a unit that is not ours and may be replaced: the host saves exactly those bytes first (S7)."""
    records = live.known_records
    text = live.permanent.value if isinstance(live.permanent, Known) else None
    if text is None or records is None:
        return None
    sha = text_sha256(text)
    return None if sha in records.produced else sha


def _old_target(live: LiveServer, recorded: Mapping[str, Target]) -> Target | None:
    """Give what the way back leads to: the applied revision from recorded content, or the unit that was here before us."""
    records = live.known_records
    if records is None:
        return None
    if records.applied is not None:
        return recorded.get(records.applied.revision)
    text = live.permanent.value if isinstance(live.permanent, Known) else None
    running = live.phase in {"running", "starting", "looping"}
    return Target(revision=ORIGINAL, unit_text=text) if text is not None and running else None


def _may_be_killed(live: LiveServer) -> tuple[str, ...]:
    """Name the processes that would be ended by force if they do not stop: the unit's own, and nobody else's."""
    processes = live.context.get("processes") or []
    return tuple(f"pid {p.get('pid')} {str(p.get('exe') or p.get('comm'))[:60]}" for p in processes)


def _history(live: LiveServer) -> dict[str, Any]:
    outages = [
        float(h["outage_s"])
        for h in live.history
        if h.get("outcome") == "Applied" and isinstance(h.get("outage_s"), int | float)
    ]
    return {
        "outage_s": statistics.median(outages[-5:]) if outages else None,
        "outage_runs": len(outages[-5:]),
    }


def prune_steps(base: ServerPlan) -> tuple[str, ...]:
    """Write the steps that end a server whose spec is gone."""
    kept = "its revisions, history and journal stay in the host's records"
    return (
        *_steps(base, Action.STOP),
        f"remove {base.wish.unit} and its bindings, so that its GPUs and port are free; {kept}",
    )


def _steps(base: ServerPlan, action: Action) -> tuple[str, ...]:
    """Write the ordered steps as sentences, with the numbers that bound each."""
    steps = _steps_of(base, action)
    moved = tuple(
        f"move {path} aside and daemon-reload; its bytes are kept" for path, _ in base.aside
    )
    at = steps.index(LEASE) + 1
    return (*steps[:at], *moved, *steps[at:])


LEASE = "acquire the lease"


def _steps_of(base: ServerPlan, action: Action) -> tuple[str, ...]:
    wish = base.wish
    budgets = wish.budgets
    stop = f"stop {wish.unit} (systemd's limit raised to {budgets.stop_s:g} s first)"
    proof = f"prove the GPUs free ({budgets.settle_s:g} s without a holder at idle memory; limit {budgets.release_s:g} s)"
    drain = f"drain: wait for requests in flight, at most {budgets.drain_s:g} s"
    gate = (
        f"measure against the gate, at most {budgets.gate_s:g} s"
        if wish.gated
        else "one real generation as its proof (no gate in the spec)"
    )
    start = [
        f"install {wish.unit} on trial (a reboot returns to what is there now)",
        "start; the guard on the host checks the GPUs again",
        f"wait until a real generation is answered, at most {budgets.ready_s:g} s",
        gate,
        "commit: permanent unit, record, timer off",
    ]
    first = [
        "preflight: engine flags, files, user, port, disk, GPUs, holders",
        LEASE,
        "disarm: no restarts, the host's dead-man timer set",
    ]
    match action:
        case Action.DEPLOY:
            return (*first, proof, *start)
        case Action.STOP:
            return (
                *first,
                drain,
                stop,
                proof,
                "settle: the unit stays down and does not start at boot",
            )
        case Action.RELOAD:
            return (
                LEASE,
                f"replace {wish.unit} and daemon-reload; the process is not touched",
                "one real generation as its proof",
                "record it as applied",
            )
        case Action.TAKE_OVER:
            return (
                LEASE,
                "one real generation as its proof",
                *([gate] if wish.gated else []),
                f"save {wish.unit}, replace it and daemon-reload; the process is not touched",
                "record this run as applied",
            )
        case Action.VERIFY:
            return (
                LEASE,
                "one real generation as its proof",
                "record this run as applied",
            )
        case _:
            return (*first, drain, stop, proof, *start)


# -- from plans to attempts ---------------------------------------------------------------------------------


def attempts_of(plans: Sequence[ServerPlan], new_id: Mapping[str, str]) -> tuple[Attempt, ...]:
    """Make the attempts of one host: one each, but one for all that take over each other's GPUs.

    Args:
        plans: The plans of one host that act.
        new_id: A fresh attempt id for each server; the first member's names the group.
    """
    groups: list[list[ServerPlan]] = []
    for plan in plans:
        if plan.action is Action.RESUME:
            continue
        touching = (
            [g for g in groups if any(_swap(plan, other) for other in g)]
            if plan.action in DISRUPTIVE
            else []
        )
        merged = [plan, *(p for g in touching for p in g)]
        groups = [g for g in groups if g not in touching]
        groups.append(sorted(merged, key=lambda p: p.wish.server))
    resumed = {
        p.intent.id: attempts.load(attempts.dump(p.intent)) for p in plans if p.intent is not None
    }
    fresh = [_attempt(group, new_id[group[0].wish.server]) for group in groups]
    return (*resumed.values(), *sorted(fresh, key=lambda a: a.members[0].server))


def _swap(one: ServerPlan, other: ServerPlan) -> bool:
    if other.action not in DISRUPTIVE:
        return False
    mine, theirs = _member(one), _member(other)
    return bool(set(mine.gpus) & set(theirs.gpus))


def _attempt(group: Sequence[ServerPlan], attempt_id: str) -> Attempt:
    leg, phase = Leg.FORWARD, Phase.PREFLIGHT
    if group[0].action in {Action.VERIFY, Action.RELOAD}:
        leg, phase = Leg.VERIFY, Phase.ACQUIRE
    elif group[0].action is Action.TAKE_OVER:
        leg, phase = Leg.TAKE_OVER, Phase.ACQUIRE
    return Attempt(
        id=attempt_id,
        host=group[0].wish.host,
        members=tuple(_member(p) for p in group),
        leg=leg,
        phase=phase,
    )


def _member(plan: ServerPlan) -> Member:
    wish = plan.wish
    return Member(
        server=wish.server,
        unit=wish.unit,
        new=wish.target,
        old=plan.old,
        budgets=wish.budgets,
        on_failure=wish.on_failure,
        on_inconclusive=wish.on_inconclusive,
        gated=wish.gated,
        port=wish.port,
        saved_sha=plan.saved_sha,
        adopt=plan.action in {Action.ADOPT, Action.TAKE_OVER},
        planned_on=plan.applied,
        supersedes=plan.supersedes,
        allow_no_pidfd=plan.no_pidfd,
        policy_digest=wish.policy_digest,
        drop_ins=plan.aside,
        waivers=wish.waivers,
        ignored=tuple(what for what, _ in wish.excuse.rules),
    )

"""What freeing some GPUs of a host would do, with nothing left to decide; and the proof that it ends with. Pure.

The ladder itself is the rollout's (`steps.py`): a release is an attempt whose servers have nothing to start afterwards.
Here is what is special to it: which servers are meant, who would be left alone, what is refused before anything stops,
and what a person is shown of each card in the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reconciler.core import release
from reconciler.core.attempt import Attempt, Leg, Member, Sample, load
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.desired import Budgets, Target
from reconciler.core.effect import Acted, Effect, Observed, Reply, Signal, Stop
from reconciler.core.live import Gpu, Known, LiveHost, Unknown
from reconciler.helper import readings

SAMPLES_SHOWN = 20
DRIFT_MIB = 16
"""Above this the floor of a card has risen: what two samples of a quiet card may differ by."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One server that this host binds to GPUs: what is needed to stop it as a rollout would."""

    server: str
    unit: str
    gpus: tuple[str, ...]
    budgets: Budgets
    old: Target | None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """One process that has a card open, and whose it is."""

    pid: int
    start_ticks: int
    cls: str
    why: str
    command: str
    cgroup: str
    server: str
    outer: bool = False

    @property
    def key(self) -> tuple[bool, int, int]:
        """Give what tells this process from any other one of the host."""
        return self.outer, self.pid, self.start_ticks

    def sentence(self) -> str:
        """Name it for people."""
        where = " on the outer layer" if self.outer else ""
        return f"pid {self.pid} ({self.command[:80]}, in {self.cgroup[:120]}){where} is {self.cls}: {self.why}"


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU that is to be free."""

    uuid: str
    index: int
    used_mib: int | None
    total_mib: int | None
    baseline_mib: int | None
    holders: tuple[Holder, ...]
    quarantined: str = ""


@dataclass(frozen=True, slots=True)
class Objection:
    """Something that keeps the release from being begun."""

    outcome: Outcome
    reason: Reason
    sentence: str


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """What would be done: `stop` are the servers to be stopped and held, `resting` those that are down already."""

    host: str
    cards: tuple[Card, ...]
    stop: tuple[Bound, ...]
    resting: tuple[Bound, ...]
    objections: tuple[Objection, ...]

    @property
    def gpus(self) -> tuple[str, ...]:
        """Give the UUIDs of the cards that are to be free."""
        return tuple(c.uuid for c in self.cards)


def servers_on(live: LiveHost, gpus: Iterable[str]) -> tuple[str, ...]:
    """Name the servers that this host binds to any of these GPUs."""
    wanted = set(gpus)
    return tuple(
        sorted(name for name, entry in live.bound.items() if wanted & set(entry.get("gpus") or ()))
    )


def plan_release(
    host: str, live: LiveHost, gpus: Sequence[str], bound: Sequence[Bound]
) -> ReleasePlan:
    """Say what freeing these GPUs would do. `live` must have looked at every server that the host binds to them."""
    cards = tuple(_card(live, uuid, bound) for uuid in gpus)
    stop: list[Bound] = []
    resting: list[Bound] = []
    for one in bound:
        found = live.server(one.server)
        down = found.phase in {"down", "not-found"}
        held = found.known_records is not None and found.known_records.hold is not None
        leftover = any(h.server == one.server for c in cards for h in c.holders)
        begun = found.known_records is not None and found.known_records.intent is not None
        (resting if down and held and not leftover and not begun else stop).append(one)
    objections = tuple(_objections(live, cards, stop))
    return ReleasePlan(host, cards, tuple(stop), tuple(resting), objections)


def _card(live: LiveHost, uuid: str, bound: Sequence[Bound]) -> Card:
    cards = {g.uuid: g for g in live.gpus.value} if isinstance(live.gpus, Known) else {}
    gpu = cards.get(uuid) or Gpu(uuid, -1, "", None, None, None)
    marks = live.quarantine.value if isinstance(live.quarantine, Known) else {}
    baseline = live.baselines.get(uuid, {}).get("used_mib")
    return Card(
        uuid,
        gpu.index,
        gpu.used_mib,
        gpu.total_mib,
        int(baseline) if isinstance(baseline, int) else None,
        holders_of(live, uuid, bound),
        release.quarantine_sentence(uuid, marks[uuid]) if uuid in marks else "",
    )


def holders_of(live: LiveHost, uuid: str, bound: Sequence[Bound]) -> tuple[Holder, ...]:
    """Say who has a card open, and whose each is; one of our servers' only if it is bound to the card."""
    contexts = [
        (
            one.server,
            release.ownership_context(one.server, one.unit, live.server(one.server).context, live),
        )
        for one in bound
        if uuid in one.gpus
    ]
    nobody = ("", release.ownership_context("", "", {}, live))
    return tuple(
        sorted(
            (_whose(h, contexts, nobody) for h in release.holders_on(live, (uuid,))),
            key=lambda h: h.key,
        )
    )


def _whose(
    holder: Mapping[str, Any],
    contexts: Sequence[tuple[str, Mapping[str, Any]]],
    nobody: tuple[str, Mapping[str, Any]],
) -> Holder:
    judged = [(name, *readings.classify_holder(holder, c)) for name, c in [*contexts, nobody]]
    rank = {"owned": 0, "infra": 1, "unknown": 2, "foreign": 3}
    name, cls, why = min(judged, key=lambda one: rank[one[1]])
    return Holder(
        pid=int(holder["pid"]),
        start_ticks=int(holder["start_ticks"]),
        cls=cls,
        why=why,
        command=str(holder.get("exe") or holder.get("comm") or "?"),
        cgroup=str(holder.get("cgroup") or "?"),
        server=name if cls == "owned" else "",
        outer=holder.get("layer") == "outer",
    )


def _objections(
    live: LiveHost, cards: Sequence[Card], stop: Sequence[Bound]
) -> Iterator[Objection]:
    unknown = (
        ("the GPUs", live.gpus),
        ("whether GPUs are quarantined", live.quarantine),
    )
    for what, reading in unknown:
        if isinstance(reading, Unknown):
            yield Objection(
                Outcome.UNKNOWN, Reason.UNREADABLE, f"{what} cannot be read: {reading.reason}"
            )
    scan = live.raw.get("holders") or {}
    known = scan.get("known")
    if known is None:
        why = f"who holds the GPUs cannot be read: {scan.get('unknown')}"
        yield Objection(Outcome.UNKNOWN, Reason.UNREADABLE, why)
    elif not known.get("complete") or known.get("unreadable"):
        why = f"{known.get('unreadable')} processes could not be looked at, so nobody can be ruled out"
        yield Objection(Outcome.UNKNOWN, Reason.UNREADABLE, why)
    strangers = {h.key: (h, c) for c in cards for h in c.holders if h.cls in {"foreign", "unknown"}}
    for holder, card in strangers.values():
        sentence = f"GPU {card.index} ({card.uuid}): {holder.sentence()}; it is never touched"
        yield Objection(Outcome.REFUSED, Reason.FOREIGN_HOLDER, sentence)
    for one in stop:
        yield from _server_objections(live, one, stop)


def left_releases(live: LiveHost, stop: Sequence[Bound]) -> tuple[Attempt, ...]:
    """Give the releases of these servers, and no others, that were left half-way on their way to the end: they are gone on with."""
    names = {one.server for one in stop}
    found = [_left(live, one.server) for one in stop]
    return tuple(
        {
            attempt.id: attempt
            for attempt in found
            if attempt is not None
            and attempt.leg is Leg.FORWARD
            and all(m.hold and m.new is None for m in attempt.members)
            and {m.server for m in attempt.members} <= names
        }.values()
    )


def _left(live: LiveHost, server: str) -> Attempt | None:
    """Read what was left half-way of a server; None where there is nothing, or nothing that this version understands."""
    records = live.server(server).known_records
    if records is None or records.intent is None:
        return None
    try:
        return load(records.intent.state)
    except ValueError:
        return None


def _server_objections(live: LiveHost, one: Bound, stop: Sequence[Bound]) -> Iterator[Objection]:
    found = live.server(one.server)
    records = found.known_records
    if records is None or isinstance(found.unit, Unknown):
        yield Objection(
            Outcome.UNKNOWN, Reason.UNREADABLE, f"{one.unit} or its records cannot be read"
        )
        return
    if records.hold is not None and found.phase not in {"down", "not-found"}:
        hold = records.hold
        sentence = f"{one.server} is held by {hold.owner or 'somebody'} ({hold.reason or 'no reason given'}) and runs; `reconcile resume {one.server}` first"
        yield Objection(Outcome.WAITING, Reason.HOLD, sentence)
    goes_on = {m.server for attempt in left_releases(live, stop) for m in attempt.members}
    if records.intent is not None and one.server not in goes_on:
        left = _left(live, one.server)
        what = "release" if left is not None and all(m.hold for m in left.members) else "rollout"
        sentence = f"a {what} of {one.server} was left half-way; run `reconcile --server {one.server}` to finish it, or wait until the host has gone back by itself"
        yield Objection(Outcome.REFUSED, Reason.LEASE_HELD, sentence)


def attempts_for(
    plan: ReleasePlan, live: LiveHost, hold: Mapping[str, Any], new_id: Mapping[str, str]
) -> tuple[Attempt, ...]:
    """Make the attempts: one a server, but one for all that share a card. What was left half-way comes first, and as it stood."""
    left = left_releases(live, plan.stop)
    resumed = {m.server for attempt in left for m in attempt.members}
    groups: list[list[Bound]] = []
    for one in (o for o in plan.stop if o.server not in resumed):
        touching = [g for g in groups if any(set(one.gpus) & set(o.gpus) for o in g)]
        groups = [g for g in groups if g not in touching] + [
            [*(o for g in touching for o in g), one]
        ]
    text = json.dumps(dict(hold), sort_keys=True)
    fresh = tuple(
        Attempt(
            id=new_id[group[0].server],
            host=plan.host,
            members=tuple(_member(one, live, text) for one in group),
        )
        for group in groups
    )
    return (*(replace(attempt, resumed=True) for attempt in left), *fresh)


def _member(one: Bound, live: LiveHost, hold: str) -> Member:
    records = live.server(one.server).known_records
    applied = records.applied.revision if records is not None and records.applied else ""
    old = one.old
    if old is not None and set(old.gpu_uuids) != set(one.gpus):
        old = replace(old, gpu_uuids=one.gpus)  # The host's bindings say which cards are its.
    return Member(
        server=one.server,
        unit=one.unit,
        new=None,
        old=old,
        budgets=one.budgets,
        port=one.port,
        planned_on=applied,
        hold=hold,
    )


# -- the proof -----------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One holder as the ledger has it: what was done to it, and when it was seen last."""

    holder: Holder
    first_s: float
    last_s: float
    done: list[str] = field(default_factory=list)


@dataclass
class Ledger:
    """Who was seen on which card while a release went on, and what was done to each. Fed with every effect and reply."""

    bound: tuple[Bound, ...]
    gpus: tuple[str, ...]
    began: float
    cards: dict[str, dict[tuple[bool, int, int], Seen]] = field(default_factory=dict)
    unit_of: dict[str, str] = field(default_factory=dict)

    def look(self, live: LiveHost, now: float) -> None:
        """Note everybody who holds a card."""
        for uuid in self.gpus:
            rows = self.cards.setdefault(uuid, {})
            for holder in holders_of(live, uuid, self.bound):
                seen = rows.setdefault(holder.key, Seen(holder, now - self.began, now - self.began))
                seen.last_s = now - self.began
                if holder.cls == "owned":
                    seen.holder = holder

    def note(self, effect: Effect | None, reply: Reply) -> None:
        """Note what became of an effect."""
        if isinstance(reply, Observed) and isinstance(reply.live.gpus, Known):
            self.look(reply.live, reply.now)
        if not isinstance(reply, Acted):
            return
        at = f"{reply.now - self.began:.1f} s"
        if isinstance(effect, Stop):
            self._write(effect.server, None, f"{effect.unit} was stopped at {at}")
        if isinstance(effect, Signal):
            results = reply.data.get("results")
            for row in results if isinstance(results, list) else ():
                said = f"SIG{effect.signal} at {at}: {row['result']}"
                self._write(effect.server, int(row["pid"]), said)
            if reply.data.get("group") not in {None, "gone"}:
                self._write(
                    effect.server, None, f"control group killed at {at}: {reply.data['group']}"
                )

    def _write(self, server: str, pid: int | None, said: str) -> None:
        for rows in self.cards.values():
            for seen in rows.values():
                mine = seen.holder.server == server
                if mine and (pid is None or seen.holder.pid == pid) and said not in seen.done:
                    seen.done.append(said)


def judge_card(
    samples: Sequence[Sample], uuid: str, bound: Sequence[Bound], live: LiveHost, settle_s: float
) -> tuple[str, tuple[str, ...]]:
    """Judge one card by the samples so far, as the guard and the timer would: (verdict, reasons)."""
    mine = [one for one in bound if uuid in one.gpus]
    if not mine:
        context = {**release.ownership_context("", "", {}, live), "unit": None}
        raw = [{**s.raw, "unit": None, "processes": None} for s in samples]
        judged = readings.released(raw, [uuid], live.baselines, context, settle_s)
        return str(judged["verdict"]), tuple(judged["reasons"])
    states = []
    for one in mine:
        member = Member(one.server, one.unit, None, one.old, one.budgets)
        verdict = release.judge(
            samples, member, live, settle_s, gpus=(uuid,), dies_within_s=release.LAST_S
        )
        states.append((verdict.state, verdict.reasons))
    worst = ["released", "not-released", "unknown", "wedged", "fault"]
    return max(states, key=lambda s: worst.index(s[0]))


def proof_of(
    samples: Sequence[Sample], ledger: Ledger, live: LiveHost, settle_s: float
) -> list[dict[str, Any]]:
    """Write the proof of each card as plain JSON: what it was judged by, who was seen, what was done."""
    return [_card_proof(samples, uuid, ledger, live, settle_s) for uuid in ledger.gpus]


def _card_proof(
    samples: Sequence[Sample], uuid: str, ledger: Ledger, live: LiveHost, settle_s: float
) -> dict[str, Any]:
    card = _card(live, uuid, ledger.bound)
    verdict, reasons = judge_card(samples, uuid, ledger.bound, live, settle_s)
    total = card.total_mib or 0
    limit = (
        None
        if card.baseline_mib is None
        else card.baseline_mib + readings.baseline_tolerance_mib(total)
    )
    held = {h.key for h in card.holders}
    drift = (
        None
        if card.baseline_mib is None or card.used_mib is None or verdict != "released"
        else card.used_mib - card.baseline_mib
    )
    report = {
        "uuid": uuid,
        "index": card.index,
        "server": next((one.server for one in ledger.bound if uuid in one.gpus), ""),
        "verdict": verdict,
        "reasons": list(reasons),
        "baseline_mib": card.baseline_mib,
        "limit_mib": limit,
        "used_mib": card.used_mib,
        "total_mib": card.total_mib,
        "drift_mib": drift,
        "settle_s": settle_s,
        "samples": [_shown(s, uuid) for s in samples[-SAMPLES_SHOWN:]],
        "holders": [
            _holder_json(seen, gone=key not in held)
            for key, seen in sorted(ledger.cards.get(uuid, {}).items())
        ],
    }
    if verdict in {"wedged", "fault"}:
        report["next"] = next_rung(reasons, live)
    return report


def _holder_json(seen: Seen, *, gone: bool) -> dict[str, Any]:
    h = seen.holder
    done = list(seen.done)
    if not done:
        done = ["left alone"] if h.cls != "owned" else ["ended with its server"] if gone else []
    return {
        "pid": h.pid,
        "start_ticks": h.start_ticks,
        "layer": "outer" if h.outer else "inner",
        "class": h.cls,
        "why": h.why,
        "server": h.server,
        "command": h.command,
        "cgroup": h.cgroup,
        "first_seen_s": round(seen.first_s, 2),
        "last_seen_s": round(seen.last_s, 2),
        "gone": gone,
        "done": done,
    }


def _shown(sample: Sample, uuid: str) -> dict[str, Any]:
    known = (sample.raw.get("gpus") or {}).get("known") or {}
    card: Mapping[str, Any] = next(
        (g for g in known.get("gpus") or () if g.get("uuid") == uuid), {}
    )
    scan = (sample.raw.get("holders") or {}).get("known") or {}
    minor = card.get("minor")
    pids = sorted(
        h["pid"] for h in scan.get("holders") or () if not h.get("minors") or minor in h["minors"]
    )
    return {"at_s": round(sample.at, 3), "used_mib": card.get("used_mib"), "pids": pids}


@dataclass(frozen=True, slots=True)
class Released:
    """How a release ended: the servers, the proof of each card (plain JSON), and whether the host has kept it."""

    results: tuple[ServerResult, ...]
    proof: tuple[Mapping[str, Any], ...]
    lifted: tuple[str, ...] = ()
    not_kept: str = ""
    notes: tuple[str, ...] = ()
    """What became of the acts that a person consented to."""

    @property
    def verdicts(self) -> tuple[ServerResult, ...]:
        """Give the servers' results and one for each card, so that the worst decides."""
        return (*self.results, *(_card_result(card) for card in self.proof))


def _card_result(card: Mapping[str, Any]) -> ServerResult:
    why = "; ".join(card["reasons"])
    match card["verdict"]:
        case "released":
            return ServerResult(card["uuid"], Outcome.STOPPED, Reason.NONE, "proven free")
        case "unknown":
            return ServerResult(card["uuid"], Outcome.UNKNOWN, Reason.UNREADABLE, why)
        case "wedged" | "fault":
            return ServerResult(card["uuid"], Outcome.FAILED, Reason.WEDGED, why)
        case _:
            return ServerResult(card["uuid"], Outcome.FAILED, Reason.NOT_RELEASED, why)


# -- what comes next -------------------------------------------------------------------------------------------

RUNG_8 = "restart the container: everything in it is out for as long as it takes to boot and to load; only where nothing else runs in it (`--allow-container-restart VMID`)"
RUNG_9 = "reset the GPU: nobody may use it, and nothing may compute on any other GPU of the machine, so every server of this host is stopped first (`--allow-gpu-reset UUID`)"
RUNG_10 = "reboot the machine: every server on it is out for minutes. This tool never does that; a task that is stuck in the driver can make the reboot itself hang, so have a way to cut its power"


def next_rung(reasons: Sequence[str], live: LiveHost) -> dict[str, Any]:
    """Say which rung of the ladder would be next for a card that is not free, and what it would cost."""
    text = " ".join(reasons)
    stuck = "does not die" in text
    container = isinstance(live.identity, Known) and live.identity.value.container is not None
    hopeless = any(w in text for w in ("(host)", "fallen off", "is missing", "lost", "Reboot"))
    if hopeless or (stuck and not container):
        return {"rung": 10, "what": RUNG_10}
    if stuck:
        return {"rung": 8, "what": RUNG_8}
    return {"rung": 9, "what": RUNG_9}


__all__ = [
    "Bound",
    "Card",
    "Holder",
    "Ledger",
    "Objection",
    "ReleasePlan",
    "Released",
    "attempts_for",
    "judge_card",
    "next_rung",
    "plan_release",
    "proof_of",
    "servers_on",
]

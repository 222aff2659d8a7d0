"""Free some GPUs of a host and prove it: what `reconcile release` does, beside one pass (`reconcile.py`).

The servers bound to those GPUs go through the same step machine as in a rollout, to nothing instead of to a new revision,
and stay down under a hold. Then every GPU is proven by itself, whoever had it, and the proof is kept on the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reconciler.core import release
from reconciler.core.attempt import Sample
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.desired import ORIGINAL, Budgets, Target
from reconciler.core.effect import Effect
from reconciler.core.errors import CommandFailedError, HostError, UsageError
from reconciler.core.event import Event, OutcomeReached, StepProgress
from reconciler.core.fleet import Fleet
from reconciler.core.live import Known, LiveHost
from reconciler.core.release_plan import (
    Bound,
    Ledger,
    Objection,
    Released,
    ReleasePlan,
    attempts_for,
    judge_card,
    plan_release,
    proof_of,
    servers_on,
)
from reconciler.core.revision import restored
from reconciler.core.rollout import resume
from reconciler.core.spec import Host, Server
from reconciler.effects.carry import Turn, carry
from reconciler.effects.perform import Performer, observe
from reconciler.effects.ports import HostPort, Ports, Request
from reconciler.helper.readings import WEDGED_AFTER_S
from reconciler.reconcile import OBSERVE_DEADLINE_S, Watcher, World, fetch_revision, sole
from reconciler.resolve import budgets_of, card_named

ASK_DEADLINE_S = 60.0

SAMPLES_MIN = 4
SETTLING_S = 120.0
"""How long clean samples may take to become enough of them: a look through a container on a busy node takes seconds."""

RESTART_DEADLINE_S = 200.0
BACK_S = 120.0
"""From the restart of a container to a login in it."""

RESET_DEADLINE_S = 120.0
"""A reset takes seconds, and the driver's first initialisation afterwards tens of them on a machine with eight cards."""

ODD_S = 3.0
"""How long beyond its window a card is looked at that is not free: one failed probe is no verdict."""

LEAK_S = WEDGED_AFTER_S + 5.0
"""How long memory without a holder gets: after that it is stranded, not late."""


@dataclass(frozen=True, slots=True)
class Consent:
    """What a person allows in this run if nothing else helps, each by its name: a container, GPUs."""

    container: int | None = None
    gpus: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        """Say whether anything is allowed."""
        return self.container is not None or bool(self.gpus)


NO_CONSENT = Consent()


@dataclass(frozen=True, slots=True)
class Found:
    """What was found before anything is done: the plan, and what it was made from."""

    host: Host
    plan: ReleasePlan
    live: LiveHost
    bound: tuple[Bound, ...]
    settle_s: float
    consent: Consent = NO_CONSENT
    wait_s: float = 0.0
    """How long a person wants cards watched that do not become free, where that is longer than a verdict takes."""
    no_pidfd: bool = False
    """The operator lets hosts be worked on whose kernel cannot open a process; nobody is signalled there."""


# -- look and plan -------------------------------------------------------------------------------------------


def look(
    fleet: Fleet,
    host: Host,
    port: HostPort,
    world: World,
    names: Sequence[str],
    *,
    consent: Consent = NO_CONSENT,
) -> Found:
    """Find what holds the GPUs that are named (all, if none is), and plan. Changes nothing.

    Raises:
        UsageError: There is no such GPU.
        HostError: The host cannot be asked.
    """
    first = observe(port, _args(()), deadline_s=OBSERVE_DEADLINE_S)
    gpus = named(host.name, first, names)
    asked = tuple(
        {"server": name, "unit": str(first.bound[name].get("unit")), "port": None}
        for name in servers_on(first, gpus)
    )
    live = observe(port, _args(asked), deadline_s=OBSERVE_DEADLINE_S)
    specs = {s.name: s for s in fleet.servers if s.host == host.name}
    bound = tuple(_bound(a["server"] or "", live, specs, port, world) for a in asked)
    settle_s = max((one.budgets.settle_s for one in bound), default=Budgets().settle_s)
    plan = plan_release(host.name, live, gpus, bound)
    refusals = tuple(_consent_refusals(host, gpus, consent))
    plan = replace(plan, objections=(*refusals, *plan.objections))
    return Found(host, plan, live, bound, settle_s, consent)


def _consent_refusals(host: Host, gpus: Sequence[str], consent: Consent) -> Iterator[Objection]:
    """Refuse a consent that names something else than what is there: a typing mistake must not restart or reset anything."""
    vmid = host.proxmox.vmid if host.proxmox is not None else None
    if consent.container is not None and consent.container != vmid:
        has = f"container {vmid}" if vmid is not None else "no container of a Proxmox node"
        sentence = (
            f"--allow-container-restart {consent.container}: {host.name} is {has}; nothing was done"
        )
        yield Objection(Outcome.REFUSED, Reason.POLICY, sentence)
    for uuid in consent.gpus:
        if uuid not in gpus:
            there = ", ".join(gpus)
            sentence = (
                f"--allow-gpu-reset {uuid}: the GPUs to be released are {there}; nothing was done"
            )
            yield Objection(Outcome.REFUSED, Reason.POLICY, sentence)


def named(host: str, live: LiveHost, names: Sequence[str]) -> tuple[str, ...]:
    """Give the UUIDs of the GPUs that a person named by index, UUID or PCI bus id; all, if none was named."""
    if not isinstance(live.gpus, Known):
        raise CommandFailedError(
            host, f"its GPUs cannot be read: {live.gpus.reason}; nothing was changed"
        )
    cards = live.gpus.value
    if not names:
        return tuple(g.uuid for g in cards)
    found = []
    for name in names:
        card = card_named(int(name) if name.isdigit() else name, cards)
        if card is None:
            known = ", ".join(f"{g.index} ({g.uuid})" for g in cards) or "none"
            message = f"{host} has no GPU {name}; it has {known}"
            raise UsageError(message)
        found.append(card.uuid)
    return tuple(dict.fromkeys(found))


def _args(servers: Sequence[Mapping[str, Any]], cursor: str = "") -> dict[str, Any]:
    return {
        "servers": [dict(s) for s in servers],
        "kernel_cursor": cursor or None,
        "paths": [],
        "users": [],
        "gpus": True,
    }


def _bound(
    name: str, live: LiveHost, specs: Mapping[str, Server], port: HostPort, world: World
) -> Bound:
    """Collect what stopping a server needs: from its spec where there is one, else from what the host keeps."""
    found, entry = live.server(name), live.bound[name]
    records = found.known_records
    old: Target | None = None
    if records is not None and records.applied is not None:
        old, _ = fetch_revision(port, name, records.applied.revision)
    spec = specs.get(name)
    if spec is None and old is not None and old.spec:
        spec = restored(json.loads(old.spec), world.engines)
    gpus = tuple(str(u) for u in entry.get("gpus") or ())
    text = found.permanent.value if isinstance(found.permanent, Known) else None
    if old is None and text is not None:
        old = Target(revision=ORIGINAL, unit_text=text, gpu_uuids=gpus)
    return Bound(
        server=name,
        unit=str(entry.get("unit")),
        gpus=gpus,
        budgets=budgets_of(spec) if spec is not None else Budgets(),
        old=old,
        port=None,
    )


# -- act -------------------------------------------------------------------------------------------------------


def free(
    found: Found,
    port: HostPort,
    world: World,
    hold: Mapping[str, Any],
    emit: Callable[[Event], None],
    *,
    learn: bool = False,
) -> Released:
    """Stop the servers and hold them, then prove each GPU. The plan must have no objections.

    Raises:
        HostError: The host could not be asked for the proof.
    """
    assert not found.plan.objections, "what is objected to is not begun"
    began = world.clock.now()
    ledger = Ledger(found.bound, found.plan.gpus, began)
    ledger.look(found.live, began)
    results: list[ServerResult] = []
    with sole(world, found.host.name, [one.server for one in found.plan.stop]) as alone:
        ids = {one.server: world.new_id() for one in found.plan.stop}
        for attempt in attempts_for(found.plan, found.live, hold, ids):
            watcher = Watcher(found.host.name, began, world.clock, emit)
            ports = Ports(port, world.clock, world.engines, world.gate, world.holder)
            state = replace(attempt, alone=alone).every_member(allow_no_pidfd=found.no_pidfd)
            if attempt.resumed:
                state = resume(state)
            ended = carry(state, Performer(ports), _both(watcher, ledger))
            results += ended
            for result in ended:
                emit(OutcomeReached(world.clock.now() - began, result))
            if any(r.outcome is not Outcome.STOPPED for r in ended):
                break
        left = [
            one.server for one in found.plan.stop if one.server not in {r.server for r in results}
        ]
        results += [_not_begun(name) for name in left]
        if learn and not left:
            relearn(found, port)

        def say(why: str) -> None:
            emit(StepProgress(world.clock.now() - began, found.host.name, "", "proof", why))

        released = keep_proof(found, port, world, ledger, tuple(results), say=say)
        found = replace(found, wait_s=0.0)
        return last_rungs(found, port, world, ledger, released)


def _both(watcher: Watcher, ledger: Ledger) -> Callable[[Turn], None]:
    last: list[Effect | None] = [None]

    def turn(turn: Turn) -> None:
        ledger.note(last[0], turn.reply)
        last[0] = turn.effect
        watcher.turn(turn)

    return turn


def relearn(found: Found, port: HostPort) -> None:
    """Have the host take what its GPUs use now as their idle use, because a person says so.

    Raises:
        CommandFailedError: Somebody holds one of them, or it uses more than any idle card does.
    """
    asked = [{"server": o.server, "unit": o.unit, "port": None} for o in found.bound]
    live = observe(port, _args(asked), deadline_s=OBSERVE_DEADLINE_S)
    plan = plan_release(found.host.name, live, found.plan.gpus, found.bound)
    held = [h for c in plan.cards for h in c.holders if h.cls != "infra"]
    if held:
        message = f"{held[0].sentence()}: what the GPUs use now is not their idle use, and was not learned"
        raise CommandFailedError(found.host.name, message)
    answer = port.call(
        Request("relearn", {"gpus": list(found.plan.gpus)}), deadline_s=ASK_DEADLINE_S
    )
    if answer.outcome != "done":
        raise CommandFailedError(found.host.name, f"{answer.message}; nothing was learned")


def _not_begun(name: str) -> ServerResult:
    sentence = "not begun, because the release of another server failed; it runs on as it was"
    return ServerResult(name, Outcome.REFUSED, Reason.NOT_RELEASED, sentence)


def last_rungs(
    found: Found, port: HostPort, world: World, ledger: Ledger, released: Released
) -> Released:
    """Climb the rungs that a person consented to, where nothing else has freed a card, and prove again."""
    notes: list[str] = []
    stuck = [card for card in released.proof if card["verdict"] in {"wedged", "fault"}]
    held = [c for c in stuck if any(not h["gone"] and h["class"] != "infra" for h in c["holders"])]
    if found.consent.container is not None and held:
        uuids = [str(c["uuid"]) for c in held]
        notes.append(restart_container(found, port, world, uuids))
        released = keep_proof(found, port, world, ledger, released.results)
        stuck = [card for card in released.proof if card["verdict"] in {"wedged", "fault"}]
    named_stuck = [str(c["uuid"]) for c in stuck if c["uuid"] in found.consent.gpus]
    if named_stuck:
        # All that were named: linked cards are reset in one command or not at all.
        notes.append(reset_gpus(port, list(found.consent.gpus)))
        released = keep_proof(found, port, world, ledger, released.results)
    if found.consent.anything and not notes:
        notes.append("nothing was restarted or reset: it was not needed, or would not have helped")
    elif notes:
        released = replace(released, results=_freed(found, port, released, notes))
    return replace(released, notes=tuple(notes))


def _freed(
    found: Found, port: HostPort, released: Released, notes: Sequence[str]
) -> tuple[ServerResult, ...]:
    """Give the servers' results as they are now: one that is down and on hold, its cards free by what was consented to, is stopped as asked."""
    asked = [{"server": o.server, "unit": o.unit, "port": None} for o in found.bound]
    try:
        live = observe(port, _args(asked), deadline_s=OBSERVE_DEADLINE_S)
    except HostError:
        return released.results
    free_now = {card["uuid"] for card in released.proof if card["verdict"] == "released"}
    stopped = set()
    for one in found.bound:
        seen = live.server(one.server)
        held = seen.known_records is not None and seen.known_records.hold is not None
        if held and seen.phase in {"down", "not-found"} and set(one.gpus) <= free_now:
            stopped.add(one.server)
    sentence = f"down and on hold; its GPUs are proven free since {', '.join(notes)}"
    return tuple(
        replace(r, outcome=Outcome.STOPPED, reason=Reason.NONE, sentence=sentence)
        if r.server in stopped and r.reason in {Reason.WEDGED, Reason.NOT_RELEASED}
        else r
        for r in released.results
    )


def restart_container(found: Found, port: HostPort, world: World, uuids: list[str]) -> str:
    """Restart the container that was named, and wait until it answers again. Gives what became of it, and never raises."""
    vmid = found.consent.container
    running = sorted(
        name
        for name, entry in found.live.bound.items()
        if name not in {one.server for one in found.bound}
    )
    if running:
        return f"container {vmid} was not restarted: {', '.join(running)} would be ended with it"
    units = [one.unit for one in found.bound]
    request = Request("restart-container", {"vmid": vmid, "gpus": uuids, "units": units})
    try:
        answer = port.ask_outer(request, deadline_s=RESTART_DEADLINE_S)
    except HostError as error:
        return f"whether container {vmid} was restarted is not known: {error}"
    if answer is None or answer.outcome != "done":
        why = answer.message if answer is not None else "there is no outer layer"
        return f"container {vmid} was not restarted: {why}"
    until = world.clock.now() + BACK_S
    while world.clock.now() < until:
        try:
            observe(port, _args(()), deadline_s=OBSERVE_DEADLINE_S)
        except HostError:
            world.clock.sleep(1.0)
        else:
            return f"container {vmid} was restarted"
    return f"container {vmid} was restarted and did not answer within {BACK_S:.0f} s"


def reset_gpus(port: HostPort, uuids: list[str]) -> str:
    """Reset the GPUs that were named, on the layer that has them. Gives what became of it, and never raises."""
    request = Request("reset-gpu", {"gpus": uuids, "proven": True})
    names = ", ".join(uuids)
    try:
        answer = port.ask_outer(request, deadline_s=RESET_DEADLINE_S)
        if answer is None:
            answer = port.call(request, deadline_s=RESET_DEADLINE_S)
    except HostError as error:
        return f"whether {names} was reset is not known: {error}"
    if answer.outcome != "done":
        return f"{names} was not reset: {answer.message or answer.reason}"
    problems = answer.data.get("problems") or []
    after = f"; afterwards: {'; '.join(map(str, problems))}" if problems else ""
    return f"{names} was reset{after}"


def keep_proof(
    found: Found,
    port: HostPort,
    world: World,
    ledger: Ledger,
    results: tuple[ServerResult, ...],
    *,
    say: Callable[[str], None] = lambda _why: None,
) -> Released:
    """Take the samples of a proof, judge every card by them, and have the host keep what was found."""
    live, samples = _watch(found, port, world, ledger, say)
    proof = proof_of(samples, ledger, live, found.settle_s)
    for card in proof:
        if card["verdict"] in {"wedged", "fault"}:
            card["evidence"] = evidence_of(port, card["holders"])
    servers = [
        {"server": r.server, "outcome": r.outcome.value, "sentence": r.sentence} for r in results
    ]
    whole = {"host": found.host.name, "by": world.holder, "servers": servers, "gpus": proof}
    request = Request("note-release", {"proof": whole})
    try:
        answer = port.call(request, deadline_s=ASK_DEADLINE_S)
    except HostError as error:
        return Released(results, tuple(proof), not_kept=str(error))
    lifted = tuple(str(u) for u in answer.data.get("lifted") or ())
    why = "" if answer.outcome == "done" else answer.message or answer.reason
    return Released(results, tuple(proof), lifted, why)


def _watch(
    found: Found, port: HostPort, world: World, ledger: Ledger, say: Callable[[str], None]
) -> tuple[LiveHost, tuple[Sample, ...]]:
    """Look until every card is proven free, or until looking longer would not help and nobody wants it (rung 7)."""
    asked = [{"server": o.server, "unit": o.unit, "port": None} for o in found.bound]
    cursor, began = release.cursor_of(found.live), world.clock.now()
    samples: tuple[Sample, ...] = ()
    while True:
        live = observe(port, _args(asked, cursor), deadline_s=OBSERVE_DEADLINE_S)
        now = world.clock.now()
        samples = (*samples[-60:], release.sample_of(live, now))
        ledger.look(live, now)
        verdicts = [
            judge_card(samples, uuid, found.bound, live, found.settle_s) for uuid in ledger.gpus
        ]
        open_ = [(state, reasons) for state, reasons in verdicts if state != "released"]
        leaks = all(state == "not-released" and "still holds" in " ".join(r) for state, r in open_)
        held = any("held by" in " ".join(r) for _, r in open_)
        limit = LEAK_S if leaks and not held else found.settle_s + ODD_S
        if held:
            limit = max(limit, release.LAST_S + ODD_S)  # Sooner nobody can be told not to die.
        settling = all(r and r[0].startswith("settling:") for _, r in open_)
        if settling or len(samples) < SAMPLES_MIN:
            limit = max(limit, SETTLING_S)  # Looks of seconds each are slow, not a verdict.
        limit, waited = max(limit, found.wait_s), now - began
        if not open_ or waited >= limit or world.clock.stopping:
            return live, samples
        why = next((reasons[0] for _, reasons in open_ if reasons), "not free yet")
        say(f"{why} (watched for at most {limit:.0f} s)")
        world.clock.sleep(min(_gap(waited, found.settle_s, settling=settling), limit - waited))


def _gap(waited: float, settle_s: float, *, settling: bool) -> float:
    """Say when to look again: soon while a proof is being taken, rarely at a driver that is in trouble (`gpu-release.md`, rung 7)."""
    if waited < 10.0 or settling:
        soon = max(0.05, settle_s / 4)
        return soon if waited < 10.0 else min(1.0, soon)
    return 1.0 if waited < LEAK_S else min(10.0, waited / 20)


def evidence_of(port: HostPort, holders: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Collect what a person needs to see of a wedged card, from each layer that can show it. Never raises."""
    shown: dict[str, Any] = {}
    for layer in ("inner", "outer"):
        pids = [h["pid"] for h in holders if h["layer"] == layer and not h["gone"]][:32]
        request = Request("evidence", {"pids": pids})
        try:
            if layer == "inner":
                answer = port.call(request, deadline_s=ASK_DEADLINE_S)
            elif (outer := port.ask_outer(request, deadline_s=ASK_DEADLINE_S)) is not None:
                answer = outer
            else:
                continue
        except HostError as error:
            shown[layer] = {"unknown": str(error)}
            continue
        shown[layer] = answer.data.get("evidence") or {"unknown": answer.message or answer.reason}
    return shown


__all__ = ["Found", "Released", "evidence_of", "free", "keep_proof", "look", "named"]

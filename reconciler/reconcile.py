"""One pass over the fleet: load, resolve, observe, diff, plan, act, record. Start reading here.

Level-based: each pass starts from what is there. Hosts fan out here and only here; on one host attempts follow each
other, so that no two ever contend for a GPU, and all below is straight blocking code. A host that is silent or broken holds
up no other (L7).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from reconciler.core.attempt import Attempt, Leg, Phase
from reconciler.core.checks import waived
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.desired import Budgets, Target
from reconciler.core.effect import Done, Inspect, Leave, Measured, Turned, Wait
from reconciler.core.errors import (
    HostError,
    HostIdentityError,
    HostUnreachableError,
    LeaseHeldError,
    ReconcilerError,
    StoreError,
)
from reconciler.core.event import (
    Diagnostic,
    Event,
    OutcomeReached,
    StepFinished,
    StepProgress,
    StepStarted,
    VerdictGiven,
)
from reconciler.core.fleet import Fleet
from reconciler.core.live import Known, LiveHost, LiveServer, Records
from reconciler.core.plan import (
    Action,
    Peer,
    Permissions,
    ServerPlan,
    Wish,
    attempts_of,
    blocked,
    checked,
    forced,
    plan_server,
)
from reconciler.core.preflight import cards_of, flags_effect
from reconciler.core.pruning import Orphan, Pruning, limited, orphan_plan, orphans_of
from reconciler.core.revision import policy_digest, restored
from reconciler.core.rollout import resume
from reconciler.core.schedule import Facts, beside, scheduled, waiting
from reconciler.core.sealed import Sealed, digests_in
from reconciler.core.spec import Host, Server
from reconciler.core.survey import HostSurvey, Survey
from reconciler.effects.carry import Turn, carry
from reconciler.effects.inspect import engine_checks
from reconciler.effects.perform import (
    JOURNAL_LINES,
    Performer,
    fetch_args,
    observe,
    records_of,
)
from reconciler.effects.ports import (
    Clock,
    FlagMemory,
    GateRunner,
    HostPort,
    Leaving,
    PassMemory,
    Ports,
    Request,
    never,
)
from reconciler.effects.steer import act_once, write_records
from reconciler.engines.base import Engine
from reconciler.logs import log
from reconciler.resolve import budgets_of, carried, excused, recorded_target, wish_of

T = TypeVar("T")
R = TypeVar("R")

NO_EXTRAS = Permissions()

OBSERVE_DEADLINE_S = 40.0


STARTS = frozenset({Action.DEPLOY, Action.ADOPT, Action.CHANGE, Action.START})
"""Plans that start the engine anew, so that what it will find matters."""

LEG_WORDS = {Leg.BACK: "back: ", Leg.DOWN: "down: "}


class Connect(Protocol):
    """Whoever opens hosts: `wiring.py` by ssh, `lab` by simulation."""

    def __call__(self, host: Host) -> AbstractContextManager[HostPort]:
        """Open one host lazily; raises nothing before the first call on it."""
        ...


def sole_process(_host: str) -> AbstractContextManager[bool]:
    """Be the only process there is, as in a rehearsal."""
    return nullcontext(enter_result=True)


@contextmanager
def sole(world: World, host: str, servers: Iterable[str]) -> Iterator[bool]:
    """Be the only process of this installation that works on some servers of a host; False while another one works on any."""
    with ExitStack() as locks:
        places = [f"{host}/{quote(server, safe='')}" for server in sorted(servers)]
        had = [locks.enter_context(world.exclusive(place)) for place in places]
        yield all(had)


class Unseal(Protocol):
    """Whoever opens what lies encrypted in the repository: `sources/unseal.py` with the operator's key, `lab` by making it up."""

    def __call__(self, sealed: Sealed) -> str:
        """Give the secret. Raises a `ReconcilerError` that says why it cannot be opened, and nothing of it."""
        ...


def unopened(sealed: Sealed) -> str:
    """Open nothing, as in a world that can only be looked at."""
    message = f"{sealed.file} cannot be opened here"
    raise StoreError(message)


@dataclass
class Turns:
    """Who of each group is under change by this process: passes over several hosts at once must not take the last that serve."""

    lock: Lock = field(default_factory=Lock)
    under_way: dict[str, dict[str, bool]] = field(default_factory=dict)

    def begin(self, plans: Iterable[ServerPlan]) -> bool:
        """Take the turns of an attempt's members, all or none."""
        with self.lock:
            wanted = [(p.wish.server, p.turn) for p in plans if p.turn is not None]
            for _, turn in wanted:
                others = self.under_way.get(turn.group, {})
                mine = [t for _, t in wanted if t.group == turn.group]
                serving = sum(others.values()) + sum(t.serves for t in mine)
                if len(others) + len(mine) > turn.at_once or serving > max(
                    turn.room, sum(t.serves for t in mine)
                ):
                    return False
            for server, turn in wanted:
                self.under_way.setdefault(turn.group, {})[server] = turn.serves
            return True

    def end(self, plans: Iterable[ServerPlan]) -> None:
        """Give the turns back."""
        with self.lock:
            for plan in plans:
                if plan.turn is not None:
                    self.under_way.get(plan.turn.group, {}).pop(plan.wish.server, None)


@dataclass(frozen=True, slots=True)
class World:
    """Everything that a pass touches the world with."""

    connect: Connect
    clock: Clock
    engines: Mapping[str, Engine]
    gate: GateRunner
    holder: str
    new_id: Callable[[], str]
    exclusive: Callable[[str], AbstractContextManager[bool]] = sole_process
    """Make this process the only one of its installation that works on `HOST/SERVER`; False while another one is."""
    flags: FlagMemory = field(default_factory=PassMemory)
    leaving: Leaving = never
    wall: Callable[[], float] = lambda: 0.0
    """The time in seconds since the epoch; 0 where it is not known, and then no window is open and no hold has run out."""
    pruning: Pruning = field(default_factory=Pruning)
    turns: Turns = field(default_factory=Turns)
    unseal: Unseal = unopened
    hosts_at_once: int = 16
    """Hosts are waited for, not computed on: a thread each, bounded so that a fleet of hundreds opens no flood of logins."""


# -- observe and plan --------------------------------------------------------------------------------------


def survey(
    fleet: Fleet,
    world: World,
    *,
    only: frozenset[str] = frozenset(),
    host: str = "",
    prune: frozenset[str] = frozenset(),
    allow: Permissions = NO_EXTRAS,
) -> Survey:
    """Observe every host, and plan. Changes nothing, needs no privilege beyond looking.

    Args:
        fleet: The specs.
        world: What the hosts are reached with.
        only: Plan for these servers alone; left out, for all, and for those that hosts have and the specs have not.
        host: Plan for the servers of this host alone.
        prune: Servers without a spec that a person wants ended, whatever the settings say.
        allow: What the person in charge allows.
    """
    if not allow.at:
        allow = replace(allow, at=world.wall())
    chosen = frozenset(
        s.name
        for s in fleet.servers
        if (not only or s.name in only) and (not host or s.host == host)
    )
    looked_at = chosen | beside(fleet.servers, chosen)
    by_host: dict[str, list[Server]] = {}
    # An absence is a removal only where everything was understood (S13), and nobody asks for some servers alone.
    whole_fleet = fleet.complete and not only
    if whole_fleet:
        by_host = {h.name: [] for h in fleet.hosts if not host or h.name == host}
    for server in sorted(fleet.servers, key=lambda s: (s.host, s.name)):
        if server.name in looked_at:
            by_host.setdefault(server.host, []).append(server)
    work = [(fleet.host(name), tuple(servers)) for name, servers in sorted(by_host.items())]

    def look(item: tuple[Host, tuple[Server, ...]]) -> HostSurvey:
        at, servers = item
        found = replace(_survey_host(at, servers, world, allow), sealed=fleet.sealed)
        if not whole_fleet or found.live is None or (host and at.name != host):
            return found
        named = frozenset(s.name for s in fleet.servers if s.host == at.name) | fleet.held
        return _with_orphans(found, named, world, prune, none_left=not fleet.servers)

    found = on_each(work, look, world.hosts_at_once)
    bound = limited(
        (p for h in found for p in h.plans if p.wish.server not in prune), world.pruning.limit
    )
    return _scheduled(fleet, found, chosen, bound, allow)


def _with_orphans(
    found: HostSurvey,
    named: frozenset[str],
    world: World,
    prune: frozenset[str],
    *,
    none_left: bool,
) -> HostSurvey:
    """Look at the servers that a host has and the specs have not, and plan for them."""
    assert found.live is not None, "the caller has looked"
    orphans = orphans_of(found.live.bound, named)
    if not orphans:
        return found
    args = records_of((o.server, o.unit) for o in orphans)
    try:
        with world.connect(found.host) as port:
            seen = observe(port, args, deadline_s=OBSERVE_DEADLINE_S)
    except (HostError, StoreError) as error:
        return replace(found, silence=f"its other servers cannot be looked at: {error}")
    plans = []
    for orphan in orphans:
        live = seen.servers.get(orphan.server)
        if live is None:
            continue  # A saved state that knows of it by name alone.
        wish = _orphan_wish(found.host.name, orphan, live, world.engines)
        plans.append(
            orphan_plan(
                wish, live, world.pruning, asked=orphan.server in prune, none_left=none_left
            )
        )
    joined = replace(found.live, servers={**found.live.servers, **seen.servers})
    return replace(found, live=joined, plans=(*found.plans, *plans))


def _orphan_wish(
    host: str, orphan: Orphan, live: LiveServer, engines: Mapping[str, Engine]
) -> Wish:
    """Give what was last wanted of a server whose spec is gone, as far as its host remembers it."""
    records = live.known_records
    spec = records.applied.spec if records is not None and records.applied is not None else ""
    try:
        server = restored(json.loads(spec), engines) if spec else None
    except ValueError:
        server = None
    return Wish(
        server=orphan.server,
        host=host,
        unit=orphan.unit,
        target=None,
        budgets=budgets_of(server) if server is not None else Budgets(),
        port=server.listen.port if server is not None else None,
        gated=False,
        on_failure="stop",
        on_inconclusive="ask",
        drift="off",
        suspend=False,
        policy_digest="",
        protect=records.protected if records is not None else False,
    )


def _scheduled(
    fleet: Fleet,
    found: list[HostSurvey],
    chosen: frozenset[str],
    bound: Mapping[str, ServerPlan],
    allow: Permissions,
) -> Survey:
    """Let what may begin now begin, and everything else wait; leave out what was only looked at because others lean on it."""
    named = {s.name: s for s in fleet.servers}
    rows = [
        (p, h.live)
        for h in found
        for p in h.plans
        if p.wish.server in named and named[p.wish.server].host == h.host.name
    ]
    plans = {p.wish.server: p for p, _ in rows}
    facts = {p.wish.server: _facts(p, live) for p, live in rows}
    now = datetime.fromtimestamp(allow.at, tz=UTC) if allow.at else None
    done = dict(plans) if allow.unscheduled else scheduled(named, plans, facts, now, allow.override)
    done = {name: _with_peers(plan, fleet) for name, plan in done.items()}
    hosts = []
    for at in found:
        kept = []
        for plan in at.plans:
            name = plan.wish.server
            if name not in named or named[name].host != at.host.name:
                kept.append(bound.get(f"{at.host.name}/{name}", plan))  # An orphan.
            elif name in chosen:
                kept.append(done[name])
        hosts.append(replace(at, plans=tuple(kept)))
    return Survey(tuple(h for h in hosts if h.plans))


def _with_peers(plan: ServerPlan, fleet: Fleet) -> ServerPlan:
    """Note where the other members of its group are, for the look that follows the lease."""
    if plan.turn is None:
        return plan
    peers = tuple(
        Peer(s.name, s.unit, fleet.host(s.host))
        for s in fleet.servers
        if s.group is not None and s.group.name == plan.turn.group and s.name != plan.wish.server
    )
    return replace(plan, turn=replace(plan.turn, peers=peers))


def _facts(plan: ServerPlan, live: LiveHost | None) -> Facts:
    """Say what a schedule goes by. What is not known does not serve."""
    found = live.servers.get(plan.wish.server) if live is not None else None
    records = found.known_records if found is not None else None
    if live is None or found is None or records is None:
        return Facts()
    target, wall = plan.wish.target, live.raw.get("wall")
    applied = records.applied
    known = applied is not None and applied.at > 0 and isinstance(wall, int | float)
    return Facts(
        serving=found.phase == "running" and applied is not None and not records.disarmed,
        under_way=records.intent is not None or records.disarmed,
        applied_s=wall - applied.at if known and applied is not None and wall is not None else None,
        failed=target is not None
        and any(r.definite and r.revision == target.revision for r in records.rejected)
        and (applied is None or applied.revision != target.revision),
    )


def on_each(items: Iterable[T], do: Callable[[T], R], at_once: int) -> list[R]:
    """Do something for every host at once, and give the results in their order."""
    todo = list(items)
    if len(todo) < 2:
        return [do(item) for item in todo]
    with ThreadPoolExecutor(max_workers=min(at_once, len(todo)), thread_name_prefix="host") as pool:
        return list(pool.map(do, todo))


def _survey_host(
    host: Host, servers: tuple[Server, ...], world: World, allow: Permissions
) -> HostSurvey:
    try:
        with world.connect(host) as port:
            return look_at(host, servers, port, world.engines, allow, flags=world.flags)
    except (HostError, StoreError) as error:
        return _silent(host, servers, error)


def look_at(
    host: Host,
    servers: tuple[Server, ...],
    port: HostPort,
    engines: Mapping[str, Engine],
    allow: Permissions,
    *,
    flags: FlagMemory | None = None,
) -> HostSurvey:
    """Observe one host in one round trip a layer, and plan each of its servers.

    What the host keeps of the applied revision is fetched only for servers that will change.
    """
    live = observe(port, observe_args(servers, engines), deadline_s=OBSERVE_DEADLINE_S)
    plans: list[ServerPlan] = []
    baselines: dict[str, Mapping[str, Any]] = {}
    for server in servers:
        wish = wish_of(server, engines[server.engine.name], live)
        plan = plan_server(wish, live.server(server.name), {}, allow)
        if wish.excuse.keys and plan.applied:
            edited = any(d.what == "unit-edited" for d in plan.drift) or wish.drift == "off"
            kept = fetch_revision(port, server.name, plan.applied)[0] if edited else None
            wish = excused(wish, live.server(server.name), kept)
            plan = plan_server(wish, live.server(server.name), {}, allow)
        if (plan.acts or plan.reason is Reason.REJECTED) and plan.applied:
            # What was rejected may leave the last good revision owed (L2).
            recorded, gate = fetch_revision(port, server.name, plan.applied)
            if gate is not None:
                baselines[server.name] = gate
            known = {plan.applied: recorded} if recorded is not None else {}
            at = live.server(server.name).permanent
            if wish.excuse.keys and recorded is not None and isinstance(at, Known) and at.value:
                known = {plan.applied: carried(recorded, at.value, wish.excuse.keys)}
            plan = plan_server(wish, live.server(server.name), known, allow)
        plans.append(check_engine(plan, port, live, flags or PassMemory()))
    return HostSurvey(host, tuple(plans), live, baselines=baselines)


def check_engine(plan: ServerPlan, port: HostPort, live: LiveHost, flags: FlagMemory) -> ServerPlan:
    """Look at what the engine would find, where a start is planned: what preflight would refuse is shown before anybody waits.

    Only looks. What the helper cannot see without privilege is asked again by the rollout itself, which fails closed.
    """
    wish = plan.wish
    if plan.action not in STARTS or wish.target is None or wish.target.demands is None:
        return plan
    look = Inspect(wish.server, wish.target.demands, wish.target.user, cards_of(wish.target, live))
    found = engine_checks(port, look, flags_effect(wish.server, wish.target), flags)
    if isinstance(found, str):
        return replace(plan, notes=(*plan.notes, f"the engine was not looked at yet: {found}"))
    return checked(plan, waived(found, dict(wish.waivers)))


def pinned_survey(
    fleet: Fleet,
    server: Server,
    world: World,
    choose: Callable[[Records, Sequence[Mapping[str, Any]]], str],
    sentence: str,
) -> Survey:
    """Plan a rollout of a revision that the host keeps, whatever the specs say by now.

    `choose` picks the revision from the host's records and history; what it raises passes. The plan is blocked where the host does not
    have the whole content of that revision.
    """
    host = fleet.host(server.host)
    try:
        with world.connect(host) as port:
            live = observe(port, observe_args([server]), deadline_s=OBSERVE_DEADLINE_S)
            found = live.server(server.name)
            wish = wish_of(server, world.engines[server.engine.name], live)
            records = found.known_records
            if records is None:
                plan = plan_server(wish, found, {}, NO_EXTRAS)
                return Survey((HostSurvey(host, (plan,), live),))
            revision = choose(records, found.history)
            target, gate = fetch_revision(port, server.name, revision)
            applied = records.applied.revision if records.applied else ""
            old = (
                target
                if applied == revision
                else fetch_revision(port, server.name, applied)[0]
                if applied
                else None
            )
    except (HostError, StoreError) as error:
        return Survey((_silent(host, (server,), error),))
    if target is None:
        plan = blocked(
            wish,
            Outcome.REFUSED,
            Reason.NO_GOOD_REVISION,
            f"the host does not have the whole content of {revision[:12]}",
        )
        return Survey((HostSurvey(host, (plan,), live),))
    wish = replace(wish, target=target, port=target.port, changes=(), problem=None)
    known = {applied: old} if old is not None else {}
    plan = plan_server(wish, found, known, Permissions(retry=True))
    if plan.action in {Action.NOTHING, Action.VERIFY}:
        plan = forced(plan, sentence)
    baselines = {server.name: gate} if gate is not None else {}
    return Survey((HostSurvey(host, (plan,), live, baselines=baselines),))


def observe_args(
    servers: Iterable[Server], engines: Mapping[str, Engine] | None = None
) -> dict[str, Any]:
    """Phrase the observation of a pass; with `engines`, running ones are asked in the same round trip what they run with."""
    return {
        "servers": [
            {
                "server": s.name,
                "unit": s.unit,
                "port": s.listen.port,
                "invocation_lines": JOURNAL_LINES,
                **(asks_about(s, engines[s.engine.name]) if engines is not None else {"ask": []}),
            }
            for s in servers
        ],
        "kernel_cursor": None,
        "paths": [],
        "users": [],
        "gpus": True,
    }


def asks_about(server: Server, engine: Engine) -> dict[str, Any]:
    """Phrase everything that is read of what a running server was given, and of what it makes of that."""
    return {
        "ask": asks_of(server, engine),
        "environment": {
            "names": ["CUDA_VISIBLE_DEVICES", *sorted(server.env)][:ENVIRONMENT_NAMES],
            "starts": list(engine.variables),
            "hidden": sorted(server.secrets)[:ENVIRONMENT_NAMES],
        },
        "startup": list(engine.startup_words(server)),
    }


ENVIRONMENT_NAMES = 100
"""Variables that a host is asked about by name; a spec with more is compared on these."""


def asks_of(server: Server, engine: Engine) -> list[dict[str, Any]]:
    """Phrase what a running engine is asked about itself."""
    return [fetch_args(server, request) for request in engine.about_requests(server)]


def fetch_revision(
    port: HostPort, server: str, revision: str
) -> tuple[Target | None, Mapping[str, Any] | None]:
    """Read what the host keeps of a revision: its target, and the gate's evidence that is the next one's baseline."""
    request = Request("read-record", {"server": server, "name": f"revisions/{revision}"})
    answer = port.call(request, deadline_s=OBSERVE_DEADLINE_S)
    content = answer.data.get("content") if answer.outcome == "done" else None
    if (
        not isinstance(content, Mapping)
        or not isinstance(content.get("server"), Mapping)
        or not content.get("text")
    ):
        return None, None
    gate = content.get("gate")
    return recorded_target(content["server"], str(content["text"])), gate if isinstance(
        gate, Mapping
    ) else None


def _silent(host: Host, servers: tuple[Server, ...], error: Exception) -> HostSurvey:
    plans = tuple(
        blocked(_bare_wish(s), Outcome.UNKNOWN, _why_silent(error), str(error)) for s in servers
    )
    return HostSurvey(host, plans, silence=str(error))


def _why_silent(error: Exception) -> Reason:
    """Tell a host that does not answer from one that answers oddly, and from trouble on this machine, which is not the host's."""
    match error:
        case StoreError():
            return Reason.LOCAL_STATE
        case HostIdentityError():
            return Reason.HOST_IDENTITY
        case HostUnreachableError():
            return Reason.UNREACHABLE
        case _:
            return Reason.UNREADABLE


def _bare_wish(server: Server) -> Wish:
    """Give a wish for a server whose host cannot be asked: nothing is resolved."""
    return Wish(
        server=server.name,
        host=server.host,
        unit=server.unit,
        target=None,
        budgets=budgets_of(server),
        port=server.listen.port,
        gated=server.gate is not None,
        on_failure=server.on_failure,
        on_inconclusive="ask",
        drift=server.drift,
        suspend=server.suspend,
        policy_digest=policy_digest(server),
    )


# -- act ------------------------------------------------------------------------------------------------------


def act(found: Survey, world: World, emit: Callable[[Event], None]) -> tuple[ServerResult, ...]:
    """Carry the plan out, hosts at once, and give how each server ended, in the order of the plan."""
    began = world.clock.now()
    results = on_each(
        found.hosts, lambda h: _act_on_host(h, world, began, emit), world.hosts_at_once
    )
    return tuple(r for rows in results for r in rows)


def _act_on_host(
    found: HostSurvey, world: World, began: float, emit: Callable[[Event], None]
) -> list[ServerResult]:
    done: dict[str, ServerResult] = {p.wish.server: still(p) for p in found.plans if not p.acts}
    acting = [p for p in found.plans if p.acts]
    if acting:
        done.update(_carry_all(found, acting, world, began, emit))
    for note in _noted(found, done, world):
        emit(Diagnostic(world.clock.now() - began, found.host.name, "", "warning", note))
    ordered = [done[p.wish.server] for p in found.plans]
    for result in ordered:
        log.info(
            "server finished",
            host=found.host.name,
            server=result.server,
            outcome=result.outcome.value,
            reason=result.reason.value,
            revision=result.revision[:12],
        )
        emit(OutcomeReached(world.clock.now() - began, result))
    return ordered


def still(plan: ServerPlan) -> ServerResult:
    """Give the result of a server to which nothing is done."""
    target = plan.wish.target
    return ServerResult(
        plan.wish.server,
        plan.outcome,
        plan.reason,
        plan.sentence,
        target.revision if target else "",
    )


def _carry_all(
    found: HostSurvey,
    acting: list[ServerPlan],
    world: World,
    began: float,
    emit: Callable[[Event], None],
) -> dict[str, ServerResult]:
    done: dict[str, ServerResult] = {}
    try:
        with world.connect(found.host) as port, ExitStack() as locks:
            for attempt in attempts_of(acting, {p.wish.server: world.new_id() for p in acting}):
                members = {m.server for m in attempt.members}
                mine = [p for p in acting if p.wish.server in members]
                alone = locks.enter_context(sole(world, found.host.name, members))
                try:
                    opened = opened_for(mine, found.sealed, world.unseal)
                except ReconcilerError as error:
                    if not attempt.resumed:
                        done.update({p.wish.server: still(_locked(p, error)) for p in mine})
                        continue
                    opened = {}  # What it installed is on the host; what is missing there is refused there.
                if not world.turns.begin(mine):
                    done.update({p.wish.server: still(_outrun(p)) for p in mine})
                    continue
                watcher = Watcher(found.host.name, began, world.clock, emit)
                leaving = in_turn(mine, (found.host.name, port), world)
                ports = Ports(
                    host=port,
                    clock=world.clock,
                    engines=world.engines,
                    gate=world.gate,
                    holder=world.holder,
                    baselines=found.baselines,
                    flags=world.flags,
                    on_progress=watcher.progress,
                    leaving=leaving,
                    secrets=opened,
                )
                state = replace(attempt, alone=alone)
                if attempt.resumed:
                    state = resume(state)
                try:
                    if alone or not attempt.resumed:
                        _record_override(port, mine, world)
                    for result in carry(state, Performer(ports), watcher.turn):
                        done[result.server] = moved_on(result, acting)
                except LeaseHeldError as error:
                    refused = (Outcome.REFUSED, Reason.LEASE_HELD, str(error))
                    done.update(
                        {p.wish.server: ServerResult(p.wish.server, *refused) for p in mine}
                    )
                finally:
                    world.turns.end(mine)
                for plan in mine:
                    if plan.action is Action.PRUNE:
                        ended = done[plan.wish.server]
                        done[plan.wish.server] = _retired(port, plan, ended, world)
    except (HostError, StoreError) as error:
        for plan in acting:
            local = isinstance(error, StoreError)
            reason = Reason.LOCAL_STATE if local else Reason.UNREACHABLE
            unknown = ServerResult(plan.wish.server, Outcome.UNKNOWN, reason, str(error))
            done.setdefault(plan.wish.server, unknown)
    return done


def in_turn(mine: Sequence[ServerPlan], own: tuple[str, HostPort], world: World) -> Leaving:
    """Let an attempt of group members leave, once it holds its leases, where somebody else has begun a turn by then.

    Each controller first takes its own lease and only then looks at the others' hosts: of two that begin at once at least
    one sees the other, so the group's bounds hold without anything that all controllers share (S25).
    """
    plans = [p for p in mine if p.turn is not None and p.turn.peers]
    if not plans:
        return world.leaving
    seen: set[Any] = set()

    def leaving(state: Attempt, now: float) -> Leave | None:
        fences = tuple(m.fence for m in state.members)
        if state.phase is Phase.ACQUIRE and None not in fences and fences not in seen:
            seen.add(fences)
            if (why := crowded(plans, own, world)) is not None:
                return Leave(world.clock.now(), Reason.GROUP, why)
        return world.leaving(state, now)

    return leaving


def crowded(plans: Sequence[ServerPlan], own: tuple[str, HostPort], world: World) -> str | None:
    """Say why a group has no room any more, by its members as they are now; None where it has."""
    for turn in {p.turn.group: p.turn for p in plans if p.turn is not None}.values():
        members = [p for p in plans if p.turn is not None and p.turn.group == turn.group]
        names = {p.wish.server for p in members}
        peers = [p for p in turn.peers if p.server not in names]
        by_host: dict[str, list[Peer]] = {}
        for peer in peers:
            by_host.setdefault(peer.host.name, []).append(peer)

        def look(them: list[Peer]) -> list[tuple[str, Facts]]:
            return _peers_now(them, own, world)

        facts = dict(
            row for rows in on_each(by_host.values(), look, world.hosts_at_once) for row in rows
        )
        busy = sorted(name for name, fact in facts.items() if fact.under_way)
        if len(busy) + len(members) > turn.at_once:
            return f"{', '.join(busy)} of group {turn.group} is under change by now; nothing was changed"
        serving = sum(f.serving and not f.under_way for f in facts.values())
        if any(p.turn is not None and p.turn.serves for p in members) and serving < turn.needed:
            return f"{serving} others of group {turn.group} serve by now, and {turn.needed} must go on; nothing was changed"
    return None


def _peers_now(
    peers: list[Peer], own: tuple[str, HostPort], world: World
) -> list[tuple[str, Facts]]:
    """Look at group members of one host; a host that is silent has none that serves."""
    args = records_of((p.server, p.unit) for p in peers)
    at = peers[0].host
    try:
        with nullcontext(own[1]) if at.name == own[0] else world.connect(at) as port:
            live = observe(port, args, deadline_s=OBSERVE_DEADLINE_S)
    except (HostError, StoreError):
        return [(p.server, Facts()) for p in peers]
    return [(p.server, _peer_facts(live, p.server)) for p in peers]


def _peer_facts(live: LiveHost, server: str) -> Facts:
    """Say how a group member stands: one whose lease is held is about to change, though nothing shows yet."""
    found = live.servers.get(server)
    records = found.known_records if found is not None else None
    if found is None or records is None:
        return Facts()
    now = live.identity.value.boottime if isinstance(live.identity, Known) else 0.0
    held = records.lease_expires is not None and records.lease_expires > now
    return Facts(
        serving=found.phase == "running" and records.applied is not None and not records.disarmed,
        under_way=held or records.intent is not None or records.disarmed,
    )


def opened_for(
    plans: Iterable[ServerPlan], sealed: Mapping[str, Sealed], unseal: Unseal
) -> dict[str, str]:
    """Open the secrets that servers about to be changed have in the repository, by digest.

    Raises:
        ReconcilerError: One cannot be opened; then nothing is begun.
    """
    targets = [p.wish.target for p in plans if p.wish.target is not None]
    wanted = sorted({d for t in targets for d in digests_in(t.spec)})
    return {digest: unseal(sealed[digest]) for digest in wanted if digest in sealed}


def _locked(plan: ServerPlan, error: ReconcilerError) -> ServerPlan:
    why = f"{error}. Nothing was stopped"
    return replace(plan, outcome=Outcome.REFUSED, reason=Reason.PREFLIGHT, sentence=why)


def _outrun(plan: ServerPlan) -> ServerPlan:
    assert plan.turn is not None, "only a member of a group takes turns"
    why = f"another member of group {plan.turn.group} is under change by now"
    return waiting(plan, Reason.GROUP, why)


def _record_override(port: HostPort, plans: Iterable[ServerPlan], world: World) -> None:
    """Record on the host, before anything is done, that a change window was overridden, why, and by whom (S26)."""
    for plan in plans:
        if plan.overrides:
            sentence = f"change window overridden by {world.holder}: {plan.overrides}"
            line = {"version": 1, "outcome": "Override", "reason": "Window", "sentence": sentence}
            write_records(port, plan.wish.server, world.holder, [("history", line)])


def _retired(port: HostPort, plan: ServerPlan, result: ServerResult, world: World) -> ServerResult:
    """Take a server that was stopped because its spec is gone out of its host's records of what it runs."""
    if result.outcome is not Outcome.STOPPED:
        return result
    args = {"unit": plan.wish.unit, "protected": plan.wish.protect}
    try:
        act_once(port, plan.wish.server, world.holder, "retire", args)
    except (HostError, LeaseHeldError) as error:
        why = f"stopped, and not taken out of the host's records: {error}"
        return replace(result, outcome=Outcome.REFUSED, reason=Reason.ORPHANED, sentence=why)
    sentence = f"pruned: its GPUs are proven free, {plan.wish.unit} is removed; its revisions stay on {plan.wish.host}"
    return replace(result, reason=Reason.ORPHANED, sentence=sentence)


def _noted(found: HostSurvey, results: Mapping[str, ServerResult], world: World) -> tuple[str, ...]:
    """Keep on the host what it must remember though a spec may go: protection, and which request was answered how.

    Nothing is written where the host knows it already (L10). What cannot be written now is written by a later pass.
    """
    wanted: list[tuple[str, list[tuple[str, Mapping[str, Any] | None]]]] = []
    for plan in found.plans:
        live = found.live.servers.get(plan.wish.server) if found.live is not None else None
        records = live.known_records if live is not None else None
        if records is None or plan.outcome is Outcome.UNKNOWN:
            continue
        rows: list[tuple[str, Mapping[str, Any] | None]] = []
        result = results[plan.wish.server]
        orphaned = plan.reason is Reason.ORPHANED or plan.action is Action.PRUNE
        bound = records.bindings is not None or result.outcome is Outcome.APPLIED
        if bound and not orphaned and plan.wish.protect != records.protected:
            rows.append(("protect", {"version": 1} if plan.wish.protect else None))
        last = (records.handled or {}).get("token")
        if records.request and records.request != last and result.outcome not in UNDECIDED:
            answer = {"version": 1, "token": records.request, "outcome": result.outcome.value}
            more = {"reason": result.reason.value, "sentence": result.sentence}
            rows.append(("handled", {**answer, **more, "revision": result.revision}))
        if rows:
            wanted.append((plan.wish.server, rows))
    if not wanted:
        return ()
    failed = []
    try:
        with world.connect(found.host) as port:
            for server, rows in wanted:
                try:
                    write_records(port, server, world.holder, rows)
                except LeaseHeldError as error:
                    failed.append(str(error))
    except (HostError, StoreError) as error:
        failed.append(str(error))
    return tuple(f"{found.host.name}: {why}; noted by a later pass" for why in failed)


UNDECIDED = frozenset({Outcome.WAITING, Outcome.UNKNOWN})
"""A request is answered when something has been decided about its server."""


def moved_on(result: ServerResult, acting: list[ServerPlan]) -> ServerResult:
    """Say that a rollout that was gone on with is not what is wanted by now: only the plan that was shown is carried out (S20)."""
    plan = next((p for p in acting if p.wish.server == result.server), None)
    wanted = plan.wish.target if plan is not None and plan.action is Action.RESUME else None
    if (
        result.outcome is not Outcome.APPLIED
        or wanted is None
        or wanted.revision == result.revision
    ):
        return result
    sentence = f"the rollout that was left half-way is finished ({result.revision[:12]} applied); the spec has moved on since: run again"
    return replace(result, outcome=Outcome.WAITING, reason=Reason.SPEC_MOVED_ON, sentence=sentence)


# -- watching ---------------------------------------------------------------------------------------------------


def _idle(state: Attempt, server: str, step: str) -> str:
    """Say that a step of a first deployment had nothing to do, so that nobody wonders what was stopped."""
    member = next((m for m in state.members if m.server == server), None)
    if step not in {"drain", "stop"} or member is None or member.old or member.invocation:
        return ""
    return f"nothing to {step}: no server of this name runs"


@dataclass
class Watcher:
    """Turns the turns of one attempt into events: a step begins, waits, ends."""

    host: str
    began: float
    clock: Clock
    emit: Callable[[Event], None]
    step: tuple[str, str] | None = None
    since: float = 0.0
    said: str = ""

    def turn(self, turn: Turn) -> None:
        """See one turn of the loop."""
        state, now = turn.state, self.clock.now()
        current = (
            (state.member.server, step_name(state)) if state.cursor < len(state.members) else None
        )
        if state.phase is Phase.FINISHED:
            current = None
        if isinstance(turn.reply, Measured):
            verdict = VerdictGiven(
                now - self.began,
                self.host,
                self.step[0] if self.step else "",
                turn.reply.verdict,
                turn.reply.message,
            )
            self.emit(verdict)
        if current != self.step:
            self._finish(now, state)
            if current is not None and not isinstance(turn.effect, Done):
                self.emit(
                    StepStarted(
                        now - self.began, self.host, current[0], current[1], limit_of(state)
                    )
                )
            self.step, self.since, self.said = current, now, ""
        if isinstance(turn.reply, Turned) and turn.reply.reason not in {"Busy", "TooLate"}:
            self._diagnose(now, f"the host refused: {turn.reply.message}")
        if isinstance(turn.effect, Wait):
            self.progress(turn.effect.why)

    def progress(self, why: str) -> None:
        """Say what is waited for, once for each new sentence."""
        if self.step is not None and why != self.said:
            self.said = why
            self.emit(StepProgress(self.clock.now() - self.began, self.host, *self.step, why))

    def _finish(self, now: float, state: Attempt) -> None:
        if self.step is None:
            return
        forward, back = state.failure, state.back_failure
        ended = {f.phase.value: f for f in [forward] if f is not None}
        ended |= {
            f"{leg}{back.phase.value}": back for leg in LEG_WORDS.values() if back is not None
        }
        why = ended.get(self.step[1])
        detail = (why.sentence if why is not None else "") or _idle(state, *self.step)
        self.emit(
            StepFinished(
                now - self.began,
                self.host,
                *self.step,
                now - self.since,
                ok=why is None,
                detail=detail,
                reason=why.reason.value if why is not None else "",
            )
        )

    def _diagnose(self, now: float, message: str) -> None:
        server = self.step[0] if self.step else ""
        self.emit(Diagnostic(now - self.began, self.host, server, "warning", message))


def step_name(state: Attempt) -> str:
    """Name the step for people: the way back says so."""
    return f"{LEG_WORDS.get(state.leg, '')}{state.phase.value}"


def limit_of(state: Attempt) -> float | None:
    """Give how long the step may take, for the progress display."""
    budgets = state.member.budgets
    return {
        Phase.DRAIN: budgets.drain_s,
        Phase.STOP: budgets.stop_s,
        Phase.RELEASE: budgets.release_s,
        Phase.READY: budgets.ready_s,
        Phase.GATE: budgets.gate_s,
    }.get(state.phase)


__all__ = ["World", "act", "fetch_revision", "look_at", "pinned_survey", "still", "survey"]

"""Which of the plans of a pass may begin now, and what the others wait for: windows, dependencies, groups, canaries. Pure.

Judged from what was observed and from the time that is given, anew in each pass: one pass and the daemon obey alike, and a crash
loses nothing. What is already under way, and what brings a server back that is down, waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.plan import Action, ServerPlan, Turn
from reconciler.core.spec import Group, Server
from reconciler.core.units_of_measure import duration_text
from reconciler.core.windows import is_open, opens_at

CHANGES = frozenset(
    {
        Action.DEPLOY, Action.ADOPT, Action.TAKE_OVER, Action.CHANGE, Action.RELOAD, Action.STOP, Action.PRUNE,
    }
)  # fmt: skip
"""What somebody wanted to be different. `start`, `verify` and `resume` only restore what was wanted before."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one server beside its plan. `applied_s` is how long its revision has been applied, by its host's clock."""

    serving: bool = False
    under_way: bool = False
    applied_s: float | None = None
    failed: bool = False


@dataclass
class _Standing:
    """How one group stands while a pass is put together."""

    rules: Group
    members: tuple[str, ...]
    under_way: set[str] = field(default_factory=set)
    serving: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Say how many members that serve may stop serving."""
        return len(self.serving) - self.rules.min_available


def beside(servers: Iterable[Server], chosen: frozenset[str]) -> frozenset[str]:
    """Name the servers that must be looked at to judge the chosen ones: their dependencies, and the members of their groups."""
    rows = tuple(servers)
    groups = {s.group.name for s in rows if s.name in chosen and s.group is not None}
    needed = {name for s in rows if s.name in chosen for name in s.depends_on}
    needed |= {s.name for s in rows if s.group is not None and s.group.name in groups}
    return frozenset(s.name for s in rows if s.name in needed) - chosen


def scheduled(
    servers: Mapping[str, Server],
    plans: Mapping[str, ServerPlan],
    facts: Mapping[str, Facts],
    now: datetime | None,
    override: str = "",
) -> dict[str, ServerPlan]:
    """Give every plan as it stands now: as it was, or waiting, with what it waits for.

    Args:
        servers: Every server of the specs, by name.
        plans: What was planned, also of servers that are only looked at because others depend on them.
        facts: What was observed, for the same servers.
        now: The time; None where it is not known, and then no window is open.
        override: Why a person lets changes begin outside of their windows; recorded on the host.
    """
    groups = _groups(servers, plans, facts)
    done: dict[str, ServerPlan] = dict(plans)
    canaries = {g.rules.canary for g in groups.values()}
    for name in sorted(plans, key=lambda n: (n not in canaries, plans[n].wish.host, n)):
        plan, server = plans[name], servers.get(name)
        if server is None or plan.action not in CHANGES:
            continue
        if server.window is not None and (shut := _shut(server, now)) is not None:
            if not override:
                done[name] = waiting(plan, Reason.WINDOW, shut)
                continue
            plan = replace(
                plan,
                overrides=override,
                notes=(*plan.notes, f"begins outside of its change window: {override}"),
            )
        if (why := _depends(server, plans, facts)) is not None:
            done[name] = waiting(plan, Reason.DEPENDENCY, why)
            continue
        if server.group is not None:
            plan = _in_group(plan, groups[server.group.name], done, facts)
        done[name] = plan
    return done


IN_TURN = frozenset({Reason.DEPENDENCY, Reason.GROUP, Reason.CANARY})
"""What a server waits for that another one's rollout may have brought about."""


def has_successors(results: Iterable[ServerResult]) -> bool:
    """Say whether looking again at once may let others begin: something was brought about, and somebody waits for such."""
    rows = tuple(results)
    moved = any(r.outcome in {Outcome.APPLIED, Outcome.STOPPED} for r in rows)
    return moved and any(r.outcome is Outcome.WAITING and r.reason in IN_TURN for r in rows)


def waiting(plan: ServerPlan, reason: Reason, why: str) -> ServerPlan:
    """Give a plan that waits."""
    return replace(
        plan,
        action=Action.BLOCKED,
        outcome=Outcome.WAITING,
        reason=reason,
        sentence=f"{plan.sentence}; {why}",
        steps=(),
    )


def _shut(server: Server, now: datetime | None) -> str | None:
    assert server.window is not None, "the caller has looked"
    windows = server.window.windows
    if now is None:
        return "waits for its change window, and the time is not known"
    if is_open(windows, now):
        return None
    opens = opens_at(windows, now)
    if opens is None:
        return "waits for its change window, which does not open within a year"
    return f"waits for its change window, which opens {_when(opens, windows.zone)}"


def _when(moment: datetime, zone: str) -> str:
    from zoneinfo import ZoneInfo  # noqa: PLC0415  (reads the zone's file)

    local = moment.astimezone(ZoneInfo(zone))
    return f"{local:%Y-%m-%d %H:%M} {zone} ({moment.astimezone(UTC):%Y-%m-%dT%H:%MZ})"


def _depends(
    server: Server, plans: Mapping[str, ServerPlan], facts: Mapping[str, Facts]
) -> str | None:
    for name in server.depends_on:
        other = plans.get(name)
        if other is None:
            return f"waits for {name}, whose spec is held back"
        if not in_sync(other):
            how = (
                "which is changed first"
                if other.acts
                else f"which is not in sync: {other.sentence}"
            )
            return f"waits for {name}, {how}"
        if not facts.get(name, Facts()).serving:
            return f"waits for {name}, which does not serve"
    return None


def in_sync(plan: ServerPlan) -> bool:
    """Say whether a server is as its spec wants it, proven or about to be proven again."""
    return plan.action is Action.VERIFY or (
        plan.action is Action.NOTHING and plan.outcome is Outcome.IN_SYNC
    )


# -- groups ----------------------------------------------------------------------------------------------


def _groups(
    servers: Mapping[str, Server],
    plans: Mapping[str, ServerPlan],
    facts: Mapping[str, Facts],
) -> dict[str, _Standing]:
    groups: dict[str, _Standing] = {}
    for name in sorted(servers):
        rules = servers[name].group
        if rules is None:
            continue
        group = groups.setdefault(rules.name, _Standing(rules, ()))
        group.members = (*group.members, name)
        fact = facts.get(name, Facts())
        if fact.under_way or (name in plans and plans[name].action is Action.RESUME):
            group.under_way.add(name)
        elif fact.serving:
            group.serving.add(name)
        if fact.failed:
            group.failed.append(name)
    return groups


def _in_group(
    plan: ServerPlan,
    group: _Standing,
    done: Mapping[str, ServerPlan],
    facts: Mapping[str, Facts],
) -> ServerPlan:
    """Let a member begin if its group allows it, and count it as under way then."""
    rules, name = group.rules, plan.wish.server
    if len(group.failed) >= rules.max_failures:
        who = ", ".join(group.failed)
        why = f"group {rules.name} stands still: {who} failed on what is to run; change the specs, or `reconcile retry {group.failed[0]}`"
        return waiting(plan, Reason.GROUP_STOPPED, why)
    if rules.canary is not None and rules.canary != name:
        why_not = _canary(rules, done.get(rules.canary), facts.get(rules.canary, Facts()))
        if why_not is not None:
            return waiting(plan, Reason.CANARY, why_not)
    others = group.under_way - {name}
    if len(others) >= rules.at_once:
        why = f"waits for {', '.join(sorted(others))}: {rules.at_once} of group {rules.name} may be changed at once"
        return waiting(plan, Reason.GROUP, why)
    serves = name in group.serving
    if serves and group.room < 1:
        why = f"waits: {len(group.serving)} of group {rules.name} serve, and {rules.min_available} must go on"
        return waiting(plan, Reason.GROUP, why)
    turn = Turn(rules.name, rules.at_once, group.room, serves, rules.min_available)
    group.under_way.add(name)
    group.serving.discard(name)
    return replace(plan, turn=turn)


def _canary(rules: Group, canary: ServerPlan | None, fact: Facts) -> str | None:
    """Say why the others of a group may not follow its canary yet."""
    name = rules.canary
    if canary is None:
        return f"waits for canary {name}, whose spec is held back"
    if not in_sync(canary):
        how = (
            "which is changed first" if canary.acts else f"which is not in sync: {canary.sentence}"
        )
        return f"waits for canary {name}, {how}"
    if not fact.serving:
        return f"waits for canary {name}, which does not serve"
    if fact.applied_s is None:
        return f"waits for canary {name}: how long it has been applied is not known"
    if fact.applied_s < rules.soak:
        left = rules.soak - fact.applied_s
        return f"waits for canary {name} to soak for another {duration_text(float(int(left) + 1))}"
    return None


__all__ = ["CHANGES", "Facts", "beside", "has_successors", "in_sync", "scheduled", "waiting"]

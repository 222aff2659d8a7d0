"""Servers that a host has and the specs have not: left alone with a notice, until somebody says otherwise. Pure.

A spec that is missing is no order to delete anything (S13): only a complete reading of the specs makes an orphan, the operator's
settings decide what becomes of one, what was protected stays protected though its spec is gone, and a pass ends only so many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from reconciler.core.conditions import Outcome, Reason
from reconciler.core.live import LiveServer
from reconciler.core.plan import Action, Permissions, ServerPlan, Wish, plan_server, prune_steps

Mode = Literal["off", "confirm", "auto"]


@dataclass(frozen=True, slots=True)
class Pruning:
    """What the operator decided about orphans: what becomes of them, and how many a pass may end."""

    mode: Mode = "off"
    limit: int = 1


@dataclass(frozen=True, slots=True)
class Orphan:
    """A server that a host keeps records of, and that no spec names there."""

    server: str
    unit: str


def orphans_of(bound: Mapping[str, Mapping[str, Any]], named: frozenset[str]) -> tuple[Orphan, ...]:
    """List the servers of a host that no spec names; `named` holds those that are wrong or held as well: they are not gone."""
    return tuple(
        Orphan(server, str(bindings["unit"]))
        for server, bindings in sorted(bound.items())
        if server not in named and bindings.get("unit")
    )


def orphan_plan(
    wish: Wish, live: LiveServer, pruning: Pruning, *, asked: bool, none_left: bool
) -> ServerPlan:
    """Decide what becomes of one orphan. `asked`: a person named it; `none_left`: the specs name no server at all any more."""
    plan = plan_server(replace(wish, target=None, suspend=False), live, {}, Permissions())
    if plan.action is Action.RESUME or (
        plan.action is Action.BLOCKED and plan.reason is not Reason.NOT_OURS
    ):
        return replace(plan, sentence=f"{plan.sentence}; its spec is gone")
    name = wish.server
    records = live.known_records
    assert records is not None, "plan_server has looked"
    if records.protected and not asked:
        why = f"its spec is gone; it is protected and left as it is; `reconcile prune {name} --protected` ends it"
        return _notice(plan, why)
    if not asked and pruning.mode == "off":
        why = f"its spec is gone; it is left as it is (prune: off); `reconcile prune {name}` ends it, a spec of that name takes it back"
        return _notice(plan, why)
    if not asked and (pruning.mode == "confirm" or none_left):
        doubt = "; the specs name no server at all any more" if none_left else ""
        why = f"its spec is gone; to be pruned when somebody confirms it: `reconcile prune {name}`{doubt}"
        waiting = _notice(plan, why)
        return replace(waiting, action=Action.BLOCKED, outcome=Outcome.WAITING)
    return replace(
        plan,
        action=Action.PRUNE,
        reason=Reason.ORPHANED,
        sentence="its spec is gone: drained, stopped, its GPUs proven free, its unit removed; what the host keeps of it stays",
        steps=prune_steps(plan),
    )


def _notice(plan: ServerPlan, sentence: str) -> ServerPlan:
    return replace(
        plan,
        action=Action.NOTHING,
        outcome=Outcome.STOPPED if plan.outcome is Outcome.STOPPED else Outcome.IN_SYNC,
        reason=Reason.ORPHANED,
        sentence=sentence,
        steps=(),
    )


def limited(plans: Iterable[ServerPlan], limit: int) -> dict[str, ServerPlan]:
    """Hold back what would be pruned beyond the bound of one pass; keyed by server and host."""
    held: dict[str, ServerPlan] = {}
    count = 0
    for plan in plans:
        if plan.action is not Action.PRUNE:
            continue
        count += 1
        if count > limit:
            why = f"its spec is gone; {limit} a pass may be pruned, so it waits for the next one (prune_limit)"
            held[f"{plan.wish.host}/{plan.wish.server}"] = replace(
                _notice(plan, why), action=Action.BLOCKED, outcome=Outcome.WAITING
            )
    return held


__all__ = ["Orphan", "Pruning", "limited", "orphan_plan", "orphans_of"]

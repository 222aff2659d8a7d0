"""Servers whose specs are wrong, as they are found on their hosts: a mistake in a spec must not hide the server that runs.

Nothing is planned for them; where they are is what the hosts' own records say, since their specs cannot be trusted with it.
`status` calls this, beside the survey of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from reconciler.core.conditions import Outcome, Reason
from reconciler.core.desired import Budgets
from reconciler.core.diff import drift_of
from reconciler.core.errors import HostError, StoreError
from reconciler.core.fleet import Fleet
from reconciler.core.held import why_held
from reconciler.core.live import LiveHost, LiveServer
from reconciler.core.plan import ServerPlan, Wish, blocked
from reconciler.core.spec import Host
from reconciler.core.survey import HostSurvey, Survey
from reconciler.effects.perform import observe, records_of
from reconciler.reconcile import OBSERVE_DEADLINE_S, World, on_each


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A survey with a row for each server whose spec is wrong; `nowhere` says why of those that no host has told of."""

    found: Survey
    nowhere: Mapping[str, str]


def with_held(fleet: Fleet, found: Survey, world: World, names: frozenset[str]) -> HeldBack:
    """Look for the servers whose specs are wrong on every host of the fleet. Changes nothing."""
    why = {n: w for n, w in why_held(fleet).items() if not names or n in names}
    if not why:
        return HeldBack(found, {})
    seen = {h.host.name: h for h in found.hosts}
    looked = on_each(
        [seen.get(host.name) or HostSurvey(host, ()) for host in fleet.hosts],
        lambda at: _looked(at, world, why),
        world.hosts_at_once,
    )
    hosts = seen | {at.host.name: at for at in looked if at.plans or at.silence}
    placed = {p.wish.server for h in hosts.values() for p in h.plans}
    silent = sorted({at.host.name for at in looked if at.silence or not _tells(at.live)})
    where = f"; not known whether it runs: not told by {', '.join(silent)}" if silent else "; no host has a server of this name"  # fmt: skip
    nowhere = {name: sentence + where for name, sentence in why.items() if name not in placed}
    return HeldBack(Survey(tuple(hosts[name] for name in sorted(hosts))), nowhere)


def _looked(at: HostSurvey, world: World, why: Mapping[str, str]) -> HostSurvey:
    """Add to what was found on a host the servers of which only the names are known."""
    if at.silence:
        return at
    if at.live is not None and not _units(at.live, why):
        return at
    try:
        with world.connect(at.host) as port:
            live = at.live or observe(
                port, records_of((), gpus=True), deadline_s=OBSERVE_DEADLINE_S
            )
            units = _units(live, why)
            if not units:
                return replace(at, live=live)
            more = observe(port, records_of(sorted(units.items())), deadline_s=OBSERVE_DEADLINE_S)
    except (HostError, StoreError) as error:
        return replace(at, silence=str(error))
    plans = tuple(_row(at.host, more.server(n), why[n]) for n in sorted(units))
    return replace(at, live=_joined(live, more), plans=(*at.plans, *plans))


def _tells(live: LiveHost | None) -> bool:
    """Say whether a host told which servers it is bound to; who may not read its records learns nothing from their absence (S12)."""
    return live is not None and "known" in (live.raw.get("bound") or {})


def _units(live: LiveHost, names: Iterable[str]) -> dict[str, str]:
    """Give the units of those of these servers that a host is bound to."""
    return {n: str(live.bound[n].get("unit") or f"{n}.service") for n in names if n in live.bound}


def _joined(live: LiveHost, more: LiveHost) -> LiveHost:
    raw = dict(live.raw)
    raw["servers"] = {**(live.raw.get("servers") or {}), **(more.raw.get("servers") or {})}
    return replace(live, servers={**live.servers, **more.servers}, raw=raw)


def _row(host: Host, live: LiveServer, why: str) -> ServerPlan:
    records = live.known_records
    applied = records.applied if records is not None else None
    wish = Wish(
        server=live.server,
        host=host.name,
        unit=live.unit_name,
        target=None,
        budgets=Budgets(),
        port=None,
        gated=False,
        on_failure="stop",
        on_inconclusive="ask",
        drift="off",
        suspend=False,
        policy_digest="",
    )
    plan = blocked(wish, Outcome.REFUSED, Reason.SPEC_INVALID, why)
    return replace(plan, applied=applied.revision if applied else "", drift=drift_of(live, applied))

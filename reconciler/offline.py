"""What a change of the specs would do, without any host: the specs of a base beside those at hand. Pure.

Called by the command line for pull requests. Only servers that differ are read twice and rendered: of ten thousand specs
of which three changed, the base is read from those three files and from the profiles and hosts that they lean on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from reconciler.core.fleet import Fleet
from reconciler.core.plan import Action, ServerPlan
from reconciler.core.review import (
    FieldChange,
    HostReview,
    Kind,
    Review,
    ServerReview,
    effect_of,
    field_changes,
    gate_moves,
    live_plan,
    with_live,
    worst_effect,
)
from reconciler.core.revision import Change, revision, whole
from reconciler.core.sealed import is_sealed
from reconciler.core.spec import Host, Server
from reconciler.core.survey import Survey
from reconciler.engines.base import Engine
from reconciler.resolve import target_of
from reconciler.systemd import UnitTextError, unit_diff

Load = Callable[[Mapping[str, bytes]], Fleet]
"""Judges spec files; without an operator's policy, since what was accepted once is not refused in hindsight."""

# Words anywhere, or a backslash that could stand for one: reading a file too many costs time, one too few hides a change.
_SHARED: Final = re.compile(rb"Profile|Host|\\")
_PROFILE: Final = re.compile(rb"Profile|\\")
_EXTENDS: Final = re.compile(rb"extends|\\")
_SEALED: Final = re.compile(rb"age|sops|\\")
EMPTY: Final = Fleet()


def base_of(
    base: Mapping[str, bytes], same: frozenset[str], head: Mapping[str, bytes], load: Load
) -> tuple[Fleet, frozenset[str]]:
    """Read of the base what may differ, and give it with the names of files that cannot.

    A file cannot differ when its bytes are the same and no profile that it may extend changed. A server that is held back in
    one of them is looked at by its name all the same.
    """
    moved = {name for name in {*base, *head} if name not in same}
    profiles_moved = any(
        _PROFILE.search(files[name]) for files in (base, head) for name in moved if name in files
    )
    secrets_moved = any(is_sealed(name) for name in moved)
    read = {
        name: content
        for name, content in base.items()
        if name in moved
        or is_sealed(name)
        or _SHARED.search(content)
        or ((profiles_moved or secrets_moved) and _EXTENDS.search(content))
        or (secrets_moved and _SEALED.search(content))
    }
    fleet = load(read) if read else EMPTY
    return fleet, frozenset(name for name in same if name not in read)


def review_of_fleets(
    base: Fleet,
    head: Fleet,
    engines: Mapping[str, Engine],
    *,
    untouched: frozenset[str] = frozenset(),
    found: Survey | None = None,
    only: frozenset[str] = frozenset(),
) -> Review:
    """Compare two fleets server by server.

    Args:
        base: What was wanted before.
        head: What is wanted now.
        engines: By name, to render units with.
        untouched: Files whose servers cannot differ; they are not in `base`.
        found: The plan against hosts or a saved state of them, to say what is there now and how long it took before.
        only: Names of the servers to look at; all when empty.
    """
    plans = {p.wish.server: p for h in found.hosts for p in h.plans} if found is not None else {}
    sides = _Sides(base, head, engines, _cards(plans.values()))
    before = {s.name: s for s in base.servers}
    after = {s.name: s for s in head.servers}
    servers: list[ServerReview] = []
    unchanged = 0
    for name in sorted({*before, *after, *head.held}):
        if only and name not in only:
            continue
        place = head.places.get(name)
        if place is not None and place.file in untouched and name not in head.held:
            unchanged += 1
            continue
        one = _compared(name, before.get(name), after.get(name), sides)
        if one is None:
            unchanged += 1
        else:
            servers.append(with_live(one, plans.get(name)))
    touched = {s.server for s in servers}
    return Review(
        servers=tuple(sorted(servers, key=_order)),
        unchanged=unchanged,
        hosts=_hosts(base, head) if not only else (),
        problems=tuple(str(p) for p in head.problems),
        base_problems=len(base.problems),
        also_pending=tuple(sorted(n for n, p in plans.items() if p.acts and n not in touched)),
    )


def _hosts(base: Fleet, head: Fleet) -> tuple[HostReview, ...]:
    """Compare how hosts are reached: a change of an address sends everything else to another machine."""
    before = {h.name: _host(h) for h in base.hosts}
    after = {h.name: _host(h) for h in head.hosts}
    found = []
    for name in sorted({*before, *after}):
        if before.get(name) == after.get(name):
            continue
        kind = (
            Kind.ADDED
            if name not in before
            else Kind.REMOVED
            if name not in after
            else Kind.CHANGED
        )
        changes = tuple(
            replace(c, effect="controller")
            for c in field_changes(before.get(name, {}), after.get(name, {}))
        )
        found.append(HostReview(name, kind, changes))
    return tuple(found)


def _host(host: Host) -> dict[str, Any]:
    return host.model_dump(mode="json", exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class _Sides:
    """Both fleets, and what units are rendered with."""

    base: Fleet
    head: Fleet
    engines: Mapping[str, Engine]
    cards: Mapping[str, Mapping[str, str]]

    def units(self, old: Server | None, new: Server | None) -> str:
        """Compare the units as they would be written; a stopped server has none that counts."""
        before = unit_text(old, self.engines, self.cards)
        after = unit_text(new, self.engines, self.cards)
        return unit_diff(before, after, old_name="base", new_name="head")


def _compared(
    name: str, old: Server | None, new: Server | None, sides: _Sides
) -> ServerReview | None:
    if new is None:
        return _held(name, old, sides) if name in sides.head.held else _removed(name, old, sides)
    if old is None:
        again = name in sides.base.held
        return ServerReview(
            name,
            new.host,
            Kind.ADDED,
            "none" if new.state == "stopped" else "restart",
            revision(new),
            unit=new.unit,
            unit_diff=sides.units(None, new),
            warnings=_warnings(new, sides.engines),
            note="its spec at the base was wrong: shown whole" if again else "",
        )
    one, other = whole(old), whole(new)
    if one == other:
        return None
    fields = field_changes(one, other)
    effect = worst_effect(fields)
    # What only the controller reads installs nothing, whatever a unit rendered today would look like.
    installs = effect in {"restart", "reload"}
    known = set(_warnings(old, sides.engines))
    moved = old.host != new.host
    return ServerReview(
        name,
        new.host,
        Kind.MOVED if moved else Kind.CHANGED,
        effect,
        revision(new),
        host_before=old.host if moved else "",
        unit=new.unit,
        changes=fields,
        unit_diff=sides.units(old, new) if installs else "",
        gate_moves=gate_moves(one, other),
        warnings=tuple(w for w in _warnings(new, sides.engines) if w not in known),
        note=f"new on {new.host}; what runs on {old.host} is left there" if moved else "",
    )


def _held(name: str, old: Server | None, sides: _Sides) -> ServerReview:
    if old is None and name not in sides.base.held:
        note = "its spec is wrong, so it would not be deployed"
    else:
        note = "its spec is wrong, so it would stay as it is on its host"
    return ServerReview(name, old.host if old is not None else "", Kind.HELD, "none", note=note)


def _removed(name: str, old: Server | None, sides: _Sides) -> ServerReview:
    assert old is not None, "a name comes from one side or the other"
    note = "no spec has it any more"
    if not sides.head.complete:
        note += (
            ", but specs with mistakes in them are not read: nothing is removed while there are any"
        )
    diff = sides.units(old, None)
    return ServerReview(
        name, old.host, Kind.REMOVED, "restart", unit=old.unit, unit_diff=diff, note=note
    )


def _warnings(server: Server, engines: Mapping[str, Engine]) -> tuple[str, ...]:
    return tuple(
        f"{path}: {text}" if path else text
        for path, text in engines[server.engine.name].warnings(server)
    )


def unit_text(
    server: Server | None,
    engines: Mapping[str, Engine],
    cards: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """Render a server's unit without its host: GPUs are named as written where nobody knows which cards they are."""
    if server is None or server.state == "stopped":
        return ""
    known = (cards or {}).get(server.name, {})
    names = [
        known.get(str(g), str(g) if str(g).startswith("GPU-") else f"gpu-{g}") for g in server.gpus
    ]
    try:
        return target_of(server, engines[server.engine.name], names).unit_text
    except UnitTextError as error:
        return f"# cannot be written as a unit: {error}\n"


def _cards(plans: Iterable[ServerPlan]) -> dict[str, dict[str, str]]:
    """Give by server which card each GPU's name leads to, where a plan has found out."""
    found: dict[str, dict[str, str]] = {}
    for plan in plans:
        target = plan.wish.target
        if target is not None and target.spec and target.gpu_uuids:
            names = _gpus_of(target.spec)
            if len(names) == len(target.gpu_uuids):
                found[plan.wish.server] = dict(zip(names, target.gpu_uuids, strict=True))
    return found


def _gpus_of(spec: str) -> list[str]:
    data: Any = json.loads(spec)
    return [str(g) for g in data.get("gpus") or ()]


def review_of_survey(found: Survey, fleet: Fleet) -> Review:
    """Make a review of a plan: what would be done to the hosts as they were found, with no base to compare with."""
    plans = [p for h in found.hosts for p in h.plans]
    shown = [_planned(p) for p in plans if p.action is not Action.NOTHING]
    held = [
        ServerReview(
            n, "", Kind.HELD, "none", note="its spec is wrong, so it stays as it is on its host"
        )
        for n in sorted(fleet.held)
    ]
    return Review(
        servers=tuple(sorted([*shown, *held], key=_order)),
        unchanged=len(plans) - len(shown),
        problems=tuple(str(p) for p in fleet.problems),
    )


def _planned(plan: ServerPlan) -> ServerReview:
    target = plan.wish.target
    one = ServerReview(
        plan.wish.server,
        plan.wish.host,
        Kind.ADDED if plan.action is Action.DEPLOY else Kind.PLANNED,
        effect_of(plan),
        target.revision if target else "",
        unit=plan.wish.unit,
        changes=tuple(_field_of(c) for c in plan.wish.changes) if plan.acts else (),
        unit_diff=unit_diff(plan.unit_before, target.unit_text) if target and plan.acts else "",
        warnings=plan.wish.warnings,
        outage_s=plan.outage_s,
        outage_runs=plan.outage_runs,
    )
    return replace(one, live=live_plan(plan))


def _field_of(change: Change) -> FieldChange:
    return FieldChange(change.path, change.old, change.new, change.effect_class.name.lower())


def _order(server: ServerReview) -> tuple[int, str]:
    """Put what hurts first."""
    rank = {Kind.HELD: 0, Kind.REMOVED: 1, Kind.MOVED: 2}
    by_effect = {"restart": 3, "reload": 5, "controller": 6, "none": 7}
    if server.kind is Kind.ADDED:
        return 4, server.server
    return rank.get(server.kind, by_effect[server.effect]), server.server


__all__ = ["base_of", "review_of_fleets", "review_of_survey", "unit_text"]

"""What a change of the specs would do, server by server: the value behind a pull request's comment. Pure.

Two ways lead here. `offline.py` compares the specs of two revisions, without any host; and a survey, of hosts or of a
saved state of them, becomes a review as well. Either way it is plain data: it is printed, saved as JSON by one job of a
build, and read back by another that has a token and none of the repository's bytes (`read_review`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from reconciler.core.errors import Problem, SpecError
from reconciler.core.plan import Action, ServerPlan
from reconciler.core.revision import Change, EffectClass, canonical, changes
from reconciler.core.units_of_measure import duration, percentage

FORMAT_VERSION: Final = "1.0"
MAX_REVIEW_BYTES: Final = 256 * 1024 * 1024
"""Ten thousand servers that all change, with their units, are a tenth of this."""


class Kind(StrEnum):
    """What the change is to a server."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    MOVED = "moved"
    """To another host: it is new there, and an orphan where it was."""
    HELD = "held"
    """Its spec is wrong, so it would stay as it is on its host."""
    PLANNED = "planned"
    """Nothing was compared: this is what would be done to the host as it was found."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field that differs, in plain JSON; None where it is not there. `effect` says what the change of it needs."""

    path: str
    old: Any
    new: Any
    effect: str


@dataclass(frozen=True, slots=True)
class GateMove:
    """A limit of a gate that moved. `looser` is None where that cannot be said (a run or a limit came or went)."""

    limit: str
    old: Any
    new: Any
    looser: bool | None


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What would be done to the host as it was found, in the words of a plan."""

    action: str
    outcome: str
    reason: str
    sentence: str
    applied: str
    drift: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerReview:
    """One server that the change touches."""

    server: str
    host: str
    kind: Kind
    effect: str
    """`restart`, `reload`, `controller` or `none`: the highest of all changed fields decides."""
    revision: str = ""
    host_before: str = ""
    unit: str = ""
    changes: tuple[FieldChange, ...] = ()
    unit_diff: str = ""
    gate_moves: tuple[GateMove, ...] = ()
    warnings: tuple[str, ...] = ()
    note: str = ""
    outage_s: float | None = None
    outage_runs: int = 0
    live: LivePlan | None = None

    @property
    def blocked(self) -> bool:
        """Say whether nothing would be done to the host as it was found, for a reason that is given."""
        return self.live is not None and self.live.action == Action.BLOCKED.value

    @property
    def disturbs(self) -> bool:
        """Say whether a running process would be stopped."""
        return self.effect == "restart" and self.kind is not Kind.ADDED


@dataclass(frozen=True, slots=True)
class HostReview:
    """A host whose document the change touches: how it is reached and what is protected there, never what runs."""

    host: str
    kind: Kind
    changes: tuple[FieldChange, ...] = ()


@dataclass(frozen=True, slots=True)
class Against:
    """The saved state that hosts were read from instead of asking them."""

    taken_at: float
    age_s: float
    stale: bool
    unknown_hosts: tuple[str, ...] = ()
    plan_hash: str = ""


@dataclass(frozen=True, slots=True)
class Review:
    """Everything that a change would do."""

    servers: tuple[ServerReview, ...]
    unchanged: int
    base: str = ""
    head: str = ""
    hosts: tuple[HostReview, ...] = ()
    problems: tuple[str, ...] = ()
    base_problems: int = 0
    against: Against | None = None
    also_pending: tuple[str, ...] = ()
    """Servers that the next pass would act on whatever this change does."""

    @property
    def differs(self) -> bool:
        """Say whether anything would be done, or wait to be done."""
        return bool(self.servers) or bool(self.hosts) or bool(self.also_pending)

    def counts(self) -> dict[str, int]:
        """Count by what it means for people who use the servers."""
        found = {"restart": 0, "added": 0, "removed": 0, "reload": 0, "controller": 0, "held": 0}
        for server in self.servers:
            found[_bucket(server)] = found.get(_bucket(server), 0) + 1
        return {word: number for word, number in found.items() if number}


def _bucket(server: ServerReview) -> str:
    if server.kind in {Kind.ADDED, Kind.REMOVED, Kind.HELD}:
        return server.kind.value
    return "blocked" if server.kind is Kind.PLANNED and server.blocked else server.effect


_WORDS: Final = {
    "restart": ("restarts", "restart"),
    "added": ("is added", "are added"),
    "removed": ("is removed", "are removed"),
    "reload": ("is reloaded, without a stop", "are reloaded, without a stop"),
    "controller": ("changes without touching its process", "change without touching their process"),
    "held": ("is held back by a mistake", "are held back by mistakes"),
    "none": ("changes nothing that runs", "change nothing that runs"),
    "blocked": ("is left as it is for now", "are left as they are for now"),
}


def headline(review: Review) -> str:
    """Say the whole review in one line, the worst first."""
    parts = [f"{n} {_WORDS[word][n > 1]}" for word, n in review.counts().items()]
    if parts:
        number, _, rest = parts[0].partition(" ")
        parts[0] = f"{number} server{'s' if number != '1' else ''} {rest}"
    if review.problems:
        n = len(review.problems)
        parts.insert(0, "1 mistake in the specs" if n == 1 else f"{n} mistakes in the specs")
    if review.hosts:
        n = len(review.hosts)
        parts.append(
            "1 host is reached or guarded differently"
            if n == 1
            else f"{n} hosts are reached or guarded differently"
        )
    return ", ".join(parts) or "nothing changes"


# -- making parts of a review ---------------------------------------------------------------------------------


def field_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """List what differs between two servers as `revision.whole` gives them, runs of a gate one by one."""
    return tuple(_field(part) for c in changes(old, new) for part in _parts(c))


def _parts(change: Change) -> Iterable[Change]:
    """Take a list of named maps apart by name, so that one limit that moved is one line."""
    one, other = _by_name(change.old), _by_name(change.new)
    if one is None or other is None or list(one) != list(other):
        return (change,)
    return tuple(
        Change(f"{change.path}[{name}].{c.path}", c.old, c.new, change.effect_class)
        for name in one
        for c in changes(one[name], other[name])
    )


def _by_name(value: Any) -> dict[str, Mapping[str, Any]] | None:
    if not isinstance(value, list | tuple) or not all(
        isinstance(v, Mapping) and isinstance(v.get("name"), str) for v in value
    ):
        return None
    return {v["name"]: v for v in value}


def _field(change: Change) -> FieldChange:
    return FieldChange(
        change.path, change.old, change.new, _needs(change.path, change.effect_class)
    )


def _needs(path: str, found: EffectClass) -> str:
    """Name the effect class; `state` says whether the server runs at all, which is its own kind of restart."""
    return "restart" if path in {"state", "host"} else found.name.lower()


def worst_effect(found: Iterable[FieldChange]) -> str:
    """Give the effect class that decides."""
    rank = {"none": 0, "controller": 1, "reload": 2, "restart": 3}
    return max((f.effect for f in found), key=rank.__getitem__, default="none")


def gate_moves(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[GateMove, ...]:
    """Compare the limits of two gates, run by run, so that a limit that was let down is seen as that."""
    before, after = _limits(old.get("gate")), _limits(new.get("gate"))
    moved = []
    for key in sorted({*before, *after}):
        one, other = before.get(key), after.get(key)
        if canonical({"v": one}) != canonical({"v": other}):
            moved.append(GateMove(key, one, other, _looser(key, one, other)))
    return tuple(moved)


def _limits(gate: Any) -> dict[str, Any]:
    if not isinstance(gate, Mapping):
        return {}
    found: dict[str, Any] = {}
    for run in gate.get("runs") or ():
        for key, value in run.items():
            if key.startswith(("min_", "max_")) and key != "max_tokens":
                found[f"{run.get('name')}.{key}"] = value
    if "max_error_rate" in gate:
        found["max_error_rate"] = gate["max_error_rate"]
    baseline = gate.get("baseline")
    if isinstance(baseline, Mapping) and "max_loss" in baseline:
        found["baseline.max_loss"] = baseline["max_loss"]
    return found


def _looser(key: str, old: Any, new: Any) -> bool | None:
    """Say whether a limit lets more through than before; one that went does, one that came does not."""
    if old is None:
        return False
    if new is None:
        return True
    one, other = _size(old), _size(new)
    if one is None or other is None or one == other:
        return None
    return other < one if key.rpartition(".")[2].startswith("min_") else other > one


def _size(value: Any) -> float | None:
    """Read a limit as `whole` writes it: a number, a duration or a percentage."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    for read in (duration, percentage):
        try:
            return float(read(value))
        except (ValueError, TypeError):
            continue
    return None


def live_plan(plan: ServerPlan) -> LivePlan:
    """Give the part of a plan that a review shows."""
    return LivePlan(
        plan.action.value,
        "" if plan.acts else plan.outcome.value,
        plan.reason.value,
        plan.sentence,
        plan.applied,
        tuple(d.sentence for d in plan.drift),
    )


_EFFECT_OF: Final = {
    Action.RELOAD: "reload",
    Action.VERIFY: "controller",
    Action.TAKE_OVER: "reload",
    Action.NOTHING: "none",
    Action.BLOCKED: "none",
}


def effect_of(plan: ServerPlan) -> str:
    """Say what a plan means for the process that runs."""
    return _EFFECT_OF.get(plan.action, "restart")


def with_live(found: ServerReview, plan: ServerPlan | None) -> ServerReview:
    """Add what is known of the server's host: what would be done there now, and how long that took before."""
    if plan is None:
        return found
    return replace(
        found, live=live_plan(plan), outage_s=plan.outage_s, outage_runs=plan.outage_runs
    )


# -- as data ------------------------------------------------------------------------------------------------------


def review_json(review: Review) -> dict[str, Any]:
    """Give a review as one document."""
    counts: Mapping[str, int] = review.counts()
    return {
        "format_version": FORMAT_VERSION,
        "type": "review",
        "headline": headline(review),
        "differs": review.differs,
        "counts": counts,
        **asdict(review),
    }


@cache
def _reader() -> TypeAdapter[Review]:
    return TypeAdapter(Review)


_OWN: Final = ("format_version", "type", "headline", "differs", "counts")


def read_review(text: bytes) -> Review:
    """Read a review back from what `review_json` gave; another job made it, so it is believed in nothing.

    Raises:
        SpecError: It is no review, or one of a format that this version does not know.
    """
    why = ""
    if len(text) > MAX_REVIEW_BYTES:
        why = "is larger than any review"
    try:
        data = json.loads(text) if not why else {}
    except (ValueError, RecursionError):
        data, why = {}, "is not JSON"
    if not why and (not isinstance(data, dict) or data.get("type") != "review"):
        why = "is no review; make one with `reconcile --dry-run --offline --base REV -o json`"
    elif not why and str(data.get("format_version")).partition(".")[0] != "1":
        why = f"has the format {str(data.get('format_version'))[:20]!r}; this version reads 1"
    if not why:
        known = {k: v for k, v in data.items() if k not in _OWN}
        try:
            return _reader().validate_python(known)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            why = f"is damaged at {'.'.join(map(str, first['loc']))[:80]}: {first['msg'][:80]}"
    raise SpecError([Problem("review", 0, 0, why)])

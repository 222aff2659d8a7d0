"""Why servers are held back: the mistakes in their specs, one sentence a server, for whoever shows how they stand. Pure."""

from __future__ import annotations

from typing import Final

from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.fleet import Fleet

PROBLEMS_SHOWN: Final = 3
"""Enough to see what is wrong; `validate` shows all."""


def why_held(fleet: Fleet) -> dict[str, str]:
    """Give, for each server that is held back, what is wrong: its own mistakes, else its file's, else anybody's."""
    return {name: _why(fleet, name) for name in sorted(fleet.held)}


def _why(fleet: Fleet, name: str) -> str:
    place = fleet.places.get(name)
    own = [p for p in fleet.problems if p.server == name]
    beside = [p for p in fleet.problems if place is not None and p.file == place.file]
    found = own or beside or fleet.problems
    said = "; ".join(str(p) for p in found[:PROBLEMS_SHOWN])
    more = f"; and {len(found) - PROBLEMS_SHOWN} more" if len(found) > PROBLEMS_SHOWN else ""
    return f"spec is wrong: {said}{more}; it is left as it is"


def held_result(name: str, why: str) -> ServerResult:
    """Give how a server stands whose spec is wrong."""
    return ServerResult(name, Outcome.REFUSED, Reason.SPEC_INVALID, why)

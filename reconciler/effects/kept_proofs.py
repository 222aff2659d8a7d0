"""Reads back the proofs of release that a host keeps: what was proven there last, and by whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconciler.core.errors import CommandFailedError
from reconciler.effects.ports import HostPort, Request

DEADLINE_S = 40.0

CARD = ("uuid", "index", "verdict", "used_mib", "limit_mib", "baseline_mib", "drift_mib", "samples", "holders", "reasons")  # fmt: skip
HOLDER = ("pid", "start_ticks", "layer", "class", "why", "command", "done")


def last_proof(port: HostPort) -> Mapping[str, Any] | None:
    """Give the newest proof of release that the host keeps; None where none was ever kept.

    Raises:
        HostError: The host cannot be asked, or what it keeps is no proof that this version can show.
    """
    answer = port.call(Request("releases", {"count": 1}), deadline_s=DEADLINE_S)
    if answer.outcome != "done":
        raise CommandFailedError(port.name, f"{answer.message or answer.reason}; nothing was done")
    kept = answer.data.get("releases")
    if kept == []:
        return None
    if not isinstance(kept, list) or not _is_proof(kept[-1]):
        why = "its newest proof of release is not one that this version understands; `reconcile release` makes a new one"
        raise CommandFailedError(port.name, why)
    proof: Mapping[str, Any] = kept[-1]
    return proof


def _is_proof(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("at"), int | float)
        and isinstance(found.get("gpus"), list)
        and all(_is_card(card) for card in found["gpus"])
        and _each_has(found.get("servers"), ("server", "outcome", "sentence"))
    )


def _is_card(card: Any) -> bool:
    return (
        _each_has([card], CARD)
        and _each_has(card["holders"], HOLDER)
        and _each_has(card["samples"], ("at_s",))
        and isinstance(card["reasons"], list)
    )


def _each_has(found: Any, keys: tuple[str, ...]) -> bool:
    return isinstance(found, list) and all(
        isinstance(one, dict) and all(key in one for key in keys) for one in found
    )


__all__ = ["last_proof"]

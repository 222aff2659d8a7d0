"""What a server's start will ask of its host, as values: program, models, devices, memory. Made by an engine, judged by `checks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model that will be loaded. `source` is a path or a hub id; `weights` is False where none are read (dummy weights).

    `mounted` is False for a hub id in a container: the host's cache is not there, so each start would fetch it.
    """

    role: str
    source: str
    revision: str | None = None
    weights: bool = True
    mounted: bool = True

    @property
    def is_path(self) -> bool:
        """Say whether the model is a place on the host."""
        return self.source.startswith("/")


@dataclass(frozen=True, slots=True)
class Demands:
    """All that the host is asked about before anything stops.

    `memory_fraction` is the share of a card that the engine takes (its own default where the spec has none), None where it
    takes what it needs. `reshaped`: the weights in memory are not the bytes on disk (quantised or cast while loading, offloaded).
    """

    engine: str
    version: str | None = None
    python: str | None = None
    binary: str | None = None
    image: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    kernels: bool = False
    models: tuple[WantedModel, ...] = ()
    cache: tuple[tuple[str, str], ...] = ()
    places: tuple[str, ...] = ("/tmp",)  # noqa: S108  (looked at for room, not written)
    tp: int = 1
    pp: int = 1
    splits_heads: bool = False
    context: int | None = None
    kv_bytes: float = 2.0
    memory_fraction: float | None = None
    reshaped: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU that a server will have: what the fit is reckoned with. Memory in MiB."""

    uuid: str
    minor: int | None = None
    total_mib: int | None = None


def load(data: Mapping[str, Any] | None) -> Demands | None:
    """Read demands back from what a host recorded; None where there are none or they are not understood."""
    if not data:
        return None
    try:
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        plain["models"] = tuple(WantedModel(**m) for m in data.get("models", ()))
        plain["cache"] = tuple((str(k), str(v)) for k, v in data.get("cache", ()))
        return Demands(**plain)
    except (TypeError, ValueError):
        return None


def request(demands: Demands, user: str | None, cards: tuple[Card, ...]) -> dict[str, Any]:
    """Phrase the helper's `inspect`."""
    nodes = [f"/dev/nvidia{card.minor}" for card in cards if card.minor is not None]
    return {
        "user": user,
        "python": demands.python,
        "distributions": list(demands.distributions),
        "kernels": demands.kernels and bool(cards),
        "binary": demands.binary,
        "image": list(demands.image) or None,
        "models": [
            {
                "role": m.role,
                "source": m.source,
                "revision": m.revision,
                "environment": dict(demands.cache),
            }
            for m in demands.models
            if m.mounted
        ],
        "nodes": ["/dev/nvidiactl", *nodes] if nodes else [],
        "places": list(demands.places),
    }

"""A host of which only a saved state is there: it answers an observation and nothing else, and nothing can be done to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from reconciler.core.errors import HostUnreachableError
from reconciler.core.saved_state import SavedHost, unknown_server
from reconciler.effects.ports import Answer, Request
from reconciler.transports.base import Address


@dataclass(frozen=True, slots=True)
class SavedHostPort:
    """`HostPort` to one host of a saved state. Every mutation is refused: there is nothing behind it (S20)."""

    name: str
    saved: SavedHost | None

    def call(self, request: Request, *, deadline_s: float) -> Answer:  # noqa: ARG002  (nothing is waited for)
        """Answer a look from what was saved.

        Raises:
            HostUnreachableError: The state says nothing of this host.
        """
        if self.saved is None:
            raise HostUnreachableError(self.name, "the saved state does not have this host")
        if self.saved.silence:
            raise HostUnreachableError(
                self.name, f"could not be observed when the state was saved: {self.saved.silence}"
            )
        if request.verb != "observe":
            return Answer(
                "refused", "SavedState", "a saved state answers no such question", {}, "", 0.0
            )
        known = self.saved.observed.get("servers") or {}
        asked = [str(s["server"]) for s in request.args.get("servers") or ()]
        servers = {name: known.get(name) or {**unknown_server()} for name in asked}
        return Answer("done", "", "", {**self.saved.observed, "servers": servers}, "", 0.0)

    def observe_outer(
        self,
        args: Mapping[str, Any],  # noqa: ARG002  (both layers were joined before they were saved)
        *,
        deadline_s: float,  # noqa: ARG002
    ) -> Mapping[str, Any] | None:
        """Say that there is one layer."""
        return None

    def ask_outer(self, request: Request, *, deadline_s: float) -> Answer | None:  # noqa: ARG002
        """Say that there is one layer."""
        return None

    def reach(self, port: int) -> AbstractContextManager[Address]:
        """Refuse: nothing listens in a file."""
        raise HostUnreachableError(self.name, f"port {port} cannot be reached in a saved state")

"""One connected host: its helper on each layer, and the check that it is the machine that was enrolled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from reconciler.core.errors import CommandFailedError, HostIdentityError
from reconciler.effects.channel import HelperChannel
from reconciler.effects.pins import Pin
from reconciler.effects.ports import Answer, Request
from reconciler.transports.base import Address, Transport


@dataclass
class ConnectedHost:
    """A host as `HostPort` wants it. Used by one thread at a time; `close` it when the pass is over."""

    name: str
    inner: HelperChannel
    outer: HelperChannel | None = None
    pin: Pin | None = None
    transports: tuple[Transport, ...] = ()
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def call(self, request: Request, *, deadline_s: float) -> Answer:
        """Ask the helper beside the units; see `HostPort.call`."""
        with self._lock:
            answer = self.inner.call(request, deadline_s=deadline_s)
        if request.verb == "observe" and answer.outcome == "done" and self.pin is not None:
            self._check(answer.data, self.pin.machine_id)
        return answer

    def observe_outer(
        self, args: Mapping[str, Any], *, deadline_s: float
    ) -> Mapping[str, Any] | None:
        """Observe the Proxmox node; None on a plain host."""
        if self.outer is None:
            return None
        with self._lock:
            answer = self.outer.call(Request("observe", args), deadline_s=deadline_s)
        if answer.outcome != "done":
            raise CommandFailedError(
                self.name, f"the outer layer would not observe: {answer.message or answer.reason}"
            )
        if self.pin is not None and self.pin.outer_machine_id is not None:
            self._check(answer.data, self.pin.outer_machine_id)
        return answer.data

    @contextmanager
    def reach(self, port: int) -> Iterator[Address]:
        """Give a local address that leads to the server's port."""
        with self.inner.transport.reach(port) as address:
            yield address

    def close(self) -> None:
        """End the kept helpers and the connections."""
        self.inner.close()
        if self.outer is not None:
            self.outer.close()
        for transport in self.transports:
            transport.close()

    def _check(self, data: Mapping[str, Any], expected: str) -> None:
        """Refuse a machine that is not the one enrolled, whatever key it shows (S21, F43)."""
        identity = (data.get("identity") or {}).get("known") or {}
        found = identity.get("machine_id")
        if found and found != expected:
            raise HostIdentityError(
                self.name,
                f"this is the machine {found[:12]}…, enrolled was {expected[:12]}…; nothing was done. "
                f"If the machine was rebuilt on purpose, run `reconcile enrol {self.name}`",
            )

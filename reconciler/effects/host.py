"""One connected host: its helper on each layer, and the check that it is the machine that was enrolled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from reconciler.core.errors import CommandFailedError, HostIdentityError, HostUnreachableError
from reconciler.effects.channel import HelperChannel
from reconciler.effects.pins import Pin
from reconciler.effects.ports import Answer, Request
from reconciler.transports.base import Address, Transport

LOCK_DEADLINE_S = 20.0


@dataclass
class ConnectedHost:
    """A host as `HostPort` wants it. Used by one thread at a time; `close` it when the pass is over."""

    name: str
    inner: HelperChannel
    outer: HelperChannel | None = None
    pin: Pin | None = None
    transports: tuple[Transport, ...] = ()
    vmid: int | None = None
    _lock_known: bool = field(default=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def call(self, request: Request, *, deadline_s: float) -> Answer:
        """Ask the helper beside the units; see `HostPort.call`."""
        with self._lock:
            if request.verb == "observe" and not self._lock_known:
                self._refuse_locked()
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

    def ask_outer(self, request: Request, *, deadline_s: float) -> Answer | None:
        """Ask the Proxmox node for one thing, as root: what a person consents to by name; None on a plain host."""
        if self.outer is None:
            return None
        with self._lock:
            return self.outer.carried_as_root(request, deadline_s=deadline_s)

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

    def _refuse_locked(self) -> None:
        """Begin nothing in a container that Proxmox has locked: a backup may freeze it at any moment (gpu-release.md 4.1).

        Asked once a connection: a rollout under way is not left behind for a lock that came later. Where the node keeps no
        such file, entering the container says whatever there is to say.
        """
        if self.outer is None or self.vmid is None:
            return
        command = f"exec cat /etc/pve/lxc/{self.vmid:d}.conf"
        done = self.outer.transport.run(command, b"", deadline_s=LOCK_DEADLINE_S)
        lines = done.stdout.decode("utf-8", "replace").splitlines() if not done.exit_status else []
        for line in lines:
            if line.startswith("["):  # What follows is a snapshot's.
                break
            if line.startswith("lock:"):
                why = line.removeprefix("lock:").strip()[:40]
                raise HostUnreachableError(
                    self.name,
                    f"container {self.vmid} is locked ({why}); nothing was executed. Run again when the node has given it back",
                )
        self._lock_known = True

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

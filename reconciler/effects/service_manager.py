"""What a daemon tells the service manager that started it: ready, what it does, that it is alive (sd_notify's protocol)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

STATUS_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """The socket that the service manager named; without one, saying something does nothing."""

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ServiceManager:
        """Read where to speak, and how often a sign of life is wanted of this process."""
        address = environ.get("NOTIFY_SOCKET", "")
        usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        ours = pid in {"", str(os.getpid())}
        every = int(usec) / 1e6 if address and ours and usec.isdecimal() else None
        return cls(address if address[:1] in {"/", "@"} else "", every)

    def ready(self, status: str) -> None:
        """Say that the daemon is up, or up again after a reload."""
        self._send("READY=1", _status(status))

    def status(self, status: str) -> None:
        """Say in a line what is going on."""
        self._send(_status(status))

    def reloading(self) -> None:
        """Say that settings are being read anew."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that the end has begun."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Give a sign of life."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as talk:
                talk.settimeout(1.0)
                talk.sendto("\n".join(lines).encode(), address)
        except OSError:
            return  # Nobody listens any more; what we do does not depend on it.


def _status(text: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text)
    return f"STATUS={plain[:STATUS_CHARS]}"

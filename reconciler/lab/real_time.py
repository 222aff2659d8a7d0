"""A simulated host in real time: its clock follows this machine's, and its servers answer real HTTP.

What the helper sees is the world of `world.py`. Beside it, for each server that the gate wants to reach, a real process of
`scripts/fakegpu-hold` runs on a free loopback port: no GPU, no root, nothing written outside of one temporary
folder. It lives no longer than the simulated process that it speaks for. Used by `rehearsal.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reconciler.core.errors import HostError, HostUnreachableError
from reconciler.effects.channel import as_answer, wire
from reconciler.effects.ports import Answer, Request
from reconciler.lab.hosts import SCRIPTS
from reconciler.lab.simulated import SimulatedHost, server_on
from reconciler.lab.stand_in import KEY
from reconciler.lab.world import Process
from reconciler.transports.base import Address

TICK_S = 0.1
"""How often a host is brought up to now while nobody asks it: late enough to cost nothing, early for a person."""

LISTENS_S = 20.0
"""For a Python with asyncio to listen: 0.2 s on an idle machine."""


@dataclass
class RealTimeHost:
    """`HostPort` to one simulated host whose time is this machine's. Threads may share it."""

    simulated: SimulatedHost
    folder: Path
    began: float = field(default_factory=time.monotonic)
    servers: dict[int, StandInServer] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        """Give the host's name."""
        return self.simulated.name

    def call(self, request: Request, *, deadline_s: float) -> Answer:  # noqa: ARG002  (nothing is slow here)
        """Ask the helper on the host, and take as long as the host took."""
        with self.lock:
            self.catch_up()
            try:
                answer = self.simulated.call(wire(request, self.simulated.world.hex(32)))
            finally:
                ahead = self.simulated.world.now - (time.monotonic() - self.began)
                time.sleep(max(0.0, ahead))
        return as_answer(answer)

    def observe_outer(
        self,
        args: Mapping[str, Any],  # noqa: ARG002  (there is one layer)
        *,
        deadline_s: float,  # noqa: ARG002
    ) -> Mapping[str, Any] | None:
        """Say that there is one layer."""
        return None

    def ask_outer(self, request: Request, *, deadline_s: float) -> Answer | None:  # noqa: ARG002
        """Say that there is one layer."""
        return None

    @contextmanager
    def reach(self, port: int) -> Iterator[Address]:
        """Give the loopback address of the real stand-in that speaks for whoever serves on a port."""
        with self.lock:
            self.catch_up()
            process = server_on(self.simulated.host, port) if self.simulated.host.is_up() else None
            if process is None:
                raise HostUnreachableError(self.name, f"nobody listens on port {port}")
            found = self.servers.get(process.pid)
            if found is None or not found.lives():
                found = StandInServer.start(process, self.folder)
                self.servers[process.pid] = found
        yield Address("127.0.0.1", found.port)

    def catch_up(self) -> None:
        """Let everything happen that was due by now, and end the stand-ins of servers that are gone."""
        world = self.simulated.world
        world.advance(max(0.0, time.monotonic() - self.began - world.now))
        for pid, server in list(self.servers.items()):
            if not server.process.alive:
                self.servers.pop(pid).end()

    def act(self, change: Callable[[SimulatedHost], str]) -> str:
        """Change the world by hand, at this instant."""
        with self.lock:
            self.catch_up()
            return change(self.simulated)

    def close(self) -> None:
        """End every stand-in."""
        with self.lock:
            while self.servers:
                self.servers.popitem()[1].end()


@dataclass(frozen=True, slots=True)
class StandInServer:
    """One real process that answers for one simulated process."""

    process: Process
    real: subprocess.Popen[bytes]
    port: int

    @classmethod
    def start(cls, process: Process, folder: Path) -> StandInServer:
        """Start it and wait until it listens.

        Raises:
            HostError: It does not.
        """
        port = _free_port()
        options = [
            *process.behaviour.http,
            "--load",
            "0",
            "--host",
            "127.0.0.1",
            "--serve",
            str(port),
        ]
        command = [
            sys.executable,
            str(SCRIPTS / "fakegpu-hold"),
            "--gpu",
            "",
            "--mib",
            "0",
            "--no-oom",
            *options,
        ]
        environment = {"PATH": os.defpath, "FAKEGPU_DEV": str(folder)}
        if process.behaviour.http_key:
            environment["FAKEGPU_API_KEY"] = KEY
        real = subprocess.Popen(  # noqa: S603  (our own script, by this Python; arguments are separate words)
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is for us: we end it when the rollout is undone.
        )
        server = cls(process, real, port)
        due = time.monotonic() + LISTENS_S
        while not _listens(port):
            if real.poll() is not None or time.monotonic() > due:
                server.end()
                raise HostError("rehearsal", f"the stand-in server did not come up on port {port}")
            time.sleep(0.02)
        return server

    def lives(self) -> bool:
        """Say whether the real process runs."""
        return self.real.poll() is None

    def end(self) -> None:
        """End the real process."""
        self.real.kill()
        self.real.wait()


class Heart:
    """Lets the time of all hosts go on while nobody asks them."""

    def __init__(self, hosts: list[RealTimeHost]) -> None:
        self.hosts = hosts
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="rehearsal-time", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        while not self.ended.wait(TICK_S):
            for host in self.hosts:
                with host.lock:
                    host.catch_up()

    def stop(self) -> None:
        """End it."""
        self.ended.set()
        self.thread.join()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


__all__ = ["Heart", "RealTimeHost", "StandInServer"]

"""What transports are tried against: a real sshd on a loopback port, a TCP proxy that cuts, a TCP server."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from reconciler.transports.host_keys import HostKey, HostKeys, pin
from reconciler.transports.ssh import SshTarget, SshTransport, scan_host_key

START_S = 20.0
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") or "/usr/sbin/sshd"


@dataclass
class Keys:
    """Key pairs, made once."""

    directory: Path

    def make(self, name: str, *options: str) -> Path:
        """Return the private key called `name`, made at its first use."""
        path = self.directory / name
        if not path.exists():
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, *options, "-f", path],
                check=True,
            )
        return path


@dataclass
class Sshd:
    """One server, run without root's help: everything it needs lies in one directory."""

    directory: Path
    host_key: Path
    port: int
    process: subprocess.Popen[bytes]
    log: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def collect(self) -> None:
        """Read the server's log to its end."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.changed:
                self.log += line.decode()
                self.changed.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait until the log says `text`."""
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.log, START_S), self.log

    def stop(self) -> None:
        """End the server; its sessions end with their connections."""
        self.process.terminate()
        self.process.wait(START_S)


class Servers:
    """Starts servers and stops them."""

    def __init__(self, directory: Path, keys: Keys) -> None:
        self.directory = directory
        self.keys = keys
        self.running: list[tuple[Sshd, threading.Thread]] = []

    def start(
        self,
        *lines: str,
        host_key: str = "host",
        user_keys: tuple[str, ...] = ("user",),
        port: int = 0,
    ) -> Sshd:
        """Start a server with these lines in its configuration, before the usual ones."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        place = self.directory / f"sshd-{len(self.running)}"
        place.mkdir()
        authorized = place / "authorized_keys"
        authorized.write_text(
            "".join(self.keys.make(n).with_suffix(".pub").read_text() for n in user_keys)
        )
        port = port or free_port()
        config = place / "sshd_config"
        usual = (
            f"Port {port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.keys.make(host_key)}",
            f"AuthorizedKeysFile {authorized}",
            "PidFile none",
            "UsePAM no",
            "StrictModes no",
            "PermitRootLogin yes",
            "MaxStartups 100",
            "LogLevel VERBOSE",
            # Without the login files of whoever runs the tests: bash reads them for each command.
            f"SetEnv HOME={place}",
        )
        config.write_text("\n".join((*lines, *usual)) + "\n")
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=subprocess.PIPE)
        server = Sshd(place, self.keys.make(host_key), port, process)
        reader = threading.Thread(target=server.collect, daemon=True)
        reader.start()
        self.running.append((server, reader))
        server.wait_for("Server listening")
        return server

    def stop(self) -> None:
        for server, reader in self.running:
            server.stop()
            reader.join(START_S)
            assert server.process.stderr is not None
            if not reader.is_alive():
                server.process.stderr.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Client:
    """What the operator has: a configuration, a store of host keys."""

    directory: Path
    keys: Keys

    @property
    def store(self) -> Path:
        return self.directory / "host_keys"

    @property
    def config(self) -> Path:
        return self.directory / "ssh_config"

    def pin(self, port: int, name: str = "127.0.0.1") -> HostKey:
        """Enrol the server at `port`."""
        key = scan_host_key("127.0.0.1", port, START_S)
        pin(self.store, name, port, [key])
        return key

    def transport(
        self,
        port: int,
        *lines: str,
        user: str | None = None,
        timeout_s: float = 10.0,
        **options: bool,
    ) -> SshTransport:
        """Return a transport to the server at `port`, with these lines first in the configuration."""
        usual = (
            "Host *",
            "IdentityAgent none",
            f"IdentityFile {self.keys.make('user')}",
        )
        self.config.write_text("\n".join((*lines, *usual)) + "\n")
        return SshTransport(
            SshTarget("127.0.0.1", user=user, port=port),
            HostKeys((self.store,)),
            self.config,
            timeout_s,
            **options,
        )


@dataclass
class Counter:
    """How many bytes may pass one way before the proxy does something about it."""

    left: int | None = None


class Proxy:
    """A TCP proxy whose connections can be cut with a reset, or left silent, at any byte."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._silent = threading.Event()
        self._closed = threading.Event()
        self.to_server = Counter()
        self.to_client = Counter()
        self.passed_to_client = 0
        self.passed_to_server = 0
        self._passed = threading.Condition()
        self._silent_after: int | None = None
        self._spawn(self._accept)

    def retarget(self, port: int) -> None:
        """Lead new connections to another port."""
        self._target = port

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {near, far}
            self._spawn(self._copy, near, far, self.to_server, "passed_to_server")
            self._spawn(self._copy, far, near, self.to_client, "passed_to_client")

    def _copy(
        self, source: socket.socket, sink: socket.socket, counter: Counter, passed: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._silent.is_set():
                    self._closed.wait()
                    return
                if counter.left is not None:
                    data = data[: counter.left]
                    counter.left -= len(data)
                sink.sendall(data)
                with self._passed:
                    setattr(self, passed, getattr(self, passed) + len(data))
                    self._passed.notify_all()
                if self._silent_after is not None and self.passed_to_server > self._silent_after:
                    self.silence()
                if counter.left == 0:
                    self.cut()
                    return
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # Wakes the thread that reads it; the reset goes out with the close.
                one.shutdown(socket.SHUT_RD)
            one.close()

    def silence(self) -> None:
        """Take everything, pass nothing on: a link that is dead and does not say so."""
        self._silent.set()

    def silence_after(self, count: int) -> None:
        """Be silent once so many bytes have gone to the server."""
        self._silent_after = count

    def speak(self) -> None:
        """Pass on again what comes over new connections."""
        self._silent.clear()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(START_S)


class TcpServer:
    """A TCP server on loopback; each connection is given to `answer` in a thread."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._main = threading.Thread(target=self._accept, daemon=True)
        self._main.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            self._answer(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._main.join(START_S)
        for thread in self._threads:
            thread.join(START_S)

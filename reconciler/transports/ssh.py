"""Commands and tunnels over SSH, by paramiko, with OpenSSH's client configuration and pinned host keys.

What paramiko leaves to its callers is done here: it neither times out a command's start or end, nor
notices a silent link, nor tells a command killed by a signal from a lost connection, nor opens a second
connection where a server allows one session only. `paramiko.SSHClient` is not used: it trusts, retries
and reads keys in its own way.

Not done, on purpose: passwords, agent forwarding, terminals, trust on first use.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from reconciler.core.errors import HostUnreachableError, OutcomeUnknownError, plain
from reconciler.transports.base import (
    OUTPUT_CAP_BYTES,
    STDERR_TAIL_BYTES,
    Address,
    Completed,
    Session,
)
from reconciler.transports.host_keys import HostKey, HostKeys, Pinned
from reconciler.transports.quick_paramiko import paramiko
from reconciler.transports.ssh_login import Route, connect, hang_up, plan_route, scan
from reconciler.transports.tunnel import Stream, listening

CHUNK_BYTES = 64 * 1024
CONNECTIONS_LIMIT = 4
"""To one host. One carries everything; more are opened only where the server's MaxSessions is used up."""

SESSION_WAIT_S = 10.0
"""For a free session once no further connection is allowed; a command of ours seldom takes longer."""

CLOSING_WAIT_S = 1.0
"""For a server to count a session that we have just closed as closed, before a further connection is made."""

EXEC_REPLY_S = 30.0
"""For the host to start a kept command: a login shell with slow rc files."""

SEND_LIMIT_S = 30.0
"""For a kept command to take what is sent to it. Requests are small; one that does not fit is not read."""

LINGER_S = 1.0
"""How long a channel may stay open once the exit status is there: what the command left running may hold
its streams, and then no end of output would ever come (paramiko/paramiko#2033)."""

TICK_S = 0.25
"""Wait between looks at what rings no bell: the exit status of a command whose streams are held open."""

WINDOW_TICK_S = 0.02
"""The same while input waits for the host to read; rare, a window is 2 MiB."""


@dataclass(frozen=True, slots=True)
class SshTarget:
    """Whom to connect to, as a Host document says; None leaves it to the OpenSSH configuration."""

    address: str
    user: str | None = None
    port: int | None = None


class SshTransport:
    """One host over SSH. Opened at the first use; threads may share it.

    `config_path` is the operator's OpenSSH configuration; None reads none. `allow_proxy_command` lets its
    ProxyCommand run: that is a shell command on this machine, so the operator has to say so.
    """

    def __init__(
        self,
        target: SshTarget,
        host_keys: HostKeys,
        config_path: Path | None,
        connect_timeout_s: float = 10.0,
        *,
        allow_proxy_command: bool = False,
    ) -> None:
        self._target = target
        self._host_keys = host_keys
        self._config_path = config_path
        self._connect_timeout_s = connect_timeout_s
        self._allow_proxy_command = allow_proxy_command
        self._pool = _Pool(self._connect, connect_timeout_s)

    @property
    def label(self) -> str:
        """Where this leads, for people: `deploy@192.0.2.74:22`, as far as the spec says it."""
        user = f"{self._target.user}@" if self._target.user else ""
        port = f":{self._target.port}" if self._target.port else ""
        return f"{user}{self._target.address}{port}"

    def run(self, command: str, stdin: bytes, *, deadline_s: float) -> Completed:
        """Run `command`; see `Transport.run`. The time to connect is not part of the deadline."""
        with self._pool.session(self.label) as (connection, channel):
            exchange = _Exchange(self.label, connection, channel, deadline_s)
            try:
                return exchange.run(command, stdin)
            except OutcomeUnknownError:
                # The link may be dead; whoever comes next gets a new one.
                self._pool.retire(connection)
                raise

    def open(self, command: str) -> Session:
        """Start `command` and keep it; see `Transport.open`."""
        with contextlib.ExitStack() as stack:
            connection, channel = stack.enter_context(self._pool.session(self.label))
            with _cut_at(connection, EXEC_REPLY_S):
                _execute(self.label, channel, command)
            return _SshSession(self.label, channel, stack.pop_all())

    @contextlib.contextmanager
    def reach(self, port: int, *, address: str = "127.0.0.1") -> Iterator[Address]:
        """Give a local address that leads to `address:port` as seen from the host, while open."""
        # Connected now, so that an unreachable host is said here and not by a reset later.
        with self._pool.borrowed():
            pass

        def open_stream() -> Stream:
            return _open_stream(self._pool, self.label, address, port, self._connect_timeout_s)

        with listening(open_stream) as local:
            yield local

    def scan(self) -> ScannedHost:
        """Ask the host for its key, without logging in to it; jump hosts on the way are logged in to.

        Raises:
            HostUnreachableError: No connection.
            HostIdentityError: A jump host is not the one that is pinned.
        """
        route = self._route()
        target = route.target
        key = scan(route, self._host_keys)
        known = self._host_keys.lookup(*target.key_name, named=target.config.known_hosts_files)
        return ScannedHost(*target.key_name, key, known)

    def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    def __enter__(self) -> SshTransport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _route(self) -> Route:
        return plan_route(
            self._target.address,
            user=self._target.user,
            port=self._target.port,
            config_path=self._config_path,
            connect_timeout_s=self._connect_timeout_s,
            allow_proxy_command=self._allow_proxy_command,
        )

    def _connect(self) -> tuple[paramiko.Transport, ...]:
        return connect(self._route(), self._host_keys)


@dataclass(frozen=True, slots=True)
class ScannedHost:
    """What a host shows before any login: its key, the name and port to pin it under, and what is known of that name."""

    name: str
    port: int
    key: HostKey
    known: Pinned


def scan_host_key(address: str, port: int, deadline_s: float) -> HostKey:
    """Ask the machine at `address:port` for its key directly, by no configuration and without a login.

    Raises:
        HostUnreachableError: No connection within `deadline_s`, or no SSH server.
    """
    route = plan_route(
        address,
        user=None,
        port=port,
        config_path=None,
        connect_timeout_s=deadline_s,
        allow_proxy_command=False,
    )
    return scan(route, HostKeys(()))


class _Connection:
    """One login: the transports of all its hops, the nearest first. `users` is the pool's to count."""

    def __init__(self, transports: tuple[paramiko.Transport, ...]) -> None:
        self.transports = transports
        self.users = 0
        self.retired = False

    @property
    def ssh(self) -> paramiko.Transport:
        """The last hop: the host itself."""
        return self.transports[-1]

    def is_active(self) -> bool:
        """Say whether every hop stands, as far as is known."""
        return all(transport.is_active() for transport in self.transports)

    def cut(self) -> None:
        """End it now, whatever is blocked in it: nearest first, so that no goodbye is waited for."""
        hang_up(self.transports)


class _Pool:
    """The connections to one host; nearly always one."""

    def __init__(
        self, login: Callable[[], tuple[paramiko.Transport, ...]], timeout_s: float
    ) -> None:
        self._login = login
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._connections: list[_Connection] = []

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[_Connection]:
        """Lend a connection that stands, for anything but a session."""
        connection = self._take(full=frozenset())
        assert connection is not None, "without full ones, one is always found or made"
        try:
            yield connection
        finally:
            self._give_back(connection)

    @contextlib.contextmanager
    def session(self, label: str) -> Iterator[tuple[_Connection, paramiko.Channel]]:
        """Lend a connection and a new session channel on it, closed at the end.

        Raises:
            HostUnreachableError: None could be had; nothing was executed.
        """
        connection, channel = self._open_session(label)
        try:
            yield connection, channel
        finally:
            _close_channel(connection, channel)
            self._give_back(connection)

    def _open_session(self, label: str) -> tuple[_Connection, paramiko.Channel]:
        """Open a session where one is free.

        A server that allows no more on one connection (MaxSessions) may still count the one that was
        just closed, or another user of this transport holds it. So: the connection we have, another one
        while that is allowed, and then again after a pause, until the time is up.
        """
        began = time.monotonic()
        full: set[_Connection] = set()
        pauses = _pauses()
        broken = False
        while True:
            connection = self._take(full=frozenset(full))
            if connection is None:
                if time.monotonic() >= began + SESSION_WAIT_S:
                    raise HostUnreachableError(
                        label,
                        f"no free session on {len(full)} connections within {SESSION_WAIT_S:g} s "
                        "(the server's MaxSessions); nothing was executed",
                    )
                self._wait(next(pauses))
                full.clear()
                continue
            try:
                return connection, _open_channel(connection, self._timeout_s)
            except _NoSessionError:
                if self._give_back(connection) or time.monotonic() >= began + CLOSING_WAIT_S:
                    full.add(connection)
                else:
                    self._wait(next(pauses))
            except (paramiko.SSHException, OSError, EOFError) as error:
                # It had died since it was last used, and so have the others, on the same way. Nothing was
                # executed, so once more on a new one.
                self._retire_all()
                self._give_back(connection)
                if broken:
                    raise HostUnreachableError(
                        label,
                        f"no session could be opened: {plain(error)}; nothing was executed",
                    ) from error
                broken = True

    def _take(self, full: frozenset[_Connection]) -> _Connection | None:
        """Count one more user of a connection that is not `full`; None when no more may be made."""
        with self._connecting:
            with self._changed:
                self._drop_dead()
                usable = [c for c in self._connections if not c.retired]
                for connection in usable:
                    if connection not in full:
                        connection.users += 1
                        return connection
                if len(usable) >= CONNECTIONS_LIMIT:
                    return None
            fresh = _Connection(self._login())
            with self._changed:
                fresh.users = 1
                self._connections.append(fresh)
            return fresh

    def _drop_dead(self) -> None:
        for connection in list(self._connections):
            if not connection.is_active():
                connection.retired = True
            if connection.retired and connection.users == 0:
                self._connections.remove(connection)
                connection.cut()

    def _wait(self, pause_s: float) -> None:
        with self._changed:
            self._changed.wait(pause_s)

    def _give_back(self, connection: _Connection) -> int:
        """Count one user less, and return how many are left."""
        with self._changed:
            connection.users -= 1
            self._drop_dead()
            self._changed.notify_all()
            return connection.users

    def retire(self, connection: _Connection) -> None:
        """Lend it no more; whoever uses it may go on."""
        with self._changed:
            connection.retired = True

    def _retire_all(self) -> None:
        with self._changed:
            for connection in self._connections:
                connection.retired = True

    def close(self) -> None:
        """Cut all."""
        with self._changed:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.cut()


def _pauses() -> Iterator[float]:
    """Give pauses that grow to half a second, with jitter: several controllers may be waiting."""
    pause_s = 0.02
    while True:
        yield pause_s * random.uniform(0.5, 1.5)  # noqa: S311  jitter, no secret
        pause_s = min(2 * pause_s, 0.5)


class _NoSessionError(Exception):
    """The server opens no further session on this connection."""


def _open_channel(connection: _Connection, timeout_s: float) -> paramiko.Channel:
    began = time.monotonic()
    try:
        with _cut_at(connection, timeout_s + 1.0):
            return connection.ssh.open_session(timeout=timeout_s)
    except paramiko.ChannelException as error:
        raise _NoSessionError from error
    except paramiko.SSHException as error:
        # paramiko keeps one error for all threads: who comes second finds none and gets a vague one.
        if connection.is_active() and time.monotonic() < began + timeout_s:
            raise _NoSessionError from error
        raise


def _close_channel(connection: _Connection, channel: paramiko.Channel) -> None:
    # Closing sends a message, which can block on a link that is full and dead.
    with _cut_at(connection, 5.0), contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


@contextlib.contextmanager
def _cut_at(connection: _Connection, seconds: float) -> Iterator[None]:
    """Cut the connection if what is inside takes longer: several of paramiko's waits know no limit."""
    watchdog = threading.Timer(seconds, connection.cut)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _execute(label: str, channel: paramiko.Channel, command: str) -> None:
    """Ask for the command to be started.

    Raises:
        OutcomeUnknownError: No answer, or the channel was closed: it may have started.
    """
    try:
        channel.exec_command(command)
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise OutcomeUnknownError(
            label, f"the host did not confirm that the command was started: {plain(error)}"
        ) from error


class _Bell(threading.Event):
    """Rung when a channel has data or has ended. paramiko clears it as it likes; only `reset` counts."""

    def clear(self) -> None:
        """Keep it set: another stream may still have something."""

    def reset(self) -> None:
        """Clear it; look at everything once more before waiting."""
        super().clear()


def _hang_bell(channel: paramiko.Channel) -> _Bell:
    bell = _Bell()
    # What Channel.fileno does with a pipe, which would cost two descriptors a command.
    channel.in_buffer.set_event(bell)
    channel.in_stderr_buffer.set_event(bell)
    return bell


def _ready_bytes(channel: paramiko.Channel) -> bytes:
    return channel.recv(CHUNK_BYTES) if channel.recv_ready() else b""


def _ready_stderr(channel: paramiko.Channel) -> bytes:
    return channel.recv_stderr(CHUNK_BYTES) if channel.recv_stderr_ready() else b""


class _Exchange:
    """One command, its input and its two outputs, moved by one thread until its end."""

    def __init__(
        self, label: str, connection: _Connection, channel: paramiko.Channel, deadline_s: float
    ) -> None:
        self._label = label
        self._connection = connection
        self._channel = channel
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._bell = _hang_bell(channel)
        self._stdout = bytearray()
        self._stderr = bytearray()

    def run(self, command: str, stdin: bytes) -> Completed:
        """See `Transport.run`."""
        # The second of grace is for the loop below to end by itself first.
        with _cut_at(self._connection, self._deadline_s + 1.0):
            _execute(self._label, self._channel, command)
            self._channel.settimeout(0.0)
            return self._move(memoryview(stdin))

    def _move(self, pending: memoryview) -> Completed:
        open_input = True
        moved_at = time.monotonic()
        ended_at: float | None = None
        while True:
            self._bell.reset()
            closed, status = self._channel.closed, self._channel.exit_status
            pending = self._send(pending)
            if open_input and not pending:
                open_input = False
                self._end_input()
            moved = self._receive()
            if len(self._stdout) > OUTPUT_CAP_BYTES or len(self._stderr) > OUTPUT_CAP_BYTES:
                return self._completed(None, truncated=True)
            if closed and not moved:
                return self._ended()
            now = time.monotonic()
            moved_at = now if moved else moved_at
            until = self._deadline
            if status >= 0:
                # Output may come after the status, but not after a silence.
                ended_at = ended_at or now
                until = min(until, max(ended_at, moved_at) + LINGER_S)
            if closed or (moved and now < until):
                continue
            if now >= until:
                return self._give_up(status)
            self._bell.wait(min(until - now, WINDOW_TICK_S if pending else TICK_S))

    def _give_up(self, status: int) -> Completed:
        """Stop reading. With a status the command has ended, and only its streams are still held."""
        if status >= 0:
            return self._completed(status, truncated=True)
        raise OutcomeUnknownError(
            self._label,
            f"the command had not ended after {self._deadline_s:g} s; the channel was closed, the command "
            "may still run",
        )

    def _send(self, pending: memoryview) -> memoryview:
        try:
            while pending:
                pending = pending[self._channel.send(bytes(pending[:CHUNK_BYTES])) :]
        except TimeoutError:
            return pending  # The window is full.
        except (OSError, EOFError, paramiko.SSHException):
            # It ended before it had read everything; how it ended says the rest.
            return pending[:0]
        return pending

    def _end_input(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def _receive(self) -> bool:
        """Take what is there, of both streams in turn."""
        try:
            out = _ready_bytes(self._channel)
            err = _ready_stderr(self._channel)
        except (paramiko.SSHException, OSError, EOFError) as error:
            # Making room in the window sends a message.
            raise self._lost() from error
        self._stdout += out
        self._stderr += err
        return bool(out or err)

    def _ended(self) -> Completed:
        status = self._channel.exit_status
        if status >= 0:
            return self._completed(status, truncated=False)
        # -1 stands both for death by a signal and for a lost connection. paramiko closes the channels of
        # a lost one before it says so, hence the short wait for its thread.
        self._connection.ssh.join(0.1)
        if not self._connection.is_active():
            raise self._lost()
        return self._completed(None, truncated=False)

    def _lost(self) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            self._label, "the connection was lost while the command ran; it may still run"
        )

    def _completed(self, status: int | None, *, truncated: bool) -> Completed:
        return Completed(
            stdout=bytes(self._stdout[:OUTPUT_CAP_BYTES]),
            stderr=bytes(self._stderr[:OUTPUT_CAP_BYTES]),
            exit_status=status,
            truncated=truncated,
        )


class _SshSession:
    """A command that is kept; see `Session`. One thread may send while another receives."""

    def __init__(
        self, label: str, channel: paramiko.Channel, resources: contextlib.ExitStack
    ) -> None:
        self._label = label
        self._channel = channel
        self._resources = resources
        self._bell = _hang_bell(channel)
        self._sending = threading.Lock()
        self._tail = bytearray()
        channel.settimeout(SEND_LIMIT_S)

    def send(self, data: bytes) -> None:
        """Write all of `data`."""
        with self._sending:
            try:
                self._channel.sendall(data)
            except TimeoutError as error:
                raise OutcomeUnknownError(
                    self._label, f"the command read nothing for {SEND_LIMIT_S:g} s"
                ) from error
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise OutcomeUnknownError(self._label, "the command has ended") from error

    def receive(self, deadline_s: float) -> bytes:
        """Return the next bytes of standard output; standard error is drained on the way."""
        deadline = time.monotonic() + deadline_s
        while True:
            self._bell.reset()
            ended = self._channel.closed or self._channel.eof_received
            try:
                self._tail += (err := _ready_stderr(self._channel))
                out = _ready_bytes(self._channel)
            except (paramiko.SSHException, OSError, EOFError) as error:
                raise OutcomeUnknownError(self._label, "the connection was lost") from error
            del self._tail[:-STDERR_TAIL_BYTES]
            if out:
                return out
            if err:
                continue
            if ended:
                return self._end_of_output()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise OutcomeUnknownError(self._label, f"no answer within {deadline_s:g} s")
            self._bell.wait(remaining)

    def _end_of_output(self) -> bytes:
        if not self._channel.eof_received:
            raise OutcomeUnknownError(self._label, "the connection was lost")
        return b""

    def stderr_tail(self) -> bytes:
        """Return the last bytes of standard error."""
        return bytes(self._tail)

    def close(self) -> None:
        """Close the channel; the command sees its input end."""
        self._resources.close()


class _ChannelStream:
    """A direct-tcpip channel as a tunnel's far end."""

    def __init__(self, channel: paramiko.Channel, resources: contextlib.ExitStack) -> None:
        self._channel = channel
        self._resources = resources

    def send(self, data: bytes) -> None:
        """Send all; the far end may be slow, so there is no limit but the tunnel's end."""
        try:
            self._channel.sendall(data)
        except (EOFError, paramiko.SSHException) as error:
            raise ConnectionResetError(str(error)) from error

    def receive(self) -> bytes:
        """Wait for the next bytes."""
        try:
            data = self._channel.recv(CHUNK_BYTES)
        except (EOFError, paramiko.SSHException) as error:
            raise ConnectionResetError(str(error)) from error
        if not data and not self._channel.eof_received:
            raise ConnectionResetError("the channel closed without an end")
        return data

    def end(self) -> None:
        """Half-close."""
        with contextlib.suppress(EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def close(self) -> None:
        """Close the channel and give the connection back."""
        self._resources.close()


def _open_stream(pool: _Pool, label: str, address: str, port: int, timeout_s: float) -> Stream:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(pool.borrowed())
        try:
            channel = connection.ssh.open_channel(
                "direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout_s
            )
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise HostUnreachableError(
                label, f"{address}:{port} is not reached from there: {plain(error)}"
            ) from error
        stack.callback(_close_channel, connection, channel)
        return _ChannelStream(channel, stack.pop_all())


__all__ = [
    "ScannedHost",
    "SshTarget",
    "SshTransport",
    "scan_host_key",
]

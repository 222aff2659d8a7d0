"""From a name to an authenticated connection: configuration, jump hosts, host keys, login.

Everything here happens before any command is sent: each failure says that nothing was executed.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import logging
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reconciler.core.errors import HostIdentityError, HostUnreachableError, plain
from reconciler.transports.host_keys import HostKey, HostKeys, Pinned, host_label
from reconciler.transports.quick_paramiko import paramiko
from reconciler.transports.ssh_config import HostConfig, SshConfigError, resolve

HOPS_LIMIT = 8
"""Jump hosts on one way. More is a loop in the configuration."""

AUTH_TIMEOUT_S = 30.0
"""For one key to be judged: servers delay refusals, and directory services are slow."""

AGENT_TIMEOUT_S = 60.0
"""For the agent to answer: a person may have to touch a token."""

KEYS_LIMIT = 12
"""Keys tried on one host. A server gives up after MaxAuthTries, six by default."""

KEEPALIVE_S = 10
LINK_DEAD_S = 30
"""Bytes that stay unacknowledged so long end the connection (TCP_USER_TIMEOUT); keepalives see to it that
there always are some. Without it a silent link is noticed after a quarter of an hour."""

DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
LIBRARY_LOG = "paramiko"

_WEAK = re.compile(r"-cbc|3des|arcfour|hmac-sha1|hmac-md5|-sha1$|group1-|^ssh-rsa$|^ssh-dss$")
_ADDRESS = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9._:%-]{0,254}")
_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@/]+)@)?(?P<host>\[[^\]]+\]|[^@:/\[\]]+)(?::(?P<port>\d{1,5}))?/?"
)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,254}")


@dataclass(frozen=True, slots=True)
class Hop:
    """One machine on the way, everything resolved."""

    name: str
    address: str
    port: int
    user: str
    config: HostConfig

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.user}@{host_label(self.address, self.port)}"

    @property
    def key_name(self) -> tuple[str, int]:
        """The name and port that its key is pinned under."""
        alias = self.config.host_key_alias
        return (alias, 22) if alias else (self.address, self.port)


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a host: jump hosts first, the host last; and how the first is reached."""

    hops: tuple[Hop, ...]
    timeout_s: float
    proxy_command: str | None = None

    @property
    def target(self) -> Hop:
        """The host itself."""
        return self.hops[-1]


def plan_route(
    name: str,
    *,
    user: str | None,
    port: int | None,
    config_path: Path | None,
    connect_timeout_s: float,
    allow_proxy_command: bool,
) -> Route:
    """Say by which hops `name` is reached.

    Raises:
        HostUnreachableError: The configuration cannot be honoured.
    """
    try:
        hops = _hops(name, user, port, config_path, depth=0)
    except SshConfigError as error:
        raise HostUnreachableError(name, f"OpenSSH configuration: {error}") from error
    command = hops[0].config.proxy_command
    if command is not None and not allow_proxy_command:
        raise HostUnreachableError(
            name,
            f"the OpenSSH configuration has a ProxyCommand for {hops[0].name}. It is a shell command on "
            "this machine, run at every connection, so it is refused unless the operator's settings allow "
            "it; ProxyJump needs no such leave",
        )
    timeout_s = hops[-1].config.connect_timeout_s or connect_timeout_s
    return Route(hops, timeout_s, command)


def _hops(
    name: str, user: str | None, port: int | None, config_path: Path | None, depth: int
) -> tuple[Hop, ...]:
    """Resolve a name and, before it, the jump hosts that its configuration names.

    As in OpenSSH, the first of several jump hosts is reached by its own configuration, which may name
    further ones; the others are reached through the one before.
    """
    if depth > HOPS_LIMIT:
        raise SshConfigError(f"more than {HOPS_LIMIT} jump hosts: ProxyJump goes in a circle")
    hop = _hop(name, user, port, config_path)
    if hop.config.proxy_jump is None:
        return (hop,)
    first, *others = [_jump(word) for word in hop.config.proxy_jump.split(",")]
    way = _hops(*first, config_path, depth + 1)
    return (*way, *(_hop(*other, config_path) for other in others), hop)


def _hop(name: str, user: str | None, port: int | None, config_path: Path | None) -> Hop:
    config = resolve(name, path=config_path, user=user, port=port)
    found_user = config.user or getpass.getuser()
    for what, text, grammar in (
        ("address", config.host_name, _ADDRESS),
        ("user", found_user, _USER),
    ):
        if not grammar.fullmatch(text):
            raise SshConfigError(f"{text!r} is no {what}")
    return Hop(name, config.host_name, config.port or 22, found_user, config)


def _jump(word: str) -> tuple[str, str | None, int | None]:
    """Read one jump host: `[user@]host[:port]` or `ssh://…`."""
    found = _JUMP.fullmatch(word.strip())
    if found is None:
        raise SshConfigError(f"ProxyJump {word!r} is not [user@]host[:port]")
    port = found["port"]
    return found["host"].strip("[]"), found["user"], None if port is None else int(port)


def connect(route: Route, host_keys: HostKeys) -> tuple[paramiko.Transport, ...]:
    """Connect and log in, hop by hop, and return the transports, the nearest first.

    Raises:
        HostUnreachableError: No way there, or no login; nothing was executed.
        HostIdentityError: A key is unknown, has changed or is revoked; nothing was executed.
    """
    _silence_library()
    transports: list[paramiko.Transport] = []
    try:
        for hop in route.hops:
            pinned = host_keys.lookup(*hop.key_name, named=hop.config.known_hosts_files)
            transport = _negotiate(route, hop, transports, pinned)
            transports.append(transport)
            _check_key(route, hop, pinned, _key_of(transport))
            _Login(route, hop, transport).run()
            transport.set_keepalive(KEEPALIVE_S)
    except BaseException:
        hang_up(transports)
        raise
    return tuple(transports)


def scan(route: Route, host_keys: HostKeys) -> HostKey:
    """Ask the target for its host key, logging in to jump hosts only."""
    _silence_library()
    way: tuple[paramiko.Transport, ...] = ()
    if len(route.hops) > 1:
        way = connect(Route(route.hops[:-1], route.timeout_s, route.proxy_command), host_keys)
    transports = list(way)
    try:
        transports.append(_negotiate(route, route.target, transports, Pinned()))
        return _key_of(transports[-1])
    finally:
        hang_up(transports)


def hang_up(transports: Sequence[paramiko.Transport]) -> None:
    """Close all hops now. The nearest first: with its socket gone, nothing behind it can block."""
    for transport in transports:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            if isinstance(transport.sock, socket.socket):
                # Wakes paramiko's thread, which otherwise looks only every tenth of a second.
                transport.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            transport.close()


def _silence_library() -> None:
    """Keep paramiko's tracebacks off standard error: what it says in its log, we raise."""
    log = logging.getLogger(LIBRARY_LOG)
    if not log.handlers:
        log.addHandler(logging.NullHandler())


def _unreachable(route: Route, hop: Hop, message: str) -> HostUnreachableError:
    via = "" if hop is route.target else f"jump host {hop.label}: "
    return HostUnreachableError(route.target.label, f"{via}{message}; nothing was executed")


def _identity(route: Route, hop: Hop, message: str) -> HostIdentityError:
    via = "" if hop is route.target else f"jump host {hop.label}: "
    return HostIdentityError(route.target.label, f"{via}{message}")


def _negotiate(
    route: Route, hop: Hop, way: Sequence[paramiko.Transport], pinned: Pinned
) -> paramiko.Transport:
    """Reach the hop and agree on keys with it; whose key that is, is not judged here."""
    deadline = time.monotonic() + route.timeout_s
    connection = _dial(route, hop, way, deadline)
    try:
        # Strict key exchange (against Terrapin) is offered by default; what that attack needs on a server
        # without it, ChaCha20 or CBC, is not spoken here.
        transport = paramiko.Transport(connection)  # type: ignore[arg-type]  # as its docstring allows
    except BaseException:
        connection.close()
        raise
    try:
        _restrict(transport, pinned)
        remaining = max(0.1, deadline - time.monotonic())
        # Ours passes first, so that a silent host is always told in the same words.
        transport.banner_timeout = transport.handshake_timeout = remaining + 5.0
        done = threading.Event()
        transport.start_client(event=done)
        agreed = done.wait(remaining) and transport.is_active()
    except BaseException:
        hang_up([transport])
        connection.close()
        raise
    if not agreed:
        error = transport.get_exception()
        hang_up([transport])
        connection.close()
        raise _failed_negotiation(route, hop, pinned, error)
    return transport


def _restrict(transport: paramiko.Transport, pinned: Pinned) -> None:
    """Take out what is weak, and ask for a key of a type that is pinned, as OpenSSH does."""
    options = transport.get_security_options()
    # GCM first: one pass over the data, and no MAC of its own.
    ciphers = sorted(options.ciphers, key=lambda name: "gcm" not in name)
    options.ciphers = tuple(name for name in ciphers if not _WEAK.search(name))
    options.digests = tuple(name for name in options.digests if not _WEAK.search(name))
    options.kex = tuple(name for name in options.kex if not _WEAK.search(name))
    strong = tuple(name for name in options.key_types if not _WEAK.search(name))
    known = {key.algorithm for key in pinned.keys}
    wanted = tuple(name for name in strong if _key_type(name) in known)
    options.key_types = wanted or strong


def _key_type(algorithm: str) -> str:
    """Return the type of the keys that sign by `algorithm`: rsa-sha2-512 is done with ssh-rsa keys."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _failed_negotiation(
    route: Route, hop: Hop, pinned: Pinned, error: Exception | None
) -> HostUnreachableError | HostIdentityError:
    if error is None:
        return _unreachable(route, hop, f"no SSH answer within {route.timeout_s:g} s")
    if (
        isinstance(error, paramiko.ssh_exception.IncompatiblePeer)
        and pinned.keys
        and "host key" in str(error)
    ):
        types = ", ".join(sorted({key.algorithm for key in pinned.keys}))
        return _identity(
            route,
            hop,
            f"the host no longer has a key of the pinned type ({types}, {pinned.source}); nothing was "
            "executed. If it was set up anew on purpose, run: reconcile enrol HOST",
        )
    if isinstance(error, EOFError):
        return _unreachable(route, hop, "the host closed the connection during the SSH negotiation")
    return _unreachable(route, hop, f"SSH negotiation failed: {plain(error)}")


def _dial(
    route: Route, hop: Hop, way: Sequence[paramiko.Transport], deadline: float
) -> socket.socket | _Passage:
    if way:
        try:
            return _Passage(
                way[-1].open_channel(
                    "direct-tcpip",
                    (hop.address, hop.port),
                    ("127.0.0.1", 0),
                    timeout=max(0.1, deadline - time.monotonic()),
                )
            )
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise _unreachable(
                route, hop, f"not reached from the jump host before it: {plain(error)}"
            ) from error
    if route.proxy_command is not None:
        return _run_proxy(route, hop, route.proxy_command)
    return _tcp(route, hop, deadline)


class _Passage:
    """A channel through a jump host, as the socket of the next connection.

    Closing a channel sends a message. On a connection that is gone that raises, and the one who closes is
    the thread of the next connection, in which nobody would catch it.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def send(self, data: bytes) -> int:
        """Send a part, and return its length in bytes."""
        return self._channel.send(data)

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end."""
        return self._channel.recv(size)

    def settimeout(self, timeout_s: float | None) -> None:
        """Limit the waits of `send` and `recv`."""
        self._channel.settimeout(timeout_s)

    def getpeername(self) -> object:
        """Return the address of the jump host, which is all that is known here."""
        return self._channel.getpeername()

    @property
    def _closed(self) -> bool:
        """What paramiko asks of its socket before it waits for its own thread."""
        return self._channel.closed

    def close(self) -> None:
        """End it, as far as there still is something to end."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()


class PromptSocket(socket.socket):
    """A TCP socket that acknowledges what it received at once, where the system can (Linux).

    sshd leaves Nagle's algorithm on for forwarded ports: a second small message waits there until the first is acknowledged,
    which a socket that has nothing to send puts off. Measured through `reach`, loopback, load 9, an answer's head and its first
    token 20 ms after: the token came 23.6 ms late (median of 40; at most 29.5), with this 0.7 ms (6.2), for the same CPU. The
    kernel forgets the wish as it likes, so it is said after each receive.
    """

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Return up to `size` bytes; none at the end."""
        data = super().recv(size, flags)
        if _QUICKACK is not None:
            with contextlib.suppress(OSError):  # Closed meanwhile; what came still counts.
                self.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        return data


_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)


def _tcp(route: Route, hop: Hop, deadline: float) -> socket.socket:
    """Connect to one of the name's addresses, each with a fair share of the time."""
    try:
        found = socket.getaddrinfo(hop.address, hop.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _unreachable(route, hop, f"{hop.address} is not found: {plain(error)}") from error
    problem: OSError | None = None
    for left, (family, kind, protocol, _, address) in zip(
        range(len(found), 0, -1), found, strict=True
    ):
        connection = PromptSocket(family, kind, protocol)
        try:
            connection.settimeout(max(0.1, (deadline - time.monotonic()) / left))
            connection.connect(address)
        except OSError as error:
            connection.close()
            problem = error
            continue
        # Measured: `exec true` 48 ms without, 6 ms with. Several small messages go out in a row.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_DEAD_S * 1000)
        return connection
    why = (
        f"no answer within {route.timeout_s:g} s"
        if isinstance(problem, TimeoutError)
        else plain(problem or OSError("no address"))
    )
    raise _unreachable(route, hop, f"no connection to {hop.address} port {hop.port}: {why}")


def _run_proxy(route: Route, hop: Hop, command: str) -> socket.socket:
    """Start the operator's ProxyCommand on one end of a socket pair; it ends when our end is closed."""
    near, far = socket.socketpair()
    with far:
        try:
            process = subprocess.Popen(  # noqa: S603  the operator wrote it and allowed it
                ["/bin/sh", "-c", f"exec {command}"], stdin=far.fileno(), stdout=far.fileno()
            )
        except OSError as error:
            near.close()
            raise _unreachable(
                route, hop, f"ProxyCommand cannot be started: {plain(error)}"
            ) from error
    threading.Thread(target=process.wait, name="proxy-command", daemon=True).start()
    return near


def _key_of(transport: paramiko.Transport) -> HostKey:
    key = transport.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


def _check_key(route: Route, hop: Hop, pinned: Pinned, found: HostKey) -> None:
    """Let pass a pinned key only.

    Raises:
        HostIdentityError: It is unknown, has changed, or was revoked.
    """
    if found in pinned.revoked:
        raise _identity(route, hop, f"the host's key {found} was revoked; nothing was executed")
    if found in pinned.keys:
        return
    label = host_label(*hop.key_name)
    if pinned.keys:
        known = ", ".join(str(key) for key in pinned.keys)
        raise _identity(
            route,
            hop,
            f"the key of {label} has changed: found {found}, pinned {known} ({pinned.source}); nothing was "
            "executed. Someone may be in between. If the host was set up anew on purpose, compare with "
            "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on its console, then run: reconcile enrol HOST",
        )
    authority = (
        f" {pinned.source} names a certificate authority for it; host certificates are not read here, the "
        "key itself has to be pinned."
        if pinned.certified
        else ""
    )
    raise _identity(
        route,
        hop,
        f"the key of {label} is unknown: found {found}; nothing was executed.{authority} Compare with "
        "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on its console, then run: reconcile enrol HOST",
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A key to try, and how to name it."""

    key: paramiko.PKey
    name: str


class _Login:
    """The login at one hop: key after key, and what was learned on the way."""

    def __init__(self, route: Route, hop: Hop, transport: paramiko.Transport) -> None:
        self._route = route
        self._hop = hop
        self._transport = transport
        self._tried: list[str] = []
        self._notes: list[str] = []

    def run(self) -> None:
        """Log in.

        Raises:
            HostUnreachableError: No key was taken; what was tried is said.
        """
        self._transport.auth_timeout = AUTH_TIMEOUT_S
        with _candidates(self._hop.config, self._notes) as candidates:
            for candidate in candidates[:KEYS_LIMIT]:
                self._tried.append(candidate.name)
                if self._accepts(candidate):
                    return
        # Some servers ask for nothing more (Tailscale SSH): they know the peer from elsewhere.
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
            if not self._transport.auth_none(self._hop.user):
                return
        if not self._transport.is_active():
            self._notes.append("then the connection was lost")
        raise self._refused()

    def _accepts(self, candidate: _Candidate) -> bool:
        try:
            further = self._transport.auth_publickey(self._hop.user, candidate.key)
        except paramiko.BadAuthenticationType as error:
            self._notes.append(f"the host takes {', '.join(error.allowed_types)} only")
            return False
        except (paramiko.SSHException, OSError, EOFError) as error:
            if self._transport.is_active():
                return False
            self._notes.append(
                f"then the connection was closed ({plain(error)}); "
                "with many keys, IdentitiesOnly limits them"
            )
            raise self._refused() from error
        if further:
            self._notes.append(
                f"{candidate.name} was taken, {', '.join(further)} is wanted as well"
            )
        return not further

    def _refused(self) -> HostUnreachableError:
        keys = ", ".join(self._tried) or "none: no key file and no agent key was found"
        more = "".join(f"; {note}" for note in self._notes)
        return _unreachable(
            self._route,
            self._hop,
            f"login as {self._hop.user} was refused (keys tried: {keys}{more})",
        )


@contextlib.contextmanager
def _candidates(config: HostConfig, notes: list[str]) -> Iterator[list[_Candidate]]:
    """Give the keys to try, in OpenSSH's order: the agent's that are configured, its others, files."""
    files = config.identity_files or tuple(Path.home() / ".ssh" / name for name in DEFAULT_KEYS)
    publics = {blob for file in files if (blob := _public_blob(file)) is not None}
    with _agent_keys(config, notes) as agent:
        listed = [c for c in agent if c.key.asbytes() in publics]
        others = [c for c in agent if c not in listed] if not config.identities_only else []
        held = {c.key.asbytes() for c in agent}
        from_files = [
            candidate
            for file in files
            if _public_blob(file) not in held
            for candidate in _load(file, notes, wanted=bool(config.identity_files))
        ]
        yield [*listed, *others, *(c for c in from_files if c.key.asbytes() not in held)]


def _public_blob(file: Path) -> bytes | None:
    """Return the public half that lies beside a key file, or is the file itself."""
    for path in (file.with_name(file.name + ".pub"), file):
        try:
            fields = path.read_bytes().split(None, 2)
        except OSError:
            continue
        if len(fields) >= 2 and fields[0].startswith((b"ssh-", b"ecdsa-", b"sk-")):
            with contextlib.suppress(ValueError):
                return base64.b64decode(fields[1], validate=True)
    return None


def _load(file: Path, notes: list[str], *, wanted: bool) -> list[_Candidate]:
    """Read a key file; with a certificate beside it, the pair comes first. `wanted`: say if it is missing."""
    try:
        key = paramiko.PKey.from_path(str(file))
    except FileNotFoundError:
        if wanted:
            notes.append(f"{file} does not exist")
        return []
    except (TypeError, paramiko.PasswordRequiredException):
        # What cryptography raises for a passphrase that is needed and not given.
        notes.append(f"{file} has a passphrase and is not in the agent (run: ssh-add {file})")
        return []
    except (ValueError, OSError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
        notes.append(f"{file} cannot be used: {plain(error)}")
        return []
    if key.public_blob is None:
        return [_Candidate(key, str(file))]
    certified, key = key, paramiko.PKey.from_path(str(file))
    key.public_blob = None
    return [_Candidate(certified, f"{file}-cert.pub"), _Candidate(key, str(file))]


@contextlib.contextmanager
def _agent_keys(config: HostConfig, notes: list[str]) -> Iterator[list[_Candidate]]:
    """Give the agent's keys; they can sign as long as this lasts. No agent is no error."""
    path = _agent_path(config.identity_agent)
    if path is None:
        yield []
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(AGENT_TIMEOUT_S)
        candidates: list[_Candidate] = []
        try:
            connection.connect(path)
            agent = paramiko.agent.AgentSSH()
            # paramiko.Agent knows SSH_AUTH_SOCK only and waits for an answer without a limit.
            agent._connect(connection)  # type: ignore[attr-defined]  # noqa: SLF001
            candidates = [
                _Candidate(key, f"agent key {key.comment or key.get_name()}")
                for key in agent.get_keys()
            ]
        except (OSError, paramiko.SSHException) as error:
            notes.append(f"the agent at {path} does not answer: {plain(error)}")
        yield candidates


def _agent_path(setting: str | None) -> str | None:
    """Read IdentityAgent: `none`, a path, or the name of a variable that holds one."""
    if setting is not None and setting.lower() == "none":
        return None
    if setting is None or setting == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if setting.startswith("$"):
        return os.environ.get(setting[1:].strip("{}")) or None
    return str(Path(setting).expanduser())


__all__ = ["Hop", "PromptSocket", "Route", "connect", "hang_up", "plan_route", "scan"]

"""SSH against a real sshd: whose key, which login, which way, and what is known after a cut."""

from __future__ import annotations

import base64
import contextlib
import getpass
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from transports.loopback import START_S, Client, Keys, Proxy, Servers, Sshd, free_port

import reconciler
from reconciler.core.errors import (
    HostIdentityError,
    HostUnreachableError,
    OutcomeUnknownError,
)
from reconciler.transports.host_keys import HostKey, HostKeys, pin
from reconciler.transports.ssh import SshTarget, SshTransport, scan_host_key
from reconciler.transports.ssh_login import PromptSocket

LONG_S = 30.0


def run(transport: SshTransport, command: str = "echo ok") -> bytes:
    completed = transport.run(command, b"", deadline_s=LONG_S)
    assert completed.exit_status == 0, completed
    return completed.stdout


# Whose key it is.


def test_unknown_key_is_refused(shared_sshd: Sshd, client: Client, tmp_path: Path) -> None:
    """An unknown host key is refused before any login, with its fingerprint and what to do (T20, F43)."""
    found = scan_host_key("127.0.0.1", shared_sshd.port, LONG_S)
    with (
        client.transport(shared_sshd.port) as transport,
        pytest.raises(HostIdentityError) as caught,
    ):
        transport.run(f"touch {tmp_path}/ran", b"", deadline_s=LONG_S)
    assert found.fingerprint in str(caught.value)
    assert "unknown" in str(caught.value)
    assert "reconcile enrol" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_changed_key_is_refused(shared_sshd: Sshd, client: Client, keys: Keys) -> None:
    """A host with another key than the pinned one is refused; both fingerprints are said (F42)."""
    other = public_key(keys.make("another-host"))
    pin(client.store, "127.0.0.1", shared_sshd.port, [other])
    with (
        client.transport(shared_sshd.port) as transport,
        pytest.raises(HostIdentityError) as caught,
    ):
        run(transport)
    assert "has changed" in str(caught.value)
    assert other.fingerprint in str(caught.value)
    assert public_key(shared_sshd.host_key).fingerprint in str(caught.value)


def test_key_that_changes_between_connections(
    servers: Servers, client: Client, make_proxy: Callable[[int], Proxy]
) -> None:
    """A connection is checked anew each time: a host swapped behind its address is refused (T20)."""
    first, second = servers.start(), servers.start(host_key="another-host")
    proxy = make_proxy(first.port)
    client.pin(proxy.port)
    with client.transport(proxy.port) as transport:
        run(transport)
        proxy.retarget(second.port)
        proxy.cut()
        with pytest.raises(HostIdentityError, match="has changed"):
            run(transport)


def test_key_of_another_type_than_pinned(servers: Servers, client: Client, keys: Keys) -> None:
    """A host that lost the pinned type of key, with one of another type, is not an unknown host."""
    rsa = keys.make("host-rsa", "-t", "rsa")
    server = servers.start(host_key="host-rsa")
    pin(client.store, "127.0.0.1", server.port, [public_key(keys.make("another-host"))])
    assert rsa.exists()
    with (
        client.transport(server.port) as transport,
        pytest.raises(HostIdentityError, match="no longer"),
    ):
        run(transport)


def test_second_key_of_the_host_does_not_matter(
    servers: Servers, client: Client, keys: Keys
) -> None:
    """The type of key that is pinned is the one that is asked for, whatever else the host has."""
    rsa = keys.make("host-rsa", "-t", "rsa")
    server = servers.start(f"HostKey {rsa}")
    pin(client.store, "127.0.0.1", server.port, [public_key(rsa)])
    with client.transport(server.port) as transport:
        assert run(transport) == b"ok\n"


def test_revoked_key_is_refused(shared_sshd: Sshd, client: Client) -> None:
    """A revoked key is refused although it is pinned."""
    client.pin(shared_sshd.port)
    fields = public_text(shared_sshd.host_key)
    with client.store.open("a") as store:
        store.write(f"@revoked * {fields}\n")
    with (
        client.transport(shared_sshd.port) as transport,
        pytest.raises(HostIdentityError, match="revoked"),
    ):
        run(transport)


def test_authority_is_explained(shared_sshd: Sshd, client: Client, keys: Keys) -> None:
    """Where only a certificate authority is known, the message says that the key itself must be pinned."""
    client.store.write_text(f"@cert-authority * {public_text(keys.make('authority'))}\n")
    with (
        client.transport(shared_sshd.port) as transport,
        pytest.raises(HostIdentityError, match="certificate authority"),
    ):
        run(transport)


def test_scan_needs_no_login(shared_sshd: Sshd, client: Client) -> None:
    """The key can be asked for without being known there, and pinning it is enough."""
    transport = client.transport(shared_sshd.port, "Host *", "User nobody-here")
    scanned = transport.scan()
    assert scanned.key == public_key(shared_sshd.host_key)
    assert (scanned.name, scanned.port) == ("127.0.0.1", shared_sshd.port)
    transport.close()


def test_scan_of_no_ssh_server() -> None:
    """A port that speaks no SSH is unreachable, within the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(HostUnreachableError, match="no SSH answer within"):
            scan_host_key("127.0.0.1", silent.getsockname()[1], 0.5)
        assert time.monotonic() - began < 5.0


def public_text(private: Path) -> str:
    return " ".join(private.with_suffix(".pub").read_text().split()[:2])


def public_key(private: Path) -> HostKey:
    algorithm, blob = public_text(private).split()
    return HostKey(algorithm, base64.b64decode(blob))


# Who logs in.


def test_wrong_user(shared_sshd: Sshd, client: Client) -> None:
    """A user who is not known there is refused, and the message says who and by which keys."""
    client.pin(shared_sshd.port)
    with (
        client.transport(shared_sshd.port, user="nobody-here") as transport,
        pytest.raises(HostUnreachableError, match="login as nobody-here was refused") as caught,
    ):
        run(transport)
    assert str(client.keys.make("user")) in str(caught.value)


def test_key_that_is_not_authorized(servers: Servers, client: Client) -> None:
    """A key that the host does not know is refused; nothing was executed."""
    server = servers.start(user_keys=("somebody-else",))
    client.pin(server.port)
    with (
        client.transport(server.port) as transport,
        pytest.raises(HostUnreachableError, match="nothing was executed"),
    ):
        run(transport)


def test_several_identity_files(servers: Servers, client: Client, keys: Keys) -> None:
    """Identity files are tried one after the other until one is taken."""
    server = servers.start(user_keys=("third",))
    client.pin(server.port)
    lines = [
        "Host 127.0.0.1",
        *(f"IdentityFile {keys.make(n)}" for n in ("first", "second", "third")),
    ]
    with client.transport(server.port, *lines) as transport:
        assert run(transport) == b"ok\n"


def test_too_many_keys(servers: Servers, client: Client, keys: Keys) -> None:
    """A host that gives up on us is told from one that says no, and the way out is named."""
    server = servers.start("MaxAuthTries 2", user_keys=("third",))
    client.pin(server.port)
    lines = [
        "Host 127.0.0.1",
        *(f"IdentityFile {keys.make(n)}" for n in ("first", "second", "third")),
    ]
    with (
        client.transport(server.port, *lines) as transport,
        pytest.raises(HostUnreachableError, match="IdentitiesOnly"),
    ):
        run(transport)


def test_key_with_a_passphrase(servers: Servers, client: Client, keys: Keys) -> None:
    """A key that needs a passphrase, and no agent: the message says to add it to the agent."""
    locked = keys.make("locked", "-N", "secret phrase")
    server = servers.start(user_keys=("locked",))
    client.pin(server.port)
    lines = ("Host 127.0.0.1", "IdentityAgent none", f"IdentityFile {locked}")
    with (
        client.transport(server.port, *lines) as transport,
        pytest.raises(HostUnreachableError, match="ssh-add") as caught,
    ):
        run(transport)
    assert "secret phrase" not in str(caught.value)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """An agent of the test's own, without keys."""
    path = str(tmp_path / "agent")
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()  # It listens once it has said where.
    try:
        yield path
    finally:
        process.terminate()
        process.wait(START_S)
        process.stdout.close()


def add_to_agent(agent: str, key: Path) -> None:
    environment = {**os.environ, "SSH_AUTH_SOCK": agent}
    subprocess.run(["ssh-add", "-q", key], env=environment, check=True)


@pytest.mark.parametrize("setting", ["IdentityAgent {path}", "IdentityAgent SSH_AUTH_SOCK", ""])
def test_key_in_the_agent(
    servers: Servers,
    client: Client,
    keys: Keys,
    agent: str,
    setting: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key that only the agent has logs in, by SSH_AUTH_SOCK or where IdentityAgent says."""
    server = servers.start(user_keys=("in-agent",))
    client.pin(server.port)
    add_to_agent(agent, keys.make("in-agent"))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere" if "path" in setting else agent)
    transport = client.transport(server.port, "Host 127.0.0.1", setting.format(path=agent))
    if not setting:
        client.config.write_text("Host *\n")
    with transport:
        assert run(transport) == b"ok\n"


def test_identities_only(servers: Servers, client: Client, keys: Keys, agent: str) -> None:
    """With IdentitiesOnly, the agent's key is used when it is named and no other is offered."""
    server = servers.start("LogLevel DEBUG", "MaxAuthTries 1", user_keys=("wanted",))
    client.pin(server.port)
    for name in ("unwanted", "wanted"):
        add_to_agent(agent, keys.make(name))
    public = client.directory / "only-public"
    public.with_suffix(".pub").write_text(keys.make("wanted").with_suffix(".pub").read_text())
    lines = (
        "Host 127.0.0.1",
        "IdentitiesOnly yes",
        f"IdentityAgent {agent}",
        f"IdentityFile {public}",
    )
    with client.transport(server.port, *lines) as transport:
        client.config.write_text("\n".join(lines))
        assert run(transport) == b"ok\n"


def test_agent_that_does_not_answer(shared_sshd: Sshd, client: Client, tmp_path: Path) -> None:
    """An agent that is not there does not keep a key file from logging in."""
    client.pin(shared_sshd.port)
    lines = ("Host *", f"IdentityAgent {tmp_path}/no-agent")
    with client.transport(shared_sshd.port, *lines) as transport:
        assert run(transport) == b"ok\n"


def test_user_certificate(servers: Servers, client: Client, keys: Keys) -> None:
    """A certificate beside the key logs in where only its authority is trusted."""
    authority, user = keys.make("authority"), keys.make("certified")
    subprocess.run(
        ["ssh-keygen", "-q", "-s", authority, "-I", "id", "-n", "root,deploy," + my_name(), user],
        check=True,
    )
    server = servers.start(f"TrustedUserCAKeys {authority.with_suffix('.pub')}", user_keys=())
    client.pin(server.port)
    lines = ("Host *", f"IdentityFile {user}")
    with client.transport(server.port, *lines) as transport:
        assert run(transport) == b"ok\n"


def my_name() -> str:
    return getpass.getuser()


# Which way.


def test_host_name_user_and_port_come_from_the_configuration(
    shared_sshd: Sshd, client: Client
) -> None:
    """A name of the configuration is enough: address, port, user and key are found there."""
    pin(client.store, "127.0.0.1", shared_sshd.port, [public_key(shared_sshd.host_key)])
    client.config.write_text(
        f"Host gpu-one\n HostName 127.0.0.1\n Port {shared_sshd.port}\n User {my_name()}\n"
        f" IdentityAgent none\n IdentityFile {client.keys.make('user')}\n"
    )
    with SshTransport(SshTarget("gpu-one"), HostKeys((client.store,)), client.config) as transport:
        assert run(transport) == b"ok\n"


def test_host_key_alias(shared_sshd: Sshd, client: Client) -> None:
    """HostKeyAlias names the line that must hold the key."""
    pin(client.store, "gpu-one", 22, [public_key(shared_sshd.host_key)])
    with client.transport(shared_sshd.port, "Host *", "HostKeyAlias gpu-one") as transport:
        assert run(transport) == b"ok\n"


def test_known_hosts_of_the_configuration(shared_sshd: Sshd, client: Client) -> None:
    """Keys in the file that UserKnownHostsFile names are pins (S21): the right one lets in, another and none do not."""
    named = client.directory / "lab_known_hosts"
    lines = ("Host *", f"UserKnownHostsFile {named}")
    with client.transport(shared_sshd.port, *lines) as transport:
        with pytest.raises(HostIdentityError, match="unknown"):
            run(transport)
        pin(named, "127.0.0.1", shared_sshd.port, [public_key(client.keys.make("other"))])
        with pytest.raises(HostIdentityError, match="has changed"):
            run(transport)
        pin(named, "127.0.0.1", shared_sshd.port, [public_key(shared_sshd.host_key)])
        assert run(transport) == b"ok\n"
        assert transport.scan().known.keys == (public_key(shared_sshd.host_key),)
    assert not client.store.exists()


@pytest.fixture
def behind(servers: Servers, client: Client, keys: Keys) -> tuple[Sshd, Sshd, str]:
    """A host behind a jump host, each with keys of its own; and the configuration for both."""
    jump = servers.start(host_key="host-jump", user_keys=("user-jump",))
    host = servers.start(host_key="host-inner", user_keys=("user-inner",))
    text = (
        f"Host jump\n HostName 127.0.0.1\n Port {jump.port}\n IdentityFile {keys.make('user-jump')}\n"
        f"Host inner\n HostName 127.0.0.1\n Port {host.port}\n ProxyJump jump\n"
        f" IdentityFile {keys.make('user-inner')}\n"
        "Host *\n IdentityAgent none\n"
    )
    client.config.write_text(text)
    return jump, host, text


def test_jump_host(behind: tuple[Sshd, Sshd, str], client: Client) -> None:
    """A host behind a jump host is reached through it, with the keys of each."""
    jump, host, _ = behind
    client.pin(jump.port)
    client.pin(host.port)
    with SshTransport(SshTarget("inner"), HostKeys((client.store,)), client.config) as transport:
        assert run(transport) == b"ok\n"
        run(transport, "head -c 3000000 /dev/zero")
    jump.wait_for("Accepted publickey")
    host.wait_for("Accepted publickey")


def test_two_jump_hosts(
    behind: tuple[Sshd, Sshd, str], servers: Servers, client: Client, keys: Keys
) -> None:
    """A jump host may have its own jump host, or several are given in a row."""
    jump, host, text = behind
    last = servers.start(host_key="host-last", user_keys=("user-last",))
    for server in (jump, host, last):
        client.pin(server.port)
    last_lines = f" HostName 127.0.0.1\n Port {last.port}\n IdentityFile {keys.make('user-last')}\n"
    client.config.write_text(
        f"Host nested\n ProxyJump inner\n{last_lines}Host row\n ProxyJump jump,inner\n{last_lines}{text}"
    )
    for name in ("nested", "row"):
        with SshTransport(SshTarget(name), HostKeys((client.store,)), client.config) as transport:
            assert run(transport) == b"ok\n"


def test_key_of_the_jump_host_is_checked(behind: tuple[Sshd, Sshd, str], client: Client) -> None:
    """An unknown jump host is refused before anything goes through it."""
    _, host, _ = behind
    client.pin(host.port)
    with (
        SshTransport(SshTarget("inner"), HostKeys((client.store,)), client.config) as transport,
        pytest.raises(HostIdentityError, match="jump host"),
    ):
        run(transport)
    assert "Accepted" not in host.log


def test_key_behind_a_jump_host_is_checked(behind: tuple[Sshd, Sshd, str], client: Client) -> None:
    """What is behind the jump host is checked just as well, and can be scanned through it."""
    jump, host, _ = behind
    client.pin(jump.port)
    with SshTransport(SshTarget("inner"), HostKeys((client.store,)), client.config) as transport:
        with pytest.raises(HostIdentityError, match="unknown"):
            run(transport)
        scanned = transport.scan()
        assert scanned.key == public_key(host.host_key)
        pin(client.store, scanned.name, scanned.port, [scanned.key])
        assert run(transport) == b"ok\n"


def test_jump_host_is_down(behind: tuple[Sshd, Sshd, str], client: Client) -> None:
    """A jump host that is down makes the host unreachable, and is named (F47)."""
    jump, host, _ = behind
    client.pin(jump.port)
    client.pin(host.port)
    jump.stop()
    with (
        SshTransport(SshTarget("inner"), HostKeys((client.store,)), client.config) as transport,
        pytest.raises(HostUnreachableError, match=f"jump host .*{jump.port}"),
    ):
        run(transport)


def test_a_way_that_is_lost_ends_quietly(
    behind: tuple[Sshd, Sshd, str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a channel of a dead connection raises; nobody would catch that in the library's thread."""
    jump, host, _ = behind
    client.pin(jump.port)
    client.pin(host.port)
    uncaught: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: uncaught.append(args.exc_value))
    threads = set(threading.enumerate())

    def lost(_channel: paramiko.Channel) -> None:
        raise EOFError

    with SshTransport(SshTarget("inner"), HostKeys((client.store,)), client.config) as transport:
        assert run(transport) == b"ok\n"
        monkeypatch.setattr(paramiko.Channel, "close", lost)
    for thread in set(threading.enumerate()) - threads:
        thread.join(5.0)
    assert uncaught == []


def test_host_behind_the_jump_host_is_down(behind: tuple[Sshd, Sshd, str], client: Client) -> None:
    """A host that its jump host does not reach is unreachable, and the jump host is not blamed."""
    jump, host, _ = behind
    client.pin(jump.port)
    client.pin(host.port)
    host.stop()
    with (
        SshTransport(SshTarget("inner"), HostKeys((client.store,)), client.config) as transport,
        pytest.raises(HostUnreachableError, match="from the jump host before it"),
    ):
        run(transport)


def test_jump_in_a_circle(client: Client) -> None:
    """Jump hosts that name each other are refused, not followed."""
    client.config.write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with (
        SshTransport(SshTarget("a"), HostKeys((client.store,)), client.config) as transport,
        pytest.raises(HostUnreachableError, match="circle"),
    ):
        run(transport)


def test_proxy_command_needs_leave(shared_sshd: Sshd, client: Client, tmp_path: Path) -> None:
    """A ProxyCommand is not run unless the operator allowed it, and the message says why."""
    client.pin(shared_sshd.port)
    lines = ("Host *", f"ProxyCommand touch {tmp_path}/ran")
    with (
        client.transport(shared_sshd.port, *lines) as transport,
        pytest.raises(HostUnreachableError, match="shell command on this machine"),
    ):
        run(transport)
    assert not (tmp_path / "ran").exists()


def test_proxy_command_with_leave(shared_sshd: Sshd, client: Client) -> None:
    """A ProxyCommand that the operator allowed is the way to the host; the host key still counts."""
    relay = (
        "import socket,sys,os,threading;s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
        "threading.Thread(target=lambda:[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')],daemon=True)"
        ".start();[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')]"
    )
    script = client.directory / "relay.py"
    script.write_text(relay)
    lines = ("Host *", f"ProxyCommand {sys.executable} {script} %h %p")
    transport = client.transport(shared_sshd.port, *lines, allow_proxy_command=True)
    with transport:
        with pytest.raises(HostIdentityError, match="unknown"):
            run(transport)
        client.pin(shared_sshd.port)
        assert run(transport) == b"ok\n"


@pytest.mark.parametrize(
    "address", ["-oProxyCommand=x", "a b", "a;b", "$(x)", "a\nb", "", "a" * 300, "a/b"]
)
def test_address_that_is_none(client: Client, address: str) -> None:
    """What is no host name reaches no resolver, no file and no message unquoted (T01)."""
    with (
        SshTransport(SshTarget(address), HostKeys((client.store,)), None) as transport,
        pytest.raises(HostUnreachableError, match="is no address"),
    ):
        run(transport)


def test_host_is_down(client: Client) -> None:
    """A port where nothing listens: unreachable at once."""
    with (
        client.transport(free_port()) as transport,
        pytest.raises(HostUnreachableError, match=r"refused.*nothing was executed"),
    ):
        run(transport)


def test_host_that_swallows_everything(client: Client) -> None:
    """A host that does not answer to a connection is unreachable once ConnectTimeout has passed."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # A queue that is full drops what comes next, as a firewall does.
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        began = time.monotonic()
        with (
            client.transport(listener.getsockname()[1], "Host *", "ConnectTimeout 1") as transport,
            pytest.raises(HostUnreachableError, match="within 1 s"),
        ):
            run(transport)
        assert 0.5 < time.monotonic() - began < 5.0


def test_host_that_accepts_and_says_nothing(client: Client) -> None:
    """A host that takes the connection and never speaks is unreachable after the same time."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        client.transport(silent.getsockname()[1], timeout_s=0.5) as transport,
        pytest.raises(HostUnreachableError, match=r"no SSH answer within 0\.5 s"),
    ):
        run(transport)


def test_name_that_does_not_exist(client: Client) -> None:
    """A name without an address is unreachable, and says so."""
    with (
        SshTransport(
            SshTarget("no-such-host.invalid"), HostKeys((client.store,)), None
        ) as transport,
        pytest.raises(HostUnreachableError, match="not found"),
    ):
        run(transport)


# What is spoken.


@pytest.mark.parametrize(
    "lines",
    [
        ("Ciphers aes128-cbc,aes256-cbc",),
        ("Ciphers 3des-cbc",),
        ("Ciphers aes128-ctr", "MACs hmac-sha1,hmac-md5"),
        ("KexAlgorithms diffie-hellman-group14-sha1,diffie-hellman-group1-sha1",),
    ],
)
def test_weak_algorithms_are_not_spoken(
    servers: Servers, client: Client, lines: tuple[str, ...]
) -> None:
    """A server that offers only what is broken or fading is not spoken with (T21)."""
    server = servers.start(*lines)
    with pytest.raises(HostUnreachableError, match="negotiation failed"):
        scan_host_key("127.0.0.1", server.port, LONG_S)


@pytest.mark.parametrize("cipher", ["aes256-gcm@openssh.com", "aes256-ctr"])
@pytest.mark.parametrize("mac", ["hmac-sha2-256", "hmac-sha2-512-etm@openssh.com"])
def test_strong_algorithms_are(servers: Servers, client: Client, cipher: str, mac: str) -> None:
    """Servers hardened to one cipher and MAC are spoken with, in bulk as well."""
    server = servers.start(f"Ciphers {cipher}", f"MACs {mac}")
    client.pin(server.port)
    with client.transport(server.port) as transport:
        assert len(run(transport, "head -c 3000000 /dev/zero")) == 3_000_000


def test_rekeying_does_not_show(servers: Servers, client: Client) -> None:
    """New keys in the middle of a stream lose nothing."""
    server = servers.start("RekeyLimit 256K")
    client.pin(server.port)
    data = os.urandom(1 << 20) * 3
    with client.transport(server.port) as transport:
        assert transport.run("exec cat", data, deadline_s=LONG_S).stdout == data


# What is printed around.


def test_banner_and_login_noise(servers: Servers, client: Client, tmp_path: Path) -> None:
    """A banner is nobody's output; what login files print comes through as it is, before ours (F45)."""
    banner = tmp_path / "banner"
    banner.write_text("Authorized use only\n" * 20)
    force = 'echo Welcome to gpu-one; echo motd >&2; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
    server = servers.start(f"Banner {banner}", f"ForceCommand {force}")
    client.pin(server.port)
    with client.transport(server.port) as transport:
        completed = transport.run("exec cat", b"data", deadline_s=LONG_S)
        assert completed.stdout == b"Welcome to gpu-one\ndata"
        assert completed.stderr == b"motd\n"


SHELLS = ("sh", "bash", "zsh", "tcsh", "fish")


def login_shell(name: str) -> str:
    """Return the path of a login shell; where CI runs, all must be there."""
    path = shutil.which(name)
    if path is None:
        assert not os.environ.get("CI"), f"{name} is not installed"
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.parametrize("shell", SHELLS)
def test_login_shells(servers: Servers, client: Client, shell: str) -> None:
    """Whatever the login shell is, a constant command gets its input and gives its status."""
    server = servers.start(f'ForceCommand exec {login_shell(shell)} -c "$SSH_ORIGINAL_COMMAND"')
    client.pin(server.port)
    with client.transport(server.port) as transport:
        completed = transport.run(
            "exec /bin/sh -s", b'printf %s "it\'s"; exit 7\n', deadline_s=LONG_S
        )
        assert (completed.stdout, completed.exit_status) == (b"it's", 7)


# Sessions.


def test_connection_is_reused(servers: Servers, client: Client) -> None:
    """Twenty commands are one login."""
    server = servers.start()
    client.pin(server.port)
    with client.transport(server.port) as transport:
        for _ in range(20):
            run(transport)
    server.wait_for("Accepted publickey")
    assert server.log.count("Accepted publickey") == 1


def test_one_session_at_a_time(servers: Servers, client: Client) -> None:
    """Where MaxSessions is 1, commands in a row need no second login (F48)."""
    server = servers.start("MaxSessions 1")
    client.pin(server.port)
    with client.transport(server.port) as transport:
        for _ in range(20):
            assert run(transport) == b"ok\n"
    assert server.log.count("Accepted publickey") == 1


def test_second_session_where_one_is_allowed(servers: Servers, client: Client) -> None:
    """Where MaxSessions is 1 and a kept command holds it, a second connection is made (F48)."""
    server = servers.start("MaxSessions 1")
    client.pin(server.port)
    with client.transport(server.port) as transport:
        session = transport.open("exec cat")
        for _ in range(5):
            assert run(transport) == b"ok\n"
        session.send(b"still here\n")
        assert session.receive(LONG_S) == b"still here\n"
        session.close()
    assert server.log.count("Accepted publickey") == 2


def test_more_sessions_than_are_allowed_at_all(servers: Servers, client: Client) -> None:
    """Twelve commands at once over connections of one session each all get their turn (F48)."""
    server = servers.start("MaxSessions 1")
    client.pin(server.port)
    with client.transport(server.port) as transport:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(run(transport))) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(START_S * 3)
    assert found == [b"ok\n"] * 12


def test_no_session_at_all(
    servers: Servers, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that opens no session at all is unreachable for commands, and says why."""
    monkeypatch.setattr("reconciler.transports.ssh.SESSION_WAIT_S", 0.5)
    server = servers.start("MaxSessions 0")
    client.pin(server.port)
    with (
        client.transport(server.port) as transport,
        pytest.raises(HostUnreachableError, match="MaxSessions"),
    ):
        run(transport)


def test_forwarding_that_is_not_allowed(servers: Servers, client: Client) -> None:
    """Where the server forwards no ports, a connection fails and commands still run."""
    server = servers.start("AllowTcpForwarding no")
    client.pin(server.port)
    with client.transport(server.port) as transport:
        with transport.reach(server.port) as address, pytest.raises(ConnectionError):
            read_once(address.host, address.port)
        assert run(transport) == b"ok\n"


def read_once(host: str, port: int) -> bytes:
    with socket.create_connection((host, port), LONG_S) as connection:
        return connection.recv(100)


# What is known after a cut.


def test_cut_in_mid_command(proxy: Proxy, client: Client, tmp_path: Path) -> None:
    """A connection that is lost while a command runs leaves its outcome unknown (F36)."""
    client.pin(proxy.port)
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    with client.transport(proxy.port) as transport, ThreadPoolExecutor(1) as pool:
        session = transport.open("exec cat")
        answer = pool.submit(
            transport.run, f"echo begun > {begun}; exec sleep 20", b"", deadline_s=LONG_S
        )
        assert begun.read_text() == "begun\n"  # Waits for the command to say so.
        proxy.cut()
        with pytest.raises(OutcomeUnknownError, match="connection was lost"):
            answer.result(START_S)
        with pytest.raises(OutcomeUnknownError):
            session.receive(LONG_S)
        session.close()
        # The next command finds a new connection by itself.
        assert run(transport) == b"ok\n"


def test_cut_before_the_command_was_sent(proxy: Proxy, client: Client) -> None:
    """A connection that died since it was last used is replaced: nothing was executed on it (F35)."""
    client.pin(proxy.port)
    with client.transport(proxy.port) as transport:
        for _ in range(5):
            assert run(transport) == b"ok\n"
            proxy.cut()


def test_silent_link(proxy: Proxy, client: Client) -> None:
    """A link that died without a word: the deadline ends the command, and the next gets a new connection."""
    client.pin(proxy.port)
    with client.transport(proxy.port, timeout_s=1.0) as transport:
        run(transport)
        proxy.silence()
        began = time.monotonic()
        with pytest.raises((OutcomeUnknownError, HostUnreachableError)):
            transport.run("echo ok", b"", deadline_s=0.5)
        assert time.monotonic() - began < 10.0
        proxy.speak()
        assert run(transport) == b"ok\n"


def test_silent_link_under_a_large_input(proxy: Proxy, client: Client) -> None:
    """Input that nobody takes any more does not hold up the deadline, however full the link is."""
    client.pin(proxy.port)
    proxy.silence_after(1_000_000)
    with client.transport(proxy.port) as transport:
        began = time.monotonic()
        with pytest.raises(OutcomeUnknownError):
            transport.run("exec cat > /dev/null", bytes(64 << 20), deadline_s=1.0)
        assert time.monotonic() - began < 10.0


def test_tunnel_is_cut(proxy: Proxy, client: Client, serve: Callable[..., int]) -> None:
    """A tunnel whose connection is lost ends its streams as broken, not as ended; new ones work again."""
    sent = threading.Event()

    def half_an_answer(connection: socket.socket) -> None:
        connection.sendall(b"half")
        sent.wait(START_S)
        connection.recv(1)

    client.pin(proxy.port)
    port = serve(half_an_answer)
    with client.transport(proxy.port) as transport, transport.reach(port) as address:
        with socket.create_connection((address.host, address.port), LONG_S) as connection:
            assert connection.recv(4) == b"half"
            proxy.cut()
            with pytest.raises(ConnectionError):
                connection.recv(1)
        sent.set()
        assert read_once(address.host, address.port) == b"half"


@pytest.mark.parametrize("way", ["to_server", "to_client"])
def test_cut_at_any_byte(
    servers: Servers,
    client: Client,
    make_proxy: Callable[[int], Proxy],
    tmp_path: Path,
    way: str,
) -> None:
    """Wherever the connection is cut, "nothing was executed" is only said when nothing was (F35, F36).

    The whole exchange is measured once; then it is cut at points spread over it, most of them near the
    end, where the command is sent and answered.
    """
    server = servers.start()
    client.pin(server.port)
    whole = make_proxy(server.port)
    pin(client.store, "127.0.0.1", whole.port, [public_key(server.host_key)])
    done = tmp_path / "done"
    command = f"read word; echo $word >> {done}"
    with client.transport(whole.port) as transport:
        transport.run(command, b"measured\n", deadline_s=LONG_S)
        total = whole.passed_to_client if way == "to_client" else whole.passed_to_server
    points = sorted({*range(1, total, total // 8), *range(max(1, total - 400), total, 16)})
    said_nothing_ran: set[str] = set()
    said_it_ran: set[str] = set()
    for point in points:
        proxy = make_proxy(server.port)
        pin(client.store, "127.0.0.1", proxy.port, [public_key(server.host_key)])
        getattr(proxy, way).left = point
        with client.transport(proxy.port) as transport:
            try:
                completed = transport.run(command, b"cut-%d\n" % point, deadline_s=LONG_S)
            except HostUnreachableError:
                # A login may have been cut and tried again: only what was said counts.
                said_nothing_ran.add(f"cut-{point}")
            except OutcomeUnknownError:
                pass
            else:
                assert completed.exit_status == 0
                said_it_ran.add(f"cut-{point}")
    server.stop()
    ran = set(done.read_text().split())
    assert said_nothing_ran & ran == set()
    assert said_it_ran - ran == set()
    assert said_nothing_ran, "some cuts come before the command"


def test_slow_link(shared_sshd: Sshd, client: Client) -> None:
    """A link with 100 ms each way is slow, not broken: one login, and a command is a few round trips."""
    script = Path(reconciler.__file__).parent / "lab" / "scripts" / "delay-proxy"
    process = subprocess.Popen(
        [sys.executable, script, "0", f"127.0.0.1:{shared_sshd.port}", "--delay", "100"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        port = int(re.findall(rb"listening (\d+)", process.stdout.readline())[0])
        pin(client.store, "127.0.0.1", port, [public_key(shared_sshd.host_key)])
        with client.transport(port) as transport:
            run(transport)
            began = time.monotonic()
            run(transport)
            assert time.monotonic() - began < 5.0
    finally:
        process.terminate()
        process.wait(START_S)
        process.stdout.close()


def test_nothing_on_standard_error(
    shared_sshd: Sshd, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the library thinks of a failure is in the error that is raised, not on the terminal."""
    with client.transport(shared_sshd.port) as transport, pytest.raises(HostIdentityError):
        run(transport)
    with client.transport(free_port()) as transport, pytest.raises(HostUnreachableError):
        run(transport)
    assert capfd.readouterr().err == ""
    assert logging.getLogger("paramiko").handlers


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux only")
def test_what_is_received_is_acknowledged_at_once() -> None:
    """A talk back and forth makes the kernel put acknowledgements off; after each receive ours is told not to."""
    with socket.create_server(("127.0.0.1", 0)) as listener, PromptSocket() as near:
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            for _ in range(8):
                near.sendall(b"ask")
                far.recv(16)
                far.sendall(b"answer")
                assert near.recv(16) == b"answer"
                assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1

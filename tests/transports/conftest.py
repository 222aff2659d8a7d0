"""What the tests of the transports are given; `loopback.py` has the parts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transports.loopback import Client, Keys, Proxy, Servers, Sshd, TcpServer

from reconciler.transports.base import Transport
from reconciler.transports.hop import HopTransport, Layer, Tool
from reconciler.transports.local import LocalTransport


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def shared_sshd(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Iterator[Sshd]:
    """One server with the usual configuration, for all tests that do not change it."""
    servers = Servers(tmp_path_factory.mktemp("sshd"), keys)
    try:
        yield servers.start()
    finally:
        servers.stop()


@pytest.fixture
def servers(tmp_path: Path, keys: Keys) -> Iterator[Servers]:
    """Servers of a test's own."""
    servers = Servers(tmp_path, keys)
    try:
        yield servers
    finally:
        servers.stop()


@pytest.fixture
def client(tmp_path: Path, keys: Keys) -> Client:
    return Client(tmp_path, keys)


@pytest.fixture(scope="session")
def pct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `pct` that knows container 101, which is this machine, and says of others what the real one says."""
    program = tmp_path_factory.mktemp("pct") / "pct"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$1" = exec ] && [ "$3" = -- ] || exit 9\n'
        "case $2 in\n"
        ' 101) shift 3; exec "$@";;\n'
        " 102) echo \"container '102' not running!\" >&2; exit 255;;\n"
        " 103) echo 'CT is locked (backup)' >&2; exit 255;;\n"
        " *) echo \"Configuration file 'nodes/pve/lxc/$2.conf' does not exist\" >&2; exit 2;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    return program


MEMBERS = ("local", "ssh", "hop-over-local", "hop-over-ssh")


@pytest.fixture(params=MEMBERS)
def transport(
    request: pytest.FixtureRequest, shared_sshd: Sshd, client: Client, pct: Path
) -> Iterator[Transport]:
    """Every member of the family in turn."""
    kind: str = request.param
    outer: Transport = LocalTransport()
    if "ssh" in kind:
        client.pin(shared_sshd.port)
        outer = client.transport(shared_sshd.port)
    layer = Layer(Tool.PCT, "101", program=str(pct))
    member = HopTransport(outer, layer) if kind.startswith("hop") else outer
    try:
        yield member
    finally:
        member.close()
        outer.close()


@pytest.fixture
def proxy(shared_sshd: Sshd) -> Iterator[Proxy]:
    """A proxy before the shared server."""
    proxy = Proxy(shared_sshd.port)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], Proxy]]:
    """Proxies before a server of one's own."""
    with contextlib.ExitStack() as stack:

        def make(port: int) -> Proxy:
            proxy = Proxy(port)
            stack.callback(proxy.close)
            return proxy

        yield make


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Start a server and return its port."""
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[socket.socket], None]) -> int:
            server = TcpServer(answer)
            stack.callback(server.close)
            return server.port

        yield start

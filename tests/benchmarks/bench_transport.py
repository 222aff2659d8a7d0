"""What a transport costs: `python tests/benchmarks/bench_transport.py [ROUNDS]`.

A script, not a test: it starts an sshd of its own on a loopback port and prints a table, with the floor
that each figure should be compared with beside it. No figure is asserted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko

sys.path.insert(0, str(Path(__file__).parents[1]))

from transports.loopback import Client, Keys, Servers, TcpServer

from reconciler.transports.base import Transport
from reconciler.transports.hop import HopTransport, Layer, Tool
from reconciler.transports.local import LocalTransport

MIB = 1 << 20


def main() -> None:
    """Measure everything once and print it."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        keys = Keys(place)
        servers = Servers(place, keys)
        try:
            server = servers.start()
            client = Client(place, keys)
            client.pin(server.port)
            _print(_login(client, server.port, rounds))
            _print(_commands(client, server.port, rounds))
            _print(_tunnels(client, server.port))
        finally:
            servers.stop()


Row = tuple[str, float, str, float | None]


def _print(rows: list[Row]) -> None:
    for what, value, unit, floor in rows:
        ratio = "" if floor is None else f"{value / floor:8.2f} x the floor of {floor:.2f}"
        sys.stdout.write(f"{what:52} {value:9.2f} {unit:8} {ratio}\n")


def _login(client: Client, port: int, rounds: int) -> list[Row]:
    wall, cpu = [], []
    for _ in range(rounds):
        transport = client.transport(port)
        began, cpu_began = time.perf_counter(), time.process_time()
        with transport:
            transport.run("exec true", b"", deadline_s=30)
            wall.append((time.perf_counter() - began) * 1e3)
            cpu.append((time.process_time() - cpu_began) * 1e3)
    return [
        ("login and `exec true`, wall", statistics.median(wall), "ms", None),
        ("login and `exec true`, client CPU", statistics.median(cpu), "ms", None),
    ]


def _commands(client: Client, port: int, rounds: int) -> list[Row]:
    def exec_true(transport: Transport) -> float:
        return _median_ms(rounds, lambda: transport.run("exec true", b"", deadline_s=30))

    with LocalTransport() as local:
        floor = exec_true(local)
    with client.transport(port) as transport:
        with_no_delay = exec_true(transport)
        session = transport.open("exec cat")

        def round_trip() -> None:
            session.send(b"x\n")
            session.receive(30)

        kept = _median_ms(rounds * 10, round_trip)
        session.close()
        flood_began = time.perf_counter()
        transport.run("head -c 4000000 /dev/zero", b"", deadline_s=30)
        output = 4.0 / (time.perf_counter() - flood_began)
    with _nagle(), client.transport(port) as transport:
        without = exec_true(transport)
    return [
        ("`exec true` on this machine", floor, "ms", None),
        ("`exec true` over ssh", with_no_delay, "ms", floor),
        ("`exec true` over ssh without TCP_NODELAY", without, "ms", with_no_delay),
        ("kept session, round trip", kept, "ms", None),
        ("output of a command", output, "MB/s", None),
    ]


@contextlib.contextmanager
def _nagle() -> Iterator[None]:
    """Turn TCP_NODELAY off again on what paramiko connects through."""
    plain = paramiko.Transport.start_client

    def start(self: paramiko.Transport, *words: object, **options: object) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        plain(self, *words, **options)  # type: ignore[arg-type]

    paramiko.Transport.start_client = start  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        paramiko.Transport.start_client = plain  # type: ignore[method-assign]


def _median_ms(rounds: int, work: Callable[[], object]) -> float:
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def _tunnels(client: Client, port: int) -> list[Row]:
    def source(connection: socket.socket) -> None:
        while asked := connection.recv(8):
            connection.sendall(bytes(int(asked) * 1024))

    server = TcpServer(source)
    pct = client.directory / "pct"
    pct.write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    pct.chmod(0o755)
    layer = Layer(Tool.PCT, "101", program=str(pct))
    rows: list[Row] = []
    floors: dict[str, float] = {}
    try:
        with client.transport(port) as ssh:
            members = {
                "direct": LocalTransport(),
                "ssh tunnel": ssh,
                "relay in a container, local": HopTransport(LocalTransport(), layer),
                "relay in a container, ssh": HopTransport(ssh, layer),
            }
            for name, transport in members.items():
                for what, value, unit in _measured(transport, server.port):
                    floor = floors.setdefault(what, value) if name != "direct" else None
                    if name == "direct":
                        floors[what] = value
                    rows.append((f"{name}: {what}", value, unit, floor))
    finally:
        server.close()
    return rows


def _measured(transport: Transport, port: int) -> list[tuple[str, float, str]]:
    with transport.reach(port) as address:

        def ask(connection: socket.socket, kib: int) -> None:
            connection.sendall(b"%8d" % kib)
            left = kib * 1024
            while left:
                left -= len(connection.recv(MIB))

        with socket.create_connection((address.host, address.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            small = _median_ms(200, lambda: ask(connection, 1))
            began = time.perf_counter()
            ask(connection, 32 * 1024)
            bulk = 32 / (time.perf_counter() - began)

        def connect_and_ask() -> None:
            with socket.create_connection((address.host, address.port)) as fresh:
                ask(fresh, 1)

        fresh = _median_ms(50, connect_and_ask)

        def carry() -> None:
            with socket.create_connection((address.host, address.port)) as one:
                ask(one, 1024)

        threads = [threading.Thread(target=carry) for _ in range(64)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        many = 64 / (time.perf_counter() - began)
    return [
        ("1 KiB round trip", small, "ms"),
        ("new connection and 1 KiB", fresh, "ms"),
        ("one stream", bulk, "MiB/s"),
        ("64 streams of 1 MiB", many, "MiB/s"),
    ]


if __name__ == "__main__":
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    os.environ.pop("SSH_AUTH_SOCK", None)
    main()

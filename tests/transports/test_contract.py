"""What every transport promises, run against each member of the family."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from reconciler.core.errors import HostError, OutcomeUnknownError
from reconciler.transports.base import OUTPUT_CAP_BYTES, Address, Transport

EVERY_BYTE = bytes(range(256)) * 5
LONG_S = 30.0
"""A deadline that is not meant to pass."""

Serve = Callable[[Callable[[socket.socket], None]], int]


def test_output_and_status_come_back(transport: Transport) -> None:
    """Both streams and the exit status are the command's own."""
    completed = transport.run("echo out; echo err >&2; exit 3", b"", deadline_s=LONG_S)
    assert completed.stdout == b"out\n"
    assert completed.stderr == b"err\n"
    assert (completed.exit_status, completed.truncated) == (3, False)


def test_bytes_are_not_touched(transport: Transport) -> None:
    """Standard input arrives byte for byte, and so does what is printed (T07)."""
    completed = transport.run("exec cat", EVERY_BYTE, deadline_s=LONG_S)
    assert completed.stdout == EVERY_BYTE


def test_empty_input_ends(transport: Transport) -> None:
    """A command that reads its input to the end is not left waiting when there is none."""
    completed = transport.run("cat; echo ended", b"", deadline_s=LONG_S)
    assert (completed.stdout, completed.exit_status) == (b"ended\n", 0)


def test_input_that_nobody_reads(transport: Transport) -> None:
    """A command that ends before it has read its input is judged by its exit status alone."""
    completed = transport.run("exec true", bytes(3_000_000), deadline_s=LONG_S)
    assert completed.exit_status == 0


def test_input_and_output_larger_than_every_buffer(transport: Transport) -> None:
    """Input is still written while output is already read: four megabytes go through `cat`."""
    data = os.urandom(1 << 20) * 4
    assert len(data) <= OUTPUT_CAP_BYTES
    completed = transport.run("exec cat", data, deadline_s=LONG_S)
    assert completed.stdout == data


def test_both_streams_at_once(transport: Transport) -> None:
    """Three megabytes on each stream arrive whole, whichever is written first (paramiko/paramiko#1778)."""
    size = 3_000_000
    completed = transport.run(
        f"head -c {size} /dev/zero >&2; head -c {size} /dev/zero", b"", deadline_s=LONG_S
    )
    assert (len(completed.stdout), len(completed.stderr)) == (size, size)
    assert (completed.exit_status, completed.truncated) == (0, False)


@pytest.mark.parametrize("where", ["", ">&2", "| tee /dev/stderr"])
def test_flood_is_cut(transport: Transport, where: str) -> None:
    """An endless stream is cut at the cap, said to be, and its end is unknown (F41)."""
    completed = transport.run(f"cat /dev/zero {where}", b"", deadline_s=LONG_S)
    assert completed.truncated
    assert completed.exit_status is None
    assert max(len(completed.stdout), len(completed.stderr)) == OUTPUT_CAP_BYTES


def test_deadline_passes(transport: Transport) -> None:
    """A command that does not end is given up at the deadline, with an unknown outcome (F38)."""
    began = time.monotonic()
    with pytest.raises(OutcomeUnknownError, match="had not ended"):
        transport.run("exec sleep 30", b"", deadline_s=0.3)
    assert time.monotonic() - began < 5.0


def test_deadline_passes_under_chatter(transport: Transport) -> None:
    """Output that trickles on does not move the deadline."""
    with pytest.raises(OutcomeUnknownError, match="had not ended"):
        transport.run(
            "i=0; while [ $i -lt 1000 ]; do echo $i; sleep 0.03; i=$((i+1)); done",
            b"",
            deadline_s=0.5,
        )


def test_usable_after_a_deadline(transport: Transport) -> None:
    """One command that was given up does not spoil the next."""
    with pytest.raises(OutcomeUnknownError):
        transport.run("exec sleep 30", b"", deadline_s=0.2)
    assert transport.run("echo again", b"", deadline_s=LONG_S).stdout == b"again\n"


def test_death_by_a_signal(transport: Transport) -> None:
    """A command that was killed has no exit status, or the one of a shell that says so: never success (F40)."""
    completed = transport.run("echo last; kill -KILL $$", b"", deadline_s=LONG_S)
    assert completed.stdout == b"last\n"
    assert completed.exit_status in {None, 137}


def test_streams_held_open(transport: Transport) -> None:
    """A command whose child keeps the streams open has ended when it has ended (paramiko/paramiko#2033)."""
    began = time.monotonic()
    completed = transport.run("sleep 20 & echo started", b"", deadline_s=15.0)
    assert (completed.stdout, completed.exit_status) == (b"started\n", 0)
    assert completed.truncated
    assert time.monotonic() - began < 10.0


def test_unknown_command(transport: Transport) -> None:
    """A command that does not exist is a command that said no, not a host that is away."""
    completed = transport.run("exec /no/such/command", b"", deadline_s=LONG_S)
    assert completed.exit_status in {126, 127}


def test_no_terminal_and_no_agent(transport: Transport) -> None:
    """A command gets no terminal and no way to the operator's keys (T27)."""
    completed = transport.run('test -t 0 || echo "none [$SSH_AUTH_SOCK]"', b"", deadline_s=LONG_S)
    assert completed.stdout == b"none []\n"


def test_many_commands_at_once(transport: Transport) -> None:
    """Threads may share a transport: twelve commands at once, each gets its own answer."""
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(
                lambda n: transport.run("exec cat", b"%d" % n, deadline_s=LONG_S).stdout, range(12)
            )
        )
    assert answers == [b"%d" % n for n in range(12)]


def test_session_answers_again_and_again(transport: Transport) -> None:
    """A kept command answers line after line."""
    session = transport.open("exec cat")
    try:
        for number in range(50):
            line = b"request %d\n" % number
            session.send(line)
            assert read_line(session.receive) == line
    finally:
        session.close()


def test_session_ends(transport: Transport) -> None:
    """The end of a kept command's output is an empty answer, and standard error can be read after it."""
    session = transport.open("echo bye; echo why >&2")
    try:
        found = b""
        while data := session.receive(LONG_S):
            found += data
        assert found == b"bye\n"
        assert session.stderr_tail() == b"why\n"
    finally:
        session.close()


def test_session_keeps_the_end_of_its_standard_error(transport: Transport) -> None:
    """A flood on standard error holds up nothing, and its last 64 KiB are kept."""
    session = transport.open("head -c 5000000 /dev/zero >&2; echo tail >&2; echo done")
    try:
        assert read_line(session.receive) == b"done\n"
        while session.receive(LONG_S):
            pass
        assert len(session.stderr_tail()) == 64 * 1024
        assert session.stderr_tail().endswith(b"tail\n")
    finally:
        session.close()


def test_session_that_is_silent(transport: Transport) -> None:
    """An answer that does not come within its deadline is an unknown outcome."""
    session = transport.open("exec cat")
    try:
        with pytest.raises(OutcomeUnknownError, match="no answer within"):
            session.receive(0.2)
    finally:
        session.close()


def test_session_that_was_closed(transport: Transport) -> None:
    """A session may be closed twice, and sending to it afterwards is said to have no known outcome."""
    session = transport.open("exec cat")
    session.close()
    session.close()
    with pytest.raises(OutcomeUnknownError):
        session.send(b"x")


def test_session_beside_commands(transport: Transport) -> None:
    """A kept command and others share a transport without mixing their answers."""
    session = transport.open("exec cat")
    try:
        assert transport.run("echo other", b"", deadline_s=LONG_S).stdout == b"other\n"
        session.send(b"mine\n")
        assert read_line(session.receive) == b"mine\n"
    finally:
        session.close()


def read_line(receive: Callable[[float], bytes]) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        data = receive(LONG_S)
        assert data, found
        found += data
    return found


def echo_at_the_end(connection: socket.socket) -> None:
    """Answer with everything once the client has half-closed."""
    found = bytearray()
    while data := connection.recv(65536):
        found += data
    connection.sendall(found)


def exchange(address: Address, data: bytes) -> bytes:
    with socket.create_connection((address.host, address.port), LONG_S) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = bytearray()
        while part := connection.recv(65536):
            found += part
    return bytes(found)


def test_tunnels_lose_nothing(transport: Transport, serve: Serve) -> None:
    """64 connections at once each carry a megabyte there, a half-close, and the megabyte back."""
    port = serve(echo_at_the_end)
    blocks = [os.urandom(4096) * 256 for _ in range(64)]
    with transport.reach(port) as address, ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda block: exchange(address, block), blocks))
    assert [a == b for a, b in zip(answers, blocks, strict=True)] == [True] * 64


def test_tunnel_passes_on_what_comes_at_once(transport: Transport, serve: Serve) -> None:
    """Small pieces arrive as they are sent, not when there are enough of them: tokens are timed."""

    def one_by_one(connection: socket.socket) -> None:
        while data := connection.recv(1):
            connection.sendall(data)

    port = serve(one_by_one)
    with (
        transport.reach(port) as address,
        socket.create_connection((address.host, address.port), LONG_S) as connection,
    ):
        for number in range(100):
            connection.sendall(bytes([number]))
            assert connection.recv(1) == bytes([number])


def test_tunnel_half_closed_by_the_server(transport: Transport, serve: Serve) -> None:
    """A server that has said everything may still be sent to."""
    heard = threading.Event()

    def speak_first(connection: socket.socket) -> None:
        connection.sendall(b"all of it")
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(100) == b"thanks":
            heard.set()

    port = serve(speak_first)
    with (
        transport.reach(port) as address,
        socket.create_connection((address.host, address.port), LONG_S) as connection,
    ):
        found = b""
        while data := connection.recv(100):
            found += data
        assert found == b"all of it"
        connection.sendall(b"thanks")
        assert heard.wait(LONG_S)


def test_tunnel_to_a_port_where_nothing_listens(transport: Transport) -> None:
    """Where nothing listens, a connection fails; it does not end as if an empty answer had come."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with transport.reach(port) as address, pytest.raises(ConnectionError):
        assert exchange(address, b"x") == b"an error, not an end"


def test_tunnel_is_taken_down(transport: Transport, serve: Serve) -> None:
    """After the block nothing listens any more and nothing of it runs, open connections included."""
    port = serve(echo_at_the_end)
    with socket.socket() as connection:
        with transport.reach(port) as address:
            connection.connect((address.host, address.port))
            connection.sendall(b"x")
        if address.port != port:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address.host, address.port), LONG_S)
    left = [t.name for t in threading.enumerate() if re.match(r"tunnel-|relay$", t.name)]
    assert left == []


def test_close_can_be_repeated(transport: Transport) -> None:
    """Closing twice is harmless, and so is using it again: it connects anew."""
    transport.run("true", b"", deadline_s=LONG_S)
    transport.close()
    transport.close()
    assert transport.run("true", b"", deadline_s=LONG_S).exit_status == 0


def test_label_is_in_every_error(transport: Transport) -> None:
    """A message says which host it is about."""
    with pytest.raises(HostError) as caught:
        transport.run("exec sleep 30", b"", deadline_s=0.1)
    assert caught.value.host
    assert str(caught.value).startswith(caught.value.host)
    assert transport.label

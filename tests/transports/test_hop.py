"""Containers: quoting for every login shell, what the tools say when they run nothing, and the relay."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.errors import HostUnreachableError
from reconciler.transports import relay_far
from reconciler.transports.base import Address
from reconciler.transports.hop import HopTransport, Layer, Tool, enter
from reconciler.transports.local import LocalTransport

LONG_S = 30.0
Serve = Callable[[Callable[[socket.socket], None]], int]


@pytest.fixture
def inside(pct: Path) -> Iterator[HopTransport]:
    with HopTransport(LocalTransport(), Layer(Tool.PCT, "101", program=str(pct))) as transport:
        yield transport


def container(pct: Path, vmid: str) -> HopTransport:
    return HopTransport(LocalTransport(), Layer(Tool.PCT, vmid, program=str(pct)))


# What the login shell sees.


def test_words_of_pct() -> None:
    """The outer command is a constant but for the number: tools by our PATH, an emptied environment inside."""
    assert enter(Layer.proxmox(129), "exec true") == (
        "exec /usr/bin/env LC_ALL=C "
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "
        "pct exec 129 -- /usr/bin/env -i LC_ALL=C LANG=C "
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin "
        "HOME=/root /bin/sh -c 'exec true'"
    )


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Layer.proxmox(100, sudo=True), " sudo -n -- pct exec 100 -- /usr/bin/env -i "),
        (Layer(Tool.DOCKER, "web-1"), " docker exec -i web-1 /usr/bin/env -i "),
        (Layer(Tool.PODMAN, "web_1"), " podman exec -i web_1 /usr/bin/env -i "),
        (Layer(Tool.INCUS, "web.1"), " incus exec -T web.1 -- /usr/bin/env -i "),
        (Layer(Tool.DOCKER, "web", program="/snap/bin/docker"), " /snap/bin/docker exec -i web "),
    ],
)
def test_words_of_the_tools(layer: Layer, words: str) -> None:
    """Each tool is asked for standard input, for no terminal, and not to take our words for its own."""
    assert words in enter(layer, "exec true")


@pytest.mark.parametrize(
    "name", ["", "1", "0101", "99999999999", "101;id", "101 ", "-1", "10１", "101\n"]
)
def test_numbers_that_are_none(name: str) -> None:
    """Nothing but a container's number comes into the command (T01)."""
    with pytest.raises(ValueError, match="no name"):
        Layer(Tool.PCT, name)


@pytest.mark.parametrize("name", ["", "-it", "a b", "a;b", "$(id)", "a'b", "a\n", "ä", "a" * 200])
@pytest.mark.parametrize("tool", [Tool.DOCKER, Tool.PODMAN, Tool.INCUS])
def test_names_that_are_none(tool: Tool, name: str) -> None:
    """Nothing but a plain name comes into the command (T01)."""
    with pytest.raises(ValueError, match="no name"):
        Layer(tool, name)


@pytest.mark.parametrize("program", ["pct", "/opt/a b", "/x;id", "$HOME/pct"])
def test_programs_that_are_none(program: str) -> None:
    """The place of a tool is a plain absolute path."""
    with pytest.raises(ValueError, match="path"):
        Layer(Tool.PCT, "101", program=program)


SCRIPTS = (
    "echo plain",
    "printf '%s\\n' \"it's\" '!history' 'back\\slash' '=ls' '~' '*' '$HOME' '`id`'",
    "echo 'ends with a backslash \\'",
    "x='two\nlines'; echo \"$x\"",
    "echo ünïcödé",
    "echo !!; echo 'a!b'",
    "exit 5",
)


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "tcsh", "fish"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_pass_every_login_shell(pct: Path, shell: str, script: str) -> None:
    """What the container's sh gets is the script, whatever the outer login shell makes of quotes."""
    path = shutil.which(shell)
    if path is None:
        assert not os.environ.get("CI"), f"{shell} is not installed"
        pytest.skip(f"{shell} is not installed")
    command = enter(Layer(Tool.PCT, "101", program=str(pct)), script)
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LC_ALL": "C"}
    got = subprocess.run([path, "-c", command], capture_output=True, env=environment, check=False)
    wanted = subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, env=environment, check=False
    )
    assert (got.stdout, got.returncode) == (wanted.stdout, wanted.returncode)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
def test_any_script_arrives(text: str) -> None:
    """What is quoted for the shell comes out of it as it went in (T07)."""
    words = shlex.split(enter(Layer.proxmox(101), text))
    script = words[-1]
    if script != text:
        assert "eval" in script
        wrapped = enter(Layer.proxmox(101), f"printf %s {shlex.quote(text)}")
        inner = shlex.split(wrapped)[-1]
        done = subprocess.run(["/bin/sh", "-c", inner], capture_output=True, check=True)
        assert done.stdout == text.encode()


def test_environment_is_emptied(inside: HopTransport) -> None:
    """Nothing of the outer session's environment comes into the container."""
    completed = inside.run("/usr/bin/env", b"", deadline_s=LONG_S)
    names = {line.split("=")[0] for line in completed.stdout.decode().splitlines()}
    assert names <= {"LC_ALL", "LANG", "PATH", "HOME", "PWD", "SHLVL", "_", "OLDPWD"}


# When the container cannot be entered.


@pytest.mark.parametrize(
    ("vmid", "why"), [("102", "not running"), ("103", "CT is locked"), ("104", "does not exist")]
)
def test_container_that_is_away(pct: Path, vmid: str, why: str) -> None:
    """A container that is stopped, locked or elsewhere is unreachable, never a host that said no (F46)."""
    transport = container(pct, vmid)
    with pytest.raises(HostUnreachableError, match=why):
        transport.run("exec true", b"", deadline_s=LONG_S)
    session = transport.open("exec cat")
    with pytest.raises(HostUnreachableError, match=why):
        session.receive(LONG_S)
    session.close()
    with pytest.raises(HostUnreachableError, match=why), transport.reach(80):
        pytest.fail("a tunnel into a container that is away")


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (Tool.PCT, "container '101' not running!"),
        (Tool.PCT, "Configuration file 'nodes/pve/lxc/101.conf' does not exist"),
        (Tool.PCT, "CT is locked (snapshot-delete)"),
        (Tool.PCT, "ipcc_send_rec[1] failed: Unknown error -1"),
        (Tool.PCT, "lxc-attach: 101: attach.c: get_attach_context: 405 Failed to get init pid"),
        (Tool.DOCKER, "Error response from daemon: container 0a1b2c is not running"),
        (Tool.DOCKER, "Error response from daemon: No such container: web"),
        (
            Tool.DOCKER,
            "Error response from daemon: Container web is paused, unpause the container before exec",
        ),
        (Tool.DOCKER, "Error: No such container: web"),
        (
            Tool.DOCKER,
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?",
        ),
        (Tool.PODMAN, 'Error: no container with name or ID "web" found: no such container'),
        (
            Tool.PODMAN,
            "Error: can only create exec sessions on running containers: container state improper",
        ),
        (Tool.INCUS, "Error: Instance is not running"),
        (Tool.INCUS, "Error: Instance not found"),
    ],
)
def test_complaints_of_the_tools(tmp_path: Path, tool: Tool, text: str) -> None:
    """What each tool says when it has run nothing is known."""
    program = tmp_path / tool.value
    program.write_text(
        f"#!/bin/sh\ncat >&2 <<'END'\nperl: warning: Setting locale failed.\n{text}\nEND\nexit 255\n"
    )
    program.chmod(0o755)
    transport = HopTransport(LocalTransport(), Layer(tool, "101", program=str(program)))
    with pytest.raises(HostUnreachableError) as caught:
        transport.run("exec true", b"", deadline_s=LONG_S)
    assert text in str(caught.value)


def test_complaint_of_the_command_itself(inside: HopTransport) -> None:
    """A command that fails in its own words is a command that ran."""
    said = "echo my service is not running >&2; exit 255"
    assert inside.run(said, b"", deadline_s=LONG_S).exit_status == 255
    said = "echo printed; echo \"container '101' not running!\" >&2; exit 255"
    assert inside.run(said, b"", deadline_s=LONG_S).stdout == b"printed\n"


# The relay.


def connect(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), LONG_S)


def test_far_end_runs_on_old_pythons() -> None:
    """What is sent into the container is Python 3.9 and imports the standard library alone."""
    text = Path(relay_far.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    modules = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules <= sys.stdlib_module_names


def test_other_addresses_need_no_relay(inside: HopTransport, serve: Serve) -> None:
    """An address that is not loopback is reached from the outer layer: nothing is run inside."""
    port = serve(lambda connection: connection.sendall(b"x"))
    with inside.reach(port, address="192.0.2.7") as address:
        assert address == Address("192.0.2.7", port)  # The local outer layer leads there as it is.


def test_reset_by_the_server(inside: HopTransport, serve: Serve) -> None:
    """A server that breaks off in the middle is seen to break off, not to have ended."""

    def break_off(connection: socket.socket) -> None:
        connection.sendall(b"half")
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with inside.reach(serve(break_off)) as address, connect(address) as connection:
        assert connection.recv(4) == b"half"
        connection.sendall(b"!")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_client_that_breaks_off(inside: HopTransport, serve: Serve) -> None:
    """A client that goes away is seen by the server, which would go on generating for nobody."""
    gone = threading.Event()

    def go_on(connection: socket.socket) -> None:
        try:
            while True:
                connection.sendall(b"token " * 1000)
        except ConnectionError:
            gone.set()

    with inside.reach(serve(go_on)) as address:
        with connect(address) as connection:
            connection.recv(100)
        assert gone.wait(LONG_S)


def test_slow_reader_holds_up_nobody(inside: HopTransport, serve: Serve) -> None:
    """A client that does not read stops its own stream only, and memory stays bounded."""
    sent = [0]

    def pour(connection: socket.socket) -> None:
        if connection.recv(1) == b"p":
            for _ in range(2000):
                connection.sendall(bytes(65536))
                sent[0] += 65536
        else:
            connection.sendall(b"quick")

    with inside.reach(serve(pour)) as address, connect(address) as slow:
        slow.sendall(b"p")
        assert slow.recv(1)
        for _ in range(20):
            with connect(address) as quick:
                quick.sendall(b"q")
                assert quick.recv(5) == b"quick"
        assert sent[0] < 2000 * 65536


def test_relay_that_dies(
    inside: HopTransport, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the relay is killed its streams break, and the next connection starts another."""
    pids: list[int] = []
    plain = LocalTransport.open

    def remember(self: LocalTransport, command: str) -> object:
        session = plain(self, command)
        pids.append(session._process.pid)  # type: ignore[attr-defined]
        return session

    monkeypatch.setattr(LocalTransport, "open", remember)

    def greet(connection: socket.socket) -> None:
        connection.sendall(b"hello")
        connection.recv(1)

    with inside.reach(serve(greet)) as address:
        with connect(address) as connection:
            assert connection.recv(5) == b"hello"
            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(ConnectionError):
                connection.recv(1)
        with connect(address) as connection:
            assert connection.recv(5) == b"hello"
    assert len(pids) == 2


def test_container_without_python(tmp_path: Path) -> None:
    """Where no relay can run, that is said when the tunnel is asked for."""
    program = tmp_path / "pct"
    program.write_text("#!/bin/sh\necho 'sh: /usr/bin/python3: not found' >&2\nexit 127\n")
    program.chmod(0o755)
    transport = HopTransport(LocalTransport(), Layer(Tool.PCT, "101", program=str(program)))
    with pytest.raises(HostUnreachableError, match="python3: not found"), transport.reach(80):
        pytest.fail("a tunnel without a relay")


def test_noise_before_the_relay(tmp_path: Path, pct: Path, serve: Serve) -> None:
    """What login files print before the relay greets is not taken for frames (F45)."""
    noisy = tmp_path / "pct"
    noisy.write_text(f"#!/bin/sh\necho 'Linux gpu-one'; echo; echo 'motd'\nexec {pct} \"$@\"\n")
    noisy.chmod(0o755)
    transport = HopTransport(LocalTransport(), Layer(Tool.PCT, "101", program=str(noisy)))
    with (
        transport.reach(serve(lambda connection: connection.sendall(b"x"))) as address,
        connect(address) as connection,
    ):
        assert connection.recv(10) == b"x"

"""A container as a layer on top of another transport: `pct`, `docker`, `podman` and `incus` exec.

The outer login shell may be anything (fish, tcsh, zsh), so it only ever sees a constant of ours and a
checked number or name; the inner command reaches the container's sh inside single quotes, and where it
holds what some shell reads inside them, as base64. Whether the command ran is the caller's markers' to
say: `pct exec` ends with 1 or 255 both for its own failures and for the command's. Only the tools' own
well-known complaints, when nothing came on standard output, are taken as "not executed".
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from reconciler.core.errors import HostUnreachableError, OutcomeUnknownError
from reconciler.transports.base import Address, Completed, Session, Transport
from reconciler.transports.relay import COMMAND, Relays
from reconciler.transports.tunnel import Stream, listening

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INNER_PATH = f"{PATH}:/usr/local/nvidia/bin"
SAY_WHY_S = 5.0
"""For a tool that has ended to have its last words read."""


class Tool(Enum):
    """What enters the container."""

    PCT = "pct"
    DOCKER = "docker"
    PODMAN = "podman"
    INCUS = "incus"


@dataclass(frozen=True, slots=True)
class _Usage:
    """How a tool is told to run something, and how it says that it did not."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    name: re.Pattern[str]
    refusals: re.Pattern[str]


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_TOOLS = {
    Tool.PCT: _Usage(
        # `--` or pct takes the command's options for its own.
        ("pct", "exec"),
        ("--",),
        re.compile(r"[1-9][0-9]{2,8}"),
        re.compile(
            r"^container '\d+' not running|^Configuration file '.*' does not exist|^CT is locked"
            r"|^ipcc_send_rec|^lxc-attach: .*(?:Failed to get init pid|not running)"
            r"|^unable to (?:open|parse).*/lxc/",
            re.MULTILINE,
        ),
    ),
    Tool.DOCKER: _Usage(
        ("docker", "exec", "-i"),
        (),
        _NAME,
        re.compile(
            r"^Error response from daemon: .*(?:is not running|No such container|is paused|is restarting)"
            r"|^Error: No such container|^Cannot connect to the Docker daemon",
            re.MULTILINE,
        ),
    ),
    Tool.PODMAN: _Usage(
        ("podman", "exec", "-i"),
        (),
        _NAME,
        re.compile(
            r"^Error: (?:no container with name or ID|can only create exec sessions on running"
            r"|container .* is not running|cannot connect to Podman)",
            re.MULTILINE | re.IGNORECASE,
        ),
    ),
    Tool.INCUS: _Usage(
        ("incus", "exec", "-T"),
        ("--",),
        _NAME,
        re.compile(
            r"^Error: (?:Instance is not running|.*[Nn]ot found|Instance is frozen)", re.MULTILINE
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One container. `program` is where the tool lies when it is not on the usual path.

    A bad name is a ValueError: nothing unchecked may come near a login shell.
    """

    tool: Tool
    name: str
    sudo: bool = False
    program: str | None = None

    def __post_init__(self) -> None:
        if not _TOOLS[self.tool].name.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name for {self.tool.value}")
        if self.program is not None and not re.fullmatch(r"/[A-Za-z0-9_./-]+", self.program):
            raise ValueError(f"{self.program!r} is no plain absolute path")

    @classmethod
    def proxmox(cls, vmid: int, *, sudo: bool = False) -> Layer:
        """Name a Proxmox container."""
        return cls(Tool.PCT, str(vmid), sudo)

    def __str__(self) -> str:
        return f"{self.tool.value} {self.name}"


def enter(layer: Layer, command: str) -> str:
    """Say `command` so that the outer login shell, whichever it is, runs it inside the layer by sh.

    `env` finds the tool by our PATH (pct is in different places), and a second one empties the environment
    on the way in: lxc-attach would carry the outer session's along, secrets and all.
    """
    usage = _TOOLS[layer.tool]
    tool = (layer.program or usage.before[0], *usage.before[1:])
    sudo = ("sudo", "-n", "--") if layer.sudo else ()
    words = (
        *("exec", "/usr/bin/env", "LC_ALL=C", f"PATH={PATH}"),
        *sudo,
        *tool,
        layer.name,
        *usage.after,
        *("/usr/bin/env", "-i", "LC_ALL=C", "LANG=C", f"PATH={INNER_PATH}", "HOME=/root"),
        *("/bin/sh", "-c", _quoted(command)),
    )
    return " ".join(words)


def _quoted(command: str) -> str:
    """Put a script into single quotes for any shell.

    Inside them sh reads nothing, but fish reads the backslash and tcsh `!` and the newline. What has one
    of those, or a quote, goes as base64 and is decoded by the inner sh.
    """
    if command.isascii() and command.isprintable() and not set(command) & set("'\\!"):
        return f"'{command}'"
    encoded = base64.b64encode(command.encode()).decode("ascii")
    return f"'eval \"$(echo {encoded} | base64 -d)\"'"


class HopTransport:
    """A container behind `outer`, which stays its owner's to close."""

    def __init__(self, outer: Transport, layer: Layer) -> None:
        self._outer = outer
        self._layer = layer

    @property
    def label(self) -> str:
        """Where this leads, for people: `pct 129 on root@192.0.2.6`."""
        return f"{self._layer} on {self._outer.label}"

    def run(self, command: str, stdin: bytes, *, deadline_s: float) -> Completed:
        """Run `command` inside; see `Transport.run`."""
        completed = self._outer.run(enter(self._layer, command), stdin, deadline_s=deadline_s)
        if completed.exit_status not in {0, None} and not completed.stdout:
            _refuse(self.label, self._layer, completed.stderr)
        return completed

    def open(self, command: str) -> Session:
        """Start `command` inside and keep it; see `Transport.open`.

        That the container was not there is only known when its first answer is awaited: `receive` raises
        HostUnreachableError then.
        """
        session = self._outer.open(enter(self._layer, command))
        return _HopSession(self.label, self._layer, session)

    @contextlib.contextmanager
    def reach(self, port: int, *, address: str = "127.0.0.1") -> Iterator[Address]:
        """Give a local address that leads to `address:port` as seen from inside.

        A loopback address is the container's own, which only a process inside can reach: a relay runs
        there. Any other (the container's address) is reached from the outer layer, with nothing run.
        """
        if not _is_loopback(address):
            with self._outer.reach(port, address=address) as local:
                yield local
            return
        relays = Relays(self.label, lambda: self.open(COMMAND))

        def open_stream() -> Stream:
            return relays.open_stream(address, port)

        try:
            # Now, so that a container that is down is said here and not by a reset later.
            relays.ready()
            with listening(open_stream) as local:
                yield local
        finally:
            relays.close()

    def close(self) -> None:
        """Nothing of our own is kept open."""

    def __enter__(self) -> HopTransport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _HopSession:
    """A kept command inside; see `Session`."""

    def __init__(self, label: str, layer: Layer, session: Session) -> None:
        self._label = label
        self._layer = layer
        self._session = session
        self._answered = False

    def send(self, data: bytes) -> None:
        """Write all of `data`."""
        try:
            self._session.send(data)
        except OutcomeUnknownError:
            if not self._answered:
                # The tool may have ended without entering; its complaint comes with the end of its output.
                while self._session.receive(SAY_WHY_S):
                    self._answered = True
                _refuse(self._label, self._layer, self._session.stderr_tail())
            raise

    def receive(self, deadline_s: float) -> bytes:
        """Return the next bytes; see `HopTransport.open` for the first."""
        data = self._session.receive(deadline_s)
        if not data and not self._answered:
            _refuse(self._label, self._layer, self._session.stderr_tail())
        self._answered = True
        return data

    def stderr_tail(self) -> bytes:
        """Return the last bytes of standard error."""
        return self._session.stderr_tail()

    def close(self) -> None:
        """End the session."""
        self._session.close()


def _refuse(label: str, layer: Layer, stderr: bytes) -> None:
    """Raise if the tool itself said that it ran nothing."""
    text = stderr.decode("utf-8", "replace")
    found = _TOOLS[layer.tool].refusals.search(text)
    if found is not None:
        line = text[found.start() :].splitlines()[0][:300]
        raise HostUnreachableError(
            label, f"the container cannot be entered: {line}; nothing was executed"
        )


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


__all__ = ["HopTransport", "Layer", "Tool", "enter"]

"""What `~/.ssh/config` says about one host: the part of ssh_config(5) that a transport needs.

Not paramiko's reader: that one knows no Include, replaces every `~` in a path, and runs `Match exec` if
another package happens to be installed. Here nothing is ever run, and what cannot be honoured (a `Match
exec` that is reached, an unknown criterion) is refused instead of guessed, because a block that is skipped
may be the one that names the jump host. The tests compare with `ssh -G`.
"""

from __future__ import annotations

import fnmatch
import getpass
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INCLUDE_DEPTH = 16
"""As OpenSSH has it."""

_LINE = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*?)\s*$")
_WORD = re.compile(r'"([^"]*)"|\'([^\']*)\'|(\S+)')
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class SshConfigError(Exception):
    """The file cannot be read, or asks for something that is not done."""


@dataclass(frozen=True, slots=True)
class HostConfig:
    """What holds for one host, defaults not filled in: None means that the file says nothing."""

    host_name: str
    user: str | None = None
    port: int | None = None
    identity_files: tuple[Path, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    proxy_jump: str | None = None
    proxy_command: str | None = None
    connect_timeout_s: float | None = None
    host_key_alias: str | None = None
    known_hosts_files: tuple[Path, ...] | None = None
    """UserKnownHostsFile; empty for `none`."""


def resolve(
    name: str, *, path: Path | None, user: str | None = None, port: int | None = None
) -> HostConfig:
    """Look `name` up as `ssh -F path -l user -p port name` would.

    Raises:
        SshConfigError: See the module.
    """
    reading = _Reading(name, user, port)
    if path is not None:
        reading.read_file(path, 0)
        if reading.wants_final:
            reading.final = True
            reading.read_file(path, 0)
    return reading.result()


class _Reading:
    """One walk over the files for one host; the first value of a keyword wins."""

    def __init__(self, name: str, user: str | None, port: int | None) -> None:
        self.name = name
        self.values: dict[str, str] = {}
        self.identity_files: list[str] = []
        self.known_hosts_files: list[str] | None = None
        self.final = False
        self.wants_final = False
        if user is not None:
            self.values["user"] = user
        if port is not None:
            self.values["port"] = str(port)

    def read_file(self, path: Path, depth: int) -> None:
        """Take in one file; `Host` and `Match` in it end where it ends."""
        if depth > INCLUDE_DEPTH:
            raise SshConfigError(f"{path}: Include is nested more than {INCLUDE_DEPTH} deep")
        try:
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
        except FileNotFoundError:
            return
        except OSError as error:
            raise SshConfigError(f"{path}: {error.strerror}") from error
        active = True
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                active = self.read_line(line, f"{path}:{number}", depth, active=active)

    def read_line(self, line: str, where: str, depth: int, *, active: bool) -> bool:
        """Take in one line and say whether the block it leaves us in is about this host."""
        found = _LINE.match(line)
        if found is None:
            raise SshConfigError(f"{where}: not a keyword and its value")
        keyword, rest = found[1].lower(), found[2]
        words = _words(rest)
        match keyword:
            case "host":
                return _pattern_list(words, self.name)
            case "match":
                return self.matches(words, where)
            case _ if not active:
                return False
            case "include":
                self.include(words, depth)
            case _:
                self.take(keyword, rest, words)
        return active

    def include(self, words: Sequence[str], depth: int) -> None:
        """Read what an Include names, in the order of the shell; no file is no error."""
        for word in words:
            pattern = self.expand(word, "d")
            base = Path(pattern) if pattern.startswith("/") else Path.home() / ".ssh" / pattern
            root, rest = Path(base.anchor), str(base.relative_to(base.anchor))
            for file in sorted(root.glob(rest)):
                if file.is_file():
                    self.read_file(file, depth + 1)

    def take(self, keyword: str, rest: str, words: Sequence[str]) -> None:
        """Keep the first value of a keyword; of IdentityFile, all."""
        if not words:
            return
        if keyword == "identityfile":
            if words[0] not in self.identity_files:
                self.identity_files.append(words[0])
        elif keyword == "userknownhostsfile":
            if self.known_hosts_files is None:
                self.known_hosts_files = list(words)
        elif keyword == "proxycommand":
            # OpenSSH: of ProxyCommand and ProxyJump the first one that is given counts.
            if "proxyjump" not in self.values:
                self.values.setdefault(keyword, rest)
        elif keyword == "proxyjump":
            if "proxycommand" not in self.values:
                self.values.setdefault(keyword, rest)
        else:
            self.values.setdefault(keyword, words[0])

    def matches(self, words: Sequence[str], where: str) -> bool:
        """Judge the criteria of one Match line from left to right, as far as they hold."""
        rest = list(words)
        while rest:
            criterion = rest.pop(0)
            negated = criterion.startswith("!")
            kind, _, inline = criterion.removeprefix("!").lower().partition("=")
            if kind == "all":
                holds = True
            elif kind == "canonical":
                holds = False  # Names are not made canonical here.
            elif kind == "final":
                self.wants_final = True
                holds = self.final
            else:
                if not inline and not rest:
                    raise SshConfigError(f"{where}: Match {kind} needs a value")
                holds = self.criterion_holds(kind, inline or rest.pop(0), where)
            if holds is negated:
                return False
        return True

    def criterion_holds(self, kind: str, value: str, where: str) -> bool:
        """Judge one criterion that has a value."""
        match kind:
            case "host":
                # ssh compares names in Match without regard to case, and in Host with it.
                patterns, subject = value.lower(), self.host_name().lower()
            case "originalhost":
                patterns, subject = value.lower(), self.name.lower()
            case "user":
                patterns, subject = value, self.remote_user()
            case "localuser":
                patterns, subject = value, getpass.getuser()
            case "exec":
                raise SshConfigError(
                    f"{where}: Match exec runs a shell command on this machine to decide; that is not done. "
                    "Put the hosts that reconcile uses above it, or name them by Host"
                )
            case _:
                raise SshConfigError(f"{where}: Match {kind} is not supported")
        return _pattern_list(patterns.split(","), subject)

    def host_name(self) -> str:
        """Return the name to connect to, as far as it is known now."""
        pattern = self.values.get("hostname", self.name)
        return re.sub("%([%hn])", lambda m: "%" if m[1] == "%" else self.name, pattern)

    def remote_user(self) -> str:
        """Return the user to log in as, as far as it is known now."""
        return self.values.get("user") or getpass.getuser()

    def expand(self, text: str, tokens: str) -> str:
        """Replace a leading `~`, `${NAME}`, and those %-tokens that are allowed here."""
        home = str(Path.home())
        if text == "~" or text.startswith("~/"):
            text = home + text[1:]
        values = {
            "%": "%",
            "d": home,
            "h": self.host_name(),
            "i": str(os.getuid()),
            "k": self.values.get("hostkeyalias", self.name),
            "L": socket.gethostname().split(".")[0],
            "l": socket.gethostname(),
            "n": self.name,
            "p": self.values.get("port", "22"),
            "r": self.remote_user(),
            "u": getpass.getuser(),
        }

        def token(found: re.Match[str]) -> str:
            if found[1] not in values or found[1] not in tokens + "%":
                raise SshConfigError(f"the token %{found[1]} in {text!r} is not supported")
            return values[found[1]]

        text = _VARIABLE.sub(lambda m: os.environ.get(m[1], ""), text)
        return re.sub("%(.)", token, text)

    def result(self) -> HostConfig:
        """Put together what was found."""
        jump, command = self.values.get("proxyjump"), self.values.get("proxycommand")
        timeout = self.values.get("connecttimeout")
        return HostConfig(
            host_name=self.host_name(),
            user=self.values.get("user"),
            port=_number(self.values.get("port"), "Port"),
            identity_files=tuple(
                Path(self.expand(f, "dhiLlnpru"))
                for f in self.identity_files
                if f.lower() != "none"
            ),
            identities_only=self.values.get("identitiesonly", "no").lower() == "yes",
            identity_agent=self.values.get("identityagent"),
            proxy_jump=None if jump is None or _none(jump) else self.expand(jump, "hnpr"),
            proxy_command=None
            if command is None or _none(command)
            else self.expand(command, "hnpr"),
            connect_timeout_s=None if timeout is None or _none(timeout) else _seconds(timeout),
            host_key_alias=self.values.get("hostkeyalias"),
            known_hosts_files=None
            if self.known_hosts_files is None
            else tuple(
                Path(self.expand(f, "dhikLlnpru"))
                for f in self.known_hosts_files
                if f.lower() != "none"
            ),
        )


def _none(text: str) -> bool:
    return text.lower() == "none"


def _words(text: str) -> list[str]:
    words = []
    for found in _WORD.finditer(text):
        if found[3] is not None and found[3].startswith("#"):
            break
        words.append(next(group for group in found.groups() if group is not None))
    return words


def _pattern_list(patterns: Sequence[str], subject: str) -> bool:
    """Match as ssh does: any pattern, unless one with `!` matches as well."""
    found = False
    for pattern in patterns:
        plain = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(subject, plain):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _number(text: str | None, keyword: str) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise SshConfigError(f"{keyword} {text!r} is not a number") from error


def _seconds(text: str) -> float:
    """Read a time as sshd_config(5) TIME FORMATS: `10`, `1m30s`."""
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    parts = re.findall(r"(\d+)([smhdw]?)", text.lower())
    if not parts or "".join(n + u for n, u in parts) != text.lower():
        raise SshConfigError(f"ConnectTimeout {text!r} is not a time")
    return float(sum(int(n) * units[u] for n, u in parts))


__all__ = ["HostConfig", "SshConfigError", "resolve"]

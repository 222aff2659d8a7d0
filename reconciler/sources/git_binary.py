"""The git binary on a bare mirror, with nothing of the repository's, the user's or the system's configuration at work.

Every command is a fixed argv, its data behind `--end-of-options` or on standard input; what must not be seen (a token)
travels in the environment of that one process. No checkout is ever made, so no hook, filter, attribute, submodule or link
of a repository is acted on; protocols are off but for the one that the operator's URL names. What a run prints is bounded
and so are its time and the files that it may write. Used by `git.py` alone.
"""

from __future__ import annotations

import base64
import os
import re
import resource
import selectors
import shlex
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from reconciler.core.errors import ReconcilerError, UsageError

READ_LIMIT_S: Final = 30.0
FETCH_LIMIT_S: Final = 120.0
MAX_FETCH_BYTES: Final = 512 * 2**20
"""What one fetch may write into a file. A repository of 10,000 specs is a few MiB; more than this is not specs."""
MAX_OUTPUT_BYTES: Final = 192 * 2**20
"""All specs at their bound (`directory.MAX_TOTAL_BYTES`) and their headers; a tree that unfolds without end stops here."""
TOKEN_BYTES: Final = 8192

_REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+@-]{0,199}\Z")
_SCP: Final = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*:(?!//)[^\s:]+\Z"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_SCHEMES: Final = frozenset({"https", "http", "ssh", "file"})
_SEEN: Final = re.compile(r"[\x21-\x7e]+\Z")
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class GitError(ReconcilerError):
    """git could not do what was asked of it; the message holds what it said, without credentials."""

    retryable = True


@dataclass(frozen=True, slots=True)
class Credentials:
    """How this installation shows who it is: files that the operator names, never values."""

    ssh_key: Path | None = None
    known_hosts: Path | None = None
    token_file: Path | None = None


def checked_url(url: str) -> str:
    """Give the URL as git gets it; a path becomes a file: URL.

    Raises:
        UsageError: It is none of the kinds that are used, could be read as an option, or holds a password.
    """
    if url.startswith("/") and _SEEN.match(url):
        return f"file://{url}"
    if _SCP.match(url) and "::" not in url and _SEEN.match(url):
        return url
    parts = urlsplit(url)
    try:
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
    host = parts.hostname or ""
    if (
        not _SEEN.match(url)
        or parts.scheme not in _SCHEMES
        or not port_is_right
        or (parts.scheme != "file" and not re.match(r"[A-Za-z0-9\[:]", host))
        or (parts.username or "x").startswith("-")
    ):
        message = f"{url!r} is no git URL that is used here: https://, ssh://, file://, user@host:path, or an absolute path"
        raise UsageError(message)
    if parts.password is not None or (parts.scheme in {"http", "https"} and parts.username):
        message = "a git URL may hold no user and password: others on this machine could read them. Put a token into a file and name it as `git_token_file` in the settings"
        raise UsageError(message)
    if parts.scheme == "http" and host not in LOOPBACK:
        message = f"{url!r}: http is unprotected, so that anybody on the way could decide what runs; use https or ssh"
        raise UsageError(message)
    return url


def checked_branch(branch: str) -> str:
    """Give a branch's name if it is one.

    Raises:
        UsageError: It could be an option, a range, a pattern, or something else than a branch.
    """
    bad = (
        not _REF.match(branch)
        or ".." in branch
        or "//" in branch
        or "@{" in branch
        or branch.endswith(("/", ".", ".lock"))
        or any(part.startswith(".") or part.endswith(".lock") for part in branch.split("/"))
    )
    if bad:
        message = f"{branch!r} is no branch name that is used here: letters, digits and . _ / + @ -, beginning with a letter or digit"
        raise UsageError(message)
    return branch


def checked_path(path: str) -> str:
    """Give a path inside the repository, without slashes around it; empty is the whole tree.

    Raises:
        UsageError: It leads out of the repository or cannot be a path there.
    """
    text = path.strip("/")
    parts = text.split("/") if text not in {"", "."} else []
    if (
        any(p in {"", ".", "..", ".git"} or p.startswith(("-", ":")) for p in parts)
        or not text.isprintable()
    ):
        message = f"{path!r} is no path inside a repository"
        raise UsageError(message)
    return "/".join(parts)


def checked_commit(commit: str) -> str:
    """Give a full commit id.

    Raises:
        UsageError: It is not one: an abbreviation could come to mean another commit.
    """
    if not _COMMIT.match(commit):
        message = f"{commit!r} is no full commit id (40 or 64 hex digits)"
        raise UsageError(message)
    return commit


@dataclass(frozen=True, slots=True)
class Git:
    """The git program on one bare mirror."""

    mirror: Path
    credentials: Credentials = Credentials()
    program: str = "git"

    def init(self) -> None:
        """Make the mirror, from no template."""
        self.mirror.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        argv = [
            self.program,
            "init",
            "--quiet",
            "--bare",
            "--template=",
            "--initial-branch=none",
            "--",
            str(self.mirror),
        ]
        self._run(argv, b"", self._environment({}), READ_LIMIT_S)

    def read(
        self,
        *words: str,
        stdin: bytes = b"",
        limit_s: float = READ_LIMIT_S,
        extra: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run a command that reads (or writes refs of) the mirror, and give what it printed.

        Raises:
            GitError: It failed, took too long, or printed too much.
        """
        argv = [self.program, f"--git-dir={self.mirror}", *words]
        return self._run(argv, stdin, self._environment(extra or {}), limit_s)

    def fetch(self, url: str, branch: str, into: str) -> None:
        """Bring one branch of the remote into one ref of the mirror, whatever became of its history.

        Raises:
            GitError: The remote is away, has no such branch, sends what is malformed or too large, or takes too long.
        """
        for left in self.mirror.glob("objects/pack/tmp_*"):
            left.unlink(missing_ok=True)  # Of a fetch that was cut off.
        refspec = f"+refs/heads/{branch}:{into}"
        argv = [
            self.program, f"--git-dir={self.mirror}", "fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head",
            "--no-auto-maintenance", "--no-show-forced-updates", "--atomic", "--end-of-options", url, refspec,
        ]  # fmt: skip
        self._run(argv, b"", self._environment(self._access(url)), FETCH_LIMIT_S)

    def push(self, url: str, ref: str) -> None:
        """Make a ref of the remote what it is here, whatever it was there: it must be one that only we write.

        Raises:
            GitError: The remote is away, or does not let us write.
        """
        argv = [
            self.program, f"--git-dir={self.mirror}", "push", "--quiet", "--no-verify", "--recurse-submodules=no", "--end-of-options",
            url, f"+{ref}:{ref}",
        ]  # fmt: skip
        self._run(argv, b"", self._environment(self._access(url)), FETCH_LIMIT_S)

    def tip(self, url: str, ref: str) -> str:
        """Say which commit a ref of the remote is; empty where there is none.

        Raises:
            GitError: The remote is away.
        """
        argv = [self.program, f"--git-dir={self.mirror}", "ls-remote", "--quiet", "--end-of-options", url, ref]  # fmt: skip
        printed = self._run(argv, b"", self._environment(self._access(url)), FETCH_LIMIT_S)
        rows = (line.split("\t") for line in printed.decode("utf-8", "replace").splitlines())
        found = [row[0] for row in rows if len(row) == 2 and row[1] == ref]
        return checked_commit(found[0]) if found else ""

    def push_leased(self, url: str, commit: str, ref: str, *, expected: str) -> None:
        """Make a ref of the remote a commit of the mirror, if it is still what was expected there (empty: it does not exist).

        Raises:
            GitError: The remote is away, lets us not write, or has another commit there by now.
        """
        argv = [
            self.program, f"--git-dir={self.mirror}", "push", "--quiet", "--no-verify", "--recurse-submodules=no",
            f"--force-with-lease={ref}:{expected}", "--end-of-options", url, f"{commit}:{ref}",
        ]  # fmt: skip
        self._run(argv, b"", self._environment(self._access(url)), FETCH_LIMIT_S)

    # -- how it is run ------------------------------------------------------------------------------------

    def _run(
        self, argv: Sequence[str], stdin: bytes, environment: Mapping[str, str], limit_s: float
    ) -> bytes:
        what = next((w for w in argv[1:] if not w.startswith("-")), "git")
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            try:
                process = subprocess.Popen(  # noqa: S603  (a fixed program, data behind --end-of-options)
                    argv,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=dict(environment),
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                message = f"{self.program} cannot be run: {error.strerror}"
                raise GitError(message) from error
        with process:
            try:
                _bound(process.pid)
                printed, said = _heard(process, what, limit_s)
            finally:
                _end_group(process)
        if process.returncode != 0:
            raise GitError(f"git {what} failed: {_said(said, process.returncode)}")
        return printed

    def _environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Give an environment of our own: of the user's only what ssh needs to find keys and an agent."""
        fixed = {
            "core.hooksPath": "/dev/null",
            "core.fsmonitor": "false",
            "core.askPass": "",
            "core.bigFileThreshold": "1m",
            "core.alternateRefsCommand": "",
            "core.protectHFS": "true",
            "core.protectNTFS": "true",
            "credential.helper": "",
            "fetch.fsckObjects": "true",
            "transfer.fsckObjects": "true",
            "fetch.recurseSubmodules": "false",
            "submodule.recurse": "false",
            "fetch.writeCommitGraph": "false",
            "gc.autoDetach": "false",
            "protocol.version": "2",
            "protocol.allow": "never",
            "transfer.bundleURI": "false",
            "http.followRedirects": "false",
            "http.lowSpeedLimit": "1",
            "http.lowSpeedTime": "30",
            "log.showSignature": "false",
            **settings,
        }
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": os.environ.get("HOME", "/nonexistent"),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_SYSTEM": "/dev/null",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_SSH_VARIANT": "ssh",
            "GIT_SSH_COMMAND": self._ssh(),
            "GIT_CONFIG_COUNT": str(len(fixed)),
        }
        if "SSH_AUTH_SOCK" in os.environ and self.credentials.ssh_key is None:
            environment["SSH_AUTH_SOCK"] = os.environ["SSH_AUTH_SOCK"]
        for number, (key, value) in enumerate(fixed.items()):
            environment[f"GIT_CONFIG_KEY_{number}"] = key
            environment[f"GIT_CONFIG_VALUE_{number}"] = value
        return environment

    def _ssh(self) -> str:
        words = [
            "ssh", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "-oForwardAgent=no", "-oForwardX11=no", "-oClearAllForwardings=yes",
            "-oPermitLocalCommand=no", "-oConnectTimeout=15", "-oServerAliveInterval=10", "-oServerAliveCountMax=3",
        ]  # fmt: skip
        if self.credentials.ssh_key is not None:
            words += [
                "-F",
                "/dev/null",
                "-oIdentitiesOnly=yes",
                f"-oIdentityFile={self.credentials.ssh_key}",
            ]
        if self.credentials.known_hosts is not None:
            words.append(f"-oUserKnownHostsFile={self.credentials.known_hosts}")
        return shlex.join(words)

    def _access(self, url: str) -> dict[str, str]:
        """Switch on the one protocol of this URL, and the token for its origin alone."""
        parts = urlsplit(url)
        scheme = parts.scheme if parts.scheme in _SCHEMES else "ssh"
        settings = {f"protocol.{scheme}.allow": "always"}
        if self.credentials.token_file is not None and scheme in {"https", "http"}:
            token = read_secret(self.credentials.token_file)
            user, _, word = token.rpartition(":")
            basic = base64.b64encode(f"{user or 'x-access-token'}:{word}".encode()).decode()
            settings[f"http.{scheme}://{parts.netloc}/.extraHeader"] = (
                f"Authorization: Basic {basic}"
            )
        return settings


def read_secret(path: Path) -> str:
    """Read one secret from a file that only its owner can read.

    Raises:
        GitError: It is not there, others may read it, or it is no single line.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(TOKEN_BYTES + 1)
    except OSError as error:
        raise GitError(f"{path}: cannot be read ({error.strerror})") from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in {0, os.getuid()}:
        raise GitError(f"{path}: others may read it; it must be yours or root's, mode 0600 or less")
    secret = text.strip()
    if (
        not secret
        or len(text) > TOKEN_BYTES
        or not secret.isascii()
        or not secret.decode().isprintable()
    ):
        raise GitError(f"{path}: holds no single line of text")
    return secret.decode()


def _bound(pid: int) -> None:
    """Bound what the process may write into one file: a pack of gigabytes ends the fetch, not the disk."""
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MAX_FETCH_BYTES, MAX_FETCH_BYTES))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        return


def _heard(process: subprocess.Popen[bytes], what: str, limit_s: float) -> tuple[bytes, bytes]:
    """Read what a process prints until it ends: all of its output within bounds, the end of what it says beside."""
    assert process.stdout is not None and process.stderr is not None, "both are pipes"  # noqa: PT018
    until = time.monotonic() + limit_s
    printed, said = bytearray(), b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        ready.register(process.stderr, selectors.EVENT_READ)
        while ready.get_map():
            left = until - time.monotonic()
            events = ready.select(left) if left > 0 else []
            if not events:
                raise GitError(f"git {what} took longer than {limit_s:g} s and was ended")
            for key, _ in events:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    ready.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    printed += chunk
                else:
                    said = (said + chunk)[-4096:]
            if len(printed) > MAX_OUTPUT_BYTES:
                raise GitError(
                    f"git {what} printed more than {MAX_OUTPUT_BYTES >> 20} MiB and was ended"
                )
    try:
        process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise GitError(f"git {what} took longer than {limit_s:g} s and was ended") from None
    return bytes(printed), said


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever git started and left (ssh, index-pack); nothing is left after a run that went well."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _said(text: bytes, status: int) -> str:
    """Give the end of what git said, in one line that a terminal can be shown."""
    lines = [
        line.strip()
        for line in text[-4096:].decode("utf-8", "replace").splitlines()
        if line.strip()
    ]
    shown = "; ".join(lines[-3:])
    plain = "".join(c if c.isprintable() else "?" for c in shown)
    return plain[-500:] or f"exit status {status}"

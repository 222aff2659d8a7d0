"""Talking to a helper over a transport: the fixed commands, the frame around each answer, what a silence means.

The login shell only ever sees one of the constants below; the request travels on standard input. Whatever a profile, a
banner or a locale warning prints around the frame is ignored, and an answer without its end mark is no answer (F39,
F45). An installed helper is kept running and asked again and again; a carried one answers once, or is kept as well
where it is asked often.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reconciler.core.errors import CommandFailedError, HostUnreachableError, OutcomeUnknownError
from reconciler.effects.ports import Answer, Request
from reconciler.helper import build
from reconciler.helper.records import PYTHON, helper_command
from reconciler.transports.base import Completed, Session, Transport

CARRIED_COMMAND = f"exec {PYTHON} -I -S -"
CARRIED_AND_KEPT_COMMAND = (
    f'exec {PYTHON} -I -S -c "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"'
)
CARRIED_AS_ROOT_COMMAND = f"exec sudo -n -- {PYTHON} -I -S -"

ANSWER_CAP_BYTES = 4 * 1024 * 1024
_BEGIN = re.compile(rb"@@reconciler-begin ([0-9a-f]{32}) ([0-9]{1,8})\n")

MUTATING = frozenset(
    {"claim", "learn", "record", "disarm", "stop", "signal", "install", "remove", "start", "deadline", "commit", "settle",
     "quarantine", "retire", "set-aside", "note-release", "relearn", "restart-container", "reset-gpu"}
)  # fmt: skip


def installed_command(digest: str, *, sudo: bool) -> str:
    """Give the one command that runs the installed helper; the sudoers line allows exactly this."""
    program = helper_command(digest)
    return f"exec sudo -n -- {program}" if sudo else f"exec {program}"


def wire(request: Request, nonce: str) -> dict[str, Any]:
    """Give the request as the helper reads it."""
    data: dict[str, Any] = {
        "format": 1,
        "nonce": nonce,
        "verb": request.verb,
        "args": dict(request.args),
    }
    for name in ("server", "fence", "boot_id", "not_after", "intent"):
        value = getattr(request, name)
        if value is not None:
            data[name] = value
    return data


def parse_frame(data: bytes, nonce: str) -> dict[str, Any] | None:
    """Find the answer to `nonce` in what came; None while it is not complete or does not check.

    Length and digest are both held against the line, so that a cut or garbled answer is none.
    """
    for match in _BEGIN.finditer(data):
        if match.group(1).decode() != nonce:
            continue
        start, length = match.end(), int(match.group(2))
        line = data[start : start + length]
        end = f"\n@@reconciler-end {nonce} {hashlib.sha256(line).hexdigest()[:16]}\n".encode()
        if len(line) == length and data[start + length : start + length + len(end)] == end:
            answer = json.loads(line)
            return answer if isinstance(answer, dict) else None
    return None


def as_answer(data: Mapping[str, Any]) -> Answer:
    """Read a framed answer; a helper that answers in another format is a helper that we cannot talk to."""
    return Answer(
        outcome=str(data["outcome"]),
        reason=str(data.get("reason") or ""),
        message=str(data.get("message") or ""),
        data=data.get("data") or {},
        boot_id=str(data.get("boot_id") or ""),
        boottime=float(data.get("boottime") or 0.0),
    )


@dataclass
class HelperChannel:
    """One layer's helper: installed where it can be, carried for what needs no installation.

    Which of the two is decided by `installed`: the digest that enrolment pinned, or None. `keep` carries the program once
    for all requests: sending and compiling it takes longer than a look.
    """

    host: str
    transport: Transport
    sudo: bool = False
    installed: str | None = None
    keep: bool = False
    fresh_nonce: Callable[[], str] = lambda: secrets.token_hex(16)
    _session: Session | None = field(default=None, repr=False)

    def call(self, request: Request, *, deadline_s: float) -> Answer:
        """Ask once. See `HostPort.call` for what is raised."""
        nonce = self.fresh_nonce()
        if self.installed is None and request.verb in MUTATING:
            message = "this host was never enrolled from here, so nothing can be changed on it: run `reconcile enrol` for it"
            raise CommandFailedError(self.host, message)
        if self.installed is None and not self.keep:
            return self._once(
                CARRIED_COMMAND, build.carried(wire(request, nonce)), nonce, deadline_s
            )
        return self._kept(request, nonce, deadline_s)

    def carried_as_root(self, request: Request, *, deadline_s: float) -> Answer:
        """Ask the carried helper with full rights, for enrolment only: no sudoers line of ours allows this."""
        nonce = self.fresh_nonce()
        command = CARRIED_AS_ROOT_COMMAND if self.sudo else CARRIED_COMMAND
        return self._once(command, build.carried(wire(request, nonce)), nonce, deadline_s)

    def close(self) -> None:
        """End the kept session, if there is one."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _once(self, command: str, stdin: bytes, nonce: str, deadline_s: float) -> Answer:
        done = self.transport.run(command, stdin, deadline_s=deadline_s)
        answer = parse_frame(done.stdout, nonce)
        if answer is not None:
            return as_answer(answer)
        raise self._no_answer(done)

    def _no_answer(self, done: Completed) -> Exception:
        """Explain a command that ended without an answer. With an exit status it ran and said no."""
        said = _last_line(done.stderr) or _last_line(done.stdout)
        if done.truncated:
            return OutcomeUnknownError(
                self.host, "the helper's output was cut off (more than the cap)"
            )
        if done.exit_status is None:
            return OutcomeUnknownError(
                self.host, f"the connection closed before the helper answered {said}"
            )
        return CommandFailedError(
            self.host, explain(done.exit_status, said), exit_status=done.exit_status
        )

    def _kept(self, request: Request, nonce: str, deadline_s: float) -> Answer:
        """Ask the running helper; start one when there is none. A session that breaks is never used again."""
        fresh = self._session is None
        line = json.dumps(wire(request, nonce), separators=(",", ":")).encode() + b"\n"
        if self._session is None and self.installed is not None:
            self._session = self.transport.open(installed_command(self.installed, sudo=self.sudo))
        elif self._session is None:
            self._session = self.transport.open(CARRIED_AND_KEPT_COMMAND)
            line = build.kept() + line
        session = self._session
        try:
            session.send(line)
            return self._receive(session, nonce, deadline_s)
        except HostUnreachableError:
            self.close()
            raise
        except OutcomeUnknownError as error:
            said = _last_line(session.stderr_tail())
            self.close()
            if fresh and (refusal := _start_refusal(said)):
                raise CommandFailedError(self.host, refusal) from error
            if not fresh and request.verb not in MUTATING:
                return self._kept(request, self.fresh_nonce(), deadline_s)
            raise

    def _receive(self, session: Session, nonce: str, deadline_s: float) -> Answer:
        data = bytearray()
        while True:
            chunk = session.receive(deadline_s)
            if not chunk:
                raise OutcomeUnknownError(self.host, "the helper ended before it answered")
            data += chunk
            if len(data) > ANSWER_CAP_BYTES:
                raise OutcomeUnknownError(self.host, "the helper's output passed the cap")
            if b"@@reconciler-end" in chunk or b"@@reconciler-end" in data[-256:]:
                answer = parse_frame(bytes(data), nonce)
                if answer is not None:
                    return as_answer(answer)


def _last_line(data: bytes) -> str:
    lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""


def _start_refusal(said: str) -> str | None:
    """Recognise what sudo, the shell and python say when they never ran the helper; None when it may have run."""
    lowered = said.lower()
    for needle, sentence in (
        (
            "a password is required",
            "sudo wants a password: `reconcile enrol` prints the one sudoers line that is needed",
        ),
        (
            "must have a tty",
            "sudo wants a terminal (requiretty): exempt this user from it in sudoers",
        ),
        (
            "not allowed to execute",
            "sudo does not allow this user to run the helper: run `reconcile enrol` again",
        ),
        (
            "is not in the sudoers file",
            "this user may not use sudo: `reconcile enrol` prints the one line that is needed",
        ),
        (
            "can't open file",
            "the helper is not installed in this version: run `reconcile enrol` again",
        ),
        (
            "no module named 'helper-",
            "the helper is not installed whole: run `reconcile enrol` again",
        ),
        (
            "permission denied",
            "the helper may not be read by this user: run it through sudo, see `reconcile enrol`",
        ),
        ("python3: not found", f"there is no {PYTHON} on the host"),
        ("python3: no such file", f"there is no {PYTHON} on the host"),
        ("sudo: not found", "there is no sudo on the host; log in as root, or install it"),
    ):
        if needle in lowered:
            return f"{sentence} (it said: {said})"
    return None


def explain(status: int, said: str) -> str:
    """Say in a sentence why a command that should have run the helper ended with this status."""
    known = _start_refusal(said)
    if known:
        return known
    if status == 127:
        return f"there is no {PYTHON} on the host, or no sudo (it said: {said})"
    return f"the helper could not be run (exit status {status}): {said or 'it said nothing'}"


def encode_body(body: bytes | None) -> str | None:
    """Give an HTTP body as the helper's `fetch` takes it."""
    return None if body is None else base64.b64encode(body).decode()

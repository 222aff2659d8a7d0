"""The one tree of exceptions, and how an error of others is told.

An outcome that the design expects is a value (a verdict, a refusal, `Unknown`). An exception means
"could not be done or could not be known"; a bug is an `assert`.

    ReconcilerError
    ├── UsageError            the command line asks for something that makes no sense      (exit 64)
    ├── SpecError             what the user wrote is wrong; carries every problem found    (exit 65)
    ├── PolicyError           the operator's settings forbid it
    ├── HostError             one host could not be asked or did not answer as it must
    │   ├── HostUnreachableError   nothing was executed
    │   ├── HostIdentityError      another key or another machine than the one enrolled
    │   ├── CommandFailedError     the command ran and said no
    │   └── OutcomeUnknownError    sent, and no complete answer came back: it may have happened
    ├── StoreError            local state cannot be read or written
    └── LeaseHeldError        somebody else is changing this server
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass


def plain(error: BaseException) -> str:
    """Give an error's words on one line, without the operating system's number; its kind where it has none."""
    words = re.sub(r"\[Errno -?\d+\] ?", "", str(error))
    return re.sub(r"\s+", " ", words).strip() or type(error).__name__


class ReconcilerError(Exception):
    """Base of all errors that this product raises on purpose.

    `retryable` says whether trying the same again can help without anybody changing anything.
    """

    retryable = False


class UsageError(ReconcilerError):
    """The command line asks for something that makes no sense."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing wrong with what the user wrote, with its place.

    `line` and `column` count from 1; 0 means that no place is known.
    """

    file: str
    line: int
    column: int
    message: str
    server: str | None = None

    def __str__(self) -> str:
        """Give the form that editors and compilers use: file:line:column: message."""
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.message}"


class SpecError(ReconcilerError):
    """What the user wrote is wrong. Carries every problem found, not the first only."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.file, p.line, p.column, p.message)))
        super().__init__("\n".join(str(p) for p in self.problems))


class PolicyError(ReconcilerError):
    """The operator's settings forbid what the specs ask for."""


class HostError(ReconcilerError):
    """One host could not be asked, or did not answer as it must."""

    def __init__(self, host: str, message: str) -> None:
        self.host = host
        super().__init__(f"{host}: {message}")


class HostUnreachableError(HostError):
    """The host could not be reached; nothing was executed there."""

    retryable = True


class HostIdentityError(HostError):
    """The host's key or identity is not the one that was enrolled; nothing was executed there."""


class CommandFailedError(HostError):
    """The command ran to its end and said no (sudo refused, no python3, exit status not 0)."""

    def __init__(self, host: str, message: str, *, exit_status: int | None = None) -> None:
        self.exit_status = exit_status
        super().__init__(host, message)


class OutcomeUnknownError(HostError):
    """The request was sent and no complete answer came back: it may or may not have happened."""

    retryable = True


class StoreError(ReconcilerError):
    """Local state cannot be read or written."""


_CURES = {
    errno.ENOTDIR: "a part of this path is a file and no directory: remove that file, or name another directory (`state_dir` in the settings)",
    errno.EEXIST: "a part of this path is a file and no directory: remove that file, or name another directory (`state_dir` in the settings)",
    errno.EISDIR: "remove it",
    errno.EACCES: "let this user read and write there, or name another directory (`state_dir` in the settings)",
    errno.EPERM: "let this user read and write there, or name another directory (`state_dir` in the settings)",
    errno.EROFS: "that file system is read-only: make it writable, or name another directory (`state_dir` in the settings)",
    errno.ENOSPC: "make room on that file system",
    errno.EDQUOT: "make room within this user's quota",
}


def local_trouble(error: OSError) -> str:
    """Say what is wrong with a file of this machine, and what cures it: `(Permission denied): let this user ...`."""
    words = error.strerror or plain(error)
    cure = _CURES.get(error.errno or 0)
    return f"({words}): {cure}" if cure else f"({words})"


class LeaseHeldError(ReconcilerError):
    """Somebody else is changing this server."""

    retryable = True

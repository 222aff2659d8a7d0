"""Opening what lies encrypted in the repository, with the operator's key and the `age` and `sops` programs.

Both are run with a fixed argv and an environment of our own; the encrypted bytes go in on standard input and the secret comes
back on standard output, so that it is in this process's memory and nowhere else on this machine. Nothing that a program
says is repeated: what is shown of a failure is ours. `reconcile.py` asks just before a rollout; what the repository may
name at all was judged by `core/sealed.py`.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reconciler.core.errors import ReconcilerError
from reconciler.core.sealed import Sealed

LIMIT_S: Final = 20.0
"""Opening takes milliseconds; a plugin that asks for a touch on a token has no person here to ask."""
MAX_SECRET_BYTES: Final = 8192
"""The longest single value; a token has a hundred bytes, and what the programs print cannot exceed what they are given."""
_WRONG_KEY: Final = (
    b"no identity matched",
    b"did not match any of the recipients",
    b"failed to get the data key",
)
_ALTERED: Final = (
    b"mac mismatch",
    b"failed to decrypt and authenticate",
    b"message authentication failed",
)


class UnsealError(ReconcilerError):
    """A secret of the repository cannot be opened. The message holds neither the secret nor what the program said."""


@dataclass(frozen=True, slots=True)
class Unsealer:
    """Opens secrets with one key file of the operator's."""

    key_file: Path | None = None
    age: str = "age"
    sops: str = "sops"
    limit_s: float = LIMIT_S

    def __call__(self, sealed: Sealed) -> str:
        """Give the secret: one line of text.

        Raises:
            UnsealError: No key, no program, the wrong key, altered bytes, or something that is no single line of text.
        """
        key = self._key(sealed)
        if sealed.form == "age":
            argv = [self.age, "--decrypt", "--identity", str(key)]
        else:
            syntax = "json" if sealed.file.endswith(".json") else "yaml"
            way = "".join(f'["{word}"]' for word in sealed.key)
            argv = [self.sops, "--decrypt", "--input-type", syntax, "--output-type", syntax, "--extract", way, "/dev/stdin"]  # fmt: skip
        return _one_line(self._printed(argv, sealed, key), sealed)

    def _key(self, sealed: Sealed) -> Path:
        if self.key_file is None:
            message = f"{sealed.file} cannot be opened: no `age_key_file` is set in the operator's settings"
            raise UnsealError(message)
        try:
            found = self.key_file.stat()
        except OSError as error:
            message = (
                f"{self.key_file}: the key that opens secrets cannot be read ({error.strerror})"
            )
            raise UnsealError(message) from None
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in {0, os.getuid()}:
            message = f"{self.key_file}: others may read the key that opens secrets; it must be yours or root's, mode 0600 or less"
            raise UnsealError(message)
        return self.key_file

    def _printed(self, argv: list[str], sealed: Sealed, key: Path) -> bytes:
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": "/nonexistent",  # So that no other key than the operator's is tried.
            "LC_ALL": "C",
            "SOPS_AGE_KEY_FILE": str(key),
        }
        try:
            process = subprocess.Popen(  # noqa: S603  (a fixed program; the keys' grammar was checked)
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            message = f"{sealed.file} cannot be opened: {argv[0]} cannot be run here ({error.strerror}); install it, or put it in PATH"
            raise UnsealError(message) from None
        with process:
            try:
                printed, said = process.communicate(sealed.content, timeout=self.limit_s)
            except subprocess.TimeoutExpired:
                message = f"{sealed.file} cannot be opened: {argv[0]} took longer than {self.limit_s:g} s and was ended"
                raise UnsealError(message) from None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise UnsealError(
                f"{sealed.file} cannot be opened: {_why(said, process.returncode, argv[0])}"
            )
        return printed


def _why(said: bytes, status: int, program: str) -> str:
    text = said.lower()
    if any(words in text for words in _WRONG_KEY):
        return "it is encrypted for other keys than the one in `age_key_file`"
    if any(words in text for words in _ALTERED):
        return "it was altered after it was encrypted"
    return f"{program} ended with status {status}; run it by hand on that file to see why"


def _one_line(printed: bytes, sealed: Sealed) -> str:
    """Take the line's end off; what an environment variable cannot hold is refused here, before anything stops."""
    try:
        text = printed.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or len(printed) > MAX_SECRET_BYTES or not text.isprintable():
        message = (
            f"what {sealed.file} holds is not one line of text of at most {MAX_SECRET_BYTES} bytes"
        )
        raise UnsealError(message)
    return text

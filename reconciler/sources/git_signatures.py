"""Whose signatures count: the operator's keys, put where git's checkers look, and nobody else's.

A file is an OpenSSH public key (or an allowed-signers file), or an exported OpenPGP key. They come from the operator's
settings and are never read from the repository, which could then vouch for itself.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reconciler.core.errors import plain
from reconciler.sources.git_binary import GitError

KEY_BYTES: Final = 1 << 20
IMPORT_LIMIT_S: Final = 30.0
_SSH_KEY: Final = re.compile(
    r"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+(?: .*)?\Z"
)


@dataclass(frozen=True, slots=True)
class Signers:
    """The files that the operator names; none means that no signature is asked for."""

    files: tuple[Path, ...]

    def prepared(self, folder: Path) -> Mapping[str, str]:
        """Put the keys where git looks, and give the settings that make it look there and nowhere else.

        Raises:
            GitError: A file cannot be read or is no key: then nothing can be accepted.
        """
        contents = [_content(path) for path in self.files]
        digest = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
        place = folder / digest
        if not (place / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            place.mkdir(parents=True, mode=0o700)
            _lay_out(place, dict(zip(self.files, contents, strict=True)))
            (place / "ready").touch()
        return {
            "gpg.ssh.allowedSignersFile": str(place / "allowed_signers"),
            "gpg.program": str(place / "gpg"),
            "gpg.minTrustLevel": "fully",
        }


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise GitError(
            f"the signing key {path} cannot be read ({error.strerror}); nothing is accepted without it"
        ) from error
    if len(content) > KEY_BYTES:
        raise GitError(f"the signing key {path} is larger than {KEY_BYTES >> 20} MiB")
    return content


def _lay_out(place: Path, contents: Mapping[Path, bytes]) -> None:
    lines: list[str] = []
    pgp: list[Path] = []
    for path, content in contents.items():
        if b"BEGIN PGP PUBLIC KEY BLOCK" in content or content[:1] in {b"\x98", b"\x99", b"\xc6"}:
            pgp.append(path)
        else:
            lines += _ssh_lines(path, content)
    (place / "allowed_signers").write_text("".join(f"{line}\n" for line in lines))
    home = place / "gnupg"
    home.mkdir(mode=0o700)
    (home / "gpg.conf").write_text("trust-model always\nno-auto-key-retrieve\nno-autostart\n")
    program = place / "gpg"
    program.write_text(
        f'#!/bin/sh\nexec gpg --homedir {shlex.quote(str(home))} --no-autostart "$@"\n'
    )
    program.chmod(0o700)
    # Made elsewhere and moved: gpg wants to name an agent's socket beside the ring, and a long path cannot name one.
    with tempfile.TemporaryDirectory(prefix="gpg-") as short:
        for path in pgp:
            _import(Path(short), path)
        ring = Path(short) / "pubring.kbx"
        if ring.exists():
            shutil.copy(ring, home / ring.name)


def _ssh_lines(path: Path, content: bytes) -> list[str]:
    """Read OpenSSH keys as signers of anything in git's namespace; lines that name principals stay as they are."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise GitError(f"{path} is neither an OpenSSH public key nor an OpenPGP one") from error
    lines = []
    for line in (raw.strip() for raw in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if _SSH_KEY.match(line):
            kind, key = line.split()[:2]
            lines.append(f'* namespaces="git" {kind} {key}')
        elif any(_SSH_KEY.match(line[at + 1 :]) for at, c in enumerate(line) if c == " "):
            lines.append(line)
        else:
            raise GitError(
                f"{path} is neither an OpenSSH public key, nor an allowed-signers file, nor an OpenPGP key"
            )
    if not lines:
        raise GitError(f"{path} holds no key")
    return lines


def _import(home: Path, path: Path) -> None:
    argv = [
        "gpg",
        "--homedir",
        str(home),
        "--batch",
        "--quiet",
        "--no-autostart",
        "--import",
        "--",
        str(path),
    ]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=IMPORT_LIMIT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"gpg cannot be run for the signing key {path}: {plain(error)}") from error
    if done.returncode != 0:
        said = done.stderr[-300:].decode("utf-8", "replace").strip()
        raise GitError(
            f"gpg cannot read the signing key {path} ({said}); nothing is accepted without it"
        )

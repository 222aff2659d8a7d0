"""Host keys that somebody vouched for: the operator's store, and `~/.ssh/known_hosts` after it.

Both are in the known_hosts format, so that `ssh` can use the store and an operator can read it. The
store wins: the first file that names a host decides, so that a stale line of a user's own file cannot
overrule what was enrolled. A revoked key is refused wherever it is revoked. Nothing here trusts on first
use; `reconcile enrol` calls `pin` after a person compared the fingerprint.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hashlib
import hmac
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from reconciler.core.errors import StoreError, local_trouble


@dataclass(frozen=True, slots=True, order=True)
class HostKey:
    """A public host key, as it travels."""

    algorithm: str
    blob: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Give the form that `ssh-keygen -l` prints: `SHA256:…`."""
        digest = hashlib.sha256(self.blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")

    def __str__(self) -> str:
        return f"{self.algorithm} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Pinned:
    """What the files say about one host. `certified` says that a certificate authority is named for it."""

    keys: tuple[HostKey, ...] = ()
    revoked: tuple[HostKey, ...] = ()
    certified: bool = False
    source: Path | None = None


class _Marker(Enum):
    NONE = ""
    AUTHORITY = "@cert-authority"
    REVOKED = "@revoked"


@dataclass(frozen=True, slots=True)
class _Line:
    marker: _Marker
    patterns: tuple[str, ...]
    key: HostKey

    def names(self, wanted: str) -> bool:
        """Say whether this line is about `wanted`; a negated pattern that matches wins."""
        found = False
        for pattern in self.patterns:
            if pattern.startswith("!") and _matches(pattern[1:], wanted):
                return False
            found = found or _matches(pattern, wanted)
        return found


@dataclass(frozen=True, slots=True)
class HostKeys:
    """The files to look in, the most trusted one first. They are read at each look-up."""

    files: tuple[Path, ...]
    user_files: tuple[Path, ...] = ()
    """Read after those, unless the OpenSSH configuration names others for a host (UserKnownHostsFile)."""
    global_files: tuple[Path, ...] = ()

    def lookup(self, name: str, port: int, *, named: tuple[Path, ...] | None = None) -> Pinned:
        """Return what is known of the host that is called `name` at `port`.

        `named` are the files that the OpenSSH configuration names for it, in place of the user's own; None: it names none.

        Raises:
            StoreError: A file is there and cannot be read: then nothing is known, and nobody is trusted.
        """
        wanted = host_label(name, port)
        revoked: list[HostKey] = []
        chosen: Pinned | None = None
        user_files = self.user_files if named is None else named
        for file in (*self.files, *user_files, *self.global_files):
            lines = [line for line in _read(file) if line.names(wanted)]
            revoked += [line.key for line in lines if line.marker is _Marker.REVOKED]
            keys = tuple(line.key for line in lines if line.marker is _Marker.NONE)
            certified = any(line.marker is _Marker.AUTHORITY for line in lines)
            if chosen is None and (keys or certified):
                chosen = Pinned(keys=keys, certified=certified, source=file)
        chosen = chosen or Pinned()
        return Pinned(chosen.keys, tuple(revoked), chosen.certified, chosen.source)


def host_label(name: str, port: int) -> str:
    """Return the name as known_hosts writes it: the port only where it is not 22."""
    return name.lower() if port == 22 else f"[{name.lower()}]:{port}"


def pin(store: Path, name: str, port: int, keys: Iterable[HostKey]) -> None:
    """Make `keys` the only ones that `store` holds for this host. The file is replaced in one step.

    Raises:
        StoreError: The file could not be read or written; it is as it was.
    """
    label = host_label(name, port)
    kept = [text for text, line in _lines(store) if line is None or not _only_names(line, label)]
    added = [f"{label} {k.algorithm} {base64.b64encode(k.blob).decode('ascii')}" for k in keys]
    _replace(store, "".join(f"{text}\n" for text in kept + added))


def _only_names(line: _Line, label: str) -> bool:
    return line.marker is _Marker.NONE and all(_matches(p, label) for p in line.patterns)


def _replace(file: Path, text: str) -> None:
    """Write by temporary file, fsync and rename. mkstemp makes it 0600 from its first moment."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            Path(temporary).replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise StoreError(
            f"{file}: host keys could not be written {local_trouble(error)}"
        ) from error


def _read(file: Path) -> Iterator[_Line]:
    return (line for _, line in _lines(file) if line is not None)


def _lines(file: Path) -> Iterator[tuple[str, _Line | None]]:
    """Yield each line of the file as text and, where it holds a key, as what it says."""
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{file}: host keys could not be read {local_trouble(error)}") from error
    for line in text.splitlines():
        yield line, _parse(line)


def _parse(text: str) -> _Line | None:
    """Read one line; a comment, and a line that makes no sense, name nobody."""
    fields = text.split()
    marker = _Marker.NONE
    if fields and fields[0].startswith("@"):
        # A marker that is not known must not turn into trust.
        if fields[0] not in {_Marker.AUTHORITY.value, _Marker.REVOKED.value}:
            return None
        marker = _Marker(fields.pop(0))
    if len(fields) < 3 or fields[0].startswith("#"):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return _Line(marker, tuple(fields[0].split(",")), HostKey(fields[1], blob))


def _matches(pattern: str, wanted: str) -> bool:
    if pattern.startswith("|1|"):
        return _hash_matches(pattern, wanted)
    # Only * and ? are wild in known_hosts; [ and ] are part of names with a port.
    return fnmatch.fnmatchcase(wanted, pattern.lower().replace("[", "[[]"))


def _hash_matches(pattern: str, wanted: str) -> bool:
    try:
        _, _, salt, digest = pattern.split("|")
        expected = base64.b64decode(digest, validate=True)
        found = hmac.digest(base64.b64decode(salt, validate=True), wanted.encode(), "sha1")
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(expected, found)


__all__ = ["HostKey", "HostKeys", "Pinned", "host_label", "pin"]

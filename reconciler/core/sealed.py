"""Secrets that lie encrypted in the repository: where each stands, whether it is encrypted at all, and its identity. Pure.

Nothing here can open one. What identifies it is the SHA-256 of what is encrypted: of a whole age file, and of the one
value in a SOPS file, so that a neighbour's new password restarts nobody else. `fleet.py` asks while it reads the
specs; `sources/unseal.py` opens what a rollout needs;
where the host keeps it says `engines/base.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Literal

from reconciler.core import yaml_text
from reconciler.core.spec import Secret, Server

SUFFIXES: Final = (".age", ".sops.yaml", ".sops.yml", ".sops.json")
"""What a file is called that holds secrets and no specs; others are never looked into for one."""
MAX_BYTES: Final = 64 * 1024
"""Of a file with secrets. A token has a hundred bytes; whoever keeps a thousand in one file may split it."""
_AGE_HEADS: Final = (b"age-encryption.org/v1\n", b"-----BEGIN AGE ENCRYPTED FILE-----")
_OTHER_KEYS: Final = ("kms", "gcp_kms", "azure_kv", "hc_vault", "hckms", "pgp", "key_groups")
"""Of SOPS's metadata: opening such a file calls addresses that are written in it, or another program."""


class NotSealedError(ValueError):
    """A file that is named as an encrypted one cannot be used as that; the message says why."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One encrypted value: the whole file that holds it, and for SOPS the way to it."""

    form: Literal["age", "sops"]
    file: str
    content: bytes = field(repr=False)
    key: tuple[str, ...] = ()


def is_sealed(file: str) -> bool:
    """Say whether a file holds secrets, by its name."""
    return file.endswith(SUFFIXES)


def secrets_of(server: Server) -> dict[str, Secret]:
    """Give all secrets of a server by the dotted path of their field."""
    found = {f"secrets.{name}": secret for name, secret in sorted(server.secrets.items())}
    return (
        found
        if server.listen.api_key is None
        else {**found, "listen.api_key": server.listen.api_key}
    )


def with_secrets(server: Server, known: Mapping[str, Secret]) -> Server:
    """Give the server with some of its secrets, by the dotted path of their field, exchanged."""
    own = {name: known.get(f"secrets.{name}", secret) for name, secret in server.secrets.items()}
    key = known.get("listen.api_key", server.listen.api_key)
    listen = server.listen.model_copy(update={"api_key": key})
    return server.model_copy(update={"secrets": own, "listen": listen})


def digests_in(spec: str) -> frozenset[str]:
    """Give the digests of all encrypted secrets that a recorded spec names."""
    data = json.loads(spec) if spec else {}
    found = [*(data.get("secrets") or {}).values(), (data.get("listen") or {}).get("api_key")]
    return frozenset(s["sha256"] for s in found if isinstance(s, Mapping) and s.get("sha256"))


@dataclass
class SealedFiles:
    """The files with secrets of one load. Each SOPS file is parsed once, however many servers name it."""

    files: Mapping[str, bytes]
    root: str = ""
    _trees: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    def find(self, secret: Secret) -> tuple[str, Sealed]:
        """Give the digest of what a secret's reference leads to, and the file to open.

        Raises:
            NotSealedError: There is no such file, it is too large, or what is named is not encrypted in the way it is said to be.
        """
        name = secret.age or secret.sops
        assert name is not None, "only a reference into the repository is looked for"
        file = self.root + name
        content = self.files.get(file)
        if content is None:
            message = f"there is no file `{name}` below the folder of the specs (or it is a link, which is not followed)"
            raise NotSealedError(message)
        if len(content) > MAX_BYTES:
            message = f"`{name}` has more than {MAX_BYTES >> 10} KiB, the most that a file with secrets may have"
            raise NotSealedError(message)
        if secret.age is not None:
            if not content.startswith(_AGE_HEADS):
                message = f"`{name}` is not encrypted by age. If it holds the secret in clear, take that for known to everybody who reads the repository, and change it"
                raise NotSealedError(message)
            return sha256(content).hexdigest(), Sealed("age", file, content)
        key = tuple((secret.key or "").split("."))
        value = self._value(file, name, content, key)
        return sha256(value.encode()).hexdigest(), Sealed("sops", file, content, key)

    def _value(self, file: str, name: str, content: bytes, key: tuple[str, ...]) -> str:
        if file not in self._trees:
            self._trees[file] = _tree(name, content)
        at: Any = self._trees[file]
        for word in key:
            at = at.get(word) if isinstance(at, Mapping) else None
        if at is None:
            message = f"`{name}` holds no `{'.'.join(key)}`"
            raise NotSealedError(message)
        if not isinstance(at, str) or not at.startswith("ENC[") or not at.endswith("]"):
            what = (
                "is not one value" if isinstance(at, Mapping | tuple | list) else "is not encrypted"
            )
            message = f"`{'.'.join(key)}` in `{name}` {what}"
            raise NotSealedError(message)
        return at


def _tree(name: str, content: bytes) -> Mapping[str, Any]:
    """Read a SOPS file's own structure, and hold it to keys of age."""
    data: Any = None
    if name.endswith(".json"):
        try:
            data = json.loads(content)
        except (ValueError, RecursionError):
            data = None
    else:
        parsed = yaml_text.parse(content, name)
        if not parsed.problems and len(parsed.documents) == 1:
            data = yaml_text.plain(parsed.documents[0].root)
    about = data.get("sops") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(about, Mapping) or not about.get("mac"):
        message = f"`{name}` is not a file that SOPS encrypted. If it holds secrets in clear, take them for known to everybody who reads the repository, and change them"
        raise NotSealedError(message)
    others = [k for k in _OTHER_KEYS if about.get(k)]
    if others or not about.get("age"):
        message = f"`{name}` is not encrypted for age alone ({', '.join(others) or 'no age recipient'}): with other keys SOPS would call what the file names; use `sops updatekeys`"
        raise NotSealedError(message)
    return data


__all__ = [
    "NotSealedError",
    "Sealed",
    "SealedFiles",
    "digests_in",
    "is_sealed",
    "secrets_of",
    "with_secrets",
]

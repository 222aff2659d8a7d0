"""What should run on a host, fully resolved, in bytes.

A `Target` is self-contained: everything that a rollout needs to bring a revision up, with git, registries
and this machine's files away. It is what the intent carries and what the host keeps of a revision.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from reconciler.core.demands import Demands

ORIGINAL = "original"
"""The revision name of a unit that was there before us: adopted, never rendered by this product."""


@dataclass(frozen=True, slots=True)
class SecretsFile:
    """A file that the host makes from other files on the host; no value ever leaves it.

    `form` is "env" (an EnvironmentFile) or "yaml" (an engine's config file); `entries` are (name, path).
    """

    form: str
    entries: tuple[tuple[str, str], ...]
    user: str


@dataclass(frozen=True, slots=True)
class Target:
    """One revision of one server, ready to install.

    `argv` and `environment` are what systemd must report once the unit is loaded (S24); empty for an
    `ORIGINAL`, whose text we did not write. `spec` is the canonical JSON of the merged server document. `paths` must
    exist on the host, the first of `argv` must be executable there, and `flags` must be known to the engine that
    `check_argv` asks for help; preflight looks at all of them, and at what `demands` names, before anything stops.
    `flag_history` has those of the flags whose versions are known: "older" for one that newer engines lost, else "newer".
    """

    revision: str
    unit_text: str
    argv: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    secrets: tuple[SecretsFile, ...] = ()
    spec: str = ""
    gpu_uuids: tuple[str, ...] = ()
    port: int | None = None
    user: str | None = None
    paths: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    flag_history: tuple[tuple[str, str], ...] = ()
    check_argv: tuple[str, ...] = ()
    demands: Demands | None = None

    @property
    def is_original(self) -> bool:
        """Say whether this is the unit as it was before us."""
        return self.revision == ORIGINAL

    @property
    def text_sha256(self) -> str:
        """Give the digest by which a unit's text is compared."""
        return text_sha256(self.unit_text)


def text_sha256(text: str) -> str:
    """Give the hex SHA-256 of a unit's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long each wait of a rollout may take, in seconds; from `timeouts:` of the spec."""

    drain_s: float = 60.0
    stop_s: float = 120.0
    release_s: float = 60.0
    settle_s: float = 2.0
    ready_s: float = 600.0
    gate_s: float = 300.0

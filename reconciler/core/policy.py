"""What the operator allows the specs to ask for. The repository does not decide this: `settings.py` does.

Without grants every path may claim everything (one person, one repository). With grants each file needs one
that names what it claims; what no grant names is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from reconciler.core.sealed import secrets_of

if TYPE_CHECKING:
    from reconciler.core.spec import Host, Server

ANY: Final = ("*",)


@dataclass(frozen=True, slots=True)
class Grant:
    """What the files under one path pattern may claim.

    In `path` a `*` stands for anything within one folder and `**` for anything below; elsewhere `*` stands
    for anything. `ports` are inclusive ranges. A GPU is compared as it is written.
    """

    path: str
    hosts: tuple[str, ...] = ANY
    gpus: tuple[str, ...] = ANY
    unit_prefixes: tuple[str, ...] = ("",)
    ports: tuple[tuple[int, int], ...] = ((1, 65535),)
    model_sources: tuple[str, ...] = ANY
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """All grants, and what holds where no grant says otherwise."""

    grants: tuple[Grant, ...] = ()
    trust_remote_code: bool = False

    def refusals(self, server: Server, file: str) -> list[tuple[str, str]]:
        """Say what this file may not ask for: (dotted field path, message)."""
        grant = self._grant(file)
        if grant is None:
            return [("", f"the operator's settings grant `{file}` nothing")]
        found = _outside(server, grant) if self.grants else []
        trusted = self.trust_remote_code or grant.trust_remote_code
        flag = next((f for f in server.args if f.replace("_", "-").startswith("trust")), None)
        if flag is not None and server.args[flag] is not False and not trusted:
            found.append(
                (
                    f"args.{flag}",
                    "runs code that comes with the model; the operator's settings do not allow it",
                )
            )
        return found

    def refuses_host(self, host: Host, file: str) -> str | None:
        """Say why this file may not describe this host, or None where it may."""
        grant = self._grant(file)
        if grant is None:
            return f"the operator's settings grant `{file}` nothing"
        return (
            None
            if _one_of(host.name, grant.hosts)
            else f"the operator's settings do not let `{file}` claim it"
        )

    def _grant(self, file: str) -> Grant | None:
        """Give the first grant whose pattern fits; the order in the settings is the order of trust."""
        if not self.grants:
            return Grant("**")
        return next((grant for grant in self.grants if _pattern(grant.path, "/").match(file)), None)


def _outside(server: Server, grant: Grant) -> list[tuple[str, str]]:
    suffix = f"the operator's settings do not give `{grant.path}`"
    found: list[tuple[str, str]] = []
    if not _one_of(server.host, grant.hosts):
        found.append(("host", f"{suffix} this host"))
    found.extend(
        (f"gpus.{i}", f"{suffix} this GPU")
        for i, gpu in enumerate(server.gpus)
        if not _one_of(str(gpu), grant.gpus)
    )
    if not server.unit.startswith(grant.unit_prefixes):
        found.append(("unit", f"{suffix} a unit of this name"))
    if not any(first <= server.listen.port <= last for first, last in grant.ports):
        found.append(("listen.port", f"{suffix} this port"))
    if server.model is not None and not _one_of(server.model, grant.model_sources):
        found.append(("model", f"{suffix} this source of models"))
    for path, secret in secrets_of(server).items():
        # Whoever may name a file here can read it on their own server: so it must be theirs.
        file = secret.age or secret.sops
        if file is not None and not _pattern(grant.path, "/").match(file):
            found.append((f"{path}.{'age' if secret.age else 'sops'}", f"{suffix} this file"))
    return found


def _one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(_pattern(pattern, "").match(name) for pattern in patterns)


@lru_cache(maxsize=1024)
def _pattern(pattern: str, separator: str) -> re.Pattern[str]:
    """Compile a pattern of `*` and `**`; where there is a separator, `*` stops at it."""
    one = f"[^{separator}]*" if separator else ".*"
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": one}
    return re.compile("".join(known.get(p, re.escape(p)) for p in parts) + r"\Z", re.DOTALL)

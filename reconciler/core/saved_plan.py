"""A plan as a file: shown now, reviewed by somebody, and carried out later if nothing has moved. Pure.

It names everything that the plan was made from: the commit, the specs, the hosts' identities and this tool's version; and the
plan's own hash, by which `--expect` knows it, covers what was live. The specs are read and the hosts are asked again when it
is applied, and it is refused unless all of it is the same: also the very first time, when there is no earlier state to
compare with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reconciler.core.errors import Problem, SpecError
from reconciler.core.live import Known
from reconciler.core.survey import Survey

FORMAT_VERSION: Final = "1.0"
MAX_PLAN_BYTES: Final = 64 * 1024 * 1024


class SavedPlan(BaseModel):
    """What a plan was made from, what it was asked for, and which plan it is."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    format_version: str = FORMAT_VERSION
    type: str = "saved_plan"
    hash: str = Field(pattern=r"^[0-9a-f]{12}$")
    tool_version: str
    created_at: float
    commit: str = ""
    specs: str
    specs_version: str
    servers: tuple[str, ...] = ()
    adopt: bool = False
    overwrite: bool = False
    hosts: Mapping[str, str]
    plan: dict[str, Any] = Field(default_factory=dict)
    """For whoever reads the file. Nothing is carried out from it, but what it shows must be what would be carried out."""


def identities(found: Survey) -> dict[str, str]:
    """Name each machine by a digest of its id, empty where it could not be asked."""
    return {h.host.name: _identity(h.live) for h in found.hosts}


def _identity(live: Any) -> str:
    identity = live.identity if live is not None else None
    if not isinstance(identity, Known):
        return ""
    machine: str = identity.value.machine_id
    return hashlib.sha256(f"reconcile host {machine}".encode()).hexdigest()[:32] if machine else ""


def moved(saved: SavedPlan, now: SavedPlan) -> tuple[str, ...]:
    """Say everything that is no longer as it was when the plan was made; empty when the plan may be carried out."""
    found = []
    if saved.tool_version != now.tool_version:
        found.append(
            f"it was made by version {saved.tool_version[:40]} of this tool, and this is {now.tool_version}"
        )
    if saved.commit != now.commit:
        found.append(
            f"the commit is {now.commit[:12] or 'none'}, and was {saved.commit[:12] or 'none'}"
        )
    if saved.specs_version != now.specs_version:
        found.append("the specs have changed")
    for name in sorted({*saved.hosts, *now.hosts}):
        before, after = saved.hosts.get(name), now.hosts.get(name)
        if not after:
            found.append(f"{name} cannot be asked which machine it is")
        elif before != after:
            found.append(f"{name} is another machine than it was")
    if saved.hash != now.hash:
        why = "" if found else "what is live has moved: "
        found.append(f"{why}the plan is now {now.hash}, and was {saved.hash}")
    elif _shown(saved.plan) != _shown(now.plan):
        found.append(
            "the plan that the file shows is not the one that would be carried out: somebody has edited it"
        )
    return tuple(found)


_SHOWN: Final = (
    "server",
    "host",
    "unit",
    "action",
    "revision",
    "gpus",
    "changes",
    "unit_diff",
    "steps",
)


def _shown(plan: Mapping[str, Any]) -> str:
    """Give what a reviewer decides by, in one spelling; estimates and remarks may differ from day to day."""
    servers = plan.get("servers")
    rows = [
        {key: row.get(key) for key in _SHOWN} if isinstance(row, Mapping) else None
        for row in (servers if isinstance(servers, list) else ())
    ]
    return json.dumps(rows, sort_keys=True)


def plan_text(plan: SavedPlan) -> str:
    """Write a plan as a file's text."""
    return json.dumps(plan.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


def read_plan(content: bytes, name: str) -> SavedPlan:
    """Read a plan back.

    Raises:
        SpecError: It is none, is damaged, or has a format that this version does not know.
    """
    try:
        data = json.loads(content) if len(content) <= MAX_PLAN_BYTES else None
    except (ValueError, RecursionError):
        data = None
    why = ""
    if not isinstance(data, dict) or data.get("type") != "saved_plan":
        why = "is no saved plan; `reconcile --dry-run --out FILE` makes one"
    elif str(data.get("format_version")).partition(".")[0] != "1":
        why = f"has the format {str(data.get('format_version'))[:20]!r}; this version reads 1"
    else:
        try:
            return SavedPlan.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            why = f"is damaged at {'.'.join(map(str, first['loc']))[:80]}: {first['msg'][:80]}"
    raise SpecError([Problem(name, 0, 0, why)])

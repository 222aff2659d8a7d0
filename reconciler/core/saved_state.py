"""The state of a fleet as a pass found it, saved so that a build without credentials for any host can plan against it. Pure.

It is what a helper answers, cut down to what planning reads: the same code then makes the same plan of it, with the same
hash. Left out is whatever could be a secret or a right: fences and leases, environments, argv, journals, holders, the text
of units that this tool did not write. A part that is left out reads as unknown, never as absent or free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reconciler.core.desired import text_sha256
from reconciler.core.errors import Problem, SpecError
from reconciler.core.revision import digest
from reconciler.core.survey import HostSurvey, Survey

FORMAT_VERSION: Final = "1.0"
STALE_AFTER_S: Final = 3_600.0
"""A daemon publishes a state every few minutes; an hour without one means that something is wrong with it."""
FUTURE_S: Final = 300.0
"""More than this ahead of us is no age at all: one of the two clocks is wrong."""
MAX_STATE_BYTES: Final = 256 * 1024 * 1024
OURS: Final = "# Made by reconcile for the server "
LEFT_OUT: Final = {"unknown": "not kept in a saved state"}


class SavedHost(BaseModel):
    """One host: what a pass found there, or why it found nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    silence: str = ""
    observed: dict[str, Any] = Field(default_factory=dict)


class SavedState(BaseModel):
    """A fleet at one moment. `digest` covers the hosts, so that half a file or an edited one is noticed."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    format_version: str = FORMAT_VERSION
    type: str = "state"
    tool_version: str = ""
    taken_at: float
    commit: str = ""
    digest: str = ""
    hosts: dict[str, SavedHost]
    spec_wrong: dict[str, str] = Field(default_factory=dict)
    """The servers whose specs were wrong, and how: what is said of them here was wanted by an earlier spec."""

    def age_s(self, now: float) -> float:
        """Give how old it is; never less than nothing."""
        return max(0.0, now - self.taken_at)

    def is_stale(self, now: float) -> bool:
        """Say whether it is too old to be trusted without a word, or from a clock that is wrong."""
        return now - self.taken_at > STALE_AFTER_S or self.taken_at - now > FUTURE_S


def state_of(
    found: Survey,
    *,
    taken_at: float,
    tool_version: str,
    commit: str = "",
    spec_wrong: Mapping[str, str] | None = None,
) -> SavedState:
    """Save what a pass found. `commit` names what was wanted by then, where that came from git."""
    hosts = {h.host.name: _saved(h) for h in found.hosts}
    return SavedState(
        tool_version=tool_version,
        taken_at=taken_at,
        commit=commit,
        digest=_digest(hosts),
        hosts=hosts,
        spec_wrong={name: _masked(why) for name, why in (spec_wrong or {}).items()},
    )


def state_text(state: SavedState) -> str:
    """Write a saved state as a file's text."""
    return json.dumps(state.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def read_state(content: bytes, name: str) -> SavedState:
    """Read a saved state back.

    Raises:
        SpecError: It is none, is damaged, or has a format that this version does not know.
    """
    why = ""
    try:
        data = json.loads(content) if len(content) <= MAX_STATE_BYTES else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("type") != "state":
        why = "is no saved state; `reconcile status --export FILE` makes one"
    elif str(data.get("format_version")).partition(".")[0] != "1":
        why = f"has the format {str(data.get('format_version'))[:20]!r}; this version reads 1"
    if not why:
        try:
            state = SavedState.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            why = f"is damaged at {'.'.join(map(str, first['loc']))[:80]}: {first['msg'][:80]}"
        else:
            if state.digest == _digest(state.hosts):
                return state
            why = "is damaged: its digest is not that of its hosts; make it again"
    raise SpecError([Problem(name, 0, 0, why)])


def _digest(hosts: Mapping[str, SavedHost]) -> str:
    return digest({name: host.model_dump(mode="json") for name, host in hosts.items()})


# -- what is kept ------------------------------------------------------------------------------------------------

_UNIT: Final = (
    "LoadState", "ActiveState", "SubState", "Result", "MainPID", "NRestarts", "InvocationID", "ControlGroup", "Restart",
    "TimeoutStopUSec", "FragmentPath", "DropInPaths", "UnitFileState", "NeedDaemonReload", "ConditionResult", "Job",
    "ExecMainCode", "ExecMainStatus", "TriggeredBy", "OnFailureOf", "OnSuccessOf", "UpheldBy", "OnFailure", "KillMode", "SendSIGKILL",
)  # fmt: skip
_GPU: Final = ("uuid", "index", "bus_id", "minor", "used_mib", "total_mib")
_APPLIED: Final = (
    "version",
    "revision",
    "invocation",
    "at",
    "unit_sha256",
    "spec",
    "policy_digest",
)
_HISTORY: Final = ("version", "outcome", "reason", "revision", "previous", "at", "took_s", "outage_s", "steps")  # fmt: skip
_HOLD: Final = ("version", "owner", "reason", "at", "until")
_REJECTED: Final = ("version", "revision", "reason", "sentence", "at", "definite")
_TOKEN: Final = re.compile(
    r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|eyJ|nvapi-)[\w.-]{4,}"
)


def _saved(found: HostSurvey) -> SavedHost:
    if found.live is None:
        return SavedHost(silence=_masked(found.silence) or "not observed")
    raw = found.live.raw
    servers = raw.get("servers")
    return SavedHost(
        observed={
            "gpus": _known(raw.get("gpus"), _gpus),
            "baselines": _known(raw.get("baselines"), _baselines),
            "installed": _known(raw.get("installed"), _plain),
            **({"quarantine": _known(raw["quarantine"], _plain)} if "quarantine" in raw else {}),
            "servers": {
                str(name): _server(section)
                for name, section in (servers.items() if isinstance(servers, Mapping) else ())
                if isinstance(section, Mapping)
            },
        }
    )


def _known(section: Any, keep: Any) -> dict[str, Any]:
    """Keep a part of what is known; what is unknown stays so, with its reason."""
    if not isinstance(section, Mapping):
        return dict(LEFT_OUT)
    if "known" not in section:
        return {"unknown": _masked(str(section.get("unknown", "")))}
    try:
        return {"known": keep(section["known"])}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {"unknown": "could not be saved: it has an unexpected shape"}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _picked(value: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {k: _text(value[k]) for k in keys if k in value}


def _text(value: Any) -> Any:
    return _masked(value) if isinstance(value, str) else value


def _masked(text: str) -> str:
    """Hide what looks like a token: a sentence may quote what an engine printed as it died."""
    return _TOKEN.sub("***", text)


def _gpus(value: Any) -> dict[str, Any]:
    return {"driver": value.get("driver"), "gpus": [_picked(g, _GPU) for g in value["gpus"]]}


def _baselines(value: Any) -> dict[str, Any]:
    return {uuid: _picked(b, ("used_mib", "driver")) for uuid, b in value.items()}


def _server(section: Mapping[str, Any]) -> dict[str, Any]:
    records = _known(section.get("records"), _records)
    if _under_way(section.get("records")):
        # Its intent is the whole of a rollout, with what was there before; a build plans nothing on top of that.
        records = {"unknown": "a rollout was under way when the state was saved"}
    produced = frozenset((records.get("known") or {}).get("produced") or ())
    return {
        "unit_name": section.get("unit_name", ""),
        "unit": _known(section.get("unit"), lambda v: _picked(v, _UNIT)),
        "files": _known(section.get("files"), _files),
        "permanent": _known(section.get("permanent"), lambda v: _place(v, produced)),
        "trial": _known(section.get("trial"), lambda v: _place(v, produced)),
        "command": LEFT_OUT,
        "processes": _known(
            section.get("processes"), lambda v: [_picked(p, ("pid", "exe", "comm")) for p in v]
        ),
        "listeners": _known(
            section.get("listeners"), lambda v: [_picked(p, ("address", "pids", "units")) for p in v]
        ),
        "journal": LEFT_OUT,
        "records": records,
        "history": _known(section.get("history"), lambda v: [_picked(h, _HISTORY) for h in v]),
    }  # fmt: skip


def _under_way(section: Any) -> bool:
    known = section.get("known") if isinstance(section, Mapping) else None
    return isinstance(known, Mapping) and bool(known.get("intent"))


def _files(value: Any) -> dict[str, Any]:
    return {
        "fragment": value["fragment"],
        "text": None,
        "link": value["link"],
        "package": value.get("package"),
        "drop_ins": [{"path": d["path"], "text": ""} for d in value["drop_ins"]],
    }


def _place(value: Any, produced: frozenset[str]) -> dict[str, Any] | None:
    """Keep the text of a unit that this tool wrote; of another one only that it is there, and its digest."""
    if value is None:
        return None
    text = value["text"]
    if not isinstance(text, str):
        return dict(value)
    sha = text_sha256(text)
    if sha not in produced or not text.startswith(OURS):
        text = f"# Not made by this tool, so its text is not kept in a saved state. SHA-256 {sha}\n"
    return {"path": value.get("path"), "text": text}


def _records(value: Any) -> dict[str, Any]:
    applied = value.get("applied")
    guard = value.get("guard")
    bindings = value.get("bindings")
    return {
        "applied": {**_picked(applied, _APPLIED), "boot_id": ""} if applied else None,
        "attempted": _picked(value["attempted"], ("version", "revision", "at")) if value.get("attempted") else None,
        "intent": None,
        "rejected": [_picked(r, _REJECTED) for r in value.get("rejected") or ()],
        "fence": None,
        "lease": None,
        "deadline": None,
        "bindings": _picked(bindings, ("version", "names", "gpus", "unit", "port")) if bindings else None,
        "hold": _picked(value["hold"], _HOLD) if value.get("hold") else None,
        "guard": {"reason": _text(guard.get("reason"))} if guard else None,
        "revisions": list(value.get("revisions") or ()),
        "produced": list(value.get("produced") or ()),
        "disarmed": value.get("disarmed") is True,
    }  # fmt: skip


@cache
def unknown_server() -> Mapping[str, Any]:
    """Give what is known of a server that was not looked at: nothing, and that is said of each part."""
    why = {"unknown": "it was in no spec when the state was saved"}
    parts = ("unit", "files", "permanent", "trial", "command", "processes", "listeners", "journal", "records")  # fmt: skip
    return {**dict.fromkeys(parts, why), "unit_name": "", "history": {"known": []}}

"""Is a set of GPUs proven free, and if not, whose turn is it? Pure; the judgement itself is `helper/readings.py`'s.

The controller, the guard on the host and the dead-man timer all ask the same function, so that they cannot
disagree. Here are only the controller's own parts: one sample out of one observation, and the ladder's next rung
(`gpu-release.md` section 6, rungs 4 to 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reconciler.core.attempt import Member, Sample
from reconciler.core.live import Known, LiveHost
from reconciler.helper import readings

GRACE_S = 3.0
"""How long own left-overs get to go by themselves before they are asked to: engines end their workers within seconds."""

TERM_S = 20.0
"""How long a left-over gets between SIGTERM and SIGKILL, at most; a third of `timeouts.release` if that is less."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the samples say of one server's GPUs.

    `state` is released, not-released, wedged, fault or unknown. `owned` are (pid, start_ticks) of left-overs that are
    provably this server's own; `others` are sentences about everybody else who holds one of the GPUs.
    """

    state: str
    reasons: tuple[str, ...]
    owned: tuple[tuple[int, int], ...]
    others: tuple[str, ...]


def sample_of(live: LiveHost, at: float) -> Sample:
    """Keep of an observation what release is judged by."""
    raw = live.raw
    servers = (raw.get("servers") or {}).items()
    return Sample(
        at,
        {
            "at": at,
            "gpus": raw.get("gpus"),
            "apps": raw.get("apps"),
            "holders": raw.get("holders"),
            "kernel": raw.get("kernel"),
            "units": {name: server.get("unit") for name, server in servers},
            "processes": {name: server.get("processes") for name, server in servers},
        },
    )


def judge(samples: Sequence[Sample], member: Member, live: LiveHost, settle_s: float) -> Verdict:
    """Judge one member's GPUs by the samples so far."""
    server = live.server(member.server)
    context = ownership_context(member.server, member.unit, server.context, live)
    verdict = readings.released(
        [_of_server(s, member.server) for s in samples],
        list(member.gpus),
        live.baselines,
        context,
        settle_s,
    )
    owned, others = [], []
    for holder in verdict["holders"]:
        match holder.get("class"):
            case "owned":
                owned.append((int(holder["pid"]), int(holder["start_ticks"])))
            case "infra":
                pass
            case cls:
                others.append(_sentence(holder, str(cls)))
    return Verdict(str(verdict["verdict"]), tuple(verdict["reasons"]), tuple(owned), tuple(others))


def _of_server(sample: Sample, server: str) -> dict[str, Any]:
    """Give a sample as the judgement takes it: of one server's unit."""
    raw = sample.raw
    return {**raw, "unit": raw["units"].get(server), "processes": raw["processes"].get(server)}


def ownership_context(
    server: str, unit: str, context: Mapping[str, Any], live: LiveHost
) -> dict[str, Any]:
    """Collect what proves a process to be a server's own, for `readings.classify_holder`."""
    unit_state = context.get("unit") or {}
    bindings = context.get("bindings") or {}
    apps = live.raw.get("apps") or {}
    container = live.identity.value.container if isinstance(live.identity, Known) else "unknown"
    host = (live.raw.get("host") or {}).get("known") or {}
    return {
        "server": server,
        "unit": unit,
        "control_group": unit_state.get("ControlGroup") or f"/system.slice/{unit}",
        "snapshot": context.get("snapshot"),
        "invocations": context.get("invocations") or [],
        "uid": bindings.get("uid"),
        "gid": bindings.get("gid"),
        "boot_id": live.boot_id,
        "host_mount_ns": live.raw.get("host_mount_ns"),
        "container": None if live.raw.get("joined") else container,
        "protect": host.get("protect") or [],
        "apps_pids": [a.get("pid") for a in apps.get("known") or ()],
    }


def _sentence(holder: Mapping[str, Any], cls: str) -> str:
    command = str(holder.get("exe") or holder.get("comm") or "?")
    group = str(holder.get("cgroup") or "?")
    return f"pid {holder.get('pid')} ({command[:80]}, in {group[:120]}) is {cls}: {holder.get('why', '')}".rstrip(
        ": "
    )


def rung(
    verdict: Verdict, waited_s: float, escalated: Sequence[tuple[str, float]], release_s: float
) -> str:
    """Say what the ladder does next: "wait", "term" or "kill".

    `waited_s` counts from the moment the unit was down; `escalated` holds (signal, waited_s) of what was sent.
    Only left-overs that are provably own are ever signalled, TERM first: a kill inside a kernel launch is what
    latches cards (`gpu-release.md`, the note under the table).
    """
    if not verdict.owned:
        return "wait"
    sent = dict(escalated)
    if "TERM" not in sent:
        return "term" if waited_s >= min(GRACE_S, release_s / 6) else "wait"
    if "KILL" not in sent:
        return "kill" if waited_s - sent["TERM"] >= min(TERM_S, release_s / 3) else "wait"
    return "wait"

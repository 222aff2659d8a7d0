"""Is a set of GPUs proven free, and if not, whose turn is it? Pure; the judgement itself is `helper/readings.py`'s.

The controller, the guard on the host and the dead-man timer all ask the same function, so that they cannot
disagree. Here are only the controller's own parts: one sample out of one observation, and the ladder's next rung
(`gpu-release.md` section 6, rungs 4 to 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reconciler.core.attempt import Member, Sample, Wedge
from reconciler.core.live import Known, LiveHost
from reconciler.helper import readings

GRACE_S = 3.0
"""How long own left-overs get to go by themselves before they are asked to: engines end their workers within seconds."""

TERM_S = 20.0
"""How long a left-over gets between SIGTERM and SIGKILL, at most; a third of `timeouts.release` if that is less."""


REASONS_KEPT = 10

LAST_S = 5.0
"""What one with a SIGKILL pending gets when the time of a release is up: a healthy one is gone in milliseconds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the samples say of one server's GPUs.

    `state` is released, not-released, wedged, fault or unknown. `owned` are (pid, start_ticks) of left-overs that are
    provably this server's own; `others` are sentences about everybody else who holds one of the GPUs; `holders` are all as they
    were seen. `mps` says that an MPS server is among them, which forbids every signal.
    """

    state: str
    reasons: tuple[str, ...]
    owned: tuple[tuple[int, int], ...]
    others: tuple[str, ...]
    holders: tuple[Mapping[str, Any], ...] = ()
    mps: bool = False


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


def judge(
    samples: Sequence[Sample],
    member: Member,
    live: LiveHost,
    settle_s: float,
    *,
    gpus: Sequence[str] = (),
    dies_within_s: float | None = None,
) -> Verdict:
    """Judge one member's GPUs (or only those named) by the samples so far.

    `dies_within_s`: how long one with a SIGKILL pending gets before it counts as wedged, where the time is up earlier than usual.
    """
    server = live.server(member.server)
    context = ownership_context(member.server, member.unit, server.context, live)
    context["dies_within_s"] = dies_within_s
    verdict = readings.released(
        [_of_server(s, member.server) for s in samples],
        list(gpus or member.gpus),
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
    return Verdict(
        str(verdict["verdict"]),
        tuple(verdict["reasons"]),
        tuple(owned),
        tuple(others),
        tuple(verdict["holders"]),
        mps=any(readings.is_mps(h) for h in holders_on(live, gpus or member.gpus)),
    )


def judge_each(samples: Sequence[Sample], member: Member, live: LiveHost) -> dict[str, Verdict]:
    """Judge each of a member's GPUs by itself: one may be wedged while its neighbours are free."""
    settle_s = member.budgets.settle_s
    return {
        uuid: judge(samples, member, live, settle_s, gpus=(uuid,), dies_within_s=LAST_S)
        for uuid in member.gpus
    }


def wedges_of(samples: Sequence[Sample], member: Member, live: LiveHost) -> tuple[Wedge, ...]:
    """Name the GPUs that neither waiting nor signals will free, to be quarantined."""
    found = []
    for uuid, verdict in judge_each(samples, member, live).items():
        if verdict.state in {"wedged", "fault"}:
            pids = tuple(int(h["pid"]) for h in verdict.holders if h.get("class") != "infra")
            reasons = verdict.reasons[:REASONS_KEPT]
            found.append(Wedge(member.server, (uuid,), verdict.state, reasons, pids))
    return tuple(found)


def holders_on(live: LiveHost, gpus: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Give everybody who has one of these GPUs open, or only a control node: that cannot be pinned to other cards."""
    cards = live.gpus.value if isinstance(live.gpus, Known) else ()
    minors = {g.minor for g in cards if g.uuid in gpus}
    scan = (live.raw.get("holders") or {}).get("known") or {}
    return tuple(
        holder
        for holder in scan.get("holders") or ()
        if not holder.get("minors") or minors & set(holder["minors"])
    )


def strangers_on(
    live: LiveHost, server: str, unit: str, context: Mapping[str, Any], gpus: Sequence[str]
) -> tuple[str, ...]:
    """Say who else has a card of a server open that is provably not its own; who cannot be judged is not accused."""
    judged = ownership_context(server, unit, context, live)
    found = []
    for holder in holders_on(live, gpus):
        cls, why = readings.classify_holder(dict(holder), judged)
        if cls == "foreign" and holder.get("minors"):
            who = str(holder.get("exe") or holder.get("comm") or "a process")[:80]
            found.append(f"pid {holder.get('pid')} ({who}, in {holder.get('cgroup')}) has a GPU of it open ({why}); it is never touched")  # fmt: skip
    return tuple(sorted(found))


def trouble_of(card: Mapping[str, Any]) -> str | None:
    """Say what a card says of itself that no server may start on; None when it says nothing of the kind."""
    action = card.get("recovery_action")
    if card.get("fault"):
        return f"the driver says {card['fault']}"
    if action not in {None, "None"}:
        return f"the driver asks for {action}"
    return None


def quarantine_sentence(uuid: str, mark: Mapping[str, Any]) -> str:
    """Say that a card is quarantined, why, and how that ends."""
    why = "; ".join(map(str, mark.get("reasons") or ())) or "no reason was recorded"
    ends = (
        "the host lifts it by itself once it proves the GPU free"
        if mark.get("kind") == "wedged"
        else "it ends with a reset or a reboot"
    )
    return f"{uuid} is quarantined ({why}); {ends}, or `reconcile release HOST --gpus {uuid}` proves it"


def cursor_of(live: LiveHost) -> str:
    """Say where the kernel log stands; empty where this layer has none."""
    known = (live.raw.get("kernel") or {}).get("known") or {}
    return str(known.get("cursor") or "")


def idle_use(live: LiveHost, gpus: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Give what each of these GPUs uses now."""
    cards = live.gpus.value if isinstance(live.gpus, Known) else ()
    return tuple((g.uuid, g.used_mib) for g in cards if g.uuid in gpus and g.used_mib is not None)


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
    if not verdict.owned or verdict.mps:
        return "wait"  # A client that ends with work in flight can leave its MPS server and its peers undefined.
    sent = dict(escalated)
    if "TERM" not in sent:
        return "term" if waited_s >= min(GRACE_S, release_s / 6) else "wait"
    if "KILL" not in sent:
        return "kill" if waited_s - sent["TERM"] >= min(TERM_S, release_s / 3) else "wait"
    return "wait"

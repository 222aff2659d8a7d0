"""How the fleet stands, for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from reconciler.core.conditions import Outcome, Reason
from reconciler.core.diff import SyncStatus, sync_status
from reconciler.core.live import Known, LiveHost
from reconciler.core.plan import Action
from reconciler.core.release_plan import DRIFT_MIB
from reconciler.views.machine import drift_json
from reconciler.views.release import evidence_lines
from reconciler.views.terminal import safe, visible

if TYPE_CHECKING:
    from reconciler.core.plan import ServerPlan
    from reconciler.core.survey import HostSurvey, Survey

COLOUR = {
    SyncStatus.IN_SYNC: "green",
    SyncStatus.OUT_OF_SYNC: "yellow",
    SyncStatus.UNVERIFIED: "yellow",
    SyncStatus.ABSENT: "yellow",
    SyncStatus.ON_HOLD: "yellow",
}


def stand(plan: ServerPlan, live: LiveHost | None) -> SyncStatus:
    """Say how a server stands, in one word."""
    found = live.servers.get(plan.wish.server) if live is not None else None
    if found is None:
        return SyncStatus.UNKNOWN
    records = found.known_records
    applied = records.applied if records else None
    status = sync_status(plan.wish.target, found, applied, plan.wish.excuse)
    if plan.reason is Reason.SPEC_INVALID and status is not SyncStatus.UNKNOWN:
        return SyncStatus.SPEC_WRONG
    down = found.phase in {"down", "not-found"}
    if down and plan.reason is Reason.HOLD and status is not SyncStatus.UNKNOWN:
        return SyncStatus.ON_HOLD
    if plan.reason is Reason.ORPHANED and status is SyncStatus.IN_SYNC:
        return SyncStatus.DOWN  # What no spec names is in sync with nothing.
    moved = any(d.what == "other-flags" for d in plan.drift)
    return SyncStatus.DRIFTED if moved and status is SyncStatus.IN_SYNC else status


TITLES = ("SERVER", "HOST", "STATUS", "UNIT", "APPLIED", "GPUS", "WHAT")
WHAT_LEAST = 30
"""Columns that a sentence needs; where less is left beside the others, it stands below them."""


def status_lines(found: Survey, width: int | None) -> list[str]:
    """Show how every server stands, in markup: a row each, or a paragraph each where `width` is too narrow for rows.

    Without a width a row is one line, however long: what reads it cuts lines apart itself.
    """
    rows = [
        (_row(plan, host), stand(plan, host.live)) for host in found.hosts for plan in host.plans
    ]
    widths = [max(len(row[i]) for row in (TITLES, *(r for r, _ in rows))) for i in range(6)]
    beside = sum(widths) + 2 * len(widths)
    if width is not None and width - beside < WHAT_LEAST:
        return [line for row, status in rows for line in _paragraph(row, status, width)]
    lines = [_columns(TITLES, widths, None) + TITLES[-1]]
    for row, status in rows:
        first, *more = _wrapped(row[-1], None if width is None else width - beside)
        lines.append(_columns(row, widths, status) + safe(first))
        lines += [" " * beside + safe(line) for line in more]
    return lines


def _row(plan: ServerPlan, host: HostSurvey) -> tuple[str, ...]:
    told = [d.sentence for d in plan.drift]
    waits = plan.action is Action.RESUME or plan.outcome is Outcome.WAITING
    if waits or plan.reason is Reason.SPEC_INVALID:
        told.insert(0, plan.sentence)  # It says why the host is as it is.
    what = "; ".join(told) or plan.sentence
    cells = (
        plan.wish.server,
        plan.wish.host,
        stand(plan, host.live).value,
        _phase(plan, host),
        plan.applied[:12] or "-",
        gpu_text(plan, host),
        what,
    )
    return tuple(visible(cell) for cell in cells)


def _columns(row: Sequence[str], widths: Sequence[int], status: SyncStatus | None) -> str:
    cells = [safe(cell.ljust(size)) for cell, size in zip(row, widths, strict=False)]
    if status is not None:
        cells[2] = f"[{COLOUR.get(status, 'red')}]{cells[2]}[/]"
    return "  ".join([*cells, ""])


def _paragraph(row: Sequence[str], status: SyncStatus, width: int) -> list[str]:
    """Show one server below each other: who and where, how it stands, then what little depends on."""
    server, host, stands, unit, applied, gpus, what = row
    colour = COLOUR.get(status, "red")
    facts = f"unit {unit}, applied {applied}, GPUs {gpus}"
    head = f"{server} on {host}: "
    lines = [f"[bold]{safe(server)}[/] on {safe(host)}: [{colour}]{stands}[/]"]
    if len(head) + len(stands) > width:
        lines = [f"[bold]{safe(server)}[/]", f"  on {safe(host)}: [{colour}]{stands}[/]"]
    return [
        *lines,
        *(f"  {safe(line)}" for text in (facts, what) for line in _wrapped(text, width - 2)),
    ]


def _wrapped(text: str, width: int | None) -> list[str]:
    return [text] if width is None else wrap(text, max(width, 20), break_on_hyphens=False) or [""]


def quarantine_lines(found: Survey) -> list[str]:
    """Show every GPU that cannot be proven usable, and every floor that has risen since its baseline was learned."""
    lines = []
    for host in found.hosts:
        name = safe(host.host.name)
        for gpu in _host_json(host)["gpus"]:
            title = f"{name}: GPU {gpu['index']} {safe(gpu['uuid'])}"
            if gpu["quarantined"] is not None:
                mark = gpu["quarantined"]
                lines.append(f"[red]Quarantined[/] {title}: {safe('; '.join(mark['reasons']))}")
                for layer, reading in _layers(mark.get("evidence")):
                    lines += evidence_lines(layer, reading)
                lines.append(
                    f"      a proof of release lifts it: `reconcile release {name} --gpus {safe(gpu['uuid'])}`"
                )
            if (gpu["drift_mib"] or 0) > DRIFT_MIB:
                lines.append(
                    f"[yellow]floor[/] {title}: idle at {gpu['baseline_mib']} MiB when learned, {gpu['drift_mib']} MiB more at its last release"
                )
    return lines


def _layers(evidence: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Give the evidence of a mark by layer: a rollout's was taken beside the unit, a release's on both."""
    if not isinstance(evidence, Mapping):
        return []
    if "known" in evidence or "unknown" in evidence:
        return [("inner", evidence)]
    return [(layer, reading) for layer, reading in evidence.items() if isinstance(reading, Mapping)]


def _phase(plan: ServerPlan, host: HostSurvey) -> str:
    return host.live.server(plan.wish.server).phase if host.live is not None else "?"


def gpu_text(plan: ServerPlan, host: HostSurvey) -> str:
    """Show each GPU of a server as index:used/total in MiB."""
    if host.live is None or not isinstance(host.live.gpus, Known):
        return "?"
    bound = host.live.bound.get(plan.wish.server, {}).get("gpus")
    uuids = plan.wish.target.gpu_uuids if plan.wish.target is not None else bound
    if not isinstance(uuids, list | tuple):
        return "?"
    cards = {g.uuid: g for g in host.live.gpus.value}
    shown = (cards.get(uuid) for uuid in uuids)
    return (
        " ".join("?" if g is None else f"{g.index}:{g.used_mib}/{g.total_mib}" for g in shown)
        or "-"
    )


def nowhere_lines(nowhere: Mapping[str, str]) -> list[str]:
    """Show the servers with a wrong spec that no host has told of."""
    return [f"[red]{safe(name)}[/]: {safe(why)}" for name, why in sorted(nowhere.items())]


def status_json(found: Survey, nowhere: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Give the status as one document; `nowhere` are the servers with a wrong spec that no host has told of."""
    return {
        "format_version": "1.0",
        "type": "status",
        "servers": [_server_json(p, h) for h in found.hosts for p in h.plans],
        "hosts": [_host_json(h) for h in found.hosts],
        "spec_wrong": dict(nowhere or {}),
    }


def _server_json(plan: ServerPlan, host: HostSurvey) -> dict[str, Any]:
    return {
        "server": plan.wish.server,
        "host": plan.wish.host,
        "status": stand(plan, host.live).value,
        "phase": _phase(plan, host),
        "applied": plan.applied or None,
        "desired": plan.wish.target.revision if plan.wish.target else None,
        "next": plan.action.value,
        "sentence": plan.sentence,
        "drift": [drift_json(d) for d in plan.drift],
        "running_with": _running_with(plan),
    }


def _running_with(plan: ServerPlan) -> dict[str, Any]:
    """Say whether the running engine was heard of, and by which answer."""
    running = plan.wish.running_with
    return {"source": running.source or None, "unknown": running.unknown or None}


def _host_json(host: HostSurvey) -> dict[str, Any]:
    live = host.live
    gpus = live.gpus.value if live is not None and isinstance(live.gpus, Known) else ()
    known = live is not None and isinstance(live.quarantine, Known)
    marks = live.quarantine.value if live is not None and isinstance(live.quarantine, Known) else {}
    return {
        "host": host.host.name,
        "reachable": not host.silence,
        "why": host.silence or None,
        "gpus": [
            {
                "uuid": g.uuid,
                "index": g.index,
                "used_mib": g.used_mib,
                "total_mib": g.total_mib,
                "baseline_mib": _baseline(live, g.uuid),
                "drift_mib": _drift(live, g.uuid),
                "status": "Quarantined" if g.uuid in marks else "Ok" if known else "Unknown",
                "quarantined": dict(marks[g.uuid]) if g.uuid in marks else None,
            }
            for g in gpus
        ],
    }


def _baseline(live: LiveHost | None, uuid: str) -> Any:
    return live.baselines.get(uuid, {}).get("used_mib") if live is not None else None


def _drift(live: LiveHost | None, uuid: str) -> int | None:
    """Give how far above its baseline a card was when it was last proven free; None where no rollout tells."""
    baseline = _baseline(live, uuid)
    if live is None or not isinstance(baseline, int):
        return None
    told = [
        (float(h.get("at") or 0), idle[uuid])
        for server in live.servers.values()
        for h in server.history
        if isinstance(idle := h.get("idle_mib"), Mapping) and isinstance(idle.get(uuid), int)
    ]
    return max(told)[1] - baseline if told else None


def history_lines(server: str, history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Show past rollouts, the newest last."""
    if not history:
        return [f"no rollout of {safe(server)} is recorded on its host"]
    lines = []
    for entry in history:
        at = datetime.fromtimestamp(float(entry.get("at") or 0), tz=UTC).strftime(
            "%Y-%m-%d %H:%M:%SZ"
        )
        outage = entry.get("outage_s")
        down = f", out for {outage:.1f} s" if isinstance(outage, int | float) else ""
        took = entry.get("took_s")
        spent = f" in {took:.1f} s" if isinstance(took, int | float) else ""
        by = f" by {entry['by']}" if entry.get("by") else ""
        revision = str(entry.get("revision") or "")[:12]
        lines.append(
            f"{at}  {safe(entry.get('outcome'))}{safe(by)}  {safe(revision)}{spent}{down}  {safe(entry.get('sentence') or '')}"
        )
    return lines

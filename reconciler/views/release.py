"""What a person and a program are shown of a release: the plan, the proof of each GPU, the report of a wedged one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from reconciler.core.release_plan import DRIFT_MIB, Bound, Card, Holder, Released, ReleasePlan
from reconciler.views.terminal import safe

VERDICT_COLOUR = {"released": "green", "not-released": "red", "wedged": "red", "fault": "red"}
FORMAT_VERSION = "1.0"


# -- the plan --------------------------------------------------------------------------------------------------


def plan_json(plan: ReleasePlan) -> dict[str, Any]:
    """Give what a release would do as one document."""
    return {
        "format_version": FORMAT_VERSION,
        "type": "release-plan",
        "host": plan.host,
        "would_stop": [
            {
                "server": one.server,
                "unit": one.unit,
                "gpus": list(one.gpus),
                "drain_s": one.budgets.drain_s,
                "stop_s": one.budgets.stop_s,
                "release_s": one.budgets.release_s,
            }
            for one in plan.stop
        ],
        "already_down": [one.server for one in plan.resting],
        "gpus": [_card_json(card) for card in plan.cards],
        "refused": [
            {"outcome": o.outcome.value, "reason": o.reason.value, "sentence": o.sentence}
            for o in plan.objections
        ],
    }


def _card_json(card: Card) -> dict[str, Any]:
    return {
        "uuid": card.uuid,
        "index": card.index,
        "used_mib": card.used_mib,
        "total_mib": card.total_mib,
        "baseline_mib": card.baseline_mib,
        "quarantined": card.quarantined or None,
        "holders": [
            {
                "pid": h.pid,
                "start_ticks": h.start_ticks,
                "layer": "outer" if h.outer else "inner",
                "class": h.cls,
                "why": h.why,
                "server": h.server,
                "command": h.command,
                "cgroup": h.cgroup,
                "would": _would(h),
            }
            for h in card.holders
        ],
    }


def _would(holder: Holder) -> str:
    """Say in a few words what is done to a holder."""
    match holder.cls:
        case "owned":
            return "end with its server; TERM, then KILL if it stays"
        case "infra":
            return "leave it alone"
        case _:
            return "refuse: it is never touched"


def plan_lines(plan: ReleasePlan) -> list[str]:
    """Show what a release would do: servers, then each GPU with everybody who holds it, then what is refused."""
    names = ", ".join(one.server for one in plan.stop) or "no server"
    lines = [f"[bold]Release[/] on {safe(plan.host)}: stops {safe(names)}"]
    lines += [_stop_line(one) for one in plan.stop]
    lines += [f"    {safe(one.server)} is down and on hold already" for one in plan.resting]
    for card in plan.cards:
        idle = (
            "no idle baseline" if card.baseline_mib is None else f"idle at {card.baseline_mib} MiB"
        )
        lines.append(
            f"  GPU {card.index} {safe(card.uuid)}: {card.used_mib} of {card.total_mib} MiB in use, {idle}"
        )
        if card.quarantined:
            lines.append(f"      [red]{safe(card.quarantined)}[/]")
        lines += [f"      {safe(h.sentence())}: would {safe(_would(h))}" for h in card.holders]
    lines += [f"  [red]refused[/] ({o.reason.value}): {safe(o.sentence)}" for o in plan.objections]
    return lines


def _stop_line(one: Bound) -> str:
    name = safe(one.server)
    return (
        f"  [red]-[/] {name} ({safe(one.unit)}): drain at most {one.budgets.drain_s:g} s, stop at most "
        f"{one.budgets.stop_s:g} s, then on hold until `reconcile resume {name}`"
    )


# -- the proof ---------------------------------------------------------------------------------------------------


def proof_json(host: str, released: Released) -> dict[str, Any]:
    """Give the proof as one line of the run stream."""
    return {
        "type": "proof",
        "host": host,
        "gpus": [dict(card) for card in released.proof],
        "quarantine_lifted": list(released.lifted),
        "consented": list(released.notes),
        "kept_on_host": not released.not_kept,
        "not_kept": released.not_kept or None,
    }


def kept_json(host: str, kept: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give the newest proof that a host keeps as one document; `proof` is null where there is none."""
    return {"format_version": FORMAT_VERSION, "type": "kept-proof", "host": host, "proof": kept}


def kept_line(host: str, kept: Mapping[str, Any]) -> str:
    """Say when and by whom a kept proof was made, and of which servers."""
    try:
        at = datetime.fromtimestamp(float(kept["at"]), tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        at = "an unknown time"
    servers = ", ".join(f"{s['server']} {s['outcome']}" for s in kept["servers"]) or "no server"
    return f"{safe(host)} was asked at {at} by {safe(str(kept.get('by') or '?'))}: {safe(servers)}"


def proof_table(proof: Sequence[Mapping[str, Any]]) -> Table:
    """Show one line a GPU: what it was judged by."""
    table = Table(box=None, pad_edge=False)
    for title in ("GPU", "UUID", "VERDICT", "USED", "LIMIT", "BASELINE", "SAMPLES", "HOLDERS SEEN"):
        table.add_column(title)
    for card in proof:
        colour = VERDICT_COLOUR.get(card["verdict"], "yellow")
        table.add_row(
            str(card["index"]),
            safe(card["uuid"]),
            f"[{colour}]{card['verdict']}[/]",
            _mib(card["used_mib"]),
            _mib(card["limit_mib"]),
            _mib(card["baseline_mib"]),
            _samples(card["samples"]),
            str(len(card["holders"])),
        )
    return table


def _mib(value: Any) -> str:
    return "?" if value is None else f"{value} MiB"


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return "none"
    span = samples[-1]["at_s"] - samples[0]["at_s"]
    return f"{len(samples)} over {span:.1f} s"


def proof_lines(host: str, released: Released) -> list[str]:
    """Show under the table who was seen and what was done to each, and what there is to know of each card that is not free."""
    lines = []
    for card in released.proof:
        title = f"GPU {card['index']}"
        for holder in card["holders"]:
            done = "; ".join(holder["done"]) or "still there"
            where = " (outer layer)" if holder["layer"] == "outer" else ""
            lines.append(
                f"  {title}: pid {holder['pid']}{where} start {holder['start_ticks']} {safe(holder['command'])} [dim]{safe(holder['class'])}[/] "
                f"({safe(holder['why'])}): {safe(done)}"
            )
        if (card["drift_mib"] or 0) > DRIFT_MIB:
            lines.append(
                f"  [yellow]{title}: its floor has risen by {card['drift_mib']} MiB since its baseline was learned[/]; `reconcile release "
                f"{safe(host)} --gpus {safe(card['uuid'])} --learn` takes the new one if that is right"
            )
        if card["verdict"] != "released":
            lines += report_lines(title, card)
    lines += [f"  {safe(note)}" for note in released.notes]
    if released.lifted:
        lines.append(f"  quarantine lifted: {safe(', '.join(released.lifted))}")
    if released.not_kept:
        lines.append(f"  [yellow]the host did not keep this proof[/]: {safe(released.not_kept)}")
    return lines


def report_lines(title: str, card: Mapping[str, Any]) -> list[str]:
    """Show why a card is not free: reasons, evidence, the next rung and its cost."""
    lines = [f"  [red]{title}[/]: {safe(why)}" for why in card["reasons"]]
    for layer, reading in (card.get("evidence") or {}).items():
        lines += evidence_lines(layer, reading)
    if "next" in card:
        rung = card["next"]
        lines.append(f"      next would be rung {rung['rung']}: {safe(rung['what'])}")
    return lines


def evidence_lines(layer: str, reading: Mapping[str, Any]) -> list[str]:
    """Show what can be seen of processes that do not die, and what the kernel said."""
    if "known" not in reading:
        return [f"      {layer}: no evidence ({safe(reading.get('unknown'))})"]
    lines = []
    for p in reading["known"].get("processes") or ():
        pending = ", ".join(f"signal {n}" for n in p.get("pending") or ()) or "none"
        lines.append(
            f"      pid {p['pid']} ({safe(p.get('comm'))}): state {safe(p.get('state'))}, in the kernel at {safe(p.get('wchan') or '?')}, "
            f"pending: {pending}"
        )
        lines += [f"        {safe(frame)}" for frame in (p.get("stack") or ())[:12]]
    kernel = reading["known"].get("kernel")
    lines += [f"      kernel: {safe(line)}" for line in (kernel or ())[-8:]]
    return lines


def objection_lines(sentences: Iterable[str]) -> list[str]:
    """Show what kept a release from being begun."""
    return [f"[red]refused[/]: {safe(text)}" for text in sentences]


__all__ = [
    "kept_json",
    "kept_line",
    "plan_json",
    "plan_lines",
    "proof_json",
    "proof_lines",
    "proof_table",
]

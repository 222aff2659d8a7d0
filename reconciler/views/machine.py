"""What programs read: one JSON document for a plan or a status, one JSON object a line for a run. Pure.

Every document carries `format_version` (major.minor; a minor version only adds). Words are those of
`architecture.md` section 6.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from reconciler.core.conditions import Exit, ServerResult, exit_of
from reconciler.core.diff import Drift
from reconciler.core.event import (
    Event,
    OutcomeReached,
    StepFinished,
    StepProgress,
    StepStarted,
    VerdictGiven,
)
from reconciler.core.plan import Plan, ServerPlan
from reconciler.systemd import unit_diff

FORMAT_VERSION = "1.0"


def line(data: dict[str, Any]) -> str:
    """Give one line of the run stream."""
    return json.dumps(
        {"format_version": FORMAT_VERSION, **data}, ensure_ascii=True, separators=(",", ":")
    )


def version_line(tool_version: str) -> str:
    """Give the first line of a run."""
    return line({"type": "version", "tool": "reconcile", "version": tool_version})


def log_json(server: str, at: float, message: str) -> str:
    """Give one line of a server's journal; the text as it was written, whatever it holds."""
    return line({"type": "log", "server": server, "at": round(at, 6), "message": message})


def plan_json(plan: Plan) -> dict[str, Any]:
    """Give a plan as one document."""
    return {
        "format_version": FORMAT_VERSION,
        "type": "plan",
        "hash": plan.hash,
        "changes": plan.acts,
        "servers": [server_json(p) for p in plan.servers],
    }


def server_json(plan: ServerPlan) -> dict[str, Any]:
    """Give what is done to one server."""
    target = plan.wish.target
    return {
        "server": plan.wish.server,
        "host": plan.wish.host,
        "unit": plan.wish.unit,
        "action": plan.action.value,
        "outcome": None if plan.acts else plan.outcome.value,
        "reason": plan.reason.value,
        "sentence": plan.sentence,
        "applied": plan.applied or None,
        "revision": target.revision if target else None,
        "gpus": list(target.gpu_uuids) if target else [],
        "drift": [drift_json(d) for d in plan.drift],
        "changes": [
            {"path": c.path, "old": c.old, "new": c.new, "effect": c.effect_class.name.lower()}
            for c in plan.wish.changes
        ],
        "unit_diff": unit_diff(plan.unit_before, target.unit_text) if target and plan.acts else "",
        "steps": list(plan.steps),
        "may_be_killed": list(plan.may_be_killed),
        "expected_outage_s": plan.outage_s,
        "warnings": list(plan.wish.warnings),
        "checks": [
            {"id": c.id, "verdict": c.verdict.value, "sentence": c.sentence} for c in plan.checks
        ],
        "notes": list(plan.notes),
    }


def drift_json(drift: Drift) -> dict[str, Any]:
    """Give one way in which the host has moved away, field by field where it is about flags."""
    return {
        "what": drift.what,
        "sentence": drift.sentence,
        "fields": [
            {"field": d.field, "asked": d.asked, "granted": d.granted, "source": d.source}
            for d in drift.fields
        ],
    }


_TYPES: dict[type, str] = {
    StepStarted: "step_started",
    StepProgress: "step_progress",
    StepFinished: "step_finished",
    VerdictGiven: "verdict",
}


def event_json(event: Event) -> dict[str, Any]:
    """Give one event of a run."""
    if isinstance(event, OutcomeReached):
        return {"type": "outcome", "at_s": round(event.at_s, 3), **result_json(event.result)}
    data = {
        k: round(v, 3) if isinstance(v, float) else v for k, v in dataclasses.asdict(event).items()
    }
    return {"type": _TYPES.get(type(event), "diagnostic"), **data}


def result_json(result: ServerResult) -> dict[str, Any]:
    """Give how one server ended."""
    return {
        "server": result.server,
        "outcome": result.outcome.value,
        "reason": result.reason.value,
        "sentence": result.sentence,
        "revision": result.revision or None,
        "commit_status": exit_of(result).status.value,
    }


def summary_json(results: Sequence[ServerResult], decided: Exit) -> dict[str, Any]:
    """Give the last line of a run."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.outcome.value] = counts.get(result.outcome.value, 0) + 1
    return {
        "type": "summary",
        "exit_code": decided.code,
        "meaning": decided.meaning,
        "commit_status": decided.status.value,
        "outcomes": counts,
    }

"""What people read on a terminal: the plan, the run, the status. Pure: values in, text out; colour is rich's markup.

Text from hosts and specs is data: it is escaped before it meets markup, and control and bidi characters are shown as
escapes, so that nothing in a spec can repaint a terminal (T19).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from reconciler.core.checks import Check, Verdict
from reconciler.core.conditions import Exit, Outcome, Reason, ServerResult, exit_of
from reconciler.core.event import (
    Diagnostic,
    Event,
    OutcomeReached,
    StepFinished,
    StepProgress,
    StepStarted,
    VerdictGiven,
)
from reconciler.core.plan import SYMBOL, Action, Plan, ServerPlan
from reconciler.core.revision import Change, EffectClass
from reconciler.systemd import unit_diff

COLOUR = {
    Action.DEPLOY: "green",
    Action.ADOPT: "yellow",
    Action.TAKE_OVER: "cyan",
    Action.CHANGE: "yellow",
    Action.RELOAD: "cyan",
    Action.START: "green",
    Action.STOP: "red",
    Action.PRUNE: "red",
    Action.VERIFY: "cyan",
    Action.RESUME: "yellow",
    Action.BLOCKED: "red",
    Action.NOTHING: "dim",
}
OUTCOME_COLOUR = {
    Outcome.IN_SYNC: "green",
    Outcome.APPLIED: "green",
    Outcome.STOPPED: "green",
    Outcome.WAITING: "yellow",
    Outcome.HELD: "yellow",
}


def visible(text: object) -> str:
    """Give text with everything that could move a cursor or turn a line around shown as an escape."""
    return "".join(
        c if c == " " or unicodedata.category(c)[0] != "C" else f"\\u{ord(c):04x}"
        for c in str(text)
    )


def safe(text: object) -> str:
    """Give text fit to stand in rich markup."""
    return visible(text).replace("\\", "\\\\").replace("[", "\\[")


def plan_lines(plan: Plan, *, command: str, exact: bool = True, wrong: bool = False) -> list[str]:
    """Show a plan: drift first, then per server what changes and the ordered steps, last the command that applies it.

    `command` is the invocation without what this function adds (`--expect`, `--yes`); one that is not `exact` takes no hash.
    `wrong`: there are specs that are wrong, which no plan holds.
    """
    lines: list[str] = []
    drifted = [p for p in plan.servers if p.drift]
    if drifted:
        lines.append("[bold]Drift[/] (the host has moved away from what was applied)")
        lines += [
            f"  [yellow]![/] {safe(p.wish.server)}: {safe(d.sentence)}"
            for p in drifted
            for d in p.drift
        ]
        lines.append("")
    for server in plan.servers:
        lines += server_lines(server)
    lines += _closing(plan, command, exact=exact, wrong=wrong)
    return lines


def server_lines(plan: ServerPlan) -> list[str]:
    """Show what is done to one server."""
    wish = plan.wish
    colour = COLOUR[plan.action]
    revision = f" [dim]{wish.target.revision[:12]}[/]" if wish.target and plan.acts else ""
    head = f"[{colour}]{SYMBOL[plan.action]} {safe(wish.server)}[/] on {safe(wish.host)}: [bold]{plan.action.value}[/]{revision}  {safe(plan.sentence)}"
    lines = [head]
    lines += [f"    [yellow]warning[/] {safe(w)}" for w in wish.warnings]
    lines += [check_line(c) for c in plan.checks if c.verdict is not Verdict.OK or c.id in TOLD]
    lines += [f"    [yellow]note[/] {safe(note)}" for note in plan.notes]
    if not plan.acts:
        return lines
    lines += [f"    {change_line(c)}" for c in wish.changes]
    if wish.target is not None and plan.action is not Action.VERIFY:
        diff = unit_diff(plan.unit_before, wish.target.unit_text)
        lines += [f"    [{diff_colour(row)}]{safe(row)}[/]" for row in diff.splitlines()]
    lines.append("    steps:")
    lines += [f"      {number}. {safe(step)}" for number, step in enumerate(plan.steps, 1)]
    if plan.may_be_killed and plan.action not in UNTOUCHED:
        lines.append(
            f"    ended by force if it does not stop by itself: {safe(', '.join(plan.may_be_killed))}"
        )
    lines.append(f"    {_outage(plan)}")
    return [*lines, ""]


UNTOUCHED = frozenset({Action.RELOAD, Action.VERIFY, Action.TAKE_OVER})
"""Plans that touch no process."""

TOLD = frozenset({"memory.fit", "memory.context"})
"""Checks whose numbers are worth a line when all is well."""

CHECKED = {
    Verdict.OK: "[green]ok[/]",
    Verdict.WARNED: "[yellow]warning[/]",
    Verdict.UNKNOWN: "[yellow]not known[/]",
    Verdict.REFUSED: "[red]refused[/]",
    Verdict.WAIVED: "[yellow]waived[/]",
}


def check_line(check: Check) -> str:
    """Show one check of preflight."""
    return f"    {CHECKED[check.verdict]} {safe(check.id)}: {safe(check.sentence)}"


def change_line(change: Change) -> str:
    """Show one changed field: `+` new, `-` gone, `~` other, with what it costs."""
    cost = {
        EffectClass.CONTROLLER: "no restart",
        EffectClass.RELOAD: "reload",
        EffectClass.RESTART: "restart",
    }
    tail = f"[dim]({cost[change.effect_class]})[/]"
    path = safe(change.path)
    if change.old is None:
        return f"[green]+ {path}: {safe(change.new)}[/] {tail}"
    if change.new is None:
        return f"[red]- {path}: {safe(change.old)}[/] {tail}"
    return f"[yellow]~ {path}: {safe(change.old)} -> {safe(change.new)}[/] {tail}"


def diff_colour(row: str) -> str:
    """Give the colour of a line of a difference."""
    if row.startswith("+"):
        return "green"
    return "red" if row.startswith("-") else "dim"


def _outage(plan: ServerPlan) -> str:
    if plan.action in UNTOUCHED:
        return "expected outage: none"
    if plan.outage_s is None:
        return "expected outage: not known yet (no change of this server on this host so far); about the time the model takes to load"
    runs = "1 rollout" if plan.outage_runs == 1 else f"{plan.outage_runs} rollouts"
    return f"expected outage: about {plan.outage_s:.0f} s (median of the last {runs} here, process to process)"


def _closing(plan: Plan, command: str, *, exact: bool, wrong: bool) -> list[str]:
    if not plan.acts:
        blocked = sum(p.action is Action.BLOCKED for p in plan.servers)
        rest = [f"{blocked} held back"] if blocked else []
        rest += ["some specs are wrong"] if wrong else []
        text = f"Nothing to do; {', and '.join(rest)} (see above)." if rest else "Nothing to do."
        return [f"{text}  [dim]plan {plan.hash}[/]"]
    if not exact:
        return [
            f"Plan [bold]{plan.hash}[/]. To carry it out without being asked:",
            f"  {safe(command)} --yes",
        ]
    return [
        f"Plan [bold]{plan.hash}[/]. To carry out exactly this plan:",
        f"  {safe(command)} --expect {plan.hash} --yes",
    ]


CUT_SHORT: Final = {
    Reason.PREEMPTED.value: "superseded",
    Reason.HANDED_OVER.value: "left",
    Reason.GROUP.value: "put off",
    Reason.INTERRUPTED.value: "interrupted",
}
"""Reasons for which a step ends that has not failed."""


def event_line(event: Event) -> str | None:
    """Show one event of a run as a plain line; None for what a line would say twice."""
    match event:
        case StepStarted(limit_s=limit):
            bound = f" (at most {limit:g} s)" if limit is not None else ""
            return f"{_stamp(event.at_s)} {_who(event.server)} {safe(event.step)}{bound} ..."
        case StepProgress(waiting_for=why):
            return f"{_stamp(event.at_s)} {_who(event.server)}   [dim]{safe(why)}[/]"
        case StepFinished(ok=True, detail=detail):
            said = f": {safe(detail)}" if detail else ""
            return f"{_stamp(event.at_s)} {_who(event.server)} [green]{safe(event.step)} done[/] in {event.took_s:.1f} s{said}"
        case StepFinished(reason=reason, detail=detail) if word := CUT_SHORT.get(reason):
            said = f": {safe(detail)}" if detail != word else ""
            return f"{_stamp(event.at_s)} {_who(event.server)} [yellow]{safe(event.step)} {word}[/] after {event.took_s:.1f} s{said}"
        case StepFinished(detail=detail):
            return f"{_stamp(event.at_s)} {_who(event.server)} [red]{safe(event.step)} failed[/] after {event.took_s:.1f} s: {safe(detail)}"
        case VerdictGiven(verdict=verdict, message=message):
            colour = "green" if verdict == "pass" else "red" if verdict == "fail" else "yellow"
            return f"{_stamp(event.at_s)} {_who(event.server)} gate: [{colour}]{safe(verdict)}[/] {safe(message)}"
        case Diagnostic(level=level, message=message):
            return f"{_stamp(event.at_s)} {_who(event.server)} [yellow]{safe(level)}[/]: {safe(message)}"
        case OutcomeReached():
            return None


def _stamp(at_s: float) -> str:
    return f"[dim]{at_s:7.1f}s[/]"


def _who(server: str) -> str:
    return f"[bold]{safe(server)}[/]"


def log_line(_server: str, at: float, message: str) -> str:
    """Show one line of a server's journal, with its time in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ} {visible(message)}"


def result_lines(results: Sequence[ServerResult], decided: Exit) -> list[str]:
    """Show how a pass ended, one line a server, and what the exit code means."""
    lines = []
    for result in results:
        colour = OUTCOME_COLOUR.get(result.outcome, "red")
        reason = f" ({result.reason.value})" if result.reason.value else ""
        lines.append(
            f"[{colour}]{result.outcome.value}[/]{reason} {_who(result.server)}: {safe(result.sentence)}"
        )
    if exit_of_all(results) or decided.code:
        lines.append(f"[dim]exit {decided.code}: {decided.meaning}[/]")
    return lines


def exit_of_all(results: Iterable[ServerResult]) -> bool:
    """Say whether any server's own row is not success."""
    return any(exit_of(r).code for r in results)

"""A review for people at a terminal or in a build's log. Pure; `markdown.py` writes the same for a comment."""

from __future__ import annotations

from typing import Final

from reconciler.core.review import FieldChange, HostReview, Kind, Review, ServerReview, headline
from reconciler.views.markdown import age
from reconciler.views.terminal import diff_colour, safe

SYMBOL: Final = {
    "held": "[red]![/]", "removed": "[red]-[/]", "added": "[green]+[/]", "restart": "[yellow]±[/]", "reload": "[cyan]~[/]",
    "controller": "[dim]~[/]", "none": "[dim]·[/]",
}  # fmt: skip
_NEEDS: Final = {"restart": "restart", "reload": "reload", "controller": "no restart", "none": ""}


def review_lines(review: Review, *, next_words: str = "") -> list[str]:
    """Show a review: what is wrong, then server by server, the worst first; last the summary."""
    lines: list[str] = []
    for server in review.servers:
        lines += _server(server)
    for host in review.hosts:
        lines += _host(host)
    lines += _notes(review)
    lines.append(f"[bold]{safe(headline(review))}[/]; {review.unchanged} not touched")
    if next_words:
        lines.append(safe(next_words))
    return lines


def _server(server: ServerReview) -> list[str]:
    look = (
        server.kind.value if server.kind in {Kind.HELD, Kind.REMOVED, Kind.ADDED} else server.effect
    )
    where = f"{safe(server.host_before)} -> " if server.host_before else ""
    what = server.kind.value if server.kind is not Kind.PLANNED else "planned"
    need = f" ({_NEEDS[server.effect]})" if server.kind in {Kind.CHANGED, Kind.MOVED} else ""
    note = f"  {safe(server.note)}" if server.note else ""
    lines = [
        f"{SYMBOL[look]} [bold]{safe(server.server)}[/] on {where}{safe(server.host or '?')}: {what}{need} [dim]{safe(server.revision[:12])}[/]{note}"
    ]
    if server.live is not None:
        live = server.live
        lines.append(f"    on the host: [bold]{safe(live.action)}[/]  {safe(live.sentence)}")
        lines += [f"    [yellow]drifted[/] {safe(d)}" for d in live.drift]
    for move in server.gate_moves:
        word = {True: "[red]looser[/]", False: "stricter", None: "moved"}[move.looser]
        lines.append(f"    gate {word}: {safe(move.limit)} {safe(move.old)} -> {safe(move.new)}")
    lines += [f"    [yellow]warning[/] {safe(w)}" for w in server.warnings]
    lines += [f"    {_field(c)}" for c in server.changes]
    lines += [
        f"    [{diff_colour(row)}]{safe(row)}[/]" for row in server.unit_diff.split("\n") if row
    ]
    if server.disturbs and server.kind is not Kind.REMOVED:
        lines.append(f"    {_outage(server)}")
    return [*lines, ""]


def _field(change: FieldChange) -> str:
    need = _NEEDS.get(change.effect, "")
    tail = f" [dim]({need})[/]" if need else ""
    path = safe(change.path)
    if change.old is None:
        return f"[green]+ {path}: {safe(change.new)}[/]{tail}"
    if change.new is None:
        return f"[red]- {path}: {safe(change.old)}[/]{tail}"
    return f"[yellow]~ {path}: {safe(change.old)} -> {safe(change.new)}[/]{tail}"


def _outage(server: ServerReview) -> str:
    if server.outage_s is None:
        return "expected outage: not known; past rollouts in a state (`--against STATE`) would tell"
    runs = "1 rollout" if server.outage_runs == 1 else f"{server.outage_runs} rollouts"
    return f"expected outage: about {server.outage_s:.0f} s (median of the last {runs} there)"


def _host(host: HostReview) -> list[str]:
    lines = [f"[yellow]host[/] [bold]{safe(host.host)}[/]: {host.kind.value}"]
    return [*lines, *(f"    {_field(c)}" for c in host.changes), ""]


def _notes(review: Review) -> list[str]:
    lines = []
    against = review.against
    if against is not None:
        old = " [red]which is old: hosts may have moved on[/]" if against.stale else ""
        lines.append(f"compared with the hosts as they were {age(against.age_s)} ago{old}")
        lines += [f"nothing is known of the host {safe(h)}" for h in against.unknown_hosts]
    if review.also_pending:
        names = ", ".join(safe(n) for n in review.also_pending)
        lines.append(f"whatever this change does, the next pass also acts on: {names}")
    if review.base_problems:
        lines.append("the base has mistakes in its specs as well; what they hid is shown as new")
    return lines

"""What `reconcile adopt` says about a unit that was found: what its spec would change, and what is in no spec. Pure."""

from __future__ import annotations

from typing import Any

from reconciler.views.machine import FORMAT_VERSION
from reconciler.views.terminal import diff_colour, safe


def adoption_lines(
    *, unit: str, diff: str, differs: tuple[str, ...], unmapped: tuple[tuple[str, str], ...],
    secrets: tuple[tuple[str, str], ...], problems: tuple[str, ...], command: str,
) -> list[str]:  # fmt: skip
    """Show the difference and everything that a person has to do, last how to go on."""
    lines = [f"[bold]{safe(unit)}[/], and the unit that the spec renders:"]
    lines += [f"  [{diff_colour(row)}]{safe(row)}[/]" for row in diff.splitlines()]
    if unmapped:
        lines += ["", "[bold]Not in the spec[/]"]
        lines += [f"  [yellow]![/] {safe(what)}: {safe(why)}" for what, why in unmapped]
    if secrets:
        lines += [
            "",
            "[bold]Secrets[/]: put each value alone into its file on the host (root, mode 0600)",
        ]
        lines += [f"  {safe(file)}  [dim]{safe(where)}[/]" for file, where in secrets]
    if problems:
        lines += ["", "[bold]The spec is not complete yet[/]"]
        lines += [f"  [red]![/] {safe(p)}" for p in problems]
    lines.append("")
    if differs:
        lines.append("[yellow]Taking over would restart it[/], because:")
        lines += [f"  {safe(d)}" for d in differs]
    elif not problems:
        lines.append(
            "[green]What runs is what the spec says[/]: it is taken over without a restart."
        )
    if problems:
        lines.append(f"Mend the spec, commit it, then: {safe(command)}")
    else:
        lines.append(f"Commit the spec, then: {safe(command)}")
    return lines


def adoption_json(document: dict[str, Any]) -> dict[str, Any]:
    """Give it as one document."""
    return {"format_version": FORMAT_VERSION, "type": "adoption", **document}

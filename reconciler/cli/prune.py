"""`reconcile prune SERVER`: end a server that a host has and the specs have not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli.context import (
    DEFAULT_SPECS,
    Output,
    PassOutput,
    Specs,
    guarded,
    load_specs,
    settings,
    stoppable,
)
from reconciler.core.errors import SpecError, UsageError

if TYPE_CHECKING:
    from reconciler.core.survey import Survey


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def prune(
        server: Annotated[str, typer.Argument(help="A server whose spec is gone.")],
        host: Annotated[
            str, typer.Option("--host", help="On this host; needed where several have it.")
        ] = "",
        protected: Annotated[
            bool, typer.Option("--protected", help="Also when it was protected.")
        ] = False,
        specs: Specs = DEFAULT_SPECS,
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
        output: Annotated[
            Output, typer.Option("--output", "-o", help="text, or json: NDJSON as of a run.")
        ] = Output.TEXT,
    ) -> None:
        """End a server that a host has and the specs have not: drained, stopped, its GPUs proven free, its unit removed.

        What the host keeps of it (revisions, history) stays: a spec of that name takes it back.

        Example:
            reconcile prune old-qwen
        """
        guarded(lambda: _prune(server, host, specs, output, protected=protected, yes=yes))


def _prune(name: str, host: str, specs: Path, output: Output, *, protected: bool, yes: bool) -> int:
    from reconciler.cli.run import PassOptions, carry_out
    from reconciler.reconcile import survey
    from reconciler.wiring import RealClock, world

    setup = settings()
    fleet = load_specs(specs, setup)
    if not fleet.complete:
        # What cannot be read may be about this very server (S13).
        raise SpecError(fleet.problems)
    clock = RealClock()
    controller = world(setup, clock)
    with stoppable(clock):
        found = chosen(survey(fleet, controller, host=host, prune=frozenset({name})), name)
        (plan,) = found.plan.servers
        if plan.wish.protect and not protected:
            message = f"{name} on {plan.wish.host} is protected; `--protected` ends it all the same"
            raise UsageError(message)
        words = [
            "prune",
            name,
            *(["--host", host] if host else []),
            *(["--protected"] if protected else []),
        ]
        options = PassOptions(
            asked=tuple(words),
            specs=specs,
            servers=(name,),
            yes=yes,
            output=PassOutput(output.value),
        )
        return carry_out(found, fleet, controller, options)


def chosen(found: Survey, name: str) -> Survey:
    """Leave only the orphan of this name.

    Raises:
        UsageError: There is none, or several hosts have one.
    """
    from reconciler.core.conditions import Reason
    from reconciler.core.plan import Action
    from reconciler.core.survey import Survey

    hosts = []
    for host in found.hosts:
        plans = tuple(
            p
            for p in host.plans
            if p.wish.server == name
            and (
                p.reason is Reason.ORPHANED or p.action is Action.PRUNE or not p.wish.policy_digest
            )
        )
        if plans:
            hosts.append(replace(host, plans=plans))
    if len(hosts) == 1:
        return Survey(tuple(hosts))
    if not hosts:
        orphans = sorted(p.wish.server for p in found.plan.servers if p.reason is Reason.ORPHANED)
        message = f"no host has a server {name!r} whose spec is gone; there are: {', '.join(orphans) or 'none'}"
        raise UsageError(message)
    message = (
        f"several hosts have a server {name!r}: {', '.join(h.host.name for h in hosts)}; say --host"
    )
    raise UsageError(message)

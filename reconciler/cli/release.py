"""`reconcile release HOST`: stop the servers on some GPUs, hold them, and prove that the GPUs are free."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli.context import (
    Output,
    guarded,
    load_specs,
    out,
    out_markup,
    say_problems,
    settings,
    stoppable,
    terminal_width,
)
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reconciler.core.fleet import Fleet
    from reconciler.core.release_plan import Released, ReleasePlan
    from reconciler.core.spec import Host
    from reconciler.reconcile import World


@dataclass(frozen=True, slots=True)
class ReleaseOptions:
    """What the command line says about one release."""

    gpus: tuple[str, ...] = ()
    dry_run: bool = False
    yes: bool = False
    reason: str = ""
    learn: bool = False
    last: bool = False
    wait_s: float = 0.0
    no_pidfd: bool = False
    restart_container: int | None = None
    reset_gpus: tuple[str, ...] = ()
    output: Output = Output.TEXT


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def release(
        host: Annotated[str, typer.Argument(help="A host of the specs.")],
        gpus: Annotated[
            list[str] | None,
            typer.Option(
                "--gpus",
                metavar="GPU",
                help="Index, UUID or bus id; repeat it or separate by commas. All GPUs, if left out.",
            ),
        ] = None,
        dry_run: Annotated[
            bool,
            typer.Option(
                "--dry-run", help="Say what would be stopped and refused; change nothing."
            ),
        ] = False,
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
        reason: Annotated[
            str, typer.Option("--reason", help="Why, for whoever finds the servers on hold.")
        ] = "",
        learn: Annotated[
            bool,
            typer.Option(
                "--learn",
                help="Take what the GPUs use now, with nobody on them, as their idle use.",
            ),
        ] = False,
        last: Annotated[
            bool,
            typer.Option(
                "--last", help="Show the newest proof that the host keeps, and do nothing."
            ),
        ] = False,
        wait: Annotated[
            str | None,
            typer.Option(
                "--wait",
                metavar="DURATION",
                help="Watch cards that do not become free for so long, as `5m`. Left out, as long as a verdict takes: 5 to 35 s after `timeouts.release`.",
            ),
        ] = None,
        restart_container: Annotated[
            int | None,
            typer.Option(
                "--allow-container-restart",
                metavar="VMID",
                help="If nothing else helps: restart this container, if nothing else runs in it.",
            ),
        ] = None,
        reset_gpus: Annotated[
            list[str] | None,
            typer.Option(
                "--allow-gpu-reset",
                metavar="UUID",
                help="If nothing else helps: reset these GPUs, if nobody computes on any; repeat it or separate by commas.",
            ),
        ] = None,
        specs: Annotated[Path, typer.Option("--specs", help="Folder of specs.")] = Path("specs"),
        output: Annotated[
            Output,
            typer.Option("--output", "-o", help="json: one document for a plan, NDJSON for a run."),
        ] = Output.TEXT,
    ) -> None:
        """Free GPUs and prove it: drain and stop the servers bound to them, hold those until `resume`, show the proof.

        Climbs the same ladder as a rollout: wait, TERM, KILL, and only processes that are provably the server's own. Who else
        holds a GPU is named and left alone, and then nothing is begun. The proof of each GPU is kept on the host; a passing
        one lifts a quarantine.

        Exit codes: 0 every GPU is proven free, 1 refused or not free, 2 nobody said yes, 6 a rollout is under way, 7 not known,
        9 held by somebody, 64 usage.

        Examples:
            reconcile release llm-two --dry-run
            reconcile release llm-two --last
            reconcile release llm-two --gpus 0,1 --reason "fine-tuning until Friday"
            reconcile release llm-two --gpus 2 --allow-gpu-reset GPU-3f1c9a52-6d0e-4b7a-9c18-5e2ab0d4f701
        """

        def begin() -> int:
            options = ReleaseOptions(
                gpus=_words(gpus),
                dry_run=dry_run,
                yes=yes,
                reason=reason,
                learn=learn,
                last=last,
                wait_s=watched_for(wait),
                restart_container=restart_container,
                reset_gpus=_words(reset_gpus),
                output=output,
            )
            return _release(host, specs, options)

        guarded(begin)


def watched_for(text: str | None) -> float:
    """Read how long cards are to be watched; 0 where nobody said."""
    from reconciler.cli.steer import seconds_of
    from reconciler.core.spec import DAY_S

    seconds = seconds_of(text) if text is not None else 0.0
    if seconds > DAY_S:
        message = f"--wait {text}: at most a day; the host goes on looking by itself and lifts a quarantine that it can prove"
        raise UsageError(message)
    return seconds


def _words(given: list[str] | None) -> tuple[str, ...]:
    return tuple(word for text in given or () for word in text.split(",") if word)


def _release(name: str, specs: Path, options: ReleaseOptions) -> int:
    from reconciler.wiring import RealClock, world

    setup = settings()
    fleet = load_specs(specs, setup)
    say_problems(fleet.problems)
    host = next((h for h in fleet.hosts if h.name == name), None)
    if host is None:
        known = ", ".join(h.name for h in fleet.hosts) or "none"
        message = f"there is no host {name!r} in {specs}; there are: {known}"
        raise UsageError(message)
    clock = RealClock()
    with stoppable(clock):
        options = replace(options, no_pidfd=setup.allow_no_pidfd)
        return run_release(fleet, host, world(setup, clock), options)


def run_release(fleet: Fleet, host: Host, controller: World, options: ReleaseOptions) -> int:
    """Plan, show, ask, act, prove, and give the exit code."""
    from reconciler.cli.run import confirmed, printer
    from reconciler.core.conditions import DIFFERENCES, ServerResult, worst
    from reconciler.releasing import Consent, free, look

    if options.last:
        return _show_last(host, controller, options)
    stream = options.output is Output.JSON
    consent = Consent(options.restart_container, options.reset_gpus)
    with controller.connect(host) as port:
        found = look(fleet, host, port, controller, options.gpus, consent=consent)
        found = replace(found, wait_s=options.wait_s, no_pidfd=options.no_pidfd)
        _show_plan(found.plan, options)
        refused = [
            ServerResult(host.name, o.outcome, o.reason, o.sentence) for o in found.plan.objections
        ]
        if refused or options.dry_run:
            return worst(refused).code
        acts = bool(found.plan.stop) or options.learn or consent.anything
        if acts and not options.yes and not confirmed():
            sys.stderr.write("reconcile: nothing was done; say --yes to carry it out\n")
            return DIFFERENCES.code
        hold = {
            "version": 1,
            "owner": f"{getpass.getuser()}@{socket.gethostname()}",
            "reason": options.reason or "its GPUs were released",
            "at": time.time(),
            "until": None,
        }
        released = free(found, port, controller, hold, printer(stream=stream), learn=options.learn)
    interrupted = controller.clock.stopping
    return _show_end(host.name, released, stream=stream, interrupted=interrupted)


def _show_last(host: Host, controller: World, options: ReleaseOptions) -> int:
    from reconciler.core.release_plan import Released
    from reconciler.effects.kept_proofs import last_proof
    from reconciler.views.release import kept_json, kept_line, proof_lines, proof_table
    from reconciler.views.table import table_lines

    others = replace(options, last=False, no_pidfd=False, output=Output.TEXT)
    if others != ReleaseOptions():
        message = "--last only shows what was proven; leave out what would do or choose something"
        raise UsageError(message)
    with controller.connect(host) as port:
        kept = last_proof(port)
    if options.output is Output.JSON:
        out(json.dumps(kept_json(host.name, kept), indent=2))
    elif kept is None:
        out(f"{host.name} keeps no proof: nothing was released there")
    else:
        out_markup([kept_line(host.name, kept)])
        out_markup(table_lines(proof_table(kept["gpus"]), terminal_width()))
        out_markup(proof_lines(host.name, Released((), tuple(kept["gpus"]))))
    return 0


def _show_plan(plan: ReleasePlan, options: ReleaseOptions) -> None:
    from reconciler.views.machine import line, version_line
    from reconciler.views.release import plan_json, plan_lines

    if options.output is Output.TEXT:
        out_markup(plan_lines(plan))
    elif options.dry_run:
        out(json.dumps(plan_json(plan), indent=2))
    else:
        from importlib.metadata import version

        out(version_line(version("inference-reconciler")))
        out(line({k: v for k, v in plan_json(plan).items() if k != "format_version"}))


def _show_end(host: str, released: Released, *, stream: bool, interrupted: bool) -> int:
    from reconciler.core.conditions import INTERRUPTED, worst
    from reconciler.views.machine import line, summary_json
    from reconciler.views.release import proof_json, proof_lines, proof_table
    from reconciler.views.table import table_lines

    decided = INTERRUPTED if interrupted else worst(released.verdicts)
    if stream:
        out(line(proof_json(host, released)))
        out(line(summary_json(released.results, decided)))
        return decided.code
    out_markup(table_lines(proof_table(released.proof), terminal_width()))
    out_markup(proof_lines(host, released))
    _say_held(released.results)
    return decided.code


def _say_held(results: Sequence[object]) -> None:
    from reconciler.views.terminal import safe

    for result in results:
        server, sentence = getattr(result, "server", ""), getattr(result, "sentence", "")
        out_markup([f"{safe(server)}: {safe(sentence)}"])

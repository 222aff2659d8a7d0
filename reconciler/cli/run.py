"""The main command: one pass over the specs. Plan, show, ask, act."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reconciler.cli.context import (
    PassOutput,
    is_terminal,
    out,
    out_markup,
    say_problems,
    settings,
    stoppable,
)
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reconciler.cli.watch import GitPlace
    from reconciler.core.conditions import Exit, ServerResult
    from reconciler.core.event import Event
    from reconciler.core.fleet import Fleet
    from reconciler.core.plan import Permissions
    from reconciler.core.saved_plan import SavedPlan
    from reconciler.core.survey import Survey
    from reconciler.reconcile import World
    from reconciler.settings import Settings


PROGRESS_EVERY_S = 5.0
"""How often a step that waits says so where no person watches."""


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What the command line says about one pass."""

    specs: Path
    git: GitPlace | None = None
    servers: tuple[str, ...] = ()
    dry_run: bool = False
    detailed: bool = False
    yes: bool = False
    expect: str | None = None
    adopt: bool = False
    overwrite: bool = False
    override_window: str = ""
    output: PassOutput = PassOutput.TEXT
    offline: bool = False
    base: str | None = None
    against: Path | None = None
    out: Path | None = None
    commit: str = ""
    specs_version: str = ""
    saved: SavedPlan | None = None
    asked: tuple[str, ...] = ()
    """The command, where it is none of a pass: `restart qwen`."""

    def command(self) -> str:
        """Give the command that would apply the plan, as a person would type it."""
        words = ["reconcile", *self.asked]
        if self.git is not None:
            words += ["--git", self.git.url, "--branch", self.git.branch, "--path", self.git.path]
        if str(self.specs) != "specs":
            words += ["--specs", str(self.specs)]
        for name in () if self.asked else self.servers:
            words += ["--server", name]
        words += ["--adopt"] if self.adopt else []
        words += ["--overwrite"] if self.overwrite else []
        words += ["--override-window", self.override_window] if self.override_window else []
        return shlex.join(words)


def one_pass(options: PassOptions) -> int:
    """Run one pass against the real world, and give the exit code."""
    from reconciler.cli.review import check_options, offline
    from reconciler.core.plan import Permissions
    from reconciler.wiring import RealClock, world

    check_options(options)
    setup = settings()
    if options.offline or options.against is not None:
        return offline(options, setup)
    fleet, options = specs_and_origin(options, setup)
    check_names(fleet, options.servers)
    clock = RealClock()
    allow = Permissions(
        adopt=options.adopt,
        overwrite=options.overwrite,
        no_pidfd=setup.allow_no_pidfd,
        override=options.override_window,
    )
    with stoppable(clock):
        return run_pass(fleet, world(setup, clock), options, allow)


def specs_and_origin(options: PassOptions, setup: Settings) -> tuple[Fleet, PassOptions]:
    """Load the specs, and note what a saved plan is bound to: their digest and the commit that is checked out."""
    from reconciler.cli.context import load_snapshot

    if options.git is not None:
        return from_git(options, options.git, setup)
    fleet, snapshot = load_snapshot(options.specs, setup)
    if options.out is None and options.saved is None:
        return fleet, options
    from reconciler.sources.revision_files import head_of

    return fleet, replace(options, commit=head_of(options.specs), specs_version=snapshot.version)


def from_git(options: PassOptions, place: GitPlace, setup: Settings) -> tuple[Fleet, PassOptions]:
    """Load the specs of the commit that is in force, and say when it is not the newest. A dry run accepts nothing."""
    from reconciler.cli.watch import fleet_of, source_of

    snapshot = source_of(place, options.specs, setup, accept=not options.dry_run).snapshot()
    if snapshot.stale:
        sys.stderr.write(f"reconcile: stale: {snapshot.stale}\n")
    commit = snapshot.commit.id if snapshot.commit else ""
    fleet = fleet_of(snapshot, setup)
    return fleet, replace(options, commit=commit, specs_version=snapshot.version)


def check_names(fleet: Fleet, names: Sequence[str]) -> None:
    """Refuse a `--server` that no spec has; one whose spec is wrong is said with its problems."""
    known = {s.name for s in fleet.servers} | set(fleet.held)
    for name in names:
        if name not in known:
            message = f"there is no server {name!r} in the specs; there are: {', '.join(sorted(known)) or 'none'}"
            raise UsageError(message)


def run_pass(fleet: Fleet, controller: World, options: PassOptions, allow: Permissions) -> int:
    """Plan, show, ask, act, and give the exit code. Spec errors hold back their own servers only."""
    from reconciler.reconcile import survey

    say_problems(fleet.problems)
    found = survey(fleet, controller, only=frozenset(options.servers), allow=allow)
    stream = options.output is PassOutput.JSON
    if fleet.held:
        one = len(fleet.held) == 1
        held = (
            "1 server is held back, because its spec is"
            if one
            else f"{len(fleet.held)} servers are held back, because their specs are"
        )
        sys.stderr.write(f"reconcile: {held} wrong (see above)\n")
    if options.dry_run:
        code = show_plan(found, fleet, options)
        if options.out is not None:
            from reconciler.cli.saved import save_plan

            save_plan(found, options, options.out)
            sys.stderr.write(
                f"reconcile: saved; `reconcile apply {shlex.quote(str(options.out))}` carries out exactly this plan\n"
            )
        return code
    if stream:
        start_stream(found)
    else:
        show_text_plan(found, options, fleet)
    if options.saved is not None and (code := moved_since(options.saved, found, options)):
        return code
    if options.expect is not None and options.expect != found.plan.hash:
        return stale(found, options)
    if found.plan.acts and not options.yes and options.expect is None and not confirmed():
        return declined(found, fleet)
    results = act_on(found, controller, stream=stream)
    if options.expect is None and options.saved is None:
        results = in_turn(results, fleet, controller, options, allow)
    decided = decide(results, fleet, interrupted=controller.clock.stopping)
    finish(results, decided, stream=stream)
    return decided.code


def carry_out(found: Survey, fleet: Fleet, controller: World, options: PassOptions) -> int:
    """Show a plan that a person asked for by name, ask, act on it once, and give the exit code."""
    stream = options.output is PassOutput.JSON
    if stream:
        start_stream(found)
    else:
        show_text_plan(found, options, fleet)
    if found.plan.acts and not options.yes and not confirmed():
        return declined(found, fleet)
    results = act_on(found, controller, stream=stream)
    decided = decide(results, fleet, interrupted=controller.clock.stopping)
    finish(results, decided, stream=stream)
    return decided.code


def in_turn(
    results: tuple[ServerResult, ...],
    fleet: Fleet,
    controller: World,
    options: PassOptions,
    allow: Permissions,
) -> tuple[ServerResult, ...]:
    """Go on with those that waited for others of this run, each time from a plan that is made and shown anew (S20).

    Not after `--expect`: that allows one plan and no other. Ends when a pass brings nothing about.
    """
    from reconciler.core.conditions import Outcome
    from reconciler.core.schedule import has_successors
    from reconciler.reconcile import survey
    from reconciler.views.machine import line, plan_json

    stream, said = options.output is PassOutput.JSON, {r.server: r for r in results}
    last = results
    while has_successors(last) and not controller.clock.stopping:
        found = survey(fleet, controller, only=frozenset(options.servers), allow=allow)
        if not found.plan.acts:
            break
        if stream:
            out(line({k: v for k, v in plan_json(found.plan).items() if k != "format_version"}))
        else:
            show_text_plan(found, options, fleet)
        acting = {p.wish.server for p in found.plan.servers if p.acts}
        last = act_on(found, controller, stream=stream)
        # What this run did to a server stays its result; only who waited, or was changed now, has a new one.
        said |= {
            r.server: r
            for r in last
            if r.server in acting
            or r.server not in said
            or said[r.server].outcome is Outcome.WAITING
        }
    return tuple(said.values())


def decide(results: Sequence[ServerResult], fleet: Fleet, *, interrupted: bool = False) -> Exit:
    """Give the row of the exit table that this pass ends with: the one that its last line tells, too."""
    from reconciler.core.conditions import INTERRUPTED, worst

    return INTERRUPTED if interrupted else worst(results, spec_errors=bool(fleet.problems))


def show_plan(found: Survey, fleet: Fleet, options: PassOptions) -> int:
    """Print a dry run's plan. Without --detailed-exitcode only what cannot be planned is an error."""
    from reconciler.core.conditions import DIFFERENCES, SPEC_ERROR, SUCCESS, Outcome, worst
    from reconciler.reconcile import still
    from reconciler.views.machine import plan_json

    if options.output is PassOutput.JSON:
        out(json.dumps(plan_json(found.plan), indent=2))
    elif options.output is PassOutput.MARKDOWN:
        from reconciler.cli.review import survey_shown

        out(survey_shown(found, fleet))
    else:
        show_text_plan(found, options, fleet)
    blocked = [still(p) for p in found.plan.servers if not p.acts]
    decided = worst(blocked, spec_errors=bool(fleet.problems))
    if decided is SUCCESS and found.plan.acts and options.detailed:
        return DIFFERENCES.code
    unknown = any(r.outcome is Outcome.UNKNOWN for r in blocked)
    if options.detailed or decided is SPEC_ERROR or unknown:
        return decided.code
    return SUCCESS.code


def show_text_plan(found: Survey, options: PassOptions, fleet: Fleet) -> None:
    """Print the plan for people."""
    from reconciler.views.terminal import plan_lines

    shown = plan_lines(
        found.plan,
        command=options.command(),
        exact=not options.asked,
        wrong=bool(fleet.problems),
    )
    out_markup(shown)


def start_stream(found: Survey) -> None:
    """Print the first two lines of the run stream."""
    from importlib.metadata import version

    from reconciler.views.machine import line, plan_json, version_line

    out(version_line(version("inference-reconciler")))
    out(line({k: v for k, v in plan_json(found.plan).items() if k != "format_version"}))


def stale(found: Survey, options: PassOptions) -> int:
    """Refuse to act: the plan is not the one that was shown."""
    from reconciler.core.conditions import STALE

    sys.stderr.write(
        f"reconcile: the plan is now {found.plan.hash}, not {options.expect}: something changed since it was shown. Nothing was done; look at the plan above\n"
    )
    return STALE.code


def moved_since(saved: SavedPlan, found: Survey, options: PassOptions) -> int:
    """Refuse a saved plan when anything that it was made from has moved; 0 when nothing has."""
    from reconciler.cli.saved import plan_now
    from reconciler.core.conditions import STALE, SUCCESS
    from reconciler.core.saved_plan import moved

    why = moved(saved, plan_now(found, options))
    if not why:
        return SUCCESS.code
    sys.stderr.write("reconcile: the saved plan is stale, and nothing was done:\n")
    for sentence in why:
        sys.stderr.write(f"  {sentence}\n")
    sys.stderr.write("make a new one with `reconcile --dry-run --out FILE`\n")
    return STALE.code


def confirmed() -> bool:
    """Ask the person at the terminal. Without one nobody can say yes."""
    if not is_terminal():
        return False
    sys.stderr.write("Carry out this plan? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def declined(found: Survey, fleet: Fleet) -> int:
    """End without acting: nobody said yes."""
    from reconciler.core.conditions import DIFFERENCES, worst
    from reconciler.reconcile import still

    sys.stderr.write(
        "reconcile: nothing was done; say --yes, or --expect with the plan's hash, to carry it out\n"
    )
    blocked = [still(p) for p in found.plan.servers if not p.acts]
    decided = worst(blocked, spec_errors=bool(fleet.problems))
    return decided.code or DIFFERENCES.code


def act_on(found: Survey, controller: World, *, stream: bool) -> tuple[ServerResult, ...]:
    """Carry the plan out while its events are shown."""
    from reconciler.reconcile import act

    return act(found, controller, printer(stream=stream))


def printer(*, stream: bool) -> Callable[[Event], None]:
    """Give whoever prints the events of a run: NDJSON on standard output, or plain lines for people."""
    from reconciler.core.event import StepProgress
    from reconciler.views.machine import event_json, line
    from reconciler.views.terminal import event_line

    def as_json(event: Event) -> None:
        out(line(event_json(event)))

    said: dict[tuple[str, str], float] = {}

    def as_text(event: Event) -> None:
        if isinstance(event, StepProgress) and not sys.stdout.isatty():
            # A log wants to know what is waited for, not each answer.
            key = (event.server, event.step)
            if event.at_s - said.get(key, -PROGRESS_EVERY_S) < PROGRESS_EVERY_S:
                return
            said[key] = event.at_s
        text = event_line(event)
        if text is not None:
            out_markup([text])

    return as_json if stream else as_text


def finish(results: Sequence[ServerResult], decided: Exit, *, stream: bool) -> None:
    """Print how the pass ended."""
    from reconciler.views.machine import line, summary_json
    from reconciler.views.terminal import result_lines

    if stream:
        out(line(summary_json(results, decided)))
    else:
        out_markup(result_lines(results, decided))

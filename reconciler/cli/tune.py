"""`reconcile tune`: try settings of one server under its own gate, and end in a spec, or in a commit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli.context import (
    DEFAULT_SPECS,
    Format,
    Output,
    Specs,
    guarded,
    is_terminal,
    load_snapshot,
    one_server,
    out,
    out_markup,
    settings,
    stoppable,
    terminal_width,
)
from reconciler.core.errors import StoreError, UsageError
from reconciler.core.tuning import OFF, Objective, Point

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reconciler.core.event import Event
    from reconciler.core.fleet import Fleet
    from reconciler.core.spec import Server
    from reconciler.core.tuning import Tried
    from reconciler.settings import Settings
    from reconciler.sources.base import Snapshot
    from reconciler.tune import Ended, Sweep

EXAMPLE = "speculative.num_steps=off,1,3,5"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a sweep."""

    sets: tuple[str, ...]
    requires: tuple[str, ...]
    objective: Objective
    margin: str
    rounds: int
    resume: bool
    yes: bool
    write: bool
    branch: str
    report: Path | None
    specs: Path
    output: Output


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def tune(
        server: Annotated[str, typer.Argument(help="A server of the specs; it must be in sync.")],
        sets: Annotated[
            list[str],
            typer.Option(
                "--set", metavar="FIELD=V1,V2", help=f"A field and its values, such as {EXAMPLE}."
            ),
        ],
        require: Annotated[
            list[str] | None,
            typer.Option(
                "--require",
                metavar="[RUN:]KEY=VALUE",
                help="A limit, such as batch:max_ttft_p95=800ms.",
            ),
        ] = None,
        objective: Annotated[
            Objective, typer.Option("--for", help="What the winner is chosen by.")
        ] = Objective.BALANCED,
        margin: Annotated[
            str,
            typer.Option(
                "--margin", help="Differences below this are ties; the smaller value wins."
            ),
        ] = "2%",
        rounds: Annotated[
            int,
            typer.Option(
                "--rounds", min=3, max=12, help="Most rounds of a point; 3 settle a clear loser."
            ),
        ] = 6,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with a sweep that was not finished.")
        ] = False,
        yes: Annotated[
            bool,
            typer.Option(
                "--yes", "-y", help="Begin without asking: every point restarts the server."
            ),
        ] = False,
        write: Annotated[
            bool, typer.Option("--write", help="Write the winner into the spec file.")
        ] = False,
        branch: Annotated[
            str,
            typer.Option(
                "--branch", help="Commit the winner on a new branch of the specs' repository."
            ),
        ] = "",
        report: Annotated[
            Path | None, typer.Option("--report", help="Write the report as an HTML file.")
        ] = None,
        specs: Specs = DEFAULT_SPECS,
        output: Format = Output.TEXT,
    ) -> None:
        """Try settings of a server, one rollout each, under one gate; then what was applied comes back.

        Two numbers describe a point: the decode speed of one stream and the throughput of all. Nobody else may touch
        the server meanwhile (a hold says so), and each restart is an outage for its users.

        Examples:
          reconcile tune qwen --set speculative.num_steps=off,1,3,5,10 --branch tune/qwen
          reconcile tune qwen --set args.max-running-requests=32,64 --require batch:max_ttft_p95=800ms --write
        """
        wanted = Wanted(
            tuple(sets), tuple(require or ()), objective, margin, rounds, resume, yes, write, branch, report, specs, output
        )  # fmt: skip
        guarded(lambda: _tune(server, wanted))


def _tune(name: str, wanted: Wanted) -> int:
    from reconciler.effects.gate import outcome_of
    from reconciler.effects.sweep_journal import SweepJournal
    from reconciler.tune import plan_of, run_sweep
    from reconciler.wiring import RealClock, world

    setup = settings()
    fleet, snapshot = load_snapshot(wanted.specs, setup)
    server, _ = one_server(fleet, name)
    sweep = _sweep(server, wanted)
    clock = RealClock()
    controller = world(setup, clock)
    journal = SweepJournal(Path(setup.state_dir) / "tune" / f"{server.name}.ndjson")
    if not wanted.resume:
        plan = plan_of(sweep, fleet, controller)
        if not _confirmed(sweep, plan.outage_s, wanted):
            return _declined()
    listener = _Listener(quiet=wanted.output is Output.JSON)

    def measure(*args: Any, **more: Any) -> Any:
        workloads = Path(setup.workloads) if setup.workloads else None
        return outcome_of(*args, workloads=workloads, **more)

    with stoppable(clock):
        ended = run_sweep(
            sweep,
            fleet,
            controller,
            journal,
            measure=measure,
            listener=listener,
            resume=wanted.resume,
        )
    _show(server, ended, wanted)
    written = _keep(server, ended, wanted, snapshot, fleet, setup)
    return _exit_code(ended) or written


def _sweep(server: Server, wanted: Wanted) -> Sweep:
    from reconciler.core.tuning import axis_of, gate_of, points_of
    from reconciler.core.units_of_measure import percentage
    from reconciler.tune import Sweep

    if (server.suspend, server.state) != (False, "running"):
        raise UsageError(
            f"{server.name} is suspended or stopped by its spec; a sweep needs it running"
        )
    try:
        margin = percentage(wanted.margin)
    except ValueError as error:
        raise UsageError(f"--margin {wanted.margin}: {error}") from None
    points = points_of([axis_of(text) for text in wanted.sets])
    _some_possible(server, points)
    return Sweep(
        server, points, gate_of(server, wanted.requires), wanted.objective, margin, wanted.rounds
    )


def _some_possible(server: Server, points: Sequence[Point]) -> None:
    """End before any load where no point could be brought up; say of each that cannot why."""
    from reconciler.core.tuning import variant
    from reconciler.wiring import engines

    refused = {p.label: why for p in points if (why := variant(server, p, engines())[1])}
    if len(refused) == len(points):
        raise UsageError("; ".join(f"{label}: {why}" for label, why in refused.items()))
    for label, why in refused.items():
        sys.stderr.write(f"reconcile: {label} will be left out: {why}\n")


def _confirmed(sweep: Sweep, outage_s: float | None, wanted: Wanted) -> bool:
    """Say what it will cost before anything begins, and ask."""
    from reconciler.core.tuning import Point
    from reconciler.core.units_of_measure import duration_text

    count = sum(bool(point.settings) for point in sweep.points)
    each = (
        f"about {duration_text(float(round(outage_s)))}"
        if outage_s is not None
        else "as long as its model loads"
    )
    runs = ", ".join(
        f"{run.name}: {run.requests} requests over {run.concurrency}" for run in sweep.gate.runs
    )
    sys.stderr.write(
        f"{sweep.server.name}: {count} points and the applied revision twice; up to {count + 1} restarts, each with an "
        f"outage of {each}; then {sweep.rounds} rounds at most ({runs}).\n"
        "How long it takes in all is said once the first point is measured.\n"
    )
    for point in (Point(), *sweep.points):
        sys.stderr.write(f"  {point.label}\n")
    if wanted.yes:
        return True
    if not is_terminal():
        return False
    sys.stderr.write("Begin? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _declined() -> int:
    from reconciler.core.conditions import DIFFERENCES

    sys.stderr.write("reconcile: nothing was done; say --yes to begin\n")
    return DIFFERENCES.code


class _Listener:
    """Says on standard error how far it is."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._said = ""

    def point(self, number: int, count: int, point: Point, left_s: float | None) -> None:
        from reconciler.core.units_of_measure import duration_text
        from reconciler.views.terminal import visible

        left = (
            ""
            if left_s is None
            else f", about {duration_text(float(round(left_s)))} for what is left"
        )
        sys.stderr.write(f"[{number}/{count}] {visible(point.label)}{left}\n")

    def progress(self, sentence: str) -> None:
        if sys.stderr.isatty() and not self._quiet:
            sys.stderr.write(f"\r\x1b[2K  {sentence}")
            sys.stderr.flush()
            self._said = sentence

    def event(self, event: Event) -> None:
        from reconciler.views.terminal import event_line

        text = None if self._quiet else event_line(event)
        if text is not None:
            out_markup([text], talk=True)

    def tried(self, tried: Tried) -> None:
        from reconciler.views.terminal import visible
        from reconciler.views.tuning import numbers_of

        if self._said:
            sys.stderr.write("\r\x1b[2K")
            self._said = ""
        speed, through = numbers_of(tried)
        shown = f"one stream {speed:.1f}, all {through:.1f} tok/s" if speed and through else ""
        said = "; ".join(part for part in (shown, visible(tried.sentence)) if part)
        sys.stderr.write(f"  {tried.state.value}{': ' if said else ''}{said}\n")


def _show(server: Server, ended: Ended, wanted: Wanted) -> None:
    from reconciler.views import tuning

    if wanted.output is Output.JSON:
        out(
            tuning.as_json(
                server.name, ended.tried, ended.choice, wanted.objective, restored=ended.restored
            )
        )
    else:
        from reconciler.views.table import table_lines

        out_markup(table_lines(tuning.table(ended.tried, ended.choice), terminal_width()))
        out_markup(tuning.lines(ended.tried, ended.choice, wanted.objective))
    if ended.sentence:
        sys.stderr.write(f"reconcile: {ended.sentence}\n")
    if wanted.report is not None:
        title = f"{server.name}: {', '.join(wanted.sets)}"
        try:
            wanted.report.write_text(
                tuning.page(title, ended.tried, ended.choice, wanted.objective), encoding="utf-8"
            )
        except OSError as error:
            raise StoreError(
                f"{wanted.report}: the report cannot be written ({error.strerror})"
            ) from error


def _exit_code(ended: Ended) -> int:
    from reconciler.core.conditions import HELD, INTERRUPTED, ROLLBACK_FAILED, UNKNOWN

    if not ended.restored:
        return ROLLBACK_FAILED.code
    if ended.stopped:
        return INTERRUPTED.code
    if ended.choice.winner is None:
        return HELD.code if ended.tried else UNKNOWN.code
    return 0


# -- into the spec ---------------------------------------------------------------------------------------------------


def _keep(
    server: Server, ended: Ended, wanted: Wanted, snapshot: Snapshot, fleet: Fleet, setup: Settings
) -> int:
    """Write the winner into the spec file, or commit it on a branch, where that was asked for."""
    if not (wanted.write or wanted.branch) or ended.choice.winner is None or ended.stopped:
        return 0
    if not ended.choice.winner.point.settings:
        sys.stderr.write("reconcile: what is applied stays, so there is nothing to write\n")
        return 0
    from reconciler.sources.branch import commit_on_branch
    from reconciler.sources.edit import replace_file, with_settings
    from reconciler.views.tuning import message

    place = fleet.places.get(f"Server/{server.name}") or fleet.places.get(server.name)
    file = next((f for f in snapshot.files if place is not None and f == place.file), None)
    if file is None:
        raise UsageError(f"the file of {server.name} is not known, so nothing was written")
    path = (
        Path(file)
        if Path(file).is_absolute() or Path(file).exists()
        else Path(snapshot.root) / file
    )
    before = snapshot.files[file]
    chosen: Mapping[str, Any] = dict(ended.choice.winner.point.settings)
    changed = {key: None if value == OFF else value for key, value in chosen.items()}
    content = with_settings(before, server.name, changed)
    _compare(
        server, ended.choice.winner.point, {**snapshot.files, file: content}, setup, snapshot.root
    )
    if wanted.branch:
        text = message(server.name, ended.tried, ended.choice, wanted.objective)
        commit = commit_on_branch(path, before, content, wanted.branch, text)
        sys.stderr.write(f"reconcile: committed {commit[:12]} on the new branch {wanted.branch}\n")
    if wanted.write:
        if path.read_bytes() != before:
            raise UsageError(
                f"{path}: has changed since the sweep began; nothing was written into it"
            )
        replace_file(path, content)
        sys.stderr.write(f"reconcile: {path}: {ended.choice.winner.point.label}\n")
    return 0


def _compare(
    server: Server, point: Point, files: Mapping[str, bytes], setup: Settings, root: str
) -> None:
    """Refuse to write a spec that does not say what was measured."""
    from reconciler.core.fleet import load_fleet
    from reconciler.core.revision import revision
    from reconciler.core.tuning import variant
    from reconciler.wiring import engines

    read = load_fleet(files, engines=engines(), policy=setup.spec_policy, root=root)
    found = next((s for s in read.servers if s.name == server.name), None)
    wanted, _ = variant(server, point, engines())
    if found is None or wanted is None or revision(found) != revision(wanted):
        raise UsageError(
            f"{point.label}: the file would not say what was measured (a profile may set it); nothing was written. Change it by hand"
        )

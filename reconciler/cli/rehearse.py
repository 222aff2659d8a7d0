"""`reconcile rehearse`: the whole thing against hosts that exist for this one run, by the real code path.

Boots the hosts of the specs (`reconciler/lab/rehearsal.py`), makes the same passes as the main command against them, shows
them with the same views, and takes everything away again, also after Ctrl-C and errors.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli.context import Output, guarded, load_specs, out, out_markup, settings
from reconciler.core.errors import SpecError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reconciler.core.conditions import ServerResult
    from reconciler.core.event import Event
    from reconciler.core.spec import Server
    from reconciler.lab.rehearsal import Stage
    from reconciler.lab.story import Chapter
    from reconciler.views.rehearsal import ChapterEnd
    from reconciler.wiring import RealClock

PASSES = 8
"""How often the tool is run again, as a person or a timer would, until the fleet has settled."""

BETWEEN_PASSES_S = 5.0


class BackendName(StrEnum):
    """What plays the hosts. The words are those of `lab.rehearsal.Backend`, which is not imported for `--help`."""

    AUTO = "auto"
    SYSTEMD = "systemd"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the command line says."""

    specs: Path | None
    sets: tuple[str, ...]
    case: str | None
    backend: BackendName
    keep: bool
    stream: bool


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def rehearse(
        specs: Annotated[
            Path | None,
            typer.Argument(
                metavar="[SPECS]",
                help="Folder or file of specs; without it a built-in story is played.",
            ),
        ] = None,
        sets: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="SERVER.field=value",
                help="Play a second commit that sets this; may be repeated.",
            ),
        ] = None,
        case: Annotated[
            str | None,
            typer.Option(
                "--break",
                metavar="CASE",
                help="Let this go wrong during the last commit; `list` explains the cases.",
            ),
        ] = None,
        backend: Annotated[
            BackendName,
            typer.Option(
                "--backend",
                help="What plays the hosts: containers with a real systemd (needs root), or this process.",
            ),
        ] = BackendName.AUTO,
        keep: Annotated[
            bool,
            typer.Option(
                "--keep",
                help="Leave the systemd hosts up afterwards, and say how to reach and end them.",
            ),
        ] = False,
        output: Annotated[
            Output, typer.Option("--output", "-o", help="json: NDJSON, as a run's stream.")
        ] = Output.TEXT,
    ) -> None:
        """Try specs, changes and failures on hosts that are made for it. No GPU, no real host, nothing left behind.

        The hosts are simulated, and so are the engines: what is real is everything that this tool does. Without SPECS it plays
        a story in four chapters: a first deploy, a faster revision, one that fails its gate, and a left-over process.

        Examples:
            reconcile rehearse
            reconcile rehearse specs/
            reconcile rehearse specs/ --set qwen.speculative.num_steps=3
            reconcile rehearse specs/ --break left-over
            reconcile rehearse --break list

        Exit codes: of a story and of --break: 0 when all ended as it should; else as `reconcile` would have ended.
        """
        wanted = Rehearsal(specs, tuple(sets or ()), case, backend, keep, output is Output.JSON)
        guarded(lambda: _rehearse(wanted))


def _rehearse(wanted: Rehearsal) -> int:
    if wanted.case == "list":
        return _list_cases(stream=wanted.stream)
    from reconciler.lab.rehearsal import Backend, choose, stage
    from reconciler.logs import configure
    from reconciler.wiring import RealClock, engines

    configure(os.environ)
    chapters, note = _chapters(wanted)
    whole = replace(chapters[-1].fleet, servers=tuple(s for c in chapters for s in c.fleet.servers))
    choice = choose(Backend(wanted.backend.value), whole, chapters[-1].broken)
    if not wanted.stream:
        out_markup(
            [f"[bold]Rehearsal[/] on the {choice.backend.value} backend: {_safe(choice.why)}"]
        )
        out_markup([f"[dim]{_safe(line)}[/]" for line in note])
    clock = RealClock()
    ends: list[ChapterEnd] = []
    with (
        _interruptible(clock),
        stage(choice.backend, whole, engines(), clock, keep=wanted.keep) as scene,
    ):
        player = Player(wanted, scene, clock)
        for number, chapter in enumerate(chapters, 1):
            ends.append(player.play(number, len(chapters), chapter))
            if not ends[-1].as_wanted:
                break
        alone = scene.left_alone()
    return _close(wanted, choice.backend.value, chapters, ends, alone)


def _list_cases(*, stream: bool) -> int:
    from reconciler.lab.story import BREAKS
    from reconciler.views.machine import line

    width = max(len(name) for name in BREAKS)
    for case in BREAKS.values():
        out(
            line({"type": "case", "name": case.name, "about": case.about, "ends": case.ends.value})
            if stream
            else f"{case.name:<{width}}  {case.about}"
        )
    return 0


def _chapters(wanted: Rehearsal) -> tuple[Sequence[Chapter], list[str]]:
    """Give what is played, and what a person should know beforehand.

    Raises:
        SpecError: The specs are wrong, or would be after `--set`.
        UsageError: The specs and options make no rehearsal.
    """
    from reconciler.lab.story import FILE, FLEET, chapters_of, shortening, story
    from reconciler.wiring import engines

    if wanted.specs is None and not wanted.sets and wanted.case is None:
        return story(engines()), [
            "one server over four GPUs; every wait is real, models load in seconds"
        ]
    if wanted.specs is None:
        from reconciler.core.fleet import load_fleet

        fleet = load_fleet({FILE: FLEET.encode()}, engines=engines())
    else:
        fleet = load_specs(wanted.specs, settings())
    if fleet.problems:
        raise SpecError(fleet.problems)
    if not fleet.servers:
        raise UsageError(f"{wanted.specs}: there is no server to rehearse")
    chapters = chapters_of(fleet, wanted.sets, wanted.case, engines())
    cut = shortening(fleet, chapters[0].fleet)
    note = [f"cut short for the rehearsal: {cut}"] if cut else []
    nodes = [h.name for h in fleet.hosts if h.proxmox is not None]
    note += [f"{', '.join(nodes)}: played as plain hosts, without a Proxmox node"] if nodes else []
    return chapters, note


@contextmanager
def _interruptible(clock: RealClock) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the rehearsal at once, and the cleaning-up run to its end."""

    def stop(_number: int, _frame: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        clock.stop()
        sys.stderr.write("\nending the rehearsal: its hosts are taken away\n")
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Player:
    """Plays chapters on a stage and shows them."""

    wanted: Rehearsal
    scene: Stage
    clock: RealClock

    def play(self, number: int, of: int, chapter: Chapter) -> ChapterEnd:
        """Play one chapter to its end, in as many passes as it takes."""
        from reconciler.views.rehearsal import ChapterEnd, wish_words

        began = time.monotonic()
        self._announce(number, of, chapter)
        self.scene.set_up(chapter.fleet, self._faults(chapter))
        outage = Outage()
        strike = self._strike(chapter)
        if chapter.broken is not None and not chapter.broken.at:
            strike("")
        results: tuple[ServerResult, ...] = ()
        first: tuple[ServerResult, ...] = ()
        passes = 0
        while passes < PASSES:
            passes += 1
            results = self._pass(chapter, strike, outage)
            first = first or results
            if self.clock.stopping or all(_settled(r) for r in results):
                break
            self._talk(
                f"not settled: run again in {BETWEEN_PASSES_S:g} s, as a timer or a person would"
            )
            self.clock.sleep(BETWEEN_PASSES_S)
        judged = first if chapter.broken is None or not chapter.broken.at else results
        forced = tuple(said for s in chapter.fleet.servers for said in self.scene.forced(s))
        return ChapterEnd(
            chapter.title,
            judged,
            _as_wanted(chapter, judged, forced),
            wish_words(chapter.ends, [r.value for r in chapter.reasons]),
            outage.settled(),
            forced,
            passes,
            time.monotonic() - began,
        )

    def _announce(self, number: int, of: int, chapter: Chapter) -> None:
        from reconciler.views.machine import line
        from reconciler.views.rehearsal import chapter_json, heading

        if self.wanted.stream:
            out(line(chapter_json(number, of, chapter.title, chapter.why)))
        else:
            out_markup(heading(number, of, chapter.title, chapter.why))

    def _talk(self, text: str) -> None:
        if self.wanted.stream:
            from reconciler.views.machine import line

            out(line({"type": "stage", "message": text}))
        else:
            out_markup([f"[bold magenta]>>>[/] {_safe(text)}"])

    def _faults(self, chapter: Chapter) -> Mapping[str, Any]:
        broken = chapter.broken
        return (
            {chapter.victim: broken.fault}
            if broken is not None and broken.fault is not None
            else {}
        )

    def _strike(self, chapter: Chapter) -> Callable[[str], None]:
        """Give what is called at the begin of each step of the victim, and lets the case strike once, at its own."""
        struck: list[str] = []

        def strike(step: str) -> None:
            broken = chapter.broken
            if broken is None or struck or step != broken.at:
                return
            struck.append(step)
            self._talk(self.scene.play(broken, self._victim(chapter)))

        return strike

    def _victim(self, chapter: Chapter) -> Server:
        return next(s for s in chapter.fleet.servers if s.name == chapter.victim)

    def _pass(
        self, chapter: Chapter, strike: Callable[[str], None], outage: Outage
    ) -> tuple[ServerResult, ...]:
        """Make one pass as the main command does: plan, show, act, results."""
        from reconciler.cli.run import decide, finish, printer, start_stream
        from reconciler.core.event import StepStarted
        from reconciler.core.plan import Permissions
        from reconciler.reconcile import act, survey
        from reconciler.views.terminal import plan_lines

        found = survey(chapter.fleet, self.scene.world, allow=Permissions(unscheduled=True))
        if self.wanted.stream:
            start_stream(found)
        else:
            out_markup(plan_lines(found.plan, command=self._command()))
        show = printer(stream=self.wanted.stream)

        def emit(event: Event) -> None:
            show(event)
            outage.see(event)
            if isinstance(event, StepStarted) and event.server == chapter.victim:
                strike(event.step)

        results = act(found, self.scene.world, emit)
        finish(results, decide(results, chapter.fleet), stream=self.wanted.stream)
        return results

    def _command(self) -> str:
        return shlex.join(
            ["reconcile", *(["--specs", str(self.wanted.specs)] if self.wanted.specs else [])]
        )


@dataclass
class Outage:
    """How long a chapter's servers did not serve: from a stop's begin to the end of the next successful `ready`."""

    since: dict[str, float] = field(default_factory=dict)
    total_s: float | None = None

    def see(self, event: Event) -> None:
        """Take one event of a run in."""
        from reconciler.core.event import StepFinished, StepStarted

        match event:
            case StepStarted(server=server, step="stop" | "back: stop"):
                self.since.setdefault(server, time.monotonic())
            case StepFinished(server=server, step="ready" | "back: ready", ok=True):
                self._end(server)
            case _:
                pass

    def _end(self, server: str) -> None:
        since = self.since.pop(server, None)
        if since is not None:
            self.total_s = (self.total_s or 0.0) + time.monotonic() - since

    def settled(self) -> float | None:
        """Give the sum over all servers; who is still down is down until now. None: nothing was stopped."""
        for server in list(self.since):
            self._end(server)
        return self.total_s


def _settled(result: ServerResult) -> bool:
    """Say whether another pass is of no use: nothing is unknown, waited for, or down."""
    from reconciler.core.conditions import Outcome

    return result.outcome not in {Outcome.UNKNOWN, Outcome.ROLLBACK_FAILED}


def _as_wanted(chapter: Chapter, results: Sequence[ServerResult], forced: Sequence[str]) -> bool:
    """Say whether a chapter ended as it had to: the victim as the case says, everybody else well."""
    from reconciler.core.conditions import SUCCESS, Outcome, exit_of

    def fits(result: ServerResult) -> bool:
        if chapter.ends is None or (chapter.victim and result.server != chapter.victim):
            return exit_of(result) is SUCCESS or result.outcome is Outcome.WAITING
        ended = result.outcome is chapter.ends or (
            chapter.ends is Outcome.APPLIED and result.outcome is Outcome.IN_SYNC
        )
        return ended and (not chapter.reasons or result.reason in chapter.reasons)

    return all(fits(r) for r in results) and (bool(forced) or not chapter.kills)


def _close(
    wanted: Rehearsal,
    backend: str,
    chapters: Sequence[Chapter],
    ends: Sequence[ChapterEnd],
    alone: str,
) -> int:
    """Print how it all ended, and give the exit code."""
    from reconciler.core.conditions import FAILED, worst
    from reconciler.views.machine import line
    from reconciler.views.rehearsal import rehearsal_json, summary

    if wanted.stream:
        out(line(rehearsal_json(backend, ends)))
    else:
        out_markup(summary(ends))
        if alone:
            out_markup([f"      [dim]bystanders: {_safe(alone)}[/]"])
    if all(e.as_wanted for e in ends):
        return 0
    chapter, end = chapters[len(ends) - 1], ends[-1]
    decided = worst(end.results)
    return decided.code or FAILED.code if chapter.ends is not None else decided.code


def _safe(text: str) -> str:
    from reconciler.views.terminal import safe

    return safe(text)

"""What every command needs: settings, the fleet, a way to print, and one way to end with the right exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from reconciler.core.errors import Problem, ReconcilerError, SpecError, UsageError, plain

if TYPE_CHECKING:
    from reconciler.cli.watch import GitPlace
    from reconciler.core.fleet import Fleet
    from reconciler.core.spec import Host, Server
    from reconciler.settings import Settings
    from reconciler.sources.base import Snapshot
    from reconciler.wiring import RealClock

DEFAULT_SPECS = Path("specs")


class Output(StrEnum):
    """How a command prints."""

    TEXT = "text"
    JSON = "json"


class PassOutput(StrEnum):
    """How a plan prints; a run has no Markdown."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


Specs = Annotated[Path, typer.Option("--specs", help="Folder of specs.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]


def is_terminal() -> bool:
    """Say whether a person can answer a prompt."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def out(text: str) -> None:
    """Print data on standard output. Where nobody reads it any more, what is under way goes on without saying so."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        go_on_unheard()


def go_on_unheard() -> None:
    """Send what is still to be printed nowhere: a reader that is gone must not end a rollout half-way."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def out_markup(lines: Iterable[str], *, talk: bool = False) -> None:
    """Print lines of rich markup: data on standard output, talk on standard error. Colour only on a terminal."""
    from rich.console import Console

    class Patient(Console):
        """A console whose reader may leave."""

        def on_broken_pipe(self) -> None:
            go_on_unheard()

    console = Patient(
        stderr=talk,
        highlight=False,
        soft_wrap=True,
        no_color=bool(os.environ.get("NO_COLOR")) or None,
    )
    for line in lines:
        console.print(line)


def terminal_width() -> int | None:
    """Give the columns of the terminal that is printed to; None: it is none, and a line may be as long as it likes."""
    from shutil import get_terminal_size

    # rich takes a dumb terminal to be 80 columns wide, whatever it says of itself.
    return get_terminal_size().columns if sys.stdout.isatty() else None


def settings() -> Settings:
    """Read the operator's settings, and set the log up as the environment says."""
    from reconciler.logs import configure
    from reconciler.settings import load_settings

    configure(os.environ)
    return load_settings(os.environ, home=Path.home(), uid=os.getuid())


@dataclass(frozen=True, slots=True)
class SpecsAt:
    """Where a command finds its specs: a folder, or a place in a repository as the daemon has it."""

    path: Path
    git: GitPlace | None = None


HERE: Final = SpecsAt(DEFAULT_SPECS)


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take `--specs`, or `--git`, `--branch` and `--path` as a pass does, for its parameter `specs: SpecsAt`."""

    @wraps(command)
    def with_place(
        *, specs: Path, git: str | None, branch: str | None, path: str | None, **rest: Any
    ) -> None:
        from reconciler.cli.watch import git_place
        from reconciler.core.conditions import USAGE

        try:
            place = git_place(git, branch, path)
        except UsageError as error:
            fail(USAGE.code, str(error))
        command(**rest, specs=SpecsAt(specs, place))

    options = {
        "specs": (Path, DEFAULT_SPECS, "--specs", "Folder of specs."),
        "git": (str | None, None, "--git", "Specs from this repository, as the daemon has it."),
        "branch": (str | None, None, "--branch", "With --git: the branch.  [default: main]"),
        "path": (str | None, None, "--path", "With --git: the folder in it.  [default: specs]"),
    }
    own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "specs"]
    more = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                kind, typer.Option(flag, metavar="URL" if name == "git" else None, help=text)
            ],
        )
        for name, (kind, default, flag, text) in options.items()
    ]
    parameters = [*(p.replace(kind=Parameter.KEYWORD_ONLY) for p in own), *more]
    with_place.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_place.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_place


def load_specs(path: Path | SpecsAt, setup: Settings) -> Fleet:
    """Read the specs at a place. A missing or empty one is a spec error: never "delete all" (S13)."""
    return load_snapshot(path, setup)[0]


def load_snapshot(path: Path | SpecsAt, setup: Settings) -> tuple[Fleet, Snapshot]:
    """Read the specs at a place, and give the files that they were read from as well. Of a repository nothing is accepted by this."""
    if isinstance(path, SpecsAt) and path.git is not None:
        from reconciler.cli.watch import fleet_of, source_of

        snapshot = source_of(path.git, path.path, setup, accept=False).snapshot()
        if snapshot.stale:
            sys.stderr.write(f"reconcile: stale: {snapshot.stale}\n")
        return fleet_of(snapshot, setup), snapshot
    folder = path.path if isinstance(path, SpecsAt) else path
    from reconciler.core.fleet import load_fleet
    from reconciler.sources.directory import Directory
    from reconciler.wiring import engines

    snapshot = Directory(folder).snapshot()
    fleet = load_fleet(
        snapshot.files,
        engines=engines(),
        policy=setup.spec_policy,
        root=snapshot.root,
        unread=snapshot.unread,
    )
    return fleet, snapshot


def say_problems(problems: Iterable[Problem]) -> None:
    """Print every problem as file:line:column: message, on standard error."""
    for problem in problems:
        sys.stderr.write(f"{problem}\n")


def one_server(fleet: Fleet, name: str) -> tuple[Server, Host]:
    """Give a server and its host by name.

    Raises:
        UsageError: There is none, or its spec is wrong.
    """
    for server in fleet.servers:
        if server.name == name:
            return server, fleet.host(server.host)
    if name in fleet.held:
        raise SpecError([p for p in fleet.problems if p.server in {name, None}] or fleet.problems)
    known = ", ".join(sorted(s.name for s in fleet.servers)) or "none"
    message = f"there is no server {name!r} in the specs; there are: {known}"
    raise UsageError(message)


@contextmanager
def stoppable(clock: RealClock) -> Iterator[None]:
    """Let the first Ctrl-C (or SIGTERM) end the run at its next safe point, the second at once."""

    def first(number: int, _frame: Any) -> None:
        clock.stop()
        signal.signal(number, at_once)
        sys.stderr.write(
            "\nstopping at the next safe point: what was begun is undone or finished, and the lease given back. Ctrl-C again leaves at once\n"
        )

    def at_once(number: int, _frame: Any) -> None:
        sys.stderr.write(
            "\nleft at once: a rollout under way stands half-way; the host goes back to the last good revision by itself after its deadline, "
            "and `reconcile` goes on with it if it is run before\n"
        )
        sys.stderr.flush()
        os._exit(128 + number)

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(code: int, message: str) -> NoReturn:
    """End with a message and an exit code."""
    sys.stderr.write(f"reconcile: {message}\n")
    raise typer.Exit(code)


def guarded(work: Callable[[], int | None]) -> NoReturn:
    """Run a command's work and end with its exit code; errors end as the table of exit codes says."""
    from reconciler.core.conditions import LEASE, LOCAL, SPEC_ERROR, UNKNOWN, USAGE
    from reconciler.core.errors import HostError, LeaseHeldError, StoreError

    try:
        raise typer.Exit(work() or 0)
    except UsageError as error:
        fail(USAGE.code, str(error))
    except SpecError as error:
        say_problems(error.problems)
        raise typer.Exit(SPEC_ERROR.code) from None
    except LeaseHeldError as error:
        fail(LEASE.code, str(error))
    except HostError as error:
        fail(UNKNOWN.code, chain(error))
    except StoreError as error:
        fail(LOCAL.code, chain(error))
    except ReconcilerError as error:
        fail(1, chain(error))


def chain(error: BaseException) -> str:
    """Give an error with what it came from, once, outermost first: ours and the system's; a library's words tell a user nothing."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = current.strerror if isinstance(current, OSError) and current.strerror else None
        text = text or plain(current)
        told = isinstance(current, ReconcilerError | OSError)
        if told and not any(text in said for said in parts):
            parts.append(text)
        current = current.__cause__
    return ": ".join(parts)

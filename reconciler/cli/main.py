"""`reconcile`: the commands, and nothing but their arguments. What they do is in the modules beside this one."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from reconciler.cli.context import PassOutput, go_on_unheard, guarded

BUG = 70
USAGE = 64

app = typer.Typer(
    name="reconcile",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"reconcile {version('inference-reconciler')}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def one_pass(
    context: typer.Context,
    specs_path: Annotated[Path, typer.Option("--specs", help="Folder (or file) of specs.")] = Path(
        "specs"
    ),
    server: Annotated[
        list[str] | None, typer.Option("--server", help="Only this server; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and its hash; change nothing.")
    ] = False,
    detailed: Annotated[
        bool,
        typer.Option(
            "--detailed-exitcode", help="With --dry-run: exit 2 when there are differences."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Carry the plan out without asking.")
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="HASH", help="Act only if the plan is still this one."),
    ] = None,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt", help="Take over units that were not made by this tool; they are saved first."
        ),
    ] = False,
    override_window: Annotated[
        str | None,
        typer.Option(
            "--override-window",
            metavar="WHY",
            help="Begin outside of change windows; kept on the host with the reason.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace units that were edited on the host; they are saved first."
        ),
    ] = False,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="With --dry-run: compare specs alone; no host is asked."),
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="REV", help="With --offline: what to compare with, as git names it."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="STATE",
            help="With --dry-run: plan against a state that `status --export` saved; no host is asked.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PLAN", help="With --dry-run: save the plan for `apply`."),
    ] = None,
    git: Annotated[
        str | None,
        typer.Option("--git", metavar="URL", help="Specs from this repository, not a folder."),
    ] = None,
    branch: Annotated[
        str | None, typer.Option("--branch", help="With --git: the branch.  [default: main]")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option("--path", help="With --git: the folder in it.  [default: specs]"),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Stay, and follow the specs; acts without asking."),
    ] = False,
    interval: Annotated[
        str | None,
        typer.Option("--interval", help="With --watch: between passes.  [default: 1m]"),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="ADDRESS:PORT", help="With --watch: for /healthz and /hook."
        ),
    ] = None,
    output: Annotated[
        PassOutput,
        typer.Option(
            "--output",
            "-o",
            help="json: one document for a plan, NDJSON for a run. markdown: a plan for a comment.",
        ),
    ] = PassOutput.TEXT,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Make GPU hosts run what the specs say: diff, drain, stop, prove the GPUs free, deploy, measure, apply or go back.

    Without a command it makes one pass over `specs/`: it shows the plan, asks, and carries it out.

    Examples:
        reconcile --dry-run                 show what would happen, change nothing
        reconcile                           show, ask, act
        reconcile --dry-run --offline --base origin/main -o markdown      what a pull request would do
        reconcile --server qwen --yes       one server, without asking
        reconcile --watch --git git@example.org:team/models.git    follow a branch
        reconcile --expect 1f3a9c0b7d21 --yes     act only on the plan that was shown

    Exit codes: 0 applied or in sync, 1 refused or failed, 2 differences (--detailed-exitcode, or nobody said yes), 3 rolled back, 4 down and not restored,
    5 plan stale, 6 lease held, 7 unknown, 8 up but unproven, 9 waiting, 64 usage, 65 spec errors, 70 our bug, 130 interrupted.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    from reconciler.cli.run import PassOptions
    from reconciler.cli.run import one_pass as run

    if expect is not None and not re.fullmatch(r"[0-9a-f]{12}", expect):
        sys.stderr.write(
            f"reconcile: {expect!r} is no plan hash; a plan shows it in its last line, twelve hex digits\n"
        )
        raise typer.Exit(USAGE)

    from reconciler.cli.watch import git_place, watched
    from reconciler.core.errors import UsageError

    try:
        place = git_place(git, branch, path)
    except UsageError as error:
        sys.stderr.write(f"reconcile: {error}\n")
        raise typer.Exit(USAGE) from None
    if watch:
        guarded(lambda: watched(context.params, specs_path, place))
    elif interval or listen:
        sys.stderr.write("reconcile: --interval and --listen belong to --watch\n")
        raise typer.Exit(USAGE)
    options = PassOptions(
        git=place,
        specs=specs_path,
        servers=tuple(server or ()),
        dry_run=dry_run,
        detailed=detailed,
        yes=yes,
        expect=expect,
        adopt=adopt,
        overwrite=overwrite,
        override_window=override_window or "",
        output=output,
        offline=offline,
        base=base,
        against=against,
        out=out,
    )
    guarded(lambda: run(options))


def no_pass() -> None:
    """Stand for the pass where the first word is a command: its thirty options need not be built to find none given."""


def refuse_options(context: typer.Context) -> None:
    """Refuse options of a pass before a command: they would be dropped in silence, `--dry-run` among them."""
    given = [
        name
        for name, value in context.params.items()
        if value not in (None, False, [], (), Path("specs"), PassOutput.TEXT)
    ]
    if given:
        word = {"specs_path": "--specs"}.get(given[0], f"--{given[0].replace('_', '-')}")
        sys.stderr.write(
            f"reconcile: {word} before {context.invoked_subcommand} belongs to a pass and would do nothing; "
            f"if {context.invoked_subcommand} has it (see its --help), write it behind. Nothing was done\n"
        )
        raise typer.Exit(USAGE)


TAKE_A_VALUE = frozenset(
    {"--specs", "--server", "--expect", "--base", "--against", "--out", "-o", "--output"}
    | {"--override-window", "--git", "--branch", "--path", "--interval", "--listen"}
)

COMMANDS = {
    "validate": "specs",
    "schema": "specs",
    "explain": "specs",
    "enrol": "enrol",
    "adopt": "adopt",
    "prune": "prune",
    "apply": "saved",
    "accept": "watch",
    "install-daemon": "watch",
    "comment": "comment",
    "status": "steer",
    "history": "steer",
    "show": "steer",
    "logs": "steer",
    "suspend": "steer",
    "resume": "steer",
    "retry": "steer",
    "rollback": "steer",
    "restart": "steer",
    "rehearse": "rehearse",
    "lab": "lab",
    "diagnose": "diagnose",
    "catalogue": "catalogue",
    "bench": "bench",
    "tune": "tune",
    "read": "read",
    "release": "release",
}
"""Which module brings a command. Only the one that is asked for is imported; help and mistakes need them all."""


def mounted(argv: Sequence[str]) -> typer.Typer:
    """Give the command line with what `argv` needs of it."""
    words = [word for before, word in pairwise(["", *argv]) if before not in TAKE_A_VALUE]
    module = next((COMMANDS[word] for word in words if word in COMMANDS), None)
    modules = [module] if module is not None else list(dict.fromkeys(COMMANDS.values()))
    is_pass = module is None and (not argv or argv[0].startswith("-"))
    if is_pass and not {"-h", "--help"} & set(argv):
        modules = []  # The options of a pass stand in the callback.
    for name in modules:
        import_module(f"reconciler.cli.{name}").register(app)
    takes = no_pass if argv and argv[0] in COMMANDS else one_pass
    app.callback(invoke_without_command=True)(takes)
    groups = [group.typer_instance for group in app.registered_groups]
    for command in (
        c for each in (app, *groups) if each is not None for c in each.registered_commands
    ):
        keep_examples(command.callback)
    keep_examples(one_pass)
    return app


def keep_examples(callback: Callable[..., Any] | None) -> None:
    """Mark the examples of a docstring as lines to be kept as they are; else they are wrapped as prose."""
    if callback is not None and callback.__doc__ is not None:
        callback.__doc__ = re.sub(r"\n\n( *)(Examples?:\n)", r"\n\n\1\b\n\1\2", callback.__doc__)


def main() -> None:
    """Run the command line; the console script's entry."""
    try:
        status: Any = mounted(sys.argv[1:])(standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except OSError as error:
        status = output_lost(error) if error.errno in {errno.EPIPE, errno.ENOSPC} else _bug(error)
    except Exception as error:  # noqa: BLE001  (the last line of defence: a bug is said, with its place, and ends with 70)
        status = _usage(error) if hasattr(error, "format_message") else _bug(error)
    sys.exit(status if isinstance(status, int) else 0)


def output_lost(error: OSError) -> int:
    """Say that what was printed could not be written: nobody reads it, or its disk is full."""
    go_on_unheard()
    if error.errno == errno.ENOSPC:
        sys.stderr.write(
            "reconcile: the output could not be written: no space left where it goes\n"
        )
        return 1
    return 0


def _usage(error: Any) -> int:
    """Say what is wrong with the command line. Typer carries its own copy of click's exceptions, which have no public name."""
    error.show()
    return USAGE


def _bug(error: BaseException) -> int:
    """Say that this is our own fault, where, and what it means for the hosts. Locals are never printed (T14)."""
    import traceback

    sys.stderr.write("".join(traceback.format_tb(error.__traceback__)[-6:]))
    sys.stderr.write(
        f"reconcile: {type(error).__name__}: {error}\n"
        "This is a bug in reconcile. A rollout that was under way is safe: the host goes back to the last good revision by itself after "
        "its deadline, or run `reconcile` again to go on with it.\n"
    )
    return BUG

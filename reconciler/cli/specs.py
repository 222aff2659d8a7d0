"""The commands about specs alone, which touch no host: `validate`, `schema`, `explain`.

What they print is made in `views/`; what is right or wrong is decided in `core/`. Everything heavy is imported
when a command runs, so that `--help` stays quick.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from reconciler.core.fleet import Fleet
    from reconciler.core.spec import EngineRules
    from reconciler.sources.base import Snapshot

EXIT_SPECS: Final = 65
EXIT_USAGE: Final = 64
FORMAT_VERSION: Final = "1.0"


class Output(StrEnum):
    """How a result is printed."""

    TEXT = "text"
    JSON = "json"


def register(app: typer.Typer, engines: Mapping[str, EngineRules] | None = None) -> None:
    """Mount the commands; `engines` replaces the product's own (tests)."""

    @app.command()
    def validate(
        path: Annotated[Path, typer.Argument(help="A folder of specs, or one file.")] = Path(
            "specs"
        ),
        output: Annotated[
            Output, typer.Option("--output", "-o", help="What to print.")
        ] = Output.TEXT,
    ) -> None:
        """Check every spec and say everything that is wrong, each with file, line and column.

        Needs no host. Exit code 0 when all is well, 65 when it is not.

        Examples:
            reconcile validate
            reconcile validate examples/quickstart.yaml
            reconcile validate -o json
        """
        raise typer.Exit(_validate(path, output, engines if engines is not None else _engines()))

    @app.command()
    def schema(
        write: Annotated[
            Path | None,
            typer.Option("--write", metavar="DIR", help="Write all schemas to this folder."),
        ] = None,
        check: Annotated[
            Path | None,
            typer.Option(
                "--check", metavar="DIR", help="Compare with this folder; exit 1 when it differs."
            ),
        ] = None,
    ) -> None:
        """Print the JSON Schema of specs, for editors.

        A first line `# yaml-language-server: $schema=…/schemas/spec.schema.json` in a spec file makes an editor
        complete and explain it.

        Examples:
            reconcile schema
            reconcile schema --write schemas
            reconcile schema --check schemas
        """
        raise typer.Exit(_schema(write, check, engines if engines is not None else _engines()))

    @app.command()
    def explain(
        field: Annotated[
            str, typer.Argument(help="A field's path, or Server, Host or Profile.")
        ] = "Server",
    ) -> None:
        """Explain a field of a spec: what it means, its default, and what a change of it costs.

        Examples:
            reconcile explain timeouts.stop
            reconcile explain gate.runs.max_ttft_p95
            reconcile explain Host
        """
        raise typer.Exit(_explain(field, engines if engines is not None else _engines()))


def _engines() -> Mapping[str, EngineRules]:
    """Give the product's engines: the one place here that knows where they are chosen."""
    from reconciler import wiring

    return wiring.engines()


# -- validate --------------------------------------------------------------------------------------------


def _validate(path: Path, output: Output, engines: Mapping[str, EngineRules]) -> int:
    from reconciler.core.errors import SpecError
    from reconciler.core.fleet import Fleet, load_fleet
    from reconciler.settings import load_settings
    from reconciler.sources.base import Snapshot
    from reconciler.sources.directory import Directory

    try:
        settings = load_settings(os.environ, home=Path.home(), uid=os.getuid())
        snapshot = Directory(path).snapshot()
    except SpecError as error:
        fleet, snapshot = Fleet(problems=error.problems), Snapshot(str(path), {}, (), "")
    else:
        fleet = load_fleet(
            snapshot.files,
            engines=engines,
            policy=settings.spec_policy,
            root=snapshot.root,
            unread=snapshot.unread,
        )
    if output is Output.JSON:
        typer.echo(json.dumps(_as_json(fleet), indent=2, ensure_ascii=False))
    else:
        _print(fleet, snapshot)
    return EXIT_SPECS if fleet.problems else 0


def _print(fleet: Fleet, snapshot: Snapshot) -> None:
    """Problems are talk, on standard error; that all is well is the result, on standard output."""
    from reconciler.views.problems import remarks, report, safe

    for line in remarks(fleet.warnings):
        typer.echo(line, err=True)
    if not fleet.problems:
        typer.echo(
            f"{snapshot.root}: {_count(len(fleet.servers), 'server')}, {_count(len(fleet.hosts), 'host')}: valid"
        )
        return
    typer.echo(report(fleet.problems, snapshot.files), err=True)
    held = (
        f"; held back: {', '.join(safe(name)[:80] for name in sorted(fleet.held))}"
        if fleet.held
        else ""
    )
    typer.echo(f"\n{_count(len(fleet.problems), 'problem')}{held}", err=True)


def _as_json(fleet: Fleet) -> dict[str, object]:
    return {
        "format_version": FORMAT_VERSION,
        "valid": not fleet.problems,
        "servers": [server.name for server in fleet.servers],
        "hosts": [host.name for host in fleet.hosts],
        "held": sorted(fleet.held),
        "problems": [asdict(problem) for problem in fleet.problems],
        "warnings": [asdict(warning) for warning in fleet.warnings],
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- schema ----------------------------------------------------------------------------------------------


def _schema(write: Path | None, check: Path | None, engines: Mapping[str, EngineRules]) -> int:
    from reconciler.core.spec_schema import schemas

    if write is not None and check is not None:
        typer.echo("give --write or --check, not both", err=True)
        return EXIT_USAGE
    texts = {
        name: json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in schemas(engines).items()
    }
    if write is not None:
        write.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (write / name).write_text(text, encoding="utf-8")
        typer.echo(f"wrote {', '.join(sorted(texts))} to {write}", err=True)
        return 0
    if check is not None:
        return _compare(check, texts)
    typer.echo(texts["spec.schema.json"], nl=False)
    return 0


def _compare(folder: Path, texts: Mapping[str, str]) -> int:
    stale = [name for name, text in texts.items() if not _holds(folder / name, text)]
    for name in sorted(stale):
        typer.echo(f"{folder / name}: differs; run `reconcile schema --write {folder}`", err=True)
    return 1 if stale else 0


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except OSError:
        return False


# -- explain ---------------------------------------------------------------------------------------------


def _explain(field: str, engines: Mapping[str, EngineRules]) -> int:
    from reconciler.core.spec_schema import schemas
    from reconciler.views.explanation import NoSuchFieldError, explain

    try:
        typer.echo(explain(schemas(engines)["spec.schema.json"], field))
    except NoSuchFieldError as error:
        typer.echo(str(error), err=True)
        return EXIT_USAGE
    return 0

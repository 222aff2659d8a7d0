"""`reconcile catalogue`: the flags of an installed engine, as a file. Asking is in `effects/introspect.py`."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from reconciler.cli.context import guarded


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def catalogue(
        python: Annotated[
            str,
            typer.Option("--python", metavar="PATH", help="The interpreter that has the engine."),
        ],
        engine: Annotated[
            str, typer.Option("--engine", metavar="NAME", help="sglang, vllm or llamacpp.")
        ],
        out: Annotated[
            Path | None, typer.Option("--out", metavar="FILE", help="Write here; else print it.")
        ] = None,
    ) -> None:
        """Ask an installed engine for its flags, by its own argument parser, and print them as a catalogue.

        Imports the engine in that interpreter, as you, without a GPU in sight.

        Examples:
            reconcile catalogue --python /opt/sglang/bin/python --engine sglang
            reconcile catalogue --python /opt/vllm/bin/python --engine vllm --out vllm-0.33.0.json
        """
        guarded(lambda: _catalogue(python, engine, out))


def _catalogue(python: str, engine: str, out: Path | None) -> None:
    from reconciler.core.errors import UsageError
    from reconciler.effects.introspect import introspect
    from reconciler.engines.catalogue import versions

    if engine not in {"sglang", "vllm", "llamacpp"}:
        raise UsageError(
            f"there is no parser to ask in {engine!r}; there are: sglang, vllm, llamacpp"
        )
    program = resources.files("reconciler.effects").joinpath("flags_program.py").read_text()
    data, book = introspect(python, engine, program)
    if out is None:
        sys.stdout.write(data.decode())
    else:
        try:
            out.write_bytes(data)
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    known = "known here already" if book.version in versions(engine) else "not known here yet"
    sys.stderr.write(f"{engine} {book.version}: {len(book.flags)} flags, a version {known}\n")

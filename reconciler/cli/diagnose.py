"""`reconcile diagnose`: what a log of a serving engine means. Reading is in `effects/log_files.py`, judging in `core/diagnose.py`."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from reconciler.cli.context import Output, guarded

ENGINES: Final = ("sglang", "vllm", "llamacpp", "custom")


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def diagnose(
        file: Annotated[
            str, typer.Argument(metavar="FILE", help="A log, or - for standard input.")
        ],
        engine: Annotated[
            str | None,
            typer.Option(
                "--engine",
                metavar="NAME",
                help="sglang, vllm, llamacpp or custom; else the log tells.",
            ),
        ] = None,
        exit_status: Annotated[
            int | None,
            typer.Option(
                "--exit-status",
                metavar="N",
                min=-64,
                max=255,
                help="How the process ended, if it did: 0 to 255, or -N for signal N.",
            ),
        ] = None,
        output: Annotated[
            Output, typer.Option("--output", "-o", help="What to print.")
        ] = Output.TEXT,
    ) -> None:
        """Say why a serving engine failed, by its log: the cause, the line that decides, what to change, what to do.

        Reads plain logs, journalctl in any output form, docker and podman logs, with the kernel's lines among them if they are there.
        What is not known is said to be Unknown. Exit code 0 whatever the log says.

        Examples:
            journalctl -u sglang-qwen -b -o short | reconcile diagnose -
            reconcile diagnose vllm.log --engine vllm --exit-status 1
            reconcile diagnose vllm.log -o json
        """
        guarded(lambda: _diagnose(file, engine, exit_status, output))


def _diagnose(file: str, engine: str | None, exit_status: int | None, output: Output) -> None:
    from reconciler.core.diagnose import Scan, judge
    from reconciler.core.errors import UsageError
    from reconciler.effects.log_files import log_lines
    from reconciler.engines.catalogue import flag_history
    from reconciler.views.diagnosis import diagnosis_json, diagnosis_text

    if engine is not None and engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}; there are: {', '.join(ENGINES)}")
    scan = Scan(engine)
    for line in log_lines(file):
        scan.feed(line)
    found = judge(scan, exit_status=exit_status, flag_history=flag_history)
    name = "standard input" if file == "-" else file
    show = diagnosis_json if output is Output.JSON else diagnosis_text
    sys.stdout.write(show(found, name))

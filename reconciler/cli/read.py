"""`reconcile read KIND`: how this tool reads one recorded output of a host's program. Touches no host."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from reconciler.cli.context import Output, fail, guarded, out, out_markup
from reconciler.core.errors import UsageError

BYTES_MAX = 16 * 1024 * 1024
"""More than any program prints that is read; a live reading gives up far earlier."""

BAD_CONTEXT = 65


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def read(
        kind: Annotated[str, typer.Argument(help="Which program's output; `list` names them all.")],
        exit_status: Annotated[
            int,
            typer.Option(
                "--exit",
                help="Its exit status; 124 for a probe that did not end in time, -1 for a connection that closed without one.",
            ),
        ] = 0,
        stdout: Annotated[
            str, typer.Option("--stdout", metavar="FILE", help="What it printed; - reads it here.")
        ] = "",
        stderr: Annotated[
            str, typer.Option("--stderr", metavar="FILE", help="What it complained about.")
        ] = "",
        context: Annotated[
            str,
            typer.Option(
                "--context",
                metavar="FILE",
                help="YAML or JSON: what must be known to judge it, such as command, expected_uuids, baseline_mib, euid.",
            ),
        ] = "",
        output: Annotated[
            Output, typer.Option("--output", "-o", help="text or json.")
        ] = Output.TEXT,
    ) -> None:
        """Show how a recorded output of nvidia-smi, fuser, systemctl and others is read: a verdict, and the facts in it.

        Verdicts: good (the facts hold), unknown (no evidence either way: nothing is done on it), fault (proof that something is broken),
        refused (it did not run, or may not). Exit code 0 whatever the verdict; 64 for a kind or a file that is not there, 65 for a
        context that cannot be read.

        Examples:
            reconcile read nvidia-smi-gpu --exit 0 --stdout smi.txt --context gpus.yaml
            nvidia-smi -L | reconcile read nvidia-smi-list --stdout - -o json
            reconcile read nvidia-smi-gpu --exit 124 --stdout /dev/null
            reconcile read list
        """
        guarded(lambda: _read(kind, exit_status, (stdout, stderr, context), output))


def _read(kind: str, exit_status: int, files: tuple[str, str, str], output: Output) -> int:
    from reconciler.helper.recorded import KINDS, read_recorded
    from reconciler.views.recorded import recorded_json, recorded_lines

    if kind == "list":
        out("\n".join(sorted(KINDS)))
        return 0
    if kind not in KINDS:
        message = f"there is no kind {kind!r}; there are: {', '.join(sorted(KINDS))}"
        raise UsageError(message)
    stdout, stderr, context = files
    if not stdout:
        message = "--stdout is missing: name the file that holds what the program printed (- for standard input, /dev/null for nothing)"
        raise UsageError(message)
    if [stdout, stderr, context].count("-") > 1:
        message = "only one of --stdout, --stderr and --context can be read from standard input"
        raise UsageError(message)
    known = _context(context)
    texts = _text(stdout), _text(stderr)
    try:
        judged = read_recorded(kind, exit_status, *texts, known)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not known:
            raise
        fail(BAD_CONTEXT, f"{context}: does not fit a {kind} ({type(error).__name__}: {error})")
    if output is Output.JSON:
        out(json.dumps(recorded_json(kind, judged), indent=2))
    else:
        out_markup(recorded_lines(kind, judged))
    return 0


def _text(name: str) -> str:
    """Give a file's text. Bytes that are no UTF-8 stay what they are: a name of a process may hold anything."""
    if not name:
        return ""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(BYTES_MAX + 1)
        else:
            with Path(name).open("rb") as stream:
                data = stream.read(BYTES_MAX + 1)
    except OSError as error:
        message = f"{name}: cannot be read ({error.strerror})"
        raise UsageError(message) from error
    if len(data) > BYTES_MAX:
        message = f"{name}: more than {BYTES_MAX // 1024 // 1024} MiB; no program that is read prints so much"
        raise UsageError(message)
    return data.decode("utf-8", "surrogateescape")


def _context(name: str) -> Mapping[str, Any]:
    """Read what is known beside the output. A whole case of a collection (with `command` and `context`) will do as well."""
    text = _text(name)
    if not text.strip():
        return {}
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        data = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        fail(BAD_CONTEXT, f"{name}: not YAML or JSON ({str(error).splitlines()[0]})")
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        fail(BAD_CONTEXT, f"{name}: not a map of what is known, such as `expected_uuids: [...]`")
    inner = data.get("context")
    case = {"command": data["command"]} if isinstance(data.get("command"), str) else {}
    return {**case, **inner} if isinstance(inner, Mapping) else dict(data)

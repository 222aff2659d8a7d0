"""The console script's entry: light, so that `reconcile --help` costs little more than starting Python.

The top-level help is kept as text (`help.txt`, compared with the real one by a test); anything else goes to `main.py`.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    # What a start makes are modules and models, and they stay: looking for cycles in them, in between and once more at
    # the exit, took a quarter of the CPU of `validate`. A daemon still has its garbage looked for, in larger heaps.
    gc.set_threshold(100_000)
    # No plugin of another package runs inside our models, and none is looked for.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    if sys.argv[1:] in (["--help"], ["-h"]):
        try:
            sys.stdout.write((Path(__file__).parent / "help.txt").read_text(encoding="utf-8"))
            sys.stdout.flush()
        except OSError as error:
            from reconciler.cli.main import output_lost

            sys.exit(output_lost(error))
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or log that has no sign for a character gets its escape, never the end of a run.
            stream.reconfigure(errors="backslashreplace")
    try:
        from reconciler.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        run()
    finally:
        gc.freeze()

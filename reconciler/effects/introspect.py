"""Ask an installed engine for its flags: its interpreter runs our program, with a limit on time and on what it may print."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from reconciler.core.errors import UsageError
from reconciler.engines.catalogue import Catalogue, read_catalogue

LIMIT_S: Final = 180.0
"""Importing an engine and torch from a cold disk takes a minute or two."""

OUTPUT_MAX: Final = 8 << 20
"""Forty times the largest catalogue known."""

TALK_MAX: Final = 2000


def introspect(
    python: str, engine: str, program: str, *, limit_s: float = LIMIT_S
) -> tuple[bytes, Catalogue]:
    """Give the catalogue of the engine that an interpreter has, as the bytes of a file and as it is read.

    Runs as whoever asks, without a GPU in sight.

    Raises:
        UsageError: The interpreter cannot be run, did not answer within the limits, or has no such engine.
    """
    if not Path(python).is_file():
        raise UsageError(f"{python} is no interpreter; nothing was written")
    answer, talk, why = _run([python, "-I", "-c", program, engine], limit_s)
    if why is not None:
        last = talk.decode(errors="replace").strip().splitlines()
        told = f"; it said: {last[-1][:300]}" if last else ""
        raise UsageError(f"{python}: {why}{told}; nothing was written")
    try:
        book = read_catalogue(answer)
    except ValueError as error:
        raise UsageError(
            f"{python}: what it answered is no catalogue ({error}); nothing was written"
        ) from error
    if not book.flags or book.engine != engine:
        raise UsageError(
            f"{python}: what it answered has no flags of {engine}; nothing was written"
        )
    return json.dumps(json.loads(answer), indent=1).encode() + b"\n", book


def _run(argv: list[str], limit_s: float) -> tuple[bytes, bytes, str | None]:
    """Give what a program printed, the end of its talk, and why it cannot be used."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        process = subprocess.Popen(  # noqa: S603  (the interpreter that was asked about)
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return b"", b"", f"it cannot be run ({error.strerror})"
    try:
        answer, talk, why = _listened(process, time.monotonic() + limit_s, limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # Our own session: whatever it left behind goes with it.
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if why is None and process.returncode != 0 and not answer:
        why = f"it has no such engine that can be imported (exit status {process.returncode})"
    return answer, talk, why


def _listened(
    process: subprocess.Popen[bytes], until: float, limit_s: float
) -> tuple[bytes, bytes, str | None]:
    assert process.stdout is not None, "it was asked for"
    assert process.stderr is not None, "it was asked for"
    parts: dict[str, bytes] = {"answer": b"", "talk": b""}
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "answer")
        selector.register(process.stderr, selectors.EVENT_READ, "talk")
        while selector.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return parts["answer"], parts["talk"], f"it did not answer within {limit_s:.0f} s"
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 65_536)
                if not chunk:
                    selector.unregister(key.fileobj)
                parts[key.data] += chunk
            parts["talk"] = parts["talk"][-TALK_MAX:]
            if len(parts["answer"]) > OUTPUT_MAX:
                return b"", parts["talk"], f"it printed more than {OUTPUT_MAX >> 20} MiB"
    try:
        process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return parts["answer"], parts["talk"], f"it did not end within {limit_s:.0f} s"
    return parts["answer"], parts["talk"], None

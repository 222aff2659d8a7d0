"""Running a program, or a risky read, with a limit on everything; the only place that starts a process.

A program gets a fixed argument list (never a shell), a fixed environment, no standard input, a time limit
and a cap on what is kept of its output. A read that can block for ever on a wedged process or a hung file
system is made in a child of its own, which can be left behind. Part of the shipped helper (see `outputs.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, TypeVar

from reconciler.helper.machine import Reading
from reconciler.helper.outputs import known, unknown

PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin"
PROGRAM_ENVIRONMENT: Mapping[str, str] = {
    "PATH": PROGRAM_PATH,
    "LC_ALL": "C",
    "LANG": "C",
    "TZ": "UTC",
    "SYSTEMD_COLORS": "0",
    "SYSTEMD_PAGER": "",
}
OUTPUT_BYTES_MAX = 1 << 20
TIMED_OUT = 124  # What timeout(1) exits with, so that the parsers know one number.
_UNKILLABLE_GRACE_S = 2.0  # A killed program is gone by then, or stuck in the kernel.
_NOTHING = b'{"known": []}'
"""The line of nearly all processes, which have no GPU mapped: it need not be parsed a thousand times."""
_GATHER_S = 0.002  # Thousands of results are taken in handfuls: waking up for each costs more than making it.

Item = TypeVar("Item")


class Captured(NamedTuple):
    """What a program left: its exit status (128 + n after signal n, 124 after our time limit), its output."""

    exit_status: int
    stdout: str
    stderr: str
    truncated: bool


def capture(
    argv: Sequence[str],
    timeout_s: float,
    bytes_max: int = OUTPUT_BYTES_MAX,
    environment: Optional[Mapping[str, str]] = None,
    started: Optional[Callable[[int], None]] = None,
    **popen: Any,
) -> Captured:
    """Run a program to its end or its limit; OSError when it cannot be started.

    `started` is told the pid as soon as there is one. At the limit the program's whole session is killed;
    one that SIGKILL cannot end is left behind rather than waited for.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(PROGRAM_ENVIRONMENT if environment is None else environment),
        cwd="/",
        start_new_session=True,
        **popen,
    )
    try:
        if started is not None:
            started(process.pid)
        output, truncated, in_time = _drain(process, time.monotonic() + timeout_s, bytes_max)
        status = _end(process, in_time)
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return Captured(status, output[0], output[1], truncated)


def _drain(process: Any, deadline: float, bytes_max: int) -> Any:
    """Read both streams side by side (one that fills would block the program) until both end."""
    streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    order, truncated, waiting = list(streams), False, set(streams)
    while waiting:
        left = deadline - time.monotonic()
        ready = select.select(list(waiting), [], [], max(left, 0))[0] if left > 0 else []
        if not ready:
            break
        for fd in ready:
            chunk = os.read(fd, 65536)
            if not chunk:
                waiting.discard(fd)
            room = bytes_max - len(streams[fd])
            streams[fd] += chunk[:room]
            truncated = truncated or len(chunk) > room
    if not waiting:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.05))
    texts = [bytes(streams[fd]).decode("utf-8", "replace") for fd in order]
    return texts, truncated, process.poll() is not None


def _end(process: Any, in_time: bool) -> int:  # noqa: FBT001 - private, named at its one call
    if not in_time:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_UNKILLABLE_GRACE_S)
        return TIMED_OUT
    code = int(process.returncode)
    return code if code >= 0 else 128 - code


def each_guarded(
    items: Sequence[Item], act: Callable[[Item], Any], limit_s: float
) -> List[Reading]:
    """Return a reading of `act(item)` for each item, each within its own limit, in order.

    The acts run in a forked child. One that blocks makes its own item unknown, and the rest go on in
    another child. Results travel as JSON.
    """
    results: List[Reading] = []
    while len(results) < len(items):
        results += _guarded_run(items[len(results) :], act, limit_s)
    return results


def _guarded_run(
    items: Sequence[Item], act: Callable[[Item], Any], limit_s: float
) -> List[Reading]:
    """Do items in one child until all are done or one blocks, which then is the last and unknown."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _guarded_child(items, act, write_end)
    os.close(write_end)
    results: List[Reading] = []
    rest = b""
    try:
        while len(results) < len(items):
            if not select.select([read_end], [], [], limit_s)[0]:
                results.append(unknown(f"no answer within {limit_s:g} s"))
                break
            chunk = os.read(read_end, 1 << 20)
            if not chunk:
                results.append(unknown("the reading child ended"))
                break
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            results += [known([]) if line == _NOTHING else json.loads(line) for line in lines]
            if len(results) < len(items):
                time.sleep(_GATHER_S)
    finally:
        os.close(read_end)
        _reap(child)
    return results


def _guarded_child(items: Sequence[Item], act: Callable[[Item], Any], write_end: int) -> None:
    try:
        for item in items:
            result: Dict[str, Any]
            try:
                result = known(act(item))
            except Exception as error:  # the child has no caller to raise to
                result = unknown(f"{type(error).__name__}: {error}")
            data = json.dumps(result).encode("ascii") + b"\n"
            while data:
                data = data[os.write(write_end, data) :]
    finally:
        os._exit(0)


def _reap(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + _UNKILLABLE_GRACE_S
    pause_s = 0.0002  # It is ending already: half of all looks at a host would be this wait.
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(child, os.WNOHANG)[0] == 0:
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.01)
                continue
        return

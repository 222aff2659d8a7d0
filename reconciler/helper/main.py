"""The ways into the helper: installed, carried, and run by our units. The last part of the joined program.

Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from typing import BinaryIO, List, Optional

from reconciler.helper.acts import answer
from reconciler.helper.guard import guard_main
from reconciler.helper.host import RealMachine
from reconciler.helper.install import renew_at_start
from reconciler.helper.machine import Machine
from reconciler.helper.protocol import frame
from reconciler.helper.records import encoded
from reconciler.helper.revert import tick_main

REQUEST_CAP_BYTES = 8 * 1024 * 1024  # An enrolment carries the program itself, some 200 kB.


def keep_going() -> None:
    """Outlive the connection: a helper that dies of a broken pipe half-way leaves a torn effect (F37)."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o077)


def main_installed(argv: List[str], stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Answer request after request until the end of input, or run what a unit asks for."""
    keep_going()
    machine = RealMachine()
    if argv[:1] == ["guard"] and len(argv) == 2:
        return guard_main(machine, argv[1], renew_at_start)
    if argv == ["tick"]:
        return tick_main(machine)
    if argv:
        print("usage: helper [guard UNIT | tick]", file=sys.stderr)  # noqa: T201
        return 64
    return serve(machine, sys.argv[0], stdin, stdout)


def serve(machine: Machine, program: Optional[str], stdin: BinaryIO, stdout: BinaryIO) -> int:
    """Answer request after request until the end of input; return the exit status."""
    while True:
        line = stdin.readline(REQUEST_CAP_BYTES + 1)
        if not line:
            return 0
        if len(line) > REQUEST_CAP_BYTES:
            return 65
        respond(line, machine, program, stdout)


def main_unit(argv: List[str]) -> None:
    """Answer what an installed helper is asked: what the launcher calls; `observe.launcher_text` says why."""
    sys.exit(main_installed(argv, sys.stdin.buffer, sys.stdout.buffer))


def main_carried(request: bytes) -> None:
    """Answer the one request that travelled inside the program."""
    keep_going()
    respond(base64.b64decode(request), RealMachine(), None, sys.stdout.buffer)


def main_kept() -> None:
    """Answer, carried, request after request: a host where nothing is installed is looked at many times in a rollout."""
    keep_going()
    sys.exit(serve(RealMachine(), None, sys.stdin.buffer, sys.stdout.buffer))


def respond(line: bytes, machine: Machine, program: Optional[str], stdout: BinaryIO) -> None:
    """Answer one request and print it at once, at the end, framed."""
    try:
        request = json.loads(line)
    except ValueError:
        request = {}
    if not isinstance(request, dict):
        request = {}
    if isinstance(machine, RealMachine):
        machine.forget()  # What an earlier request saw is not this one's to act on.
    result = answer(request, machine, program)
    nonce = result["nonce"] if isinstance(result["nonce"], str) else ""
    try:
        stdout.write(frame(nonce, encoded(result)))
        stdout.flush()
    except OSError:
        pass  # Nobody listens any more; the answer is kept under its nonce.

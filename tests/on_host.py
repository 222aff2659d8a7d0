"""Run the helper's `RealMachine` inside a lab host, with that host's own python3."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import reconciler.helper
from reconciler.helper import build
from reconciler.lab.hosts import SystemdHost

HERE = Path(reconciler.helper.__file__).parent

_BOOTSTRAP = """
import base64, json, sys, types
for name in ("reconciler", "reconciler.helper"):
    sys.modules[name] = types.ModuleType(name)
for name, text in json.loads(base64.b64decode(SOURCES)):
    module = types.ModuleType("reconciler.helper." + name)
    sys.modules[module.__name__] = module
    exec(compile(text, name + ".py", "exec"), module.__dict__)
host = sys.modules["reconciler.helper.host"]
processes = sys.modules["reconciler.helper.processes"]
programs = sys.modules["reconciler.helper.programs"]
readings = sys.modules["reconciler.helper.readings"]
m = host.RealMachine()
"""


def ask(host: SystemdHost, code: str, *, user: str | None = None, last: str = "host") -> Any:
    """Run code that sets `answer`, with `m` a RealMachine of that host; return the answer. `last` is the last module it needs."""
    modules = build.PARTS[: build.PARTS.index(last) + 1]
    sources = [(name, (HERE / f"{name}.py").read_text()) for name in modules]
    packed = base64.b64encode(json.dumps(sources).encode()).decode()
    program = f"SOURCES = {packed!r}\n{_BOOTSTRAP}\n{code}\nprint('\\n@@' + json.dumps(answer))\n"
    command = ["/usr/bin/python3", "-I", "-S", "-"]
    if user is not None:
        command = ["setpriv", "--reuid", user, "--regid", user, "--init-groups", *command]
    said = host.check(command, program.encode())
    return json.loads(said.rpartition("\n@@")[2])

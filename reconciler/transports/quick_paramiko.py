"""paramiko, loaded without the task runner that it brings along.

paramiko loads `invoke` for one option (`Match exec`) of a reader that we do not use (`ssh_config.py` says why): a
quarter of a second of each command. It takes the runner's absence as an answer, so it is told that there is none.
"""

from __future__ import annotations

import sys
from typing import Any, cast

_modules = cast("dict[str, Any]", sys.modules)
_absent = "invoke" not in _modules
if _absent:
    _modules["invoke"] = None  # How Python itself marks a module that cannot be imported.
try:
    import paramiko
    import paramiko.agent
    import paramiko.pkey
    import paramiko.ssh_exception
finally:
    if _absent:
        del _modules["invoke"]

__all__ = ["paramiko"]

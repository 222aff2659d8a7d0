"""Joins the helper's modules into the one program that is shipped to hosts.

Deterministic: the same sources give the same bytes, and their digest names the installed file. Own imports
are dropped, because all parts share one namespace; what that asks of the parts (no name defined twice, no
module but the standard library) is checked here, at each build. Runs on the controller, not on hosts.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any

PARTS = (
    "machine",
    "outputs",
    "readings",
    "redaction",
    "files",
    "programs",
    "processes",
    "inspection",
    "amd",
    "fetching",
    "host",
    "records",
    "protocol",
    "environments",
    "observe",
    "quarantine",
    "guard",
    "consented",
    "enrol",
    "install",
    "retire",
    "acts",
    "revert",
    "main",
)
"""In the order of their imports of each other."""

PACKAGE = "reconciler.helper"
MINIMUM = (3, 9)
HEADER = "# The helper of reconcile: one program, made from its parts; see helper/build.py there.\n"


class BuildError(Exception):
    """The parts cannot be joined: a programming error, found by the first test that builds."""


@functools.lru_cache(maxsize=1)
def program() -> str:
    """Return the joined program."""
    bodies, defined = [], dict[str, str]()
    for part in PARTS:
        source = resources.files(PACKAGE).joinpath(f"{part}.py").read_text(encoding="utf-8")
        tree = ast.parse(source, filename=f"{part}.py", feature_version=MINIMUM)
        check_names(part, tree, defined)
        bodies.append(f"\n# ---- {part}.py\n{body_of(source, tree)}")
    return HEADER + "from __future__ import annotations\n" + "".join(bodies)


@functools.lru_cache(maxsize=1)
def digest() -> str:
    """Return the first 12 hex digits of the program's SHA-256; they name the installed file."""
    return hashlib.sha256(program().encode()).hexdigest()[:12]


def carried(request: Mapping[str, Any]) -> bytes:
    """Return the program with a request in its last line, for the standard input of `python3 -I -S -`.

    The call is the last line, so a program that was cut on its way is no program or does nothing.
    """
    data = base64.b64encode(json.dumps(request, ensure_ascii=True).encode()).decode()
    return f'{program()}\nmain_carried(b"{data}")\n'.encode()


def kept() -> bytes:
    """Return the program, its length in a line before it, for a Python that reads it so and then goes on with requests."""
    data = f"{program()}\nmain_kept()\n".encode()
    return b"%d\n" % len(data) + data


def body_of(source: str, tree: ast.Module) -> str:
    """Return a part without its docstring, its own imports, and `__all__`."""
    lines = source.splitlines()
    dropped: set[int] = set()
    for node in tree.body:
        if is_own_import(node) or is_docstring(node) or is_public_list(node):
            dropped.update(range(node.lineno - 1, (node.end_lineno or node.lineno)))
    kept = [line for number, line in enumerate(lines) if number not in dropped]
    return "\n".join(kept).strip("\n") + "\n"


def is_own_import(node: ast.stmt) -> bool:
    """Say whether a statement imports from `__future__` or from the helper itself."""
    if not isinstance(node, ast.ImportFrom):
        return False
    return node.module == "__future__" or node.level > 0 or (node.module or "").startswith(PACKAGE)


def is_docstring(node: ast.stmt) -> bool:
    """Say whether a statement is a bare text; parts explain themselves in the repository."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_public_list(node: ast.stmt) -> bool:
    """Say whether a statement is `__all__`."""
    return isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
    )


def check_names(part: str, tree: ast.Module, defined: dict[str, str]) -> None:
    """Refuse a part that defines a name of another part, or imports what a host may not have.

    In one namespace the later definition would silently replace the earlier one.
    """
    for node in tree.body:
        for name, origin in names_of(part, node):
            if defined.setdefault(name, origin) != origin:
                raise BuildError(f"{name} is defined by {defined[name]} and by {origin}")
    for inner in ast.walk(tree):
        if isinstance(inner, ast.ImportFrom) and inner not in tree.body and is_own_import(inner):
            raise BuildError(
                f"{part}.py:{inner.lineno}: an own import inside a function cannot be joined"
            )


def names_of(part: str, node: ast.stmt) -> list[tuple[str, str]]:
    """Return (name, where it comes from) of all that a statement puts into the namespace."""
    found: list[tuple[str, str]] = []
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        found.append((node.name, part))
    elif isinstance(node, ast.Import):
        for alias in node.names:
            require_standard(part, alias.name)
            found.append((alias.asname or alias.name.partition(".")[0], f"import {alias.name}"))
    elif isinstance(node, ast.ImportFrom) and not is_own_import(node):
        require_standard(part, node.module or "")
        found += [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.asname is not None:
                raise BuildError(f"{part}.py: {alias.name} as {alias.asname} cannot be joined")
    elif isinstance(node, ast.Assign | ast.AnnAssign) and not is_public_list(node):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            found += [(n.id, part) for n in ast.walk(target) if isinstance(n, ast.Name)]
    return found


def require_standard(part: str, module: str) -> None:
    """Refuse a module that is not of the standard library."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        raise BuildError(f"{part}.py imports {module}, which is not in the standard library")


__all__ = ["BuildError", "carried", "digest", "kept", "program"]

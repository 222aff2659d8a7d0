"""Where each value of a merged server comes from: its own document, a profile, or the default. Pure.

`fleet.py` merges and judges; this walks the same chain of documents again for a person who asks, and agrees with it by a
test. What is shown is what is hashed and applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from reconciler.core import yaml_text
from reconciler.core.fleet import MAX_CHAIN, Fleet, Place
from reconciler.core.sealed import is_sealed
from reconciler.core.spec import Server
from reconciler.core.yaml_text import Mapping as Tree
from reconciler.core.yaml_text import Node, Scalar

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Resolved:
    """One value: its dotted path, plain JSON, and where it was written; `place` is None for a default."""

    path: str
    value: Any
    origin: str
    """`server`, `profile NAME` or `default`."""
    place: Place | None = None


def resolved(files: Mapping[str, bytes], fleet: Fleet, name: str) -> tuple[Resolved, ...]:
    """Give every value of one server with its origin, in the order of the spec language.

    Args:
        files: The bytes that the fleet was loaded from.
        fleet: What they mean; the server is in it.
        name: Its name.
    """
    server = next(s for s in fleet.servers if s.name == name)
    chain = _chain(files, name)
    return tuple(_origin(path, value, chain) for path, value in _leaves(_data(server), ()))


def _data(server: Server) -> dict[str, Any]:
    return server.model_dump(mode="json")


def _leaves(
    data: Mapping[str, Any], before: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in data.items():
        path = (*before, key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _chain(files: Mapping[str, bytes], name: str) -> list[tuple[str, Tree]]:
    """Find the server's document and the profiles that it extends, nearest first."""
    servers: dict[str, Tree] = {}
    profiles: dict[str, Tree] = {}
    for file, content in sorted(files.items()):
        if is_sealed(file):
            continue
        if b"Profile" not in content and name.encode() not in content and b"\\" not in content:
            continue
        for document in yaml_text.parse(content, file).documents:
            tree = document.root
            if isinstance(tree, Tree) and document.sound:
                kind = {"Server": servers, "Profile": profiles}.get(_text(tree, "kind"), {})
                kind.setdefault(_text(tree, "name"), tree)
    tree = servers[name]
    chain = [("server", tree)]
    while len(chain) <= MAX_CHAIN + 1:
        base = _text(tree, "extends")
        if base not in profiles:
            break
        tree = profiles[base]
        chain.append((f"profile {base}", tree))
    return chain


def _text(tree: Tree, key: str) -> str:
    node = tree.get(key)
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else ""


def _origin(path: tuple[str, ...], value: Any, chain: list[tuple[str, Tree]]) -> Resolved:
    """Find the nearest document that says something of a path: a value, or something in its way."""
    shown = ".".join(path)
    for origin, tree in chain:
        if origin != "server" and path == ("name",):
            break  # A profile's name is its own.
        found = _find(tree, path)
        if found is None:
            continue
        if isinstance(found, Scalar) and found.value is None:
            break  # Null removes what a profile says, and the default is left.
        return Resolved(shown, value, origin, Place(found.file, found.line, found.column))
    return Resolved(shown, value, DEFAULT)


def _find(tree: Tree, path: tuple[str, ...]) -> Node | None:
    """Follow a path as far as it goes; what stands in its way (a list, a text, null) hides all that is below it."""
    node: Node = tree
    for part in path:
        if not isinstance(node, Tree):
            return node
        below = node.get(part)
        if below is None:
            return None
        node = below
    return node


def resolved_json(name: str, revision: str, values: tuple[Resolved, ...]) -> dict[str, Any]:
    """Give it as one document."""
    return {
        "format_version": "1.0",
        "type": "resolved",
        "server": name,
        "revision": revision,
        "values": [
            {
                "path": r.path,
                "value": r.value,
                "origin": r.origin,
                "file": r.place.file if r.place else None,
                "line": r.place.line if r.place else None,
            }
            for r in values
        ],
    }

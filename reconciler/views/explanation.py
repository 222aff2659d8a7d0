"""What a field of the spec language means, for `reconcile explain`: worded from the schema that editors use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from reconciler.core.grammar import nearest
from reconciler.core.revision import EFFECT_CLASSES, EffectClass, effect_class

Schema = Mapping[str, Any]

KINDS: Final = ("Server", "Host", "Profile")

_HEAD: Final = frozenset({"apiVersion", "kind", "name", "extends"})

_EFFECT: Final = {
    EffectClass.CONTROLLER: "A change needs nothing on the host; the next pass uses it.",
    EffectClass.RELOAD: "A change installs the unit anew; the process is not touched.",
    EffectClass.RESTART: "A change takes a whole rollout: drain, stop, start, gate.",
}


@dataclass(frozen=True, slots=True)
class NoSuchFieldError(Exception):
    """There is no field of this name; `hint` says which was perhaps meant."""

    field: str
    hint: str

    def __str__(self) -> str:
        """Say it."""
        return (
            f"there is no field `{self.field}`{self.hint}; `reconcile explain` lists those of a Server, "
            "`reconcile explain Host` and `Profile` the others"
        )


def explain(schema: Schema, field: str) -> str:
    """Explain a field by its dotted path, such as `gate.runs.max_ttft_p95`, or a kind.

    Args:
        schema: The schema of all kinds (`spec.schema.json`).
        field: Begins with a kind, or at a Server's fields (a Host's, where a Server has none of the name).

    Raises:
        NoSuchFieldError: No document has this field.
    """
    path = [part for part in re.split(r"[.\[\]]+", field) if part and not part.isdigit()]
    for kind in KINDS:
        if path and path[0].lower() == kind.lower():
            return _explained(schema, kind, path[1:], field)
    last: NoSuchFieldError | None = None
    for kind in ("Server", "Host"):
        try:
            return _explained(schema, kind, path, field)
        except NoSuchFieldError as error:
            last = last or error
    assert last is not None
    raise last


def _explained(schema: Schema, kind: str, path: list[str], field: str) -> str:
    node: Schema = schema["$defs"][kind]
    named = kind
    own = ""
    for depth, part in enumerate(path):
        children = _children(schema, node)
        inner = children.get(part) or _by_pattern(schema, node, part)
        if not inner:
            if _is_free(schema, node):
                # The key is somebody else's word; what can be said is said of the map.
                path, own = path[:depth], ".".join(path[depth:])
                break
            raise NoSuchFieldError(field, nearest(part, children))
        node, named = inner, part
    page = list(_page(schema, node, kind, path, named))
    if own:
        page.append(f"  `{own}` is a key that you choose: nothing more is known of it here.")
    return "\n".join(page)


def _page(schema: Schema, node: Schema, kind: str, path: list[str], named: str) -> Iterator[str]:
    title = ".".join(path) or kind
    yield f"{title}  ({_type_words(schema, node)})" if path else kind
    yield ""
    yield f"  {_described(schema, node)}"
    if "default" in node:
        yield f"  Default: {_json(node['default'])}"
    for example in node.get("examples", ())[:3]:
        yield f"  Example: {named}: {_json(example)}"
    if path and kind != "Host" and path[0] not in _HEAD:
        yield f"  {_effect('.'.join(path))}"
    children = _children(schema, node)
    if children:
        yield ""
        yield "Fields:" if path else "Fields of a document:"
        width = max(len(name) for name in children)
        for name, child in children.items():
            yield f"  {name:<{width}}  {_described(schema, child)}"


def _effect(path: str) -> str:
    """Say what a change costs; a map whose fields differ says that."""
    if any(known.startswith(f"{path}.") for known in EFFECT_CLASSES):
        return "What a change needs differs by field."
    return _EFFECT[effect_class(path)]


def _described(schema: Schema, node: Schema) -> str:
    own = node.get("description")
    return str(own or _resolved(schema, node).get("description", "")).replace("\n", " ")


def _resolved(schema: Schema, node: Schema) -> Schema:
    """Follow references, and take the fullest of several forms."""
    while True:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        elif node.get("type") == "array" and isinstance(node.get("items"), Mapping):
            node = node["items"]
        elif "anyOf" in node or "allOf" in node:
            forms = [
                form for form in node.get("anyOf", node.get("allOf")) if form.get("type") != "null"
            ]
            deeper = [
                form for form in forms if "$ref" in form or "properties" in form or "anyOf" in form
            ]
            if not deeper:
                return node
            node = deeper[0]
        elif "array" in node.get("type", ()) and isinstance(node.get("items"), Mapping):
            node = node["items"]
        else:
            return node


def _children(schema: Schema, node: Schema) -> dict[str, Schema]:
    return dict(_resolved(schema, node).get("properties", {}))


def _by_pattern(schema: Schema, node: Schema, name: str) -> Schema | None:
    patterns = _resolved(schema, node).get("patternProperties", {})
    return next((part for pattern, part in patterns.items() if re.search(pattern, name)), None)


def _is_free(schema: Schema, node: Schema) -> bool:
    """Say whether the keys below are somebody else's words (`args`, `env`)."""
    found = _resolved(schema, node)
    return "object" in found.get("type", ()) and "properties" not in found


def _type_words(schema: Schema, node: Schema) -> str:
    if "enum" in node:
        return " | ".join(str(word) for word in node["enum"] if word is not None)
    kind = node.get("type")
    kinds = [k for k in (kind if isinstance(kind, list) else [kind]) if k and k != "null"]
    if "array" in kinds:
        return "list"
    pattern = node.get("pattern", "")
    if kinds == ["string"]:
        return "percentage" if "%" in pattern else "duration" if "ms" in pattern else "text"
    words = {
        "object": "map",
        "integer": "whole number",
        "boolean": "true | false",
        "number": "number",
    }
    if kinds:
        return words.get(kinds[0], str(kinds[0]))
    return "map" if _children(schema, node) else "value"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""From a document's plain data to a model, or to sentences about everything that is wrong with it.

`fleet.py` calls this for each merged document and gives every finding its place in a file.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from reconciler.core.grammar import Loc, nearest
from reconciler.core.spec import Engine, EngineRules, Host, Server
from reconciler.core.yaml_text import shown_key


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a document: the path of the field, pydantic's or our kind, and a sentence."""

    loc: Loc
    kind: str
    message: str


def read_server(
    raw: Mapping[str, Any], engines: Mapping[str, EngineRules]
) -> tuple[Server | None, list[Finding]]:
    """Make a Server of a merged document (without apiVersion, kind, extends), or say all that is wrong."""
    try:
        server = Server.model_validate(raw, context={"engines": engines})
    except ValidationError as error:
        return None, findings(error, Server, engines)
    rules = engines[server.engine.name]
    found = [
        Finding(split_path(raw, path), "engine", text) for path, text in rules.problems(server)
    ]
    return (None if found else server), found


def partial_problems(raw: Mapping[str, Any], engines: Mapping[str, EngineRules]) -> list[Finding]:
    """Judge a part of a server (a profile): everything that is there, and nothing that is missing."""
    try:
        Server.model_validate(raw, context={"engines": engines})
    except ValidationError as error:
        return [f for f in findings(error, Server, engines) if f.kind != "missing"]
    return []


def read_host(raw: Mapping[str, Any]) -> tuple[Host | None, list[Finding]]:
    """Make a Host of a document, or say all that is wrong."""
    try:
        return Host.model_validate(raw), []
    except ValidationError as error:
        return None, findings(error, Host, {})


def split_path(raw: Any, path: str | Loc) -> Loc:
    """Take a dotted path apart along the keys that are there, since keys may hold dots themselves."""
    if not isinstance(path, str):
        return path
    loc: list[str | int] = []
    rest = path.replace("[", ".").replace("]", "")
    while rest:
        keys = raw if isinstance(raw, Mapping) else {}
        fits = [key for key in keys if rest == key or rest.startswith(f"{key}.")]
        word = max(fits, key=len) if fits else rest.split(".", 1)[0]
        rest = rest[len(word) + 1 :]
        if isinstance(raw, (tuple, list)) and word.isdigit() and int(word) < len(raw):
            loc.append(int(word))
            raw = raw[int(word)]
        else:
            loc.append(word)
            raw = keys.get(word)
    return tuple(loc)


def findings(
    error: ValidationError,
    model: type[BaseModel],
    engines: Mapping[str, EngineRules] = MappingProxyType({}),
) -> list[Finding]:
    """Say in plain words everything that pydantic found."""
    found = []
    for detail in error.errors(include_url=False, include_context=True):
        loc = tuple(part for part in detail["loc"] if part not in {"options", "limits"})
        found.append(Finding(loc, detail["type"], _sentence(detail, loc, model, engines)))
    return found


def _sentence(
    detail: Any, loc: Loc, model: type[BaseModel], engines: Mapping[str, EngineRules]
) -> str:
    """Say in plain words what pydantic found, without the value."""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail.get("input")
    if kind == "extra_forbidden":
        known = _keys_at(model, loc[:-1], engines)
        return f"unknown key `{shown_key(str(loc[-1]))}`{nearest(str(loc[-1]), known)}"
    if kind == "missing":
        return f"`{loc[-1]}` is missing"
    if kind in _EXPECTED:
        quotes = (
            "; put it in quotes"
            if kind == "string_type" and isinstance(value, (int, float))
            else ""
        )
        return f"expected {_EXPECTED[kind]}, found {_kind_of(value)}{quotes}"
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", context["expected"])
        hint = nearest(value, words) if isinstance(value, str) else ""
        return f"must be {' or '.join(words)}{hint}"
    for bound, word in (
        ("ge", "at least"),
        ("gt", "more than"),
        ("le", "at most"),
        ("lt", "less than"),
    ):
        if bound in context:
            return f"must be {word} {context[bound]}"
    if kind in {"string_too_short", "too_short"}:
        return (
            "is empty"
            if context.get("min_length", 1) == 1
            else f"needs {context['min_length']} or more"
        )
    if kind in {"string_too_long", "too_long"}:
        return f"is longer than {context['max_length']}"
    return str(detail["msg"])


_EXPECTED: Final = {
    "string_type": "text", "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "bool_type": "true or false", "tuple_type": "a list", "list_type": "a list",
    "dict_type": "a map", "model_type": "a map", "model_attributes_type": "a map", "is_instance_of": "a map",
    "dataclass_type": "a map",
}  # fmt: skip


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "a map"
        case tuple() | list():
            return "a list"
        case _:
            return "nothing"


def _keys_at(model: type[BaseModel], loc: Loc, engines: Mapping[str, EngineRules]) -> list[str]:
    """Give the keys that are valid at a place, for the suggestion."""
    here: Any = model
    for part in loc:
        fields = here.model_fields if _is_model(here) else {}
        here = (
            _inner(fields[part].annotation)
            if part in fields
            else (here if isinstance(part, int) else None)
        )
    if here is Engine:
        options = [key for rules in engines.values() for key in rules.Options.model_fields]
        return ["name", "version", *options]
    if not _is_model(here):
        return []
    return [*here.model_fields, "extends"] if here is Server else list(here.model_fields)


def _inner(annotation: Any) -> Any:
    """Look through Optional, Annotated and tuple for the model inside."""
    while not _is_model(annotation):
        if typing.get_origin(annotation) is None:
            return None
        arguments = [a for a in typing.get_args(annotation) if a not in {types.NoneType, Ellipsis}]
        annotation = arguments[0] if arguments else None
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)

"""The spec language as JSON Schema, for editors: completion, hover texts, red lines while typing.

Made from the models, so that it cannot say anything else; `schemas/` holds what `reconcile schema --write` made,
and a test compares. It is a help, not the judge: what documents mean to each other only `fleet.py` knows, and
since a server may take any field from a profile, nothing that a profile can give is required here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from reconciler.core import spec
from reconciler.core.spec import API_VERSION, RESULTS, EngineRules, Host, Server
from reconciler.core.units_of_measure import duration_text, percentage_text

Schema = dict[str, Any]

DRAFT: Final = "http://json-schema.org/draft-07/schema#"
_NEEDED: Final = ("host", "gpus", "engine", "listen")
"""Of a server that extends nothing."""
_ATOMS: Final = frozenset({"GateRun", "Secret", "Ssh", "Proxmox", "Host"})
"""Models that no profile completes: what they need is needed right there."""
_MEANING: Final = {
    "output_tps": "Tokens per second over all streams, in the steady window.",
    "decode_tps": "Tokens per second of one stream after its first token.",
    "ttft": "Time to the first token.",
    "e2e": "Time to the last token.",
    "event_gap": "Time between two events of a stream.",
    "error_rate": "Share of requests that fail.",
    "accept_length": "Tokens per verification step of speculative decoding.",
    "accept_rate": "Share of proposed tokens that are accepted.",
}
_EXAMPLES: Final[Mapping[str, Any]] = {"number": 200, "duration": "600ms", "percentage": "1%"}


def schemas(engines: Mapping[str, EngineRules]) -> dict[str, Schema]:
    """Give every schema by its file name: one for each kind, and one for a file of any kinds."""
    server, server_defs = _server(engines)
    host, host_defs = _host()
    profile = _profile(server)
    one = {
        "server": (server, server_defs),
        "host": (host, host_defs),
        "profile": (profile, server_defs),
    }
    files = {f"{name}.schema.json": _alone(schema, defs) for name, (schema, defs) in one.items()}
    combined = _combined(
        {"Server": server, "Host": host, "Profile": profile}, {**server_defs, **host_defs}
    )
    return {**files, "spec.schema.json": combined}


def _alone(schema: Schema, defs: Schema) -> Schema:
    return {"$schema": DRAFT, **schema, "$defs": dict(sorted(defs.items()))}


def _combined(kinds: Mapping[str, Schema], defs: Schema) -> Schema:
    """Choose by `kind`, so that an editor offers the fields of the document at hand."""
    return {
        "$schema": DRAFT,
        "title": "reconcile spec",
        "description": "One document of a spec file: a Server, a Host or a Profile.",
        "type": "object",
        "required": ["apiVersion", "kind", "name"],
        "properties": {"apiVersion": _api_version(), "kind": {**_kind(*kinds), "title": "Kind"}},
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {"$ref": f"#/$defs/{kind}"},
            }
            for kind in kinds
        ],
        "$defs": dict(sorted({**defs, **kinds}.items())),
    }


def _server(engines: Mapping[str, EngineRules]) -> tuple[Schema, Schema]:
    schema, defs = _of(Server)
    defs["Engine"] = _engine(defs["Engine"], engines)
    defs["GateRun"] = _gate_run(defs["GateRun"])
    defs = {name: part for name, part in defs.items() if name not in {"Limit", "BaseModel"}}
    for name, part in defs.items():
        if name not in _ATOMS:
            _nullable_properties(part)
    properties = {
        "apiVersion": _api_version(),
        "kind": _kind("Server"),
        "name": schema["properties"].pop("name"),
        "extends": {
            "title": "Extends",
            "description": "A Profile to take fields from. Maps merge, lists and single values replace, null removes.",
            "type": "string",
            "examples": ["sglang-defaults"],
        },
    }
    _nullable_properties(schema)
    schema["properties"] = {**properties, **schema["properties"]}
    schema["required"] = ["apiVersion", "kind", "name"]
    schema["if"] = {"not": {"required": ["extends"]}}
    schema["then"] = {"required": list(_NEEDED), "properties": {"listen": {"required": ["port"]}}}
    return schema, defs


def _profile(server: Schema) -> Schema:
    profile = {key: value for key, value in server.items() if key not in {"if", "then"}}
    profile["title"] = "Profile"
    profile["description"] = (
        "Fields that servers take over by `extends:`. Whatever a Server may say, a Profile may."
    )
    name = {**server["properties"]["name"], "description": "What servers write after `extends:`."}
    profile["properties"] = {**server["properties"], "kind": _kind("Profile"), "name": name}
    return profile


def _host() -> tuple[Schema, Schema]:
    schema, defs = _of(Host)
    schema["properties"] = {
        "apiVersion": _api_version(),
        "kind": _kind("Host"),
        **schema["properties"],
    }
    schema["required"] = ["apiVersion", "kind", "name"]
    return schema, defs


def _engine(schema: Schema, engines: Mapping[str, EngineRules]) -> Schema:
    """Put each engine's own fields beside the name, and allow the short form."""
    properties = dict(schema["properties"])
    properties.pop("options")
    properties["name"] = {**properties["name"], "enum": sorted(engines)}
    properties["name"].pop("pattern", None)
    for name, rules in sorted(engines.items()):
        own, _ = _of(rules.Options)
        for key, part in own.get("properties", {}).items():
            described = f"{part.get('description', '')} ({name} only)".strip()
            properties[key] = {**part, "description": described}
    full = {**schema, "properties": properties}
    return {
        "title": "Engine",
        "description": schema["description"],
        "anyOf": [{"type": "string", "enum": sorted(engines)}, full],
    }


def _gate_run(schema: Schema) -> Schema:
    """Write the limits out as the keys that they are."""
    properties = {key: part for key, part in schema["properties"].items() if key != "limits"}
    patterns = {}
    for result, kind in RESULTS.items():
        for bound, word in (("min", "At least. "), ("max", "At most. ")):
            part = {
                "title": f"{bound} {result}",
                "description": word + _MEANING[result],
                **_written_as(kind),
            }
            properties[f"{bound}_{result}"] = part
        if kind == "duration" or result == "decode_tps":
            patterns[rf"^(min|max)_{result}_p[0-9]{{1,2}}(\.[0-9]+)?$"] = {
                "description": f"A percentile. {_MEANING[result]}",
                **_written_as(kind),
            }
    return {**schema, "properties": properties, "patternProperties": patterns}


def _written_as(kind: str) -> Schema:
    if kind == "number":
        return {"type": "number", "exclusiveMinimum": 0, "examples": [_EXAMPLES[kind]]}
    pattern = r"^[0-9]{1,3}(\.[0-9]+)?%$" if kind == "percentage" else r"^([0-9.]+(d|h|m|s|ms))+$"
    return {"type": "string", "pattern": pattern, "examples": [_EXAMPLES[kind]]}


def _api_version() -> Schema:
    return {
        "title": "API version",
        "description": "The version of the spec language.",
        "type": "string",
        "enum": [API_VERSION],
    }


def _kind(*kinds: str) -> Schema:
    return {
        "title": "Kind",
        "description": "What this document describes.",
        "type": "string",
        "enum": list(kinds),
    }


# -- what pydantic makes, in the shape that editors understand best --------------------------------------


def _of(model: type[BaseModel]) -> tuple[Schema, Schema]:
    raw = model.model_json_schema()
    for name, part in [(model.__name__, raw), *raw.get("$defs", {}).items()]:
        _add_words(part, model if part is raw else getattr(spec, name, model))
    schema = _tidy(raw)
    defs = schema.pop("$defs", {})
    for name, part in defs.items():
        if name not in _ATOMS:
            part.pop("required", None)
    return schema, defs


def _add_words(part: Schema, model: type) -> None:
    """Give each field its own title and description: pydantic leaves out what the field's model says too."""
    fields = model.model_fields if issubclass(model, BaseModel) else {}
    for name, field in fields.items():
        if name in part.get("properties", {}):
            words = {"title": field.title, "description": field.description}
            part["properties"][name] = {
                **{key: word for key, word in words.items() if word},
                **part["properties"][name],
            }


def _tidy(node: Any) -> Any:
    """Fold `X or null` into X, write defaults as people would, and keep words beside a `$ref`."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _tidy(value) for key, value in node.items()}
    choices = node.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        choices.remove({"type": "null"})
        if len(choices) == 1:
            node.pop("anyOf")
            node = {**choices[0], **node}
    if node.get("default", 0) in (None, {}, []):
        node.pop("default")
    if isinstance(node.get("default"), float) and node.get("type") == "string":
        text = percentage_text if "%" in node["pattern"] else duration_text
        node["default"] = text(node["default"])
    if isinstance(node.get("default"), dict):
        node.pop("default")
    if "$ref" in node and len(node) > 1:
        node = {"allOf": [{"$ref": node.pop("$ref")}], **node}
    return node


def _nullable_properties(schema: Schema) -> None:
    """Allow null, which takes away what a profile sets."""
    for part in (schema, *schema.get("anyOf", ())):
        if "properties" in part:
            part["properties"] = {
                key: _nullable(value) for key, value in part["properties"].items()
            }


def _nullable(part: Schema) -> Schema:
    null = {"type": "null"}
    if "allOf" in part:
        (reference,) = part["allOf"]
        return {"anyOf": [reference, null], **{k: v for k, v in part.items() if k != "allOf"}}
    if "$ref" in part:
        return {"anyOf": [part, null]}
    if "anyOf" in part:
        return {**part, "anyOf": [*part["anyOf"], null]}
    if "type" not in part:
        return part
    nullable = {**part, "type": [part["type"], "null"]}
    if "enum" in part:
        nullable["enum"] = [*part["enum"], None]
    return nullable

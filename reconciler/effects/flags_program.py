"""The program that asks an installed engine for its flags: run as text by that engine's own interpreter, printed as a catalogue.

It calls the function with which the engine fills its own argument parser, walks that parser, and learns what a value's form is by trying:
a type that takes `7` and refuses `x` is a whole number, whatever the engine calls it. Standard library only, Python 3.9. The engine's own
talk goes to standard error. `effects/introspect.py` runs it with limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import sys
import typing
from typing import Any

PACKAGES = {"sglang": "sglang", "vllm": "vllm", "llamacpp": "llama-cpp-python"}
ENTRIES = {
    "sglang": "python -m sglang.launch_server",
    "vllm": "vllm serve",
    "llamacpp": "python -m llama_cpp.server",
}


def _sglang() -> Any:
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def _vllm() -> Any:
    # Without a GPU in sight it may know no platform, and then refuses to build its defaults.
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.device_type:
        platform.device_type = "cuda"
    served = _old_vllm()
    if served is not None:
        return served
    make = None
    for place in ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.common.cli_args"):
        try:
            make = importlib.import_module(place).make_arg_parser
            break
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise  # The place is there, and something that it needs is not.
    if make is None:
        raise SystemExit("this vLLM has its argument parser where no version known here had it")
    for place in ("vllm.utils.argparse_utils", "vllm.utils"):
        try:
            return make(importlib.import_module(place).FlexibleArgumentParser())
        except (ImportError, AttributeError):
            continue
    return make(argparse.ArgumentParser())


def _old_vllm() -> Any:
    """Give the parser of `vllm serve` as versions made it that put the model and --config in place there."""
    try:
        cli = importlib.import_module("vllm.entrypoints.cli.serve")
        if "--config" not in inspect.getsource(cli):
            return None
    except (ImportError, OSError):
        return None
    return cli.ServeSubcommand().subparser_init(argparse.ArgumentParser().add_subparsers())


def _llamacpp() -> Any:
    parser = argparse.ArgumentParser()
    cli = importlib.import_module("llama_cpp.server.cli")
    settings = importlib.import_module("llama_cpp.server.settings")
    cli.add_args_from_model(parser, settings.ModelSettings)
    cli.add_args_from_model(parser, settings.ServerSettings)
    return parser


def _takes(form: Any, text: str) -> Any:
    try:
        return form(text)
    except BaseException:  # noqa: BLE001  (whatever a form raises, it does not take the text)
        return _takes


def _type_of(action: Any) -> str:
    """Name the form of a flag's value."""
    if action.nargs == 0:
        return "bool" if len(_negations(action)) else "flag"
    form = action.type
    if form is None or form is str:
        return "str"
    if form in (int, float):
        return str(form.__name__)
    number, word = _takes(form, "7"), _takes(form, "x-y")
    if _takes(form, "true") is True and _takes(form, "{}") is _takes:
        return "true|false"
    table, listed = _takes(form, '{"a": 1}'), _takes(form, "[1]")
    if isinstance(table, str) or (table is _takes and word is not _takes):
        return "str"
    if table is _takes and _takes(form, "{}") is not _takes:
        return "json"  # An object of known keys alone.
    if table is not _takes:
        return "json|str" if isinstance(word, str) else "json"
    if isinstance(listed, list):
        return "json-list"
    if isinstance(number, bool) or number is _takes:
        return "str"
    if isinstance(number, float) or _takes(form, "0.5") is not _takes:
        return "float"
    suffix = _takes(form, "1k") is not _takes
    auto = _takes(form, "auto") is not _takes
    return "int(k/M/G suffix)|auto" if suffix and auto else "int(k/M/G suffix)" if suffix else "int"


def _negations(action: Any) -> list[str]:
    """Give the spellings that turn a flag off: those that set the opposite of what its first one sets."""
    names = [name for name in action.option_strings if name.startswith("--")]
    if action.nargs != 0 or len(names) < 2:
        return []
    first = _sets(action, names[0])
    if not isinstance(first, bool):
        return []
    return sorted(n for n in names[1:] if _sets(action, n) is (not first))


def _sets(action: Any, name: str) -> Any:
    """Give what a spelling sets; nothing where the action cannot be tried."""
    space = argparse.Namespace()
    try:
        action(None, space, [], name)
    except BaseException:  # noqa: BLE001  (whatever it raises, it does not tell)
        return None
    return getattr(space, action.dest, None)


def _plain(value: Any) -> Any:
    if value is argparse.SUPPRESS:
        return None
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return {"$object": type(value).__name__}


_CALLED_DEPRECATED = re.compile(
    r"\W*deprecated\b|.*(?:\bis|\[|\() ?deprecated\b", re.IGNORECASE | re.DOTALL
)
_NO_GROUP = {"options", "optional arguments", "positional arguments"}


def _row(action: Any, group: str | None) -> dict[str, Any]:
    off = _negations(action)
    names = [name for name in action.option_strings if name not in off]
    names.sort(key=lambda name: not name.startswith("--"))  # Stable: the first long one leads.
    shown = action.help not in (None, argparse.SUPPRESS)
    kind = type(action).__name__.strip("_")
    row = {
        "flag": names[0] if names else action.dest,
        "aliases": names[1:],
        "dest": action.dest,
        "action": kind.removesuffix("Action"),
        "type": _type_of(action),
        "choices": [_plain(c) for c in action.choices] if action.choices is not None else None,
        "default": _plain(action.default),
        "nargs": action.nargs,
        "required": bool(action.required),
        "deprecated": bool(getattr(action, "deprecated", False))
        or "deprecated" in kind.lower()
        or (shown and bool(_CALLED_DEPRECATED.match(str(action.help)[:80]))),
        "hidden": action.help is argparse.SUPPRESS,
        "group": None if group in _NO_GROUP else group,
    }
    if off:
        row["negations"] = off
    if not action.option_strings:
        row["positional"] = True
    return row


def _form_of(hint: Any) -> str:
    """Name what a key takes: the names of plain types, `|` between them; a closed list of words is `str`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "|".join(sorted({type(part).__name__ for part in parts}))
    if origin is typing.Annotated or type(hint).__name__ == "_AnnotatedAlias":
        return _form_of(parts[0])
    if origin is typing.Union or type(hint).__name__ == "UnionType":
        named = ("None" if p is type(None) else _form_of(p) for p in parts)
        return "|".join(dict.fromkeys(named))
    if origin is not None:
        inner = ", ".join("None" if p is type(None) else _form_of(p) for p in parts)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    return str(getattr(hint, "__name__", hint))


def _speculative() -> list[dict[str, Any]]:
    """Give the keys of vLLM's speculative JSON."""
    kind = importlib.import_module("vllm.config").SpeculativeConfig
    hints = typing.get_type_hints(kind)
    rows = []
    for item in dataclasses.fields(kind):
        hint = hints.get(item.name)
        parts = [hint, *typing.get_args(hint)]
        choices = [
            c for p in parts if typing.get_origin(p) is typing.Literal for c in typing.get_args(p)
        ]
        internal = not item.init or item.name.startswith(
            (
                "target_",
                "draft_model_config",
                "draft_parallel_config",
                "draft_load_config",
                "_",
                "enable_chunked_prefill",
                "disable_log_stats",  # The engine's own, to 0.10.
            )
        )
        default: Any = item.default
        if type(default).__name__ == "FieldInfo":  # Pydantic's own way to write one.
            default = default.default if default.default_factory is None else None
        if default is dataclasses.MISSING or type(default).__name__ == "PydanticUndefinedType":
            default = None
        rows.append(
            {
                "key": item.name,
                "type": _form_of(hint),
                "choices": choices or None,
                "default": _plain(default),
                "internal": internal,
            }
        )
    return rows


def main(engine: str) -> None:
    """Print the catalogue of the engine that this interpreter has."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the engine prints while it is imported is no part of the answer.
    parser = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp}[engine]()
    for name, action in parser._option_string_actions.items():  # noqa: SLF001
        if name not in action.option_strings:  # vLLM hides spellings that it still takes.
            action.option_strings = [*action.option_strings, name]
    groups = {id(a): g.title for g in parser._action_groups for a in g._group_actions}  # noqa: SLF001  (argparse has no other way)
    rows = [_row(a, groups.get(id(a))) for a in parser._actions if a.dest != "help"]  # noqa: SLF001
    # Before Python 3.13 argparse has no such fact, and vLLM keeps it here.
    gone = {a.dest for a in getattr(parser, "_deprecated", ())}
    for row in rows:
        row["deprecated"] = row["deprecated"] or row["dest"] in gone
    found = {
        "engine": engine,
        "version": importlib.metadata.version(PACKAGES[engine]),
        "entrypoint": ENTRIES[engine],
        "count": len(rows),
        "deprecated_count": sum(row["deprecated"] for row in rows),
        "allow_abbrev": bool(getattr(parser, "allow_abbrev", True)),
        "flags": rows,
    }
    if engine == "vllm":
        found["speculative_config_keys"] = _speculative()
    json.dump(found, answer)
    answer.close()


if __name__ == "__main__":
    main(sys.argv[1])

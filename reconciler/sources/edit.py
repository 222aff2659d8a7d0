"""Writing values into a spec file of a person: comments, order and every other document stay as they are.

Only the document of the server is written anew, by ruamel.yaml's round trip; the bytes of the others are not touched.
Whoever calls this reads the result back and compares before it replaces the file.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from reconciler.core.errors import StoreError, UsageError, plain

_BORDER: Final = re.compile(r"^---[ \t]*(?:#[^\n]*)?\n", re.MULTILINE)


def with_settings(content: bytes, server: str, settings: Mapping[str, Any | None]) -> bytes:
    """Give a file's text with fields of one server set by their dotted paths; None takes a field out.

    Raises:
        UsageError: The file has no document of this server, or a path leads through something that is no map.
    """
    text = content.decode("utf-8")
    starts = [0, *(found.end() for found in _BORDER.finditer(text))]
    ends = [*(found.start() for found in _BORDER.finditer(text)), len(text)]
    for start, end in zip(starts, ends, strict=True):
        document = _parsed(text[start:end])
        if isinstance(document, dict) and (document.get("kind"), document.get("name")) == (
            "Server",
            server,
        ):
            for path, value in settings.items():
                _set(document, path, value)
            return (text[:start] + _dumped(document, text[start:end]) + text[end:]).encode()
    raise UsageError(
        f"there is no document of the server {server} in this file; nothing was written"
    )


_DASH: Final = re.compile(
    r"^( *)(?:[^\s#'\"][^\n]*|\"[^\n]*|'[^\n]*):[ \t]*(?:#[^\n]*)?\n( *)-( +)\S", re.MULTILINE
)
_INNER: Final = re.compile(r"^[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n( +)[^\s#-]", re.MULTILINE)


def _yaml(text: str) -> Any:
    """Give a writer that indents as the text does, so that a change of one value shows as one line."""
    from ruamel.yaml import YAML  # noqa: PLC0415  (only who writes specs pays for it)

    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 4096
    dash, inner = _DASH.search(text), _INNER.search(text)
    offset = max(0, len(dash[2]) - len(dash[1])) if dash else 2
    behind = len(dash[3]) if dash else 1
    mapping = len(inner[1]) if inner else 2
    yaml.indent(mapping=mapping, sequence=offset + 1 + behind, offset=offset)
    return yaml


def _parsed(text: str) -> Any:
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    try:
        return _yaml(text).load(text)
    except YAMLError as error:
        raise UsageError(f"the file cannot be read for writing: {plain(error)}") from error


def _dumped(document: Any, before: str) -> str:
    out = io.StringIO()
    _yaml(before).dump(document, out)
    return out.getvalue()


def _set(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    inner = document
    for part in parents:
        if part not in inner:
            if value is None:
                return
            inner[part] = {}
        inner = inner[part]
        if not isinstance(inner, dict):
            raise UsageError(f"{path}: `{part}` is no map in the file; nothing was written")
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = list(value) if isinstance(value, tuple) else value


def replace_file(path: Path, content: bytes) -> None:
    """Put new bytes in a file's place in one step, with its mode; a reader sees the old ones or the new ones.

    Raises:
        StoreError: It could not be written; the old file is still there.
    """
    temporary = ""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()
        raise StoreError(
            f"{path}: cannot be written ({error.strerror}); it is as it was"
        ) from error


__all__ = ["replace_file", "with_settings"]

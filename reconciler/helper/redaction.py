"""Takes secrets out of what an engine says about itself, before it leaves the host. Pure.

SGLang's description of itself holds its API keys in clear. What is masked: values under a key that names a secret, the
word after a flag that does, passwords in URLs, and every occurrence of a secret that is known. Part of the shipped helper.
"""

from __future__ import annotations

import json
import re
from typing import Any, List, Sequence

MASK = "[redacted]"
_NAMES = r"api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|password|passwd|token|credential|authorization|cookie"
SECRET_NAME = re.compile(r"(?:\A|.*[_-])(?:%s)s?\Z" % _NAMES, re.IGNORECASE | re.DOTALL)
SECRET_VARIABLE = re.compile(
    r"(?:^|_|API)KEYS?$|TOKEN$|SECRET|PASSW|PASS$|PWD$|_PAT$|CREDENTIAL|AUTH|PRIVATE|COOKIE",
    re.IGNORECASE,
)
"""How people call environment variables that hold a secret. Wider than `SECRET_NAME`: a name that is hidden costs nothing."""
_TELLING_FLAGS = r"--?[a-z0-9_-]*(?:api[_-]?key|token|secret|password)"  # Not `--max-total-tokens`.
_FLAG = re.compile(_TELLING_FLAGS + r"(=|\Z)", re.IGNORECASE)
_IN_FLAG = re.compile("(" + _TELLING_FLAGS + r"(?:=|\s+)['\"]?)([^\s'\"]+)", re.IGNORECASE)
_QUOTED = re.compile(
    r"(\b[a-z0-9_]*(?:%s)['\"]?\s*[:=]\s*[\[(]?['\"])([^'\"]+)" % _NAMES, re.IGNORECASE
)
_KNOWN_FORMS = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,})|(?<=Bearer )\S+")
_IN_URL = re.compile(r"(://[^/@\s:]*:)[^/@\s]+@")
_DEPTH = 30
SHORTEST_SECRET = 6  # A shorter one would mask words of every answer.


def redacted(value: Any, secrets: Sequence[str] = (), depth: int = _DEPTH) -> Any:
    """Return a JSON value without what it must not show."""
    if depth <= 0:
        return MASK
    if isinstance(value, dict):
        return {
            str(key): MASK
            if SECRET_NAME.match(str(key)) and _could_be_secret(item)
            else redacted(item, secrets, depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return _redacted_words(value, secrets, depth)
    return redacted_text(value, secrets) if isinstance(value, str) else value


def _could_be_secret(value: Any) -> bool:
    """Numbers, switches and nothing at all are none: `max_total_tokens` counts."""
    return value not in (None, "", [], {}) and not isinstance(value, (bool, int, float))


def _redacted_words(words: Sequence[Any], secrets: Sequence[str], depth: int) -> List[Any]:
    found: List[Any] = []
    hidden = False
    for word in words:
        if hidden and isinstance(word, str):
            found.append(MASK)
            hidden = False
            continue
        match = _FLAG.match(word) if isinstance(word, str) else None
        hidden = match is not None and match.group(1) != "="
        if match is not None and not hidden:
            found.append(word[: match.end()] + MASK)
        else:
            found.append(redacted(word, secrets, depth - 1))
    return found


def redacted_text(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text without known secrets, values of flags and keys that name one, and passwords in URLs."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, MASK)
    if "://" in text:
        text = _IN_URL.sub(r"\1" + MASK + "@", text)
    text = _IN_FLAG.sub(r"\1" + MASK, text)
    text = _QUOTED.sub(r"\1" + MASK, text)
    return _KNOWN_FORMS.sub(MASK, text)


def redacted_body(body: bytes, secrets: Sequence[str] = ()) -> bytes:
    """Return a JSON answer without secrets. What is no JSON says nothing that is wanted, and is left out whole."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return b""
    return json.dumps(redacted(value, secrets), separators=(",", ":")).encode()

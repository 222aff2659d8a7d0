"""Take secrets out of text that people wrote before it is shown: unit files, command lines, environments. Pure.

What we render holds none. A unit that was here before us may hold anything, and is shown as a difference, in a plan, in a
comment on a pull request (S17). Rather too much is masked than too little: a mask hides nothing that a plan depends on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from reconciler.core.grammar import SECRET_ENV, SECRET_ENV_UNLESS_PATH, SECRET_FLAG, URL_CREDENTIAL

MASK: Final = "(secret)"

_KEY: Final = r"[A-Za-z0-9_-]*?(?:token(?![A-Za-z])|(?:secret|passw(?:or)?d|passphrase|api[-_]?key|access[-_]?key|private[-_]?key|credential)s?|_(?:key|pass|pat)(?![A-Za-z0-9_]))"
_VALUE: Final = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"']+)"""
_ASSIGNED: Final = re.compile(rf"(?i)(\b{_KEY})=({_VALUE})")
_WORD: Final = re.compile(rf"""(?i)(["'])({_KEY})=((?:[^"'\\]|\\.)*)(["'])""")
_FLAG: Final = re.compile(
    rf"""(?i)(["']?--?{_KEY}["']?)((?:[ \t]*\\\n[ \t]*)|[ \t]+)(?!["']?--|\\\n)({_VALUE})"""
)
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}")
TOKEN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16}|nvapi-[A-Za-z0-9_-]{16,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
"""Values that are tokens by their form, whatever they stand behind."""


def masked(text: str) -> str:
    """Give the text with the values of what looks like secrets taken out; everything else stays where it is."""
    text = _WORD.sub(lambda m: f"{m[1]}{m[2]}={_kept(m[3])}{m[4]}", text)
    text = _ASSIGNED.sub(lambda m: f"{m[1]}={_kept(m[2])}", text)
    text = _FLAG.sub(lambda m: f"{m[1]}{m[2]}{_kept(m[3])}", text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = URL_CREDENTIAL.sub(f"://{MASK}@", text)
    return TOKEN.sub(MASK, text)


def _kept(value: str) -> str:
    """Keep the quotes, and what is a path: a place is no secret, and a reader wants to see it."""
    bare = value.strip("\"'")
    if bare.startswith("/") or not bare or bare == MASK:
        return value
    quote = value[0] if value[0] in "\"'" else ""
    # `"NAME=value"`: the quote that ends the word belongs to it and stays.
    tail = value[-1] if not quote and value[-1] in "\"'" else ""
    return f"{quote}{MASK}{quote or tail}"


def is_secret(name: str, value: str) -> bool:
    """Say whether a variable or flag carries a secret: by its name, or by what its value looks like."""
    named = (
        SECRET_ENV.match(name)
        or SECRET_ENV_UNLESS_PATH.match(name)
        or SECRET_FLAG.match(name)
        or re.fullmatch(f"(?i){_KEY}", name)
    )
    return bool(named and not value.startswith("/")) or holds_secret(value)


def holds_secret(value: str) -> bool:
    """Say whether a value looks like a secret by itself."""
    return bool(TOKEN.search(value) or URL_CREDENTIAL.search(value) or _BEARER.search(value))


def masked_words(words: Iterable[str]) -> tuple[str, ...]:
    """Give a command line fit to be shown."""
    shown: list[str] = []
    hide = False
    for word in words:
        flag, equals, value = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(word if word.startswith("/") else MASK)
        elif equals and is_secret(flag.lstrip("-"), value):
            shown.append(f"{flag}={MASK}")
        else:
            shown.append(masked(word))
        hide = word.startswith("-") and not equals and is_secret(flag.lstrip("-"), "")
    return tuple(shown)


__all__ = ["MASK", "TOKEN", "holds_secret", "is_secret", "masked", "masked_words"]

"""Whether a generated text shows a broken model. Pure, standard library only.

A broken model (wrong weights, a bad kernel, a quantisation that went wrong) is often the fastest one,
and its transport is perfect: only the text tells. Two kinds are kept apart. *Garbage* is text that no
healthy model of any size writes: one character for ever, replacement characters, control characters.
One or two words for ever are garbage too, in a text of any length. *Looping* is a longer phrase repeated to the end, which small models do under greedy decoding and every model
does when the end of sequence is ignored; it is judged only against a baseline, never by itself.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from enum import Enum


class TextFault(Enum):
    """What is wrong with one generated text."""

    EMPTY = "empty"
    ONE_CHARACTER = "one_character"
    ONE_WORD = "one_word"
    UNDECODABLE = "undecodable"
    LOOPING = "looping"


GARBAGE = frozenset(
    {TextFault.EMPTY, TextFault.ONE_CHARACTER, TextFault.ONE_WORD, TextFault.UNDECODABLE}
)

# Markdown rules, tables and code fences repeat a mark a few dozen times; nothing healthy fills half a
# text with them.
_RUN_LENGTH = 24
_RUN = re.compile(rf"(\S)\1{{{_RUN_LENGTH - 1},}}")
# One character cut by max_tokens in a short text is ordinary; one in ten is not.
_UNDECODABLE_SHARE = 0.1
_UNDECODABLE = re.compile(r"[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# "Row, row, row" is a song; so many words of which nine in ten are the same one or two are none.
_SAME_WORDS = 8
_SAME_SHARE = 0.9
# In a short text only a phrase that fills nearly all of it, three times and more, is a loop and no refrain.
_LOOP_WORDS = 32
_LOOP_SHARE = 0.6
_SHORT_LOOP_WORDS = 12
_SHORT_LOOP_SHARE = 0.9
_LOOP_NGRAM = 8
# Prose compresses 2 to 3 times, code 4 times; a loop goes far beyond.
_COMPRESSION_CHARACTERS = 256
_COMPRESSION_RATIO = 8.0


def text_fault(text: str, *, max_chars: int = 65_536) -> TextFault | None:
    """Name what is wrong with `text`, the worst first, or None for a text that could be an answer."""
    text = text[:max_chars]
    visible = "".join(text.split())
    if not visible:
        return TextFault.EMPTY
    if len(_UNDECODABLE.findall(visible)) > _UNDECODABLE_SHARE * len(visible):
        return TextFault.UNDECODABLE
    longest = max((len(run.group()) for run in _RUN.finditer(visible)), default=0)
    if longest * 2 > len(visible):
        return TextFault.ONE_CHARACTER
    words = text.split()
    if len(words) >= _SAME_WORDS and _longest_loop(words, 2) >= _SAME_SHARE * len(words):
        return TextFault.ONE_WORD
    return TextFault.LOOPING if _loops(text, words) else None


def is_garbage(text: str) -> bool:
    """Say whether no healthy model would have written `text`."""
    return text_fault(text) in GARBAGE


def all_alike(texts: Sequence[str]) -> bool:
    """Say whether different prompts all drew the same words, which no working model does."""
    said = [text.strip() for text in texts]
    return len(said) >= 4 and len(set(said)) == 1


def _loops(text: str, words: Sequence[str]) -> bool:
    count = len(words)
    if count >= _LOOP_WORDS and _longest_loop(words) >= _LOOP_SHARE * count:
        return True
    fills = _longest_loop(words, count // 3) if _SHORT_LOOP_WORDS <= count < _LOOP_WORDS else 0
    if fills and fills >= _SHORT_LOOP_SHARE * count:
        return True
    if len(text) < _COMPRESSION_CHARACTERS:
        return False
    raw = text.encode("utf-8", "replace")
    return len(raw) / len(zlib.compress(raw)) > _COMPRESSION_RATIO


def _longest_loop(words: Sequence[str], longest: int = _LOOP_NGRAM) -> int:
    """Count the words of the longest stretch in which a phrase of 1 to `longest` (at most 8) words repeats itself."""
    best = 0
    for size in range(1, min(longest, _LOOP_NGRAM) + 1):
        same = 0
        for here, before in zip(words[size:], words, strict=False):
            same = same + 1 if here == before else 0
            if same >= size:
                best = max(best, same + size)
    return best

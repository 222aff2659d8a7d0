"""Which combinations of speculative fields llama.cpp takes, in both of its servers, and what it makes of them.

Each rule names where it comes from: `common/arg.cpp` and `common/speculative.cpp` of llama.cpp (read at builds of
2026), `server/model.py` of llama-cpp-python 0.3.36. llama.cpp has no releases but builds, and gains a key now and
then: a key that is not known here is a warning, since the installed program is asked before anything stops; a key
that it refuses, or silently leaves without effect, is a problem.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

Complaint = tuple[str, str]
"""A key of `speculative` ("" for all of it), and a sentence about it."""

ARG: Final = "common/arg.cpp"
SPECULATIVE: Final = "common/speculative.cpp"

NEED_MODEL: Final = frozenset({"draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"})
"""Types that draft with a second model. The first dies without one; the others would silently not be there."""
BLOCKS: Final = frozenset({"draft-dflash", "draft-dspark"})
"""Types whose draft model was trained for one block: more draft tokens are silently cut to it."""
DRAFTS: Final = NEED_MODEL | {"draft-mtp"}
NGRAMS: Final = (
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)
TYPES: Final = (*sorted(DRAFTS), *NGRAMS)
RENAMED: Final = {
    "draft": "draft-simple",
    "simple": "draft-simple",
    "mtp": "draft-mtp",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
FAKES: Final = frozenset({"synth_len", "synth_rates"})
REMOVED: Final = {
    "draft": "draft_n_max",
    "draft_n": "draft_n_max",
    "draft_max": "draft_n_max",
    "draft_min": "draft_n_min",
    "ngram_size_n": "ngram_simple_size_n, or ngram_mod_n_match",
    "ngram_size_m": "ngram_simple_size_m",
    "ngram_min_hits": "ngram_simple_min_hits",
    "model_draft": "draft_model",
}

ALIASES: Final = {
    "md": "spec-draft-model",
    "model-draft": "spec-draft-model",
    "hfd": "spec-draft-hf",
    "hfrd": "spec-draft-hf",
    "hf-repo-draft": "spec-draft-hf",
    "td": "spec-draft-threads",
    "threads-draft": "spec-draft-threads",
    "tbd": "spec-draft-threads-batch",
    "threads-batch-draft": "spec-draft-threads-batch",
    "ngld": "spec-draft-ngl",
    "gpu-layers-draft": "spec-draft-ngl",
    "n-gpu-layers-draft": "spec-draft-ngl",
    "devd": "spec-draft-device",
    "device-draft": "spec-draft-device",
    "otd": "spec-draft-override-tensor",
    "override-tensor-draft": "spec-draft-override-tensor",
    "cmoed": "spec-draft-cpu-moe",
    "cpu-moe-draft": "spec-draft-cpu-moe",
    "ncmoed": "spec-draft-n-cpu-moe",
    "spec-draft-ncmoe": "spec-draft-n-cpu-moe",
    "n-cpu-moe-draft": "spec-draft-n-cpu-moe",
    "ctkd": "spec-draft-type-k",
    "cache-type-k-draft": "spec-draft-type-k",
    "ctvd": "spec-draft-type-v",
    "cache-type-v-draft": "spec-draft-type-v",
    "draft-p-min": "spec-draft-p-min",
    "draft-p-split": "spec-draft-p-split",
    "draft": "spec-draft-n-max",
    "draft-n": "spec-draft-n-max",
    "draft-max": "spec-draft-n-max",
    "draft-min": "spec-draft-n-min",
    "draft-n-min": "spec-draft-n-min",
}
"""Other spellings of llama-server's draft options, some of builds that still had them: how a stranger's command line is read."""

_CACHES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _whole(least: int) -> tuple[str, Callable[[object], bool]]:
    def fits(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return f"a whole number, at least {least}", fits


def _chance(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _layers(value: object) -> bool:
    return value in ("auto", "all") or _whole(0)[1](value)


_COUNT, _CHANCE, _TEXT = _whole(1), ("a number from 0 to 1", _chance), ("text", _text)
FORMS: Final[Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    "type": _TEXT,
    "draft_model": _TEXT,
    "draft_hf": _TEXT,
    "draft_n_max": _COUNT,
    "draft_n_min": _whole(0),
    "draft_p_min": _CHANCE,
    "draft_p_split": _CHANCE,
    "draft_ngl": ("a whole number, auto or all", _layers),
    "draft_device": _TEXT,
    "draft_threads": _COUNT,
    "draft_threads_batch": _COUNT,
    "draft_override_tensor": _TEXT,
    "draft_cpu_moe": ("true or false", lambda value: isinstance(value, bool)),
    "draft_n_cpu_moe": _whole(0),
    "draft_type_k": (f"one of {', '.join(_CACHES)}", lambda value: value in _CACHES),
    "draft_type_v": (f"one of {', '.join(_CACHES)}", lambda value: value in _CACHES),
    "draft_backend_sampling": ("true or false", lambda value: isinstance(value, bool)),
    "draft_sampling": (
        "greedy or probabilistic",
        lambda value: value in ("greedy", "probabilistic"),
    ),
    "ngram_mod_n_min": _whole(0),
    "ngram_mod_n_max": _COUNT,
    "ngram_mod_n_match": _COUNT,
    **{
        f"ngram_{kind}_{what}": _COUNT
        for kind in ("simple", "map_k", "map_k4v")
        for what in ("size_n", "size_m", "min_hits")
    },
}
"""What each key takes (tools/server/README.md)."""

_ALONE: Final = {"draft_n_max": 3, "draft_n_min": 0, "ngram_mod_n_max": 64, "ngram_mod_n_min": 48}
"""Defaults of builds since the old names were removed; n_max was 16 before."""


def kinds(speculative: Mapping[str, object]) -> tuple[str, ...]:
    """Return the types of speculation that are asked for, in order."""
    written = speculative.get("type")
    return tuple(written.split(",")) if isinstance(written, str) else ()


def of_program(speculative: Mapping[str, object]) -> list[Complaint]:
    """Judge what llama-server is given: each field by itself, and where those are right, together."""
    found = list(_forms(speculative))
    if not kinds(speculative) and "type" not in speculative:
        found.append(("type", f"is missing: {', '.join(TYPES[:3])}, ngram-simple, …"))
    return found or [*_kinds(kinds(speculative)), *_together(speculative)]


def _forms(speculative: Mapping[str, object]) -> Iterator[Complaint]:
    for key, value in sorted(speculative.items()):
        if key in FAKES:
            yield key, f"fakes the acceptance of speculative decoding ({ARG})"
        elif key == "default":
            yield key, f"hides its numbers: write type ngram-mod with ngram_mod_n_match 24, ngram_mod_n_min 48, ngram_mod_n_max 64 ({ARG})"  # fmt: skip
        elif key in REMOVED:
            yield key, f"was removed from llama-server; write `{REMOVED[key]}` ({ARG})"
        elif key in FORMS and not FORMS[key][1](value):
            yield key, f"must be {FORMS[key][0]} ({ARG})"


def _kinds(given: tuple[str, ...]) -> Iterator[Complaint]:
    for kind in given:
        if kind in RENAMED:
            yield (
                "type",
                f"{kind} is no type of llama-server; write {RENAMED[kind]} ({SPECULATIVE})",
            )
        elif kind != kind.strip() or not kind:
            yield "type", f"is a list with commas and without blanks ({ARG})"
    if "none" in given:
        more = " and all others with it" if len(given) > 1 else ""
        yield (
            "type",
            f"none switches speculation off{more}: leave `speculative` out ({SPECULATIVE})",
        )
    twice = {kind for kind in given if given.count(kind) > 1}
    if twice:
        yield "type", f"names {min(twice)} twice"
    if len(DRAFTS & set(given)) > 1:
        names = ", ".join(sorted(DRAFTS & set(given)))
        yield "type", f"names {names}, which all draft with the one draft model ({SPECULATIVE})"


def _together(speculative: Mapping[str, object]) -> Iterator[Complaint]:
    given = set(kinds(speculative))
    drafts = any(kind.startswith("draft") or kind in RENAMED for kind in given)
    models = [key for key in ("draft_model", "draft_hf") if key in speculative]
    needing = NEED_MODEL & given
    if needing and not models:
        what = "it dies without one" if "draft-simple" in needing else "it is silently left out"
        yield "draft_model", f"is missing: {min(needing)} drafts with a second model, and {what} ({SPECULATIVE})"  # fmt: skip
    if len(models) > 1:
        yield "draft_hf", "and draft_model name a draft each: write one"
    known = given <= {*TYPES, *RENAMED, "none"}
    for key in sorted(speculative):
        if key.startswith("draft_") and known and not drafts:
            told = "uses no draft model" if key in {"draft_model", "draft_hf"} else "drafts without a model, so it has no effect"  # fmt: skip
            yield key, f"{','.join(kinds(speculative))} {told} ({SPECULATIVE})"
        for kind in NGRAMS:
            mine = f"{kind.replace('-', '_')}_"
            if key in FORMS and known and key.startswith(mine) and kind not in given:
                if mine == "ngram_map_k_" and key.startswith("ngram_map_k4v_"):
                    continue
                yield key, f"has no effect without type {kind} ({SPECULATIVE})"
    for least, most in (("draft_n_min", "draft_n_max"), ("ngram_mod_n_min", "ngram_mod_n_max")):
        low, high = (_number(speculative, key) for key in (least, most))
        if (least in speculative or most in speculative) and low > high:
            where = least if least in speculative else most
            untold = "" if least in speculative and most in speculative else ", the default of the other"  # fmt: skip
            yield where, f"{least} {low} is more than {most} {high}{untold}: every draft would be thrown away ({SPECULATIVE})"  # fmt: skip


def _number(speculative: Mapping[str, object], key: str) -> int:
    value = speculative.get(key, _ALONE[key])
    return value if isinstance(value, int) else _ALONE[key]


def program_warnings(speculative: Mapping[str, object]) -> list[Complaint]:
    """Say what llama-server will do besides, or what only it knows."""
    found: list[Complaint] = []
    given = kinds(speculative)
    strange = [k for k in given if k not in {*TYPES, *RENAMED, "none"}]
    if strange:
        found.append(("type", f"{strange[0]} is none that this tool knows: the build must bring it"))  # fmt: skip
    for key in sorted(set(speculative) - set(FORMS)):
        near = difflib.get_close_matches(key, list(FORMS), n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        found.append((key, f"is none that this tool knows; the program is asked on the host{hint}"))
    if DRAFTS & set(given) and "draft_n_max" not in speculative:
        found.append(("draft_n_max", f"is not written: 3, and 16 in builds before the new names ({ARG})"))  # fmt: skip
    block = BLOCKS & set(given)
    if block and "draft_n_max" in speculative:
        found.append(("draft_n_max", f"is cut to the trained block of a {min(block)} model less one ({SPECULATIVE})"))  # fmt: skip
    if "draft-mtp" in given and "draft_model" not in speculative and "draft_hf" not in speculative:
        found.append(("draft_model", f"is not written: the head is then looked for in the model itself ({SPECULATIVE})"))  # fmt: skip
    if any(k in NGRAMS for k in given) and DRAFTS & set(given):
        found.append(("type", f"asks the n-gram type first, whatever the order; the draft model only where that finds nothing ({SPECULATIVE})"))  # fmt: skip
    if "draft_hf" in speculative:
        found.append(("draft_hf", "is fetched by each start that does not find it in its cache: name a file in draft_model"))  # fmt: skip
    return found


LOOKUP: Final = "prompt-lookup-decoding"
_PYTHON: Final = ("draft_model", "draft_model_num_pred_tokens")


def of_module(speculative: Mapping[str, object], args: Mapping[str, object]) -> Iterator[Complaint]:
    """Judge what llama_cpp.server is given: it drafts by looking the prompt up, whatever `draft_model` says."""
    source = "llama_cpp/server/model.py"
    for key in sorted(set(speculative) - set(_PYTHON)):
        yield key, f"llama_cpp.server knows {_PYTHON[0]} and {_PYTHON[1]} alone ({source})"
    if speculative.get("draft_model") != LOOKUP:
        yield "draft_model", f"must be {LOOKUP}, the only method of llama_cpp.server: any other word would silently mean it too ({source})"  # fmt: skip
    if not _COUNT[1](speculative.get("draft_model_num_pred_tokens", 1)):
        yield "draft_model_num_pred_tokens", f"must be {_COUNT[0]} ({source})"
    if False in (args.get("logits_all"), args.get("logits-all")):
        yield "", "needs the logits of all tokens: with args.logits_all false, a text longer than n_batch breaks it (llama_cpp/llama.py)"  # fmt: skip


def module_warnings(speculative: Mapping[str, object]) -> Iterator[Complaint]:
    """Say what llama_cpp.server will choose by itself."""
    if "draft_model_num_pred_tokens" not in speculative:
        yield "draft_model_num_pred_tokens", "is not written: 10 (llama_cpp/server/settings.py)"

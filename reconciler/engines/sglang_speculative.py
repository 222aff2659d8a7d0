"""Which combinations of speculative fields SGLang takes, by version, and what it makes of them.

Each rule names where it comes from: `server_args.py` (to 0.5.10) or `arg_groups/speculative_hook.py` (0.5.23),
read in the wheels of 0.4.10, 0.5.6.post2, 0.5.10.post1 and 0.5.23. A combination that the engine refuses, or
silently runs otherwise than written, is a problem; one that costs something unasked is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reconciler.engines.base import Finding, version_key
from reconciler.engines.catalogue import Catalogue, Flag, unknown_flag, wrong_value

if TYPE_CHECKING:
    from reconciler.core.spec import Server

PREFIX: Final = "--speculative-"
EAGLE: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN"})
TREES: Final = EAGLE | {"STANDALONE"}
"""The algorithms that draft by steps, topk and draft tokens."""
KNOWN: Final = TREES | {"NGRAM", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP"}
FAKES: Final = re.compile(r"(?:SGLANG_)?SIMULATE_ACC_.*")
_HYBRID: Final = re.compile(r"qwen-?3[.-]?(?:5|next)|qwen3-next", re.IGNORECASE)
V0_5_6: Final = (0, 5, 6)
V0_5_10: Final = (0, 5, 10)
V0_5_23: Final = (0, 5, 23)


@dataclass(frozen=True, slots=True)
class Case:
    """One server's speculative fields beside the flags that they must agree with."""

    speculative: Mapping[str, object]
    args: Mapping[str, object]
    env: Mapping[str, str]
    version: tuple[int, ...]
    tp_size: int
    pp_size: int
    model: str

    @property
    def algorithm(self) -> str:
        """The algorithm as the engine compares it."""
        return str(self.speculative.get("algorithm", "")).upper()

    def number(self, key: str) -> int | None:
        """Return a whole number of `speculative`, None when it is not written."""
        value = self.speculative.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def on(self, flag: str) -> bool:
        """Say whether a switch is written as on."""
        return self.args.get(flag) is True

    @property
    def page(self) -> int | None:
        """The page size as written."""
        value = self.args.get("page-size")
        return value if isinstance(value, int) else None

    @property
    def dp_attention(self) -> bool:
        """Whether attention runs data parallel, by the old switch or the new size."""
        size = self.args.get("attn-dp-size")
        return self.on("enable-dp-attention") or (isinstance(size, int) and size > 1)

    @property
    def spec_v2(self) -> bool:
        """Whether the variable of 0.5.10 that keeps the overlap scheduler is on."""
        return _true(self.env.get("SGLANG_ENABLE_SPEC_V2"))

    @property
    def strategy(self) -> tuple[str, str]:
        """The flag for the state of hybrid models in this version, and its value as written."""
        new = self.version >= V0_5_23
        flag = "mamba-radix-cache-strategy" if new else "mamba-scheduler-strategy"
        return flag, str(self.args.get(flag, "auto"))


def case_of(server: Server, book: Catalogue, args: Mapping[str, object]) -> Case:
    """Take what the rules need out of a server; `args` are the accepted ones, under every spelling."""
    return Case(
        server.speculative or {},
        args,
        server.env,
        version_key(server.engine.version or book.version),
        server.tp_size,
        server.pp_size,
        server.model or "",
    )


def derived(speculative: Mapping[str, object]) -> dict[str, object]:
    """Return the fields with `num_draft_tokens` filled in where it can only be one number."""
    steps, topk = speculative.get("num_steps"), speculative.get("eagle_topk")
    tree = str(speculative.get("algorithm", "")).upper() in TREES
    if tree and topk == 1 and isinstance(steps, int) and "num_draft_tokens" not in speculative:
        return {**speculative, "num_draft_tokens": steps + 1}
    return dict(speculative)


def flag_of(key: str) -> str:
    """Return the flag of a speculative field."""
    return PREFIX + key.replace("_", "-")


def problems(case: Case, book: Catalogue) -> list[Finding]:
    """Judge the fields by themselves; where those are right, also together."""
    found = [(f"speculative.{key}", text) for key, text in _forms(case, book)]
    if "algorithm" not in case.speculative:
        return [*found, ("speculative.algorithm", "is missing")]
    if not found:
        found = [
            (f"speculative.{key}" if key else "speculative", text) for key, text in _rules(case)
        ]
        found += _hybrid(case)
    return found


def _forms(case: Case, book: Catalogue) -> Iterator[Finding]:
    for key, value in sorted(case.speculative.items()):
        flag, _ = book.spellings.get(flag_of(key), (None, False))
        if flag is None:
            told = unknown_flag(book, flag_of(key)[2:])
            yield key, told.replace("`speculative-", "`")
            continue
        wrong = wrong_value(flag, value)
        if wrong is not None:
            yield key, wrong
        elif _counted(flag, key) and isinstance(value, int) and value < 1:
            yield key, "must be at least 1"


def _counted(flag: Flag, key: str) -> bool:
    return flag.type == "int" and key in {
        "num_steps",
        "eagle_topk",
        "num_draft_tokens",
        "dflash_block_size",
        "dspark_block_size",
        "draft_window_size",
    }


def _rules(case: Case) -> Iterator[Finding]:
    if case.algorithm in TREES:
        yield from _tree(case)
    elif case.algorithm == "NGRAM":
        yield from _ngram(case)
    elif case.algorithm == "DFLASH":
        yield from _dflash(case)
    elif case.algorithm == "DSPARK":
        yield from _dspark(case)
    elif case.algorithm == "UNO":
        yield from _uno(case)
    if (
        case.algorithm in {"STANDALONE", "EAGLE3", "DFLASH"}
        and "draft_model_path" not in case.speculative
    ):
        yield "draft_model_path", f"is missing: {case.algorithm} drafts with a model of its own"
    if case.algorithm in {"NGRAM", "UNO"} and "draft_model_path" in case.speculative:
        yield "draft_model_path", f"must not be given: {case.algorithm} has no draft model"
    if case.algorithm in {"STANDALONE", "NGRAM"} and case.dp_attention:
        yield "algorithm", f"{case.algorithm} does not work with DP attention (server_args.py)"
    if case.pp_size > 1:
        yield from _pipeline(case)
    if (
        case.args.get("disaggregation-mode") == "decode"
        and case.on("disaggregation-decode-enable-radix-cache")
        and case.algorithm not in {"DSPARK", "EAGLE", "EAGLE3", "NEXTN"}
    ):
        yield (
            "algorithm",
            f"{case.algorithm} does not work with disaggregation-decode-enable-radix-cache (speculative_hook.py)",
        )
    yield from _sampling(case)


def _tree(case: Case) -> Iterator[Finding]:
    steps, topk, tokens = (case.number(k) for k in ("num_steps", "eagle_topk", "num_draft_tokens"))
    if steps is None and topk is None and tokens is None:
        return
    if adapts(case):
        yield from _adaptive(case, steps, tokens)
        return
    if steps is None:
        yield (
            "num_steps",
            "is missing: the engine asserts it as soon as one of the three is given (server_args.py)",
        )
        return
    if topk is None:
        yield (
            "eagle_topk",
            "is missing: write all three of num_steps, eagle_topk, num_draft_tokens or none (server_args.py)",
        )
        return
    if topk == 1 and tokens is not None and tokens != steps + 1:
        only = f"must be num_steps + 1 = {steps + 1} with eagle_topk 1, or left out"
        yield "num_draft_tokens", f"{only}: the engine would silently set it so (server_args.py)"
    if topk > 1 and tokens is None:
        yield (
            "num_draft_tokens",
            "is missing: with eagle_topk > 1 it can be many numbers (server_args.py)",
        )
    if topk > 1:
        yield from _wide(case)


ADAPTIVE_STEPS: Final = (0, 1, 3, 5, 7)
"""What 0.5.23 chooses among where no configuration file names others (speculative/adaptive_spec_params.py)."""


def adapts(case: Case) -> bool:
    """Say whether the engine will vary the steps; else `adaptive` is switched off with only a warning."""
    return (
        case.speculative.get("adaptive") is True
        and case.version >= V0_5_23
        and _not_adaptive(case) is None
    )


def _not_adaptive(case: Case) -> str | None:
    """Name what makes the engine fall back to fixed steps."""
    if case.algorithm not in EAGLE:
        return f"{case.algorithm} is not EAGLE, EAGLE3 or NEXTN"
    if case.number("eagle_topk") not in {None, 1}:
        return "eagle_topk is not 1"
    if case.dp_attention:
        return "attention is data parallel"
    for flag in ("enable-multi-layer-eagle", "enable-two-batch-overlap", "enable-pdmux"):
        if case.on(flag):
            return f"{flag} is on"
    return None


def _adaptive(case: Case, steps: int | None, tokens: int | None) -> Iterator[Finding]:
    """With adaptive steps the engine fills in topk 1 and steps + 1 itself, and takes steps from its candidates alone."""
    if (
        steps is not None
        and "adaptive_config" not in case.speculative
        and steps not in ADAPTIVE_STEPS
    ):
        told = ", ".join(map(str, ADAPTIVE_STEPS))
        yield (
            "num_steps",
            f"must be one of the adaptive candidates {told}, or one of adaptive_config's (adaptive_spec_params.py)",
        )
    if tokens is not None and (steps is None or tokens != steps + 1):
        yield (
            "num_draft_tokens",
            "must be num_steps + 1, or left out: adaptive sets it so (speculative_hook.py)",
        )


def _wide(case: Case) -> Iterator[Finding]:
    backend = case.args.get("attention-backend")
    if backend == "trtllm_mha":
        yield "eagle_topk", "must be 1 with attention-backend trtllm_mha (server_args.py)"
    elif backend is not None and (case.page or 1) > 1 and case.version >= V0_5_6:
        fitting = {"flashinfer", "fa3"} | ({"triton"} if case.version >= V0_5_23 else set())
        if backend not in fitting:
            names = ", ".join(sorted(fitting))
            yield (
                "eagle_topk",
                f"above 1 with page-size > 1 needs attention-backend {names} (server_args.py)",
            )
    if V0_5_10 <= case.version < V0_5_23 and case.spec_v2:
        yield "eagle_topk", "must be 1 with SGLANG_ENABLE_SPEC_V2 (server_args.py)"


def _ngram(case: Case) -> Iterator[Finding]:
    if "eagle_topk" in case.speculative:
        yield (
            "eagle_topk",
            "has no effect with NGRAM: the engine replaces it by ngram_max_bfs_breadth (server_args.py)",
        )
    if "num_steps" in case.speculative and case.version < V0_5_23:
        yield "num_steps", "has no effect with NGRAM before 0.5.23 (server_args.py)"
    if "ngram_external_corpus_path" in case.speculative:
        yield from _corpus(case)
    backend = case.args.get("attention-backend")
    wide = (case.number("ngram_max_bfs_breadth") or NGRAM_BREADTH) > 1
    if wide and (case.page or 1) > 1 and backend not in {None, "flashinfer"}:
        yield (
            "algorithm",
            "NGRAM with page-size > 1 needs attention-backend flashinfer (server_args.py)",
        )


NGRAM_BREADTH: Final = 10
NGRAM_TOKENS: Final = 12
"""What NGRAM takes for ngram_max_bfs_breadth and num_draft_tokens where they are not written (before 0.5.10: the match window)."""


def _corpus(case: Case) -> Iterator[Finding]:
    most = (case.number("num_draft_tokens") or NGRAM_TOKENS) - 1
    budget = case.number("ngram_external_sam_budget")
    tokens = case.number("ngram_external_corpus_max_tokens")
    if budget is None or not 1 <= budget <= most:
        yield (
            "ngram_external_sam_budget",
            f"must be from 1 to num_draft_tokens - 1 = {most} with ngram_external_corpus_path (speculative_hook.py)",
        )
    if tokens is not None and tokens < 1:
        yield (
            "ngram_external_corpus_max_tokens",
            "must be positive with ngram_external_corpus_path (speculative_hook.py)",
        )


def _dflash(case: Case) -> Iterator[Finding]:
    for key in ("num_steps", "eagle_topk"):
        if case.number(key) not in {None, 1}:
            yield key, "is forced to 1 with DFLASH (speculative_hook.py)"
    block, tokens = case.number("dflash_block_size"), case.number("num_draft_tokens")
    if block is not None and tokens is not None and block != tokens:
        yield "num_draft_tokens", f"must equal dflash_block_size, {block} (speculative_hook.py)"
    window = case.number("draft_window_size")
    if window is not None and window < (tokens or block or 1):
        yield (
            "draft_window_size",
            f"must be at least num_draft_tokens, {tokens or block} (speculative_hook.py)",
        )
    yield from _shared_head(case)


def _shared_head(case: Case) -> Iterator[Finding]:
    """With DP attention, DFLASH and DSPARK borrow the target's head, which must then be data parallel too."""
    if not case.dp_attention:
        return
    if not case.on("enable-dp-lm-head"):
        yield (
            "algorithm",
            f"{case.algorithm} with DP attention needs args.enable-dp-lm-head (speculative_hook.py)",
        )
    if case.args.get("attn-cp-size", 1) != 1:
        yield (
            "algorithm",
            f"{case.algorithm} with DP attention excludes attn-cp-size (speculative_hook.py)",
        )


def _dspark(case: Case) -> Iterator[Finding]:
    for key in ("num_steps", "eagle_topk"):
        if case.number(key) not in {None, 1}:
            yield key, "is forced to 1 with DSPARK (speculative_hook.py)"
    gamma, tokens = case.number("dspark_block_size"), case.number("num_draft_tokens")
    if gamma is not None and tokens is not None and tokens != gamma + 1:
        yield (
            "num_draft_tokens",
            f"must be dspark_block_size + 1 = {gamma + 1}, or left out (speculative_hook.py)",
        )
    elif tokens is not None and tokens < 2:
        yield "num_draft_tokens", "must be at least 2 with DSPARK (speculative_hook.py)"
    yield from _shared_head(case)


def _uno(case: Case) -> Iterator[Finding]:
    if (case.tp_size, case.pp_size) != (1, 1):
        yield "algorithm", "UNO needs tp_size and pp_size 1 (speculative_hook.py)"
    if "uno-lora-path" not in case.args:
        yield "algorithm", "UNO needs args.uno-lora-path (speculative_hook.py)"
    if case.number("num_draft_tokens") is None:
        yield "num_draft_tokens", "is missing: UNO takes its width from it (speculative_hook.py)"
    elif (case.number("eagle_topk") or 1) > 1:
        yield from _uno_tree(case)
    elif case.number("num_steps") not in {None, 1}:
        yield "num_steps", "is forced to 1 with UNO and eagle_topk 1 (speculative_hook.py)"
    if case.dp_attention or case.args.get("attn-cp-size", 1) != 1:
        yield "algorithm", "UNO excludes DP attention and attn-cp-size (speculative_hook.py)"
    for flag in (
        "enable-deterministic-inference",
        "enable-strict-thinking",
        "enable-lora",
        "lora-paths",
    ):
        if case.args.get(flag) not in {None, False}:
            yield "algorithm", f"UNO excludes args.{flag} (speculative_hook.py)"
    if case.args.get("attention-backend") not in {None, "fa3"}:
        yield "algorithm", "UNO needs attention-backend fa3 (speculative_hook.py)"


def _uno_tree(case: Case) -> Iterator[Finding]:
    """A tree of Q nodes from F = steps + 1 levels of K candidates: Q must fit in what F and K can build."""
    steps, topk = case.number("num_steps"), case.number("eagle_topk") or 1
    width = case.number("num_draft_tokens") or 1
    if steps is None:
        yield "num_steps", "is missing: UNO with eagle_topk > 1 needs it (speculative_hook.py)"
        return
    parents = topk * max(steps - 1, 0) + 1
    most = min(128, 2048 // topk, parents + 1)
    if not steps + 1 <= width <= most:
        yield (
            "num_draft_tokens",
            f"must be from num_steps + 1 = {steps + 1} to {most} with UNO and eagle_topk {topk} (speculative_hook.py)",
        )
    for flag in ("enable-pdmux", "enable-two-batch-overlap"):
        if case.on(flag):
            yield "eagle_topk", f"must be 1 for UNO with args.{flag} (speculative_hook.py)"
    for key in ("accept_threshold_single", "accept_threshold_acc"):
        if case.speculative.get(key, 1.0) != 1.0:
            yield key, "must be 1.0 for UNO with eagle_topk > 1 (speculative_hook.py)"


def _pipeline(case: Case) -> Iterator[Finding]:
    if case.algorithm in {"DFLASH", "UNO"}:
        if case.algorithm == "DFLASH":
            yield "algorithm", "DFLASH needs pp_size 1 (speculative_hook.py)"
        return
    if case.algorithm == "DSPARK":
        if case.args.get("disaggregation-mode") != "prefill":
            yield "algorithm", "DSPARK needs pp_size 1, but on a prefill node (speculative_hook.py)"
        return
    if case.version < V0_5_23:
        yield (
            "algorithm",
            "speculation and pp_size > 1 exclude each other up to 0.5.10 (server_args.py)",
        )
    elif case.args.get("disaggregation-mode") != "prefill" and not (
        case.algorithm in {"EAGLE", "NEXTN"} and _true(case.env.get("SGLANG_ENABLE_PP_SPEC"))
    ):
        yield (
            "algorithm",
            "with pp_size > 1 only EAGLE works, with SGLANG_ENABLE_PP_SPEC=1 (speculative_hook.py)",
        )


def _sampling(case: Case) -> Iterator[Finding]:
    spec = case.speculative
    if spec.get("use_rejection_sampling") is True:
        if case.algorithm not in EAGLE:
            yield (
                "use_rejection_sampling",
                "works with EAGLE, EAGLE3 and NEXTN alone (server_args.py)",
            )
        elif case.number("eagle_topk") not in {None, 1}:
            yield "use_rejection_sampling", "needs eagle_topk 1 (server_args.py)"
        for key in ("accept_threshold_single", "accept_threshold_acc"):
            if spec.get(key, 1.0) != 1.0:
                yield key, "must be 1.0 with use_rejection_sampling (server_args.py)"
    if spec.get("use_block_verification") is True and case.algorithm not in EAGLE | {
        "DFLASH",
        "DSPARK",
    }:
        yield (
            "use_block_verification",
            "works with EAGLE, EAGLE3, NEXTN, DFLASH and DSPARK alone (speculative_hook.py)",
        )
    if case.version[:3] == V0_5_10 and spec.get("moe_runner_backend") == "flashinfer_trtllm":
        yield "moe_runner_backend", "may not be flashinfer_trtllm (0.5.10, server_args.py)"
    if "draft_sink_size" in spec and "draft_window_size" not in spec:
        yield "draft_sink_size", "needs draft_window_size (speculative_hook.py)"
    if _true(case.env.get("SGLANG_ENABLE_PP_SPEC")) and spec.get("adaptive") is True:
        yield "adaptive", "excludes SGLANG_ENABLE_PP_SPEC (validation_hook.py)"


def _hybrid(case: Case) -> list[Finding]:
    flag, strategy = case.strategy
    place, found = f"args.{flag}", list[Finding]()
    if strategy.startswith("extra_buffer") and case.on("disable-radix-cache"):
        found.append(
            (place, "extra_buffer and disable-radix-cache exclude each other (server_args.py)")
        )
    needs_v2 = case.version[:3] == V0_5_10 and not case.on("disable-radix-cache")
    if strategy.startswith("extra_buffer") and needs_v2 and not case.spec_v2:
        found.append(
            (place, "extra_buffer with speculation needs env SGLANG_ENABLE_SPEC_V2=1 in 0.5.10")
        )
    if strategy == "no_buffer" and not case.on("disable-radix-cache"):
        if case.version[:3] == V0_5_10:
            found.append(
                (
                    place,
                    "no_buffer with speculation is not compatible with the radix cache (QwenLM/Qwen3.8#108)",
                )
            )
        elif case.version >= V0_5_23 and (case.page or 1) > 1:
            found.append((place, "no_buffer needs page-size 1 (arg_groups/mamba_hook.py)"))
    interval, tokens = (
        case.args.get("mamba-track-interval"),
        derived(case.speculative).get("num_draft_tokens"),
    )
    if isinstance(interval, int):
        if isinstance(tokens, int) and interval < tokens:
            found.append(
                ("args.mamba-track-interval", f"must be at least num_draft_tokens, {tokens}")
            )
        if case.page and interval % case.page:
            found.append(
                ("args.mamba-track-interval", f"must be a multiple of page-size, {case.page}")
            )
    return found


def _ngram_unwritten(case: Case) -> Iterator[Finding]:
    if case.algorithm != "NGRAM":
        return
    if "num_draft_tokens" not in case.speculative:
        taken = "the match window" if case.version < V0_5_10 else str(NGRAM_TOKENS)
        yield (
            "speculative.num_draft_tokens",
            f"is not written: NGRAM takes {taken} (server_args.py)",
        )
    if "num_steps" not in case.speculative and case.version >= V0_5_23:
        yield (
            "speculative.num_steps",
            "is not written: NGRAM takes num_draft_tokens // ngram_max_bfs_breadth (speculative_hook.py)",
        )


def warnings(case: Case) -> list[Finding]:
    """Say what the engine will do besides, or leave to luck."""
    found: list[Finding] = []
    if case.algorithm not in KNOWN:
        found.append(
            ("speculative.algorithm", "is none that this tool knows: a plugin must bring it")
        )
    if "max-running-requests" not in case.args and case.algorithm in KNOWN - {"UNO"}:
        found.append(
            (
                "args.max-running-requests",
                "is not written: with speculation the engine sets it to 48 (server_args.py)",
            )
        )
    if case.on("enable-mixed-chunk"):
        found.append(("args.enable-mixed-chunk", "is switched off by speculation (server_args.py)"))
    if case.algorithm in TREES and not {"num_steps", "eagle_topk"} & set(case.speculative):
        found.append(
            (
                "speculative",
                "leaves num_steps, eagle_topk and num_draft_tokens to the engine, which chooses by model and version",
            )
        )
    if case.algorithm in {"EAGLE", "NEXTN"} and "draft_model_path" not in case.speculative:
        found.append(
            (
                "speculative.draft_model_path",
                "is not written: the draft is then looked for in the model itself (configs/model_config.py)",
            )
        )
    found += _ngram_unwritten(case)
    draft = case.speculative.get("draft_model_path")
    pinned = (
        draft is None or str(draft).startswith("/") or "draft_model_revision" in case.speculative
    )
    if not pinned:
        found.append(
            ("speculative.draft_model_revision", "is not pinned: the draft of the day is taken")
        )
    hinders = _not_adaptive(case) if case.speculative.get("adaptive") is True else None
    if hinders is not None:
        found.append(
            (
                "speculative.adaptive",
                f"will be switched off, since {hinders}: the engine falls back to fixed steps (adaptive_spec_params.py)",
            )
        )
    if case.version < V0_5_10 and not case.on("disable-overlap-schedule"):
        found.append(
            (
                "speculative",
                "switches the overlap scheduler off up to 0.5.6 (server_args.py)",
            )
        )
    elif case.version[:3] == V0_5_10 and not case.spec_v2:
        found.append(
            (
                "env.SGLANG_ENABLE_SPEC_V2",
                "is not 1: speculation switches the overlap scheduler off in 0.5.10 (server_args.py)",
            )
        )
    if (
        "draft_window_size" in case.speculative
        and case.version >= V0_5_23
        and case.algorithm not in EAGLE | {"DFLASH"}
    ):
        found.append(
            (
                "speculative.draft_window_size",
                f"has no effect with {case.algorithm} (speculative_hook.py)",
            )
        )
    if (case.number("num_draft_tokens") or 0) >= 64:
        found.append(
            (
                "speculative.num_draft_tokens",
                "64 and more were seen to crash (sgl-project/sglang#12349)",
            )
        )
    if "SGLANG_ENABLE_SPEC_V2" in case.env and case.version >= V0_5_23:
        found.append(("env.SGLANG_ENABLE_SPEC_V2", "does nothing in 0.5.23: v2 is the only one"))
    flag, strategy = case.strategy
    unset = (
        case.version[:3] == V0_5_10 and strategy == "auto" and not case.on("disable-radix-cache")
    )
    if unset and _HYBRID.search(case.model):
        told = "should be extra_buffer for this hybrid model: auto is refused with the radix cache"
        found.append((f"args.{flag}", f"{told} (QwenLM/Qwen3.8#108)"))
    return found


def _true(value: str | None) -> bool:
    return value is not None and value.lower() in {"1", "true", "yes", "on"}

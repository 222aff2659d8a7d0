"""What preflight finds about an engine is judged with its numbers, and refused only where a start is known to fail."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from reconciler.core.checks import (
    IDS,
    Verdict,
    flags_check,
    judge,
    refused,
    runs_on,
    unprivileged,
    waived,
)
from reconciler.core.demands import Card, Demands, WantedModel, load
from reconciler.lab.world import SOUND_MODEL

GIB = 1024**3
DEMANDS = Demands(
    engine="sglang",
    version="0.5.23",
    python="/opt/sglang/bin/python",
    kernels=True,
    models=(WantedModel("model", "/srv/m"),),
    tp=4,
    splits_heads=True,
    context=131_072,
    memory_fraction=0.9,
)
CARDS = tuple(Card(f"GPU-{n}", n, 81_920) for n in range(4))


def facts(model: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
    """Give what a host on which all is well answers, changed."""
    config = {**SOUND_MODEL["config"], **(model or {}).pop("config", {})} if model else None
    row = {**SOUND_MODEL, "path": "/srv/m", **(model or {}), **({"config": config} if config else {})}  # fmt: skip
    good = {
        "program": {"known": {"python": "3.12.3", "version": "0.5.23", "digest": "d", "kernels": ["sm_80", "sm_90"]}},
        "models": {"known": [{"known": row}]},
        "nodes": {"known": {"/dev/nvidia0": "usable"}},
        "limits": {"known": {"shm": {"free": 8 * GIB, "total": 8 * GIB}, "files": 1 << 20, "disks": {"/tmp": 9 * GIB}}},
        "capabilities": {"known": {card.uuid: "9.0" for card in CARDS}},
    }  # fmt: skip
    return {**good, **other}


def wrong(found: dict[str, Any], demands: Demands = DEMANDS) -> dict[str, str]:
    """Give the refusals by id."""
    return {c.id: c.sentence for c in refused(judge(demands, found, CARDS))}


def test_all_is_well_on_a_host_on_which_all_is_well() -> None:
    """Nothing refuses, and what fits is said in numbers."""
    checks = {c.id: c for c in judge(DEMANDS, facts(), CARDS)}
    assert not [c for c in checks.values() if c.verdict is not Verdict.OK]
    assert checks["memory.fit"].sentence == (
        "it fits: weights 0.2 GiB a card, KV cache 8.0 KiB a token, of 80.0 GiB × 0.9 = 72.0 GiB"
    )
    assert set(checks) <= set(IDS)


@pytest.mark.parametrize(
    ("id_", "found", "words"),
    [
        ("engine.runs", facts(program={"unknown": "it ended with 127"}), "does not run"),
        ("engine.version", facts(program={"known": {"python": "3", "version": "0.5.10", "digest": "d"}}), "0.5.10 is installed where"),
        ("engine.version", facts(program={"known": {"python": "3", "version": None}}), "has no such package"),
        ("model.cached", facts({"found": False, "why": "does not exist"}), "does not exist"),
        ("model.cached", facts(models={"unknown": "no user sglang"}), "no user sglang"),
        ("model.cached", facts(models={"known": []}), "no answer"),
        ("model.config", facts({"config": {"unknown": "is not JSON"}}), "is not JSON"),
        ("model.tokenizer", facts({"tokenizer": False}), "no tokenizer"),
        ("model.weights", facts({"missing": ["m-2"], "missing_count": 1}), "1 of 2 weight files of /srv/m are missing: m-2"),
        ("model.weights", facts({"broken": [["m-1", "is cut short"]], "broken_count": 1}), "m-1 is cut short"),
        ("model.weights", facts({"index_problem": "is no index"}), "is no index"),
        ("model.weights", facts({"shards": 0}), "no weight files"),
        ("parallel.heads", facts({"config": {"num_attention_heads": 30}}), "30 attention heads cannot"),
        ("parallel.heads", facts({"config": {"num_key_value_heads": 6}}), "6 key-value heads"),
        ("memory.fit", facts({"bytes": 300 * GIB}), "weights 75.0 GiB a card"),
        ("gpu.devices", facts(nodes={"known": {"/dev/nvidia0": "denied"}}), "/dev/nvidia0"),
        ("gpu.kernels", facts(capabilities={"known": {c.uuid: "12.0" for c in CARDS}}), "a card here is 12.0"),
        ("host.shm", facts(limits={"known": {"shm": {"free": 64 << 20}, "files": 1 << 20}}), "64 MiB free"),
        ("host.files", facts(limits={"known": {"shm": {"free": GIB}, "files": 1024}}), "may open 1024"),
        ("host.disk", facts(limits={"known": {"shm": {"free": GIB}, "disks": {"/tmp": 1 << 20}}}), "/tmp has 1 MiB"),
    ],
)  # fmt: skip
def test_what_is_known_to_fail_is_refused_with_what_was_found(
    id_: str, found: dict[str, Any], words: str
) -> None:
    """Each check by its own id, alone, with the number or the name that decides; and each can be waived with a reason."""
    sentences = wrong(found)
    assert words in sentences[id_]
    assert set(sentences) == {id_}
    let = waived(judge(DEMANDS, found, CARDS), {id_: "looked at by hand"})
    assert not refused(let)
    assert next(c.sentence for c in let if c.verdict is Verdict.WAIVED).endswith("waived: looked at by hand")  # fmt: skip


def test_what_is_not_known_is_said_and_refuses_only_where_nothing_can_go_on() -> None:
    """A model that does not tell its heads, cards without a size: not known, never "fits"."""
    strange = facts({"config": {"num_attention_heads": None, "num_key_value_heads": None}})
    checks = {c.id: c.verdict for c in judge(DEMANDS, strange, tuple(replace(c, total_mib=None) for c in CARDS))}  # fmt: skip
    assert checks["parallel.heads"] is Verdict.UNKNOWN
    assert checks["memory.fit"] is Verdict.UNKNOWN
    assert "gpu.kernels" not in {c.id for c in judge(DEMANDS, facts(capabilities={"unknown": "x"}), CARDS)}  # fmt: skip


def test_weights_that_change_while_loading_only_warn() -> None:
    """Quantised on the fly or offloaded: the bytes on disk prove nothing, so nobody is refused for them."""
    checks = judge(replace(DEMANDS, reshaped=True), facts({"bytes": 300 * GIB}), CARDS)
    assert {c.id: c.verdict for c in checks}["memory.fit"] is Verdict.WARNED


def test_a_context_that_does_not_fit_is_a_warning_with_numbers() -> None:
    """The engine may well start; one full request would not be served."""
    found = facts({"config": {"num_hidden_layers": 8000}})
    checks = {c.id: c for c in judge(DEMANDS, found, CARDS)}
    assert checks["memory.context"].verdict is Verdict.WARNED
    assert "fewer than the context of 131072" in checks["memory.context"].sentence


def test_an_image_or_a_model_that_a_start_would_fetch_is_refused() -> None:
    """Never a download after the old server is gone, unless the spec says so."""
    inside = replace(
        DEMANDS, python=None, kernels=False, image=("/usr/bin/podman", "x:1"),
        models=(WantedModel("model", "org/m", mounted=False),),
    )  # fmt: skip
    sentences = wrong(facts(image={"known": {"id": None}}, models={"known": []}), inside)
    assert "Pull it first" in sentences["engine.image"]
    assert "downloaded at each start" in sentences["model.cached"]


@pytest.mark.parametrize(
    ("built", "card", "runs"),
    [
        (["sm_80", "sm_90"], "9.0", True), (["sm_80"], "8.6", True), (["sm_86"], "8.0", False), (["sm_90a"], "9.0", True),
        (["sm_90"], "12.0", False), (["sm_90", "compute_90"], "12.0", True), (["compute_90"], "8.9", False), (["sm_120"], "12.0", True),
        (["sm_100"], "12.0", False), (["gfx90a"], "9.0", False),
    ],
)  # fmt: skip
def test_machine_code_runs_within_a_major_version_and_ptx_on_later_ones(
    built: list[str],
    card: str,
    runs: bool,
) -> None:
    """As the driver decides it."""
    assert runs_on(built, card) is runs


def test_demands_come_back_from_what_a_host_keeps_of_them() -> None:
    """Through JSON; what is not understood is none, and is then not looked at."""
    assert load(json.loads(json.dumps(asdict(DEMANDS)))) == DEMANDS
    assert load(None) is None
    assert load({"engine": "x", "of_the_future": 1}) is None


def test_a_help_that_dies_is_refused_and_a_look_without_privilege_only_not_known() -> None:
    """An engine that ends with a signal at its help knows nothing; a dry run that was not let look refuses nothing by that."""
    dead = flags_check({"known": {"unknown": "python --help ended with 132"}, "unknown": []}, "one")
    assert (dead.verdict, "ended with 132" in dead.sentence) == (Verdict.REFUSED, True)
    assert flags_check({}, "one").verdict is Verdict.REFUSED
    assert flags_check({"known": {"known": ["--a"]}, "unknown": []}, "one").verdict is Verdict.OK
    told = "PermissionError: only root can look with another user's rights"
    blind = facts(
        program={"unknown": "only root can run a program as sglang"},
        models={"known": [{"unknown": told}]},
    )
    assert {c.id for c in refused(judge(DEMANDS, blind, CARDS))} == {"engine.runs", "model.cached"}
    assert not refused(unprivileged(judge(DEMANDS, blind, CARDS)))
    assert refused(unprivileged([dead]))

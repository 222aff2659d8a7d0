"""The identity of what runs: what changes it, what does not, and what a change needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_engines import ENGINES

from reconciler.core.findings import read_server
from reconciler.core.revision import (
    Change,
    EffectClass,
    changes,
    effect_class,
    policy_digest,
    restored,
    revision,
    whole,
    written,
)
from reconciler.core.spec import Server

RAW: Mapping[str, Any] = {
    "name": "qwen", "host": "llm-two", "gpus": (0, 1), "engine": {"name": "custom", "command": ("/opt/x", "--a")},
    "model": "Qwen/Qwen3-8B", "listen": {"port": 30000, "api_key": {"file": "/k"}}, "tp_size": 2,
    "speculative": {"algorithm": "NEXTN", "num_steps": 4}, "args": {"a": 1, "b": (1, 2), "c": {"x": 1.5, "y": "z"}, "d": True},
    "env": {"A": "1", "B": "2"}, "secrets": {"T": {"file": "/t"}}, "timeouts": {"stop": "90s", "ready": "20m"},
    "gate": {
        "runs": ({"name": "r", "concurrency": 1, "requests": 64, "max_tokens": 8, "min_decode_tps": 10, "max_ttft_p95": "600ms"},),
        "baseline": {"max_loss": "5%"},
    },
    "drift": "heal",
}  # fmt: skip


def made(raw: Mapping[str, Any]) -> Server:
    server, findings = read_server(raw, ENGINES)
    assert findings == []
    assert server is not None
    return server


def shuffled(value: Any, order: st.DataObject) -> Any:
    if isinstance(value, Mapping):
        keys = order.draw(st.permutations(sorted(value)))
        return {key: shuffled(value[key], order) for key in keys}
    return tuple(shuffled(item, order) for item in value) if isinstance(value, tuple) else value


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_order_of_keys_never_changes_the_revision(order: st.DataObject) -> None:
    """However a person sorts a document, it is the same revision."""
    assert revision(made(shuffled(RAW, order))) == revision(made(RAW))


def test_the_revision_is_pinned() -> None:
    """An upgrade of the tool never restarts a fleet: this digest may only change with the spec language's version."""
    assert written(made(RAW))["timeouts"] == {"stop": "1m30s"}
    assert revision(made(RAW)) == "793cd75416d097b8aedbfc18b45931db1d5671bf03d3ab77d26736401c324ca4"


def test_another_spelling_of_the_same_is_the_same() -> None:
    """Units, defaults written out and the short form of the engine do not matter."""
    base = made({**RAW, "engine": "sglang", "timeouts": {"stop": "120s"}})
    same = {
        **RAW,
        "engine": {"name": "sglang"},
        "timeouts": {},
        "pp_size": 1,
        "state": "running",
        "unit": "qwen.service",
    }
    assert revision(made(same)) == revision(base)


@pytest.mark.parametrize(
    "change",
    [
        {"gate": None}, {"drift": "off"}, {"on_failure": "stop"}, {"suspend": True}, {"state": "stopped"}, {"host": "other"},
        {"timeouts": {"stop": "90s", "ready": "5m", "drain": "1s", "settle": "1s", "release": "9s", "gate": "1m"}},
    ],
)  # fmt: skip
def test_what_only_the_controller_reads_is_no_new_revision(change: Mapping[str, Any]) -> None:
    """A changed gate leaves `applied` as it is."""
    assert revision(made({**RAW, **change})) == revision(made(RAW))


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": (1, 0)}, {"model": "Qwen/Qwen3-4B"}, {"tp_size": 1}, {"env": {"A": "1"}}, {"env": {"A": "1", "B": "3"}},
        {"listen": {"port": 30001, "api_key": {"file": "/k"}}}, {"timeouts": {"stop": "91s"}}, {"unit": "x.service"},
        {"engine": {"name": "custom", "command": ("/opt/x", "--b")}}, {"args": {**RAW["args"], "a": 1.0}},
        {"args": {**RAW["args"], "a": "1"}}, {"args": {**RAW["args"], "d": 1}}, {"args": {**RAW["args"], "b": (2, 1)}},
        {"secrets": {"T": {"file": "/u"}}}, {"speculative": {"algorithm": "NEXTN", "num_steps": 3}}, {"runtime": {"user": "x"}},
    ],
)  # fmt: skip
def test_whatever_decides_what_runs_is_a_new_revision(change: Mapping[str, Any]) -> None:
    """Values, their types and the order of lists all count."""
    assert revision(made({**RAW, **change})) != revision(made(RAW))


def test_a_changed_gate_has_a_digest_of_its_own() -> None:
    """What the controller reads can be compared too."""
    assert policy_digest(made({**RAW, "drift": "off"})) != policy_digest(made(RAW))
    assert policy_digest(made({**RAW, "model": "a/b"})) == policy_digest(made(RAW))


def test_what_was_recorded_reads_back_equal() -> None:
    """A rollback needs no git: the record gives the same server."""
    server = made(RAW)
    assert restored(whole(server), ENGINES) == server
    assert restored({"name": "x"}, ENGINES) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("timeouts.stop", EffectClass.RELOAD), ("timeouts.drain", EffectClass.CONTROLLER), ("gate.runs", EffectClass.CONTROLLER),
        ("gate", EffectClass.CONTROLLER), ("suspend", EffectClass.CONTROLLER), ("args.context-length", EffectClass.RESTART),
        ("args.gate", EffectClass.RESTART), ("gpus", EffectClass.RESTART), ("listen.port", EffectClass.RESTART), ("x", EffectClass.RESTART),
        ("model", EffectClass.RESTART),
    ],
)  # fmt: skip
def test_each_field_has_an_effect_class(path: str, expected: EffectClass) -> None:
    """What is not known to need less needs a restart."""
    assert effect_class(path) is expected


def test_changes_are_listed_field_by_field() -> None:
    """Sorted, with what each needs; nothing where nothing differs."""
    old = made(RAW)
    new = made(
        {
            **RAW,
            "args": {"a": 2, "b": (1, 2), "c": {"x": 1.5}, "d": True},
            "timeouts": {"stop": "60s"},
            "drift": "off",
        }
    )
    assert changes(whole(old), whole(old)) == ()
    assert changes(whole(old), whole(new)) == (
        Change("args.a", 1, 2, EffectClass.RESTART),
        Change("args.c.y", "z", None, EffectClass.RESTART),
        Change("drift", "heal", "off", EffectClass.CONTROLLER),
        Change("timeouts.ready", "20m", None, EffectClass.CONTROLLER),
        Change("timeouts.stop", "1m30s", "1m", EffectClass.RELOAD),
    )


def test_one_and_true_are_two_values() -> None:
    """`1`, `1.0` and `true` render differently, so they differ."""
    assert len(changes({"a": 1, "b": 1, "c": (1,)}, {"a": True, "b": 1.0, "c": [1]})) == 2


def test_a_map_that_came_whole_is_judged_by_its_fields() -> None:
    """`timeouts: {stop: 40s}` where there was no `timeouts` needs a reload, as it does inside one."""
    found = changes({}, {"timeouts": {"stop": "40s", "drain": "5s"}})
    assert [(c.path, c.effect_class) for c in found] == [
        ("timeouts.drain", EffectClass.CONTROLLER),
        ("timeouts.stop", EffectClass.RELOAD),
    ]
    assert [c.path for c in changes({"args": {"a": 1}}, {"args": [1]})] == ["args"]
    assert [c.path for c in changes({"env": {}}, {"env": {"A": "b"}})] == ["env.A"]

"""What a sweep tries and how its numbers are shown: the grid, the words, the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from reconciler.cli.tune import _some_possible
from reconciler.core.errors import UsageError
from reconciler.core.fleet import load_fleet
from reconciler.core.measurement import Distribution, RunResult
from reconciler.core.spec import Server
from reconciler.core.tuning import (
    Axis,
    Objective,
    Point,
    State,
    Tried,
    axis_of,
    choose,
    gate_of,
    points_of,
    surely_below,
    variant,
)
from reconciler.views import tuning
from reconciler.wiring import engines

SPEC = b"""apiVersion: reconciler/v1
kind: Host
name: one
---
apiVersion: reconciler/v1
kind: Server
name: qwen
host: one
gpus: [0]
engine: {name: sglang, version: 0.5.23}
runtime: {python: /opt/sglang/bin/python}
model: /srv/models/qwen
served_model_name: qwen
speculative: {algorithm: NEXTN, num_steps: 4, eagle_topk: 1}
listen: {address: 127.0.0.1, port: 30000}
"""


def server() -> Server:
    """Give a server with speculative decoding."""
    fleet = load_fleet({"a.yaml": SPEC}, engines=engines())
    assert not fleet.problems, fleet.problems
    return fleet.servers[0]


def rounds(single: float, batch: float, count: int = 4) -> tuple[RunResult, ...]:
    """Give rounds of one stream and of sixteen with these speeds, a little apart."""
    found = []
    for number in range(1, count + 1):
        for concurrency in (1, 16):
            factor = 1 + 0.001 * number
            found.append(
                RunResult(
                    f"c{concurrency}", number, "realistic", concurrency, 256, sent=8, completed=8,
                    decode_tps=Distribution.of([single * factor]), output_tps=batch * factor,
                )
            )  # fmt: skip
    return tuple(found)


def tried(settings: Sequence[tuple[str, Any]], single: float, batch: float, **other: Any) -> Tried:
    """Give a point with its numbers."""
    again = bool(other.pop("again", False))
    return Tried(
        Point(tuple(settings), again), State.MEASURED, results=rounds(single, batch), **other
    )


def test_values_are_numbers_words_switches_and_lists() -> None:
    """As in YAML, but for `off`, which leaves the field out; brackets keep a list together."""
    assert axis_of("a.b=off,1,2.5,true,word,[1,2]") == Axis(
        "a.b", ("off", 1, 2.5, True, "word", (1, 2))
    )


@pytest.mark.parametrize(
    "text",
    ["", "a", "=1", "a=", "a=1,,2", "a=1,1"],
    ids=["nothing", "no-values", "no-field", "empty", "hole", "twice"],
)
def test_a_wrong_set_is_a_usage_error(text: str) -> None:
    """It says how one is written."""
    with pytest.raises(UsageError):
        axis_of(text)


def test_off_takes_the_whole_block_and_so_is_tried_once() -> None:
    """Two axes of speculation: `off` of one makes the other's values moot."""
    points = points_of(
        [axis_of("speculative.num_steps=off,1"), axis_of("speculative.eagle_topk=1,2")]
    )
    assert [p.label for p in points] == [
        "speculative=off",
        "speculative.num_steps=1, speculative.eagle_topk=1",
        "speculative.num_steps=1, speculative.eagle_topk=2",
    ]


def test_more_points_than_anybody_waits_for_are_refused() -> None:
    """Each restarts the server."""
    axis = axis_of("args.a=" + ",".join(map(str, range(9))))
    with pytest.raises(UsageError, match="81 combinations"):
        points_of([axis, Axis("args.b", axis.values)])
    with pytest.raises(UsageError, match="given twice"):
        points_of([axis, axis])


def test_a_variant_is_the_server_with_its_settings() -> None:
    """`off` leaves speculation out; what the engine's rules refuse comes with the rule."""
    found, why = variant(server(), Point((("speculative.num_steps", 7),)), engines())
    assert found is not None, why
    assert found.speculative == {"algorithm": "NEXTN", "num_steps": 7, "eagle_topk": 1}
    plain, _ = variant(server(), Point((("speculative", "off"),)), engines())
    assert plain is not None
    assert plain.speculative is None
    wrong, why = variant(server(), Point((("args.no-such-flag", 1),)), engines())
    assert wrong is None
    assert "no-such-flag" in why
    through, why = variant(server(), Point((("model.x", 1),)), engines())
    assert (through, why) == (None, "model.x: `model` is no map")


def test_a_sweep_without_a_possible_point_ends_before_any_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A typo costs nobody a measurement; where some points are possible the others are named and left out."""
    wrong, right = (Point((("speculative.num_steps", value),)) for value in ("many", 3))
    with pytest.raises(UsageError, match="num_steps=many"):
        _some_possible(server(), [wrong])
    _some_possible(server(), [wrong, right])
    assert "num_steps=many will be left out" in capsys.readouterr().err


def test_the_gate_of_a_sweep_has_two_ends_and_the_limits_that_were_asked_for() -> None:
    """One stream and many, without the spec's baseline; a run that is not there is said."""
    gate = gate_of(server(), ["batch:min_output_tps=900", "max_error_rate=1%"][:1])
    assert [(run.name, run.concurrency) for run in gate.runs] == [("single", 1), ("batch", 16)]
    assert [limit.key for limit in gate.runs[1].limits] == ["min_output_tps"]
    for wrong in ("nothing", "none:min_output_tps=1", "min_no_such=1", "min_output_tps=fast"):
        with pytest.raises(UsageError, match="--require"):
            gate_of(server(), [wrong])


def test_three_rounds_are_the_least_that_say_slower() -> None:
    """And noise as large as the difference says nothing."""
    assert surely_below([80.0, 80.1, 79.9], [100.0, 100.1, 99.9], 0.02)
    assert not surely_below([80.0, 80.1], [100.0, 100.1], 0.02)
    assert not surely_below([60.0, 100.0, 80.0], [100.0, 60.0, 95.0], 0.02)
    assert not surely_below([98.5, 98.6, 98.4], [100.0, 100.1, 99.9], 0.02)


def test_greedy_for_one_stream_and_for_all_choose_differently() -> None:
    """K = 10 is best for one user, none at all for a full house; balanced takes what is good for both."""
    points = [
        tried((), 100, 1000),
        tried((("k", 10),), 160, 500),
        tried((("k", 3),), 130, 1000),
        tried((("k", "off"),), 70, 1300),
    ]
    labels = {o: choose(points, o, 0.02).winner for o in Objective}
    assert {o.value: t.point.label for o, t in labels.items() if t is not None} == {
        "speed": "k=10",
        "throughput": "k=off",
        "balanced": "k=3",
    }


def test_what_is_shown_says_the_same_everywhere() -> None:
    """Table, page and JSON carry the numbers; hostile text in a value reaches neither markup nor HTML."""
    hostile = "<script>[red]\u202e"
    points = [tried((), 100, 1000), tried((("env.K", hostile),), 120, 1200, rollout_s=12.0)]
    choice = choose(points, Objective.BALANCED, 0.02)
    page = tuning.page("qwen: env.K", points, choice, Objective.BALANCED)
    assert "<script>" not in page
    assert "\u202e" not in page
    assert page.count("<circle") == 2
    message = tuning.message("qwen", points, choice, Objective.BALANCED)
    assert "120.3 (+20.0%)" in message
    assert "\u202e" not in message
    document = json.loads(tuning.as_json("qwen", points, choice, Objective.BALANCED, restored=True))
    assert document["winner"] == {"env.K": hostile}
    assert [Tried.from_json(p).to_json() for p in document["points"]] == document["points"]

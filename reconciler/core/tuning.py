"""What `reconcile tune` tries and how it chooses: points of a grid, what was measured of each, the winner. Pure.

Two numbers describe a point: the decode speed of a single stream (what one user sees) and the throughput of all
streams (what the cards give). A point that is worse in both than another by more than the margin is dominated; of
those that are not, the objective chooses, and where several are within the margin of the best, the smaller value
wins: it leaves more memory and fails less. `tune.py` carries a sweep out.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from pydantic import ValidationError

from reconciler.core.errors import UsageError
from reconciler.core.findings import read_server
from reconciler.core.measurement import QualityResult, RunResult
from reconciler.core.revision import frozen, revision, whole
from reconciler.core.significance import mean_of, student_t, variance
from reconciler.core.spec import EngineRules, Gate, Server

OFF: Final = "off"
"""As a value: the feature that the field belongs to is left out (`speculative` as a whole), else the field."""

POINTS_LIMIT: Final = 64
"""Each is a restart of the server; nobody waits for more."""

RACE_AFTER: Final = 3
"""Rounds. Fewer say nothing of the spread between rounds, so nothing can be called slower."""

ROUNDS_LIMIT: Final = 12

GREEDY: Final = "greedy"

_LEVEL: Final = 0.95


class Objective(StrEnum):
    """What the winner is chosen by."""

    SPEED = "speed"
    """The decode speed of a single stream."""
    THROUGHPUT = "throughput"
    """Tokens a second of all streams at the highest concurrency."""
    BALANCED = "balanced"
    """Both alike: the geometric mean of the two ratios to what is applied."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One field and the values that are tried, in the order in which they were written."""

    field: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of all axes; without any it is what is applied: the control."""

    settings: tuple[tuple[str, Any], ...] = ()
    again: bool = False
    """The control once more, after everything else: how far the host itself drifted meanwhile."""

    @property
    def label(self) -> str:
        """Name the point for people and for the journal."""
        if not self.settings:
            return "applied, again" if self.again else "applied"
        return ", ".join(f"{name}={shown(value)}" for name, value in self.settings)


class State(StrEnum):
    """What came of a point."""

    MEASURED = "measured"
    DOMINATED = "dominated"
    """Measured as far as it took to see that another point is better in every way."""
    UNFIT = "unfit"
    """Measured, and a limit, the quality or the error budget was missed."""
    UNCLEAR = "unclear"
    """The measurement itself is in doubt; nothing is said of the point."""
    FAILED = "failed"
    """It never served: refused, did not come up, or was rolled back."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A point and what was found. `results` are all rounds; `rollout_s` is what it took to bring it up."""

    point: Point
    state: State
    sentence: str = ""
    revision: str = ""
    results: tuple[RunResult, ...] = ()
    quality: QualityResult | None = None
    rollout_s: float = 0.0
    measured_s: float = 0.0

    @property
    def fit(self) -> bool:
        """Say whether it may win."""
        return self.state is State.MEASURED and bool(self.results)

    def to_json(self) -> dict[str, Any]:
        """Give one JSON object, from which `from_json` makes the same."""
        return {
            "settings": [list(pair) for pair in self.point.settings],
            "again": self.point.again,
            "label": self.point.label,
            "state": self.state.value,
            "sentence": self.sentence,
            "revision": self.revision,
            "rollout_s": round(self.rollout_s, 3),
            "measured_s": round(self.measured_s, 3),
            "single_tps": _rounded(mean_or_none(single_speeds(self.results))),
            "output_tps": _rounded(mean_or_none(throughputs(self.results))),
            "accept_length": _rounded(acceptance(self.results)),
            "greedy_tps": _rounded(mean_or_none(single_speeds(greedy_of(self.results)))),
            "greedy_accept_length": _rounded(acceptance(greedy_of(self.results))),
            "quality": self.quality.to_json() if self.quality else None,
            "results": [result.to_json() for result in self.results],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Tried:
        """Read what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: It is no such object.
        """
        settings = tuple((str(name), _plain(value)) for name, value in stored["settings"])
        quality = stored["quality"]
        return cls(
            Point(settings, bool(stored["again"])),
            State(stored["state"]),
            str(stored["sentence"]),
            str(stored["revision"]),
            tuple(RunResult.from_json(result) for result in stored["results"]),
            QualityResult.from_json(quality) if quality else None,
            float(stored["rollout_s"]),
            float(stored["measured_s"]),
        )


# -- the grid ------------------------------------------------------------------------------------------------


def axis_of(text: str) -> Axis:
    """Read `FIELD=V1,V2,…`. A value is a number, true or false, `off`, or a word; JSON lists in brackets are one value.

    Raises:
        UsageError: It is not of this form, or a value comes twice.
    """
    name, equals, rest = text.partition("=")
    name = name.strip()
    if not equals or not name or not rest.strip():
        raise UsageError(
            f"--set {text!r}: write FIELD=VALUE,VALUE, such as speculative.num_steps=off,1,3,5"
        )
    values = tuple(_value(part) for part in _split(rest))
    if len({shown(v) for v in values}) != len(values):
        raise UsageError(f"--set {text!r}: a value is written twice")
    return Axis(name, values)


def _split(text: str) -> list[str]:
    """Split at commas that stand in no bracket."""
    parts, depth, current = [], 0, ""
    for sign in text:
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += sign
    return [*parts, current]


def _value(text: str) -> Any:
    word = text.strip()
    if not word:
        raise UsageError("--set: a value is empty; write `off` to leave the field out")
    try:
        return _plain(json.loads(word))
    except ValueError:
        return word


def _plain(value: Any) -> Any:
    return tuple(_plain(item) for item in value) if isinstance(value, list) else value


def shown(value: Any) -> str:
    """Write a value as it would be typed."""
    return value if isinstance(value, str) else json.dumps(value)


def points_of(axes: Sequence[Axis]) -> tuple[Point, ...]:
    """Give every combination once, in the order of the values; `off` of one field takes its neighbours' values along.

    Raises:
        UsageError: A field comes twice, or there are more than `POINTS_LIMIT`.
    """
    names = [axis.field for axis in axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--set {twice} is given twice; write all its values in one")
    count = math.prod(len(axis.values) for axis in axes)
    if count > POINTS_LIMIT:
        raise UsageError(
            f"{count} combinations are more than {POINTS_LIMIT}; each restarts the server"
        )
    found: dict[str, Point] = {}
    for values in itertools.product(*(axis.values for axis in axes)):
        settings = _without_moot(tuple(zip(names, values, strict=True)))
        point = Point(settings)
        found.setdefault(point.label, point)
    return tuple(found.values())


def _without_moot(settings: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Leave out values of fields whose whole block is off: they say nothing, and would be tried again and again."""
    off = {_block(name) for name, value in settings if value == OFF}
    kept = {
        _block(n) if _block(n) in off else n: OFF if _block(n) in off else v for n, v in settings
    }
    return tuple(kept.items())


def _block(name: str) -> str:
    """Give what `off` takes out: `speculative` for its fields, else the field itself."""
    return "speculative" if name.startswith("speculative.") else name


def variant(
    server: Server, point: Point, engines: Mapping[str, EngineRules]
) -> tuple[Server | None, str]:
    """Give the server with a point's settings, or why there can be none."""
    raw = whole(server)
    for name, value in point.settings:
        problem = _set(raw, name, value)
        if problem:
            return None, problem
    found, findings = read_server(frozen(raw), engines)
    if found is None:
        said = "; ".join(f"{'.'.join(map(str, f.loc))}: {f.message}" for f in findings)
        return None, said or "it cannot be read back"
    return found, ""


def _set(raw: dict[str, Any], name: str, value: Any) -> str:
    path = (_block(name) if value == OFF else name).split(".")
    inner = raw
    for part in path[:-1]:
        if inner.get(part) is None and value != OFF:
            if part == "speculative":
                return f"{name}: the spec has no `speculative` to vary; write its algorithm into the spec first"
            inner[part] = {}
        deeper = inner.get(part)
        if not isinstance(deeper, dict):
            return "" if value == OFF and deeper is None else f"{name}: `{part}` is no map"
        inner = deeper
    if value == OFF:
        inner.pop(path[-1], None)
    elif path[0] == "env":
        inner[path[-1]] = shown(value)  # Variables are text, whatever they look like.
    else:
        inner[path[-1]] = value
    return ""


def same_as_applied(server: Server, other: Server) -> bool:
    """Say whether two servers run the same, so that one need not be measured twice."""
    return revision(server) == revision(other)


# -- the gate of a sweep ----------------------------------------------------------------------------------------


DEFAULT_RUNS: Final = (
    {"name": "single", "concurrency": 1, "requests": 24, "max_tokens": 256},
    {"name": "batch", "concurrency": 16, "requests": 96, "max_tokens": 256},
)


def gate_of(server: Server, requires: Sequence[str]) -> Gate:
    """Give what every point must hold: the spec's own gate without its baseline, and `[RUN:]KEY=VALUE` limits.

    Raises:
        UsageError: A limit is none, or names a run that is not there.
    """
    raw: dict[str, Any] = dict(whole(server).get("gate") or {})
    raw.pop("baseline", None)
    raw["runs"] = [dict(run) for run in raw.get("runs") or DEFAULT_RUNS]
    deciding = [r for r in raw["runs"] if (r.get("workload") or raw.get("workload")) != GREEDY]
    if len({run["concurrency"] for run in deciding}) < 2:
        raw["runs"].append(dict(_other_end(deciding or raw["runs"])))
    for text in requires:
        key, equals, value = text.partition("=")
        run, colon, limit = key.rpartition(":")
        if not equals or not value:
            raise UsageError(
                f"--require {text!r}: write KEY=VALUE or RUN:KEY=VALUE, such as batch:max_ttft_p95=800ms"
            )
        chosen = [r for r in raw["runs"] if not colon or r["name"] == run]
        if not chosen:
            names = ", ".join(r["name"] for r in raw["runs"])
            raise UsageError(f"--require {text!r}: there is no run {run!r}; there are: {names}")
        for one in chosen:
            one[limit.strip()] = _value(value)
    try:
        return Gate.model_validate(frozen(raw))
    except ValidationError as error:
        said = "; ".join(dict.fromkeys(str(detail["msg"]) for detail in error.errors()))
        raise UsageError(f"--require {', '.join(requires)}: {said}") from None


def _other_end(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Give the run that is missing where a gate measures one concurrency only: a point has two numbers."""
    alone = runs[0]["concurrency"] == 1
    return {**DEFAULT_RUNS[1 if alone else 0], "max_tokens": runs[0]["max_tokens"]}


# -- what was measured ---------------------------------------------------------------------------------------------


def single_speeds(results: Iterable[RunResult]) -> list[float]:
    """Give each round's decode speed of one stream, at the lowest concurrency, in tokens a second."""
    lowest = _of_level(results, min)
    return [speed for r in lowest if (speed := r.decode_tps.p50) is not None]


def throughputs(results: Iterable[RunResult]) -> list[float]:
    """Give each round's tokens a second of all streams, at the highest concurrency."""
    highest = _of_level(results, max)
    return [r.output_tps for r in highest if r.output_tps is not None]


def acceptance(results: Iterable[RunResult]) -> float | None:
    """Give the mean acceptance length over all rounds that tell one and decide."""
    deciding = _deciding(list(results))
    return mean_or_none([r.accept_length for r in deciding if r.accept_length is not None])


def greedy_of(results: Iterable[RunResult]) -> tuple[RunResult, ...]:
    """Give the rounds at temperature 0 to a fixed length. They are told, and decide nothing.

    Greedy text runs into loops, which any draft guesses: on one server ten drafts gave five times the speed there,
    and 0.6 times for what users sample.
    """
    return tuple(r for r in results if r.workload == GREEDY)


def _deciding(results: Sequence[RunResult]) -> list[RunResult]:
    """Give the rounds that say what users get; greedy ones only where there is nothing else (the report of those alone)."""
    return [r for r in results if r.workload != GREEDY] or list(results)


def _of_level(results: Iterable[RunResult], choose: Any) -> list[RunResult]:
    good = [r for r in results if r.infrastructure is None and r.workload != "quality"]
    good = _deciding(good)
    if not good:
        return []
    level = choose(r.concurrency for r in good)
    return [r for r in good if r.concurrency == level]


def mean_or_none(values: Sequence[float]) -> float | None:
    """Give the mean; None of nothing."""
    return mean_of(values) if values else None


def surely_below(a: Sequence[float], b: Sequence[float], margin: float) -> bool:
    """Say whether the mean of `a` is below that of `b` by more than `margin` (a share), with 95 % confidence.

    Welch's one-sided test on `a - (1 - margin) b`, with the smaller of the two degrees of freedom: on the safe side.
    """
    if len(a) < RACE_AFTER or len(b) < RACE_AFTER:
        return False
    floor = [(1 - margin) * value for value in b]
    spread = math.sqrt(variance(a) / len(a) + variance(floor) / len(floor))
    bound = mean_of(a) - mean_of(floor) + student_t(_LEVEL, min(len(a), len(b)) - 1) * spread
    return bound < 0


def dominated_by(
    results: Sequence[RunResult], others: Iterable[Tried], margin: float
) -> Tried | None:
    """Give a point that is surely better in both numbers, by more than the margin; None where there is none yet."""
    speed, through = single_speeds(results), throughputs(results)
    for other in others:
        if (
            other.fit
            and surely_below(speed, single_speeds(other.results), margin)
            and surely_below(through, throughputs(other.results), margin)
        ):
            return other
    return None


# -- choosing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """The end of a sweep: who won and why, who is on the Pareto front, and how much of a difference counts."""

    winner: Tried | None
    sentence: str
    front: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()
    margin: float = 0.0
    drift: float | None = None
    notes: tuple[str, ...] = field(default=())


def choose(tried: Sequence[Tried], objective: Objective, margin: float) -> Choice:
    """Choose by the objective among those that held every limit; within the margin of the best the smaller value wins.

    The margin is widened by what the control itself drifted between the first and the last measurement.
    """
    control = next((t for t in tried if not t.point.settings and not t.point.again), None)
    again = next((t for t in tried if t.point.again), None)
    if control is None or not _both(control):
        why = control.sentence if control is not None else "the sweep did not come to it"
        return Choice(None, f"nothing to compare with: what is applied was not measured ({why})")
    drift = _drift(control, again)
    notes = []
    if drift is not None and drift > margin:
        notes.append(
            f"the applied revision itself changed by {drift:.1%} between the first and the last measurement; "
            "smaller differences are not told apart"
        )
    wide = max(margin, drift or 0.0)
    fit = [t for t in tried if t.fit and not t.point.again and _both(t)]
    scores = {t.point.label: _score(t, control, objective) for t in fit}
    best = max(scores.values(), default=0.0)
    tied = [t for t in fit if scores[t.point.label] >= best * (1 - wide)]
    winner = min(tied, key=lambda t: _smallness(t.point, control.point)) if tied else None
    front = tuple(t.point.label for t in fit if not any(_beats(o, t) for o in fit))
    if winner is None:
        return Choice(None, "no point held every limit", front, (), wide, drift, tuple(notes))
    ties = tuple(t.point.label for t in tied if t is not winner)
    notes += _greedy_notes(tried, control, winner, objective, wide)
    if winner is control:
        sentence = f"what is applied stays: nothing is better by more than {wide:.1%}"
    else:
        gain = scores[winner.point.label] - 1
        sentence = f"{winner.point.label}: {gain:+.1%} by {objective.value} against what is applied"
    return Choice(winner, sentence, front, ties, wide, drift, tuple(notes))


def _greedy_notes(
    tried: Sequence[Tried], control: Tried, winner: Tried, objective: Objective, margin: float
) -> list[str]:
    """Say what greedy runs alone would have chosen, where it is something else: a table of those would be believed."""
    measured = [t for t in tried if t.state in {State.MEASURED, State.DOMINATED}]
    alone = [replace(t, results=greedy_of(t.results)) for t in measured if not t.point.again]
    alone = [t for t in alone if _both(t)]
    start = next((t for t in alone if t.point == control.point), None)
    if start is None:
        return []
    scores = {t.point.label: _score(t, start, objective) for t in alone}
    best = max(scores.values())
    tied = [t for t in alone if scores[t.point.label] >= best * (1 - margin)]
    chosen = min(tied, key=lambda t: _smallness(t.point, control.point))
    if chosen.point == winner.point:
        return []
    gain = scores[chosen.point.label] - 1
    why = "greedy text runs into loops that drafts guess, and users sample"
    return [
        f"greedy runs alone would have chosen {chosen.point.label} ({gain:+.0%}); they do not decide: {why}"
    ]


def _both(tried: Tried) -> bool:
    return bool(single_speeds(tried.results)) and bool(throughputs(tried.results))


def _drift(control: Tried, again: Tried | None) -> float | None:
    """Give the larger relative change of the control's two numbers; None where it was not measured twice."""
    if again is None or not _both(again) or not _both(control):
        return None
    pairs = (
        (single_speeds(control.results), single_speeds(again.results)),
        (throughputs(control.results), throughputs(again.results)),
    )
    return max(abs(mean_of(b) / mean_of(a) - 1) for a, b in pairs)


def _score(tried: Tried, control: Tried, objective: Objective) -> float:
    speed = mean_of(single_speeds(tried.results)) / mean_of(single_speeds(control.results))
    through = mean_of(throughputs(tried.results)) / mean_of(throughputs(control.results))
    match objective:
        case Objective.SPEED:
            return speed
        case Objective.THROUGHPUT:
            return through
        case Objective.BALANCED:
            return math.sqrt(speed * through)


def _beats(other: Tried, tried: Tried) -> bool:
    """Say whether another is at least as good in both numbers and better in one."""
    mine = (mean_of(single_speeds(tried.results)), mean_of(throughputs(tried.results)))
    theirs = (mean_of(single_speeds(other.results)), mean_of(throughputs(other.results)))
    return theirs != mine and all(t >= m for t, m in zip(theirs, mine, strict=True))


def _smallness(point: Point, control: Point) -> tuple[int, tuple[float, ...], str]:
    """Order points by how little they ask for: what is applied first (no restart), then off, then the smaller numbers."""
    sizes = tuple(
        -1.0 if value == OFF else float(value) if isinstance(value, int | float) else 0.0
        for _, value in point.settings
    )
    return (0 if point == control else 1, sizes, point.label)


# -- how long it will take ------------------------------------------------------------------------------------------


def estimate_s(left: int, outage_s: float | None, tried: Sequence[Tried]) -> float | None:
    """Give the time for `left` more points: rollout and measurement as they were so far; None while nothing is known."""
    measuring = mean_or_none([t.measured_s for t in tried if t.measured_s > 0])
    rollout = mean_or_none([t.rollout_s for t in tried if t.rollout_s > 0])
    rollout = outage_s if rollout is None else rollout
    if measuring is None or rollout is None:
        return None
    return left * (measuring + rollout)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def with_state(tried: Tried, state: State, sentence: str) -> Tried:
    """Give the same point with another judgement."""
    return replace(tried, state=state, sentence=sentence)

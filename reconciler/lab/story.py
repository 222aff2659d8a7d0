"""What a rehearsal plays: chapters, the failures that `--break` knows, second commits by `--set`, the built-in story.

A chapter is a commit: the fleet as it should be from now on, and perhaps one thing that goes wrong while it is rolled
out. Values only; `rehearsal.py` plays them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from reconciler.core import yaml_text
from reconciler.core.conditions import Outcome, Reason
from reconciler.core.errors import Problem, SpecError, UsageError
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.revision import whole
from reconciler.core.spec import API_VERSION, EngineRules, Server
from reconciler.lab.stand_in import Fault

FILE: Final = "story.yaml"
FLEET: Final = """\
# The fleet of the built-in story: one server over four GPUs, with speculative decoding.
apiVersion: reconciler/v1
kind: Host
name: llm-two
ssh: {address: 192.0.2.74, user: deploy}
---
apiVersion: reconciler/v1
kind: Server
name: qwen
host: llm-two
unit: sglang-qwen.service
gpus: [0, 1, 2, 3]
tp_size: 4
engine: {name: sglang, version: 0.5.23}
runtime: {python: /opt/sglang/bin/python, user: sglang}
model: Qwen/Qwen3.5-122B-A10B
served_model_name: qwen
speculative: {algorithm: NEXTN, num_steps: 1, eagle_topk: 1}
listen: {port: 30000}
timeouts: {drain: 5s, stop: 5s, release: 20s, ready: 60s, gate: 60s}
gate:
  runs:
    - {name: single, concurrency: 1, requests: 12, max_tokens: 32, min_decode_tps: 100}
"""


# -- failures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Break:
    """One thing that goes wrong during a rollout.

    `at` is the step at whose begin it strikes ("": before the rollout), `fault` what is wrong with the new server instead.
    `ends` is how the tool has to end, after as many passes as it takes.
    """

    name: str
    about: str
    ends: Outcome
    reasons: tuple[Reason, ...] = (Reason.NONE,)
    at: str = ""
    fault: Fault | None = None
    needs_gate: bool = False
    needs_quality: bool = False
    needs_gpu: bool = False
    only_simulated: bool = False


BREAKS: Mapping[str, Break] = MappingProxyType(
    {
        b.name: b
        for b in (
            Break(
                "left-over",
                "a process of the old server has left its control group and keeps the GPUs: proven own, and ended",
                Outcome.APPLIED,
                needs_gpu=True,
            ),
            Break(
                "foreign-holder",
                "somebody else's process holds a GPU of the server: refused before anything is stopped, never touched",
                Outcome.REFUSED,
                (Reason.FOREIGN_HOLDER,),
                needs_gpu=True,
            ),
            Break(
                "monitor",
                "a GPU monitor (dcgm-exporter) has the GPUs open: left alone, and no reason to wait",
                Outcome.APPLIED,
                needs_gpu=True,
            ),
            Break(
                "ignore-term",
                "the old server ignores SIGTERM: ended by force when its time to stop is over",
                Outcome.APPLIED,
            ),
            Break(
                "crash",
                "the new server dies while it loads: the old revision comes back",
                Outcome.ROLLED_BACK,
                (Reason.DIED, Reason.RESTART_LOOP),
                fault=Fault.CRASH,
            ),
            Break(
                "slow",
                "the new server is too slow: the gate fails, the old revision comes back",
                Outcome.ROLLED_BACK,
                (Reason.GATE_FAILED,),
                fault=Fault.SLOW,
                needs_gate=True,
            ),
            Break(
                "garbage",
                "the new server answers with one word again and again: the gate fails, the old revision comes back",
                Outcome.ROLLED_BACK,
                (Reason.GATE_FAILED,),
                fault=Fault.GARBAGE,
                needs_gate=True,
                needs_quality=True,
            ),
            Break(
                "wrong-model",
                "the new server serves another model than the spec names: the old revision comes back",
                Outcome.ROLLED_BACK,
                (Reason.WRONG_ANSWER,),
                fault=Fault.WRONG_MODEL,
            ),
            Break(
                "guard",
                "somebody takes a GPU between release and start: the guard refuses the start; they leave after 8 s, and the old revision comes back",
                Outcome.ROLLED_BACK,
                (Reason.GUARD_REFUSED,),
                at="start",
                needs_gpu=True,
            ),
            Break(
                "cut",
                "the network to the host is gone for 8 s while the new server loads",
                Outcome.APPLIED,
                at="ready",
            ),
            Break(
                "reboot",
                "the host loses power while the new server loads (simulated hosts only)",
                Outcome.APPLIED,
                at="ready",
                only_simulated=True,
            ),
        )
    }
)


def break_of(name: str) -> Break:
    """Give a case by name.

    Raises:
        UsageError: There is none.
    """
    if name not in BREAKS:
        known = ", ".join(BREAKS)
        raise UsageError(
            f"there is no case {name!r} for --break; there are: {known}, and `list` explains them"
        )
    return BREAKS[name]


# -- chapters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chapter:
    """One commit to play. `ends` is how the story wants it to end; None: whatever the exit table says."""

    title: str
    why: str
    fleet: Fleet
    broken: Break | None = None
    victim: str = ""
    ends: Outcome | None = None
    reasons: tuple[Reason, ...] = ()
    kills: bool = False


def story(engines: Mapping[str, EngineRules]) -> tuple[Chapter, ...]:
    """Give the built-in story, in four chapters."""
    first = load_fleet({FILE: FLEET.encode()}, engines=engines)
    assert not first.problems, first.problems

    def steps(count: int) -> Fleet:
        return changed(first, [f"qwen.speculative.num_steps={count}"], engines)

    return (
        Chapter(
            "first deploy",
            "nothing runs yet; one speculative step",
            first,
            ends=Outcome.APPLIED,
        ),
        Chapter(
            "num_steps 1 -> 3",
            "a commit that should make it faster: drain, stop, prove the GPUs free, start, measure, apply",
            steps(3),
            ends=Outcome.APPLIED,
        ),
        Chapter(
            "num_steps 3 -> 10",
            "a commit that guesses too far ahead: the gate must fail, and three steps must come back",
            steps(10),
            ends=Outcome.ROLLED_BACK,
            reasons=(Reason.GATE_FAILED,),
        ),
        Chapter(
            "num_steps 3 -> 4, with a left-over",
            "a worker of the old server has escaped and keeps the GPU memory: it must be proven own, and ended, and nothing else",
            steps(4),
            broken=BREAKS["left-over"],
            victim="qwen",
            ends=Outcome.APPLIED,
            kills=True,
        ),
    )


def chapters_of(
    fleet: Fleet, sets: Sequence[str], case: str | None, engines: Mapping[str, EngineRules]
) -> tuple[Chapter, ...]:
    """Give the chapters for a person's own specs: they are applied; then the second commit or the failure is played.

    Raises:
        UsageError: A `--set` that makes no sense, or a case that this fleet has no place for.
        SpecError: What `--set` makes is no valid spec.
    """
    broken = break_of(case) if case is not None else None
    first = Chapter(
        "first deploy",
        "the specs as they are, onto hosts that run nothing yet",
        shortened(fleet, engines),
    )
    if not sets and broken is None:
        return (first,)
    second = changed(fleet, sets, engines) if sets else fleet
    victim = _victim(fleet, second, broken) if broken is not None else ""
    if broken is not None and not sets:
        second = changed(fleet, [f"{victim}.env.REHEARSAL=second commit"], engines)
    why = "; ".join(sets) or f"a commit that changes nothing but the environment of {victim}"
    commit = Chapter("second commit", why, shortened(second, engines))
    if broken is not None:
        commit = replace(
            commit,
            title=f"second commit, {broken.name}",
            why=f"{why}. Meanwhile: {broken.about}",
            broken=broken,
            victim=victim,
            ends=broken.ends,
            reasons=broken.reasons,
        )
    return (first, commit)


def _victim(before: Fleet, after: Fleet, case: Break) -> str:
    """Choose the server that the failure strikes: the first that the commit changes and that the case fits."""
    old = {s.name: s for s in before.servers}
    moved = [s for s in after.servers if old.get(s.name) != s] or list(after.servers)
    for server in moved:
        if server.state == "running" and not server.suspend and _fits(server, case):
            return server.name
    what = (
        "a gate with quality"
        if case.needs_quality
        else "a gate"
        if case.needs_gate
        else "a GPU"
        if case.needs_gpu
        else "to run"
    )
    names = ", ".join(s.name for s in moved) or "none"
    raise UsageError(f"--break {case.name} needs a server that has {what}; of {names} none does")


def _fits(server: Server, case: Break) -> bool:
    """Say whether a server has what the case is about."""
    if case.needs_gpu and not server.gpus:
        return False
    if case.needs_quality and (server.gate is None or server.gate.quality == "off"):
        return False
    return not case.needs_gate or server.gate is not None


# -- documents --------------------------------------------------------------------------------------------------

WAITS_S: Final = {"drain": 5.0, "stop": 5.0, "release": 30.0, "ready": 60.0, "gate": 120.0}
"""The longest waits of a rehearsal: the stand-in servers load in seconds."""

TOKENS: Final = 32
"""The longest answer that a gate asks for in a rehearsal."""


def shortened(fleet: Fleet, engines: Mapping[str, EngineRules]) -> Fleet:
    """Give the fleet with waits and answers cut to what a rehearsal has patience for; nothing else changes."""
    documents = [_document(server) for server in fleet.servers]
    for document, server in zip(documents, fleet.servers, strict=True):
        longer = {
            name: limit for name, limit in WAITS_S.items() if getattr(server.timeouts, name) > limit
        }
        if longer:
            document["timeouts"] = document.get("timeouts", {}) | {
                k: f"{v:g}s" for k, v in longer.items()
            }
        for run in document.get("gate", {}).get("runs", ()):
            run["max_tokens"] = min(run["max_tokens"], TOKENS)
    return _fleet_of(fleet, documents, engines, {})


def shortening(before: Fleet, after: Fleet) -> str:
    """Say what `shortened` changed; empty when nothing."""
    said: dict[str, None] = {}
    for old, new in zip(before.servers, after.servers, strict=True):
        for name in WAITS_S:
            if getattr(old.timeouts, name) != getattr(new.timeouts, name):
                said[f"{name} {getattr(new.timeouts, name):g} s"] = None
        if old.gate != new.gate:
            said[f"answers of at most {TOKENS} tokens in gates"] = None
    return ", ".join(said)


def changed(fleet: Fleet, sets: Iterable[str], engines: Mapping[str, EngineRules]) -> Fleet:
    """Give the fleet after a commit that sets fields of merged servers, `SERVER.field.path=value` each.

    The value is read as YAML 1.2, as in a spec; `null` removes. The whole fleet is judged as specs are.

    Raises:
        UsageError: No such form, or no such server.
        SpecError: The fleet is wrong then.
    """
    documents = {server.name: _document(server) for server in fleet.servers}
    origin: dict[str, str] = {}
    for text in sets:
        path, equals, value = text.partition("=")
        name, dot, field = path.strip().partition(".")
        if not equals or not dot or not field or not all(field.split(".")):
            raise UsageError(
                f"--set {text}: write SERVER.field=value, for example --set qwen.speculative.num_steps=3"
            )
        if name not in documents:
            known = ", ".join(documents) or "none"
            raise UsageError(
                f"--set {text}: there is no server {name!r} in the specs; there are: {known}"
            )
        if field in {"name", "apiVersion", "kind"}:
            raise UsageError(f"--set {text}: {field} says which server it is; it cannot be set")
        _place(documents[name], field.split("."), _value(text, value), text)
        origin[name] = f"--set {text}"
    return _fleet_of(fleet, documents.values(), engines, origin)


def _value(text: str, value: str) -> Any:
    parsed = yaml_text.parse(f"value: {value}\n".encode(), f"--set {text}")
    if parsed.problems:
        raise SpecError([replace(p, line=0, column=0) for p in parsed.problems])
    root = parsed.documents[0].root if parsed.documents else None
    if not isinstance(root, yaml_text.Mapping) or set(root.entries) != {"value"}:
        raise UsageError(
            f"--set {text}: the value must be one YAML value: 3, true, text, [1, 2], {{a: 1}}"
        )
    plain = yaml_text.plain(root)
    assert isinstance(plain, dict)
    return plain.get("value")


def _place(document: dict[str, Any], path: Sequence[str], value: Any, text: str) -> None:
    """Set or (for None) remove one field; a list's item is named by its number or its `name`."""
    at: Any = document
    for part in path[:-1]:
        if isinstance(at, list):
            at = at[_item(at, part, text)]
        elif isinstance(at, dict):
            at = at.setdefault(part, {})
        if not isinstance(at, dict | list):
            raise UsageError(f"--set {text}: `{part}` has no fields of its own")
    if isinstance(at, list):
        at[_item(at, path[-1], text)] = value
    elif value is None:
        at.pop(path[-1], None)
    else:
        at[path[-1]] = value


def _item(items: Sequence[Any], part: str, text: str) -> int:
    for number, item in enumerate(items):
        if part == str(number) or (isinstance(item, dict) and item.get("name") == part):
            return number
    raise UsageError(f"--set {text}: there is no item {part!r} in that list")


def _document(server: Server) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(whole(server)))
    return {"apiVersion": API_VERSION, "kind": "Server", **document}


def _fleet_of(
    fleet: Fleet,
    documents: Iterable[Mapping[str, Any]],
    engines: Mapping[str, EngineRules],
    origin: Mapping[str, str],
) -> Fleet:
    """Judge documents as specs are judged, beside the fleet's own hosts."""
    hosts = [
        {
            "apiVersion": API_VERSION,
            "kind": "Host",
            **h.model_dump(mode="json", exclude_defaults=True),
        }
        for h in fleet.hosts
    ]
    files = {f"host {h['name']}": json.dumps(h).encode() for h in hosts}
    for document in documents:
        name = str(document["name"])
        files[origin.get(name, f"server {name}")] = json.dumps(document).encode()
    made = load_fleet(files, engines=engines)
    if made.problems:
        raise SpecError([_worded(p) for p in made.problems])
    return made


def _worded(problem: Problem) -> Problem:
    """Leave the place out: it is in a document that nobody wrote."""
    return replace(problem, line=0, column=0)

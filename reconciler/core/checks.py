"""What preflight asks of a host about the engine itself: each check with an id, a sentence, and a way to waive it.

Pure: from demands and what the helper's `inspect` found to `Check`s. A check that cannot be decided says so; only those
without which a start is known to fail refuse on not knowing, and all of them can be waived in the spec with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from reconciler.core.demands import Card, Demands, WantedModel

GIB: Final = 1024**3
MIB: Final = 1024**2

OVERHEAD_BYTES: Final = GIB
"""Of a card, beside weights and KV cache: context, kernels, activations, graphs. Engines need one to four; this is the least."""

LEAST_TOKENS: Final = 1024
"""A server whose KV cache holds fewer is of no use to anybody."""

SHM_BYTES: Final = 512 * MIB
"""Of /dev/shm, for ranks that talk to each other: a container's default of 64 MiB ends in an NCCL error."""

DISK_BYTES: Final = 256 * MIB
FILES: Final = 65_536
"""The unit asks for more descriptors and is given the kernel's limit if that is lower."""

IDS: Final[Mapping[str, str]] = {
    "engine.runs": "the interpreter or program starts",
    "engine.image": "the container image lies on the host",
    "engine.version": "the installed engine has the version that the spec names",
    "engine.flags": "the installed engine knows every flag that will be given",
    "model.cached": "the model lies on the host, so that no start has to download it",
    "model.config": "the model's configuration can be read",
    "model.tokenizer": "the model has a tokenizer",
    "model.weights": "every weight file is there and whole",
    "parallel.heads": "the attention heads can be split over tp_size",
    "memory.fit": "weights and a least KV cache fit into the cards",
    "memory.context": "one request of full length fits into the KV cache",
    "gpu.kernels": "the engine was built for these cards",
    "gpu.devices": "the server's user may open the cards",
    "host.shm": "shared memory is large enough for several ranks",
    "host.files": "enough files may be open",
    "host.disk": "there is room for temporary files",
}
"""Every check that a spec can waive, by its id."""


class Verdict(StrEnum):
    """How one check ended."""

    OK = "ok"
    WARNED = "warned"
    UNKNOWN = "unknown"
    REFUSED = "refused"
    WAIVED = "waived"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its id, how it ended, and the sentence that says why, with the numbers."""

    id: str
    verdict: Verdict
    sentence: str


def waived(checks: Sequence[Check], waivers: Mapping[str, str]) -> tuple[Check, ...]:
    """Let what would refuse pass where the spec says so, and say why it may."""
    return tuple(
        replace(c, verdict=Verdict.WAIVED, sentence=f"{c.sentence}; waived: {waivers[c.id]}")
        if c.verdict is Verdict.REFUSED and c.id in waivers
        else c
        for c in checks
    )


def refused(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Give the checks that stop a rollout."""
    return tuple(c for c in checks if c.verdict is Verdict.REFUSED)


UNPRIVILEGED: Final = "only root can"
"""The helper's words where it was not let look: nothing is known then, and the rollout, which has the right, looks again."""


def flags_check(answer: Mapping[str, Any], host: str) -> Check:
    """Judge what the installed engine's own help says of the flags. One that dies of its help will not serve either."""
    told = answer.get("known")
    unknown = answer.get("unknown")
    if not isinstance(told, Mapping) or "known" not in told or not isinstance(unknown, list):
        why = _why(told)[:300] or "no answer"
        sentence = f"the engine on {host} does not tell its flags ({why})"
        return Check("engine.flags", Verdict.REFUSED, sentence)
    if unknown:
        sentence = f"the engine on {host} does not know {', '.join(str(f) for f in unknown)}"
        return Check("engine.flags", Verdict.REFUSED, sentence)
    return Check("engine.flags", Verdict.OK, "the installed engine knows every flag")


ALL_FLAGS: Final[Mapping[str, Any]] = {"known": {"known": []}, "unknown": []}
"""The answer of an installation that said before that it knows them all."""


def unprivileged(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Read a look without privilege, as a plan may be made of: what it was not let see is not known, and refuses nothing yet."""
    return tuple(
        replace(c, verdict=Verdict.UNKNOWN)
        if c.verdict is Verdict.REFUSED and UNPRIVILEGED in c.sentence
        else c
        for c in checks
    )


def installed(facts: Mapping[str, Any]) -> str:
    """Give what tells this installation of an engine from any other; empty where that is not known."""
    program = _known(facts.get("program"))
    if program is None or not program.get("digest"):
        return ""
    return f"{program.get('version')} {program['digest']}"


def judge(demands: Demands, facts: Mapping[str, Any], cards: Sequence[Card]) -> tuple[Check, ...]:
    """Run every check on what `inspect` found."""
    found = [*_engine(demands, facts)]
    models = _known(facts.get("models"))
    why = _why(facts.get("models"))
    rows = iter(models if isinstance(models, list) else ())
    main: Mapping[str, Any] | None = None
    weights, complete = 0, True
    for model in demands.models:
        row = next(rows, None) if model.mounted else None
        known = _known(row)
        facts_of = known if isinstance(known, Mapping) else None
        found += _model(model, facts_of, why or _why(row))
        if model.role == "model":
            main = facts_of
        size = (facts_of or {}).get("bytes")
        complete = complete and isinstance(size, int) and size > 0 and model.weights
        weights += size if isinstance(size, int) else 0
    config = (main or {}).get("config")
    config = config if isinstance(config, Mapping) and "unknown" not in config else None
    if demands.splits_heads:
        found += _heads(demands, config)
    found += _memory(demands, config, weights if complete else None, cards)
    found += _gpus(demands, facts, cards)
    found += _limits(demands, facts)
    return tuple(found)


def _known(section: Any) -> Any:
    return section.get("known") if isinstance(section, Mapping) else None


def _why(section: Any) -> str:
    return str(section["unknown"]) if isinstance(section, Mapping) and "unknown" in section else ""


# -- the engine --------------------------------------------------------------------------------------------


def _engine(demands: Demands, facts: Mapping[str, Any]) -> Iterator[Check]:
    if demands.image:
        yield _image(demands, facts.get("image"))
        return
    path = demands.python or demands.binary
    if path is None:
        return
    program = _known(facts.get("program"))
    if program is None:
        sentence = (
            f"{path} does not run on the host: {_why(facts.get('program')) or 'it was not asked'}"
        )
        yield Check("engine.runs", Verdict.REFUSED, sentence)
        return
    about = f"Python {program['python']}" if program.get("python") else "it says its version"
    yield Check("engine.runs", Verdict.OK, f"{path} runs ({about})")
    version = program.get("version")
    if demands.version is None:
        if version:
            yield Check("engine.version", Verdict.OK, f"{demands.engine} {version} is installed")
        return
    if demands.binary is not None:
        yield from _build(demands, version)
    elif not version:
        sentence = (
            f"{demands.engine} {demands.version} is asked for, and {path} has no such package"
        )
        yield Check("engine.version", Verdict.REFUSED, sentence)
    elif str(version).partition("+")[0] != demands.version.partition("+")[0]:
        sentence = f"{demands.engine} {version} is installed where the spec says {demands.version}"
        yield Check("engine.version", Verdict.REFUSED, sentence)
    else:
        yield Check("engine.version", Verdict.OK, f"{demands.engine} {version} is installed")


def _build(demands: Demands, version: object) -> Iterator[Check]:
    """A binary numbers its builds in its own way: it is compared loosely, and not knowing is said."""
    wanted = str(demands.version).lstrip("b")
    if version is None:
        yield Check("engine.version", Verdict.UNKNOWN, "the program does not tell its version")
    elif str(version).lstrip("b") != wanted:
        sentence = f"{demands.engine} {version} is installed where the spec says {demands.version}"
        yield Check("engine.version", Verdict.REFUSED, sentence)
    else:
        yield Check("engine.version", Verdict.OK, f"{demands.engine} {version} is installed")


def _image(demands: Demands, section: Any) -> Check:
    name = demands.image[-1]
    known = _known(section)
    if known is None:
        why = _why(section) or "it was not asked"
        return Check("engine.image", Verdict.REFUSED, f"{name} cannot be looked for: {why}")
    if known.get("id") is None:
        sentence = f"{name} is not on the host: the start would fetch it, after the old server is gone. Pull it first"
        return Check("engine.image", Verdict.REFUSED, sentence)
    return Check("engine.image", Verdict.OK, f"{name} is there ({str(known['id'])[:19]})")


# -- models ------------------------------------------------------------------------------------------------


def _model(model: WantedModel, facts: Mapping[str, Any] | None, why: str) -> Iterator[Check]:
    name = model.source if model.role == "model" else f"{model.source} ({model.role})"
    if not model.mounted:
        sentence = f"{name} would be downloaded at each start: a container has a cache of its own. Name a path on the host"
        yield Check("model.cached", Verdict.REFUSED, sentence)
        return
    if facts is None:
        sentence = f"{name} cannot be looked at on the host ({why or 'no answer'})"
        yield Check("model.cached", Verdict.REFUSED, sentence)
        return
    if not facts.get("found"):
        told = str(facts.get("why") or "it is not there")
        sentence = (
            f"{name} {told}"
            if model.is_path
            else f"{name} is not in the hub's cache of the server's user ({told}): the start would download it, after the old server is gone. Fetch it first"
        )
        yield Check("model.cached", Verdict.REFUSED, sentence)
        return
    yield Check("model.cached", Verdict.OK, f"{name} is at {facts.get('path')}")
    if facts.get("form") == "directory":
        yield _config_check(name, facts.get("config"))
        there = facts.get("tokenizer") is True
        yield Check(
            "model.tokenizer",
            Verdict.OK if there or model.role != "model" else Verdict.REFUSED,
            f"{name} has {'a' if there else 'no'} tokenizer",
        )
    if model.weights:
        yield _weights_check(name, facts)


def _config_check(name: str, config: Any) -> Check:
    if config is None:
        return Check("model.config", Verdict.REFUSED, f"{name} has no config.json")
    if not isinstance(config, Mapping) or "unknown" in config:
        told = config.get("unknown") if isinstance(config, Mapping) else "cannot be read"
        return Check("model.config", Verdict.REFUSED, f"config.json of {name} {told}")
    kind = ", ".join(str(a) for a in config.get("architectures") or ()) or config.get("model_type")
    return Check("model.config", Verdict.OK, f"{name}: {kind or 'no architecture named'}")


def _weights_check(name: str, facts: Mapping[str, Any]) -> Check:
    count, missing, broken = (
        _count(facts.get("shards")),
        _count(facts.get("missing_count")),
        _count(facts.get("broken_count")),
    )
    if facts.get("index_problem"):
        sentence = f"{facts.get('index')} of {name} {facts['index_problem']}"
        return Check("model.weights", Verdict.REFUSED, sentence)
    if missing:
        names = ", ".join(str(n) for n in facts.get("missing") or ())
        sentence = f"{missing} of {count} weight files of {name} are missing: {names}"
        return Check("model.weights", Verdict.REFUSED, sentence)
    if broken:
        told = "; ".join(f"{row[0]} {row[1]}" for row in facts.get("broken") or ())
        return Check("model.weights", Verdict.REFUSED, f"{name}: {told}")
    if not count:
        return Check("model.weights", Verdict.REFUSED, f"{name} has no weight files")
    size = _gib(_count(facts.get("bytes")))
    files = "1 weight file" if count == 1 else f"{count} weight files"
    return Check("model.weights", Verdict.OK, f"{name}: {files}, {size}, all whole")


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


# -- does it fit -------------------------------------------------------------------------------------------


def _heads(demands: Demands, config: Mapping[str, Any] | None) -> Iterator[Check]:
    if demands.tp == 1:
        return
    heads = _count((config or {}).get("num_attention_heads"))
    if not heads:
        yield Check(
            "parallel.heads", Verdict.UNKNOWN, "the model does not say how many heads it has"
        )
        return
    shared = _count((config or {}).get("num_key_value_heads")) or heads
    if heads % demands.tp:
        sentence = f"{heads} attention heads cannot be split over tp_size {demands.tp}"
        yield Check("parallel.heads", Verdict.REFUSED, sentence)
    elif shared % demands.tp and demands.tp % shared:
        sentence = (
            f"{shared} key-value heads can neither be split over tp_size {demands.tp} nor repeated"
        )
        yield Check("parallel.heads", Verdict.REFUSED, sentence)
    else:
        sentence = f"{heads} attention heads over tp_size {demands.tp}"
        yield Check("parallel.heads", Verdict.OK, sentence)


def kv_bytes_per_token(demands: Demands, config: Mapping[str, Any]) -> float | None:
    """Estimate what one token takes of each card's KV cache; None where the model does not tell enough."""
    layers = _count(config.get("num_hidden_layers"))
    full = config.get("full_attention_layers")
    every = _count(config.get("full_attention_interval"))
    if isinstance(full, int) and full > 0:
        layers = full
    elif every:
        layers //= every
    if not layers:
        return None
    rank = _count(config.get("kv_lora_rank"))
    if rank:  # One compressed vector, whole on every card.
        each = float(rank + _count(config.get("qk_rope_head_dim")))
        return layers / demands.pp * each * demands.kv_bytes
    heads = _count(config.get("num_attention_heads"))
    shared = _count(config.get("num_key_value_heads")) or heads
    width = _count(config.get("head_dim"))
    if not width and heads:
        width = _count(config.get("hidden_size")) // heads
    if not shared or not width:
        return None
    return 2 * layers / demands.pp * max(shared / demands.tp, 1) * width * demands.kv_bytes


def _memory(
    demands: Demands,
    config: Mapping[str, Any] | None,
    weights: int | None,
    cards: Sequence[Card],
) -> Iterator[Check]:
    if not cards or not demands.models:
        return
    totals = [c.total_mib for c in cards if c.total_mib]
    if weights is None or len(totals) != len(cards):
        yield Check(
            "memory.fit", Verdict.UNKNOWN, "not known: the size of the weights or of a card"
        )
        return
    total = min(totals) * MIB
    share = demands.memory_fraction
    budget = total * share if share is not None else float(total)
    each = weights / (demands.tp * demands.pp if demands.splits_heads else len(cards))
    token = kv_bytes_per_token(demands, config) if config is not None else None
    least = (token or 0.0) * LEAST_TOKENS
    parts = [f"weights {_gib(each)} a card"]
    if token is not None:
        parts.append(f"KV cache {token / 1024:.1f} KiB a token")
    of = f" × {share:g}" if share is not None else ""
    numbers = f"{', '.join(parts)}, of {_gib(total)}{of} = {_gib(budget)}"
    if each + least + OVERHEAD_BYTES > budget:
        verdict = Verdict.WARNED if demands.reshaped else Verdict.REFUSED
        sentence = f"it does not fit: {numbers}, and {_gib(OVERHEAD_BYTES)} for the rest"
        yield Check("memory.fit", verdict, sentence)
        return
    yield Check("memory.fit", Verdict.OK, f"it fits: {numbers}")
    context = demands.context or _count((config or {}).get("max_position_embeddings"))
    if token is None or not context:
        return
    room = budget - each - OVERHEAD_BYTES
    tokens = int(room / token)
    if tokens < context:
        sentence = f"about {tokens} tokens fit into the KV cache, fewer than the context of {context}: one full request would not"
        yield Check("memory.context", Verdict.WARNED, sentence)
    else:
        sentence = f"about {tokens} tokens fit into the KV cache; the context is {context}"
        yield Check("memory.context", Verdict.OK, sentence)


# -- cards and limits --------------------------------------------------------------------------------------


def _gpus(demands: Demands, facts: Mapping[str, Any], cards: Sequence[Card]) -> Iterator[Check]:
    if not cards:
        return
    nodes = _known(facts.get("nodes"))
    if isinstance(nodes, Mapping):
        denied = sorted(path for path, state in nodes.items() if state == "denied")
        if denied:
            sentence = f"the server's user may not open {', '.join(denied)}"
            yield Check("gpu.devices", Verdict.REFUSED, sentence)
        elif nodes:
            yield Check("gpu.devices", Verdict.OK, "the server's user may open the cards")
    else:
        why = _why(facts.get("nodes")) or "no answer"
        yield Check("gpu.devices", Verdict.UNKNOWN, f"whether its user may open the cards: {why}")
    if demands.kernels:
        yield from _kernels(facts, cards)


def _kernels(facts: Mapping[str, Any], cards: Sequence[Card]) -> Iterator[Check]:
    built = (_known(facts.get("program")) or {}).get("kernels")
    found = _known(facts.get("capabilities"))
    if not isinstance(built, list) or not built or not isinstance(found, Mapping):
        return  # Nothing is known, and most installations fit: a line for everybody would be noise.
    names = [str(b) for b in built[:40]]
    foreign = sorted(
        {f"{found[c.uuid]}" for c in cards if c.uuid in found and not runs_on(names, found[c.uuid])}
    )
    told = " ".join(names)
    if foreign:
        sentence = f"torch was built for {told}, and a card here is {', '.join(foreign)}"
        yield Check("gpu.kernels", Verdict.REFUSED, sentence)
    else:
        yield Check("gpu.kernels", Verdict.OK, f"torch was built for {told}")


def runs_on(built: Sequence[str], capability: str) -> bool:
    """Say whether code built for these runs on a card: machine code within a major version, PTX on all later ones."""
    major, _, minor = capability.partition(".")
    card = (int(major), int(minor or 0))
    for name in built:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit() or len(digits) < 2:
            continue
        level = (int(digits[:-1]), int(digits[-1]))
        if (kind == "sm" and level[0] == card[0] and level <= card) or (
            kind == "compute" and level <= card
        ):
            return True
    return False


def _limits(demands: Demands, facts: Mapping[str, Any]) -> Iterator[Check]:
    limits = _known(facts.get("limits"))
    if not isinstance(limits, Mapping):
        why = _why(facts.get("limits")) or "no answer"
        yield Check("host.disk", Verdict.UNKNOWN, f"the host's limits cannot be read ({why})")
        return
    if demands.tp * demands.pp > 1:
        yield _shm(limits.get("shm"))
    files = limits.get("files")
    if isinstance(files, int):
        verdict = Verdict.REFUSED if files < FILES else Verdict.OK
        sentence = f"a process may open {files} files" + (
            f"; {FILES} are needed" if files < FILES else ""
        )
        yield Check("host.files", verdict, sentence)
    disks = limits.get("disks")
    for place, free in sorted(disks.items()) if isinstance(disks, Mapping) else ():
        if isinstance(free, int) and free < DISK_BYTES:
            sentence = f"{place} has {free // MIB} MiB free; {DISK_BYTES // MIB} MiB are needed"
            yield Check("host.disk", Verdict.REFUSED, sentence)


SHM: Final = "/dev/shm"  # noqa: S108  (the kernel's, looked at)


def _shm(room: Any) -> Check:
    free = room.get("free") if isinstance(room, Mapping) else None
    if not isinstance(free, int):
        return Check("host.shm", Verdict.REFUSED, f"there is no {SHM}, through which ranks talk")
    if free < SHM_BYTES:
        sentence = f"{SHM} has {free // MIB} MiB free; several ranks need {SHM_BYTES // MIB} MiB"
        return Check("host.shm", Verdict.REFUSED, sentence)
    return Check("host.shm", Verdict.OK, f"{SHM} has {_gib(free)} free")

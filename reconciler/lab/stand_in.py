"""From a spec to the server that stands in for it in a rehearsal: its name, its port, how fast it is, how it fails.

Both backends of `rehearsal.py` start the same stand-in (`scripts/fakegpu-hold`) with what is found here; no model, no
CUDA. Speeds are those of the tuning sprint that this product began with where a spec sets `speculative.num_steps`,
else a third more than its gate demands. Pure.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from types import MappingProxyType

from reconciler.core.revision import revision
from reconciler.core.spec import Server
from reconciler.engines.base import Launch, secret_path, served_name, version_key
from reconciler.helper.inspection import hub_cache

SPEED_BY_STEPS: Mapping[int, float] = MappingProxyType({1: 123, 2: 186, 3: 234, 4: 277, 5: 282})
"""Tokens a second of one stream, measured on four GPUs by the number of speculative steps."""

TOTAL_OF_FOUR_STEPS = 1817.0
"""Tokens a second of 64 streams together, at four steps."""

DECAY = 0.7
"""Beyond five steps: each further guess costs its time and is almost never right."""

GUESSED_RIGHT = 0.8
"""How often a draft token is right, so that the acceptance counters fit the speeds."""

SPARE = 1.3
TOO_SLOW = 0.3
"""Of the usual speed: below any gate's limit, and quick enough that the gate finds it out at once."""

DEFAULT_TPS = 200.0
LOAD_S = 1.5
MEMORY_MIB = 20_000
KEY = "rehearsal-key"
"""What every secret file of a rehearsal holds."""


class Fault(StrEnum):
    """How a new server can be wrong."""

    CRASH = "crash"
    SLOW = "slow"
    WRONG_MODEL = "wrong-model"
    GARBAGE = "garbage"


@dataclass(frozen=True, slots=True)
class StandIn:
    """One revision of a server as a rehearsal plays it."""

    server: str
    revision: str
    engine: str
    model: str
    port: int
    speed: float
    total_speed: float
    accept_length: float
    draft_tokens: int
    has_key: bool
    patience_s: float = 0.0
    """The longest first token that the gate allows; 0 without such a limit."""
    fault: Fault | None = None

    def options(self) -> tuple[str, ...]:
        """Give what `fakegpu-hold` needs to speak as this server, beside GPUs, address and port."""
        engine = self.engine if self.engine in {"sglang", "vllm", "llamacpp"} else "vllm"
        pace = TOO_SLOW if self.fault is Fault.SLOW else 1.0
        words = ["--engine", engine, "--model", self.model, "--speed", f"{self.speed * pace:g}"]
        if self.total_speed:
            words += ["--max-speed", f"{self.total_speed * pace:g}"]
        if self.fault is Fault.SLOW and self.patience_s:
            words += ["--ttft", f"{self.patience_s / TOO_SLOW:g}"]
        if self.accept_length > 1:
            words += ["--accept-length", f"{self.accept_length:.3f}"]
            words += ["--draft-tokens", str(self.draft_tokens)]
        if self.fault is Fault.WRONG_MODEL:
            words.append("--wrong-model")
        if self.fault is Fault.GARBAGE:
            words += ["--garbage", "loops"]
        return tuple(words)


def stand_in_of(server: Server, fault: Fault | None = None) -> StandIn:
    """Give the stand-in for a server as it is written now."""
    speed, accept, drafts = _speed(server)
    total = _demanded(server, "output_tps") * SPARE
    total = max(total, 3 * speed) if total else 0.0
    if drafts and total and speed in SPEED_BY_STEPS.values():
        total = TOTAL_OF_FOUR_STEPS * speed / SPEED_BY_STEPS[4]
    return StandIn(
        server=server.name,
        revision=revision(server),
        engine=server.engine.name,
        model=served_name(server) or server.name,
        port=server.listen.port,
        speed=speed,
        total_speed=total,
        accept_length=accept,
        draft_tokens=drafts,
        has_key=server.listen.api_key is not None,
        patience_s=_allowed(server, "ttft"),
        fault=fault,
    )


def _speed(server: Server) -> tuple[float, float, int]:
    """Give tokens a second of one stream, tokens a step, drafts a step."""
    speculative = server.speculative or {}
    demanded = max(_demanded(server, "decode_tps") * SPARE, DEFAULT_TPS)
    steps = speculative.get("num_steps")
    if isinstance(steps, int) and steps > 0:
        known = SPEED_BY_STEPS.get(steps)
        speed = known or SPEED_BY_STEPS[5] * DECAY ** (steps - 5)
        return speed, _accepted(steps), steps
    drafts = next((v for k, v in speculative.items() if "num" in k and isinstance(v, int)), 0)
    wanted = _demanded(server, "accept_length") * SPARE
    if not drafts and not wanted:
        return demanded, 1.0, 0
    drafts = max(drafts, 1)
    return demanded, min(max(_accepted(drafts), wanted), drafts + 1.0), drafts


def _accepted(steps: int) -> float:
    return sum(GUESSED_RIGHT**k for k in range(steps + 1))


def _demanded(server: Server, result: str) -> float:
    """Give the highest lower limit of a result in the spec's gate; 0 without one."""
    runs = server.gate.runs if server.gate is not None else ()
    limits = (limit for run in runs for limit in run.limits)
    return max(
        (lim.value for lim in limits if lim.bound == "min" and lim.result == result), default=0.0
    )


def _allowed(server: Server, result: str) -> float:
    """Give the lowest upper limit of a result in the spec's gate; 0 without one."""
    runs = server.gate.runs if server.gate is not None else ()
    limits = (limit for run in runs for limit in run.limits)
    return min(
        (lim.value for lim in limits if lim.bound == "max" and lim.result == result), default=0.0
    )


# -- what must be there on a host -----------------------------------------------------------------------------


def help_text(engine: str, launches: Iterable[Launch]) -> str:
    """Give what the stand-in answers to `--help`: the newest catalogue's flags, or those that are asked for where there is none."""
    folder = resources.files("reconciler.engines").joinpath("flags")
    found = [e for e in folder.iterdir() if e.name.startswith(f"{engine}-")]
    if not found:
        flags = sorted({flag for launch in launches for flag in launch.flags_to_check})
    else:
        newest = max(
            found,
            key=lambda e: version_key(e.name.removeprefix(f"{engine}-").removesuffix(".json")),
        )
        rows = json.loads(newest.read_text())["flags"]
        flags = [
            f for row in rows if not row.get("positional") for f in (row["flag"], *row["aliases"])
        ]
    return "usage: stand-in [options]\n\noptions:\n" + "".join(f"  {flag}\n" for flag in flags)


def secret_files(server: Server, launch: Launch) -> frozenset[str]:
    """Give the files on the host that the server's secrets are read from."""
    at = server.listen.api_key
    key = {secret_path(server.name, at)} if at is not None else set[str]()
    return frozenset({*launch.secret_env.values(), *(launch.secret_config or {}).values(), *key})


CONFIG = {
    "architectures": ["StandInForCausalLM"],
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 8,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1_048_576,
}
"""Of a model that nobody loads: small, and divisible by any number of cards."""


def model_files(server: Server, launch: Launch, home: str) -> dict[str, bytes]:
    """Give, by path, files that look like each model that the server will load: where its user's hub cache has it, or at its path."""
    files: dict[str, bytes] = {}
    demands = launch.demands
    for model in demands.models if demands is not None else ():
        if demands is not None and demands.engine == "llamacpp":
            files[model.source] = GGUF
        elif model.mounted:
            files |= files_of(model.source, home, model.revision, server.env)
    return files


GGUF = b"GGUF" + bytes(28)


def files_of(
    source: str,
    home: str,
    revision: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Give, by path, files that look like one model: at its path, or as the hub's library caches it below a home."""
    if source.endswith(".gguf"):
        return {source: GGUF}
    if source.startswith("/"):
        return {f"{source}/{name}": content for name, content in _model().items()}
    repo = f"{hub_cache(dict(environment or {}), home)}/models--{source.replace('/', '--')}"
    commit = (revision or "").ljust(40, "0") if _is_commit(revision) else "0" * 40
    found = {f"{repo}/snapshots/{commit}/{name}": content for name, content in _model().items()}
    return {**found, f"{repo}/refs/{revision or 'main'}": commit.encode()}


def _is_commit(revision: str | None) -> bool:
    return revision is not None and all(c in "0123456789abcdef" for c in revision)


def _model() -> dict[str, bytes]:
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(8)
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": weights,
    }


def needed_paths(server: Server, launch: Launch) -> frozenset[str]:
    """Give the paths that preflight looks for."""
    model = {server.model} if server.model and server.model.startswith("/") else set[str]()
    return frozenset({*launch.paths, *launch.argv[:1], *model})

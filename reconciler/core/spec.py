"""What users write: the models of `Server` and `Host`.

The models are strict and frozen, unknown keys are errors, and no message holds a refused value. The engines
are handed in as `EngineRules`; this module knows no engine's name. It judges one document by itself, and its
fields' grammars are `grammar.py`'s; sentences are made in `findings.py`, places and what documents mean to each
other in `fleet.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Protocol, Self
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from reconciler.core.checks import IDS
from reconciler.core.grammar import (
    IS_LABEL,
    SECRET_ENV,
    SECRET_ENV_UNLESS_PATH,
    SECRET_FLAG,
    URL_CREDENTIAL,
    AbsolutePath,
    AgeFile,
    CredentialName,
    Duration,
    EngineName,
    EngineVersion,
    EnvName,
    EnvValue,
    FlagName,
    Gpu,
    ImageName,
    IpAddress,
    Json,
    Label,
    Loc,
    ModelSource,
    Percentage,
    RevisionName,
    ServedName,
    Sha256,
    SopsFile,
    SopsKey,
    SpeculativeKey,
    SshAddress,
    Strictly,
    UnitName,
    UserName,
    between,
    distinct_gpus,
    nearest,
    raise_all,
    refusal,
    unseen,
)
from reconciler.core.significance import requests_needed
from reconciler.core.units_of_measure import duration, duration_text, percentage, percentage_text
from reconciler.core.windows import Windows, read_slot

API_VERSION: Final = "reconciler/v1"


class _Nothing(dict[str, Any]):
    """An empty map that is never written to. It has a hash, so that no reader makes a copy of it for each server."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        """Let it be written into a schema as the empty map that it is."""
        return core_schema.dict_schema()


NOTHING: Final = _Nothing()
DAY_S: Final = 86_400.0


class EngineRules(Protocol):
    """What an engine tells the spec language about itself."""

    @property
    def name(self) -> str:
        """The word under `engine:`."""

    @property
    def Options(self) -> type[BaseModel]:  # noqa: N802  (it is a type)
        """The model of the engine's own fields under `engine:`."""

    def problems(self, server: Server) -> Sequence[tuple[str, str]]:
        """Judge how fields go together: (dotted path of the field, message) for each thing wrong."""

    def warnings(self, server: Server) -> Sequence[tuple[str, str]]:
        """Say what is accepted and still worth a look, in the same form."""


# -- parts of a server -----------------------------------------------------------------------------------


class Secret(Strictly):
    """Where a secret comes from: the host, or an encrypted file of the repository. Never the secret itself."""

    file: AbsolutePath | None = Field(
        default=None,
        title="File on the host",
        description="Absolute path of a file on the host that holds the secret and nothing else.",
        examples=["/etc/reconciler/qwen.key"],
    )
    credential: CredentialName | None = Field(
        default=None,
        title="systemd credential",
        description="A credential that systemd finds on the host by this name (/etc/credstore, or passed to the host). The variable then holds the path "
        "of the credential's file, since systemd shows the value nowhere else; this tool never reads it.",
        examples=["hf-token"],
    )
    age: AgeFile | None = Field(
        default=None,
        title="age file",
        description="A file below the folder of the specs, encrypted by age, that holds the secret and nothing else. Opened with `age_key_file` of the "
        "operator's settings on its way to the host.",
        examples=["secrets/hf-token.age"],
    )
    sops: SopsFile | None = Field(
        default=None,
        title="SOPS file",
        description="A file below the folder of the specs, encrypted by SOPS for age keys; `key` says which value.",
        examples=["secrets/llm.sops.yaml"],
    )
    key: SopsKey | None = Field(
        default=None,
        title="Key in the SOPS file",
        description="The way to the value, with dots between the keys.",
        examples=["hf.token"],
    )
    sha256: Sha256 | None = Field(
        default=None,
        title="Digest of what is encrypted",
        description="Filled in when the specs are read, so that a changed secret is a change of the server. Written out, it must be right.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        ways = [
            way for way in ("file", "credential", "age", "sops") if getattr(self, way) is not None
        ]
        found: list[tuple[Loc, str]] = []
        if not ways:
            found.append(((), "names one of `file`, `credential`, `age` and `sops`"))
        elif len(ways) > 1:
            found.append(((ways[1],), f"`{ways[0]}` is given too; a secret lies in one place"))
        if self.sops is not None and self.key is None:
            found.append((("sops",), "needs `key`, the way to one value of the file"))
        if self.key is not None and self.sops is None:
            found.append((("key",), "is the key in a SOPS file, and none is named"))
        if self.sha256 is not None and not self.in_repository:
            found.append((("sha256",), "is of an encrypted file, and none is named"))
        if self.file is not None and self.file.startswith("/var/lib/reconciler/"):
            found.append((("file",), "lies among this tool's own files, which no spec may name"))
        raise_all(found)
        return self

    @property
    def in_repository(self) -> bool:
        """Say whether the secret lies encrypted in the repository."""
        return self.age is not None or self.sops is not None


class Engine(Strictly):
    """The program that serves: its name, the version that the host must have, and its own options."""

    name: EngineName = Field(
        title="Engine", description="Which engine serves the model.", examples=["sglang", "vllm"]
    )
    version: EngineVersion | None = Field(
        default=None,
        title="Version",
        description="The version that must be installed on the host; left out, any will do. Flags are checked against it.",
        examples=["0.5.23"],
    )
    options: BaseModel | None = Field(
        default=None, title="Options", description="The engine's own fields, written beside `name`."
    )

    @model_validator(mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Take `engine: sglang` as the name alone, and set the engine's own fields apart."""
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or isinstance(value.get("options"), BaseModel):
            return value
        own = {key: item for key, item in value.items() if key not in {"name", "version"}}
        return {key: value[key] for key in ("name", "version") if key in value} | {"options": own}

    @field_validator("name")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        engines = _engines(info)
        if engines is not None and name not in engines:
            raise refusal(f"is no engine that this tool knows{nearest(name, engines)}")
        return name

    @field_validator("options", mode="before")
    @classmethod
    def _options(cls, value: Any, info: ValidationInfo) -> BaseModel | None:
        """Have the engine's own model judge its fields; only where the engine is known."""
        if isinstance(value, BaseModel):
            return value
        engines, name = _engines(info), info.data.get("name")
        if engines is None or name is None:
            return None
        options = engines[name].Options.model_validate(value)
        raise_all(_unseen_in(options.model_dump(), ()))
        return options

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        written.pop("options", None)
        if self.options is not None:
            written |= self.options.model_dump(mode="json", exclude_defaults=True)
        return written


def _unseen_in(value: Any, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Hold the engine's own fields to the rule of all others: nothing that cannot be seen."""
    if isinstance(value, str):
        what = unseen(value)
        if what:
            yield loc, f"holds {what}, which no value may"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unseen_in(item, (*loc, key))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _unseen_in(item, (*loc, i))


def _engines(info: ValidationInfo) -> Mapping[str, EngineRules] | None:
    return info.context.get("engines") if isinstance(info.context, Mapping) else None


class Runtime(Strictly):
    """How the engine's program is started: a Python, a binary, or a container image; and as whom."""

    python: AbsolutePath | None = Field(
        default=None,
        title="Python",
        description="The interpreter of the environment in which the engine is installed.",
        examples=["/opt/sglang/bin/python"],
    )
    binary: AbsolutePath | None = Field(
        default=None,
        title="Binary",
        description="The engine's executable, where it is one (llama-server).",
        examples=["/usr/local/bin/llama-server"],
    )
    container: Literal["podman", "docker"] | None = Field(
        default=None,
        title="Container tool",
        description="Run the image with this.",
        examples=["podman"],
    )
    image: ImageName | None = Field(
        default=None,
        title="Image",
        description="The container image; a digest pins it.",
        examples=["docker.io/vllm/vllm-openai:v0.33.0"],
    )
    user: UserName | None = Field(
        default=None,
        title="User",
        description="The Unix user that the server runs as.",
        examples=["sglang"],
    )
    working_directory: AbsolutePath | None = Field(
        default=None,
        title="Working directory",
        description="Where the process starts; an engine may look for files there.",
        examples=["/srv/models"],
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [key for key in ("python", "binary", "container") if getattr(self, key) is not None]
        found: list[tuple[Loc, str]] = []
        if len(ways) > 1:
            found.append(((ways[1],), f"`{ways[0]}` is given too; a server is started in one way"))
        if self.container and not self.image:
            found.append((("container",), "needs an `image`"))
        if self.image and not self.container:
            found.append((("image",), "needs `container: podman` or `container: docker`"))
        raise_all(found)
        return self


class Listen(Strictly):
    """Where the server answers."""

    address: IpAddress = Field(
        default="127.0.0.1",
        title="Address",
        description="The IP address to listen on; 0.0.0.0 is every network of the host.",
        examples=["0.0.0.0"],  # noqa: S104  (an example; the default is loopback)
    )
    port: int = Field(ge=1, le=65535, title="Port", description="The TCP port.", examples=[30000])
    api_key: Secret | None = Field(
        default=None,
        title="API key",
        description="Where the key lies that clients must send; never the key itself.",
        examples=[{"file": "/etc/reconciler/qwen.key"}, {"age": "secrets/qwen.age"}],
    )

    @field_validator("api_key")
    @classmethod
    def _readable(cls, key: Secret | None) -> Secret | None:
        """Refuse a key that this tool could not send: every check of readiness needs it."""
        if key is not None and key.credential is not None:
            why = "cannot be read by this tool, which must send the key too; use `file`, `age` or `sops`"
            raise_all([(("credential",), why)])
        return key


class Timeouts(Strictly):
    """How long each wait of a rollout may take."""

    drain: Annotated[Duration, between(0, DAY_S)] = Field(
        default=60.0,
        title="Drain",
        description="How long requests in flight may go on before the stop. What is then left is cut, and recorded.",
        examples=["60s"],
    )
    stop: Annotated[Duration, between(1, DAY_S)] = Field(
        default=120.0,
        title="Stop",
        description="How long the process may take to end by itself before systemd kills it.",
        examples=["120s"],
    )
    release: Annotated[Duration, between(1, DAY_S)] = Field(
        default=60.0,
        title="Release",
        description="How long the GPUs may take to be proven free after the stop.",
        examples=["60s"],
    )
    settle: Annotated[Duration, between(0, 600)] = Field(
        default=2.0,
        title="Settle",
        description="Over how long the GPUs must look free, sample after sample, to count as free.",
        examples=["2s"],
    )
    ready: Annotated[Duration, between(1, DAY_S)] = Field(
        default=600.0,
        title="Ready",
        description="How long loading may take until a real generation is answered.",
        examples=["10m"],
    )
    gate: Annotated[Duration, between(1, DAY_S)] = Field(
        default=300.0,
        title="Gate",
        description="How long the whole gate may take.",
        examples=["5m"],
    )

    @model_validator(mode="after")
    def _settles_within_release(self) -> Self:
        if self.settle >= self.release:
            raise_all([(("settle",), "must be shorter than `release`")])
        return self


# -- the gate --------------------------------------------------------------------------------------------

RESULTS: Final = {
    "output_tps": "number", "decode_tps": "number", "ttft": "duration", "e2e": "duration", "event_gap": "duration",
    "error_rate": "percentage", "accept_length": "number", "accept_rate": "percentage",
}  # fmt: skip
"""The results that a gate may limit, as `bench-gate.md` section 1 defines them, and how each is written."""
_WITH_PERCENTILES: Final = frozenset({"decode_tps", "ttft", "e2e", "event_gap"})
_LIMIT_KEY: Final = re.compile(
    r"(min|max)_([a-z0-9_]+?)(?:_p([0-9]{1,2}(?:\.[0-9]{1,3})?))?\Z", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a run: `max_ttft_p95: 600ms` is Limit("max", "ttft", 95.0, 0.6, "max_ttft_p95")."""

    bound: Literal["min", "max"]
    result: str
    percentile: float | None
    value: float
    key: str

    @property
    def text(self) -> str | float:
        """Give the value as it is written in a spec."""
        kind = RESULTS[self.result]
        if kind == "duration":
            return duration_text(self.value)
        return percentage_text(self.value) if kind == "percentage" else self.value


@lru_cache(maxsize=4096, typed=True)
def _known_limit(key: str, value: str | float) -> Limit:
    return _read_limit(key, value)


def _read_limit(key: str, value: Any) -> Limit:
    match = _LIMIT_KEY.match(key)
    result = match[2] if match else ""
    if not match or result not in RESULTS:
        named = [f"{bound}_{name}" for name in RESULTS for bound in ("min", "max")]
        raise ValueError(
            f"a limit is min_ or max_ and one of {', '.join(RESULTS)}, and perhaps a percentile "
            f"such as _p95{nearest(key, named)}"
        )
    percentile = float(match[3]) if match[3] else None
    if percentile is not None and result not in _WITH_PERCENTILES:
        raise ValueError(f"`{result}` is one number for a run and has no percentiles")
    if percentile == 0:
        raise ValueError("a percentile is more than 0 and less than 100")
    bound: Literal["min", "max"] = "min" if match[1] == "min" else "max"
    return Limit(bound, result, percentile, _read_result(RESULTS[result], value), key)


def _read_result(kind: str, value: Any) -> float:
    if kind == "duration":
        if not isinstance(value, str):
            raise ValueError("write a duration with its unit, such as 600ms")
        return duration(value)
    if kind == "percentage":
        if not isinstance(value, str):
            raise ValueError("write a percentage from 0% to 100%, such as 5%")
        return percentage(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ValueError("must be a number above 0")
    return float(value)


class GateRun(Strictly):
    """One measurement: so many requests over so many streams, and what must come out."""

    name: Label = Field(
        title="Name", description="What this run is called in output.", examples=["single"]
    )
    concurrency: int = Field(
        ge=1,
        le=4096,
        title="Streams",
        description="How many requests are in flight at once.",
        examples=[64],
    )
    requests: int = Field(
        ge=1,
        le=100_000,
        title="Requests",
        description="How many requests are sent; a percentile needs enough of them (299 for p99).",
        examples=[256],
    )
    max_tokens: int = Field(
        ge=1,
        le=131_072,
        title="Tokens",
        description="The longest answer to ask for.",
        examples=[256],
    )
    workload: Literal["realistic", "greedy"] | None = Field(
        default=None,
        title="Workload",
        description="As the gate's, for this run alone.",
        examples=["greedy"],
    )
    runner: Label | None = Field(
        default=None,
        title="Runner",
        description="Another benchmark tool for this run, by its name in the operator's settings (`runners`). Only what it defines as we do "
        "can be limited.",
        examples=["sglang-rust"],
    )
    limits: tuple[Limit, ...] = Field(
        default=(),
        title="Limits",
        description="Written as keys of the run: `min_` or `max_`, a result, perhaps a percentile.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or isinstance(value.get("limits"), tuple):
            return value
        fields = cls.model_fields
        limits = {k: v for k, v in value.items() if k not in fields and k[:4] in {"min_", "max_"}}
        return {k: v for k, v in value.items() if k not in limits} | {"limits": limits}

    @field_validator("limits", mode="before")
    @classmethod
    def _limits(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        limits, found = [], list[tuple[Loc, str]]()
        for key, written in value.items():
            try:
                known = type(written) in {str, int, float}
                limits.append((_known_limit if known else _read_limit)(key, written))
            except ValueError as error:
                found.append(((key,), str(error)))
        raise_all(found)
        return tuple(sorted(limits, key=lambda limit: limit.key))

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        found: list[tuple[Loc, str]] = []
        if self.requests < self.concurrency:
            found.append((("requests",), f"must be at least `concurrency` ({self.concurrency})"))
        least = {(x.result, x.percentile): x.value for x in self.limits if x.bound == "min"}
        for limit in self.limits:
            loc = ("limits", limit.key)
            if limit.percentile is not None and self.runner is not None:
                found.append(
                    (
                        loc,
                        "cannot be judged by a runner's own percentile; leave it to a run without `runner`",
                    )
                )
            elif limit.percentile is not None:
                needed = requests_needed(limit.bound, limit.percentile)
                if self.requests < needed:
                    why = f"cannot decide p{limit.percentile:g} with 95 % confidence"
                    found.append((loc, f"{self.requests} requests {why}; it takes {needed}"))
            below = least.get((limit.result, limit.percentile))
            if limit.bound == "max" and below is not None and below > limit.value:
                found.append((loc, "is less than the `min_` of the same result"))
        raise_all(found)
        return self

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        written.pop("limits", None)
        return written | {limit.key: limit.text for limit in self.limits}


class Baseline(Strictly):
    """How much worse than the last applied revision a new one may be."""

    max_loss: Percentage = Field(
        title="Largest loss",
        description="Of any measured result against the last applied revision, on the same host and workload.",
        examples=["5%"],
    )


def _some_runs(runs: tuple[GateRun, ...]) -> tuple[GateRun, ...]:
    if not 1 <= len(runs) <= 20:
        raise refusal("needs at least one run, and at most 20")
    return runs


class Gate(Strictly):
    """The test that a new revision must pass before it counts as applied."""

    model_config = ConfigDict(serialize_by_alias=True)

    workload: Literal["realistic", "greedy"] = Field(
        default="realistic",
        title="Workload",
        description="`realistic` samples as users sample: as the model's own generation config says where the engine applies it, else "
        "temperature 0.7. `greedy` is temperature 0 to a fixed length, which flatters speculative decoding; it never decides alone.",
        examples=["realistic"],
    )
    prompts: Label | None = Field(
        default=None,
        title="Prompts",
        description="A file of prompts by its name without `.jsonl`, in the folder that the operator's settings call `workloads`. "
        "Left out: eight classes of work are shipped.",
        examples=["support-chats"],
    )
    mix: dict[Label, Annotated[float, Strict(strict=False), Field(ge=0, le=1e6)]] | None = Field(
        default=None,
        title="Mix",
        description="Shares of the classes of prompts: `code`, `edit`, `maths`, `extraction`, `summary`, `story`, `question`, "
        "`languages`, or your own. Left out: all alike.",
        examples=[{"code": 3, "story": 1}],
    )
    measured_from: Literal["controller", "host"] = Field(
        default="controller",
        alias="from",
        title="From",
        description="Where the measuring client runs. `host` leaves network and tunnel out of every latency; it needs Python 3.9 there.",
        examples=["host"],
    )
    runs: Annotated[tuple[GateRun, ...], Strict(strict=False), AfterValidator(_some_runs)] = Field(
        title="Runs",
        description="The measurements, in this order.",
    )
    max_error_rate: Percentage = Field(
        default=0.0,
        title="Errors allowed",
        description="The share of requests that may fail, over all runs.",
        examples=["0%"],
    )
    baseline: Baseline | None = Field(
        default=None,
        title="Baseline",
        description="Compare with the last applied revision as well; left out, only the limits count.",
    )
    quality: Literal["default", "off"] = Field(
        default="default",
        title="Quality",
        description="Ask prompts whose answers show a broken model, before the speed is measured.",
        examples=["default"],
    )
    on_inconclusive: Literal["ask", "rollback"] = Field(
        default="ask",
        title="When it cannot be decided",
        description="`ask` leaves the new server up, unproven, and says so. `rollback` goes back.",
        examples=["ask"],
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [run.name for run in self.runs]
        raise_all(
            (("runs", i, "name"), "another run has this name")
            for i, name in enumerate(names)
            if name in names[:i]
        )
        return self

    @model_validator(mode="after")
    def _greedy_never_decides(self) -> Self:
        greedy = [run for run in self.runs if (run.workload or self.workload) == "greedy"]
        found: list[tuple[Loc, str]] = []
        if len(greedy) == len(self.runs):
            why = "never decides alone: a draft guesses what greedy decoding loops in. Give at least one run `workload: realistic`"
            found.append((("workload",), f"`greedy` {why}"))
        found.extend(
            (
                ("runs", i, "limits", limit.key),
                "says nothing in a `greedy` run; write it in a `realistic` one",
            )
            for i, run in enumerate(self.runs)
            if run in greedy
            for limit in run.limits
            if limit.result in {"accept_length", "accept_rate"}
        )
        raise_all(found)
        return self


# -- preflight -------------------------------------------------------------------------------------------


def _reasons(waive: dict[str, str]) -> dict[str, str]:
    """Hold each waiver to a check that there is, and to a reason that says something."""
    found: list[tuple[Loc, str]] = []
    for check, why in waive.items():
        if check not in IDS:
            found.append(((check,), f"is no check that can be waived{nearest(check, IDS)}"))
        what = unseen(why)
        if what:
            found.append(((check,), f"holds {what}, which no value may"))
        elif not 8 <= len(why.strip()) <= 300:
            found.append(((check,), "says why, in 8 to 300 characters"))
    raise_all(found)
    return waive


class Preflight(Strictly):
    """What is looked at on the host before anything stops, and what of it may fail."""

    waive: Annotated[dict[str, str], AfterValidator(_reasons)] = Field(
        default=NOTHING,
        title="Waive",
        description="Checks that may fail, each by its id with the reason; the plan shows it and the host records it. Ids: "
        + ", ".join(f"`{check}` ({what})" for check, what in IDS.items())
        + ".",
        examples=[{"model.cached": "downloads at its first start; the line is fast"}],
    )


# -- when, and beside whom -------------------------------------------------------------------------------


def _zone(name: str) -> str:
    """Accept a time zone that is known here."""
    try:
        known = bool(re.match(r"[A-Za-z][A-Za-z0-9_+/-]*\Z", name)) and ZoneInfo(name) is not None
    except (KeyError, ValueError, OSError):
        known = False
    if not known:
        raise refusal("must be a time zone such as UTC or Europe/Berlin")
    return name


def _slots(*, dates: bool) -> AfterValidator:
    def check(texts: tuple[str, ...]) -> tuple[str, ...]:
        found: list[tuple[Loc, str]] = []
        for i, text in enumerate(texts):
            try:
                read_slot(text, dates=dates)
            except ValueError as error:
                found.append(((i,), str(error)))
        raise_all(found)
        return texts

    return AfterValidator(check)


Slots = Annotated[tuple[str, ...], Strict(strict=False)]


class ChangeWindow(Strictly):
    """When changes of a server may begin. One that began in time may end after it."""

    zone: Annotated[str, AfterValidator(_zone)] = Field(
        default="UTC",
        title="Time zone",
        description="Whose wall clock the times mean, summer time included.",
        examples=["Europe/Berlin"],
    )
    allow: Annotated[Slots, _slots(dates=False)] = Field(
        default=(),
        max_length=50,
        title="Allow",
        description="When changes may begin: days and times; over midnight is fine. Left out: always, but for what is denied.",
        examples=[["Mon-Fri 22:00-06:00", "Sat,Sun 00:00-24:00"]],
    )
    deny: Annotated[Slots, _slots(dates=True)] = Field(
        default=(),
        max_length=50,
        title="Deny",
        description="When none may begin, whatever is allowed: days and times, or dates, both ends included.",
        examples=[["2026-12-24/2027-01-02"]],
    )

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.allow and not self.deny:
            raise_all([((), "needs `allow` or `deny`")])
        return self

    @property
    def windows(self) -> Windows:
        """Give the part that judges a moment."""
        return Windows(
            self.zone,
            tuple(read_slot(text, dates=False) for text in self.allow),
            tuple(read_slot(text, dates=True) for text in self.deny),
        )


class Group(Strictly):
    """Servers that stand in for each other, and how they are changed. Every member says the same; write it into a profile."""

    name: Label = Field(title="Name", description="What the group is called.", examples=["chat"])
    at_once: int = Field(
        default=1,
        ge=1,
        le=1000,
        title="At once",
        description="How many members may be under change at the same time. A member whose host does not answer is not counted; "
        "`min_available` counts it as one that does not serve.",
        examples=[1],
    )
    min_available: int = Field(
        default=0,
        ge=0,
        le=1000,
        title="Least available",
        description="How many members must go on serving while others are changed.",
        examples=[2],
    )
    canary: Label | None = Field(
        default=None,
        title="Canary",
        description="The member that is changed first; the others wait until it is in sync.",
        examples=["chat-a"],
    )
    soak: Annotated[Duration, between(0, 30 * DAY_S)] = Field(
        default=0.0,
        title="Soak",
        description="How long the canary must have been applied before the others follow.",
        examples=["30m"],
    )
    max_failures: int = Field(
        default=1,
        ge=1,
        le=1000,
        title="Largest number of failures",
        description="At so many members that failed on what they are to run, nobody else is changed until the specs change or somebody says `retry`.",
        examples=[1],
    )


IGNORABLE: Final = (
    "Description", "Documentation", "Nice", "IOSchedulingClass", "IOSchedulingPriority", "CPUAffinity", "CPUQuota", "CPUWeight",
    "CPUSchedulingPolicy", "NUMAPolicy", "NUMAMask", "AllowedCPUs", "AllowedMemoryNodes", "IOWeight", "MemoryLow", "MemoryHigh", "MemoryMax",
    "MemorySwapMax", "TasksMax", "OOMScoreAdjust", "Slice", "LimitCORE", "LimitNOFILE", "LimitMEMLOCK", "LimitSTACK", "StandardOutput",
    "StandardError", "SyslogIdentifier", "LogRateLimitBurst", "LogRateLimitIntervalSec", "RestartSec", "WantedBy", "UMask",
)  # fmt: skip
"""Keys of a unit that another tool may keep: none decides what runs, on which cards, or how it is stopped and guarded."""

_IGNORED_DROP_IN: Final = re.compile(r"drop-in:[A-Za-z0-9][A-Za-z0-9_.@-]{0,100}\.conf\Z", re.ASCII)


def _ignored(rules: dict[str, str]) -> dict[str, str]:
    """Hold each rule to something that may be ignored, and to a reason that says something."""
    known = {f"unit:{key}" for key in IGNORABLE} | {"port", "gpu-taken"}
    found: list[tuple[Loc, str]] = []
    for what, why in rules.items():
        if what not in known and not _IGNORED_DROP_IN.match(what):
            hint = (
                nearest(what, known)
                or "; say `drop-in:NAME.conf`, `unit:KEY`, `port` or `gpu-taken`"
            )
            found.append(((what,), f"is nothing that may be ignored{hint}"))
        said = unseen(why)
        if said:
            found.append(((what,), f"holds {said}, which no value may"))
        elif not 8 <= len(why.strip()) <= 300:
            found.append(((what,), "says why, in 8 to 300 characters"))
    raise_all(found)
    return rules


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    raise_all(((i,), "is listed twice") for i, name in enumerate(names) if name in names[:i])
    return names


# -- server ----------------------------------------------------------------------------------------------


class Server(Strictly):
    """One inference server: one systemd unit, one port, a set of GPUs."""

    name: Label = Field(
        title="Name",
        description="What this server is called everywhere; never given to another one.",
        examples=["qwen35-122b"],
    )
    host: Label = Field(
        title="Host",
        description="The name of the `Host` document it runs on.",
        examples=["llm-two"],
    )
    unit: UnitName = Field(
        default="",
        title="Unit",
        description="The systemd unit. Left out: the server's name and .service.",
        examples=["sglang-qwen.service"],
    )
    state: Literal["running", "stopped"] = Field(
        default="running",
        title="State",
        description="`stopped` takes the server down and keeps its files. A stopped server claims no GPU and no port.",
        examples=["running"],
    )
    gpus: Annotated[tuple[Gpu, ...], Strict(strict=False), AfterValidator(distinct_gpus)] = Field(
        max_length=64,
        title="GPUs",
        description="Each as index, UUID or PCI bus id; `[]` for a server without a GPU. Bound to UUIDs when the host is enrolled.",
        examples=[[0, 1, 2, 3]],
    )
    engine: Engine = Field(
        title="Engine",
        description="The program that serves. `engine: sglang` is short for `{name: sglang}`.",
        examples=[{"name": "sglang", "version": "0.5.23"}, "sglang"],
    )
    runtime: Runtime = Field(
        default=Runtime(), title="Runtime", description="How the program is started, and as whom."
    )
    model: ModelSource | None = Field(
        default=None,
        title="Model",
        description="A hub id, or an absolute path on the host.",
        examples=["Qwen/Qwen3.5-122B-A10B", "/srv/models/smollm2.gguf"],
    )
    model_revision: RevisionName | None = Field(
        default=None,
        title="Model revision",
        description="The commit of the model on its hub. Pinned, since a model is code.",
        examples=["3f1c9a5"],
    )
    served_model_name: ServedName | None = Field(
        default=None,
        title="Served name",
        description="What clients call the model. Left out: what the engine makes of `model`.",
        examples=["qwen"],
    )
    tp_size: int = Field(
        default=1, ge=1, le=64, title="Tensor parallel", description="Over how many GPUs a layer is split.", examples=[4]
    )  # fmt: skip
    pp_size: int = Field(
        default=1, ge=1, le=64, title="Pipeline parallel", description="Into how many stages the layers are split.", examples=[1]
    )  # fmt: skip
    dp_size: int = Field(
        default=1, ge=1, le=64, title="Data parallel", description="How many copies serve side by side.", examples=[1]
    )  # fmt: skip
    ep_size: int = Field(
        default=1, ge=1, le=64, title="Expert parallel", description="Over how many GPUs the experts are spread.", examples=[1]
    )  # fmt: skip
    speculative: dict[SpeculativeKey, Json] | None = Field(
        default=None,
        title="Speculative decoding",
        description="By the engine's own names, without its `speculative-` prefix.",
        examples=[{"algorithm": "NEXTN", "num_steps": 4, "eagle_topk": 1}],
    )
    listen: Listen = Field(title="Listen", description="Where the server answers.")
    args: dict[FlagName, Json] = Field(
        default=NOTHING,
        title="Arguments",
        description="The engine's other flags without the dashes in front. `true` is a bare flag, `false` its negation, "
        "a list several values, a map JSON.",
        examples=[{"context-length": 131072}],
    )
    env: dict[EnvName, EnvValue] = Field(
        default=NOTHING,
        title="Environment",
        description="Environment variables. What loads code, chooses GPUs or holds secrets is refused here.",
        examples=[{"NCCL_SOCKET_IFNAME": "eth0"}],
    )
    secrets: dict[EnvName, Secret] = Field(
        default=NOTHING,
        title="Secrets",
        description="Environment variables whose values lie on the host, or encrypted in the repository.",
        examples=[
            {"HF_TOKEN": {"file": "/etc/reconciler/hf-token"}},
            {"HF_TOKEN": {"sops": "secrets/llm.sops.yaml", "key": "hf.token"}},
        ],
    )
    timeouts: Timeouts = Field(
        default=Timeouts(),
        title="Timeouts",
        description="How long each wait of a rollout may take.",
    )
    preflight: Preflight = Field(
        default=Preflight(),
        title="Preflight",
        description="Looked at on the host before anything stops: program, flags, model, memory, devices.",
    )
    gate: Gate | None = Field(
        default=None,
        title="Gate",
        description="The test that a new revision must pass. Without one, an answered generation is enough.",
    )
    on_failure: Literal["rollback", "stop", "leave"] = Field(
        default="rollback",
        title="When a rollout fails",
        description="`rollback` brings the last good revision back, `stop` leaves the server down, `leave` leaves it as it is.",
        examples=["rollback"],
    )
    drift: Literal["off", "warn", "heal"] = Field(
        default="warn",
        title="When the host was changed by hand",
        description="`warn` says so and changes nothing, `heal` puts it back (what was there is saved first), `off` is silent.",
        examples=["warn"],
    )
    drift_ignore: Annotated[dict[str, str], AfterValidator(_ignored)] = Field(
        default=NOTHING,
        title="Drift to ignore",
        description="What others may change on the host, each with the reason: `drop-in:NAME.conf`, `port`, `gpu-taken` (somebody else has a card open while it serves), or `unit:KEY` for a key of the unit that "
        "is then carried over as it stands there. Keys: " + ", ".join(IGNORABLE) + ".",
        examples=[{"drop-in:50-memory.conf": "memory limits are kept by the site's own tool"}],
    )
    window: ChangeWindow | None = Field(
        default=None,
        title="Change window",
        description="When changes may begin. Left out: at any time. A server that is down is brought back at any time.",
        examples=[{"zone": "Europe/Berlin", "allow": ["Mon-Fri 22:00-06:00"]}],
    )
    depends_on: Annotated[tuple[Label, ...], Strict(strict=False), AfterValidator(_distinct)] = (
        Field(
            default=(),
            max_length=50,
            title="Depends on",
            description="Servers that must be in sync before this one is changed.",
            examples=[["embedder"]],
        )
    )
    group: Group | None = Field(
        default=None,
        title="Group",
        description="The servers that stand in for this one, and how many of them may be changed at once.",
        examples=[{"name": "chat", "min_available": 1, "canary": "chat-a", "soak": "30m"}],
    )
    protect: bool = Field(
        default=False,
        title="Protect",
        description="Never prune this server though its spec is gone; remembered on its host.",
        examples=[True],
    )
    suspend: bool = Field(
        default=False,
        title="Suspend",
        description="Leave this server alone; it is still observed.",
        examples=[False],
    )

    @model_validator(mode="before")
    @classmethod
    def _default_unit(cls, value: Any) -> Any:
        """Name the unit after the server, unless the name is wrong itself: that is said once."""
        if isinstance(value, Mapping) and "unit" not in value:
            name = value.get("name")
            if isinstance(name, str) and IS_LABEL.match(name):
                return {**value, "unit": f"{name}.service"}
        return value

    @field_validator("args")
    @classmethod
    def _no_secret_flags(cls, args: dict[str, Json]) -> dict[str, Json]:
        why = "would show a secret to everyone on the host; write `listen.api_key` or `secrets`"
        raise_all(((flag,), why) for flag in args if SECRET_FLAG.match(flag))
        return args

    @field_validator("env")
    @classmethod
    def _no_secret_values(cls, env: dict[str, str]) -> dict[str, str]:
        why = "looks like a secret; write it under `secrets`, as a file on the host"
        raise_all(
            ((name,), why)
            for name, value in env.items()
            if SECRET_ENV.match(name)
            or (SECRET_ENV_UNLESS_PATH.match(name) and not value.startswith("/"))
        )
        in_url = "holds a password in a URL, which everybody on the host could read; write it under `secrets`, as a file on the host"
        raise_all(((name,), in_url) for name, value in env.items() if URL_CREDENTIAL.search(value))
        return env

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        found: list[tuple[Loc, str]] = []
        needed = self.tp_size * self.pp_size
        if len(self.gpus) < needed and not (not self.gpus and needed == 1):
            found.append(
                (("gpus",), f"tp_size × pp_size needs {needed} GPUs; {len(self.gpus)} are listed")
            )
        found.extend(
            (("env", name), "is under `secrets` too") for name in self.env if name in self.secrets
        )
        raise_all(found)
        return self


# -- host ------------------------------------------------------------------------------------------------


class Ssh(Strictly):
    """How to reach a machine; `~/.ssh/config` is honoured."""

    address: SshAddress = Field(
        title="Address",
        description="A name, an address, or a `Host` of ~/.ssh/config.",
        examples=["192.0.2.74"],
    )
    user: UserName | None = Field(
        default=None, title="User", description="Whom to log in as.", examples=["deploy"]
    )
    port: int | None = Field(
        default=None, ge=1, le=65535, title="Port", description="The port of sshd.", examples=[22]
    )


class Proxmox(Strictly):
    """The outer layer of a container on Proxmox: the node that runs it."""

    vmid: int = Field(
        ge=100, le=999_999_999, title="VM id", description="The container's number.", examples=[129]
    )
    ssh: Ssh = Field(title="SSH", description="How to reach the Proxmox node.")


class Host(Strictly):
    """A machine or container that runs servers."""

    name: Label = Field(
        title="Name", description="What servers call it under `host`.", examples=["llm-two"]
    )
    ssh: Ssh | None = Field(
        default=None,
        title="SSH",
        description="How to reach it. Left out (and no `proxmox`): the machine that the tool runs on.",
        examples=[{"address": "192.0.2.74", "user": "deploy"}],
    )
    proxmox: Proxmox | None = Field(
        default=None,
        title="Proxmox",
        description="The node that runs this container: there every process that holds a GPU is visible.",
        examples=[{"vmid": 129, "ssh": {"address": "192.0.2.6", "user": "root"}}],
    )
    gpu: Literal["nvidia", "amd"] = Field(
        default="nvidia",
        title="GPU vendor",
        description="Whose GPUs are in it.",
        examples=["nvidia"],
    )
    protect: Annotated[tuple[UnitName, ...], Strict(strict=False)] = Field(
        default=(),
        max_length=100,
        title="Protect",
        description="More units that must never be touched; the built-in list always applies.",
        examples=[["dcgm-exporter.service"]],
    )

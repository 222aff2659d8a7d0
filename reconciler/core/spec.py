"""What users write: the models of `Server` and `Host`, and every grammar of their fields.

A field accepts what it can mean and nothing else: types are strict, models frozen, unknown keys errors, and
no message ever holds the value that was refused (it may be a secret in the wrong place). The engines are
handed in as `EngineRules`; this module knows no engine's name. It judges one document by itself: what
documents mean to each other, and where in a file a problem is, is `fleet.py`'s matter.

Values may hold `%`, `$`, quotes, `;` and backslashes, since engines need them; whoever renders quotes them
exactly. Names may not, and nothing may hold a newline, NUL or another character that cannot be seen.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import types
import typing
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from reconciler.core.units_of_measure import duration, duration_text, percentage, percentage_text
from reconciler.core.yaml_text import MAX_INTEGER, Plain

API_VERSION: Final = "reconciler/v1"
DAY_S: Final = 86_400.0

Loc = tuple[str | int, ...]


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


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a document: the path of the field, pydantic's or our kind, and a sentence."""

    loc: Loc
    kind: str
    message: str


class Strictly(BaseModel):
    """The configuration that all models here share."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


# -- errors with places ----------------------------------------------------------------------------------


def _error(message: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{message}", {"message": message})


def _raise_all(found: Iterable[tuple[Loc, str]]) -> None:
    """Raise all problems at once, each at its own field."""
    errors = [InitErrorDetails(type=_error(message), loc=loc, input=None) for loc, message in found]
    if errors:
        raise ValidationError.from_exception_data("spec", errors, hide_input=True)


# -- text and names --------------------------------------------------------------------------------------

_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_CALLED: Final = {"\n": "a newline", "\r": "a carriage return", "\t": "a tab", "\0": "NUL"}


def unseen(text: str) -> str | None:
    """Name the first character that cannot be seen (newline, NUL, controls, bidi marks), if there is one."""
    if text.isascii() and text.isprintable():
        return None
    for character in text:
        if unicodedata.category(character) in _INVISIBLE:
            return _CALLED.get(character, f"the invisible character U+{ord(character):04X}")
    return None


def _visible(text: str) -> str:
    what = unseen(text)
    if what:
        raise _error(f"holds {what}, which no value may")
    return text


def _offender(text: str) -> str:
    """Point at the character that makes a name wrong, where a reader might not see it."""
    for place, character in enumerate(text, 1):
        what = unseen(character)
        if what:
            return f"; character {place} is {what}"
        if not character.isascii():
            called = unicodedata.name(character, "not ASCII")
            return f"; character {place} is U+{ord(character):04X} ({called})"
    return "; it begins with `-`" if text.startswith("-") else ""


def _name(pattern: str, rule: str, longest: int, examples: list[Any]) -> Any:
    """Make the type of a name: ASCII by a grammar; `rule` ends the sentence "must be …"."""
    compiled = re.compile(rf"(?:{pattern})\Z", re.ASCII)

    def check(text: str) -> str:
        if len(text) > longest:
            raise _error(f"is longer than {longest} characters")
        if not compiled.match(text):
            raise _error(f"must be {rule}{_offender(text)}")
        return text

    shape: dict[str, Any] = {"pattern": f"^(?:{pattern})$", "maxLength": longest}
    return Annotated[str, AfterValidator(check), Field(examples=examples, json_schema_extra=shape)]


_PATH: Final = r"/|(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._+@=,:~-]+)+"

_LABEL: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_IS_LABEL: Final = re.compile(rf"{_LABEL}\Z", re.ASCII)

if TYPE_CHECKING:
    Text = str
    Label = str
    UnitName = str
    AbsolutePath = str
    ModelSource = str
    ServedName = str
    RevisionName = str
    EngineName = str
    EngineVersion = str
    UserName = str
    ImageName = str
    SshAddress = str
    FlagName = str
    SpeculativeKey = str
    Json = Plain
else:
    Text = Annotated[str, Field(min_length=1, max_length=16_384), AfterValidator(_visible)]
    Label = _name(_LABEL, "small letters, digits and `-` between them", 63, ["qwen35-122b"])
    UnitName = _name(
        r"(?!reconciler-|systemd-)[A-Za-z0-9][A-Za-z0-9:_.-]*(@[A-Za-z0-9:_.-]+)?\.service",
        "a systemd unit name of letters, digits and `:_.-`, ending in .service, and none of systemd's or this tool's own",
        200,
        ["sglang-qwen.service"],
    )
    AbsolutePath = _name(
        _PATH,
        "an absolute path of letters, digits and `._+@=,:~-`, without `..`",
        1024,
        ["/opt/sglang/bin/python"],
    )
    EngineName = _name(r"[a-z][a-z0-9_-]*", "an engine's name", 40, ["sglang", "vllm"])
    EngineVersion = _name(r"[0-9][A-Za-z0-9.+!_-]*", "a version such as 0.5.23", 60, ["0.5.23"])
    ServedName = _name(
        r"[A-Za-z0-9][A-Za-z0-9._:/+-]*",
        "letters, digits and `._:/+-`, a letter or digit first",
        200,
        ["qwen"],
    )
    RevisionName = _name(
        r"[A-Za-z0-9][A-Za-z0-9._/-]*",
        "a commit, tag or branch of letters, digits and `._/-`",
        200,
        ["3f1c9a5"],
    )
    UserName = _name(r"[a-z_][a-z0-9_-]*", "a Unix user name", 32, ["sglang"])
    ImageName = _name(
        r"[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?",
        "a container image reference",
        400,
        ["vllm/vllm-openai:v0.33.0"],
    )
    SshAddress = _name(
        r"[A-Za-z0-9][A-Za-z0-9._:%-]*|[0-9A-Fa-f:]+",
        "a host name, an address or a name of ~/.ssh/config",
        253,
        ["192.0.2.74"],
    )
    FlagName = _name(
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "the engine's flag without the dashes in front",
        100,
        ["context-length"],
    )
    SpeculativeKey = _name(
        r"[a-z][a-z0-9_]*",
        "the engine's own name of small letters, digits and `_`",
        80,
        ["algorithm"],
    )


def _json(value: Any) -> Any:
    """Check a value of an engine: text, numbers, booleans, lists and maps of them, nothing unseen in it."""
    found: list[tuple[Loc, str]] = []
    checked = _checked_json(value, (), found)
    _raise_all(found)
    return checked


def _checked_json(value: Any, loc: Loc, found: list[tuple[Loc, str]]) -> Any:
    if isinstance(value, str):
        what = unseen(value)
        if what:
            found.append((loc, f"holds {what}, which no value may"))
        if len(value) > 16_384:
            found.append((loc, "is longer than 16384 characters"))
    elif isinstance(value, Mapping):
        if any(not isinstance(key, str) or unseen(key) for key in value):
            found.append((loc, "a key must be text without invisible characters"))
        return {key: _checked_json(item, (*loc, key), found) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        return tuple([_checked_json(item, (*loc, i), found) for i, item in enumerate(value)])
    elif value is None or not isinstance(value, (int, float)):
        found.append((loc, "must be text, a number, true, false, a list or a map"))
    elif not math.isfinite(value) or abs(value) > (
        MAX_INTEGER if isinstance(value, int) else math.inf
    ):
        found.append((loc, "the number is too large"))
    return value


_HUB_ID: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?(:[A-Za-z0-9][A-Za-z0-9._-]*)?\Z",
    re.ASCII,
)


def _model_source(text: str) -> str:
    """Accept a hub id, or a clean absolute path; a path is a value and may hold any visible character."""
    if text.startswith("/"):
        _visible(text)
        if len(text) > 1024 or any(part in {"", ".", ".."} for part in text[1:].split("/")):
            raise _error("a path must be absolute, without `.`, `..` or an empty part")
        return text
    if len(text) > 200 or ".." in text or not _HUB_ID.match(text):
        raise _error(
            f"must be a hub id such as Qwen/Qwen3-8B, or an absolute path{_offender(text)}"
        )
    return text


if not TYPE_CHECKING:
    Json = Annotated[Any, AfterValidator(_json)]
    ModelSource = Annotated[str, AfterValidator(_model_source)]


# -- numbers with units ----------------------------------------------------------------------------------


def _read_duration(value: Any) -> float:
    if not isinstance(value, str):
        raise _error("write a duration with its unit, such as 90s, 10m, 1h30m or 250ms")
    try:
        return duration(value)
    except ValueError as error:
        raise _error(str(error)) from None


def _read_percentage(value: Any) -> float:
    if not isinstance(value, str):
        raise _error("write a percentage from 0% to 100%, such as 5%")
    try:
        return percentage(value)
    except ValueError as error:
        raise _error(str(error)) from None


def _between(least: float, most: float) -> AfterValidator:
    def check(seconds: float) -> float:
        if not least <= seconds <= most:
            raise _error(f"must be from {duration_text(least)} to {duration_text(most)}")
        return seconds

    return AfterValidator(check)


_DURATION_SCHEMA: Final = {
    "type": "string",
    "pattern": r"^(?=.)([0-9.]+d)?([0-9.]+h)?([0-9.]+m)?([0-9.]+s)?([0-9.]+ms)?$",
}
_PERCENTAGE_SCHEMA: Final = {"type": "string", "pattern": r"^[0-9]{1,3}(\.[0-9]{1,6})?%$"}

Duration = Annotated[
    float,
    BeforeValidator(_read_duration),
    PlainSerializer(duration_text, when_used="json"),
    WithJsonSchema(_DURATION_SCHEMA),
]
Percentage = Annotated[
    float,
    BeforeValidator(_read_percentage),
    PlainSerializer(percentage_text, when_used="json"),
    WithJsonSchema(_PERCENTAGE_SCHEMA),
]

# -- GPUs ------------------------------------------------------------------------------------------------

_UUID: Final = re.compile(
    r"(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z", re.ASCII
)
_BUS_ID: Final = re.compile(
    r"([0-9A-Fa-f]{4}|[0-9A-Fa-f]{8}):[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]\Z"
)


def _gpu(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255:
        return value
    if isinstance(value, str) and (_UUID.match(value) or _BUS_ID.match(value)):
        return value
    raise _error(
        "must be an index such as 0, a UUID such as GPU-… or a PCI bus id such as 0000:3b:00.0"
    )


def gpu_key(gpu: int | str) -> str:
    """Give one spelling for each way to name a GPU, to find two names for one."""
    text = str(gpu)
    if isinstance(gpu, str) and _BUS_ID.match(gpu):
        domain, rest = text.split(":", 1)
        return f"{int(domain, 16):08x}:{rest.lower()}"
    return text


def _distinct_gpus(gpus: tuple[int | str, ...]) -> tuple[int | str, ...]:
    seen: set[str] = set()
    found: list[tuple[Loc, str]] = []
    for i, gpu in enumerate(gpus):
        if gpu_key(gpu) in seen:
            found.append(((i,), "this GPU is listed twice"))
        seen.add(gpu_key(gpu))
    _raise_all(found)
    return gpus


Gpu = Annotated[
    int | str,
    BeforeValidator(_gpu),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 255}, {"type": "string"}]}
    ),
]

# -- environment -----------------------------------------------------------------------------------------

_HARMLESS_PYTHON: Final = frozenset(
    {
        "PYTHONUNBUFFERED",
        "PYTHONHASHSEED",
        "PYTHONFAULTHANDLER",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONUTF8",
    }
)
_DENIED: Final = (
    (r"LD_.*|DYLD_.*|GCONV_PATH|GLIBC_TUNABLES|LOCPATH|NLSPATH|MALLOC_.*", "it decides what code a process loads"),
    (r"PYTHON.*|PERL5.*|RUBY(LIB|OPT)|NODE_(OPTIONS|PATH)|JAVA_TOOL_OPTIONS", "it decides what code a process loads"),
    (r".*INJECTION(32|64)_PATH|NSYS_.*|OMP_TOOL_LIBRARIES", "it decides what code a process loads"),
    (r"PATH|BASH_(ENV|FUNC).*|ENV|SHELLOPTS|BASHOPTS|IFS|CDPATH|PS4|PROMPT_COMMAND", "it decides what a shell runs"),
    (r"(CUDA|HIP|ROCR|NVIDIA|ASCEND|ONEAPI)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|CUDA_DEVICE_ORDER|CUDA_MPS_.*", "`gpus` decides which GPUs are seen"),
    (r"RECONCILER_.*|SPT_NOENV", "it marks the processes of this tool"),
    (r"INVOCATION_ID|NOTIFY_SOCKET|LISTEN_.*|WATCHDOG_.*|JOURNAL_STREAM|MAINPID|SYSTEMD_.*|CREDENTIALS_DIRECTORY|USER|LOGNAME|SHELL|MANAGERPID", "systemd sets it"),
)  # fmt: skip
_DENIED_ENV: Final = tuple((re.compile(rf"(?:{p})\Z", re.IGNORECASE), why) for p, why in _DENIED)
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
_SECRET_ENV: Final = re.compile(
    r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)\Z",
    re.IGNORECASE,
)
_SECRET_FLAG: Final = re.compile(
    r"(?:.*[-_])?(?:api[-_]?key|token|password|secret)\Z", re.IGNORECASE
)


def _env_name(name: str) -> str:
    if len(name) > 200 or not _ENV_NAME.match(name):
        raise _error(f"must be letters, digits and `_`, no digit first{_offender(name)}")
    if name not in _HARMLESS_PYTHON:
        for denied, why in _DENIED_ENV:
            if denied.match(name):
                raise _error(f"may not be set: {why}")
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]

# -- parts of a server -----------------------------------------------------------------------------------


class SecretFile(Strictly):
    """A place on the host where a secret lies. Never the secret: that stays on its host."""

    file: AbsolutePath = Field(
        title="File on the host",
        description="Absolute path of a file on the host that holds the secret and nothing else.",
        examples=["/etc/reconciler/qwen.key"],
    )


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
            raise _error(f"is no engine that this tool knows{nearest(name, engines)}")
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
        return engines[name].Options.model_validate(value)

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        written.pop("options", None)
        if self.options is not None:
            written |= self.options.model_dump(mode="json", exclude_defaults=True)
        return written


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
        _raise_all(found)
        return self


class Listen(Strictly):
    """Where the server answers."""

    address: Text = Field(
        default="127.0.0.1",
        title="Address",
        description="The IP address to listen on; 0.0.0.0 is every network of the host.",
        examples=["0.0.0.0"],  # noqa: S104  (an example; the default is loopback)
    )
    port: int = Field(ge=1, le=65535, title="Port", description="The TCP port.", examples=[30000])
    api_key: SecretFile | None = Field(
        default=None,
        title="API key",
        description="A file on the host with the key that clients must send; never the key itself.",
        examples=[{"file": "/etc/reconciler/qwen.key"}],
    )

    @field_validator("address")
    @classmethod
    def _address(cls, text: str) -> str:
        try:
            return str(ipaddress.ip_address(text))
        except ValueError:
            raise _error("must be an IP address, such as 127.0.0.1, 0.0.0.0 or ::") from None


class Timeouts(Strictly):
    """How long each wait of a rollout may take."""

    drain: Annotated[Duration, _between(0, DAY_S)] = Field(
        default=60.0,
        title="Drain",
        description="How long requests in flight may go on before the stop. What is then left is cut, and recorded.",
        examples=["60s"],
    )
    stop: Annotated[Duration, _between(1, DAY_S)] = Field(
        default=120.0,
        title="Stop",
        description="How long the process may take to end by itself before systemd kills it.",
        examples=["120s"],
    )
    release: Annotated[Duration, _between(1, DAY_S)] = Field(
        default=60.0,
        title="Release",
        description="How long the GPUs may take to be proven free after the stop.",
        examples=["60s"],
    )
    settle: Annotated[Duration, _between(0, 600)] = Field(
        default=2.0,
        title="Settle",
        description="Over how long the GPUs must look free, sample after sample, to count as free.",
        examples=["2s"],
    )
    ready: Annotated[Duration, _between(1, DAY_S)] = Field(
        default=600.0,
        title="Ready",
        description="How long loading may take until a real generation is answered.",
        examples=["10m"],
    )
    gate: Annotated[Duration, _between(1, DAY_S)] = Field(
        default=300.0,
        title="Gate",
        description="How long the whole gate may take.",
        examples=["5m"],
    )

    @model_validator(mode="after")
    def _settles_within_release(self) -> Self:
        if self.settle >= self.release:
            _raise_all([(("settle",), "must be shorter than `release`")])
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


def requests_needed(bound: Literal["min", "max"], percentile: float) -> int:
    """Give how many requests decide a percentile with 95 % confidence: 16 for p82.9, 299 for p99.

    With every one of n requests inside the limit, the chance of that under a server that breaks it is
    p^n (for a `max`; (1-p)^n for a `min`), and must be at most 5 %.
    """
    share = percentile / 100 if bound == "max" else 1 - percentile / 100
    return math.ceil(round(math.log(0.05) / math.log(share), 6))


def _read_limit(key: str, value: Any) -> Limit:
    match = _LIMIT_KEY.match(key)
    result = match[2] if match else ""
    if not match or result not in RESULTS:
        named = [f"{bound}_{name}" for name in RESULTS for bound in ("min", "max")]
        raise ValueError(
            f"unknown limit `{_cut(key)}`{nearest(key, named)}; a limit is min_ or max_ and one of "
            f"{', '.join(RESULTS)}, and perhaps a percentile such as _p95"
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
                limits.append(_read_limit(key, written))
            except ValueError as error:
                found.append(((key,), str(error)))
        _raise_all(found)
        return tuple(sorted(limits, key=lambda limit: limit.key))

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        found: list[tuple[Loc, str]] = []
        if self.requests < self.concurrency:
            found.append((("requests",), f"must be at least `concurrency` ({self.concurrency})"))
        least = {(x.result, x.percentile): x.value for x in self.limits if x.bound == "min"}
        for limit in self.limits:
            loc = ("limits", limit.key)
            if limit.percentile is not None:
                needed = requests_needed(limit.bound, limit.percentile)
                if self.requests < needed:
                    why = f"cannot decide p{limit.percentile:g} with 95 % confidence"
                    found.append((loc, f"{self.requests} requests {why}; it takes {needed}"))
            below = least.get((limit.result, limit.percentile))
            if limit.bound == "max" and below is not None and below > limit.value:
                found.append((loc, "is less than the `min_` of the same result"))
        _raise_all(found)
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
        raise _error("needs at least one run, and at most 20")
    return runs


class Gate(Strictly):
    """The test that a new revision must pass before it counts as applied."""

    workload: Literal["realistic", "greedy"] = Field(
        default="realistic",
        title="Workload",
        description="`realistic` samples as users sample. `greedy` is temperature 0, which flatters speculative decoding.",
        examples=["realistic"],
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
        _raise_all(
            (("runs", i, "name"), "another run has this name")
            for i, name in enumerate(names)
            if name in names[:i]
        )
        return self


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
    gpus: Annotated[tuple[Gpu, ...], Strict(strict=False), AfterValidator(_distinct_gpus)] = Field(
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
        default={},
        title="Arguments",
        description="The engine's other flags without the dashes in front. `true` is a bare flag, `false` its negation, "
        "a list several values, a map JSON.",
        examples=[{"context-length": 131072}],
    )
    env: dict[EnvName, Text] = Field(
        default={},
        title="Environment",
        description="Environment variables. What loads code, chooses GPUs or holds secrets is refused here.",
        examples=[{"NCCL_SOCKET_IFNAME": "eth0"}],
    )
    secrets: dict[EnvName, SecretFile] = Field(
        default={},
        title="Secrets",
        description="Environment variables whose values lie in files on the host.",
        examples=[{"HF_TOKEN": {"file": "/etc/reconciler/hf-token"}}],
    )
    timeouts: Timeouts = Field(
        default=Timeouts(),
        title="Timeouts",
        description="How long each wait of a rollout may take.",
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
            if isinstance(name, str) and _IS_LABEL.match(name):
                return {**value, "unit": f"{name}.service"}
        return value

    @field_validator("args")
    @classmethod
    def _no_secret_flags(cls, args: dict[str, Json]) -> dict[str, Json]:
        why = "would show a secret to everyone on the host; write `listen.api_key` or `secrets`"
        _raise_all(((flag,), why) for flag in args if _SECRET_FLAG.match(flag))
        return args

    @field_validator("env")
    @classmethod
    def _no_secret_values(cls, env: dict[str, str]) -> dict[str, str]:
        why = "looks like a secret; write it under `secrets`, as a file on the host"
        _raise_all(((name,), why) for name in env if _SECRET_ENV.match(name))
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
        _raise_all(found)
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


# -- reading one document --------------------------------------------------------------------------------


def read_server(
    raw: Mapping[str, Any], engines: Mapping[str, EngineRules]
) -> tuple[Server | None, list[Finding]]:
    """Make a Server of a merged document (without apiVersion, kind, extends), or say all that is wrong."""
    try:
        server = Server.model_validate(raw, context={"engines": engines})
    except ValidationError as error:
        return None, _findings(error, Server, engines)
    rules = engines[server.engine.name]
    found = [
        Finding(split_path(raw, path), "engine", text) for path, text in rules.problems(server)
    ]
    return (None if found else server), found


def partial_problems(raw: Mapping[str, Any], engines: Mapping[str, EngineRules]) -> list[Finding]:
    """Judge a part of a server (a profile): everything that is there, and nothing that is missing."""
    try:
        Server.model_validate(raw, context={"engines": engines})
    except ValidationError as error:
        return [f for f in _findings(error, Server, engines) if f.kind != "missing"]
    return []


def read_host(raw: Mapping[str, Any]) -> tuple[Host | None, list[Finding]]:
    """Make a Host of a document, or say all that is wrong."""
    try:
        return Host.model_validate(raw), []
    except ValidationError as error:
        return None, _findings(error, Host, {})


def split_path(raw: Any, path: str | Loc) -> Loc:
    """Take a dotted path apart along the keys that are there, since keys may hold dots themselves."""
    if not isinstance(path, str):
        return path
    loc: list[str | int] = []
    rest = path.replace("[", ".").replace("]", "")
    while rest:
        keys = raw if isinstance(raw, Mapping) else {}
        fits = [key for key in keys if rest == key or rest.startswith(f"{key}.")]
        word = max(fits, key=len) if fits else rest.split(".", 1)[0]
        rest = rest[len(word) + 1 :]
        if isinstance(raw, (tuple, list)) and word.isdigit() and int(word) < len(raw):
            loc.append(int(word))
            raw = raw[int(word)]
        else:
            loc.append(word)
            raw = keys.get(word)
    return tuple(loc)


def _findings(
    error: ValidationError, model: type[BaseModel], engines: Mapping[str, EngineRules]
) -> list[Finding]:
    found = []
    for detail in error.errors(include_url=False, include_context=True):
        loc = tuple(part for part in detail["loc"] if part not in {"options", "limits"})
        found.append(Finding(loc, detail["type"], _sentence(detail, loc, model, engines)))
    return found


def _sentence(
    detail: Any, loc: Loc, model: type[BaseModel], engines: Mapping[str, EngineRules]
) -> str:
    """Say in plain words what pydantic found, without the value."""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail.get("input")
    if kind == "extra_forbidden":
        known = _keys_at(model, loc[:-1], engines)
        return f"unknown key `{_cut(str(loc[-1]))}`{nearest(str(loc[-1]), known)}"
    if kind == "missing":
        return f"`{loc[-1]}` is missing"
    if kind in _EXPECTED:
        quotes = (
            "; put it in quotes"
            if kind == "string_type" and isinstance(value, (int, float))
            else ""
        )
        return f"expected {_EXPECTED[kind]}, found {_kind_of(value)}{quotes}"
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", context["expected"])
        hint = nearest(value, words) if isinstance(value, str) else ""
        return f"must be {' or '.join(words)}{hint}"
    for bound, word in (
        ("ge", "at least"),
        ("gt", "more than"),
        ("le", "at most"),
        ("lt", "less than"),
    ):
        if bound in context:
            return f"must be {word} {context[bound]}"
    if kind in {"string_too_short", "too_short"}:
        return (
            "is empty"
            if context.get("min_length", 1) == 1
            else f"needs {context['min_length']} or more"
        )
    if kind in {"string_too_long", "too_long"}:
        return f"is longer than {context['max_length']}"
    return str(detail["msg"])


_EXPECTED: Final = {
    "string_type": "text", "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "bool_type": "true or false", "tuple_type": "a list", "list_type": "a list",
    "dict_type": "a map", "model_type": "a map", "model_attributes_type": "a map", "is_instance_of": "a map",
    "dataclass_type": "a map",
}  # fmt: skip


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "a map"
        case tuple() | list():
            return "a list"
        case _:
            return "nothing"


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the nearest valid word, if one is near."""
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""


def _cut(text: str) -> str:
    seen = "".join(c if c.isprintable() else "�" for c in text[:60])
    return seen + ("…" if len(text) > 60 else "")


def _keys_at(model: type[BaseModel], loc: Loc, engines: Mapping[str, EngineRules]) -> list[str]:
    """Give the keys that are valid at a place, for the suggestion."""
    here: Any = model
    for part in loc:
        fields = here.model_fields if _is_model(here) else {}
        here = (
            _inner(fields[part].annotation)
            if part in fields
            else (here if isinstance(part, int) else None)
        )
    if here is Engine:
        options = [key for rules in engines.values() for key in rules.Options.model_fields]
        return ["name", "version", *options]
    if not _is_model(here):
        return []
    return [*here.model_fields, "extends"] if here is Server else list(here.model_fields)


def _inner(annotation: Any) -> Any:
    """Look through Optional, Annotated and tuple for the model inside."""
    while not _is_model(annotation):
        if typing.get_origin(annotation) is None:
            return None
        arguments = [a for a in typing.get_args(annotation) if a not in {types.NoneType, Ellipsis}]
        annotation = arguments[0] if arguments else None
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)

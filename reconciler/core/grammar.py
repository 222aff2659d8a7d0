"""The grammar of every single field of a spec: names, text, numbers with units, GPUs, environment names.

A type here accepts what the field can mean and nothing else, and its error says what would be right without
repeating what was wrong (it may be a secret in the wrong place). Values may hold `%`, `$`, quotes, `;` and
backslashes, since engines need them; whoever renders quotes them exactly. Names may not, and nothing may hold
a newline, NUL or another character that cannot be seen. `spec.py` makes its models of these types.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from reconciler.core.units_of_measure import duration, duration_text, percentage, percentage_text
from reconciler.core.yaml_text import MAX_INTEGER, Plain

Loc = tuple[str | int, ...]
"""The path of a field: keys and list positions."""


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


def refusal(message: str) -> PydanticCustomError:
    """Make the error that a validator raises; `message` goes on after the field's name."""
    return PydanticCustomError("rule", "{message}", {"message": message})


def raise_all(found: Iterable[tuple[Loc, str]]) -> None:
    """Raise all problems at once, each at its own field."""
    errors = [
        InitErrorDetails(type=refusal(message), loc=loc, input=None) for loc, message in found
    ]
    if errors:
        raise ValidationError.from_exception_data("spec", errors, hide_input=True)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Suggest the nearest valid word, if one is near."""
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=cutoff)
    return f"; did you mean `{near[0]}`?" if near else ""


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
        raise refusal(f"holds {what}, which no value may")
    return text


def _ip_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise refusal("must be an IP address, such as 127.0.0.1, 0.0.0.0 or ::") from None


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
            raise refusal(f"is longer than {longest} characters")
        if not compiled.match(text):
            raise refusal(f"must be {rule}{_offender(text)}")
        return text

    shape: dict[str, Any] = {"pattern": f"^(?:{pattern})$", "maxLength": longest}
    return Annotated[str, AfterValidator(check), Field(examples=examples, json_schema_extra=shape)]


_PATH: Final = r"/|(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._+@=,:~-]+)+"

_BELOW: Final = r"(?:[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*/)*[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*"
"""A path below a folder: no part is hidden, empty, `.` or `..`."""

_LABEL: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
IS_LABEL: Final = re.compile(rf"{_LABEL}\Z", re.ASCII)

if TYPE_CHECKING:
    EnvValue = str
    IpAddress = str
    Label = str
    UnitName = str
    AbsolutePath = str
    CredentialName = str
    AgeFile = str
    SopsFile = str
    SopsKey = str
    Sha256 = str
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
    EnvValue = Annotated[str, Field(max_length=16_384), AfterValidator(_visible)]
    IpAddress = Annotated[str, AfterValidator(_ip_address)]
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
    CredentialName = _name(
        r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", "the name of a systemd credential", 100, ["hf-token"]
    )
    AgeFile = _name(
        rf"{_BELOW}\.age",
        "a path below the folder of the specs, ending in .age, without `..`",
        400,
        ["secrets/hf-token.age"],
    )
    SopsFile = _name(
        rf"{_BELOW}\.sops\.(yaml|yml|json)",
        "a path below the folder of the specs, ending in .sops.yaml or .sops.json, without `..`",
        400,
        ["secrets/llm.sops.yaml"],
    )
    SopsKey = _name(
        r"(?!sops(\.|\Z))[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*",
        "keys of the file with dots between them, of letters, digits, `_` and `-`",
        200,
        ["hf.token"],
    )
    Sha256 = _name(r"[0-9a-f]{64}", "a SHA-256 in 64 hex digits", 64, ["3f" * 32])
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
    raise_all(found)
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
            raise refusal("a path must be absolute, without `.`, `..` or an empty part")
        return text
    if len(text) > 200 or ".." in text or not _HUB_ID.match(text):
        raise refusal(
            f"must be a hub id such as Qwen/Qwen3-8B, or an absolute path{_offender(text)}"
        )
    return text


if not TYPE_CHECKING:
    Json = Annotated[Any, AfterValidator(_json)]
    ModelSource = Annotated[str, AfterValidator(_model_source)]


# -- numbers with units ----------------------------------------------------------------------------------


def _read_duration(value: Any) -> float:
    if not isinstance(value, str):
        raise refusal("write a duration with its unit, such as 90s, 10m, 1h30m or 250ms")
    try:
        return duration(value)
    except ValueError as error:
        raise refusal(str(error)) from None


def _read_percentage(value: Any) -> float:
    if not isinstance(value, str):
        raise refusal("write a percentage from 0% to 100%, such as 5%")
    try:
        return percentage(value)
    except ValueError as error:
        raise refusal(str(error)) from None


def between(least: float, most: float) -> AfterValidator:
    """Bound a duration, in seconds."""

    def check(seconds: float) -> float:
        if not least <= seconds <= most:
            raise refusal(f"must be from {duration_text(least)} to {duration_text(most)}")
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
    raise refusal(
        "must be an index such as 0, a UUID such as GPU-… or a PCI bus id such as 0000:3b:00.0"
    )


def gpu_key(gpu: int | str) -> str:
    """Give one spelling for each way to name a GPU, to find two names for one."""
    text = str(gpu)
    if isinstance(gpu, str) and _BUS_ID.match(gpu):
        domain, rest = text.split(":", 1)
        return f"{int(domain, 16):08x}:{rest.lower()}"
    return text


def distinct_gpus(gpus: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Refuse a list that names one GPU twice."""
    seen: set[str] = set()
    found: list[tuple[Loc, str]] = []
    for i, gpu in enumerate(gpus):
        if gpu_key(gpu) in seen:
            found.append(((i,), "this GPU is listed twice"))
        seen.add(gpu_key(gpu))
    raise_all(found)
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
SECRET_ENV: Final = re.compile(
    r".*PASSWORD\Z|(?:.*_)?(?:TOKEN|SECRET|PASSWD|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)\Z",
    re.IGNORECASE,
)
SECRET_ENV_UNLESS_PATH: Final = re.compile(r".+_(?:KEY|PASS|PASSPHRASE|PAT)\Z", re.IGNORECASE)
"""Such as `OPENAI_KEY` or `DB_PASS`; but `TLS_KEY: /etc/tls/key.pem` names a place."""
URL_CREDENTIAL: Final = re.compile(r"://[^/\s:@]{1,200}:[^/\s@]{1,200}@")
"""`user:password@` in a URL, wherever it stands in a value."""
SECRET_FLAG: Final = re.compile(
    r"(?:.*[-_])?(?:api[-_]?key|token|password|secret)\Z", re.IGNORECASE
)


def _env_name(name: str) -> str:
    if len(name) > 200 or not _ENV_NAME.match(name):
        raise refusal(f"must be letters, digits and `_`, no digit first{_offender(name)}")
    if name not in _HARMLESS_PYTHON:
        for denied, why in _DENIED_ENV:
            if denied.match(name):
                raise refusal(f"may not be set: {why}")
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]

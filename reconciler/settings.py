"""What the operator decides and the repository may not: policy, places, and what is allowed at all.

Read from one file (`RECONCILER_SETTINGS`, else `~/.config/reconciler/settings.yaml`, else
`/etc/reconciler/settings.yaml`), then from `RECONCILER_*` in the environment, which wins. The file must belong
to the user or root and be writable by nobody else: it decides what specs may do. Called once, by `wiring`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_origin

from pydantic import Field, Strict, ValidationError, field_validator

from reconciler.core import yaml_text
from reconciler.core.errors import Problem, SpecError
from reconciler.core.findings import Finding, findings
from reconciler.core.fleet import place_of, worded
from reconciler.core.grammar import Strictly, nearest, refusal, unseen
from reconciler.core.policy import Grant, Policy
from reconciler.core.units_of_measure import duration

SYSTEM_FILE: Final = Path("/etc/reconciler/settings.yaml")
PROBE_LEAST_S: Final = 600.0
_PREFIX: Final = "RECONCILER_"
_FILE_VARIABLE: Final = "RECONCILER_SETTINGS"

Patterns = Annotated[tuple[str, ...], Strict(strict=False)]


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        raise refusal("must be a port or a range such as 30000-30099")
    ports = int(first), int(last or first)
    if not 1 <= ports[0] <= ports[1] <= 65535:
        raise refusal("must be a port or a range such as 30000-30099")
    return ports


class PathGrant(Strictly):
    """What the spec files under one path may claim."""

    path: str = Field(
        min_length=1,
        title="Path",
        description="Of spec files, below the folder of the specs: `*` within a folder, `**` anything below.",
        examples=["team-a/**"],
    )
    hosts: Patterns = Field(
        default=("*",), title="Hosts", description="Names; `*` stands for anything."
    )
    gpus: Patterns = Field(
        default=("*",), title="GPUs", description='As specs name them, in quotes: `"0"`, `GPU-…`.'
    )
    unit_prefixes: Patterns = Field(
        default=("",), title="Unit prefixes", description="What the unit's name must begin with."
    )
    ports: Patterns = Field(
        default=("1-65535",),
        title="Ports",
        description="Ports and ranges.",
        examples=[["30000-30099"]],
    )
    model_sources: Patterns = Field(
        default=("*",), title="Model sources", description="What `model` must match.", examples=[["Qwen/*", "/srv/models/*"]]
    )  # fmt: skip
    trust_remote_code: bool = Field(
        default=False, title="Trust remote code", description="Models may bring code that runs."
    )

    @field_validator("ports")
    @classmethod
    def _ports(cls, ports: tuple[str, ...]) -> tuple[str, ...]:
        for text in ports:
            _port_range(text)
        return ports

    def grant(self) -> Grant:
        """Turn it into the core's type."""
        return Grant(
            path=self.path,
            hosts=self.hosts,
            gpus=self.gpus,
            unit_prefixes=self.unit_prefixes,
            ports=tuple(_port_range(text) for text in self.ports),
            model_sources=self.model_sources,
            trust_remote_code=self.trust_remote_code,
        )


class RunnerCommand(Strictly):
    """Another benchmark tool that gates may use by name. A repository must not choose what runs here."""

    kind: Literal["sglang", "vllm", "guidellm", "aiperf", "inference-perf", "command"] = Field(
        title="Kind",
        description="Whose output it prints; `command` is one JSON object with our own names.",
        examples=["sglang"],
    )
    argv: Patterns = Field(
        min_length=1,
        title="Arguments",
        description="The command; `{url}`, `{host}`, `{port}`, `{model}`, `{concurrency}`, `{requests}`, `{max_tokens}` and `{output}` "
        "(a file) are filled in. No shell reads it. The server's key is in OPENAI_API_KEY.",
        examples=[["python3", "my-bench.py", "--url", "{url}", "--streams", "{concurrency}"]],
    )
    timeout_s: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        title="Timeout",
        description="Seconds after which it and all that it started are ended.",
    )


class Settings(Strictly):
    """Everything that an operator may set; every field also as RECONCILER_… in the environment, but `policy` and `runners`."""

    state_dir: str = Field(
        default="",
        title="State directory",
        description="History and caches of this machine. Default: $XDG_STATE_HOME/reconciler.",
        examples=["/var/lib/reconciler-controller"],
    )
    store: str = Field(
        default="",
        title="Store",
        description="URL of the history database. Default: a SQLite file in the state directory.",
        examples=["sqlite:////var/lib/reconciler-controller/history.db"],
    )
    holder: str = Field(
        default="",
        title="Holder",
        description="What this installation is called in leases. Default: user@machine.",
        examples=["ci@runner-1"],
    )
    trust_remote_code: bool = Field(
        default=False,
        title="Trust remote code",
        description="Whether any spec may let a model bring code that runs.",
    )
    allow_no_pidfd: bool = Field(
        default=False,
        title="Allow hosts without pidfd",
        description="On kernels before 5.3 a signal can hit a reused pid; say that this is known.",
    )
    hosts_at_once: int = Field(
        default=16,
        ge=1,
        le=256,
        title="Hosts at once",
        description="How many hosts are worked on side by side.",
    )
    ssh_config: str = Field(
        default="",
        title="SSH configuration",
        description="OpenSSH client configuration that says how hosts are reached. Default: ~/.ssh/config.",
        examples=["/run/reconciler-lab/ssh_config"],
    )
    prune: Literal["off", "confirm", "auto"] = Field(
        default="off",
        title="Prune",
        description="What becomes of a server whose spec is gone: `off` leaves it and says so, `confirm` waits for `reconcile prune`, `auto` ends it.",
        examples=["confirm"],
    )
    prune_limit: int = Field(
        default=1,
        ge=1,
        le=1000,
        title="Prune limit",
        description="How many servers one pass may prune.",
    )
    git_key: str = Field(
        default="",
        title="SSH key for git",
        description="File of the private key that fetches; without it ssh's own configuration and agent decide.",
        examples=["/etc/reconciler/git.key"],
    )
    git_known_hosts: str = Field(
        default="",
        title="Known hosts for git",
        description="File with the keys of git's hosts; an unknown host is never fetched from.",
    )
    git_token_file: str = Field(
        default="",
        title="Token for git",
        description="File with a token (or user:token) for https, readable by its owner alone.",
        examples=["/etc/reconciler/git.token"],
    )
    age_key_file: str = Field(
        default="",
        title="Key for secrets",
        description="File with the age identity that opens the encrypted secrets of specs (`age`, `sops`), readable by its owner alone.",
        examples=["/etc/reconciler/age.key"],
    )
    webhook_secret_file: str = Field(
        default="",
        title="Secret of the webhook",
        description="File with the secret that the forge signs with; without it there is no webhook.",
        examples=["/etc/reconciler/webhook.secret"],
    )
    report_forge: str = Field(
        default="",
        title="Forge of statuses",
        description="github, gitlab or gitea: the daemon sets a status of each server beside each commit there.",
        examples=["github"],
    )
    report_api: str = Field(
        default="",
        title="API of that forge",
        description="Its address, https.",
        examples=["https://api.github.com"],
    )
    report_repository: str = Field(
        default="",
        title="Repository of statuses",
        description="owner/name, or GitLab's id of the project.",
        examples=["ops/llm"],
    )
    report_token_file: str = Field(
        default="",
        title="Token for statuses",
        description="File with a token that may set statuses, readable by its owner alone.",
        examples=["/etc/reconciler/forge.token"],
    )
    report_url: str = Field(
        default="", title="Link of statuses", description="A page that statuses lead to."
    )
    notify_file: str = Field(
        default="",
        title="Addresses of messages",
        description="File with Apprise addresses, one a line, readable by its owner alone: told of rollouts, failures and recoveries.",
        examples=["/etc/reconciler/notify"],
    )
    report_notes: bool = Field(
        default=False,
        title="Notes",
        description="The daemon keeps a git note of each commit's statuses in its mirror (`refs/notes/reconcile`).",
    )
    report_notes_url: str = Field(
        default="",
        title="Repository of notes",
        description="Notes are pushed there as well, with the credentials that fetch, which may then write.",
        examples=["git@example.org:ops/llm.git"],
    )
    state_file: str = Field(
        default="",
        title="State file",
        description="The daemon keeps the state of all hosts in this file after each pass, for `--dry-run --against`.",
        examples=["/var/lib/reconciler-controller/state.json"],
    )
    state_branch: str = Field(
        default="",
        title="State branch",
        description="The same state as one commit on this branch, which must be for it alone, pushed at most once a minute; `status --export "
        "branch:NAME` pushes it by hand.",
        examples=["reconcile-state"],
    )
    state_url: str = Field(
        default="",
        title="Repository of the state branch",
        description="Left out, the repository of `--git`. Pushed with the credentials that fetch, which may then write.",
        examples=["git@example.org:ops/llm-state.git"],
    )
    report_branch: str = Field(
        default="",
        title="Status branch",
        description="The daemon keeps the statuses of the newest commits as one file on this branch of `report_notes_url` or `--git`: for "
        "forges that show no notes.",
        examples=["reconcile-status"],
    )
    starts_per_hour: int = Field(
        default=6,
        ge=1,
        le=1000,
        title="Starts per hour",
        description="How many rollouts of one server the daemon may begin within an hour.",
    )
    heals_per_hour: int = Field(
        default=3,
        ge=1,
        le=1000,
        title="Heals per hour",
        description="How often the daemon brings one server back within an hour before it leaves it alone and says so.",
    )
    probe_interval: str = Field(
        default="",
        title="Probe interval",
        description="How often the daemon measures a gated server that nobody uses, to say whether it became slower; left out: never.",
        examples=["6h"],
    )
    signing_keys: Patterns = Field(
        default=(),
        title="Signing keys",
        description="Files with the public keys that may sign commits.",
        examples=[["/etc/reconciler/release.pub"]],
    )
    workloads: str = Field(
        default="",
        title="Workloads",
        description="Folder of prompt files (NAME.jsonl) that gates may name under `prompts`.",
        examples=["/etc/reconciler/workloads"],
    )
    runners: dict[str, RunnerCommand] = Field(
        default={},
        title="Runners",
        description="Other benchmark tools that the runs of a gate may name.",
    )
    policy: Annotated[tuple[PathGrant, ...], Strict(strict=False)] = Field(
        default=(),
        title="Policy",
        description="Which path may claim what. Left out, every spec may claim everything; given, what no entry names is refused.",
    )

    @field_validator(
        "state_dir", "store", "holder", "workloads", "state_file", "age_key_file", "ssh_config"
    )
    @classmethod
    def _seen(cls, text: str) -> str:
        what = unseen(text)
        if what:
            raise refusal(f"holds {what}, which no value may")
        return text

    @field_validator("state_dir", "workloads", "state_file", "age_key_file", "ssh_config")
    @classmethod
    def _absolute(cls, text: str) -> str:
        if text and not text.startswith("/"):
            raise refusal("must be an absolute path")
        return text

    @field_validator("probe_interval")
    @classmethod
    def _interval(cls, text: str) -> str:
        try:
            good = not text or duration(text) >= PROBE_LEAST_S
        except ValueError as error:
            raise refusal(str(error)) from error
        if not good:
            raise refusal("must be 10m or more: a probe takes seconds from whoever comes")
        return text

    @property
    def probe_every_s(self) -> float:
        """Give the interval of probes in seconds; 0: never."""
        return duration(self.probe_interval) if self.probe_interval else 0.0

    @property
    def spec_policy(self) -> Policy:
        """Give the part that judges specs."""
        return Policy(tuple(entry.grant() for entry in self.policy), self.trust_remote_code)


def load_settings(environ: Mapping[str, str], *, home: Path, uid: int) -> Settings:
    """Read the settings of this machine and user.

    Raises:
        SpecError: The file or the environment holds something that is no setting; every problem is named.
    """
    path = settings_file(environ, home=home)
    raw, tree, problems = _from_file(path, uid) if path else ({}, None, [])
    from_environment, wrong = _from_environment(environ)
    problems += wrong
    try:
        settings = Settings.model_validate({**raw, **from_environment})
    except ValidationError as error:
        for finding in findings(error, Settings):
            problems.append(_placed(finding, tree, from_environment, str(path)))
    else:
        if not problems:
            return _with_defaults(settings, environ, home)
    raise SpecError(problems)


def settings_file(environ: Mapping[str, str], *, home: Path) -> Path | None:
    """Say which file is read: the one that is named, else the user's, else the machine's, else none."""
    named = environ.get(_FILE_VARIABLE)
    if named:
        return Path(named)
    config = environ.get("XDG_CONFIG_HOME") or str(home / ".config")
    for path in (Path(config) / "reconciler" / "settings.yaml", SYSTEM_FILE):
        if path.exists():
            return path
    return None


def _from_file(
    path: Path, uid: int
) -> tuple[dict[str, Any], yaml_text.Mapping | None, list[Problem]]:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(yaml_text.MAX_BYTES + 1)
    except OSError as error:
        return (
            {},
            None,
            [Problem(str(path), 0, 0, f"cannot be read: {os.strerror(error.errno or 0)}")],
        )
    if found.st_uid not in {0, uid} or stat.S_IMODE(found.st_mode) & 0o022:
        why = "decides what specs may do, and others may write it; it must belong to you or root, mode 0644 or less"
        return {}, None, [Problem(str(path), 0, 0, why)]
    parsed = yaml_text.parse(content, str(path))
    if parsed.problems or not parsed.documents:
        return {}, None, list(parsed.problems)
    root = parsed.documents[0].root
    if not isinstance(root, yaml_text.Mapping) or len(parsed.documents) > 1:
        return (
            {},
            None,
            [Problem(str(path), root.line, root.column, "settings are one map in one document")],
        )
    raw = yaml_text.plain(root)
    assert isinstance(raw, dict)
    return raw, root, []


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Read the variables that are settings; a name that is nearly one is a mistake, others are not ours."""
    known = {
        _PREFIX + name.upper(): name
        for name in Settings.model_fields
        if name not in {"policy", "runners"}
    }
    raw: dict[str, Any] = {}
    problems = []
    for variable, text in sorted(environ.items()):
        if variable in known:
            raw[known[variable]] = _typed(known[variable], text)
        elif variable.startswith(_PREFIX) and variable != _FILE_VARIABLE:
            hint = nearest(variable, known, cutoff=0.85)
            if hint:
                problems.append(Problem(variable, 0, 0, f"is no setting{hint}"))
    return raw, problems


def _typed(name: str, text: str) -> object:
    """Give an environment variable the type of its field; what does not fit is left for the model to refuse."""
    kind = Settings.model_fields[name].annotation
    if kind is bool:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(
            text.lower(), text
        )
    if kind is int:
        return int(text) if text.isdecimal() and len(text) < 10 else text
    return (
        text
        if kind is str or get_origin(kind) is Literal
        else tuple(part for part in text.split(":") if part)
    )


def _placed(
    finding: Finding, tree: yaml_text.Mapping | None, from_environment: Mapping[str, Any], path: str
) -> Problem:
    field = finding.loc[0] if finding.loc else ""
    if field in from_environment:
        return Problem(_PREFIX + str(field).upper(), 0, 0, finding.message)
    if tree is None:
        return Problem(path, 0, 0, worded(finding))
    place = place_of(tree, finding)
    return Problem(place.file, place.line, place.column, worded(finding))


def _with_defaults(settings: Settings, environ: Mapping[str, str], home: Path) -> Settings:
    """Fill in what depends on the user and the machine."""
    state_home = environ.get("XDG_STATE_HOME") or str(home / ".local" / "state")
    state_dir = settings.state_dir or f"{state_home}/reconciler"
    store = settings.store or f"sqlite:///{state_dir}/history.db"
    return settings.model_copy(update={"state_dir": state_dir, "store": store})

"""What one round of load is: against which endpoint, with which prompts, how many at once. Pure.

`load.py` carries it out; `rounds.py` makes the plans from a spec's gate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat", "generate"]

# Without a chat template an instruction looks finished to many a model, which then ends at once: of 48 plain
# prompts SmolLM2 answered 23 with nothing, in this form none.
COMPLETION_FORM = "Task: {}\n\nHere is a good and complete answer:\n\n"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server listens, and how it is spoken to.

    `model` is the name that requests carry; None leaves it to a server that has only one. `engine` is the
    engine's name in the spec; it decides what more than OpenAI's fields is asked, and where acceptance is
    read. `server` holds facts about server and host that a baseline must share to be compared with (GPU
    model, driver, power limit): they become part of the fingerprint. `prefix` is put before each path.
    """

    host: str
    port: int
    api: Api
    model: str | None
    bearer: str | None = field(default=None, repr=False)
    engine: str = "custom"
    tunnelled: bool = False
    server: Mapping[str, str] = field(default_factory=dict)
    tls: bool = False
    prefix: str = ""

    @property
    def authority(self) -> str:
        """Give host and port as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the class of work it stands for; `messages` are a conversation's (role, content), where it is one."""

    kind: str
    text: str
    messages: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Every request has a seed of its own, the same in every round.

    None leaves it out of the request: the server then uses the model's own generation config.
    """

    temperature: float | None = 0.7
    top_p: float | None = 0.95
    ignore_eos: bool = False

    def fields(self) -> dict[str, float]:
        """Give what a request says about it."""
        said = {"temperature": self.temperature, "top_p": self.top_p}
        return {key: value for key, value in said.items() if value is not None}

    def __str__(self) -> str:
        """Give it for a fingerprint."""
        values = ("model" if v is None else f"{v:g}" for v in (self.temperature, self.top_p))
        return f"{'/'.join(values)}/{self.ignore_eos}"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One round of one run.

    `salt` is put at the start of each prompt, with the request's number, so that no prefix cache answers.
    The idle limit is reset by any byte, the limit for the first token by no byte but one of a token
    event. `given_up` names extras that this server is known to refuse. After `duration_s` nothing more
    is sent, and what is under way is waited for.
    """

    run: str
    prompts: tuple[Prompt, ...]
    concurrency: int
    requests: int
    max_tokens: int
    round: int = 0
    workload: str = "realistic"
    sampling: Sampling = Sampling()
    salt: str = ""
    ttft_limit_s: float = 60.0
    idle_limit_s: float = 30.0
    total_limit_s: float | None = None
    deadline_s: float | None = None
    duration_s: float | None = None
    stop_after_failures: int | None = None
    given_up: frozenset[str] = frozenset()

    @property
    def total_s(self) -> float:
        """Give the longest one answer may take: by default the slowest speed worth the name."""
        if self.total_limit_s is not None:
            return self.total_limit_s
        return self.ttft_limit_s + self.max_tokens * 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a round is."""

    run: str
    round: int
    of: int
    completed: int
    failed: int

    def __str__(self) -> str:
        """Give a line for a person."""
        what = f"round {self.round}" if self.round else "warming up"
        bad = f", {self.failed} failed" if self.failed else ""
        return f"{self.run}, {what}: {self.completed} of {self.of} answers{bad}"


def request_body(
    plan: LoadPlan, endpoint: Endpoint, number: int, given_up: frozenset[str]
) -> dict[str, Any]:
    """Give the JSON body of one request, in the words of the endpoint."""
    prompt = plan.prompts[number % len(plan.prompts)]
    salt = f"[{plan.salt}{number:x}] " if plan.salt else ""
    text = prompt.text if endpoint.api == "chat" else COMPLETION_FORM.format(prompt.text)
    text = salt + text
    sampling = plan.sampling
    if endpoint.api == "generate":
        return {
            "text": text,
            "stream": True,
            "sampling_params": {
                "max_new_tokens": plan.max_tokens,
                "ignore_eos": sampling.ignore_eos,
                **sampling.fields(),
            },
        }
    body: dict[str, Any] = {
        **({"model": endpoint.model} if endpoint.model is not None else {}),
        "max_tokens": plan.max_tokens,
        **sampling.fields(),
        "stream": True,
    }
    if endpoint.api == "chat":
        turns = prompt.messages or (("user", prompt.text),)
        body["messages"] = [
            {"role": role, "content": salt + content if place == 0 else content}
            for place, (role, content) in enumerate(turns)
        ]
    else:
        body["prompt"] = text
    if "standard_extras" not in given_up:
        body["seed"] = number
        body["stream_options"] = {"include_usage": True}
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if "continuous_usage" not in given_up:
            body["stream_options"]["continuous_usage_stats"] = True
    if endpoint.engine == "sglang" and "spec_tokens_details" not in given_up:
        body["return_spec_tokens_details"] = True
    return body


def http_request(endpoint: Endpoint, method: str, path: str, body: bytes) -> bytes:
    """Give the bytes of one request."""
    lines = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {endpoint.authority}"]
    if body or method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if endpoint.bearer:
        lines.append(f"Authorization: Bearer {endpoint.bearer}")
    lines += ["Accept: text/event-stream, application/json, text/plain", "User-Agent: reconcile"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Give a short digest of a prompt set, for the fingerprint of a measurement."""
    whole = "\x00".join(f"{p.kind}\x01{p.text}" for p in prompts)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]

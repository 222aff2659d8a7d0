"""Bytes of a streamed answer in, what it says out. Pure, standard library only.

Two layers. `EventParser` knows the event stream grammar (WHATWG): any line ending, a byte order mark,
comments, several data lines, packets cut anywhere, an unfinished event at the end of file. `read_stream`
knows what the engines put into the events: OpenAI completions and chat as SGLang, vLLM, llama.cpp,
llama-cpp-python and TGI write them, and SGLang's own /generate. It returns a `Reading`, in the words of
the recorded cases in `tests/recorded/sse-streams`.

Three rules that peers break, each with a recorded case. Tokens are what the server's `usage` says, never
a count of events. A request succeeded only if it said how it finished, in a way that means finished, and
held at least one token event. The time of an event is the time of the read that completed it.

`load.py` calls this after a round, `reconcile bench --replay` with a file.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from reconciler.bench.degeneracy import TextFault, text_fault

Failure = Literal["server_error", "truncated", "aborted", "malformed", "empty"]
TokenSource = Literal["usage", "usage_inconsistent", "none"]

# "function_call" is the old name of tool_calls; eos_token and stop_sequence are TGI's words for stop.
_FINISHED = frozenset(
    {"stop", "length", "tool_calls", "function_call", "eos_token", "stop_sequence"}
)
_BOM = b"\xef\xbb\xbf"
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the stream: its name ("" when it has none), its data, when it was complete."""

    name: str
    data: str
    at: float


class EventParser:
    """Turn packets into events, however the packets are cut.

    `feed` returns the events that a packet completed. `comments` counts comment lines so far;
    `unfinished` says whether an event was begun and not ended by its blank line.
    """

    __slots__ = ("_data", "_line", "_name", "_skip_lf", "_started", "comments")

    def __init__(self) -> None:
        self.comments = 0
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._name = b""
        self._skip_lf = False
        self._started = False

    @property
    def unfinished(self) -> bool:
        """Say whether an event is begun: its end of file would drop it."""
        return bool(self._data) or any(self._line)

    def feed(self, packet: bytes, at: float = 0.0) -> list[Event]:
        """Return the events that end in this packet, stamped with the time of its arrival."""
        if not self._started:
            packet = self._without_bom(packet)
        if self._skip_lf or b"\r" in packet:
            packet = self._with_lf_only(packet)
        head, newline, rest = packet.partition(b"\n")
        if not newline:
            self._line.append(head)
            return []
        lines = rest.split(b"\n")
        self._line.append(head)
        lines.insert(0, b"".join(self._line))
        self._line = [lines.pop()]
        return self._take(lines, at)

    def _take(self, lines: list[bytes], at: float) -> list[Event]:
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line:
                if self._data:
                    data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                    name = self._name.decode("utf-8", "replace") if self._name else ""
                    events.append(Event(name, data.decode("utf-8", "replace"), at))
                    self._data = []
                self._name = b""
            elif line.startswith(b":"):
                self.comments += 1
            else:
                self._take_field(line)
        return events

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"event":
            self._name = value.removeprefix(b" ")
        elif name == b"data":  # A line that is the field's name alone: an empty value.
            self._data.append(value)

    def _without_bom(self, packet: bytes) -> bytes:
        """Drop the byte order mark, which may itself be cut into packets."""
        packet = b"".join([*self._line, packet])
        self._line = []
        if len(packet) < len(_BOM) and _BOM.startswith(packet):
            self._line = [packet]
            return b""
        self._started = True
        return packet.removeprefix(_BOM)

    def _with_lf_only(self, packet: bytes) -> bytes:
        """Turn CR and CRLF into LF; a CR that ends a packet ends its line at once."""
        if self._skip_lf and packet.startswith(b"\n"):
            packet = packet[1:]
            self._skip_lf = False
        if packet:
            self._skip_lf = packet.endswith(b"\r")
        return packet.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, as far as the reading of the answer depends on it."""

    endpoint: Literal["completions", "chat", "generate"] = "chat"
    max_tokens: int | None = None
    ignore_eos: bool = False
    include_usage: bool = True
    continuous_usage: bool = False
    n: int = 1

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Request:
        """Build one from a mapping, ignoring keys that do not matter to the reading."""
        return cls(**{k: v for k, v in fields.items() if k in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Reading:
    """What one streamed answer said.

    Positions count data events from zero. `completion_tokens` is the server's last word and is to be
    believed only when `token_source` is "usage". `per_event_tokens` exists when the server gave a running
    count on every token event. Times are those of the packets, in the caller's unit.
    """

    outcome: Literal["ok", "failed"]
    failure: Failure | None
    message: str
    error_code: int | None
    data_events: int
    comments: int
    done: bool
    role_only_events: int
    content_events: int
    reasoning_events: int
    tool_events: int
    empty_events: int
    token_positions: tuple[int, ...]
    token_times: tuple[float, ...]
    first_content_event: int | None
    first_content_time: float | None
    completion_tokens: int | None
    token_source: TokenSource
    per_event_tokens: tuple[int, ...] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    reasoning_tokens: int | None
    finish_reasons: Mapping[int, str | None]
    texts: Mapping[int, str]
    reasoning_text: str
    tool_arguments: str
    warnings: tuple[str, ...]
    named_events: tuple[str, ...] = ()
    spec_verify_ct: int | None = None
    spec_accept_length: float | None = None
    spec_drafted: int | None = None
    spec_accepted: int | None = None
    spec_source: str = ""
    server_decode_tok_s: float | None = None

    @property
    def token_events(self) -> int:
        """Count the events that held generated output of any channel."""
        return len(self.token_times)

    @property
    def first_event_tokens(self) -> int:
        """Give the tokens that the first token event held; 1 where the server gives no running count."""
        return self.per_event_tokens[0] if self.per_event_tokens else 1

    @property
    def trusted_tokens(self) -> int | None:
        """Give the number of generated tokens if the server said it believably."""
        return self.completion_tokens if self.token_source == "usage" else None  # noqa: S105 - a count of words, no secret

    @property
    def decode_time_per_token(self) -> float | None:
        """Give the time one token took after the first event, in the packets' unit.

        (last token event - first token event) / (tokens - tokens in the first event). None when the
        server gave no count, or when nothing was decoded after the first event, or all came at once.
        """
        if self.trusted_tokens is None or len(self.token_times) < 2:
            return None
        tokens = self.trusted_tokens - self.first_event_tokens
        span = self.token_times[-1] - self.token_times[0]
        return span / tokens if tokens > 0 and span > 0 else None

    @property
    def text(self) -> str:
        """Give the visible text of all choices, one after the other."""
        return "".join(self.texts[index] for index in sorted(self.texts))


@dataclass(slots=True)
class _Notes:
    """What `read_stream` has seen so far; becomes a `Reading` at the end."""

    request: Request
    data_events: int = 0
    done: bool = False
    after_done: bool = False
    role_only: int = 0
    content: int = 0
    reasoning: int = 0
    tools: int = 0
    empty: int = 0
    positions: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    first_content: tuple[int, float] | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    spec_source: str = ""
    finish: dict[int, str | None] = field(default_factory=dict)
    texts: dict[int, list[str]] = field(default_factory=dict)
    thoughts: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    failure: Failure | None = None
    message: str = ""
    error_code: int | None = None


def read_stream(packets: Iterable[tuple[float, bytes]], request: Request | None = None) -> Reading:
    """Read a whole answer: packets as (arrival time, bytes), in order, to its end of file."""
    parser = EventParser()
    notes = _Notes(request or Request())
    for at, packet in packets:
        for event in parser.feed(packet, at):
            _note_event(notes, event)
    return _reading(notes, parser)


def _note_event(notes: _Notes, event: Event) -> None:
    if notes.done:
        notes.after_done = True
        return
    position = notes.data_events
    notes.data_events += 1
    if event.data.strip() == _DONE:
        notes.done = True
        return
    if event.name not in {"", "message", "error"} and event.name not in notes.names:
        notes.names.append(event.name)
    body = _json_object(event.data)
    if event.name == "error" or (body is not None and _error_of(body) is not None):
        _note_error(notes, event.data, body)
    elif body is None:
        if event.name in {"", "message"}:
            _fail(
                notes, "malformed", f"event {position} is not a JSON object: {event.data[:120]!r}"
            )
    else:
        _note_body(notes, body, position, event.at)


def _note_body(notes: _Notes, body: dict[str, Any], position: int, at: float) -> None:
    usage = body.get("usage")
    if isinstance(usage, dict):
        notes.usage = usage
    timings = body.get("timings")
    if isinstance(timings, dict):
        notes.timings = timings
    extension = body.get("sglext")
    if isinstance(extension, dict) and isinstance(extension.get("spec_tokens_details"), dict):
        notes.spec = extension["spec_tokens_details"]
        notes.spec_source = "sglext.spec_tokens_details of each answer (SGLang)"
    if "meta_info" in body:
        choices: object = _generate_choices(notes, body)
        usage = notes.usage
    else:
        choices = body.get("choices")
    if choices is None:
        return
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        _fail(notes, "malformed", f"event {position} has choices that are not a list of objects")
        return
    if choices:
        _note_choices(notes, choices, position, at, usage)


def _note_choices(
    notes: _Notes, choices: list[dict[str, Any]], position: int, at: float, usage: object
) -> None:
    held: set[str] = set()
    for choice in choices:
        held |= _note_choice(notes, choice)
    if held & {"content", "reasoning", "tools"}:
        notes.positions.append(position)
        notes.times.append(at)
        count = _count(usage, "completion_tokens") if isinstance(usage, dict) else None
        if count is not None:
            notes.running.append(count)
        if "content" in held and notes.first_content is None:
            notes.first_content = (position, at)
        notes.content += "content" in held
        notes.reasoning += "reasoning" in held
        notes.tools += "tools" in held
    elif "finish" not in held:
        notes.role_only += "role" in held
        notes.empty += "role" not in held


def _note_choice(notes: _Notes, choice: dict[str, Any]) -> set[str]:
    """Note what one choice says, and return what it held."""
    index = choice.get("index")
    index = index if isinstance(index, int) else 0
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else choice
    held = set()
    pieces = notes.texts.setdefault(index, [])
    notes.finish.setdefault(index, None)
    text = said.get("content") or said.get("text")
    if text and isinstance(text, str):
        pieces.append(text)
        held.add("content")
    thought = said.get("reasoning_content") or said.get("reasoning")
    if thought and isinstance(thought, str):
        notes.thoughts.append(thought)
        held.add("reasoning")
    if said.get("tool_calls") and _note_tools(notes, said["tool_calls"]):
        held.add("tools")
    if said.get("role"):
        held.add("role")
    reason = choice.get("finish_reason")
    if reason is not None:
        notes.finish[index] = reason if isinstance(reason, str) else json.dumps(reason)
        held.add("finish")
    return held


def _note_tools(notes: _Notes, calls: object) -> bool:
    if not isinstance(calls, list):
        return False
    generated = False
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if arguments and isinstance(arguments, str):
            notes.arguments.append(arguments)
            generated = True
        generated = generated or bool(function.get("name"))
    return generated


def _generate_choices(notes: _Notes, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Put an event of SGLang's /generate into the form of a completions choice.

    Its text is cumulative unless the server was told otherwise: what is new is what the text so far
    does not begin with.
    """
    meta = body["meta_info"] if isinstance(body["meta_info"], dict) else {}
    details = {"cached_tokens": meta.get("cached_tokens")}
    notes.usage = {
        "completion_tokens": meta.get("completion_tokens"),
        "prompt_tokens": meta.get("prompt_tokens"),
        "prompt_tokens_details": details,
    }
    if "spec_verify_ct" in meta:
        notes.spec = meta
        notes.spec_source = "meta_info.spec_verify_ct of each answer (SGLang)"
    index = body.get("index", 0)
    text = body.get("text")
    so_far = "".join(notes.texts.get(index, ()))
    if isinstance(text, str) and so_far and text.startswith(so_far):
        text = text[len(so_far) :]
    reason = meta.get("finish_reason")
    if isinstance(reason, dict):
        reason = reason.get("type")
    return [{"index": index, "text": text, "finish_reason": reason}]


def _note_error(notes: _Notes, data: str, body: dict[str, Any] | None) -> None:
    error = _error_of(body) if body is not None else None
    facts = error if isinstance(error, dict) else (body or {})
    if notes.error_code is None:
        notes.error_code = _code(facts.get("code"))
    message = error if isinstance(error, str) else facts.get("message")
    # An error event outranks whatever else went wrong before: it is the server's own word.
    if notes.failure != "server_error":
        notes.failure, notes.message = "server_error", str(message or data)[:500]


def _error_of(body: dict[str, Any]) -> object:
    """Give the error that an event carries in any of the forms seen, or None."""
    error = body.get("error")
    if error:
        return error
    if body.get("object") == "error" or (body.get("type") == "error" and "choices" not in body):
        return body
    return None


def _fail(notes: _Notes, failure: Failure, message: str) -> None:
    if notes.failure is None:
        notes.failure, notes.message = failure, message


def _reading(notes: _Notes, parser: EventParser) -> Reading:
    _judge_end(notes)
    ok = notes.failure is None
    tokens, source = _tokens(notes)
    usage = notes.usage or {}
    cached = _count(_details(usage, "prompt_tokens_details"), "cached_tokens")
    if cached is None:
        cached = _count(notes.timings, "cache_n")
    reasoning_tokens = _count(_details(usage, "completion_tokens_details"), "reasoning_tokens")
    if reasoning_tokens is None:
        reasoning_tokens = _count(usage, "reasoning_tokens")
    texts = {index: "".join(pieces) for index, pieces in sorted(notes.texts.items())}
    per_event = _per_event(notes) if source == "usage" else None
    return Reading(
        outcome="ok" if ok else "failed",
        failure=notes.failure,
        message=notes.message,
        error_code=notes.error_code,
        data_events=notes.data_events,
        comments=parser.comments,
        done=notes.done,
        role_only_events=notes.role_only,
        content_events=notes.content,
        reasoning_events=notes.reasoning,
        tool_events=notes.tools,
        empty_events=notes.empty,
        token_positions=tuple(notes.positions),
        token_times=tuple(notes.times),
        first_content_event=notes.first_content[0] if notes.first_content else None,
        first_content_time=notes.first_content[1] if notes.first_content else None,
        completion_tokens=tokens,
        token_source=source,
        per_event_tokens=per_event,
        prompt_tokens=_count(usage, "prompt_tokens"),
        cached_tokens=cached,
        reasoning_tokens=reasoning_tokens,
        finish_reasons=dict(sorted(notes.finish.items())),
        texts=texts,
        reasoning_text="".join(notes.thoughts),
        tool_arguments="".join(notes.arguments),
        warnings=_warnings(notes, parser, ok=ok, tokens=tokens, source=source, cached=cached),
        named_events=tuple(notes.names),
        **_speculation(notes, tokens if source == "usage" else None),
    )


def _judge_end(notes: _Notes) -> None:
    """Say why the answer is not a success, once all of it was seen."""
    reasons = list(notes.finish.values())
    bad = next((r for r in reasons if r is not None and r not in _FINISHED), None)
    if bad is not None:
        _fail(notes, "aborted", f"finish_reason {bad}")
    elif not reasons or None in reasons or len(reasons) < notes.request.n:
        if notes.done and not notes.positions and not reasons:
            _fail(notes, "empty", "the stream ended without any output")
        _fail(notes, "truncated", "the stream ended without a finish_reason")
    elif len(reasons) > notes.request.n:
        asked = "1 was" if notes.request.n == 1 else f"{notes.request.n} were"
        _fail(notes, "malformed", f"{len(reasons)} choices came, {asked} asked for")
    elif not notes.positions:
        _fail(notes, "empty", "finished without any output")


def _tokens(notes: _Notes) -> tuple[int | None, TokenSource]:
    """Give the server's final count and whether it can be believed.

    A running count of a stream that broke off is not a final one. More tokens than were asked for, or
    fewer than there were events with output, is a count that something else invented.
    """
    count = _count(notes.usage, "completion_tokens") if notes.usage else None
    if count is None or (notes.failure and not any(notes.finish.values())):
        return None, "none"
    limit = notes.request.max_tokens
    too_many = limit is not None and count > limit * max(notes.request.n, len(notes.finish)) + 1
    if count < len(notes.times) or too_many:
        return count, "usage_inconsistent"
    return count, "usage"


def _per_event(notes: _Notes) -> tuple[int, ...] | None:
    """Attribute tokens to token events by the server's running count, where every one carried it.

    One event that holds everything with the final usage is no running count, but is right all the same.
    """
    running = notes.running
    if not running or len(running) != len(notes.times):
        return None
    before = 0
    parts = []
    for count in running:
        if count < before:
            return None
        parts.append(count - before)
        before = count
    return tuple(parts) if parts[0] > 0 else None


def _warnings(
    notes: _Notes,
    parser: EventParser,
    *,
    ok: bool,
    tokens: int | None,
    source: TokenSource,
    cached: int | None,
) -> tuple[str, ...]:
    request = notes.request
    texts = ["".join(pieces) for pieces in notes.texts.values()]
    faults = {text_fault(text) for text in texts if text.strip()}
    # With the end of sequence ignored every model loops; then only garbage is worth a word.
    strange = {TextFault.ONE_CHARACTER, TextFault.UNDECODABLE}
    if not request.ignore_eos:
        strange |= {TextFault.LOOPING, TextFault.ONE_WORD}
    early = ok and request.ignore_eos and source == "usage" and request.max_tokens is not None
    told = {
        "no_usage": ok and source == "none",
        "usage_inconsistent": source == "usage_inconsistent",
        "missing_done": ok and not notes.done and request.endpoint != "generate",
        "partial_event_at_eof": parser.unfinished and not notes.done,
        "data_after_done": notes.after_done,
        "early_stop": early and (tokens or 0) < (request.max_tokens or 0),
        "prefix_cache_hit": bool(cached),
        "no_visible_content": ok and not notes.content and not notes.tools,
        "several_choices": len(notes.finish) > 1,
        "degenerate_output": bool(faults & strange),
    }
    return tuple(word for word, true in told.items() if true)


def _speculation(notes: _Notes, tokens: int | None) -> dict[str, Any]:
    """Collect what the server said about its drafts and its own speed.

    SGLang counts verify passes; llama.cpp counts drafted and accepted tokens, from which the passes
    follow: every pass yields its accepted drafts and one token more.
    """
    source = notes.spec_source
    verified = _count(notes.spec, "spec_verify_ct")
    drafted = _count(notes.spec, "spec_num_proposed_drafts")
    accepted = _count(notes.spec, "spec_num_correct_drafts")
    length = notes.spec.get("spec_accept_length")
    if not notes.spec and _count(notes.timings, "draft_n") is not None:
        drafted = _count(notes.timings, "draft_n")
        accepted = _count(notes.timings, "draft_n_accepted") or 0
        made = tokens or _count(notes.timings, "predicted_n")
        verified = made - accepted if made and made > accepted else None
        length = made / verified if made and verified else None
        source = "timings.draft_n of each answer (llama.cpp)"
    elif length is None and verified and tokens:
        length = tokens / verified
    speed = notes.timings.get("predicted_per_second")
    return {
        "spec_verify_ct": verified,
        "spec_accept_length": _finite(length),
        "spec_drafted": drafted,
        "spec_accepted": accepted,
        "spec_source": source if verified else "",
        "server_decode_tok_s": _finite(speed),
    }


def _json_object(data: str) -> dict[str, Any] | None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):  # ValueError also for a number of thousands of digits.
        return None
    return body if isinstance(body, dict) else None


def _details(usage: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    details = usage.get(key)
    return details if isinstance(details, dict) else {}


def _count(facts: Mapping[str, Any] | None, key: str) -> int | None:
    """Give a number that can be a count; a server that says -1, true or "7" has said nothing."""
    value = facts.get(key) if facts else None
    return value if type(value) is int and value >= 0 else None


def _finite(value: object) -> float | None:
    """Give a number that can be measured; JSON as Python reads it also knows NaN and Infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _code(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 6:
        return int(value)
    return value if type(value) is int else None


def replay(recorded: bytes, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a recorded stream and give the reading in the words and keys of `cases.yaml`.

    `recorded` is a raw response body, or a JSON list of packets {t_ms, b64}; then times are given too.
    """
    timed = recorded.lstrip()[:1] == b"["
    packets = _recorded_packets(recorded) if timed else [(0.0, recorded)]
    reading = read_stream(packets, Request.of(request or {}))
    told = _told(reading)
    if timed and reading.token_times:
        told |= _told_times(reading)
    return told


def _recorded_packets(recorded: bytes) -> list[tuple[float, bytes]]:
    return [(float(p["t_ms"]), base64.b64decode(p["b64"])) for p in json.loads(recorded)]


def _told(reading: Reading) -> dict[str, Any]:
    several = len(reading.finish_reasons) > 1
    one_reason = next(iter(reading.finish_reasons.values()), None)
    positions = reading.token_positions
    told: dict[str, Any] = {
        "outcome": reading.outcome,
        "data_events": reading.data_events,
        "comments": reading.comments,
        "done": reading.done,
        "role_only_events": reading.role_only_events,
        "token_events": reading.token_events,
        "content_events": reading.content_events,
        "reasoning_events": reading.reasoning_events,
        "tool_events": reading.tool_events,
        "empty_events": reading.empty_events,
        "first_token_event": positions[0] if positions else None,
        "first_content_event": reading.first_content_event,
        "last_token_event": positions[-1] if positions else None,
        "completion_tokens": reading.completion_tokens,
        "token_source": reading.token_source,
        "prompt_tokens": reading.prompt_tokens,
        "cached_tokens": reading.cached_tokens,
        "reasoning_tokens": reading.reasoning_tokens,
        "finish_reason": dict(reading.finish_reasons) if several else one_reason,
        "text": dict(reading.texts) if several else reading.text,
        "reasoning_text": reading.reasoning_text,
        "tool_arguments": reading.tool_arguments,
        "warnings": list(reading.warnings),
    }
    if reading.failure:
        told |= {"failure": reading.failure, "message": reading.message}
        told["error_code"] = reading.error_code
    if reading.token_events:
        told["first_event_tokens"] = reading.first_event_tokens
    if reading.trusted_tokens and reading.token_events:
        told["tokens_per_event"] = round(reading.trusted_tokens / reading.token_events, 3)
    optional: dict[str, Any] = {
        "per_event_tokens": list(reading.per_event_tokens) if reading.per_event_tokens else None,
        "named_events": list(reading.named_events) or None,
        "spec_accept_length": reading.spec_accept_length,
        "spec_verify_ct": reading.spec_verify_ct,
        "server_decode_tok_s": _rounded(reading.server_decode_tok_s, 1),
    }
    return told | {key: value for key, value in optional.items() if value is not None}


def _told_times(reading: Reading) -> dict[str, Any]:
    times = reading.token_times
    told: dict[str, Any] = {
        "token_event_times_ms": list(times),
        "ttft_ms": times[0],
        "arrival_groups": len(set(times)),
    }
    if reading.decode_time_per_token is not None and reading.trusted_tokens:
        naive = (times[-1] - times[0]) / (reading.trusted_tokens - 1)
        told["decode_ms_per_token"] = _rounded(reading.decode_time_per_token, 3)
        told["decode_ms_per_token_naive"] = _rounded(naive, 3)
    return told


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)

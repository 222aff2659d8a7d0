"""What an engine's log means: `Scan` reads it line by line, `judge` says the cause, how sure that is, and what to do.

How a log is read:

- Only what a program says itself counts: words at the front of a line. Arguments that are echoed, prompts, request logs and the
  inside of tracebacks never decide (`_ECHO`, `diagnosis_rules.Rule`).
- The earliest line that decides, decides; but the specific goes before the general, a cause before what another rank saw of it, and
  the kernel's word (Xid, OOM killer) before the engine's.
- A server that became ready afterwards had no failure: what was said before is void.
- The same words can mean two things (a card that is full: of whom?). `_READINGS` has the ones where other lines tell.
- A SIGKILL is not "out of memory" unless the kernel or systemd says so. What is not known is `unknown`, never the nearest guess.

Memory is bounded whatever the length of the log: counters, the first line of each kind, and a window of lines around it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from reconciler.core.diagnosis_rules import CODES, REACTIONS, RULES, Cause, Rank, Reaction, Rule
from reconciler.core.log_lines import Level, Line, Source, lines_of
from reconciler.helper.outputs import read_xid_lines

WINDOW: Final = 24
"""How many lines before and after a deciding one are kept: a traceback and the shutdown that follows fit in."""

NAMED_WITHIN: Final = 10_000
"""An engine that has not named itself by this line will not."""

SHAPES_MAX: Final = 4096
SHAPE_MAX: Final = 1024

SHOWN_MAX: Final = 600
LINES_MAX: Final = 8

FlagHistory = Callable[[str, str], str | None]
"""(engine, flag) → "older" when only versions before the newest have it, "newer" when the newest has it, None when none has."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of the log that speaks for the diagnosis."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log means. `key_line` is the line that decides, as it stands in the log; None where only the whole picture does."""

    cause: Cause
    code: str
    reaction: Reaction
    also_page: bool
    confidence: str
    key_line: str | None
    lines: tuple[Evidence, ...]
    why: str
    change: str
    engine: str | None = None
    restarts: int = 0

    @property
    def failure(self) -> bool:
        """Whether something is wrong at all."""
        return self.cause not in {Cause.READY, Cause.LOADING, Cause.DRAINING}

    @property
    def known(self) -> bool:
        """Whether the log says something that is known, though it may leave open whose fault that was."""
        return self.code != "unknown"


# -- reading --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stage:
    """How far a start had come when a line was written."""

    weights_begun: int = 0
    weights_ended: int = 0
    free_gib: float | None = None
    ready: int = 0


@dataclass(slots=True)
class _Candidate:
    rule: Rule
    line: Line
    stage: _Stage
    before: tuple[Line, ...]
    after: list[Line] = field(default_factory=list)
    times: int = 1
    accounts: Line | None = None
    """The first line of these words that says who has how much of the card."""
    frees: list[float] = field(default_factory=list)


_ECHO: Final = re.compile(
    r"server_args\b|(?:non-default )?args: |launch_command\b|Exec(?:Start|Stop)\b|COMMAND=|\+ |[Cc]ommand line\b|(?:running|Running) command"
    r"|Received request |Receive: |Finish: |Added? request |[\w/.-]+: ?Traceback|['\"`{<]|\[[{'\"]"
    r"|\S+ - \"(?:GET|POST|PUT|HEAD|DELETE|OPTIONS) |usage: |Namespace\(|Ignore import error"
)
_SPOKEN: Final = re.compile(
    r"[^:=]{0,60}\b(?:user|prompt|question|content|message|messages|asks?|asked|says?|said|input|inputs|output|text|reply|answer|request"
    r"|response|chat|completion|assistant|system|body|payload|example|quote|e\.g\.)\b[^:=]{0,20}[:=]",
    re.IGNORECASE,
)
_READY: Final = re.compile(
    r"The server is fired up and ready to roll!|(?:main: )?(?:HTTP )?server is listening on http"
)
_UVICORN_READY: Final = re.compile(r"Application startup complete\.")
_DRAINING: Final = re.compile(
    r"Gracefully exiting\.\.\. Remaining number of requests|\[shutdown\] .*[Dd]raining"
)
_WEIGHTS_BEGIN: Final = re.compile(
    r"Load weight begin\. avail mem=(?P<free>[\d.]+)|Load weight begin|Starting to load model|Loading (?:safetensors|pt|bin) checkpoint shards"
    r"|Multi-thread loading shards|Loading model from \d+|llama_model_loader: loaded meta data|load_tensors: loading model tensors"
)
_WEIGHTS_END: Final = re.compile(
    r"Load weight end\.|Model loading took|Loading weights took|.{0,80}shards: +100%|Capture \S+ .*graph end|KV Cache is allocated"
)
_LOADING: Final = re.compile(
    r"Load weight begin|Load weight end|Loading (?:safetensors|pt|bin) checkpoint shards|Multi-thread loading shards|Starting to load model"
    r"|Loading model from|Capture .{1,40}graph (?:begin|end)|compiling for |Compiling |torch\.compile|Dynamo bytecode|Init torch distributed"
    r"|KV Cache is allocated|Initializing a V1 LLM engine|Fetching \d+ files|load_tensors: |llama_model_loader: |srv +load_model: loading"
    r"|Memory pool end|DeepGEMM warmup|Model loading took|Loading weights took|Graph capturing|Memory profiling takes"
)
_BEGAN: Final = re.compile(
    r"Initializing a V1 LLM engine|Init torch distributed|ggml_cuda_init: found \d|build: \d+ \("
)
"""Where a server begins, before it reads a weight."""
_ENDED: Final = re.compile(
    r"(?:\S+: )?Main process exited, code=(?:killed|dumped|exited, status=[1-9])|\S+: Failed with result|(?:runtime: )?container \S* ?exit(?:ed)?\b"
    r"|Killed$|Aborted\b|Segmentation fault|Fatal Python error|Traceback \(most recent call last\)|terminate called after throwing"
    r"|.{0,60}\bhit an exception: Traceback|EngineCore failed to start|Exit code: -?[1-9]"
)
_LEFT_OVER: Final = re.compile(
    r"\S+: Unit process \d+ \(.{1,32}\) remains running after unit stopped|\S+: Found left-over process \d+"
    r"|runtime: container \S+ removed by force|probe: compute processes on GPU .*(?:VLLM|sglang|EngineCore|Worker)"
)
_RESTARTS: Final = re.compile(
    r"\S+: Scheduled restart job, restart counter is at (\d+)|.{0,80}\battempt (\d+)\b|\S+: Start request repeated too quickly"
)
_CARD_ERROR: Final = re.compile(r".{0,60}\bGPU \d+: .*(?:\bERR!|\[Unknown Error\]|\[GPU is lost\])")
_OOM_KILL: Final = re.compile(
    r"(?:Memory cgroup out of memory|Out of memory): Killed process (\d+) \(([^)]*)\)"
)
_OOM_UNIT: Final = re.compile(
    r"\S+: A process of this unit has been killed by the OOM killer|\S+: Failed with result 'oom-kill'"
)
_OURS: Final = re.compile(
    r"sglang|vllm|llama|trtllm|python|ray::|EngineCore|pt_main_thread", re.IGNORECASE
)
_ACCEPTED: Final = re.compile(
    r"SpecDecoding metrics: .*\bAccepted: (\d+) tokens, Drafted: (\d+) tokens"
)
_ACCEPT_LEN: Final = re.compile(r"Decode batch.*#running-req: [1-9].*\baccept len: ([\d.]+)")
_THROUGHPUT: Final = re.compile(
    r".*\bAvg generation throughput: ([\d.]+) tokens/s, Running: (\d+) reqs"
)
_BROADCAST: Final = re.compile(r"No available shared memory broadcast block found in \d+ seconds")
_NO_TOKENS: Final = re.compile(r"gate: [1-9]\d* requests sent in this window, 0 tokens received")
_DIED: Final = re.compile(r"Rank \d+ scheduler (?:died during initialization|is dead)")
_EXIT_KILLED: Final = re.compile(r"Exit code: -9\b")
_DIGITS: Final = re.compile(r"\d+")
_TELLING: Final = re.compile(r"\b(?:80[234]|98|28|401|9)\b")
"""Numbers that rules ask for."""
_ENGINES: Final = (
    (
        "sglang",
        re.compile(
            rb"sglang|launch_server\.py|ready to roll|Load weight (?:begin|end)", re.IGNORECASE
        ),
    ),
    ("vllm", re.compile(rb"vllm|EngineCore|api_server\.py", re.IGNORECASE)),
    ("llamacpp", re.compile(rb"llama[._-]|ggml_", re.IGNORECASE)),
)


_WORDS: Final = tuple(
    word.encode()
    for word in (
        "rror", "xception", "fail", "Fail", "illed", "Kill", "SIGKILL", "memory", "imeout", "imed out", "NVRM", "amdgpu", "uvm_spin", "raft",
        "pecul", "eight", "shards", "ready", "startup complete", "listening", "xiting", "rain", "raceback", "scheduler", "remains running",
        "left-over", "estart", "attempt", "robe:", "gate:", "rompt", "Received", "Receive:", "Finish:", "mismatch", "GPU ", "apture", "ompil",
        "divisible", "profiled", "oading model", "load model", "loading model", "Not enough", "No available", "bind", "custom code",
        "requires you", "template", "No space", "CRITICAL", "undefined symbol", "shared object", "think_", "res=<", "other ranks", "peer",
        "NCCL", "exit", "Exit", "Fetching", "Init torch", "KV Cache", "Initializing", "collective", "Abort", "fault", "SpecDecoding",
        "Avg generation", "PTX", "CUDA", "rchitecture", "is dead", "on startup", "occupied", "already in use", "removed by", "removed.", "lost",
        "killing", "llama_model", "load_tensors", "Repo id", "gated", "server_args", "args:", "corrupted", "insufficient", "too old",
    )
)  # fmt: skip
"""A line without any of these can neither decide nor tell how far a server has come. A test compares reading with and without."""


class Scan:
    """Reads a log line by line and keeps what `judge` needs of it."""

    def __init__(self, engine: str | None = None) -> None:
        """Begin a log of this engine; None: the log will tell."""
        self.engine = engine
        self.lines = 0
        self.shapes: dict[bytes, bool] = {}
        self.rules: dict[tuple[object, ...], Rule | None] = {}
        self.candidates: dict[tuple[Rank, str], _Candidate] = {}
        self.stage = _Stage()
        self.recent: deque[Line] = deque(maxlen=WINDOW)
        self.open_windows: list[_Candidate] = []
        self.ready: Line | None = None
        self.draining: Line | None = None
        self.loading: Line | None = None
        self.begun: Line | None = None
        self.ended: Line | None = None
        self.loud: list[Line] = []
        self.left_over: list[Line] = []
        self.card_errors: list[Line] = []
        self.oom_kills: list[Line] = []
        self.killed: Line | None = None
        self.xids: list[Line] = []
        self.restarts = 0
        self.accepted = 0
        self.none_accepted: list[Line] = []
        self.drafted = 0
        self.standing: list[Line] = []
        self.broadcasts: list[Line] = []
        self.no_tokens: Line | None = None
        self.in_echo = 0
        self.died: Line | None = None

    def feed(self, raw: bytes) -> None:
        """Read one physical line. Most lines of a long log are counted and no more: not one word in them could matter."""
        self.lines += 1
        self._name_engine(raw)
        if self.in_echo:
            if not any(word in raw for word in _WORDS):
                self.in_echo = 0 if _closes(raw.decode(errors="replace")) else self.in_echo - 1
                return
        elif self._dull(raw):
            if b"accept len: " in raw:
                self._decoded(raw.decode(errors="replace"))
            return
        for line in lines_of(self.lines, raw.decode(errors="replace")):
            self._name_engine(line.shown.encode())
            self._read(line)

    def _name_engine(self, said: bytes) -> None:
        if self.engine is None and self.lines <= NAMED_WITHIN:
            self.engine = next((name for name, form in _ENGINES if form.search(said, 0, 400)), None)

    def _dull(self, raw: bytes) -> bool:
        """Say whether no word of a line could matter. Lines that differ in numbers alone are asked about once."""
        if raw.startswith(b"{"):
            return False  # journald may have packed its words as numbers.
        shape = raw.translate(None, b"0123456789")
        known = self.shapes.get(shape)
        if known is None:
            known = not any(word in raw for word in _WORDS)
            if len(self.shapes) >= SHAPES_MAX:
                self.shapes.clear()
            if len(shape) < SHAPE_MAX:
                self.shapes[shape] = known
        return known

    def _decoded(self, raw: str) -> None:
        """Count accepted drafts in SGLang's line per batch, without taking it apart: there are millions of them."""
        if (found := _ACCEPT_LEN.search(raw)) is None:
            return
        if float(found[1].rstrip(".")) > 1.005:
            self.accepted, self.none_accepted = self.accepted + 1, []
            return
        self.drafted += 100
        if len(self.none_accepted) < LINES_MAX:
            self.none_accepted += lines_of(self.lines, raw)

    def _read(self, line: Line) -> None:
        if not line.text:
            return
        for open_one in self.open_windows:
            open_one.after.append(line)
        self.open_windows = [one for one in self.open_windows if len(one.after) < WINDOW]
        echo = self._is_echo(line)
        if line.source is Source.KERNEL:
            self._kernel(line)
        elif line.source is Source.SYSTEMD:
            self._systemd(line)
        elif not echo:
            self._progress(line)
        if not echo and not line.inner:
            self._match(line)
            if line.loud and len(self.loud) < LINES_MAX:
                self.loud.append(line)
        self.recent.append(line)

    def _is_echo(self, line: Line) -> bool:
        """Say whether a line repeats somebody's words: arguments, prompts, a text that goes on from the line above."""
        if line.source is not Source.ENGINE:
            return False
        if self.in_echo and not line.stamped:
            self.in_echo -= 1
            if _closes(line.shown):
                self.in_echo = 0
            return True
        self.in_echo = 0
        if _ECHO.match(line.text) or (not line.errors and _SPOKEN.match(line.text)):
            self.in_echo = 200 if _opens(line.text) else 0
            return True
        return False

    def _kernel(self, line: Line) -> None:
        if "Xid" in line.text or "fallen off the bus" in line.text:
            if len(self.xids) < 4 * LINES_MAX:
                self.xids.append(line)
        elif (found := _OOM_KILL.match(line.text)) and _OURS.search(found[2]):
            self.oom_kills.append(line) if len(self.oom_kills) < LINES_MAX else None

    def _systemd(self, line: Line) -> None:
        if _OOM_UNIT.match(line.text) and len(self.oom_kills) < LINES_MAX:
            self.oom_kills.append(line)
        if _LEFT_OVER.match(line.text) and len(self.left_over) < LINES_MAX:
            self.left_over.append(line)
        self._restarted(line)
        if _ENDED.match(line.text):
            self.ended = line

    def _restarted(self, line: Line) -> None:
        if found := _RESTARTS.match(line.text):
            count = next((int(g) for g in found.groups() if g), self.restarts + 1)
            self.restarts = max(self.restarts, min(count, 1_000_000))

    def _progress(self, line: Line) -> None:
        """Note how far the server has come, and whether it does its work."""
        text = line.text
        if self._is_ready(line):
            self._became_ready(line)
        elif _DRAINING.match(text):
            self.draining = self.draining or line
        elif _ENDED.match(text):
            self.ended = line
        elif _LOADING.match(text):
            self.loading = line
        if self.begun is None and _BEGAN.match(text):
            self.begun = line
        if begun := _WEIGHTS_BEGIN.match(text):
            self.stage = replace(self.stage, weights_begun=line.number, weights_ended=0)
            if begun["free"]:
                self.stage = replace(self.stage, free_gib=float(begun["free"]))
        if _WEIGHTS_END.match(text):
            self.stage = replace(self.stage, weights_ended=line.number)
        if _LEFT_OVER.match(text) and len(self.left_over) < LINES_MAX:
            self.left_over.append(line)
        if _CARD_ERROR.match(text) and len(self.card_errors) < LINES_MAX:
            self.card_errors.append(line)
        if "attempt" in text or "restart" in text:
            self._restarted(line)
        if _DIED.match(text) and self.died is None:
            self.died = line
        if _EXIT_KILLED.match(text):
            self.killed = line
        self._work(line)

    def _is_ready(self, line: Line) -> bool:
        if _READY.match(line.text):
            return True
        # SGLang serves HTTP before it is ready; its lines have their time in brackets.
        return (
            bool(_UVICORN_READY.match(line.text)) and self.engine != "sglang" and not line.bracketed
        )

    def _became_ready(self, line: Line) -> None:
        self.candidates.clear()
        self.open_windows.clear()
        self.loud.clear()
        self.xids.clear()
        self.oom_kills.clear()
        self.ready, self.ended, self.loading, self.draining = line, None, None, None
        self.died, self.killed, self.none_accepted, self.accepted, self.drafted = (
            None,
            None,
            [],
            0,
            0,
        )
        self.standing, self.broadcasts, self.no_tokens = [], [], None
        self.stage = replace(self.stage, ready=line.number)

    def _work(self, line: Line) -> None:
        """Count tokens that leave the server, and drafts that are accepted."""
        text = line.text
        if found := _ACCEPTED.match(text):
            self.accepted += int(found[1])
            self.drafted += int(found[2])
            if int(found[1]):
                self.none_accepted = []
            elif int(found[2]) and len(self.none_accepted) < LINES_MAX:
                self.none_accepted.append(line)
        elif found := _THROUGHPUT.match(text):
            if float(found[1]) == 0 and int(found[2]) > 0:
                self.standing.append(line) if len(self.standing) < LINES_MAX else None
            else:
                self.standing, self.broadcasts = [], []
        elif _BROADCAST.match(text) and self.ready is not None:
            self.broadcasts.append(line) if len(self.broadcasts) < LINES_MAX else None
        elif _NO_TOKENS.match(text):
            self.no_tokens = line

    def _rule(self, line: Line) -> Rule | None:
        """Give the rule that reads a line. Lines that differ in numbers that mean nothing are asked about once."""
        key = (
            _DIGITS.sub("", line.text[:SHAPE_MAX]),
            *_TELLING.findall(line.text),
            line.loud,
            bool(line.errors),
            line.level,
            line.source,
        )
        if key not in self.rules:
            if len(self.rules) >= SHAPES_MAX:
                self.rules.clear()
            self.rules[key] = _rule_of(line)
        return self.rules[key]

    def _match(self, line: Line) -> None:
        rule = self._rule(line) if len(line.text) < SHAPE_MAX else _rule_of(line)
        if rule is None:
            return
        key = (rule.rank, rule.code)
        known = self.candidates.get(key)
        free = _FREE.match(line.text)
        if known is None:
            known = _Candidate(rule, line, replace(self.stage), tuple(self.recent))
            self.candidates[key] = known
            self.open_windows.append(known)
        else:
            known.times += 1
        if known.accounts is None and _tells_use(line.text):
            known.accounts = line
        if free and len(known.frees) < 4 * LINES_MAX:
            known.frees.append(float(free[1]))


def _rule_of(line: Line) -> Rule | None:
    """Give the first rule that reads this line."""
    for rule in RULES:
        if rule.kernel is not (line.source is Source.KERNEL):
            continue
        if (rule.loud and not line.loud) or (rule.named and not line.errors):
            continue
        if line.level is Level.INFO and not rule.calm:
            continue
        if rule.form.match(line.text):
            return rule
    return None


def _opens(text: str) -> bool:
    """Say whether a text has a quotation that goes on in the next line."""
    return any(text.count(mark) % 2 == 1 for mark in ('"', "`")) or bool(
        re.search(r"(?:[:=(,] ?|^)'[^']*$", text)
    )


def _closes(text: str) -> bool:
    return text.rstrip().endswith(('"', "'", "`", '"}', "'}", '",', "',", "')", '")'))


# -- judging ----------------------------------------------------------------------------------------------


def diagnose(
    lines: Iterable[bytes],
    *,
    engine: str | None = None,
    exit_status: int | None = None,
    kernel: Sequence[str] = (),
    flag_history: FlagHistory | None = None,
) -> Diagnosis:
    """Read a whole log. `kernel`: lines of the kernel's own log that belong to it."""
    scan = Scan(engine)
    for raw in lines:
        scan.feed(raw)
    for said in kernel:
        scan.feed(f"Jan  1 00:00:00 host kernel: {said}".encode())
    return judge(scan, exit_status=exit_status, flag_history=flag_history)


def judge(
    scan: Scan, *, exit_status: int | None = None, flag_history: FlagHistory | None = None
) -> Diagnosis:
    """Say what the log that was read means."""
    if (host := _kernel_verdict(scan)) is not None:
        return host
    ordered = sorted(scan.candidates.values(), key=lambda c: (-c.rule.rank, c.line.number))
    for candidate in ordered:
        if (told := _read(candidate, scan, flag_history)) is not None:
            return told
    if (stands := _stands_still(scan)) is not None:
        return stands
    return _state(scan, exit_status)


def _verdict(  # noqa: PLR0917  (a verdict has these parts)
    scan: Scan,
    code: str,
    key: Line | None,
    confidence: str,
    more: Iterable[Line] = (),
    note: str = "",
) -> Diagnosis:
    meaning = CODES[code]
    shown: dict[int, Line] = {line.number: line for line in (*([key] if key else []), *more)}
    lines = sorted(shown.values(), key=lambda line: line.number)[:LINES_MAX]
    return Diagnosis(
        cause=meaning.cause,
        code=code,
        reaction=meaning.reaction or REACTIONS[meaning.cause],
        also_page=meaning.also_page,
        confidence=confidence,
        key_line=None if key is None else _fit_to_show(key),
        lines=tuple(Evidence(line.number, _fit_to_show(line)) for line in lines),
        why=f"{meaning.why}{f'; {note}' if note else ''}",
        change=meaning.change,
        engine=scan.engine,
        restarts=scan.restarts,
    )


_SECRET: Final = re.compile(
    r"\b(hf_|sk-)[\w-]{8,}|((?:api[-_]?key|[a-z_]*token|password|secret|authorization)['\"]?(?:\s*[:=]\s*|\s+)(?:Bearer\s+)?['\"]?)(?=[\w.+/-]*\d)[\w.+/-]{12,}",
    re.IGNORECASE,
)


def _fit_to_show(line: Line) -> str:
    """Cut a line and take keys out of it (S17): an engine prints its arguments, and its hub's answers, in clear."""
    return _SECRET.sub(lambda m: f"{m[1] or m[2]}(redacted)", line.shown)[:SHOWN_MAX]


_MEMORY_XIDS: Final = frozenset({48, 63, 64, 92, 94, 95})
_CRASHES: Final = frozenset({"illegal_memory_access", "launch_failure", "gpu_ecc"})


def _kernel_verdict(scan: Scan) -> Diagnosis | None:
    """Let the kernel speak first: cards that it lost, and processes of the engine that it killed for memory."""
    crashed = [c for c in scan.candidates.values() if c.rule.code in _CRASHES]
    for line in scan.xids:
        for xid in read_xid_lines([line.text])["known"]["xids"]:
            hard = xid["class"] in {"reset", "host", "fabric"}
            if hard or (crashed and xid["code"] in _MEMORY_XIDS):
                code = "gpu_ecc" if xid["code"] in _MEMORY_XIDS else "gpu_lost"
                return _verdict(
                    scan, code, line, "certain", [c.line for c in crashed], f"Xid {xid['code']}"
                )
    if crashed and scan.card_errors:
        first = min(crashed, key=lambda c: c.line.number)
        code = "gpu_ecc" if first.rule.code == "gpu_ecc" else "gpu_lost"
        return _verdict(scan, code, first.line, "likely", scan.card_errors)
    if scan.oom_kills and not any(c.rule.rank is Rank.KERNEL for c in scan.candidates.values()):
        return _verdict(
            scan, "host_memory_limit", scan.died or scan.oom_kills[0], "certain", scan.oom_kills
        )
    return None


def _read(candidate: _Candidate, scan: Scan, flag_history: FlagHistory | None) -> Diagnosis | None:
    """Give the verdict of one candidate; None where its words turn out to prove nothing."""
    code = candidate.rule.code
    if code == "unknown_flag":
        return _unknown_flag(candidate, scan, flag_history)
    reading = _READINGS.get(code)
    told = (code, "", ()) if reading is None else reading(candidate, scan)
    if told is None:
        return None
    code, note, more = told
    sure = candidate.rule.rank >= Rank.SPECIFIC and not note.startswith("probably")
    if code in _MEMORY and _loops(candidate, scan):
        return _verdict(
            scan,
            "restart_loop",
            candidate.line,
            "likely",
            more,
            f"{scan.restarts} restarts, the first cause: {CODES[code].why}",
        )
    confidence = "certain" if sure else "likely"
    if code in _VAGUE:
        confidence = "likely"
    if code == "host_memory_limit":
        confidence = "weak"
    return _verdict(scan, code, candidate.line, confidence, more, note)


def _unknown_flag(candidate: _Candidate, scan: Scan, flag_history: FlagHistory | None) -> Diagnosis:
    flags = re.findall(r"(?<!\S)--[a-z0-9][\w.-]*", candidate.line.text.partition("arguments: ")[2])
    if scan.engine is not None and flag_history is not None and flags:
        told = flag_history(scan.engine, flags[0])
        if told == "older":
            return _verdict(
                scan,
                "removed_flag",
                candidate.line,
                "certain",
                (),
                f"{flags[0]} is in older versions only",
            )
        if told == "newer":
            note = f"{flags[0]} is a flag of newer versions"
            return _verdict(scan, "unknown_flag", candidate.line, "certain", (), note)
    return _verdict(scan, "unknown_flag", candidate.line, "certain")


_VAGUE: Final = frozenset({"launch_failure", "oom_after_weights", "oom_unclear"})

Told = tuple[str, str, Sequence[Line]]
_MEMORY: Final = frozenset(
    {
        "gpu_memory_held",
        "orphan_workers",
        "oom_weights",
        "oom_after_weights",
        "utilization_above_baseline",
    }
)
_FREE: Final = re.compile(
    r"Free memory on device (?:cuda:\d+ )?\(([\d.]+)/([\d.]+) GiB\) on startup.*?\([\d.]+, ([\d.]+) GiB\)"
)
_FREE_SHORT: Final = re.compile(r"Free memory on device (?:cuda:\d+ )?\(([\d.]+)/([\d.]+) GiB\)")


def _loops(candidate: _Candidate, scan: Scan) -> bool:
    """Say whether the same failure came again and again, each time with less memory."""
    falling = len(candidate.frees) >= 2 and all(
        a > b for a, b in zip(candidate.frees, candidate.frees[1:], strict=False)
    )
    return scan.restarts >= 5 or (scan.restarts >= 2 and candidate.times >= 2 and falling)


def _held(scan: Scan, note: str = "") -> Told:
    if scan.left_over:
        return "orphan_workers", "", scan.left_over
    return "gpu_memory_held", note, ()


def _free_memory(candidate: _Candidate, scan: Scan) -> Told:
    """Tell a card that somebody uses from one whose idle use is too high for the fraction."""
    if candidate.line.text.startswith("The memory capacity"):
        return _unbalanced(candidate, scan)
    numbers = _FREE.match(candidate.line.text)
    if numbers is None:
        return _held(scan, "probably: the numbers are cut off")
    free, total, wanted = (float(n) for n in numbers.groups())
    short, used = wanted - free, total - free
    if not scan.left_over and short <= max(0.5, total / 50) and used <= max(1.5, total * 0.12):
        return (
            "utilization_above_baseline",
            f"{used:.2f} GiB of {total:.2f} are in use and it is short by {short:.2f} GiB",
            (),
        )
    return _held(scan)


def _unbalanced(candidate: _Candidate, scan: Scan) -> Told:
    drafts = _draft_lines((*candidate.before[-12:], candidate.line))
    if drafts and (
        candidate.stage.weights_ended or any("/speculative/" in line.shown for line in drafts)
    ):
        return "draft_memory_check", "", drafts
    return _held(scan, "probably: the engine itself only supposes it")


def _draft_lines(lines: Iterable[Line]) -> list[Line]:
    form = re.compile(
        r"\bdraft|eagle_worker|/speculative/|\bmtp\b|multi_layer_eagle|spec_decode/", re.IGNORECASE
    )
    return [line for line in lines if not _ECHO.match(line.text) and form.search(line.text)][:3]


_CAPACITY: Final = re.compile(
    r"total capaci?ty of ([\d.]+) (MiB|GiB) of which ([\d.]+) (bytes|KiB|MiB|GiB) is free"
)
_CAPACITY_OLD: Final = re.compile(
    r"([\d.]+) (MiB|GiB) total capacity; .*?([\d.]+) (bytes|KiB|MiB|GiB) free\b"
)
_OTHERS: Final = re.compile(r"Process (\d+) has ([\d.]+) (MiB|GiB) memory in use")
_OWN: Final = re.compile(r"this process has ([\d.]+) (MiB|GiB) memory in use")
_ALLOCATED: Final = re.compile(
    r"Of the allocated memory ([\d.]+) (MiB|GiB) is allocated by PyTorch"
)
_RESERVED: Final = re.compile(r"([\d.]+) (MiB|GiB) reserved in total by PyTorch")


class _Whose(Enum):
    """Who fills the card."""

    OWN = "the engine itself"
    OTHERS = "others, and the engine is not among those that are listed"
    OTHERS_BESIDE = "others, beside the engine"
    ONE = "one process, which may be the engine itself"
    UNTOLD = "the log does not say"


def _gib(number: str, unit: str) -> float:
    return float(number) * {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}[unit]


def _tells_use(text: str) -> bool:
    return bool(_CAPACITY.search(text) or _CAPACITY_OLD.search(text))


def _accounts(candidate: _Candidate) -> str:
    """Give the words that say who has how much, which another rank may have said."""
    return (candidate.accounts or candidate.line).text


def _out_of_memory(candidate: _Candidate, scan: Scan) -> Told:
    """Say whose memory it was, and what did not fit. Where no line tells, that is the answer: a guess would end or restart the wrong one."""
    stage = candidate.stage
    whose = _whose(_accounts(candidate), stage)
    if (foreign := _foreign(whose, candidate, scan)) is not None:
        return foreign
    if stage.ready and stage.ready > stage.weights_begun:
        return "oom_under_load", "" if whose is _Whose.OWN else _UNTOLD, ()
    if whose is not _Whose.OWN and not stage.weights_begun:
        return _before_weights(candidate, scan, whose)
    note = "" if whose is _Whose.OWN else _UNTOLD
    around = (*candidate.before[-8:], candidate.line, *candidate.after)
    if drafts := _draft_lines(around):
        return "oom_draft", note, drafts
    if stage.weights_ended:
        return "oom_after_weights", note, ()
    if whose is _Whose.OWN:
        return "oom_weights", "", ()
    # Weights were being read; whether the card was empty when that began, nobody said.
    if scan.left_over:
        return _held(scan)
    return "oom_unclear", f"{whose.value}; weights were being read", ()


_UNTOLD: Final = "probably: the log does not say who holds the rest"


def _foreign(whose: _Whose, candidate: _Candidate, scan: Scan) -> Told | None:
    """Give the verdict where a line shows memory that is not the engine's; None where none does."""
    elsewhere = candidate.accounts
    more = [] if elsewhere is None or elsewhere is candidate.line else [elsewhere]
    if whose is _Whose.OTHERS_BESIDE:
        code, note, left = _held(scan)
    elif whose is _Whose.OTHERS:
        code, note, left = _held(scan, "probably: by what the engine counts as its own")
    else:
        return None
    return code, note, (*left, *more)


def _before_weights(candidate: _Candidate, scan: Scan, whose: _Whose) -> Told:
    """Judge a card that was full before the log has a weight: taken by somebody, if this is where the log's server began."""
    if scan.left_over:
        return _held(scan)
    if whose is _Whose.ONE:
        return _held(scan, "probably: one process has it, and no weights were read before")
    if _began(candidate, scan):
        return _held(scan, "probably: no weights were read before")
    return "oom_unclear", "", ()


def _began(candidate: _Candidate, scan: Scan) -> bool:
    """Say whether the log has the start of the server that ran out of memory, so that what is not in it did not happen."""
    return scan.begun is not None and scan.begun.number <= candidate.line.number


def _graphs(candidate: _Candidate, scan: Scan) -> Told:
    """Graphs need the memory that is left, unless a line says that somebody else has it."""
    foreign = _foreign(_whose(_accounts(candidate), candidate.stage), candidate, scan)
    return foreign or ("oom_graph_capture", "", ())


def _whose(text: str, stage: _Stage) -> _Whose:
    """Say who fills the card, by one line's account of it and by how empty it was when loading began."""
    capacity = _CAPACITY.search(text) or _CAPACITY_OLD.search(text)
    if capacity is None:
        return _Whose.UNTOLD
    total, free = _gib(capacity[1], capacity[2]), _gib(capacity[3], capacity[4])
    own = _OWN.search(text) or _ALLOCATED.search(text) or _RESERVED.search(text)
    listed = [_gib(n, unit) for _, n, unit in _OTHERS.findall(text)]
    if own is not None and _gib(own[1], own[2]) < 0.75 * (total - free):
        return _Whose.OTHERS_BESIDE if sum(listed) >= 1.0 else _Whose.OTHERS
    if own is not None or (stage.free_gib is not None and stage.free_gib >= 0.9 * total):
        return _Whose.OWN  # By its own count, or because the card was empty when loading began.
    if stage.free_gib is not None and sum(listed) >= 1.0:
        return _Whose.OTHERS  # It was not: what was in use then is not the engine's.
    if len(listed) > 1 and sum(listed) >= 1.0 and total - free - sum(listed) >= 1.5:
        return _Whose.OTHERS  # What the listed ones do not use is ours.
    # Inside a container the engine does not know its own number among those listed.
    return _Whose.ONE if len(listed) == 1 and listed[0] >= 1.0 else _Whose.UNTOLD


def _scheduler_died(candidate: _Candidate, scan: Scan) -> Told | None:
    """A killed scheduler proves a SIGKILL, not its sender; while it read weights into the host's memory, that is the likeliest."""
    killed = scan.killed is not None and abs(scan.killed.number - candidate.line.number) <= WINDOW
    reading = scan.stage.weights_begun and not scan.stage.ready
    if "is dead" in candidate.line.text and killed and reading and scan.killed is not None:
        return (
            "host_memory_limit",
            "probably: killed from outside while loading; `journalctl -k` would prove it",
            [scan.killed],
        )
    return None


def _watchdog(candidate: _Candidate, scan: Scan) -> Told:  # noqa: ARG001  (the table's signature)
    return ("hang" if candidate.stage.ready else "watchdog_timeout"), "", ()


def _stuck(candidate: _Candidate, scan: Scan) -> Told | None:
    if candidate.rule.rank is Rank.GENERAL and not scan.ended:
        return None
    return "process_unkillable", "", ()


_READINGS: Final[Mapping[str, Callable[[_Candidate, Scan], Told | None]]] = {
    "gpu_memory_held": _free_memory,
    "oom_weights": _out_of_memory,
    "oom_graph_capture": _graphs,
    "host_memory_limit": _scheduler_died,
    "watchdog_timeout": _watchdog,
    "process_unkillable": _stuck,
}
"""Where the same words can mean several things."""


def _stands_still(scan: Scan) -> Diagnosis | None:
    """Find the failures that print no error: no token leaves, or every draft is rejected."""
    if len(scan.broadcasts) >= 2:
        return _verdict(
            scan, "hang", scan.broadcasts[0], "likely", (*scan.standing, *scan.broadcasts)
        )
    if scan.no_tokens is not None:
        return _verdict(scan, "hang", None, "likely", [scan.no_tokens])
    if len(scan.standing) >= 6:
        return _verdict(scan, "hang", None, "likely", scan.standing)
    if not scan.accepted and len(scan.none_accepted) >= 2 and scan.drafted >= 200:
        return _verdict(
            scan, "acceptance_zero", scan.none_accepted[0], "likely", scan.none_accepted
        )
    return None


def _state(scan: Scan, exit_status: int | None) -> Diagnosis:
    """Say how far a server without a failure has come; unknown when it ended, or said something nobody knows."""
    over = scan.ended is not None or bool(exit_status)
    if not over and scan.draining is not None:
        return _verdict(scan, "draining", scan.draining, "certain")
    if not over and scan.ready is not None and not scan.loud:
        if scan.loading is not None:
            return _verdict(scan, "loading", None, "likely", [scan.ready, scan.loading])
        return _verdict(scan, "ready", scan.ready, "certain")
    if not over and scan.loading is not None and not scan.loud:
        return _verdict(scan, "loading", None, "likely", [scan.loading])
    unknown = _verdict(
        scan,
        "unknown",
        None,
        "none",
        [*scan.loud[:4], *([scan.ended] if scan.ended else [])],
        _about_exit(scan, exit_status),
    )
    return unknown if scan.lines else replace(unknown, change=EMPTY)


EMPTY: Final = "look whether it is the log of the right unit, boot and time; nothing is retried"


def _about_exit(scan: Scan, exit_status: int | None) -> str:
    if not scan.lines:
        return "the log is empty"
    if exit_status in {137, -9, 9}:
        return "it was killed by SIGKILL, which says nothing about who sent it: look at `journalctl -k` for the OOM killer"
    if scan.restarts >= 2:
        return f"it was restarted {scan.restarts} times: turn the restarts off before anything else"
    return ""

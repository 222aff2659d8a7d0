"""What a log means: recorded logs of each kind, the same in other clothes, and logs that only look like them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from reconciler.core import diagnose as module
from reconciler.core.diagnose import Diagnosis, Scan, diagnose, judge
from reconciler.core.diagnosis_rules import CODES, REACTIONS, RULES, Cause
from reconciler.engines.catalogue import flag_history

RECORDED = Path(__file__).parents[1] / "recorded" / "engine-logs"
CASES: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(RECORDED / "cases.yaml")["cases"]
FAILURES = [case for case in CASES if case["class"] not in {"ready", "loading", "draining"}]


def read(text: str | Iterable[str], **more: Any) -> Diagnosis:
    lines = text.splitlines() if isinstance(text, str) else text
    return diagnose((line.encode() for line in lines), flag_history=flag_history, **more)


def text_of(case: dict[str, Any]) -> str:
    return (RECORDED / str(case["file"])).read_text()


def named(name: str) -> str:
    return (RECORDED / f"{name}.log").read_text()


def assert_right(case: dict[str, Any], found: Diagnosis) -> None:
    __tracebackhide__ = True
    got = (found.cause.value, found.code, found.reaction.value, found.also_page)
    assert got == (case["class"], case["code"], case["reaction"], case.get("also") == "page")


@pytest.mark.parametrize("case", CASES, ids=[case["file"] for case in CASES])
def test_a_recorded_log_is_read_as_it_should_be(case: dict[str, Any]) -> None:
    """Class, code, reaction and the line that decides are those that a person found."""
    found = read(text_of(case), exit_status=case.get("exit_status"))
    assert_right(case, found)
    assert (case["key_line"] is None) == (found.key_line is None)
    assert (case["key_line"] or "") in (found.key_line or "")


# -- the same in other clothes ----------------------------------------------------------------------------


def _plain(line: str) -> tuple[str, str]:
    """Give who wrote a line of a recorded log, and the line without its carrier."""
    found = re.match(r"\w{3} \d\d [\d:]{8} \S+ ([^:\[ ]+)(?:\[\d+\])?: (.*)", line)
    if found is None:
        return "engine", line
    return (found[1] if found[1] in {"kernel", "systemd"} else "engine"), found[2]


def _pid(who: str) -> str:
    return {"kernel": "", "systemd": "[1]"}.get(who, "[4711]")


CLOTHES: dict[str, Callable[[str, str], str]] = {
    "short": lambda who, said: f"Dec  3 04:05:06 h-1 {who}{_pid(who)}: {said}",
    "short-iso": lambda who, said: f"2027-12-03T04:05:06+0100 h-1 {who}{_pid(who)}: {said}",
    "short-full": lambda who, said: f"Fri 2027-12-03 04:05:06 CET h-1 {who}{_pid(who)}: {said}",
    "short-monotonic": lambda who, said: f"[ 1234.567890] h-1 {who}{_pid(who)}: {said}",
    "short-unix": lambda who, said: f"1827800000.123456 h-1 {who}{_pid(who)}: {said}",
    "json": lambda who, said: json.dumps(
        {
            "MESSAGE": said,
            "SYSLOG_IDENTIFIER": who,
            "_PID": "1" if who == "systemd" else "4711",
            "_TRANSPORT": "kernel" if who == "kernel" else "stdout",
        }
    ),
    "json with bytes": lambda who, said: json.dumps(
        {"MESSAGE": list(f"\x1b[31m{said}\x1b[0m".encode()), "SYSLOG_IDENTIFIER": who, "_PID": "1"}
    ),
    "crlf": lambda who, said: f"Dec  3 04:05:06 h-1 {who}{_pid(who)}: {said}\r",
}
ENGINE_CLOTHES: dict[str, Callable[[str], str]] = {
    "docker logs -t": lambda said: f"2027-12-03T04:05:06.123456789Z {said}",
    "podman logs -t": lambda said: f"2027-12-03T04:05:06+01:00 {said}",
    "docker's file": lambda said: json.dumps({"log": f"{said}\n", "stream": "stderr", "time": "x"}),
    "compose": lambda said: f"vllm-1  | {said}",
    "cri": lambda said: f"2027-12-03T04:05:06.123456789+01:00 stderr F {said}",
    "colours": lambda said: f"\x1b[1;36m{said}\x1b[0m",
}


@pytest.mark.parametrize("clothes", CLOTHES)
def test_journald_in_any_form_changes_nothing(clothes: str) -> None:
    """Each recorded log means the same in every form in which journalctl prints."""
    for case in CASES:
        lines = [CLOTHES[clothes](*_plain(line)) for line in text_of(case).splitlines()]
        assert_right(case, read(lines, exit_status=case.get("exit_status")))


@pytest.mark.parametrize("clothes", ENGINE_CLOTHES)
def test_a_container_runtime_in_front_changes_nothing(clothes: str) -> None:
    """Each recorded log of an engine alone means the same when docker, podman, compose or a CRI wrote it."""
    for case in CASES:
        said = [_plain(line) for line in text_of(case).splitlines()]
        if any(who != "engine" for who, _ in said):
            continue
        lines = [ENGINE_CLOTHES[clothes](line) for _, line in said]
        assert_right(case, read(lines, exit_status=case.get("exit_status")))


VARIATIONS = (
    (r"\bTP\d\b", "TP6"),
    (r"\bpid=\d+", "pid=91234"),
    (r"/srv/venv|/usr/local|/opt/venv\S*|/srv/sglang", "/home/someone/engines/prod"),
    (r"\d\d:\d\d:\d\d", "23:59:59"),
    (r"\b(?:19000|8000|30000)\b", "18443"),
    (r"python3\.\d+", "python3.13"),
    (r"\.py:\d+\]", ".py:7]"),
    (r"Rank \d+", "Rank 12"),
    (r"GPU (\d)\b", r"GPU 1\1"),
)


@pytest.mark.parametrize(("form", "to"), VARIATIONS, ids=[to for _, to in VARIATIONS])
def test_ranks_pids_paths_times_and_ports_do_not_matter(form: str, to: str) -> None:
    """What differs between two hosts with the same failure differs in no diagnosis."""
    for case in CASES:
        assert_right(
            case, read(re.sub(form, to, text_of(case)), exit_status=case.get("exit_status"))
        )


def test_noise_around_a_failure_does_not_hide_it() -> None:
    """Hundreds of dull lines before and after change no diagnosis of a start that failed."""
    noise = (
        '[2026-05-02 11:04:43] INFO:     127.0.0.1:55012 - "GET /metrics HTTP/1.1" 200 OK\n' * 200
    )
    for case in FAILURES:
        found = read(noise + text_of(case) + noise, exit_status=case.get("exit_status"))
        assert_right(case, found)


def test_lines_that_are_skipped_unread_would_have_said_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading every line in full gives the same as reading only those with a word that could matter."""
    quick = [read(text_of(case)) for case in CASES]
    monkeypatch.setattr(Scan, "_dull", lambda _self, raw: b"accept len: " in raw)
    assert [read(text_of(case)) for case in CASES] == quick


# -- logs that only look like it --------------------------------------------------------------------------


ECHOES = {
    "arguments": "[2026-05-02 11:00:00] server_args=ServerArgs(model_path='/m', chat_template='{}')",
    "non-default": "(APIServer pid=1) INFO 10-20 08:00:03 [utils.py:96] non-default args: {{'x': '{}'}}",
    "request": "INFO 05-01 10:00:00 [logger.py:42] Received request cmpl-1: prompt: '{}', params: None",
    "sglang request": "[2026-05-02 11:00:00] Receive: obj=GenerateReqInput(text='{}')",
    "sglang answer": "[2026-05-02 11:00:00] Finish: obj=x, out={{'text': '{}'}}",
    "user": "[2026-05-02 11:00:00] user: {}",
    "prompt": "Prompt: {}",
    "info": "INFO 05-01 10:00:00 [x.py:1] {}",
    "debug": "DEBUG 05-01 10:00:00 [x.py:1] {}",
    "inside a traceback": '    raise ValueError("{}")',
    "quoted": '[2026-05-02 11:00:00 TP0] the documentation says "{}" when that happens',
    "json": '{{"level": "info", "prompt": "{}"}}',
    "command": "+ vllm serve /m --chat-template '{}'",
}


@pytest.mark.parametrize("kind", ECHOES)
def test_words_that_somebody_else_said_decide_nothing(kind: str) -> None:
    """The deciding words in an argument, a prompt, a calm line or a quotation are no failure: the log is unknown."""
    for case in FAILURES:
        if case["key_line"] is None or case["code"] in {
            "acceptance_zero",
            "release_unverified",
            "process_unkillable",
        }:
            continue  # These are calm lines by nature; what they prove is in the next tests.
        line = ECHOES[kind].format(case["key_line"].replace("\n", " "))
        assert read([line, line, line]).code == "unknown", case["file"]


def test_a_prompt_of_many_lines_decides_nothing() -> None:
    """An error that a user pasted into a chat stays the user's, line by line, until the engine speaks again."""
    pasted = """\
INFO 05-01 10:00:00 [logger.py:42] Received request cmpl-1: prompt: "Why do I get this?
Traceback (most recent call last):
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 23.56 GiB of which 402.12 MiB is free.
ValueError: Total number of attention heads (52) must be divisible by tensor parallel size (8).
Thanks", params: SamplingParams(n=1)
INFO 05-01 10:00:05 [loggers.py:257] Engine 000: Avg generation throughput: 96.4 tokens/s, Running: 1 reqs
"""
    assert read(f"INFO:     Application startup complete.\n{pasted}").code == "ready"
    meant = (
        pasted
        + "ERROR 05-01 10:00:06 [core.py:1] ValueError: No available memory for the cache blocks.\n"
    )
    assert read(meant).code == "kv_pool_too_small"


@pytest.mark.parametrize("case", FAILURES, ids=[case["file"] for case in FAILURES])
def test_a_truncated_log_is_right_or_unknown(case: dict[str, Any]) -> None:
    """A log cut anywhere never means another failure with certainty than the whole one."""
    text = text_of(case)
    states = {"unknown", "ready", "loading", "draining"}
    # A flag cut in the middle is another flag, and no less unknown.
    states |= {"unknown_flag"} if case["code"] == "removed_flag" else set()
    for cut in range(0, len(text), 41):
        found = read(text[:cut])
        whole = read(text[: text.find("\n", cut) + 1] if "\n" in text[cut:] else text)
        fine = {case["code"], whole.code, *states}
        weaker = found.confidence in {"likely", "weak"}
        assert found.code in fine or weaker, (cut, found.code)


NEAR_MISSES = {
    "a fraction that fits": "(Worker pid=1) INFO 10-20 08:05:30 [gpu_worker.py:1] Free memory on device (78.50/79.18 GiB) on startup. Desired GPU memory utilization is (0.92, 72.85 GiB).",
    "the sentence cut before its verb": "ValueError: Free memory on device (0.49/79.32 GiB) on startup is",
    "a profile that is positive": "[2025-07-02 07:41:59 TP0] max_total_tokens=131072 is larger than the profiled value 90112. Use the profiled value instead.",
    "an import that is not needed": "[2026-05-02 11:00:00] WARNING: Ignore import error when loading sglang.srt.models.x: /l.so: undefined symbol: _ZN3c10",
    "shared memory once": "INFO 05-02 11:21:51 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds.",
    "a warning at the end": "[rank0]:[W1016 18:12:12.204 ProcessGroupNCCL.cpp:1250] Warning: WARNING: destroy_process_group() was not called before program exit",
    "an architecture of another runner": "WARNING 05-02 11:21:51 [x.py:4] compute capability not in compiled architectures",
    "an application's Xid": "Jul 14 02:05:21 box kernel: NVRM: Xid (PCI:0000:41:00): 31, pid=881, name=python, Ch 0000000f",
    "somebody else's process": "Jul 14 02:05:21 box kernel: Out of memory: Killed process 881 (chromium) total-vm:1kB",
    "an error rate": "[2026-05-02 11:00:00] INFO: error rate 0.00, errors: 0, last error: None",
    "exit 137 of a container": "2026-03-30T10:01:12Z container exit: status 137",
    "a kill": "Sep 05 22:10:01 gpu-e systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL",
    "a scheduler that was killed": "RuntimeError: Rank 5 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.",
    "only echoes": "[2025-03-11 15:02:53] Received sigquit from a child process. It usually means the child failed.",
    "a cause that is elsewhere": "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "a new failure": "ValueError: The frobnicator of rank 3 must be recalibrated before use.",
    "nothing": "",
    "blanks": "\n\n   \n",
}


@pytest.mark.parametrize("kind", NEAR_MISSES)
@pytest.mark.parametrize("exit_status", [1, 137, -9])
def test_a_near_miss_is_unknown(kind: str, exit_status: int) -> None:
    """Words that resemble a failure, and a status of any kind, are never taken for the nearest one."""
    found = read(NEAR_MISSES[kind], exit_status=exit_status)
    assert (found.cause, found.code, found.key_line) == (Cause.UNKNOWN, "unknown", None)
    assert (found.reaction.value, found.also_page, found.confidence) == ("rollback", True, "none")


def test_a_kill_is_no_lack_of_memory() -> None:
    """Exit 137 names the signal and where to look for its sender."""
    assert "journalctl -k" in read("some line", exit_status=137).why


# -- the same words, another meaning ------------------------------------------------------------------------

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. "
BEGIN = "[2026-05-16 12:09:37 TP0] Load weight begin. avail mem={} GB\n"
END = "[2026-05-16 12:10:37 TP0] Load weight end. type=X, avail mem=9 GB\n"


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (BEGIN.format("79.1") + OOM, "oom_weights"),
        (BEGIN.format("31.0") + OOM + "Process 77 has 48.00 GiB memory in use.", "gpu_memory_held"),
        (BEGIN.format("31.0") + OOM + "Including non-PyTorch memory, this process has 78.60 GiB memory in use.", "oom_weights"),
        (BEGIN.format("31.0") + OOM + "Including non-PyTorch memory, this process has 30.00 GiB memory in use.", "gpu_memory_held"),
        (BEGIN.format("79.1") + END + OOM, "oom_after_weights"),
        (BEGIN.format("79.1") + END + '  File "/x/sglang/srt/speculative/eagle_worker.py", line 1\n' + OOM, "oom_draft"),
        (BEGIN.format("79.1") + END + "The server is fired up and ready to roll!\n" + OOM, "oom_under_load"),
        ("INFO 07-28 [core.py:106] Initializing a V1 LLM engine\n" + OOM, "gpu_memory_held"),
    ],
)  # fmt: skip
def test_whose_memory_it_was_decides_what_is_to_be_done(log: str, code: str) -> None:
    """A full card is this spec's fault only where the engine itself filled it."""
    assert read(log).code == code


FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.32 GiB of which 1.00 GiB is free. "
ONE = "Process 1234 has 78.00 GiB memory in use. "
THIS = "Including non-PyTorch memory, this process has {} GiB memory in use. "
OLD = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.32 GiB total capacity; {0} GiB already allocated; 1.00 GiB free; {0} GiB reserved in total by PyTorch)"
LOADING = "(Worker pid=9) INFO 07-28 14:05:52 [gpu_model_runner.py:1] Starting to load model X...\n"
STARTING = "(EngineCore pid=118) INFO 07-28 14:05:52 [core.py:106] Initializing a V1 LLM engine\n"
READY = "INFO:     Application startup complete.\n"
CAPTURE = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total capacity of 80.00 GiB of which 0.20 GiB is free. "


@pytest.mark.parametrize(
    ("log", "code", "confidence"),
    [
        ("CUDA out of memory. Tried to allocate 20 GiB", "oom_unclear", "likely"),
        ("RuntimeError: CUDA error: out of memory", "oom_unclear", "likely"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.", "oom_unclear", "likely"),
        ("allocating 9000.00 MiB on device 0: cudaMalloc failed: out of memory", "oom_unclear", "likely"),
        (FULL, "oom_unclear", "likely"),
        (LOADING + FULL, "oom_unclear", "likely"),
        (LOADING + FULL + ONE, "oom_unclear", "likely"),
        (FULL + ONE, "gpu_memory_held", "likely"),
        (STARTING + FULL, "gpu_memory_held", "likely"),
        (FULL + ONE + THIS.format("0.30"), "gpu_memory_held", "certain"),
        (LOADING + FULL + ONE + THIS.format("0.30"), "gpu_memory_held", "certain"),
        (LOADING + FULL + THIS.format("78.20"), "oom_weights", "certain"),
        (LOADING + OLD.format("78.00"), "oom_weights", "certain"),
        (LOADING + OLD.format("20.00"), "gpu_memory_held", "likely"),
        (READY + FULL, "oom_under_load", "likely"),
        (READY + FULL + THIS.format("78.20"), "oom_under_load", "certain"),
        (READY + FULL + "Process 1234 has 60.00 GiB memory in use. " + THIS.format("18.00"), "gpu_memory_held", "certain"),
        (CAPTURE + THIS.format("79.00"), "oom_graph_capture", "certain"),
        (CAPTURE + "Process 1234 has 60.00 GiB memory in use. " + THIS.format("19.00"), "gpu_memory_held", "certain"),
        (LOADING + "CUDA out of memory. Tried to allocate 1 GiB.\n" + FULL + ONE + THIS.format("0.30"), "gpu_memory_held", "certain"),
    ],
)  # fmt: skip
def test_only_a_line_that_shows_whose_memory_it_was_makes_it_certain(
    log: str, code: str, confidence: str
) -> None:
    """Out of memory is somebody else's, or the spec's, with certainty only where the log accounts for the card; else that is left open."""
    found = read(log)
    assert (found.code, found.confidence) == (code, confidence)
    assert found.key_line is not None
    if code == "oom_unclear":
        assert (found.cause, found.known, found.also_page) == (Cause.UNKNOWN, True, True)
        assert "free" not in found.why


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        ("NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.", "gpu_lost"),
        ("NVRM: Xid (PCI:0000:41:00): 48, pid=1, An uncorrectable double bit error", "gpu_ecc"),
        ("NVRM: Xid (PCI:0000:41:00): 94, pid=1, Contained: SM (0x1). RST: No", "gpu_ecc"),
        ("NVRM: Xid (PCI:0000:41:00): 31, pid=1, MMU Fault", "illegal_memory_access"),
        ("Memory cgroup out of memory: Killed process 1 (sglang::detoken) total-vm:1kB", "host_memory_limit"),
        ("Memory cgroup out of memory: Killed process 1 (chromium) total-vm:1kB", "illegal_memory_access"),
    ],
)  # fmt: skip
def test_the_kernel_outranks_the_engine(kernel: str, code: str) -> None:
    """An Xid of a broken card and the OOM killer decide over what the engine says; an application's own Xid does not."""
    log = named("sglang-spec-illegal-access-at-capture")
    assert read(log, kernel=[kernel]).code == code
    assert read(f"{log}Jul 14 08:06:31 h kernel: {kernel}\n").code == code
    assert read(f"{log}[12345.678901] {kernel}\n").code == code


def test_a_pasted_xid_in_the_engines_own_words_is_no_kernel_line() -> None:
    """The engine's stream cannot speak for the kernel."""
    line = "Jul 14 08:06:31 h sglang[12]: NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus."
    assert read(line).code == "unknown"


def test_a_later_ready_voids_what_was_before() -> None:
    """A server that came up had no failure, whatever an earlier try said."""
    log = named("vllm-free-memory-gpu-occupied")
    assert read(f"{log}INFO:     Application startup complete.\n").code == "ready"
    assert read(f"{log}INFO:     Application startup complete.\n{log}").code == "gpu_memory_held"


def test_uvicorn_is_no_sign_of_ready_in_sglang() -> None:
    """SGLang serves HTTP minutes before it is ready."""
    log = "[2024-12-13 01:45:02] INFO:     Application startup complete.\n[2024-12-13 01:45:02] INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)\n"
    assert read(log, engine="sglang").code == "unknown"
    assert read(log).code == "unknown"


def test_a_specific_line_goes_before_a_general_one_and_a_cause_before_its_echo_elsewhere() -> None:
    """What another rank saw of a failure never hides the failure."""
    log = named("sglang-gloo-peer-closed") + named("sglang-graph-capture-oom")
    assert read(log).code == "oom_graph_capture"
    shm = named("vllm-nccl-shm-create").splitlines()
    assert read(reversed(shm)).code == "shm_too_small"


@pytest.mark.parametrize("restarts", [0, 1, 2, 40])
def test_a_loop_that_eats_memory_is_recognised_from_its_second_restart(restarts: int) -> None:
    """The same failure with less free memory each time is a loop: stop it, call a person."""
    log = ""
    for turn in range(restarts + 1):
        if turn:
            log += f"May 23 04:01:13 h systemd[1]: v.service: Scheduled restart job, restart counter is at {turn}.\n"
        log += f"May 23 04:01:11 h v[9]: ValueError: Free memory on device cuda:0 ({60 - turn}.00/121.63 GiB) on startup is less than desired GPU memory utilization (0.85, 103.38 GiB).\n"
    expected = ("restart_loop", "page") if restarts >= 2 else ("gpu_memory_held", "release_retry")
    found = read(log)
    assert (found.code, found.reaction.value) == expected


def test_a_flag_of_a_newer_version_is_not_called_removed() -> None:
    """Only a flag that the newest version lacks and an older one had was removed."""
    line = "sglang serve: error: unrecognized arguments: {} x"
    assert read(line.format("--mamba-scheduler-strategy")).code == "removed_flag"
    newer = read(line.format("--mamba-radix-cache-strategy"))
    assert (newer.code, "newer" in newer.why) == ("unknown_flag", True)
    assert read(line.format("--frob")).code == "unknown_flag"


def test_secrets_in_a_log_are_not_repeated() -> None:
    """S17: keys that an engine printed stay out of what is shown and stored."""
    log = "OSError: You are trying to access a gated repo. token=hf_abcdefghijklmnopqrstu1 api_key='a1b2c3d4e5f6g7h8' Authorization: Bearer abcdef1234567890"
    found = read(log)
    assert found.key_line is not None
    assert not re.search("abcdef|a1b2c3", found.key_line + str(found.lines))


# -- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filler", ["x", "'", '"', " ", "(", "a: ", "Error: ", "{", "\x1b[", "12:34:56 "]
)
def test_a_line_of_ten_million_characters_costs_nothing(filler: str) -> None:
    """One endless line is cut, whatever it repeats, and the next one is read."""
    scan = Scan()
    scan.feed((filler * (10_000_000 // len(filler)) + "Error").encode())
    scan.feed(b"Error: memory " + filler.encode() * 5000)
    scan.feed(b"ValueError: No available memory for the cache blocks.")
    assert judge(scan).code == "kv_pool_too_small"


def test_memory_stays_bounded() -> None:
    """Thousands of lines that all matter leave no more behind than a few."""
    scan = Scan()
    for number in range(2_000):
        scan.feed(
            f"ERROR 05-01 10:00:00 [x.py:1] ValueError: odd {number} Error {chr(97 + number % 26)}".encode()
        )
        scan.feed(
            b"Jul 14 02:05:21 box kernel: NVRM: Xid (PCI:0000:41:00): 31, pid=881, name=python"
        )
    kept = [len(v) for v in vars(scan).values() if isinstance(v, list | dict | tuple)] + [
        len(scan.recent)
    ]
    assert max(kept) <= module.SHAPES_MAX
    assert all(len(c.after) <= module.WINDOW for c in scan.candidates.values())


def test_bytes_that_are_no_text_are_read_past() -> None:
    """Broken UTF-8 and control characters neither stop the reading nor reach the output."""
    found = read_bytes(
        b"\xff\xfe\x00\x01 broken \x1b]0;title\x07\nValueError: No available memory for the cache blocks.\x07\x1b[0m\n"
    )
    assert found.code == "kv_pool_too_small"
    assert found.key_line == "ValueError: No available memory for the cache blocks."


def read_bytes(data: bytes) -> Diagnosis:
    return diagnose(data.split(b"\n"))


# -- the tables -----------------------------------------------------------------------------------------------


def test_every_code_has_a_reaction_and_every_rule_a_code() -> None:
    """The tables know each other, and the words are those of the recorded cases."""
    assert {rule.code for rule in RULES} <= set(CODES)
    assert set(REACTIONS) == set(Cause)
    for case in CASES:
        meaning = CODES[case["code"]]
        assert meaning.cause.value == case["class"]
    for code, meaning in CODES.items():
        assert all((meaning.why, meaning.change)), code

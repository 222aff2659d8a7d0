"""`reconcile bench`: recorded streams, any server by its URL, and what it says of bad ones."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_server import Asked, Drop, Reply, chat_chunk, chat_parts, event, ordinary, serving
from ruamel.yaml import YAML

from reconciler.cli.main import main
from reconciler.core.benchmark import METRICS

RECORDED = Path(__file__).parents[1] / "recorded" / "sse-streams"
CASES: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(RECORDED / "cases.yaml")["cases"]
SMALL = ["--concurrency", "1,3", "--requests", "6", "--max-tokens", "4"]


@pytest.fixture
def reconcile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["reconcile", *words])
        with pytest.raises(SystemExit) as end:
            main()
        heard = capsys.readouterr()
        return int(end.value.code or 0), heard.out, heard.err

    return run


Reconcile = Callable[..., tuple[int, str, str]]


def test_every_recorded_stream_is_read_by_the_command(reconcile: Reconcile) -> None:
    """All 40 cases give exactly the keys and values of cases.yaml as JSON."""
    assert len(CASES) == 40
    wrong = {}
    for case in CASES:
        words = ("--replay", str(RECORDED / case["file"]), "--request", json.dumps(case["request"]))
        code, text, talk = reconcile("bench", *words, "-o", "json")
        told = json.loads(text)
        # JSON has no keys but text: choices are counted by theirs.
        expected = json.loads(json.dumps(case["expect"]))
        found = {key: told.get(key) for key in expected}
        if (code, talk, found) != (0, "", expected):
            wrong[case["id"]] = (code, talk, found)
    assert wrong == {}


def test_a_failed_stream_that_was_read_is_no_failure_of_the_command(reconcile: Reconcile) -> None:
    """Exit 0 whatever the recorded stream says, as `read` and `diagnose` do; what it says is in `outcome`, and --help says so."""
    failed = next(case for case in CASES if case["expect"]["outcome"] == "failed")
    code, text, _ = reconcile("bench", "--replay", str(RECORDED / failed["file"]))
    assert (code, "outcome: failed" in text) == (0, True)
    assert "With --replay 0 whatever the stream says" in " ".join(
        reconcile("bench", "--help")[1].split()
    )


def test_a_reading_is_shown_to_people_too(reconcile: Reconcile) -> None:
    """Without -o json each key has its line, and no control character of the stream reaches a terminal."""
    code, text, _ = reconcile("bench", "--replay", str(RECORDED / CASES[0]["file"]))
    assert code == 0
    assert "outcome: ok" in text.splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to measure"),
        (("qwen", "--url", "http://127.0.0.1:1"), "exclude each other"),
        (("--url", "ftp://x"), "is no URL of a server"),
        (("--url", "http://u:secret@127.0.0.1:1"), "a key belongs into a file"),
        (("--url", "http://127.0.0.1:99999"), "is no URL"),
        (("--url", "http://127.0.0.1:1", "--concurrency", "0"), "--concurrency 0"),
        (("--url", "http://127.0.0.1:1", "--concurrency", "1,x"), "--concurrency"),
        (("--url", "http://127.0.0.1:1", "--mix", "code"), "--mix code"),
        (("--url", "http://127.0.0.1:1", "--mix", "poems=1", "--model", "m", "--engine", "vllm"), "no prompt is of class poems"),
        (("--url", "http://127.0.0.1:1", "--from", "host"), "needs a server of the specs"),
        (("--url", "http://127.0.0.1:1", "--api-key-file", "/no/such"), "cannot be read"),
        (("--url", "http://127.0.0.1:1", "--workload", "/no/such", "--model", "m", "--engine", "vllm"), "is no file"),
        (("--replay", "/no/such"), "cannot be read"),
        (("--replay", str(RECORDED / "cases.yaml"), "--request", "[]"), "no JSON object"),
        (("--replay", str(RECORDED / "cases.yaml"), "--request", '{"n": "2"}'), "n must be of type int"),
        (("--replay", str(RECORDED / "cases.yaml"), "--request", '{"endpoint": "x"}'), "endpoint is chat"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_usage(reconcile: Reconcile, words: tuple[str, ...], said: str) -> None:
    """Exit 64 with what is wrong; nothing on standard output, and no secret in the message."""
    code, text, talk = reconcile("bench", *words)
    assert (code, text) == (64, "")
    assert said in talk
    assert "secret" not in talk


def test_a_recording_that_is_none_is_said(reconcile: Reconcile, tmp_path: Path) -> None:
    """A JSON list that holds no packets is usage, not a traceback."""
    path = tmp_path / "x.json"
    path.write_text("[1, 2]")
    code, _, talk = reconcile("bench", "--replay", str(path))
    assert code == 64
    assert "neither a response body nor" in talk


def _listing(answer: Callable[[Asked], Reply]) -> Callable[[Asked], Reply]:
    def with_models(asked: Asked) -> Reply:
        if asked.path == "/v1/models":
            listed = json.dumps({"data": [{"id": "tiny", "owned_by": "sglang"}]}).encode()
            return Reply([listed], content_type="application/json", framing="length")
        return answer(asked)

    return with_models


def test_a_server_is_measured_by_its_url(reconcile: Reconcile) -> None:
    """JSON with a version, a row a level, every round, every metric; the model is asked for; nothing but reads and completions is sent."""
    with serving(_listing(ordinary)) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        code, text, talk = reconcile("bench", "--url", url, *SMALL, "-o", "json")
    told = json.loads(text)
    assert (code, told["format_version"], told["kind"]) == (0, "1.0", "benchmark")
    assert [row["concurrency"] for row in told["levels"]] == [1, 3]
    assert [(r["run"], r["round"]) for r in told["results"]] == [
        (run, number) for number in (1, 2, 3) for run in ("c1", "c3")
    ]
    assert set(METRICS) <= set(told["levels"][0]) | set(told["results"][0])
    assert told["facts"] == {"model": "tiny", "engine": "sglang", "api": "chat"}
    assert {a.path for a in server.asked} == {"/v1/models", "/v1/chat/completions"}
    assert {a.body.get("model") for a in server.asked[1:]} == {"tiny"}
    assert "temperature" not in server.asked[-1].body  # The model's own generation config decides.
    assert "c3, round 3" in talk


def test_a_benchmark_is_shown_as_table_and_bars(reconcile: Reconcile) -> None:
    """Off a terminal: plain lines, no escape sequence; percentiles that the sample cannot support are marked."""
    with serving(ordinary) as server:
        words = ("--url", f"http://127.0.0.1:{server.port}", "--model", "m", "--engine", "custom")
        code, text, talk = reconcile("bench", *words, *SMALL)
    assert code == 0
    assert "\x1b" not in text + talk
    assert "STREAMS" in text
    assert "tokens a second, all streams" in text
    assert "####" in text
    assert "~ too few requests" in text


def test_the_duration_bounds_a_level(reconcile: Reconcile) -> None:
    """With a duration nothing more is sent after it, and what is under way is waited for."""
    with serving(ordinary) as server:
        words = ("--url", f"http://127.0.0.1:{server.port}", "--model", "m", "--engine", "custom")
        code, text, _ = reconcile(
            "bench", *words, "-c", "2", "--duration", "0.3", "--max-tokens", "2", "-o", "json"
        )
    row = json.loads(text)["levels"][0]
    assert code == 0
    assert row["completed"] == row["sent"] >= 6


def test_a_key_from_a_file_is_sent_and_never_shown(reconcile: Reconcile, tmp_path: Path) -> None:
    """The bearer token travels in its header and is in no output (S17)."""
    key = tmp_path / "key"
    key.write_text("sesame-42\n")
    with serving(_listing(ordinary)) as server:
        words = ("--url", f"http://127.0.0.1:{server.port}", "--api-key-file", str(key))
        code, text, talk = reconcile("bench", *words, *SMALL, "-o", "json")
    assert code == 0
    assert {a.headers["authorization"] for a in server.asked} == {"Bearer sesame-42"}
    assert "sesame" not in text + talk


def _no_usage(asked: Asked) -> Reply:
    return Reply(chat_parts([f" {n}" for n in range(4)], usage=False))


def _garbled(asked: Asked) -> Reply:
    return Reply(chat_parts(["!" * 8] * 8))


def _dropping(asked: Asked) -> Reply:
    return Reply([chat_chunk("a"), Drop()])


def _moved(asked: Asked) -> Reply:
    return Reply([b""], status=307, framing="length")


def _page(asked: Asked) -> Reply:
    return Reply([b"<html>Welcome</html>"], content_type="text/html", framing="length")


def _too_long(asked: Asked) -> Reply:
    refusal = json.dumps({"error": {"message": "maximum context length is 8"}}).encode()
    return Reply([refusal], status=400, framing="length")


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (_no_usage, 8, "told no believable token count"),
        (_garbled, 1, "are garbled"),
        (_dropping, 1, "truncated"),
        (_moved, 7, "sent on to"),
        (_page, 1, "no event stream but text/html"),
        (_too_long, 7, "longer than the server takes"),
        (lambda _: Reply([event("[DONE]")]), 1, "empty"),
    ],
    ids=["no usage", "garbled", "dropping", "moved", "page", "too long", "nothing"],
)
def test_a_bad_server_is_told_in_a_line_and_an_exit_code(
    reconcile: Reconcile, answer: Callable[[Asked], Reply], code: int, said: str
) -> None:
    """What is wrong with the answers, or with our asking, decides the exit code and is said."""
    with serving(answer) as server:
        words = ("--url", f"http://127.0.0.1:{server.port}", "--model", "m", "--engine", "custom")
        found, text, _ = reconcile("bench", *words, *SMALL)
    assert found == code, text
    assert said in text


def test_no_server_is_exit_seven(reconcile: Reconcile) -> None:
    """A refused connection was no measurement."""
    with serving(ordinary) as server:
        url = f"http://127.0.0.1:{server.port}"
    code, text, _ = reconcile("bench", "--url", url, *SMALL)
    assert code == 7
    assert "not measured: no connection" in text


def test_progress_on_a_terminal_stays_in_one_line(
    reconcile: Reconcile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the progress overwrites itself and is gone at the end."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with serving(ordinary) as server:
        words = ("--url", f"http://127.0.0.1:{server.port}", "--model", "m", "--engine", "custom")
        reconcile("bench", *words, *SMALL)
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[2K")

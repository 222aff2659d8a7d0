"""Other tools as gates: what is taken over, what never is, and how they end."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_server import ordinary, serving
from ruamel.yaml import YAML

from reconciler.bench.load_plan import Endpoint, LoadPlan, Prompt
from reconciler.bench.rounds import run_gate
from reconciler.bench.runners import READERS, last_object, result_of
from reconciler.core.gate import VerdictKind, judge
from reconciler.core.measurement import ReasonCode
from reconciler.core.spec import Gate
from reconciler.effects.runner import RESULT_FILES, Runner, RunnerMeter, filled
from reconciler.settings import RunnerCommand

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded" / "runners"
PLAN = LoadPlan("r", (Prompt("a", "x"),), 16, 64, 128, round=1)
ENDPOINT = Endpoint("127.0.0.1", 8000, "chat", "tiny", bearer="sesame")


REQUESTS = {"vllm.json": 17, "command.txt": 64}
"""Of the recorded runs; the others sent 16."""


def _result(name: str) -> Any:
    kind = name.partition(".")[0]
    plan = replace(PLAN, requests=REQUESTS.get(name, 16))
    return result_of(kind, (RECORDED / name).read_bytes(), plan, ENDPOINT)


@pytest.mark.parametrize(
    ("name", "sent", "completed", "ttft", "e2e", "output_tps"),
    [
        ("sglang.jsonl", 16, 16, 0.03077, None, 342.6),
        ("sglang.rust.jsonl", 16, 12, 0.02634, None, 364.8),
        ("vllm.json", 17, 13, None, 0.26, 298.3),
        ("guidellm.json", 16, 16, 0.03217, None, None),
        ("aiperf.json", 16, 16, 0.06228, 0.2738, None),
        ("inference-perf.json", 16, 16, None, None, None),
        ("command.txt", 32, 32, 0.081, None, 812.5),
    ],
)
def test_only_figures_that_mean_the_same_are_taken_over(
    name: str, sent: int, completed: int, ttft: float, e2e: float, output_tps: float
) -> None:
    """No TPOT becomes a decode speed, no retokenized count a throughput, no lifetime acceptance a run's."""
    result = _result(name)
    assert (result.sent, result.completed, result.infrastructure) == (sent, completed, None)
    found = (result.ttft.p50, result.e2e.p50, result.output_tps)
    assert [v and float(f"{v:.4g}") for v in found] == [ttft, e2e, output_tps]
    if name != "command.txt":
        assert result.decode_tps.count == 0
        assert result.accept_length is None


def test_a_run_that_was_ended_early_is_no_measurement() -> None:
    """What aiperf had when it was cancelled is not what was asked for (S22)."""
    told = json.loads((RECORDED / "aiperf.json").read_text())
    for ended in ({"was_cancelled": True}, {"is_complete": False}):
        result = result_of("aiperf", json.dumps(told | ended).encode(), PLAN, ENDPOINT)
        assert result.infrastructure is ReasonCode.RUNNER


def test_the_example_commands_are_settings_and_every_word_in_braces_is_filled() -> None:
    """Each kind that has an example is one of ours, and nothing in braces is left but JSON."""
    text = (ROOT / "examples" / "runners" / "settings.yaml").read_text()
    examples = YAML(typ="safe").load(text)["runners"]
    assert set(examples) == set(READERS) - {"command"}
    for raw in examples.values():
        command = RunnerCommand.model_validate(raw)
        words = filled(command.argv, PLAN, ENDPOINT, Path("/o"))
        assert not [word for word in words if "{" in word.replace('{"stream_options": {', "")]
        assert "/o" in " ".join(words)


@pytest.mark.parametrize(("kind", "name"), RESULT_FILES.items())
def test_a_tool_that_writes_a_folder_is_read_by_the_name_of_its_file(kind: str, name: str) -> None:
    """Of aiperf and inference-perf, which want a folder, the result is found in it; one without is no verdict."""
    code = (
        "import pathlib, shutil, sys; f = pathlib.Path(sys.argv[1]) / 'deep'; f.mkdir(parents=True);"
        "(f / 'config.json').write_text('{}'); len(sys.argv) > 2 and shutil.copy(sys.argv[2], f / sys.argv[3])"
    )
    plan = replace(PLAN, requests=16)
    argv = (sys.executable, "-c", code, "{output}")
    environ = {"PATH": os.environ["PATH"]}
    recorded = (str(RECORDED / f"{kind}.json"), name)
    found = RunnerMeter(Runner("it", kind, (*argv, *recorded)), environ).measure(
        plan, ENDPOINT, None
    )
    assert (found.completed, found.infrastructure_message) == (16, "")
    empty = RunnerMeter(Runner("it", kind, argv), environ).measure(plan, ENDPOINT, None)
    assert empty.infrastructure is ReasonCode.RUNNER


def test_every_kind_has_a_recorded_output() -> None:
    """A reader without one would not be tested."""
    assert {p.name.partition(".")[0] for p in RECORDED.iterdir()} - {"README"} == set(READERS)


@pytest.mark.parametrize("kind", sorted(READERS))
@pytest.mark.parametrize(
    "output",
    [b"", b"no json", b"[]", b"{}", b'{"completed": -1}', b'{"completed": "64"}', b'{"completed": NaN}', b"\xff\xfe{", b'{"a":' * 9000],
)  # fmt: skip
def test_what_cannot_be_read_is_no_verdict(kind: str, output: bytes) -> None:
    """S22: no output, half an output and nonsense are infrastructure errors."""
    result = result_of(kind, output, PLAN, ENDPOINT)
    assert result.infrastructure is ReasonCode.RUNNER
    assert result.output_tps is None


def test_the_object_is_found_among_talk() -> None:
    """The whole, the last line, or what follows the talk."""
    assert last_object(b'{\n "a": 1\n}') == {"a": 1}
    assert last_object(b'hello\n{"a": 1}\nbye') == {"a": 1}
    assert last_object(b'hello\n{\n "a": 2\n}') == {"a": 2}
    assert last_object(b"hello") is None


def test_a_limit_on_what_a_runner_does_not_measure_stays_open() -> None:
    """Missing is inconclusive, never passed; a percentile of a runner is refused in the spec."""
    run = {"name": "r", "concurrency": 16, "requests": 64, "max_tokens": 128, "runner": "x"}
    gate = Gate.model_validate({"runs": [run | {"min_decode_tps": 10}]})
    verdict = judge(gate, [_result("sglang.jsonl")] * 3)
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    with pytest.raises(ValueError, match="runner's own percentile"):
        Gate.model_validate({"runs": [run | {"max_ttft_p95": "1s"}]})


def _meter(code: str, timeout_s: float = 30.0, *more: str) -> RunnerMeter:
    argv = (sys.executable, "-c", code, *more)
    return RunnerMeter(Runner("mine", "command", argv, timeout_s), {"PATH": os.environ["PATH"]})


def test_a_command_is_given_what_it_needs() -> None:
    """Words in braces are filled in, each argument stays one; the key is in the environment and in no argument (S17)."""
    words = filled(("{url}/v1", "{model} {concurrency}", "$(x)"), PLAN, ENDPOINT, Path("/o"))
    assert words == ("http://127.0.0.1:8000/v1", "tiny 16", "$(x)")
    code = (
        "import json, os, sys; assert os.environ['OPENAI_API_KEY'] == 'sesame'; assert 'sesame' not in str(sys.argv);"
        "json.dump({'completed': 64, 'output_tps': 5.0}, open(sys.argv[1], 'w')); print('done')"
    )
    result = _meter(code, 30.0, "{output}").measure(PLAN, ENDPOINT, None)
    assert (result.infrastructure_message, result.output_tps) == ("", 5.0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no tokenizer')", "ended with 1: no tokenizer"),
        ("print('hello')", "printed no JSON object"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
    ],
)
def test_a_command_that_fails_is_no_verdict(code: str, said: str) -> None:
    """Its own last words are told (S22)."""
    result = _meter(code).measure(PLAN, ENDPOINT, None)
    assert result.infrastructure is ReasonCode.RUNNER
    assert said in result.infrastructure_message


def test_a_command_that_is_not_there_is_said() -> None:
    """Named, and nothing is run."""
    meter = RunnerMeter(Runner("mine", "command", ("no-such-program",)), {"PATH": "/usr/bin"})
    assert "no program 'no-such-program'" in meter.measure(PLAN, ENDPOINT, None).infrastructure_message  # fmt: skip


def test_a_command_is_ended_with_everything_it_started(tmp_path: Path) -> None:
    """One that hangs, ignores SIGTERM and left a child behind: all of its session is gone when the round is over."""
    note = tmp_path / "child"
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)']);"
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)"
    )
    result = _meter(code, 1.5, str(note)).measure(PLAN, ENDPOINT, None)
    assert "did not end within 1.5 s" in result.infrastructure_message
    stat = Path(f"/proc/{note.read_text()}/stat")
    state = stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "gone"
    assert state in {"gone", "Z"}


def test_an_interrupted_gate_leaves_no_runner(tmp_path: Path) -> None:
    """Whatever the progress callback raises ends the command too."""
    note = tmp_path / "pid"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"

    def stop(progress: object) -> None:
        if note.exists() and note.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _meter(code, 30.0, str(note)).measure(PLAN, ENDPOINT, stop)
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_a_gate_mixes_own_runs_and_runners() -> None:
    """A run with a runner is measured by it, the others by our client, and one verdict is given."""
    figures = json.dumps({"completed": 6, "sent": 6, "output_tps": 50.0})
    runs = [
        {"name": "ours", "concurrency": 1, "requests": 3, "max_tokens": 4},
        {"name": "theirs", "concurrency": 2, "requests": 6, "max_tokens": 4, "runner": "mine", "min_output_tps": 40},
    ]  # fmt: skip
    gate = Gate.model_validate({"runs": runs, "quality": "off"})
    with serving(ordinary) as server:
        endpoint = Endpoint("127.0.0.1", server.port, "chat", "m")
        meter = _meter(f"print({figures!r})")
        outcome = run_gate(gate, endpoint, None, deadline_s=60, runners={"mine": meter})
    assert outcome.verdict.kind is VerdictKind.PASS
    assert {r.client.split()[0] for r in outcome.results if r.run == "theirs"} == {"runner"}

"""Other benchmark tools as gates: started here, in a session of their own, and ended with everything that they started.

Which commands there are is the operator's to say (settings, `runners`); a spec only names one. A run that a runner
measures is judged like any other, by what the runner's words have in common with ours.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reconciler.bench.ask import flush_prefix_cache
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress
from reconciler.bench.runners import OUTPUT_LIMIT, broken, result_of
from reconciler.core.measurement import RunResult

KILL_AFTER_S = 3.0
"""Between the polite end and the other one. A tool's services do not listen to their parent's death."""

RESULT_FILES = {
    "aiperf": "profile_export_aiperf.json",
    "inference-perf": "summary_lifecycle_metrics.json",
}
"""What tools call their result that want a folder and not a file to write to."""

_POLL_S = 0.2
_TAIL_BYTES = 400


@dataclass(frozen=True, slots=True)
class Runner:
    """A command of the operator's. Words in braces are filled in: url, model, concurrency, requests, max_tokens, output.

    `output` is a path in a fresh folder, for a file or for a folder of the tool's; where there is nothing at the end,
    standard output is read. Environment
    is the operator's; the server's key goes into OPENAI_API_KEY, never into an argument.
    """

    name: str
    kind: str
    argv: tuple[str, ...]
    timeout_s: float = 900.0


@dataclass(frozen=True, slots=True)
class RunnerMeter:
    """A `bench.meter.Meter` for runs that a runner measures; questions are asked by our own client."""

    runner: Runner
    environ: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic

    def measure(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: Callable[[Progress], None] | None
    ) -> RunResult:
        """Run the command once and read what it printed."""
        limit_s = min(self.runner.timeout_s, plan.deadline_s or self.runner.timeout_s)
        with tempfile.TemporaryDirectory(prefix="reconcile-runner-") as folder:
            output = Path(folder) / "result.json"
            argv = filled(self.runner.argv, plan, endpoint, output)
            stdout = Path(folder) / "stdout"
            status = self._run(
                argv, endpoint, stdout, limit_s=limit_s, plan=plan, on_progress=on_progress
            )
            if isinstance(status, str):
                return broken(plan, f"runner {self.runner.name}: {status}")
            said = _read(stdout)
            if status != 0:
                tail = said[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
                return broken(plan, f"runner {self.runner.name} ended with {status}: {tail}")
            found = _read(_result_file(output, self.runner.kind)) if output.exists() else said
            return result_of(self.runner.kind, found, plan, endpoint)

    def ask(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: Callable[[Progress], None] | None
    ) -> tuple[RunResult, Mapping[int, str]]:
        """Give no texts: a runner shows none."""
        return self.measure(plan, endpoint, on_progress), {}

    def flush(self, endpoint: Endpoint) -> bool:
        """Empty the prefix cache."""
        return flush_prefix_cache(endpoint)

    def _run(
        self,
        argv: Sequence[str],
        endpoint: Endpoint,
        stdout: Path,
        *,
        limit_s: float,
        plan: LoadPlan,
        on_progress: Callable[[Progress], None] | None,
    ) -> int | str:
        program = shutil.which(argv[0], path=self.environ.get("PATH"))
        if program is None:
            return f"there is no program {argv[0]!r} here"
        key = {"OPENAI_API_KEY": endpoint.bearer} if endpoint.bearer else {}
        with stdout.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - the operator's own command, no shell
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=stdout.parent,
                env={**self.environ, **key},
                start_new_session=True,
            )
            try:
                return self._waited(process, stdout, limit_s, plan, on_progress)
            finally:
                _end_group(process)

    def _waited(
        self,
        process: subprocess.Popen[bytes],
        stdout: Path,
        limit_s: float,
        plan: LoadPlan,
        on_progress: Callable[[Progress], None] | None,
    ) -> int | str:
        due = self.clock() + limit_s
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if self.clock() >= due:
                    return f"did not end within {limit_s:g} s; it and what it started were ended"
                if stdout.stat().st_size > OUTPUT_LIMIT:
                    return "printed too much; it and what it started were ended"
                if on_progress is not None:
                    on_progress(Progress(plan.run, plan.round, plan.requests, 0, 0))


def filled(
    argv: Sequence[str], plan: LoadPlan, endpoint: Endpoint, output: Path
) -> tuple[str, ...]:
    """Fill the words in braces in; each argument stays one argument."""
    scheme = "https" if endpoint.tls else "http"
    words = {
        "{url}": f"{scheme}://{endpoint.authority}{endpoint.prefix}",
        "{host}": endpoint.host,
        "{port}": str(endpoint.port),
        "{model}": endpoint.model or "",
        "{concurrency}": str(plan.concurrency),
        "{requests}": str(plan.requests),
        "{max_tokens}": str(plan.max_tokens),
        "{output}": str(output),
    }
    return tuple(_filled(word, words) for word in argv)


def _filled(argument: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        argument = argument.replace(word, value)
    return argument


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the command's whole session: first asked, then made to. What left the session is not ours to find."""
    for number, wait_s in ((signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        due = time.monotonic() + wait_s
        while time.monotonic() < due and _lives(process):
            time.sleep(0.05)
    process.wait()


def _lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # Collects the leader, whose group may live on without it.
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _result_file(output: Path, kind: str) -> Path:
    """Give the file that a tool wrote: `{output}` itself, or the one of its name below it where that became a folder."""
    if not output.is_dir():
        return output
    named = RESULT_FILES.get(kind, "")
    return next((path for path in sorted(output.rglob("*.json")) if path.name == named), output)


def _read(path: Path) -> bytes:
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        return file.read(OUTPUT_LIMIT)

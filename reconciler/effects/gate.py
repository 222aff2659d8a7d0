"""The real gate: the benchmark client against the server's port, reached through the host's own connection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from reconciler.bench.load_plan import Endpoint, Prompt
from reconciler.bench.meter import LOCAL, Meter
from reconciler.bench.rounds import GateOutcome, run_gate
from reconciler.bench.workloads import load_prompts, mixed
from reconciler.core.desired import Target
from reconciler.core.errors import HostError, UsageError
from reconciler.core.gate import Reason, Row, Verdict, VerdictKind
from reconciler.core.live import Known
from reconciler.core.measurement import Baseline, ReasonCode, RunResult
from reconciler.core.revision import restored
from reconciler.core.spec import Gate, Server
from reconciler.effects.bench import bearer_of, endpoint_of, on_the_host
from reconciler.effects.host import ConnectedHost
from reconciler.effects.host_meter import HostMeter
from reconciler.effects.perform import observe
from reconciler.effects.ports import GateReport, HostPort
from reconciler.engines.base import Engine

OBSERVE_DEADLINE_S = 30.0


def measure(
    target: Target,
    engine: Engine,
    host: HostPort,
    baseline: Mapping[str, Any] | None,
    *,
    deadline_s: float,
    on_progress: Callable[[str], None],
    workloads: Path | None = None,
    runners: Mapping[str, Meter] | None = None,
) -> GateReport:
    """Measure the server that runs `target`, and judge it; see `GateRunner`.

    `workloads` has the operator's prompt files, `runners` the operator's other benchmark tools.

    What is not a measurement (no connection, a stored baseline that cannot be read) is an error or is left out, never
    a verdict about the revision (S22).
    """
    server = restored(json.loads(target.spec), {engine.name: engine})
    if server is None or server.gate is None:
        return GateReport(
            "error", "the recorded spec has no gate that this version can read", {"kind": "gate"}
        )
    facts = {"gpus": ",".join(target.gpu_uuids), "model": server.model or ""}
    try:
        outcome = outcome_of(
            server,
            server.gate,
            host,
            stored_baseline(baseline),
            deadline_s=deadline_s,
            on_progress=on_progress,
            facts=facts,
            workloads=workloads,
            runners=runners,
        )
    except UsageError as error:
        return GateReport("error", f"the gate cannot be run: {error}", {"kind": "gate"})
    except HostError as error:
        return GateReport(
            "error", f"the server could not be reached for the gate: {error}", {"kind": "gate"}
        )
    return report_of(outcome, target.revision)


def outcome_of(
    server: Server,
    gate: Gate,
    host: HostPort,
    baseline: Baseline | None,
    *,
    deadline_s: float,
    on_progress: Callable[[str], None],
    go_on: Callable[[Sequence[RunResult]], bool] = lambda _results: False,
    facts: Mapping[str, str] = MappingProxyType({}),
    workloads: Path | None = None,
    runners: Mapping[str, Meter] | None = None,
) -> GateOutcome:
    """Measure a server that is up under a gate that need not be its own; see `rounds.run_gate`.

    Raises:
        UsageError: The gate asks for prompts, or a runner, that are not there.
        HostError: The host, or its key file, cannot be reached.
    """
    prompts = _prompts(gate, workloads)
    _check_runners(gate, runners or {})
    faked = faked_acceptance(server, host)
    if faked:
        return _refused(faked)
    with _reached(server, gate, host, facts) as (endpoint, meter):
        return run_gate(
            gate,
            endpoint,
            baseline,
            deadline_s=deadline_s,
            on_progress=lambda progress: on_progress(str(progress)),
            meter=meter,
            prompts=prompts,
            speculative=json.dumps(server.speculative, sort_keys=True)
            if server.speculative
            else "",
            go_on=go_on,
            runners=runners,
        )


@contextmanager
def _reached(
    server: Server, gate: Gate, host: HostPort, facts: Mapping[str, str]
) -> Iterator[tuple[Endpoint, Meter]]:
    """Give the way to the server and who measures: this process, or the client on the host where the gate says so."""
    if gate.measured_from == "host" and isinstance(host, ConnectedHost):
        with HostMeter(host.name, host.inner.transport).running() as meter:
            yield on_the_host(server, bearer=bearer_of(server, host), facts=facts), meter
        return
    with endpoint_of(server, host, facts=facts) as endpoint:
        yield endpoint, LOCAL


def _prompts(gate: Gate, workloads: Path | None) -> tuple[Prompt, ...]:
    """Give the operator's prompts that a gate names; none where it takes those that are shipped.

    A spec names a file of the operator's folder and no path: a repository must not choose what is read here.
    """
    if gate.prompts is None:
        return ()
    if workloads is None:
        raise UsageError(
            f"gate.prompts: {gate.prompts} needs the setting `workloads`, the folder of prompt files"
        )
    prompts = load_prompts(workloads / f"{gate.prompts}.jsonl")
    return mixed(prompts, gate.mix) if gate.mix else prompts


def _check_runners(gate: Gate, runners: Mapping[str, Meter]) -> None:
    """Refuse a runner that the operator does not have, and one that would have to run on another machine."""
    for run in gate.runs:
        if run.runner is None:
            continue
        if run.runner not in runners:
            known = ", ".join(sorted(runners)) or "none"
            raise UsageError(
                f"run {run.name}: there is no runner {run.runner!r} in the settings; there are: {known}"
            )
        if gate.measured_from == "host":
            raise UsageError(f"run {run.name}: runners run here, and `gate.from` says host")


# What makes an engine report an acceptance that it does not have; the specs refuse both as well.
_FAKES = re.compile(
    r"(?:SGLANG_)?SIMULATE_ACC_\w*=.*|.*rejection_sample_method\W+synthetic.*|.*synthetic_acceptance.*"
    r"|LLAMA_ARG_SPEC_SYNTH_\w*=.*|--spec-synth-.*",
    re.DOTALL,
)


def faked_acceptance(server: Server, host: HostPort) -> str:
    """Name what in the live environment or command line fakes the acceptance of drafts, or give "".

    Units inherit variables of their manager, which no spec shows. What cannot be read is not known to be free of it:
    that matters, and is said, only where the spec speculates.
    """
    if server.speculative is None:
        return ""
    asked = {"server": server.name, "unit": server.unit, "port": server.listen.port}
    args = {
        "servers": [{**asked, "invocation_lines": 0}],
        "kernel_cursor": None,
        "paths": [],
        "users": [],
        "gpus": False,
    }
    live = observe(host, args, deadline_s=OBSERVE_DEADLINE_S).servers.get(server.name)
    words: tuple[str, ...] = ()
    for part in (live.environment, live.argv) if live is not None else ():
        words += part.value if isinstance(part, Known) else ()
    return next((word[:120] for word in words if _FAKES.fullmatch(word)), "")


def _refused(faked: str) -> GateOutcome:
    message = (
        f"the gate refuses to measure: the server runs with {faked!r}, which fakes the acceptance of speculative decoding. "
        "Take it away and apply again"
    )
    return GateOutcome(Verdict(VerdictKind.FAIL, (Reason(ReasonCode.FAKED, message),)), (), 0)


def stored_baseline(baseline: Mapping[str, Any] | None) -> Baseline | None:
    """Read the measurement out of a gate's evidence; None where there is none that this version can read."""
    content = (baseline or {}).get("baseline")
    if not isinstance(content, Mapping):
        return None
    try:
        return Baseline.from_json(content)
    except (KeyError, TypeError, ValueError):
        return None


def report_of(outcome: GateOutcome, revision: str) -> GateReport:
    """Give the outcome as evidence for the record; the rounds in it are the next gate's baseline."""
    verdict = outcome.verdict
    message = "; ".join(r.message for r in verdict.reasons) or summary(outcome)
    evidence: dict[str, Any] = {
        "version": 1,
        "kind": "gate",
        "message": message,
        "judgement": verdict.to_json(),
        "rounds": outcome.rounds,
        "took_s": round(outcome.took_s, 3),
    }
    if verdict.kind is VerdictKind.PASS:
        evidence["baseline"] = outcome.as_baseline(revision).to_json()
    return GateReport(verdict.kind.value, message, evidence)


def summary(outcome: GateOutcome) -> str:
    """Say in a line what was measured, for a gate that passed."""
    rows = [row_words(r) for r in outcome.verdict.rows if r.measured is not None]
    return "; ".join(rows) or f"{outcome.rounds} rounds, no limit set"


def row_words(row: Row) -> str:
    """Say one result beside what it had to be; that nothing failed is said as that."""
    assert row.measured is not None
    where = "" if row.run == "all" else f"{row.run} "
    if row.key == "max_error_rate":
        share = "no request" if not row.measured else f"{row.measured:.2%} of requests"
        return f"{where}{share} failed ({'none' if not row.bound else f'{row.bound:.2%}'} may)"
    side = "at least" if row.key.startswith("min_") else "at most"
    return f"{where}{row.key} {row.measured:g} ({side} {row.bound:g})"

"""The real gate: the benchmark client against the server's port, reached through the host's own connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from reconciler.bench.load_plan import Api, Endpoint
from reconciler.bench.rounds import GateOutcome, run_gate
from reconciler.core.desired import Target
from reconciler.core.errors import HostUnreachableError, OutcomeUnknownError
from reconciler.core.gate import VerdictKind
from reconciler.core.measurement import Baseline
from reconciler.core.revision import restored
from reconciler.core.spec import Server
from reconciler.effects.ports import GateReport, HostPort, Request
from reconciler.engines.base import Engine, served_name

KEY_DEADLINE_S = 20.0


def measure(
    target: Target,
    engine: Engine,
    host: HostPort,
    baseline: Mapping[str, Any] | None,
    *,
    deadline_s: float,
    on_progress: Callable[[str], None],
) -> GateReport:
    """Measure the server that runs `target`, and judge it; see `GateRunner`.

    What is not a measurement (no connection, a stored baseline that cannot be read) is an error or is left out, never
    a verdict about the revision (S22).
    """
    server = restored(json.loads(target.spec), {engine.name: engine})
    if server is None or server.gate is None:
        return GateReport(
            "error", "the recorded spec has no gate that this version can read", {"kind": "gate"}
        )
    try:
        with host.reach(server.listen.port) as address:
            endpoint = Endpoint(
                host=address.host,
                port=address.port,
                api=api_of(server),
                model=served_name(server),
                bearer=_bearer(server, host),
                engine=engine.name,
                tunnelled=True,
            )
            outcome = run_gate(
                server.gate,
                endpoint,
                _stored(baseline),
                server_info={"gpus": ",".join(target.gpu_uuids), "model": server.model or ""},
                deadline_s=deadline_s,
                on_progress=lambda progress: on_progress(str(progress)),
            )
    except (HostUnreachableError, OutcomeUnknownError) as error:
        return GateReport(
            "error", f"the server could not be reached for the gate: {error}", {"kind": "gate"}
        )
    return report_of(outcome, target.revision)


def api_of(server: Server) -> Api:
    """Say which of OpenAI's two forms the gate speaks: completions, unless a custom engine says that it only chats."""
    return "chat" if getattr(server.engine.options, "api", None) == "openai-chat" else "completions"


def _stored(baseline: Mapping[str, Any] | None) -> Baseline | None:
    content = (baseline or {}).get("baseline")
    if not isinstance(content, Mapping):
        return None
    try:
        return Baseline.from_json(content)
    except (KeyError, TypeError, ValueError):
        return None


def _bearer(server: Server, host: HostPort) -> str | None:
    """Fetch the API key for the time of the gate: over the host's own connection, into memory, nowhere else."""
    if server.listen.api_key is None:
        return None
    request = Request("api-key", {"server": server.name, "path": server.listen.api_key.file})
    answer = host.call(request, deadline_s=KEY_DEADLINE_S)
    if answer.outcome != "done":
        raise HostUnreachableError(
            host.name, f"the API key could not be read on the host: {answer.message}"
        )
    return str(answer.data["key"])


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
    rows = [
        f"{r.run} {r.key} {r.measured:g} (limit {r.bound:g})"
        for r in outcome.verdict.rows
        if r.measured is not None
    ]
    return "; ".join(rows) or f"{outcome.rounds} rounds, no limit set"

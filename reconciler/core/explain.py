"""Why a rollout's server failed: the diagnosis of its journal and the kernel's lines, tied into the failure.

`rollout.py` asks for one longer look before it acts on a failure, and hands it here. A known cause is said in the failure's sentence,
and so stands in the outcome, in the host's history and beside the rejected revision. It also settles what the unit's exit status leaves
open: a cause in the host, or in somebody else's memory or port, is no verdict about the revision (S22); one in the spec or the engine is,
however the process ended.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from reconciler.core.attempt import Failure, Phase
from reconciler.core.conditions import Reason
from reconciler.core.desired import Target
from reconciler.core.diagnose import Diagnosis, diagnose
from reconciler.core.diagnosis_rules import Cause
from reconciler.core.live import Known, LiveHost, LiveServer

PHASES: Final = frozenset({Phase.START, Phase.READY, Phase.GATE, Phase.COMMIT})
REASONS: Final = frozenset(
    {
        Reason.DIED,
        Reason.DIED_LATER,
        Reason.RESTART_LOOP,
        Reason.READY_TIMEOUT,
        Reason.GATE_FAILED,
        Reason.WRONG_ANSWER,
    }
)
QUOTED_MAX: Final = 240

_ITS_OWN: Final = frozenset({Cause.CONFIG_ERROR, Cause.ENGINE_FAULT})
_NOT_ITS_OWN: Final = frozenset({Cause.HOST_FAULT, Cause.RESOURCE_BUSY, Cause.TRANSIENT})

_AFTER_PROOF: Final = frozenset({"gpu_memory_held", "orphan_workers"})
"""What a log takes for somebody else's memory. This rollout has proven the cards free a moment before the start, so it settles
nothing here: the unit's own end decides, else a server that does not fit would be tried, and the old one stopped, again and again."""


def explicable(failure: Failure) -> bool:
    """Say whether the server's own words can tell more about a failure."""
    return failure.phase in PHASES and failure.reason in REASONS


def explained(failure: Failure, target: Target | None, live: LiveHost) -> Failure:
    """Give the failure with what the journal and the kernel say of it; as it is where they say nothing that is known."""
    found = live.server(failure.server)
    if not isinstance(found.journal, Known):
        return failure
    told = diagnose(
        (line.encode() for line in _lines(found)),
        engine=_engine(target),
        exit_status=_exit_status(found),
        kernel=_kernel(live),
        flag_history=None
        if target is None
        else lambda _, flag: dict(target.flag_history).get(flag),
    )
    if not (told.known and told.failure):
        return failure
    return replace(
        failure,
        sentence=f"{failure.sentence}. {_sentence(told)}",
        rejects=_rejects(failure, told),
        code=told.code,
    )


def _rejects(failure: Failure, told: Diagnosis) -> bool:
    """Say whether this is a verdict about the revision. A guess moves nothing; a gate's own numbers yield to a broken host alone."""
    if told.confidence not in {"certain", "likely"} or told.code in _AFTER_PROOF:
        return failure.rejects
    measured = failure.reason in {Reason.GATE_FAILED, Reason.WRONG_ANSWER}
    if told.cause in _NOT_ITS_OWN and not (measured and told.cause is not Cause.HOST_FAULT):
        return False
    return failure.rejects or told.cause in _ITS_OWN


def _sentence(told: Diagnosis) -> str:
    line = f': "{told.key_line[:QUOTED_MAX]}"' if told.key_line else ""
    page = "; a person is needed" if told.reaction.value == "page" or told.also_page else ""
    return f"Cause: {told.code} ({told.cause.value.replace('_', ' ')}, {told.confidence}): {told.why}{line}. What to do: {told.change}{page}"


def _lines(found: LiveServer) -> tuple[str, ...]:
    """Give the journal, with systemd's own lines about the unit as systemd's."""
    lines = found.journal.value if isinstance(found.journal, Known) else ()
    prefix = f"{found.unit_name}: "
    own = "Jan  1 00:00:00 host systemd[1]: "
    return tuple(
        f"{own}{part}" if line.startswith(prefix) else part
        for line in lines
        for part in line.splitlines()
    )


def _engine(target: Target | None) -> str | None:
    """Give the engine's name out of the recorded spec."""
    try:
        engine = json.loads(target.spec)["engine"] if target is not None and target.spec else None
    except (ValueError, KeyError, TypeError):
        return None
    name = engine.get("name") if isinstance(engine, dict) else engine
    return name if isinstance(name, str) and name != "custom" else None


def _exit_status(found: LiveServer) -> int | None:
    unit = found.unit.value if isinstance(found.unit, Known) else None
    if unit is None or not unit.exec_main_code:
        return None
    return unit.exec_main_status if unit.exec_main_code == 1 else -unit.exec_main_status


def _kernel(live: LiveHost) -> tuple[str, ...]:
    known = (live.raw.get("kernel") or {}).get("known") or {}
    return tuple(str(line) for line in known.get("lines") or ())

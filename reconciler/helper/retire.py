"""The verb `retire`: end what a host knows of a server whose spec is gone, once it is down. What it served from stays on disk.

The unit goes (when it is ours), the bindings go, so that its unit, port and GPUs are free for others; revisions, history and
journal stay, and a spec of the same name takes the server back. Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

from typing import Any, Dict

from reconciler.helper.guard import phase_reading, same_bytes
from reconciler.helper.machine import Refused
from reconciler.helper.observe import produced_by
from reconciler.helper.protocol import Act
from reconciler.helper.readings import unit_phase
from reconciler.helper.records import (
    PERMANENT,
    bound_gpus,
    claim_path,
    read_json,
    refused_path,
    state_path,
)


def retire_server(act: Act) -> Dict[str, Any]:
    """Take a server that is down out of what this host runs, and keep its bytes."""
    machine, changes = act.machine, act.changes
    bindings = act.record("bindings")
    if bindings is None and act.record("retired") is not None:
        return {"removed": False}  # Done before; its answer was lost.
    unit = act.bound_unit()
    if act.record("protect") is not None and act.args.get("protected") is not True:
        raise Refused("Protected", f"{act.server} is protected on this host; say so to end it")
    if act.record("intent") is not None:
        raise Refused("RolloutUnderWay", f"a rollout of {act.server} was left half-way")
    props = phase_reading(machine.unit(unit), unit)
    if unit_phase(props) not in ("down", "not-found"):
        raise Refused("UnitActive", f"{unit} is {unit_phase(props)}; it is stopped first")
    path = f"{PERMANENT}/{unit}"
    ours = machine.kind(path) == "file" and same_bytes(
        machine.read(path), produced_by(machine, act.server)
    )
    if ours:
        changes.disable(unit)
        changes.remove(path, 0o644)
    changes.remove(refused_path(unit))
    for uuid in bound_gpus(bindings):
        claim = read_json(machine, claim_path(uuid))
        if claim is not None and claim.get("server") == act.server:
            changes.remove(claim_path(uuid))
    for name in ("secrets.env", "secrets.yaml"):
        changes.remove(state_path(act.server, name))
    for name in machine.listdir(state_path(act.server, "sealed")):
        changes.remove(state_path(act.server, f"sealed/{name}"))
    changes.put_record(act.server, "retired", {"bindings": bindings, "at": machine.walltime()})
    changes.drop_record(act.server, "protect")
    changes.drop_record(act.server, "bindings")
    changes.reload()
    act.after = {"unit": unit, "removed": ours}
    return {"removed": ours}


__all__ = ["retire_server"]

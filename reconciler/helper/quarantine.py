"""GPUs that cannot be proven usable, the proofs that lift that, and what a person is shown of a wedged one.

A card is quarantined by a rollout or a release that ended wedged or with a fault, and stays so until a proof of
release passes: a person's `reconcile release`, or the host's own, made by the tick where waiting can cure it. While it
lasts the guard refuses every start on the card. Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

from typing import Any, Dict, List

from reconciler.helper.machine import Busy, Machine, Refused
from reconciler.helper.observe import json_lines, need_root, release_sample
from reconciler.helper.protocol import Act
from reconciler.helper.readings import SETTLE_SAMPLES_MIN, classify_holder, released
from reconciler.helper.records import (
    GPU_ID,
    QUARANTINE,
    RECORD_VERSION,
    RUN,
    STATE,
    bad,
    baselines_on,
    encoded,
    matching,
    quarantined_on,
    read_json,
    record_of,
    text_of,
    texts_of,
    whole_of,
)

RELEASES = f"{STATE}/releases.ndjson"
TRIES = f"{RUN}/quarantine-tries.json"
RELEASES_KEPT = 100
PROOF_CAP = 256 * 1024
REASONS_CAP = 10
PIDS_CAP = 64
LIFT_SETTLE_S = 2.0
LIFT_GAP_S, LIFT_GAP_MAX_S = (
    15.0,
    300.0,
)  # A wedged driver is asked rarely: each probe is one client more.


def show_evidence(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return what can be seen of processes that do not die, and the GPU drivers' last kernel lines."""
    return {"evidence": machine.evidence(pids_of(args))}


def pids_of(args: Dict[str, Any]) -> List[int]:
    """Return the pids that a request asks about."""
    pids = args.get("pids") or []
    if not isinstance(pids, list) or len(pids) > PIDS_CAP:
        raise bad(f"pids is not a list of at most {PIDS_CAP}")
    return [whole_of(pid, "pid", 1, 2**31) for pid in pids]


def quarantine_gpus(act: Act) -> Dict[str, Any]:
    """Record that GPUs cannot be proven usable, with what can be seen of why."""
    uuids = [matching(GPU_ID, u, "GPU UUID") for u in texts_of(act.args.get("gpus"), "gpus")]
    kind = act.args.get("kind")
    if kind not in ("wedged", "fault"):
        raise bad("kind is neither wedged nor fault")
    reasons = [text[:500] for text in texts_of(act.args.get("reasons") or [], "reasons")]
    mark = {
        "kind": kind,
        "reasons": reasons[:REASONS_CAP],
        "evidence": act.machine.evidence(pids_of(act.args)),
        "server": act.server,
    }
    put_in_quarantine(act, uuids, mark)
    act.after = {"quarantined": uuids}
    return {"quarantined": uuids}


def put_in_quarantine(act: Act, uuids: List[str], mark: Dict[str, Any]) -> None:
    """Write the mark of each card; the oldest moment stays."""
    machine = act.machine
    marks = quarantined_on(machine)
    cards = {g["uuid"]: g for g in (machine.gpus().get("known") or {}).get("gpus", [])}
    for uuid in uuids:
        old = marks.get(uuid) or {}
        marks[uuid] = dict(
            mark,
            since=old.get("since") or machine.walltime(),
            boot_id=machine.boot_id(),
            minor=cards.get(uuid, {}).get("minor", old.get("minor")),
        )
    act.changes.write(QUARANTINE, encoded(dict(marks, version=RECORD_VERSION)))


def note_release(act: Act) -> Dict[str, Any]:
    """Keep a proof of release, lift the quarantine of what it proves free, and set it where it proves a fault.

    The judgement is the controller's: it sees both layers. Every start is judged again here by the guard.
    """
    need_root(act.machine)
    proof = record_of(act.args.get("proof"), "proof")
    if len(encoded(proof)) > PROOF_CAP:
        raise bad(f"proof is larger than {PROOF_CAP} bytes")
    cards = proof.get("gpus")
    if not isinstance(cards, list):
        raise bad("proof has no list of gpus")
    marks = quarantined_on(act.machine)
    lifted = []
    for card in cards:
        uuid = matching(GPU_ID, record_of(card, "gpu").get("uuid"), "GPU UUID")
        verdict = card.get("verdict")
        if verdict == "released" and marks.pop(uuid, None) is not None:
            lifted.append(uuid)
    act.changes.write(QUARANTINE, encoded(dict(marks, version=RECORD_VERSION)))
    for card in cards:
        if card.get("verdict") in ("wedged", "fault"):
            reasons = [text_of(r, "reason")[:500] for r in card.get("reasons") or []][:REASONS_CAP]
            mark = {"kind": card["verdict"], "reasons": reasons, "evidence": card.get("evidence")}
            put_in_quarantine(act, [card["uuid"]], dict(mark, server=card.get("server") or ""))
    append_release(act, proof)
    act.after = {"lifted": lifted}
    return {"lifted": lifted, "quarantined": sorted(quarantined_on(act.machine))}


def append_release(act: Act, proof: Dict[str, Any]) -> None:
    """Append one proof to the host's history of releases; the newest stay."""
    lines = (act.machine.read(RELEASES) or b"").splitlines()
    line = encoded(dict(proof, version=RECORD_VERSION, at=act.machine.walltime()))
    kept = [*lines, line][-RELEASES_KEPT:]
    while len(kept) > 1 and sum(map(len, kept)) > 2 * 1024 * 1024:
        kept.pop(0)
    act.changes.write(RELEASES, b"\n".join(kept) + b"\n")


def last_releases(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the newest proofs of release, oldest first."""
    count = whole_of(args.get("count", 1), "count", 1, RELEASES_KEPT)
    return {"releases": json_lines(machine.read(RELEASES) or b"")[-count:]}


# -- lifted by the host itself -------------------------------------------------------------------------


def lift_proven(machine: Machine) -> None:
    """Prove quarantined cards free where waiting can cure them, and lift the mark of those that are.

    A fault (an Xid that asks for a reset, a recovery action) is cured by no waiting, only by a boot or by a
    person; a wedge may free itself. The scan of /proc comes first: while somebody holds the card, the driver is
    not asked at all.
    """
    marks = quarantined_on(machine)
    if not marks:
        return
    try:
        with machine.lock(0):
            for uuid in sorted(marks):
                if may_be_cured(machine, marks[uuid]) and due_again(machine, uuid):
                    prove_one(machine, uuid, marks[uuid])
    except Busy:
        return


def may_be_cured(machine: Machine, mark: Dict[str, Any]) -> bool:
    """Say whether time or a boot can have cured a card, and nobody is seen on it."""
    if mark.get("kind") != "wedged" and mark.get("boot_id") == machine.boot_id():
        return False
    scan = machine.holders().get("known") or {}
    if not scan.get("complete"):
        return False
    context = {"boot_id": machine.boot_id(), "protect": protected_on(machine)}
    return not any(
        mark.get("minor") in holder["minors"]
        for holder in scan["holders"]
        if classify_holder(holder, context)[0] != "infra"
    )


def protected_on(machine: Machine) -> List[str]:
    """Return what this host's settings protect."""
    host = read_json(machine, f"{STATE}/host.json") or {}
    return list(host.get("protect") or [])


def due_again(machine: Machine, uuid: str) -> bool:
    """Say whether it is time to ask the driver again; the gap doubles with each try."""
    tries = read_json(machine, TRIES) or {}
    mine = tries.get(uuid) or {}
    now = machine.boottime()
    if now < float(mine.get("next_boottime", 0)):
        return False
    count = int(mine.get("count", 0)) + 1
    gap = min(LIFT_GAP_MAX_S, LIFT_GAP_S * 2 ** min(count, 8))
    tries[uuid] = {"count": count, "next_boottime": now + gap}
    machine.write(TRIES, encoded(dict(tries, version=RECORD_VERSION)))
    return True


def prove_one(machine: Machine, uuid: str, mark: Dict[str, Any]) -> None:
    """Take the samples of one settle window and lift the mark if they prove the card free."""
    cursor = (machine.kernel_log(None).get("known") or {}).get("cursor")
    identity = machine.identity().get("known") or {}
    context = {
        "boot_id": machine.boot_id(),
        "protect": protected_on(machine),
        "container": identity.get("container"),
    }
    samples: List[Dict[str, Any]] = []
    for number in range(SETTLE_SAMPLES_MIN):
        if number:
            machine.sleep(LIFT_SETTLE_S / (SETTLE_SAMPLES_MIN - 1))
        samples.append(release_sample(machine, None, cursor))
    judged = released(samples, [uuid], baselines_on(machine), context, LIFT_SETTLE_S - 0.05)
    if judged["verdict"] != "released":
        return
    marks = quarantined_on(machine)
    marks.pop(uuid, None)
    act = Act(machine, "", {})
    act.changes.write(QUARANTINE, encoded(dict(marks, version=RECORD_VERSION)))
    proof = {
        "by": "host",
        "gpus": [{"uuid": uuid, "verdict": "released", "reasons": [], "was": mark.get("reasons")}],
    }
    append_release(act, proof)


def refuse_quarantined(machine: Machine, uuids: List[str]) -> None:
    """Refuse a start on a card that cannot be proven usable."""
    marks = quarantined_on(machine)
    for uuid in uuids:
        if uuid in marks:
            why = "; ".join(map(str, marks[uuid].get("reasons") or ["no reason recorded"]))
            raise Refused("GpuQuarantined", f"GPU {uuid} is quarantined: {why[:400]}", uuid=uuid)


__all__ = ["lift_proven", "note_release", "quarantine_gpus", "refuse_quarantined"]

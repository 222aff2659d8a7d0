"""The two acts that a person consents to by name in one run: restart a container, reset GPUs.

Both are for a card that nothing else frees, both can hurt others, and so each looks at everything it needs to be safe
under the lock of the machine that it runs on (the outermost layer) and refuses what it does not know. Part of the
shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional

from reconciler.helper.guard import check_claim
from reconciler.helper.machine import Machine, Refused
from reconciler.helper.observe import need_root
from reconciler.helper.protocol import Act
from reconciler.helper.quarantine import protected_on
from reconciler.helper.readings import (
    cgroup_owner,
    classify_holder,
    pci_address,
    read_xid_lines,
)
from reconciler.helper.records import (
    GPU_ID,
    UNIT_NAME,
    bad,
    known_value,
    matching,
    quarantined_on,
    texts_of,
    whole_of,
)

RESET_ACTIONS = ("Reset", "Drain and Reset")
BLOCKING = ("reset", "host", "fabric", "unknown")
# What runs in any container with a systemd of its own, and serves nobody outside of it.
BASE_UNITS = re.compile(
    r"(systemd-.*|dbus(-broker)?|ssh|sshd|ssh@.*|cron|crond|rsyslog|.*getty@.*|networking|ifup@.*|"
    r"user@.*|polkit|reconciler-.*)\.service"
)


def named_gpus(act: Act) -> List[str]:
    """Return the UUIDs that a request names, at least one."""
    uuids = [matching(GPU_ID, u, "GPU UUID") for u in texts_of(act.args.get("gpus"), "gpus")]
    if not uuids or len(set(uuids)) != len(uuids):
        raise bad("gpus names none, or one twice")
    return uuids


def cards_named(machine: Machine, uuids: List[str]) -> Dict[str, Dict[str, Any]]:
    """Return all cards of this machine; every named one must be among them."""
    cards = {g["uuid"]: g for g in known_value(machine.gpus(), "what the GPUs say")["gpus"]}
    for uuid in uuids:
        if uuid not in cards or cards[uuid].get("minor") is None:
            raise Refused("GpuMissing", f"GPU {uuid} is not there")
    return cards


def complete_scan(machine: Machine) -> List[Dict[str, Any]]:
    """Return who holds GPUs, of a scan that left nobody out."""
    scan = known_value(machine.holders(), "who holds the GPUs")
    if not scan.get("complete") or scan.get("unreadable"):
        raise Refused("Unknown", f"{scan.get('unreadable')} processes could not be looked into")
    holders: List[Dict[str, Any]] = scan["holders"]
    return holders


# -- rung 8: restart a container -----------------------------------------------------------------------


def restart_one_container(act: Act) -> Dict[str, Any]:
    """Restart the container that holds GPUs, if it holds them alone and runs nothing but our units."""
    machine = act.machine
    need_root(machine)
    vmid = whole_of(act.args.get("vmid"), "vmid", 100, 999_999_999)
    uuids = named_gpus(act)
    ours = [matching(UNIT_NAME, u, "unit name") for u in texts_of(act.args.get("units"), "units")]
    state = known_value(machine.container(vmid), f"container {vmid}")
    if state.get("lock"):
        raise Refused("ContainerLocked", f"container {vmid} is locked ({state['lock']})")
    if state.get("status") != "running":
        raise Refused("ContainerNotRunning", f"container {vmid} is {state.get('status')}")
    minors = {cards_named(machine, uuids)[uuid]["minor"] for uuid in uuids}
    context = {"boot_id": machine.boot_id(), "protect": protected_on(machine)}
    inside_holders = 0
    for holder in complete_scan(machine):
        if classify_holder(holder, context)[0] == "infra" or not minors & set(holder["minors"]):
            continue
        if not in_container(holder.get("cgroup"), vmid):
            raise Refused(
                "ForeignHolder",
                f"pid {holder['pid']} ({holder.get('exe')}, in {holder.get('cgroup')}) holds one of the GPUs from outside container {vmid}",
            )
        inside_holders += 1
    if not inside_holders:
        raise Refused(
            "NoHolder", f"nobody in container {vmid} holds these GPUs: a restart frees nothing"
        )
    others = other_units(machine, vmid, ours)
    if others:
        raise Refused(
            "ContainerShared",
            f"container {vmid} also runs {', '.join(others[:10])}: it is not restarted",
            units=others,
        )
    act.before = {"container": state}
    answer = known_value(machine.restart_container(vmid), f"the restart of container {vmid}")
    act.after = {"exit_status": answer["exit_status"]}
    if answer["exit_status"] != 0:
        said = (answer["stderr"].strip() or answer["stdout"].strip())[-400:]
        raise Refused(
            "RestartFailed", f"pct reboot {vmid} ended with {answer['exit_status']}: {said}"
        )
    return {"restarted": vmid, "state": machine.container(vmid)}


def in_container(cgroup: Optional[str], vmid: int) -> bool:
    """Say whether a control group lies in a container, by either name that LXC gives it."""
    path = f"{cgroup or ''}/"
    return path.startswith((f"/lxc/{vmid}/", f"/lxc.payload.{vmid}/"))


def other_units(machine: Machine, vmid: int, ours: List[str]) -> List[str]:
    """Return the services in a container that are neither ours nor what every container runs."""
    found = set()
    seen = 0
    for group in (f"/lxc/{vmid}", f"/lxc.payload.{vmid}"):
        for process in known_value(machine.processes(group), f"what runs in container {vmid}"):
            seen += 1
            unit = cgroup_owner(str(process.get("cgroup")))["unit"]
            if unit and unit not in ours and not BASE_UNITS.fullmatch(unit):
                found.add(unit)
    if not seen:
        raise Refused("Unknown", f"what runs in container {vmid} cannot be seen")
    return sorted(found)


# -- rung 9: reset GPUs --------------------------------------------------------------------------------


def reset_named_gpus(act: Act) -> Dict[str, Any]:
    """Reset GPUs that nobody uses, and look at what came back."""
    machine = act.machine
    need_root(machine)
    uuids = named_gpus(act)
    identity = known_value(machine.identity(), "which machine this is")
    if identity.get("container") is not None:
        raise Refused(
            "InContainer", "GPUs are reset on the machine that has them, not in a container"
        )
    cards = cards_named(machine, uuids)
    facts = known_value(machine.reset_facts(), "what a reset would touch")
    check_cards(machine, uuids, cards, facts, proven=act.args.get("proven") is True)
    check_nobody(machine, uuids, cards)
    log = known_value(machine.kernel_log(None), "the kernel log")
    act.before = {"gpus": uuids}
    said = reset_between(machine, uuids, cards)
    act.after = {"said": said["stdout"][-400:], "exit_status": said["exit_status"]}
    if said["exit_status"] != 0 or "was successfully reset" not in said["stdout"]:
        text = said["stdout"].strip()[-400:] or f"exit {said['exit_status']}"
        raise Refused("ResetRefused", f"the driver did not reset: {text}")
    problems = trouble_after(machine, uuids, str(log["cursor"]))
    return {"reset": uuids, "problems": problems}


def check_cards(
    machine: Machine,
    uuids: List[str],
    cards: Dict[str, Dict[str, Any]],
    facts: Dict[str, Dict[str, Any]],
    *,
    proven: bool,
) -> None:
    """Refuse a card that may not be reset alone, or that nothing says needs it."""
    linked = {uuid for uuid, fact in facts.items() if fact.get("links")}
    marks = quarantined_on(machine)
    asked = xid_asks(machine, cards)
    for uuid in uuids:
        card, fact = cards[uuid], facts.get(uuid) or {}
        if card.get("mig") == "Enabled":
            raise Refused("Mig", f"MIG is on on {uuid}: a reset would hit every tenant of it")
        if fact.get("display") != "Disabled":
            raise Refused("Display", f"{uuid}: whether a display uses it is {fact.get('display')}")
        if fact.get("links") is None:
            raise Refused("Unknown", f"{uuid}: whether NVLink binds it to others is not known")
        if uuid in linked and linked - set(uuids):
            raise Refused(
                "NvlinkPeers",
                f"{uuid} is linked by NVLink: {', '.join(sorted(linked - set(uuids)))} must be named as well",
            )
        says = card.get("recovery_action") in RESET_ACTIONS
        if not (says or proven or uuid in marks or uuid in asked):
            raise Refused("NoNeed", f"nothing says that {uuid} needs a reset")


def xid_asks(machine: Machine, cards: Dict[str, Dict[str, Any]]) -> List[str]:
    """Return the cards of which the kernel log of this boot says that they need a reset."""
    lines = (machine.evidence([]).get("known") or {}).get("kernel") or []
    events = read_xid_lines(lines).get("known") or {"xids": []}
    buses = {pci_address(x["bus"]) for x in events["xids"] if x["class"] == "reset"}
    return [uuid for uuid, card in cards.items() if pci_address(card.get("bus_id")) in buses]


def check_nobody(machine: Machine, uuids: List[str], cards: Dict[str, Dict[str, Any]]) -> None:
    """Refuse while anybody has one of the cards, anything computes on any card, or a server is about to."""
    minors = {cards[uuid]["minor"] for uuid in uuids}
    context = {"boot_id": machine.boot_id(), "protect": protected_on(machine)}
    for holder in complete_scan(machine):
        infra = classify_holder(holder, context)[0] == "infra"
        on_card = bool(minors & set(holder["minors"]))
        persistenced = (holder.get("exe") or "").endswith("/nvidia-persistenced") and infra
        if persistenced or (infra and not on_card):
            continue
        if on_card or not holder["minors"]:
            raise Refused(
                "GpuHeld", f"pid {holder['pid']} ({holder.get('exe')}) has one of the GPUs open"
            )
    apps = known_value(machine.apps(), "which processes compute")
    if apps:
        raise Refused(
            "Computing",
            f"pid {apps[0]['pid']} computes on {apps[0]['gpu_uuid']}: a reset needs every GPU of the machine idle",
        )
    for uuid in cards:
        check_claim(machine, uuid, "")


def reset_between(
    machine: Machine, uuids: List[str], cards: Dict[str, Dict[str, Any]]
) -> Dict[str, Any]:
    """Reset with persistence mode off, which counts as a client, and on again afterwards, whatever happened."""
    persistent = [u for u in uuids if cards[u].get("persistence") == "Enabled"]
    changed = []
    try:
        for uuid in persistent:
            known_value(machine.set_persistence(uuid, on=False), "persistence mode")
            changed.append(uuid)
        said: Dict[str, Any] = known_value(machine.reset_gpus(uuids), "the reset")
        return said
    finally:
        for uuid in changed:
            machine.set_persistence(uuid, on=True)


def trouble_after(machine: Machine, uuids: List[str], cursor: str) -> List[str]:
    """Return what is wrong after a reset: the exit code of the tool says little."""
    problems = []
    cards = {g["uuid"]: g for g in (machine.gpus().get("known") or {}).get("gpus", [])}
    for uuid in uuids:
        card = cards.get(uuid)
        if card is None:
            problems.append(f"{uuid} did not come back")
        elif card.get("recovery_action") not in (None, "None"):
            problems.append(f"{uuid}: the driver still asks for {card['recovery_action']}")
    facts = machine.reset_facts().get("known") or {}
    for uuid in uuids:
        fabric = (facts.get(uuid) or {}).get("fabric")
        if fabric not in (None, "Completed", "N/A", "Not Supported"):
            problems.append(f"{uuid}: its NVSwitch fabric is {fabric}")
    log = machine.kernel_log(cursor)
    if "known" not in log:
        problems.append(f"the kernel log cannot be read: {log.get('unknown')}")
    else:
        xids = read_xid_lines(log["known"]["lines"])["known"]["xids"]
        problems += [
            f"Xid {x['code']} on {x['bus']}: {x['text']}" for x in xids if x["class"] in BLOCKING
        ]
    return problems


__all__ = ["reset_named_gpus", "restart_one_container"]

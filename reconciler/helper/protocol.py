"""The one place where a mutation is let through: lock, fence, lease, boot, not_after, intent, journal, answer.

A verb never sees a request that these checks have not passed, and never writes without being listed in
the journal. `Act` is what a verb gets; what it returns is the answer's data. Called by `acts.answer`.
Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Dict, List, Optional, Tuple

from reconciler.helper.machine import Busy, Machine, Refused
from reconciler.helper.records import (
    NONCE,
    RECORD_VERSION,
    RUN,
    SERVER_NAME,
    WIRE_FORMAT,
    Changes,
    decoded,
    encoded,
    io_words,
    lease_path,
    matching,
    number_of,
    read_json,
    read_record,
    record_of,
    record_path,
    state_path,
    unit_name,
    whole_of,
)

LOCK_WAIT_S = 10.0
ANSWERS_KEPT = 50  # A controller asks again at once or never; fifty outlives any burst of one host.
LEASE_TTL_CAP_S = 1800.0
JOURNAL_CAP_BYTES = (
    2 * 1024 * 1024
)  # Machine.read gives up at 4 MiB; some 4,000 mutations fit in here.
HOST_REVERT = "host-revert"

READ, FENCED, CLAIM, HOST = "read", "fenced", "claim", "host"


class Act:
    """One mutation under way: who asked for what, and the changes made so far."""

    def __init__(self, machine: Machine, server: str, args: Dict[str, Any]) -> None:
        self.machine = machine
        self.server = server
        self.args = args
        self.changes = Changes(machine)
        self.before: Dict[str, Any] = {}
        self.after: Dict[str, Any] = {}
        self.request: Dict[str, Any] = {}

    def record(self, name: str) -> Optional[Dict[str, Any]]:
        """Return one of this server's records."""
        return read_record(self.machine, self.server, name)

    def bound_unit(self) -> str:
        """Return the unit that the request names, if it is the one this server is bound to."""
        name = unit_name(self.args.get("unit"))
        bindings = self.record("bindings")
        if bindings is None:
            raise Refused(
                "NotBound", f"{self.server} has no bindings on this host; record them first"
            )
        if bindings.get("unit") != name:
            raise Refused(
                "BindingChanged",
                f"{self.server} is bound to {bindings.get('unit')}, not to {name}",
                unit=bindings.get("unit"),
            )
        return name


Verb = Callable[[Act], Dict[str, Any]]


def reply(
    request: Dict[str, Any],
    machine: Machine,
    outcome: str,
    data: Dict[str, Any],
    why: Tuple[str, str] = ("", ""),
) -> Dict[str, Any]:
    """Return an answer in the wire's form; `why` is (reason, message) of what is not done."""
    return {
        "format": WIRE_FORMAT,
        "nonce": request.get("nonce", ""),
        "verb": request.get("verb", ""),
        "outcome": outcome,
        "reason": why[0],
        "message": why[1],
        "data": data,
        "boot_id": machine.boot_id(),
        "boottime": machine.boottime(),
    }


def refusal(request: Dict[str, Any], machine: Machine, refused: Refused) -> Dict[str, Any]:
    """Return the answer that says no."""
    return reply(request, machine, "refused", refused.data, (refused.reason, refused.message))


def frame(nonce: str, line: bytes) -> bytes:
    """Return an answer's line between its marks; without the end mark it is no answer (F39)."""
    digest = hashlib.sha256(line).hexdigest()[:16]
    begin = f"\n@@reconciler-begin {nonce} {len(line)}\n".encode()
    return begin + line + f"\n@@reconciler-end {nonce} {digest}\n".encode()


# -- mutations ---------------------------------------------------------------------------------------


def mutate(request: Dict[str, Any], machine: Machine, verb: Verb, kind: str) -> Dict[str, Any]:
    """Carry one mutating verb through the protocol and return its answer.

    Everything is re-checked after the lock is had: a request may have waited for it longer than its
    sender lived. A request whose nonce was answered gets that answer again and nothing is done (S10).
    `kind` is FENCED (needs the server's fence and lease), CLAIM (is what gives them) or HOST (concerns
    no server).
    """
    try:
        nonce = matching(NONCE, request.get("nonce"), "nonce")
        server = "" if kind == HOST else matching(SERVER_NAME, request.get("server"), "server")
        act = Act(machine, server, record_of(request.get("args"), "args"))
        act.request = request
        with machine.lock(LOCK_WAIT_S):
            stored = stored_answer(machine, nonce)
            if stored is not None:
                return replayed(request, stored)
            if kind == CLAIM and request.get("fence") is not None:
                return renewed(request, act, verb)
            fence = admit(request, machine, server) if kind == FENCED else None
            answer = carry_out(request, act, verb, fence)
            store_answer(machine, nonce, answer)
            return answer
    except Busy as busy:
        return reply(
            request, machine, "refused", {}, ("Busy", f"the host lock was not had: {busy}")
        )
    except Refused as refused:
        return refusal(request, machine, refused)
    except OSError as error:
        return reply(request, machine, "failed", {}, ("OSError", io_words(error)))


def renewed(request: Dict[str, Any], act: Act, verb: Verb) -> Dict[str, Any]:
    """Renew a lease. It is asked for every few seconds, is the same done twice, and is not journalled."""
    try:
        return reply(request, act.machine, "done", verb(act))
    except (Refused, OSError):
        act.changes.put_back()
        raise


def admit(request: Dict[str, Any], machine: Machine, server: str) -> Dict[str, Any]:
    """Let a request pass only with the current fence, a living lease of ours, this boot, and in time."""
    fence = current_fence(request, machine, server)
    check_boot(request, machine)
    lease = read_json(machine, lease_path(server))
    if (
        lease is None
        or lease.get("nonce") != fence["nonce"]
        or lease.get("boot_id") != machine.boot_id()
        or machine.boottime() >= lease.get("expires_boottime", 0)
    ):
        raise Refused("LeaseExpired", f"the lease on {server} has run out; claim it again")
    not_after = number_of(request.get("not_after"), "not_after", 0, 1e12)
    check_time(machine, not_after)
    return fence


def check_boot(request: Dict[str, Any], machine: Machine) -> None:
    """Refuse a request that was made for another boot."""
    if request.get("boot_id") != machine.boot_id():
        raise Refused("OtherBoot", "the host has rebooted since; observe again")


def check_time(machine: Machine, not_after: float) -> None:
    """Refuse a request that comes too late: its sender has stopped waiting for it."""
    now = machine.boottime()
    if now > not_after:
        raise Refused(
            "TooLate", f"it is {now:.3f} on this host, the request ended at {not_after:.3f}"
        )


def current_fence(request: Dict[str, Any], machine: Machine, server: str) -> Dict[str, Any]:
    """Return the host's fence when the request carries exactly that one (S8)."""
    asked = record_of(request.get("fence"), "fence")
    epoch = whole_of(asked.get("epoch"), "fence epoch", 1, 2**53)
    nonce = matching(NONCE, asked.get("nonce"), "fence nonce")
    fence = read_record(machine, server, "fence")
    if fence is None or fence.get("epoch") != epoch or fence.get("nonce") != nonce:
        shown = (
            None if fence is None else {"epoch": fence.get("epoch"), "holder": fence.get("holder")}
        )
        raise Refused("StaleFence", f"the fence of {server} is another one now", fence=shown)
    return fence


def carry_out(
    request: Dict[str, Any], act: Act, verb: Verb, fence: Optional[Dict[str, Any]]
) -> Dict[str, Any]:
    """Write the intent and the journal, act, and write how it ended; put everything back on failure."""
    machine, changes = act.machine, act.changes
    intent = request.get("intent")
    line = {
        "verb": request.get("verb", ""),
        "server": act.server,
        "holder": (fence or {}).get("holder", ""),
        "epoch": (fence or {}).get("epoch", 0),
        "nonce": request.get("nonce", ""),
        "revision": revision_in(act.args, intent),
    }
    if intent is not None:
        write_intent(machine, act.server, record_of(intent, "intent"), line["epoch"])
    append_journal(machine, act.server, {**line, "outcome": "begun", "what": summary(act.args)})
    try:
        data = verb(act)
    except Refused as refused:
        answer = refusal(request, machine, refused)
        stuck = changes.put_back()
    except OSError as error:
        answer = reply(request, machine, "failed", {}, ("OSError", io_words(error)))
        stuck = changes.put_back()
    except Exception as error:  # A bug of ours must not leave half a change behind either.
        answer = reply(request, machine, "failed", {}, ("Bug", f"{type(error).__name__}: {error}"))
        stuck = changes.put_back()
    else:
        answer = reply(request, machine, "done", data)
        stuck = []
    if stuck:
        answer["outcome"] = "failed"
        answer["message"] += f"; could not be put back: {'; '.join(stuck)}"
    try:
        append_journal(
            machine,
            act.server,
            {
                **line,
                "outcome": answer["outcome"],
                "reason": answer["reason"],
                "before": act.before,
                "after": act.after,
            },
        )
    except OSError as error:
        # The act is done or undone already; without this line the journal says "begun": unknown.
        answer["message"] += f" (journal not written: {io_words(error)})"
    return answer


def revision_in(args: Dict[str, Any], intent: Any) -> str:
    """Return the revision that a request is about, for the journal."""
    for source in (args, intent if isinstance(intent, dict) else {}):
        value = source.get("revision")
        if isinstance(value, str) and len(value) <= 64:
            return value
    return ""


def summary(args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the short scalars of a request's arguments: what was asked, without texts or secrets."""
    return {
        key: value
        for key, value in args.items()
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 128)
    }


def write_intent(machine: Machine, server: str, intent: Dict[str, Any], epoch: int) -> None:
    """Make the intent durable before its effect (S11). `boot_id` is ours: the guard compares it."""
    record = dict(intent)
    record.update(
        version=RECORD_VERSION, boot_id=machine.boot_id(), epoch=epoch, at=machine.walltime()
    )
    machine.write(record_path(server, "intent"), encoded(record))


def append_journal(machine: Machine, server: str, line: Dict[str, Any]) -> None:
    """Append one line, chained to the one before by its hash (S26).

    Each mutation has two: "begun" before it acts, and how it ended. A "begun" without an end is an
    outcome that nobody saw.
    """
    path = state_path(server, "journal.ndjson")
    data = machine.read(path) or b""
    last = data[data.rfind(b"\n", 0, len(data) - 1) + 1 :] if data else b""
    previous = ""
    if last:
        try:
            previous = str(decoded(last, path)["hash"])
        except (Refused, KeyError):
            previous = "unreadable"  # A cut last line: say so and go on; the chain shows the place.
            machine.append(path, b"\n")
    if len(data) > JOURNAL_CAP_BYTES:
        machine.write(state_path(server, "journal.1.ndjson"), data)
        machine.remove(path)
    entry = dict(line, version=RECORD_VERSION, at=machine.walltime(), prev=previous)
    entry["hash"] = hashlib.sha256(encoded(entry)).hexdigest()
    machine.append(path, encoded(entry) + b"\n")


# -- answers -----------------------------------------------------------------------------------------


def stored_answer(machine: Machine, nonce: str) -> Optional[Dict[str, Any]]:
    """Return the answer that was given to this nonce."""
    for name in machine.listdir(f"{RUN}/answers"):
        if name.endswith(f"-{nonce}.json"):
            return read_json(machine, f"{RUN}/answers/{name}")
    return None


def store_answer(machine: Machine, nonce: str, answer: Dict[str, Any]) -> None:
    """Keep an answer so that it can be asked for again, and forget the oldest ones."""
    folder = f"{RUN}/answers"
    names = machine.listdir(folder)
    last = int(names[-1].split("-")[0]) if names and names[-1].split("-")[0].isdigit() else 0
    try:
        data = encoded({"version": RECORD_VERSION, "answer": answer})
        machine.write(f"{folder}/{last + 1:010d}-{nonce}.json", data)
        for name in names[: max(0, len(names) + 1 - ANSWERS_KEPT)]:
            machine.remove(f"{folder}/{name}")
    except OSError as error:
        # The act itself stands. Losing the copy costs the sender one observation.
        if answer["outcome"] == "done":
            answer["message"] += f" (answer not kept: {io_words(error)})"


def replayed(request: Dict[str, Any], stored: Dict[str, Any]) -> Dict[str, Any]:
    """Return a stored answer, unless the nonce was used for something else."""
    answer = stored.get("answer")
    if not isinstance(answer, dict) or answer.get("verb") != request.get("verb"):
        raise Refused("NonceReused", "this nonce was used for another request")
    return answer


# -- the lease ---------------------------------------------------------------------------------------


def raise_fence(act: Act, holder: str, ttl_s: float) -> Dict[str, Any]:
    """Take the server: fence and lease in one critical section. The caller holds the lock.

    The fence is written first. Dying in between leaves a lease whose nonce is not the fence's, which
    binds nobody.
    """
    machine, server = act.machine, act.server
    old = act.record("fence") or {}
    epoch = whole_of(old.get("epoch", 0), "recorded epoch", 0, 2**53) + 1
    fence = {"epoch": epoch, "nonce": machine.nonce(), "holder": holder, "at": machine.walltime()}
    act.before["epoch"] = epoch - 1
    act.after["epoch"] = epoch
    act.changes.put_record(server, "fence", fence)
    return write_lease(act, fence, ttl_s)


def write_lease(act: Act, fence: Dict[str, Any], ttl_s: float) -> Dict[str, Any]:
    """Write the lease of this fence and return what its holder needs to know."""
    machine = act.machine
    now = machine.boottime()
    lease = {
        "version": RECORD_VERSION,
        "holder": fence["holder"],
        "epoch": fence["epoch"],
        "nonce": fence["nonce"],
        "expires_boottime": now + ttl_s,
        "boot_id": machine.boot_id(),
    }
    act.changes.write(lease_path(act.server), encoded(lease))
    return {
        "fence": {"epoch": fence["epoch"], "nonce": fence["nonce"]},
        "expires_boottime": now + ttl_s,
        "boot_id": machine.boot_id(),
        "boottime": now,
    }


def holders_of_leases(machine: Machine, servers: List[str]) -> List[str]:
    """Return "server held by holder" of every lease that stands."""
    from_lease = []
    for server in servers:
        lease = read_json(machine, lease_path(server))
        if (
            lease is not None
            and lease.get("boot_id") == machine.boot_id()
            and machine.boottime() < lease.get("expires_boottime", 0)
        ):
            from_lease.append(f"{server} held by {lease.get('holder')}")
    return from_lease


__all__ = ["Act", "Verb", "frame", "mutate", "raise_fence", "refusal", "reply", "write_lease"]

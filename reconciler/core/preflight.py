"""Everything that can be refused is refused here, before anything stops. A failure here costs nobody anything.

Changes nothing, needs no lease. Each check is a function from what was found to a `Refusal` or nothing; all are
run, so that one reading of the list is enough to mend them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reconciler.core import checks, release
from reconciler.core.attempt import Attempt, Member
from reconciler.core.checks import Check, Verdict
from reconciler.core.conditions import Reason
from reconciler.core.demands import Card
from reconciler.core.desired import Target, text_sha256
from reconciler.core.effect import Acted, CheckFlags, Inspect, Look, Observed, Reply, Turned
from reconciler.core.live import Known, LiveHost, LiveServer, Unknown
from reconciler.core.steps import Do, Fail, Move, Next
from reconciler.helper import readings

FREE_BYTES = 32 * 1024 * 1024
"""What a rollout may write on the host: records, revisions and units come to well under a tenth of it."""

SYSTEMCTL = ("/usr/bin/systemctl", "/bin/systemctl")

OUR_DROP_IN = "/zz-reconciler-disarm.conf"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One check that does not hold: its id, a sentence, and the reason under which it is reported."""

    check: str
    sentence: str
    reason: Reason = Reason.PREFLIGHT


def preflight(state: Attempt, reply: Reply) -> Move:
    """Run every check for the cursor's member: what one look shows, then what the engine will find, its flags last (slow)."""
    member = state.member
    if isinstance(reply, Acted):
        if not member.inspected:
            return _inspected(state, reply)
        state = state.with_member(flags_checked=True)
        judged = _judged(state, (checks.flags_check(reply.data, state.host),))
        return judged if isinstance(judged, Fail) else Next(judged)
    if isinstance(reply, Turned):
        what = "engine's flags" if member.inspected else "engine"
        return Fail(
            state,
            Reason.PREFLIGHT,
            f"the {what} could not be checked: {reply.message}; nothing was stopped",
        )
    if not isinstance(reply, Observed):
        new = [m.new for m in state.members if m.new is not None]
        paths = sorted({*SYSTEMCTL, *(path for t in new for path in (*t.paths, *t.argv[:1]))})
        users = sorted({t.user for t in new if t.user})
        return Do(Look(tuple(m.server for m in state.members), tuple(paths), tuple(users)), state)
    state = replace(state, kernel_cursor=state.kernel_cursor or release.cursor_of(reply.live))
    refusals = list(refusals_of(state, member, reply.live))
    if refusals:
        reason = refusals[0].reason
        text = "; ".join(r.sentence for r in refusals)
        return Fail(state, reason, f"{text}. Nothing was stopped")
    target = member.new
    if target is not None and target.demands is not None and not member.inspected:
        cards = cards_of(target, reply.live)
        state = state.with_member(cards=cards)
        return Do(Inspect(member.server, target.demands, target.user, cards), state)
    return _flags_next(state.with_member(inspected=True))


def _inspected(state: Attempt, reply: Acted) -> Move:
    """Judge what the engine will find."""
    member = state.member
    assert member.new is not None, "only a new target is inspected"
    assert member.new.demands is not None, "only what demands something is inspected"
    found = checks.judge(member.new.demands, reply.data, member.cards)
    state = state.with_member(inspected=True, installed=checks.installed(reply.data), cards=())
    judged = _judged(state, found)
    return judged if isinstance(judged, Fail) else _flags_next(judged)


def _judged(state: Attempt, found: Sequence[Check]) -> Attempt | Fail:
    """Refuse what does not hold and is not waived; note what is."""
    member = state.member
    found = checks.waived(found, dict(member.waivers))
    passed = [c.id for c in found if c.verdict is Verdict.WAIVED]
    state = state.with_member(waived=tuple(sorted({*member.waived, *passed})))
    wrong = checks.refused(found)
    if not wrong:
        return state
    sentence = "; ".join(f"{c.sentence} [{c.id}]" for c in wrong)
    return Fail(state, Reason.PREFLIGHT, f"{sentence}. Nothing was stopped")


def _flags_next(state: Attempt) -> Move:
    member = state.member
    effect = flags_effect(member.server, member.new, member.installed)
    return Next(state) if effect is None or member.flags_checked else Do(effect, state)


def flags_effect(server: str, target: Target | None, installed: str = "") -> CheckFlags | None:
    """Ask the engine that will be started about its flags; None where it cannot be asked."""
    if target is None or not target.flags or not target.check_argv:
        return None
    return CheckFlags(server, target.check_argv, target.flags, target.user, installed)


def cards_of(target: Target, live: LiveHost) -> tuple[Card, ...]:
    """Give the GPUs of a target as its host shows them."""
    known = {g.uuid: g for g in live.gpus.value} if isinstance(live.gpus, Known) else {}
    return tuple(
        Card(uuid, known[uuid].minor, known[uuid].total_mib) if uuid in known else Card(uuid)
        for uuid in target.gpu_uuids
    )


def refusals_of(state: Attempt, member: Member, live: LiveHost) -> Iterator[Refusal]:
    """Yield every check that does not hold, in the order in which a person would mend them."""
    found = live.server(member.server)
    yield from _enrolment(live, member)
    yield from _unit(member, found)
    yield from _records(found)
    yield from _gpus(member, live)
    yield from _holders(state, live)
    yield from _disk(live)
    if member.new is not None:
        yield from _files(member.new, live)
        yield from _port(member, found, state)


def _enrolment(live: LiveHost, member: Member) -> Iterator[Refusal]:
    reason = Reason.NOT_ENROLLED
    if isinstance(live.identity, Unknown):
        yield Refusal(
            "identity",
            f"the host's identity cannot be read ({live.identity.reason})",
            Reason.UNREADABLE,
        )
        return
    if isinstance(live.installed, Unknown) or not live.installed.value:
        yield Refusal(
            "enrolled", "the helper is not installed on the host: run `reconcile enrol`", reason
        )
    elif not (live.guard_installed and live.tick_installed):
        yield Refusal(
            "guard",
            "the guard or the dead-man timer is not installed: run `reconcile enrol` again",
            reason,
        )
    if live.paths and not any(_is_there(live, path) for path in SYSTEMCTL):
        yield Refusal(
            "systemctl",
            "there is no systemctl on the host: only servers under systemd can be managed",
        )
    if not live.identity.value.pidfd and not member.allow_no_pidfd:
        yield Refusal(
            "pidfd",
            "the kernel has no pidfd, so no signal can be sent safely; an operator who knows that may set allow_no_pidfd",
        )


def _is_there(live: LiveHost, path: str) -> bool:
    known = live.paths.get(path, {}).get("known") or {}
    return known.get("kind") not in {None, "missing"}


def _unit(member: Member, found: LiveServer) -> Iterator[Refusal]:
    if isinstance(found.unit, Unknown):
        yield Refusal(
            "unit", f"{member.unit} cannot be read ({found.unit.reason})", Reason.UNREADABLE
        )
        return
    unit = found.unit.value
    if (refusal := unit_refusal(found)) is not None:
        yield refusal
    elif unit.load_state not in {"loaded", "not-found"}:
        yield Refusal(
            "unit-file",
            f"{member.unit} is {unit.load_state}: its file is broken; mend or remove it",
            Reason.DRIFTED,
        )
    if unit.phase == "unknown":
        yield Refusal(
            "unit-state",
            f"{member.unit} is {unit.active_state}/{unit.sub_state}, a state that is not known",
        )
    if unit.triggered_by:
        others = ", ".join(unit.triggered_by)
        yield Refusal(
            "triggers",
            f"{others} would start {member.unit} again behind our back; disable it first",
        )
    if isinstance(found.files, Known):
        files = found.files.value
        if files.package:
            yield Refusal(
                "package",
                f"{files.fragment} belongs to the package {files.package}; choose another unit name",
                Reason.NOT_OURS,
            )
        for path, _ in files.drop_ins:
            if f"drop-in:{path.rpartition('/')[2]}" in member.ignored or path in dict(
                member.drop_ins
            ):
                continue
            if not path.endswith(OUR_DROP_IN) and "/service.d/" not in path:
                yield Refusal(
                    "drop-in",
                    f"{path} changes the unit; put what it says into the spec and remove it",
                    Reason.NOT_OURS,
                )


def unit_refusal(found: LiveServer) -> Refusal | None:
    """Refuse a unit that is no plain file: masked, or a link to somewhere else (F63). Its text is not even read."""
    if isinstance(found.unit, Known) and found.unit.value.load_state == "masked":
        return Refusal(
            "masked",
            f"{found.unit_name} is masked: somebody decided that it must not run; it is never unmasked",
            Reason.NOT_OURS,
        )
    if isinstance(found.files, Known) and found.files.value.link:
        return Refusal(
            "symlink",
            f"{found.files.value.fragment} is a symbolic link; only a plain file is replaced",
            Reason.NOT_OURS,
        )
    return None


def _records(found: LiveServer) -> Iterator[Refusal]:
    if isinstance(found.records, Unknown):
        yield Refusal(
            "records",
            f"the host's records cannot be read ({found.records.reason})",
            Reason.UNREADABLE,
        )


def _gpus(member: Member, live: LiveHost) -> Iterator[Refusal]:
    # A card without an idle baseline is no refusal: it is learned once its server is down (`steps._baseline_wanted`).
    if not member.gpus:
        return
    if isinstance(live.gpus, Unknown):
        yield Refusal("gpus", f"the GPUs cannot be read ({live.gpus.reason})", Reason.UNREADABLE)
        return
    if isinstance(live.quarantine, Unknown):
        yield Refusal(
            "quarantine",
            f"whether GPUs are quarantined cannot be read ({live.quarantine.reason})",
            Reason.UNREADABLE,
        )
    else:
        yield from _unusable(member, live, live.quarantine.value)
    present = {g.uuid: g for g in live.gpus.value}
    for uuid in member.gpus:
        if uuid not in present:
            yield Refusal("gpu-missing", f"{uuid} is not on the host", Reason.QUARANTINED)
        elif present[uuid].used_mib is None:
            yield Refusal(
                "gpu-memory",
                f"{uuid} does not tell how much of its memory is used",
                Reason.QUARANTINED,
            )


def _unusable(
    member: Member, live: LiveHost, marks: Mapping[str, Mapping[str, object]]
) -> Iterator[Refusal]:
    """Refuse cards that no server may start on. A release alone goes on: it is what may free them."""
    raw = (live.raw.get("gpus") or {}).get("known") or {}
    for card in raw.get("gpus") or ():
        uuid = card.get("uuid")
        if uuid not in member.gpus:
            continue
        if card.get("mig") == "Enabled":
            yield Refusal(
                "mig",
                f"MIG is on on {uuid}, and servers are given whole cards only: turn it off (`nvidia-smi -i {uuid} -mig 0`) or name another GPU",
            )
        if member.hold:
            continue
        if uuid in marks:
            yield Refusal(
                "quarantine", release.quarantine_sentence(uuid, marks[uuid]), Reason.QUARANTINED
            )
        if (trouble := release.trouble_of(card)) is not None:
            yield Refusal("gpu-trouble", f"{uuid}: {trouble}", Reason.QUARANTINED)
    for holder in release.holders_on(live, member.gpus):
        if readings.is_mps(holder):
            yield Refusal(
                "mps",
                f"MPS serves one of the GPUs (pid {holder.get('pid')}): its clients cannot be ended safely by signals; end MPS first (`echo quit | nvidia-cuda-mps-control`)",
            )


def _holders(state: Attempt, live: LiveHost) -> Iterator[Refusal]:
    """Nobody but the attempt's own servers and known housekeeping may hold a GPU that we will need."""
    wanted = {uuid for m in state.members for uuid in m.gpus}
    if not wanted:
        return
    section = live.raw.get("holders") or {}
    scan = section.get("known")
    if scan is None:
        yield Refusal(
            "holders",
            f"who holds the GPUs cannot be read ({section.get('unknown')})",
            Reason.UNREADABLE,
        )
        return
    if not scan.get("complete") or scan.get("unreadable"):
        yield Refusal(
            "holders",
            f"{scan.get('unreadable')} processes could not be looked at, so nobody can be ruled out",
            Reason.UNREADABLE,
        )
    minors = (
        {g.minor for g in live.gpus.value if g.uuid in wanted}
        if isinstance(live.gpus, Known)
        else set()
    )
    contexts = [
        release.ownership_context(m.server, m.unit, live.server(m.server).context, live)
        for m in state.members
    ]
    for holder in scan.get("holders", ()):
        theirs = set(holder.get("minors") or ())
        # One that has only control nodes open cannot be pinned to other cards, so after a stop nothing would be proven free.
        if theirs and not minors & theirs:
            continue
        classes = [readings.classify_holder(holder, context) for context in contexts]
        if any(cls in {"owned", "infra"} for cls, _ in classes):
            continue
        cls, why = classes[0]
        who = str(holder.get("exe") or holder.get("comm"))[:80]
        yield Refusal(
            "foreign-holder",
            f"pid {holder.get('pid')} ({who}, in {holder.get('cgroup')}) holds {'one of the GPUs' if theirs else 'a control node of the GPUs'} and is {cls} ({why}); it is never touched",
            Reason.FOREIGN_HOLDER,
        )


def _disk(live: LiveHost) -> Iterator[Refusal]:
    for place, free in sorted(live.disk.items()):
        if free < FREE_BYTES:
            left = f"has {free // 1024} KiB free" if free else "has no room free, or is read-only"
            needed = f"{FREE_BYTES // 1024 // 1024} MiB are needed"
            yield Refusal("disk", f"{place} {left}; {needed}")


def _files(target: Target, live: LiveHost) -> Iterator[Refusal]:
    for path in target.paths:
        yield from _path(path, live, executable=False)
    if target.argv:
        yield from _path(target.argv[0], live, executable=True)
    if target.user:
        entry = live.users.get(target.user)
        if entry is None or "known" not in entry:
            yield Refusal("user", f"the user {target.user} cannot be looked up", Reason.UNREADABLE)
        elif entry["known"] is None:
            yield Refusal("user", f"there is no user {target.user} on the host")


def _path(path: str, live: LiveHost, *, executable: bool) -> Iterator[Refusal]:
    entry = live.paths.get(path)
    if entry is None or "known" not in entry:
        why = (entry or {}).get("unknown", "not asked")
        yield Refusal("path", f"{path} cannot be looked at on the host ({why})", Reason.UNREADABLE)
    elif entry["known"].get("kind") == "missing":
        yield Refusal("path", f"{path} does not exist on the host")
    elif executable and not entry["known"].get("executable"):
        yield Refusal("path", f"{path} is not executable on the host")


def _port(member: Member, found: LiveServer, state: Attempt) -> Iterator[Refusal]:
    if isinstance(found.listeners, Unknown):
        if member.port is not None:
            yield Refusal(
                "port",
                f"who listens on port {member.port} cannot be read ({found.listeners.reason})",
                Reason.UNREADABLE,
            )
        return
    own = set(found.pids.value) if isinstance(found.pids, Known) else set()
    units = {m.unit for m in state.members}
    for listener in found.listeners.value:
        if set(listener.pids) <= own and listener.pids:
            continue
        if listener.units and set(listener.units) <= units:
            continue
        who = ", ".join(listener.units) or f"pid {', '.join(map(str, listener.pids)) or 'unknown'}"
        yield Refusal("port", f"port {member.port} is already listened on by {who}")


def ownership_refusal(found: LiveServer, *, adopt: bool, overwrite: bool) -> Refusal | None:
    """Say whether the unit that is there may be replaced: ours and unchanged, or allowed by the person in charge (S7)."""
    records = found.known_records
    if isinstance(found.permanent, Unknown) or records is None:
        return Refusal("unit-text", f"{found.unit_name}'s file cannot be read", Reason.UNREADABLE)
    text = found.permanent.value
    if text is None:
        return None
    sha = text_sha256(text)
    ours = sha in records.produced
    if records.applied is None and not ours:
        if adopt:
            return None
        return Refusal(
            "not-ours",
            f"{found.unit_name} was not made by this tool: `--adopt` takes it over (it is saved first and shown in the plan)",
            Reason.NOT_OURS,
        )
    if (
        records.applied is not None
        and records.applied.unit_sha256
        and sha != records.applied.unit_sha256
        and not overwrite
    ):
        return Refusal(
            "drifted",
            f"{found.unit_name} was edited on the host since it was applied: `--overwrite` replaces it (it is saved first); to keep the edit, write it into the spec",
            Reason.DRIFTED,
        )
    return None

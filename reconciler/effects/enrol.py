"""Enrolment: install the helper on a host, pin who the host is, learn what its idle GPUs use. And the way back.

The only part that ever runs a program as root that is not installed yet; a person asks for it, host by host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reconciler.core.errors import CommandFailedError, HostError, OutcomeUnknownError
from reconciler.core.live import Known, LiveHost, parse_live
from reconciler.effects.channel import HelperChannel, wire
from reconciler.effects.pins import Pin, write_whole
from reconciler.effects.ports import Answer, Request
from reconciler.helper import build, readings

ENROL_DEADLINE_S = 120.0
"""The upload of some 250 kB, a daemon-reload, and the driver's first initialisation of every GPU."""


EVERYTHING: Mapping[str, Any] = {
    "servers": [],
    "kernel_cursor": None,
    "paths": [],
    "users": [],
    "gpus": True,
}
"""What is asked of a host that is not known yet: all but servers."""


@dataclass(frozen=True, slots=True)
class Enrolled:
    """What enrolment did: the pin to keep, the baselines learned (MiB by UUID), and what a person should know."""

    pin: Pin
    baselines: Mapping[str, Any]
    gpus: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NeedsRoot:
    """We may not install anything there: a person has to run this file as root on the host."""

    program: Path
    why: str


def enrol(
    host: str,
    inner: HelperChannel,
    outer: HelperChannel | None,
    *,
    login: str,
    protect: tuple[str, ...],
    state_dir: Path,
    at: float,
) -> Enrolled | NeedsRoot:
    """Install or upgrade the helper, and give what is to be pinned.

    Baselines are learned where the GPUs are verifiably idle: with an outer layer, only when nobody holds them there.

    `login` is whom we log in as on the inner layer (root needs no sudo and no sudoers line), `at` seconds since the
    epoch, for people.

    Raises:
        HostError: The host cannot be reached or would not.
    """
    seen = _observe(inner)
    is_root = isinstance(seen.identity, Known) and seen.identity.value.uid == 0
    outside = _observe(outer) if outer is not None else None
    notes = []
    learn = True
    if outside is not None:
        learn, note = _idle_outside(outside, protect)
        notes += [note] if note else []
    request = Request(
        "enrol",
        {
            "program": build.program(),
            "digest12": build.digest(),
            "sudo_user": None if is_root else login,
            "protect": list(protect),
            "learn": learn,
        },
    )
    inner.sudo = not is_root
    try:
        answer = inner.carried_as_root(request, deadline_s=ENROL_DEADLINE_S)
    except CommandFailedError as error:
        installed = _installed_already(inner)
        if installed is None:
            return NeedsRoot(_program_file(host, request, state_dir), str(error))
        answer = installed
    if answer.outcome != "done":
        raise CommandFailedError(
            host, f"enrolment was refused: {answer.message or answer.reason}; nothing was changed"
        )
    live = parse_live({**answer.data, "servers": {}})
    identity = live.identity.value if isinstance(live.identity, Known) else None
    if identity is None:
        raise CommandFailedError(
            host, "the host does not say which machine it is; nothing was pinned"
        )
    gpus = (outside or live).gpus
    uuids = tuple(g.uuid for g in gpus.value) if isinstance(gpus, Known) else ()
    if not isinstance(gpus, Known):
        notes.append(f"its GPUs cannot be read: {gpus.reason}")
    pin = Pin(
        host=host,
        machine_id=identity.machine_id,
        outer_machine_id=_machine_id(outside) if outside is not None else None,
        digest=build.digest(),
        sudo=not is_root,
        gpu_uuids=uuids,
        enrolled_at=at,
    )
    baselines = answer.data.get("baselines") or {}
    unlearned = [uuid for uuid in uuids if uuid not in baselines]
    if unlearned:
        notes.append(
            f"no idle baseline yet for {', '.join(unlearned)}: enrol again while they are idle"
        )
    return Enrolled(pin, baselines, uuids, tuple(notes))


def _installed_already(inner: HelperChannel) -> Answer | None:
    """Ask the helper that a person has installed for us, by the sudoers line; None when there is none of this version."""
    channel = HelperChannel(inner.host, inner.transport, sudo=inner.sudo, installed=build.digest())
    try:
        answer = channel.call(Request("observe", EVERYTHING), deadline_s=60.0)
    except (CommandFailedError, OutcomeUnknownError):
        return None
    finally:
        channel.close()
    if answer.outcome != "done":
        return None
    known = (answer.data.get("baselines") or {}).get("known") or {}
    return replace(answer, data={**answer.data, "baselines": known})


def _observe(channel: HelperChannel) -> LiveHost:
    bare = HelperChannel(channel.host, channel.transport)
    answer = bare.call(Request("observe", EVERYTHING), deadline_s=60.0)
    if answer.outcome != "done":
        raise CommandFailedError(
            channel.host, f"the host would not be observed: {answer.message or answer.reason}"
        )
    return parse_live(answer.data)


def _idle_outside(outside: LiveHost, protect: tuple[str, ...]) -> tuple[bool, str]:
    """Say whether nobody holds a GPU on the outermost layer, so that what is used now is the floor."""
    scan = (outside.raw.get("holders") or {}).get("known")
    apps = (outside.raw.get("apps") or {}).get("known")
    if scan is None or apps is None:
        return (
            False,
            "who holds the GPUs on the outer layer cannot be read, so no baseline was learned",
        )
    context = {"boot_id": outside.boot_id, "protect": list(protect)}
    held = [h for h in scan["holders"] if readings.classify_holder(h, context)[0] != "infra"]
    users = {h["pid"] for h in held} | {app["pid"] for app in apps}
    if users:
        return (
            False,
            f"{len(users)} processes use GPUs on the outer layer, so no baseline was learned",
        )
    if not scan["complete"] or scan["unreadable"]:
        return (
            False,
            "not every process of the outer layer can be looked into, so no baseline was learned",
        )
    return True, ""


def _machine_id(live: LiveHost) -> str | None:
    return live.identity.value.machine_id if isinstance(live.identity, Known) else None


def _program_file(host: str, request: Request, state_dir: Path) -> Path:
    """Write the enrolment as one self-contained program that a person runs as root. It holds no secret."""
    path = state_dir / "enrol" / f"enrol-{host}.py"
    write_whole(path, build.carried(wire(request, "0" * 32)))
    return path


def unenrol(host: str, inner: HelperChannel, *, keep_records: bool) -> str:
    """Take the helper, its units and its sudoers line away; servers run on, unguarded.

    Raises:
        HostError: Refused (a lease stands, a unit still requires the guard), or unreachable.
    """
    answer = inner.carried_as_root(
        Request("unenrol", {"keep_records": keep_records}), deadline_s=ENROL_DEADLINE_S
    )
    if answer.outcome != "done":
        raise CommandFailedError(host, f"{answer.message or answer.reason}; nothing was taken away")
    return str(answer.data.get("message") or "removed")


__all__ = ["Enrolled", "HostError", "NeedsRoot", "enrol", "unenrol"]

"""What was found on a host. Each part is `Known(value)` or `Unknown(reason)`; unknown is never read as absent.

The helper's answer is data from another machine: it is taken apart here, once, with every type checked; a
section that does not have the shape it should have is `Unknown`, never guessed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from reconciler.core.applied import Applied, Attempted, Hold, Intent, Rejected
from reconciler.core.effect import Fence
from reconciler.helper import readings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """A part of the host that could be read."""

    value: T


@dataclass(frozen=True, slots=True)
class Unknown:
    """A part of the host that could not be read, and why."""

    reason: str


Reading = Known[T] | Unknown


@dataclass(frozen=True, slots=True)
class Identity:
    """Which machine this is, and which boot of it."""

    machine_id: str
    hostname: str
    boot_id: str
    boottime: float
    python: str
    uid: int
    container: str | None
    pidfd: bool


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver's tool and the device nodes show it. Memory in MiB."""

    uuid: str
    index: int
    bus_id: str
    minor: int | None
    used_mib: int | None
    total_mib: int | None


STARTED_BY = ("TriggeredBy", "OnFailureOf", "OnSuccessOf", "UpheldBy")
"""Sockets, timers and paths; units whose end starts this one; units that keep it up."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """One unit as systemd has it loaded."""

    load_state: str
    active_state: str
    sub_state: str
    phase: str
    result: str
    main_pid: int
    restarts: int
    invocation: str
    control_group: str
    restart: str
    stop_timeout_us: int | None
    fragment: str
    drop_ins: tuple[str, ...]
    unit_file_state: str
    need_reload: bool
    condition_result: bool
    job: int
    exec_main_code: int
    exec_main_status: int
    triggered_by: tuple[str, ...]
    on_failure: tuple[str, ...]
    kill_mode: str
    send_sigkill: bool


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """The files that make up a unit, as they are on disk."""

    fragment: str | None
    text: str | None
    link: bool
    package: str | None
    drop_ins: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Records:
    """What the host remembers of one server. The truth of what was tried, applied and rejected."""

    applied: Applied | None
    attempted: Attempted | None
    intent: Intent | None
    rejected: tuple[Rejected, ...]
    fence: Fence | None
    lease_holder: str | None
    lease_expires: float | None
    deadline_due: float | None
    bindings: Mapping[str, Any] | None
    hold: Hold | None
    guard_refusal: str | None
    revisions: tuple[str, ...]
    produced: frozenset[str]
    disarmed: bool
    protected: bool = False
    request: str = ""
    handled: Mapping[str, Any] | None = None
    lease_lives: bool = False
    """Whether the lease still bound everybody else when the host was looked at."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens on the server's port."""

    address: str
    pids: tuple[int, ...]
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveServer:
    """One server as found: unit, files, processes, port, records."""

    server: str
    unit_name: str
    unit: Reading[UnitState]
    files: Reading[UnitFiles]
    permanent: Reading[str | None]
    trial: Reading[str | None]
    argv: Reading[tuple[str, ...]]
    environment: Reading[tuple[str, ...]]
    pids: Reading[tuple[int, ...]]
    listeners: Reading[tuple[Listener, ...]]
    journal: Reading[tuple[str, ...]]
    records: Reading[Records]
    told: tuple[tuple[int | None, bytes], ...]
    main_argv: tuple[str, ...]
    history: tuple[Mapping[str, Any], ...]
    context: Mapping[str, Any] = field(compare=False, hash=False)
    runs_with: Reading[Mapping[str, str]] = Unknown("it was not asked")
    started_with: tuple[str, ...] = ()

    @property
    def phase(self) -> str:
        """Give the unit's phase in the helper's words; "unknown" when it could not be read."""
        return self.unit.value.phase if isinstance(self.unit, Known) else "unknown"

    @property
    def invocation(self) -> str:
        """Give the current InvocationID, empty when there is none or it is unknown."""
        return self.unit.value.invocation if isinstance(self.unit, Known) else ""

    @property
    def effective_text(self) -> str | None:
        """Give the text of the unit file that counts now: the trial if there is one, else the permanent one."""
        for place in (self.trial, self.permanent):
            if isinstance(place, Known) and place.value is not None:
                return place.value
        return None

    @property
    def known_records(self) -> Records | None:
        """Give the records where they could be read."""
        return self.records.value if isinstance(self.records, Known) else None


@dataclass(frozen=True, slots=True)
class LiveHost:
    """One host as found, both layers joined."""

    identity: Reading[Identity]
    gpus: Reading[tuple[Gpu, ...]]
    installed: Reading[tuple[str, ...]]
    guard_installed: bool
    tick_installed: bool
    baselines: Mapping[str, Mapping[str, Any]]
    disk: Mapping[str, int]
    servers: Mapping[str, LiveServer]
    paths: Mapping[str, Mapping[str, Any]]
    users: Mapping[str, Mapping[str, Any]]
    gpu_containers: tuple[str, ...]
    bound: Mapping[str, Mapping[str, Any]]
    quarantine: Reading[Mapping[str, Mapping[str, Any]]]
    raw: Mapping[str, Any] = field(compare=False, hash=False, repr=False)

    def server(self, name: str) -> LiveServer:
        """Give one server that was asked for."""
        return self.servers[name]

    def has_baseline(self, uuid: str) -> bool:
        """Say whether the idle use of a card is known for the driver that runs now."""
        driver = _known_or(self.raw.get("gpus"), {}).get("driver")
        return bool(self.baselines.get(uuid, {}).get("driver") == driver)

    @property
    def boot_id(self) -> str:
        """Give the boot id of the layer that runs the units, empty when unknown."""
        return self.identity.value.boot_id if isinstance(self.identity, Known) else ""


def parse_live(data: Mapping[str, Any]) -> LiveHost:
    """Take an `observe` answer apart. Anything of an unexpected shape becomes `Unknown`."""
    servers = data.get("servers")
    installed = _reading(data.get("installed"), _map)
    inst = installed.value if isinstance(installed, Known) else {}
    return LiveHost(
        identity=_reading(data.get("identity"), _identity),
        gpus=_reading(data.get("gpus"), _gpus),
        installed=_reading(data.get("installed"), lambda v: _strings(v["digests"])),
        guard_installed=inst.get("guard") is True,
        tick_installed=inst.get("tick") is True,
        baselines=_known_or(data.get("baselines"), {}),
        disk={
            str(k): int(v) for k, v in _known_or(data.get("disk"), {}).items() if isinstance(v, int)
        },
        servers={
            name: _server(name, section, data)
            for name, section in sorted(servers.items() if isinstance(servers, Mapping) else ())
        },
        paths=_sections(data.get("paths")),
        users=_sections(data.get("users")),
        gpu_containers=_strings(_known_or(data.get("containers_with_gpus"), [])),
        bound=_sections(_known_or(data.get("bound"), {})),
        # A helper from before there was a quarantine says nothing of one, and keeps none.
        quarantine=_reading(data["quarantine"], _map) if "quarantine" in data else Known({}),
        raw=data,
    )


def join_layers(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Join what the container and its host saw into one answer: units from inside, GPUs and holders from outside.

    A holder seen from outside is one of the container's own processes exactly when the last number of its
    NSpid and its start time are those of a process that the container saw; then the container's record of it
    (its pid, group and marks there) stands in for it, so that a signal is sent where the identity was read.
    Everyone else stays as the outer layer saw them: foreign, unless known housekeeping.
    """
    joined = {**inner, "joined": True}
    for section in ("gpus", "apps", "kernel", "containers_with_gpus"):
        joined[section] = outer.get(section, {"unknown": "the outer layer did not say"})
    inside = {
        (p.get("pid"), p.get("start_ticks")): p
        for reading in [inner.get("holders")]
        for p in _known_or(reading, {}).get("holders", ())
    }
    for section in _map_or_empty(inner.get("servers")).values():
        for process in _known_or(_map_or_empty(section).get("processes"), []):
            inside.setdefault((process.get("pid"), process.get("start_ticks")), process)
    outside = outer.get("holders")
    if not isinstance(outside, Mapping) or "known" not in outside:
        joined["holders"] = outside or {"unknown": "the outer layer did not say"}
        return joined
    scan = dict(outside["known"])
    scan["holders"] = [_seen_from_inside(holder, inside) for holder in scan.get("holders", ())]
    joined["holders"] = {"known": scan}
    joined["apps"] = _apps_from_inside(joined["apps"], outside["known"].get("holders", ()), inside)
    return joined


def _seen_from_inside(
    holder: Mapping[str, Any], inside: Mapping[tuple[Any, Any], Any]
) -> dict[str, Any]:
    namespaces = holder.get("nspid") or [holder.get("pid")]
    match = inside.get((namespaces[-1], holder.get("start_ticks"))) if len(namespaces) > 1 else None
    if match is None:
        # Marked, so that a unit of the outer machine with the same name as ours is never taken for ours.
        return {**holder, "cgroup": f"outer:{holder.get('cgroup')}", "layer": "outer"}
    devices = {key: holder[key] for key in ("minors", "devices", "via") if key in holder}
    return {**match, **devices, "layer": "inner", "outer_pid": holder.get("pid")}


def _apps_from_inside(
    apps: Any, holders: Sequence[Mapping[str, Any]], inside: Mapping[tuple[Any, Any], Any]
) -> Any:
    """Give the process list with the container's own pids where the process is one of the container's."""
    if not isinstance(apps, Mapping) or not isinstance(apps.get("known"), list):
        return apps
    numbers = {
        h.get("pid"): h["nspid"][-1]
        for h in holders
        if len(h.get("nspid") or ()) > 1 and (h["nspid"][-1], h.get("start_ticks")) in inside
    }
    return {
        "known": [
            {**app, "pid": numbers.get(app.get("pid"), app.get("pid"))} for app in apps["known"]
        ]
    }


# -- taking the answer apart -----------------------------------------------------------------------------


def _reading(section: Any, parse: Callable[[Any], T]) -> Reading[T]:
    if not isinstance(section, Mapping):
        return Unknown("the helper did not say")
    if "known" not in section:
        return Unknown(str(section.get("unknown", "the helper did not say")))
    try:
        return Known(parse(section["known"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Unknown(
            f"the helper's answer has an unexpected shape ({type(error).__name__}: {error})"
        )


def _known_or(section: Any, default: Any) -> Any:
    if isinstance(section, Mapping) and "known" in section and section["known"] is not None:
        return section["known"]
    return default


def _map(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("not a map")
    return value


def _map_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TypeError("not a list of strings")
    return tuple(value)


def _sections(value: Any) -> dict[str, Mapping[str, Any]]:
    return {str(k): v for k, v in _map_or_empty(value).items() if isinstance(v, Mapping)}


def _identity(value: Any) -> Identity:
    return Identity(
        machine_id=str(value["machine_id"]),
        hostname=str(value["hostname"]),
        boot_id=str(value["boot_id"]),
        boottime=float(value["boottime"]),
        python=str(value["python"]),
        uid=int(value["uid"]),
        container=value.get("container"),
        pidfd=value["pidfd"] is True,
    )


def _gpus(value: Any) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            uuid=str(g["uuid"]),
            index=int(g["index"]),
            bus_id=str(g["bus_id"]),
            minor=g.get("minor"),
            used_mib=g.get("used_mib"),
            total_mib=g.get("total_mib"),
        )
        for g in value["gpus"]
    )


def _unit(value: Any) -> UnitState:
    return UnitState(
        load_state=value["LoadState"],
        active_state=value["ActiveState"],
        sub_state=value["SubState"],
        phase=readings.unit_phase(value),
        result=value["Result"],
        main_pid=int(value["MainPID"]),
        restarts=int(value["NRestarts"]),
        invocation=value["InvocationID"],
        control_group=value["ControlGroup"],
        restart=value["Restart"],
        stop_timeout_us=value["TimeoutStopUSec"],
        fragment=value["FragmentPath"],
        drop_ins=tuple(value["DropInPaths"]),
        unit_file_state=value["UnitFileState"],
        need_reload=bool(value["NeedDaemonReload"]),
        condition_result=bool(value["ConditionResult"]),
        job=int(value["Job"]),
        exec_main_code=int(value["ExecMainCode"]),
        exec_main_status=int(value["ExecMainStatus"]),
        triggered_by=tuple(unit for name in STARTED_BY for unit in value.get(name, ())),
        on_failure=tuple(value.get("OnFailure", ())),
        kill_mode=value["KillMode"],
        send_sigkill=bool(value["SendSIGKILL"]),
    )


def _files(value: Any) -> UnitFiles:
    return UnitFiles(
        fragment=value["fragment"],
        text=value["text"],
        link=value["link"] is True,
        package=value.get("package"),
        drop_ins=tuple((str(d["path"]), str(d["text"])) for d in value["drop_ins"]),
    )


def _place(section: Any) -> Reading[str | None]:
    def text(value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value["text"], str):
            message = f"{value.get('path')} is a {value.get('kind')}, not a file"
            raise TypeError(message)
        return value["text"]

    return _reading(section, text)


def _lives(lease: Any, fence: Any, host: Mapping[str, Any]) -> bool:
    """Say whether a lease binds anybody, as the host itself judges: of this boot, of the current fence, not run out."""
    at, boot = host.get("at"), host.get("boot_id")
    return bool(
        lease
        and fence
        and isinstance(at, int | float)
        and at < lease.get("expires_boottime", 0)
        and lease.get("boot_id") == boot
        and lease.get("nonce") == fence.get("nonce")
    )


def _records(value: Any, host: Mapping[str, Any]) -> Records:
    lease = value.get("lease")
    fence = value.get("fence")
    deadline = value.get("deadline")
    guard = value.get("guard")
    return Records(
        applied=Applied.model_validate(value["applied"]) if value.get("applied") else None,
        attempted=Attempted.model_validate(value["attempted"]) if value.get("attempted") else None,
        intent=Intent.model_validate(value["intent"]) if value.get("intent") else None,
        rejected=tuple(Rejected.model_validate(r) for r in value.get("rejected") or ()),
        fence=Fence(int(fence["epoch"]), str(fence["nonce"])) if fence else None,
        lease_holder=str(lease["holder"]) if lease else None,
        lease_expires=float(lease["expires_boottime"]) if lease else None,
        deadline_due=float(deadline["due_boottime"]) if deadline else None,
        bindings=value.get("bindings"),
        hold=Hold.model_validate(value["hold"]) if value.get("hold") else None,
        guard_refusal=str(guard["reason"]) if guard and guard.get("reason") else None,
        revisions=tuple(value.get("revisions") or ()),
        produced=frozenset(value.get("produced") or ()),
        disarmed=value.get("disarmed") is True,
        protected=value.get("protect") is not None,
        request=str((value.get("request") or {}).get("token") or ""),
        handled=value.get("handled"),
        lease_lives=_lives(lease, fence, host),
    )


def _listeners(value: Any) -> tuple[Listener, ...]:
    return tuple(
        Listener(
            str(v["address"]), tuple(int(p) for p in v["pids"]), tuple(str(u) for u in v["units"])
        )
        for v in value
    )


def _answer(section: Any) -> tuple[int | None, bytes]:
    """Give status and body of an answer of the server's own; (None, b"") where there was none."""
    known = _known_or(section, {})
    try:
        return int(known["status"]), base64.b64decode(str(known["body"]))
    except (KeyError, TypeError, ValueError):
        return None, b""


def _main_argv(section: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the command line of the unit's main process, () where it is not known."""
    main = _known_or(section.get("unit"), {}).get("MainPID")
    for process in _known_or(section.get("processes"), []):
        if process.get("pid") == main and isinstance(process.get("argv"), list):
            return tuple(str(word) for word in process["argv"])
    return ()


def _server(name: str, section: Any, host: Mapping[str, Any]) -> LiveServer:
    section = _map_or_empty(section)
    unit = _reading(section.get("unit"), _unit)
    raw_records = _known_or(section.get("records"), {})
    return LiveServer(
        server=name,
        unit_name=str(section.get("unit_name", "")),
        unit=unit,
        files=_reading(section.get("files"), _files),
        permanent=_place(section.get("permanent")),
        trial=_place(section.get("trial")),
        argv=_reading(section.get("command"), lambda v: _strings(v["argv"])),
        environment=_reading(section.get("command"), lambda v: _strings(v["environment"])),
        pids=_reading(section.get("processes"), lambda v: tuple(int(p["pid"]) for p in v)),
        listeners=_reading(section.get("listeners"), _listeners),
        journal=_reading(section.get("journal"), lambda v: tuple(str(e["message"]) for e in v)),
        records=_reading(section.get("records"), lambda v: _records(v, host)),
        told=tuple(_answer(a) for a in section.get("told") or ()),
        main_argv=_main_argv(section),
        history=tuple(_known_or(section.get("history"), [])),
        context={
            "snapshot": raw_records.get("snapshot"),
            "invocations": raw_records.get("invocations"),
            "bindings": raw_records.get("bindings"),
            "unit": _known_or(section.get("unit"), None),
            "processes": _known_or(section.get("processes"), []),
        },
        runs_with=_reading(
            section.get("environ"), lambda v: {str(k): str(t) for k, t in v.items()}
        ),
        started_with=tuple(str(line) for line in _known_or(section.get("startup"), [])),
    )

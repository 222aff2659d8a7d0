"""What runs under a unit that was not made by this tool, and how it differs from what a spec wants. Pure.

Where nothing differs the unit is taken over without a restart (`resolve.py` asks, the plan says so); where something does, or
cannot be seen, the plan says what. Both sides are read by the engine's own `read_argv`, so that order, short names and
written-out defaults count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reconciler.core.desired import Target
from reconciler.core.live import Gpu, Known, LiveHost, LiveServer, Unknown
from reconciler.core.masking import holds_secret, is_secret
from reconciler.core.spec import Server
from reconciler.engines.base import Engine
from reconciler.helper.outputs import started_argv
from reconciler.systemd import UnitFile, UnitTextError, parse_unit

MARKS = frozenset({"RECONCILER_SERVER", "SPT_NOENV", "CUDA_VISIBLE_DEVICES"})
"""Of an environment: ours, and the cards, which are compared by what is held."""

LISTS = frozenset({
    "ExecStart", "ExecStartPre", "ExecStartPost", "ExecStop", "ExecStopPost", "ExecReload", "ExecCondition", "Environment",
    "EnvironmentFile", "PassEnvironment", "UnsetEnvironment", "After", "Before", "Wants", "Requires", "BindsTo", "PartOf",
    "Conflicts", "LoadCredential", "SetCredential", "WantedBy", "RequiredBy", "Alias", "Documentation", "SupplementaryGroups",
    "ReadWritePaths", "ReadOnlyPaths", "BindPaths", "DeviceAllow",
})  # fmt: skip
"""Keys whose assignments add up, and which an empty one clears."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the unit."""

    pid: int
    argv: tuple[str, ...]
    uid: int | None


HIDDEN = "(secret)"
"""Stands for a value that the helper does not answer."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """A unit as it was found, taken apart. `None` is what could not be read."""

    unit: str
    running: bool
    main: Process | None
    processes: tuple[Process, ...]
    loaded: tuple[str, ...] | None
    loaded_why: str
    environment: Mapping[str, str]
    environment_files: tuple[str, ...]
    file_variables: tuple[tuple[str, str, str | None], ...]
    """What those files set: file, name, and value; a secret has none."""
    unseen_variables: tuple[tuple[str, str], ...]
    """What of those files is not known, and why."""
    user: str
    entries: tuple[tuple[str, str, str, str], ...]
    """(section, key, value, file) of what counts, in order: later files over earlier ones."""
    broken: str
    drop_ins: tuple[tuple[str, str], ...]
    stop_s: float | None
    need_reload: bool
    held: frozenset[str] | None
    """The cards that the unit's own processes hold, by UUID."""
    addresses: tuple[str, ...]
    """Where its own processes listen on the port that was asked about."""

    def values(self, key: str, section: str = "Service") -> tuple[str, ...]:
        """Give every assignment of a key that counts."""
        return tuple(v for s, k, v, _ in self.entries if (s, k) == (section, key))


def stranger_of(live: LiveHost, name: str) -> Stranger:
    """Take apart what was observed of one unit."""
    found = live.server(name)
    raw = (live.raw.get("servers") or {}).get(name) or {}
    command = (raw.get("command") or {}).get("known") or {}
    unit = found.unit.value if isinstance(found.unit, Known) else None
    variables, unseen = _file_variables(raw.get("environment_files"), command)
    rows = tuple(
        Process(int(p["pid"]), tuple(str(w) for w in p.get("argv") or ()), p.get("uid"))
        for p in found.context.get("processes") or ()
        if p.get("pid") is not None
    )
    main = next((p for p in rows if unit is not None and p.pid == unit.main_pid), None)
    loaded = started_argv(found.argv.value) if isinstance(found.argv, Known) else None
    why = (
        found.argv.reason
        if isinstance(found.argv, Unknown)
        else "its command holds variables, which systemd resolves at the start"
    )
    environment = found.environment.value if isinstance(found.environment, Known) else ()
    files = found.files.value if isinstance(found.files, Known) else None
    drop_ins = tuple(
        (path, text)
        for path, text in (files.drop_ins if files else ())
        if not path.endswith("/zz-reconciler-disarm.conf") and "/service.d/" not in path
    )
    entries, broken = entries_of(
        (files.fragment or "", files.text or "") if files else ("", ""), drop_ins
    )
    stop = unit.stop_timeout_us if unit is not None else None
    return Stranger(
        unit=found.unit_name,
        running=found.phase == "running",
        main=main,
        processes=rows,
        loaded=None if loaded is None else tuple(loaded),
        loaded_why="" if loaded is not None else why,
        # As systemd does: a file has the last word.
        environment={
            **dict(pair.partition("=")[::2] for pair in environment),
            **{n: HIDDEN if value is None else value for _, n, value in variables},
        },
        environment_files=tuple(str(f) for f in command.get("environment_files") or ()),
        file_variables=variables,
        unseen_variables=unseen,
        user=str(command.get("user") or ""),
        entries=entries,
        broken=broken,
        drop_ins=drop_ins,
        stop_s=None if stop is None else stop / 1e6,
        need_reload=unit.need_reload if unit is not None else False,
        held=_held(live, found, rows),
        addresses=_addresses(found),
    )


def _file_variables(
    reading: Any, command: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str, str | None], ...], tuple[tuple[str, str], ...]]:
    """Take apart what was read of environment files. What was not read is not known."""
    known = reading.get("known") if isinstance(reading, Mapping) else None
    paths = [str(f) for f in command.get("environment_files") or ()]
    if not isinstance(known, list):
        why = str((reading or {}).get("unknown") or "it was not read")
        return (), tuple((path, why) for path in paths)
    variables = tuple(
        (str(file["path"]), str(v["name"]), None if v["value"] is None else str(v["value"]))
        for file in known
        for v in file["variables"]
    )
    unseen = [(str(f["path"]), str(odd)) for f in known for odd in f["odd"]]
    unseen += [
        (str(f["path"]), f"{name} is not what the process was started with: the file was edited")
        for f in known
        for name in f["changed"]
    ]
    return variables, tuple(unseen)


def entries_of(
    fragment: tuple[str, str], drop_ins: Sequence[tuple[str, str]]
) -> tuple[tuple[tuple[str, str, str, str], ...], str]:
    """Give what counts of a unit's files, and what of them could not be read as systemd reads it."""
    counted: list[tuple[str, str, str, str]] = []
    broken: list[str] = []
    for path, text in (fragment, *drop_ins):
        try:
            parsed: UnitFile = parse_unit(text)
        except UnitTextError as error:
            broken.append(f"{path}: {error}")
            continue
        for section in parsed.sections:
            for key, value in section.entries:
                if key not in LISTS or not value:
                    counted = [e for e in counted if e[:2] != (section.name, key)]
                if value:
                    counted.append((section.name, key, value, path))
    return tuple(counted), "; ".join(broken)


def _held(live: LiveHost, found: LiveServer, rows: Sequence[Process]) -> frozenset[str] | None:
    scan = (live.raw.get("holders") or {}).get("known")
    if (
        not isinstance(scan, Mapping)
        or scan.get("complete") is False
        or not isinstance(live.gpus, Known)
    ):
        return None
    by_minor = {g.minor: g.uuid for g in live.gpus.value}
    own = {p.pid for p in rows}
    minors = {
        minor
        for holder in scan.get("holders") or ()
        if holder.get("pid") in own
        or str(holder.get("cgroup") or "").endswith(f"/{found.unit_name}")
        for minor in holder.get("minors") or ()
    }
    return frozenset(by_minor[m] for m in minors if m in by_minor)


def _addresses(found: LiveServer) -> tuple[str, ...]:
    if not isinstance(found.listeners, Known) or not isinstance(found.pids, Known):
        return ()
    own = set(found.pids.value)
    return tuple(x.address for x in found.listeners.value if x.pids and set(x.pids) <= own)


# -- comparing -------------------------------------------------------------------------------------------


def differences(server: Server, engine: Engine, target: Target, live: LiveHost) -> tuple[str, ...]:
    """Say how what runs differs from what is wanted. Empty: it is the same. What cannot be seen is a difference."""
    return tuple(_differences(server, engine, target, stranger_of(live, server.name)))


def _differences(server: Server, engine: Engine, target: Target, found: Stranger) -> Iterator[str]:
    if found.main is None or not found.main.argv:
        yield "the running command line cannot be seen"
        return
    if found.need_reload:
        yield f"{found.unit} was edited since systemd loaded it"
    if found.loaded is not None and not _started_as(found.main.argv, found.loaded):
        yield f"{found.unit} was edited since its process was started"
    for path, _ in found.drop_ins:
        if f"drop-in:{path.rpartition('/')[2]}" in server.drift_ignore:
            continue
        yield f"{path} changes the unit: remove it (the spec has what it says, or a line on what it has not), and reload systemd"
    for path, why in found.unseen_variables:
        yield f"{path} sets variables that cannot be seen: {why}"
    # A script shows its interpreter in front; what it was started as is what the unit says.
    argv = found.loaded or found.main.argv
    if not engine.recognises(argv):
        yield "the main process is a wrapper around the engine"
        return
    yield from _fields(
        _read(engine, argv, found.environment), _wanted(engine, target), server, found
    )
    yield from _environment(found.environment, target)
    if (found.user or "root") != (target.user or "root"):
        yield f"runtime.user: runs as {found.user or 'root'}, wanted is {target.user or 'root'}"
    directory = next(iter(found.values("WorkingDirectory")), "").removeprefix("-")
    if directory != (server.runtime.working_directory or ""):
        yield f"runtime.working_directory: is {directory or 'not set'}, wanted is {server.runtime.working_directory or 'not set'}"
    if found.held is None:
        yield "which GPUs it holds cannot be seen"
    elif found.held != frozenset(target.gpu_uuids):
        yield f"gpus: it holds {', '.join(sorted(found.held)) or 'none'}, wanted are {', '.join(target.gpu_uuids) or 'none'}"


def _started_as(running: Sequence[str], loaded: Sequence[str]) -> bool:
    """Say whether a process shows the command that is loaded; a script shows its interpreter before it."""
    return (
        tuple(running) == tuple(loaded) or tuple(running[-len(loaded) :])[1:] == tuple(loaded)[1:]
    )


def _read(engine: Engine, argv: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    return engine.read_argv(tuple(argv), environment)


def _wanted(engine: Engine, target: Target) -> dict[str, object]:
    environment = dict(pair.partition("=")[::2] for pair in target.environment)
    for file in target.secrets:
        environment |= {name: "" for name, _ in file.entries if file.form == "env"}
    return engine.read_argv(target.argv, environment)


APART = frozenset({"gpus", "env"})
SIZES = ("tp_size", "pp_size", "dp_size", "ep_size")


def _fields(
    runs: Mapping[str, Any], wanted: Mapping[str, Any], server: Server, found: Stranger
) -> Iterator[str]:
    one, other = _flat(_filled(runs, server, found)), _flat(_filled(wanted, server, found))
    for path in sorted({*one, *other}):
        if path.split(".")[0] in APART or one.get(path) == other.get(path):
            continue
        yield f"{path}: runs {_shown(path, one.get(path))}, wanted is {_shown(path, other.get(path))}"


def _filled(read: Mapping[str, Any], server: Server, found: Stranger) -> dict[str, Any]:
    """Write out what a command line leaves to its engine: sizes of one, and the address that it does listen on."""
    listen = dict(read.get("listen") or {})
    if server.listen.address in found.addresses:
        listen.setdefault("address", server.listen.address)
        listen.setdefault("port", server.listen.port)
    filled = {**dict.fromkeys(SIZES, 1), **read, "listen": listen}
    if filled.get("served_model_name") in {None, filled.get("model")}:
        filled.pop("served_model_name", None)
    return filled


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(item) if isinstance(item, tuple) else item
    return flat


def _environment(runs: Mapping[str, str], target: Target) -> Iterator[str]:
    wanted = dict(pair.partition("=")[::2] for pair in target.environment)
    secret = {name for file in target.secrets for name, _ in file.entries if file.form == "env"}
    for name in sorted({*runs, *wanted, *secret} - MARKS):
        if name in secret and name in runs:
            continue  # The same variable by a file. Whether the value is the same only the host knows.
        if runs.get(name) != wanted.get(name) or name in secret:
            old, new = runs.get(name), "(from a file)" if name in secret else wanted.get(name)
            yield f"env.{name}: runs {_shown(name, old)}, wanted is {_shown(name, new)}"


def _shown(path: str, value: object) -> str:
    if value is None:
        return "without"
    text = str(value)
    return "(secret)" if is_secret(path.rpartition(".")[2], text) or holds_secret(text) else text


def card_named(cards: Sequence[Gpu], name: str) -> Gpu | None:
    """Find a card as CUDA_VISIBLE_DEVICES names it: by index, or by the beginning of its UUID."""
    for card in cards:
        if name == str(card.index) or (
            name.startswith(("GPU-", "MIG-")) and card.uuid.startswith(name)
        ):
            return card
    return None


__all__ = ["Process", "Stranger", "card_named", "differences", "entries_of", "stranger_of"]

"""A small true model of systemd: unit files and drop-ins, jobs, starts and stops, restarts and limits.

What is modelled is what the product relies on or is hurt by, as tried on systemd 252
(`reconciler/README.md`): precedence of places, loaded against on disk, our guard as a required unit at
every start, conditions, restart policy, start limit, kill modes, stop timeouts, left-overs. Everything
else is left out. It acts on a `Host` of `world.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reconciler.helper.environments import environment_pairs
from reconciler.lab.world import (
    KILL,
    OPENS_GPU_AFTER_S,
    PERMANENT,
    TERM,
    TRIAL,
    Host,
    PowerLost,
    Process,
    Signalled,
    Started,
)

VENDOR = "/usr/lib/systemd/system"
RUNTIME = "/run/systemd/system"
PLACES = (TRIAL, PERMANENT, RUNTIME, VENDOR)
WANTS = f"{PERMANENT}/multi-user.target.wants"
JOB_TAKES_S = 0.02
TICK_EVERY_S = 15.0
GUARD_WAITS_S = 20.0
UNITS_OF_TIME = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "": 1.0,
}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "s": " "}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A unit as systemd holds it in memory."""

    state: str
    fragment: str
    drop_ins: tuple[str, ...]
    text: bytes
    argv: tuple[str, ...]
    environment: tuple[str, ...]
    requires: tuple[str, ...]
    conditions: tuple[str, ...]
    user: str
    groups: tuple[int, ...]
    private_mounts: bool
    kind: str
    restart: str
    restart_s: float
    stop_s: float | None
    kill_mode: str
    send_kill: bool
    limit_s: float
    limit_burst: int
    environment_files: tuple[str, ...] = ()


def span(text: str) -> float | None:
    """Return seconds of a time as systemd reads it; None is infinity."""
    if text.strip() == "infinity":
        return None
    total = 0.0
    for number, unit in re.findall(r"([0-9.]+)\s*([a-z]*)", text):
        total += float(number) * UNITS_OF_TIME[unit]
    return total


def words(text: str) -> list[str]:
    """Split a value as systemd does: quotes, C escapes, `%%`."""
    found: list[str] = []
    current, quote, inside, i = "", "", False, 0
    while i < len(text):
        char = text[i]
        if char == "\\" and i + 1 < len(text):
            step = text[i + 1]
            if step == "x":
                current += chr(int(text[i + 2 : i + 4], 16))
                i += 4
            else:
                current += ESCAPES.get(step, step)
                i += 2
            inside = True
            continue
        if quote:
            if char == quote:
                quote = ""
            else:
                current += char
        elif char in "\"'":
            quote, inside = char, True
        elif char.isspace():
            if inside:
                found.append(current)
            current, inside = "", False
        else:
            current += char
            inside = True
        i += 1
    if inside:
        found.append(current)
    return [word.replace("%%", "%") for word in found]


@functools.lru_cache(maxsize=4096)
def assignments(text: bytes) -> tuple[tuple[str, str, str], ...]:
    """Return (section, key, value) of a unit file."""
    section, found = "", []
    for line in text.decode("utf-8", "replace").replace("\\\n", " ").splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        if stripped.startswith("["):
            section = stripped.strip("[]")
            continue
        key, _, value = stripped.partition("=")
        found.append((section, key.strip(), value.strip()))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def loaded(
    name: str, fragment: str, text: bytes, drop_ins: tuple[str, ...], texts: tuple[bytes, ...]
) -> Loaded:
    """Return what systemd makes of a unit file and its drop-ins."""
    values: dict[str, list[str]] = {}
    for part in (text, *texts):
        for section, key, value in assignments(part):
            entry = f"{section}.{key}"
            if value:
                values.setdefault(entry, []).append(value)
            else:
                values[entry] = []

    def last(entry: str, default: str) -> str:
        found = values.get(entry)
        return found[-1] if found else default

    def flag(entry: str, default: str) -> bool:
        return last(entry, default) in ("yes", "true", "on", "1")

    argv = words(last("Service.ExecStart", ""))
    environment: dict[str, str] = {}
    for value in values.get("Service.Environment", []):
        for word in words(value):
            key, _, content = word.partition("=")
            environment[key] = content
    required = [w for v in values.get("Unit.Requires", []) for w in v.split()]
    bad = fragment and not argv and name.endswith(".service") and "@" not in name
    return Loaded(
        state="not-found" if not fragment else "bad-setting" if bad else "loaded",
        fragment=fragment,
        drop_ins=drop_ins,
        text=text,
        argv=tuple(argv),
        environment=tuple(f"{k}={v}" for k, v in environment.items()),
        requires=tuple(required),
        conditions=tuple(values.get("Unit.ConditionPathExists", [])),
        user=last("Service.User", "root"),
        groups=tuple(
            int(w)
            for v in values.get("Service.SupplementaryGroups", [])
            for w in v.split()
            if w.isdigit()
        ),
        private_mounts=flag("Service.PrivateMounts", "no"),
        kind=last("Service.Type", "simple"),
        restart=last("Service.Restart", "no"),
        restart_s=span(last("Service.RestartSec", "100ms")) or 0.0,
        stop_s=span(last("Service.TimeoutStopSec", "90s")),
        kill_mode=last("Service.KillMode", "control-group"),
        send_kill=flag("Service.SendSIGKILL", "yes"),
        limit_s=span(last("Unit.StartLimitIntervalSec", "10s")) or 0.0,
        limit_burst=int(last("Unit.StartLimitBurst", "5")),
        environment_files=tuple(v.lstrip("-") for v in values.get("Service.EnvironmentFile", [])),
    )


MASKED = loaded("masked", "", b"", (), ())


class Unit:
    """One unit's state."""

    __slots__ = (
        "active",
        "condition",
        "entered_at",
        "exec_code",
        "exec_status",
        "group",
        "invocation",
        "job",
        "left_at",
        "limit_hits",
        "loaded",
        "main",
        "name",
        "restarts",
        "result",
        "run",
        "started_at",
        "stop_asked",
        "stop_began",
        "sub",
        "timed_out",
    )

    def __init__(self, name: str, config: Loaded) -> None:
        self.name = name
        self.loaded = config
        self.active = "inactive"
        self.sub = "dead"
        self.result = "success"
        self.main: Process | None = None
        self.invocation = ""
        self.group = ""
        self.job = ""
        self.condition = True
        self.restarts = 0
        self.exec_code = 0
        self.exec_status = 0
        self.limit_hits: list[float] = []
        self.entered_at = 0.0
        self.left_at = 0.0
        self.started_at = 0.0
        self.stop_asked = False
        self.stop_began = 0.0
        self.timed_out = False
        self.run = 0
        """Counts what was begun with the unit, so that a timer can tell that it is outdated."""


class Systemd:
    """The manager of one host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.units: dict[str, Unit] = {}
        self.guard: Callable[[str], int] = lambda _prefix: 0
        self.tick: Callable[[], None] = lambda: None
        self.reload_fails = False
        self.tick_runs = 0
        self.ticking = False
        self.tick_stopped = False

    # -- loading ------------------------------------------------------------------------------------

    def find(self, name: str) -> tuple[str, str]:
        """Return (path, LoadState) of the unit file that counts."""
        files = self.host.files
        for place in PLACES:
            path = f"{place}/{name}"
            if path in files.links:
                target = files.links[path]
                if target == "/dev/null":
                    return path, "masked"
                return (path, "loaded") if target in files.data else (path, "not-found")
            if path in files.data:
                return path, "loaded"
        return "", "not-found"

    def drop_ins(self, name: str) -> list[str]:
        """Return the paths of the drop-ins that count, in order."""
        chosen: dict[str, str] = {}
        for place in PLACES:
            folder = f"{place}/{name}.d"
            for file in self.host.files.children.get(folder, ()):
                if file.endswith(".conf") and f"{folder}/{file}" in self.host.files.data:
                    chosen.setdefault(file, f"{folder}/{file}")
        return [chosen[file] for file in sorted(chosen)]

    def load(self, name: str) -> Loaded:
        """Read a unit from disk."""
        files = self.host.files
        path, state = self.find(name)
        paths = tuple(self.drop_ins(name))
        if state == "masked":
            return Loaded(**{**_fields(MASKED), "state": "masked", "fragment": path})
        text = files.data.get(files.links.get(path, path), b"") if path else b""
        return loaded(name, path, text, paths, tuple(files.data[p] for p in paths))

    def unit(self, name: str) -> Unit:
        """Return a unit, loading it when systemd does not hold it."""
        unit = self.units.get(name)
        if unit is None:
            unit = self.units[name] = Unit(name, self.load(name))
        return unit

    def reload(self) -> None:
        """Read all units again; processes are not touched."""
        if self.reload_fails:
            raise OSError("daemon-reload: Failed to reload daemon: Connection timed out")
        for name in list(self.units):
            unit = self.units[name]
            before = unit.loaded
            unit.loaded = self.load(name)
            if unit.loaded is not before and unit.active == "deactivating":
                self._arm_stop_timer(unit)
            if unit.loaded.state == "not-found" and unit.active == "inactive" and not unit.job:
                del self.units[name]

    def enabled(self, name: str) -> bool:
        """Say whether the unit starts at boot."""
        return f"{WANTS}/{name}" in self.host.files.links

    # -- starting -----------------------------------------------------------------------------------

    def start(self, name: str, *, by_hand: bool = True) -> None:
        """Queue a start job."""
        if not name.endswith(".service") or name.startswith("reconciler-"):
            if name == "reconciler-tick.timer":
                self.start_ticking()
            return
        unit = self.unit(name)
        if unit.active in ("inactive", "failed") and not unit.job:
            unit.loaded = unit.loaded if self.enabled(name) else self.load(name)
        if unit.loaded.state != "loaded":
            raise OSError(f"Failed to start {name}: Unit {name} is {unit.loaded.state}.")
        guard = f"reconciler-guard@{name.removesuffix('.service')}.service"
        template = f"{PERMANENT}/reconciler-guard@.service"
        if guard in unit.loaded.requires and template not in self.host.files.data:
            raise OSError(f"Failed to start {name}: Unit {guard} not found.")
        if unit.active == "active" or (unit.active == "activating" and unit.main is not None):
            return
        if unit.job == "start":
            return
        unit.job = "start"
        if by_hand:
            unit.restarts = 0
        if unit.active != "deactivating":
            self._soon(unit, JOB_TAKES_S, self._run_start)

    def _soon(self, unit: Unit, delay_s: float, action: Callable[[Unit], None]) -> None:
        """Do something to a unit later, unless another thing was begun with it or the host rebooted."""
        unit.run += 1
        run, generation = unit.run, self.host.generation

        def act() -> None:
            if unit.run == run and self.host.generation == generation:
                action(unit)

        self.host.world.after(delay_s, act)

    def _run_start(self, unit: Unit, waited_s: float = 0.0) -> None:
        host = self.host
        if unit.job != "start":
            return
        prefix = unit.name.removesuffix(".service")
        if f"reconciler-guard@{prefix}.service" in unit.loaded.requires:
            if host.locked and waited_s < GUARD_WAITS_S:
                # One thread runs this world: the guard's wait for the lock is a later try.
                self._soon(unit, 0.1, lambda u: self._run_start(u, waited_s + 0.1))
                return
            run = unit.run
            there = f"{PERMANENT}/reconciler-guard@.service" in host.files.data
            allowed = there and self.guard(prefix) == 0
            if unit.run != run or unit.job != "start":
                return
            if not allowed:
                unit.job = ""
                if unit.active == "activating":
                    self._set(unit, "inactive", "dead")
                host.log(unit.name, None, f"Dependency failed for {unit.name}.", 4)
                return
        if not self._conditions_hold(unit):
            unit.job, unit.condition = "", False
            if unit.active == "activating":
                self._set(unit, "inactive", "dead")
            host.log(
                unit.name, None, f"{unit.name} was skipped because of an unmet condition check."
            )
            return
        unit.condition = True
        now, config = host.world.now, unit.loaded
        unit.limit_hits = [t for t in unit.limit_hits if now - t < config.limit_s]
        if config.limit_s and len(unit.limit_hits) >= config.limit_burst:
            unit.job = ""
            if unit.result == "success":
                unit.result = "start-limit-hit"
            host.log(unit.name, None, f"{unit.name}: Start request repeated too quickly.", 4)
            self._set(unit, "failed", "failed")
            return
        unit.limit_hits.append(now)
        unit.job = ""
        self._spawn(unit)

    def _conditions_hold(self, unit: Unit) -> bool:
        for condition in unit.loaded.conditions:
            wanted = not condition.startswith("!")
            path = condition.lstrip("!")
            if (path in self.host.files.data) is not wanted:
                return False
        return True

    def _spawn(self, unit: Unit) -> None:
        host, config = self.host, unit.loaded
        world = host.world
        unit.invocation = world.hex(32)
        unit.group = f"/system.slice/{unit.name}"
        unit.result, unit.stop_asked, unit.timed_out = "success", False, False
        unit.exec_code = unit.exec_status = 0
        unit.started_at = world.now
        main = self._process(unit, config, list(config.argv))
        unit.main = main
        behaviour = main.behaviour
        gpus = self._gpus_of(config, behaviour.gpus)
        host.truth.starts.append(
            Started(
                world.now,
                unit.name,
                unit.invocation,
                tuple((p.unit, p.invocation, p.pid) for i in gpus for p in host.holders_of(i)),
                config.text,
            )
        )
        self._set(unit, "active", "running")
        host.log(unit.name, unit.invocation, f"Started {unit.name}.")
        main.port = behaviour.port or _port_of(main.argv)
        self._later(main, OPENS_GPU_AFTER_S, lambda: self._open_gpus(unit, main, gpus))
        if behaviour.crash_at_s is not None:
            self._later(main, behaviour.crash_at_s, lambda: self._crash(unit, main))

    def _later(self, process: Process, delay_s: float, action: Callable[[], None]) -> None:
        self.host.world.after(delay_s, lambda: action() if process.alive else None)

    def _process(self, unit: Unit, config: Loaded, argv: list[str]) -> Process:
        host = self.host
        process = host.new_process(unit.group)
        user = host.users.get(config.user) or {"uid": 990, "gid": 990, "groups": [990]}
        process.uid, process.gid = user["uid"], user["gid"]
        process.groups = [*user["groups"], *config.groups]
        process.argv = argv
        files = (host.files.data.get(path, b"") for path in config.environment_files)
        pairs = (pair for data in files for pair in environment_pairs(data)[0].items())
        process.environment = (*config.environment, *(f"{name}={value}" for name, value in pairs))
        process.exe = argv[0]
        process.comm = argv[0].rsplit("/", 1)[-1][:15]
        process.unit, process.invocation = unit.name, unit.invocation
        for assignment in config.environment:
            if assignment.startswith("RECONCILER_SERVER="):
                process.mark = assignment.partition("=")[2]
        if config.private_mounts:
            process.mount_ns = 4026540000 + int(unit.invocation[:6], 16)
        process.behaviour = host.behaviour_of(argv, config.text)
        process.ignores_term = process.behaviour.ignores_term
        return process

    def _gpus_of(self, config: Loaded, stated: tuple[int, ...] | None) -> tuple[int, ...]:
        if stated is not None:
            return stated
        for assignment in config.environment:
            key, _, value = assignment.partition("=")
            if key in VISIBLE:
                found = [self.host.gpu_index(name) for name in value.split(",") if name]
                return tuple(i for i in found if i is not None)
        return tuple(gpu.index for gpu in self.host.gpus)

    def _open_gpus(self, unit: Unit, main: Process, gpus: tuple[int, ...]) -> None:
        host, behaviour = self.host, main.behaviour
        for index in gpus:
            if host.used_mib(index) + behaviour.needs_mib > host.gpus[index].total_mib:
                host.log(
                    unit.name, unit.invocation, "torch.OutOfMemoryError: CUDA out of memory.", 3
                )
                self._exit(unit, main, 1, 1)
                return
        main.gpus, main.mib = gpus, behaviour.needs_mib
        extra = max(behaviour.workers, 1 if behaviour.leaves_child or behaviour.escapes else 0)
        for number in range(extra):
            worker = self._process(unit, unit.loaded, [*main.argv[:1], f"worker-{number}"])
            worker.behaviour = behaviour
            worker.ppid, worker.mount_ns, worker.gpus = main.pid, main.mount_ns, gpus
            worker.environ_readable = not behaviour.wipes_environment
            if number == 0 and (behaviour.leaves_child or behaviour.escapes):
                worker.stays = True
                worker.mib, main.mib = behaviour.needs_mib // 2, behaviour.needs_mib // 2
                worker.ignores_term = behaviour.child_ignores_term
                worker.unkillable = behaviour.unkillable_child
                if behaviour.escapes:
                    worker.cgroup = "/"

    def _crash(self, unit: Unit, main: Process) -> None:
        self.host.log(unit.name, unit.invocation, main.behaviour.crash_line, 3)
        self._exit(unit, main, 1, main.behaviour.exit_status)

    # -- ending -------------------------------------------------------------------------------------

    def deliver(self, process: Process, number: int, by: str) -> None:
        """Send a signal to a process; what it does with it is its behaviour."""
        host = self.host
        host.truth.signals.append(
            Signalled(host.world.now, process.pid, process.unit, process.invocation, number, by)
        )
        if number == KILL and process.unkillable:
            process.kill_pending = True
            return
        if number != KILL and process.ignores_term:
            return
        delay_s = 0.05 if number == KILL else process.behaviour.term_s
        self._later(process, delay_s, lambda: self._signalled(process, number))

    def _signalled(self, process: Process, number: int) -> None:
        unit = self.units.get(process.unit) if process.unit else None
        if unit is not None and unit.main is process:
            self._exit(unit, process, 1 if number == TERM else 2, 0 if number == TERM else number)
            return
        self.host.end(process)
        if unit is not None:
            self._group_changed(unit)

    def end_process(self, process: Process) -> None:
        """Let a process end by itself, with what that means for its unit."""
        unit = self.units.get(process.unit) if process.unit else None
        if unit is not None and unit.main is process:
            self._exit(unit, process, 1, process.behaviour.exit_status)
            return
        self.host.end(process)
        if unit is not None:
            self._group_changed(unit)

    def _exit(self, unit: Unit, main: Process, code: int, status: int) -> None:
        """Handle the end of the main process."""
        self.host.end(main)
        unit.main, unit.exec_code, unit.exec_status = None, code, status
        for worker in self.host.in_group(unit.group):
            if not worker.stays:
                self.host.end(worker)
        if unit.active != "deactivating":
            if code == 1 and status != 0:
                unit.result = "exit-code"
            elif code == 2:
                unit.result = "signal"
            self.host.log(
                unit.name, unit.invocation, f"{unit.name}: Main process exited, status={status}", 5
            )
        rest = self.host.in_group(unit.group)
        mode = unit.loaded.kill_mode
        if rest and mode in ("control-group", "mixed"):
            if unit.active != "deactivating":
                self._begin_stopping(unit, "final-sigterm")
                for process in rest:
                    self.deliver(process, TERM, "systemd")
            if mode == "mixed":
                for process in rest:
                    self.deliver(process, KILL, "systemd")
            return
        self._finish(unit)

    def _group_changed(self, unit: Unit) -> None:
        if unit.main is None and not self.host.in_group(unit.group):
            if unit.active == "deactivating":
                self._finish(unit)
            else:
                unit.group = ""

    def stop(self, name: str) -> None:
        """Queue a stop job."""
        if not name.endswith(".service") or name.startswith("reconciler-"):
            if name == "reconciler-tick.timer":
                self.tick_stopped = True
            return
        unit = self.unit(name)
        unit.job = ""
        if unit.active in ("inactive", "failed"):
            return
        if unit.active == "activating" and unit.main is None:
            unit.run += 1
            self._set(unit, "inactive", "dead")
            return
        if unit.active == "deactivating":
            return
        unit.stop_asked = True
        self._begin_stopping(unit, "stop-sigterm")
        targets = self.host.in_group(unit.group)
        if unit.loaded.kill_mode in ("mixed", "process"):
            targets = [p for p in targets if p is unit.main]
        if unit.loaded.kill_mode == "none":
            targets = []
        for process in targets:
            self.deliver(process, TERM, "systemd")

    def _begin_stopping(self, unit: Unit, sub: str) -> None:
        self._set(unit, "deactivating", sub)
        unit.stop_began = self.host.world.now
        self._arm_stop_timer(unit)

    def _arm_stop_timer(self, unit: Unit) -> None:
        limit = unit.loaded.stop_s
        if limit is None:
            unit.run += 1
            return
        left = unit.stop_began + limit - self.host.world.now
        self._soon(unit, max(0.0, left), self._stop_timed_out)

    def _stop_timed_out(self, unit: Unit) -> None:
        unit.timed_out = True
        if not unit.loaded.send_kill or unit.sub.endswith("sigkill"):
            unit.result = "timeout"
            self._finish(unit)
            return
        unit.result = "timeout"
        unit.sub = "stop-sigkill"
        unit.stop_began = self.host.world.now
        self.host.log(unit.name, unit.invocation, f"{unit.name}: State timed out. Killing.", 4)
        targets = self.host.in_group(unit.group)
        if unit.loaded.kill_mode == "process":
            targets = [p for p in targets if p is unit.main]
        for process in targets:
            self.deliver(process, KILL, "systemd")
        self._arm_stop_timer(unit)

    def _finish(self, unit: Unit) -> None:
        """Bring a unit to rest, or schedule its restart."""
        host = self.host
        if not host.in_group(unit.group):
            unit.group = ""
        unit.main = None if unit.main is None or not unit.main.alive else unit.main
        policy = unit.loaded.restart
        again = not unit.stop_asked and (
            policy == "always"
            or (policy == "on-failure" and unit.result != "success")
            or (policy == "on-success" and unit.result == "success")
        )
        if again and unit.job != "start":
            self._set(unit, "activating", "auto-restart")
            self._soon(unit, unit.loaded.restart_s, self._restart)
            return
        if unit.result == "success":
            self._set(unit, "inactive", "dead")
            if not self.enabled(unit.name) and not unit.group:
                unit.invocation = ""  # Unloaded at once: the next question finds nothing of it.
                unit.exec_code = unit.exec_status = 0
        else:
            self._set(unit, "failed", "failed")
            host.log(unit.name, None, f"{unit.name}: Failed with result '{unit.result}'.", 4)
        if unit.job == "start":
            unit.loaded = self.load(unit.name)
            self._soon(unit, JOB_TAKES_S, self._run_start)

    def _restart(self, unit: Unit) -> None:
        unit.restarts += 1
        unit.job = "start"
        self._run_start(unit)

    def _set(self, unit: Unit, active: str, sub: str) -> None:
        if active == "active":
            unit.entered_at = self.host.boottime()
        if active in ("inactive", "failed"):
            unit.left_at = self.host.boottime()
            unit.run += 1
        unit.active, unit.sub = active, sub

    def reset_failed(self, name: str) -> None:
        """Clear the failed state and the start limit."""
        unit = self.unit(name)
        unit.limit_hits.clear()
        unit.restarts = 0
        if unit.active == "failed":
            unit.result = "success"
            self._set(unit, "inactive", "dead")

    # -- boot and tick ------------------------------------------------------------------------------

    def power_off(self) -> None:
        """Forget everything that lives in memory."""
        for unit in self.units.values():
            unit.run += 1
        self.units.clear()
        self.ticking = False

    def boot(self) -> None:
        """Start what is enabled."""
        files = self.host.files
        for name in files.names(WANTS):
            if f"{WANTS}/{name}" in files.links:
                try:
                    self.start(name)
                except OSError as error:
                    self.host.log(name, None, str(error), 4)
        self.start_ticking()

    def start_ticking(self) -> None:
        """Let the tick run every 15 seconds, if it is installed and enabled."""
        self.tick_stopped = False
        if not self.ticking and f"{PERMANENT}/reconciler-tick.timer" in self.host.files.data:
            self.ticking = True
            self.host.world.after(TICK_EVERY_S, self._next_tick(self.host.generation))

    def _next_tick(self, generation: int) -> Callable[[], None]:
        def run() -> None:
            host = self.host
            there = f"{PERMANENT}/reconciler-tick.service" in host.files.data
            if host.generation != generation or not there or self.tick_stopped:
                self.ticking = self.ticking and host.generation != generation
                return
            host.world.after(TICK_EVERY_S, run)
            if not host.locked:
                self.tick_runs += 1
                with contextlib.suppress(PowerLost):
                    self.tick()

        return run

    # -- telling ------------------------------------------------------------------------------------

    def properties(self, name: str) -> dict[str, Any]:
        """Return what `Machine.unit` tells."""
        unit = self.unit(name)
        config = unit.loaded
        if unit.active == "inactive" and not unit.job and not self.enabled(name):
            config = unit.loaded = self.load(name)  # Nothing holds it in memory.
        main = unit.main
        stop = config.stop_s
        masked = config.state == "masked"
        found = bool(config.fragment)
        enabled = "masked" if masked else "enabled" if self.enabled(name) else "disabled"
        return {
            "Id": name,
            "LoadState": config.state,
            "ActiveState": unit.active,
            "SubState": unit.sub,
            "Result": unit.result,
            "MainPID": main.pid if main else 0,
            "ControlPID": 0,
            "NRestarts": unit.restarts,
            "ExecMainCode": unit.exec_code,
            "ExecMainStatus": unit.exec_status,
            "ControlGroup": unit.group,
            "InvocationID": unit.invocation,
            "Restart": config.restart,
            "KillMode": config.kill_mode,
            "SendSIGKILL": config.send_kill,
            "Type": config.kind,
            "FragmentPath": config.fragment,
            "DropInPaths": list(config.drop_ins),
            "UnitFileState": enabled if found else "",
            "NeedDaemonReload": False,
            "ConditionResult": unit.condition,
            "Job": 1 if unit.job else 0,
            "StartLimitBurst": config.limit_burst,
            "RemainAfterExit": False,
            "TriggeredBy": [],
            "OnFailure": [],
            "OnFailureOf": [],
            "OnSuccessOf": [],
            "UpheldBy": [],
            "Requires": ["sysinit.target", *config.requires],
            "TimeoutStopUSec": None if stop is None else round(stop * 1e6),
            "RestartUSec": round(config.restart_s * 1e6),
            "StartLimitIntervalUSec": round(config.limit_s * 1e6),
            "ActiveEnterTimestampMonotonic": round(unit.entered_at * 1e6),
            "InactiveEnterTimestampMonotonic": round(unit.left_at * 1e6),
            "ExecMainStartTimestampMonotonic": round(unit.started_at * 1e6),
        }


def _fields(config: Loaded) -> dict[str, Any]:
    return {name: getattr(config, name) for name in Loaded.__dataclass_fields__}


def _port_of(argv: list[str]) -> int | None:
    for flag, value in itertools.pairwise(argv):
        if flag in ("--port", "-p", "--serve") and value.isdigit():
            return int(value)
    return None


__all__ = ["Loaded", "Systemd", "Unit", "loaded", "words"]

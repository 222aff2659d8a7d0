"""The one simulated host: the shipped helper's own code on a virtual machine.

`SimulatedHost.call` runs `helper.acts.answer` on `SimulatedMachine`, which is `Machine` over the world of
`world.py` and `simulated_systemd.py`; the guard and the tick are the real ones as well. The rehearsal, the
simulator and the contract tests all use this host and no other.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from reconciler.core.errors import HostUnreachableError, OutcomeUnknownError
from reconciler.helper import acts
from reconciler.helper.enrol import (
    GUARD_UNIT,
    TICK_TIMER,
    TICK_UNIT,
    guard_unit_text,
    helper_path,
    tick_timer_text,
    tick_unit_text,
)
from reconciler.helper.guard import guard_main
from reconciler.helper.install import renew_at_start
from reconciler.helper.machine import Busy, Reading
from reconciler.helper.observe import launcher_text
from reconciler.helper.records import PERMANENT, STATE, encoded, launcher_path, sha256_of
from reconciler.helper.revert import tick_main
from reconciler.lab.simulated_systemd import RUNTIME, VENDOR, WANTS, Systemd
from reconciler.lab.world import (
    FREE_BYTES,
    SOUND_MODEL,
    TRIAL,
    Behaviour,
    Effect,
    Host,
    PowerLost,
    Process,
    World,
)

PROGRAM = "# The simulated hosts' helper: its code runs in the simulator's own process.\n"
DIGEST = sha256_of(PROGRAM.encode())[:12]
SIMULATED_KEY = "sk-simulated-key-in-clear"
"""What a simulated SGLang tells as its API key, as a real one tells its own."""
HOST_MOUNT_NS = 4026531840
UNIT_PLACES = (TRIAL, PERMANENT, RUNTIME, VENDOR)
ENOSPC, EROFS, ELOOP = 28, 30, 40


class SimulatedMachine:
    """`Machine` over one host of the world. One per request: it dies with the boot that it was made in."""

    def __init__(
        self, host: Host, systemd: Systemd, request: Mapping[str, Any] | None = None
    ) -> None:
        self.host = host
        self.systemd = systemd
        self.request = request
        self.generation = host.generation

    def _alive(self) -> None:
        if self.generation != self.host.generation:
            raise PowerLost

    @contextmanager
    def _effect(self, kind: str, detail: str) -> Iterator[None]:
        """Let the watchers in before and after something is done to the host."""
        self._alive()
        watchers = self.host.world.watchers
        for watcher in watchers:
            watcher(Effect(self.host, "before", kind, detail, self.request))
        self._alive()
        yield
        for watcher in watchers:
            watcher(Effect(self.host, "after", kind, detail, self.request))
        self._alive()

    # -- time, chance, identity ------------------------------------------------------------------

    def boottime(self) -> float:
        """See `Machine`."""
        self._alive()
        return self.host.boottime()

    def walltime(self) -> float:
        """See `Machine`."""
        return 1_800_000_000.0 + self.host.world.now

    def sleep(self, seconds: float) -> None:
        """See `Machine`."""
        self._alive()
        self.host.world.advance(seconds)
        self._alive()

    def boot_id(self) -> str:
        """See `Machine`."""
        return self.host.boot_id

    def nonce(self) -> str:
        """See `Machine`."""
        return self.host.world.hex(32)

    def identity(self) -> Reading:
        """See `Machine`."""
        host = self.host
        return {
            "known": {
                "machine_id": host.machine_id,
                "hostname": host.name,
                "boot_id": host.boot_id,
                "boottime": host.boottime(),
                "kernel": "6.1.0-sim",
                "python": "3.11.2",
                "uid": 0,
                "container": host.container,
                "pidfd": True,
            }
        }

    def mount_namespace(self) -> int | None:
        """See `Machine`."""
        return HOST_MOUNT_NS

    # -- files ----------------------------------------------------------------------------------

    def read(self, path: str) -> bytes | None:
        """See `Machine`."""
        self._alive()
        files = self.host.files
        if path in files.links:
            raise OSError(ELOOP, "Too many levels of symbolic links", path)
        return files.data.get(path)

    def _writable(self, path: str) -> None:
        files = self.host.files
        for prefix in files.full:
            if path.startswith(prefix):
                raise OSError(ENOSPC, "No space left on device", path)
        for prefix in files.read_only:
            if path.startswith(prefix):
                raise OSError(EROFS, "Read-only file system", path)

    def _note_overwriting(self, path: str) -> None:
        before = self.host.files.data.get(path)
        truth = self.host.truth
        if (
            before is not None
            and path.startswith(UNIT_PLACES)
            and (path, before) not in truth.produced
        ):
            truth.overwritten.append((path, before))

    def write(self, path: str, data: bytes, mode: int = 0o600, uid: int = 0, gid: int = 0) -> None:
        """See `Machine`."""
        if self.host.world.watchers:
            with self._effect("write", path):
                self._write(path, data, mode, uid, gid)
        else:
            self._alive()
            self._write(path, data, mode, uid, gid)

    def _write(self, path: str, data: bytes, mode: int, uid: int, gid: int) -> None:
        self._writable(path)
        files = self.host.files
        if path.startswith(UNIT_PLACES):
            self._note_overwriting(path)
            self.host.truth.produced.add((path, data))
        files.links.pop(path, None)
        files.put(path, data)
        files.meta[path] = (mode, uid, gid)

    def append(self, path: str, line: bytes) -> None:
        """See `Machine`."""
        with self._effect("append", path):
            self._writable(path)
            files = self.host.files
            ended = line if line.endswith(b"\n") else line + b"\n"
            files.put(path, files.data.get(path, b"") + ended)

    def remove(self, path: str) -> None:
        """See `Machine`."""
        with self._effect("remove", path):
            for prefix in self.host.files.read_only:
                if path.startswith(prefix):
                    raise OSError(EROFS, "Read-only file system", path)
            self._note_overwriting(path)
            self.host.files.drop(path)

    def remove_tree(self, path: str) -> None:
        """See `Machine`."""
        with self._effect("remove_tree", path):
            if not path.startswith(STATE + "/"):
                raise OSError(1, "not below the state directory", path)
            self.host.files.drop_tree(path)

    def listdir(self, path: str) -> list[str]:
        """See `Machine`."""
        self._alive()
        return self.host.files.names(path)

    def kind(self, path: str) -> str:
        """See `Machine`."""
        files = self.host.files
        if path in files.data:
            return "file"
        if path in files.links:
            return "link"
        return "dir" if path in files.children else "missing"

    def stat(self, path: str) -> Reading:
        """See `Machine`."""
        files = self.host.files
        stated = self.host.paths.get(path)
        if stated is not None:
            return {"known": {"free_bytes": FREE_BYTES, **stated}}
        kind = self.kind(files.links.get(path, path))
        free = 0 if any(path.startswith(p) for p in files.full) else FREE_BYTES
        if kind == "missing":
            return {"known": {"kind": "missing", "free_bytes": free}}
        mode, uid, gid = files.meta.get(path, (0o644, 0, 0))
        return {
            "known": {
                "kind": kind,
                "size": len(files.data.get(path, b"")),
                "mode": mode,
                "uid": uid,
                "gid": gid,
                "executable": bool(mode & 0o111) or kind == "dir",
                "free_bytes": free,
            }
        }

    def user(self, name: str) -> Reading:
        """See `Machine`."""
        return {"known": self.host.users.get(name)}

    def ensure_group(self, gid: int) -> None:
        """See `Machine`."""
        self.host.group_numbers.add(gid)

    def lock(self, timeout_s: float) -> AbstractContextManager[None]:
        """See `Machine`."""
        return self._locked(timeout_s)

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        self._alive()
        host = self.host
        if host.locked:
            # One thread runs this world: whoever holds the lock is our own caller and cannot go on meanwhile.
            raise Busy(f"not within {timeout_s:g} s")
        host.locked += 1
        try:
            yield
        finally:
            if self.generation == host.generation:
                host.locked -= 1

    # -- systemd -------------------------------------------------------------------------------------

    def unit(self, name: str) -> Reading:
        """See `Machine`."""
        self._alive()
        if self.host.systemd_fault:
            return {"unknown": self.host.systemd_fault}
        return {"known": self.systemd.properties(name)}

    def unit_files(self, name: str) -> Reading:
        """See `Machine`."""
        files = self.host.files
        config = self.systemd.unit(name).loaded
        path = config.fragment
        data = files.data.get(files.links.get(path, path)) if path else None
        package = "distribution" if path.startswith(VENDOR) else None
        return {
            "known": {
                "fragment": path or None,
                "text": None if data is None else data.decode("utf-8", "replace"),
                "link": path in files.links,
                "package": package,
                "drop_ins": [
                    {"path": p, "text": files.data.get(p, b"").decode("utf-8", "replace")}
                    for p in config.drop_ins
                ],
            }
        }

    def unit_command(self, name: str) -> Reading:
        """See `Machine`."""
        config = self.systemd.unit(name).loaded
        return {
            "known": {
                "argv": list(config.argv),
                "environment": list(config.environment),
                "environment_files": list(config.environment_files),
                "user": config.user,
                "supplementary_groups": [str(g) for g in config.groups],
            }
        }

    def reload(self) -> None:
        """See `Machine`."""
        with self._effect("reload", ""):
            self.systemd.reload()

    def start(self, unit: str) -> None:
        """See `Machine`."""
        with self._effect("start", unit):
            self.systemd.start(unit)

    def stop(self, unit: str) -> None:
        """See `Machine`."""
        with self._effect("stop", unit):
            self.systemd.stop(unit)

    def reset_failed(self, unit: str) -> None:
        """See `Machine`."""
        with self._effect("reset_failed", unit):
            self.systemd.reset_failed(unit)

    def enable(self, unit: str) -> None:
        """See `Machine`."""
        with self._effect("enable", unit):
            path = f"{WANTS}/{unit}"
            self._writable(path)
            self.host.files.link(path, f"{PERMANENT}/{unit}")

    def disable(self, unit: str) -> None:
        """See `Machine`."""
        with self._effect("disable", unit):
            self.host.files.drop(f"{WANTS}/{unit}")

    def verify_unit(self, name: str, text: str) -> Reading:
        """See `Machine`."""
        return {"known": [] if "ExecStart=" in text else [f"{name}: has no ExecStart="]}

    # -- processes and GPUs ----------------------------------------------------------------------------

    def environment(self, pid: int) -> Reading:
        """See `Machine`."""
        process = self.host.processes.get(pid)
        if process is None or not process.environ_readable:
            return {"unknown": "it cannot be read, or was wiped"}
        known = dict(pair.split("=", 1) for pair in process.environment)
        return {"known": {**known, "INVOCATION_ID": process.invocation or ""}}

    def processes(self, control_group: str) -> Reading:
        """See `Machine`."""
        self._alive()
        return {"known": [p.record() for p in self.host.in_group(control_group)]}

    def holders(self) -> Reading:
        """See `Machine`."""
        self._alive()
        if self.host.holders_fault:
            return {"unknown": self.host.holders_fault}
        found = []
        for process in self.host.processes.values():
            if process.gpus:
                record = process.record()
                record["minors"] = list(process.gpus)
                record["devices"] = [f"/dev/nvidia{i}" for i in process.gpus]
                record["via"] = "fd"
                found.append(record)
        return {"known": {"complete": True, "unreadable": 0, "holders": found}}

    def gpus(self) -> Reading:
        """See `Machine`."""
        self._alive()
        host = self.host
        if host.gpu_fault:
            return {"unknown": host.gpu_fault}
        cards = [
            {
                "uuid": gpu.uuid,
                "index": gpu.index,
                "bus_id": gpu.bus_id or f"00000000:{gpu.index + 1:02X}:00.0",
                "minor": gpu.index,
                "node": f"/dev/nvidia{gpu.index}",
                "used_mib": host.used_mib(gpu.index),
                "total_mib": gpu.total_mib,
                "temperature_c": 40,
                "utilization_pct": 0,
                "mig": gpu.mig,
                "persistence": gpu.persistence,
                "recovery_action": gpu.recovery_action,
            }
            for gpu in host.gpus
            if not gpu.lost
        ]
        return {"known": {"driver": host.driver, "gpus": cards}}

    def apps(self) -> Reading:
        """See `Machine`."""
        host = self.host
        if host.apps_fault:
            return {"unknown": host.apps_fault}
        return {
            "known": [
                {
                    "gpu_uuid": host.gpus[index].uuid,
                    "pid": process.pid,
                    "used_mib": process.mib,
                    "name": process.exe,
                }
                for process in host.processes.values()
                if process.mib
                for index in process.gpus
            ]
        }

    def evidence(self, pids: list[int]) -> Reading:
        """See `Machine`."""
        found = []
        for process in self.host.processes.values():
            if process.pid in pids:
                stack = (
                    ["[<0>] uvm_spin_loop+0xb4/0x100 [nvidia_uvm]"] if process.unkillable else None
                )
                pending = [9] if process.kill_pending else []
                found.append({**process.record(), "stack": stack, "pending": pending})
        return {"known": {"processes": found, "kernel": self.host.kernel[-40:]}}

    def container(self, vmid: int) -> Reading:
        """See `Machine`."""
        known = self.host.containers.get(vmid)
        return {"unknown": "no such container"} if known is None else {"known": dict(known)}

    def restart_container(self, vmid: int) -> Reading:
        """See `Machine`: everything in it ends, but what does not die keeps it from coming back."""
        with self._effect("restart_container", str(vmid)):
            for process in self.host.in_group(f"/lxc/{vmid}"):
                self.systemd.deliver(process, 9, "systemd")
            self.sleep(2.0)
        left = bool(self.host.in_group(f"/lxc/{vmid}"))
        said = "unable to shut down" if left else ""
        return {"known": {"exit_status": 255 if left else 0, "stdout": "", "stderr": said}}

    def reset_facts(self) -> Reading:
        """See `Machine`."""
        return {
            "known": {
                g.uuid: {"display": g.display, "links": g.links, "fabric": None}
                for g in self.host.gpus
                if not g.lost
            }
        }

    def set_persistence(self, uuid: str, *, on: bool) -> Reading:
        """See `Machine`."""
        with self._effect("set_persistence", uuid):
            index = self.host.gpu_index(uuid)
            assert index is not None, "a card that was just seen"
            self.host.gpus[index].persistence = "Enabled" if on else "Disabled"
        return {"known": {}}

    def reset_gpus(self, uuids: list[str]) -> Reading:
        """See `Machine`: what nobody holds is given back, and the driver asks for nothing any more."""
        with self._effect("reset_gpus", ",".join(uuids)):
            cards = [g for g in self.host.gpus if g.uuid in uuids]
            said = next((g.reset_says for g in cards), "")
            if any(g.persistence == "Enabled" for g in cards):
                said = "GPU 0 could not be reset: In use by another client"
            done = "successfully" in said
            for gpu in cards if done else []:
                gpu.leak_mib, gpu.recovery_action = 0, None
        return {"known": {"exit_status": 0 if done else 255, "stdout": said}}

    def signal(self, pid: int, start_ticks: int, number: int) -> str:
        """See `Machine`."""
        process = self.host.processes.get(pid)
        if process is None:
            return "gone"
        if process.start_ticks != start_ticks:
            return "refused: another process has this number now"
        with self._effect("signal", str(pid)):
            self.systemd.deliver(process, number, "helper")
        return "sent"

    def kill_group(self, control_group: str) -> str:
        """See `Machine`."""
        inside = self.host.in_group(control_group)
        if not inside:
            return "gone"
        with self._effect("kill_group", control_group):
            for process in inside:
                self.systemd.deliver(process, 9, "helper")
        return "sent"

    def listeners(self, port: int, main_pid: int) -> Reading:  # noqa: ARG002  # one network namespace here
        """See `Machine`."""
        found = [
            {
                "address": "0.0.0.0",  # noqa: S104  # what a server in the model listens on
                "inode": 100_000 + p.pid,
                "pids": [p.pid],
                "units": [p.unit] if p.unit else [],
                "cgroups": [p.cgroup],
            }
            for p in self.host.processes.values()
            if p.port == port and listening(self.host, p)
        ]
        return {"known": found}

    def kernel_log(self, cursor: str | None) -> Reading:
        """See `Machine`."""
        lines = self.host.kernel
        since = len(lines) if cursor is None else int(cursor)
        return {"known": {"cursor": str(len(lines)), "lines": lines[since:]}}

    def journal(
        self, unit: str, invocation: str | None, lines: int, until: float | None = None
    ) -> Reading:
        """See `Machine`."""
        found = [
            {"at": 1_800_000_000.0 + at, "message": message, "priority": priority}
            for at, name, run, priority, message in self.host.journal
            if name == unit
            and (invocation is None or run in (invocation, None))
            and (until is None or 1_800_000_000.0 + at <= until)
        ]
        return {"known": found[-lines:]}

    def fetch(self, request: dict[str, Any]) -> Reading:
        """See `Machine`."""
        self._alive()
        return answer_http(self.host, request)

    def engine_facts(self, asked: dict[str, Any]) -> dict[str, Reading]:
        """See `Machine`. All is well, but for what the host was told of."""
        self._alive()
        host = self.host
        told = host.engine_facts
        found: dict[str, Reading] = {
            "models": {
                "known": [
                    {
                        "known": {
                            **SOUND_MODEL,
                            "path": str(model["source"]),
                            **host.models.get(str(model["source"]), {}),
                        }
                    }
                    for model in asked["models"]
                ]
            },
            "nodes": {"known": dict.fromkeys(asked["nodes"], "usable")},
            "limits": {
                "known": {
                    "shm": {"free": 64 << 30, "total": 64 << 30},
                    "files": 1 << 20,
                    "memory": {"total": 256 << 30, "available": 250 << 30},
                    "disks": dict.fromkeys(asked["places"], 500 << 30),
                }
            },
        }
        program = asked["python"] or asked["binary"]
        if asked["image"]:
            found["image"] = {"known": {"id": "sha256:" + "0" * 64}}
        elif program:
            version = host.versions.get(program)
            found["program"] = {
                "known": {"python": "3.12.3", "version": version, "digest": f"{program}-{version}"}
            }
        if asked["kernels"]:
            found["capabilities"] = {"known": {gpu.uuid: "9.0" for gpu in host.gpus}}
        return {**found, **told}

    def run_as(self, user: str | None, argv: list[str], timeout_s: float) -> Reading:  # noqa: ARG002
        """See `Machine`. Only programs that the host was told of can run."""
        for length in range(len(argv), 0, -1):
            text = self.host.programs.get(" ".join(argv[:length]))
            if text is not None:
                return {"known": {"exit_status": 0, "stdout": text, "stderr": ""}}
        return {"unknown": f"{argv[0]}: no such program on this host"}


# -- HTTP --------------------------------------------------------------------------------------------


def listening(host: Host, process: Process) -> bool:
    """Say whether a process has opened its port."""
    if process.port is None:
        return False
    if process.unit is None:
        return True
    behaviour = process.behaviour
    opens = behaviour.listens_after_s
    opens = behaviour.load_s / 2 if opens is None else opens
    return host.world.now - process.started_at >= opens


def ready(host: Host, process: Process) -> bool:
    """Say whether a server has loaded its model."""
    behaviour = process.behaviour
    return not behaviour.never_ready and host.world.now - process.started_at >= behaviour.load_s


def server_on(host: Host, port: int) -> Process | None:
    """Return the process that answers on a port: the first listener."""
    for process in host.processes.values():
        if process.port == port and listening(host, process):
            return process
    return None


def answer_http(host: Host, request: Mapping[str, Any]) -> Reading:
    """Answer as an engine does in its present state."""
    process = server_on(host, int(request["port"]))
    if process is None:
        return {"unknown": "connection refused"}
    status, body = respond(host, process, str(request["path"]).partition("?")[0])
    data = body if isinstance(body, str) else json.dumps(body)
    return {
        "known": {
            "status": status,
            "headers": {"content-type": "application/json"},
            "body": base64.b64encode(data.encode()).decode(),
            "truncated": False,
            "took_s": 0.01,
        }
    }


def respond(host: Host, process: Process, path: str) -> tuple[int, Any]:
    """Return status and body for one path."""
    behaviour = process.behaviour
    if not ready(host, process):
        return 503, {"error": {"message": "Loading model", "code": 503}}
    model = behaviour.model or model_of(process.argv)
    running = requests_in_flight(host, process)
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    if path in ("/health", "/health_generate", "/ping"):
        return 200, {"status": "ok"}
    if path == "/v1/models":
        entry = {"id": model, "object": "model", "owned_by": "sim", "max_model_len": 32768}
        return 200, {"object": "list", "data": [entry]}
    if path in ("/v1/completions", "/v1/chat/completions", "/completion", "/generate"):
        if behaviour.generation_status != 200:
            return behaviour.generation_status, {"error": {"message": "simulated failure"}}
        chat = "chat" in path
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if chat:
            choice["message"] = {"role": "assistant", "content": "Hello"}
        else:
            choice["text"] = " world"
        kind = "chat.completion" if chat else "text_completion"
        answer = {"id": "cmpl-1", "object": kind, "model": model, "choices": [choice]}
        return 200, {**answer, "created": 1_800_000_000, "usage": usage}
    if path == "/metrics":
        return 200, metrics_text(running)
    if path in ("/get_server_info", "/server_info"):
        return 200, {**server_arguments(process.argv), **behaviour.says, "internal_states": [{}]}
    if path in ("/get_model_info", "/model_info"):
        return 200, {"model_path": model, "is_generation": True}
    if path in ("/get_load", "/v1/loads", "/load"):
        return 200, [{"dp_rank": 0, "num_reqs": running, "num_waiting_reqs": 0, "num_tokens": 0}]
    if path == "/slots":
        return 200, [{"id": i, "is_processing": i < running} for i in range(max(4, running))]
    if path == "/props":
        told = server_arguments(process.argv)
        props = {"model_path": told.get("model"), "total_slots": told.get("parallel", 4)}
        return 200, {**props, **behaviour.says}
    return 404, {"detail": "Not Found"}


def server_arguments(argv: list[str]) -> dict[str, Any]:
    """Return an argv as SGLang describes itself: underscores, numbers as numbers, NEXTN resolved, the key in clear."""
    found: dict[str, Any] = {"api_key": SIMULATED_KEY}
    words = [*argv, "--"]
    for at, word in enumerate(words[:-1]):
        if not word.startswith("--"):
            continue
        name, equals, glued = word[2:].partition("=")
        value: Any = glued if equals else words[at + 1]
        if not equals and value.startswith("--"):
            value = True
        elif isinstance(value, str) and value.lstrip("-").isdigit():
            value = int(value)
        found[name.replace("-", "_")] = value
    if found.get("speculative_algorithm") == "NEXTN":
        found["speculative_algorithm"] = "EAGLE"
    if found.get("speculative_eagle_topk") == 1 and "speculative_num_steps" in found:
        found["speculative_num_draft_tokens"] = found["speculative_num_steps"] + 1
    return found


def metrics_text(running: int) -> str:
    """Return counters in the names of every engine."""
    lines = [
        f'sglang:num_running_reqs{{model_name="m"}} {running}.0',
        'sglang:num_queue_reqs{model_name="m"} 0.0',
        f'vllm:num_requests_running{{model_name="m"}} {running}.0',
        'vllm:num_requests_waiting{model_name="m"} 0.0',
        f"llamacpp:requests_processing {running}",
        "llamacpp:requests_deferred 0",
    ]
    return "\n".join(lines) + "\n"


def model_of(argv: list[str]) -> str:
    """Return the model's name as an argv gives it."""
    for flag in ("--served-model-name", "--alias", "--model-path", "--model", "-m"):
        if flag in argv[:-1] and argv[argv.index(flag) + 1] != "sglang.launch_server":
            return argv[argv.index(flag) + 1]
    return "model"


def requests_in_flight(host: Host, process: Process) -> int:
    """Return how many requests a server is working on."""
    behaviour = process.behaviour
    return (
        behaviour.in_flight
        if host.world.now - process.started_at < behaviour.in_flight_ends_s
        else 0
    )


# -- the host ----------------------------------------------------------------------------------------


class SimulatedHost:
    """A host of the world with the helper's real code on it."""

    def __init__(self, world: World, name: str, *, gpus: int, gpu_mib: int, enrolled: bool) -> None:
        self.world = world
        self.name = name
        self.host = Host(world, name, gpus, gpu_mib)
        self.systemd = Systemd(self.host)
        self.systemd.guard = self.run_guard
        self.systemd.tick = self.run_tick
        self.enrolled = enrolled
        if enrolled:
            self.enrol()
        world.hosts[name] = self.host

    def enrol(self) -> None:
        """Leave what enrolment leaves: the helper, its units, the baselines of the GPUs as they are now."""
        self.enrolled = True
        files = self.host.files
        for path, data in enrolment().items():
            files.put(path, data)
        baselines = {
            gpu.uuid: {
                "used_mib": gpu.baseline_mib,
                "total_mib": gpu.total_mib,
                "driver": self.host.driver,
                "mig": None,
                "persistence": "Disabled",
                "learned_at": 1_800_000_000.0,
            }
            for gpu in self.host.gpus
        }
        files.put(f"{STATE}/baselines.json", encoded({**baselines, "version": 1}))
        files.link(f"{WANTS}/{TICK_TIMER}", f"{PERMANENT}/{TICK_TIMER}")
        self.systemd.start_ticking()

    def machine(self, request: Mapping[str, Any] | None = None) -> SimulatedMachine:
        """Return the machine as a helper process that starts now sees it."""
        return SimulatedMachine(self.host, self.systemd, request)

    def run_guard(self, prefix: str) -> int:
        """Run the real guard verb, as the guard's unit does."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = guard_main(self.machine(), prefix, renew_at_start)
        if said.getvalue():
            self.host.log(f"{prefix}.service", None, said.getvalue().strip(), 4)
        return status

    def run_tick(self) -> None:
        """Run the real tick verb, as the timer does."""
        with contextlib.redirect_stdout(io.StringIO()):
            tick_main(self.machine())

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request to the helper on this host and return its answer.

        Raises:
            HostUnreachableError: The host is down; nothing was executed.
            OutcomeUnknownError: The host went down meanwhile, or a watcher lost the reply.
        """
        host, world = self.host, self.world
        world.advance(world.call_takes_s / 2)
        if not host.is_up():
            raise HostUnreachableError(self.name, "no route to host")
        verb = str(request.get("verb"))
        for watcher in world.watchers:
            watcher(Effect(host, "before", "call", verb, request))
        if not host.is_up():
            raise HostUnreachableError(self.name, "no route to host")
        answer = self.execute(request)
        for watcher in world.watchers:
            watcher(Effect(host, "after", "call", verb, request))
        world.advance(world.call_takes_s / 2)
        return answer

    def execute(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the helper on a request now, without the way there and back: for effects that land late."""
        program = helper_path(DIGEST) if self.is_installed() else None
        try:
            return acts.answer(dict(request), self.machine(request), program)
        except PowerLost:
            raise OutcomeUnknownError(self.name, "the connection was lost") from None

    def is_installed(self) -> bool:
        """Say whether a helper lies on this host."""
        return bool(self.host.files.children.get("/usr/local/lib/reconciler"))

    def reboot(self) -> None:
        """Cut the power; the host is back after `world.BOOT_TAKES_S` and starts what is enabled."""
        self.systemd.power_off()
        self.host.power_off()
        generation = self.host.generation

        def boot() -> None:
            if self.host.generation == generation:
                self.systemd.boot()

        self.world.after(self.host.up_at - self.world.now, boot)


@functools.lru_cache(maxsize=1)
def enrolment() -> dict[str, bytes]:
    """Return the files that enrolment leaves on a host."""
    host = {
        "version": 1,
        "helper": DIGEST,
        "enrolled_at": 1_800_000_000.0,
        "protect": [],
        "sudo_user": None,
    }
    return {
        helper_path(DIGEST): PROGRAM.encode(),
        launcher_path(DIGEST): launcher_text(DIGEST).encode(),
        f"{PERMANENT}/{GUARD_UNIT}": guard_unit_text(DIGEST).encode(),
        f"{PERMANENT}/{TICK_UNIT}": tick_unit_text(DIGEST).encode(),
        f"{PERMANENT}/{TICK_TIMER}": tick_timer_text().encode(),
        f"{STATE}/host.json": encoded(host),
    }


def add_host(
    world: World, name: str, *, gpus: int = 4, gpu_mib: int = 24_576, enrolled: bool = True
) -> SimulatedHost:
    """Add a host to a world."""
    return SimulatedHost(world, name, gpus=gpus, gpu_mib=gpu_mib, enrolled=enrolled)


__all__ = [
    "DIGEST",
    "PROGRAM",
    "Behaviour",
    "SimulatedHost",
    "SimulatedMachine",
    "World",
    "add_host",
]

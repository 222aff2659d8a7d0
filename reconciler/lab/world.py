"""The simulated world's ground truth: a virtual clock, files, processes, GPUs, listeners, logs.

Nothing here decides anything: it is what happens on hosts when somebody acts on them, and what a test
may look at (`Truth`) that the code under test never sees. systemd's part is `simulated_systemd.py`; the
helper's view is `SimulatedMachine` in `simulated.py`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from reconciler.helper.records import LIB, PERMANENT, RUN, STATE, TRIAL

TERM, KILL = 15, 9
TICKS_PER_S = 100
FREE_BYTES = 50 * 2**30
BOOT_TAKES_S = 20.0
OPENS_GPU_AFTER_S = 0.8  # An engine opens the device about a second after its start.


class PowerLost(BaseException):
    """The host lost power while the helper was running on it: nothing of it goes on, not even cleanup."""


Stage = Literal["before", "after"]


@dataclass(slots=True)
class Effect:
    """One thing that is about to be done to a host, or has just been done.

    `kind` is a mutating method of `Machine` (write, append, remove, remove_tree, reload, start, stop,
    reset_failed, enable, disable, signal, kill_group) or `call` for a whole request. `detail` is its path,
    unit, pid or verb.
    """

    host: Host
    stage: Stage
    kind: str
    detail: str
    request: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a server behaves that a unit's argv starts. Times are virtual seconds since its start."""

    load_s: float = 5.0
    listens_after_s: float | None = None
    """When the port opens; until `load_s` it answers 503. None: half of `load_s`."""
    crash_at_s: float | None = None
    """Exits by itself at this time, with `exit_status`."""
    exit_status: int = 1
    crash_line: str = "RuntimeError: simulated crash"
    never_ready: bool = False
    needs_mib: int = 20_000
    """On each of its GPUs. More than is free ends the process, as CUDA out of memory does."""
    says: Mapping[str, Any] = field(default_factory=dict)
    """What it says of itself otherwise than its command line does."""
    gpus: tuple[int, ...] | None = None
    """Indexes; None: what CUDA_VISIBLE_DEVICES and its like say, else all."""
    term_s: float = 0.2
    ignores_term: bool = False
    workers: int = 0
    """Further processes in the control group that hold the same GPUs and end with the main process."""
    leaves_child: bool = False
    """One worker outlives the main process, inside the control group."""
    escapes: bool = False
    """That worker has moved itself out of the control group."""
    child_ignores_term: bool = True
    unkillable_child: bool = False
    wipes_environment: bool = False
    """Its workers' environment reads as zero bytes, as after setproctitle."""
    model: str | None = None
    """What /v1/models answers; None: what the argv says."""
    port: int | None = None
    in_flight: int = 0
    in_flight_ends_s: float = 0.0
    """Until when the requests stay in flight, counted from the start."""
    generation_status: int = 200
    speeds: Mapping[str, float] = field(default_factory=dict)
    """What a gate measures: names as in specs (`decode_tps`, `output_tps`, `ttft_p95`, ...)."""
    http: tuple[str, ...] = ()
    """Options of the real stand-in server (`scripts/fakegpu-hold`) that answers for it in a rehearsal."""
    http_key: bool = False
    """That server wants a key."""


class Process:
    """One process of the world."""

    __slots__ = (
        "alive",
        "argv",
        "behaviour",
        "cgroup",
        "comm",
        "environ_readable",
        "environment",
        "exe",
        "gid",
        "gpus",
        "groups",
        "ignores_term",
        "invocation",
        "kill_pending",
        "mark",
        "mib",
        "mount_ns",
        "pid",
        "port",
        "ppid",
        "start_ticks",
        "started_at",
        "stays",
        "uid",
        "unit",
        "unkillable",
    )

    def __init__(self, pid: int, start_ticks: int, cgroup: str) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.cgroup = cgroup
        self.alive = True
        self.argv: list[str] = []
        self.behaviour = Behaviour()
        self.comm = "python"
        self.environ_readable = True
        self.environment: tuple[str, ...] = ()
        self.exe = "/usr/bin/python3.11"
        self.uid = 0
        self.gid = 0
        self.groups: list[int] = []
        self.gpus: tuple[int, ...] = ()
        self.ignores_term = False
        self.invocation: str | None = None
        self.kill_pending = False
        self.mark: str | None = None
        self.mib = 0
        self.mount_ns = 4026531840
        self.port: int | None = None
        self.ppid = 1
        self.started_at = 0.0
        self.stays = False
        self.unit: str | None = None
        self.unkillable = False

    def record(self) -> dict[str, Any]:
        """Return the process as `Machine` tells it."""
        return {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "state": "S",
            "threads": 1,
            "ppid": self.ppid,
            "uid": self.uid,
            "gid": self.gid,
            "groups": self.groups,
            "exe": self.exe,
            "comm": self.comm,
            "cgroup": self.cgroup,
            "nspid": [self.pid],
            "mount_ns": self.mount_ns,
            "argv": self.argv,
            "invocation": self.invocation if self.environ_readable else None,
            "mark": self.mark if self.environ_readable else None,
            "environ_readable": self.environ_readable,
            "kill_pending": self.kill_pending,
            "wchan": "uvm_spin_loop" if self.unkillable else None,
        }


@dataclass(slots=True)
class Gpu:
    """One card. `lag_s`: freed memory stays visible so long; `leak_mib`: in use, and nobody's."""

    uuid: str
    index: int
    total_mib: int
    bus_id: str = ""
    baseline_mib: int = 4
    leak_mib: int = 0
    lag_s: float = 0.0
    lost: bool = False
    mig: str | None = None
    persistence: str = "Disabled"
    recovery_action: str | None = None
    display: str | None = "Disabled"
    links: int | None = 0
    reset_says: str = "GPU was successfully reset.\nAll done."
    lagging: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Started:
    """A start that systemd executed, with everybody who held the unit's GPUs at that instant."""

    at: float
    unit: str
    invocation: str
    holders: tuple[tuple[str | None, str | None, int], ...]
    text: bytes


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal that was delivered. `by` is systemd or helper."""

    at: float
    pid: int
    unit: str | None
    invocation: str | None
    number: int
    by: str


@dataclass(slots=True)
class Truth:
    """What really happened on one host. The code under test never reads it."""

    starts: list[Started] = field(default_factory=list)
    signals: list[Signalled] = field(default_factory=list)
    overwritten: list[tuple[str, bytes]] = field(default_factory=list)
    """Unit files, other than by the helper written before, that the helper replaced or removed."""
    produced: set[tuple[str, bytes]] = field(default_factory=set)


SOUND_MODEL: Mapping[str, Any] = MappingProxyType(
    {
        "found": True,
        "form": "directory",
        "config": {
            "architectures": ["SimulatedForCausalLM"],
            "model_type": "simulated",
            "torch_dtype": "bfloat16",
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "max_position_embeddings": 1_048_576,
        },
        "tokenizer": True,
        "index": "model.safetensors.index.json",
        "index_problem": None,
        "shards": 2,
        "missing": [],
        "missing_count": 0,
        "broken": [],
        "broken_count": 0,
        "bytes": 1 << 30,
    }
)
"""A model that is whole and fits anywhere."""


class Files:
    """A file tree. Everything is durable at once, as the helper's atomic writes are."""

    __slots__ = ("children", "data", "full", "links", "meta", "read_only")

    def __init__(self, data: Mapping[str, bytes]) -> None:
        self.data: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.meta: dict[str, tuple[int, int, int]] = {}
        self.children: dict[str, dict[str, None]] = {}
        self.full: list[str] = []
        self.read_only: list[str] = []
        for path, content in data.items():
            self.put(path, content)

    def put(self, path: str, content: bytes) -> None:
        """Place a file, by nobody."""
        if path not in self.data:
            self._enter(path)
        self.data[path] = content

    def link(self, path: str, target: str) -> None:
        """Place a symbolic link."""
        self._enter(path)
        self.links[path] = target

    def _enter(self, path: str) -> None:
        while True:
            parent, _, name = path.rpartition("/")
            names = self.children.setdefault(parent, {})
            if name in names:
                return
            names[name] = None
            if not parent:
                return
            path = parent

    def drop(self, path: str) -> None:
        """Remove a file or a link."""
        gone = self.data.pop(path, None) is not None
        if self.links.pop(path, None) is not None or gone:
            self.meta.pop(path, None)
            parent, _, name = path.rpartition("/")
            self.children[parent].pop(name, None)

    def drop_tree(self, path: str) -> None:
        """Remove a directory and all below."""
        prefix = path + "/"
        for known in [p for p in self.data if p.startswith(prefix)]:
            self.drop(known)
        for known in [p for p in self.links if p.startswith(prefix)]:
            self.drop(known)
        for known in [p for p in self.children if p == path or p.startswith(prefix)]:
            del self.children[known]
        parent, _, name = path.rpartition("/")
        self.children.get(parent, {}).pop(name, None)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory."""
        return sorted(self.children.get(path, ()))


class World:
    """All hosts on one clock. Time passes only in `advance`, and is what `sleep` uses up."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)  # noqa: S311  # reproducible on purpose
        self.hosts: dict[str, Host] = {}
        self.watchers: list[Callable[[Effect], None]] = []
        self.call_takes_s = 0.01
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def hex(self, digits: int) -> str:
        """Return fresh hex digits, the same for the same seed."""
        return f"{self.random.getrandbits(digits * 4):0{digits}x}"

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let something happen later. It cannot be cancelled: the action looks whether it still applies."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, action))

    def advance(self, seconds: float) -> None:
        """Let time pass, with all that happens meanwhile. May be called from within an event."""
        end = self.now + seconds
        events = self._events
        while events and events[0][0] <= end:
            at, _, action = heapq.heappop(events)
            self.now = max(self.now, at)
            try:
                action()
            except PowerLost:
                continue
        self.now = max(self.now, end)

    def on_effect(self, watcher: Callable[[Effect], None]) -> None:
        """Call `watcher` before and after each effect on any host; see `Effect`.

        It may change the world (`host.reboot()`, `host.add_process(...)`, `world.advance(...)`), raise
        `OutcomeUnknownError` or any other exception of its own around a `call` (a lost reply, a controller
        that dies), or OSError before an effect (the effect fails).
        """
        self.watchers.append(watcher)


class Host:
    """One machine of the world."""

    def __init__(self, world: World, name: str, gpus: int, gpu_mib: int) -> None:
        self.world = world
        self.name = name
        self.machine_id = world.hex(32)
        self.boot_id = self._new_boot_id()
        self.booted_at = world.now - 1000.0
        self.generation = 0
        self.up_at = world.now
        self.container: str | None = None
        self.files = Files({})
        self.processes: dict[int, Process] = {}
        self.gpus = [Gpu(f"GPU-{i:08x}-{name}", i, gpu_mib) for i in range(gpus)]
        self.gpu_fault: str | None = None
        self.holders_fault: str | None = None
        self.apps_fault: str | None = None
        self.systemd_fault: str | None = None
        self.driver = "550.54.15"
        self.containers: dict[int, dict[str, Any]] = {}
        """By number, when this host plays a Proxmox node: {status, lock}."""
        self.kernel: list[str] = []
        self.journal: list[tuple[float, str, str | None, int, str]] = []
        self.users: dict[str, dict[str, Any]] = {
            "root": {"uid": 0, "gid": 0, "groups": [0]},
            "deploy": {"uid": 1001, "gid": 1001, "groups": [1001]},
            "sglang": {"uid": 990, "gid": 990, "groups": [990]},
        }
        self.programs: dict[str, str] = {}
        """What a program prints for `--help`, by its path (or `path -m module`)."""
        self.paths: dict[str, dict[str, Any]] = {
            "/usr/bin/systemctl": {
                "kind": "file",
                "size": 1,
                "mode": 0o755,
                "uid": 0,
                "gid": 0,
                "executable": True,
            }
        }
        """What `stat` says of paths that are no files of the model: overrides the default."""
        self.versions: dict[str, str] = {}
        """Which version of its engine a program is, by its path."""
        self.models: dict[str, dict[str, Any]] = {}
        """What lies here of a model, by its source, beside `SOUND_MODEL`: overrides of `helper.inspection.model_facts`."""
        self.engine_facts: dict[str, Any] = {}
        """Other readings of `Machine.engine_facts` than those of a host on which all is well."""
        self.behaviours: list[tuple[str, Behaviour]] = []
        self.locked = 0
        self.truth = Truth()
        self.next_pid = 1000
        self.group_numbers: set[int] = set()

    # -- clock and boot ----------------------------------------------------------------------------

    def _new_boot_id(self) -> str:
        raw = self.world.hex(32)
        return f"{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"

    def boottime(self) -> float:
        """Return seconds since this boot."""
        return self.world.now - self.booted_at

    def is_up(self) -> bool:
        """Say whether the host answers at all."""
        return self.world.now >= self.up_at

    def power_off(self) -> None:
        """End everything that lives in memory, and begin another boot."""
        self.generation += 1
        for process in self.processes.values():
            process.alive = False  # What was to happen to it later looks for this.
        self.processes.clear()
        for gpu in self.gpus:
            gpu.lagging.clear()
            gpu.leak_mib = 0
        files = self.files
        for path in [p for p in files.data if p.startswith("/run/")]:
            files.drop(path)
        for path in [p for p in files.links if p.startswith("/run/")]:
            files.drop(path)
        for path in [p for p in files.children if p.startswith("/run")]:
            del files.children[path]
        self.kernel.clear()
        self.journal.clear()
        self.locked = 0
        self.boot_id = self._new_boot_id()
        self.booted_at = self.world.now
        self.up_at = self.world.now + BOOT_TAKES_S

    # -- what runs --------------------------------------------------------------------------------

    def behave(self, words: str, behaviour: Behaviour) -> None:
        """Say how servers behave whose argv, joined by blanks, or unit text contains `words`. The last said wins."""
        self.behaviours.append((words, behaviour))

    def behaviour_of(self, argv: list[str], unit_text: bytes = b"") -> Behaviour:
        """Return how a server with this argv, started by this unit, behaves."""
        line = " ".join(argv)
        for words, behaviour in reversed(self.behaviours):
            if words in line or words.encode() in unit_text:
                return behaviour
        return Behaviour()

    def add_process(
        self,
        cgroup: str = "/user.slice/user-1000.slice/session-1.scope",
        *,
        gpus: tuple[int, ...] = (),
        mib: int = 0,
        exe: str = "/home/someone/train",
        uid: int = 1000,
        port: int | None = None,
    ) -> Process:
        """Start a process that is not ours: a foreign holder, a neighbour, or with port a listener."""
        process = self.new_process(cgroup)
        process.exe = exe
        process.comm = exe.rsplit("/", 1)[-1][:15]
        process.uid = process.gid = uid
        process.groups = [uid]
        process.argv = [exe]
        process.gpus, process.mib, process.port = gpus, mib, port
        return process

    def new_process(self, cgroup: str) -> Process:
        """Return a new process in a control group."""
        self.next_pid += 1
        process = Process(self.next_pid, int(self.boottime() * TICKS_PER_S), cgroup)
        process.started_at = self.world.now
        self.processes[process.pid] = process
        return process

    def end(self, process: Process) -> None:
        """Let a process be gone, and its memory with it (after the card's lag)."""
        if not process.alive:
            return
        process.alive = False
        self.processes.pop(process.pid, None)
        for index in process.gpus:
            gpu = self.gpus[index]
            if gpu.lag_s and process.mib:
                gpu.lagging.append((self.world.now + gpu.lag_s, process.mib))

    def in_group(self, control_group: str) -> list[Process]:
        """Return the processes in a control group and below it."""
        prefix = control_group + "/"
        return [
            p
            for p in self.processes.values()
            if p.cgroup == control_group or p.cgroup.startswith(prefix)
        ]

    # -- GPUs ---------------------------------------------------------------------------------------

    def used_mib(self, index: int) -> int:
        """Return what the driver says is in use on a card."""
        gpu, now = self.gpus[index], self.world.now
        used = gpu.baseline_mib + gpu.leak_mib
        for process in self.processes.values():
            if index in process.gpus:
                used += process.mib
        if gpu.lagging:
            gpu.lagging[:] = [entry for entry in gpu.lagging if entry[0] > now]
            used += sum(mib for _, mib in gpu.lagging)
        return used

    def holders_of(self, index: int) -> list[Process]:
        """Return who has a card open: ground truth."""
        return [p for p in self.processes.values() if index in p.gpus]

    def gpu_index(self, name: str) -> int | None:
        """Return the index of a card by UUID or index text."""
        for gpu in self.gpus:
            if name in (gpu.uuid, str(gpu.index)):
                return gpu.index
        return None

    def serving_units(self) -> dict[int, set[tuple[str | None, str | None]]]:
        """Return {GPU index: {(unit, invocation) of its holders}}, for the rule S1."""
        found: dict[int, set[tuple[str | None, str | None]]] = {}
        for process in self.processes.values():
            for index in process.gpus:
                found.setdefault(index, set()).add((process.unit, process.invocation))
        return found

    # -- logs ---------------------------------------------------------------------------------------

    def log(self, unit: str, invocation: str | None, message: str, priority: int = 6) -> None:
        """Write a line into the journal."""
        self.journal.append((self.world.now, unit, invocation, priority, message))

    def kernel_line(self, line: str) -> None:
        """Write a line into the kernel log, for example an Xid."""
        self.kernel.append(line)


__all__ = [
    "KILL",
    "LIB",
    "PERMANENT",
    "RUN",
    "STATE",
    "TERM",
    "TRIAL",
    "Behaviour",
    "Effect",
    "Files",
    "Gpu",
    "Host",
    "PowerLost",
    "Process",
    "Signalled",
    "Started",
    "Truth",
    "World",
]

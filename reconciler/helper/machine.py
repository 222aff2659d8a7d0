"""The world as the helper sees it: one protocol, so that the verbs in `acts.py` never touch an OS call.

`RealMachine` (in `host.py`) is the host; `reconciler.lab.simulated` has the other one, on a virtual
clock. The same contract tests run on both. This module is part of the shipped helper: Python 3.9,
standard library only.

Every method that asks something of the host returns a *reading*: `{"known": value}` or
`{"unknown": "why"}`. Unknown is never absent, free or fine. Values are plain JSON (dict, list, str, int,
float, bool, None), because they travel as they are.
"""

from __future__ import annotations

from typing import Any, ContextManager, Dict, List, Optional, Protocol

Reading = Dict[str, Any]


class Busy(Exception):
    """The host lock was not had in time."""


class Refused(Exception):
    """A verb's precondition does not hold; nothing was done. `reason` is a stable CamelCase word."""

    def __init__(self, reason: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.data = data


class Machine(Protocol):
    """One host, or one container layer of it."""

    # -- time, chance, identity ------------------------------------------------------------------

    def boottime(self) -> float:
        """Seconds on CLOCK_BOOTTIME (suspended time counts, wall clock jumps do not)."""

    def walltime(self) -> float:
        """Seconds since the epoch, for people to read in records; never compared."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def boot_id(self) -> str:
        """Return this layer's boot identity: kernel boot id; in a container joined with PID 1's start time."""

    def nonce(self) -> str:
        """Return 32 fresh random hex digits."""

    def identity(self) -> Reading:
        """Known: {machine_id, hostname, boot_id, boottime, kernel, python, uid, container: null|"lxc"|..., pidfd: bool}."""

    # -- files. Paths are absolute. OSError passes through (full disk, read-only) -----------------

    def read(self, path: str) -> Optional[bytes]:
        """Return the content, None when there is no such file. Follows no symbolic link; caps at 4 MiB (OSError past it)."""

    def write(self, path: str, data: bytes, mode: int = 0o600, uid: int = 0, gid: int = 0) -> None:
        """Replace atomically: temporary file in the same directory (name without a unit suffix), mode first, fsync, rename, fsync of the directory. Makes missing parents (0755 under /etc and /run/systemd, else 0700)."""

    def append(self, path: str, line: bytes) -> None:
        """Append one line and fsync."""

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory that lies under the state directory, following no links; missing is fine."""

    def listdir(self, path: str) -> List[str]:
        """Return the sorted names in a directory; empty when it is missing."""

    def kind(self, path: str) -> str:
        """Return "file", "dir", "link", "missing" or "other"; never follows a link."""

    def stat(self, path: str) -> Reading:
        """Follow links; known: {kind, size, mode, uid, gid, executable: bool, free_bytes} or {kind: "missing", free_bytes of nearest parent}."""

    def user(self, name: str) -> Reading:
        """Known: {uid, gid, groups: [gid]} or null when there is no such user."""

    def ensure_group(self, gid: int) -> None:
        """Make sure that a group with this number exists: systemd starts no unit with a SupplementaryGroups= that has no entry (216/GROUP). Raises OSError."""

    # -- the host lock -----------------------------------------------------------------------------

    def lock(self, timeout_s: float) -> ContextManager[None]:
        """Hold the host's one lock (flock on /run/reconciler/lock). Raises Busy."""

    # -- systemd -------------------------------------------------------------------------------------

    def unit(self, name: str) -> Reading:
        """Known: the properties below of a unit; LoadState "not-found" is a known value.

        Strings as systemd prints them: Id LoadState ActiveState SubState Result MainPID(int) ControlPID(int)
        NRestarts(int) ExecMainCode(int) ExecMainStatus(int) ControlGroup InvocationID Restart KillMode SendSIGKILL(bool) Type
        FragmentPath DropInPaths(list) UnitFileState NeedDaemonReload(bool) ConditionResult(bool) Job(int, 0 = none)
        StartLimitBurst(int) RemainAfterExit(bool) TriggeredBy(list) OnFailure(list) Requires(list)
        OnFailureOf(list) OnSuccessOf(list) UpheldBy(list);
        numbers of microseconds (null = infinity): TimeoutStopUSec RestartUSec StartLimitIntervalUSec ActiveEnterTimestampMonotonic
        InactiveEnterTimestampMonotonic ExecMainStartTimestampMonotonic.
        """

    def unit_files(self, name: str) -> Reading:
        """Known: {fragment: path|null, text: str|null, link: bool, package: str|null, drop_ins: [{path, text}]}.

        What systemd has loaded paths for, read from disk. `package` names the package that owns the fragment.
        """

    def unit_command(self, name: str) -> Reading:
        """Known: {argv: [str], environment: [str "K=V"], environment_files: [path], user: str, supplementary_groups: [str]} exactly, from busctl JSON."""

    def reload(self) -> None:
        """Run daemon-reload. Raises OSError when it fails."""

    def start(self, unit: str) -> None:
        """Queue a start, do not wait. Raises OSError when the job cannot be queued."""

    def stop(self, unit: str) -> None:
        """Queue a stop, do not wait. Raises OSError when the job cannot be queued."""

    def reset_failed(self, unit: str) -> None:
        """Clear the failed state and the start limit's counter; fine when there is nothing to clear."""

    def enable(self, unit: str) -> None:
        """Make it start at boot (multi-user.target.wants link), without starting it."""

    def disable(self, unit: str) -> None:
        """Undo enable; fine when it is not enabled."""

    def verify_unit(self, name: str, text: str) -> Reading:
        """Known: [] or a list of complaints of `systemd-analyze verify` on a scratch copy under its real name."""

    # -- processes and GPUs ----------------------------------------------------------------------------

    def environment(self, pid: int) -> Reading:
        """Known: {name: value} that a process was started with; unknown where it cannot be read or was wiped."""

    def processes(self, control_group: str) -> Reading:
        """Known: list of process records (see below) in that control group and below it; [] when the group is gone.

        Process record: {pid, start_ticks, state, threads, ppid, uid, gid, groups: [gid], exe: str|null, comm, cgroup: str, nspid: [int],
        mount_ns: int|null, argv: [str], invocation: str|null, mark: str|null, environ_readable: bool, kill_pending: bool, wchan: str|null}.
        `invocation` and `mark` are INVOCATION_ID and RECONCILER_SERVER of its environment.
        """

    def holders(self) -> Reading:
        """Known: {complete: bool, unreadable: int, holders: [process record + {minors: [int], devices: [str], via: "fd"|"map"}]}.

        Every process with a GPU device open or mapped, by device number, this machine's own helper excepted.
        """

    def gpus(self) -> Reading:
        """Known: {driver: str, gpus: [{uuid, index, bus_id, minor: int|null, node: str|null, used_mib, total_mib, temperature_c, utilization_pct, mig: str|null, persistence: str|null, recovery_action: str|null}]}."""

    def apps(self) -> Reading:
        """Known: [{gpu_uuid, pid, used_mib: int|null, name}]."""

    def evidence(self, pids: List[int]) -> Reading:
        """Known: {processes: [process record + {stack: [str]|null, pending: [int signal numbers]}], kernel: [str]|null}.

        What a person needs to see of processes that do not die: where they stand in the kernel, and what the GPU drivers said last
        in this boot (null: not for this layer to read).
        """

    def container(self, vmid: int) -> Reading:
        """Known: {status: str, lock: str|null} of a container of this Proxmox node; unknown where there is no such thing."""

    def restart_container(self, vmid: int) -> Reading:
        """Shut a container down and start it again; known: {exit_status, stdout, stderr}. Never by force."""

    def reset_facts(self) -> Reading:
        """Known: {uuid: {display: "Disabled"|str|null, links: int|null active NVLinks, fabric: str|null}} of every card."""

    def set_persistence(self, uuid: str, *, on: bool) -> Reading:
        """Switch one card's persistence mode; known when the driver's tool did it."""

    def reset_gpus(self, uuids: List[str]) -> Reading:
        """Reset cards by the driver's tool; known: {exit_status, stdout}."""

    def signal(self, pid: int, start_ticks: int, number: int) -> str:
        """Signal one process through a pidfd after re-reading its start time: "sent", "gone" or "refused: why"."""

    def kill_group(self, control_group: str) -> str:
        """Write cgroup.kill of exactly this control group: "sent", "gone" or "refused: why"."""

    def mount_namespace(self) -> Optional[int]:
        """Return the inode of this machine's own mount namespace, None when it cannot be read."""

    def listeners(self, port: int, main_pid: int) -> Reading:
        """Known: [{address, inode, pids: [int], units: [str], cgroups: [str]}] of every TCP listener on the port, also in main_pid's network namespace."""

    def kernel_log(self, cursor: Optional[str]) -> Reading:
        """Known: {cursor: str, lines: [str]} newer than the cursor (null: only the cursor of now)."""

    def journal(
        self, unit: str, invocation: Optional[str], lines: int, until: Optional[float] = None
    ) -> Reading:
        """Known: [{at: float wall seconds, message: str, priority: int}] oldest first, at most `lines`; of one invocation or of the unit.

        The newest ones, or the newest that were written before `until` (wall seconds).
        """

    def fetch(self, request: Dict[str, Any]) -> Reading:
        """Do one HTTP request to this layer itself; known: {status, headers, body (base64), truncated, took_s}; unknown: refused, timed out, no HTTP.

        request: {method, address, port, path, headers, body (base64|null), timeout_s, max_bytes, bearer_file: path|null}.
        """

    def engine_facts(self, asked: Dict[str, Any]) -> Dict[str, Reading]:
        """Look at what an engine will find here; each part a reading. What is not asked for is left out.

        asked: {user: name|null, python: path|null, distributions: [name], kernels: bool, binary: path|null,
        image: [tool, image]|null, models: [{role, source, revision, environment}], nodes: [path], places: [path]}.

        program: {python, version, digest, distribution, torch?, kernels?: ["sm_90"]} or, of a binary, {version, digest};
        image: {id: str|null}; models: [reading of `model_facts`, in order]; limits: see `machine_limits`;
        nodes: {path: "usable"|"denied"|"missing"}; capabilities: {uuid: "9.0"}, asked for with `kernels`.
        """

    def run_as(self, user: Optional[str], argv: List[str], timeout_s: float) -> Reading:
        """Run a program for its output, never a shell; known: {exit_status, stdout, stderr} (text, capped at 1 MiB)."""


__all__ = ["Busy", "Machine", "Reading", "Refused"]

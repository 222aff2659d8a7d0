"""The real host, as `machine.py` draws it: every method is one question or one act.

What an answer means is `outputs.py`'s and `readings.py`'s matter; here programs are run and files are read.
Part of the shipped helper (see `outputs.py`); `acts.py` is its only caller.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import shutil
import sys
import time
from typing import Any, ContextManager, Dict, List, Mapping, Optional, Sequence, Tuple

from reconciler.helper.amd import AmdDevices, amd_apps, amd_gpus, amd_present
from reconciler.helper.fetching import fetch
from reconciler.helper.files import (
    append_line,
    file_facts,
    file_kind,
    file_lock,
    kernel_text,
    list_directory,
    make_parents,
    read_file,
    remove_directory,
    remove_file,
    replace_file,
    sync_directory,
)
from reconciler.helper.inspection import (
    PROBE,
    inspect_models,
    inspect_nodes,
    machine_limits,
    read_compute_capabilities,
    read_probe,
)
from reconciler.helper.machine import Busy, Reading
from reconciler.helper.outputs import (
    APP_FIELDS,
    GPU_FIELDS,
    GPU_FIELDS_OPTIONAL,
    UNIT_PROPERTIES_ASKED,
    known,
    read_apps,
    read_driver_version,
    read_exec_start,
    read_gpu_information,
    read_gpu_rows,
    read_journal,
    read_nvlinks,
    read_optional_fields,
    read_unit_properties,
    read_unit_show,
    unknown,
)
from reconciler.helper.processes import (
    Devices,
    group_processes,
    has_pidfd,
    kill_control_group,
    namespace_inode,
    process_environment,
    process_records,
    process_stat,
    scan_holders,
    scan_listeners,
    signal_process,
)
from reconciler.helper.programs import (
    OUTPUT_BYTES_MAX,
    PROGRAM_ENVIRONMENT,
    PROGRAM_PATH,
    TIMED_OUT,
    capture,
    each_guarded,
)

STATE_DIRECTORY = "/var/lib/reconciler"
RUN_DIRECTORY = "/run/reconciler"
DRIVER_ROOTS = ("/proc/driver/nvidia", "/run/fakegpu/proc/driver/nvidia")
# Without persistence the driver initialises each card for every client: tens of seconds with eight of them.
PROBE_LIMIT_S = 25.0
SYSTEMCTL_LIMIT_S = 30.0
RELOAD_LIMIT_S = 90.0
RESTART_LIMIT_S = 150.0  # A container gets 60 s to shut down, and boots in seconds.
JOURNAL_LIMIT_S = 20.0
JOURNAL_BYTES_MAX = 8 << 20
PROGRAM_LIMIT_S = 60.0  # An interpreter that imports torch from a cold disk.
FILE_SYSTEM_LIMIT_S = 5.0  # A network file system that is away would block for ever.
KERNEL_LINES_MAX = 1000
_KERNEL_LINE = re.compile(
    r"NVRM|nvidia|amdgpu|\bkfd\b|out of memory: Killed process", re.IGNORECASE
)
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,255}\.(service|timer|socket|target|scope)\Z")
_WANTS = "/etc/systemd/system/multi-user.target.wants"
_SYSTEMD_BUS = "org.freedesktop.systemd1"


SEEN_FOR_S = 0.25  # How long one look at a unit may take in parts; never across requests.


class RealMachine:
    """This host, or this container layer of it. Stateless but for which optional GPU fields the driver knows."""

    def __init__(
        self,
        *,
        state: str = STATE_DIRECTORY,
        run: str = RUN_DIRECTORY,
        driver_roots: Sequence[str] = DRIVER_ROOTS,
        probe_limit_s: float = PROBE_LIMIT_S,
    ) -> None:
        self._state = state
        self._run = run
        self._driver_roots = tuple(driver_roots)
        self._probe_limit_s = probe_limit_s
        self._gpu_fields: Optional[List[str]] = None
        self._smi_is_silent = False
        self._seen_units: Dict[str, Tuple[float, Reading]] = {}

    def forget(self) -> None:
        """Forget what was seen: called before each request and wherever time passes or something is done."""
        self._seen_units.clear()
        self._smi_is_silent = False

    def _unit_properties(self, name: str) -> Reading:
        """Return a unit's properties; three parts of one look are answered by one call of the bus."""
        now = time.monotonic()
        seen = self._seen_units.get(name)
        if seen is not None and now - seen[0] < SEEN_FOR_S:
            return seen[1]
        reading = _unit_properties(name)
        self._seen_units[name] = (now, reading)
        return reading

    # -- time, chance, identity ------------------------------------------------------------------

    def boottime(self) -> float:
        """Return CLOCK_BOOTTIME; /proc/uptime is faked in containers."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def walltime(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.forget()
        time.sleep(seconds)

    def boot_id(self) -> str:
        """Return the kernel's boot id; a container's own boot is told by its PID 1's start time."""
        kernel = _first_line("/proc/sys/kernel/random/boot_id")
        if container_kind() is None:
            return kernel
        init = process_stat(1)
        return f"{kernel}-{init['start_ticks'] if init else 'unknown'}"

    def nonce(self) -> str:
        """Return 32 random hex digits."""
        return os.urandom(16).hex()

    def identity(self) -> Reading:
        """Say which machine this is."""
        with contextlib.suppress(OSError):
            return known(
                {
                    "machine_id": _first_line("/etc/machine-id"),
                    "hostname": os.uname().nodename,
                    "boot_id": self.boot_id(),
                    "boottime": self.boottime(),
                    "kernel": os.uname().release,
                    "python": ".".join(str(part) for part in sys.version_info[:3]),
                    "uid": os.geteuid(),
                    "container": container_kind(),
                    "pidfd": has_pidfd(),
                }
            )
        return unknown("the machine's identity files cannot be read")

    # -- files -------------------------------------------------------------------------------------

    def read(self, path: str) -> Optional[bytes]:
        """Return a file's content, None when it is missing."""
        return read_file(path)

    def write(self, path: str, data: bytes, mode: int = 0o600, uid: int = 0, gid: int = 0) -> None:
        """Replace a file atomically and durably."""
        replace_file(path, data, mode, uid, gid)

    def append(self, path: str, line: bytes) -> None:
        """Append a line durably."""
        append_line(path, line)

    def remove(self, path: str) -> None:
        """Remove a file."""
        remove_file(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory under the state directory."""
        remove_directory(path, self._state)

    def listdir(self, path: str) -> List[str]:
        """Return the sorted names in a directory."""
        return list_directory(path)

    def kind(self, path: str) -> str:
        """Return what stands at a path, without following it."""
        return file_kind(path)

    def stat(self, path: str) -> Reading:
        """Return the facts of what a path leads to; a hung file system makes them unknown."""
        return each_guarded([path], file_facts, FILE_SYSTEM_LIMIT_S)[0]

    def user(self, name: str) -> Reading:
        """Return a user's numbers, null when there is no such user."""
        return each_guarded([name], _user_numbers, FILE_SYSTEM_LIMIT_S)[0]

    def ensure_group(self, gid: int) -> None:
        """Make sure that a server's group number has an entry, which systemd insists on (216/GROUP)."""
        with contextlib.suppress(KeyError):
            grp.getgrgid(gid)
            return
        answer = capture(["groupadd", "-g", str(gid), f"reconciler-{gid}"], SYSTEMCTL_LIMIT_S)
        if answer.exit_status != 0:
            raise OSError(f"groupadd {gid}: {answer.stderr.strip()[:200]}")

    # -- the host lock -----------------------------------------------------------------------------

    def lock(self, timeout_s: float) -> ContextManager[None]:
        """Hold the host's one lock."""
        return file_lock(f"{self._run}/lock", timeout_s)

    # -- systemd -------------------------------------------------------------------------------------

    def unit(self, name: str) -> Reading:
        """Return a unit's properties, from the bus when it can be asked, else from `systemctl show`."""
        properties = self._unit_properties(name)
        if "known" in properties:
            return read_unit_properties(properties["known"])
        if properties.get("refused"):
            return properties
        shown = _program(
            ["systemctl", "show", "--no-pager", "-p", ",".join(UNIT_PROPERTIES_ASKED), "--", name],
            SYSTEMCTL_LIMIT_S,
        )
        if isinstance(shown, str):
            return unknown(shown)
        return read_unit_show(shown.stdout, shown.exit_status, shown.stderr)

    def unit_files(self, name: str) -> Reading:
        """Return the texts on disk of what systemd has loaded for a unit."""
        reading = self.unit(name)
        if "known" not in reading:
            return reading
        fragment = reading["known"]["FragmentPath"] or None
        try:
            drop_ins = [
                {"path": path, "text": _unittext_of(path)}
                for path in reading["known"]["DropInPaths"]
            ]
            linked = fragment is not None and file_kind(fragment) == "link"
            text = None if fragment is None or _is_masked(fragment) else _unittext_of(fragment)
        except OSError as error:
            return unknown(f"a unit file cannot be read: {error}")
        package = _package_of(fragment) if fragment else None
        return known(
            {
                "fragment": fragment,
                "text": text,
                "link": linked,
                "package": package,
                "drop_ins": drop_ins,
            }
        )

    def unit_command(self, name: str) -> Reading:
        """Return what a unit has loaded to run: argv (`$$` is a literal `$`), and the environment that it sets."""
        properties = self._unit_properties(name)
        if "known" not in properties:
            return properties
        values = properties["known"]
        try:
            argv = read_exec_start(values["ExecStart"])
            if "known" not in argv:
                return argv
            return known(
                {
                    "argv": argv["known"],
                    "environment": list(values["Environment"]),
                    "environment_files": [entry[0] for entry in values["EnvironmentFiles"]],
                    "user": values["User"],
                    "supplementary_groups": list(values["SupplementaryGroups"]),
                }
            )
        except (KeyError, IndexError, TypeError) as error:
            return unknown(f"the bus left out {error}")

    def reload(self) -> None:
        """Make systemd read its files again."""
        self.forget()
        _systemctl(["daemon-reload"], RELOAD_LIMIT_S)

    def start(self, unit: str) -> None:
        """Queue a start."""
        self.forget()
        _systemctl(["start", "--no-block", "--", _unit_name(unit)], SYSTEMCTL_LIMIT_S)

    def stop(self, unit: str) -> None:
        """Queue a stop."""
        self.forget()
        _systemctl(["stop", "--no-block", "--", _unit_name(unit)], SYSTEMCTL_LIMIT_S)

    def reset_failed(self, unit: str) -> None:
        """Clear the failed state; a unit that is not loaded has none."""
        self.forget()
        try:
            _systemctl(["reset-failed", "--", _unit_name(unit)], SYSTEMCTL_LIMIT_S)
        except OSError as error:
            if "not loaded" not in str(error):
                raise

    def enable(self, unit: str) -> None:
        """Make a unit start at boot.

        By a link of our own: `systemctl enable` would link to the trial in /run when there is one, which
        is gone at the boot that it was meant for.
        """
        self.forget()
        link = f"{_WANTS}/{_unit_name(unit)}"
        make_parents(link)
        if file_kind(link) == "missing":
            os.symlink(f"/etc/systemd/system/{unit}", link)
            sync_directory(_WANTS)

    def disable(self, unit: str) -> None:
        """Make a unit not start at boot, whoever enabled it."""
        self.forget()
        if file_kind(f"{_WANTS}/{_unit_name(unit)}") == "link":
            os.unlink(f"{_WANTS}/{unit}")
            sync_directory(_WANTS)
        try:
            _systemctl(["disable", "--no-reload", "--", unit], SYSTEMCTL_LIMIT_S)
        except OSError as error:
            if "does not exist" not in str(error):
                raise

    def verify_unit(self, name: str, text: str) -> Reading:
        """Let systemd judge a unit's text before it is installed: known is its complaints about this unit."""
        if not _UNIT_NAME.match(name):
            return unknown(f"not a unit name: {name!r}")
        import tempfile  # noqa: PLC0415 - loaded where it is needed: each guard would pay for it

        try:
            make_parents(f"{self._run}/x")
            with tempfile.TemporaryDirectory(prefix="verify-", dir=self._run) as scratch:
                path = f"{scratch}/{name}"
                data = text.encode("utf-8", "surrogateescape")
                replace_file(path, data, 0o644, os.geteuid(), os.getegid())
                return _verify(path, name)
        except OSError as error:
            return unknown(f"systemd-analyze: {error}")

    # -- processes and GPUs ----------------------------------------------------------------------------

    def environment(self, pid: int) -> Reading:
        """Return the environment that a process was started with."""
        return process_environment(pid)

    def processes(self, control_group: str) -> Reading:
        """Return the processes in a unit's control group and below it."""
        return group_processes(control_group) if control_group else known([])

    def holders(self) -> Reading:
        """Return every process that has a GPU open or mapped."""
        return scan_holders(AmdDevices() if _is_amd() else Devices())

    def gpus(self) -> Reading:
        """Return the GPUs as the driver sees them, joined with their device nodes."""
        if _is_amd():
            return amd_gpus()
        answer = self._gpu_table()
        if "known" not in answer:
            return answer
        rows, extra = answer["known"]
        minors, devices = self._minors(), Devices()
        gpus = [_with_optional(row, extra.get(row["uuid"], {})) for row in rows]
        for gpu in gpus:
            minor = minors.get(gpu["uuid"])
            gpu["minor"] = minor
            gpu["node"] = None if minor is None else devices.node(minor)
        return known({"driver": self._driver(extra), "gpus": gpus})

    def apps(self) -> Reading:
        """Return the compute apps that the driver knows, in this pid namespace's numbers."""
        if _is_amd():
            return amd_apps()
        answer = self._probe(
            ["--query-compute-apps=" + ",".join(APP_FIELDS), "--format=csv,noheader,nounits"]
        )
        if isinstance(answer, str):
            return unknown(answer)
        return read_apps(answer.exit_status, answer.stdout)

    def _gpu_table(self) -> Reading:
        """Ask for what must be known of the cards and for what their driver knows besides: known (rows, {uuid: cells}).

        All in one call, without the fields that this driver refused before: a call costs a start of the tool, and
        on a driver without persistence an initialisation of every card.
        """
        driver = self._driver({})
        if self._gpu_fields is None:
            self._gpu_fields = self._remembered_fields(driver)
        refused = False
        while True:
            fields = [*GPU_FIELDS, *self._gpu_fields]
            answer = self._probe(
                ["--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
            )
            if isinstance(answer, str):
                return unknown(answer)
            rows = read_gpu_rows(answer.exit_status, answer.stdout, fields)
            if "known" in rows:
                break
            if rows.get("unsupported") not in self._gpu_fields:
                self._gpu_fields = None  # A driver may have been replaced: begin anew.
                return rows
            self._gpu_fields.remove(rows["unsupported"])
            refused = True
        if refused:
            self._remember_fields(driver, self._gpu_fields)
        extra = read_optional_fields(answer.exit_status, answer.stdout, fields[1:])
        return known((rows["known"], extra["known"])) if "known" in extra else extra

    def _remembered_fields(self, driver: str) -> List[str]:
        """Return the optional fields that this driver has not refused since the machine's start."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            memory = json.loads(kernel_text(f"{self._run}/gpu-fields.json"))
            if driver and memory["driver"] == driver:
                return [field for field in GPU_FIELDS_OPTIONAL if field not in memory["without"]]
        return list(GPU_FIELDS_OPTIONAL)

    def _remember_fields(self, driver: str, fields: Sequence[str]) -> None:
        """Write down what a driver refused: each helper that starts would find out again, a call for each field."""
        if os.geteuid() != 0 or not driver:
            return
        without = [field for field in GPU_FIELDS_OPTIONAL if field not in fields]
        data = json.dumps({"driver": driver, "without": without}).encode()
        with contextlib.suppress(OSError):  # Only a memory: without it the next one asks again.
            replace_file(f"{self._run}/gpu-fields.json", data, 0o644, 0, 0)

    def _minors(self) -> Dict[str, int]:
        """Return UUID → minor from the driver's own files, of the first root that has any."""
        for root in self._driver_roots:
            readings = [
                read_gpu_information(kernel_text(f"{root}/gpus/{bus}/information"))
                for bus in list_directory(f"{root}/gpus")
            ]
            cards = [reading["known"] for reading in readings if "known" in reading]
            if cards:
                return {card["uuid"]: card["minor"] for card in cards}
        return {}

    def _driver(self, optional: Mapping[str, Mapping[str, Any]]) -> str:
        for root in self._driver_roots:
            version = read_driver_version(kernel_text(f"{root}/version"))
            if version:
                return version
        return next((cells.get("driver_version") or "" for cells in optional.values()), "")

    def _probe(self, arguments: Sequence[str]) -> Any:
        """Run nvidia-smi once, never beside one that hangs: its output, or why there is none.

        A driver that hangs leaves nvidia-smi unkillable, and each further one is a client more that blocks
        a reset. So a probe is written down with its identity while it runs, and one at a time. One that did not
        answer is not tried again in the same look, which somebody waits for.
        """
        if self._smi_is_silent:
            return "nvidia-smi did not answer in time a moment ago; not asking again in this look"
        program = shutil.which("nvidia-smi", path=PROGRAM_PATH)
        if program is None:
            return "nvidia-smi is not on this machine"
        directory = self._probe_directory()
        if directory is None:
            return self._heard(_program([program, *arguments], self._probe_limit_s))
        record = f"{directory}/probe.json"
        try:
            with file_lock(f"{directory}/probe.lock", self._probe_limit_s):
                hanging = _hanging_probe(record)
                if hanging:
                    return f"an earlier nvidia-smi (pid {hanging}) still hangs; not asking again"
                answer = _program(
                    [program, *arguments],
                    self._probe_limit_s,
                    started=lambda pid: _record_probe(record, pid),
                )
                if _hanging_probe(record) is None:
                    remove_file(record)
                return self._heard(answer)
        except Busy:
            self._smi_is_silent = True
            return "another nvidia-smi of ours is still running"
        except OSError as error:
            return f"nvidia-smi could not be run: {error}"

    def _heard(self, answer: Any) -> Any:
        self._smi_is_silent = getattr(answer, "exit_status", 0) == TIMED_OUT
        return answer

    def _probe_directory(self) -> Optional[str]:
        """Return where the running probe is written down: ours as root, else the user's own run directory."""
        if os.geteuid() == 0:
            return self._run
        own = f"/run/user/{os.geteuid()}"
        return own if os.access(own, os.W_OK) else None

    def evidence(self, pids: List[int]) -> Reading:
        """Return what can be seen of processes that do not die; each is read in a child with a limit."""
        records = process_records(pids)
        places = each_guarded([one["pid"] for one in records], _kernel_place, FILE_SYSTEM_LIMIT_S)
        for record, place in zip(records, places):  # noqa: B905 - strict= is younger than 3.9; one answer each
            record.update(place.get("known") or {"stack": None, "pending": []})
        lines = _journalctl(["-k", "-b", "-n", "2000", "--output-fields=MESSAGE"]).get("known")
        said = [one["message"] for one in lines or [] if _KERNEL_LINE.search(one["message"])]
        return known({"processes": records, "kernel": said[-40:] if lines else None})

    def container(self, vmid: int) -> Reading:
        """Return what `pct status` says of a container."""
        answer = _program(["pct", "status", str(vmid), "--verbose"], SYSTEMCTL_LIMIT_S)
        if isinstance(answer, str):
            return unknown(answer)
        said = dict(re.findall(r"^(\w+): (.*)$", answer.stdout, re.MULTILINE))
        if answer.exit_status != 0 or "status" not in said:
            return unknown(f"pct status {vmid}: exit {answer.exit_status}: {answer.stderr[:200]}")
        lock = said.get("lock") or _lock_of(kernel_text(f"/etc/pve/lxc/{vmid}.conf"))
        return known({"status": said["status"], "lock": lock})

    def restart_container(self, vmid: int) -> Reading:
        """Shut a container down and start it again."""
        answer = _program(["pct", "reboot", str(vmid)], RESTART_LIMIT_S)
        return unknown(answer) if isinstance(answer, str) else _said(answer)

    def reset_facts(self) -> Reading:
        """Return what decides whether a card may be reset: displays, links, fabric."""
        asked = self._probe(["--query-gpu=uuid,display_active", "--format=csv,noheader,nounits"])
        if isinstance(asked, str):
            return unknown(asked)
        shown = read_optional_fields(asked.exit_status, asked.stdout, ["display_active"])
        if "known" not in shown:
            return shown
        fabric = self._probe(["--query-gpu=uuid,fabric.state", "--format=csv,noheader,nounits"])
        states = (
            {}
            if isinstance(fabric, str)
            else read_optional_fields(fabric.exit_status, fabric.stdout, ["fabric.state"]).get(
                "known", {}
            )
        )
        facts = {}
        for uuid, cells in shown["known"].items():
            links = self._probe(["nvlink", "--status", "-i", uuid])
            facts[uuid] = {
                "display": cells["display_active"],
                "links": None
                if isinstance(links, str)
                else read_nvlinks(links.exit_status, links.stdout),
                "fabric": states.get(uuid, {}).get("fabric.state"),
            }
        return known(facts)

    def set_persistence(self, uuid: str, *, on: bool) -> Reading:
        """Switch one card's persistence mode."""
        answer = self._probe(["-i", uuid, "-pm", "1" if on else "0"])
        if isinstance(answer, str):
            return unknown(answer)
        return _said(answer) if answer.exit_status == 0 else unknown(answer.stdout.strip()[:200])

    def reset_gpus(self, uuids: List[str]) -> Reading:
        """Reset cards."""
        answer = self._probe(["--gpu-reset", "-i", ",".join(uuids)])
        return unknown(answer) if isinstance(answer, str) else _said(answer)

    def signal(self, pid: int, start_ticks: int, number: int) -> str:
        """Signal one process that is proven to be the same."""
        return signal_process(pid, start_ticks, number)

    def kill_group(self, control_group: str) -> str:
        """Kill everything in one unit's control group."""
        return kill_control_group(control_group)

    def mount_namespace(self) -> Optional[int]:
        """Return the inode of our own mount namespace."""
        return namespace_inode("/proc/self", "mnt")

    def listeners(self, port: int, main_pid: int) -> Reading:
        """Return who listens on a port."""
        return scan_listeners(port, main_pid)

    def kernel_log(self, cursor: Optional[str]) -> Reading:
        """Return what the GPU drivers and the OOM killer said in the kernel's log since the cursor.

        A container has no kernel log: that is unknown with `"elsewhere": true`, for the outer layer to read.
        """
        if cursor is None:
            return _cursor_now()
        answer = _journalctl(["-k", "--after-cursor=" + cursor, "--output-fields=MESSAGE"])
        if "known" not in answer:
            return answer
        entries = answer["known"]
        if not entries and not _has_kernel_log():
            return _no_kernel_log()
        lines = [one["message"] for one in entries if _KERNEL_LINE.search(one["message"])]
        if len(lines) > KERNEL_LINES_MAX:
            lines = lines[:50] + lines[50 - KERNEL_LINES_MAX :]
        return known({"cursor": entries[-1]["cursor"] if entries else cursor, "lines": lines})

    def journal(
        self, unit: str, invocation: Optional[str], lines: int, until: Optional[float] = None
    ) -> Reading:
        """Return the newest lines of a unit or of one of its runs, systemd's own about it included."""
        if not _UNIT_NAME.match(unit) or (
            invocation and not re.fullmatch(r"[0-9a-f]{32}", invocation)
        ):
            return unknown("not a unit or not an invocation")
        which = ["-u", unit]
        if invocation:
            which = [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
        before = [] if until is None else [f"--until=@{int(until)}"]
        count = ["-n", str(max(lines, 0)), "--output-fields=MESSAGE,PRIORITY"]
        answer = _journalctl([*count, *before, *which])
        if "known" not in answer:
            return answer
        keys = ("at", "message", "priority")
        return known([{key: entry[key] for key in keys} for entry in answer["known"]])

    def fetch(self, request: Dict[str, Any]) -> Reading:
        """Do one HTTP request to this layer itself."""
        return fetch(request)

    def engine_facts(self, asked: Dict[str, Any]) -> Dict[str, Any]:
        """Look at what an engine will find here, as the user that it will run as."""
        name = asked.get("user")
        user = self.user(name if name is not None else "root").get("known")
        found: Dict[str, Any] = {}
        if asked.get("image"):
            found["image"] = self._image(*asked["image"])
        elif asked.get("python"):
            what = "kernels" if asked.get("kernels") else "-"
            names = ",".join(asked.get("distributions") or ["-"])
            argv = [str(asked["python"]), "-c", PROBE, names, what]
            found["program"] = read_probe(self.run_as(name, argv, PROGRAM_LIMIT_S))
        elif asked.get("binary"):
            found["program"] = self._binary(name, str(asked["binary"]))
        if user is None:
            gone = unknown(f"no user {name}")
            found.update(models=gone, nodes=gone)
        else:
            models = inspect_models(asked.get("models") or [], user, user["home"])
            found["models"] = known(models)
            found["nodes"] = inspect_nodes(asked.get("nodes") or [], user)
        found["limits"] = each_guarded(
            [list(asked.get("places") or [])], machine_limits, FILE_SYSTEM_LIMIT_S
        )[0]
        if asked.get("kernels"):
            answer = self._probe(["--query-gpu=uuid,compute_cap", "--format=csv,noheader"])
            found["capabilities"] = (
                unknown(answer)
                if isinstance(answer, str)
                else read_compute_capabilities(answer.exit_status, answer.stdout)
            )
        return found

    def _binary(self, user: Optional[str], path: str) -> Reading:
        """Return what a program says of its version, and what tells this file from another one."""
        facts = self.stat(path).get("known") or {}
        if facts.get("kind") != "file":
            return unknown(f"{path} is not a file")
        ran = self.run_as(user, [path, "--version"], PROGRAM_LIMIT_S)
        if "known" not in ran:
            return ran
        text = str(ran["known"]["stdout"]) + "\n" + str(ran["known"]["stderr"])
        match = re.search(r"version:?\s+(\S{1,64})", text)
        status = os.stat(path)
        digest = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
        return known({"version": match.group(1) if match else None, "digest": digest})

    def _image(self, tool: str, image: str) -> Reading:
        """Return the id of an image that lies on this host; null where it would be fetched first."""
        answer = _program(
            [tool, "image", "inspect", "--format", "{{.Id}}", image], SYSTEMCTL_LIMIT_S
        )
        if isinstance(answer, str):
            return unknown(answer)
        if answer.exit_status == 0 and answer.stdout.strip():
            return known({"id": answer.stdout.split()[0][:80]})
        missing = re.search(r"(?i)no such image|not known|not found|unable to find", answer.stderr)
        return known({"id": None}) if missing else unknown(answer.stderr.strip()[:200])

    def run_as(self, user: Optional[str], argv: List[str], timeout_s: float) -> Reading:
        """Run a program for its output, as a user, without a GPU in sight."""
        environment = dict(PROGRAM_ENVIRONMENT, CUDA_VISIBLE_DEVICES="", HOME="/")
        identity: Dict[str, Any] = {}
        if user is not None:
            found = self.user(user).get("known")
            if not found:
                return unknown(f"no user {user}")
            environment.update(HOME=found["home"], USER=user, LOGNAME=user)
            if os.geteuid() == 0:
                identity = {
                    "user": found["uid"],
                    "group": found["gid"],
                    "extra_groups": found["groups"],
                }
            elif found["uid"] != os.geteuid():
                return unknown(f"only root can run a program as {user}")
        try:
            answer = capture(argv, timeout_s, environment=environment, umask=0o077, **identity)
        except (OSError, ValueError) as error:
            return unknown(f"{argv[0] if argv else 'nothing'} could not be run: {error}")
        if answer.exit_status == TIMED_OUT:
            return unknown(f"{argv[0]} did not end within {timeout_s:g} s")
        if answer.truncated:
            return unknown(
                f"{argv[0]} said more than {OUTPUT_BYTES_MAX >> 20} MiB: not all of it was read"
            )
        return known(
            {
                "exit_status": answer.exit_status,
                "stdout": answer.stdout,
                "stderr": answer.stderr,
            }
        )


# -- identity ------------------------------------------------------------------------------------------


def container_kind() -> Optional[str]:
    """Return what kind of container this layer is ("lxc", "docker", …), None on a host of its own."""
    said = (
        kernel_text("/run/systemd/container").strip()
        or kernel_text("/run/host/container-manager").strip()
    )
    if said:
        return said
    found = re.search(r"(?:\A|\0)container=([^\0]+)", kernel_text("/proc/1/environ"))
    if found:
        return found.group(1)
    if os.path.exists("/run/.containerenv"):
        return "podman"
    return "docker" if os.path.exists("/.dockerenv") else None


def _first_line(path: str) -> str:
    with open(path, encoding="utf-8") as stream:
        return stream.readline().strip()


def _user_numbers(name: str) -> Optional[Dict[str, Any]]:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = sorted(set(os.getgrouplist(name, entry.pw_gid)))
    return {"uid": entry.pw_uid, "gid": entry.pw_gid, "groups": groups, "home": entry.pw_dir}


def _said(answer: Any) -> Reading:
    return known(
        {
            "exit_status": answer.exit_status,
            "stdout": answer.stdout,
            "stderr": answer.stderr,
        }
    )


def _lock_of(config: str) -> Optional[str]:
    """Return the lock in a container's configuration; what follows a bracket is a snapshot's."""
    found = re.search(r"^lock: *(\S+)", config.partition("\n[")[0], re.MULTILINE)
    return found.group(1) if found else None


def _kernel_place(pid: int) -> Dict[str, Any]:
    """Return where a process stands in the kernel, and the signals that wait for it there."""
    stack = kernel_text(f"/proc/{pid}/stack").splitlines()
    masks = re.findall(
        r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", kernel_text(f"/proc/{pid}/status"), re.M
    )
    pending = {bit + 1 for mask in masks for bit in range(64) if int(mask, 16) >> bit & 1}
    return {"stack": stack[:40] or None, "pending": sorted(pending)}


# -- programs ------------------------------------------------------------------------------------------


def _program(argv: Sequence[str], limit_s: float, **options: Any) -> Any:
    """Run a program: what it left, or (a str) why it could not be started."""
    try:
        return capture(argv, limit_s, **options)
    except OSError as error:
        return f"{argv[0]} could not be run: {error.strerror or error}"


def _systemctl(arguments: Sequence[str], limit_s: float) -> None:
    answer = capture(["systemctl", "--no-ask-password", *arguments], limit_s)
    if answer.exit_status != 0:
        why = answer.stderr.strip()[:500] or f"exit {answer.exit_status}"
        raise OSError(f"systemctl {arguments[0]}: {why}")


def _unit_name(unit: str) -> str:
    if not _UNIT_NAME.match(unit):
        raise OSError(f"not a unit name: {unit!r}")
    return unit


def _unit_properties(name: str) -> Reading:
    """Ask the bus for all properties of a unit in one call: exact lists and microseconds, no text to parse."""
    if not _UNIT_NAME.match(name):
        return dict(unknown(f"not a unit name: {name!r}"), refused=True)
    path = "/org/freedesktop/systemd1/unit/" + "".join(
        char if char.isalnum() and not (at == 0 and char.isdigit()) else f"_{ord(char):02x}"
        for at, char in enumerate(name)
    )
    call = ["busctl", "--system", "--json=short", "call", _SYSTEMD_BUS, path]
    answer = _program(
        [*call, "org.freedesktop.DBus.Properties", "GetAll", "s", ""], SYSTEMCTL_LIMIT_S
    )
    if isinstance(answer, str):
        return unknown(answer)
    if answer.exit_status != 0 or answer.truncated:
        return unknown(f"busctl: exit {answer.exit_status}: {answer.stderr.strip()[:200]}")
    try:
        values = json.loads(answer.stdout)["data"][0]
        return known({key: value["data"] for key, value in values.items()})
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return unknown(f"busctl: not the answer expected: {error!r}")


def _unittext_of(path: str) -> str:
    """Return a unit file's text, through links as systemd reads it."""
    data = read_file(os.path.realpath(path))
    if data is None:
        raise FileNotFoundError(path)
    return data.decode("utf-8", "surrogateescape")


def _is_masked(path: str) -> bool:
    return os.path.realpath(path) == "/dev/null" or not os.path.lexists(path)


def _package_of(path: str) -> Optional[str]:
    """Return the package that owns a unit file, None for one that a person wrote."""
    if path.startswith(("/etc/", "/run/")):
        return None
    aliases = [path, path[len("/usr") :] if path.startswith("/usr/lib/") else "/usr" + path]
    for program in (["dpkg-query", "-S"], ["rpm", "-qf", "--queryformat=%{NAME}: "]):
        for alias in aliases:
            answer = _program([*program, alias], SYSTEMCTL_LIMIT_S)
            if not isinstance(answer, str) and answer.exit_status == 0:
                package: str = answer.stdout.partition(":")[0]
                return package
    return None


def _verify(path: str, name: str) -> Reading:
    """Run `systemd-analyze verify`; it also talks of other units, which are not ours to judge."""
    answer = capture(["systemd-analyze", "verify", "--man=no", path], SYSTEMCTL_LIMIT_S)
    if answer.exit_status == TIMED_OUT:
        return unknown("systemd-analyze verify did not end in time")
    lines = [line for line in answer.stderr.splitlines() if path in line or name in line]
    complaints = [line.replace(path, name) for line in lines]
    if answer.exit_status != 0 and not complaints:
        return known([answer.stderr.strip()[-500:] or f"exit {answer.exit_status}"])
    return known(complaints)


# -- nvidia-smi ----------------------------------------------------------------------------------------


def _is_amd() -> bool:
    """Say whether this machine's GPUs are AMD's: a machine with both vendors is taken for NVIDIA's."""
    return amd_present() and shutil.which("nvidia-smi", path=PROGRAM_PATH) is None


def _record_probe(path: str, pid: int) -> None:
    facts = process_stat(pid)
    start = facts["start_ticks"] if facts else None
    record = {"version": 1, "pid": pid, "start_ticks": start}
    replace_file(path, json.dumps(record).encode(), 0o600, os.geteuid(), os.getegid())


def _hanging_probe(path: str) -> Optional[int]:
    """Return the pid of a recorded probe that still lives; its start time tells it from a stranger."""
    with contextlib.suppress(ValueError, KeyError, OSError):
        record = json.loads(read_file(path) or b"{}")
        facts = process_stat(record["pid"])
        if facts and facts["start_ticks"] == record["start_ticks"] and facts["state"] not in "ZX":
            return int(record["pid"])
    return None


def _with_optional(row: Mapping[str, Any], cells: Mapping[str, Any]) -> Dict[str, Any]:
    return dict(
        row,
        mig=cells.get("mig.mode.current"),
        persistence=cells.get("persistence_mode"),
        recovery_action=cells.get("gpu_recovery_action"),
    )


# -- journal -------------------------------------------------------------------------------------------


def _journalctl(arguments: Sequence[str]) -> Reading:
    """Read the journal; its exit code says nothing (no entries may be 1), its complaints do."""
    argv = ["journalctl", "--no-pager", "-q", "-o", "json", *arguments]
    answer = _program(argv, JOURNAL_LIMIT_S, bytes_max=JOURNAL_BYTES_MAX)
    if isinstance(answer, str):
        return unknown(answer)
    if answer.exit_status == TIMED_OUT or answer.truncated:
        return unknown("journalctl: too much or too slow")
    if answer.exit_status != 0 and answer.stderr.strip():
        return unknown(f"journalctl: {answer.stderr.strip()[:200]}")
    if os.geteuid() != 0 and not answer.stdout.strip():
        return unknown("journalctl: nothing that this user may see")
    return read_journal(answer.stdout)


def _cursor_now() -> Reading:
    if not _has_kernel_log():
        return _no_kernel_log()
    answer = _journalctl(["-n", "1", "--output-fields=MESSAGE"])
    if "known" not in answer:
        return answer
    if not answer["known"] or not answer["known"][-1]["cursor"]:
        return unknown("the journal is empty")
    return known({"cursor": answer["known"][-1]["cursor"], "lines": []})


def _has_kernel_log() -> bool:
    """Say whether this layer's journal gets kernel messages: a kernel prints some at each boot."""
    return bool(_journalctl(["-k", "-n", "1", "--output-fields=MESSAGE"]).get("known"))


def _no_kernel_log() -> Reading:
    reading = unknown("this layer's journal has no kernel messages")
    if container_kind() is not None:
        reading["elsewhere"] = True
    return reading

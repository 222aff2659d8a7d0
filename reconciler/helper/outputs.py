"""How the outputs of a host's programs are read; pure.

Each function takes text (and the exit code, where it says something) and returns a reading,
`{"known": value}` or `{"unknown": why}`, see `machine.py`. An unknown reading may carry `"fault": code`:
trusted evidence that something is broken, which no waiting cures. What the readings prove is for
`readings.py` to judge; the programs are run by `host.py`.

Part of the shipped helper: Python 3.9, standard library, and, because the helper is one joined file,
names that no sibling module uses.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from reconciler.helper.machine import Reading

# -- readings ------------------------------------------------------------------------------------


def known(value: Any) -> Reading:
    """Return the reading of a value that was seen."""
    return {"known": value}


def unknown(why: str, fault: Optional[str] = None) -> Reading:
    """Return the reading of what could not be seen; `fault` names a breakage that was seen instead."""
    return {"unknown": why} if fault is None else {"unknown": why, "fault": fault}


# -- nvidia-smi ------------------------------------------------------------------------------------

# What is always asked, in one call. Temperature and utilisation are life signs: a dead card can report
# 0 MiB used, but not a temperature.
GPU_FIELDS = (
    "uuid",
    "index",
    "pci.bus_id",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "utilization.gpu",
)
# One field that an older driver does not know fails the whole query, so these are left out where they were refused.
GPU_FIELDS_OPTIONAL = (
    "mig.mode.current",
    "persistence_mode",
    "gpu_recovery_action",
    "driver_version",
)
APP_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")

_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
_MIG_OR_GPU_UUID = re.compile(r"(GPU|MIG)-[0-9a-fA-F-]{36}\Z")
_BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\Z")
_NUMBER = re.compile(r"(\d+)(?: (?:MiB|%|W|C))?\Z")
_NUMERIC_FIELDS = frozenset(
    {
        "index",
        "memory.used",
        "memory.total",
        "memory.free",
        "temperature.gpu",
        "utilization.gpu",
    }
)
_CELL_FAULTS = {"[GPU is lost]": "lost", "[GPU requires reset]": "reset_required", "ERR!": "error"}

# Text on standard output (nvidia-smi's own errors go there) → (error, is it a proven fault).
_SMI_ERRORS: Tuple[Tuple[str, str, bool], ...] = (
    (r"couldn't communicate with the NVIDIA driver", "driver_not_loaded", True),
    (r"couldn't find libnvidia-ml", "nvml_library_missing", True),
    (r"Driver/library version mismatch", "version_mismatch", True),
    (r"^No devices were found", "no_devices", True),
    (r"Failed to initialize NVML: Unknown Error", "container_lost_gpu", False),
    (r"Unable to determine the device handle for GPU", "gpu_handle", True),
)
# nvidia-smi(1), RETURN VALUE, for exits whose text said nothing that we know.
_SMI_EXITS: Mapping[int, Tuple[str, bool]] = {
    2: ("bad_argument", False),
    3: ("not_available", False),
    4: ("no_permission", False),
    6: ("no_devices", True),
    8: ("power_cable", True),
    9: ("driver_not_loaded", True),
    10: ("interrupt_problem", True),
    12: ("nvml_library_missing", True),
    14: ("inforom_corrupted", False),
    15: ("gpu_lost", True),
    18: ("version_mismatch", True),
}


def read_smi_table(exit_status: int, stdout: str, fields: Sequence[str]) -> Dict[str, Any]:
    """Read one `--query-gpu` answer: {error, fault, rows, warnings, bad_lines, bad_bus_ids, field_unsupported}.

    The order of judgement is the policy: timed out, then the exit code and its text, then "every line is
    a row, or the sample is bad". A row has all cells, by field name, plus `fault` where a cell says so;
    a cell is None when it holds no number. The set of UUIDs is the caller's to compare.
    """
    table: Dict[str, Any] = {
        "error": None,
        "fault": False,
        "rows": [],
        "warnings": [],
        "bad_lines": [],
        "bad_bus_ids": [],
        "field_unsupported": None,
    }
    if exit_status in (124, 137, -9):
        table["error"] = "timeout"
        return table
    _sort_smi_lines(stdout, fields, table)
    _judge_smi_exit(exit_status, stdout, table)
    return table


def _sort_smi_lines(stdout: str, fields: Sequence[str], table: Dict[str, Any]) -> None:
    lines = [line for line in stdout.splitlines() if line.strip()]
    if lines and _is_smi_header(lines[0], fields):
        lines = lines[1:]
    for line in lines:
        row = _smi_row(line, fields)
        if row is not None:
            table["rows"].append(row)
        elif line.startswith("WARNING:"):
            table["warnings"].append(line)
        else:
            table["bad_lines"].append(line)
    uuids = [row["uuid"] for row in table["rows"] if row.get("uuid")]
    if len(set(uuids)) != len(uuids):
        table["bad_lines"].append("one UUID in two rows")


def _is_smi_header(line: str, fields: Sequence[str]) -> bool:
    return [cell.split(" [")[0] for cell in line.split(", ")] == list(fields)


def _smi_row(line: str, fields: Sequence[str]) -> Optional[Dict[str, Any]]:
    cells = line.strip().split(", ")
    if len(cells) != len(fields):
        return None
    row: Dict[str, Any] = {"fault": None}
    for field, cell in zip(fields, cells):  # noqa: B905 - strict= is younger than Python 3.9; the lengths were compared
        if field in ("uuid", "gpu_uuid") and not _UUID.match(cell):
            return None
        if field == "pci.bus_id" and not _BUS_ID.match(cell):
            return None
        if cell in _CELL_FAULTS:
            row["fault"] = row["fault"] or _CELL_FAULTS[cell]
            row[field] = None
        elif cell.startswith("[") and cell.endswith("]"):
            row[field] = None
        elif field in _NUMERIC_FIELDS:
            number = _NUMBER.match(cell)
            if not number:
                return None
            row[field] = int(number.group(1))
        else:
            row[field] = cell
    return row


def _judge_smi_exit(exit_status: int, stdout: str, table: Dict[str, Any]) -> None:
    field = re.search(r'Field "([^"]*)" is not a valid field to query', stdout)
    if field:
        table["error"], table["field_unsupported"] = "field_unsupported", field.group(1)
        return
    table["bad_bus_ids"] = re.findall(
        r"device handle for GPU ?\d*:? ?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])",
        stdout,
    )
    for pattern, error, fault in _SMI_ERRORS:
        if re.search(pattern, stdout, re.MULTILINE):
            table["error"], table["fault"] = error, fault
            return
    if exit_status != 0:
        table["error"], table["fault"] = _SMI_EXITS.get(exit_status, ("failed", False))
    elif table["bad_lines"] or table["warnings"]:
        table["error"] = "unexpected_line"
    elif not table["rows"]:
        table["error"] = "no_rows"


def read_gpu_rows(exit_status: int, stdout: str, fields: Sequence[str] = GPU_FIELDS) -> Reading:
    """Read the needed query: known is a list of {uuid, index, bus_id, used_mib, total_mib, temperature_c, utilization_pct, fault}.

    A cell without a number is null (`[N/A]` is neither zero nor free). `fault` is null or the word of a
    broken card. `unsupported` beside an unknown names a field that this driver does not know. The whole answer is unknown when it was cut short, failed, or has a line that is no row.
    """
    table = read_smi_table(exit_status, stdout, fields)
    if table["error"]:
        return _smi_failure(exit_status, stdout, table)
    return known([_gpu_record(row) for row in table["rows"]])


def _gpu_record(row: Mapping[str, Any]) -> Dict[str, Any]:
    return {
        "uuid": row["uuid"],
        "index": row.get("index"),
        "bus_id": row.get("pci.bus_id"),
        "used_mib": row.get("memory.used"),
        "total_mib": row.get("memory.total"),
        "temperature_c": row.get("temperature.gpu"),
        "utilization_pct": row.get("utilization.gpu"),
        "fault": row["fault"],
    }


def _smi_why(exit_status: int, stdout: str, table: Mapping[str, Any]) -> str:
    if table["error"] == "timeout":
        return "nvidia-smi did not answer in time"
    line = next(iter(table["bad_lines"] or table["warnings"]), stdout.strip()[:200])
    return f"nvidia-smi: {table['error']} (exit {exit_status}): {line[:200]}"


def read_optional_fields(exit_status: int, stdout: str, fields: Sequence[str]) -> Reading:
    """Read the optional query (uuid first): known {uuid: {field: text|None}}; `unsupported` names a field to leave out."""
    table = read_smi_table(exit_status, stdout, ["uuid", *fields])
    if table["error"]:
        return _smi_failure(exit_status, stdout, table)
    return known({row["uuid"]: {field: row[field] for field in fields} for row in table["rows"]})


def _smi_failure(exit_status: int, stdout: str, table: Mapping[str, Any]) -> Reading:
    """Return why a query told nothing; `unsupported` names the field that this driver does not know."""
    reading = unknown(
        _smi_why(exit_status, stdout, table), table["error"] if table["fault"] else None
    )
    if table["field_unsupported"]:
        reading["unsupported"] = table["field_unsupported"]
    return reading


def read_apps(exit_status: int, stdout: str) -> Reading:
    """Read `--query-compute-apps` with the name last: known [{gpu_uuid, pid, used_mib: int|None, name: str|None}].

    The title is under the workload's control, so a row is split three times at most. A hidden size or
    name still is a holder. The pids are only good to compare with: they may belong to another namespace.
    """
    if exit_status in (124, 137, -9):
        return unknown("nvidia-smi did not answer in time")
    if exit_status != 0:
        table = read_smi_table(exit_status, stdout, APP_FIELDS)
        return unknown(
            _smi_why(exit_status, stdout, table), table["error"] if table["fault"] else None
        )
    apps = []
    for line in stdout.splitlines():
        if line.startswith("No running processes found"):
            continue
        app = _app_row(line)
        if app is None:
            return unknown(f"nvidia-smi: a line that is no compute app: {line[:200]!r}")
        apps.append(app)
    return known(apps)


def _app_row(line: str) -> Optional[Dict[str, Any]]:
    cells = line.split(", ", 3)
    if len(cells) != 4 or not _MIG_OR_GPU_UUID.match(cells[0]) or not cells[1].isdigit():
        return None
    used = _NUMBER.match(cells[2])
    if not used and not (cells[2].startswith("[") and cells[2].endswith("]")):
        return None
    return {
        "gpu_uuid": cells[0],
        "pid": int(cells[1]),
        "used_mib": int(used.group(1)) if used else None,
        "name": None if cells[3] in ("[Not Found]", "[N/A]", "") else cells[3],
    }


def read_gpu_information(text: str) -> Reading:
    """Read `/proc/driver/nvidia/gpus/<bus>/information`: known {uuid, minor, bus_id}."""
    fields = dict(re.findall(r"^([A-Za-z ]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
    uuid, minor = fields.get("GPU UUID", ""), fields.get("Device Minor", "")
    if not _UUID.match(uuid) or not minor.isdigit():
        return unknown("the driver's information file names no UUID and minor")
    return known({"uuid": uuid, "minor": int(minor), "bus_id": fields.get("Bus Location")})


def read_nvlinks(exit_status: int, stdout: str) -> Optional[int]:
    """Return how many NVLinks of one card are up, of `nvidia-smi nvlink --status -i UUID`; None when it does not say."""
    if exit_status != 0 or not re.match(r"GPU \d+: .*\(UUID: GPU-[0-9a-fA-F-]+\)", stdout):
        return None
    links = re.findall(r"^\s+Link \d+: (.*)$", stdout, re.MULTILINE)
    return sum(1 for link in links if "inactive" not in link.lower())


def read_driver_version(text: str) -> Optional[str]:
    """Return the kernel module's version out of `/proc/driver/nvidia/version`."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def pci_address(bus_id: Optional[str]) -> Optional[Tuple[int, int, int]]:
    """Return (domain, bus, device), so that `0000:41:00`, `00000000:41:00.0` compare equal."""
    found = re.match(
        r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?\Z", bus_id or ""
    )
    if not found:
        return None
    domain, bus, device = (int(part, 16) for part in found.groups())
    return domain, bus, device


# -- /proc -------------------------------------------------------------------------------------------

_PF_KTHREAD = 0x00200000


def read_proc_stat(text: str) -> Reading:
    """Read `/proc/PID/stat`: known {pid, comm, state, ppid, threads, start_ticks, kernel_thread, exit_code}.

    The name may hold anything, `) R 1 (` and newlines too, so the record is cut at the last bracket.
    """
    head, bracket, tail = text.rpartition(")")
    pid, opening, comm = head.partition(" (")
    rest = tail.split()
    if not bracket or not opening or not pid.strip().isdigit() or len(rest) < 20:
        return unknown("not a stat record")
    try:
        flags, threads, start = int(rest[6]), int(rest[17]), int(rest[19])
        parent = int(rest[1])
    except ValueError:
        return unknown("not a stat record")
    return known(
        {
            "pid": int(pid),
            "comm": comm,
            "state": rest[0],
            "ppid": parent,
            "threads": threads,
            "start_ticks": start,
            "kernel_thread": bool(flags & _PF_KTHREAD),
            "exit_code": int(rest[49]) if len(rest) > 49 and rest[49].isdigit() else None,
        }
    )


def process_is_dead(state: str, threads: int) -> bool:
    """Say whether a process holds nothing any more: a zombie leader with live threads still does."""
    return state in ("X", "x") or (state == "Z" and threads <= 1)


def read_proc_status(text: str) -> Reading:
    """Read `/proc/PID/status`: known {tgid, state, threads, uid, gid, groups, nspid, kill_pending}.

    uid and gid are the effective ones; null where the text was cut to fewer lines.
    """
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        pending = int(lines.get("SigPnd", "0"), 16) | int(lines.get("ShdPnd", "0"), 16)
        uids, gids = lines.get("Uid", "").split(), lines.get("Gid", "").split()
        return known(
            {
                "tgid": int(lines["Tgid"]),
                "state": lines["State"].split()[0],
                "threads": int(lines["Threads"]),
                "uid": int(uids[1]) if uids else None,
                "gid": int(gids[1]) if gids else None,
                "groups": [int(group) for group in lines.get("Groups", "").split()],
                "nspid": [int(pid) for pid in lines.get("NSpid", "").split()],
                "kill_pending": bool(pending & 1 << 8),
            }
        )
    except (KeyError, ValueError, IndexError):
        return unknown("not a status record")


def read_cgroup(text: str, *, unified: bool = False) -> Reading:
    """Read `/proc/PID/cgroup`: known is the path that says who a process belongs to.

    Where systemd uses cgroup v2 alone (`unified`) it is the `0::` line. On v1 and hybrid hosts that line may
    be `/` or the container runtime's own service, so a named controller that says anything is preferred.
    """
    paths: Dict[str, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            gone = parts[2].endswith(" (deleted)")
            paths[parts[1]] = parts[2][: -len(" (deleted)")] if gone else parts[2]
    controllers = () if unified else ("name=systemd", "pids", "memory")
    for controller in controllers:
        if paths.get(controller, "/") != "/":
            return known(paths[controller])
    return known(paths[""]) if "" in paths else unknown("no control group line")


def in_control_group(path: Optional[str], control_group: Optional[str]) -> bool:
    """Say whether a path is that control group or below it; the root group contains nobody."""
    if not path or not control_group or control_group == "/":
        return False
    return path == control_group or path.startswith(control_group + "/")


def cgroup_owner(path: str) -> Dict[str, Any]:
    """Say whose a control group path is, by its shape: {owner, unit, vmid, container_id}."""
    owner: Dict[str, Any] = {"owner": "other", "unit": None, "vmid": None, "container_id": None}
    units = re.findall(r"/([^/]+\.service)(?=/|\Z)", path)
    pve = re.match(r"/lxc/(\d+)(/|\Z)", path)
    container = re.search(
        r"/(docker|kubepods|libpod|crio)?[^/]*?/?(?:docker-|libpod-|cri-containerd-|crio-)?([0-9a-f]{64})(?:\.scope)?(?:/|\Z)",
        path,
    )
    if re.search(r"(\A|/)\.lxc(\.|/|\Z)", path):
        owner["owner"] = "attached-session"
    elif pve or path.startswith("/lxc.payload."):
        owner.update(owner="lxc-unit" if units else "lxc", vmid=int(pve.group(1)) if pve else None)
        owner["unit"] = units[-1] if units else None
    elif container:
        runtime = "docker" if "docker" in path else "podman" if "libpod" in path else "container"
        owner.update(owner=runtime, container_id=container.group(2))
    elif path.startswith("/user.slice/") and not units:
        owner["owner"] = "session"
    elif units:
        owner.update(owner="unit", unit=units[0])
    return owner


# -- network -----------------------------------------------------------------------------------------


def read_listening_sockets(text: str, port: int) -> Reading:
    """Read `/proc/net/tcp` or `tcp6`: known [{address, inode}] of the listeners on a port."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        try:
            address, _, port_hex = words[1].rpartition(":")
            if words[3] == "0A" and int(port_hex, 16) == port:
                found.append({"address": _kernel_address(address), "inode": int(words[9])})
        except (IndexError, ValueError):
            return unknown(f"not a socket: {line[:200]!r}")
    return known(found)


def _kernel_address(text: str) -> str:
    """Return an address that the kernel printed as host-order words of four bytes."""
    data = bytes.fromhex(text)
    order = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    return str(ipaddress.ip_address(order))


def read_local_addresses(fib_trie: str, if_inet6: str) -> FrozenSet[str]:
    """Return the addresses of this machine out of `/proc/net/fib_trie` and `/proc/net/if_inet6`."""
    found = set(re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", fib_trie))
    for line in if_inet6.splitlines():
        if re.match(r"[0-9a-f]{32} ", line):
            found.add(str(ipaddress.ip_address(bytes.fromhex(line[:32]))))
    return frozenset(found)


# -- systemd -----------------------------------------------------------------------------------------

_UNIT_TEXT = [
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ControlGroup",
    "InvocationID",
    "Restart",
    "KillMode",
    "Type",
    "FragmentPath",
    "UnitFileState",
]
_UNIT_NUMBER = [
    "MainPID",
    "ControlPID",
    "NRestarts",
    "ExecMainCode",
    "ExecMainStatus",
    "StartLimitBurst",
]
_UNIT_BOOL = ["SendSIGKILL", "NeedDaemonReload", "ConditionResult", "RemainAfterExit"]
_UNIT_LIST = ["DropInPaths", "TriggeredBy", "OnFailure", "Requires"]
_UNIT_LIST_249 = ["OnFailureOf", "OnSuccessOf", "UpheldBy"]  # An older systemd does not tell them.
_UNIT_SPAN = ["TimeoutStopUSec", "RestartUSec", "StartLimitIntervalUSec"]
_UNIT_CLOCK = [
    "ActiveEnterTimestampMonotonic",
    "InactiveEnterTimestampMonotonic",
    "ExecMainStartTimestampMonotonic",
]
UNIT_PROPERTIES: Tuple[str, ...] = (
    *_UNIT_TEXT,
    *_UNIT_NUMBER,
    *_UNIT_BOOL,
    *_UNIT_LIST,
    *_UNIT_SPAN,
    *_UNIT_CLOCK,
    "Job",
)
UNIT_PROPERTIES_ASKED: Tuple[str, ...] = (*UNIT_PROPERTIES, *_UNIT_LIST_249)
_INFINITY = 2**64 - 1
_SPAN_UNITS = {
    "us": 1,
    "ms": 1000,
    "s": 10**6,
    "min": 60 * 10**6,
    "h": 3600 * 10**6,
    "d": 86400 * 10**6,
    "w": 7 * 86400 * 10**6,
    "month": 2629800 * 10**6,
    "y": 31557600 * 10**6,
}


def read_timespan(text: str) -> Reading:
    """Read systemd's time for people (`1min 30s`, `infinity`) to microseconds; null is infinity."""
    if text == "infinity":
        return known(None)
    if text == "0":
        return known(0)
    total, words = 0, text.split()
    for word in words:
        found = re.match(r"(\d+)(?:\.(\d{1,6}))?(us|ms|s|min|h|d|w|month|y)\Z", word)
        if not found:
            return unknown(f"not a time span: {text!r}")
        scale = _SPAN_UNITS[found.group(3)]
        total += int(found.group(1)) * scale
        total += int((found.group(2) or "").ljust(6, "0")) * scale // 10**6
    return known(total) if words else unknown("an empty time span")


def read_show(text: str) -> Dict[str, str]:
    """Return `systemctl show` output as a map; a key that comes twice is taken out as not trustworthy."""
    values: Dict[str, str] = {}
    twice: Set[str] = set()
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            twice |= {key} & values.keys()
            values[key] = value
    return {key: value for key, value in values.items() if key not in twice}


def read_unit_show(text: str, exit_status: int = 0, stderr: str = "") -> Reading:
    """Read `systemctl show -p UNIT_PROPERTIES`: known is what `Machine.unit` promises, every key of it.

    systemd leaves out unknown names silently, so a missing key is an unknown unit, never a default.
    """
    if exit_status != 0:
        return unknown(f"systemctl show: exit {exit_status}: {stderr.strip()[:200]}")
    values = read_show(text)
    missing = [name for name in UNIT_PROPERTIES if name not in values]
    if missing:
        return unknown(f"systemctl show left out {', '.join(missing)}")
    unit: Dict[str, Any] = {name: values[name] for name in _UNIT_TEXT}
    unit.update({name: values[name].split() for name in _UNIT_LIST})
    unit.update({name: values.get(name, "").split() for name in _UNIT_LIST_249})
    try:
        unit.update({name: int(values[name]) for name in _UNIT_NUMBER})
        unit.update({name: int(values[name]) for name in _UNIT_CLOCK})
        unit["Job"] = int(values["Job"] or 0)
        unit.update({name: {"yes": True, "no": False}[values[name]] for name in _UNIT_BOOL})
        unit.update({name: read_timespan(values[name])["known"] for name in _UNIT_SPAN})
    except (KeyError, ValueError) as error:
        return unknown(f"systemctl show: a value that cannot be read: {error}")
    return known(unit)


def read_unit_properties(properties: Mapping[str, Any]) -> Reading:
    """Read the bus's own answer (`{name: data}`): the same as `read_unit_show`, exact to the microsecond."""
    missing = [name for name in UNIT_PROPERTIES if name not in properties]
    if missing:
        return unknown(f"the bus left out {', '.join(missing)}")
    unit = {name: properties[name] for name in UNIT_PROPERTIES}
    unit.update({name: properties.get(name, []) for name in _UNIT_LIST_249})
    unit["Job"] = properties["Job"][0]
    unit["InvocationID"] = bytes(properties["InvocationID"] or []).hex()
    for name in (*_UNIT_SPAN, *_UNIT_CLOCK):
        unit[name] = None if unit[name] == _INFINITY else unit[name]
    return known(unit)


def read_exec_start(commands: Sequence[Sequence[Any]]) -> Reading:
    """Read the bus's ExecStart: known is the one argv as it is loaded, where `$$` stands for a literal `$`."""
    if len(commands) != 1:
        return unknown(f"the unit has {len(commands)} start commands")
    return known(list(commands[0][1]))


def started_argv(loaded: Sequence[str]) -> Optional[List[str]]:
    """Return the argv that a process gets from a loaded one; None when it has variables.

    systemd resolves `$$` and variables at the start, with an environment that is not ours to know.
    """
    if any("$" in word.replace("$$", "") for word in loaded):
        return None
    return [word.replace("$$", "$") for word in loaded]


def read_jobs(text: str) -> Reading:
    """Read `systemctl list-jobs --no-legend`: known [{id, unit, type, state}]."""
    jobs = []
    for line in text.splitlines():
        words = line.split()
        if not words or line.startswith("No jobs"):
            continue
        if len(words) < 4 or not words[0].isdigit():
            return unknown(f"not a job: {line[:200]!r}")
        jobs.append({"id": int(words[0]), "unit": words[1], "type": words[2], "state": words[3]})
    return known(jobs)


# -- journal and kernel log ----------------------------------------------------------------------------


def read_journal(text: str) -> Reading:
    """Read `journalctl -o json`: known [{at, message, priority, cursor, invocation, pid}], in its order.

    A message may come as an array of bytes (colours) or null (too long).
    """
    entries = []
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            return unknown("journalctl: a line that is not JSON")
        entries.append(_journal_entry(entry))
    return known(entries)


def _journal_entry(entry: Mapping[str, Any]) -> Dict[str, Any]:
    message = entry.get("MESSAGE")
    if isinstance(message, list):
        message = bytes(message).decode("utf-8", "replace")
    stamp, priority = str(entry.get("__REALTIME_TIMESTAMP", "0")), str(entry.get("PRIORITY", "6"))
    return {
        "at": int(stamp) / 1e6 if stamp.isdigit() else 0.0,
        "message": message if isinstance(message, str) else "",
        "priority": int(priority) if priority.isdigit() else 6,
        "cursor": entry.get("__CURSOR"),
        "invocation": entry.get("_SYSTEMD_INVOCATION_ID") or entry.get("INVOCATION_ID"),
    }


def _codes(text: str) -> FrozenSet[int]:
    codes: Set[int] = set()
    for part in text.split():
        first, _, last = part.partition("-")
        codes |= set(range(int(first), int(last or first) + 1))
    return frozenset(codes)


# NVIDIA's catalogue, condensed: what a code asks for at once. Codes in no class block like `reset`.
_XID_CLASSES: Tuple[Tuple[str, FrozenSet[int]], ...] = (
    (
        "app",
        _codes("8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139"),
    ),
    ("note", _codes("14 37 38 43-45 63 66 67 92 93 106-108 121 137 141 152 153 157 160 161")),
    ("reset", _codes("46 48 62 64 95 109 110 119 120 136 140 143 155 156 158")),
    ("host", _codes("54 79 151")),
    ("fabric", _codes("74 144-150")),
    ("state", _codes("154")),
)
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?"
    r"(?: GPU-I:(\d+))?(?: GPU-CI:(\d+))?\): (\d+), (.*)"
)
_OFF_BUS = re.compile(r"NVRM: GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+): GPU has fallen off the bus")


def xid_class(code: int) -> str:
    """Return app, note, reset, host, fabric, state or unknown."""
    return next((name for name, codes in _XID_CLASSES if code in codes), "unknown")


def read_xid_lines(lines: Iterable[str]) -> Reading:
    """Read kernel log lines: known {xids: [{code, bus, pid, gpu_instance, class, recovery, text}], unbind: bool}.

    A card that fell off the bus without a number counts as Xid 79. The pid names whoever asked, which
    may be the prober. Of the 154 lines of one card the last one counts, so earlier ones are `note`.
    """
    xids: List[Dict[str, Any]] = []
    unbind = False
    for line in lines:
        unbind = unbind or "Attempting to remove device" in line
        xid = _xid(line) or _off_bus(line, xids)
        if xid and xid["code"] == 154:
            for earlier in xids:
                if earlier["code"] == 154 and earlier["bus"] == xid["bus"]:
                    earlier["class"] = "note"
        if xid:
            xids.append(xid)
    return known({"xids": xids, "unbind": unbind})


def _xid(line: str) -> Optional[Dict[str, Any]]:
    found = _XID.search(line)
    if not found:
        return None
    code, text = int(found.group(4)), found.group(5)
    pid = re.search(r"\bpid='?(\d+)", text)
    recovery = re.findall(r"\(([A-Za-z][^()]*)\)", text)[-1:] if code == 154 else []
    return {
        "code": code,
        "bus": found.group(1),
        "pid": int(pid.group(1)) if pid else None,
        "gpu_instance": int(found.group(2)) if found.group(2) else None,
        "class": _recovery_class(recovery[0] if recovery else "")
        if code == 154
        else xid_class(code),
        "recovery": recovery[0] if recovery else None,
        "text": text[:300],
    }


def _off_bus(line: str, seen: Sequence[Mapping[str, Any]]) -> Optional[Dict[str, Any]]:
    found = _OFF_BUS.search(line)
    if not found:
        return None
    bus = found.group(1).split(".")[0]
    if any(xid["code"] == 79 and xid["bus"] == bus for xid in seen):
        return None
    return {
        "code": 79,
        "bus": bus,
        "pid": None,
        "gpu_instance": None,
        "class": "host",
        "recovery": None,
        "text": "GPU has fallen off the bus.",
    }


def _recovery_class(action: str) -> str:
    if action == "None":
        return "note"
    return "host" if "Reboot" in action or "Restart" in action else "reset"


# -- AMD -----------------------------------------------------------------------------------------------


def read_amd_processes(text: str) -> Reading:
    """Read `amd-smi process --json`: known {apps: [{gpu, pid, vram_bytes, name}], empty_gpus: [gpu]}.

    An idle card has one entry whose `process_info` is the string N/A. `mem_usage` often is 0 beside
    a huge `vram_mem`, so only that one counts.
    """
    try:
        apps, empty = [], []
        for card in json.loads(text):
            infos = [entry["process_info"] for entry in card["process_list"]]
            held = [info for info in infos if info != "N/A"]
            if not held:
                empty.append(card["gpu"])
            for info in held:
                vram = info["memory_usage"]["vram_mem"]
                apps.append(
                    {
                        "gpu": card["gpu"],
                        "pid": int(info["pid"]),
                        "vram_bytes": _amd_bytes(vram),
                        "name": info.get("name"),
                    }
                )
        return known({"apps": apps, "empty_gpus": empty})
    except (ValueError, KeyError, TypeError) as error:
        return unknown(f"amd-smi process: {error!r}")


def _amd_bytes(amount: Any) -> Optional[int]:
    if not isinstance(amount, Mapping) or not isinstance(amount.get("value"), int):
        return None
    return int(amount["value"]) * {"B": 1, "KB": 10**3, "MB": 10**6}[amount["unit"]]


def read_amd_memory(text: str) -> Reading:
    """Read `amd-smi metric --mem-usage --json`: known {gpu: {used_mb, total_mb}}, null where N/A."""
    try:
        cards = {}
        for card in json.loads(text):
            usage = card["mem_usage"]
            cards[str(card["gpu"])] = {
                "used_mb": _amd_number(usage["used_vram"]),
                "total_mb": _amd_number(usage["total_vram"]),
            }
        return known(cards)
    except (ValueError, KeyError, TypeError) as error:
        return unknown(f"amd-smi metric: {error!r}")


def _amd_number(amount: Any) -> Optional[int]:
    value = amount.get("value") if isinstance(amount, Mapping) else None
    return value if isinstance(value, int) else None

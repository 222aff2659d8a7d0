"""Processes as /proc shows them: who they are, which GPU they hold, which port they listen on.

Nothing here enters a GPU driver, so it works while nvidia-smi hangs. What can block on a wedged process
(argv, environment, mappings need its memory lock) is read last, in a child with a limit. Devices are told
by number and never by path: a container has nodes of its own. Part of the shipped helper (see `outputs.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import signal
import stat
import time
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from reconciler.helper.machine import Reading
from reconciler.helper.outputs import (
    cgroup_owner,
    known,
    process_is_dead,
    read_cgroup,
    read_listening_sockets,
    read_proc_stat,
    read_proc_status,
    unknown,
)
from reconciler.helper.programs import each_guarded

SLOW_READ_S = 2.0  # A healthy process answers in microseconds.
SCAN_S_MAX = 60.0
_SCAN_ROUNDS_MAX = 5
_LIBC = ctypes.CDLL(None, use_errno=True)
_KCMP = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "ppc64le": 354, "s390x": 343}.get(
    os.uname().machine
)
_KCMP_FILES = 2
_AT_FDCWD = -100
_AT_STATX_DONT_SYNC = 0x4000
_STATX_TYPE = 1
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # The same on every architecture.
# A file system that is gone or hung says this; a device node's never does.
_NOT_A_DEVICE_NODE = (errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN)
_GONE = (errno.ENOENT, errno.ESRCH)
_FILE_NAMES = ("utf-8", "surrogateescape")

Number = Tuple[int, int]


class Device(NamedTuple):
    """A GPU device by number: its name, and the GPU's minor when it is the node of one card."""

    name: str
    minor: Optional[int]


# -- device numbers ------------------------------------------------------------------------------------


class Devices:
    """The GPU devices of this machine, found by their nodes and by the drivers' names in /proc/devices.

    A node's number is read from the node and never computed: majors differ between machines. The driver's
    majors are added because a container can have a node for a card that the host's /dev has none for.
    """

    def __init__(self, dev: str = "/dev", proc: str = "/proc") -> None:
        self._numbers = _device_nodes(dev)
        self._majors = _device_majors(proc)

    def find(self, number: Number) -> Optional[Device]:
        """Return the GPU device with that number, None for any other device."""
        found = self._numbers.get(number)
        driver = self._majors.get(number[0])
        if found or not driver:
            return found
        card = driver in ("nvidia", "nvidia-frontend") and number[1] <= 247
        return Device(f"{driver} {number[0]}:{number[1]}", number[1] if card else None)

    def node(self, minor: int, dev: str = "/dev") -> Optional[str]:
        """Return the path of a card's node when there is one."""
        path = f"{dev}/nvidia{minor}"
        return path if any(device.name == path for device in self._numbers.values()) else None


def _device_nodes(dev: str) -> Dict[Number, Device]:
    numbers: Dict[Number, Device] = {}
    with contextlib.suppress(FileNotFoundError):
        names = [f"{dev}/{name}" for name in os.listdir(dev) if name.startswith("nvidia")]
        caps = f"{dev}/nvidia-caps"
        if caps in names:
            names += [f"{caps}/{name}" for name in os.listdir(caps)]
        for path in names:
            with contextlib.suppress(OSError):
                found = os.stat(path)
                if stat.S_ISCHR(found.st_mode):
                    number = (os.major(found.st_rdev), os.minor(found.st_rdev))
                    minor = re.match(re.escape(dev) + r"/nvidia(\d+)\Z", path)
                    numbers[number] = Device(path, int(minor.group(1)) if minor else None)
    return numbers


def _device_majors(proc: str) -> Dict[int, str]:
    text = _read_text(f"{proc}/devices") or ""
    majors = {}
    for line in text.partition("Block devices")[0].splitlines():
        words = line.split()
        if len(words) == 2 and words[0].isdigit() and words[1].startswith("nvidia"):
            majors[int(words[0])] = words[1]
    return majors


class _Statx(ctypes.Structure):
    """The parts of `struct statx` that tell a device; the gaps are what we do not ask for."""

    _fields_ = (
        ("_before", ctypes.c_char * 28),
        ("mode", ctypes.c_uint16),
        ("_between", ctypes.c_char * 98),
        ("rdev_major", ctypes.c_uint32),
        ("rdev_minor", ctypes.c_uint32),
        ("_after", ctypes.c_char * 120),
    )


def char_device(path: str) -> Optional[Number]:
    """Return the number of the character device at the end of a path, None for anything else.

    By statx without synchronising: a plain stat of a descriptor into a hung file system blocks.
    Raises OSError as stat does.
    """
    numbers, failures = char_devices(_AT_FDCWD, [path])
    if failures:
        raise OSError(failures[0], os.strerror(failures[0]), path)
    return numbers[0] if numbers else None


def char_devices(directory: int, names: List[str]) -> Tuple[List[Number], List[int]]:
    """Return the numbers of the character devices among some names in an open directory, and why others failed.

    One loop without a call of its own, because a crowded host has a hundred thousand descriptors.
    """
    statx = getattr(_LIBC, "statx", None)
    if statx is None:
        return _char_devices_without_statx(directory, names)
    numbers: List[Number] = []
    failures: List[int] = []
    answer = _Statx()
    where = ctypes.byref(answer)
    for name in names:
        if statx(directory, name.encode(*_FILE_NAMES), _AT_STATX_DONT_SYNC, _STATX_TYPE, where):
            failures.append(ctypes.get_errno())
        elif answer.mode & 0xF000 == stat.S_IFCHR:
            numbers.append((answer.rdev_major, answer.rdev_minor))
    return numbers, failures


def _char_devices_without_statx(directory: int, names: List[str]) -> Tuple[List[Number], List[int]]:
    numbers, failures = [], []
    for name in names:
        try:
            found = os.stat(name, dir_fd=None if directory == _AT_FDCWD else directory)
        except OSError as error:
            failures.append(error.errno or errno.EIO)
            continue
        if stat.S_ISCHR(found.st_mode):
            numbers.append((os.major(found.st_rdev), os.minor(found.st_rdev)))
    return numbers, failures


# -- one process ---------------------------------------------------------------------------------------


def _read_text(path: str, size: int = 1 << 16) -> Optional[str]:
    data = _read_bytes(path, size)
    return None if data is None else data.decode("utf-8", "surrogateescape")


def _read_bytes(path: str, size: int) -> Optional[bytes]:
    """Return the start of a /proc file; None when the process is gone or may not be read."""
    try:
        with open(path, "rb") as stream:
            return stream.read(size)
    except OSError:
        return None


def _read_link(path: str) -> Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None


def process_pids(proc: str = "/proc") -> List[int]:
    """Return the pids of this pid namespace."""
    return sorted(int(name) for name in os.listdir(proc) if name.isdigit())


def process_stat(pid: int, proc: str = "/proc") -> Optional[Dict[str, Any]]:
    """Return what `/proc/PID/stat` says, None when there is no such process."""
    text = _read_text(f"{proc}/{pid}/stat")
    reading = read_proc_stat(text) if text else unknown("gone")
    found: Optional[Dict[str, Any]] = reading.get("known")
    return found


def _living_task(pid: int, facts: Mapping[str, Any], proc: str) -> str:
    """Return the directory to read a process from: of a dead leader's first live thread, else its own.

    A zombie leader has no files, executable or memory of its own while its threads still hold all of them.
    """
    if facts["state"] != "Z":
        return f"{proc}/{pid}"
    for tid in _tasks(pid, proc):
        text = _read_text(f"{proc}/{pid}/task/{tid}/stat") or ""
        task = read_proc_stat(text).get("known")
        if task and task["state"] not in ("Z", "X"):
            return f"{proc}/{tid}"  # Not listed, yet there, and unlike task/TID it has map_files.
    return f"{proc}/{pid}"


def _tasks(pid: int, proc: str) -> List[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"{proc}/{pid}/task"))
    except OSError:
        return []


def process_records(pids: Iterable[int], proc: str = "/proc") -> List[Dict[str, Any]]:
    """Return the record of each process that still is there (see `Machine.processes` for its keys)."""
    records = [record for record in (_quick_record(pid, proc) for pid in pids) if record]
    bases = [_living_task(record["pid"], record, proc) for record in records]
    for record, slow in zip(records, each_guarded(bases, _slow_facts, SLOW_READ_S)):  # noqa: B905 - strict= is younger than 3.9; one answer each
        record.update(slow.get("known") or _SLOW_UNKNOWN)
    return records


def _quick_record(pid: int, proc: str) -> Optional[Dict[str, Any]]:
    facts = process_stat(pid, proc)
    if facts is None:
        return None
    base = _living_task(pid, facts, proc)
    status = read_proc_status(_read_text(f"{proc}/{pid}/status") or "").get("known") or {}
    cgroup = process_cgroup(base)
    exe = _read_link(f"{base}/exe")
    return {
        "pid": pid,
        "start_ticks": facts["start_ticks"],
        "state": facts["state"],
        "threads": facts["threads"],
        "ppid": facts["ppid"],
        "uid": status.get("uid"),
        "gid": status.get("gid"),
        "groups": status.get("groups", []),
        "exe": exe[: -len(" (deleted)")] if exe and exe.endswith(" (deleted)") else exe,
        "comm": facts["comm"],
        "cgroup": cgroup,
        "nspid": status.get("nspid", []),
        "mount_ns": namespace_inode(base, "mnt"),
        "kill_pending": status.get("kill_pending", False),
        "wchan": _read_text(f"{base}/wchan", 128) or None,
    }


_SLOW_UNKNOWN: Mapping[str, Any] = {
    "argv": [],
    "invocation": None,
    "mark": None,
    "environ_readable": False,
}


def _slow_facts(base: str) -> Dict[str, Any]:
    """Read what needs the process's memory; an environment of zero bytes was wiped and says nothing."""
    argv = _read_bytes(f"{base}/cmdline", 1 << 17) or b""
    environ = _read_bytes(f"{base}/environ", 1 << 20) or b""
    pairs = dict(pair.partition(b"=")[::2] for pair in environ.split(b"\0") if b"=" in pair)
    invocation, mark = pairs.get(b"INVOCATION_ID"), pairs.get(b"RECONCILER_SERVER")
    return {
        "argv": [os.fsdecode(word) for word in argv.rstrip(b"\0").split(b"\0") if argv],
        "invocation": os.fsdecode(invocation) if invocation else None,
        "mark": os.fsdecode(mark) if mark else None,
        "environ_readable": bool(pairs),
    }


def process_environment(pid: int, proc: str = "/proc") -> Reading:
    """Return the environment that a process was started with; one of zero bytes was wiped and says nothing."""

    def read(base: str) -> Dict[str, str]:
        data = _read_bytes(f"{base}/environ", 1 << 20) or b""
        pairs = (pair.partition(b"=") for pair in data.split(b"\0") if b"=" in pair)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}

    (reading,) = each_guarded([f"{proc}/{pid}"], read, SLOW_READ_S)
    if reading.get("known"):
        return reading
    return unknown(str(reading.get("unknown") or "it cannot be read, or was wiped"))


def namespace_inode(base: str, kind: str) -> Optional[int]:
    """Return the inode of a process's namespace ("mnt", "net"), None when it may not be read."""
    found = re.match(rf"{kind}:\[(\d+)\]\Z", _read_link(f"{base}/ns/{kind}") or "")
    return int(found.group(1)) if found else None


# -- control groups ------------------------------------------------------------------------------------

_CGROUP_ROOT = "/sys/fs/cgroup"


def process_cgroup(base: str) -> Optional[str]:
    """Return the control group of a process as this layer's systemd sees it."""
    unified = os.path.exists(f"{_CGROUP_ROOT}/cgroup.controllers")
    reading = read_cgroup(_read_text(f"{base}/cgroup") or "", unified=unified)
    path: Optional[str] = reading.get("known")
    return path


def cgroup_directory(control_group: str, root: str = _CGROUP_ROOT) -> Optional[str]:
    """Return where a unit's control group lies in the file system; None for a path that is no unit's."""
    parts = control_group.split("/")
    if not control_group.startswith("/") or len(parts) < 2 or set(parts[1:]) & {"", ".", ".."}:
        return None
    for mount in (root, f"{root}/unified", f"{root}/systemd"):
        if os.path.exists(f"{mount}/cgroup.procs"):
            return mount + control_group
    return None


def cgroup_pids(directory: str) -> Optional[List[int]]:
    """Return the pids in a control group and below it; None when one is of another pid namespace."""
    pids: Set[int] = set()
    for path, _, names in os.walk(directory):
        if "cgroup.procs" in names:
            text = _read_text(f"{path}/cgroup.procs", 1 << 22)
            if text is None:
                text = _read_text(f"{path}/cgroup.threads", 1 << 22) or ""
            pids |= {int(line) for line in text.split()}
    return None if 0 in pids else sorted(pids)


def group_processes(control_group: str, proc: str = "/proc") -> Reading:
    """Return the records of the processes in a control group and below it."""
    directory = cgroup_directory(control_group)
    if directory is None:
        return unknown(f"not a control group of a unit: {control_group!r}")
    pids = cgroup_pids(directory)
    if pids is None:
        return unknown("a process of another pid namespace is in the control group")
    return known(process_records(pids, proc))


def kill_control_group(control_group: str) -> str:
    """Kill all in exactly one unit's group at once, without naming a pid: "sent", "gone" or "refused: why"."""
    directory = cgroup_directory(control_group)
    if directory is None or not re.search(r"\.(service|scope)\Z", control_group):
        return "refused: not the control group of a service"
    if not os.path.isdir(directory):
        return "gone"
    try:
        descriptor = os.open(f"{directory}/cgroup.kill", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"refused: no cgroup.kill here ({error.strerror})"
    try:
        os.write(descriptor, b"1")
    except OSError as error:
        return f"refused: {error.strerror}"
    finally:
        os.close(descriptor)
    return "sent"


# -- signals -------------------------------------------------------------------------------------------


def open_pidfd(pid: int) -> int:
    """Open a process so that it cannot become another one; OSError as the system call says."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    descriptor = int(_LIBC.syscall(_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def has_pidfd() -> bool:
    """Say whether this kernel can open a process (5.3)."""
    try:
        os.close(open_pidfd(os.getpid()))
    except OSError:
        return False
    return True


def signal_process(pid: int, start_ticks: int, number: int, proc: str = "/proc") -> str:
    """Signal one process, open first, identity second, signal third: "sent", "gone" or "refused: why".

    Once it is open the number cannot pass to a stranger, so the check holds until the signal. A kernel
    without pidfd is refused: there is no safe way.
    """
    if pid <= 1 or pid == os.getpid():
        return "refused: not a process to signal"
    try:
        descriptor = open_pidfd(pid)
    except ProcessLookupError:
        return "gone"
    except OSError as error:
        return f"refused: it cannot be opened ({error.strerror})"
    try:
        facts = process_stat(pid, proc)
        if facts is None or process_is_dead(facts["state"], facts["threads"]):
            return "gone"
        if facts["start_ticks"] != start_ticks:
            return "refused: another process has this number now"
        return _send(descriptor, number)
    finally:
        os.close(descriptor)


def _send(descriptor: int, number: int) -> str:
    try:
        _pidfd_send(descriptor, number)
    except ProcessLookupError:
        return "gone"
    except OSError as error:
        return f"refused: {error.strerror}"
    return "sent"


def _pidfd_send(descriptor: int, number: int) -> None:
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    elif _LIBC.syscall(_PIDFD_SEND_SIGNAL, descriptor, number, None, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# -- who holds a GPU -------------------------------------------------------------------------------------


class _Scan:
    """One pass over all processes: what each holds, and how many could not be seen."""

    def __init__(self, devices: Devices, proc: str) -> None:
        self.devices = devices
        self.proc = proc
        self.held: Dict[int, Dict[str, Any]] = {}
        self.unreadable: Set[int] = set()

    def add(self, pid: int, number: Optional[Number], via: str) -> None:
        device = self.devices.find(number) if number else None
        if device is None:
            return
        one = self.held.setdefault(pid, {"minors": set(), "devices": set(), "via": via})
        one["devices"].add(device.name)
        if device.minor is not None:
            one["minors"].add(device.minor)


def scan_holders(devices: Devices, proc: str = "/proc", skip: Iterable[int] = ()) -> Reading:
    """Find every process with a GPU device open or mapped: {complete, unreadable, holders}.

    Kernel threads and the dead hold nothing. A process that could not be looked into counts as unreadable,
    and then the scan proves nothing about free. Looks again for processes that appeared meanwhile.
    """
    scan = _Scan(devices, proc)
    seen: Set[int] = {os.getpid(), *skip}
    deadline = time.monotonic() + SCAN_S_MAX
    rest: Set[int] = set()
    for _ in range(_SCAN_ROUNDS_MAX):
        fresh = [pid for pid in process_pids(proc) if pid not in seen]
        seen |= set(fresh)
        rest = _scan_round(scan, fresh, deadline)
        if not fresh or rest:
            break
    complete = not scan.unreadable and not rest and os.geteuid() == 0
    holders = []
    for record in process_records(sorted(scan.held), proc):
        held = scan.held[record["pid"]]
        record.update(
            minors=sorted(held["minors"]), devices=sorted(held["devices"]), via=held["via"]
        )
        holders.append(record)
    unreadable = len(scan.unreadable) + len(rest)
    return known({"complete": complete, "unreadable": unreadable, "holders": holders})


def _scan_round(scan: _Scan, pids: List[int], deadline: float) -> Set[int]:
    """Scan the descriptors, then the mappings, of some processes; return those there was no time for."""
    living: Dict[int, str] = {}
    for at, pid in enumerate(pids):
        if time.monotonic() > deadline:
            return set(pids[at:])
        base = _scan_process(scan, pid)
        if base is not None:
            living[pid] = base
    cache: Dict[Any, Optional[Number]] = {}
    readings = each_guarded(
        list(living.values()),
        lambda base: _mapped_devices(base, cache),
        SLOW_READ_S,
    )
    for pid, reading in zip(living, readings):  # noqa: B905 - strict= is younger than 3.9; one answer each
        if "known" not in reading:
            scan.unreadable.add(pid)
        for number in reading.get("known") or []:
            scan.add(pid, (number[0], number[1]), "map")
    return set()


def _scan_process(scan: _Scan, pid: int) -> Optional[str]:
    """Scan the descriptors of one process; return where to read its mappings, None when it has none.

    A leader that has files open lives, and its table is also its threads' but for those that kcmp tells
    apart. One that shows none may be a kernel thread, dead, or dead with threads that hold everything.
    """
    if _scan_table(scan, pid, f"{scan.proc}/{pid}/fd"):
        for table in _other_tables(pid, [pid], scan.proc):
            _scan_table(scan, pid, table)
        return f"{scan.proc}/{pid}"
    facts = process_stat(pid, scan.proc)
    if facts is None or facts["kernel_thread"]:
        return None
    if process_is_dead(facts["state"], facts["threads"]):
        return None
    for table in descriptor_tables(pid, scan.proc):
        _scan_table(scan, pid, table, strict=True)
    return _living_task(pid, facts, scan.proc)


def _scan_table(scan: _Scan, pid: int, table: str, *, strict: bool = False) -> bool:
    """Look at every descriptor of a table; return whether it had any. What may not be read is counted if `strict`."""
    try:
        directory = os.open(table, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if strict and error.errno not in _GONE:
            scan.unreadable.add(pid)
        return False
    try:
        names = os.listdir(directory)
        numbers, failures = char_devices(directory, names)
    except OSError as error:
        if strict and error.errno not in _GONE:
            scan.unreadable.add(pid)
        return False
    finally:
        os.close(directory)
    for number in numbers:
        scan.add(pid, number, "fd")
    if not {*_GONE, *_NOT_A_DEVICE_NODE}.issuperset(failures):
        scan.unreadable.add(pid)
    return bool(names)


def descriptor_tables(pid: int, proc: str = "/proc") -> List[str]:
    """Return one directory for each table of open files that the threads of a process use.

    Nearly always one: threads share it, and kcmp tells so in microseconds where listing them all takes
    seconds. A dead leader has none, and its threads' is found through one of them.
    """
    return _other_tables(pid, [], proc)


def _other_tables(pid: int, seen: List[int], proc: str) -> List[str]:
    """Return the directories of the tables that are not those of the threads `seen`."""
    tables: List[int] = []
    for tid in _tasks(pid, proc):
        if tid in seen or _shares_table(tid, seen):
            continue
        facts = read_proc_stat(_read_text(f"{proc}/{pid}/task/{tid}/stat") or "").get("known")
        if facts is not None and facts["state"] not in ("Z", "X"):
            seen = [*seen, tid]
            tables.append(tid)
    return [f"{proc}/{pid}/task/{tid}/fd" for tid in tables]


def _shares_table(tid: int, others: List[int]) -> bool:
    """Say whether a thread has the table of one of the others; a kernel that cannot say makes it a table of its own."""
    for other in others:
        if _KCMP is not None and _LIBC.syscall(_KCMP, other, tid, _KCMP_FILES, 0, 0) == 0:
            return True
    return False


# What `PROCMAP_QUERY` (Linux 6.11) is asked: the next mapping of a file at or after an address. `maps` writes
# a line for every mapping, most of which are of no file, and the kernel takes far longer to write them.
_PROCMAP_QUERY = 0xC0686611
_PROCMAP_NEXT_FILE = 0x10 | 0x20
_PROCMAP_WORDS = 13
_MAPS_LINE = re.compile(rb"^(\S+) \S+ \S+ (\S+ [1-9]\d*) +(.*)$", re.MULTILINE)


def _mapped_devices(base: str, cache: Dict[Any, Optional[Number]]) -> List[Number]:
    """Return the numbers of the character devices that a process has mapped.

    The device that the kernel names is the file system's, so the mapped file itself is asked, each inode once.
    """
    try:
        descriptor = os.open(f"{base}/maps", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return []
    try:
        return sorted(_queried_devices(descriptor, base, cache))
    except OSError:
        return sorted(_listed_devices(descriptor, base, cache))
    finally:
        os.close(descriptor)


def _queried_devices(descriptor: int, base: str, cache: Dict[Any, Optional[Number]]) -> Set[Number]:
    """Ask for one mapping after the other; OSError where the kernel or our rights do not suffice."""
    buffer = bytearray(8 * _PROCMAP_WORDS)
    words = memoryview(buffer).cast("Q")
    words[0], words[1] = len(buffer), _PROCMAP_NEXT_FILE
    found: Set[Number] = set()
    ioctl = (
        fcntl.ioctl
    )  # A crowded host has two hundred thousand mappings: this loop looks up as little as it can.
    while True:
        try:
            ioctl(descriptor, _PROCMAP_QUERY, buffer)
        except OSError as error:
            if error.errno in _GONE:
                return found
            raise
        words[2] = words[4]
        file = (words[8], words[9])  # Its inode and its file system.
        try:
            number = cache[file]
        except KeyError:
            # What is not mapped any more says nothing about others' mappings of it.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                cache[file] = _mapped_file(f"{base}/map_files/{words[3]:x}-{words[4]:x}")
            number = cache.get(file)
        if number is not None:
            found.add(number)


def _listed_devices(descriptor: int, base: str, cache: Dict[Any, Optional[Number]]) -> Set[Number]:
    """Read the list of mappings as text, as every kernel writes it."""
    found: Set[Number] = set()
    with open(descriptor, "rb", closefd=False) as stream:
        lines = _MAPS_LINE.findall(stream.read(1 << 26))
    for span, file, path in lines:
        if file not in cache:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                cache[file] = _mapping_device(base, os.fsdecode(span), os.fsdecode(path))
        number = cache.get(file)
        if number is not None:
            found.add(number)
    return found


def _mapping_device(base: str, span: str, path: str) -> Optional[Number]:
    """Return the device number of one mapping; where `map_files` is not for us, ask the path in its root.

    Raises FileNotFoundError or ProcessLookupError when it is not mapped any more.
    """
    first, _, last = span.partition("-")
    try:
        return _mapped_file(f"{base}/map_files/{int(first, 16):x}-{int(last, 16):x}")
    except PermissionError:
        if not path.startswith("/dev/"):
            return None
    with contextlib.suppress(OSError):
        return char_device(f"{base}/root{path}")
    return None


def _mapped_file(link: str) -> Optional[Number]:
    """Return the device number of a mapped file; a file system that is gone has no device nodes."""
    try:
        return char_device(link)
    except OSError as error:
        if error.errno in _NOT_A_DEVICE_NODE:
            return None
        raise


# -- who listens ---------------------------------------------------------------------------------------


def scan_listeners(port: int, main_pid: int, proc: str = "/proc") -> Reading:
    """Return every TCP listener on a port, here and in the main process's network namespace, with its holders."""
    sockets: Dict[int, str] = {}
    bases = [f"{proc}/self"]
    if main_pid > 0 and namespace_inode(f"{proc}/{main_pid}", "net") not in (
        None,
        namespace_inode(f"{proc}/self", "net"),
    ):
        bases.append(f"{proc}/{main_pid}")
    for base in bases:
        for table in ("tcp", "tcp6"):
            text = _read_text(f"{base}/net/{table}", 1 << 24)
            if text is None:
                if table == "tcp":
                    return unknown(f"{base}/net/{table} cannot be read")
                continue
            reading = read_listening_sockets(text, port)
            if "known" not in reading:
                return reading
            sockets.update({one["inode"]: one["address"] for one in reading["known"]})
    holders = _socket_holders(set(sockets), proc) if sockets else {}
    return known(
        [
            _listener(inode, sockets[inode], holders.get(inode, []), proc)
            for inode in sorted(sockets)
        ]
    )


def _socket_holders(inodes: Set[int], proc: str) -> Dict[int, List[int]]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    holders: Dict[int, List[int]] = {}
    for pid in process_pids(proc):
        for table in descriptor_tables(pid, proc):
            with contextlib.suppress(OSError):
                links = {_read_link(f"{table}/{name}") for name in os.listdir(table)}
                for link in links & wanted.keys():
                    holders.setdefault(wanted[link or ""], []).append(pid)
    return {inode: sorted(set(pids)) for inode, pids in holders.items()}


def _listener(inode: int, address: str, pids: List[int], proc: str) -> Dict[str, Any]:
    cgroups = sorted({path for path in (process_cgroup(f"{proc}/{pid}") for pid in pids) if path})
    units = {cgroup_owner(path)["unit"] for path in cgroups} - {None}
    return {
        "address": address,
        "inode": inode,
        "pids": pids,
        "units": sorted(units),
        "cgroups": cgroups,
    }

"""Where the helper keeps what it knows on a host, and how it changes files so that it can change back.

Paths, the grammar of every argument, versioned JSON records, and `Changes`: the list of what a verb
wrote, undone in reverse when the verb fails. Part of the shipped helper: Python 3.9, standard library
only, no OS call but through `Machine`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from typing import Any, Callable, Dict, List, Optional

from reconciler.helper.machine import Machine, Reading, Refused

STATE = "/var/lib/reconciler"
RUN = "/run/reconciler"
QUARANTINE = f"{STATE}/quarantine.json"
LIB = "/usr/local/lib/reconciler"
PYTHON = "/usr/bin/python3"
SECRET_PLACES = ("/etc/reconciler/", "/run/secrets/")
PERMANENT = "/etc/systemd/system"
TRIAL = "/run/systemd/system.control"
DROP_INS = "/run/systemd/system"
DISARM_DROP_IN = "zz-reconciler-disarm.conf"
RECORD_VERSION = 1
WIRE_FORMAT = 1

UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.service")
SERVER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
REVISION_ID = re.compile(r"[0-9a-f]{64}")
NONCE = re.compile(r"[0-9a-f]{16,64}")
INVOCATION = re.compile(r"[0-9a-f]{32}")
GPU_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
SEALED = re.compile(STATE + r"/([a-z0-9][a-z0-9-]{0,62})/sealed/[0-9a-f]{64}")
CONFIG_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
CANONICAL = json.JSONEncoder(ensure_ascii=True, sort_keys=True, separators=(",", ":"))
TEXT_CAP = 512 * 1024  # A unit is some kilobytes; this only bounds what a mistake can write.


# -- arguments ---------------------------------------------------------------------------------------


def launcher_path(digest12: str) -> str:
    """Return where the program lies that runs the helper of this digest."""
    return f"{LIB}/run-{digest12}.py"


def helper_command(digest12: str) -> str:
    """Return the one command that sudo allows, and that the transports and our units run."""
    return f"{PYTHON} -I -S {launcher_path(digest12)}"


IO_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "access is refused",
    errno.EPERM: "access is refused",
    errno.EIO: "the disk has an error",
    errno.EMFILE: "too many files are open",
    errno.ENOTDIR: "a part of its path is not a directory",
    errno.EISDIR: "is a directory",
}


def io_words(error: OSError) -> str:
    """Say what a file system refused, and for which file, without the number of the error."""
    words = IO_WORDS.get(error.errno or 0) or str(error.strerror or error)
    return f"{error.filename}: {words}" if error.filename else words


def bad(message: str) -> Refused:
    """Return the refusal of a request that does not keep the grammar."""
    return Refused("BadRequest", message)


def matching(pattern: Any, value: Any, what: str) -> str:
    """Return `value` if all of it matches `pattern`."""
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise bad(f"{what} is not acceptable: {str(value)[:80]!r}")
    return value


def unit_name(value: Any) -> str:
    """Return a unit name that is one of ours to touch."""
    name = matching(UNIT_NAME, value, "unit name")
    if name.startswith("reconciler-"):
        raise bad(f"{name} belongs to the reconciler itself")
    return name


def absolute_path(value: Any, what: str = "path") -> str:
    """Return an absolute path without `.`, `..`, empty parts or control characters."""
    if not isinstance(value, str) or not value.startswith("/") or len(value) > 4096:
        raise bad(f"{what} is not an absolute path: {str(value)[:80]!r}")
    parts = value.split("/")[1:]
    if any(part in ("", ".", "..") for part in parts) and value != "/":
        raise bad(f"{what} has an empty, '.' or '..' part: {value[:80]!r}")
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise bad(f"{what} has a control character")
    return value


def text_of(value: Any, what: str) -> str:
    """Return a text of bounded size without NUL."""
    if not isinstance(value, str) or len(value) > TEXT_CAP or "\0" in value:
        raise bad(f"{what} is not a text of at most {TEXT_CAP} characters without NUL")
    return value


def texts_of(value: Any, what: str) -> List[str]:
    """Return a list of texts."""
    if not isinstance(value, list) or len(value) > 4096:
        raise bad(f"{what} is not a list")
    return [text_of(v, what) for v in value]


def number_of(value: Any, what: str, low: float, high: float) -> float:
    """Return a number between two bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise bad(f"{what} is not a number from {low:g} to {high:g}: {str(value)[:40]}")
    return value


def whole_of(value: Any, what: str, low: int, high: int) -> int:
    """Return a whole number between two bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad(f"{what} is not a whole number from {low} to {high}: {str(value)[:40]}")
    return value


def record_of(value: Any, what: str) -> Dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise bad(f"{what} is not an object")
    return value


# -- records -----------------------------------------------------------------------------------------


def sha256_of(data: bytes) -> str:
    """Return the digest that `produced.json` and `saved_sha` speak of."""
    return hashlib.sha256(data).hexdigest()


def encoded(value: Any) -> bytes:
    """Return one line of canonical ASCII JSON."""
    return CANONICAL.encode(value).encode()


def decoded(data: bytes, path: str) -> Dict[str, Any]:
    """Return the record in `data`; an unreadable or newer one is a refusal, never an empty record."""
    try:
        record = json.loads(data.decode())
    except ValueError as error:
        raise Refused("RecordUnreadable", f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Refused("RecordUnreadable", f"{path} is not a JSON object")
    version = record.get("version")
    if not isinstance(version, int) or version > RECORD_VERSION:
        raise Refused(
            "RecordTooNew",
            f"{path} has version {version}; this helper understands up to {RECORD_VERSION}",
        )
    return record


def state_path(server: str, name: str) -> str:
    """Return the path of one of a server's records; of the host's own without a server."""
    return f"{STATE}/{server}/{name}" if server else f"{STATE}/{name}"


def record_path(server: str, name: str) -> str:
    """Return the path of one of a server's JSON records."""
    return state_path(server, f"{name}.json")


def sealed_path(server: str, digest: str) -> str:
    """Return the path of a secret that came encrypted with the specs, under the digest of what was encrypted."""
    return state_path(server, f"sealed/{digest}")


def is_sealed(path: str, server: Optional[str] = None) -> bool:
    """Say whether a path is that of such a secret: of this server, or of any."""
    found = SEALED.fullmatch(path)
    return found is not None and server in (None, found.group(1))


def lease_path(server: str) -> str:
    """Return the path of a server's lease."""
    return f"{RUN}/{server}.lease"


def flag_path(unit: str) -> str:
    """Return the path of the flag that blocks any start but ours."""
    return f"{RUN}/{unit}.disarmed"


def drop_in_path(unit: str) -> str:
    """Return the path of the drop-in that disarms a unit."""
    return f"{DROP_INS}/{unit}.d/{DISARM_DROP_IN}"


def refused_path(unit: str) -> str:
    """Return the path of the mark that the tick owes the unit a start; the guard leaves it when it cannot write its record."""
    return f"{RUN}/{unit}.refused"


def claim_path(uuid: str) -> str:
    """Return the path of the claim on one GPU."""
    return f"{RUN}/gpu/{uuid}.claim"


def read_json(machine: Machine, path: str) -> Optional[Dict[str, Any]]:
    """Return the record at `path`, None when there is none."""
    data = machine.read(path)
    return None if data is None else decoded(data, path)


def read_record(machine: Machine, server: str, name: str) -> Optional[Dict[str, Any]]:
    """Return one of a server's records, None when there is none."""
    return read_json(machine, record_path(server, name))


def servers_on(machine: Machine) -> List[str]:
    """Return the names of the servers with records on this host."""
    return [name for name in machine.listdir(STATE) if SERVER_NAME.fullmatch(name) is not None]


def server_of_unit(machine: Machine, unit: str) -> Optional[str]:
    """Return the server whose bindings name this unit."""
    for server in servers_on(machine):
        bindings = read_record(machine, server, "bindings")
        if bindings is not None and bindings.get("unit") == unit:
            return server
    return None


def bound_gpus(bindings: Optional[Dict[str, Any]]) -> List[str]:
    """Return the UUIDs that a server is bound to, whether listed as texts or as objects with `uuid`."""
    found = []
    for gpu in (bindings or {}).get("gpus") or []:
        uuid = gpu.get("uuid") if isinstance(gpu, dict) else gpu
        found.append(matching(GPU_ID, uuid, "GPU UUID in bindings"))
    return found


def baselines_on(machine: Machine) -> Dict[str, Any]:
    """Return {uuid: what the idle GPU used when it was learned}."""
    record = read_json(machine, f"{STATE}/baselines.json") or {}
    return {k: v for k, v in record.items() if k != "version"}


def quarantined_on(machine: Machine) -> Dict[str, Any]:
    """Return {uuid: why the GPU cannot be proven usable}."""
    record = read_json(machine, QUARANTINE) or {}
    return {k: v for k, v in record.items() if k != "version"}


def bound_servers(machine: Machine) -> Dict[str, Any]:
    """Return {server: {unit, gpus}} of every server that this host knows."""
    found = {}
    for server in servers_on(machine):
        bindings = read_record(machine, server, "bindings")
        if bindings is not None:
            found[server] = {"unit": bindings.get("unit"), "gpus": bound_gpus(bindings)}
    return found


def living_lease(machine: Machine, server: str) -> Optional[Dict[str, Any]]:
    """Return the server's lease while it binds anybody: of this boot, unexpired, and of the current fence.

    A lease with another nonce than the fence's was left behind between two writes of a claim; its
    holder can execute nothing any more.
    """
    lease = read_json(machine, lease_path(server))
    if lease is None or lease.get("boot_id") != machine.boot_id():
        return None
    if machine.boottime() >= lease.get("expires_boottime", 0):
        return None
    fence = read_record(machine, server, "fence")
    if fence is None or fence.get("nonce") != lease.get("nonce"):
        return None
    return lease


def reading_of(ask: Callable[[], Any]) -> Reading:
    """Return `ask()` as known, or why it could not be had."""
    try:
        return {"known": ask()}
    except Refused as refused:
        return {"unknown": refused.message}
    except OSError as error:
        return {"unknown": str(error)}


def known_value(reading: Reading, what: str) -> Any:
    """Return what a reading says, refusing to go on without it (S12)."""
    if "known" not in reading:
        raise Refused("Unknown", f"{what} is unknown: {reading.get('unknown', 'no reading')}")
    return reading["known"]


# -- changes -----------------------------------------------------------------------------------------


class Changes:
    """What one verb has written, so that a failure can put every byte back (F61).

    Only files and enablement are undone; jobs and signals are not, so a verb makes them last.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._undo: List[Callable[[], None]] = []
        self._reloaded = False

    def write(self, path: str, data: bytes, mode: int = 0o600, uid: int = 0, gid: int = 0) -> None:
        """Write a file, unless it has these bytes already."""
        machine = self.machine
        before = machine.read(path)
        if before == data:
            return
        if before is None:
            self._undo.append(lambda: machine.remove(path))
        else:
            old: bytes = before
            self._undo.append(lambda: machine.write(path, old, mode, uid, gid))
        machine.write(path, data, mode, uid, gid)

    def remove(self, path: str, mode: int = 0o600) -> None:
        """Remove a file, if it is there."""
        machine = self.machine
        before = machine.read(path)
        if before is None:
            return
        old: bytes = before
        self._undo.append(lambda: machine.write(path, old, mode))
        machine.remove(path)

    def put_record(self, server: str, name: str, content: Dict[str, Any]) -> None:
        """Write one of a server's JSON records."""
        record = dict(content)
        record["version"] = RECORD_VERSION
        self.write(record_path(server, name), encoded(record))

    def drop_record(self, server: str, name: str) -> None:
        """Remove one of a server's JSON records."""
        self.remove(record_path(server, name))

    def enable(self, unit: str) -> None:
        """Make the unit start at boot."""
        machine = self.machine
        before = machine.unit(unit).get("known") or {}
        machine.enable(unit)
        if before.get("UnitFileState") not in ("enabled", None):
            self._undo.append(lambda: machine.disable(unit))

    def disable(self, unit: str) -> None:
        """Stop the unit from starting at boot."""
        machine = self.machine
        before = machine.unit(unit).get("known") or {}
        machine.disable(unit)
        if before.get("UnitFileState") == "enabled":
            self._undo.append(lambda: machine.enable(unit))

    def reload(self) -> None:
        """Make systemd read the files again."""
        self._reloaded = True
        self.machine.reload()

    def put_back(self) -> List[str]:
        """Undo everything, newest first; return what could not be undone."""
        stuck = []
        for undo in reversed(self._undo):
            try:
                undo()
            except OSError as error:
                stuck.append(io_words(error))
        self._undo = []
        if self._reloaded:
            try:
                self.machine.reload()
            except OSError as error:
                stuck.append(f"daemon-reload: {io_words(error)}")
        return stuck


__all__ = [
    "Changes",
    "absolute_path",
    "baselines_on",
    "bound_gpus",
    "bound_servers",
    "claim_path",
    "drop_in_path",
    "flag_path",
    "helper_command",
    "io_words",
    "known_value",
    "launcher_path",
    "lease_path",
    "living_lease",
    "quarantined_on",
    "read_json",
    "read_record",
    "reading_of",
    "record_path",
    "server_of_unit",
    "servers_on",
    "sha256_of",
    "state_path",
]

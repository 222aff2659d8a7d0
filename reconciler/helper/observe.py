"""The verbs that only look: observe, fetch, journal, read-record, check-flags, release-check.

Each section is a reading; what may not be read or did not answer is unknown and says why. All of them
work carried and without privilege, then with many unknowns. Part of the shipped helper: Python 3.9,
standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from typing import Any, Dict, List, Optional

from reconciler.helper.environments import environment_files_of
from reconciler.helper.machine import Machine, Reading, Refused
from reconciler.helper.records import (
    GPU_ID,
    INVOCATION,
    LIB,
    PERMANENT,
    REVISION_ID,
    SECRET_PLACES,
    SERVER_NAME,
    STATE,
    TRIAL,
    UNIT_NAME,
    USER_NAME,
    VARIABLE,
    absolute_path,
    bad,
    baselines_on,
    bound_servers,
    flag_path,
    is_sealed,
    launcher_path,
    lease_path,
    matching,
    number_of,
    quarantined_on,
    read_json,
    read_record,
    reading_of,
    record_of,
    sha256_of,
    state_path,
    text_of,
    texts_of,
    whole_of,
)
from reconciler.helper.redaction import SECRET_VARIABLE, redacted_body, redacted_text

HELPER_FILE = re.compile(r"helper-([0-9a-f]{12})\.py")
LAUNCHER_FILE = re.compile(r"run-([0-9a-f]{12})\.py")
CONTAINER_GROUP = re.compile(r"docker|libpod|containerd|crio|kubepods|lxc|machine\.slice|buildkit")
GUARD_UNIT_FILE = f"{PERMANENT}/reconciler-guard@.service"
TICK_TIMER_FILE = f"{PERMANENT}/reconciler-tick.timer"
LINES_CAP = 500
SERVER_RECORDS = (
    "applied",
    "attempted",
    "intent",
    "fence",
    "deadline",
    "bindings",
    "hold",
    "protect",
    "request",
    "handled",
    "guard",
    "revert",
    "snapshot",
    "invocations",
)
ASKS_CAP = 3
NAMES_CAP = 256
VALUE_MAX = 4096
STARTING_S = 300.0
"""How long after a start its start-up lines are looked for: what an engine was asked for stands at the very front."""
STARTING_LINES = 2000
STARTED_LINE_MAX = 1 << 15
ASK_LIMIT_S = 3.0
ASK_BYTES_MAX = 1 << 20
HELP_LIMIT_S = 120.0
"""Some engines import all of themselves to say which flags they have."""
NOT_ASKED = {"unknown": "not asked for"}
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def observe_host(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return everything that one pass needs to know of this layer."""
    wants_gpus = args.get("gpus", True) is True
    holders = machine.holders() if wants_gpus else NOT_ASKED
    return {
        "at": machine.boottime(),
        "wall": machine.walltime(),
        "boot_id": machine.boot_id(),
        "host_mount_ns": machine.mount_namespace(),
        "identity": machine.identity(),
        "installed": reading_of(lambda: installed_on(machine)),
        "gpus": machine.gpus() if wants_gpus else NOT_ASKED,
        "apps": machine.apps() if wants_gpus else NOT_ASKED,
        "holders": holders,
        "baselines": reading_of(lambda: baselines_on(machine)),
        "kernel": machine.kernel_log(cursor_in(args)) if wants_gpus else NOT_ASKED,
        "quarantine": reading_of(lambda: quarantined_on(machine)),
        "bound": reading_of(lambda: bound_servers(machine)),
        "disk": free_bytes(machine),
        "containers_with_gpus": containers_among(holders),
        "paths": {
            path: machine.stat(absolute_path(path))
            for path in texts_of(args.get("paths") or [], "paths")
        },
        "users": {
            name: machine.user(matching(USER_NAME, name, "user"))
            for name in texts_of(args.get("users") or [], "users")
        },
        "host": reading_of(lambda: read_json(machine, f"{STATE}/host.json")),
        "servers": {
            matching(SERVER_NAME, asked.get("server"), "server"): observe_server(machine, asked)
            for asked in (record_of(s, "server") for s in args.get("servers") or [])
        },
    }


def observe_server(machine: Machine, asked: Dict[str, Any]) -> Dict[str, Any]:
    """Return what is there of one server: unit, files, processes, listeners, journal, records."""
    server = asked["server"]
    name = matching(UNIT_NAME, asked.get("unit"), "unit name")
    lines = whole_of(asked.get("invocation_lines", 0), "invocation_lines", 0, LINES_CAP)
    port = asked.get("port")
    unit = machine.unit(name)
    props = unit.get("known") or {}
    absent = props.get("LoadState") == "not-found"
    group = props.get("ControlGroup") or ""
    found: Dict[str, Any] = {
        "unit_name": name,
        "unit": unit,
        "files": machine.unit_files(name),
        "command": {"unknown": "there is no such unit"} if absent else machine.unit_command(name),
        "trial": reading_of(lambda: placed_file(machine, TRIAL, name)),
        "permanent": reading_of(lambda: placed_file(machine, PERMANENT, name)),
        "processes": processes_of(machine, unit, group),
        "listeners": NOT_ASKED,
        "journal": NOT_ASKED,
        "records": reading_of(lambda: records_of(machine, server, name)),
        "history": reading_of(lambda: history_of(machine, server)[-20:]),
    }
    if (found["command"].get("known") or {}).get("environment_files"):
        found["environment_files"] = environment_files_of(machine, found["command"], props)
    asks = asked.get("ask") or []
    if asks and props.get("ActiveState") == "active":
        found["told"] = told_by(machine, asks)
    if asked.get("environment") is not None and props.get("ActiveState") == "active":
        found["environ"] = environ_of(machine, props, asked["environment"])
    if asked.get("startup") and props.get("ActiveState") == "active":
        found["startup"] = startup_of(machine, name, props, found["processes"], asked["startup"])
    if port is not None:
        number = whole_of(port, "port", 1, 65535)
        found["listeners"] = machine.listeners(number, int(props.get("MainPID") or 0))
    if lines:
        found["journal"] = journal_of(machine, name, props.get("InvocationID") or None, lines)
    return found


def environ_of(machine: Machine, props: Dict[str, Any], asked: Any) -> Reading:
    """Return what the main process was started with, of the variables asked for by name or by how they begin.

    Never one whose name is a secret's. An environment without the unit's own invocation is another process's, or was
    written over, and says nothing.
    """
    record_of(asked, "environment")
    names, starts, hidden = (
        texts_of(asked.get(key) or [], key) for key in ("names", "starts", "hidden")
    )
    if len(names) + len(starts) + len(hidden) > NAMES_CAP:
        raise bad(f"environment asks for more than {NAMES_CAP} names")
    for word in (*names, *starts, *hidden):
        matching(VARIABLE, word, "variable")
    pid = int(props.get("MainPID") or 0)
    reading = machine.environment(pid) if pid else {"unknown": "the unit has no main process"}
    known: Any = reading.get("known")
    if known is None:
        return reading
    if not known.get("INVOCATION_ID") or known["INVOCATION_ID"] != props.get("InvocationID"):
        return {"unknown": "the main process does not carry its unit's invocation"}
    return {
        "known": {
            name: redacted_text(value[:VALUE_MAX])
            for name, value in sorted(known.items())
            if (name in names or name.startswith(tuple(starts)))
            and name not in hidden
            and not SECRET_VARIABLE.search(name)
        }
    }


def startup_of(
    machine: Machine, unit: str, props: Dict[str, Any], processes: Reading, words: Any
) -> Reading:
    """Return the lines with one of these words in them that this invocation wrote when it started, without secrets."""
    wanted = texts_of(words, "startup")
    if len(wanted) > ASKS_CAP or not all(8 <= len(word) <= 80 for word in wanted):
        raise bad(f"startup is not a list of at most {ASKS_CAP} phrases")
    main = [p for p in processes.get("known") or [] if p.get("pid") == props.get("MainPID")]
    invocation = props.get("InvocationID")
    if not main or not invocation:
        return {"unknown": "the unit has no main process, or no invocation"}
    started = main[0]["start_ticks"] / os.sysconf("SC_CLK_TCK")
    until = machine.walltime() - machine.boottime() + started + STARTING_S
    reading = machine.journal(unit, invocation, STARTING_LINES, until)
    if "known" not in reading:
        return reading
    lines = [str(entry.get("message")) for entry in reading["known"]]
    found = [line for line in lines if any(word in line for word in wanted)]
    return {"known": [redacted_text(line[:STARTED_LINE_MAX]) for line in found[:ASKS_CAP]]}


def told_by(machine: Machine, asks: Any) -> List[Reading]:
    """Return what a running engine says about itself, without secrets; a silent one costs seconds, not minutes."""
    if not isinstance(asks, list) or len(asks) > ASKS_CAP:
        raise bad(f"ask is not a list of at most {ASKS_CAP}")
    found: List[Reading] = []
    for request in asks:
        args = dict(record_of(request, "ask"), method="GET", body=None)
        args["timeout_s"] = min(
            number_of(args.get("timeout_s"), "timeout_s", 0.01, 600), ASK_LIMIT_S
        )
        args["max_bytes"] = ASK_BYTES_MAX
        if found and found[-1].get("unknown") in ("timed out", "connection refused"):
            found.append({"unknown": "not asked: the request before it was not answered"})
            continue
        try:
            found.append(without_secrets(machine, args, fetch_local(machine, args)))
        except Refused as refused:
            found.append({"unknown": refused.message})
    return found


def without_secrets(machine: Machine, args: Dict[str, Any], reading: Reading) -> Reading:
    """Return an HTTP answer with its body redacted; a body that is cut or no JSON is left out."""
    known = reading.get("known")
    if known is None:
        return reading
    if known.get("truncated"):
        return {"unknown": f"the answer is longer than {ASK_BYTES_MAX} bytes"}
    secrets = []
    if args.get("bearer_file"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            secrets.append((machine.read(args["bearer_file"]) or b"").decode("ascii").strip())
    body = redacted_body(base64.b64decode(known.get("body") or ""), secrets)
    return {"known": {"status": known["status"], "body": base64.b64encode(body).decode("ascii")}}


def processes_of(machine: Machine, unit: Reading, group: str) -> Reading:
    """Return the processes of a unit's control group; without the unit's word they are unknown."""
    if "known" not in unit:
        return {"unknown": f"the unit is unknown: {unit.get('unknown')}"}
    return machine.processes(group) if group else {"known": []}


def placed_file(machine: Machine, place: str, unit: str) -> Optional[Dict[str, Any]]:
    """Return {path, text} of a unit file in one of the two places, None where there is none."""
    path = f"{place}/{unit}"
    kind = machine.kind(path)
    if kind == "missing":
        return None
    if kind != "file":
        return {"path": path, "text": None, "kind": kind}
    data = machine.read(path)
    return None if data is None else {"path": path, "text": data.decode("utf-8", "replace")}


def records_of(machine: Machine, server: str, unit: str) -> Dict[str, Any]:
    """Return all that is recorded of a server, None for each record that does not exist."""
    found: Dict[str, Any] = {name: read_record(machine, server, name) for name in SERVER_RECORDS}
    found["invocations"] = (found["invocations"] or {}).get("invocations") or []
    found["lease"] = read_json(machine, lease_path(server))
    rejected = []
    for name in machine.listdir(state_path(server, "rejected")):
        revision = name[: -len(".json")]
        if name.endswith(".json") and REVISION_ID.fullmatch(revision):
            record = read_record(machine, server, f"rejected/{revision}")
            if record is not None:
                rejected.append(dict(record, revision=revision))
    found["rejected"] = rejected
    found["revisions"] = [
        name
        for name in machine.listdir(state_path(server, "revisions"))
        if REVISION_ID.fullmatch(name)
    ]
    found["disarmed"] = machine.kind(flag_path(unit)) != "missing"
    found["produced"] = produced_by(machine, server)
    return found


def produced_by(machine: Machine, server: str) -> List[str]:
    """Return the digests of all unit texts that we ever wrote for a server."""
    record = read_record(machine, server, "produced")
    return list((record or {}).get("sha256") or [])


def history_of(machine: Machine, server: str) -> List[Dict[str, Any]]:
    """Return the finished rollouts of a server, oldest first. A cut line is skipped."""
    return json_lines(machine.read(state_path(server, "history.ndjson")) or b"")


def json_lines(data: bytes) -> List[Dict[str, Any]]:
    """Return the objects in newline-separated JSON, leaving out what is not one."""
    found = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def launcher_text(digest12: str) -> str:
    """Return the program that runs the helper: imported, so that its bytecode is kept.

    Compiling the helper takes 0.2 s, which each connection, each start and each tick would pay. `-I` leaves nothing
    of the caller's on the path, the directory is root's, and nobody else may write what is kept there.
    """
    return (
        "import os, sys\n"
        "os.umask(0o022)\n"
        f'sys.path.insert(0, "{LIB}")\n'
        "from importlib import import_module\n"
        f'import_module("helper-{digest12}").main_unit(sys.argv[1:])\n'
    )


def installed_on(machine: Machine) -> Dict[str, Any]:
    """Return which helpers lie on this host under the digest that their name claims."""
    digests = []
    for name in machine.listdir(LIB):
        match = HELPER_FILE.fullmatch(name)
        if match and is_whole(machine, match.group(1)):
            digests.append(match.group(1))
    return {
        "digests": digests,
        "guard": machine.kind(GUARD_UNIT_FILE) == "file",
        "tick": machine.kind(TICK_TIMER_FILE) == "file",
    }


def is_whole(machine: Machine, digest12: str) -> bool:
    """Say whether the helper of this digest and what runs it are as we write them."""
    program = machine.read(f"{LIB}/helper-{digest12}.py") or b""
    launcher = machine.read(launcher_path(digest12))
    return sha256_of(program)[:12] == digest12 and launcher == launcher_text(digest12).encode()


def free_bytes(machine: Machine) -> Reading:
    """Return the free space where we write, by path; a place that cannot be read is left out."""
    found = {}
    for path in ("/etc", "/var/lib", "/run"):
        stat = machine.stat(path).get("known") or {}
        if stat.get("free_bytes") is not None:
            found[path] = stat["free_bytes"]
    return {"known": found}


def containers_among(holders: Reading) -> Reading:
    """Return the control groups of containers that have a GPU open: a daemon-reload may cut them off."""
    if "known" not in holders:
        return holders
    groups = {str(h.get("cgroup") or "") for h in holders["known"].get("holders", [])}
    return {"known": sorted(g for g in groups if CONTAINER_GROUP.search(g))}


def cursor_in(args: Dict[str, Any]) -> Optional[str]:
    """Return the kernel log cursor of a request."""
    cursor = args.get("kernel_cursor")
    if cursor is not None and (not isinstance(cursor, str) or len(cursor) > 512):
        raise bad("kernel_cursor is not a text")
    return cursor


# -- the smaller ones --------------------------------------------------------------------------------


def fetch_local(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the reading of one HTTP request to this layer. `Machine.fetch` knows whether it is."""
    matching(re.compile(r"[0-9A-Fa-f:.]{2,45}"), args.get("address"), "address")
    matching(re.compile(r"GET|POST|HEAD"), args.get("method"), "method")
    matching(re.compile(r"/[!-~]{0,2047}"), args.get("path"), "path")
    whole_of(args.get("port"), "port", 1, 65535)
    number_of(args.get("timeout_s"), "timeout_s", 0.01, 600)
    whole_of(args.get("max_bytes"), "max_bytes", 0, 2 * 1024 * 1024)
    for key, value in record_of(args.get("headers") or {}, "headers").items():
        matching(re.compile(r"[A-Za-z0-9-]{1,64}"), key, "header name")
        matching(re.compile(r"[ -~]{0,1024}"), value, "header value")
    if args.get("bearer_file") is not None:
        check_key_file(machine, absolute_path(args["bearer_file"], "bearer_file"))
    return machine.fetch(args)


def check_key_file(machine: Machine, path: str) -> None:
    """Refuse a file that no spec may name: one of root's that lies outside the places for secrets.

    The repository names the path, and this runs as root.
    """
    stat = machine.stat(path).get("known") or {}
    if stat.get("kind") != "file":
        raise Refused("SecretMissing", f"{path} is not a file on this host", path=path)
    placed = path.startswith(SECRET_PLACES) or is_sealed(path)
    if not placed and stat.get("uid") == 0:
        raise Refused(
            "SecretPlace",
            f"{path} belongs to root and is not under {' or '.join(SECRET_PLACES)}",
            path=path,
        )


def read_api_key(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return a server's API key, for the time of a gate: the benchmark runs where the controller is.

    It travels inside the SSH connection only, and the controller keeps it in memory only.
    """
    matching(SERVER_NAME, args.get("server"), "server")
    path = absolute_path(args.get("path"), "path")
    check_key_file(machine, path)
    try:
        key = (machine.read(path) or b"").decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isprintable() or len(key) > 1024:
        raise Refused("SecretUnusable", f"{path} does not hold one line of text", path=path)
    return {"key": key}


def read_journal_lines(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the last lines of a unit's journal."""
    name = matching(UNIT_NAME, args.get("unit"), "unit name")
    invocation = args.get("invocation")
    if invocation is not None:
        matching(INVOCATION, invocation, "invocation")
    lines = whole_of(args.get("lines"), "lines", 1, LINES_CAP)
    return {"lines": journal_of(machine, name, invocation, lines)}


def journal_of(machine: Machine, unit: str, invocation: Optional[str], lines: int) -> Reading:
    """Return lines of a unit's journal without secrets: engines print all their arguments, keys among them."""
    reading = machine.journal(unit, invocation, lines)
    if "known" not in reading:
        return reading
    return {
        "known": [
            dict(entry, message=redacted_text(str(entry.get("message"))))
            for entry in reading["known"]
        ]
    }


def read_content(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return one of the larger records of a server."""
    server = matching(SERVER_NAME, args.get("server"), "server")
    name = args.get("name")
    if name == "journal":
        return {
            "content": json_lines(machine.read(state_path(server, "journal.ndjson")) or b"")[
                -LINES_CAP:
            ]
        }
    if name == "history":
        return {"content": history_of(machine, server)}
    if name == "original":
        text = machine.read(state_path(server, "original/unit.service"))
        drop_ins = read_record(machine, server, "original/drop-ins")
        if text is None and drop_ins is None:
            return {"content": None}
        return {
            "content": {
                "text": None if text is None else text.decode("utf-8", "replace"),
                "drop_ins": (drop_ins or {}).get("drop_ins", []),
            }
        }
    if isinstance(name, str) and name.startswith("revisions/"):
        return {"content": revision_content(machine, server, name[len("revisions/") :])}
    raise bad("no such record")


def revision_content(machine: Machine, server: str, revision: str) -> Optional[Dict[str, Any]]:
    """Return the recorded content of a revision, None where it is not kept (whole)."""
    matching(REVISION_ID, revision, "revision")
    text = machine.read(state_path(server, f"revisions/{revision}/unit.service"))
    written = read_record(machine, server, f"revisions/{revision}/server")
    if text is None or written is None:
        return None
    gate = read_record(machine, server, f"revisions/{revision}/gate")
    return {
        "text": text.decode(),
        "server": written.get("server"),
        "gate": (gate or {}).get("gate"),
    }


def check_flags(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return which flags an installed engine's own help knows.

    Nothing but `PROGRAM -m MODULE --help` (or words of the same kind) can be asked to run.
    """
    user = args.get("user")
    if user is not None:
        matching(USER_NAME, user, "user")
    argv = texts_of(args.get("argv"), "argv")
    if not 1 <= len(argv) <= 8:
        raise bad("argv is not a program and a few words")
    absolute_path(argv[0], "program")
    for word in argv[1:]:
        if word != "-m":
            matching(WORD, word, "word of argv")
    flags = [
        matching(re.compile(r"--?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"), f, "flag")
        for f in texts_of(args.get("flags"), "flags")
    ]
    plain = help_words(machine, user, argv, "--help")
    if "known" not in plain:
        return {"known": plain, "unknown": []}
    words = set(plain["known"])
    if not words.issuperset(flags):
        # Newer vLLM shows a handful of its flags under --help and all under --help=all. Other programs refuse
        # that word, which says nothing about their flags.
        words.update(help_words(machine, user, argv, "--help=all").get("known", []))
    return {
        "known": {"known": [f for f in flags if f in words]},
        "unknown": [f for f in flags if f not in words],
    }


def help_words(machine: Machine, user: Optional[str], argv: List[str], asked: str) -> Reading:
    """Return the flags in a program's help, as whole words."""
    ran = machine.run_as(user, [*argv, asked], HELP_LIMIT_S)
    if "known" not in ran:
        return ran
    result = ran["known"]
    text = str(result.get("stdout", "")) + "\n" + str(result.get("stderr", ""))
    if result.get("exit_status") != 0:
        shown = text.strip()[-400:]
        return {"unknown": f"{argv[0]} {asked} ended with {result.get('exit_status')}: {shown}"}
    # llama-server goes on listing the flags that it now refuses.
    text = re.sub(r"(?m)^.*the argument has been removed.*$", "", text)
    return {"known": re.findall(r"(?<![A-Za-z0-9_-])--?[A-Za-z0-9][A-Za-z0-9_.-]*", text)}


IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,400}")
TOOL = re.compile(r"/usr/bin/(podman|docker)")
MODEL_SOURCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
NODE = re.compile(r"/dev/[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64}){0,2}")
CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
MODELS_CAP = 8


def inspect_engine(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return what an engine will find on this host. Only these words of a request reach the machine."""
    models = args.get("models") or []
    if not isinstance(models, list) or len(models) > MODELS_CAP:
        raise bad(f"models is not a list of at most {MODELS_CAP}")
    image = args.get("image")
    if image is not None:
        tool, name = texts_of(image, "image") if len(image) == 2 else ("", "")
        image = [matching(TOOL, tool, "container tool"), matching(IMAGE, name, "image")]
    return machine.engine_facts(
        {
            "user": None if args.get("user") is None else matching(USER_NAME, args["user"], "user"),
            "python": None if args.get("python") is None else absolute_path(args["python"]),
            "distributions": [
                matching(WORD, name, "distribution")
                for name in texts_of(args.get("distributions") or [], "distributions")
            ],
            "kernels": args.get("kernels") is True,
            "binary": None if args.get("binary") is None else absolute_path(args["binary"]),
            "image": image,
            "models": [model_asked(record_of(model, "model")) for model in models],
            "nodes": [
                matching(NODE, node, "device node")
                for node in texts_of(args.get("nodes") or [], "nodes")
            ],
            "places": [
                absolute_path(place, "place")
                for place in texts_of(args.get("places") or [], "places")
            ],
        }
    )


def model_asked(model: Dict[str, Any]) -> Dict[str, Any]:
    """Return one model of a request, each word checked."""
    source = model.get("source")
    revision = model.get("revision")
    environment = record_of(model.get("environment") or {}, "environment")
    return {
        "role": matching(WORD, model.get("role"), "role"),
        "source": absolute_path(source)
        if str(source).startswith("/")
        else matching(MODEL_SOURCE, source, "model"),
        "revision": None if revision is None else text_of(revision, "revision"),
        "environment": {
            name: text_of(environment[name], name)
            for name in CACHE_VARIABLES
            if name in environment
        },
    }


def check_release(machine: Machine, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return one sample for the judgement `released`."""
    for uuid in texts_of(args.get("uuids"), "uuids"):
        matching(GPU_ID, uuid, "GPU UUID")
    name = args.get("unit")
    if name is not None:
        matching(UNIT_NAME, name, "unit name")
    sample = release_sample(machine, name, cursor_in(args))
    sample["baselines"] = reading_of(lambda: baselines_on(machine))
    return sample


def release_sample(machine: Machine, unit: Optional[str], cursor: Optional[str]) -> Dict[str, Any]:
    """Return one look at all that the judgement `released` weighs."""
    sample = {
        "at": machine.boottime(),
        "boot_id": machine.boot_id(),
        "gpus": machine.gpus(),
        "apps": machine.apps(),
        "holders": machine.holders(),
        "kernel": machine.kernel_log(cursor),
    }
    if unit is not None:
        look = machine.unit(unit)
        sample["unit"] = look
        group = ((look.get("known") or {}).get("ControlGroup")) or ""
        sample["processes"] = processes_of(machine, look, group)
    return sample


def need_root(machine: Machine) -> None:
    """Refuse without root."""
    identity = machine.identity().get("known") or {}
    if identity.get("uid") != 0:
        raise Refused("NotRoot", f"needs root, runs as uid {identity.get('uid')}")


__all__ = [
    "check_flags",
    "check_release",
    "fetch_local",
    "inspect_engine",
    "observe_host",
    "produced_by",
    "read_content",
    "read_journal_lines",
    "release_sample",
]

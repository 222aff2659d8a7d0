"""Putting unit files and secrets on a host, and taking them away: only ours, and only what then takes effect.

The verbs `install` and `remove`, and the rules that a commit keeps as well: no byte that we did not produce
is overwritten (S7), no link is written through, and what systemd has loaded is compared with what was
asked (S24). Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Optional

from reconciler.helper.guard import phase_reading, same_bytes
from reconciler.helper.machine import Machine, Refused
from reconciler.helper.observe import produced_by
from reconciler.helper.protocol import Act
from reconciler.helper.records import (
    CONFIG_KEY,
    PERMANENT,
    REVISION_ID,
    SECRET_PLACES,
    TRIAL,
    USER_NAME,
    VARIABLE,
    absolute_path,
    bad,
    drop_in_path,
    flag_path,
    is_sealed,
    known_value,
    matching,
    read_record,
    record_of,
    sealed_path,
    sha256_of,
    state_path,
    text_of,
    texts_of,
)

PRODUCED_KEPT = 200
SEALED_CAP = 8192
DROP_INS_CAP = 64
ASIDE_KEPT = 200
DROP_IN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:-]{0,120}\.conf")


def install_unit(act: Act) -> Dict[str, Any]:
    """Put a unit file where systemd finds it, and make sure that systemd will run exactly that (S24)."""
    machine, args, changes = act.machine, act.args, act.changes
    unit = act.bound_unit()
    revision = matching(REVISION_ID, args.get("revision"), "revision")
    place = args.get("place")
    if place not in ("trial", "permanent"):
        raise bad("place is neither trial nor permanent")
    data = text_of(args.get("text"), "text").encode()
    argv = texts_of(args.get("argv"), "argv")
    environment = texts_of(args.get("environment"), "environment")
    saved = saved_digest(args)
    path = f"{TRIAL if place == 'trial' else PERMANENT}/{unit}"
    props = phase_reading(machine.unit(unit), unit)
    refuse_masked(props, unit)
    refuse_links(machine, unit)
    act.before = {"fragment": props.get("FragmentPath"), "sha": digest_at(machine, path)}
    check_ours(act, unit, path, data, saved)
    keep_revision(act, revision, data, args.get("server_json"))
    put_sealed(act, args.get("sealed") or {})
    make_secrets(act, args.get("secrets") or [])
    remember_produced(act, data)
    changes.write(path, data, 0o644)
    changes.reload()
    check_effective(machine, unit, path, argv, environment)
    act.after = {"fragment": path, "sha": sha256_of(data)}
    return {"fragment": path}


def set_aside(act: Act) -> Dict[str, Any]:
    """Move drop-ins of this one unit out of systemd's sight; their bytes are kept among the server's records (S7).

    A link, a file of other bytes than were seen, or one that lies elsewhere is refused; one that is gone already is fine.
    """
    machine, changes = act.machine, act.changes
    unit = act.bound_unit()
    asked = act.args.get("drop_ins")
    if not isinstance(asked, list) or len(asked) > DROP_INS_CAP:
        raise bad("drop_ins is no list of acceptable length")
    kept = {}
    for item in asked:
        wanted = record_of(item, "drop-in")
        path = text_of(wanted.get("path"), "path")
        digest = matching(REVISION_ID, wanted.get("sha"), "sha")
        folder, _, name = path.rpartition("/")
        if folder not in (f"{PERMANENT}/{unit}.d", f"{TRIAL}/{unit}.d"):
            raise Refused("NotOurs", f"{path} is no drop-in of {unit} alone", path=path)
        if not DROP_IN_NAME.fullmatch(name) or path == drop_in_path(unit):
            raise bad("a drop-in has a name that is not acceptable")
        kind = machine.kind(path)
        if kind == "missing":
            continue
        if kind != "file":
            raise Refused("SymlinkedUnit", f"{path} is a {kind}, not a file", path=path, kind=kind)
        data = machine.read(path) or b""
        if sha256_of(data) != digest:
            raise Refused("NotOurs", f"{path} was changed since it was looked at", path=path)
        place = state_path(act.server, f"aside/{digest}")
        changes.write(place, data)
        kept[path] = place
        changes.remove(path, 0o644)
    if kept:
        at = machine.walltime()
        entries = [{"path": p, "kept": k, "at": at} for p, k in sorted(kept.items())]
        before = (read_record(machine, act.server, "aside") or {}).get("moved") or []
        changes.put_record(act.server, "aside", {"moved": [*before, *entries][-ASIDE_KEPT:]})
    changes.reload()
    left = phase_reading(machine.unit(unit), unit).get("DropInPaths") or []
    if set(kept) & set(left):
        raise Refused("NotEffective", f"systemd still reads {', '.join(sorted(kept))}; put back")
    act.after = {"kept": kept}
    return {"kept": kept}


def saved_digest(args: Dict[str, Any]) -> Optional[str]:
    """Return the digest of the foreign file that a person has agreed to have replaced."""
    value = args.get("saved_sha")
    return None if value is None else matching(REVISION_ID, value, "saved_sha")


def refuse_masked(props: Dict[str, Any], unit: str) -> None:
    """Refuse a unit that somebody has masked: it is their decision (F63)."""
    if props.get("LoadState") == "masked":
        raise Refused("MaskedUnit", f"{unit} is masked; unmask it yourself if that is meant")


def refuse_links(machine: Machine, unit: str) -> None:
    """Refuse a unit one of whose files is a symbolic link or no file: writing would go elsewhere."""
    for path in (f"{TRIAL}/{unit}", f"{PERMANENT}/{unit}", drop_in_path(unit)):
        kind = machine.kind(path)
        if kind not in ("missing", "file"):
            raise Refused("SymlinkedUnit", f"{path} is a {kind}, not a file", path=path, kind=kind)


def digest_at(machine: Machine, path: str) -> Optional[str]:
    """Return the digest of a file, None when it is missing."""
    data = machine.read(path)
    return None if data is None else sha256_of(data)


def check_ours(act: Act, unit: str, path: str, data: bytes, saved: Optional[str]) -> None:
    """Refuse to overwrite a file that we did not produce, unless a person named these very bytes (S7)."""
    machine = act.machine
    present = machine.read(path)
    files = machine.unit_files(unit).get("known") or {}
    package = files.get("package")
    if package:
        raise Refused("PackagedUnit", f"{unit} belongs to the package {package}", package=package)
    if present is None or present == data or same_bytes(present, produced_by(machine, act.server)):
        return
    if sha256_of(present) != saved:
        raise Refused(
            "NotOurs",
            f"{path} was not written by reconcile; adopt it or move it away",
            path=path,
            sha=sha256_of(present),
        )
    act.changes.write(state_path(act.server, "original/unit.service"), present)
    act.changes.put_record(
        act.server, "original/drop-ins", {"path": path, "drop_ins": files.get("drop_ins", [])}
    )


def keep_revision(act: Act, revision: str, data: bytes, server_json: Any) -> None:
    """Record the full content of a revision before any of it is used (S5)."""
    folder = f"revisions/{revision}"
    act.changes.write(state_path(act.server, f"{folder}/unit.service"), data)
    content = {"server": record_of(server_json, "server_json")}
    act.changes.put_record(act.server, f"{folder}/server", content)


def remember_produced(act: Act, data: bytes) -> None:
    """Record the digest of bytes that we are about to write."""
    digests = produced_by(act.machine, act.server)
    digest = sha256_of(data)
    if digest not in digests:
        kept = [*digests, digest][-PRODUCED_KEPT:]
        act.changes.put_record(act.server, "produced", {"sha256": kept})


def check_effective(
    machine: Machine, unit: str, path: str, argv: List[str], environment: List[str]
) -> None:
    """Compare what systemd has loaded with what was asked for.

    systemd keeps `$$` in a loaded argument and resolves it when it starts the program, so a literal
    dollar is expected doubled; a single one would be a variable.
    """
    props = phase_reading(machine.unit(unit), unit)
    command = known_value(machine.unit_command(unit), f"the command of {unit}")
    wanted = [argument.replace("$", "$$") for argument in argv]
    differs = []
    if props.get("LoadState") != "loaded":
        differs.append(f"the unit is {props.get('LoadState')}")
    if props.get("FragmentPath") != path:
        differs.append(f"systemd uses {props.get('FragmentPath')}")
    if command.get("argv") != wanted:
        differs.append("another command line is loaded")
    if sorted(command.get("environment") or []) != sorted(environment):
        differs.append("another environment is loaded")
    if differs:
        raise Refused(
            "EffectiveDiffers",
            f"systemd would not run {unit} as rendered: {'; '.join(differs)}. It was put back",
            differs=differs,
            argv=command.get("argv"),
        )


def put_sealed(act: Act, sealed: Any) -> None:
    """Keep secrets that came with the request, each under the digest of what it was encrypted as; root's alone."""
    for digest, value in sorted(record_of(sealed, "sealed").items()):
        matching(REVISION_ID, digest, "digest of a secret")
        if not isinstance(value, str) or not 0 < len(value) <= SEALED_CAP:
            raise bad("a secret is not a text of acceptable length")
        act.changes.write(sealed_path(act.server, digest), value.encode(), 0o600)


def make_secrets(act: Act, secrets: Any) -> None:
    """Make the files that carry a server's secrets, from files on this host; no value is ever answered."""
    if not isinstance(secrets, list):
        raise bad("secrets is not a list")
    for asked in secrets:
        wanted = record_of(asked, "secret")
        form, user = wanted.get("form"), wanted.get("user")
        if form not in ("env", "yaml"):
            raise bad("form is neither env nor yaml")
        owner: Dict[str, Any] = {"uid": 0, "gid": 0}
        if user is not None:
            name = matching(USER_NAME, user, "user")
            found = known_value(act.machine.user(name), f"user {name}")
            if found is None:
                raise Refused("NoSuchUser", f"there is no user {name} on this host")
            owner = found
        lines = []
        for key, path in sorted(record_of(wanted.get("entries"), "entries").items()):
            matching(VARIABLE if form == "env" else CONFIG_KEY, key, "secret name")
            value = secret_value(act, absolute_path(path, "secret file"), owner)
            lines.append(env_line(key, value) if form == "env" else f"{key}: {json.dumps(value)}\n")
        # systemd reads EnvironmentFile= as root; the engine reads its own configuration.
        uid, gid = (owner["uid"], owner["gid"]) if form == "yaml" else (0, 0)
        path = state_path(act.server, f"secrets.{form}")
        act.changes.write(path, "".join(lines).encode(), 0o600, uid, gid)


def renew_secrets(act: Act, unit: str) -> None:
    """Make the secret files as the revision whose unit systemd has loaded was recorded: a way back starts an older one (S5).

    What can no longer be made stays as it is: an old key is no reason not to bring the last good server back.
    """
    machine = act.machine
    path = phase_reading(machine.unit(unit), unit).get("FragmentPath")
    loaded = machine.read(path) if path else None
    for revision in machine.listdir(state_path(act.server, "revisions")):
        kept = machine.read(state_path(act.server, f"revisions/{revision}/unit.service"))
        if loaded is None or kept != loaded:
            continue
        content = (read_record(machine, act.server, f"revisions/{revision}/server") or {}).get(
            "server"
        )
        recorded = content.get("secrets") if isinstance(content, dict) else None
        try:
            make_secrets(act, [dict(s, entries=dict(s["entries"])) for s in recorded or []])
        except (Refused, KeyError, TypeError, ValueError):
            return


def renew_at_start(machine: Machine, server: str, unit: str) -> None:
    """Make the secret files anew before a start that nobody asked for: a reboot in a trial brings back the older unit."""
    if read_record(machine, server, "intent") is not None:
        renew_secrets(Act(machine, server, {}), unit)


def secret_value(act: Act, path: str, owner: Dict[str, Any]) -> str:
    """Return what a secret file holds, if the server's user may have it.

    The repository names the path, and this runs as root: so only the operator's own places, or what the
    server's user owns anyway, can be read in this way.
    """
    stat = known_value(act.machine.stat(path), path)
    if stat.get("kind") != "file":
        raise Refused("SecretMissing", f"{path} is not a file on this host", path=path)
    ours = is_sealed(path, act.server)
    if not (ours or path.startswith(SECRET_PLACES)) and (
        owner["uid"] == 0 or stat.get("uid") != owner["uid"]
    ):
        raise Refused(
            "SecretPlace",
            f"{path} is neither under {' or '.join(SECRET_PLACES)} nor owned by the server's user",
            path=path,
        )
    data = act.machine.read(path)
    try:
        value = (data or b"").decode().rstrip("\r\n")
    except UnicodeDecodeError:
        value = ""
    if not value or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise Refused("SecretUnusable", f"{path} is empty, or not one line of text", path=path)
    return value


def env_line(name: str, value: str) -> str:
    """Return one line of an EnvironmentFile: in double quotes, these four characters are escaped."""
    for special in ("\\", '"', "$", "`"):
        value = value.replace(special, "\\" + special)
    return f'{name}="{value}"\n'


def remove_files(act: Act) -> Dict[str, Any]:
    """Take away files that we wrote, each only when its bytes are ours."""
    machine, changes = act.machine, act.changes
    unit = act.bound_unit()
    what = texts_of(act.args.get("what"), "what")
    ours = produced_by(machine, act.server)
    places = {"trial": f"{TRIAL}/{unit}", "permanent": f"{PERMANENT}/{unit}"}
    for item in what:
        if item in places:
            remove_unit_file(act, places[item], ours)
            if item == "permanent":
                changes.disable(unit)
        elif item == "disarm":
            changes.remove(drop_in_path(unit), 0o644)
        elif item == "flag":
            changes.remove(flag_path(unit))
        else:
            raise bad(f"there is nothing called {item[:40]!r} to remove")
    changes.reload()
    return {}


def remove_unit_file(act: Act, path: str, ours: List[str]) -> None:
    """Remove a unit file that we produced; a missing one is fine, another's is refused."""
    kind = act.machine.kind(path)
    if kind == "missing":
        return
    if kind != "file":
        raise Refused("SymlinkedUnit", f"{path} is a {kind}, not a file", path=path, kind=kind)
    if not same_bytes(act.machine.read(path), ours):
        raise Refused("NotOurs", f"{path} was not written by reconcile", path=path)
    act.changes.remove(path, 0o644)


__all__ = [
    "check_ours",
    "install_unit",
    "refuse_links",
    "refuse_masked",
    "remember_produced",
    "remove_files",
    "renew_at_start",
    "renew_secrets",
    "saved_digest",
    "set_aside",
]

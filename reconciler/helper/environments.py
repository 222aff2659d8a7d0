"""What the files of `EnvironmentFile=` set for a unit that is not ours: names, and the values of those that are no secrets.

Read by the rules of systemd where a line is simple; what is quoted in parts or continued is named as not understood, so that
nobody takes half a value for the whole. Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from reconciler.helper.machine import Machine, Reading
from reconciler.helper.records import STATE, VARIABLE
from reconciler.helper.redaction import SECRET_VARIABLE, redacted_text

ENVIRONMENT_FILE_CAP = 65536
ENVIRONMENT_FILES_CAP = 8
ENVIRONMENT_VALUE_CAP = 4096


def environment_files_of(machine: Machine, command: Reading, props: Dict[str, Any]) -> Reading:
    """Known: [{path, variables: [{name, value: str|null for a secret}], odd: [what of it is not understood], changed: [name]}].

    `changed` names variables that the main process does not have as the file says: it was edited since the start.
    """
    pid = int(props.get("MainPID") or 0)
    reading = machine.environment(pid) if pid else {"unknown": "the unit has no main process"}
    running: Any = reading.get("known")
    if running is not None and running.get("INVOCATION_ID") != props.get("InvocationID"):
        running = None
    found: List[Dict[str, Any]] = []
    last: Dict[str, str] = {}
    for path in (command.get("known") or {}).get("environment_files") or []:
        if path.startswith(f"{STATE}/"):
            continue  # Ours: it holds secrets and nothing else.
        if len(found) >= ENVIRONMENT_FILES_CAP:
            return {"unknown": f"there are more than {ENVIRONMENT_FILES_CAP} environment files"}
        kind = machine.kind(path)
        if kind != "file":
            return {"unknown": f"{path} is {'missing' if kind == 'missing' else f'a {kind}'}"}
        data = machine.read(path) or b""
        if len(data) > ENVIRONMENT_FILE_CAP:
            return {"unknown": f"{path} is larger than {ENVIRONMENT_FILE_CAP} bytes"}
        pairs, odd = environment_pairs(data)
        last.update(pairs)
        found.append({"path": path, "pairs": pairs, "odd": odd})
    return {
        "known": [
            {
                "path": entry["path"],
                "odd": entry["odd"],
                "variables": [
                    {"name": name, "value": shown_value(name, value)}
                    for name, value in sorted(entry["pairs"].items())
                ],
                "changed": sorted(
                    name
                    for name in entry["pairs"]
                    if running is not None and running.get(name) != last[name]
                ),
            }
            for entry in found
        ]
    }


def shown_value(name: str, value: str) -> Optional[str]:
    """Return a value that may be shown, None for one that is or may be a secret."""
    hidden = SECRET_VARIABLE.search(name) or redacted_text(value) != value
    return None if hidden or len(value) > ENVIRONMENT_VALUE_CAP else value


def environment_pairs(data: bytes) -> Tuple[Dict[str, str], List[str]]:
    """Return what a file sets, and what of it is not understood, in words without its values."""
    pairs: Dict[str, str] = {}
    odd: List[str] = []
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {}, ["it is not UTF-8"]
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        name, sign, value = stripped.partition("=")
        name, value = name.strip(), value.strip()
        if not sign or not VARIABLE.fullmatch(name):
            odd.append(f"line {number} is no assignment")
            continue
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        bare = value[1:-1] if quoted else value
        if "\\" in bare or (bare[:1] + bare[-1:]).strip("\"'") != bare[:1] + bare[-1:]:
            odd.append(f"line {number}: the value of {name} has quotes or backslashes inside")
            continue
        if quoted and value[0] in bare:
            odd.append(f"line {number}: the value of {name} has quotes or backslashes inside")
            continue
        pairs[name] = bare
    return pairs, odd


__all__ = ["environment_files_of", "environment_pairs"]

"""A diagnosis of a log, for people and for machines."""

from __future__ import annotations

import json
from typing import Final

from reconciler.core.diagnose import Diagnosis
from reconciler.core.diagnosis_rules import Cause, Reaction

FORMAT_VERSION: Final = "1.0"

_CAUSES: Final = {
    Cause.CONFIG_ERROR: "Config error: this spec cannot run here, and would fail again tomorrow",
    Cause.RESOURCE_BUSY: "Resource busy: memory, port or process of an earlier or foreign owner is in the way",
    Cause.HOST_FAULT: "Host fault: no spec can cure it",
    Cause.TRANSIENT: "Transient: may pass on a clean second try",
    Cause.ENGINE_FAULT: "Engine fault: a valid spec that this engine build crashes or hangs on",
    Cause.SECONDARY: "Secondary: another rank's failure, seen from here",
    Cause.READY: "Ready: no failure",
    Cause.LOADING: "Loading: no failure",
    Cause.DRAINING: "Draining: no failure",
    Cause.UNKNOWN: "Unknown",
}
_REACTIONS: Final = {
    Reaction.ROLLBACK: "go back to the last good revision; trying the same again is useless",
    Reaction.RELEASE_RETRY: "prove the release, then try the same once more",
    Reaction.PAGE: "stop, hold, and call a person: another revision on this host is no cure",
    Reaction.LOOK_AT_OTHER_RANKS: "read the other ranks' logs first; if none tells more, go back",
    Reaction.WAIT: "wait",
    Reaction.ACCEPT: "none",
}


def diagnosis_text(found: Diagnosis, name: str) -> str:
    """Say it in a few lines."""
    head = _CAUSES[found.cause]
    if found.known:
        head += f" ({found.code}, {found.confidence})"
    lines = [f"{name}: {head}", f"  why       {found.why}"]
    lines += [f"  line {item.number:<5}{item.text}" for item in found.lines]
    if found.failure:
        also = ", and tell a person" if found.also_page else ""
        reaction = (
            _REACTIONS[found.reaction]
            if found.cause is not Cause.UNKNOWN
            else "go back to the last good revision, never try again and again"
        )
        lines += [f"  change    {found.change}", f"  reaction  {reaction}{also}"]
    return "\n".join(lines) + "\n"


def diagnosis_json(found: Diagnosis, name: str) -> str:
    """Give the document of `-o json`."""
    document = {
        "format_version": FORMAT_VERSION,
        "type": "diagnosis",
        "file": name,
        "class": found.cause.value,
        "code": found.code,
        "reaction": found.reaction.value,
        "also": "page" if found.also_page else None,
        "key_line": found.key_line,
        "confidence": found.confidence,
        "lines": [{"number": item.number, "text": item.text} for item in found.lines],
        "why": found.why,
        "change": found.change,
        "engine": found.engine,
        "restarts": found.restarts,
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"

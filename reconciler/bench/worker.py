"""The client on a host: requests on standard input, one JSON object a line; answers framed on standard output.

Ends when its standard input does, also in the middle of a round: then whoever asked is gone, and no load may stay
behind. `carried.py` brings it there, `effects/host_meter.py` speaks to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any

from reconciler.bench import load
from reconciler.bench.ask import flush_prefix_cache
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress, Prompt, Sampling
from reconciler.bench.summary import answers

_PROMPTS: dict[str, tuple[Prompt, ...]] = {}


def main() -> None:
    """Answer requests until there are no more."""
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        _answer(json.loads(lines.get()))


def _read(lines: queue.Queue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _answer(request: Mapping[str, Any]) -> None:
    nonce = str(request["nonce"])
    try:
        told = _carry_out(request, nonce)
    except Exception as error:  # noqa: BLE001 - the asker must hear of it, whatever it is
        told = {"error": f"{type(error).__name__}: {error}"[:500]}
    line = json.dumps(told).encode()
    mark = hashlib.sha256(line).hexdigest()[:16]
    frame = b"@@reconciler-begin %s %d\n%s\n@@reconciler-end %s %s\n"
    _write(frame % (nonce.encode(), len(line), line, nonce.encode(), mark.encode()))


def _carry_out(request: Mapping[str, Any], nonce: str) -> dict[str, Any]:
    endpoint = Endpoint(**request["endpoint"])
    if "plan" not in request:
        return {"flushed": flush_prefix_cache(endpoint)}
    plan = plan_from(request["plan"], _PROMPTS)

    def said(progress: Progress) -> None:
        counts = f"{progress.completed} {progress.failed}"
        _write(f"@@reconciler-progress {nonce} {counts}\n".encode())

    collected = load.collect(plan, endpoint, on_progress=said)
    result, texts = answers(plan, endpoint, collected)
    told: dict[str, Any] = {"result": result.to_json()}
    if request.get("texts"):
        told["texts"] = {str(number): text for number, text in texts.items()}
    return told


def plan_from(data: Mapping[str, Any], known: dict[str, tuple[Prompt, ...]]) -> LoadPlan:
    """Give the plan that a request holds; its prompts only come the first time, later their digest alone."""
    fields = dict(data)
    digest = fields.pop("digest")
    if "prompts" in fields:
        known[digest] = tuple(
            Prompt(kind, text, tuple((role, content) for role, content in messages))
            for kind, text, messages in fields.pop("prompts")
        )
    fields["sampling"] = Sampling(**fields["sampling"])
    fields["given_up"] = frozenset(fields["given_up"])
    return LoadPlan(prompts=known[digest], **fields)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()

"""One small question to a server beside the load: which models, what about itself, empty the prefix cache. Standard library only.

Blocking, bounded in time and bytes, with the reader of `answer.py`; None is "no answer", never an empty one.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from contextlib import closing
from typing import Any

from reconciler.bench.answer import Answer, AnswerError
from reconciler.bench.load_plan import Endpoint, http_request

LIMIT_S = 10.0
MAX_BYTES = 4 << 20
_READ_BYTES = 64 * 1024
# Where the engines empty their prefix caches. vLLM has the path only in its development mode.
_FLUSH = {"sglang": "/flush_cache", "vllm": "/reset_prefix_cache"}


def fetch(
    endpoint: Endpoint, method: str, path: str, body: bytes = b"", *, limit_s: float = LIMIT_S
) -> Answer | None:
    """Ask once; None where no complete answer came within the limits."""
    due = time.monotonic() + limit_s
    answer = Answer(max_bytes=MAX_BYTES)
    try:
        with closing(_connected(endpoint, limit_s)) as connection:
            connection.sendall(http_request(endpoint, method, path, body))
            while True:
                left = due - time.monotonic()
                if left <= 0:
                    return None
                connection.settimeout(left)
                packet = connection.recv(_READ_BYTES)
                if not packet:
                    return answer if answer.end() else None
                if answer.feed(packet, 0.0):
                    return answer
    except (OSError, AnswerError):
        return None


def _connected(endpoint: Endpoint, limit_s: float) -> socket.socket:
    plain = socket.create_connection((endpoint.host, endpoint.port), timeout=limit_s)
    if not endpoint.tls:
        return plain
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=endpoint.host)
    except OSError:
        plain.close()
        raise


def fetch_json(endpoint: Endpoint, path: str) -> Any:
    """Get a JSON value with HTTP 200, or None."""
    answer = fetch(endpoint, "GET", path)
    if answer is None or answer.status != 200:
        return None
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None


def first_model(endpoint: Endpoint) -> tuple[str | None, str]:
    """Give the first model that a server lists, and the engine that it says it is ("custom" where it says none)."""
    listed = fetch_json(endpoint, "/v1/models")
    rows = listed.get("data") if isinstance(listed, dict) else None
    row = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    name, owner = row.get("id"), str(row.get("owned_by", "")).lower()
    engine = next((e for e in ("sglang", "vllm", "llamacpp") if owner == e), "custom")
    return (name if isinstance(name, str) else None), engine


def flush_prefix_cache(endpoint: Endpoint) -> bool:
    """Empty the server's prefix cache where its engine can; False where nothing says that it was."""
    path = _FLUSH.get(endpoint.engine)
    answer = fetch(endpoint, "POST", path) if path else None
    return answer is not None and answer.status == 200

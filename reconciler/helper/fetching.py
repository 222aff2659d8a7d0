"""One HTTP request to a server on this host, for a controller that cannot reach its port.

Part of the shipped helper: Python 3.9, standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import stat
import time
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Tuple

from reconciler.helper.files import kernel_text
from reconciler.helper.machine import Reading
from reconciler.helper.outputs import known, read_local_addresses, unknown

if TYPE_CHECKING:
    from http.client import HTTPConnection

FETCH_BYTES_MAX = 4 << 20
BEARER_BYTES_MAX = 4096


def fetch(request: Mapping[str, Any]) -> Reading:
    """Do one request to an address of this machine: no name look-up, no redirect, limits on time and size.

    What speaks HTTP is loaded here only: it is a third of what the helper loads, and each guard would pay for it.
    """
    import http.client  # noqa: PLC0415
    import threading  # noqa: PLC0415

    address, why = _own_address(str(request["address"]))
    if why:
        return unknown(why)
    headers = dict(request.get("headers") or {})
    if request.get("bearer_file"):
        token = _bearer(request["bearer_file"])
        if token is None:
            return unknown("the key file cannot be read")
        headers["Authorization"] = f"Bearer {token}"
    timeout_s = min(max(float(request["timeout_s"]), 0.1), 600.0)
    began = time.monotonic()
    connection = http.client.HTTPConnection(address, int(request["port"]), timeout=timeout_s)
    # A peer that sends a byte now and then never trips a socket's own timeout.
    cut = threading.Timer(timeout_s, _shut, [connection])
    cut.start()
    try:
        answer = _exchange(connection, request, headers)
    except (OSError, http.client.HTTPException, ValueError) as error:
        late = time.monotonic() - began >= timeout_s
        return unknown("timed out" if late else f"{type(error).__name__}: {error}")
    finally:
        cut.cancel()
        cut.join()
        connection.close()
    took_s = time.monotonic() - began
    if took_s >= timeout_s:
        return unknown("timed out")
    return known(dict(answer, took_s=took_s))


def _exchange(
    connection: HTTPConnection, request: Mapping[str, Any], headers: Mapping[str, str]
) -> Dict[str, Any]:
    body = base64.b64decode(request["body"]) if request.get("body") is not None else None
    limit = min(int(request.get("max_bytes") or FETCH_BYTES_MAX), FETCH_BYTES_MAX)
    connection.request(
        str(request["method"]), str(request["path"]), body=body, headers=dict(headers)
    )
    response = connection.getresponse()
    data = response.read(limit + 1)
    return {
        "status": response.status,
        "headers": {key.lower(): value for key, value in response.getheaders()},
        "body": base64.b64encode(data[:limit]).decode("ascii"),
        "truncated": len(data) > limit,
    }


def _shut(connection: HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(2)  # SHUT_RDWR


def _own_address(text: str) -> Tuple[str, Optional[str]]:
    """Return the address when it is this machine's own, else why it is not asked."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text, f"not an address: {text[:100]!r}"
    own = read_local_addresses(kernel_text("/proc/net/fib_trie"), kernel_text("/proc/net/if_inet6"))
    if not address.is_loopback and str(address) not in own:
        return text, f"{text} is not an address of this machine"
    return str(address), None


def _bearer(path: str) -> Optional[str]:
    """Return the token in a file on this host; it goes into one header and nowhere else."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            token = os.read(descriptor, BEARER_BYTES_MAX).decode("ascii").strip()
        finally:
            os.close(descriptor)
        return token if token and "\n" not in token and "\r" not in token else None
    return None

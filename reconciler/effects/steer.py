"""A person's wishes about one server, written on its host: hold, resume, forget a rejection.

Each takes the lease for the moment of writing, so that it never races a rollout; a rollout under way refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reconciler.core.errors import CommandFailedError, LeaseHeldError
from reconciler.effects.ports import Answer, HostPort, Request

DEADLINE_S = 30.0
TTL_S = 60.0


def write_records(
    host: HostPort,
    server: str,
    holder: str,
    records: Sequence[tuple[str, Mapping[str, Any] | None]],
) -> None:
    """Write or remove (None) records of a server, under its lease.

    Raises:
        LeaseHeldError: A rollout is under way.
        HostError: The host cannot be reached or would not.
    """
    claim = _ask(
        host,
        Request(
            "claim",
            {"server": server, "holder": holder, "ttl_s": TTL_S, "takeover": False},
            server=server,
        ),
    )
    fence = claim.data["fence"]
    try:
        for name, content in records:
            request = Request(
                "record",
                {"name": name, "content": dict(content) if content is not None else None},
                server=server,
                fence=fence,
                boot_id=claim.boot_id,
                not_after=claim.boottime + TTL_S,
            )
            _ask(host, request)
    finally:
        back = {"server": server, "holder": holder, "ttl_s": 0, "takeover": False}
        host.call(Request("claim", back, server=server, fence=fence), deadline_s=DEADLINE_S)


def act_once(
    host: HostPort, server: str, holder: str, verb: str, args: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Do one thing to a server under its lease, and give what the helper says.

    Raises:
        LeaseHeldError: A rollout is under way.
        HostError: The host cannot be reached or would not.
    """
    asked = {"server": server, "holder": holder, "ttl_s": TTL_S, "takeover": False}
    claim = _ask(host, Request("claim", asked, server=server))
    fence = claim.data["fence"]
    try:
        request = Request(
            verb,
            dict(args),
            server=server,
            fence=fence,
            boot_id=claim.boot_id,
            not_after=claim.boottime + TTL_S,
        )
        return _ask(host, request).data
    finally:
        back = {"server": server, "holder": holder, "ttl_s": 0, "takeover": False}
        host.call(Request("claim", back, server=server, fence=fence), deadline_s=DEADLINE_S)


def _ask(host: HostPort, request: Request) -> Answer:
    answer = host.call(request, deadline_s=DEADLINE_S)
    if answer.outcome == "done":
        return answer
    if answer.reason == "LeaseHeld":
        message = f"{host.name}: {answer.message}; nothing was changed"
        raise LeaseHeldError(message)
    raise CommandFailedError(host.name, f"{answer.message or answer.reason}; nothing was changed")


def journal_of(host: HostPort, unit: str, lines: int) -> list[tuple[float, str]]:
    """Read the last lines that a unit wrote: (seconds since the epoch, text)."""
    answer = _ask(host, Request("journal", {"unit": unit, "invocation": None, "lines": lines}))
    section = answer.data.get("lines")
    known = section.get("known") if isinstance(section, Mapping) else None
    if not isinstance(known, list):
        why = section.get("unknown") if isinstance(section, Mapping) else "no answer"
        raise CommandFailedError(host.name, f"the journal of {unit} cannot be read: {why}")
    return [(float(entry["at"]), str(entry["message"])) for entry in known]

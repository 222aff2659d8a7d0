"""Reaching a server in order to measure it, for the gate and for `reconcile bench`; nothing here changes anything on a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from reconciler.bench.ask import first_model
from reconciler.bench.load_plan import Api, Endpoint
from reconciler.core.errors import HostUnreachableError, UsageError
from reconciler.core.spec import Server
from reconciler.effects.ports import HostPort, Request
from reconciler.engines.base import secret_path, served_name

KEY_DEADLINE_S = 20.0


@contextmanager
def endpoint_of(
    server: Server, host: HostPort, *, facts: Mapping[str, str] | None = None
) -> Iterator[Endpoint]:
    """Give the way to a server of the specs from here: through the host's own connection, with its key.

    Raises:
        HostUnreachableError: No connection, or the key cannot be read.
    """
    with host.reach(server.listen.port) as address:
        yield Endpoint(
            host=address.host,
            port=address.port,
            api=api_of(server),
            model=served_name(server),
            bearer=bearer_of(server, host),
            engine=server.engine.name,
            # A local host gives its own address; whatever else leads to it is a tunnel's end.
            tunnelled=address.port != server.listen.port,
            server=dict(facts or {}),
        )


def on_the_host(
    server: Server, *, bearer: str | None, facts: Mapping[str, str] | None = None
) -> Endpoint:
    """Give the way to a server of the specs as its own host sees it."""
    listens = server.listen.address
    return Endpoint(
        host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listens, listens),  # noqa: S104 - the wildcard is what is replaced
        port=server.listen.port,
        api=api_of(server),
        model=served_name(server),
        bearer=bearer,
        engine=server.engine.name,
        server=dict(facts or {}),
    )


def api_of(server: Server) -> Api:
    """Say which of OpenAI's two forms the gate speaks: completions, unless a custom engine says that it only chats."""
    return "chat" if getattr(server.engine.options, "api", None) == "openai-chat" else "completions"


def bearer_of(server: Server, host: HostPort) -> str | None:
    """Fetch the API key for the time of a measurement: over the host's own connection, into memory, nowhere else."""
    if server.listen.api_key is None:
        return None
    path = secret_path(server.name, server.listen.api_key)
    request = Request("api-key", {"server": server.name, "path": path})
    answer = host.call(request, deadline_s=KEY_DEADLINE_S)
    if answer.outcome != "done":
        raise HostUnreachableError(
            host.name, f"the API key could not be read on the host: {answer.message}"
        )
    return str(answer.data["key"])


def endpoint_at(
    url: str, *, api: Api | None, model: str | None, engine: str | None, bearer: str | None
) -> Endpoint:
    """Give the way to any server by its URL; what is not told is asked of the server.

    Raises:
        UsageError: The URL is not one of a server.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL ({error}); write http://127.0.0.1:8000") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a server; write http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise UsageError(
            "the URL may hold scheme, host, port and path only; a key belongs into a file, see --api-key-file"
        )
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    if any(ord(c) <= 32 or ord(c) > 126 for c in prefix + parts.hostname):
        raise UsageError(f"{url!r} holds a character that no URL has")
    tls = parts.scheme == "https"
    asked = Endpoint(
        host=parts.hostname,
        port=port or (443 if tls else 80),
        api=api or "chat",
        model=model,
        bearer=bearer,
        tls=tls,
        prefix=prefix,
    )
    first, owner = (None, "custom") if model and engine else first_model(asked)
    return Endpoint(
        host=asked.host,
        port=asked.port,
        api=asked.api,
        model=model or first,
        bearer=bearer,
        engine=engine or owner,
        tls=tls,
        prefix=prefix,
    )

"""What servers mean to each other: dependencies that exist and come to an end, groups whose members agree. Pure; `fleet.py` asks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from reconciler.core.grammar import nearest
from reconciler.core.spec import Group, Server


def relation_problems(
    servers: Mapping[str, Server], names: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Give (server, field, message) for each relation that cannot be; `names` holds also servers that are wrong themselves."""
    for name, server in sorted(servers.items()):
        for other in server.depends_on:
            if other not in names:
                yield name, "depends_on", f"there is no server `{other}`{nearest(other, names)}"
        if (circle := _circle(name, servers)) is not None:
            yield (
                name,
                "depends_on",
                f"servers wait for each other in a circle: {' → '.join(circle)}",
            )
    yield from _groups(servers, names)


def _circle(start: str, servers: Mapping[str, Server]) -> tuple[str, ...] | None:
    """Find a way from a server back to itself."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        for following in servers[way[-1]].depends_on if way[-1] in servers else ():
            if following == start:
                return (*way, start)
            if following not in seen:
                seen.add(following)
                ways.append((*way, following))
    return None


def _groups(
    servers: Mapping[str, Server], names: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    first: dict[str, tuple[str, Group]] = {}
    members: dict[str, set[str]] = {}
    for name, server in sorted(servers.items()):
        if server.group is None:
            continue
        members.setdefault(server.group.name, set()).add(name)
        other, rules = first.setdefault(server.group.name, (name, server.group))
        if rules != server.group:
            message = f"says something else of group `{rules.name}` than server `{other}`; write it into a profile that both extend"
            yield name, "group", message
            yield other, "group", message.replace(f"`{other}`", f"`{name}`")
    for group, (_, rules) in sorted(first.items()):
        canary = rules.canary
        if (
            canary is not None
            and canary not in members[group]
            and (canary in servers or canary not in names)
        ):
            for name in sorted(members[group]):
                yield (
                    name,
                    "group.canary",
                    f"`{canary}` is no member of group `{group}`{nearest(canary, members[group])}",
                )


__all__ = ["relation_problems"]

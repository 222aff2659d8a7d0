"""Each value of a merged server says where it was written, and what is said agrees with what was merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconciler.core.fleet import load_fleet
from reconciler.core.origin import DEFAULT, Resolved, resolved
from reconciler.sources.directory import Directory
from reconciler.wiring import engines

FILES = {
    "specs/hosts.yaml": "apiVersion: reconciler/v1\nkind: Host\nname: one\n",
    "specs/profiles.yaml": """apiVersion: reconciler/v1
kind: Profile
name: base
engine: {name: custom, command: [/usr/bin/serve]}
timeouts: {drain: 5s, stop: 20s}
env: {A: base, B: base}
drift: heal
---
apiVersion: reconciler/v1
kind: Profile
name: prod
extends: base
timeouts:
  drain: 9s
env: {B: prod}
""",
    "specs/prod/qwen.yaml": """apiVersion: reconciler/v1
kind: Server
name: qwen
extends: prod
host: one
model: some/model
listen: {port: 30000}
drift: null
env:
  C: own
gpus: [0]
""",
}


def values(files: dict[str, str], name: str) -> dict[str, Resolved]:
    """Give every value by its path."""
    content = {k: v.encode() for k, v in files.items()}
    fleet = load_fleet(content, engines=engines())
    assert not fleet.problems, fleet.problems
    return {r.path: r for r in resolved(content, fleet, name)}


def where(found: Resolved) -> tuple[str, str, int]:
    """Give the origin in short."""
    place = found.place
    return (found.origin, place.file if place else "", place.line if place else 0)


def test_each_value_has_its_origin() -> None:
    """Own document, nearest profile, the profile below it, default; null lets the default through."""
    found = values(FILES, "qwen")
    assert found["timeouts.drain"].value == "9s"
    assert where(found["timeouts.drain"]) == ("profile prod", "specs/profiles.yaml", 14)
    assert where(found["timeouts.stop"]) == ("profile base", "specs/profiles.yaml", 5)
    assert where(found["env.A"]) == ("profile base", "specs/profiles.yaml", 6)
    assert where(found["env.B"]) == ("profile prod", "specs/profiles.yaml", 15)
    assert where(found["env.C"]) == ("server", "specs/prod/qwen.yaml", 10)
    assert where(found["engine.command"])[0] == "profile base"
    assert where(found["name"])[0] == "server"
    assert found["drift"] == Resolved("drift", "warn", DEFAULT)
    assert where(found["timeouts.ready"]) == (DEFAULT, "", 0)
    assert found["unit"].value == "qwen.service"
    assert found["unit"].origin == DEFAULT


def test_an_engine_in_short_is_found() -> None:
    """`engine: NAME` says the name, wherever it stands."""
    text = FILES["specs/prod/qwen.yaml"].replace("extends: prod\n", "engine: vllm\n")
    text += "runtime: {python: /x}\n"
    found = values({**FILES, "specs/prod/qwen.yaml": text}, "qwen")
    assert where(found["engine.name"]) == ("server", "specs/prod/qwen.yaml", 4)


@pytest.mark.parametrize("name", ["qwen35-122b", "qwen3-8b"])
def test_it_agrees_with_what_was_merged(name: str) -> None:
    """On the specs that come with the repository: what is set somewhere is not called a default, and the other way round."""
    root = Path(__file__).parents[2] / "specs"
    snapshot = Directory(root).snapshot()
    fleet = load_fleet(snapshot.files, engines=engines())
    server = next(s for s in fleet.servers if s.name == name)
    set_somewhere = server.model_dump(mode="json", exclude_defaults=True)
    for one in resolved(snapshot.files, fleet, name):
        inside: object = set_somewhere
        for part in one.path.split("."):
            inside = inside.get(part) if isinstance(inside, dict) else None
        if inside is not None and one.path not in {"unit", "speculative.num_draft_tokens"}:
            assert one.origin != DEFAULT, one
        if one.origin == DEFAULT and one.path != "unit":
            assert inside is None or one.path == "speculative.num_draft_tokens", one

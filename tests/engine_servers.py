"""Servers for the tests of engines: made by the real models, without a fleet around them."""

from __future__ import annotations

from collections.abc import Mapping

from reconciler.core.spec import Server
from reconciler.engines.base import Engine


def validated(document: Mapping[str, object], engine: Engine) -> Server:
    """Make a Server of a document, whatever the engine thinks of it."""
    return Server.model_validate(document, context={"engines": {engine.name: engine}})


def accepted(document: Mapping[str, object], engine: Engine) -> Server:
    """Make a Server that the engine has nothing against."""
    server = validated(document, engine)
    found = engine.problems(server)
    assert not found, found
    return server

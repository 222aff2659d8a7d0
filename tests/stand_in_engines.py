"""Engines for tests of the spec language: two that refuse little, so that a test shows the language's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from reconciler.core.spec import EngineRules, Server


class NoOptions(BaseModel):
    """An engine without fields of its own."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)


class CommandOptions(NoOptions):
    """An engine that needs a command."""

    command: tuple[str, ...] = Field(strict=False, title="Command", description="What to run.")
    health: str = Field(default="/health", title="Health", description="Where to ask.")


@dataclass(frozen=True)
class StandIn:
    """Engine rules that refuse one flag, at its place."""

    name: str
    Options: type[BaseModel]

    def problems(self, server: Server) -> list[tuple[str, str]]:
        return [("args.no.such", "no such flag")] if "no.such" in server.args else []

    def warnings(self, server: Server) -> list[tuple[str, str]]:
        return (
            [("model_revision", "is not pinned")]
            if server.model and not server.model_revision
            else []
        )


ENGINES: Mapping[str, EngineRules] = {
    "sglang": StandIn("sglang", NoOptions),
    "vllm": StandIn("vllm", NoOptions),
    "custom": StandIn("custom", CommandOptions),
}

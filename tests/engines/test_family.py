"""What holds for every engine alike."""

from __future__ import annotations

import pytest
from engine_servers import accepted

from reconciler.core.spec import EngineRules, Server
from reconciler.engines import custom, llamacpp, sglang, vllm
from reconciler.engines.base import Engine, ReadyRequests
from reconciler.systemd import ServerUnit, argv_of, environment_of, parse_unit, server_unit

MEMBERS: tuple[Engine, ...] = (custom, llamacpp, sglang, vllm)
RULES: tuple[EngineRules, ...] = (custom, llamacpp, sglang, vllm)


def plain(engine: Engine) -> Server:
    """A small server of each engine, with a key and a secret."""
    command = {"command": ["/opt/serve"]} if engine.name == "custom" else {}
    runtime = {} if engine.name == "custom" else {"python": "/opt/py"}
    return accepted(
        {
            "name": "one",
            "host": "h",
            "gpus": [0],
            "engine": {"name": engine.name, **command},
            "runtime": runtime,
            "model": "/srv/m",
            "listen": {"port": 8000, "api_key": {"file": "/etc/CANARY"}},
            "secrets": {"HF_TOKEN": {"file": "/etc/CANARY"}},
            "env": {"NCCL_DEBUG": "$INFO %n"},
        },
        engine,
    )


@pytest.mark.parametrize("engine", MEMBERS, ids=lambda e: e.name)
def test_a_member_is_an_engine_for_the_spec_language(engine: Engine) -> None:
    """The spec language can hold it as rules: a name, a model of options, problems."""
    assert engine.name == RULES[MEMBERS.index(engine)].name
    assert engine.stop_extra_s >= 0
    assert engine.ready_path.startswith("/")


@pytest.mark.parametrize("engine", MEMBERS, ids=lambda e: e.name)
def test_no_secrets_file_is_named_in_argv_but_by_its_handed_on_copy(engine: Engine) -> None:
    """S17: neither a key nor the place of its file on the host stands in a command or a variable."""
    launch = engine.render(plain(engine), ["GPU-1"])
    assert "CANARY" not in " ".join(launch.argv)
    assert "CANARY" not in " ".join(launch.environment.values())
    assert launch.secret_env["HF_TOKEN"] == "/etc/CANARY"


@pytest.mark.parametrize("engine", MEMBERS, ids=lambda e: e.name)
def test_rendering_is_a_function_of_the_spec(engine: Engine) -> None:
    """The same server gives the same launch, byte for byte, and its unit says exactly that command."""
    one = plain(engine)
    launch = engine.render(one, ["GPU-1"])
    assert engine.render(one, ["GPU-1"]) == launch
    unit = ServerUnit(
        server=one.name,
        unit=one.unit,
        revision="ab",
        description="x",
        argv=launch.argv,
        environment=launch.environment,
        stop_s=one.timeouts.stop,
        ready_s=one.timeouts.ready,
        credentials=launch.credentials,
    )
    read = parse_unit(server_unit(unit))
    assert argv_of(read) == launch.argv
    assert environment_of(read).items() >= launch.environment.items()


@pytest.mark.parametrize("engine", MEMBERS, ids=lambda e: e.name)
def test_every_request_can_be_sent(engine: Engine) -> None:
    """Paths are absolute, waits are bounded, and a generation is asked of every engine."""
    asked: ReadyRequests = engine.ready_requests(plain(engine))
    load = engine.in_flight_request(plain(engine))
    requests = [r for r in (asked.alive, asked.generation, asked.identity, load) if r is not None]
    assert asked.generation is not None
    assert all(r.path.startswith("/") and 0 < r.timeout_s <= 60 for r in requests)


@pytest.mark.parametrize("engine", MEMBERS, ids=lambda e: e.name)
@pytest.mark.parametrize(
    "argv", [[], ["-"], ["--"], ["--x=" * 1000], ["\0", "\ud800"], ["-m"] * 50]
)
def test_no_live_command_line_breaks_a_reader(engine: Engine, argv: list[str]) -> None:
    """Whatever runs on a host under a name, reading it gives words and no error."""
    assert engine.read_argv(argv, {"A": "\udcff"})["engine"]

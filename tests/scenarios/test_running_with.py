"""Asked against granted, and preflight, on simulated hosts: every example is in sync at once, and what differs is told field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.live import Known
from reconciler.core.plan import Action, Permissions, ServerPlan
from reconciler.core.spec import Server
from reconciler.core.survey import Survey
from reconciler.engines import sglang
from reconciler.engines.base import served_name
from reconciler.lab.simulated import SIMULATED_KEY, SimulatedHost, add_host
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.stand_in import help_text, needed_paths, secret_files
from reconciler.lab.world import Behaviour, Process, World
from reconciler.reconcile import World as Controller
from reconciler.reconcile import act, survey
from reconciler.views.machine import plan_json
from reconciler.views.status import stand, status_json
from reconciler.views.terminal import plan_lines
from reconciler.wiring import engines

ROOT = Path(__file__).parents[2]
SPECS = [[path] for path in sorted((ROOT / "examples").glob("*.yaml"))] + [
    sorted((ROOT / "specs").glob("*.yaml"))
]

ONE = """apiVersion: reconciler/v1
kind: Host
name: one
---
apiVersion: reconciler/v1
kind: Server
name: qwen
host: one
gpus: [0, 1]
engine: {name: sglang, version: 0.5.23}
runtime: {python: /opt/sglang/bin/python, user: sglang}
model: /srv/models/qwen
served_model_name: qwen
tp_size: 2
speculative: {algorithm: NEXTN, num_steps: 3, eagle_topk: 1, num_draft_tokens: 4}
listen: {port: 30000, api_key: {file: /etc/reconciler/qwen.key}}
args: {context-length: 32768, max-running-requests: 64}
timeouts: {drain: 1s, settle: 1s}
"""


@dataclass
class Stage:
    """Simulated hosts with what a fleet needs on them, and the controller."""

    world: World
    hosts: Mapping[str, SimulatedHost]
    controller: Controller

    def apply(self, fleet: Fleet) -> tuple[ServerResult, ...]:
        """Make the hosts run the fleet, whatever the hour."""
        found = survey(fleet, self.controller, allow=Permissions(unscheduled=True))
        return act(found, self.controller, lambda _event: None)

    def look(self, fleet: Fleet) -> Survey:
        """Look at the fleet."""
        return survey(fleet, self.controller)


def read(*files: tuple[str, bytes]) -> Fleet:
    """Read a fleet and take its gates away: nothing is measured here."""
    fleet = load_fleet(dict(files), engines=engines())
    assert not fleet.problems, fleet.problems
    servers = tuple(s.model_copy(update={"gate": None}) for s in fleet.servers)
    return replace(fleet, servers=servers)


def one(**changes: str) -> Fleet:
    """Read the one server, with words replaced or lines added."""
    text = ONE
    for old, new in changes.items():
        text = text.replace(old, new) if old in text else f"{text}{old}: {new}\n"
    return read(("one.yaml", text.encode()))


def stage(fleet: Fleet, behaviour: Behaviour | None = None) -> Stage:
    """Boot a host for each host of the fleet, and put there what its servers need."""
    world = World(7)
    hosts = {}
    for document in fleet.hosts:
        servers = [s for s in fleet.servers if s.host == document.name]
        cards = max([3, *(g for s in servers for g in s.gpus if isinstance(g, int))]) + 1
        hosts[document.name] = add_host(world, document.name, gpus=cards, gpu_mib=81_920)
        by_name = [g for s in servers for g in s.gpus if isinstance(g, str)]
        for card, name in zip(hosts[document.name].host.gpus, by_name, strict=False):
            card.uuid = name
        for server in servers:
            furnish(hosts[document.name], server)
            hosts[document.name].host.behave(
                server.unit.removesuffix(".service"),
                replace(
                    behaviour or Behaviour(),
                    port=server.listen.port,
                    needs_mib=1000,
                    model=served_name(server),
                ),
            )
    return Stage(world, hosts, controller_world(world, hosts, engines()))


def furnish(simulated: SimulatedHost, server: Server) -> None:
    """Put user, program, files and flags on a host."""
    host = simulated.host
    launch = engines()[server.engine.name].render(
        server, [f"GPU-{i}" for i in range(len(server.gpus))]
    )
    if server.runtime.user:
        host.users.setdefault(server.runtime.user, {"uid": 990, "gid": 990, "groups": [990]})
    for path in needed_paths(server, launch):
        host.paths[path] = {"kind": "file", "size": 1, "mode": 0o755, "uid": 0, "gid": 0, "executable": True}  # fmt: skip
    for path in secret_files(server, launch):
        host.files.put(path, f"{SIMULATED_KEY}\n".encode())
    program = server.runtime.python or server.runtime.binary
    if program and server.engine.version:
        host.versions[program] = server.engine.version
    if launch.check_argv:
        host.programs[" ".join(launch.check_argv)] = help_text(server.engine.name, [launch])


def plan_of(found: Survey) -> ServerPlan:
    """Give the plan of the one server."""
    (plan,) = found.plan.servers
    return plan


def told(found: Survey) -> str:
    """Give everything that a person or a program is shown of a survey."""
    lines = [Text.from_markup(line).plain for line in plan_lines(found.plan, command="x")]
    return "\n".join([*lines, json.dumps(plan_json(found.plan)), json.dumps(status_json(found))])


@pytest.mark.parametrize("files", SPECS, ids=lambda files: files[0].parent.name + "/" + files[0].stem)  # fmt: skip
def test_a_fresh_deployment_of_every_example_is_in_sync_at_once(files: list[Path]) -> None:
    """No false drift: aliases, derived numbers and defaults are known; asked and heard where the engine tells."""
    fleet = read(*((str(f), f.read_bytes()) for f in files))
    at = stage(fleet)
    results = at.apply(fleet)
    assert {r.outcome for r in results} <= {Outcome.APPLIED, Outcome.STOPPED, Outcome.IN_SYNC}, results  # fmt: skip
    found = at.look(fleet)
    for host in found.hosts:
        for plan in host.plans:
            assert plan.drift == (), plan.drift
            if plan.wish.target is not None:
                assert stand(plan, host.live).value == "InSync"
                running = host.live.server(plan.wish.server) if host.live is not None else None
                if running is not None and running.phase == "running":
                    assert isinstance(running.runs_with, Known), running.runs_with
                assert plan.wish.running_with.unknown == "", plan.wish.running_with
    assert not found.plan.acts


def test_the_examples_are_heard_and_not_only_not_asked() -> None:
    """The test above would pass if nothing were compared: the one SGLang here is, and says so."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    found = at.look(fleet)
    assert plan_of(found).wish.running_with.source == "GET /server_info"
    assert "SIMULATED" not in told(found)


@pytest.mark.parametrize(
    ("says", "field", "asked", "granted"),
    [
        ({"context_length": 8192}, "args.context-length", "32768", "8192"),
        ({"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}, "speculative.num_steps", "3", "1"),
        ({"speculative_algorithm": None}, "speculative.algorithm", "NEXTN", "null"),
        ({"tp_size": 1}, "tp_size", "2", "1"),
        ({"max_running_requests": 48}, "args.max-running-requests", "64", "48"),
    ],
)  # fmt: skip
def test_what_an_engine_does_otherwise_is_told_field_by_field(
    says: dict[str, Any], field: str, asked: str, granted: str
) -> None:
    """Asked with ours and not granted: shown in plan and status with both values and who says so; nothing acts on it."""
    fleet = one()
    at = stage(fleet, Behaviour(says=says))
    assert at.apply(fleet)[0].outcome is Outcome.APPLIED
    found = at.look(fleet)
    (drift,) = plan_of(found).drift
    (row,) = drift.fields
    assert (drift.what, row.field, row.asked, row.granted) == ("not-granted", field, asked, granted)
    assert row.source == "GET /server_info"
    assert not found.plan.acts
    assert f"{field}: {granted}, not {asked}" in told(found)


def started_otherwise(at: Stage) -> None:
    """Let somebody have started the process with another context than its unit says."""
    host = at.hosts["one"].host
    (main,) = [p for p in host.processes.values() if "--context-length" in p.argv]
    main.argv = ["8192" if word == "32768" else word for word in main.argv]


def test_a_server_that_runs_with_other_flags_than_its_unit_says_is_drifted() -> None:
    """Its command line says it, field by field; `warn` changes nothing, `heal` starts it anew, `off` is silent."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    started_otherwise(at)
    found = at.look(fleet)
    plan = plan_of(found)
    (drift,) = plan.drift
    assert (drift.what, drift.fields[0].field, drift.fields[0].granted) == ("other-flags", "args.context-length", "8192")  # fmt: skip
    assert (plan.action, plan.reason) == (Action.BLOCKED, Reason.DRIFTED)
    assert stand(plan, found.hosts[0].live).value == "Drifted"
    assert plan_of(at.look(one(drift="off"))).drift == ()
    healed = one(drift="heal")
    assert plan_of(at.look(healed)).action is Action.CHANGE
    assert at.apply(healed)[0].outcome is Outcome.APPLIED
    assert plan_of(at.look(healed)).drift == ()


def the_main(at: Stage) -> Process:
    """Give the server's main process."""
    (main,) = [p for p in at.hosts["one"].host.processes.values() if "--model-path" in p.argv]
    return main


def test_a_process_with_another_environment_than_its_unit_says_is_drifted() -> None:
    """What the spec sets and the cards are compared with the process itself; a value is told, and healed by a new start."""
    fleet = one(env="{NCCL_DEBUG: WARN, SGLANG_WARMUP_TIMEOUT: '600'}")
    at = stage(fleet)
    at.apply(fleet)
    assert plan_of(at.look(fleet)).drift == ()
    main = the_main(at)
    main.environment = tuple(
        "NCCL_DEBUG=INFO" if pair.startswith("NCCL_DEBUG=") else pair for pair in main.environment
    )
    plan = plan_of(at.look(fleet))
    (drift,) = plan.drift
    (row,) = drift.fields
    assert (drift.what, row.field, row.asked, row.granted) == ("other-flags", "env.NCCL_DEBUG", "WARN", "INFO")  # fmt: skip
    assert row.source == "its environment"
    assert (plan.action, plan.reason) == (Action.BLOCKED, Reason.DRIFTED)


def test_a_variable_that_the_engine_heeds_and_nobody_asked_for_is_told() -> None:
    """From the service manager's environment, or a wrapper: shown, and no new start would cure it, so nothing acts on it."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    the_main(at).environment += ("SGLANG_SIMULATE_ACC_LEN=4", "EDITOR=vi", "SGLANG_AUTH_TOKEN=hide-me")  # fmt: skip
    found = at.look(fleet)
    (drift,) = plan_of(found).drift
    (row,) = drift.fields
    assert (drift.what, row.field, row.granted) == ("not-granted", "env.SGLANG_SIMULATE_ACC_LEN", "4")  # fmt: skip
    assert not found.plan.acts
    assert "hide-me" not in told(found)


def test_a_value_that_is_told_in_part_is_no_drift() -> None:
    """What the host cuts or takes a secret out of is compared as far as it is told."""
    fleet = one(env="{LONG: " + "x" * 5000 + ", NOTE: started with --api-key see-the-wiki}")
    at = stage(fleet)
    at.apply(fleet)
    found = at.look(fleet)
    assert plan_of(found).drift == ()
    assert "see-the-wiki" not in repr(
        found.hosts[0].live and found.hosts[0].live.server("qwen").runs_with
    )


@pytest.mark.parametrize("how", ["wiped", "another"])
def test_an_environment_that_is_not_its_units_says_nothing(how: str) -> None:
    """S12: wiped by the engine, or of another start: unknown, and no drift is made of it."""
    fleet = one(env="{NCCL_DEBUG: WARN}")
    at = stage(fleet)
    at.apply(fleet)
    main = the_main(at)
    main.environment = ("NCCL_DEBUG=INFO",)
    if how == "wiped":
        main.environ_readable = False
    else:
        main.invocation = "0" * 32
    assert plan_of(at.look(fleet)).drift == ()


VLLM = (
    ONE.replace("{name: sglang, version: 0.5.23}", "{name: vllm, version: 0.19.1}")
    .replace("/opt/sglang/bin/python", "/opt/vllm/bin/python")
    .replace("{algorithm: NEXTN, num_steps: 3, eagle_topk: 1, num_draft_tokens: 4}", "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}")
    .replace("{context-length: 32768, max-running-requests: 64}", "{dtype: half, enable-prefix-caching: true}")
)  # fmt: skip
GRANTED = "(EngineCore pid=9) INFO 12-01 04:57:40 [core.py:133] Initializing a V1 LLM engine (v0.19.1) with config: model='/srv/models/qwen', speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=4), dtype=torch.float16, tensor_parallel_size=2, enable_prefix_caching=True, quantization_config=X(a='b, c', d=[1, 2])"


@pytest.mark.parametrize(
    ("instead", "field", "asked", "granted"),
    [
        (("", ""), "", "", ""),
        (("enable_prefix_caching=True", "enable_prefix_caching=False"), "args.enable-prefix-caching", "true", "false"),
        (("num_spec_tokens=4", "num_spec_tokens=1"), "speculative.num_speculative_tokens", "4", "1"),
        (("torch.float16", "torch.float32"), "args.dtype", "half", "float32"),
        (("tensor_parallel_size=2", "tensor_parallel_size=1"), "tp_size", "2", "1"),
    ],
)  # fmt: skip
def test_what_an_engine_says_only_when_it_starts_is_compared(
    instead: tuple[str, str], field: str, asked: str, granted: str
) -> None:
    """The engine's own configuration stands in the journal of this invocation alone; that of the run before is not read."""
    fleet = read(("one.yaml", VLLM.encode()))
    at = stage(fleet)
    at.apply(fleet)
    host = at.hosts["one"].host
    (main,) = [p for p in host.processes.values() if "--tensor-parallel-size" in p.argv]
    host.log("qwen.service", "f" * 32, GRANTED.replace("=True", "=False"))
    host.log("qwen.service", main.invocation, GRANTED.replace(*instead))
    found = at.look(fleet)
    rows = [row for drift in plan_of(found).drift for row in drift.fields]
    assert [(r.field, r.asked, r.granted) for r in rows] == ([(field, asked, granted)] if field else [])  # fmt: skip
    assert all(r.source == "its start-up lines" for r in rows)
    assert not found.plan.acts


def test_a_stale_process_on_the_port_is_told_apart_from_what_the_engine_refuses() -> None:
    """A new commit is compared with what was applied: the spec that moved on is no drift."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    plan = plan_of(at.look(one(**{"context-length: 32768": "context-length: 16384"})))
    assert (plan.action, plan.drift) == (Action.CHANGE, ())


def test_an_engine_that_does_not_tell_is_unknown_and_neither_in_sync_nor_drift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A path that is not there, or an answer of another kind: said in the status, and nothing is concluded."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    monkeypatch.setattr("reconciler.lab.simulated.server_arguments", lambda _argv: [])
    with pytest.raises(TypeError):  # what the simulated engine says is no object any more
        at.look(fleet)
    monkeypatch.setattr(
        "reconciler.lab.simulated.respond", lambda *_asked: (404, {"detail": "Not Found"})
    )
    found = at.look(fleet)
    plan = plan_of(found)
    assert plan.drift == ()
    assert plan.wish.running_with.unknown == "GET /server_info: HTTP 404"
    (row,) = status_json(found)["servers"]
    assert row["running_with"] == {"source": None, "unknown": "GET /server_info: HTTP 404"}


def test_the_key_that_an_engine_tells_in_clear_is_nowhere() -> None:
    """S17: not in an answer of the helper, a record, a plan, a status; the host redacts before anything is sent."""
    fleet = one()
    at = stage(fleet)
    answers: list[str] = []
    call = at.hosts["one"].call

    def heard(request: Mapping[str, Any]) -> dict[str, Any]:
        answer = call(request)
        answers.append(json.dumps(answer))
        return answer

    at.hosts["one"].call = heard  # type: ignore[method-assign]
    at.hosts["one"].host.log("qwen.service", None, f"server_args=ServerArgs(api_key='{SIMULATED_KEY}')")  # fmt: skip
    at.apply(fleet)
    found = at.look(fleet)
    live = found.hosts[0].live
    assert live is not None
    bodies = [body.decode() for _, body in live.server("qwen").told]
    assert any('"api_key":"[redacted]"' in body for body in bodies)
    kept = [d.decode(errors="replace") for p, d in at.hosts["one"].host.files.data.items() if p.startswith("/var/lib/reconciler/") and not p.endswith(("secrets.env", "secrets.yaml"))]  # fmt: skip
    for text in (*answers, *bodies, *kept, told(found), repr(live)):
        assert SIMULATED_KEY not in text


@pytest.mark.parametrize(
    ("broken", "check", "words"),
    [
        ({"missing": ["model-2.safetensors"], "missing_count": 1}, "model.weights", "model-2.safetensors"),
        ({"found": False, "why": "is gone"}, "model.cached", "is gone"),
        ({"config": {"unknown": "is not JSON (cut short?)"}}, "model.config", "is not JSON"),
        ({"config": {"num_attention_heads": 7}}, "parallel.heads", "7 attention heads"),
        ({"bytes": 400 << 30}, "memory.fit", "200.0 GiB a card"),
    ],
)  # fmt: skip
def test_what_would_fail_is_refused_in_the_dry_run_and_before_anything_stops(
    broken: dict[str, Any], check: str, words: str
) -> None:
    """Shown in the plan and in JSON by its id; nothing stops; the spec may waive it with a reason, which the host records."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    at.hosts["one"].host.models["/srv/models/qwen"] = broken
    changed = {"context-length: 32768": "context-length: 16384"}
    starts = len(at.hosts["one"].host.truth.starts)
    found = at.look(one(**changed))
    plan = plan_of(found)
    assert (plan.action, plan.outcome, plan.reason) == (Action.BLOCKED, Outcome.REFUSED, Reason.PREFLIGHT)  # fmt: skip
    assert words in plan.sentence
    (row,) = [c for c in plan_json(found.plan)["servers"][0]["checks"] if c["verdict"] == "refused"]
    assert row["id"] == check
    assert at.apply(one(**changed))[0].outcome is Outcome.REFUSED
    assert len(at.hosts["one"].host.truth.starts) == starts

    waiver = one(**changed, preflight=f"{{waive: {{{check}: looked at by hand}}}}")
    assert "looked at by hand" in told(at.look(waiver))
    assert at.apply(waiver)[0].outcome is Outcome.APPLIED
    attempted = json.loads(at.hosts["one"].host.files.data["/var/lib/reconciler/qwen/attempted.json"])  # fmt: skip
    assert attempted["waived"] == {check: "looked at by hand"}


def test_a_model_that_vanishes_between_plan_and_rollout_stops_nothing() -> None:
    """The rollout looks again by itself, whatever the plan saw."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    changed = one(**{"context-length: 32768": "context-length: 16384"})
    planned = at.look(changed)
    assert planned.plan.acts
    at.hosts["one"].host.models["/srv/models/qwen"] = {"found": False, "why": "is gone"}
    starts = len(at.hosts["one"].host.truth.starts)
    (result,) = act(planned, at.controller, lambda _event: None)
    assert (result.outcome, result.reason) == (Outcome.REFUSED, Reason.PREFLIGHT)
    assert "is gone [model.cached]" in result.sentence
    assert len(at.hosts["one"].host.truth.starts) == starts


def test_an_installation_is_asked_about_its_flags_once() -> None:
    """By version and digest: the same installation is not asked again, another one is."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    changed = one(**{"context-length: 32768": "context-length: 16384"})
    host = at.hosts["one"].host
    host.programs["/opt/sglang/bin/python -m sglang.launch_server"] = "usage: nothing"
    assert at.look(changed).plan.acts
    host.engine_facts["program"] = {"known": {"python": "3.12.3", "version": "0.5.23", "digest": "another"}}  # fmt: skip
    plan = plan_of(at.look(changed))
    assert "does not know" in plan.sentence
    assert "[engine.flags]" in plan.sentence


def test_a_process_that_renamed_itself_says_nothing_of_its_flags() -> None:
    """S3's cousin: a title is no command line, and nothing is concluded from it."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    for process in at.hosts["one"].host.processes.values():
        process.argv = ["sglang::server"]
    running = plan_of(at.look(fleet)).wish.running_with
    assert running.other == ()


def test_the_equivalence_table_is_what_keeps_a_fresh_deployment_in_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard's mutant: without the table, NEXTN that reads back as EAGLE is called drift."""
    fleet = one()
    at = stage(fleet)
    at.apply(fleet)
    assert plan_of(at.look(fleet)).drift == ()
    monkeypatch.setattr(sglang, "_reads_back", lambda *_asked: False)
    (drift,) = plan_of(at.look(fleet)).drift
    assert [d.field for d in drift.fields] == ["speculative.algorithm"]

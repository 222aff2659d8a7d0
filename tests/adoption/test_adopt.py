"""Hand-made units in, specs out: what is mapped, what is honestly listed, and no secret anywhere."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from reconciler.adoption import Adoption
from reconciler.cli.adopt import as_document, drafted
from reconciler.core.conditions import Outcome, Reason
from reconciler.core.errors import UsageError
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.plan import Action, Permissions
from reconciler.core.spec import Host
from reconciler.lab.simulated import SimulatedHost, add_host
from reconciler.lab.simulated_ports import SimulatedPort, controller_world
from reconciler.lab.world import Behaviour, World
from reconciler.reconcile import World as Controller
from reconciler.reconcile import act, survey
from reconciler.wiring import engines

UNIT = "qwen.service"
PLACE = f"/etc/systemd/system/{UNIT}"
ADOPT = Permissions(adopt=True)

INCIDENT = """[Unit]
Description=SGLang Qwen3.5-122B-A10B
After=network-online.target
[Service]
User=sglang
WorkingDirectory=/opt/sglang
Environment=CUDA_VISIBLE_DEVICES=0,1,2,3
Environment=NCCL_DEBUG=INFO
ExecStart=/opt/sglang/bin/python -m sglang.launch_server --model-path Qwen/Qwen3.5-122B-A10B \\
  --tp 4 --host 0.0.0.0 --port 30000 --served-model-name qwen \\
  --speculative-algorithm NEXTN --speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5 \\
  --mem-fraction-static 0.85
Restart=always
RestartSec=10
TimeoutStopSec=60
[Install]
WantedBy=multi-user.target
"""
PLAIN = """[Service]
Environment=CUDA_VISIBLE_DEVICES=0,1
ExecStart=/usr/bin/serve --port 30000 --steps 1
"""
SECRETS = ("hf_abcdefghijklmnopqrstuv", "sk-verysecretverysecret", "hunter2")


class Stage:
    """A host with a hand-made unit that serves."""

    def __init__(self, text: str, drop_ins: Mapping[str, str] | None = None) -> None:
        self.world = World(1)
        self.host: SimulatedHost = add_host(self.world, "one")
        self.host.host.behave("", Behaviour(workers=1, gpus=None))
        self.host.host.files.put(PLACE, text.encode())
        for name, content in (drop_ins or {}).items():
            self.host.host.files.put(f"{PLACE}.d/{name}", content.encode())
        self.host.systemd.reload()
        self.host.systemd.start(UNIT)
        self.world.advance(20)
        self.controller: Controller = controller_world(self.world, {"one": self.host}, engines())

    def draft(self) -> tuple[Adoption, str]:
        """Draft its spec, by the code that the command runs."""
        return drafted(Host(name="one"), UNIT, None, SimulatedPort(self.host), engines())

    def fleet(self, text: str) -> Fleet:
        """Read the drafted spec beside its host."""
        files = {
            "hosts.yaml": b"apiVersion: reconciler/v1\nkind: Host\nname: one\n",
            "qwen.yaml": text.encode(),
        }
        return load_fleet(files, engines=engines())

    @property
    def pids(self) -> list[int]:
        """Give every process, by number."""
        return sorted(self.host.host.processes)


def lost(adoption: Adoption) -> str:
    """Give everything that is said to be in no spec."""
    return "\n".join(f"{r.what}: {r.sentence}" for r in adoption.unmapped)


def test_the_incidents_unit_becomes_a_spec_and_is_taken_over_without_a_restart() -> None:
    """The drafted spec validates, renders to what runs, and `--adopt` then changes no process; the old bytes are kept (S7)."""
    stage = Stage(INCIDENT)
    adoption, text = stage.draft()
    assert adoption.problems == ()
    assert adoption.differs == ()
    fleet = stage.fleet(text)
    assert fleet.problems == ()
    (server,) = fleet.servers
    assert server.speculative == {
        "algorithm": "NEXTN", "num_steps": 4, "eagle_topk": 1, "num_draft_tokens": 5,
    }  # fmt: skip
    assert (server.tp_size, server.gpus, server.listen.port) == (4, (0, 1, 2, 3), 30000)
    assert (server.runtime.user, server.timeouts.stop) == ("sglang", 60.0)
    before = stage.pids
    found = survey(fleet, stage.controller, allow=ADOPT)
    assert [p.action for p in found.plan.servers] == [Action.TAKE_OVER]
    (result,) = act(found, stage.controller, lambda _event: None)
    assert result.outcome is Outcome.APPLIED
    assert stage.pids == before
    assert len(stage.host.host.truth.starts) == 1
    kept = stage.host.host.files.data["/var/lib/reconciler/qwen/original/unit.service"]
    assert kept.decode() == INCIDENT
    (result,) = act(survey(fleet, stage.controller), stage.controller, lambda _event: None)
    assert result.outcome is Outcome.IN_SYNC


def test_without_adopt_a_stranger_is_left_alone() -> None:
    """S7: nothing is taken over that nobody asked for, though it is what is wanted."""
    stage = Stage(PLAIN)
    fleet = stage.fleet(stage.draft()[1])
    (plan,) = survey(fleet, stage.controller).plan.servers
    assert (plan.action, plan.reason) == (Action.BLOCKED, Reason.NOT_OURS)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--steps, '1'", "--steps, '2'", "engine.command"),
        ("gpus:\n  - 0\n  - 1\n", "gpus:\n  - 0\n  - 2\n", "gpus"),
        ("listen:", "env: {NCCL_DEBUG: INFO}\nlisten:", "env.NCCL_DEBUG"),
        ("listen:", "runtime: {user: sglang}\nlisten:", "runtime.user"),
        ("listen:", "runtime: {working_directory: /srv}\nlisten:", "runtime.working_directory"),
    ],
)
def test_what_would_change_takes_a_restart_and_is_named(old: str, new: str, said: str) -> None:
    """A take-over without a restart is only for what is the same: each difference switches it off, and the plan names it."""
    stage = Stage(PLAIN)
    text = stage.draft()[1].replace(
        "      - --steps\n      - '1'\n", "      - --steps\n      - '1'\n"
    )
    if old.startswith("--steps"):
        old, new = "- '1'\n", "- '2'\n"
    assert old in text, text
    (plan,) = survey(
        stage.fleet(text.replace(old, new)), stage.controller, allow=ADOPT
    ).plan.servers
    assert plan.action is Action.ADOPT
    assert any(note.startswith(f"taking over takes a restart: {said}") for note in plan.notes)


def test_a_stranger_whose_file_was_edited_since_it_started_is_not_the_same() -> None:
    """What runs is compared, not what the file says by now."""
    stage = Stage(PLAIN)
    text = stage.draft()[1]
    edited = PLAIN.replace("--steps 1", "--steps 2")
    stage.host.host.files.put(PLACE, edited.encode())
    stage.host.systemd.reload()
    (plan,) = survey(stage.fleet(text), stage.controller, allow=ADOPT).plan.servers
    assert plan.action is Action.ADOPT


def test_a_server_that_does_not_answer_is_not_taken_over() -> None:
    """S4: without a real generation nothing is applied, and nothing on the host has changed."""
    stage = Stage(PLAIN)
    text = stage.draft()[1]
    fleet = stage.fleet(
        text.replace("timeouts:", "timeouts:\n  ready: 20s")
        if "timeouts:" in text
        else text + "timeouts: {ready: 20s}\n"
    )
    for process in stage.host.host.processes.values():
        process.behaviour = Behaviour(workers=1, generation_status=500)
    found = survey(fleet, stage.controller, allow=ADOPT)
    (result,) = act(found, stage.controller, lambda _event: None)
    assert result.outcome is Outcome.REFUSED
    assert stage.host.host.files.data[PLACE].decode() == PLAIN
    assert "/var/lib/reconciler/qwen/applied.json" not in stage.host.host.files.data


def test_no_secret_of_a_hand_made_unit_is_ever_written_or_shown() -> None:
    """S17: keys in arguments, environment and URLs become files on the host; neither spec, diff nor JSON holds a value."""
    text = INCIDENT.replace(
        "  --mem-fraction-static 0.85",
        "  --mem-fraction-static 0.85 --api-key sk-verysecretverysecret --admin-api-key hunter2hunter2",
    ).replace(
        "Environment=NCCL_DEBUG=INFO",
        'Environment="HF_TOKEN=hf_abcdefghijklmnopqrstuv"\nEnvironment=WANDB=https://me:hunter2@wandb.example MY_PASSWORD=hunter2\nEnvironment=OPENAI_KEY=hunter2hunter2',
    )
    stage = Stage(text)
    adoption, spec = stage.draft()
    (plan,) = survey(stage.fleet(spec), stage.controller, allow=ADOPT).plan.servers
    shown = spec + str(as_document(adoption, spec)) + str(plan.notes) + plan.sentence
    for secret in SECRETS:
        assert secret not in shown
    assert {s.name for s in adoption.secrets} >= {
        "HF_TOKEN",
        "api-key",
        "WANDB",
        "MY_PASSWORD",
        "OPENAI_KEY",
    }
    (server,) = stage.fleet(spec).servers
    assert server.secrets["HF_TOKEN"].file == "/etc/reconciler/qwen/HF_TOKEN"
    assert server.listen.api_key is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("EnvironmentFile=/etc/default/gone", "EnvironmentFile=/etc/default/gone"),
        ("ExecStartPre=/bin/sh -c 'fuser -k /dev/nvidia*'", "ExecStartPre="),
        ("ExecStartPost=/bin/curl http://127.0.0.1", "ExecStartPost="),
        ("ExecStop=/bin/kill $MAINPID", "ExecStop="),
        ("Nice=-5", "Nice=-5"),
        ("CPUAffinity=0-15", "CPUAffinity=0-15"),
        ("Group=render", "Group=render"),
        ("WorkingDirectory=~", "WorkingDirectory=~"),
        ("Restart=always", "Restart=always"),
        ("Environment=LD_LIBRARY_PATH=/x", "LD_LIBRARY_PATH=/x"),
        ("SetCredential=key:hunter2", "SetCredential="),
        ("LimitNOFILE=4096", "LimitNOFILE=4096"),
    ],
)
def test_every_line_that_no_spec_can_say_is_listed(line: str, said: str) -> None:
    """Nothing of a hand-made unit is dropped in silence."""
    adoption, text = Stage(PLAIN + line + "\n").draft()
    assert said in lost(adoption)
    assert said in text
    assert "hunter2" not in text


DEFAULTS = b"""# by hand
NCCL_DEBUG=INFO
TOKENIZERS_PARALLELISM="false"
HF_TOKEN=hf_abcdefghijklmnopqrstuv
DB_PASS=hunter2
"""


class FilesStage(Stage):
    """A unit that reads its variables from a file."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        super().__init__(PLAIN)
        self.host.host.files.put("/etc/default/llm", content)
        self.host.host.files.put(PLACE, f"{PLAIN}EnvironmentFile=-/etc/default/llm\n".encode())
        self.host.systemd.stop(UNIT)
        self.world.advance(20)
        self.host.systemd.reload()
        self.host.systemd.start(UNIT)
        self.world.advance(20)


def test_what_an_environment_file_sets_is_mapped_and_its_secrets_get_files() -> None:
    """Plain values become `env`, secrets a file to fill; nothing that runs changes, and no secret leaves the host."""
    stage = FilesStage(DEFAULTS)
    adoption, text = stage.draft()
    assert adoption.document["env"] == {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false"}
    assert set(adoption.document["secrets"]) == {"DB_PASS", "HF_TOKEN"}
    assert "from /etc/default/llm, which is not read any more" in text
    assert not any(secret in f"{text}{as_document(adoption, text)}" for secret in SECRETS)
    assert (adoption.problems, adoption.differs, lost(adoption)) == ((), (), "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'A=1\nB="x\\"y"\n', "the value of B has quotes or backslashes inside"),
        (b"A=1\nexport B=2\n", "line 2 is no assignment"),
        (b"A=\xff\n", "it is not UTF-8"),
    ],
)
def test_a_line_that_is_not_understood_is_named_and_stands_in_the_way(
    content: bytes, said: str
) -> None:
    """Half a value is never taken for the whole: a person writes what it sets."""
    adoption, text = FilesStage(content).draft()
    assert said in lost(adoption)
    assert said in text
    assert any(said in d for d in adoption.differs)


def test_a_file_that_was_edited_since_the_start_is_no_account_of_what_runs() -> None:
    """The process is asked as well: what it was started with counts."""
    stage = FilesStage(b"NCCL_DEBUG=INFO\n")
    stage.host.host.files.put("/etc/default/llm", b"NCCL_DEBUG=WARN\n")
    adoption, _ = stage.draft()
    assert any("NCCL_DEBUG is not what the process was started with" in d for d in adoption.differs)


def test_a_drop_in_counts_and_stands_in_the_way_of_a_take_over() -> None:
    """What counts is the unit with its drop-ins; since they would outrank ours, they are named and have to go first."""
    extra = "[Service]\nExecStart=\nExecStart=/usr/bin/serve --port 30000 --steps 7\nNice=3\n"
    stage = Stage(PLAIN, {"50-more.conf": extra})
    adoption, text = stage.draft()
    assert "'7'" in text
    assert "Nice=3 (in " in lost(adoption)
    assert any("50-more.conf" in d for d in adoption.differs)
    assert adoption.drop_ins == (f"{PLACE}.d/50-more.conf",)


def test_a_shell_wrapper_is_seen_through_to_the_engine() -> None:
    """The spec starts the engine itself; that the wrapper is gone is said, and the take-over takes a restart."""
    wrapped = INCIDENT.replace(
        "ExecStart=/opt", 'ExecStart=/bin/bash -c "ulimit -l unlimited; /opt'
    ).replace("0.85\n", '0.85"\n')
    stage = Stage(wrapped)
    main = next(p for p in stage.host.host.processes.values() if p.unit == UNIT)
    child = stage.host.host.add_process(main.cgroup, exe="/opt/sglang/bin/python")
    child.argv = [
        "/opt/sglang/bin/python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "Qwen/Q",
        "--tp",
        "4",
    ]
    adoption, text = stage.draft()
    assert adoption.document["engine"] == {"name": "sglang"}
    assert adoption.document["model"] == "Qwen/Q"
    assert "wrapper" in lost(adoption)
    assert any("wrapper" in d for d in adoption.differs)
    assert stage.fleet(text).problems == ()


def test_a_wrapper_that_hides_everything_is_written_out() -> None:
    """Where no process is an engine's, the command is what there is, and that is said."""
    stage = Stage(PLAIN.replace("/usr/bin/serve", "/bin/bash /opt/start.sh"))
    adoption, text = stage.draft()
    assert adoption.document["engine"]["command"][:2] == ["/bin/bash", "/opt/start.sh"]
    assert any("wrapper" in r.sentence for r in adoption.remarks)
    assert stage.fleet(text).problems == ()


def test_a_flag_that_no_catalogue_knows_is_kept_in_a_command_that_is_written_out() -> None:
    """A fork's own flag does not get lost: the custom engine carries the command as it is."""
    stage = Stage(INCIDENT.replace("--mem-fraction-static 0.85", "--our-own-flag 3"))
    adoption, text = stage.draft()
    assert adoption.document["engine"]["name"] == "custom"
    assert "--our-own-flag" in adoption.document["engine"]["command"]
    assert any(r.path == "engine" and "our-own-flag" in r.sentence for r in adoption.remarks)
    assert stage.fleet(text).problems == ()


@pytest.mark.parametrize(
    "exec_start",
    [
        "/usr/bin/serve --name %i --port 30000",
        "/usr/bin/serve --port 30000 --note 'a: b # c'",
        '/usr/bin/serve --port 30000 --x "$HOME"',
        "/usr/bin/serve --port 30000 --percent 5%%",
        '/usr/bin/serve --port 30000 --json \'{"a": [1, "*"]}\'',
        "/usr/bin/serve --port 30000 --tag !!python/object --y &anchor *alias",
        "/usr/bin/serve \\\n   --port 30000 \\\n# a comment\n   --steps 1",
    ],
)
def test_hostile_text_becomes_a_spec_that_reads_back(exec_start: str) -> None:
    """S18: no text of a unit is syntax in the spec; what is drafted is read by the spec language as it was found."""
    stage = Stage(f"[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=0\nExecStart={exec_start}\n")
    adoption, text = stage.draft()
    fleet = stage.fleet(text)
    assert fleet.problems == ()
    (server,) = fleet.servers
    assert list(server.engine.options.command) == list(adoption.document["engine"]["command"])  # type: ignore[union-attr]


def test_several_commands_are_one_too_many() -> None:
    """Only one command can be a server."""
    two = PLAIN.replace("[Service]\n", "[Service]\nType=oneshot\nExecStart=/bin/true\n")
    assert "there are 2" in lost(Stage(two).draft()[0])


@pytest.mark.parametrize(
    "unit", ["qwen@0.service", "absent.service", "reconciler-tick.service", "x;y.service"]
)
def test_what_is_no_unit_to_take_over_is_refused(unit: str) -> None:
    """Templates, absent units and this tool's own are usage errors that say why."""
    stage = Stage(PLAIN)
    with pytest.raises(UsageError):
        drafted(Host(name="one"), unit, None, SimulatedPort(stage.host), engines())


def test_a_unit_that_is_ours_already_is_not_adopted_twice() -> None:
    """The owner is named instead."""
    stage = Stage(PLAIN)
    fleet = stage.fleet(stage.draft()[1])
    act(survey(fleet, stage.controller, allow=ADOPT), stage.controller, lambda _event: None)
    with pytest.raises(UsageError, match="made by this tool already"):
        stage.draft()

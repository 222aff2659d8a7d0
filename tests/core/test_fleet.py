"""All documents together: profiles, places of problems, clashes, and who is held back by what."""

from __future__ import annotations

import pytest
from stand_in_engines import ENGINES

from reconciler.core.errors import Problem
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.policy import Grant, Policy

HOST = "apiVersion: reconciler/v1\nkind: Host\nname: llm-two\nssh: {address: 192.0.2.74}\n"


def server(name: str, *, port: int = 30000, gpu: int = 0, more: str = "") -> str:
    return (
        f"apiVersion: reconciler/v1\nkind: Server\nname: {name}\nhost: llm-two\nengine: sglang\n"
        f"gpus: [{gpu}]\nlisten: {{port: {port}}}\n{more}"
    )


def load(files: dict[str, str], policy: Policy | None = None, root: str = "") -> Fleet:
    return load_fleet(
        {name: text.encode() for name, text in files.items()},
        engines=ENGINES,
        policy=policy,
        root=root,
    )


def messages(fleet: Fleet) -> list[str]:
    return [str(problem) for problem in fleet.problems]


def names(fleet: Fleet) -> list[str]:
    return [made.name for made in fleet.servers]


def test_a_fleet_without_problems_is_complete() -> None:
    """Every server comes out, sorted, and knows its place."""
    fleet = load({"b.yaml": server("b"), "a.yaml": HOST + "---\n" + server("a", port=30001, gpu=1)})
    assert fleet.problems == ()
    assert fleet.complete
    assert names(fleet) == ["a", "b"]
    assert fleet.host("llm-two").ssh is not None
    assert (fleet.places["a"].file, fleet.places["a"].line) == ("a.yaml", 6)


def test_nothing_at_all_is_a_problem_and_never_a_wish() -> None:
    """S13: an empty set of files does not mean that all servers should go."""
    for files in ({}, {"a.yaml": ""}, {"a.yaml": "# nothing\n"}):
        fleet = load(files, root="specs")
        assert messages(fleet) == [
            "specs: no specs found; nothing is planned, and nothing is removed"
        ]
        assert not fleet.complete


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n", "1:1: a document is a map that begins with apiVersion and kind"),
        ("just text\n", "1:1: a document is a map that begins with apiVersion and kind"),
        ("kind: Server\nname: a\n", "1:1: `apiVersion` is missing; write `apiVersion: reconciler/v1`"),
        ("apiVersion: v2\nkind: Host\nname: a\n", "1:13: `apiVersion`: must be reconciler/v1"),
        ("apiVersion: reconciler/v1\nname: a\n", "1:1: `kind` is missing; it is Server, Host or Profile"),
        ("apiVersion: reconciler/v1\nkind: Sever\nname: a\n", "2:7: `kind`: must be Server, Host or Profile; did you mean `Server`?"),
        ("apiVersion: reconciler/v1\nkind: Host\n", "1:1: `name` is missing"),
        ("apiVersion: reconciler/v1\nkind: Host\nname: 12\n", "3:7: `name`: expected text; put it in quotes"),
        (server("a", more="prot: 1\n") + "---\n" + HOST, "8:1: unknown key `prot`; did you mean `protect`?"),
        (server("a", more="timeouts:\n  drian: 1s\n") + "---\n" + HOST, "9:3: unknown key `drian`; did you mean `drain`?"),
        (server("a", more="timeouts:\n  settle: 90s\n") + "---\n" + HOST, "9:11: `timeouts.settle`: must be shorter than `release`"),
        (server("a", more="env:\n  A: no\n  B: off\n  C: 12:30\n  D: 5\n") + "---\n" + HOST, "12:6: `env.D`: expected text, found a number; put it in quotes"),
        (server("a", more="env:\n  LD_PRELOAD: x\n") + "---\n" + HOST, "9:3: `env.LD_PRELOAD`: may not be set: it decides what code a process loads"),
        (server("a", more="gate:\n  runs:\n    - name: x\n      concurrency: 1\n      requests: 8\n      max_tokens: 1\n      max_ttft_p99: 1s\n") + "---\n" + HOST, "14:21: `gate.runs[0].max_ttft_p99`: 8 requests cannot decide p99 with 95 % confidence; it takes 299"),
        (server("a", more="args: {no.such: true}\n") + "---\n" + HOST, "8:17: `args.no.such`: no such flag"),
        (server("a", more="model:\ntp_size: x\n") + "---\n" + HOST, "9:10: `tp_size`: expected a whole number, found text"),
        (server("a").replace("llm-two", "llm-tow") + "---\n" + HOST, "4:7: `host`: there is no host `llm-tow`; did you mean `llm-two`?"),
        (server("a").replace("{port: 30000}", "{}") + "---\n" + HOST, "7:9: `port` is missing in `listen`"),
        (server("a").replace("gpus: [0]\n", "gpus:\n") + "---\n" + HOST, "6:1: `gpus` is missing"),
        (HOST + "extends: x\n", "5:1: unknown key `extends`"),
        (HOST + "protect: dcgm.service\n", "5:10: `protect`: expected a list, found text"),
    ],
)  # fmt: skip
def test_each_problem_has_its_place(text: str, expected: str) -> None:
    """file:line:column points at what must be changed."""
    fleet = load({"f.yaml": text})
    assert messages(fleet) == [f"f.yaml:{expected}"]
    assert names(fleet) == []


def test_problems_of_all_documents_come_at_once() -> None:
    """One run shows everything, in the order of the files."""
    fleet = load(
        {
            "b.yaml": server("b", more="x: 1\n"),
            "a.yaml": HOST + "y: 1\n---\n" + server("a", more="z: 1\nw: [\n"),
        }
    )
    assert [(p.file, p.line) for p in fleet.problems] == [
        ("a.yaml", 5),
        ("a.yaml", 16),
        ("b.yaml", 8),
    ]


# -- who is held back


def test_a_wrong_file_holds_back_its_own_servers_only() -> None:
    """The others go on; those of the file stay as they are, also the ones that are right."""
    fleet = load(
        {
            "host.yaml": HOST,
            "bad.yaml": server("a", more="x: 1\n") + "---\n" + server("b", port=1, gpu=1),
            "ok.yaml": server("c", port=2, gpu=2),
        }
    )
    assert names(fleet) == ["c"]
    assert fleet.held == {"a", "b"}
    assert [p.server for p in fleet.problems] == ["a"]


@pytest.mark.parametrize(
    "broken", ["\tx: 1\n", "y: 'unclosed\n", "z: &a 1\n", "%YAML 1.1\n", "name: twice\n"]
)
def test_servers_of_an_unreadable_file_are_held_and_not_gone(broken: str) -> None:
    """S13: what cannot be read says nothing about what should go."""
    fleet = load(
        {"host.yaml": HOST, "bad.yaml": server("a") + broken, "ok.yaml": server("c", port=2, gpu=2)}
    )
    assert names(fleet) == ["c"]
    assert "a" in fleet.held
    assert not fleet.complete


def test_a_server_waits_for_its_host_and_its_profile() -> None:
    """What leans on something wrong is held, and the mistake is said once, where it is."""
    profile = "apiVersion: reconciler/v1\nkind: Profile\nname: p\nenv: {A: 1}\n"
    fleet = load(
        {
            "p.yaml": profile,
            "h.yaml": HOST,
            "s.yaml": server("a", more="extends: p\n"),
            "t.yaml": server("b", port=1, gpu=1),
        }
    )
    assert messages(fleet) == [
        "p.yaml:4:10: `env.A`: expected text, found a number; put it in quotes"
    ]
    assert (names(fleet), fleet.held) == (["b"], {"a"})
    fleet = load({"h.yaml": HOST + "x: 1\n", "s.yaml": server("a")})
    assert messages(fleet) == ["h.yaml:5:1: unknown key `x`"]
    assert fleet.held == {"a"}


def test_what_a_source_could_not_read_makes_the_fleet_incomplete() -> None:
    """A refused link may have been a server."""
    problem = Problem("specs/x.yaml", 0, 0, "is a link")
    fleet = load_fleet(
        {"a.yaml": (HOST + "---\n" + server("a")).encode()}, engines=ENGINES, unread=[problem]
    )
    assert fleet.problems == (problem,)
    assert names(fleet) == ["a"]
    assert not fleet.complete


# -- documents against each other


def test_two_documents_with_one_name_are_both_held() -> None:
    """Neither is the right one."""
    fleet = load({"h.yaml": HOST, "a.yaml": server("a"), "b.yaml": server("a", port=1, gpu=1)})
    assert messages(fleet) == ["b.yaml:3:7: another Server has the name `a`: a.yaml:1"]
    assert (names(fleet), fleet.held) == ([], {"a"})
    fleet = load({"h.yaml": HOST, "i.yaml": HOST, "a.yaml": server("a")})
    assert messages(fleet) == ["i.yaml:3:7: another Host has the name `llm-two`: h.yaml:1"]
    assert fleet.held == {"a"}


def test_two_servers_may_not_claim_one_gpu_port_or_unit() -> None:
    """S1 begins in the spec; the message names both places, and both wait."""
    fleet = load(
        {
            "h.yaml": HOST,
            "a.yaml": server("a"),
            "b.yaml": server("b", more="unit: a.service\n"),
            "c.yaml": server("c", port=1, gpu=1),
        }
    )
    assert messages(fleet) == [
        "b.yaml:6:8: `gpus[0]`: GPU 0 of host `llm-two` is claimed by server `a` too (a.yaml:1)",
        "b.yaml:7:16: `listen.port`: port 30000 of host `llm-two` is claimed by server `a` too (a.yaml:1)",
        "b.yaml:8:7: `unit`: unit `a.service` of host `llm-two` is claimed by server `a` too (a.yaml:1)",
    ]
    assert (names(fleet), fleet.held) == (["c"], {"a", "b"})


def test_one_gpu_under_two_spellings_is_one_gpu() -> None:
    """A PCI bus id is the same with four or eight digits of domain, in any case."""
    one = server("a").replace("[0]", '["0000:3B:00.0"]')
    two = server("b", port=1).replace("[0]", "[00000000:3b:00.0]")
    assert len(load({"h.yaml": HOST, "a.yaml": one, "b.yaml": two}).problems) == 1


def test_a_stopped_server_leaves_its_gpus_and_port_to_another() -> None:
    """Two models may take turns on one GPU; the unit stays its own."""
    stopped = server("b", more="state: stopped\n")
    assert load({"h.yaml": HOST, "a.yaml": server("a"), "b.yaml": stopped}).problems == ()
    same_unit = server("b", more="state: stopped\nunit: a.service\n")
    assert len(load({"h.yaml": HOST, "a.yaml": server("a"), "b.yaml": same_unit}).problems) == 1


def test_the_same_on_two_hosts_is_no_clash() -> None:
    """Claims are those of one host."""
    other = HOST.replace("llm-two", "llm-one")
    fleet = load(
        {
            "h.yaml": HOST + "---\n" + other,
            "a.yaml": server("a"),
            "b.yaml": server("b").replace("llm-two", "llm-one"),
        }
    )
    assert fleet.problems == ()


def test_a_clash_with_a_held_server_does_not_hold_the_other() -> None:
    """A file that is wrong anyway cannot hold back a server of another file."""
    fleet = load(
        {"h.yaml": HOST, "a.yaml": server("a"), "b.yaml": server("b", more="---\nkind: x\n")}
    )
    assert (names(fleet), fleet.held) == (["a"], {"b"})


# -- profiles


def profile(name: str, body: str) -> str:
    return f"apiVersion: reconciler/v1\nkind: Profile\nname: {name}\n{body}"


def test_maps_merge_lists_and_scalars_replace_null_removes() -> None:
    """The merged result is what is applied, through a chain of profiles."""
    fleet = load(
        {
            "h.yaml": HOST,
            "p.yaml": profile(
                "one", "args: {a: 1, b: [1, 2], c: {x: 1, y: 2}}\nenv: {A: x, B: y}\nmodel: a/b\n"
            )
            + "---\n"
            + profile("two", "extends: one\nargs: {a: 2, c: {y: 3}}\nengine: {version: 0.5.23}\n"),
            "s.yaml": server(
                "s", more="extends: two\nargs: {b: [3], d: true}\nenv: {A: }\nmodel: ~\n"
            ),
        }
    )
    assert messages(fleet) == []
    (made,) = fleet.servers
    assert made.args == {"a": 2, "b": (3,), "c": {"x": 1, "y": 3}, "d": True}
    assert (made.env, made.model) == ({"B": "y"}, None)
    assert (made.engine.name, made.engine.version) == ("sglang", "0.5.23")


def test_a_whole_server_but_its_name_may_come_from_a_profile() -> None:
    """What a profile gives is not missing."""
    text = server("x").replace("kind: Server\nname: x\n", "kind: Profile\nname: p\n")
    fleet = load(
        {
            "a.yaml": HOST
            + "---\n"
            + text
            + "---\napiVersion: reconciler/v1\nkind: Server\nname: s\nextends: p\n"
        }
    )
    assert messages(fleet) == []
    assert [made.unit for made in fleet.servers] == ["s.service"]


def test_a_problem_of_an_inherited_value_is_said_in_the_profile() -> None:
    """A value that only does not go together with the server's own points to where it stands."""
    fleet = load(
        {
            "h.yaml": HOST,
            "p.yaml": profile("p", "timeouts:\n  settle: 30s\n"),
            "s.yaml": server("s", more="extends: p\ntimeouts: {release: 10s}\n"),
        }
    )
    assert messages(fleet) == ["p.yaml:5:11: `timeouts.settle`: must be shorter than `release`"]
    assert [p.server for p in fleet.problems] == ["s"]
    assert fleet.held == {"s"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (profile("a", "extends: b\n") + "---\n" + profile("b", "extends: a\n"), "f.yaml:9:10: `extends`: the profiles extend each other in a circle: a → b → a"),
        (profile("a", "extends: a\n"), "f.yaml:4:10: `extends`: the profiles extend each other in a circle: a → a"),
        (profile("base", "") + "---\n" + profile("a", "extends: bsae\n"), "f.yaml:8:10: `extends`: there is no profile `bsae`; did you mean `base`?"),
        (profile("a", "extends: [b]\n"), "f.yaml:4:10: `extends`: expected the name of a profile"),
        (profile("a", "extends: 3\n"), "f.yaml:4:10: `extends`: expected the name of a profile"),
        ("---\n".join(profile(f"p{i}", f"extends: p{i + 1}\n" if i < 9 else "") for i in range(10)), "f.yaml:39:10: `extends`: more than 8 profiles in a row"),
    ],
)  # fmt: skip
def test_profiles_extend_what_there_is_and_end(text: str, expected: str) -> None:
    """Circles, unknown names and towers are refused at their `extends`."""
    fleet = load(
        {
            "f.yaml": text,
            "h.yaml": HOST,
            "s.yaml": server("s", more="extends: a\n"),
            "t.yaml": server("t", port=1, gpu=1),
        }
    )
    assert expected in messages(fleet)
    assert names(fleet) == ["t"]


# -- policy


TEAM = Policy(
    (
        Grant("team-a/**", hosts=("llm-*",), gpus=("0", "1"), unit_prefixes=("a-",), ports=((30000, 30009),), model_sources=("Qwen/*",)),
        Grant("shared/*.yaml"),
    )
)  # fmt: skip


def test_a_path_claims_only_what_it_was_granted() -> None:
    """T28: default deny, for hosts, GPUs, units, ports and model sources alike."""
    good = server("a-x", more="model: Qwen/Qwen3-8B\n")
    files = {"specs/shared/h.yaml": HOST, "specs/team-a/deep/er/s.yaml": good}
    assert messages(load(files, TEAM, root="specs")) == []
    bad = server("b-x", port=1, gpu=2, more="model: evil/model\n")
    fleet = load({"specs/shared/h.yaml": HOST, "specs/team-a/s.yaml": bad}, TEAM, root="specs")
    gives = "the operator's settings do not give `team-a/**`"
    assert messages(fleet) == [
        f"specs/team-a/s.yaml:3:7: `unit`: {gives} a unit of this name",
        f"specs/team-a/s.yaml:6:8: `gpus[0]`: {gives} this GPU",
        f"specs/team-a/s.yaml:7:16: `listen.port`: {gives} this port",
        f"specs/team-a/s.yaml:8:8: `model`: {gives} this source of models",
    ]
    assert names(fleet) == []


def test_a_path_that_no_grant_names_claims_nothing() -> None:
    """Also a path that only looks like a granted one."""
    for file in ("team-b/s.yaml", "shared/deep/s.yaml", "xteam-a/s.yaml", "team-a.yaml"):
        fleet = load({"shared/h.yaml": HOST, file: server("a-x")}, TEAM)
        assert messages(fleet) == [f"{file}:1:1: the operator's settings grant `{file}` nothing"]


def test_a_path_describes_only_hosts_that_it_was_granted() -> None:
    """Whoever describes a host decides where commands go."""
    fleet = load({"team-a/h.yaml": HOST.replace("llm-two", "db-one"), "shared/h.yaml": HOST})
    assert fleet.problems == ()
    fleet = load({"team-a/h.yaml": HOST.replace("llm-two", "db-one"), "shared/h.yaml": HOST}, TEAM)
    assert messages(fleet) == [
        "team-a/h.yaml:3:7: `name`: the operator's settings do not let `team-a/h.yaml` claim it"
    ]


@pytest.mark.parametrize(
    "flag",
    ["trust-remote-code: true", "trust_remote_code: true", "trust: true", "trust-remote-code: 1"],
)
def test_code_that_comes_with_a_model_needs_the_operator(flag: str) -> None:
    """T11: the spec alone cannot decide that a model's code runs, under no spelling."""
    files = {"h.yaml": HOST, "s.yaml": server("s", more=f"args: {{{flag}}}\n")}
    (problem,) = load(files, Policy()).problems
    assert "runs code that comes with the model" in problem.message
    assert load(files, Policy(trust_remote_code=True)).problems == ()


def test_loading_is_linear() -> None:
    """A fleet twice as large holds no quadratic surprise: clashes and duplicates are found by look-up."""
    files = {
        f"{i}.yaml": server(f"s{i}", port=i + 1, gpu=0).replace("llm-two", f"h{i}")
        for i in range(300)
    }
    hosts = "---\n".join(HOST.replace("llm-two", f"h{i}") for i in range(300))
    fleet = load({**files, "h.yaml": hosts})
    assert len(fleet.servers) == 300


def test_what_looks_like_a_variable_is_served_as_it_stands_and_said() -> None:
    """S18: no environment of the controller ever fills a spec in; whoever writes `${X}` is told so, at its place."""
    text = server("a", more='env: {NCCL_SOCKET_IFNAME: "${HOME}"}\n')
    fleet = load({"hosts.yaml": HOST, "fleet.yaml": text})
    assert fleet.servers[0].env["NCCL_SOCKET_IFNAME"] == "${HOME}"
    (warning,) = [w for w in fleet.warnings if "${HOME}" in w.message]
    assert warning.line > 0
    assert "nothing is filled in in specs" in warning.message


def test_profiles_extend_profiles_and_environments_are_folders() -> None:
    """The nearest word counts, key by key, whichever folder it stands in; two environments share a base and not a name."""
    base = (
        "apiVersion: reconciler/v1\nkind: Profile\nname: base\nenv: {A: base, B: base, C: base}\n"
    )
    prod = "apiVersion: reconciler/v1\nkind: Profile\nname: prod\nextends: base\nenv: {B: prod, C: prod}\n"
    one = server("a", more="extends: prod\nenv: {C: own}\n")
    two = server("b", port=30001, gpu=1, more="extends: base\n")
    fleet = load(
        {
            "base.yaml": base,
            "prod/profile.yaml": prod,
            "prod/a.yaml": one,
            "staging/b.yaml": two,
            "hosts.yaml": HOST,
        }
    )
    assert fleet.problems == ()
    assert dict(fleet.servers[0].env) == {"A": "base", "B": "prod", "C": "own"}
    assert dict(fleet.servers[1].env) == {"A": "base", "B": "base", "C": "base"}


@pytest.mark.parametrize(
    "more",
    [
        "password=hunter2: 5\n",
        '"--api-key hunter2": 1\n',
        '"token=hunter2": 1\n"token=hunter2": 1\n',
        'env: {"MY_SECRET=hunter2": x}\n',
        "timeouts: {password=hunter2: {a: 1}}\n",
    ],
)
def test_a_secret_where_a_key_belongs_is_not_repeated(more: str) -> None:
    """S17: a problem says which key is wrong, and not what somebody meant to keep."""
    fleet = load({"hosts.yaml": HOST, "a.yaml": server("a", more=more)})
    said = "\n".join(messages(fleet))
    assert "***" in said
    assert "hunter2" not in said

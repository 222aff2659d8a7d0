"""One document at a time: which values a field takes, and the sentence for every one that it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_engines import ENGINES

from reconciler.core.findings import Finding, partial_problems, read_host, read_server
from reconciler.core.grammar import unseen
from reconciler.core.significance import requests_needed
from reconciler.core.spec import Limit, Server

MINIMAL: Mapping[str, Any] = {
    "name": "qwen", "host": "llm-two", "gpus": (0,), "engine": {"name": "sglang"}, "listen": {"port": 30000},
}  # fmt: skip
RUN: Mapping[str, Any] = {"name": "single", "concurrency": 1, "requests": 64, "max_tokens": 256}


def with_field(path: str, value: object) -> dict[str, Any]:
    """Give the minimal server with one field set, by dotted path."""
    *outer, last = path.split(".")
    raw: dict[str, Any] = {key: dict(v) if isinstance(v, dict) else v for key, v in MINIMAL.items()}
    inner = raw
    for key in outer:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return raw


def found(raw: Mapping[str, Any]) -> list[tuple[Any, str]]:
    server, findings = read_server(raw, ENGINES)
    assert (server is None) == bool(findings)
    return [(finding.loc, finding.message) for finding in findings]


def server(raw: Mapping[str, Any]) -> Server:
    made, findings = read_server(raw, ENGINES)
    assert findings == []
    assert made is not None
    return made


def message(path: str, value: object) -> str:
    """Give the one message for a wrong value."""
    ((_, text),) = found(with_field(path, value))
    return text


def test_a_minimal_server_has_the_documented_defaults() -> None:
    """What is left out means what the design says."""
    made = server(MINIMAL)
    assert made.unit == "qwen.service"
    assert (made.state, made.on_failure, made.drift, made.suspend) == (
        "running",
        "rollback",
        "warn",
        False,
    )
    assert made.timeouts.model_dump() == {
        "drain": 60.0,
        "stop": 120.0,
        "release": 60.0,
        "settle": 2.0,
        "ready": 600.0,
        "gate": 300.0,
    }
    assert (made.listen.address, made.gate, made.tp_size) == ("127.0.0.1", None, 1)


def test_the_design_s_own_server_is_read_as_it_says() -> None:
    """Units become seconds and shares, limits become limits."""
    raw = {
        **MINIMAL,
        "gpus": (0, 1, 2, 3), "tp_size": 4, "timeouts": {"drain": "60s", "ready": "10m"},
        "gate": {
            "runs": (
                {**RUN, "min_decode_tps": 200, "max_ttft_p95": "600ms"},
                {"name": "batch", "concurrency": 64, "requests": 256, "max_tokens": 256, "min_output_tps": 1500, "min_accept_length": 2.5},
            ),
            "max_error_rate": "0%", "baseline": {"max_loss": "5%"}, "quality": "default", "on_inconclusive": "ask",
        },
    }  # fmt: skip
    gate = server(raw).gate
    assert gate is not None
    assert gate.baseline is not None
    assert gate.baseline.max_loss == 0.05
    assert gate.runs[0].limits == (
        Limit("max", "ttft", 95.0, 0.6, "max_ttft_p95"),
        Limit("min", "decode_tps", None, 200.0, "min_decode_tps"),
    )


def test_engine_may_be_written_as_its_name_alone() -> None:
    """`engine: sglang` is short for the name."""
    assert server({**MINIMAL, "engine": "sglang"}) == server(MINIMAL)


def test_an_engine_s_own_fields_are_read_by_its_own_model() -> None:
    """The options of an engine stand beside its name and keep their types."""
    made = server({**MINIMAL, "engine": {"name": "custom", "command": ("/opt/x", "$HOME;'\"\\")}})
    assert made.engine.options is not None
    assert made.engine.options.model_dump()["command"] == ("/opt/x", "$HOME;'\"\\")


@pytest.mark.parametrize(
    ("path", "value", "loc", "text"),
    [
        ("prot", 1, ("prot",), "unknown key `prot`; did you mean `protect`?"),
        ("listne", 1, ("listne",), "unknown key `listne`; did you mean `listen`?"),
        ("timeouts.drian", "1s", ("timeouts", "drian"), "unknown key `drian`; did you mean `drain`?"),
        ("engine.comand", "x", ("engine", "comand"), "unknown key `comand`; did you mean `command`?"),
        ("engine.name", "sglnag", ("engine", "name"), "is no engine that this tool knows; did you mean `sglang`?"),
        ("engine", 3, ("engine",), "expected a map, found a number"),
        ("state", "runing", ("state",), "must be running or stopped; did you mean `running`?"),
        ("state", False, ("state",), "must be running or stopped"),
        ("suspend", "no", ("suspend",), "expected true or false, found text"),
        ("tp_size", "4", ("tp_size",), "expected a whole number, found text"),
        ("tp_size", 4.0, ("tp_size",), "expected a whole number, found a number"),
        ("tp_size", True, ("tp_size",), "expected a whole number, found true or false"),
        ("tp_size", 0, ("tp_size",), "must be at least 1"),
        ("listen.port", 65536, ("listen", "port"), "must be at most 65535"),
        ("listen.port", "30000", ("listen", "port"), "expected a whole number, found text"),
        ("listen.address", "localhost", ("listen", "address"), "must be an IP address, such as 127.0.0.1, 0.0.0.0 or ::"),
        ("listen.api_key", "sk-secret", ("listen", "api_key"), "expected a map, found text"),
        ("listen.api_key", {"file": "key"}, ("listen", "api_key", "file"), "must be an absolute path of letters, digits and `._+@=,:~-`, without `..`"),
        ("model_revision", 1234567, ("model_revision",), "expected text, found a number; put it in quotes"),
        ("engine.version", 0.1, ("engine", "version"), "expected text, found a number; put it in quotes"),
        ("gpus", 0, ("gpus",), "expected a list, found a number"),
        ("gpus", (0, "1"), ("gpus", 1), "must be an index such as 0, a UUID such as GPU-… or a PCI bus id such as 0000:3b:00.0"),
        ("gpus", (True,), ("gpus", 0), "must be an index such as 0, a UUID such as GPU-… or a PCI bus id such as 0000:3b:00.0"),
        ("gpus", (0, 1, 0), ("gpus", 2), "this GPU is listed twice"),
        ("gpus", ("0000:3B:00.0", "00000000:3b:00.0"), ("gpus", 1), "this GPU is listed twice"),
        ("tp_size", 2, ("gpus",), "tp_size × pp_size needs 2 GPUs; 1 are listed"),
        ("timeouts.drain", 60, ("timeouts", "drain"), "write a duration with its unit, such as 90s, 10m, 1h30m or 250ms"),
        ("timeouts.drain", "60", ("timeouts", "drain"), "write a duration with its unit, such as 90s, 10m, 1h30m or 250ms"),
        ("timeouts.stop", "2d", ("timeouts", "stop"), "must be from 1s to 1d"),
        ("timeouts.settle", "60s", ("timeouts", "settle"), "must be shorter than `release`"),
        ("env.NCCL_DEBUG", 1, ("env", "NCCL_DEBUG"), "expected text, found a number; put it in quotes"),
        ("env.HF_TOKEN", "x", ("env", "HF_TOKEN"), "looks like a secret; write it under `secrets`, as a file on the host"),
        ("env.OPENAI_KEY", "x", ("env", "OPENAI_KEY"), "looks like a secret; write it under `secrets`, as a file on the host"),
        ("env.PGPASSWORD", "x", ("env", "PGPASSWORD"), "looks like a secret; write it under `secrets`, as a file on the host"),
        ("env.DB_PASS", "x", ("env", "DB_PASS"), "looks like a secret; write it under `secrets`, as a file on the host"),
        ("env.GH_PAT", "x", ("env", "GH_PAT"), "looks like a secret; write it under `secrets`, as a file on the host"),
        ("args.api-key", "x", ("args", "api-key"), "would show a secret to everyone on the host; write `listen.api_key` or `secrets`"),
        ("args.--context-length", 1, ("args", "--context-length", "[key]"), "must be the engine's flag without the dashes in front; it begins with `-`"),
        ("secrets.HF_TOKEN", "hf_x", ("secrets", "HF_TOKEN"), "expected a map, found text"),
        ("runtime", {"python": "/a", "binary": "/b"}, ("runtime", "binary"), "`python` is given too; a server is started in one way"),
        ("runtime", {"container": "podman"}, ("runtime", "container"), "needs an `image`"),
        ("runtime.user", "root\n", ("runtime", "user"), "must be a Unix user name; character 5 is a newline"),
    ],
)  # fmt: skip
def test_a_wrong_value_gets_one_sentence_at_its_field(path: str, value: object, loc: tuple[object, ...], text: str) -> None:  # fmt: skip
    """The message says what would be right, and the path where."""
    assert found(with_field(path, value)) == [(loc, text)]


def test_all_problems_are_said_at_once() -> None:
    """Problems in different parts of a document do not hide each other."""
    raw = {
        **MINIMAL,
        "name": "Q",
        "listen": {"prot": 1},
        "env": {"LD_PRELOAD": "x", "A": 1},
        "timeouts": {"drain": 5},
    }
    assert [loc for loc, _ in found(raw)] == [
        ("name",), ("listen", "port"), ("listen", "prot"), ("env", "LD_PRELOAD", "[key]"), ("env", "A"), ("timeouts", "drain"),
    ]  # fmt: skip


NAMES = {
    "name": "qwen", "host": "llm-two", "unit": "qwen.service", "model": "Qwen/Qwen3-8B", "model_revision": "3f1c9a5",
    "served_model_name": "qwen", "engine.name": "sglang", "engine.version": "0.5.23", "runtime.user": "sglang",
    "runtime.python": "/opt/sglang/bin/python", "runtime.working_directory": "/srv", "listen.address": "127.0.0.1",
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(NAMES))
@pytest.mark.parametrize(
    "bad",
    [
        "\n",
        "\0",
        "\r",
        "\t",
        "\x1b",
        "\u202e",
        "\u200b",
        "%",
        "$",
        '"',
        "'",
        ";",
        "\\",
        " ",
        "а",
        "🙂",
    ],
)
def test_names_take_no_character_that_means_something_elsewhere(field: str, bad: str) -> None:
    """S18: a name holds no quoting, specifier, control or look-alike character, wherever it stands."""
    good = NAMES[field]
    middle = len(good) // 2
    for text in (good[:middle] + bad + good[middle:], good + bad, bad + good):
        assert found(with_field(field, text)), repr(text)


@pytest.mark.parametrize("field", sorted(set(NAMES) - {"listen.address"}))
def test_names_do_not_begin_with_a_dash(field: str) -> None:
    """No name can be taken for an option."""
    assert found(with_field(field, f"-{NAMES[field]}"))


def test_a_look_alike_letter_is_named() -> None:
    """The message shows what the eye cannot see."""
    assert message("model", "Qwеn/Qwen3-8B") == (
        "must be a hub id such as Qwen/Qwen3-8B, or an absolute path; "
        "character 3 is U+0435 (CYRILLIC SMALL LETTER IE)"
    )


@pytest.mark.parametrize("field", ["env.A", "args.x", "speculative.draft_model", "model"])
@pytest.mark.parametrize("text", ["/a%h$HOME", "/'\"", "/a;b", "/a\\b", "/é漢", "/--x", "/ a "])
def test_values_may_hold_what_engines_need(field: str, text: str) -> None:
    """Quotes, `%`, `$`, `;` and backslashes are kept as they are in values."""
    raw = with_field(field, text)
    dumped = server(raw).model_dump()
    for key in field.split("."):
        dumped = dumped[key]
    assert dumped == text


@pytest.mark.parametrize(
    "field", ["env.A", "args.x", "speculative.draft_model", "model", "served_model_name"]
)
@pytest.mark.parametrize(
    "bad", ["\n", "\0", "\r", "\t", "\x7f", "\x85", "\u202e", "\u2066", "\ufeff", "\u2028"]
)
def test_no_value_holds_what_cannot_be_seen(field: str, bad: str) -> None:
    """T08: CR, LF, NUL, control and bidi characters are refused in every string."""
    assert found(with_field(field, f"/a{bad}b"))


def test_invisible_characters_are_found_inside_lists_and_maps_and_engine_fields() -> None:
    """Also deep inside an engine's values, and at their place."""
    raw = {
        **MINIMAL,
        "args": {"x": ("a", {"b": "c\n"})},
        "engine": {"name": "custom", "command": ("/a", "b\0")},
    }
    assert found(raw) == [
        (("engine", "command", 1), "holds NUL, which no value may"),
        (("args", "x", 1, "b"), "holds a newline, which no value may"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD", "LD_LIBRARY_PATH", "ld_preload", "LD_AUDIT", "GLIBC_TUNABLES", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP",
        "PYTHONINSPECT", "PYTHONUSERBASE", "PATH", "BASH_ENV", "ENV", "IFS", "NODE_OPTIONS", "PERL5LIB", "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_INJECTION64_PATH",
        "RECONCILER_SERVER", "SPT_NOENV", "INVOCATION_ID", "NOTIFY_SOCKET", "LISTEN_FDS", "MALLOC_CHECK_", "SYSTEMD_LOG_LEVEL",
        "CREDENTIALS_DIRECTORY", "A=B", "A B", "1A", "", "Α", "A\n", "-A", "A.B",
    ],
)  # fmt: skip
@pytest.mark.parametrize("section", ["env", "secrets"])
def test_no_variable_loads_code_or_chooses_gpus(section: str, name: str) -> None:
    """T10: what the loader, an interpreter, a shell, CUDA, systemd or this tool reads cannot be set."""
    value = "x" if section == "env" else {"file": "/x"}
    assert [loc for loc, _ in found({**MINIMAL, section: {name: value}})] == [
        (section, name, "[key]")
    ]


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_SOCKET_IFNAME",
        "HF_HOME",
        "PYTHONUNBUFFERED",
        "VLLM_USE_V1",
        "SGLANG_ENABLE_SPEC_V2",
        "TOKENIZERS_PARALLELISM",
    ],
)
def test_ordinary_variables_are_taken(name: str) -> None:
    """What engines are tuned by is allowed, and may be empty."""
    assert server({**MINIMAL, "env": {name: ""}}).env == {name: ""}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "the number is too large"), (float("inf"), "the number is too large"), (2**70, "the number is too large"),
        (None, "must be text, a number, true, false, a list or a map"),
    ],
)  # fmt: skip
def test_numbers_without_a_value_are_refused(value: object, text: str) -> None:
    """NaN and infinity cannot come in by any door (pydantic's strict mode alone takes them)."""
    assert message("args.x", value) == text


@pytest.mark.parametrize(
    "unit",
    [
        "x",
        "x.service\n",
        "../x.service",
        "a/b.service",
        "x.socket",
        "reconciler-tick.service",
        "systemd-logind.service",
        "@x.service",
        "a@.service",
        ".service",
    ],
)
def test_units_are_services_that_are_not_ours_or_systemd_s(unit: str) -> None:
    """A spec cannot name a path, another kind of unit, or a unit of the machinery."""
    assert found(with_field("unit", unit))


@pytest.mark.parametrize(
    "unit", ["sglang-qwen.service", "Serve_1.service", "vllm@qwen.service", "a:b.service"]
)
def test_ordinary_units_are_taken(unit: str) -> None:
    """Also an instance of a template."""
    assert server(with_field("unit", unit)).unit == unit


@pytest.mark.parametrize(
    "model",
    ["/a/../b", "/a//b", "/a/", "a/b/c", "../x", "a/..", "~/x", "http://x/y", "", "a" * 300],
)
def test_models_are_hub_ids_or_clean_paths(model: str) -> None:
    """A model comes from a hub or from one absolute place."""
    assert found(with_field("model", model))


@pytest.mark.parametrize(
    "gpu", [0, 7, "GPU-8c2b5a7e-1d2f-4c3b-9a8d-0123456789ab", "0000:3b:00.0", "00000000:3B:00.0"]
)
def test_gpus_are_named_in_three_ways(gpu: int | str) -> None:
    """By index, UUID or PCI bus id, and kept as written."""
    assert server({**MINIMAL, "gpus": (gpu,)}).gpus == (gpu,)


def test_a_server_without_gpus_says_so() -> None:
    """`gpus: []` is a server on the processor; leaving it out is a mistake."""
    assert server({**MINIMAL, "gpus": ()}).gpus == ()
    raw = {key: value for key, value in MINIMAL.items() if key != "gpus"}
    assert found(raw) == [(("gpus",), "`gpus` is missing")]


def test_a_variable_stands_in_one_place() -> None:
    """The same name under `env` and `secrets` would hide one of them."""
    raw = {**MINIMAL, "env": {"A": "1"}, "secrets": {"A": {"file": "/a"}}}
    assert found(raw) == [(("env", "A"), "is under `secrets` too")]


def test_the_engine_s_own_rules_get_their_place() -> None:
    """A dotted path finds a key that holds dots itself."""
    assert found({**MINIMAL, "args": {"no.such": True}}) == [(("args", "no.such"), "no such flag")]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("min_decode_tps", 0, "must be a number above 0"),
        ("min_decode_tps", "200", "must be a number above 0"),
        ("min_decode_tps", True, "must be a number above 0"),
        ("max_ttft", 1, "write a duration with its unit, such as 600ms"),
        ("max_error_rate", 0.1, "write a percentage from 0% to 100%, such as 5%"),
        ("min_output_tps_p95", 1, "`output_tps` is one number for a run and has no percentiles"),
        ("max_ttft_p0", "1s", "a percentile is more than 0 and less than 100"),
        ("max_ttft_p95", "0.0001s", "a duration is a whole number of milliseconds"),
        ("max_tfft", "1s", "a limit is min_ or max_ and one of output_tps, decode_tps, ttft, e2e, event_gap, error_rate, accept_length, accept_rate, and perhaps a percentile such as _p95; did you mean `max_ttft`?"),
    ],
)  # fmt: skip
def test_a_wrong_limit_gets_one_sentence_at_its_key(key: str, value: object, text: str) -> None:
    """Limits are typed by the result that they limit."""
    raw = {**MINIMAL, "gate": {"runs": ({**RUN, key: value},)}}
    assert found(raw) == [(("gate", "runs", 0, key), text)]


@pytest.mark.parametrize(
    ("bound", "percentile", "needed"),
    [("max", 82.9, 16), ("max", 95, 59), ("max", 95.4, 64), ("max", 99, 299), ("max", 50, 5), ("min", 5, 59), ("min", 1, 299)],
)  # fmt: skip
def test_a_percentile_needs_enough_requests(bound: Any, percentile: float, needed: int) -> None:
    """With no request over the limit, n requests decide p at 95 % when p^n is at most 5 %."""
    assert requests_needed(bound, percentile) == needed


def test_a_percentile_that_its_requests_cannot_decide_is_refused() -> None:
    """p99 takes 299 requests; 298 cannot decide it, whatever they measure."""
    run = {**RUN, "requests": 298, "max_ttft_p99": "1s"}
    assert found({**MINIMAL, "gate": {"runs": (run,)}}) == [
        (
            ("gate", "runs", 0, "max_ttft_p99"),
            "298 requests cannot decide p99 with 95 % confidence; it takes 299",
        )
    ]
    assert server({**MINIMAL, "gate": {"runs": ({**run, "requests": 299},)}})


@pytest.mark.parametrize(
    ("gate", "loc", "text"),
    [
        ({"runs": ()}, ("gate", "runs"), "needs at least one run, and at most 20"),
        ({}, ("gate", "runs"), "`runs` is missing"),
        ({"runs": (RUN, RUN)}, ("gate", "runs", 1, "name"), "another run has this name"),
        ({"runs": ({**RUN, "concurrency": 65},)}, ("gate", "runs", 0, "requests"), "must be at least `concurrency` (65)"),
        ({"runs": ({**RUN, "min_ttft": "2s", "max_ttft": "1s"},)}, ("gate", "runs", 0, "max_ttft"), "is less than the `min_` of the same result"),
        ({"runs": (RUN,), "workload": "gredy"}, ("gate", "workload"), "must be realistic or greedy; did you mean `greedy`?"),
    ],
)  # fmt: skip
def test_a_gate_must_make_sense(gate: object, loc: tuple[object, ...], text: str) -> None:
    """Runs have names of their own, enough requests, and limits that something can meet."""
    assert found({**MINIMAL, "gate": gate}) == [(loc, text)]


CANARY = "c4n4ry-5ecret-value"


@pytest.mark.parametrize(
    "path",
    ["listen.api_key", "secrets.HF_TOKEN", "env.A_TOKEN", "args.api-key", "listen.api_key.file", "name", "model", "engine.name",
     "gpus", "timeouts.drain", "state", "runtime", "speculative", "engine.command", "suspend", "tp_size", "gate"],
)  # fmt: skip
def test_no_message_shows_the_value(path: str) -> None:
    """S17: a key that was written where a file belongs does not end up in the log of a build."""
    for value in (CANARY, (CANARY,), {"x": CANARY}, f"{CANARY}\n", {"file": f"{CANARY} "}):
        for _, text in (
            found(with_field(path, value)) if path != "name" or isinstance(value, str) else ()
        ):
            assert CANARY not in text


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_no_text_gets_through_that_cannot_be_seen(text: str) -> None:
    """S18: whatever a person writes, a string that was taken holds no invisible character."""
    for field in (
        "model",
        "env.A",
        "args.x",
        "served_model_name",
        "unit",
        "runtime.python",
        "name",
    ):
        made, _ = read_server(with_field(field, text), ENGINES)
        if made is not None:
            assert unseen(text) is None


def test_a_profile_is_judged_by_what_it_says() -> None:
    """Nothing is missing from a part, but what is there must be right."""
    assert (
        partial_problems({"timeouts": {"drain": "1s"}, "gate": {"on_inconclusive": "ask"}}, ENGINES)
        == []
    )
    assert partial_problems({"timeouts": {"drian": "1s"}}, ENGINES) == [
        Finding(
            ("timeouts", "drian"), "extra_forbidden", "unknown key `drian`; did you mean `drain`?"
        )
    ]


def test_a_host_is_read() -> None:
    """The design's own host, and one that is this machine."""
    host, findings = read_host(
        {
            "name": "llm-two",
            "ssh": {"address": "192.0.2.74", "user": "deploy"},
            "proxmox": {"vmid": 129, "ssh": {"address": "192.0.2.6", "user": "root"}},
            "gpu": "nvidia",
            "protect": ("dcgm-exporter.service",),
        }
    )
    assert findings == []
    assert host is not None
    assert host.proxmox is not None
    assert (host.proxmox.vmid, host.protect) == (129, ("dcgm-exporter.service",))
    assert read_host({"name": "here"})[1] == []


@pytest.mark.parametrize(
    "address", ["-oProxyCommand=x", "a b", "a;b", "$(x)", "", "a\n", "hоst", "a/b", "user@host"]
)
def test_an_address_is_no_option(address: str) -> None:
    """T01: nothing that ssh could take for an option or a shell for a command."""
    assert read_host({"name": "h", "ssh": {"address": address}})[1]


def test_a_password_in_a_url_is_refused() -> None:
    """S17: what stands in `env` is printed in plans and units, and readable by everybody on the host."""
    said = found(with_field("env", {"HTTPS_PROXY": "http://user:hunter2@proxy:3128"}))
    assert [text for _, text in said if "password in a URL" in text]
    assert "hunter2" not in str(said)
    assert found(with_field("env", {"HTTPS_PROXY": "http://proxy:3128"})) == []

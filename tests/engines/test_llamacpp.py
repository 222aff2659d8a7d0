"""llama.cpp in both forms: started, refused, read back, asked."""

from __future__ import annotations

import json

import pytest
from engine_servers import accepted, validated
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.spec import Server
from reconciler.engines import llamacpp
from reconciler.engines.base import NotYet, Ready
from reconciler.engines.llamacpp_speculative import ALIASES

BINARY = {"binary": "/opt/llama/llama-server"}
PYTHON = {"python": "/opt/llama/bin/python"}


def document(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "name": "smol",
        "host": "lab",
        "unit": "llama-smol.service",
        "gpus": [0],
        "engine": "llamacpp",
        "runtime": BINARY,
        "model": "/srv/smol.gguf",
        "listen": {"address": "127.0.0.1", "port": 8080},
    }
    return {**plain, **changes}


def server(**changes: object) -> Server:
    return accepted(document(**changes), llamacpp)


def refusals(**changes: object) -> dict[str, str]:
    made = validated(document(**changes), llamacpp)
    return dict(llamacpp.problems(made))


def test_llama_server_is_started_by_long_flags() -> None:
    """Flags are long, in one order; the key is a file that systemd hands on, never an argument."""
    launch = llamacpp.render(
        server(
            served_model_name="smol",
            listen={"address": "0.0.0.0", "port": 8080, "api_key": {"file": "/etc/k"}},
            speculative={"type": "draft-simple", "draft_model": "/srv/d.gguf", "draft_n_max": 3},
            args={
                "ctx-size": 4096,
                "metrics": True,
                "mmap": False,
                "lora": ["/a", "/b"],
                "seed": -1,
            },
        ),
        ["GPU-1"],
    )
    assert launch.argv == (
        "/opt/llama/llama-server", "--model", "/srv/smol.gguf", "--host", "0.0.0.0", "--port", "8080", "--alias", "smol",
        "--api-key-file", "/run/credentials/llama-smol.service/api-key",
        "--spec-draft-model", "/srv/d.gguf", "--spec-draft-n-max", "3", "--spec-type", "draft-simple",
        "--ctx-size", "4096", "--lora", "/a", "--lora", "/b", "--metrics", "--no-mmap", "--seed", "-1",
    )  # fmt: skip
    assert launch.credentials == {"api-key": "/etc/k"}
    assert launch.environment == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert launch.check_argv == ("/opt/llama/llama-server",)
    assert launch.flags_to_check[:3] == ("--model", "--host", "--port")
    assert "--no-mmap" in launch.flags_to_check
    assert launch.paths == ("/opt/llama/llama-server", "/srv/smol.gguf", "/srv/d.gguf")


def test_the_python_form_takes_underscores_and_values() -> None:
    """Its parser is another: names with underscores, switches with true or false, the key by environment."""
    launch = llamacpp.render(
        server(
            runtime=PYTHON,
            served_model_name="smol",
            listen={"port": 8080, "api_key": {"file": "/etc/k"}},
            speculative={"draft_model": "prompt-lookup-decoding", "draft_model_num_pred_tokens": 5},
            args={
                "n_ctx": 512,
                "interrupt-requests": False,
                "tensor_split": [0.5, 0.5],
                "chat_format": "-x",
            },
            secrets={"HF_TOKEN": {"file": "/etc/t"}},
        ),
        [],
    )
    assert launch.argv == (
        "/opt/llama/bin/python", "-m", "llama_cpp.server", "--model", "/srv/smol.gguf", "--host", "127.0.0.1",
        "--port", "8080", "--model_alias", "smol",
        "--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", "5",
        "--chat_format=-x", "--interrupt_requests", "false", "--n_ctx", "512", "--tensor_split", "0.5", "0.5",
    )  # fmt: skip
    assert launch.secret_env == {"HF_TOKEN": "/etc/t", "API_KEY": "/etc/k"}
    assert launch.check_argv == ("/opt/llama/bin/python", "-m", "llama_cpp.server")
    assert launch.environment == {"CUDA_VISIBLE_DEVICES": ""}
    assert "--chat_format" in launch.flags_to_check


def test_a_hub_model_is_named_as_one() -> None:
    """A model that is no path goes to llama-server as a repository, and no path must exist."""
    launch = llamacpp.render(server(model="ggml-org/smol:Q8_0"), [])
    assert launch.argv[1:3] == ("--hf-repo", "ggml-org/smol:Q8_0")
    assert launch.paths == ("/opt/llama/llama-server",)


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"runtime": {}}, "runtime", "needs `binary`"),
        ({"model": None}, "model", "is missing"),
        ({"runtime": PYTHON, "model": "org/name"}, "model", "GGUF"),
        ({"model_revision": "abc"}, "model_revision", "cannot be pinned"),
        ({"tp_size": 2, "gpus": [0, 1]}, "tp_size", "split-mode"),
        ({"dp_size": 2}, "dp_size", "split-mode"),
        ({"args": {"ctx_size": 1}}, "args.ctx_size", "`ctx-size`"),
        ({"args": {"c": 1}}, "args.c", "`ctx-size`"),
        ({"args": {"port": 1}}, "args.port", "`listen.port`"),
        ({"args": {"spec-type": "x"}}, "args.spec-type", "`speculative`"),
        ({"args": {"mmap": True, "no-mmap": True}}, "args.no-mmap", "contradicts"),
        ({"runtime": PYTHON, "args": {"model-alias": "x"}}, "args.model-alias", "`served_model_name`"),
        ({"runtime": PYTHON, "args": {"n-ctx": 1, "n_ctx": 2}}, "args.n-ctx", "given twice"),
        ({"args": {"gpu-layers": 1, "n-gpu-layers": 2}}, "args.gpu-layers", "given twice"),
        ({"args": {"gpu-layers": 1}}, "args.gpu-layers", "written `n-gpu-layers`"),
        ({"args": {"model-draft": "/d"}}, "args.model-draft", "`speculative`"),
        ({"args": {"draft-max": 3}}, "args.draft-max", "`speculative`"),
        ({"args": {"spec-default": True}}, "args.spec-default", "`speculative`"),
        ({"env": {"LLAMA_ARG_SPEC_TYPE": "draft-mtp"}}, "env.LLAMA_ARG_SPEC_TYPE", "`speculative`"),
        ({"env": {"LLAMA_ARG_SPEC_SYNTH_LEN": "3"}}, "env.LLAMA_ARG_SPEC_SYNTH_LEN", "fakes"),
    ],
)  # fmt: skip
def test_what_llama_cpp_cannot_do_is_refused(
    changes: dict[str, object], place: str, words: str
) -> None:
    """Each wrong field is an error of its own, at its place, before any server is touched."""
    found = refusals(**changes)
    assert words in found[place]
    assert len(found) == 1


DRAFT = {"type": "draft-simple", "draft_model": "/d.gguf"}
MODULE = {"draft_model": "prompt-lookup-decoding"}


@pytest.mark.parametrize(
    ("speculative", "field", "words"),
    [
        ({"draft_n_max": 3}, "type", "is missing"),
        ({"type": ""}, "type", "must be text"),
        ({"type": "draft"}, "type", "write draft-simple"),
        ({"type": "mtp"}, "type", "write draft-mtp"),
        ({"type": "none"}, "type", "switches speculation off"),
        ({"type": "none,ngram-mod"}, "type", "and all others with it"),
        ({"type": "ngram-mod, ngram-cache"}, "type", "without blanks"),
        ({"type": "ngram-mod,ngram-mod"}, "type", "ngram-mod twice"),
        ({**DRAFT, "type": "draft-mtp,draft-simple"}, "type", "the one draft model"),
        ({"type": "draft-simple"}, "draft_model", "dies without one"),
        ({"type": "draft-eagle3"}, "draft_model", "silently left out"),
        ({"type": "draft-dflash"}, "draft_model", "silently left out"),
        ({"type": "draft-dspark,ngram-mod"}, "draft_model", "silently left out"),
        ({**DRAFT, "draft_hf": "a/b"}, "draft_hf", "write one"),
        ({"type": "ngram-simple", "draft_model": "/d"}, "draft_model", "no draft model"),
        ({"type": "ngram-simple", "draft_n_max": 3}, "draft_n_max", "no effect"),
        ({"type": "ngram-simple", "ngram_mod_n_match": 3}, "ngram_mod_n_match", "without type ngram-mod"),
        ({"type": "ngram-map-k", "ngram_map_k4v_size_n": 3}, "ngram_map_k4v_size_n", "without type ngram-map-k4v"),
        ({"type": "ngram-map-k4v", "ngram_map_k_size_n": 3}, "ngram_map_k_size_n", "without type ngram-map-k "),
        ({"type": "ngram-mod", "ngram_mod_n_max": 32}, "ngram_mod_n_max", "48 is more than ngram_mod_n_max 32, the default"),
        ({"type": "ngram-mod", "ngram_mod_n_min": 9, "ngram_mod_n_max": 8}, "ngram_mod_n_min", "9 is more than ngram_mod_n_max 8:"),
        ({**DRAFT, "draft_n_min": 4}, "draft_n_min", "4 is more than draft_n_max 3, the default"),
        ({**DRAFT, "draft_n_max": 2, "draft_n_min": 3}, "draft_n_min", "thrown away"),
        ({**DRAFT, "draft_n_max": 0}, "draft_n_max", "at least 1"),
        ({**DRAFT, "draft_n_max": True}, "draft_n_max", "at least 1"),
        ({**DRAFT, "draft_p_min": 1.5}, "draft_p_min", "from 0 to 1"),
        ({**DRAFT, "draft_ngl": "some"}, "draft_ngl", "auto or all"),
        ({**DRAFT, "draft_type_k": "fp8"}, "draft_type_k", "q8_0"),
        ({**DRAFT, "draft_sampling": "random"}, "draft_sampling", "probabilistic"),
        ({**DRAFT, "draft_max": 3}, "draft_max", "write `draft_n_max`"),
        ({**DRAFT, "draft": 3}, "draft", "write `draft_n_max`"),
        ({"type": "ngram-simple", "ngram_size_n": 3}, "ngram_size_n", "ngram_simple_size_n"),
        ({"type": "ngram-mod", "default": True}, "default", "hides its numbers"),
        ({**DRAFT, "synth_len": 3.4}, "synth_len", "fakes"),
        ({**DRAFT, "synth_rates": "0.8,0.6"}, "synth_rates", "fakes"),
    ],
)  # fmt: skip
def test_each_rule_of_llama_servers_speculation_is_told_at_its_field(
    speculative: dict[str, object], field: str, words: str
) -> None:
    """What llama-server would refuse, or silently leave without effect, is one error at its field, with its source."""
    found = refusals(speculative=speculative)
    assert words in found[f"speculative.{field}"]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("speculative", "args", "field", "words"),
    [
        ({"draft_model": "/d.gguf"}, {}, "speculative.draft_model", "prompt-lookup-decoding"),
        ({**MODULE, "n": 1}, {}, "speculative.n", "alone"),
        ({**MODULE, "draft_model_num_pred_tokens": 0}, {}, "speculative.draft_model_num_pred_tokens", "at least 1"),
        (MODULE, {"logits_all": False}, "speculative", "longer than n_batch"),
    ],
)  # fmt: skip
def test_each_rule_of_the_modules_speculation_is_told_at_its_field(
    speculative: dict[str, object], args: dict[str, object], field: str, words: str
) -> None:
    """llama_cpp.server takes any word for its one method: only the right one passes."""
    found = refusals(runtime=PYTHON, speculative=speculative, args=args)
    assert words in found[field]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("runtime", "speculative", "field", "words"),
    [
        (BINARY, DRAFT, "draft_n_max", "is not written: 3"),
        (BINARY, {**DRAFT, "type": "draft-dflash", "draft_n_max": 8}, "draft_n_max", "trained block"),
        (BINARY, {"type": "draft-mtp"}, "draft_model", "in the model itself"),
        (BINARY, {"type": "draft-mtp,ngram-mod"}, "type", "n-gram type first"),
        (BINARY, {"type": "draft-new", "draft_model": "/d"}, "type", "draft-new is none that this tool knows"),
        (BINARY, {**DRAFT, "draft_nmax": 3}, "draft_nmax", "did you mean `draft_n_max`?"),
        (BINARY, {"type": "draft-simple", "draft_hf": "a/b"}, "draft_hf", "fetched"),
        (PYTHON, MODULE, "draft_model_num_pred_tokens", "10"),
    ],
)  # fmt: skip
def test_what_llama_cpp_adjusts_or_only_it_knows_is_said(
    runtime: dict[str, str], speculative: dict[str, object], field: str, words: str
) -> None:
    """Accepted, and each named with its rule: a new type or key of a new build does not lock anybody out."""
    made = server(runtime=runtime, speculative=speculative)
    assert any(words in text for place, text in llamacpp.warnings(made) if place == f"speculative.{field}")  # fmt: skip


def test_other_spellings_of_draft_options_read_back_as_the_one() -> None:
    """A stranger's short forms and older names become the fields of a spec."""
    found = llamacpp.read_argv(
        ["llama-server", "-m", "/m", "-md", "/d", "-ngld", "99", "--draft-max", "4", "--gpu-layers", "5", "-ctkd", "q8_0", "--spec-type", "draft-simple"],
        {},
    )  # fmt: skip
    assert found["speculative"] == {"draft_model": "/d", "draft_ngl": 99, "draft_n_max": 4, "draft_type_k": "q8_0", "type": "draft-simple"}  # fmt: skip
    assert found["args"] == {"n-gpu-layers": 5}


VALUE = st.one_of(st.booleans(), st.integers(-(10**6), 10**6), st.from_regex(r"[a-zA-Z/][a-zA-Z0-9/.]{0,9}", fullmatch=True).filter(lambda t: t not in {"true", "false"}))  # fmt: skip
KEY = st.from_regex(r"[a-z]{3,8}(-[a-z]{2,8})?", fullmatch=True).filter(
    lambda k: (
        k not in {*llamacpp._OWNED, *llamacpp.SHORT, *llamacpp.LONG, *ALIASES}
        and not k.startswith(("no-", "spec-"))
    )
)


@given(st.dictionaries(KEY, VALUE, max_size=6), st.booleans())
def test_a_rendered_server_reads_back_to_its_spec(args: dict[str, object], python: bool) -> None:
    """Rendering and reading agree on every field, in both forms."""
    one = server(
        runtime=PYTHON if python else BINARY,
        served_model_name="smol",
        speculative=(
            {"draft_model": "prompt-lookup-decoding", "draft_model_num_pred_tokens": 5}
            if python
            else {"type": "draft-simple", "draft_model": "/srv/d.gguf", "draft_n_max": 3}
        ),
        args=args,
    )
    found = llamacpp.read_argv(llamacpp.render(one, ["GPU-1"]).argv, {})
    assert found == {
        "engine": {"name": "llamacpp"},
        "runtime": PYTHON if python else BINARY,
        "model": one.model,
        "served_model_name": "smol",
        "listen": {"address": "127.0.0.1", "port": 8080},
        "speculative": one.speculative,
        "args": args,
    }


def test_a_strangers_command_line_is_read_by_the_same_names() -> None:
    """Short forms, negations and repeated flags of a hand-made unit become the words of a spec."""
    found = llamacpp.read_argv(
        ["/usr/bin/llama-server", "-m", "/m.gguf", "-c", "8192", "-ngl", "99", "--no-mmap", "--lora", "/a", "--lora", "/b", "--api-key", "K"],
        {},
    )  # fmt: skip
    assert found["model"] == "/m.gguf"
    assert found["args"] == {
        "ctx-size": 8192,
        "n-gpu-layers": 99,
        "mmap": False,
        "lora": ["/a", "/b"],
    }
    assert found["listen"] == {"api_key": True}
    assert "K" not in json.dumps(found)
    assert llamacpp.read_argv([], {}) == {"engine": {"name": "llamacpp"}, "args": {}}


def test_readiness_asks_the_form_that_runs() -> None:
    """llama-server has a health path that says 503 while loading; the Python form has its models."""
    assert llamacpp.ready_requests(server()).alive.path == "/health"
    assert llamacpp.ready_requests(server(runtime=PYTHON)).alive.path == "/v1/models"
    loading = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
    assert isinstance(llamacpp.alive(server(), 503, loading), NotYet)
    assert isinstance(llamacpp.generation_ok(server(), 503, loading), NotYet)
    answer = {"model": "smol.gguf", "choices": [{"text": "a", "finish_reason": "length"}]}
    assert llamacpp.generation_ok(server(), 200, json.dumps(answer).encode()) == Ready()


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({}, "/slots"),
        ({"metrics": True}, "/metrics"),
        ({"slots": False}, None),
        ({"no-slots": True}, None),
    ],
)
def test_requests_in_flight_are_asked_where_they_can_be_seen(
    args: dict[str, object], path: str | None
) -> None:
    """Metrics when they are on, slots unless they are off, nothing otherwise."""
    asked = llamacpp.in_flight_request(server(args=args))
    assert (asked.path if asked else None) == path
    assert llamacpp.in_flight_request(server(runtime=PYTHON)) is None


@pytest.mark.parametrize(
    ("status", "body", "count"),
    [
        (200, b'[{"id":0,"is_processing":true},{"id":1,"is_processing":false}]', 1),
        (200, b'[{"id":0,"is_processing":false}]', 0),
        (200, b'[{"id":0,"state":1}]', None),
        (200, b"[]", None),
        (200, b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n", 3),
        (501, b'{"error":{}}', None),
        (None, b"", None),
    ],
)
def test_busy_slots_and_gauges_are_counted(
    status: int | None, body: bytes, count: int | None
) -> None:
    """What does not say how many is unknown (S12)."""
    assert llamacpp.in_flight(status, body) == count


def test_what_only_the_host_can_check_is_said() -> None:
    """A spec with flags of its own is told that they are checked on the host."""
    assert llamacpp.warnings(server()) == []
    assert "on the host" in llamacpp.warnings(server(args={"ctx-size": 1}))[0][1]


def test_maps_become_json_in_both_forms() -> None:
    """A map is JSON for whichever parser reads it."""
    for runtime, flag in ((BINARY, "--chat-template-kwargs"), (PYTHON, "--chat_template_kwargs")):
        argv = llamacpp.render(
            server(runtime=runtime, args={"chat-template-kwargs": {"b": 1, "a": 2}}), []
        ).argv
        assert argv[argv.index(flag) + 1] == '{"a":2,"b":1}'


def test_the_models_tell_who_answers() -> None:
    """A model without an alias is named by its path."""
    assert llamacpp.identity_ok(server(), 200, b'{"data":[{"id":"/srv/smol.gguf"}]}') == Ready()


def test_a_speed_that_the_python_server_never_tells_is_said_before_anything_runs() -> None:
    """Its streams have no token counts, so a speed limit would stay inconclusive for ever; times can be limited."""
    run = {"name": "one", "concurrency": 1, "requests": 64, "max_tokens": 8}

    def said(runtime: object, limit: dict[str, object]) -> list[str]:
        made = server(runtime=runtime, gate={"runs": [{**run, **limit}]})
        return [text for path, text in llamacpp.warnings(made) if path == "gate"]

    (warning,) = said(PYTHON, {"min_decode_tps": 10})
    assert "min_decode_tps stays inconclusive" in warning
    assert said(PYTHON, {"max_e2e_p50": "60s"}) == []
    assert said(BINARY, {"min_decode_tps": 10}) == []

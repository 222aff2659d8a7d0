"""Flags as data: checked, written and read as each engine's own parser would."""

from __future__ import annotations

import argparse
import json

import pytest
from engine_servers import validated
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.engines import sglang, vllm
from reconciler.engines.catalogue import (
    Catalogue,
    Flag,
    catalogue,
    check_args,
    read_catalogue,
    read_words,
    versions,
    words,
    wrong_value,
)

ALL = [(engine, version) for engine in ("sglang", "vllm") for version in versions(engine)]
SGLANG = catalogue("sglang", "0.5.23")
VLLM = catalogue("vllm", "0.33.0")


def test_every_catalogue_reads_and_counts_as_it_says() -> None:
    """The data that came with the engines is whole: as many rows as each file claims."""
    assert versions("sglang") == ("0.4.10", "0.5.6.post2", "0.5.10.post1", "0.5.23")
    assert versions("vllm") == ("0.8.5", "0.10.2", "0.19.1", "0.33.0")
    counts = {(e, v): len(catalogue(e, v).flags) for e, v in ALL}
    # vLLM's counts include the positional model, which is no flag.
    assert counts == {
        ("sglang", "0.4.10"): 180, ("sglang", "0.5.6.post2"): 292, ("sglang", "0.5.10.post1"): 354, ("sglang", "0.5.23"): 531,
        ("vllm", "0.8.5"): 137, ("vllm", "0.10.2"): 176, ("vllm", "0.19.1"): 230, ("vllm", "0.33.0"): 320,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "used", "note"),
    [
        ("0.5.23", "0.5.23", None),
        ("0.5.12", "0.5.10.post1", "no catalogue of sglang 0.5.12"),
        ("0.9.0", "0.5.23", "no catalogue of sglang 0.9.0"),
        ("0.3.0", "0.4.10", "no catalogue of sglang 0.3.0"),
        (None, "0.5.23", "no engine.version"),
    ],
)
def test_the_nearest_version_stands_in_and_says_so(
    asked: str | None, used: str, note: str | None
) -> None:
    """A version without a catalogue is checked against the newest that is not newer, with a stated note."""
    book = catalogue("sglang", asked)
    assert book.version == used
    assert (note is None) == (book.note is None)
    if note is not None and book.note is not None:
        assert note in book.note
        assert used in book.note


def refused(book: Catalogue, **args: object) -> str:
    dashed = {key.replace("__", "-"): value for key, value in args.items()}
    found = check_args(book, dashed, {"--tp-size": "`tp_size`"}).problems
    assert len(found) == 1, found
    return found[0][1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"contxt-length": 1}, "did you mean `context-length`?"),
        ({"context_length": 1}, "is written with dashes: `context-length`"),
        ({"--context-length": 1}, "without the dashes in front"),
        ({"enable-metric": True}, "is the beginning of several flags"),
        ({"trust-remote": True}, "only the beginning of a flag; write `trust-remote-code`"),
        ({"cuda-graph-bs": [1]}, "is the beginning of several flags"),
        ({"torchao-config": "x"}, "(sglang 0.5.10.post1 has it)"),
        ({"quite-unheard-of": 1}, "is no flag of sglang 0.5.23"),
        ({"tensor-parallel-size": 2}, "is decided by `tp_size`"),
        ({"context-length": "long"}, "takes a whole number"),
        ({"context-length": 1.5}, "takes a whole number"),
        ({"context-length": True}, "takes a value, not true or false"),
        ({"context-length": [1]}, "takes one value, not a list"),
        ({"context-length": {"a": 1}}, "takes no map"),
        ({"mem-fraction-static": "much"}, "takes a number"),
        ({"mamba-backend": "trition"}, "did you mean `triton`?"),
        ({"enable-metrics": "yes"}, "takes no value: write true"),
        ({"enable-metrics": False}, "has no form that turns it off"),
        ({"numa-node": []}, "needs at least one value"),
        ({"numa-node": ["x"]}, "takes a whole number"),
        ({"prompt-tokens-buckets": ["-x"]}, "begins with a dash"),
        ({"preferred-sampling-params": "{"}, "takes JSON"),
    ],
)
def test_what_the_parser_would_refuse_is_a_problem(args: dict[str, object], words: str) -> None:
    """Each wrong flag or value is named at its place, with what was probably meant."""
    found = check_args(SGLANG, args, {"--tp-size": "`tp_size`"}).problems
    assert len(found) == 1, found
    assert found[0][0] == f"args.{next(iter(args))}"
    assert words in found[0][1]


def test_one_flag_by_two_names_is_given_twice() -> None:
    """An alias or a negation beside its flag would win or lose by chance: it is refused."""
    found = check_args(VLLM, {"disable-prefix-caching": True, "enable-prefix-caching": True}, {})
    assert found.problems == (
        ("args.enable-prefix-caching", "is given twice: `disable-prefix-caching` is the same flag"),
    )
    assert refused(VLLM, **{"disable-prefix-caching": 3}) == "takes true or false, no value"


def test_a_negation_is_written_as_its_flag_turned_off() -> None:
    """`false`, or the off-spelling with `true`, gives the one spelling that every version has."""
    off = check_args(VLLM, {"enable-prefix-caching": False}, {}).values
    same = check_args(VLLM, {"disable-prefix-caching": True}, {}).values
    assert off == same
    assert words(*off[0]) == ("--no-enable-prefix-caching",)
    assert words(*check_args(VLLM, {"no-enable-prefix-caching": False}, {}).values[0]) == (
        "--enable-prefix-caching",
    )


def test_a_deprecated_flag_is_accepted_with_a_word() -> None:
    """It works today: a warning, not a refusal."""
    found = check_args(SGLANG, {"enable-dp-attention": True}, {})
    assert found.problems == ()
    assert found.warnings == (("args.enable-dp-attention", "is deprecated in sglang 0.5.23"),)


def test_values_are_written_in_the_form_of_their_flag() -> None:
    """Lists follow their flag, maps become JSON, a leading dash is glued on, order does not matter."""
    given_args = {
        "numa-node": [0, 1],
        "preferred-sampling-params": {"b": 1, "a": [2]},
        "chat-template": "-x",
        "mem-fraction-static": 0.85,
        "model-checksum": True,
    }
    expected = (
        "--chat-template=-x", "--mem-fraction-static", "0.85", "--model-checksum", "--numa-node", "0", "1",
        "--preferred-sampling-params", '{"a":[2],"b":1}',
    )  # fmt: skip
    for order in (given_args, dict(reversed(given_args.items()))):
        checked = check_args(SGLANG, order, {})
        assert not checked.problems
        assert tuple(w for flag, value in checked.values for w in words(flag, value)) == expected


def test_a_repeated_flag_is_repeated() -> None:
    """A flag that collects is given once for each value."""
    flag = next(f for f in VLLM.flags.values() if f.action == "Append")
    assert words(flag, ["a", "b"]) == (flag.flag, "a", flag.flag, "b")
    assert read_words(VLLM, [flag.flag, "a", flag.flag, "b"]).values == {flag.flag: ["a", "b"]}


@pytest.mark.parametrize("value", ["32k", 32768, "1.5M", "auto"])
def test_sizes_with_a_suffix_are_accepted_where_the_parser_knows_them(value: object) -> None:
    """`32k` is a number there and nowhere else."""
    assert wrong_value(VLLM.flags["--max-model-len"], value) is None
    assert wrong_value(VLLM.flags["--max-model-len"], "32x") is not None


def parser_of(book: Catalogue) -> argparse.ArgumentParser:
    """Rebuild the engine's parser from its catalogue: the judge over writing and reading."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    for flag in book.flags.values():
        names = [flag.flag, *flag.aliases]
        if flag.bare:
            parser.add_argument(*names, dest=flag.flag, action="store_const", const=True)
            if flag.negations:
                parser.add_argument(
                    *flag.negations, dest=flag.flag, action="store_const", const=False
                )
            continue
        kind = {"int": int, "float": float}.get(flag.type, str)
        action = "append" if flag.action == "Append" else "store"
        nargs = flag.nargs if isinstance(flag.nargs, str) else None
        if nargs == "?":
            parser.add_argument(*names, dest=flag.flag, nargs=nargs, type=kind, const=True)
        else:
            parser.add_argument(*names, dest=flag.flag, action=action, nargs=nargs, type=kind)
    return parser


PARSERS = {key: parser_of(catalogue(*key)) for key in ALL}
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def value_for(flag: Flag) -> st.SearchStrategy[object]:
    if flag.bare:
        return st.booleans() if flag.off else st.just(True)
    if flag.json:
        return st.dictionaries(TEXT, JSON, max_size=3) | st.lists(JSON, max_size=3)
    one: st.SearchStrategy[object]
    if flag.choices:
        one = st.sampled_from([c for c in flag.choices if c is not None])
    elif flag.type.startswith("int"):
        one = st.integers(-(10**6), 10**6)
    elif flag.type == "float":
        one = st.floats(-1e6, 1e6)
    else:
        one = TEXT
    if flag.many:
        plain = one.filter(lambda v: not (isinstance(v, str) and v.startswith("-")))
        return st.lists(plain, min_size=1, max_size=3)
    return st.lists(one, min_size=1, max_size=3) if flag.action == "Append" else one


@st.composite
def chosen(draw: st.DrawFn) -> tuple[tuple[str, str], dict[Flag, object]]:
    key = draw(st.sampled_from(ALL))
    flags = sorted(catalogue(*key).flags.values(), key=lambda f: f.flag)
    picked = draw(st.lists(st.sampled_from(flags), max_size=5, unique_by=lambda f: f.flag))
    return key, {flag: draw(value_for(flag)) for flag in picked}


@settings(deadline=None)
@given(chosen())
def test_what_is_written_is_what_the_parser_reads(
    case: tuple[tuple[str, str], dict[Flag, object]],
) -> None:
    """For any flags and values that pass the check, argparse itself reads back exactly those values."""
    key, picked = case
    accepted = {f: v for f, v in picked.items() if wrong_value(f, v) is None}
    argv = [word for flag, value in accepted.items() for word in words(flag, value)]
    seen = vars(PARSERS[key].parse_args(argv))
    for flag, value in accepted.items():
        found = json.loads(seen[flag.flag]) if flag.json else seen[flag.flag]
        wanted = (
            value if flag.bare or flag.json or flag.type in {"int", "float"} else as_text(value)
        )
        assert found == wanted


def as_text(value: object) -> object:
    return [str(v) for v in value] if isinstance(value, list) else str(value)


@settings(deadline=None)
@given(chosen())
def test_what_is_written_is_what_we_read(case: tuple[tuple[str, str], dict[Flag, object]]) -> None:
    """Reading a rendered command line gives the same flags; text that looks like a number may become one."""
    key, picked = case
    accepted = {f: v for f, v in picked.items() if wrong_value(f, v) is None}
    argv = [word for flag, value in accepted.items() for word in words(flag, value)]
    read = read_words(catalogue(*key), argv, underscores=key[0] == "vllm")
    assert read.unknown == {}
    assert read.positional == ()
    assert set(read.values) == {f.flag for f in accepted}
    for flag, value in accepted.items():
        found = read.values[flag.flag]
        assert found == value or (not flag.json and str(found) == str(value))


@given(
    st.lists(
        st.text(max_size=10) | st.sampled_from(["--tp", "--port=1", "--", "-", "--no-such", "-1"])
    )
)
def test_no_command_line_breaks_the_reader(argv: list[str]) -> None:
    """A stranger's command line is read as far as it can be, and never raises."""
    read_words(SGLANG, argv)
    read_words(VLLM, argv, underscores=True)


def test_habits_of_the_engines_parsers_are_read() -> None:
    """Prefixes, aliases, glued values, underscores, short forms and dotted JSON reach their full names."""
    read = read_words(SGLANG, ["--tp", "4", "--ep=2", "--trust-remote", "--pp", "2", "stray"])
    assert read.values == {"--tp-size": 4, "--ep-size": 2, "--trust-remote-code": True}
    assert read.unknown == {"--pp": ["2", "stray"]}  # Ambiguous there: the engine would refuse it.
    read = read_words(
        VLLM,
        ["m", "--max_model_len", "8192", "-tp", "2", "--speculative-config.method", "mtp", "--speculative-config.num-speculative-tokens", "3", "--disable-prefix-caching"],
        underscores=True,
    )  # fmt: skip
    assert read.positional == ("m",)
    assert read.values == {
        "--max-model-len": 8192,
        "--tensor-parallel-size": 2,
        "--speculative-config": {"method": "mtp", "num_speculative_tokens": 3},
        "--enable-prefix-caching": False,
    }


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"flags": [1]}', b'{"flags": [{"flag": "--x"}], "engine": "e", "version": "1"}', b"[" * 100_000, b"\xff",
     b'{"engine":"e","version":"1","flags":[{"flag":"--x","aliases":"y","action":"a","type":"t","choices":null,"nargs":null,"deprecated":false}]}'],
)  # fmt: skip
def test_a_file_of_another_shape_is_no_catalogue(data: bytes) -> None:
    """A broken catalogue is one clear error."""
    with pytest.raises(ValueError):
        read_catalogue(data)


def test_rare_forms_of_values_are_judged() -> None:
    """A bare optional value, nothing at all, a map inside a list: taken, refused, refused."""
    assert wrong_value(SGLANG.flags["--model-checksum"], True) is None
    assert (
        wrong_value(SGLANG.flags["--model-checksum"], False) == "takes a value, not true or false"
    )
    assert wrong_value(SGLANG.flags["--numa-node"], None) == "has no value"
    assert wrong_value(SGLANG.flags["--numa-node"], [{}]) == "takes text or a number"
    assert words(SGLANG.flags["--preferred-sampling-params"], '{"a":1}')[1] == '{"a":1}'


def test_dotted_json_is_read_as_far_as_it_goes() -> None:
    """Nested keys, text that is no JSON, a key without a value, and one inside what is no map."""
    read = read_words(
        VLLM,
        ["--compilation-config.pass-config.fuse", "true", "--compilation-config.mode", "x[", "--compilation-config.last"],
        underscores=True,
    )  # fmt: skip
    assert read.values == {
        "--compilation-config": {"pass_config": {"fuse": True}, "mode": "x[", "last": True}
    }
    read = read_words(
        VLLM, ["--kv-transfer-config", "[1]", "--kv-transfer-config.a.b", "1"], underscores=True
    )
    assert read.values == {"--kv-transfer-config": [1]}


def test_a_switch_that_takes_the_word_is_judged_written_and_read() -> None:
    """llama_cpp.server's switches are followed by true or false: no bare form, no other word."""
    row = {"flag": "--use_mmap", "aliases": [], "action": "Store", "type": "true|false", "choices": None, "nargs": None, "deprecated": False}  # fmt: skip
    book = read_catalogue(json.dumps({"engine": "e", "version": "1", "flags": [row]}).encode())
    flag = book.flags["--use_mmap"]
    assert wrong_value(flag, value=False) is None
    assert wrong_value(flag, "maybe") == "takes true or false"
    assert words(flag, value=False) == ("--use_mmap", "false")
    assert read_words(book, ["--use_mmap", "false"]).values == {"--use_mmap": False}


@pytest.mark.parametrize(
    ("engine", "args", "place", "words_of"),
    [
        ("vllm", {"tp": 2}, "args.tp", "is decided by `tp_size`"),
        ("vllm", {"cc": {"mode": 0}, "compilation-config": {"mode": 3}}, "args.cc", "given twice: `compilation-config`"),
        ("vllm", {"cc": {"mode": 0}}, "args.cc", "short form; write `compilation-config`"),
        ("vllm", {"max-num-seqs": 1, "max_num_seqs": 2}, "args.max_num_seqs", "written with dashes"),
        ("vllm", {"enable-prefix-caching": True, "no-enable-prefix-caching": True}, "args.no-enable-prefix-caching", "given twice"),
        ("vllm", {"speculative-config": {"method": "ngram"}}, "args.speculative-config", "is decided by `speculative`"),
        ("vllm", {"spec-tokens": 3}, "args.spec-tokens", "is decided by `speculative`"),
        ("sglang", {"tensor-parallel-size": 2}, "args.tensor-parallel-size", "is decided by `tp_size`"),
        ("sglang", {"tp-size": 2}, "args.tp-size", "is decided by `tp_size`"),
        ("sglang", {"speculative-num-draft-tokens": 4}, "args.speculative-num-draft-tokens", "is decided by `speculative`"),
        ("sglang", {"speculative-draft-model-path": "/d"}, "args.speculative-draft-model-path", "is decided by `speculative`"),
        ("sglang", {"model": "/m"}, "args.model", "is decided by `model`"),
    ],
)  # fmt: skip
def test_a_flag_given_twice_is_found_by_whatever_name(
    engine: str, args: dict[str, object], place: str, words_of: str
) -> None:
    """Through an alias, a negation, another spelling, a glued value, or a field of the spec that decides it."""
    member = {"vllm": vllm, "sglang": sglang}[engine]
    plain = {
        "name": "s", "host": "h", "gpus": [0], "engine": {"name": engine, "version": versions(engine)[-1]},
        "runtime": {"python": "/p"}, "model": "/m", "listen": {"port": 1}, "args": args,
    }  # fmt: skip
    found = dict(member.problems(validated(plain, member)))
    assert words_of in found[place]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_other_name_of_every_flag_is_given_twice_beside_the_first(engine: str) -> None:
    """No alias and no negation in any catalogue evades it."""
    for version in versions(engine):
        book = catalogue(engine, version)
        for flag in book.flags.values():
            for other in (*flag.aliases, *flag.negations):
                if other.startswith("--"):
                    value = fitting(flag)
                    found = check_args(book, {flag.flag[2:]: value, other[2:]: value}, {}).problems
                    assert [text for _, text in found if "is given twice" in text], (flag, other)


def fitting(flag: Flag) -> object:
    """Give a value that the flag takes."""
    choices = [c for c in flag.choices or () if c is not None]
    one: object = choices[0] if choices else {} if flag.json and "str" not in flag.type else "1"
    return True if flag.bare else [one] if flag.many else one

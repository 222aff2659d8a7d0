"""Bytes to trees: what is refused, where, and what a plain value is."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reconciler.core import yaml_text
from reconciler.core.yaml_text import Mapping, parse, plain


@pytest.fixture(params=["libyaml", "pure"])
def _scanner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each scanner; without libyaml both runs use the other one."""
    if request.param == "pure":
        monkeypatch.setattr(yaml_text, "_built_by_libyaml", lambda text, file: None)


def problems(text: str | bytes) -> list[str]:
    content = text if isinstance(text, bytes) else text.encode()
    return [str(problem) for problem in parse(content, "f.yaml").problems]


def value(text: str) -> object:
    """Give the one document of a text that must be free of problems."""
    parsed = parse(text.encode(), "f.yaml")
    assert parsed.problems == ()
    (document,) = parsed.documents
    return plain(document.root)


@pytest.mark.usefixtures("_scanner")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: !!str x\n", "f.yaml:1:4: a tag (!); write the plain value"),
        ("a: !!python/object/apply:os.system [x]\n", "f.yaml:1:4: a tag (!); write the plain value"),
        ("a: ! x\n", "f.yaml:1:4: a tag (!); write the plain value"),
        ("a: &x 1\n", "f.yaml:1:4: an anchor (&x); use `extends:` instead"),
        ("a: *x\n", "f.yaml:1:4: an alias (*x); use `extends:` instead"),
        ("a:\n  <<: {b: 1}\n", "f.yaml:2:3: a merge key (<<); use `extends:` instead"),
        ('a:\n  "<<": {b: 1}\n', "f.yaml:2:3: a merge key (<<); use `extends:` instead"),
        ("%YAML 1.1\n---\na: no\n", "f.yaml:1:1: a YAML directive; remove this line"),
        ("%TAG ! tag:x,2000:\n---\na: 1\n", "f.yaml:1:1: a YAML directive; remove this line"),
        ("a: 1\n---\n%YAML 1.1\n---\nb: 1\n", "f.yaml:3:1: a YAML directive; remove this line"),
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: `a` is here twice; first in line 1"),
        ('a: 1\n"a": 3\n', "f.yaml:2:1: `a` is here twice; first in line 1"),
        ("? [x, y]\n: 1\n", "f.yaml:1:3: a map or list as a key; keys are simple text"),
        ("{a: b}: 1\n", "f.yaml:1:1: a map or list as a key; keys are simple text"),
        ("? |\n  a\n  b\n: 1\n", "f.yaml:1:3: a key of several lines; keys are simple text"),
        (": 1\n", "f.yaml:1:1: an empty key"),
        ("a: .inf\n", "f.yaml:1:4: infinity and NaN are no values; write a number"),
        ("a: -.INF\n", "f.yaml:1:4: infinity and NaN are no values; write a number"),
        ("a: .nan\n", "f.yaml:1:4: infinity and NaN are no values; write a number"),
        ("a: 1e999\n", "f.yaml:1:4: the number is too large; put it in quotes if it is text"),
        ("a: 9223372036854775808\n", "f.yaml:1:4: the number is too large; put it in quotes if it is text"),
        (f"a: {'9' * 5000}\n", "f.yaml:1:4: the number is too large; put it in quotes if it is text"),
        (f"a: 0x{'f' * 40}\n", "f.yaml:1:4: the number is too large; put it in quotes if it is text"),
        ("a:\n\tb: 1\n", "f.yaml:2:1: a tab in the indentation; use spaces"),
        ("a:\n  \tb: 1\n", "f.yaml:2:3: a tab in the indentation; use spaces"),
        ("a: 1\t# why\n", "f.yaml:1:5: a tab; use spaces"),
        ("a: x\x00y\n", "f.yaml:1:5: U+0000 is a control character; remove it"),
        ("a: x\x1b[31m\n", "f.yaml:1:5: U+001B is a control character; remove it"),
        ("a: x\x85y\n", "f.yaml:1:5: U+0085 is a control character; remove it"),
        ("a: x\u2028y\n", "f.yaml:1:5: U+2028 is a control character; remove it"),
        ("a: x\ry\n", "f.yaml:1:5: U+000D is a control character; remove it"),
        ("a: 1\n\ufeffb: 1\n", "f.yaml:2:1: U+FEFF is a control character; remove it"),
        (
            "a: 1 # \u202e evil\n",
            "f.yaml:1:8: U+202E changes the order in which text is shown; what is read would not be what is meant",
        ),
        (b"a: \xff\xfe\n", "f.yaml:1:4: byte 0xff is not UTF-8; save it as UTF-8"),
        (b"a: 1\nb: \xe9t\xe9\n", "f.yaml:2:4: byte 0xe9 is not UTF-8; save it as UTF-8"),
        ("a: 1\n".encode("utf-16"), "f.yaml:1:1: the file is UTF-16 (by its byte order mark); save it as UTF-8"),
        ("a: 'x\n", "f.yaml:2:1: the closing quote is missing"),
        ("a: [1, 2\n", "f.yaml:2:1: `,` or `]` is missing"),
        ("a: b: c\n", "f.yaml:1:5: a `:` where no key can be; put the value in quotes, or check the indentation"),
        ("a: @b\n", "f.yaml:1:4: this character cannot begin a value; put the value in quotes"),
        ("a: %b\n", "f.yaml:1:4: this character cannot begin a value; put the value in quotes"),
        ("- a\nb: c\n", "f.yaml:2:1: the indentation does not fit the lines above"),
        ('a: "\\q"\n', "f.yaml:1:6: an unknown escape after `\\`; use single quotes for text with backslashes"),
    ],
)  # fmt: skip
def test_refuses_what_means_more_than_it_shows(text: str | bytes, expected: str) -> None:
    """Whatever is refused is refused with one plain sentence at its place."""
    assert problems(text) == [expected]


@pytest.mark.usefixtures("_scanner")
def test_says_everything_that_is_wrong_at_once() -> None:
    """A file with many mistakes is mended in one go: the reading goes on after each."""
    text = "%YAML 1.1\n---\na: &x 1\nb: *x\n<<: {c: 1}\nd: !!int 3\na: 2\ne: .nan\n---\nf: [*y]\n"
    assert [message.split(":")[1] for message in problems(text)] == [
        "1",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "10",
    ]


BOMBS = {
    "aliases": "a0: &a0 [x]\n"
    + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 600)),
    "merges": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 20)),
    "flow lists": "[" * 100_000,
    "flow maps": "{a: " * 50_000,
    "block lists": "- " * 50_000 + "x\n",
    "block maps": "".join(" " * i + "a:\n" for i in range(600)),
    "nulls": "[" + "," * 200_000,
    "explicit keys": "? " * 50_000,
    "values": "[" + "a," * 120_000 + "]",
    "documents": "---\na\n" * 3_000,
    "comments": "#\n" * 120_000,
    "quotes": "'" * 199_999,
    "anchors": "&a " * 50_000,
    "tags": "!a " * 50_000,
    "colons": "a" + ": " * 50_000,
    "empty maps in one line": "{} " * 50_000,
    "bytes": "a" * (yaml_text.MAX_BYTES + 1),
    "duplicates": "a: 1\n" * 30_000,
}


@pytest.mark.parametrize("kind", sorted(set(BOMBS) - {"comments"}))
def test_bombs_are_refused(kind: str) -> None:
    """No small file costs much: each ends in a bounded number of problems."""
    found = problems(BOMBS[kind])
    assert 0 < len(found) <= yaml_text.MAX_PROBLEMS


def test_a_file_of_comments_holds_no_document() -> None:
    """Comments alone are no specs and no mistake."""
    assert parse(BOMBS["comments"].encode(), "f.yaml") == yaml_text.Parsed((), ())


@pytest.mark.usefixtures("_scanner")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no", "no"), ("off", "off"), ("yes", "yes"), ("on", "on"), ("NO", "NO"), ("n", "n"), ("y", "y"),
        ("12:30", "12:30"), ("12:30:45", "12:30:45"), ("1_000", "1_000"), ("0b11", "0b11"), ("=", "="),
        ("2026-01-02", "2026-01-02"), ("0.5.23", "0.5.23"), ("60s", "60s"), ("1e3x", "1e3x"), ("+", "+"), (".", "."),
        ("true", True), ("False", False), ("tRue", "tRue"), ("null", None), ("~", None), ("", None),
        ("0", 0), ("-12", -12), ("+7", 7), ("007", 7), ("0o17", 15), ("0x1F", 31), ("9223372036854775807", 2**63 - 1),
        ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("1e3", 1000.0), ("-1.5E-2", -0.015),
        ("'no'", "no"), ('"12"', "12"), ("'~'", "~"), ('"\\u00e9"', "é"), ("ünïcode 漢", "ünïcode 漢"), ("a#b", "a#b"),
    ],
)  # fmt: skip
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, expected: object) -> None:
    """`no`, `off` and `12:30` are text, and numbers are what they look like."""
    (document,) = parse(f"a: {text}\n".encode(), "f.yaml").documents
    assert isinstance(document.root, Mapping)
    node = document.root.get("a")
    assert isinstance(node, yaml_text.Scalar)
    assert (node.value, type(node.value)) == (expected, type(expected))


@pytest.mark.usefixtures("_scanner")
def test_keys_and_values_know_their_places() -> None:
    """Line and column count from 1, in characters, also behind wide ones and after CRLF."""
    (document,) = parse("é: 1\r\nb:\r\n  漢: [x, yy]\r\n".encode(), "f.yaml").documents
    root = document.root
    assert isinstance(root, Mapping)
    key, node = root.entries["b"]
    assert (key.line, key.column) == (2, 1)
    assert isinstance(node, Mapping)
    inner_key, inner = node.entries["漢"]
    assert (inner_key.line, inner_key.column) == (3, 3)
    assert isinstance(inner, yaml_text.Sequence)
    assert [(item.line, item.column) for item in inner.items] == [(3, 7), (3, 10)]


@pytest.mark.usefixtures("_scanner")
def test_one_byte_order_mark_at_the_start_is_nothing() -> None:
    """Some editors write one; it changes neither content nor columns."""
    parsed = parse(b"\xef\xbb\xbfa: 1\n", "f.yaml")
    assert parsed.problems == ()
    assert isinstance(parsed.documents[0].root, Mapping)
    assert parsed.documents[0].root.entries["a"][0].column == 1


@pytest.mark.usefixtures("_scanner")
def test_null_says_the_same_as_not_writing_the_key() -> None:
    """Null removes, so it is not there in the end."""
    assert value("a: \nb: {c: null, d: 1}\n") == {"b": {"d": 1}}


@pytest.mark.usefixtures("_scanner")
def test_empty_documents_are_no_documents() -> None:
    """A `---` too many is no mistake."""
    assert value("---\n---\na: 1\n---\n") == {"a": 1}


def test_documents_before_a_syntax_error_are_kept() -> None:
    """What can be read is read, and the broken document is marked."""
    parsed = parse(b"a: 1\n---\nb: 'x\n", "f.yaml")
    assert [(plain(d.root), d.sound) for d in parsed.documents] == [({"a": 1}, True), ({}, False)]


JSON = st.recursive(
    st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf", "Co", "Cn", "Zl", "Zp"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(categories=["L", "N"]), min_size=1), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_json_is_read_as_what_it_says(data: object) -> None:
    """A spec may be made by a program: any JSON (without null and control characters) reads back equal."""

    def frozen(item: object) -> object:
        if isinstance(item, dict):
            return {key: frozen(inner) for key, inner in item.items()}
        return tuple(map(frozen, item)) if isinstance(item, list) else item

    assert value(json.dumps({"a": data}, ensure_ascii=False)) == {"a": frozen(data)}


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes_end_in_documents_or_problems(content: bytes) -> None:
    """Nothing in a file makes the reader raise."""
    parsed = parse(content, "f.yaml")
    for document in parsed.documents:
        plain(document.root)


PIECES = st.sampled_from(
    ["a", "b: ", "c:", "- ", "\n", "  ", "    ", "[", "]", "{", "}", ", ", "'", '"', " #", "no", "|\n", ">\n", "? ", ": ",
     "&x ", "*x ", "!t ", "---\n", "<<: ", "é", "漢", "\\", "http://x:80", "-", "~", "@", "%"]
)  # fmt: skip


def is_refused(parsed: yaml_text.Parsed) -> bool:
    """Say whether no reader takes this file: it has problems, or a document that is one bare text."""
    return bool(parsed.problems) or any(
        isinstance(document.root, yaml_text.Scalar) and document.root.value is not None
        for document in parsed.documents
    )


@example("|\n---\n? ")
@example("|\n---\n")  # where such a text ends, the two do not agree
@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=300, deadline=None)
def test_both_scanners_say_the_same(text: str) -> None:
    """Whether libyaml is installed changes how long a check takes, and nothing else."""
    quick = parse(text.encode(), "f.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_text, "_built_by_libyaml", lambda text, file: None)
        slow = parse(text.encode(), "f.yaml")
    assert quick.problems == slow.problems or is_refused(slow)
    assert is_refused(quick) == is_refused(slow)
    if not is_refused(slow):
        assert [plain(d.root) for d in quick.documents] == [plain(d.root) for d in slow.documents]

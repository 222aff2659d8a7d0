"""Problems for a reader: the line, the caret, and no secret."""

from __future__ import annotations

import pytest

from reconciler.core.errors import Problem
from reconciler.views.problems import WIDTH, remarks, report


def shown(text: str, line: int, column: int, message: str = "`x`: wrong") -> list[str]:
    return report([Problem("f.yaml", line, column, message)], {"f.yaml": text.encode()}).split("\n")


def test_the_caret_stands_under_the_place() -> None:
    """Also behind a wide character, and in a file of Windows."""
    assert shown("a: 1\r\nb: 漢 x\r\n", 2, 6) == [
        "f.yaml:2:6: `x`: wrong",
        "  b: 漢 x",
        "        ^",
    ]


def test_a_long_line_is_cut_around_the_place() -> None:
    """A line of flow style may be longer than a terminal."""
    line = "x" * 500 + "HERE" + "y" * 500
    _, excerpt, caret = shown(line, 1, 501)
    assert len(excerpt) <= WIDTH + 2
    assert excerpt[caret.index("^") :].startswith("HERE")


def test_a_problem_without_a_line_is_one_line() -> None:
    """A missing file has no place."""
    assert shown("a", 0, 0) == ["f.yaml: `x`: wrong"]
    assert report([Problem("gone.yaml", 3, 1, "m")], {}) == "gone.yaml:3:1: m"


def test_nothing_that_a_terminal_obeys_is_printed() -> None:
    """T19: escape sequences and bidi marks of a spec stay in the spec."""
    text = "\n".join(shown("a: \x1b[31m\u202e\x07\n", 1, 4, "m \x1b]0;x\x07"))
    assert all(c == "\n" or c.isprintable() for c in text)


SECRET = "c4n4ry5ecret"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (f"  api_key: {SECRET}\n", 1, "`listen.api_key`: expected a map, found text"),
        (f"  api_key:\n    {SECRET}\n", 2, "`listen.api_key`: expected a map, found text"),
        (f"secrets: {{HF_TOKEN: {SECRET}}}\n", 1, "`secrets.HF_TOKEN`: expected a map, found text"),
        (f"env: {{MY_PASSWORD: {SECRET}, B: 1}}\n", 1, "`env.B`: expected text, found a number"),
        (f"x: 'sk-{SECRET}\n", 1, "the closing quote is missing"),
        (f"x: [hf_{SECRET}\n", 1, "`,` or `]` is missing"),
        (f'"api_key": "{SECRET}" x\n', 1, "a `:` where no key can be"),
        (f"password={SECRET}: 1\n", 1, "unknown key"),
        (f"args: {{x: MY_TOKEN={SECRET}}}\n", 1, "`args.x`: wrong"),
        (f"x: https://me:{SECRET}@example.org/a\n", 1, "`x`: wrong"),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_shown(text: str, line: int, message: str) -> None:
    """S17: the output of a check ends up in the log of a build."""
    output = "\n".join(shown(text, line, 3, message))
    assert SECRET not in output
    assert "^" in output


def test_a_reference_to_a_secret_is_no_secret() -> None:
    """A path is what belongs there, and is shown."""
    assert shown("api_key: {file: key}\n", 1, 17, "`x`: m")[1] == "  api_key: {file: key}"


def test_a_line_of_one_long_word_is_shown_at_once() -> None:
    """T05: looking for secrets in an excerpt costs one look at the line, however long a word is."""
    text = report([Problem("a.yaml", 1, 1, "no map")], {"a.yaml": b"a" * 250_000})
    assert text.startswith("a.yaml:1:1: no map\n  aaaa")
    text = report([Problem("a.yaml", 1, 1, "no map")], {"a.yaml": b"a-" * 125_000})
    assert text.startswith("a.yaml:1:1: no map\n  a-a-")


def test_a_count_of_tokens_is_no_secret() -> None:
    """`max_tokens` may be read where it is wrong; `hf_token` may not."""
    line = b"{max_tokens: 1e9, hf_token: abcdef}"
    shown = report([Problem("a.yaml", 1, 1, "x")], {"a.yaml": line})
    assert "max_tokens: 1e9" in shown
    assert "abcdef" not in shown


def test_a_warning_of_a_profile_is_one_line_however_many_servers_extend_it() -> None:
    """A thousand servers of one profile do not bury what else is said."""
    about = [Problem("p.yaml", 3, 5, "`args.x`: is old", f"server-{i}") for i in range(1000)]
    alone = Problem("q.yaml", 1, 1, "`args.y`: is odd", "alone")
    assert remarks([*about, alone]) == [
        "warning: p.yaml:3:5: `args.x`: is old (1000 servers: server-0, server-1, server-2, and 997 more)",
        "warning: q.yaml:1:1: `args.y`: is odd",
    ]

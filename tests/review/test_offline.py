"""What a change of the specs would do, without any host: compared, worded, bounded, and never misread."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from reconciler.core.errors import SpecError, UsageError
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.review import Kind, Review, headline, read_review, review_json
from reconciler.offline import base_of, review_of_fleets
from reconciler.sources.revision_files import files_at
from reconciler.views.markdown import (
    GITHUB_LIMIT,
    code,
    fenced,
    marked,
    marker,
    pages,
)
from reconciler.views.review import review_lines
from reconciler.wiring import engines

HOST = "apiVersion: reconciler/v1\nkind: Host\nname: one\nssh: {address: 192.0.2.1}\n"
PROFILE = "apiVersion: reconciler/v1\nkind: Profile\nname: base\ntimeouts: {drain: 5s}\n"


def server(name: str = "qwen", gpu: int = 0, extra: str = "", **changes: str) -> str:
    """Give a server's document."""
    text = f"""apiVersion: reconciler/v1
kind: Server
name: {name}
host: one
gpus: [{gpu}]
engine: {{name: custom, command: [/usr/bin/serve, --steps, "1"]}}
model: some/model
listen: {{port: {30000 + gpu}}}
gate:
  quality: "off"
  runs:
    - {{name: single, concurrency: 1, requests: 64, max_tokens: 64, min_decode_tps: 100, max_ttft_p95: 600ms}}
{extra}"""
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def load(files: Mapping[str, bytes]) -> Fleet:
    """Judge spec files."""
    return load_fleet(files, engines=engines())


def files(**texts: str) -> dict[str, bytes]:
    """Name files by their stem."""
    return {f"specs/{name}.yaml": text.encode() for name, text in texts.items()}


def reviewed(base: dict[str, bytes], head: dict[str, bytes]) -> Review:
    """Compare two sets of files as the command does."""
    same = frozenset(n for n in base if base[n] == head.get(n))
    before, untouched = base_of(base, same, head, load)
    return review_of_fleets(before, load(head), engines(), untouched=untouched)


def one(base: str | None, head: str | None) -> Review:
    """Compare one server's document before and after."""
    first = files(hosts=HOST, **({"a": base} if base is not None else {}))
    return reviewed(first, files(hosts=HOST, **({"a": head} if head is not None else {})))


# -- what is compared ------------------------------------------------------------------------------------------


def test_nothing_changed_is_nothing() -> None:
    """The same specs, written another way, are no change."""
    found = one(server(), "# a comment\n" + server())
    assert found.servers == ()
    assert found.unchanged == 1
    assert not found.differs
    assert headline(found) == "nothing changes"


def test_each_field_is_listed_with_what_it_needs() -> None:
    """Restart, reload and controller fields are told apart, and the highest decides."""
    found = one(
        server(extra="timeouts: {stop: 20s, drain: 5s}\n"),
        server(extra="timeouts: {stop: 40s, drain: 9s}\n").replace('"1"', '"2"'),
    )
    (change,) = found.servers
    assert change.kind is Kind.CHANGED
    assert change.effect == "restart"
    assert {c.path: c.effect for c in change.changes} == {
        "engine.command": "restart",
        "timeouts.drain": "controller",
        "timeouts.stop": "reload",
    }
    assert '-    "--steps" "1"' in change.unit_diff
    assert '+    "--steps" "2"' in change.unit_diff
    reload = one(server(), server(extra="timeouts: {stop: 40s}\n"))
    assert reload.servers[0].effect == "reload"
    assert not reload.servers[0].disturbs


def test_a_limit_that_is_let_down_is_called_looser() -> None:
    """Lower for a minimum, higher for a maximum, gone at all: each lets more through."""
    found = one(
        server(),
        server().replace("min_decode_tps: 100", "min_decode_tps: 90").replace("600ms", "1s"),
    ).servers[0]
    assert {(m.limit, m.looser) for m in found.gate_moves} == {
        ("single.min_decode_tps", True),
        ("single.max_ttft_p95", True),
    }
    assert found.effect == "controller"
    assert found.unit_diff == ""
    stricter = one(server(), server().replace("600ms", "500ms")).servers[0]
    assert [m.looser for m in stricter.gate_moves] == [False]
    gone = one(server(), server().replace(", max_ttft_p95: 600ms", "")).servers[0]
    assert [m.looser for m in gone.gate_moves] == [True]


def test_added_removed_moved_and_held_are_each_said() -> None:
    """A server that came, went, went elsewhere, or cannot be read any more is never one of the others."""
    assert one(None, server()).servers[0].kind is Kind.ADDED
    removed = one(server(), server("other", 1)).servers
    assert {(s.server, s.kind) for s in removed} == {("qwen", Kind.REMOVED), ("other", Kind.ADDED)}
    held = one(server(), server().replace("gpus: [0]", "gpus: [0]\ntypo: 1"))
    assert [(s.kind, s.host) for s in held.servers] == [(Kind.HELD, "one")]
    assert held.problems
    two = HOST + "---\n" + HOST.replace("name: one", "name: two")
    moved = reviewed(
        files(hosts=two, a=server()), files(hosts=two, a=server().replace("host: one", "host: two"))
    ).servers[0]
    assert (moved.kind, moved.effect, moved.host_before, moved.host) == (
        Kind.MOVED, "restart", "one", "two",
    )  # fmt: skip


def test_removal_is_in_doubt_while_specs_are_wrong() -> None:
    """S13: with a mistake anywhere, a server that is not there may only be unreadable."""
    found = reviewed(files(hosts=HOST, a=server()), files(hosts=HOST, b="kind: Serve\n"))
    removed = next(s for s in found.servers if s.kind is Kind.REMOVED)
    assert "nothing is removed" in removed.note


def test_a_profile_reaches_servers_in_files_that_did_not_change() -> None:
    """Their files have the same bytes and their merged specs do not."""
    user = server(extra="extends: base\n")
    base = files(hosts=HOST, profiles=PROFILE, a=user, b=server("plain", 1))
    head = {**base, "specs/profiles.yaml": PROFILE.replace("5s", "9s").encode()}
    found = reviewed(base, head)
    assert [s.server for s in found.servers] == ["qwen"]
    assert found.unchanged == 1


@pytest.mark.parametrize("key", ['"k\\x69nd": Profile', 'kind: "Prof\\x69le"', "? kind\n: Profile"])
def test_a_profile_that_hides_its_kind_is_still_seen(key: str) -> None:
    """A change cannot be kept out of a review by how a profile is spelt."""
    user = server(extra="extends: base\n")
    hidden = PROFILE.replace("kind: Profile", key)
    base = files(hosts=HOST, profiles=hidden, a=user)
    head = {**base, "specs/profiles.yaml": hidden.replace("5s", "9s").encode()}
    if load(base).problems:
        pytest.skip("the spec language refuses this spelling")
    assert [s.server for s in reviewed(base, head).servers] == ["qwen"]


def test_a_host_that_is_reached_elsewhere_is_shown() -> None:
    """Another address sends everything to another machine."""
    base = files(hosts=HOST, a=server())
    found = reviewed(
        base, {**base, "specs/hosts.yaml": HOST.replace("192.0.2.1", "192.0.2.9").encode()}
    )
    assert [h.host for h in found.hosts] == ["one"]
    assert found.differs
    assert "192.0.2.9" in pages(found)[0]


# -- a comment that nothing can break ----------------------------------------------------------------------------

HOSTILE = [
    "@everyone #1 fixes #2 GH-3 !4 $5 ~6 &7",
    "<img src=x onerror=alert(1)><script>x</script></details></code>",
    "```\n# injected\n```",
    "`````` ticks ``",
    "| cell | break \\|",
    "<!-- reconcile:specs:1 -->",
    "-->",
    "\\`escape\\`",
    "[link](javascript:alert(1)) ![i](http://x/y) www.example.com",
    "http://example.com/a?b=c",
]


def outside_code(markdown: str) -> str:
    """Give what a forge would read as Markdown or HTML: everything but fences, code spans and <code>."""
    text = re.sub(r"(?ms)^(`{3,})[a-z]*\n.*?^\1$", "", markdown)
    text = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    return re.sub(r"<code>.*?</code>", "", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_specs_stands_only_in_code(text: str) -> None:
    """No mention, issue number, link, tag or hidden mark of a spec reaches what a forge reads (S17, S18)."""
    quoted = json.dumps(text)
    found = one(
        server(), server(extra=f"env: {{NOTE: {quoted}}}\n").replace("some/model", "other/model")
    )
    if (
        found.problems
    ):  # The spec language refuses it; then it must not come through its message either.
        pass
    page = pages(found)[0]
    prose = outside_code(page)
    allowed = {"<!--", "-->", "<details>", "<summary>", "</summary>", "</details>"}
    tags = set(re.findall(r"<[^>\s]*>?|-->", prose)) - allowed
    assert not tags, tags
    assert "@" not in prose
    assert not re.search(r"(?<!#)#\d", prose)
    assert "example.com" not in prose
    assert "injected" not in prose
    assert page.count(marker("plan")) == 1
    assert page.startswith(marker("plan"))


@pytest.mark.parametrize("text", [*HOSTILE, "`", "``a`", "a`b @x ``c", "` `", "x`"])
def test_a_code_span_holds_all_of_its_text(text: str) -> None:
    """Whatever ticks are inside, nothing is left for a forge to read."""
    assert outside_code(f"- {code(text)} end") == "-  end"


@pytest.mark.parametrize("name", ["a|b", "x\n| y", "`", "``a`", " ", "a\\", "a\\|b"])
def test_a_server_of_any_name_breaks_no_table(name: str) -> None:
    """A review that another job made is believed in nothing: its names may be anything."""
    found = one(server(), server().replace('"1"', '"2"'))
    data = json.loads(json.dumps(review_json(found)))
    data["servers"][0]["server"] = name
    page = pages(read_review(json.dumps(data).encode()))[0]
    rows = [line for line in page.split("\n") if line.startswith("| 🔁")]
    assert len(rows) == 1
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 6


def test_what_cannot_be_seen_is_shown() -> None:
    """Bidi and control characters are escapes, so that nothing reads otherwise than it is."""
    assert code("a\u202eb\x1b[31m\u2028c\u200b") == "`a\\u202eb\\u001b[31m\\u2028c\\u200b`"
    assert code("") == "`(empty)`"


@pytest.mark.parametrize("text", ["```", "````a````", "a\n~~~\n`````"])
def test_a_fence_is_longer_than_any_inside(text: str) -> None:
    """Content cannot close its own fence."""
    block = fenced(text, "diff")
    fence = block.split("\n", 1)[0].removesuffix("diff")
    assert fence not in text
    assert len(fence) >= 3


def many(count: int, wide: str = "") -> Review:
    """Give a review of many changed servers."""
    base = files(hosts=HOST, **{f"s{i}": server(f"s{i}", i) for i in range(count)})
    head = files(
        hosts=HOST,
        **{
            f"s{i}": server(f"s{i}", i, extra=f"env: {{A: {json.dumps(wide)}}}\n").replace(
                '"1"', '"2"'
            )
            for i in range(count)
        },
    )
    return reviewed(base, head)


@pytest.mark.parametrize("wide", ["", "é🙂" * 200])
def test_no_page_is_longer_than_its_forge_allows(wide: str) -> None:
    """In bytes, so also in characters however they are counted; each page is whole by itself, and what is left out is said."""
    found = many(40, wide)
    for limit, most in ((4_000, 1), (9_000, 3), (GITHUB_LIMIT, 2)):
        parts = pages(found, limit=limit, most=most)
        assert 1 <= len(parts) <= most
        for number, page in enumerate(parts, 1):
            assert len(page.encode()) <= limit
            assert marked(page, "plan") == number
            assert page.count("<details>") == page.count("</details>")
            assert len(re.findall(r"(?m)^```", page)) % 2 == 0
        shown = sum(page.count("#### ") for page in parts)
        if shown < 40:
            assert f"{40 - shown} more server" in parts[-1]


def test_a_mark_is_known_again_only_in_the_first_line() -> None:
    """A body that quotes our mark further down is not ours."""
    assert marked(f"{marker('a/b', 2)}\nx", "a/b") == 2
    assert marked(f"hello\n{marker('a/b')}", "a/b") is None
    assert marked(marker("other"), "a/b") is None
    with pytest.raises(ValueError, match="no key"):
        marker("a-->b")


# -- as data -----------------------------------------------------------------------------------------------------


def test_a_review_comes_back_as_it_was() -> None:
    """One job makes it, another posts it."""
    found = one(server(), server().replace('"1"', '"2"').replace("600ms", "1s"))
    again = read_review(json.dumps(review_json(found)).encode())
    assert again == found or json.dumps(review_json(again)) == json.dumps(review_json(found))
    assert pages(again) == pages(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not JSON"),
        (b"[1]", "no review"),
        (b'{"type": "review", "format_version": "2.0"}', "reads 1"),
        (b'{"type": "review", "format_version": "1.0"}', "damaged at"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_is_no_review_is_refused(text: bytes, why: str) -> None:
    """Damaged input is a sentence, never half a comment."""
    with pytest.raises(SpecError, match=why):
        read_review(text)


# -- the base, from git ------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    """Give a repository in tmp_path/work, and a way to run git in it."""
    work = tmp_path / "work"
    (work / "specs").mkdir(parents=True)

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(work), "-c", "user.name=T", "-c", "user.email=t@example.org", *words],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    git("init", "-q")
    return git


def test_the_base_is_read_from_the_commit_and_not_from_a_checkout(
    tmp_path: Path, repository: Callable[..., str]
) -> None:
    """Also with links, submodules and filters in it, none of which is acted on; what is equal is not read twice."""
    work = tmp_path / "work"
    (work / "specs" / "hosts.yaml").write_text(HOST)
    (work / "specs" / "a.yaml").write_text(server())
    (work / "specs" / "link.yaml").symlink_to("/etc/passwd")
    (work / "specs" / "note.txt").write_text("no spec")
    (work / ".gitattributes").write_text("*.yaml filter=evil\n")
    repository("config", "filter.evil.smudge", "touch /nonexistent/x; cat")
    repository("add", "-A")
    repository("commit", "-qm", "one")
    (work / "specs" / "a.yaml").write_text(server().replace('"1"', '"2"'))
    specs = work / "specs"
    hand = {str(p): p.read_bytes() for p in specs.glob("*.yaml") if not p.is_symlink()}
    found = files_at(specs, "HEAD", hand)
    assert set(found.files) == set(hand)
    assert found.same == {str(specs / "hosts.yaml")}
    assert b'"1"' in found.files[str(specs / "a.yaml")]
    assert [Path(p.file).name for p in found.unread] == ["link.yaml"]
    only = files_at(specs / "a.yaml", "HEAD", {})
    assert list(only.files) == [str(specs / "a.yaml")]
    assert files_at(work / "elsewhere", "HEAD", {}).files == {}


@pytest.mark.parametrize("revision", ["--output=x", "nope", "HEAD:specs", "", "a b", "x" * 300])
def test_a_revision_that_can_be_none_is_usage(
    revision: str, tmp_path: Path, repository: Callable[..., str]
) -> None:
    """Neither an option nor a path gets through, and a shallow clone is told how to fetch."""
    repository("commit", "-q", "--allow-empty", "-m", "one")
    with pytest.raises(UsageError):
        files_at(tmp_path / "work" / "specs", revision, {})


def test_without_a_repository_there_is_no_base(tmp_path: Path) -> None:
    """It says so."""
    with pytest.raises(UsageError, match="no git repository"):
        files_at(tmp_path, "HEAD", {})


def test_people_read_the_same_on_a_terminal() -> None:
    """The text form names the fields, the limits and what is needed."""
    found = one(server(), server().replace('"1"', '"2"').replace("600ms", "1s"))
    text = "\n".join(review_lines(found))
    assert "engine.command" in text
    assert "looser" in text
    assert "1 server restarts" in text

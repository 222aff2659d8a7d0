"""Comments and statuses on three forges: one comment, kept up to date, whatever fails; the token seen by nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from forge_server import (
    TOKEN,
    FakeForge,
    broken,
    echoes_the_token,
    elsewhere,
    flood,
    forge_server,
    hangs_up,
    limited,
    limited_as_forbidden,
)

from reconciler.cli.comment import _comment
from reconciler.core.conditions import CommitStatus
from reconciler.core.review import Kind, Review, ServerReview, review_json
from reconciler.reporting import gitea, github, gitlab
from reconciler.reporting.base import Forge, ForgeError, Place, Status
from reconciler.reporting.ci import place_of, token_in
from reconciler.reporting.client import MAX_WAIT_S, ForgeClient, checked_api
from reconciler.views.markdown import marked, marker

FORGES: dict[str, Forge] = {"github": github, "gitlab": gitlab, "gitea": gitea}
COMMIT = "a" * 40
KEY = "specs"


@pytest.fixture(params=sorted(FORGES))
def forge(request: pytest.FixtureRequest) -> Iterator[FakeForge]:
    """Give each forge in turn."""
    with forge_server(request.param) as serving:
        yield serving


class Waits:
    """Keeps how long was waited, without waiting."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)


def client(forge: FakeForge, waits: Waits | None = None, token: str = TOKEN) -> ForgeClient:
    """Give a client for it."""
    place = Place(forge.kind, forge.url, "ops/llm", 7, COMMIT)
    return ForgeClient(FORGES[forge.kind], place, token, sleep=waits or Waits())


def put(forge: FakeForge, *texts: str, waits: Waits | None = None, create: bool = True) -> str:
    """Make these the parts of our comment."""
    bodies = [f"{marker(KEY, n)}\n\n{text}\n" for n, text in enumerate(texts, 1)]
    with client(forge, waits) as connected:
        return connected.put_comments(bodies, lambda body: marked(body, KEY), create=create)


def texts(forge: FakeForge) -> list[str]:
    """Give what our comments say."""
    return [b.partition("\n\n")[2].strip() for b in forge.bodies() if marked(b, KEY)]


# -- one comment --------------------------------------------------------------------------------------------------


def test_one_comment_is_written_and_then_updated(forge: FakeForge) -> None:
    """Among others, on whatever page; what is the same is not written again."""
    for number in range(5):
        forge.add(f"talk {number}", "somebody")
    assert put(forge, "first") == "1 written"
    assert put(forge, "first") == "as it was"
    assert put(forge, "second") == "1 updated"
    assert texts(forge) == ["second"]
    assert len(forge.comments) == 6


def test_parts_come_and_go(forge: FakeForge) -> None:
    """A review that grew has more comments; one that shrank has fewer, and duplicates go."""
    put(forge, "a", "b", "c")
    assert texts(forge) == ["a", "b", "c"]
    forge.add(f"{marker(KEY, 1)}\n\ntwice")
    assert put(forge, "d") == "1 updated, 3 removed"
    assert texts(forge) == ["d"]


def test_nothing_to_say_is_not_said(forge: FakeForge) -> None:
    """A first comment that says that nothing changes is noise; one that stands there is brought up to date."""
    put(forge, "none", create=False)
    assert forge.comments == []
    put(forge, "restart")
    put(forge, "none", create=False)
    assert texts(forge) == ["none"]


def test_a_copy_of_our_mark_is_not_ours(forge: FakeForge) -> None:
    """Anybody can write our mark; their comment is left alone, and does not stand for ours."""
    theirs = forge.add(f"{marker(KEY, 1)}\n\nall is well, merge it", "mallory")
    put(forge, "restart")
    assert theirs in forge.comments
    assert "all is well" in theirs.body
    assert texts(forge) == ["all is well, merge it", "restart"]


def test_a_workflow_that_may_not_ask_who_it_is() -> None:
    """GitHub's own token cannot: then only a bot's comments can be ours."""
    with forge_server("github") as forge:
        forge.may_ask_who = False
        person = forge.add(f"{marker(KEY, 1)}\n\nfrom a person", "mallory")
        bot = forge.add(f"{marker(KEY, 1)}\n\nold", "github-actions[bot]", bot=True)
        assert put(forge, "new") == "1 updated"
        assert "new" in bot.body
        assert "from a person" in person.body


# -- what fails ----------------------------------------------------------------------------------------------------


def test_a_forge_that_is_busy_is_waited_for(forge: FakeForge) -> None:
    """As long as it asks, within reason."""
    waits = Waits()
    forge.faults = [limited, limited_as_forbidden, broken, hangs_up]
    assert put(forge, "x", waits=waits) == "1 written"
    assert waits.slept == [3.0, 7.0, 4.0, 8.0]
    assert max(waits.slept) <= MAX_WAIT_S


def test_a_forge_that_stays_away_is_an_error(forge: FakeForge) -> None:
    """Bounded tries, and it says what the last answer was."""
    forge.faults = [broken] * 20
    with pytest.raises(ForgeError, match=r"after 5 tries \(HTTP 502\)"):
        put(forge, "x")


@pytest.mark.parametrize("fault", [broken, hangs_up])
def test_a_comment_whose_answer_was_lost_is_not_written_twice(forge: FakeForge, fault) -> None:  # type: ignore[no-untyped-def]
    """S10: it may stand there, so the comments are read again before anything is written."""
    forge.after = [fault]
    put(forge, "once")
    assert texts(forge) == ["once"]


def test_the_token_goes_to_one_address(forge: FakeForge) -> None:
    """A redirect is refused, not followed; and the next page is never asked for where a header says it is."""
    forge.faults = [elsewhere]
    with pytest.raises(ForgeError, match=r"moved to 127\.0\.0\.1:9"):
        put(forge, "x")
    assert len(forge.asked) == 1


def test_an_answer_without_end_is_bounded(forge: FakeForge) -> None:
    """Memory is not the forge's to fill."""
    forge.faults = [flood]
    with pytest.raises(ForgeError, match="larger than"):
        put(forge, "x")


def test_no_error_prints_the_token(forge: FakeForge) -> None:
    """S17: also where something quotes it."""
    forge.faults = [echoes_the_token]
    with pytest.raises(ForgeError) as caught:
        put(forge, "x")
    assert TOKEN not in str(caught.value)
    assert "***" in str(caught.value)
    with (
        pytest.raises(ForgeError, match="is the token valid") as wrong,
        client(forge, token="no") as connected,
    ):
        connected.put_comments(["x"], lambda _b: None)
    assert "'no'" not in str(wrong.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://git.example.org/api/v1",
        "https://me:pw@git.example.org",
        "ftp://x",
        "",
        "https://x/?a=b",
    ],
)
def test_an_address_that_would_show_the_token_is_refused(url: str) -> None:
    """Unprotected, or no address at all."""
    with pytest.raises(ForgeError):
        checked_api(url)


@pytest.mark.parametrize(
    "place",
    [
        Place("github", "https://x", "../../user"),
        Place("github", "https://x", "a/..", 7),
        Place("github", "https://x", "a/b?x=1", 7),
        Place("github", "https://x", "a/b", 0),
        Place("github", "https://x", "a/b", 7, "HEAD"),
    ],
)
def test_a_place_that_leads_elsewhere_is_refused(place: Place) -> None:
    """What builds hand over becomes part of a path."""
    with pytest.raises(ForgeError, match="nothing was posted"):
        ForgeClient(github, place, TOKEN)


# -- statuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(CommitStatus))
def test_a_status_is_set_in_the_forges_own_words(forge: FakeForge, state: CommitStatus) -> None:
    """And set again without an error, also on GitLab, which refuses a step from a state to itself."""
    with client(forge) as connected:
        connected.set_status(
            Status("reconcile/specs", state, "x" * 400, "https://ci.example.org/1")
        )
        connected.set_status(Status("reconcile/specs", state, "again"))
    first = forge.statuses[0]
    words = {"failure": "failed", "error": "failed"} if forge.kind == "gitlab" else {}
    assert first["state"] == words.get(state.value, state.value)
    assert (first.get("context") or first.get("name")) == "reconcile/specs"
    assert len(first["description"]) <= 255
    assert first["target_url"] == "https://ci.example.org/1"


# -- builds ---------------------------------------------------------------------------------------------------------

EVENT = json.dumps({"pull_request": {"number": 7, "head": {"sha": COMMIT}}}).encode()


def test_a_build_knows_where_it_is() -> None:
    """The head of the pull request, not the merge that GitHub makes of it; Gitea before GitHub, whose names it copies."""
    common = {
        "GITHUB_ACTIONS": "true", "GITHUB_REPOSITORY": "ops/llm", "GITHUB_API_URL": "https://api.github.com",
        "GITHUB_EVENT_PATH": "/e.json", "GITHUB_SHA": "b" * 40,
    }  # fmt: skip
    found = place_of(common, lambda _p: EVENT)
    assert found == Place("github", "https://api.github.com", "ops/llm", 7, COMMIT)
    push = place_of(common, lambda _p: b"{}")
    assert push is not None
    assert (push.request, push.commit) == (None, "b" * 40)
    other = place_of({**common, "GITEA_ACTIONS": "true"}, lambda _p: EVENT)
    assert other is not None
    assert other.forge == "gitea"
    lab = {
        "GITLAB_CI": "true", "CI_API_V4_URL": "https://gitlab.example.org/api/v4", "CI_PROJECT_ID": "42",
        "CI_MERGE_REQUEST_IID": "7", "CI_COMMIT_SHA": COMMIT,
    }  # fmt: skip
    assert place_of(lab, lambda _p: b"") == Place(
        "gitlab", "https://gitlab.example.org/api/v4", "42", 7, COMMIT
    )
    assert place_of({}, lambda _p: b"") is None
    with pytest.raises(ForgeError, match="event"):
        place_of(common, lambda _p: b"{")
    assert token_in({"GITEA_TOKEN": "a", "GITHUB_TOKEN": "b"}, "gitea") == "a"
    assert token_in({"CI_JOB_TOKEN": "a"}, "gitlab") == ""


def test_the_command_posts_a_review(
    forge: FakeForge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From a file that another job made, with a token from a file that only its owner reads."""
    found = Review(
        (ServerReview("qwen", "one", Kind.CHANGED, "restart", note="@everyone"),), unchanged=3
    )
    file = tmp_path / "review.json"
    file.write_text(json.dumps(review_json(found)))
    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    secret.chmod(0o600)
    for name in ("GITHUB_ACTIONS", "GITLAB_CI", "GITEA_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    asked = {"forge": forge.kind, "api": forge.url, "repository": "ops/llm", "commit": COMMIT}
    assert _comment(file, asked, 7, secret, "specs", "") == 0
    (body,) = forge.bodies()
    assert "1 server restarts" in body
    assert "@everyone" not in body
    assert forge.statuses[0]["state"] == "success"
    assert "status reconcile/specs: success" in capsys.readouterr().out
    file.write_text(json.dumps(review_json(Review((), 1, problems=("a.yaml:1:1: wrong",)))))
    assert _comment(file, asked, 7, secret, "specs", "") == 0
    assert "mistake" in forge.bodies()[0]
    assert forge.statuses[-1]["state"] in {"failure", "failed"}

"""`reconcile comment`: put a review under its pull request, and a status beside its commit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli.context import guarded, out
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.core.review import Review
    from reconciler.reporting.base import Forge, Place, Status

PARTS = 4
"""Of one review. More than four long comments are read by nobody; what is left out is said."""


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def comment(
        review: Annotated[Path, typer.Argument(help="What `--dry-run --offline -o json` printed.")],
        forge: Annotated[
            str, typer.Option("--forge", help="github, gitlab or gitea; found out in CI.")
        ] = "",
        api: Annotated[str, typer.Option("--api", help="Address of the forge's API.")] = "",
        repo: Annotated[str, typer.Option("--repo", help="owner/name, or GitLab's id.")] = "",
        request: Annotated[
            int | None, typer.Option("--request", help="Number of the pull or merge request.")
        ] = None,
        commit: Annotated[str, typer.Option("--commit", help="Full id of its head.")] = "",
        token_file: Annotated[
            Path | None,
            typer.Option("--token-file", help="Else GITHUB_TOKEN, GITLAB_TOKEN or GITEA_TOKEN."),
        ] = None,
        key: Annotated[
            str, typer.Option("--key", help="Tells the comments of several runs apart.")
        ] = "specs",
        link: Annotated[str, typer.Option("--link", help="Of the build, for the status.")] = "",
    ) -> None:
        """Post a review on GitHub, GitLab or Gitea: one comment that is updated, and a commit status.

        In CI everything but the review is found in the build's variables. The status `reconcile/KEY` is success when the
        change can be planned, failure when a spec is wrong: it does not wait for the merge, which it would hold up.

        Examples:
            reconcile --dry-run --offline --base origin/main -o json > review.json
            reconcile comment review.json
            reconcile comment review.json --forge gitea --api https://git.example.org/api/v1 --repo ops/llm --request 7
        """
        asked = {"forge": forge, "api": api, "repository": repo, "commit": commit}
        guarded(lambda: _comment(review, asked, request, token_file, key, link))


def _comment(
    path: Path,
    asked: Mapping[str, str],
    request: int | None,
    token_file: Path | None,
    key: str,
    link: str,
) -> int:
    from reconciler.cli.saved import read_file
    from reconciler.core.review import read_review
    from reconciler.reporting.client import ForgeClient
    from reconciler.views.markdown import marked, marker, pages

    try:
        marker(key)
    except ValueError as error:
        raise UsageError(str(error)) from error
    review = read_review(read_file(path))
    place = _place(asked, request)
    forge = _member(place.forge)
    parts = pages(review, limit=forge.comment_limit, key=key, most=PARTS)
    with ForgeClient(forge, place, _token(place, token_file)) as client:
        if place.request is not None:
            done = client.put_comments(
                parts,
                lambda body: marked(body, key),
                create=review.differs or bool(review.problems),
            )
            out(f"comment: {done}")
        if place.commit:
            status = plan_status(review, key, link)
            client.set_status(status)
            out(f"status {status.context}: {status.state.value}, {status.description}")
    return 0


def plan_status(review: Review, key: str, link: str) -> Status:
    """Give the status of a plan: whether there is one, not whether it was carried out."""
    from reconciler.core.conditions import CommitStatus
    from reconciler.core.review import headline
    from reconciler.reporting.base import Status

    state = CommitStatus.FAILURE if review.problems else CommitStatus.SUCCESS
    return Status(f"reconcile/{key}", state, headline(review), link)


def _place(asked: Mapping[str, str], request: int | None) -> Place:
    from reconciler.reporting.base import Place
    from reconciler.reporting.ci import place_of

    found = place_of(os.environ, lambda name: Path(name).read_bytes())
    if found is None or (asked["forge"] and asked["forge"] != found.forge):
        found = Place(asked["forge"], "", "")  # Nothing of another forge's build is meant.
    place = replace(
        found,
        api=asked["api"] or found.api,
        repository=asked["repository"] or found.repository,
        commit=asked["commit"] or found.commit,
    )
    place = place if request is None else replace(place, request=request)
    if not place.forge or not place.api or not place.repository:
        message = "this is no build of a forge that is known; say --forge, --api and --repo"
        raise UsageError(message)
    if place.request is None and not place.commit:
        message = (
            "there is neither a pull request nor a commit to write to; say --request or --commit"
        )
        raise UsageError(message)
    return place


def _member(name: str) -> Forge:
    from reconciler.reporting.forges import FORGES

    if name not in FORGES:
        message = f"{name!r} is no forge that is known; there are: {', '.join(FORGES)}"
        raise UsageError(message)
    return FORGES[name]


def _token(place: Place, path: Path | None) -> str:
    from reconciler.reporting.ci import TOKENS, token_in
    from reconciler.sources.git_binary import read_secret

    token = read_secret(path) if path is not None else token_in(os.environ, place.forge).strip()
    if not token or not token.isascii() or not token.isprintable():
        names = " or ".join(TOKENS[place.forge])
        message = f"there is no token: say --token-file, or set {names}"
        raise UsageError(message)
    return token

"""`reconcile --dry-run --offline`: what a change of the specs would do, without any host."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from reconciler.cli.context import PassOutput, load_snapshot, out, out_markup, say_problems
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.cli.run import PassOptions
    from reconciler.core.fleet import Fleet
    from reconciler.core.review import Review
    from reconciler.core.survey import Survey
    from reconciler.settings import Settings


def offline(options: PassOptions, setup: Settings) -> int:
    """Compare the specs at hand with those at a base, and print what differs."""
    from reconciler.cli.run import check_names
    from reconciler.offline import base_of, review_of_fleets
    from reconciler.sources.revision_files import RevisionFiles, files_at, head_of
    from reconciler.wiring import engines

    fleet, files = load_snapshot(options.specs, setup)
    only = frozenset(options.servers)
    base = RevisionFiles("", {}, frozenset())
    if options.base is not None:
        base = files_at(options.specs, options.base, files)

    def load(part: Mapping[str, bytes]) -> Fleet:
        from reconciler.core.fleet import load_fleet

        return load_fleet(part, engines=engines())

    before, untouched = base_of(base.files, base.same, files, load)
    if only - {s.name for s in before.servers}:
        check_names(fleet, sorted(only - {s.name for s in before.servers}))
    review = review_of_fleets(before, fleet, engines(), untouched=untouched, only=only)
    head = head_of(options.specs) if options.base is not None else ""
    review = replace(
        review,
        base=base.commit,
        head=head if head != base.commit else "",
        base_problems=review.base_problems + len(base.unread),
    )
    say_problems(fleet.problems)
    return shown(review, options)


def shown(review: Review, options: PassOptions) -> int:
    """Print a review and give the exit code: 65 for mistakes, 2 for differences where they were asked for."""
    from reconciler.core.conditions import DIFFERENCES, SPEC_ERROR, SUCCESS
    from reconciler.core.review import review_json
    from reconciler.views.markdown import pages
    from reconciler.views.review import review_lines

    match options.output:
        case PassOutput.JSON:
            out(json.dumps(review_json(review), indent=2))
        case PassOutput.MARKDOWN:
            out(pages(review, key=comment_key(options))[0].rstrip("\n"))
        case PassOutput.TEXT:
            out_markup(review_lines(review, next_words=_next(review, options)))
    if review.problems:
        return SPEC_ERROR.code
    return DIFFERENCES.code if options.detailed and review.differs else SUCCESS.code


def _next(review: Review, options: PassOptions) -> str:
    if options.base is None and review.against is None:
        return "Nothing was compared: every server is shown as new. `--base HEAD` shows what the working tree changes."
    return ""


def comment_key(options: PassOptions) -> str:
    """Name the comment by the folder of specs, so that two fleets in one repository have one each."""
    from reconciler.views.markdown import marker

    name = options.specs.as_posix().strip("/") or "specs"
    try:
        marker(name)
    except ValueError:
        return "plan"
    return name


def check_options(options: PassOptions) -> None:
    """Refuse what makes no sense together.

    Raises:
        UsageError: Something was asked for that would be dropped in silence.
    """
    wrong = ""
    if options.base is not None and not options.offline:
        wrong = "--base compares specs with specs: add --offline"
    elif options.offline and not options.dry_run:
        wrong = "--offline only shows: add --dry-run"
    elif options.output is PassOutput.MARKDOWN and not options.dry_run:
        wrong = "-o markdown is for a plan: add --dry-run"
    elif options.offline and (options.adopt or options.overwrite):
        wrong = (
            "--adopt and --overwrite are about what is on a host, which --offline does not look at"
        )
    if wrong:
        raise UsageError(wrong)


def survey_shown(found: Survey, fleet: Fleet) -> str:
    """Give a plan against hosts as Markdown."""
    from reconciler.offline import review_of_survey
    from reconciler.views.markdown import pages

    return pages(review_of_survey(found, fleet))[0].rstrip("\n")

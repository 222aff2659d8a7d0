"""`reconcile --dry-run --offline`: what a change of the specs would do, without any host."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from reconciler.cli.context import PassOutput, load_snapshot, out, out_markup, say_problems
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from reconciler.cli.run import PassOptions
    from reconciler.core.fleet import Fleet
    from reconciler.core.review import Against, Review
    from reconciler.core.saved_state import SavedState
    from reconciler.core.survey import Survey
    from reconciler.settings import Settings


def offline(options: PassOptions, setup: Settings) -> int:
    """Compare the specs at hand with a base, with a saved state of the hosts, or with both; print what differs."""
    from reconciler.cli.run import check_names
    from reconciler.offline import base_of, review_of_fleets, review_of_survey
    from reconciler.sources.revision_files import RevisionFiles, files_at, head_of
    from reconciler.wiring import engines

    fleet, snapshot = load_snapshot(options.specs, setup)
    say_problems(fleet.problems)
    only = frozenset(options.servers)
    found, state = None, None
    if options.against is not None:
        state, found = _looked_at(options.against, fleet, only)
    if options.base is None and found is not None:
        check_names(fleet, options.servers)
        review = review_of_survey(found, fleet)
    else:
        base = RevisionFiles("", {}, frozenset())
        if options.base is not None:
            base = files_at(options.specs, options.base, snapshot.files)

        def load(part: Mapping[str, bytes]) -> Fleet:
            from reconciler.core.fleet import load_fleet

            return load_fleet(part, engines=engines())

        before, untouched = base_of(base.files, base.same, snapshot.files, load)
        check_names(fleet, sorted(only - {s.name for s in before.servers}))
        review = review_of_fleets(
            before, fleet, engines(), untouched=untouched, found=found, only=only
        )
        head = head_of(options.specs) if options.base is not None else ""
        review = replace(
            review,
            base=base.commit,
            head=head if head != base.commit else "",
            base_problems=review.base_problems + len(base.unread),
        )
    if state is not None and found is not None:
        review = replace(review, against=_against(state, found))
    return shown(review, options)


def _looked_at(path: Path, fleet: Fleet, only: frozenset[str]) -> tuple[SavedState, Survey]:
    from reconciler.cli.saved import read_state_file
    from reconciler.reconcile import survey
    from reconciler.wiring import engines, saved_world

    state = read_state_file(path)
    return state, survey(fleet, saved_world(state, engines()), only=only)


def _against(state: SavedState, found: Survey) -> Against:
    import time

    from reconciler.core.review import Against

    now = time.time()
    return Against(
        taken_at=state.taken_at,
        age_s=state.age_s(now),
        stale=state.is_stale(now),
        unknown_hosts=tuple(h.host.name for h in found.hosts if h.silence),
        plan_hash=found.plan.hash,
    )


def shown(review: Review, options: PassOptions) -> int:
    """Print a review and give the exit code: 65 for mistakes, 2 for differences where they were asked for."""
    from reconciler.core.conditions import DIFFERENCES, SPEC_ERROR, SUCCESS, UNKNOWN
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
    if review.against is not None and review.against.unknown_hosts and options.base is None:
        return UNKNOWN.code  # As in a dry run that asks hosts: nothing is decided about them.
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
    elif options.against is not None and not options.dry_run:
        wrong = "--against only shows: add --dry-run"
    elif options.out is not None and not options.dry_run:
        wrong = "--out saves a plan that is shown: add --dry-run"
    elif options.out is not None and (options.offline or options.against is not None):
        wrong = "--out saves a plan that can be carried out, which needs the hosts: leave --offline and --against"
    elif (options.offline or options.against is not None) and (options.adopt or options.overwrite):
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

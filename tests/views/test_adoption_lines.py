"""What `adopt` says last: how to go on, which depends on whether the spec can be read."""

from __future__ import annotations

import pytest

from reconciler.views.adoption import adoption_lines


@pytest.mark.parametrize(
    ("problems", "last"),
    [
        ((), "Commit the spec, then: "),
        (("`model` is missing",), "Mend the spec, commit it, then: "),
    ],
)
def test_a_spec_that_is_wrong_is_not_to_be_committed(problems: tuple[str, ...], last: str) -> None:
    """The last line names the next step, and that is no commit where the spec has problems."""
    lines = adoption_lines(
        unit="a.service",
        diff="",
        differs=(),
        unmapped=(),
        secrets=(),
        problems=problems,
        command="reconcile --adopt",
    )
    assert lines[-1] == f"{last}reconcile --adopt"

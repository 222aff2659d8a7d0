"""Programs and risky reads end at their limits."""

from __future__ import annotations

import time

from reconciler.helper.programs import TIMED_OUT, capture, each_guarded


def test_a_program_gets_nothing_but_its_words() -> None:
    """No shell, no standard input, the C locale, and both streams apart."""
    script = 'printf "%s" "$1$LC_ALL"; cat; echo oops >&2; exit 7'
    ran = capture(["/bin/sh", "-c", script, "sh", "a b;$(id)"], 10)
    assert (ran.exit_status, ran.stdout, ran.stderr) == (7, "a b;$(id)C", "oops\n")


def test_a_signal_is_told_as_a_shell_tells_it() -> None:
    """128 + n, so that it is no exit code of the program's own."""
    assert capture(["/bin/sh", "-c", "kill -9 $$"], 10).exit_status == 137


def test_a_limit_ends_the_program_and_its_children() -> None:
    """A child that keeps the pipe open does not keep us."""
    began = time.monotonic()
    ran = capture(["/bin/sh", "-c", "sleep 60 & echo begun; sleep 60"], 0.3)
    assert (ran.exit_status, ran.stdout) == (TIMED_OUT, "begun\n")
    assert time.monotonic() - began < 10


def test_output_is_capped_and_said_to_be() -> None:
    """What is over the cap is read and dropped, so that the program does not block."""
    ran = capture(["/bin/sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x"], 30, bytes_max=1000)
    assert (ran.exit_status, len(ran.stdout), ran.truncated) == (0, 1000, True)


def test_one_that_blocks_makes_its_own_item_unknown() -> None:
    """The others are answered, in order, and an error is the item's own too."""

    def act(item: int) -> int:
        if item == 2:
            time.sleep(60)
        return 12 // item

    found = each_guarded([1, 2, 0, 3], act, 0.3)
    assert found[0] == {"known": 12}
    assert "within" in found[1]["unknown"]
    assert "ZeroDivisionError" in found[2]["unknown"]
    assert found[3] == {"known": 4}

"""Durations, sizes and percentages: exact both ways, and refused without their unit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.core.units_of_measure import (
    duration,
    duration_text,
    percentage,
    percentage_text,
    size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("10m", 600.0), ("1h30m", 5400.0), ("250ms", 0.25), ("1.5s", 1.5), ("1d", 86400.0), ("0s", 0.0), ("2m3s4ms", 123.004)],
)  # fmt: skip
def test_durations_are_seconds(text: str, seconds: float) -> None:
    """Every spelling that people use gives the seconds that it means."""
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "90",
        "s",
        "-1s",
        "1 s",
        "1s2h",
        "1s1s",
        "1e3s",
        "٣s",
        "1m\n",
        "0.0001s",
        "9" * 40 + "s",
        "1S",
        "inf s",
    ],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    """A number without a unit, a wrong order or other digits are no duration."""
    with pytest.raises(ValueError, match="duration"):
        duration(text)


@given(st.integers(0, 10**11))
@settings(deadline=None)
def test_a_duration_is_written_in_one_way_that_reads_back(ms: int) -> None:
    """Writing and reading a duration gives the same number, exactly."""
    assert duration(duration_text(ms / 1000)) == ms / 1000


def test_equal_durations_have_one_spelling() -> None:
    """`60s` and `1m` are one value in a revision."""
    assert duration_text(duration("60s")) == duration_text(duration("1m")) == "1m"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("512MiB", 2**29), ("24 GiB", 24 * 2**30), ("1.5GB", 1_500_000_000), ("1kB", 1000), ("7B", 7)],
)
def test_sizes_are_bytes(text: str, size_bytes: int) -> None:
    """Binary and decimal units are told apart."""
    assert size(text) == size_bytes


@pytest.mark.parametrize("text", ["512", "5 M", "-1MiB", "0.5B", "1mib", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    """A size needs its unit."""
    with pytest.raises(ValueError, match="size"):
        size(text)


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("0%", 0.0), ("100%", 1.0), ("0.5%", 0.005), ("12.5 %", 0.125)],
)
def test_percentages_are_shares_of_one(text: str, share: float) -> None:
    """A percentage is a share of one."""
    assert percentage(text) == share


@pytest.mark.parametrize("text", ["5", "101%", "-1%", "%", "1e1%", "100.1%"])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    """A percentage needs its sign and lies from 0 to 100."""
    with pytest.raises(ValueError, match="percentage"):
        percentage(text)


@given(st.integers(0, 100 * 10**4))
@settings(deadline=None)
def test_a_percentage_is_written_in_one_way_that_reads_back(ten_thousandths: int) -> None:
    """Writing and reading a percentage gives the same share, exactly."""
    share = percentage(f"{ten_thousandths / 10**4:.4f}%")
    assert percentage(percentage_text(share)) == share

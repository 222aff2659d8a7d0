"""Every recorded output of a host program is read as its case says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from reconciler.helper.recorded import KINDS, read_recorded

CASES_DIRECTORY = Path(__file__).parents[1] / "recorded" / "host-outputs"
CASES = YAML(typ="safe").load((CASES_DIRECTORY / "cases.yaml").read_text())["cases"]


def _text(name: str | None) -> str:
    return (CASES_DIRECTORY / name).read_bytes().decode() if name else ""


def _holds(expected: Any, found: Any) -> bool:
    """Say whether the found facts say what is expected; they may say more."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return all(key in found and _holds(value, found[key]) for key, value in expected.items())
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_holds, expected, found))
    return type(expected) is type(found) and expected == found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_recorded_output_is_read_as_its_case_says(case: dict[str, Any]) -> None:
    """The verdict and every fact of the case are what the parsers find in the recorded output."""
    context = {"command": case["command"], **(case.get("context") or {})}
    found = read_recorded(
        case["kind"], case["exit"], _text(case["stdout"]), _text(case["stderr"]), context
    )
    assert found["verdict"] == case["verdict"], found
    for name, value in case["facts"].items():
        assert name in found["facts"], f"no fact {name}"
        assert _holds(value, found["facts"][name]), f"{name}: {found['facts'][name]!r}"


def test_there_is_a_case_for_every_kind() -> None:
    """No kind of output is read that no recorded case proves."""
    assert {case["kind"] for case in CASES} == set(KINDS)

"""`reconcile catalogue` against engines made on the fly: well ones, slow ones, and ones that talk without end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from reconciler.cli import catalogue
from reconciler.effects import introspect
from reconciler.engines.catalogue import check_args, read_catalogue

PARSER = """
import argparse, json
print("INFO: talk on standard output")
def count(text):
    if text == "auto": return -1
    return int(float(text[:-1]) * 1000) if text.endswith("k") else int(text)
def rules(text):
    if set(json.loads(text)) - {"known"}: raise ValueError("no such key")
class Pair(argparse.Action):
    def __init__(self, option_strings, dest, **more): super().__init__(option_strings, dest, nargs=0)
    def __call__(self, parser, space, values, name): setattr(space, self.dest, name.startswith("--disable-"))
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--tp-size", type=int, default=1)
        parser.add_argument("--share", type=float)
        parser.add_argument("--length", type=count)
        parser.add_argument("--table", type=json.loads)
        parser.add_argument("--names", nargs="*")
        parser.add_argument("--mode", choices=["a", "b"])
        parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("--old", action="store_true", help="Deprecated, use --quiet")
        parser.add_argument("--cache", action=argparse.BooleanOptionalAction)
        parser.add_argument("--disable-graphs", "--enable-graphs", action=Pair)
        parser.add_argument("--rules", type=rules, default=argparse.SUPPRESS)
"""


def interpreter(folder: Path, body: str) -> str:
    """Make an interpreter that has an `sglang` of this text: a small script before the real one."""
    package = folder / "site" / "sglang" / "srt"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "__init__.py").write_text("")
    (package / "server_args.py").write_text(body)
    info = folder / "site" / "sglang-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -I ] && shift\nPYTHONPATH={folder}/site exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    catalogue.register(app)
    return CliRunner().invoke(app, arguments)


def test_an_installed_engine_is_asked_by_its_own_parser(tmp_path: Path) -> None:
    """Names, forms, choices, negations and deprecations come out as a catalogue that checks specs."""
    out = tmp_path / "sglang-9.9.9.json"
    result = run("--python", interpreter(tmp_path, PARSER), "--engine", "sglang", "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "sglang 9.9.9: 12 flags, a version not known here yet" in result.stderr
    book = read_catalogue(out.read_bytes())
    forms = {flag.flag: flag.type for flag in book.flags.values()}
    assert forms == {
        "--model-path": "str", "--tp-size": "int", "--share": "float", "--length": "int(k/M/G suffix)|auto", "--table": "json",
        "--names": "str", "--mode": "str", "--quiet": "flag", "--old": "flag", "--cache": "bool",
        "--disable-graphs": "bool", "--rules": "json",
    }  # fmt: skip
    assert book.flags["--cache"].off == "--no-cache"
    assert book.flags["--disable-graphs"].off == "--enable-graphs"
    assert book.flags["--model-path"].aliases == ("--model",)
    assert [flag.flag for flag in book.flags.values() if flag.deprecated] == ["--old"]
    wrong = check_args(book, {"mode": "c", "share": "much", "lengt": 1, "cache": False}, {})
    assert [place for place, _ in wrong.problems] == ["args.lengt", "args.mode", "args.share"]


def test_without_a_file_it_is_printed(tmp_path: Path) -> None:
    """Data on standard output, talk on standard error."""
    result = run("--python", interpreter(tmp_path, PARSER), "--engine", "sglang")
    assert json.loads(result.stdout)["version"] == "9.9.9"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import time; time.sleep(3600)", "did not answer within"),
        ("import os\nfor _ in range(3000): os.write(2, b'x' * 65536)", "ImportError|AttributeError|no such engine"),
        ("import os\nfor _ in range(300): os.write(9, b'x')", "OSError"),
        ("raise SystemExit(3)", "exit status 3"),
        ("import torch_that_is_not_there", "ModuleNotFoundError"),
        ("class ServerArgs:\n    add_cli_args = staticmethod(lambda parser: None)", "no flags of sglang"),
    ],
    ids=["hangs", "talks", "writes elsewhere", "exits", "cannot be imported", "has no flags"],
)  # fmt: skip
def test_an_engine_that_does_not_answer_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    """One sentence, exit 64, no file, and the command comes back."""
    real = introspect.introspect
    monkeypatch.setattr(introspect, "introspect", lambda *a: real(*a, limit_s=5.0))
    out = tmp_path / "x.json"
    result = run("--python", interpreter(tmp_path, body), "--engine", "sglang", "--out", str(out))
    assert (result.exit_code, result.stdout, out.exists()) == (64, "", False)
    assert any(word in result.stderr for word in told.split("|")), result.stderr
    assert "nothing was written" in result.stderr


def test_an_interpreter_that_prints_without_end_is_stopped(tmp_path: Path) -> None:
    """A hundred megabytes instead of an answer are cut off, and so is what is no catalogue."""
    for number, (line, told) in enumerate(
        (("exec cat /dev/zero", "printed more than"), ("echo '{\"flags\": 3}'", "no catalogue"))
    ):
        python = tmp_path / f"python{number}"
        python.write_text(f"#!/bin/sh\n{line}\n")
        python.chmod(0o755)
        result = run("--python", str(python), "--engine", "sglang")
        assert (result.exit_code, result.stdout) == (64, "")
        assert told in result.stderr


@pytest.mark.parametrize("arguments", [("/nowhere/python", "sglang"), (sys.executable, "triton")])
def test_a_wrong_interpreter_or_engine_is_usage(arguments: tuple[str, str]) -> None:
    """Exit 64 and a sentence."""
    result: Any = run("--python", arguments[0], "--engine", arguments[1])
    assert result.exit_code == 64

"""`validate`, `schema` and `explain` as a person or a build meets them: output, streams, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from stand_in_engines import ENGINES
from typer.testing import CliRunner, Result

from reconciler import wiring
from reconciler.cli import specs
from reconciler.core import yaml_text
from reconciler.core.spec_schema import schemas

ROOT = Path(__file__).parents[2]

GOOD = """\
apiVersion: reconciler/v1
kind: Host
name: h
---
apiVersion: reconciler/v1
kind: Server
name: s
host: h
gpus: [0]
engine: sglang
listen: {port: 30000}
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without settings, and a folder of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/.config"))
    monkeypatch.setattr("reconciler.settings.SYSTEM_FILE", tmp_path / "none")
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, engines: Any = ENGINES) -> Result:
    app = typer.Typer()
    specs.register(app, engines)
    return CliRunner().invoke(app, arguments)


def test_valid_specs_are_said_to_be_on_standard_output() -> None:
    """Data on standard output, nothing on standard error, exit 0."""
    Path("specs").mkdir()
    Path("specs/a.yaml").write_text(GOOD)
    result = run("validate")
    assert (result.exit_code, result.stdout, result.stderr) == (
        0,
        "specs: 1 server, 1 host: valid\n",
        "",
    )


def test_every_problem_comes_with_its_line_on_standard_error() -> None:
    """All at once, each with a caret, exit 65."""
    Path("specs").mkdir()
    Path("specs/a.yaml").write_text(
        GOOD.replace("gpus: [0]", "gpus: [0, x]").replace("port", "prot")
    )
    result = run("validate", "specs")
    assert result.exit_code == 65
    assert result.stdout == ""
    assert result.stderr == (
        "specs/a.yaml:9:11: `gpus[1]`: must be an index such as 0, a UUID such as GPU-… or a PCI bus id such as 0000:3b:00.0\n"
        "  gpus: [0, x]\n"
        "            ^\n"
        "specs/a.yaml:11:9: `port` is missing in `listen`\n"
        "  listen: {prot: 30000}\n"
        "          ^\n"
        "specs/a.yaml:11:10: unknown key `prot`; did you mean `port`?\n"
        "  listen: {prot: 30000}\n"
        "           ^\n"
        "\n3 problems; held back: s\n"
    )


def test_json_is_one_document_with_everything() -> None:
    """A build reads places, not words; the exit code is the same."""
    Path("a.yaml").write_text(GOOD + "x: 1\n")
    result = run("validate", "a.yaml", "-o", "json")
    assert result.exit_code == 65
    assert json.loads(result.stdout) == {
        "format_version": "1.0",
        "valid": False,
        "servers": [],
        "hosts": ["h"],
        "held": ["s"],
        "problems": [
            {"file": "a.yaml", "line": 12, "column": 1, "message": "unknown key `x`", "server": "s"}
        ],
        "warnings": [],
    }


def test_warnings_are_talk_and_no_mistake() -> None:
    """What an engine remarks on leaves the exit code alone."""
    Path("a.yaml").write_text(GOOD + "model: Qwen/Qwen3-8B\n")
    result = run("validate", "a.yaml")
    assert result.exit_code == 0
    assert result.stderr == "warning: a.yaml:5:1: `model_revision`: is not pinned\n"


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_nothing_to_validate_is_a_spec_error(kind: str) -> None:
    """S13: never "valid, and everything may go"."""
    if kind == "empty":
        Path("specs").mkdir()
    result = run("validate")
    assert result.exit_code == 65
    assert result.stdout == ""
    assert result.stderr.startswith("specs: ")


def test_a_link_out_of_the_tree_is_a_spec_error() -> None:
    """S19: it is named and not followed."""
    Path("specs").mkdir()
    Path("specs/a.yaml").write_text(GOOD)
    Path("specs/b.yaml").symlink_to("/etc/passwd")
    result = run("validate")
    assert (result.exit_code, result.stderr.split("\n")[0]) == (
        65,
        "specs/b.yaml: is a link, which is not followed; put the file itself here",
    )


def test_the_operator_s_settings_apply_to_a_check_too(tmp_path: Path) -> None:
    """What would be refused later is said now."""
    Path("specs").mkdir()
    Path("specs/a.yaml").write_text(GOOD)
    settings = tmp_path / "home/.config/reconciler/settings.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("policy:\n  - {path: 'other/**'}\n")
    result = run("validate")
    assert result.exit_code == 65
    assert "specs/a.yaml:5:1: the operator's settings grant `a.yaml` nothing" in result.stderr
    settings.write_text("polcy: []\n")
    assert "unknown key `polcy`; did you mean `policy`?" in run("validate").stderr


def test_no_secret_of_a_spec_is_printed() -> None:
    """S17, through the whole command."""
    Path("a.yaml").write_text(
        GOOD.replace("{port: 30000}", "{port: 30000, api_key: c4n4ry5ecret}")
        + "env: {HF_TOKEN: c4n4ry5ecret}\n"
    )
    for output in ("text", "json"):
        result = run("validate", "a.yaml", "-o", output)
        assert result.exit_code == 65
        assert "c4n4ry" not in result.output


def test_the_schemas_in_the_repository_are_those_of_the_models() -> None:
    """After a change of the models: `reconcile schema --write schemas`."""
    result = run("schema", "--check", str(ROOT / "schemas"), engines=wiring.engines())
    assert (result.stderr, result.exit_code) == ("", 0)


def test_a_stale_schema_is_named(tmp_path: Path) -> None:
    """`--check` says which file differs and what to run."""
    assert run("schema", "--write", "out").exit_code == 0
    assert run("schema", "--check", "out").exit_code == 0
    Path("out/host.schema.json").write_text("{}")
    result = run("schema", "--check", "out")
    assert result.exit_code == 1
    assert result.stderr == "out/host.schema.json: differs; run `reconcile schema --write out`\n"
    assert run("schema", "--check", "out", "--write", "out").exit_code == 64


def test_schema_prints_the_one_for_all_kinds() -> None:
    """On standard output, ready to be redirected."""
    assert json.loads(run("schema").stdout) == schemas(ENGINES)["spec.schema.json"]


def spec_files() -> list[Path]:
    return sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("specs/*.yaml")])


def documents(path: Path) -> list[Any]:
    def thawed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: thawed(item) for key, item in value.items()}
        return [thawed(item) for item in value] if isinstance(value, tuple) else value

    parsed = yaml_text.parse(path.read_bytes(), path.name)
    assert parsed.problems == ()
    return [thawed(yaml_text.plain(document.root)) for document in parsed.documents]


@pytest.mark.parametrize("path", spec_files(), ids=lambda path: path.name)
def test_the_schema_accepts_what_is_valid(path: Path) -> None:
    """An editor shows no red line in any spec of this repository."""
    schema = schemas(wiring.engines())["spec.schema.json"]
    jsonschema.Draft7Validator.check_schema(schema)
    for document in documents(path):
        assert [
            error.message for error in jsonschema.Draft7Validator(schema).iter_errors(document)
        ] == []


@pytest.mark.parametrize(
    "change",
    [{"prot": 1}, {"gpus": "x"}, {"listen": {}}, {"state": "up"}, {"timeouts": {"drain": 5}}, {"engine": "sglnag"}, {"gpus": None}, {"apiVersion": "v2"},
     {"gate": {"runs": [{"name": "x"}]}}, {"secrets": {"A": "x"}}, {"listen": {"port": 0}}],
)  # fmt: skip
def test_the_schema_refuses_what_a_model_would(change: dict[str, Any]) -> None:
    """An editor shows the common mistakes while typing."""
    schema = schemas(ENGINES)["spec.schema.json"]
    good = {
        "apiVersion": "reconciler/v1", "kind": "Server", "name": "s", "host": "h", "gpus": [0], "engine": "sglang", "listen": {"port": 1},
    }  # fmt: skip
    validator = jsonschema.Draft7Validator(schema)
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, **change}) or change == {"gpus": None}


@pytest.mark.parametrize("name", ["server", "host", "profile", "spec"])
def test_every_field_of_a_schema_says_what_it_is(name: str) -> None:
    """An editor can complete and explain each: title and description everywhere."""
    schema = schemas(wiring.engines())[f"{name}.schema.json"]

    def silent(node: Any, path: str) -> list[str]:
        found = []
        if isinstance(node, dict):
            for key, part in node.get("properties", {}).items():
                if (
                    isinstance(part, dict)
                    and "if" not in path
                    and not (part.get("title") and part.get("description"))
                ):
                    found.append(f"{path}.{key}")
            for key, part in node.items():
                found += (
                    silent(part, f"{path}.{key}") if key not in {"then", "if", "examples"} else []
                )
        elif isinstance(node, list):
            for part in node:
                found += silent(part, path)
        return found

    assert silent(schema, name) == []


@pytest.mark.parametrize(
    "path",
    [ROOT / "specs", ROOT / "examples/secrets", *sorted(ROOT.glob("examples/*.yaml"))],
    ids=lambda path: path.name,
)
def test_every_example_and_the_fleet_of_this_repository_validate(path: Path) -> None:
    """With the product's own engines and their flag catalogues."""
    result = run("validate", str(path), engines=wiring.engines())
    assert (
        result.exit_code,
        [line for line in result.stderr.split("\n") if line and not line.startswith("warning: ")],
    ) == (0, [])


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("timeouts.stop", ["timeouts.stop  (duration)", "Default: 2m", "installs the unit anew; the process is not touched"]),
        ("gate.runs.max_ttft_p95", ["(duration)", "A percentile. Time to the first token.", "needs nothing on the host"]),
        ("gate.runs[0].requests", ["(whole number)", "299 for p99"]),
        ("gpus", ["gpus  (list)", "Example: gpus: [0, 1, 2, 3]", "whole rollout"]),
        ("engine.command", ["What to run. (custom only)"]),
        ("args.context-length", ["args  (map)", "`context-length` is a key that you choose", "without the dashes in front", "Example: args: "]),
        ("timeouts", ["What a change needs differs by field.", "Fields:", "drain"]),
        ("Host", ["A machine or container that runs servers.", "protect"]),
        ("proxmox.vmid", ["The container's number."]),
        ("Profile.name", ["What servers write after `extends:`."]),
        ("Server", ["One inference server", "on_failure"]),
    ],
)  # fmt: skip
def test_explain_says_what_a_field_means(field: str, words: list[str]) -> None:
    """Its type, its meaning, its default, an example, and what a change of it costs."""
    result = run("explain", field)
    assert result.exit_code == 0
    for part in words:
        assert part in result.stdout


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("timeouts.stpo", "; did you mean `stop`?"),
        ("zzz", ""),
        ("Host.prot", "; did you mean `protect`?"),
    ],
)
def test_explain_of_what_is_not_there_is_a_usage_error(field: str, hint: str) -> None:
    """Exit 64, with the nearest field."""
    result = run("explain", field)
    lists = "`reconcile explain` lists those of a Server, `reconcile explain Host` and `Profile` the others"
    said = f"there is no field `{field}`{hint}; {lists}\n"
    assert (result.exit_code, result.stdout, result.stderr) == (64, "", said)

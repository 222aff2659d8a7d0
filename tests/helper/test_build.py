"""The helper's modules become one program that runs on a bare Python 3.9, and the same one each time."""

from __future__ import annotations

import ast
import base64
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import cast

import pytest

from reconciler.effects.channel import (
    CARRIED_AND_KEPT_COMMAND,
    CARRIED_AS_ROOT_COMMAND,
    CARRIED_COMMAND,
)
from reconciler.effects.host_meter import COMMAND as METER_COMMAND
from reconciler.helper import build
from reconciler.helper.machine import Machine
from reconciler.helper.observe import installed_on, launcher_text
from reconciler.helper.records import LIB, helper_command

OBSERVE = {
    "format": 1,
    "nonce": "ab" * 16,
    "verb": "observe",
    "args": {
        "servers": [
            {"server": "qwen", "unit": "qwen.service", "port": None, "invocation_lines": 0}
        ],
        "kernel_cursor": None,
        "paths": ["/etc/passwd"],
        "users": ["root"],
        "gpus": False,
    },
}


def pythons() -> list[str]:
    """Return this interpreter, and a 3.9 where there is one."""
    found = [sys.executable]
    for name in ("python3.9", "/usr/bin/python3"):
        path = shutil.which(name)
        if (
            path
            and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            found.append(path)
    return found


def answer_in(output: bytes) -> dict[str, object]:
    """Return the answer between the marks."""
    begin, _, rest = output.partition(b"@@reconciler-begin " + b"ab" * 16)
    line = rest.split(b"\n")[1]
    answer: dict[str, object] = json.loads(line)
    assert begin == b"\n"
    return answer


def test_the_program_is_valid_python_3_9() -> None:
    """Nothing in the joined text needs a newer grammar than the oldest host has."""
    ast.parse(build.program(), feature_version=(3, 9))


def test_the_program_imports_the_standard_library_only() -> None:
    """A host has nothing but Python."""
    for node in ast.walk(ast.parse(build.program())):
        if isinstance(node, ast.Import):
            assert all(a.name.split(".")[0] in sys.stdlib_module_names for a in node.names)
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in {*sys.stdlib_module_names, "__future__"}


def test_the_program_is_the_same_bytes_each_time() -> None:
    """The digest names the program, so building twice must give the same."""
    first = build.program()
    build.program.cache_clear()
    assert build.program() == first


def test_no_name_is_defined_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace a second definition would silently replace the first."""
    tree = ast.parse("def answer(): ...")
    with pytest.raises(build.BuildError):
        build.check_names("other", tree, {"answer": "acts"})


@pytest.mark.parametrize("python", pythons())
def test_the_carried_program_observes(python: str) -> None:
    """`python3 -I -S -` answers an observation, also where there is no systemd and no GPU."""
    ran = subprocess.run(
        [python, "-I", "-S", "-"],
        input=build.carried(OBSERVE),
        capture_output=True,
        timeout=60,
        check=True,
    )
    answer = answer_in(ran.stdout)
    assert answer["outcome"] == "done", answer
    data = answer["data"]
    assert isinstance(data, dict)
    assert data["paths"]["/etc/passwd"]["known"]["kind"] == "file"
    assert data["servers"]["qwen"]["records"].keys() <= {"known", "unknown"}


def test_a_program_that_was_cut_does_nothing() -> None:
    """The call is the last line: what arrives in part is an error or silence, never half a run."""
    text = build.carried(OBSERVE)
    for end in (len(text) // 3, len(text) - 40):
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-"],
            input=text[:end],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert b"@@reconciler" not in ran.stdout


def test_the_installed_program_answers_request_after_request(tmp_path: Path) -> None:
    """A kept channel sends one JSON request a line and gets a framed answer to each, until its end."""
    digest = build.digest()
    (tmp_path / f"helper-{digest}.py").write_text(build.program(), encoding="utf-8")
    launcher = tmp_path / f"run-{digest}.py"
    launcher.write_text(launcher_text(digest).replace(LIB, str(tmp_path)), encoding="utf-8")
    lines = (
        json.dumps(OBSERVE).encode() + b"\n" + b"not json\n" + json.dumps(OBSERVE).encode() + b"\n"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-S", str(launcher)],
        input=lines,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.count(b"@@reconciler-begin") == 3
    assert ran.stdout.count(b'"reason":"BadRequest"') == 1
    assert [path.suffix for path in (tmp_path / "__pycache__").iterdir()] == [".pyc"]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_carried_program_may_be_kept(shell: str) -> None:
    """The program is sent once and answers request after request; nothing that changes a host is done, cut in two it is silent."""
    claim = OBSERVE | {"verb": "claim", "server": "qwen", "args": {"holder": "a", "ttl_s": 60}}
    lines = b"".join(json.dumps(request).encode() + b"\n" for request in (OBSERVE, claim, OBSERVE))
    sent = build.kept() + lines
    for cut in (len(sent), len(build.kept()) // 2):
        ran = subprocess.run(
            [shell, "-c", CARRIED_AND_KEPT_COMMAND],
            input=sent[:cut],
            capture_output=True,
            timeout=60,
            check=False,
        )
        whole = cut == len(sent)
        assert ran.stdout.count(b"@@reconciler-begin") == (3 if whole else 0), ran.stderr
        assert ran.stdout.count(b'"outcome":"done"') == (2 if whole else 0)


def test_the_request_travels_as_it_is() -> None:
    """What is carried is the request, in the last line."""
    last = build.carried(OBSERVE).decode().splitlines()[-1]
    encoded = last.removeprefix('main_carried(b"').removesuffix('")')
    assert json.loads(base64.b64decode(encoded)) == OBSERVE


class Files:
    """What `installed_on` asks of a machine, over a mapping of paths to bytes."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def listdir(self, path: str) -> list[str]:
        return [name.rpartition("/")[2] for name in self.files if name.rpartition("/")[0] == path]

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def kind(self, path: str) -> str:
        return "file" if path in self.files else "missing"


def test_a_helper_counts_as_installed_only_where_all_of_it_is_as_written() -> None:
    """Without its launcher, or with another text in either file, the host must be enrolled anew."""
    digest = build.digest()
    program, launcher = f"{LIB}/helper-{digest}.py", f"{LIB}/run-{digest}.py"
    whole = {program: build.program().encode(), launcher: launcher_text(digest).encode()}

    def digests(files: dict[str, bytes]) -> object:
        return installed_on(cast("Machine", Files(files)))["digests"]

    assert digests(whole) == [digest]
    for path, written in whole.items():
        assert digests({name: data for name, data in whole.items() if name != path}) == []
        assert digests(whole | {path: written + b"\n"}) == []


@pytest.mark.parametrize(
    "command", [CARRIED_COMMAND, CARRIED_AS_ROOT_COMMAND, CARRIED_AND_KEPT_COMMAND, METER_COMMAND, helper_command("0" * 12)]
)  # fmt: skip
def test_no_line_of_a_hosts_site_packages_is_run_with_what_we_start(
    command: str, tmp_path: Path
) -> None:
    """`-I` alone runs what stands in `.pth` files, as root; every way in which a program of ours is started on a host leaves them out."""
    venv.create(tmp_path / "host")
    (site,) = (tmp_path / "host").glob("lib/python3*/site-packages")
    (site / "evil.pth").write_text("import sys; sys.stdout.write('evil')\n")
    python = tmp_path / "host" / "bin" / "python3"

    def said(code: str, *flags: str) -> str:
        argv = [str(python), *flags, "-c", code]
        return subprocess.run(argv, input="11\nprint('we')", check=True, capture_output=True, text=True).stdout  # fmt: skip

    assert "evil" in said("", "-I")
    (flags,) = re.findall(r"python3((?: -[A-Z])+)", command)
    code = re.search(r'-c "(.*)"', command)
    assert said(code[1] if code else "print('we')", *flags.split()) == "we\n"

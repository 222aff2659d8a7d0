"""Stand-ins for inference engines on a lab host, where a spec's `runtime` expects the real ones.

A virtual environment whose `python -m sglang.launch_server` (vllm, llama_cpp) is the lab's own server,
or a `llama-server` binary: real command lines, the flags of a real version, no model and no CUDA. So
a spec for a real host runs on a lab host as it is; see `scripts/lab-engine` for what the flags do there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

from reconciler.core.errors import UsageError
from reconciler.lab.faults import LabHost
from reconciler.lab.hosts import SCRIPTS

MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sglang": ("sglang.launch_server",),
        "vllm": ("vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server"),
        "llamacpp": ("llama_cpp.server.__main__",),
    }
)
"""What `python -m` is asked to run, for each engine that is started so."""


def install_engine(host: LabHost, engine: str, path: str, *, version: str | None = None) -> None:
    """Put the stand-in for `engine` on a host at `path`, where the spec's runtime looks for it.

    A path `…/bin/python` becomes a virtual environment with the engine's module in it, any other a
    binary. `version` chooses whose flags it knows (the newest without it); llama.cpp's knows all flags.
    """
    if engine not in MODULES:
        raise UsageError(
            f"lab: there is no stand-in for engine {engine!r} (there is: {', '.join(MODULES)})"
        )
    if not re.fullmatch(r"(/[A-Za-z0-9._+-]+)+", path) or ".." in path:
        raise UsageError(f"lab: a stand-in engine needs a plain absolute path, not {path!r}")
    program = (SCRIPTS / "lab-engine").read_bytes()
    facts = json.dumps(
        {"engine": engine, "entrypoint": MODULES[engine][0], "flags": _flags(engine, version)}
    ).encode()
    directory, _, name = path.rpartition("/")
    if name.startswith("python") and directory.endswith("/bin"):
        root = directory.removesuffix("/bin")
        site = f"{root}/lib/site-lab"
        host.check(["bash", "-ec", _VENV, "_", root, path, site])
        for module in MODULES[engine]:
            file = f"{site}/{module.replace('.', '/')}.py"
            _place(host, file, program)
            _place(host, f"{file.rpartition('/')[0]}/lab-engine.json", facts)
    else:
        _place(host, path, program, mode="755")
        _place(host, f"{directory}/lab-engine.json", facts)


_VENV = """
root=$1 python=$2 site=$3
mkdir -p "${python%/*}" "$site"
ln -sfn /usr/bin/python3 "$python"
printf 'home = /usr/bin\\ninclude-system-site-packages = false\\n' >"$root/pyvenv.cfg"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages"
echo "$site" >"$packages/lab.pth"
"""


def _place(host: LabHost, path: str, content: bytes, *, mode: str = "644") -> None:
    script = 'mkdir -p "${1%/*}" && cat >"$1" && chmod "$2" "$1"'
    host.check(["bash", "-c", script, "_", path, mode], content)


def _flags(engine: str, version: str | None) -> list[str]:
    """Return every spelling of every flag of the catalogue's version; none where there is no catalogue."""
    folder = resources.files("reconciler.engines").joinpath("flags")
    found = sorted(
        (e for e in folder.iterdir() if e.name.startswith(f"{engine}-")),
        key=lambda e: _natural(e.name),
    )
    if version is not None:
        found = [entry for entry in found if entry.name == f"{engine}-{version}.json"]
        if not found:
            raise UsageError(f"lab: no catalogue of the flags of {engine} {version}")
    if not found:
        return []
    rows = json.loads(found[-1].read_text())["flags"]
    return [
        flag for row in rows if not row.get("positional") for flag in (row["flag"], *row["aliases"])
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)
    ]

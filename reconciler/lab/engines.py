"""Stand-ins for inference engines on a lab host, where a spec's `runtime` expects the real ones.

A virtual environment whose `python -m sglang.launch_server` (vllm, llama_cpp) is the lab's own server,
or a `llama-server` binary: real command lines, the flags of a real version, no model and no CUDA. So
a spec for a real host runs on a lab host as it is; see `scripts/lab-engine` for what the flags do there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType

from reconciler.core.errors import UsageError
from reconciler.lab.faults import LabHost
from reconciler.lab.hosts import SCRIPTS
from reconciler.lab.stand_in import files_of

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
        package = "" if engine == "llamacpp" else f"{engine}-{_version_of(engine, version)}"
        host.check(["bash", "-ec", _VENV, "_", root, path, site, package])
        for module in MODULES[engine]:
            file = f"{site}/{module.replace('.', '/')}.py"
            _place(host, file, program)
            _place(host, f"{file.rpartition('/')[0]}/lab-engine.json", facts)
    else:
        _place(host, path, program, mode="755")
        _place(host, f"{directory}/lab-engine.json", facts)


_VENV = """
root=$1 python=$2 site=$3 package=$4
mkdir -p "${python%/*}" "$site"
ln -sfn /usr/bin/python3 "$python"
printf 'home = /usr/bin\\ninclude-system-site-packages = false\\n' >"$root/pyvenv.cfg"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages"
echo "$site" >"$packages/lab.pth"
if [ "$package" ]; then
    mkdir -p "$packages/$package.dist-info"
    printf 'Metadata-Version: 2.1\\nName: %s\\nVersion: %s\\n' "${package%%-*}" "${package#*-}" >"$packages/$package.dist-info/METADATA"
    printf '%s.dist-info/METADATA,,\\n' "$package" >"$packages/$package.dist-info/RECORD"
fi
"""


def install_model(host: LabHost, source: str, users: Sequence[str]) -> None:
    """Put files on a host that look like a model: at its path (a directory, or a .gguf file), or in these users' hub caches."""
    if source.startswith("/") and not re.fullmatch(r"(/[A-Za-z0-9._+-]+)+", source):
        raise UsageError(f"lab: a model needs a plain absolute path or a hub id, not {source!r}")
    homes = [""]
    if not source.startswith("/"):
        script = 'for user; do getent passwd -- "$user" | cut -d: -f6; done'
        homes = host.check(["bash", "-ec", script, "_", *users]).split()
    for home in homes:
        for path, content in files_of(source, home).items():
            _place(host, path, content)


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


def _version_of(engine: str, version: str | None) -> str:
    """Give the version that a stand-in says it is: the asked one, or the newest catalogue's."""
    folder = resources.files("reconciler.engines").joinpath("flags")
    known = [e.name for e in folder.iterdir() if e.name.startswith(f"{engine}-")]
    newest = max(known, key=_natural, default=f"{engine}-0")
    return version or newest.removeprefix(f"{engine}-").removesuffix(".json")


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)
    ]

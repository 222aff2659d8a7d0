"""llama-cpp-python's own server, compiled here once and kept: the `llamacpp` engine with `runtime.python`, with real tokens.

Nightly: compiling takes 11 to 12 minutes on two idle cores. `--interrupt_requests false`, because its default lets a second
request cut off the first, which a gate with more than one stream would read as a broken server.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lab_hosts import BootHost
from live_controller import PORT, Controller, HostView
from real_engine.engine import cache_directory, fetch

from reconciler.lab.hosts import SystemdHost

pytestmark = [pytest.mark.lab, pytest.mark.real_engine, pytest.mark.nightly]

VERSION = "0.3.36"
ENGINE = "/opt/llama-cpp-python"
MODEL = "/opt/model.gguf"


def built() -> Path:
    """Compile the package into an environment of the system's Python, once, and say where it is."""
    directory = cache_directory().parent / f"llama-cpp-python-{VERSION}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "complete").exists():
            shutil.rmtree(directory, ignore_errors=True)
            run("/usr/bin/python3", "-m", "venv", "--without-pip", str(directory))
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(directory / "bin" / "python"),
                "install",
                "--quiet",
            ]
            run(*pip, f"llama-cpp-python[server]=={VERSION}")
            (directory / "complete").touch()
    return directory


def run(*command: str) -> None:
    """Run a step of the build; what it said is shown when it fails."""
    environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{command[:4]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture
def host(boot_host: BootHost) -> SystemdHost:
    """Boot a host that has the engine and the model."""
    binds = [f"{built()}:{ENGINE}", f"{fetch().model}:{MODEL}"]
    return boot_host("llamapy", gpus=1, users=["deploy"], binds=binds)


def commit(controller: Controller, **args: object) -> None:
    """Commit the server with these flags of llama_cpp.server."""
    controller.write("llm", {
        "apiVersion": "reconciler/v1", "kind": "Server", "name": "llm", "host": controller.host.name, "gpus": [],
        "engine": "llamacpp", "runtime": {"python": f"{ENGINE}/bin/python", "user": "deploy"},
        "model": MODEL, "served_model_name": "smollm2",
        "args": {"interrupt_requests": "false", "n_threads": 2, **args},
        "listen": {"address": "0.0.0.0", "port": PORT},
        "timeouts": {"drain": "5s", "stop": "15s", "release": "30s", "settle": "300ms", "ready": "120s", "gate": "240s"},
        "gate": {"quality": "off", "runs": [{"name": "one", "concurrency": 1, "requests": 6, "max_tokens": 12, "max_e2e_p50": "60s"}]},
    })  # fmt: skip


def test_llama_cpp_python_is_deployed_and_changed(host: SystemdHost, tmp_path: Path) -> None:
    """L1: a committed spec for llama_cpp.server becomes a gated server, and a changed context length replaces it."""
    (tmp_path / "controller").mkdir()
    controller, view = Controller(host, tmp_path / "controller"), HostView(host)
    assert controller.enrol().code == 0
    commit(controller, n_ctx=1024)
    first = controller.apply()
    assert first.ended == (0, "Applied", ""), first.err + first.out
    before = view.server()
    commit(controller, n_ctx=2048)
    second = controller.apply()
    assert second.ended == (0, "Applied", ""), second.err + second.out
    assert view.server() != before
    assert view.left() == []

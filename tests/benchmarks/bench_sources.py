"""How soon a push or a save becomes a pass, and what reading a fleet's specs costs. Prints a table; nothing is asserted.

python tests/benchmarks/bench_sources.py
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from git_repository import Repository

from reconciler.core.fleet import load_fleet
from reconciler.engines import custom
from reconciler.sources.directory import Directory
from reconciler.sources.git import GitSource, git_source
from reconciler.sources.git_binary import Credentials
from reconciler.sources.watch import watch_folder
from reconciler.web.listener import Listener
from reconciler.web.webhook import Hooks

SPEC = """apiVersion: reconciler/v1
kind: Host
name: h{n}
---
apiVersion: reconciler/v1
kind: Server
name: s{n}
host: h{n}
engine: {name: custom, command: [/usr/bin/serve]}
model: m
listen: {port: 30000}
"""
SECRET = b"0123456789abcdef"


def say(line: str) -> None:
    """Print a line of the table."""
    sys.stdout.write(line + "\n")


def timed(do: Callable[[], object], times: int = 3) -> float:
    """Give the median of a few runs, in milliseconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        do()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def source(repository: Repository, folder: Path) -> GitSource:
    """Give a source of its specs."""
    return git_source(
        str(repository.path), "main", "specs", state_dir=folder, credentials=Credentials()
    )


def reading(folder: Path, count: int) -> None:
    """Read a fleet of `count` specs, cold and again."""
    repository = Repository.new(folder / f"{count}.git")
    repository.many(count, SPEC)
    reader = source(repository, folder / "state")
    cold = timed(reader.snapshot, 1)
    commit = reader.accepted()
    assert commit is not None
    tree = timed(lambda: reader._read(commit))
    warm = timed(reader.snapshot)
    files = reader.snapshot().files
    parse = timed(lambda: load_fleet(files, engines={"custom": custom}, root="specs"))
    say(
        f"{count:6} specs: first fetch and read {cold:7.0f} ms, read the tree {tree:6.0f} ms, nothing new {warm:5.0f} ms, judge all specs {parse:6.0f} ms"
    )


def saved(folder: Path) -> None:
    """From a save to the daemon's wake-up, with the specs read."""
    specs = folder / "specs"
    specs.mkdir()
    (specs / "a.yaml").write_text(SPEC.replace("{n}", "1"))
    changed, ended = threading.Event(), threading.Event()
    watch_folder(specs, changed.set, ended)
    time.sleep(1.0)
    taken = []
    for number in range(10):
        changed.clear()
        began = time.perf_counter()
        (specs / "a.yaml").write_text(SPEC.replace("{n}", str(number)))
        changed.wait(5.0)
        Directory(specs).snapshot()
        taken.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.3)
    ended.set()
    say(
        f"a save, until its specs are read: median {statistics.median(taken):.0f} ms, worst {max(taken):.0f} ms of 10"
    )


def hooked(folder: Path) -> None:
    """From a webhook's first byte to the newer commit's specs, read."""
    repository = Repository.new(folder / "hooked.git")
    repository.many(100, SPEC)
    reader = source(repository, folder / "state")
    reader.snapshot()
    woken = threading.Event()
    listener = Listener("127.0.0.1", 0, lambda: {"ok": True}, woken.set, Hooks(SECRET))
    _, port = listener.start()
    taken = []
    for number in range(10):
        repository.commit({"specs/a.yaml": SPEC.replace("{n}", str(number)).encode()})
        body = f'{{"n": {number}}}'.encode()
        signature = "sha256=" + hmac.new(SECRET, body, hashlib.sha256).hexdigest()
        woken.clear()
        began = time.perf_counter()
        talk = http.client.HTTPConnection("127.0.0.1", port)
        talk.request("POST", "/hook", body, {"X-Hub-Signature-256": signature})
        talk.getresponse()
        woken.wait(5.0)
        reader.snapshot()
        taken.append((time.perf_counter() - began) * 1e3)
        talk.close()
    listener.stop()
    say(
        f"a webhook, until its commit is fetched, judged and read: median {statistics.median(taken):.0f} ms, worst {max(taken):.0f} ms of 10"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        saved(place)
        hooked(place)
        reading(place, 1_000)
        reading(place, 10_000)

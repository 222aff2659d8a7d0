"""Makes the one program that carries the client to a host: modules of this package, to be run by the host's own Python.

As the helper it travels on standard input and needs nothing but the standard library, from Python 3.9 on; unlike it
these modules keep their names and are imported from memory, because the product uses the very same ones. What older
Pythons lack is filled in before them, so that the modules can be written for the version that the product needs.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from importlib import resources

MODULES = (
    "core.measurement",
    "bench.degeneracy",
    "bench.answer",
    "bench.load_plan",
    "bench.ask",
    "bench.stream",
    "bench.summary",
    "bench.load",
    "bench.worker",
)
"""All that `bench.worker` imports; a test holds this against what it really does import."""

_PROGRAM = """
from __future__ import annotations
import sys
if sys.version_info < (3, 9):
    sys.exit("the benchmark client needs Python 3.9 or newer, this is %d.%d" % sys.version_info[:2])
import asyncio, base64, builtins, dataclasses, enum, importlib.abc, importlib.util, json, zlib

if sys.version_info < (3, 10):
    _dataclass, _zip = dataclasses.dataclass, builtins.zip

    def _without_slots(cls=None, *, slots=False, **more):
        return _dataclass(cls, **more) if cls is not None else _dataclass(**more)

    def _strict_zip(*parts, strict=False):
        return _zip(*parts)

    dataclasses.dataclass, builtins.zip = _without_slots, _strict_zip

if sys.version_info < (3, 11):

    class _StrEnum(str, enum.Enum):
        __str__ = str.__str__

    class _Timeout:
        def __init__(self, seconds):
            self._seconds, self._over = seconds, False

        async def __aenter__(self):
            self._task = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

        def _end(self):
            self._over = True
            self._task.cancel()

        async def __aexit__(self, kind, error, trace):
            self._timer.cancel()
            if self._over and kind is asyncio.CancelledError:
                raise TimeoutError from error

    class _Runner:
        def __init__(self, *, loop_factory):
            self._loop = loop_factory()

        def __enter__(self):
            return self

        def run(self, work):
            asyncio.set_event_loop(self._loop)
            return self._loop.run_until_complete(work)

        def __exit__(self, *_):
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            self._loop.close()

    enum.StrEnum, asyncio.timeout, asyncio.Runner = _StrEnum, _Timeout, _Runner

SOURCES = json.loads(zlib.decompress(base64.b64decode(b"%s")))


class _Carried(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name not in SOURCES:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=not SOURCES[name])

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(SOURCES[module.__name__], module.__name__, "exec"), module.__dict__)


sys.meta_path.insert(0, _Carried())
from reconciler.bench.worker import main
main()
"""


@functools.lru_cache(maxsize=1)
def program() -> bytes:
    """Return the program, its length in a line before it, for a Python that reads it so and then goes on with requests."""
    sources = {"reconciler": "", "reconciler.bench": "", "reconciler.core": ""}
    root = resources.files("reconciler")
    for name in MODULES:
        folder, _, module = name.partition(".")
        text = root.joinpath(folder, f"{module}.py").read_text(encoding="utf-8")
        sources[f"reconciler.{name}"] = text
    packed = base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode()
    data = (_PROGRAM.lstrip().replace('b"%s"', f'b"{packed}"')).encode()
    return b"%d\n" % len(data) + data

"""Inert stand-ins for packages that an argument parser imports and never uses; a `.pth` file starts this in the engine's interpreter.

What an engine computes with them would show in its catalogue as a stand-in's name; none does.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = frozenset(
    {"sgl_kernel", "orjson", "IPython", "pybase64", "sentencepiece", "gguf", "torchvision"}
)


class Meta(abc.ABCMeta):
    """Classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Inert,), {})


class Inert(metaclass=Meta):
    """An object that does nothing, whatever is asked of it; as a decorator it gives back what it was given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and not named and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()


class Module(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Inert,), {}) if name[0].isupper() else Inert()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of these names, and whatever is asked for below them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Take what is ours; the last to be asked, so a package that is there is itself."""
        del path, target
        ours = name.partition(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make an empty one."""
        module = Module(spec.name)
        module.__dict__["__version__"] = "0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


sys.meta_path.append(Finder())

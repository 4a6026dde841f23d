"""Deferred modules: they are loaded when an attribute of theirs is first read, not when they are imported.

It is for modules that other packages import in case they are needed. Those of torch cost a generation process 27 MiB
and half a second of processor before it is ready (docs/learn/decisions/light-starts.md). The standard library's
LazyLoader would load such a module when it is imported a second time; this one loads it only when an attribute is read.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_lock = threading.RLock()


def defer(names: Collection[str]) -> None:
    """Load the modules of these full names (`package.module`) when they are used, from now on in this process.

    Modules that are loaded already stay so; names that do not exist are harmless. Registrations that a module makes
    when it is loaded are missing until then. While a module is loaded, other threads that read it wait, even amid
    imports of their own: so it is not for modules that threads load and import at once.
    """
    finder = _Finder(frozenset(names))
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


def is_deferred(name: str) -> bool:
    """True when that module was imported and is not loaded yet."""
    return isinstance(sys.modules.get(name), _Deferred)


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Make imports of the package `name` fail inside the block, unless it was imported before.

    It is for optional imports of other packages, at start only: other threads would not find the package either.
    """
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    is_hidden = name not in modules
    if is_hidden:
        modules[name] = None
    try:
        yield
    finally:
        if is_hidden:
            del modules[name]


@dataclass(frozen=True)
class _Finder(MetaPathFinder):
    names: frozenset[str]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Prepare the module as its own loader would find it, without loading it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # Attributes that import and inspection read of every module; `from module import *` reads `__all__` first.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _lock:
            if type(self) is _Deferred and "__loading__" not in self.__dict__:
                _load(self)
        return ModuleType.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        with _lock:
            if "__loading__" not in self.__dict__:
                _load(self)
        return sorted(self.__dict__)


def _load(module: _Deferred) -> None:
    """Run the module. Other threads wait; modules that it imports may read its attributes so far, as of any module."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    module.__dict__["__loading__"] = True
    try:
        spec.loader.exec_module(module)
    finally:
        del module.__dict__["__loading__"]
    module.__class__ = ModuleType  # type: ignore[assignment]

"""Modules that are loaded when something of theirs is first asked for, not when they are imported, or not at all.

For what other packages import for whoever may want it, which costs every process memory and time to start. The standard
library's LazyLoader would load such a module when it is imported a second time; this one does so only when an attribute
of it is asked for.
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

    Modules that are loaded already stay so; names that do not exist are harmless. What they register as they are loaded
    is missing until then. While one is loaded another thread that asks for it waits, whatever it imports itself just
    then: so not for modules that threads load and import at once.
    """
    finder = _Finder(frozenset(names))
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


def is_deferred(name: str) -> bool:
    """Whether that module has been imported and not been loaded."""
    return isinstance(sys.modules.get(name), _Deferred)


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Inside, importing the package `name` fails as if it were not installed, unless it has been imported before. For
    what others import if they can, and at start only: another thread would not find it either."""
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
        """Leave it as its own loader would find it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # What import and inspection ask of every module; `__all__` is what `from module import *` asks for first.
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
    """Run it. Other threads wait; whatever it imports may ask for what it has so far, as of any module."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    module.__dict__["__loading__"] = True
    try:
        spec.loader.exec_module(module)
    finally:
        del module.__dict__["__loading__"]
    module.__class__ = ModuleType  # type: ignore[assignment]

"""Modules that are loaded when they are used."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from penstock.common.deferred import absent, defer, is_deferred

MODULE = """
import sys
loads = getattr(sys, "deferred_loads", 0) + 1
sys.deferred_loads = loads
from . import other
__all__ = ["value"]
value = other.value
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package on the path whose module `late`, itself a package, is deferred."""
    folder = tmp_path / "deferred_package"
    (folder / "late").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "other.py").write_text("value = 7\n")
    (folder / "late" / "__init__.py").write_text(MODULE.replace("from . import", "from .. import"))
    (folder / "late" / "below.py").write_text("deep = 3\n")
    (folder / "broken.py").write_text("raise ValueError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "deferred_loads", 0, raising=False)
    defer(("deferred_package.late", "deferred_package.broken", "deferred_package.missing"))
    yield "deferred_package"
    for name in [name for name in sys.modules if name.partition(".")[0] == "deferred_package"]:
        del sys.modules[name]


def loads() -> int:
    return int(vars(sys)["deferred_loads"])


def test_imports_do_not_load_and_an_attribute_does_once(package: str) -> None:
    late = importlib.import_module(f"{package}.late")
    assert importlib.import_module(f"{package}.late") is late
    assert importlib.import_module(f"{package}.late.below").deep == 3
    assert repr(late)
    assert (late.__name__, late.__path__ != [], loads()) == (f"{package}.late", True, 0)
    assert is_deferred(late.__name__)
    assert late.value == 7
    assert late.value == 7
    assert (type(late), loads(), is_deferred(late.__name__)) == (ModuleType, 1, False)
    assert not hasattr(late, "nothing")


def test_from_module_import_loads(package: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from {package}.late import *", namespace)
    assert (namespace["value"], "loads" in namespace, loads()) == (7, False, 1)


def test_listing_its_names_loads(package: str) -> None:
    assert "value" in dir(importlib.import_module(f"{package}.late"))


def test_reloading_and_sources_work_as_for_any_module(package: str) -> None:
    late = importlib.import_module(f"{package}.late")
    assert late.__spec__ is not None
    assert late.__spec__.loader is not None
    assert late.__spec__.loader.get_source(late.__name__) == (Path(str(late.__file__))).read_text()  # type: ignore[attr-defined]
    assert importlib.reload(late).loads == 1


def test_a_module_that_fails_fails_whoever_uses_it_each_time(package: str) -> None:
    broken = importlib.import_module(f"{package}.broken")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            _ = broken.anything


def test_what_does_not_exist_is_not_found(package: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.missing")
    assert not is_deferred(f"{package}.missing")


def test_threads_that_use_it_at_once_all_see_it_whole(package: str) -> None:
    late = importlib.import_module(f"{package}.late")
    start, found = threading.Barrier(8), []

    def use() -> None:
        start.wait()
        found.append(late.value)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, loads()) == ([7] * 8, 1)


def test_an_absent_package_is_there_again_afterwards(package: str) -> None:
    with absent(package), pytest.raises(ImportError):
        importlib.import_module(package)
    module = importlib.import_module(package)
    with absent(package):
        assert importlib.import_module(package) is module
    assert sys.modules[package] is module

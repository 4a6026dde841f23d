"""Each service starts with what its extra declares, and with nothing else that is installed here."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement

# Imports a module while those of `hidden` cannot be found, as if they were not installed.
_IMPORT = """
import importlib, sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden)
importlib.import_module({module!r})
"""


def declared(extra: str) -> set[str]:
    """Names of the distributions that `pip install 'penstock[extra]'` brings."""
    seen: set[tuple[str, str]] = set()
    waiting = [("penstock", extra)]
    while waiting:
        name, wanted = one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        try:
            needs = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            # For another system.
            continue
        for need in needs:
            if need.marker is None or need.marker.evaluate({"extra": wanted}):
                waiting += [(canonical(need.name), word) for word in ("", *need.extras)]
    return {name for name, _ in seen}


def canonical(name: str) -> str:
    """Name of a distribution as an index has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("service", ["router", "tokenizer", "generation", "gateway"])
def test_a_service_imports_nothing_that_its_extra_does_not_bring(service: str) -> None:
    brought = declared(service)
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not {canonical(one) for one in owners} & brought
    }
    assert {"pytest", "mypy"} <= hidden
    code = _IMPORT.format(hidden=hidden, module=f"penstock.{service}.app")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""A knob is one edit: declared once, it is a flag, a row of the reference, and in the engine."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import penstock
import pytest
from penstock.common.options import options_of
from penstock.generation.adapters.adapter_limits import AdapterLimits, AdapterOptions
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.graph_options import GraphOptions
from penstock.generation.engine.config import EngineConfig, EngineOptions
from penstock.generation.grammar.grammar_limits import GrammarLimits, GrammarOptions, JsonBounds
from penstock.generation.graphs.graph_limits import GraphLimits
from penstock.generation.options.request_limits import RequestBounds, RequestLimits

PACKAGE = Path(penstock.__file__).parent / "generation"
# From the flags to the engine.
WAY = (PACKAGE / "config.py", PACKAGE / "running.py", *sorted((PACKAGE / "startup").glob("*.py")))
# A process that reads engine/config.py with one line more, and prints the page.
ONE_EDIT = """
import importlib.abc, importlib.machinery, sys
class Edited(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        text = self.get_data(self.path).decode()
        begin = text.index("    preemption: str = option(")
        line = "    spare_knob: int = option(3, 'Nothing.', group=BATCHING, minimum=1)\\n"
        return compile(text[:begin] + line + text[begin:], self.path, "exec")
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if name == "penstock.generation.engine.config":
            spec.loader = Edited(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder())
from penstock.cli.reference import configuration_markdown
from penstock.common.config import from_env_and_flags
from penstock.common.options import values_of
from penstock.generation.adapters.adapter_limits import AdapterLimits, AdapterOptions
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.config import EngineConfig, EngineOptions
config = from_env_and_flags(GenerationServiceConfig, {"spare_knob": "5"})
engine = EngineConfig(8, 16, 64, **values_of(EngineOptions, config))
print(engine.spare_knob, "torch" in sys.modules)
try:
    EngineConfig(8, 16, 64, spare_knob=0)
except ValueError as error:
    print(error)
print(configuration_markdown())
"""


def test_a_knob_of_the_engine_is_one_edit() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_EDIT], capture_output=True, text=True, check=True)
    value, refusal, *page = done.stdout.splitlines()
    assert value == "5 False"
    assert refusal == "spare_knob must be at least 1"
    assert "| `--spare-knob INT` | `PENSTOCK_SPARE_KNOB` | `3` | Nothing. |" in page


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        (EngineOptions, EngineConfig),
        (RequestBounds, RequestLimits),
        (AdapterOptions, AdapterLimits),
        (GrammarOptions, GrammarLimits),
        (JsonBounds, JsonBounds),
        (GraphOptions, GraphLimits),
    ],
)
def test_a_knob_is_declared_in_one_class_and_copied_by_none(part: type, whole: type) -> None:
    names = {bound.name for bound in options_of(part)}
    assert names
    assert names <= {bound.name for bound in options_of(GenerationServiceConfig)}
    assert names == {bound.name for bound in options_of(whole)}
    declared = {name: count for name, count in fields_made_by_call().items() if name in names}
    assert declared == dict.fromkeys(names, 1)
    assert [(path.name, name) for path in WAY for name in copied(path) if name in names] == []


@functools.cache
def fields_made_by_call() -> Counter[str]:
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    return Counter(
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call)
    )


def copied(path: Path) -> Iterator[str]:
    """Names that a call passes on under the name that they were read by: `name=config.name`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Attribute) and node.arg == node.value.attr:
            yield node.arg


def test_threads_that_compute_give_way_on_a_cpu_unless_they_are_told() -> None:
    def niceness(*, on_cpu: bool, **given: int) -> int:
        return GenerationServiceConfig(model="m", **given).niceness(on_cpu=on_cpu)  # type: ignore[arg-type]

    assert niceness(on_cpu=True) == 4
    # The thread that feeds an accelerator, or the other ranks, is waited for.
    assert niceness(on_cpu=False) == niceness(on_cpu=True, tensor_parallel=2) == 0
    assert niceness(on_cpu=True, compute_nice=0) == 0
    assert niceness(on_cpu=False, compute_nice=7) == 7

"""Parts of torch that a generation process leaves unloaded: that it does, and that they are whole when asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from penstock.generation.early import UNUSED_OF_TORCH

BEGIN = """
import importlib, json, sys
from penstock.common.deferred import is_deferred
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.early import UNUSED_OF_TORCH, begin
begin(GenerationServiceConfig(model="demo", prefault_weights=False, device="cpu", defer_imports={defer}))
import penstock.generation.app
deferred = [name for name in UNUSED_OF_TORCH if is_deferred(name)]
"""
# This operator has no kernel for tensors without data but the one that is registered.
LOAD = """
import torch
meta = torch.empty(1, 2, 4, 4, device="meta")
names = {name: dir(importlib.import_module(name)) for name in UNUSED_OF_TORCH}
shape = list(torch.ops.aten._adaptive_avg_pool2d(meta, [2, 2]).shape)
print(json.dumps({"deferred": deferred, "names": names, "shape": shape}))
"""


def run(code: str) -> Any:
    return json.loads(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1])


@pytest.fixture(scope="module")
def with_and_without() -> tuple[Any, Any]:
    with_it, without = (run(BEGIN.format(defer=defer) + LOAD) for defer in (True, False))
    return with_it, without


def test_nothing_of_a_generation_process_loads_them(with_and_without: tuple[Any, Any]) -> None:
    with_it, without = with_and_without
    assert with_it["deferred"] == list(UNUSED_OF_TORCH)
    assert without["deferred"] == []


def test_loaded_later_they_hold_what_they_hold_anyway(with_and_without: tuple[Any, Any]) -> None:
    with_it, without = with_and_without
    for name in UNUSED_OF_TORCH:
        assert set(without["names"][name]) <= set(with_it["names"][name]), name
    assert with_it["shape"] == without["shape"] == [1, 2, 2, 2]

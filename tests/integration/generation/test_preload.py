"""Parts of torch that a generation process leaves unloaded: that it does, and that they are whole when asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import factories
import penstock
import pytest
from penstock.generation.startup.preload import UNUSED_OF_TORCH

BEGIN = """
import importlib, json, sys
from penstock.common.deferred import is_deferred
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.startup.preload import UNUSED_OF_TORCH, begin
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

# Requests of every mode and every processor, drafts and grammars among them: their ids.
SERVE = """
from itertools import cycle
from pathlib import Path
from random import Random
from factories.engine.mixed import _PROCESSORS, MODES, drafted, structured, textual
from factories.engine.modes import generate, load_service
from penstock.common.checkpoint import demo_folder
loaded = load_service(demo_folder(), assistant_model=str(demo_folder()), assistant_kv_memory="4MiB")
name = loaded.served.assistant_model
found, random = [], Random(0)
for draw, processor in zip([*MODES.values(), drafted(name), structured(name), textual], cycle(_PROCESSORS)):
    arguments = {"max_new_tokens": 6, "seed": 1, **processor, **draw(random)}
    found.append(generate(loaded, [45, 46, 200, 45, 46], arguments).ids)
print(json.dumps(found))
"""

# int4 measures the importance of inputs at the first start.
QUANTISE = """
from penstock.common.checkpoint import demo_folder
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model
load_model(demo_folder(), dtype="float32", quantization="int4", device=CPUDevice())
from penstock.common.deferred import is_deferred
print(json.dumps([name for name in UNUSED_OF_TORCH if is_deferred(name)]))
"""


def run(code: str) -> Any:
    path = os.pathsep.join(str(Path(module.__path__[0]).parent) for module in (factories, penstock))
    environment = {**os.environ, "PYTHONPATH": path}
    return json.loads(
        subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).splitlines()[-1]
    )


@pytest.fixture(scope="module")
def with_and_without() -> tuple[Any, Any]:
    with_it, without = (run(BEGIN.format(defer=defer) + LOAD) for defer in (True, False))
    return with_it, without


def test_nothing_of_a_generation_process_loads_them() -> None:
    assert run(BEGIN.format(defer=True) + "print(json.dumps(deferred))") == list(UNUSED_OF_TORCH)


def test_a_first_start_with_int4_needs_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(BEGIN.format(defer=True) + QUANTISE) == list(UNUSED_OF_TORCH)
    assert len(list((tmp_path / "penstock" / "importance").iterdir())) == 1


@pytest.mark.slow
def test_loaded_later_they_hold_what_they_hold_anyway(with_and_without: tuple[Any, Any]) -> None:
    with_it, without = with_and_without
    assert (with_it["deferred"], without["deferred"]) == (list(UNUSED_OF_TORCH), [])
    for name in UNUSED_OF_TORCH:
        assert set(without["names"][name]) <= set(with_it["names"][name]), name
    assert with_it["shape"] == without["shape"] == [1, 2, 2, 2]


@pytest.mark.slow
def test_every_kind_of_request_is_answered_without_them() -> None:
    with_it, without = (run(BEGIN.format(defer=defer) + SERVE) for defer in (True, False))
    assert with_it == without

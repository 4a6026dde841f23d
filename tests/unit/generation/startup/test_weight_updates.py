"""Updates of weights: one at a time, to its end, whoever waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.weight_tensor import TensorSpec
from penstock.generation.devices.base import DeviceMemory
from penstock.generation.models.registry import read_model_config
from penstock.generation.startup import weight_updates
from penstock.generation.startup.weight_updates import AppliedUpdate, WeightUpdates
from penstock.generation.weights.new_tensors import NewTensors
from penstock.generation.weights.tensor_names import tensor_shapes

pytestmark = pytest.mark.asyncio
DONE = AppliedUpdate(1, 0, 0.0, 0.0)


class Held:
    """An update that ends when it may."""

    def __init__(self) -> None:
        self.may_end, self.has_begun = asyncio.Event(), asyncio.Event()
        self.updates = WeightUpdates(GenerationServiceConfig(model="m"), self.apply)

    async def apply(self, tensors: NewTensors, of_draft: bool) -> AppliedUpdate:
        self.has_begun.set()
        await self.may_end.wait()
        return DONE

    async def write(self) -> Any:
        with self.updates.alone():
            return await self.updates.write(NewTensors({}))

    def assert_busy(self) -> None:
        with pytest.raises(FailedPrecondition) as refused, self.updates.alone():
            pass
        assert refused.value.reason == "BUSY"


async def test_one_runs_at_a_time() -> None:
    held = Held()
    writing = asyncio.create_task(held.write())
    await held.has_begun.wait()
    held.assert_busy()
    held.may_end.set()
    assert await writing == DONE
    with held.updates.alone():
        held.assert_busy()
    with held.updates.alone():
        pass


async def test_a_caller_that_leaves_does_not_end_it_and_the_next_one_waits_for_its_end() -> None:
    held = Held()
    writing = asyncio.create_task(held.write())
    await held.has_begun.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    # Its parts are being made of the present weights: another update between would be lost.
    held.assert_busy()
    held.may_end.set()
    work = held.updates._work
    assert work is not None
    assert await work == DONE
    with held.updates.alone():
        pass


async def test_the_end_of_the_model_ends_it() -> None:
    held = Held()
    writing = asyncio.create_task(held.write())
    await held.has_begun.wait()
    held.updates.cancel()
    with pytest.raises(Unavailable) as refused:
        await writing
    assert refused.value.reason == "ENGINE_STOPPED"
    with held.updates.alone():
        pass


@pytest.mark.parametrize(("is_compact", "fits"), [(False, True), (True, False)])
async def test_a_matrix_that_lies_whole_while_it_becomes_compact_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_compact: bool, fits: bool
) -> None:
    config = read_model_config(tiny_checkpoint(tmp_path))
    name = "model.layers.0.self_attn.o_proj.weight"
    spec = TensorSpec(name, "bfloat16", tensor_shapes(config)[name])
    # For what is sent and what is made of it, and not for a third.
    free = 2 * spec.num_bytes + spec.num_bytes // 2
    memory = DeviceMemory(free, free)
    device = SimpleNamespace(compacts_weights=is_compact, memory=lambda: memory, torch_device=torch.device("cpu"))
    model = SimpleNamespace(config=config, num_bytes=10 * spec.num_bytes)
    loaded = SimpleNamespace(weights=SimpleNamespace(model=model, device=device))
    monkeypatch.setattr(weight_updates, "fixed_because", lambda *_, **__: "")
    monkeypatch.setattr(weight_updates, "host_memory", lambda: (free, free))
    if fits:
        Held().updates.check([spec], cast("Any", loaded))
        return
    with pytest.raises(ResourceExhausted, match="memory for them and the parts made of them is short"):
        Held().updates.check([spec], cast("Any", loaded))

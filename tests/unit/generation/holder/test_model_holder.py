"""The place for a model: whatever breaks on the way, it is free for another one afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.holder import model_holder
from penstock.generation.holder.model_holder import ModelHolder
from penstock.generation.lifecycle import Lifecycle, ModelState
from penstock.generation.metrics import GenerationMetrics
from prometheus_client import CollectorRegistry


async def _nothing(*_: object) -> bool:
    return True


class Loop:
    """The engine's loop, for a weak reference."""


async def test_an_unload_that_breaks_after_the_models_end_leaves_the_place_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifecycle = Lifecycle("m")
    holder = ModelHolder(GenerationServiceConfig(model="m"), lifecycle, GenerationMetrics(CollectorRegistry(), "m"))
    hub = SimpleNamespace(num_live=0, num_prepared=0, notify=int, close_streams=int, wait_streams_closed=_nothing)
    core: Any = SimpleNamespace(hub=hub, loop=Loop(), finish=_nothing)
    running: Any = SimpleNamespace(stop=_nothing)
    holder.running = running
    lifecycle.serve(core)

    def broken() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(model_holder, "free_memory", broken)
    with pytest.raises(RuntimeError, match="new thread"):
        await holder.unload(None)
    assert (lifecycle.state, lifecycle.model_name, lifecycle.core) == (ModelState.EMPTY, "", None)
    lifecycle.begin_load("n")

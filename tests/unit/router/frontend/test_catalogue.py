"""The catalogue of models on demand: who keeps a slot when the one that wanted it is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from factories.servers.router import until
from penstock.router.backends.model_slot import ModelSlot
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import Admission
from penstock.router.frontend.catalogue import Catalogue
from penstock.router.frontend.residence import Residence, ResidenceState
from penstock.router.metrics import RouterMetrics
from penstock.router.models_file import ModelEntry, ModelsFile
from prometheus_client import CollectorRegistry

SLOT = "127.0.0.1:1"


def add(catalogue: Catalogue, name: str) -> Residence:
    entry = ModelEntry(name=name, tokenizer=(SLOT,), path=name)
    pool: Any = SimpleNamespace(ready=lambda: [SimpleNamespace(key=SLOT)], backends=[], follow=lambda _: None)
    return catalogue.add(entry, pool, Admission(max_live=4, max_waiting=4, retry_after_seconds=1.0))


async def test_a_model_keeps_its_slot_when_the_one_that_wanted_it_leaves_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def loaded_name(_: ModelSlot) -> str:
        return "there"

    monkeypatch.setattr(ModelSlot, "loaded_name", loaded_name)
    config = RouterConfig(tokenizer=(SLOT,), model_turn_seconds=0.0)
    catalogue = Catalogue(config, RouterMetrics(CollectorRegistry()))
    catalogue.use(ModelsFile(models=(), slots=(SLOT,)))
    there, wanted = add(catalogue, "there"), add(catalogue, "wanted")
    running = asyncio.ensure_future(catalogue.run())
    await until(lambda: there.state is ResidenceState.LOADED)
    slot = there.slot
    await there.admission.enter("default", None)
    asking = asyncio.ensure_future(wanted.require(None))
    await until(lambda: there.state is ResidenceState.LEAVING)
    wanted.drain()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: there.state is ResidenceState.LOADED)
    assert there.slot is slot
    # New requests of it go on beside the old ones.
    await there.require(None)
    running.cancel()

"""LoRA adapters of a service: chosen by a request, refused, brought back, replaced under traffic."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from factories.engine.step_gate import held_after
from factories.models.adapters import LAYER_TARGETS, lora_folder, merged_checkpoint
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import Client, generation_service, request
from penstock.common.errors import StartupError
from penstock.generation.adapters.store import AdapterStore
from penstock.generation.app import GenerationApp
from penstock.generation.config import GenerationServiceConfig

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: lora_folder(folder / name, model, rank=4 << number, seed=number, targets=LAYER_TARGETS)
        for number, name in enumerate(NAMES)
    }


@contextlib.asynccontextmanager
async def service(model: Path, folders: dict[str, Path], **config: object) -> AsyncIterator[Client]:
    lora = tuple(f"{name}={folder}" for name, folder in folders.items())
    async with generation_service(model, lora=lora, **config) as client:
        yield client


def store_of(client: Client) -> AdapterStore:
    app = client.running.service
    assert isinstance(app, GenerationApp)
    core = app._lifecycle.core
    assert core is not None
    return core.loaded.weights.adapters


async def ids(client: Client, **fields: str) -> list[int]:
    outcome = await client.generate(request(**fields))
    assert outcome.error is None
    return outcome.ids()


async def test_a_request_gets_its_adapter(tmp_path: Path, model: Path, folders: dict[str, Path]) -> None:
    async with service(model, folders) as client:
        answers = await asyncio.gather(*(ids(client, adapter=name) for name in ("", *NAMES)))
        metrics = client.running.registry.get_sample_value
        labels = {"model_name": model.name}
        assert metrics("penstock_adapters_known", labels) == metrics("penstock_adapters_loaded", labels) == 3
        assert metrics("penstock_adapter_loads_total", labels) == 3
        assert metrics("penstock_adapter_bytes", labels) == store_of(client).figures().num_bytes > 0
    assert len({str(answer) for answer in answers}) == 4
    async with generation_service(merged_checkpoint(tmp_path / "merged", model, folders["two"])) as client:
        assert await ids(client) == answers[2]


async def test_an_unknown_name_is_refused(model: Path, folders: dict[str, Path]) -> None:
    async with service(model, folders) as client:
        outcome = await client.generate(request(adapter="nobody"))
    assert outcome.error is not None
    assert (outcome.error.reason, outcome.error.field) == ("ADAPTER_NOT_FOUND", "adapter")


async def test_one_that_left_memory_is_read_again(model: Path, folders: dict[str, Path]) -> None:
    async with service(model, folders, max_adapters=1) as client:
        store = store_of(client)
        assert [info.is_loaded for info in store.infos()] == [False, False, True]
        first = [await ids(client, adapter=name) for name in NAMES]
        assert [await ids(client, adapter=name) for name in NAMES] == first
        figures = store.figures()
        assert (figures.known, figures.loaded) == (3, 1)
        assert figures.loads == 3 + 6
        metrics = client.running.registry.get_sample_value
        assert metrics("penstock_adapter_evictions_total", {"model_name": model.name}) == figures.evictions == 8


async def test_requests_that_use_all_places_keep_them(model: Path, folders: dict[str, Path]) -> None:
    async with service(model, folders, max_adapters=1) as client:
        with held_after(1):
            long = asyncio.create_task(client.generate(request(adapter="one", config={"max_new_tokens": 40})))
            await client.until(lambda load: load.running_requests == 1)
            refused = await client.generate(request(adapter="two"))
        assert refused.error is not None
        assert refused.error.reason == "ADAPTER_SLOTS_FULL"
        assert refused.error.retry_after_seconds
        outcome = await long
        assert outcome.error is None
        assert len(outcome.ids()) == 40
        await client.until_idle()
        assert (await client.generate(request(adapter="two"))).error is None


async def test_nothing_is_held_by_requests_that_ended_in_any_way(model: Path, folders: dict[str, Path]) -> None:
    async with service(model, folders) as client:
        task = asyncio.create_task(client.generate(request(adapter="one", config={"max_new_tokens": 400})))
        await client.until(lambda load: load.running_requests == 1)
        assert [info.num_requests for info in store_of(client).infos()] == [1, 0, 0]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.until_idle()
        # A prompt that is refused after its adapter was found.
        assert (await client.generate(request(range(3, 3 + 9000), adapter="two"))).error is not None
        assert [info.num_requests for info in store_of(client).infos()] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_many_loads_and_unloads_under_traffic_lose_nothing(model: Path, folders: dict[str, Path]) -> None:
    loads = 200
    async with service(model, {"one": folders["one"]}, max_adapters=4) as client:
        store = store_of(client)
        expected = {str(await ids(client, adapter="one"))}
        store.load("one", folders["two"], replace=True)
        expected.add(str(await ids(client, adapter="one")))
        done, seen = asyncio.Event(), 0

        async def traffic() -> None:
            nonlocal seen
            while not done.is_set():
                assert str(await ids(client, adapter="one")) in expected
                seen += 1

        async def reload(times: int) -> None:
            for number in range(times // 2):
                await asyncio.to_thread(store.load, "one", folders[NAMES[number % 2]], replace=True)
                await asyncio.to_thread(store.load, "passing", folders["one"])
                store.unload("passing")

        users = [asyncio.create_task(traffic()) for _ in range(2)]
        await reload(loads // 5)
        gc.collect()
        before = psutil.Process().memory_info().rss
        await reload(loads - loads // 5)
        gc.collect()
        grown = psutil.Process().memory_info().rss - before
        done.set()
        await asyncio.gather(*users)
        assert seen
        assert grown < 16 << 20
        assert store.names() == ("one",)
        assert store.figures().loaded == 1


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"lora": ("one",)}, "expected NAME=FOLDER"),
        ({"lora": ("one=a", "one=b")}, "twice"),
        ({"adapter_memory": "auto"}, "--adapter-memory"),
    ],
)
def test_flags_that_mean_nothing_are_refused(config: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError) as caught:
        GenerationServiceConfig(**config).validate()  # type: ignore[arg-type]
    assert named in str(caught.value)


async def test_an_adapter_that_cannot_be_loaded_ends_the_start(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        async with generation_service(model, lora=(f"one={tmp_path}",)):
            pass
    assert caught.value.flag == "--lora"
    assert "adapter_model.safetensors" in str(caught.value)

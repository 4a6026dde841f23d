"""Adapters from the hub and from S3: loaded by operators and for requests, and forgotten when others need the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.models.adapters import lora_folder
from factories.servers.generation import Client, generation_service, request
from factories.servers.hub import Hub, running_hub
from factories.servers.router import running_router
from factories.servers.s3_server import ObjectStore, running_object_store
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import PenstockError, StartupError, from_rpc_error
from penstock.generation.config import GenerationServiceConfig
from penstock.v1 import admin_pb2
from penstock_client import AsyncClient

STORES = ("hub://owner", "s3://adapters/team")


def files_of(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


@dataclass
class Stores:
    """A hub with the adapter owner/tiny, a bucket with adapters/team/{one,two}, and the same in folders of a root."""

    hub: Hub
    bucket: ObjectStore
    root: Path
    adapter_bytes: int


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    root = tmp_path / "root"
    found = [
        files_of(lora_folder(root / name, demo_folder(), seed=seed)) for seed, name in enumerate(("hub", "one", "two"))
    ]
    with ExitStack() as stack:
        hub = stack.enter_context(running_hub(found[0], tmp_path / "cache"))
        bucket = stack.enter_context(running_object_store())
        bucket.put("adapters/team/one", found[1])
        bucket.put("adapters/team/two", found[2])
        bucket.put("adapters/others/one", found[1])
        for name, value in {**hub.environment, **bucket.environment}.items():
            monkeypatch.setenv(name, value)
        yield Stores(hub, bucket, root, sum(map(len, found[1].values())))


async def load(client: Client, name: str, path: str = "", *, replace: bool = False) -> admin_pb2.Adapter:
    asked = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
    answer: admin_pb2.LoadAdapterResponse = await client.admin.LoadAdapter(asked)
    return answer.adapter


async def refusal(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def ids(client: Client, adapter: str) -> list[int]:
    outcome = await client.generate(request(config={"max_new_tokens": 8}, adapter=adapter))
    assert outcome.error is None, outcome.error
    return outcome.ids()


async def test_adapters_of_stores_are_those_of_folders(stores: Stores) -> None:
    async with generation_service(demo_folder(), adapter_root=str(stores.root), adapter_store=STORES) as client:
        for name in ("hub", "one"):
            await load(client, f"folder-{name}", name)
        first = await load(client, "legal", "hub://owner/tiny")
        assert first.path == "hub://owner/tiny"
        assert await ids(client, "legal") == await ids(client, "folder-hub")
        # By their names alone.
        assert (await load(client, "owner/tiny")).path == "hub://owner/tiny"
        assert (await load(client, "s3://adapters/team/one")).path == "s3://adapters/team/one"
        assert await ids(client, "s3://adapters/team/one") == await ids(client, "folder-one")
        # The files came once.
        assert sorted(stores.hub.sent) == ["adapter_config.json", "adapter_model.safetensors"]
        replaced = await load(client, "legal", "s3://adapters/team/one", replace=True)
        assert replaced.path == "s3://adapters/team/one"
        assert await ids(client, "legal") == await ids(client, "folder-one")


async def test_places_outside_the_stores_are_refused(stores: Stores) -> None:
    async with generation_service(demo_folder(), adapter_root=str(stores.root), adapter_store=STORES) as client:
        for path in ("hub://other/tiny", "s3://adapters/others/one", "s3://adapters/team/../others/one"):
            error = await refusal(load(client, "x", path))
            assert (error.reason, error.field) == ("ADAPTER_PATH", "path")
        assert (await refusal(load(client, "x", "s3://adapters/team/three"))).reason == "ADAPTER_PATH"
        assert (await refusal(load(client, "s3://adapters/team/one", "one"))).field == "name"
        assert stores.bucket.sent == []
    async with generation_service(demo_folder(), adapter_root=str(stores.root)) as client:
        assert (await refusal(load(client, "x", "hub://owner/tiny"))).reason == "ADAPTER_PATH"
        assert (await refusal(load(client, "owner/tiny"))).reason == "ADAPTER_PATH"
        assert stores.hub.sent == []


async def test_the_least_recently_used_adapter_is_forgotten_for_another(stores: Stores) -> None:
    room = stores.adapter_bytes * 5 // 2
    settings = {"adapter_root": str(stores.root), "adapter_store": STORES, "adapter_disk": str(room)}
    async with generation_service(demo_folder(), **settings) as client:
        before = await client.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
        await load(client, "folder", "one")
        await load(client, "first", "s3://adapters/team/one")
        await load(client, "second", "s3://adapters/team/two")
        await ids(client, "first")
        await load(client, "third", "hub://owner/tiny")
        listed = await client.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
        assert [one.name for one in listed.adapters] == ["folder", "first", "third"]
        assert listed.version > before.version + 4
        outcome = await client.generate(request(adapter="second"))
        assert outcome.error is not None
        # It comes back, and another one leaves.
        await load(client, "second", "s3://adapters/team/two")
        listed = await client.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
        assert [one.name for one in listed.adapters] == ["folder", "third", "second"]


async def test_a_router_brings_what_a_request_names(stores: Stores) -> None:
    async with (
        generation_service(demo_folder(), adapter_root=str(stores.root), adapter_store=STORES) as service,
        running_router(backend=(service.running.address,), adapter_loading=True) as router,
        AsyncClient(router.server.address) as client,
    ):
        await load(service, "folder", "hub")
        wanted = (await client.generate("Hello", adapter="folder", max_new_tokens=8, do_sample=False)).text
        for name in ("owner/tiny", "hub://owner/tiny"):
            assert (await client.generate("Hello", adapter=name, max_new_tokens=8, do_sample=False)).text == wanted


def test_stores_need_a_root() -> None:
    with pytest.raises(StartupError) as caught:
        GenerationServiceConfig(adapter_store=("hub",)).validate()
    assert caught.value.flag == "--adapter-root"

"""Adapters loaded, replaced and unloaded through a router, under traffic through it: nothing fails, memory stays."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.models.adapters import lora_folder
from factories.servers.generation import generation_service, text_checkpoint
from factories.servers.router import Router, collect, generate, running_router
from penstock.v1 import admin_pb2, admin_pb2_grpc, config_pb2

FEW, MANY = 20, 1000
ONE_MIB = 1 << 20
# Of the router, both services, and the test, which are one process here.
MOST_GROWTH_BYTES = 32 * ONE_MIB
WEIGHTS = ("one", "two")


@dataclass
class Operator:
    """Operator and callers of a router."""

    router: Router
    admin: Any

    async def load(self, name: str, path: str, backend: str) -> None:
        asked = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=True)
        await self.admin.LoadAdapter(asked, metadata=(("penstock-backend", backend),))

    async def unload(self, name: str, backend: str) -> None:
        asked = admin_pb2.UnloadAdapterRequest(name=name)
        await self.admin.UnloadAdapter(asked, metadata=(("penstock-backend", backend),))

    async def ids(self, adapter: str, begun: asyncio.Event | None = None) -> list[int]:
        config = config_pb2.GenerationConfig(max_new_tokens=8)
        stop, output = config_pb2.StopConfig(ignore_eos=True), config_pb2.OutputConfig(return_token_ids=True)
        request = generate(adapter=adapter, config=config, stop=stop, output=output)

        async def note(_: object) -> None:
            if begun is not None:
                begun.set()

        return (await collect(self.router.stub.Generate(request), note)).ids()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def churn(operator: Operator, backends: tuple[str, str], rounds: int) -> tuple[int, int]:
    """Load, replace and unload at both backends in turns; return requests that ended well, and the growth of memory
    after a third of the rounds."""
    wanted = {"": await operator.ids("")}
    for path in WEIGHTS:
        for backend in backends:
            await operator.load("steady", path, backend)
        wanted[path] = await operator.ids("steady")
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    choose, stop, ended, base = random.Random(0), asyncio.Event(), 0, 0

    async def traffic() -> None:
        nonlocal ended
        while not stop.is_set():
            name = choose.choice(["steady", ""])
            ids = await operator.ids(name)
            # Each backend has either weights at a time; none a mixture, or those of the base model.
            assert ids == wanted[""] if not name else ids in (wanted["one"], wanted["two"])
            ended += 1

    tasks = [asyncio.ensure_future(traffic()) for _ in range(4)]
    try:
        for number in range(rounds):
            if number == rounds // 3:
                base = resident_bytes()
            backend, path, guest = backends[number % 2], choose.choice(WEIGHTS), f"guest-{number}"
            await operator.load(guest, path, backend)
            # It is known at once, goes on when the name is taken away, and is never another's.
            begun = asyncio.Event()
            request = asyncio.ensure_future(operator.ids(guest, begun))
            await operator.load("steady", choose.choice(WEIGHTS), backend)
            await asyncio.wait({request, waiting := asyncio.ensure_future(begun.wait())}, return_when="FIRST_COMPLETED")
            waiting.cancel()
            await operator.unload(guest, backend)
            assert await request == wanted[path]
            ended += 1
            for task in tasks:
                assert not task.done(), task.exception()
    finally:
        stop.set()
        await asyncio.gather(*tasks)
    return ended, resident_bytes() - base


async def check_churn(folder: Path, rounds: int) -> None:
    model = text_checkpoint(folder / "model")
    for seed, name in enumerate(WEIGHTS):
        lora_folder(folder / "adapters" / name, model, seed=seed, rank=16)
    # Requests may hold earlier readings of the name that is replaced.
    settings: dict[str, Any] = {"adapter_root": str(folder / "adapters"), "max_adapters": 16, "dtype": "float32"}
    async with generation_service(model, **settings) as one, generation_service(model, **settings) as two:
        backends = (one.running.address, two.running.address)
        async with (
            running_router(backend=backends) as router,
            grpc.aio.insecure_channel(router.server.address) as channel,
        ):
            operator = Operator(router, admin_pb2_grpc.GenerationAdminServiceStub(channel))
            ended, growth = await churn(operator, backends, rounds)
            print(f"{rounds} rounds: {ended} requests, {growth / ONE_MIB:.1f} MiB more")
            assert ended > rounds
            assert growth < MOST_GROWTH_BYTES, f"{growth / ONE_MIB:.1f} MiB more"
            for client in (one, two):
                await client.until_idle()
                found = await client.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
                assert [adapter.name for adapter in found.adapters] == ["steady"]


async def test_loads_and_unloads_through_a_router_fail_nothing(tmp_path: Path) -> None:
    await check_churn(tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_thousand_loads_and_unloads_through_a_router_fail_nothing(tmp_path: Path) -> None:
    await check_churn(tmp_path, MANY)

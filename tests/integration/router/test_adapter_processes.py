"""Real generation processes with adapters behind a router: streams of one that is killed go on at the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.models.adapters import lora_folder
from factories.servers import stack
from factories.servers.router import Router, running_router
from penstock.common.checkpoint import demo_folder
from penstock.v1 import admin_pb2, admin_pb2_grpc
from penstock_client import AsyncClient, Unavailable

# float32: no id depends on the other rows of a batch, so a moved stream must have the very ids of one that was not.
FLAGS = ("--kv-memory", "32MiB", "--threads", "1", "--dtype", "float32")
LONG: dict[str, Any] = {"max_new_tokens": 160, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the adapters left, right and both."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("left", "right", "both")):
        lora_folder(folder / name, demo_folder(), seed=seed)
    return folder


@contextlib.asynccontextmanager
async def two_processes(root: Path, *more: str, **settings: Any) -> AsyncIterator[tuple[Router, list[stack.Process]]]:
    """One process with the adapters left and both, one with right and both, and a router."""
    processes = []
    try:
        for name in ("left", "right"):
            lora = ("--lora", f"{name}={root / name}", "--lora", f"both={root / 'both'}")
            processes.append(await asyncio.to_thread(stack.start, "generation", *FLAGS, *lora, *more))
        for process in processes:
            await asyncio.to_thread(process.wait_ready)
        addresses = tuple(process.address for process in processes)
        async with running_router(backend=addresses, **settings) as router:
            yield router, processes
    finally:
        for process in processes:
            if process.popen.poll() is None:
                process.kill()


async def test_a_killed_backends_stream_goes_on_with_its_adapter_and_the_same_ids(root: Path) -> None:
    async with two_processes(root) as (router, processes), AsyncClient(router.server.address) as client:
        wanted = (await client.generate("Tell me", adapter="both", **LONG)).choices[0].token_ids
        plain = (await client.generate("Tell me", **LONG)).choices[0].token_ids
        assert wanted != plain
        streams = [client.stream("Tell me", adapter="both", session_id="s", **LONG) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        # One session: all are at one backend, the only one that is busy.
        busy = [process for process in processes if await running_at(process.address)]
        assert len(busy) == 1
        busy[0].kill()
        for stream in streams:
            answer = await stream.result()
            assert answer.choices[0].token_ids == wanted
            assert answer.finished.attempts == 2
        assert router.metric("moves_total") == 3
        gone = "left" if busy[0] is processes[0] else "right"
        with pytest.raises(Unavailable, match="no generation backend that has the adapter is ready"):
            await client.generate("Hello", adapter=gone)


async def running_at(address: str) -> int:
    """Requests that run at a generation service."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
        return int((await stub.GetLoad(admin_pb2.GetLoadRequest())).load.running_requests)


@pytest.mark.slow
async def test_a_stream_moves_to_a_backend_that_loads_its_adapter_for_it(root: Path) -> None:
    more = ("--adapter-root", str(root))
    async with (
        two_processes(root, *more, adapter_loading=True) as (router, processes),
        AsyncClient(router.server.address) as client,
    ):
        wanted = (await client.generate("Tell me", adapter="left", **LONG)).choices[0].token_ids
        stream = client.stream("Tell me", adapter="left", **LONG)
        await anext(stream)
        processes[0].kill()
        answer = await stream.result()
        assert answer.choices[0].token_ids == wanted
        assert answer.finished.attempts == 2
        assert router.metric("adapter_loads_total", outcome="ok") == 1
        there = await client.list_adapters(backend=processes[1].address)
        assert [(one.name, one.path) for one in there] == [("right", "right"), ("both", "both"), ("left", "left")]

"""A service with a host pool that has four times more to do than its KV pool holds: ids, figures, cancels, drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.engine.step_gate import StepGate, held_after
from factories.servers.generation import Client, generation_service, request
from penstock.common.errors import StartupError, from_rpc_error
from penstock.generation.config import GenerationServiceConfig
from penstock.v1 import admin_pb2
from prometheus_client import generate_latest

pytestmark = pytest.mark.asyncio(loop_scope="module")
BLOCK_SIZE = 16
# Of 7 blocks at its end; the pool holds two of them.
PROMPT_TOKENS, NEW_TOKENS, BLOCKS = 40, 60, 14
COUNT = 8


def block_bytes(folder: Path) -> int:
    facts = json.loads((folder / "config.json").read_text())
    head_dim = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    return int(facts["num_hidden_layers"] * 2 * BLOCK_SIZE * facts["num_key_value_heads"] * head_dim * 4)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    sizes = {"kv_memory": str(BLOCKS * block_bytes(folder)), "host_kv_memory": str(100 * block_bytes(folder))}
    return {**sizes, "preemption": "swap", "max_context": 128, "dtype": "float32", **changes}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder, **settings(folder)) as running:
        yield running


def long_request(number: int) -> Any:
    sampling = {"do_sample": True, "temperature": 1.2} if number % 2 else {}
    prompt = range(10 + 50 * number, 10 + 50 * number + PROMPT_TOKENS)
    return request(prompt, config={"max_new_tokens": NEW_TOKENS, **sampling}, seed=number)


async def pool_stats(client: Client) -> admin_pb2.GetPoolStatsResponse:
    stats: admin_pb2.GetPoolStatsResponse = await client.admin.GetPoolStats(admin_pb2.GetPoolStatsRequest())
    return stats


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_the_ids_are_those_of_requests_one_after_the_other(client: Client, folder: Path) -> None:
    alone = [(await client.generate(long_request(number))).ids() for number in range(COUNT)]
    await client.admin.ClearCache(admin_pb2.ClearCacheRequest())
    before = await pool_stats(client)
    together = await asyncio.gather(*(client.generate(long_request(number)) for number in range(COUNT)))
    assert [outcome.ids() for outcome in together] == alone
    stats = await pool_stats(client)
    assert stats.swaps - before.swaps == stats.preemptions - before.preemptions > 0
    assert stats.host_out_bytes == stats.host_out_blocks * block_bytes(folder) > 0
    assert stats.host_in_blocks > 0
    assert stats.host_out_seconds > 0
    assert stats.host_in_seconds > 0
    load = await client.until_idle()
    assert (load.host_blocks_total, load.host_blocks_used, load.swapped_requests) == (100, 0, 0)
    metrics = generate_latest(client.running.registry).decode()
    for name, value in (
        ("num_preemptions_swapped_total", stats.swaps),
        ("swap_out_bytes_total", stats.host_out_bytes),
        ("swap_in_blocks_total", stats.host_in_blocks),
        ("cpu_cache_blocks", 100),
        ("num_requests_swapped", 0),
    ):
        line = next(line for line in metrics.splitlines() if line.startswith(f"penstock_{name}{{"))
        assert float(line.rpartition(" ")[2]) == value, name


async def until_swapped(client: Client, gate: StepGate) -> admin_pb2.Load:
    """Let the engine take a step at a time until a request has given way. Requests come at their own pace."""
    async with asyncio.timeout(60):
        while not (load := await client.load()).swapped_requests:
            if gate.is_spent:
                gate.allow(1)
    return load


async def test_swapped_requests_that_are_cancelled_leave_nothing(client: Client) -> None:
    await client.until_idle()
    with held_after(30) as gate:
        calls = [client.generation.Generate(long_request(number)) for number in range(COUNT)]
        load = await until_swapped(client, gate)
        assert load.host_blocks_used
        for call in calls:
            call.cancel()
        gate.open()
    await client.until_idle()
    load = await client.load()
    assert (load.host_blocks_used, load.swapped_requests) == (0, 0)


async def test_a_drain_waits_for_swapped_requests_and_its_grace_ends_them(client: Client) -> None:
    await client.until_idle()
    with held_after(30) as gate:
        calls = [asyncio.create_task(client.generate(long_request(number))) for number in range(COUNT)]
        await until_swapped(client, gate)
        draining = asyncio.create_task(_drain(client))
        await client.until(lambda load: load.draining)
        gate.open()
        await draining
    outcomes = await asyncio.gather(*calls)
    assert all(outcome.error is None or outcome.error.reason for outcome in outcomes)
    load = await client.load()
    assert (load.kv_blocks_used, load.host_blocks_used) == (0, 0)
    await client.admin.Resume(admin_pb2.ResumeRequest())


async def _drain(client: Client) -> None:
    await client.admin.Drain(admin_pb2.DrainRequest(grace_seconds=0.0))


async def test_blocks_are_copied_by_hand_but_for_those_that_requests_hold(client: Client) -> None:
    await client.until_idle()
    copied = await client.admin.CopyBlocks(
        admin_pb2.CopyBlocksRequest(pairs=[admin_pb2.BlockPair(source=3, destination=4)])
    )
    assert (copied.blocks, copied.seconds > 0) == (1, True)
    swaps = [admin_pb2.BlockSwap(kind=1, source=3, destination=7), admin_pb2.BlockSwap(kind=0, source=7, destination=5)]
    swapped = await client.admin.SwapBlocks(admin_pb2.SwapBlocksRequest(swaps=swaps))
    assert swapped.blocks == 2
    with held_after(30) as gate:
        calls = [client.generation.Generate(long_request(number)) for number in range(COUNT)]
        await until_swapped(client, gate)
        # The engine's thread is in a step: the answer comes after it.
        pairs = [admin_pb2.BlockPair(source=block, destination=(block + 1) % BLOCKS) for block in range(BLOCKS)]
        asked = asyncio.create_task(refusal(client.admin.CopyBlocks(admin_pb2.CopyBlocksRequest(pairs=pairs))))
        while not asked.done():
            gate.allow(1)
            await asyncio.sleep(0.001)
        error = await asked
        assert error.reason == "BLOCK_IN_USE"
        assert error.metadata["device_blocks"]
        for call in calls:
            call.cancel()
        gate.open()
    await client.until_idle()
    wrong = [admin_pb2.BlockSwap(kind=2, source=0, destination=0)]
    assert (await refusal(client.admin.SwapBlocks(admin_pb2.SwapBlocksRequest(swaps=wrong)))).field == "swaps[0].kind"


async def test_without_a_host_pool_blocks_cannot_be_swapped(folder: Path) -> None:
    async with generation_service(folder) as client:
        swaps = [admin_pb2.BlockSwap(kind=1, source=0, destination=0)]
        assert (
            await refusal(client.admin.SwapBlocks(admin_pb2.SwapBlocksRequest(swaps=swaps)))
        ).reason == "NO_HOST_POOL"
        assert (await client.load()).host_blocks_total == 0


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"host_kv_memory": "0"}, "--preemption"),
        ({"preemption": "both"}, "--preemption"),
        ({"host_kv_memory": "-2GiB"}, "--host-kv-memory"),
        ({"host_kv_memory": "much"}, "--host-kv-memory"),
    ],
)
async def test_flags_that_cannot_be_are_named(folder: Path, changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(StartupError) as caught:
        GenerationServiceConfig(model=str(folder), **settings(folder, **changes)).validate()
    assert caught.value.flag == flag


@pytest.mark.parametrize("memory", ["900TiB", "17"])
async def test_a_host_pool_that_cannot_be_says_so_at_the_start(folder: Path, memory: str) -> None:
    with pytest.raises(StartupError, match="one block takes") as caught:
        async with generation_service(folder, **settings(folder, host_kv_memory=memory)):
            pass
    assert caught.value.flag == "--host-kv-memory"

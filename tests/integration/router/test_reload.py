"""Reload of backends under traffic: the router moves what a reload ends, and every stream is the exact one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from factories.engine.step_gate import held_after
from factories.servers.generation import Client, generation_service
from factories.servers.router import Router, collect, generate, running_router
from penstock.common.checkpoint import demo_folder
from penstock.v1 import admin_pb2, admin_pb2_grpc, config_pb2

STREAMS, TOKENS = 12, 200


def message(number: int) -> Any:
    """One of several kinds of requests, by its number."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"do_sample": True, "seed": number},
        {"ngram_memory_num_tokens": 6, "lookahead_window": 4},
        {"do_sample": True, "seed": number, "lookahead_window": 6, "num_return_sequences": 2},
    )
    config = {"max_new_tokens": TOKENS, **kinds[number % len(kinds)]}
    return generate(text=f"{number}: Count from 1 to 20.", config=config, output={"return_token_ids": True})


async def words(router: Router, number: int) -> Any:
    answer = await collect(router.stub.Generate(message(number)))
    ends = [(one.token_count, one.finish_reason) for one in answer.finished.sequences]
    return [answer.text(index) for index in range(2)], [answer.ids(index) for index in range(2)], ends


def _is_busy(load: admin_pb2.Load) -> bool:
    return load.running_requests + load.waiting_requests > 0


@pytest.mark.slow
@pytest.mark.parametrize("grace", [pytest.param(0.0, marks=pytest.mark.slow), None])
async def test_reloads_under_traffic_change_no_stream(grace: float | None) -> None:
    """Both backends are reloaded in turns, twice, with streams on each that are ended there or waited for."""
    async with contextlib.AsyncExitStack() as stack:
        service = {"dtype": "float32", "kv_memory": "32MiB"}
        backends: list[Client] = [
            await stack.enter_async_context(generation_service(demo_folder(), **service)) for _ in range(2)
        ]
        addresses = tuple(one.running.address for one in backends)
        router = await stack.enter_async_context(running_router(backend=addresses, max_moves=9, retry_budget_burst=99))
        expected = [await words(router, number) for number in range(STREAMS)]
        request = admin_pb2.ReloadRequest() if grace is None else admin_pb2.ReloadRequest(grace_seconds=grace)
        aborted = 0
        for _ in range(2):
            for one in backends:
                with held_after(20):
                    streams = [asyncio.create_task(words(router, number)) for number in range(STREAMS)]
                    await asyncio.gather(*(each.until(_is_busy) for each in backends))
                    reload = asyncio.ensure_future(one.admin.Reload(request))
                    await one.until(lambda load: load.draining)
                aborted += (await reload).aborted_requests
                assert await asyncio.gather(*streams) == expected
                await router.until("backend_up", 1, backend=one.running.address)
        assert (aborted > 0) == (grace is not None)
        # The backends were told to, and did nothing wrong.
        assert not any(
            router.metric("backend_failures_total", backend=address, outcome="internal") for address in addresses
        )
        assert (router.metric("moves_total") + router.metric("retries_total") > 0) == (grace is not None)
        for one in backends:
            await one.until_idle()


async def test_a_reload_goes_through_the_router() -> None:
    async with generation_service(demo_folder()) as backend:
        address = backend.running.address
        async with running_router(backend=(address,)) as router:
            async with grpc.aio.insecure_channel(router.server.address) as channel:
                admin: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
                answer = await admin.Reload(admin_pb2.ReloadRequest(), metadata=(("penstock-backend", address),))
            assert answer.weights_bytes == backend.running.service._lifecycle.core.loaded.weights.model.num_bytes
            await router.until("backend_up", 1, backend=address)
            few = config_pb2.GenerationConfig(max_new_tokens=8)
            assert (await collect(router.stub.Generate(generate(config=few)))).finished

"""Random requests at every call of every service: a documented status, nothing left behind, nothing told to the log.

PENSTOCK_FUZZ: how many; PENSTOCK_FUZZ_SEED: where to begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from factories.servers.generation import generation_service, request, text_checkpoint
from factories.servers.router import QUICK
from factories.wire.random_messages import CANARY, RandomMessages
from google.protobuf import descriptor_pool, message_factory
from penstock.router.app import RouterApp
from penstock.router.config import RouterConfig
from penstock.serving.server import serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.config import TokenizerConfig
from penstock.v1 import text_pb2, text_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

COUNT = int(os.environ.get("PENSTOCK_FUZZ", "400"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
AT_ONCE = 8
# A call ends by then whatever it asked for.
CALL_SECONDS = 5.0
# They would stop the very service, or never end by themselves; DEADLINE_EXCEEDED ends the others.
LEFT_OUT = ("Drain", "Resume", "Reload", "Shutdown")
BAD = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)


def methods(service: str) -> list[Any]:
    found = descriptor_pool.Default().FindServiceByName(service)
    return [method for method in found.methods if not method.name.startswith(LEFT_OUT)]


@contextlib.asynccontextmanager
async def everything(model: Path) -> AsyncIterator[tuple[Any, dict[str, tuple[str, ...]], list[CollectorRegistry]]]:
    """All services in this process; yields generation's client, services by address, registries."""
    tokenizer_config = TokenizerConfig(model=str(model), template_timeout_seconds=60)
    registries = [CollectorRegistry(), CollectorRegistry()]
    async with (
        generation_service(model) as generation,
        serve_in_process(TokenizerApp(tokenizer_config, registries[0]), tokenizer_config, registries[0]) as tokenizer,
    ):
        config = RouterConfig(tokenizer=(tokenizer.address,), backend=(generation.running.address,), **QUICK)
        async with serve_in_process(RouterApp(config, registries[1]), config, registries[1]) as router:
            servers = (router, tokenizer, generation.running)
            services = {server.address: server.service.grpc_services for server in servers}
            yield generation, services, [*registries, generation.running.registry]


async def call(
    channel: grpc.aio.Channel, method: Any, bodies: list[bytes], deadline: float
) -> grpc.aio.AioRpcError | None:
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    start: Any = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    try:
        begun = start(iter(bodies) if method.client_streaming else bodies[0], timeout=deadline)
        if method.server_streaming:
            async for _ in begun:
                pass
        else:
            await begun
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def text_of(address: str) -> tuple[int, ...]:
    """Ids of a greedy answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        asked = text_pb2.GenerateTextRequest(text="one two three")
        asked.config.max_new_tokens, asked.config.do_sample = 8, False
        asked.output.return_token_ids = asked.stop.ignore_eos = True
        stub: Any = text_pb2_grpc.TextServiceStub(channel)
        return tuple([token async for event in stub.Generate(asked) for token in event.delta.token_ids])


def told(error: grpc.aio.AioRpcError) -> Iterable[str]:
    yield error.details() or ""
    for _, value in error.trailing_metadata() or ():
        yield value if isinstance(value, str) else value.decode("utf-8", "replace")


@pytest.mark.timeout(0)  # as long as PENSTOCK_FUZZ takes
async def test_random_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, outcomes = RandomMessages(SEED), Counter[tuple[str, str]]()
    problems: list[str] = []
    memory: list[int] = []
    async with everything(text_checkpoint(tmp_path / "model", max_position_embeddings=256)) as (
        generation,
        services,
        registries,
    ):
        (router, *_) = services
        before, ids = await text_of(router), (await generation.generate(request())).ids()
        targets = [
            (address, method) for address, names in services.items() for name in names for method in methods(name)
        ]
        async with contextlib.AsyncExitStack() as stack:
            channels = {
                address: await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in services
            }

            async def one(number: int) -> None:
                address, method = targets[number % len(targets)]
                kind = message_factory.GetMessageClass(method.input_type)
                count = 1 + (number % 3 if method.client_streaming else 0)
                bodies = [make.damaged(make.message(kind).SerializeToString()) for _ in range(count)]
                watches = method.name.startswith("Watch")
                error = await call(channels[address], method, bodies, 0.05 if watches else CALL_SECONDS)
                code = grpc.StatusCode.OK if error is None else error.code()
                outcomes[method.name, code.name] += 1
                if code in BAD:
                    problems.append(
                        f"{number} {method.full_name}: {code.name} {error.details() if error else ''}"[:300]
                    )
                if error is not None and any(CANARY in text for text in told(error)):
                    problems.append(f"{number} {method.full_name}: repeats the caller's text")

            for first in range(0, COUNT, AT_ONCE):
                await asyncio.gather(*(one(number) for number in range(first, min(COUNT, first + AT_ONCE))))
                if first % max(AT_ONCE, COUNT // 20 // AT_ONCE * AT_ONCE) == 0:
                    gc.collect()
                    memory.append(psutil.Process().memory_info().rss >> 20)
        await generation.until_idle()
        assert await text_of(router) == before
        assert (await generation.generate(request())).ids() == ids
        for registry in registries:
            assert CANARY not in generate_latest(registry).decode()
    said = "".join(capfd.readouterr())
    if COUNT > 1000:
        with capfd.disabled():
            sys.stdout.write(f"\nMiB: {memory}\n" + "".join(f"{key}: {n}\n" for key, n in sorted(outcomes.items())))
            sys.stdout.write("\n".join(problems[:40]) + "\n")
    assert not problems, problems[:20]
    assert CANARY not in said

"""Random requests at every call of every service: a documented status, nothing left behind, nothing told to the log.

PENSTOCK_FUZZ: how many; PENSTOCK_FUZZ_SEED: where to begin.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from factories.servers.gateway import running_gateway
from factories.servers.generation import generation_service, request, text_checkpoint
from factories.servers.router import QUICK
from factories.wire.random_messages import CANARY
from factories.wire.request_fuzz import RequestFuzzer
from penstock.common.checkpoint import demo_folder
from penstock.gateway.jobs_port import JobsPort
from penstock.router.app import RouterApp
from penstock.router.config import RouterConfig
from penstock.serving.server import serve_in_process
from penstock.tokenizer.app import TokenizerApp
from penstock.tokenizer.config import TokenizerConfig
from penstock.v1 import text_pb2, text_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

COUNT = int(os.environ.get("PENSTOCK_FUZZ", "100"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
# Times at which a run is looked at.
LOOKS = 20
# A run of so many may add so many MiB to the process after its first quarter. Messages of 19 MB come and go.
LONG, MOST_MEMORY = 20_000, 100


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
            async with running_gateway(router.address, jobs_port=0) as gateway:
                services[gateway.app.jobs_address] = JobsPort.grpc_services
                yield generation, services, [*registries, generation.running.registry, gateway.registry]


async def text_of(address: str) -> tuple[int, ...]:
    """Ids of a greedy answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        asked = text_pb2.GenerateTextRequest(text="one two three")
        asked.config.max_new_tokens, asked.config.do_sample = 8, False
        asked.output.return_token_ids = asked.stop.ignore_eos = True
        stub: Any = text_pb2_grpc.TextServiceStub(channel)
        return tuple([token async for event in stub.Generate(asked) for token in event.delta.token_ids])


@pytest.fixture
def no_garbage() -> None:
    """Collect what earlier tests left while no event loop runs: clients of openai that nobody closed would close
    themselves within a running one, by connections of their own loop, and tell a traceback of that."""
    gc.collect()


@pytest.mark.timeout(0)  # as long as PENSTOCK_FUZZ takes
@pytest.mark.usefixtures("no_garbage")
async def test_random_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    memory: list[int] = []
    leaks: list[str] = []
    tracebacks: list[str] = []

    def look() -> None:
        gc.collect()
        memory.append(psutil.Process().memory_info().rss >> 20)
        # Read now and then: a long run's log is long.
        said = "".join(capfd.readouterr())
        if CANARY in said:
            leaks.append(said[max(0, said.index(CANARY) - 500) :][:1000])
        if "Traceback" in said:
            tracebacks.append(said[max(0, said.index("Traceback") - 500) :][:5000])

    model = text_checkpoint(tmp_path / "model", max_position_embeddings=256)
    shutil.copy(demo_folder() / "chat_template.jinja", model)
    async with everything(model) as (generation, services, registries):
        (router, *_) = services
        before, ids = await text_of(router), (await generation.generate(request())).ids()
        async with RequestFuzzer.opened(services, SEED) as fuzzer:
            totals = await fuzzer.run(COUNT, every=max(1, COUNT // LOOKS), look=look)
        await generation.until_idle()
        assert await text_of(router) == before
        assert (await generation.generate(request())).ids() == ids
        for registry in registries:
            assert CANARY not in generate_latest(registry).decode()
    look()
    if COUNT > 1000:
        with capfd.disabled():
            sys.stdout.write(f"\nMiB: {memory}\n{totals}\n")
            sys.stdout.write("\n".join((*tracebacks[:3], "")))
    assert not totals.problems, totals.problems[:20]
    assert not tracebacks, tracebacks[:3]
    assert not leaks, leaks[:5]
    assert COUNT < LONG or memory[-1] - memory[LOOKS // 4] < MOST_MEMORY, memory

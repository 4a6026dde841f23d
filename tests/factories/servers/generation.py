"""Generation service in this process, on a tiny random model, and a client of its RPCs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import PenstockError, from_rpc_error
from penstock.generation.app import GenerationApp
from penstock.generation.config import GenerationServiceConfig
from penstock.serving.server import RunningServer, serve_in_process
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    config_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2_grpc,
)
from prometheus_client import CollectorRegistry

# Time that a condition has to come true; the tests end as soon as it does.
PATIENCE_SECONDS = 60.0
# The demo tokenizer's size, so that its texts can be used with a random model.
TEXT_VOCAB_SIZE = 4096
CONTEXT = 8192


def text_checkpoint(folder: Path, **config: Any) -> Path:
    """Write a random model with the demo model's tokens."""
    settings = {"vocab_size": TEXT_VOCAB_SIZE, "max_position_embeddings": CONTEXT, **config}
    tiny_checkpoint(folder, **settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / name)
    return folder


@dataclass(slots=True)
class Outcome:
    """All events of one request."""

    events: list[generation_pb2.GenerateResponse] = field(default_factory=list)
    error: PenstockError | None = None

    @property
    def kinds(self) -> list[str | None]:
        """Kinds of the events: started, delta … finished."""
        return [event.WhichOneof("event") for event in self.events]

    @property
    def started(self) -> generation_pb2.Started:
        return self.events[0].started

    @property
    def deltas(self) -> list[generation_pb2.TokenDelta]:
        return [event.delta for event in self.events if event.HasField("delta")]

    @property
    def finished(self) -> generation_pb2.Finished:
        return self.events[-1].finished

    def ids(self, index: int = 0) -> list[int]:
        """Token ids of one returned sequence."""
        return [token_id for delta in self.deltas if delta.index == index for token_id in delta.token_ids]


@dataclass(slots=True)
class Client:
    """Stubs and shorthands over one channel."""

    running: RunningServer
    channel: grpc.aio.Channel

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.GenerationAdminServiceStub(self.channel)

    @property
    def model(self) -> Any:
        return model_pb2_grpc.ModelServiceStub(self.channel)

    async def generate(self, message: generation_pb2.GenerateRequest, **call: Any) -> Outcome:
        """Read a Generate to its end."""
        outcome = Outcome()
        try:
            async for event in self.generation.Generate(message, **call):
                outcome.events.append(event)
        except grpc.RpcError as error:
            outcome.error = from_rpc_error(error)
        return outcome

    async def load(self) -> admin_pb2.Load:
        """Read the present load."""
        response: admin_pb2.GetLoadResponse = await self.admin.GetLoad(admin_pb2.GetLoadRequest())
        return response.load

    async def until(self, condition: Callable[[admin_pb2.Load], bool]) -> admin_pb2.Load:
        """Watch the load until `condition` holds."""
        call = self.admin.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=0.01))
        report: admin_pb2.WatchLoadResponse
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for report in call:
                if condition(report.load):
                    call.cancel()
                    return report.load
        raise AssertionError("the watch ended")

    async def until_idle(self) -> admin_pb2.Load:
        """Wait until nothing runs or waits, and every block is free."""
        return await self.until(
            lambda load: not (load.running_requests or load.waiting_requests or load.kv_blocks_used)
        )


@contextlib.asynccontextmanager
async def generation_service(model: Path | None, **config: Any) -> AsyncIterator[Client]:
    """Run a ready service over `model`, or one without a model; yield a client of it."""
    torch.set_num_threads(1)
    settings = {
        "model": None if model is None else str(model),
        "empty": model is None,
        "kv_memory": "8MiB",
        "threads": 1,
        "tune_seconds": 0.0,
        # A request that a busy machine makes slow must not be refused.
        "constraint_compile_seconds": PATIENCE_SECONDS,
        **config,
    }
    service_config = GenerationServiceConfig(**settings)
    registry = CollectorRegistry()
    app = GenerationApp(service_config, registry)
    async with (
        serve_in_process(app, service_config, registry) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield Client(running, channel)


def request(
    prompt: Iterable[int] = (5, 6, 7),
    *,
    config: dict[str, Any] | None = None,
    stop: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **fields: Any,
) -> generation_pb2.GenerateRequest:
    """Make a GenerateRequest: 8 new tokens, past end-of-sequence ids, unless `config` and `stop` change that."""
    return generation_pb2.GenerateRequest(
        prompt_token_ids=list(prompt),
        config=config_pb2.GenerationConfig(**{"max_new_tokens": 8, **(config or {})}),
        stop=config_pb2.StopConfig(**{"ignore_eos": True, **(stop or {})}),
        output=config_pb2.OutputConfig(**(output or {})),
        **fields,
    )


def token_ids(*ids: int) -> common_pb2.TokenIds:
    """Make one run of ids."""
    return common_pb2.TokenIds(ids=ids)

"""Services of smg-grpc-proto's protocols: vLLM's and SGLang's have the same calls, with messages of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from penstock.engines import smg_common_pb2
from penstock.router.engines.engine_services import EngineFacts, ToldLoad, standard_health
from penstock.serving.transport import Channel


class SmgServices:
    """Calls of one connection. Implements EngineServices."""

    def __init__(
        self,
        channel: Channel,
        stub: Any,
        messages: ModuleType,
        service: str,
        timeout: float,
        *,
        window: Callable[[Any], int],
        aborts: Callable[[Sequence[str]], list[Message]],
    ) -> None:
        """Make them. `window` reads the most requests at once from GetServerInfo, `aborts` makes requests of Abort."""
        self._stub = stub
        self._health = health_pb2_grpc.HealthStub(channel.for_stubs)
        self._messages = messages
        self._service = service
        self._timeout = timeout
        self._window = window
        self._aborts = aborts

    async def is_healthy(self) -> bool:
        """Ask the engine's own call and the standard one. By its own alone an engine is healthy while it warms up, when
        requests take a hundred times as long, and while it shuts down."""
        own = await self._stub.HealthCheck(self._messages.HealthCheckRequest(), timeout=self._timeout)
        if not own.healthy:
            return False
        return await standard_health(self._health, self._service, self._timeout) is not False

    async def facts(self) -> EngineFacts:
        messages, timeout = self._messages, self._timeout
        told = await self._stub.GetModelInfo(messages.GetModelInfoRequest(), timeout=timeout)
        server = await self._stub.GetServerInfo(messages.GetServerInfoRequest(), timeout=timeout)
        loads = await self._stub.GetLoads(messages.GetLoadsRequest(), timeout=timeout)
        return EngineFacts(
            name=told.served_model_name or PurePosixPath(told.model_path).name,
            max_context_tokens=told.max_context_length,
            vocab_size=told.vocab_size,
            eos_token_ids=tuple(told.eos_token_ids),
            generates=told.is_generation,
            architecture=next(iter(told.architectures), ""),
            model_type=told.model_type,
            default_sampling_params_json=told.default_sampling_params_json,
            max_running_requests=self._window(server),
            kv_tokens=sum(max(load.max_total_num_tokens, 0) for load in loads.loads),
        )

    async def load(self) -> ToldLoad:
        told = await self._stub.GetLoads(self._messages.GetLoadsRequest(), timeout=self._timeout)
        loads = list(told.loads)
        return ToldLoad(
            running=sum(max(load.num_running_reqs, 0) for load in loads),
            waiting=sum(max(load.num_waiting_reqs, 0) for load in loads),
            kv_usage=max((load.token_usage for load in loads), default=0.0),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request in self._aborts(request_ids):
            await self._stub.Abort(request, timeout=self._timeout)

    def generate(self, message: Message, timeout: float | None) -> Any:
        return self._stub.Generate(message, timeout=timeout)

    async def embed(
        self, token_ids: Sequence[int], request_id: str, timeout: float | None
    ) -> tuple[Sequence[float], int]:
        message = self._messages.EmbedRequest(request_id=request_id)
        message.tokenized.input_ids.extend(token_ids)
        told = await self._stub.Embed(message, timeout=timeout)
        return told.embedding, told.prompt_tokens

    def tokenizer_files(self, timeout: float) -> Any:
        return self._stub.GetTokenizer(smg_common_pb2.GetTokenizerRequest(), timeout=timeout)

    def cache_events(self) -> Any:
        return self._stub.SubscribeKvEvents(smg_common_pb2.SubscribeKvEventsRequest())

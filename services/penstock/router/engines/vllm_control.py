"""Services of vLLM's own protocol beside generation: vllm.Control, and the standard health service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from penstock.common.errors import InvalidArgument
from penstock.engines import vllm_control_pb2, vllm_control_pb2_grpc, vllm_inference_pb2_grpc
from penstock.router.engines.engine_services import EngineFacts, standard_health
from penstock.serving.transport import Channel

INFERENCE_NAME = "vllm.Inference"


class VllmControl:
    """Calls of one connection. Implements EngineServices.

    The protocol tells no vocabulary, ends, files or load: the tokenizer's facts and the router's own count take their
    places. Its cache's events come by another transport (ZeroMQ), which a router does not speak.
    """

    def __init__(self, channel: Channel, timeout: float) -> None:
        """Make them. `timeout` is that of each call, in seconds."""
        # Without types: the channel is either transport's.
        self._control: Any = vllm_control_pb2_grpc.ControlStub(channel.for_stubs)
        self._inference: Any = vllm_inference_pb2_grpc.InferenceStub(channel.for_stubs)
        self._health = health_pb2_grpc.HealthStub(channel.for_stubs)
        self._timeout = timeout
        # The standard health service has told of this engine.
        self._has_health = False

    async def is_healthy(self) -> bool:
        """Ask the standard health service; where it has never told anything, an answer of Control is enough.

        One that has told and does not any more has taken itself off: an engine does so when it shuts down.
        """
        told = await standard_health(self._health, INFERENCE_NAME, self._timeout)
        if told is None and not self._has_health:
            await self._server_info()
            return True
        self._has_health = True
        return bool(told)

    async def facts(self) -> EngineFacts:
        request = vllm_control_pb2.GetModelInfoRequest()
        model = await self._control.GetModelInfo(request, timeout=self._timeout)
        server = await self._server_info()
        return EngineFacts(
            name=model.served_model_name or PurePosixPath(model.model_id).name,
            max_context_tokens=server.max_model_len,
            vocab_size=None,
            eos_token_ids=None,
            # One that embeds takes no ids here.
            generates=model.supports_token_ids_input,
            max_running_requests=min(server.max_running_requests, 1 << 30),
            kv_tokens=min(server.total_kv_blocks * server.kv_block_size, 1 << 40),
        )

    async def load(self) -> None:
        """Return None: the protocol does not tell it."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        request = vllm_control_pb2.AbortRequest(request_ids=request_ids)
        await self._control.Abort(request, timeout=self._timeout)

    def generate(self, message: Message, timeout: float | None) -> Any:
        return self._inference.GenerateStream(message, timeout=timeout)

    async def embed(
        self, token_ids: Sequence[int], request_id: str, timeout: float | None
    ) -> tuple[Sequence[float], int]:
        """Refuse: the protocol has no embeddings."""
        raise InvalidArgument("request", "Embed is not there: the backend is vLLM", reason="NOT_ON_BACKEND")

    def tokenizer_files(self, timeout: float) -> None:
        """Return None: the protocol sends none."""

    def cache_events(self) -> None:
        """Return None: they do not come by gRPC."""

    async def _server_info(self) -> vllm_control_pb2.ServerInfo:
        request = vllm_control_pb2.GetServerInfoRequest()
        told: vllm_control_pb2.ServerInfo = await self._control.GetServerInfo(request, timeout=self._timeout)
        return told

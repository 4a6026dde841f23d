"""Tokenizer process."""

from __future__ import annotations

import asyncio

import grpc
from prometheus_client import CollectorRegistry

from penstock.common.environment import prepare_environment
from penstock.common.progress import CancellableProgress, ShowProgress
from penstock.tokenizer.config import TokenizerConfig
from penstock.tokenizer.metrics import TokenizerMetrics
from penstock.tokenizer.service import TokenizerService, load_service
from penstock.tokenizer.servicer import TokenizerServicer
from penstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc


class TokenizerApp:
    """The tokenizer as a service. Implements serving.server.Service."""

    name = "tokenizer"
    grpc_services: tuple[str, ...] = (tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,)

    def __init__(self, config: TokenizerConfig, registry: CollectorRegistry) -> None:
        """Make it inside the event loop that will serve it."""
        self._config = config
        self._metrics = TokenizerMetrics(registry)
        self._servicer = TokenizerServicer(self._metrics)
        self._service: TokenizerService | None = None
        self._progress = CancellableProgress()
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def service(self) -> TokenizerService:
        """The loaded service. Raises RuntimeError before start() has returned."""
        if self._service is None:
            raise RuntimeError("not started")
        return self._service

    async def start(self) -> None:
        """Load the tokenizer, start threads and template processes. Raises StartupError naming the file and MODEL."""
        # Otherwise all requests would share one pool of tokenizers' threads, and small texts would wait behind large
        # ones.
        prepare_environment()
        try:
            self._service = await load_service(self._config, self._metrics, self._progress)
        except asyncio.CancelledError:
            self._progress.cancel()
            raise
        self._servicer.open(self._service)

    def bind_progress(self, show: ShowProgress) -> None:
        """Make the start show its progress through `show`."""
        self._progress.show = show

    def register(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self._servicer, server)

    async def drain(self) -> None:
        """Refuse new calls; return when no call is running and no sequence is being decoded."""
        await self._servicer.activity.drain()

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()

    def status_lines(self) -> list[str]:
        service = self.service
        vocabulary = service.vocabulary
        templates = ", ".join(service.templates.names) or "none"
        return [
            f"tokenizer {service.model}: {vocabulary.size} entries, {len(vocabulary.marks.control_tokens)} control"
            f" tokens, {service.detokenizers.kind} decoding",
            f"chat templates: {templates}",
        ]

"""TextService: what clients call."""

from __future__ import annotations

from typing import Any

import grpc

from penstock.common.errors import NotFound
from penstock.router.backends.pool import BackendPool
from penstock.router.frontend import convert
from penstock.router.frontend.generate import CHAT, GENERATE, TextFlow
from penstock.router.frontend.score_embed import GivenFlow
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.v1 import text_pb2, text_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class TextServicer(text_pb2_grpc.TextServiceServicer):
    """Streams are written by the handler itself: an async generator would cost a switch per message."""

    def __init__(self, flow: TextFlow, given: GivenFlow, pool: BackendPool, link: TokenizerLink) -> None:
        self._flow = flow
        self._given = given
        self._pool = pool
        self._link = link

    async def Generate(self, request: text_pb2.GenerateTextRequest, context: Context) -> None:  # type: ignore[override]
        """Completes text or ids."""
        await self._flow.run(request, GENERATE, context)

    async def Chat(self, request: text_pb2.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Answers a conversation."""
        await self._flow.run(request, CHAT, context)

    async def Embed(self, request: text_pb2.EmbedTextRequest, context: Context) -> text_pb2.EmbedTextResponse:
        """Means of the final hidden states of texts."""
        return await self._given.embed(request, context)

    async def Score(self, request: text_pb2.ScoreTextRequest, context: Context) -> text_pb2.ScoreTextResponse:
        """Log-probabilities of given continuations."""
        return await self._given.score(request, context)

    async def DetectWatermark(
        self, request: text_pb2.DetectWatermarkTextRequest, context: Context
    ) -> text_pb2.DetectWatermarkTextResponse:
        """Evidence of a watermark in a text or ids."""
        return await self._given.detect_watermark(request, context)

    async def ListModels(self, request: text_pb2.ListModelsRequest, context: Context) -> text_pb2.ListModelsResponse:
        """Every model that a backend serves or served, each followed by its adapters."""
        return text_pb2.ListModelsResponse(models=self._models())

    async def GetModel(self, request: text_pb2.GetModelRequest, context: Context) -> text_pb2.GetModelResponse:
        """One model or adapter; the first when `name` is empty."""
        for model in self._models():
            if request.name in ("", model.name):
                return text_pb2.GetModelResponse(model=model)
        raise NotFound("name: no model or adapter of this name", reason="MODEL_NOT_FOUND", field="name")

    def _models(self) -> list[text_pb2.Model]:
        models = []
        for name, info in self._pool.models.items():
            ready = len(self._pool.ready(name))
            model = convert.to_model(info, ready_backends=ready, tokenizer_fingerprint=self._link.fingerprint)
            models.append(model)
            for adapter in info.adapters:
                part = text_pb2.Model()
                part.CopyFrom(model)
                part.name, part.parent = adapter, name
                models.append(part)
        return models

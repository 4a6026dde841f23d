"""Handlers of TextService, the service that clients call."""

from __future__ import annotations

from penstock.common.errors import NotFound
from penstock.common.model_names import those_there_are
from penstock.router.backends.pool import BackendPool
from penstock.router.frontend.generate import TextFlow
from penstock.router.frontend.score_embed import ScoreEmbedFlow
from penstock.router.frontend.stream_writer import CHAT, GENERATE
from penstock.router.frontend.tokens import TokenFlow
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.serving.transport import ServerCall
from penstock.v1 import common_pb2, model_pb2, text_pb2, text_pb2_grpc


class TextServicer(text_pb2_grpc.TextServiceServicer):
    """Handlers of TextService. They write streams themselves: an async generator would cost a switch per message."""

    def __init__(
        self, flow: TextFlow, score_embed: ScoreEmbedFlow, tokens: TokenFlow, pool: BackendPool, link: TokenizerLink
    ) -> None:
        self._flow = flow
        self._score_embed = score_embed
        self._tokens = tokens
        self._pool = pool
        self._link = link

    async def Generate(self, request: text_pb2.GenerateTextRequest, context: ServerCall) -> None:  # type: ignore[override]
        """Complete text or ids."""
        await self._flow.run(request, GENERATE, context)

    async def Chat(self, request: text_pb2.ChatRequest, context: ServerCall) -> None:  # type: ignore[override]
        """Answer a conversation."""
        await self._flow.run(request, CHAT, context)

    async def Embed(self, request: text_pb2.EmbedTextRequest, context: ServerCall) -> text_pb2.EmbedTextResponse:  # type: ignore[override]
        """Return means of the final hidden states of texts."""
        return await self._score_embed.embed(request, context)

    async def Score(self, request: text_pb2.ScoreTextRequest, context: ServerCall) -> text_pb2.ScoreTextResponse:  # type: ignore[override]
        """Return log-probabilities of the request's continuations."""
        return await self._score_embed.score(request, context)

    async def DetectWatermark(  # type: ignore[override]
        self, request: text_pb2.DetectWatermarkTextRequest, context: ServerCall
    ) -> text_pb2.DetectWatermarkTextResponse:
        """Return evidence of a watermark in a text or ids."""
        return await self._score_embed.detect_watermark(request, context)

    async def Tokenize(self, request: text_pb2.TokenizeRequest, context: ServerCall) -> text_pb2.TokenizeResponse:  # type: ignore[override]
        """Encode texts."""
        return await self._tokens.tokenize(request, context)

    async def Detokenize(self, request: text_pb2.DetokenizeRequest, context: ServerCall) -> text_pb2.DetokenizeResponse:  # type: ignore[override]
        """Decode runs of ids."""
        return await self._tokens.detokenize(request, context)

    async def RenderChat(self, request: text_pb2.RenderChatRequest, context: ServerCall) -> text_pb2.RenderChatResponse:  # type: ignore[override]
        """Return the prompt that Chat makes of a conversation."""
        return await self._tokens.render_chat(request, context)

    async def ListModels(self, request: text_pb2.ListModelsRequest, context: ServerCall) -> text_pb2.ListModelsResponse:  # type: ignore[override]
        """List every model that a backend serves or served, each followed by its adapters."""
        return text_pb2.ListModelsResponse(models=self._models())

    async def GetModel(self, request: text_pb2.GetModelRequest, context: ServerCall) -> text_pb2.GetModelResponse:  # type: ignore[override]
        """Return one model or adapter; the first when `name` is empty."""
        models = self._models()
        for model in models:
            if request.name in ("", model.name):
                return text_pb2.GetModelResponse(model=model)
        names = those_there_are(model.name for model in models)
        raise NotFound(f"name: no model or adapter of this name; {names}", reason="MODEL_NOT_FOUND", field="name")

    def _models(self) -> list[text_pb2.Model]:
        models = []
        for name, info in self._pool.models.items():
            fingerprint = self._link.fingerprint
            models.append(_model(info, len(self._pool.ready(name)), fingerprint))
            for alias in info.aliases:
                models.append(_model(info, len(self._pool.ready(name)), fingerprint))
                models[-1].name = alias
            for adapter in self._pool.adapters(name):
                part = _model(info, len(self._pool.ready(name, adapter)), fingerprint)
                part.name, part.parent = adapter, name
                models.append(part)
        return models


def _model(info: model_pb2.GetModelInfoResponse, ready_backends: int, tokenizer_fingerprint: str) -> text_pb2.Model:
    """A model as clients see it."""
    ready = ready_backends > 0
    return text_pb2.Model(
        name=info.model,
        state=common_pb2.MODEL_STATE_READY if ready else common_pb2.MODEL_STATE_UNAVAILABLE,
        percent_loaded=info.percent_loaded if info.percent_loaded else 100.0,
        max_context_tokens=info.limits.max_context_tokens,
        vocab_size=info.vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint,
        backends=ready_backends,
    )

"""Handlers of TextService, the service that clients call."""

from __future__ import annotations

from penstock.common.errors import NotFound
from penstock.common.model_names import those_there_are
from penstock.router.frontend.model_list import list_models
from penstock.router.frontend.reach import reach
from penstock.router.frontend.route_table import RouteTable
from penstock.router.frontend.stream_writer import CHAT, GENERATE
from penstock.router.keys.api_key import ApiKey
from penstock.router.keys.key_desk import require_scope
from penstock.router.metrics import RouterMetrics
from penstock.serving.transport import ServerCall
from penstock.v1 import text_pb2, text_pb2_grpc


class TextServicer(text_pb2_grpc.TextServiceServicer):
    """Handlers of TextService. They write streams themselves: an async generator would cost a switch per message."""

    def __init__(self, table: RouteTable, metrics: RouterMetrics) -> None:
        self._table = table
        self._metrics = metrics

    def _key(self, context: ServerCall) -> ApiKey | None:
        keys = self._table.keys
        return None if keys is None else keys.find(context.invocation_metadata())

    async def Generate(self, request: text_pb2.GenerateTextRequest, context: ServerCall) -> None:  # type: ignore[override]
        """Complete text or ids."""
        route = await reach(self._table, "Generate", request, context, self._metrics)
        await route.flow.run(request, GENERATE, context)

    async def Chat(self, request: text_pb2.ChatRequest, context: ServerCall) -> None:  # type: ignore[override]
        """Answer a conversation."""
        route = await reach(self._table, "Chat", request, context, self._metrics)
        await route.flow.run(request, CHAT, context)

    async def Embed(self, request: text_pb2.EmbedTextRequest, context: ServerCall) -> text_pb2.EmbedTextResponse:  # type: ignore[override]
        """Return means of the final hidden states of texts."""
        route = await reach(self._table, "Embed", request, context, self._metrics)
        return await route.score_embed.embed(request, context)

    async def Score(self, request: text_pb2.ScoreTextRequest, context: ServerCall) -> text_pb2.ScoreTextResponse:  # type: ignore[override]
        """Return log-probabilities of the request's continuations."""
        route = await reach(self._table, "Score", request, context, self._metrics)
        return await route.score_embed.score(request, context)

    async def DetectWatermark(  # type: ignore[override]
        self, request: text_pb2.DetectWatermarkTextRequest, context: ServerCall
    ) -> text_pb2.DetectWatermarkTextResponse:
        """Return evidence of a watermark in a text or ids."""
        route = await reach(self._table, "DetectWatermark", request, context, self._metrics)
        return await route.score_embed.detect_watermark(request, context)

    async def Tokenize(self, request: text_pb2.TokenizeRequest, context: ServerCall) -> text_pb2.TokenizeResponse:  # type: ignore[override]
        """Encode texts."""
        route = await reach(self._table, "Tokenize", request, context, self._metrics)
        return await route.tokens.tokenize(request, context)

    async def Detokenize(self, request: text_pb2.DetokenizeRequest, context: ServerCall) -> text_pb2.DetokenizeResponse:  # type: ignore[override]
        """Decode runs of ids."""
        route = await reach(self._table, "Detokenize", request, context, self._metrics)
        return await route.tokens.detokenize(request, context)

    async def RenderChat(self, request: text_pb2.RenderChatRequest, context: ServerCall) -> text_pb2.RenderChatResponse:  # type: ignore[override]
        """Return the prompt that Chat makes of a conversation."""
        route = await reach(self._table, "RenderChat", request, context, self._metrics)
        return await route.tokens.render_chat(request, context)

    async def ListModels(self, request: text_pb2.ListModelsRequest, context: ServerCall) -> text_pb2.ListModelsResponse:  # type: ignore[override]
        """List every model that a backend serves or served, each followed by its adapters, and the aliases."""
        key = self._key(context)
        if key is not None:
            require_scope(key, context.invocation_metadata())
        return text_pb2.ListModelsResponse(models=list_models(self._table, key))

    async def GetModel(self, request: text_pb2.GetModelRequest, context: ServerCall) -> text_pb2.GetModelResponse:  # type: ignore[override]
        """Return one model or adapter; when `name` is empty that of requests without one, or the first."""
        models = list_models(self._table, self._key(context))
        asked = request.name or self._table.default
        for model in models:
            if asked in ("", model.name):
                answer = text_pb2.GetModelResponse(model=model)
                if request.with_tokenizer:
                    link = self._table.choose(text_pb2.TokenizeRequest(model=request.name)).link
                    if link.info is not None:
                        answer.tokenizer.CopyFrom(link.info)
                return answer
        names = those_there_are(model.name for model in models)
        raise NotFound(f"name: no model or adapter of this name; {names}", reason="MODEL_NOT_FOUND", field="name")

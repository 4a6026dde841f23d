"""Tokenize, Detokenize and RenderChat: text and ids, converted as for the router's own prompts, without a backend."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from penstock.common.errors import InvalidArgument, PenstockError, ResourceExhausted
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.frontend.convert import MAX_RESPONSE_BYTES
from penstock.router.metrics import RouterMetrics
from penstock.router.tokenizer.pipeline import Pipeline
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.serving.transport import ServerCall
from penstock.v1 import common_pb2, text_pb2, tokenizer_pb2

AnswerT = TypeVar("AnswerT", text_pb2.TokenizeResponse, text_pb2.DetokenizeResponse, text_pb2.RenderChatResponse)


@dataclass(frozen=True, slots=True)
class TokenFlow:
    """Calls of the tokenizer for clients. They need no place from admission: the tokenizer has its own limits."""

    config: RouterConfig
    pipeline: Pipeline
    link: TokenizerLink
    pool: BackendPool
    metrics: RouterMetrics

    async def tokenize(self, request: text_pb2.TokenizeRequest, context: ServerCall) -> text_pb2.TokenizeResponse:
        """Raises InvalidArgument naming `texts`, and as TokenizerLink.encode."""
        async with self._counted("Tokenize", request.model):
            self._check_count("texts", len(request.texts))
            encode = tokenizer_pb2.EncodeRequest(
                texts=request.texts,
                add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
                parse_special_tokens=self.config.allow_control_tokens_in_text,
            )
            answer = await self.link.encode(encode, context.time_remaining())
            sequences = [common_pb2.TokenIds(ids=encoding.ids) for encoding in answer.encodings]
            return _checked(text_pb2.TokenizeResponse(sequences=sequences), "texts")

    async def detokenize(self, request: text_pb2.DetokenizeRequest, context: ServerCall) -> text_pb2.DetokenizeResponse:
        """Raises InvalidArgument naming `sequences`, and as TokenizerLink.decode."""
        async with self._counted("Detokenize", request.model):
            self._check_count("sequences", len(request.sequences))
            decode = tokenizer_pb2.DecodeRequest(sequences=request.sequences)
            if request.HasField("skip_special_tokens"):
                decode.skip_special_tokens = request.skip_special_tokens
            answer = await self.link.decode(decode, context.time_remaining())
            return _checked(text_pb2.DetokenizeResponse(texts=answer.texts), "sequences")

    async def render_chat(
        self, request: text_pb2.RenderChatRequest, context: ServerCall
    ) -> text_pb2.RenderChatResponse:
        """Raises InvalidArgument naming `messages`, and as TokenizerLink.apply_chat_template."""
        async with self._counted("RenderChat", request.model):
            if not request.messages:
                raise InvalidArgument("messages", "must not be empty")
            answer = await self.pipeline.render(request, context.time_remaining())
            return _checked(text_pb2.RenderChatResponse(text=answer.text, token_ids=answer.token_ids), "messages")

    def _check_count(self, field: str, count: int) -> None:
        if not 1 <= count <= self.config.max_items:
            raise InvalidArgument(field, f"must have between 1 and {self.config.max_items} entries")

    @asynccontextmanager
    async def _counted(self, method: str, model: str) -> AsyncIterator[None]:
        """Refuse an unknown model; count the call's end and its time."""
        status, begin = "CANCELLED", time.monotonic()
        try:
            self.pool.choose_model(model)
            yield
            status = "OK"
        except PenstockError as error:
            status = error.code.name
            raise
        finally:
            self.metrics.requests(method, status).inc()
            self.metrics.tokenize.observe(time.monotonic() - begin)


def _checked(answer: AnswerT, field: str) -> AnswerT:
    """Return `answer`. Raises ResourceExhausted when it is larger than clients can receive."""
    if answer.ByteSize() > MAX_RESPONSE_BYTES - 1024:
        raise ResourceExhausted(
            f"the answer does not fit one message: send fewer {field} at a time",
            reason="RESPONSE_TOO_LARGE",
            metadata={"field": field},
        )
    return answer

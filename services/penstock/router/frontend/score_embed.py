"""Score, Embed and DetectWatermark from request to answer: admission, token ids, a backend, texts of tokens."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.common.block_hashes import routing_salt
from penstock.common.errors import InvalidArgument, PenstockError, ResourceExhausted
from penstock.common.idle_only import IDLE_TENANT
from penstock.common.pace import Demand
from penstock.common.request_context import current_request_id
from penstock.common.tracing import exemplar, stage
from penstock.router.backends.forecast import Forecast
from penstock.router.backends.pool import BackendPool
from penstock.router.backends.prefix_index import BlockNames
from penstock.router.backends.unary_attempts import UnaryAttempts
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import Admission, fair_share_key, serving_tenant, tenant_of
from penstock.router.frontend.convert import BYTES_PER_TOKEN, MAX_RESPONSE_BYTES, cache_salt
from penstock.router.frontend.drain import Drain
from penstock.router.frontend.score_embed_text import ScoredIds, ScoreEmbedTexts
from penstock.router.keys.key_account import KeyAccount
from penstock.router.keys.key_desk import KeyDesk, require_model
from penstock.router.metrics import UNKNOWN_MODEL, RouterMetrics
from penstock.router.tokenizer.remembered_texts import TokenTexts
from penstock.serving.transport import ServerCall
from penstock.v1 import common_pb2, generation_pb2, text_pb2

_Request = text_pb2.ScoreTextRequest | text_pb2.EmbedTextRequest | text_pb2.DetectWatermarkTextRequest
AnswerT = TypeVar("AnswerT", text_pb2.ScoreTextResponse, text_pb2.EmbedTextResponse)


@dataclass(frozen=True, slots=True)
class _CallFacts:
    """Facts about a call that every stage needs. `deadline` is a time of time.monotonic()."""

    model: str
    adapter: str
    # Of its cache, and of its places and turns.
    tenant: str
    served_as: str
    deadline: float | None
    account: KeyAccount | None

    @property
    def left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    async def reserve(self, tokens: int) -> None:
        """Take the tokens of the call from the quotas of its key. Raises as KeyAccount.reserve."""
        if self.account is not None:
            await self.account.reserve(tokens, 0, current_request_id.get() or "")


@dataclass(frozen=True, slots=True)
class ScoreEmbedFlow:
    """Runs calls in their handlers' tasks. They count against the same admission as streams."""

    config: RouterConfig
    texts: ScoreEmbedTexts
    pool: BackendPool
    attempts: UnaryAttempts
    forecast: Forecast
    admission: Admission
    drain: Drain
    token_texts: TokenTexts
    metrics: RouterMetrics
    # None: there is no file of keys.
    keys: KeyDesk | None = None

    async def score(self, request: text_pb2.ScoreTextRequest, context: ServerCall) -> text_pb2.ScoreTextResponse:
        """Raises PenstockError; fields are named as in the request."""
        async with self._admitted("Score", request, context) as call:
            self._check_count("items", len(request.items))
            items = await self.texts.items(request.items, call.left)
            message = self._score_request(request, items, call)
            await call.reserve(sum(len(item.prompt) + len(item.continuation) for item in items))
            answer: generation_pb2.ScoreResponse = await self._ask(
                "Score", lambda stub, left: stub.Score(message, timeout=left), call, items[0].prompt, message.cache_salt
            )
            positions = [position for result in answer.results for position in result.logprobs]
            await self.token_texts.fill(positions, call.left)
            await self._count(answer.usage, call)
            return _checked(text_pb2.ScoreTextResponse(results=answer.results, usage=answer.usage), "items")

    async def embed(self, request: text_pb2.EmbedTextRequest, context: ServerCall) -> text_pb2.EmbedTextResponse:
        """Raises PenstockError; fields are named as in the request."""
        async with self._admitted("Embed", request, context) as call:
            self._check_count("texts", len(request.texts))
            inputs = await self.texts.inputs(request.texts, call.left)
            message = generation_pb2.EmbedRequest(
                model=call.model,
                inputs=[common_pb2.TokenIds(ids=ids) for ids in inputs],
                normalize=request.normalize,
                cache_salt=cache_salt(call.tenant, ""),
                fair_share_key=fair_share_key(call.served_as),
                adapter=call.adapter,
            )
            await call.reserve(sum(map(len, inputs)))
            answer: generation_pb2.EmbedResponse = await self._ask(
                "Embed", lambda stub, left: stub.Embed(message, timeout=left), call, (), ""
            )
            await self._count(answer.usage, call)
            return _checked(text_pb2.EmbedTextResponse(embeddings=answer.embeddings, usage=answer.usage), "texts")

    async def detect_watermark(
        self, request: text_pb2.DetectWatermarkTextRequest, context: ServerCall
    ) -> text_pb2.DetectWatermarkTextResponse:
        """Raises PenstockError; fields are named as in the request."""
        async with self._admitted("DetectWatermark", request, context) as call:
            output = request.WhichOneof("output")
            if output is None:
                raise InvalidArgument("output", "text or token_ids must be set")
            ids = request.token_ids.ids if output == "token_ids" else await self.texts.output(request.text, call.left)
            message = generation_pb2.DetectWatermarkRequest(
                model=call.model, token_ids=ids, ignore_repeated_ngrams=request.ignore_repeated_ngrams
            )
            if request.HasField("watermarking_config"):
                message.watermarking_config.CopyFrom(request.watermarking_config)
            if request.HasField("z_threshold"):
                message.z_threshold = request.z_threshold
            try:
                answer: generation_pb2.DetectWatermarkResponse = await self._ask(
                    "DetectWatermark", lambda stub, left: stub.DetectWatermark(message, timeout=left), call, (), ""
                )
            except InvalidArgument as error:
                field = output if error.field == "token_ids" else error.field or "request"
                raise InvalidArgument(field, error.description, reason=error.reason) from error
            return text_pb2.DetectWatermarkTextResponse(evidence=answer.evidence, token_ids=message.token_ids)

    @asynccontextmanager
    async def _admitted(self, method: str, request: _Request, context: ServerCall) -> AsyncIterator[_CallFacts]:
        """Hold a place from admission during the block, and count the call's end."""
        remaining = context.time_remaining()
        begin = time.monotonic()
        deadline = None if remaining is None else begin + remaining
        status, model = "INTERNAL", ""
        try:
            metadata = context.invocation_metadata()
            # A watermark does not depend on an adapter.
            adapter = "" if isinstance(request, text_pb2.DetectWatermarkTextRequest) else request.adapter
            model, adapter = self.pool.choose_model(request.model, adapter)
            account = None
            if self.keys is not None and (key := self.keys.find(metadata, method)) is not None:
                require_model(key, model, adapter)
                account = self.keys.begin(key, model)
            tenant = tenant_of(self.config, metadata) if account is None else account.tenant
            served_as = serving_tenant(tenant, metadata)
            call = _CallFacts(model, adapter, tenant, served_as, deadline, account)
            self.attempts.check_capacity(call.model, call.adapter)
            demand = Demand(fair_share_key(served_as), request.ByteSize() // BYTES_PER_TOKEN, 0)
            if remaining is not None:
                self.forecast.check(call.model, demand, remaining)
            async with self.drain.attended():
                with account or nullcontext():
                    with stage("admission"):
                        await self.admission.enter(served_as, call.left, demand.prompt_tokens)
                    with self.admission.leaving(served_as):
                        if call.adapter:
                            await self.attempts.require_adapter(call.model, call.adapter, call.left)
                        yield call
            status = "OK"
            self.metrics.score_embed.observe_traced(time.monotonic() - begin, exemplar())
        except asyncio.CancelledError:
            is_late = deadline is not None and time.monotonic() >= deadline
            status = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
            raise
        except PenstockError as error:
            status = error.code.name
            raise
        finally:
            self.metrics.requests(method, status).inc()
            self.metrics.model_requests(model or UNKNOWN_MODEL, status).inc()

    def _check_count(self, field: str, count: int) -> None:
        if not 1 <= count <= self.config.max_items:
            raise InvalidArgument(field, f"must have between 1 and {self.config.max_items} entries")

    def _score_request(
        self, request: text_pb2.ScoreTextRequest, items: Sequence[ScoredIds], call: _CallFacts
    ) -> generation_pb2.ScoreRequest:
        message = generation_pb2.ScoreRequest(
            model=call.model,
            items=[
                generation_pb2.ScoreItem(prompt_token_ids=item.prompt, continuation_token_ids=item.continuation)
                for item in items
            ],
            cache_salt=cache_salt(call.tenant, ""),
            fair_share_key=fair_share_key(call.served_as),
            adapter=call.adapter,
        )
        if request.HasField("top_logprobs"):
            message.top_logprobs = request.top_logprobs
        return message

    async def _ask(self, method: str, ask: Any, call: _CallFacts, prompt: Sequence[int], salt: str) -> Any:
        """Return a backend's answer; a backend that probably has the first prompt cached is asked first."""
        info = self.pool.models.get(call.model)
        hashes: Sequence[int] = ()
        if prompt and info is not None and info.kv.block_size:
            keyed = routing_salt(salt, call.adapter)
            hashes = BlockNames(list(prompt), info.kv.block_size, keyed, self.config.max_prefix_blocks)
        try:
            return await self.attempts.run(
                ask,
                model=call.model,
                adapter=call.adapter,
                hashes=hashes,
                deadline=call.deadline,
                method=method,
                is_idle_only=call.served_as == IDLE_TENANT,
            )
        except InvalidArgument as error:
            raise InvalidArgument(_public(error.field or ""), error.description, reason=error.reason) from error

    async def _count(self, usage: common_pb2.Usage, call: _CallFacts) -> None:
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.cached_tokens.inc(usage.cached_tokens)
        if call.account is not None:
            await call.account.finish(usage.prompt_tokens, usage.completion_tokens)


def _public(field: str) -> str:
    """The client's name for a backend's field."""
    field = field.replace(".prompt_token_ids", ".prompt").replace(".continuation_token_ids", ".continuation")
    return re.sub(r"^inputs\b", "texts", field) or "request"


def _checked(answer: AnswerT, field: str) -> AnswerT:
    """Return `response`. Raises ResourceExhausted when it is larger than clients can receive."""
    size = answer.ByteSize()
    if size > MAX_RESPONSE_BYTES - 1024:
        raise ResourceExhausted(
            f"the answer does not fit one message: send fewer {field} at a time",
            reason="RESPONSE_TOO_LARGE",
            metadata={"field": field, "bytes": str(size)},
        )
    return answer

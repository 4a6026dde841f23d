"""Calls with a single answer at another engine: Score by the log-probabilities of a prompt, and Embed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.common.errors import Internal, InvalidArgument
from penstock.router.engines.engine_codec import EngineCodec
from penstock.router.engines.engine_model import EngineModel
from penstock.router.engines.engine_services import EngineServices
from penstock.v1 import common_pb2, generation_pb2


class EngineCalls:
    """Calls of one connection. Implements BackendCalls. Items go one after the other: an engine batches them with
    other requests."""

    def __init__(
        self,
        codec: EngineCodec,
        services: EngineServices,
        model: Callable[[], EngineModel],
        new_id: Callable[[], str],
    ) -> None:
        """Make them. `model` returns the engine's; `new_id` an id that is not used yet."""
        self._codec = codec
        self._services = services
        self._model = model
        self._new_id = new_id

    async def Score(
        self, request: generation_pb2.ScoreRequest, *, timeout: float | None = None
    ) -> generation_pb2.ScoreResponse:
        """Return log-probabilities of continuations, by the model alone."""
        most = self._codec.max_top_logprobs
        if request.top_logprobs > most:
            raise InvalidArgument("top_logprobs", f"must be at most {most}: the backend is {self._codec.name}")
        answer = generation_pb2.ScoreResponse()
        for item in request.items:
            ids = [*item.prompt_token_ids, *item.continuation_token_ids]
            if not item.prompt_token_ids or not item.continuation_token_ids:
                raise InvalidArgument("items", "must have a prompt and a continuation")
            positions = await self._score(ids, max(request.top_logprobs, 1), request.cache_salt, timeout)
            scored = positions[len(item.prompt_token_ids) :]
            answer.results.append(_result(scored, request.top_logprobs if request.HasField("top_logprobs") else 0))
            answer.usage.prompt_tokens += len(ids)
        return answer

    async def _score(
        self, ids: Sequence[int], alternatives: int, salt: str, timeout: float | None
    ) -> list[common_pb2.PositionLogprobs]:
        message = self._codec.score(ids, alternatives, self._new_id(), salt)
        found: list[common_pb2.PositionLogprobs] = []
        call = self._services.generate(message, timeout)
        try:
            async for part in call:
                found = found or self._codec.read_scores(part, alternatives)
        finally:
            call.cancel()
        if [position.chosen.token_id for position in found[1:]] != list(ids[1:]):
            raise Internal("the backend broke the protocol: other tokens scored than sent", reason="BACKEND_PROTOCOL")
        return found

    async def Embed(
        self, request: generation_pb2.EmbedRequest, *, timeout: float | None = None
    ) -> generation_pb2.EmbedResponse:
        """Return embeddings as the engine's model pools them."""
        answer = generation_pb2.EmbedResponse()
        for one in request.inputs:
            embedding, prompt_tokens = await self._services.embed(one.ids, self._new_id(), timeout)
            values = list(embedding)
            if request.normalize:
                norm = sum(value * value for value in values) ** 0.5
                values = [value / norm for value in values] if norm else values
            answer.embeddings.add(values=values)
            answer.usage.prompt_tokens += prompt_tokens
        return answer

    async def DetectWatermark(
        self, request: generation_pb2.DetectWatermarkRequest, *, timeout: float | None = None
    ) -> generation_pb2.DetectWatermarkResponse:
        """Refuse: no other engine has it."""
        raise InvalidArgument("request", f"DetectWatermark is not there: the backend is {self._codec.name}")


def _result(scored: list[common_pb2.PositionLogprobs], alternatives: int) -> generation_pb2.ScoreResult:
    result = generation_pb2.ScoreResult(
        logprob=sum(position.chosen.logprob for position in scored),
        is_greedy=all(position.chosen.rank == 1 for position in scored),
    )
    for position in scored:
        del position.top[alternatives:]
        result.logprobs.append(position)
    return result

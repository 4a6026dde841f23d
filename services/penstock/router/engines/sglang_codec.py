"""SGLang's protocol: SglangScheduler of smg-grpc-proto."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from penstock.engines import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc
from penstock.generation.grammar.spec import ConstraintKind
from penstock.router.engines.engine_codec import EngineChunk, EngineEnd
from penstock.router.engines.engine_logprobs import from_input, from_output
from penstock.router.engines.engine_request import EngineRequest
from penstock.router.engines.smg_services import SmgServices
from penstock.serving.transport import Channel
from penstock.v1 import common_pb2

# Off.
_NO_TOP_K = -1
_CONSTRAINTS = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "ebnf_grammar",
}


class SglangCodec:
    """SglangScheduler's messages. Implements EngineCodec."""

    name = "SGLang"
    protocol = "sglang.grpc.scheduler.SglangScheduler"
    generate_method = f"/{protocol}/Generate"
    response: type[Message] = sglang_scheduler_pb2.GenerateResponse
    max_top_logprobs = 20
    params: frozenset[str] = frozenset(("logit_bias",))
    constraints: frozenset[str] = frozenset(kind.value for kind in _CONSTRAINTS)
    calls: frozenset[str] = frozenset(("Score",))
    keeps_salts = False

    def connect(self, channel: Channel, timeout: float) -> SmgServices:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel.for_stubs)
        return SmgServices(
            channel, stub, sglang_scheduler_pb2, self.protocol, timeout, window=self.window, aborts=self.aborts
        )

    def lacks(self, request: EngineRequest) -> tuple[str, str] | None:
        if request.options.options.seed is not None and request.params.do_sample:
            return "config.seed", "is not there"
        return None

    def generate(self, request: EngineRequest, index: int, request_id: str) -> Message:
        params, resumed = request.params, request.resumed(index)
        message = sglang_scheduler_pb2.GenerateRequest(request_id=request_id, stream=True)
        message.tokenized.input_ids.extend(request.options.prompt_token_ids)
        message.tokenized.input_ids.extend(resumed)
        message.sampling_params.CopyFrom(
            sglang_scheduler_pb2.SamplingParams(
                temperature=params.temperature if params.do_sample else 0.0,
                # A top_p of 0 keeps the most likely token.
                top_p=params.top_p if params.do_sample and params.top_p else 1.0,
                top_k=(params.top_k or _NO_TOP_K if params.top_p else 1) if params.do_sample else _NO_TOP_K,
                min_p=params.min_p if params.do_sample else 0.0,
                repetition_penalty=params.repetition_penalty,
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                max_new_tokens=params.max_new_tokens - len(resumed),
                min_new_tokens=max(params.min_new_tokens - len(resumed), 0),
                stop=params.stop_strings,
                # The request's own ids take the place of those that the engine would end on.
                ignore_eos=True,
                stop_token_ids=request.ending_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=True,
                # Ids of an end are part of the answer; the router cuts its text.
                no_stop_trim=True,
                stream_interval=1,
                n=1,
                logit_bias={str(token_id): bias for token_id, bias in params.logit_bias.items()},
            )
        )
        if params.top_logprobs is not None:
            message.return_logprob = True
            message.logprob_start_len = -1
            message.top_logprobs_num = params.top_logprobs
        constraint = request.options.constraint
        if constraint is not None and constraint.kind is not None:
            setattr(message.sampling_params, _CONSTRAINTS[constraint.kind], constraint.text)
        return message

    def read(self, message: sglang_scheduler_pb2.GenerateResponse, request: EngineRequest) -> EngineChunk:
        if message.HasField("complete"):
            complete = message.complete
            return EngineChunk(
                prompt_tokens=complete.prompt_tokens, cached_tokens=complete.cached_tokens, end=_end(complete)
            )
        chunk, alternatives = message.chunk, request.params.top_logprobs
        return EngineChunk(
            chunk.token_ids,
            chunk.prompt_tokens,
            chunk.cached_tokens,
            from_output(chunk.output_logprobs, alternatives) if alternatives is not None else [],
        )

    def aborts(self, request_ids: Sequence[str]) -> list[Message]:
        """Make the requests of Abort."""
        return [sglang_scheduler_pb2.AbortRequest(request_id=one, reason="cancelled") for one in request_ids]

    def window(self, server: sglang_scheduler_pb2.GetServerInfoResponse) -> int:
        """Return 0: it does not tell the most requests that it runs at once."""
        return 0

    def score(self, token_ids: Sequence[int], alternatives: int, request_id: str, salt: str) -> Message:
        message = sglang_scheduler_pb2.GenerateRequest(
            request_id=request_id, stream=True, return_logprob=True, top_logprobs_num=alternatives
        )
        message.tokenized.input_ids.extend(token_ids)
        message.sampling_params.CopyFrom(
            sglang_scheduler_pb2.SamplingParams(
                temperature=0.0, top_p=1.0, top_k=_NO_TOP_K, repetition_penalty=1.0, max_new_tokens=1, n=1
            )
        )
        return message

    def read_scores(
        self, message: sglang_scheduler_pb2.GenerateResponse, alternatives: int
    ) -> list[common_pb2.PositionLogprobs]:
        part = message.chunk if message.HasField("chunk") else message.complete
        return from_input(part.input_logprobs, alternatives)


def _end(complete: sglang_scheduler_pb2.GenerateComplete) -> EngineEnd:
    kind = complete.WhichOneof("matched_stop")
    return EngineEnd(
        complete.finish_reason,
        complete.matched_token_id if kind == "matched_token_id" else None,
        complete.matched_stop_str if kind == "matched_stop_str" else None,
        complete.spec_accepted_tokens,
        complete.spec_draft_tokens,
    )

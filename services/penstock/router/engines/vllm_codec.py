"""vLLM's protocol: VllmEngine of smg-grpc-proto (`vllm serve --grpc`)."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from penstock.engines import vllm_engine_pb2, vllm_engine_pb2_grpc
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.router.engines.engine_codec import EngineChunk, EngineEnd
from penstock.router.engines.engine_logprobs import from_input, from_output
from penstock.router.engines.engine_request import EngineRequest
from penstock.router.engines.engine_seeds import call_seed
from penstock.router.engines.smg_services import SmgServices
from penstock.serving.transport import Channel
from penstock.v1 import common_pb2

# It cuts a bias to this.
_MOST_BIAS = 100.0


class VllmCodec:
    """VllmEngine's messages. Implements EngineCodec."""

    name = "vLLM"
    protocol = "vllm.grpc.engine.VllmEngine"
    generate_method = f"/{protocol}/Generate"
    response: type[Message] = vllm_engine_pb2.GenerateResponse
    # One more is asked for, and it takes 20 (--max-logprobs).
    max_top_logprobs = 19
    params: frozenset[str] = frozenset(("logit_bias", "prompt_logprobs"))
    constraints: frozenset[str] = frozenset(kind.value for kind in ConstraintKind)
    calls: frozenset[str] = frozenset(("Score", "Embed"))
    keeps_salts = False

    def connect(self, channel: Channel, timeout: float) -> SmgServices:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel.for_stubs)
        return SmgServices(
            channel, stub, vllm_engine_pb2, self.protocol, timeout, window=self.window, aborts=self.aborts
        )

    def lacks(self, request: EngineRequest) -> tuple[str, str] | None:
        if any(abs(bias) > _MOST_BIAS for bias in request.params.logit_bias.values()):
            return "config.logit_bias", f"may be between -{_MOST_BIAS:g} and {_MOST_BIAS:g} there"
        return None

    def generate(self, request: EngineRequest, index: int, request_id: str) -> Message:
        params, resumed = request.params, request.resumed(index)
        message = vllm_engine_pb2.GenerateRequest(request_id=request_id, stream=True)
        message.tokenized.input_ids.extend(request.options.prompt_token_ids)
        message.tokenized.input_ids.extend(resumed)
        sampling = message.sampling_params
        sampling.CopyFrom(
            vllm_engine_pb2.SamplingParams(
                temperature=params.temperature if params.do_sample else 0.0,
                repetition_penalty=params.repetition_penalty,
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                max_tokens=params.max_new_tokens - len(resumed),
                min_tokens=max(params.min_new_tokens - len(resumed), 0),
                stop=params.stop_strings,
                # The request's own ids take the place of those that the engine would end on.
                ignore_eos=True,
                stop_token_ids=request.ending_ids,
                include_stop_str_in_output=params.include_stop_string_in_output,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=True,
                n=1,
                logit_bias=params.logit_bias,
            )
        )
        if params.do_sample:
            # 0 is off in its proto; a top_p of 0 keeps the most likely token.
            sampling.top_k = params.top_k if params.top_p else 1
            sampling.top_p = params.top_p or 1.0
            sampling.min_p = params.min_p
            sampling.seed = call_seed(params, index, len(resumed))
        if params.top_logprobs is not None:
            sampling.logprobs = _asked(params.top_logprobs)
        if params.prompt_logprobs is not None and index == 0 and not resumed:
            sampling.prompt_logprobs = _asked(params.prompt_logprobs)
        if request.options.constraint is not None:
            _constrain(sampling, request.options.constraint)
        return message

    def read(self, message: vllm_engine_pb2.GenerateResponse, request: EngineRequest) -> EngineChunk:
        if message.HasField("complete"):
            return EngineChunk(
                prompt_tokens=message.complete.prompt_tokens,
                cached_tokens=message.complete.cached_tokens,
                end=_end(message.complete),
            )
        chunk, params = message.chunk, request.params
        return EngineChunk(
            chunk.token_ids,
            chunk.prompt_tokens,
            chunk.cached_tokens,
            from_output(chunk.output_logprobs, params.top_logprobs) if params.top_logprobs is not None else [],
            from_input(chunk.input_logprobs, params.prompt_logprobs) if params.prompt_logprobs is not None else [],
        )

    def aborts(self, request_ids: Sequence[str]) -> list[Message]:
        """Make the requests of Abort."""
        return [vllm_engine_pb2.AbortRequest(request_ids=request_ids)]

    def window(self, server: vllm_engine_pb2.GetServerInfoResponse) -> int:
        """Return the most requests that it runs at once."""
        return max(server.max_num_seqs, 0)

    def score(self, token_ids: Sequence[int], alternatives: int, request_id: str, salt: str) -> Message:
        message = vllm_engine_pb2.GenerateRequest(request_id=request_id, stream=True)
        message.tokenized.input_ids.extend(token_ids)
        message.sampling_params.CopyFrom(
            # The second alternative tells whether the first is the token itself.
            vllm_engine_pb2.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=alternatives + 1)
        )
        return message

    def read_scores(
        self, message: vllm_engine_pb2.GenerateResponse, alternatives: int
    ) -> list[common_pb2.PositionLogprobs]:
        part = message.chunk if message.HasField("chunk") else message.complete
        return from_input(part.input_logprobs, alternatives)


def _asked(alternatives: int) -> int:
    """Return the number of alternatives to ask for: the token itself takes one of the places."""
    return alternatives + 1 if alternatives else 0


def _constrain(sampling: vllm_engine_pb2.SamplingParams, constraint: ConstraintSpec) -> None:
    if constraint.kind is ConstraintKind.CHOICE:
        sampling.choice.choices.extend(constraint.choices)
    elif constraint.kind is ConstraintKind.JSON_OBJECT:
        sampling.json_object = True
    elif constraint.kind is not None:
        setattr(sampling, constraint.kind.value, constraint.text)


def _end(complete: vllm_engine_pb2.GenerateComplete) -> EngineEnd:
    kind = complete.WhichOneof("matched_stop")
    return EngineEnd(
        complete.finish_reason,
        complete.matched_token_id if kind == "matched_token_id" else None,
        complete.matched_stop_str if kind == "matched_stop_str" else None,
        complete.spec_accepted_tokens,
        complete.spec_draft_tokens,
    )

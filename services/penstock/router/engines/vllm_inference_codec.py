"""vLLM's own protocol: vllm.Inference, of its frontend's gRPC port."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from penstock.engines import vllm_inference_pb2
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.router.engines.engine_codec import EngineChunk, EngineEnd
from penstock.router.engines.engine_logprobs import from_candidates
from penstock.router.engines.engine_request import EngineRequest
from penstock.router.engines.engine_seeds import call_seed
from penstock.router.engines.vllm_control import INFERENCE_NAME, VllmControl
from penstock.serving.transport import Channel
from penstock.v1 import common_pb2

# 0 is a default of the model's file in its protocol: what is off has a value that keeps every token. No vocabulary is
# that large, and no token is so unlikely that a float tells it.
_NO_TOP_K = (1 << 31) - 1
_NO_MIN_P = 1e-30
# Above it the engine refuses.
_MOST_TEMPERATURE = 2.0
_REASONS = {
    vllm_inference_pb2.FinishInfo.LENGTH: "length",
    vllm_inference_pb2.FinishInfo.STOP: "stop",
    vllm_inference_pb2.FinishInfo.ABORTED: "abort",
}


class VllmInferenceCodec:
    """Messages of vllm.Inference. Implements EngineCodec."""

    name = "vLLM"
    protocol = INFERENCE_NAME
    generate_method = f"/{INFERENCE_NAME}/GenerateStream"
    response: type[Message] = vllm_inference_pb2.GenerateResponse
    # It takes 20 (--max-logprobs), and the token itself is not one of them.
    max_top_logprobs = 20
    params: frozenset[str] = frozenset(("logit_bias", "prompt_logprobs", "allowed_token_ids"))
    constraints: frozenset[str] = frozenset(kind.value for kind in ConstraintKind)
    calls: frozenset[str] = frozenset(("Score",))
    keeps_salts = True

    def connect(self, channel: Channel, timeout: float) -> VllmControl:
        return VllmControl(channel, timeout)

    def lacks(self, request: EngineRequest) -> tuple[str, str] | None:
        if request.params.do_sample and request.params.temperature > _MOST_TEMPERATURE:
            return "config.temperature", f"may be at most {_MOST_TEMPERATURE:g} there"
        return None

    def generate(self, request: EngineRequest, index: int, request_id: str) -> Message:
        params, resumed = request.params, request.resumed(index)
        message = vllm_inference_pb2.GenerateRequest(
            request_id=request_id,
            temperature=params.temperature if params.do_sample else 0.0,
            decoding=vllm_inference_pb2.DecodingParameters(
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
                logit_bias=params.logit_bias,
                allowed_token_ids=sorted(params.allowed_token_ids or ()),
            ),
            stopping=vllm_inference_pb2.StoppingCriteria(
                max_new_tokens=params.max_new_tokens - len(resumed),
                min_new_tokens=max(params.min_new_tokens - len(resumed), 0),
                # The request's own ids take the place of those that the engine would end on.
                ignore_eos=True,
                stop_token_ids=request.ending_ids,
                stop_strings=params.stop_strings,
                include_stop_strings=params.include_stop_string_in_output,
            ),
            response=vllm_inference_pb2.ResponseOptions(
                output_text=False, output_token_ids=True, skip_special_tokens=params.skip_special_tokens
            ),
            kv=vllm_inference_pb2.KVCacheParameters(cache_salt=request.options.cache_salt),
        )
        message.token_ids.ids.extend(request.options.prompt_token_ids)
        message.token_ids.ids.extend(resumed)
        if params.do_sample:
            message.sampling.CopyFrom(
                vllm_inference_pb2.RandomSampling(
                    # A top_p of 0 keeps the most likely token.
                    top_k=(params.top_k or _NO_TOP_K) if params.top_p else 1,
                    top_p=params.top_p or 1.0,
                    min_p=params.min_p or _NO_MIN_P,
                    seed=call_seed(params, index, len(resumed)),
                )
            )
        if params.top_logprobs is not None:
            message.response.output_logprobs = True
            message.response.output_candidates.top_n = params.top_logprobs
        if params.prompt_logprobs is not None and index == 0 and not resumed:
            _ask_for_prompt(message.response, params.prompt_logprobs)
        if request.options.constraint is not None:
            _constrain(message.decoding, request.options.constraint)
        return message

    def read(self, message: vllm_inference_pb2.GenerateResponse, request: EngineRequest) -> EngineChunk:
        prompt, params = message.prompt_info, request.params
        chunk = EngineChunk(
            prompt_tokens=prompt.num_prompt_tokens,
            prompt_logprobs=_of_prompt(prompt, params.prompt_logprobs) if params.prompt_logprobs is not None else [],
        )
        if not message.HasField("outputs"):
            return chunk
        told = message.outputs
        chunk.token_ids = told.token_ids
        if params.top_logprobs is not None:
            chunk.logprobs = from_candidates(
                told.token_ids, told.logprobs, told.ranks, told.candidate_tokens, params.top_logprobs
            )
        if told.index or told.num_tokens != len(told.token_ids):
            chunk.end = EngineEnd("tokens of another sequence, or fewer than it counts")
        elif told.HasField("finish_info"):
            chunk.end = _end(told.finish_info)
        return chunk

    def score(self, token_ids: Sequence[int], alternatives: int, request_id: str, salt: str) -> Message:
        message = vllm_inference_pb2.GenerateRequest(
            request_id=request_id,
            temperature=0.0,
            stopping=vllm_inference_pb2.StoppingCriteria(max_new_tokens=1),
            response=vllm_inference_pb2.ResponseOptions(output_text=False),
            kv=vllm_inference_pb2.KVCacheParameters(cache_salt=salt),
        )
        message.token_ids.ids.extend(token_ids)
        _ask_for_prompt(message.response, alternatives)
        return message

    def read_scores(
        self, message: vllm_inference_pb2.GenerateResponse, alternatives: int
    ) -> list[common_pb2.PositionLogprobs]:
        return _of_prompt(message.prompt_info, alternatives)


def _ask_for_prompt(response: vllm_inference_pb2.ResponseOptions, alternatives: int) -> None:
    response.prompt_token_ids = response.prompt_logprobs = True
    response.prompt_candidates.top_n = alternatives


def _of_prompt(prompt: vllm_inference_pb2.PromptInfo, alternatives: int) -> list[common_pb2.PositionLogprobs]:
    """Return a prompt's log-probabilities: the first token has none, and a 0 in its place."""
    told = from_candidates(prompt.token_ids, prompt.logprobs, prompt.ranks, prompt.candidate_tokens, alternatives)
    return [common_pb2.PositionLogprobs(), *told[1:]] if told else []


def _constrain(decoding: vllm_inference_pb2.DecodingParameters, constraint: ConstraintSpec) -> None:
    if constraint.kind is ConstraintKind.CHOICE:
        decoding.choice.choices.extend(constraint.choices)
    elif constraint.kind is ConstraintKind.JSON_OBJECT:
        decoding.json_object = True
    elif constraint.kind is ConstraintKind.JSON_SCHEMA:
        decoding.json = constraint.text
    elif constraint.kind is not None:
        setattr(decoding, constraint.kind.value, constraint.text)


def _end(told: vllm_inference_pb2.FinishInfo) -> EngineEnd:
    kind = told.WhichOneof("stop_reason")
    return EngineEnd(
        _REASONS.get(told.finish_reason, "unknown"),
        None if kind in (None, "stop_string") else getattr(told, kind),
        told.stop_string if kind == "stop_string" else None,
    )

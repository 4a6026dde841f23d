"""VllmEngine's messages as plain data and back: a gateway that routes to vLLM routes to a generation service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.common.errors import InvalidArgument, PenstockError
from penstock.engines import vllm_engine_pb2
from penstock.engines.vllm_engine_pb2 import GenerateComplete, GenerateResponse, GenerateStreamChunk
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.generation.options.kinds import check_count
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.options.table import OutputOptions, RequestOptions, StopOptions
from penstock.v1 import common_pb2, generation_pb2

# Our fields by theirs, where a refusal names one of ours.
_FIELDS = {
    "config.max_new_tokens": "sampling_params.max_tokens",
    "config.min_new_tokens": "sampling_params.min_tokens",
    "config.num_return_sequences": "sampling_params.n",
    "stop.stop_strings": "sampling_params.stop",
    "stop.stop_token_ids": "sampling_params.stop_token_ids",
    "output.top_logprobs": "sampling_params.logprobs",
    "output.prompt_logprobs": "sampling_params.prompt_logprobs",
    "prompt": "tokenized.input_ids",
    "prompt_token_ids": "tokenized.input_ids",
}
_NAMED = ("top_k", "top_p", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty")
_STOPS = frozenset(
    (
        common_pb2.FINISH_REASON_STOP_EOS,
        common_pb2.FINISH_REASON_STOP_STRING,
        common_pb2.FINISH_REASON_STOP_TOKEN,
        common_pb2.FINISH_REASON_CONSTRAINT_DONE,
        common_pb2.FINISH_REASON_STOP_CRITERIA,
    )
)
_LENGTHS = frozenset((common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_MAX_TIME))


def to_generate(message: vllm_engine_pb2.GenerateRequest, limits: RequestLimits) -> GenerateOptions:
    """Return a GenerateRequest as plain data, unchecked but for the lengths of lists. Defaults are vLLM's: what is
    unset is off, and a temperature of 1.

    Raises InvalidArgument naming the field of vLLM's message.
    """
    if message.WhichOneof("input") != "tokenized":
        raise InvalidArgument("text", "must be tokenized: send tokenized.input_ids")
    sampling = message.sampling_params
    for name, entries, most in (
        ("stop", sampling.stop, limits.max_stop_strings),
        ("stop_token_ids", sampling.stop_token_ids, limits.max_stop_token_sequences),
        ("logit_bias", sampling.logit_bias, limits.max_logit_bias),
    ):
        check_count(f"sampling_params.{name}", entries, most)
    return GenerateOptions(
        request_id=message.request_id,
        prompt_token_ids=list(message.tokenized.input_ids),
        options=_options(sampling),
        stop=StopOptions(
            stop_strings=tuple(sampling.stop),
            stop_token_ids=tuple((token_id,) for token_id in sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            include_stop_string_in_output=sampling.include_stop_str_in_output,
        ),
        output=OutputOptions(
            top_logprobs=_alternatives(sampling, "logprobs"),
            prompt_logprobs=_alternatives(sampling, "prompt_logprobs"),
            skip_special_tokens=sampling.skip_special_tokens,
        ),
        constraint=_constraint(sampling),
        # vLLM's text is that of the answer alone.
        begins_text=True,
    )


def _options(sampling: vllm_engine_pb2.SamplingParams) -> RequestOptions:
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    values: dict[str, Any] = {
        "do_sample": temperature != 0,
        "temperature": temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p or 1.0,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "min_new_tokens": sampling.min_tokens,
        "num_return_sequences": sampling.n or 1,
    }
    if sampling.HasField("max_tokens"):
        values["max_new_tokens"] = sampling.max_tokens
    if sampling.HasField("seed"):
        # One below 0 is a seed, too.
        values["seed"] = sampling.seed & ((1 << 63) - 1)
    if sampling.logit_bias:
        values["logit_bias"] = dict(sampling.logit_bias)
    return RequestOptions(**values)


def _alternatives(sampling: vllm_engine_pb2.SamplingParams, name: str) -> int | None:
    if not sampling.HasField(name):  # type: ignore[arg-type]
        return None
    value: int = getattr(sampling, name)
    if value < 0:
        raise InvalidArgument(f"sampling_params.{name}", "must be a number of alternatives: not the whole vocabulary")
    return value


def _constraint(sampling: vllm_engine_pb2.SamplingParams) -> ConstraintSpec | None:
    name = sampling.WhichOneof("constraint")
    if name is None:
        return None
    if name == "structural_tag":
        raise InvalidArgument("sampling_params.structural_tag", "is not there: send json_schema, regex or grammar")
    kind = ConstraintKind(name)
    if kind is ConstraintKind.CHOICE:
        return ConstraintSpec(kind, choices=tuple(sampling.choice.choices))
    if kind is ConstraintKind.JSON_OBJECT:
        return ConstraintSpec(kind, enabled=sampling.json_object)
    return ConstraintSpec(kind, text=getattr(sampling, name))


def renamed(error: PenstockError) -> PenstockError:
    """Return an error with vLLM's name of the field."""
    if not isinstance(error, InvalidArgument) or error.field is None:
        return error
    field = _FIELDS.get(error.field)
    if field is None and error.field.removeprefix("config.") in (*_NAMED, "logit_bias", "seed"):
        field = f"sampling_params.{error.field.removeprefix('config.')}"
    return error if field is None else InvalidArgument(field, error.description, reason=error.reason)


class AnswerWriter:
    """Writer of one answer: our events as vLLM's messages. In a stream a sequence ends with a message that repeats its
    last ids, as vLLM's; without a stream there is one message for each sequence."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._started = generation_pb2.Started()
        # Ids and log-probabilities of each sequence, without a stream.
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[common_pb2.PositionLogprobs]] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def write(self, event: generation_pb2.GenerateResponse) -> Iterable[GenerateResponse]:
        """Return the messages of an event."""
        if event.HasField("started"):
            self._started = event.started
        elif event.HasField("delta"):
            return self._delta(event.delta)
        else:
            # What was aborted has no last delta.
            return [
                GenerateResponse(complete=self._complete(one, self._ids.get(one.index, ()), ()))
                for one in event.finished.sequences
                if one.index not in self._ended
            ]
        return ()

    def _delta(self, delta: generation_pb2.TokenDelta) -> Iterable[GenerateResponse]:
        index, ids, logprobs = delta.index, list(delta.token_ids), list(delta.logprobs)
        has_ended = delta.HasField("finished")
        if not self._is_stream:
            ids = self._ids.setdefault(index, []) + ids
            logprobs = self._logprobs.setdefault(index, []) + logprobs
            self._ids[index], self._logprobs[index] = ids, logprobs
            if not has_ended:
                return
        elif ids:
            yield GenerateResponse(chunk=self._chunk(index, ids, logprobs))
        if has_ended:
            yield GenerateResponse(complete=self._complete(delta.finished, ids, logprobs))

    def _chunk(
        self, index: int, ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs]
    ) -> GenerateStreamChunk:
        chunk = GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=self._started.prompt_tokens,
            completion_tokens=len(ids),
            cached_tokens=self._started.cached_tokens,
            index=index,
        )
        _add_output(chunk.output_logprobs, logprobs)
        if index not in self._begun:
            self._begun.add(index)
            self._add_input(chunk.input_logprobs)
        return chunk

    def _complete(
        self,
        result: common_pb2.SequenceResult,
        ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
    ) -> GenerateComplete:
        self._ended.add(result.index)
        reason = result.finish_reason
        complete = GenerateComplete(
            output_ids=ids,
            finish_reason="stop" if reason in _STOPS else "length" if reason in _LENGTHS else "abort",
            prompt_tokens=self._started.prompt_tokens,
            completion_tokens=len(ids),
            cached_tokens=self._started.cached_tokens,
            index=result.index,
        )
        if result.HasField("stop_string"):
            complete.matched_stop_str = result.stop_string
        elif reason == common_pb2.FINISH_REASON_STOP_TOKEN and result.HasField("stop_token_id"):
            complete.matched_token_id = result.stop_token_id
        _add_output(complete.output_logprobs, logprobs)
        if not self._is_stream:
            self._add_input(complete.input_logprobs)
        return complete

    def _add_input(self, message: vllm_engine_pb2.InputLogProbs) -> None:
        for position in self._started.prompt_logprobs:
            if position.HasField("chosen"):
                message.token_logprobs.add(value=position.chosen.logprob)
                message.token_ids.append(position.chosen.token_id)
            else:
                message.token_logprobs.add()
                message.token_ids.append(0)
            _add_top(message.top_logprobs, position)


def _add_output(message: vllm_engine_pb2.OutputLogProbs, positions: Sequence[common_pb2.PositionLogprobs]) -> None:
    for position in positions:
        message.token_logprobs.append(position.chosen.logprob)
        message.token_ids.append(position.chosen.token_id)
        _add_top(message.top_logprobs, position)


def _add_top(message: Any, position: common_pb2.PositionLogprobs) -> None:
    if position.top:
        message.add(values=[one.logprob for one in position.top], token_ids=[one.token_id for one in position.top])

"""Small pure converters between penstock.v1 messages and the generation service's dataclasses, both ways."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from penstock.common.errors import InvalidArgument, PenstockError, to_status
from penstock.generation.engine.request import (
    DeltaOutput,
    FinishedOutput,
    Logprob,
    PositionLogprobs,
    Request,
    RequestTimings,
    SequenceFinish,
    StartedOutput,
)
from penstock.generation.engine.stats import EngineLoad, EngineStats
from penstock.generation.requested import (
    GenerateCommand,
    RequestedOptions,
    RequestedOutput,
    RequestedStop,
    RequestLimits,
)
from penstock.v1 import admin_pb2, common_pb2, config_pb2, generation_pb2

Event = StartedOutput | DeltaOutput | FinishedOutput
GenerateResponse = generation_pb2.GenerateResponse
SessionEvent = generation_pb2.SessionEvent
SessionResponse = generation_pb2.SessionResponse

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_PLAIN = (
    "max_new_tokens",
    "min_new_tokens",
    "max_length",
    "min_length",
    "max_time",
    "do_sample",
    "num_return_sequences",
    "top_k",
    "seed",
)
_HONOURED = frozenset((*_FLOATS, *_PLAIN, "logit_bias"))
_EARLY_STOPPING = {
    config_pb2.EARLY_STOPPING_UNSPECIFIED: "false",
    config_pb2.EARLY_STOPPING_FALSE: "false",
    config_pb2.EARLY_STOPPING_TRUE: "true",
    config_pb2.EARLY_STOPPING_NEVER: "never",
}
_SCHEDULE = {
    config_pb2.ASSISTANT_TOKENS_SCHEDULE_UNSPECIFIED: "constant",
    config_pb2.ASSISTANT_TOKENS_SCHEDULE_CONSTANT: "constant",
}
_DEFAULT_LIMITS = RequestLimits()
_TENSOR_OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
_DTYPES = {
    "float32": common_pb2.D_TYPE_FLOAT32,
    "float16": common_pb2.D_TYPE_FLOAT16,
    "bfloat16": common_pb2.D_TYPE_BFLOAT16,
}


def as_written(value: float) -> float:
    """The shortest decimal that is this float32: 0.7 rather than the 0.699999988 that travelled."""
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


def to_command(message: generation_pb2.GenerateRequest, limits: RequestLimits = _DEFAULT_LIMITS) -> GenerateCommand:
    """A GenerateRequest as plain data, unchecked but for the lists that cost microseconds an entry to convert.

    Raises InvalidArgument for one of those beyond its bound: a message has room for millions, and the loop would stall.
    """
    for field, entries, most in (
        ("resumed_token_ids", message.resumed_token_ids, limits.max_return_sequences),
        ("stop.stop_token_ids", message.stop.stop_token_ids, limits.max_stop_token_sequences),
        ("config.logit_bias", message.config.logit_bias, limits.max_logit_bias),
    ):
        if len(entries) > most:
            raise InvalidArgument(field, f"must have at most {most} entries")
    return GenerateCommand(
        request_id=message.request_id,
        attempt_epoch=message.attempt_epoch,
        prompt_token_ids=list(message.prompt_token_ids),
        resumed_token_ids=[list(entry.ids) for entry in message.resumed_token_ids],
        options=to_options(message.config),
        stop=to_stop(message.stop),
        output=to_output(message.output),
        has_constraint=message.HasField("constraint"),
        eos_token_ids=tuple(message.eos_token_ids),
        seed=message.seed if message.HasField("seed") else None,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        priority=message.priority,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        model=message.model,
        timeout_seconds=message.timeout_seconds if message.HasField("timeout_seconds") else None,
    )


def to_options(config: config_pb2.GenerationConfig) -> RequestedOptions:
    """The set fields of a GenerationConfig; those that are not honoured go by name into `others`."""
    present = {field.name: value for field, value in config.ListFields()}
    known: dict[str, Any] = {name: as_written(present[name]) for name in _FLOATS if name in present}
    known.update((name, present[name]) for name in _PLAIN if name in present)
    others = {name: _plain_value(name, value) for name, value in present.items() if name not in _HONOURED}
    bias = {token_id: as_written(bias) for token_id, bias in config.logit_bias.items()}
    return RequestedOptions(**known, logit_bias=bias, others=others)


def _plain_value(name: str, value: object) -> object:
    if name == "early_stopping":
        return _EARLY_STOPPING.get(value)  # type: ignore[call-overload]
    if name == "num_assistant_tokens_schedule":
        return _SCHEDULE.get(value)  # type: ignore[call-overload]
    return as_written(value) if isinstance(value, float) else value


def to_stop(stop: config_pb2.StopConfig) -> RequestedStop:
    """A StopConfig as plain data."""
    return RequestedStop(
        stop_strings=tuple(stop.stop_strings),
        stop_token_ids=tuple(tuple(entry.ids) for entry in stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop_string_in_output=stop.include_stop_string_in_output,
    )


def to_output(output: config_pb2.OutputConfig) -> RequestedOutput:
    """An OutputConfig as plain data."""
    present = {field.name: value for field, value in output.ListFields()}
    return RequestedOutput(
        top_logprobs=present.get("top_logprobs"),
        prompt_logprobs=present.get("prompt_logprobs"),
        skip_special_tokens=present.get("skip_special_tokens"),
        echo=present.get("echo"),
        stream_interval=present.get("stream_interval"),
        tensors=tuple(name for name in _TENSOR_OUTPUTS if present.get(name)),
    )


def from_options(options: RequestedOptions) -> config_pb2.GenerationConfig:
    """The inverse of `to_options` for the honoured fields."""
    config = config_pb2.GenerationConfig()
    for name in (*_FLOATS, *_PLAIN):
        value = getattr(options, name)
        if value is not None:
            setattr(config, name, value)
    for token_id, bias in options.logit_bias.items():
        config.logit_bias[token_id] = bias
    return config


def fill_started(message: generation_pb2.Started, request: Request, model: str, started: StartedOutput) -> None:
    """First event of a request."""
    params = request.params
    message.request_id = request.request_id
    message.model = model
    message.generation_mode = (
        common_pb2.GENERATION_MODE_SAMPLE if params.do_sample else common_pb2.GENERATION_MODE_GREEDY_SEARCH
    )
    message.seed = params.seed
    message.prompt_tokens = len(request.prompt_token_ids)
    message.cached_tokens = started.cached_tokens
    message.warnings.extend(request.warnings)
    message.prompt_logprobs.extend(_from_positions(started.prompt_logprobs))


def fill_delta(message: generation_pb2.TokenDelta, delta: DeltaOutput) -> None:
    """New tokens of one sequence. Filled in place: on the token path a copied message costs more than its fields."""
    message.seq = delta.seq
    message.index = delta.index
    message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(_from_positions(delta.logprobs))
    if delta.finish is not None:
        message.finished.CopyFrom(from_finish(delta.finish))


def from_finish(finish: SequenceFinish) -> common_pb2.SequenceResult:
    """How a sequence ended."""
    result = common_pb2.SequenceResult(
        index=finish.index,
        finish_reason=common_pb2.FinishReason.ValueType(finish.reason.value),
        token_count=finish.num_tokens,
        cumulative_logprob=finish.cumulative_logprob,
    )
    if finish.stop_string is not None:
        result.stop_string = finish.stop_string
    elif finish.stop_token_id is not None:
        result.stop_token_id = finish.stop_token_id
    return result


def from_finished(finished: FinishedOutput) -> generation_pb2.Finished:
    """Last event of a request."""
    return generation_pb2.Finished(
        sequences=[from_finish(finish) for finish in finished.sequences],
        usage=common_pb2.Usage(
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
            accepted_draft_tokens=finished.accepted_draft_tokens,
            rejected_draft_tokens=finished.rejected_draft_tokens,
        ),
        timings=_from_timings(finished.timings),
        attempts=1,
        last_seq=finished.last_seq,
    )


def _from_timings(timings: RequestTimings) -> common_pb2.StageTimings:
    return common_pb2.StageTimings(
        queue_seconds=timings.queue,
        prefill_seconds=timings.prefill,
        decode_seconds=timings.decode,
        time_to_first_token_seconds=timings.time_to_first_token,
        total_seconds=timings.total,
    )


def _from_positions(positions: Iterable[PositionLogprobs]) -> list[common_pb2.PositionLogprobs]:
    return [
        common_pb2.PositionLogprobs(
            chosen=None if position.chosen is None else _from_logprob(position.chosen),
            top=[_from_logprob(entry) for entry in position.top],
        )
        for position in positions
    ]


def _from_logprob(entry: Logprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)


def to_response(request: Request, model: str, event: Event) -> GenerateResponse:
    """An event of a request that has its stream to itself."""
    message = GenerateResponse()
    _fill(message, request, model, event)
    return message


def add_event(response: SessionResponse, request: Request, model: str, event: Event) -> None:
    """Append an event of one request to its session's message."""
    message = response.events.add(request_id=request.request_id, attempt_epoch=request.attempt_epoch)
    _fill(message, request, model, event)


def add_error(response: SessionResponse, request_id: str, attempt_epoch: int, error: PenstockError) -> None:
    """Append the last word on a request that was refused or failed."""
    response.events.add(request_id=request_id, attempt_epoch=attempt_epoch, error=from_error(error))


def _fill(message: GenerateResponse | SessionEvent, request: Request, model: str, event: Event) -> None:
    if isinstance(event, DeltaOutput):
        fill_delta(message.delta, event)
    elif isinstance(event, StartedOutput):
        fill_started(message.started, request, model, event)
    else:
        message.finished.CopyFrom(from_finished(event))


def from_error(error: PenstockError) -> generation_pb2.RequestError:
    """A refusal or failure of one request of a session."""
    status = to_status(error)
    return generation_pb2.RequestError(
        code=status.code, message=status.message, status_details=status.SerializeToString()
    )


def from_load(load: EngineLoad, state: int, max_queued_requests: int) -> admin_pb2.Load:
    """What a router needs to place a request. `state` is a ModelState's number."""
    return admin_pb2.Load(
        **load._asdict(),
        draining=state == common_pb2.MODEL_STATE_DRAINING,
        state=from_state(state),
        max_queued_requests=max_queued_requests,
    )


def from_pool_stats(load: admin_pb2.Load, stats: EngineStats) -> admin_pb2.GetPoolStatsResponse:
    """Counters since the start."""
    return admin_pb2.GetPoolStatsResponse(
        load=load,
        prefix_lookups_tokens=stats.prefix_lookup_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        preemptions=stats.preemptions,
        evictions=stats.evictions,
        copy_on_write_blocks=stats.copy_on_write_blocks,
    )


def from_state(state: int) -> common_pb2.ModelState.ValueType:
    """A ModelState's number as the proto's."""
    return common_pb2.ModelState.ValueType(state)


def from_dtype(name: str) -> common_pb2.DType.ValueType:
    """`torch.bfloat16` or `bfloat16` as DType; unknown names are UNSPECIFIED."""
    return _DTYPES.get(name.removeprefix("torch."), common_pb2.D_TYPE_UNSPECIFIED)

"""Small pure converters between penstock.v1 messages and the generation service's dataclasses, both ways."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Literal

from google.protobuf import json_format

from penstock.common.block_hashes import SCHEME
from penstock.common.errors import InvalidArgument, PenstockError, to_status
from penstock.common.pace import Pace
from penstock.common.unknown_fields import refuse_unknown_fields
from penstock.generation.adapters.figures import AdapterInfo
from penstock.generation.core.decoding_mode import AnyWatermark
from penstock.generation.core.request import (
    Emission,
    FinishedOutput,
    Logprob,
    PositionLogprobs,
    Request,
    RequestTimings,
    SequenceFinish,
    StartedOutput,
)
from penstock.generation.core.tensors import TensorData
from penstock.generation.core.thought_budget import ThoughtEnd
from penstock.generation.engine.dump import EngineDump
from penstock.generation.engine.prefix_log import PrefixReport
from penstock.generation.engine.stats import EngineLoad, EngineStats
from penstock.generation.engine.step_watch import StepView
from penstock.generation.grammar.call_spec import MOST_MARKERS, CallSpec
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.generation.options.compound_kinds import WATERMARK
from penstock.generation.options.detect_watermark import DEFAULT_Z_THRESHOLD, DetectWatermarkCommand
from penstock.generation.options.kinds import check_count
from penstock.generation.options.request_limits import DEFAULT_LIMITS, RequestLimits
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.wire.dtype_messages import from_dtype, to_dtype
from penstock.generation.wire.option_messages import to_options, to_output, to_stop
from penstock.text.thoughts import Thought
from penstock.v1 import admin_pb2, common_pb2, config_pb2, generation_pb2

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    from penstock.generation.core.tensors import StepTensors
    from penstock.generation.sampling.watermark_detector import WatermarkEvidence

Event = StartedOutput | Emission | FinishedOutput
GenerateResponse = generation_pb2.GenerateResponse
SessionEvent = generation_pb2.SessionEvent
SessionResponse = generation_pb2.SessionResponse

# Most tenants with waiting requests in a report: a router assumes that a tenant outside the list has little waiting.
MAX_REPORTED_TENANTS = 64
# Fields of a request that may have no unknown fields inside.
_OPTIONS: tuple[Literal["config", "stop", "output", "constraint"], ...] = ("config", "stop", "output", "constraint")
# Of tensors in a request; each is a number that any caller may send millions of.
_MOST_DIMENSIONS = 8


def to_generate_options(
    message: generation_pb2.GenerateRequest, limits: RequestLimits = DEFAULT_LIMITS
) -> GenerateOptions:
    """Return a GenerateRequest as plain data, unchecked except for lists that take microseconds per entry to convert.

    Raises InvalidArgument for options that this release does not know, and for one of those lists beyond its bound: a
    message has room for millions, and the loop would stall.
    """
    for field, entries, most in (
        ("resumed_token_ids", message.resumed_token_ids, limits.max_return_sequences),
        ("eos_token_ids", message.eos_token_ids, limits.max_eos_token_ids),
    ):
        check_count(field, entries, most)
    for name in _OPTIONS:
        if message.HasField(name):
            refuse_unknown_fields(getattr(message, name), name)
    thought = _to_thought(message.thought, limits) if message.HasField("thought") else None
    return GenerateOptions(
        request_id=message.request_id,
        attempt_epoch=message.attempt_epoch,
        prompt_token_ids=list(message.prompt_token_ids),
        resumed_token_ids=[list(entry.ids) for entry in message.resumed_token_ids],
        options=to_options(message.config, limits),
        stop=to_stop(message.stop, limits),
        output=to_output(message.output, limits),
        constraint=_constraint(message, thought),
        may_be_closed=message.may_be_closed,
        calls=_calls(message.calls, thought) if message.HasField("calls") else None,
        eos_token_ids=tuple(message.eos_token_ids),
        seed=message.seed if message.HasField("seed") else None,
        cache_salt=message.cache_salt,
        fair_share_key=message.fair_share_key,
        adapter=message.adapter,
        adapter_digest=message.adapter_digest,
        priority=message.priority,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        model=message.model,
        timeout_seconds=message.timeout_seconds if message.HasField("timeout_seconds") else None,
        begins_text=message.begins_text,
        thought=thought,
        thought_end=_to_thought_end(message.thought_end, limits) if message.HasField("thought_end") else None,
        inputs_embeds=_to_tensor(message.inputs_embeds) if message.HasField("inputs_embeds") else None,
        inputs_embeds_before_ids=message.inputs_embeds_before_ids,
    )


def _to_tensor(message: common_pb2.Tensor) -> TensorData:
    """Return a tensor as plain data, unchecked. Of a shape only so much is kept that a check can tell what is wrong."""
    return TensorData(to_dtype(message.dtype), tuple(message.shape[:_MOST_DIMENSIONS]), message.data)


def to_detect_watermark(
    message: generation_pb2.DetectWatermarkRequest, limits: RequestLimits
) -> DetectWatermarkCommand:
    """Return a DetectWatermarkRequest as plain data, unchecked except for the number of ids. Raises InvalidArgument."""
    check_count("token_ids", message.token_ids, limits.max_watermark_tokens)
    return DetectWatermarkCommand(
        token_ids=list(message.token_ids),
        model=message.model,
        watermark=_watermark(message.watermarking_config, limits) if message.HasField("watermarking_config") else None,
        z_threshold=message.z_threshold if message.HasField("z_threshold") else DEFAULT_Z_THRESHOLD,
        ignore_repeated_ngrams=message.ignore_repeated_ngrams,
    )


def _watermark(config: config_pb2.WatermarkingConfig, limits: RequestLimits) -> AnyWatermark:
    """Return a WatermarkingConfig with transformers' defaults for unset fields, unchecked."""
    return WATERMARK.from_proto(config, "watermarking_config", limits, "max_watermark_context")


def from_evidence(evidence: WatermarkEvidence) -> generation_pb2.WatermarkEvidence:
    """Return the result of a detection as a message; the fields have the same names."""
    return generation_pb2.WatermarkEvidence(**asdict(evidence))


def _constraint(message: generation_pb2.GenerateRequest, thought: Thought | None) -> ConstraintSpec | None:
    if not message.HasField("constraint"):
        return None
    found = to_constraint(message.constraint)
    if around := message.calls.beside_answer:
        return replace(found, around=around, may_be_calls=True, thought=thought)
    around = message.thought.grammar
    # A grammar without text around it is that of forced calls: it tells where the thought ends.
    is_thought_told = around or found.kind is ConstraintKind.GRAMMAR
    return replace(found, around=around, thought=thought) if is_thought_told else found


def _calls(message: generation_pb2.CallGrammar, thought: Thought | None) -> CallSpec:
    """Return what holds tool calls. Raises InvalidArgument for too many markers."""
    check_count("calls.opens", message.opens, MOST_MARKERS)
    free_part = None if message.within_thought else thought
    return CallSpec(tuple(message.opens), message.grammar, free_part, message.is_required)


def _to_thought_end(message: generation_pb2.ThoughtEnd, limits: RequestLimits) -> ThoughtEnd:
    """Return what closes a thought that takes its budget. Raises InvalidArgument for invalid markers."""
    return ThoughtEnd(
        _to_thought(message.thought, limits, "thought_end.thought"),
        tuple(message.token_ids),
        message.wished_tokens if message.HasField("wished_tokens") else None,
    )


def _to_thought(message: common_pb2.Thought, limits: RequestLimits, field: str = "thought") -> Thought:
    """Return the markers of the thoughts before an answer. Raises InvalidArgument for invalid markers."""
    check_count(f"{field}.closes", message.closes, limits.max_stop_strings)
    markers, longest = (message.opens, *message.closes), limits.max_stop_string_chars
    if not message.closes or any(not 0 < len(one) <= longest for one in markers):
        raise InvalidArgument(field, f"must have markers of 1 to {longest} characters, at least one of them closing")
    return Thought(message.opens, tuple(message.closes), message.is_open)


def to_constraint(constraint: config_pb2.Constraint) -> ConstraintSpec:
    """Return a Constraint as plain data, unchecked."""
    name = constraint.WhichOneof("kind")
    if name is None:
        return ConstraintSpec(None)
    kind = ConstraintKind(name)
    if kind is ConstraintKind.CHOICE:
        return ConstraintSpec(kind, choices=tuple(constraint.choice.values))
    if kind is ConstraintKind.JSON_OBJECT:
        return ConstraintSpec(kind, enabled=constraint.json_object)
    return ConstraintSpec(kind, text=getattr(constraint, name))


def fill_started(message: generation_pb2.Started, request: Request, model: str, started: StartedOutput) -> None:
    """Fill in the first event of a request."""
    params = request.params
    message.request_id = request.request_id
    message.model = model
    message.generation_mode = common_pb2.GenerationMode.ValueType(params.generation_mode.value)
    message.seed = params.seed
    message.prompt_tokens = len(request.prompt_token_ids)
    message.cached_tokens = started.cached_tokens
    message.warnings.extend(request.warnings)
    message.prompt_logprobs.extend(from_positions(started.prompt_logprobs))
    if request.adapter is not None:
        message.adapter_digest = request.adapter.digest
    if started.healed is not None:
        token_id, message.healed_text = started.healed
        message.healed_token_ids.append(token_id)


def fill_delta(message: generation_pb2.TokenDelta, delta: Emission) -> None:
    """Fill in the new tokens of one sequence. In place: on the token path a copied message costs more than its
    fields."""
    message.seq = delta.seq
    message.index = delta.index
    message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(from_positions(delta.logprobs))
    if delta.tensors:
        fill_tensors(message.tensors, delta.tensors)
    if delta.finish is not None:
        message.finished.CopyFrom(from_finish(delta.finish))


def from_finish(finish: SequenceFinish) -> common_pb2.SequenceResult:
    """Return the result of a sequence as a message."""
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
    """Return the last event of a request."""
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
        first_weights_version=finished.weights_versions[0],
        last_weights_version=finished.weights_versions[1],
    )


def _from_timings(timings: RequestTimings) -> common_pb2.StageTimings:
    return common_pb2.StageTimings(
        queue_seconds=timings.queue,
        prefill_seconds=timings.prefill,
        decode_seconds=timings.decode,
        time_to_first_token_seconds=timings.time_to_first_token,
        total_seconds=timings.total,
    )


def from_positions(positions: Iterable[PositionLogprobs]) -> list[common_pb2.PositionLogprobs]:
    """Return log-probabilities as messages, position by position."""
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
    """Return an event of a request that has its stream to itself."""
    message = GenerateResponse()
    _fill(message, request, model, event)
    return message


def add_event(response: SessionResponse, request: Request, model: str, event: Event) -> None:
    """Append an event of one request to its session's message."""
    message = response.events.add(request_id=request.request_id, attempt_epoch=request.attempt_epoch)
    _fill(message, request, model, event)


def add_tokens(response: SessionResponse, tokens: Sequence[tuple[int, Emission]]) -> None:
    """Append one event of all deltas that are one token each, by the handles of their requests."""
    if tokens:
        columns = response.events.add().tokens
        columns.handles.extend([handle for handle, _ in tokens])
        columns.seqs.extend([delta.seq for _, delta in tokens])
        columns.token_ids.extend([delta.token_ids[0] for _, delta in tokens])


def add_error(response: SessionResponse, request_id: str, attempt_epoch: int, error: PenstockError) -> None:
    """Append the last event of a request that was refused or failed."""
    response.events.add(request_id=request_id, attempt_epoch=attempt_epoch, error=from_error(error))


def _fill(message: GenerateResponse | SessionEvent, request: Request, model: str, event: Event) -> None:
    if isinstance(event, Emission):
        fill_delta(message.delta, event)
    elif isinstance(event, StartedOutput):
        fill_started(message.started, request, model, event)
    else:
        message.finished.CopyFrom(from_finished(event))


def from_error(error: PenstockError) -> generation_pb2.RequestError:
    """Return a refusal or failure of one request of a session as a message."""
    status = to_status(error)
    return generation_pb2.RequestError(
        code=status.code, message=status.message, status_details=status.SerializeToString()
    )


def from_load(
    load: EngineLoad,
    view: StepView,
    state: int,
    max_queued_requests: int,
    start_id: str,
    adapters_version: int = 0,
    paused_seconds: float | None = None,
) -> admin_pb2.Load:
    """Return the facts that a router needs for placing a request. `state` is a ModelState's number; `paused_seconds`:
    what a pause of the steps has lasted, None: there is none."""
    return admin_pb2.Load(
        **{**load._asdict(), "pace": _pace(load.pace)},
        step_seconds=view.seconds,
        step_overdue=view.is_overdue,
        step_hung=view.is_hung,
        draining=state == common_pb2.MODEL_STATE_DRAINING,
        state=from_state(state),
        max_queued_requests=max_queued_requests,
        process_start_id=start_id,
        adapters_version=adapters_version,
        paused_seconds=paused_seconds,
    )


def from_report(load: admin_pb2.Load, prefixes: PrefixReport | None) -> admin_pb2.WatchLoadResponse:
    """Return a report of a load, with what it tells of prefixes."""
    response = admin_pb2.WatchLoadResponse(load=load)
    if prefixes is not None:
        told = response.prefixes
        told.scheme, told.begins_anew = SCHEME, prefixes.begins_anew
        told.kept.extend(prefixes.kept)
        told.gone.extend(prefixes.gone)
    return response


def _pace(pace: Pace) -> admin_pb2.Pace:
    most = heapq.nlargest(MAX_REPORTED_TENANTS, pace.waiting.items(), key=lambda item: item[1])
    return admin_pb2.Pace(
        tokens_per_second=pace.tokens_per_second,
        step_seconds=pace.step_seconds,
        least_step_seconds=pace.least_step_seconds,
        full_step_seconds=pace.full_step_seconds,
        output_tokens=pace.output_tokens,
        output_shares=pace.output_shares,
        batch_tokens=pace.batch_tokens,
        headroom=pace.headroom * pace.wait_headroom if pace.is_busy else pace.headroom,
        least_headroom=pace.headroom,
        most_headroom=pace.headroom * pace.wait_headroom,
        uneven_seconds=pace.uneven_seconds,
        is_busy=pace.is_busy,
        free_places=pace.free_places,
        waiting=[admin_pb2.TenantWaiting(fair_share_key=key, tokens=tokens) for key, tokens in most],
    )


def from_pool_stats(load: admin_pb2.Load, stats: EngineStats, block_bytes: int) -> admin_pb2.GetPoolStatsResponse:
    """Return the counters since the start as a message. `block_bytes` of one block."""
    return admin_pb2.GetPoolStatsResponse(
        load=load,
        prefix_lookups_tokens=stats.prefix_lookup_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        preemptions=stats.preemptions,
        evictions=stats.evictions,
        copy_on_write_blocks=stats.copy_on_write_blocks,
        swaps=stats.swaps,
        preempted_tokens=stats.preempted_tokens,
        host_out_blocks=stats.host_out_blocks,
        host_in_blocks=stats.host_in_blocks,
        host_out_bytes=stats.host_out_blocks * block_bytes,
        host_in_bytes=stats.host_in_blocks * block_bytes,
        host_out_seconds=stats.host_out_seconds,
        host_in_seconds=stats.host_in_seconds,
        host_prefix_hit_tokens=stats.host_prefix_hit_tokens,
        host_evictions=stats.host_evictions,
    )


def from_adapter(info: AdapterInfo, path: str) -> admin_pb2.Adapter:
    """Return the facts of an adapter as a message. `path` is the operator's own spelling."""
    return admin_pb2.Adapter(
        name=info.name,
        path=path,
        rank=info.rank,
        target_modules=info.targets,
        bytes=info.num_bytes,
        loaded=info.is_loaded,
        live_requests=info.num_requests,
    )


def from_dump(dump: EngineDump) -> admin_pb2.EngineState:
    """Return the engine's state as a message; the fields have the same names."""
    return json_format.ParseDict(dump.as_dict(), admin_pb2.EngineState())


def from_state(state: int) -> common_pb2.ModelState.ValueType:
    """Return a ModelState's number as the proto's type."""
    return common_pb2.ModelState.ValueType(state)


def fill_tensors(
    messages: RepeatedCompositeFieldContainer[common_pb2.StepTensors], tensors: Iterable[StepTensors | None]
) -> None:
    """Append one message per token; it stays empty for a position that was not asked for."""
    for one in tensors:
        message = messages.add()
        if one is None:
            continue
        if one.beam_index is not None:
            message.beam_index = one.beam_index
        for part, data in (
            (message.scores, one.scores),
            (message.score_ids, one.score_ids),
            (message.logits, one.logits),
            (message.logit_ids, one.logit_ids),
            (message.hidden_states, one.hidden_states),
            (message.attentions, one.attentions),
        ):
            # Reading a submessage would make it present.
            if data is not None:
                _fill_tensor(part, data)


def _fill_tensor(message: common_pb2.Tensor, data: TensorData) -> None:
    message.dtype = from_dtype(data.dtype)
    message.shape.extend(data.shape)
    message.data = data.data

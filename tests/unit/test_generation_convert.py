"""Converters between proto and dataclasses."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument, ResourceExhausted, from_status
from penstock.generation import convert
from penstock.generation.engine.request import (
    DeltaOutput,
    FinishedOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    Request,
    RequestTimings,
    SequenceFinish,
    StartedOutput,
)
from penstock.generation.options import BEAM_ONLY, LATER
from penstock.generation.requested import RequestedOptions
from penstock.generation.sampling.params import SamplingParams
from penstock.v1 import common_pb2, config_pb2, generation_pb2


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@given(st.decimals(-1000, 1000, places=4, allow_nan=False))
def test_a_float_arrives_as_it_was_written(value: object) -> None:
    written = float(str(value))
    assert convert.as_written(float32(written)) == pytest.approx(written, rel=1e-6)
    assert float32(convert.as_written(float32(written))) == float32(written)


def test_seven_tenths_stays_seven_tenths() -> None:
    config = config_pb2.GenerationConfig(temperature=0.7, top_p=0.95, repetition_penalty=1.05)
    options = convert.to_options(config)
    assert (options.temperature, options.top_p, options.repetition_penalty) == (0.7, 0.95, 1.05)


def test_zero_is_not_unset() -> None:
    options = convert.to_options(config_pb2.GenerationConfig(temperature=0, top_k=0, seed=0, do_sample=False))
    assert (options.temperature, options.top_k, options.seed, options.do_sample) == (0.0, 0, 0, False)
    assert options.top_p is None


def test_every_field_is_honoured_or_known_by_name() -> None:
    """A field added to the proto must be put into one of the tables, never dropped."""
    honoured = set(RequestedOptions.__slots__) - {"others"}
    known = honoured | set(LATER) | set(BEAM_ONLY)
    assert {field.name for field in config_pb2.GenerationConfig.DESCRIPTOR.fields} == known


def test_fields_without_a_place_go_by_name() -> None:
    config = config_pb2.GenerationConfig(num_beams=4, early_stopping=config_pb2.EARLY_STOPPING_NEVER)
    config.suppress_tokens.append(3)
    others = convert.to_options(config).others
    assert set(others) == {"num_beams", "early_stopping", "suppress_tokens"}
    assert others["early_stopping"] == "never"


def test_options_round_trip() -> None:
    options = RequestedOptions(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, logit_bias={3: -1.5}, seed=9)
    assert convert.to_options(convert.from_options(options)) == options


def test_an_unset_output_field_is_none() -> None:
    output = convert.to_output(config_pb2.OutputConfig(top_logprobs=0))
    assert (output.top_logprobs, output.prompt_logprobs, output.skip_special_tokens) == (0, None, None)


def request_of(**params: object) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(4, seed=5, **params), 0.0, warnings=("w",))  # type: ignore[arg-type]


def test_started_tells_mode_seed_and_warnings() -> None:
    position = PositionLogprobs(Logprob(2, -0.5, 1), (Logprob(2, -0.5, 1),))
    started = StartedOutput(cached_tokens=2, prompt_logprobs=(PositionLogprobs(None), position))
    message = convert.to_response(request_of(do_sample=True), "tiny", started).started
    assert message.generation_mode == common_pb2.GENERATION_MODE_SAMPLE
    assert (message.seed, message.prompt_tokens, message.cached_tokens) == (5, 3, 2)
    assert list(message.warnings) == ["w"]
    assert not message.prompt_logprobs[0].HasField("chosen")
    assert message.prompt_logprobs[1].top[0].rank == 1


def test_a_delta_carries_how_its_sequence_ended() -> None:
    finish = SequenceFinish(1, FinishReason.STOP_STRING, 2, stop_token_id=9, stop_string="END")
    delta = DeltaOutput(seq=3, index=1, token_ids=(8, 9), finish=finish)
    message = convert.to_response(request_of(), "tiny", delta).delta
    assert (message.seq, message.index, list(message.token_ids)) == (3, 1, [8, 9])
    assert message.finished.finish_reason == common_pb2.FINISH_REASON_STOP_STRING
    assert message.finished.WhichOneof("matched_stop") == "stop_string"
    assert not message.finished.HasField("cumulative_logprob")


def test_an_empty_first_delta_is_still_a_delta() -> None:
    message = convert.to_response(request_of(), "tiny", DeltaOutput(seq=0, index=0, token_ids=()))
    assert message.WhichOneof("event") == "delta"


def test_finish_reasons_are_the_protos() -> None:
    for reason in FinishReason:
        assert (
            common_pb2.FinishReason.Name(common_pb2.FinishReason.ValueType(reason.value))
            == f"FINISH_REASON_{reason.name}"
        )


def test_a_stage_that_did_not_run_is_absent() -> None:
    timings = RequestTimings(queue=0.0, prefill=None, decode=None, time_to_first_token=None, total=1.0)
    message = convert.from_finished(FinishedOutput((), 3, 0, 0, timings, last_seq=None))
    assert message.timings.HasField("queue_seconds")
    assert not message.timings.HasField("prefill_seconds")
    assert not message.HasField("last_seq")


def test_an_error_travels_whole_in_a_session() -> None:
    error = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=0.5)
    message = convert.from_error(error)
    back = from_status(status_pb2.Status.FromString(message.status_details))
    assert isinstance(back, ResourceExhausted)
    assert (back.reason, back.retry_after_seconds) == ("QUEUE_FULL", 0.5)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("resumed_token_ids", {"resumed_token_ids": [common_pb2.TokenIds()] * 65}),
        ("stop.stop_token_ids", {"stop": config_pb2.StopConfig(stop_token_ids=[common_pb2.TokenIds(ids=[1])] * 65)}),
        ("config.logit_bias", {"config": config_pb2.GenerationConfig(logit_bias=dict.fromkeys(range(1025), 1.0))}),
    ],
)
def test_long_lists_are_refused_before_they_are_converted(field: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        convert.to_command(generation_pb2.GenerateRequest(**message))
    assert refused.value.field == field


def test_a_command_keeps_every_field() -> None:
    message = generation_pb2.GenerateRequest(
        request_id="r",
        attempt_epoch=2,
        prompt_token_ids=[1, 2],
        resumed_token_ids=[common_pb2.TokenIds(ids=[3])],
        eos_token_ids=[7],
        seed=0,
        cache_salt="s",
        priority=-1,
        model="m",
        stop=config_pb2.StopConfig(stop_token_ids=[common_pb2.TokenIds(ids=[4, 5])], stop_strings=["x"]),
    )
    command = convert.to_command(message)
    assert (command.request_id, command.attempt_epoch, command.seed, command.priority) == ("r", 2, 0, -1)
    assert command.resumed_token_ids == [[3]]
    assert command.stop.stop_token_ids == ((4, 5),)
    assert not command.has_constraint

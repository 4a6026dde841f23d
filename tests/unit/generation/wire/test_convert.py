"""Converters between proto and dataclasses."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument, ResourceExhausted, from_status
from penstock.common.pace import Pace
from penstock.generation.core.decoding_mode import AssistantSchedule, EarlyStopping, SynthIdOptions, WatermarkOptions
from penstock.generation.core.plugins import PluginChoice
from penstock.generation.core.request import (
    Emission,
    FinishedOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    Request,
    RequestTimings,
    SequenceFinish,
    StartedOutput,
)
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.engine.stats import EngineLoad
from penstock.generation.engine.step_watch import StepView
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.generation.options.kinds import as_written
from penstock.generation.options.table import CONFIG, RequestOptions
from penstock.generation.wire import convert
from penstock.generation.wire.option_messages import from_options, to_options, to_output
from penstock.router.backends.load_report import to_pace
from penstock.v1 import admin_pb2, common_pb2, config_pb2, generation_pb2


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@given(st.decimals(-1000, 1000, places=4, allow_nan=False))
def test_a_float_arrives_as_it_was_written(value: object) -> None:
    written = float(str(value))
    assert as_written(float32(written)) == pytest.approx(written, rel=1e-6)
    assert float32(as_written(float32(written))) == float32(written)


def test_seven_tenths_stays_seven_tenths() -> None:
    config = config_pb2.GenerationConfig(temperature=0.7, top_p=0.95, repetition_penalty=1.05)
    options = to_options(config)
    assert (options.temperature, options.top_p, options.repetition_penalty) == (
        0.7,
        0.95,
        1.05,
    )


def test_zero_is_not_unset() -> None:
    options = to_options(config_pb2.GenerationConfig(temperature=0, top_k=0, seed=0, do_sample=False))
    assert (options.temperature, options.top_k, options.seed, options.do_sample) == (0.0, 0, 0, False)
    assert options.top_p is None


EVERY_OPTION = RequestOptions(
    max_new_tokens=7,
    min_new_tokens=1,
    max_length=30,
    min_length=2,
    max_time=1.5,
    do_sample=True,
    num_beams=4,
    num_beam_groups=2,
    diversity_penalty=0.3,
    penalty_alpha=0.6,
    length_penalty=-1.0,
    early_stopping=EarlyStopping.NEVER,
    num_return_sequences=2,
    prompt_lookup_num_tokens=3,
    max_matching_ngram_size=2,
    assistant_model="draft",
    num_assistant_tokens=5,
    num_assistant_tokens_schedule=AssistantSchedule.HEURISTIC_TRANSIENT,
    assistant_confidence_threshold=0.9,
    dola_layers=(1, 3),
    guidance_scale=1.5,
    negative_prompt_ids=(8, 9),
    temperature=0.7,
    top_k=20,
    top_p=0.8,
    min_p=0.05,
    top_h=0.4,
    typical_p=0.95,
    epsilon_cutoff=0.0003,
    eta_cutoff=0.002,
    repetition_penalty=1.05,
    encoder_repetition_penalty=1.1,
    no_repeat_ngram_size=3,
    encoder_no_repeat_ngram_size=4,
    bad_words_ids=((1,), (2, 3)),
    force_words_ids=(((4,),), ((5,), (6, 7))),
    constraints=(((10, 11),), ((12,), (13,))),
    renormalize_logits=True,
    remove_invalid_values=True,
    forced_bos_token_id=0,
    forced_eos_token_id=(1, 2),
    exponential_decay_length_penalty=(5, 1.01),
    suppress_tokens=(3,),
    begin_suppress_tokens=(4, 5),
    sequence_bias=(((1, 2), -0.5), ((3,), 2.0)),
    watermarking_config=WatermarkOptions(0.3, 1.7, 42, "selfhash", 2),
    token_healing=True,
    frequency_penalty=-0.1,
    presence_penalty=0.1,
    logit_bias={3: -1.5},
    allowed_token_ids=(1, 2, 3),
    allowed_token_trie=((1, 2), (1, 3)),
    top_n_sigma=1.5,
    xtc_probability=0.5,
    xtc_threshold=0.2,
    thinking_budget_tokens=64,
    seed=9,
    eos_token_id=(1, 2),
    pad_token_id=0,
    bos_token_id=5,
    logits_processor=(PluginChoice("one"), PluginChoice("two", '{"a": 1}')),
    stopping_criteria=(PluginChoice("three"),),
    ngram_memory_num_tokens=6,
    ngram_memory_match=4,
    lookahead_window=5,
    lookahead_ngram_size=3,
    lookahead_guesses=2,
)


def test_every_option_is_tried() -> None:
    assert dict(EVERY_OPTION.items()).keys() == {name for name, spec in CONFIG.items() if not spec.router_only}


def test_options_round_trip() -> None:
    assert to_options(from_options(EVERY_OPTION)) == EVERY_OPTION
    assert to_options(from_options(RequestOptions())) == RequestOptions()
    low = RequestOptions(dola_layers="low")
    assert to_options(from_options(low)) == low


def test_a_message_round_trips_too() -> None:
    message = from_options(EVERY_OPTION)
    assert from_options(to_options(message)) == message


def test_a_phrase_is_a_constraint_with_one_alternative() -> None:
    config = config_pb2.GenerationConfig()
    config.constraints.add(phrasal=common_pb2.TokenIds(ids=[1, 2]))
    assert to_options(config).constraints == (((1, 2),),)


def test_unspecified_is_unset() -> None:
    config = config_pb2.GenerationConfig(early_stopping=config_pb2.EARLY_STOPPING_UNSPECIFIED)
    assert to_options(config) == RequestOptions()


def test_synthid_travels_as_the_other_watermark_does() -> None:
    for options in (SynthIdOptions(5, (7, -8)), SynthIdOptions(2, (1,), 3, 4, 5, True)):
        one = RequestOptions(watermarking_config=options)
        assert to_options(from_options(one)) == one


def test_a_watermark_keeps_transformers_defaults_where_it_says_nothing() -> None:
    short = config_pb2.SynthIDTextWatermarkingConfig(ngram_len=4, keys=[9])
    config = config_pb2.GenerationConfig(watermarking_config=config_pb2.WatermarkingConfig(synthid=short))
    assert to_options(config).watermarking_config == SynthIdOptions(4, (9,))
    config = config_pb2.GenerationConfig(watermarking_config=config_pb2.WatermarkingConfig(bias=2.5))
    assert to_options(config).watermarking_config == WatermarkOptions(bias=2.5)


def test_an_unset_output_field_is_none() -> None:
    output = to_output(config_pb2.OutputConfig(top_logprobs=0))
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
    delta = Emission(seq=3, index=1, token_ids=(8, 9), finish=finish)
    message = convert.to_response(request_of(), "tiny", delta).delta
    assert (message.seq, message.index, list(message.token_ids)) == (3, 1, [8, 9])
    assert message.finished.finish_reason == common_pb2.FINISH_REASON_STOP_STRING
    assert message.finished.WhichOneof("matched_stop") == "stop_string"
    assert not message.finished.HasField("cumulative_logprob")


def test_an_empty_first_delta_is_still_a_delta() -> None:
    message = convert.to_response(request_of(), "tiny", Emission(seq=0, index=0, token_ids=()))
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


def ids(*token_ids: int) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=token_ids)


def word(*alternatives: common_pb2.TokenIds) -> config_pb2.WordAlternatives:
    return config_pb2.WordAlternatives(alternatives=alternatives)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("resumed_token_ids", {"resumed_token_ids": [ids()] * 65}),
        ("eos_token_ids", {"eos_token_ids": range(65)}),
        ("stop.stop_token_ids", {"stop": config_pb2.StopConfig(stop_token_ids=[ids(1)] * 65)}),
        ("output.tensor_steps", {"output": config_pb2.OutputConfig(tensor_steps=range(4097))}),
    ],
)
def test_long_lists_are_refused_before_they_are_converted(field: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        convert.to_generate_options(generation_pb2.GenerateRequest(**message))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("bad_words_ids", {"bad_words_ids": [ids(1)] * 4097}),
        ("bad_words_ids", {"bad_words_ids": [ids(*[1] * 65)]}),
        ("force_words_ids", {"force_words_ids": [word(ids(1))] * 65}),
        ("force_words_ids", {"force_words_ids": [word(*[ids(1)] * 65)]}),
        ("force_words_ids", {"force_words_ids": [word(ids(*[1] * 65))]}),
        ("constraints", {"constraints": [config_pb2.DecodingConstraint(phrasal=ids(1))] * 65}),
        ("constraints", {"constraints": [config_pb2.DecodingConstraint(phrasal=ids(*[1] * 65))]}),
        ("constraints", {"constraints": [config_pb2.DecodingConstraint(disjunctive=word(*[ids(1)] * 65))]}),
        ("forced_eos_token_id", {"forced_eos_token_id": range(65)}),
        ("suppress_tokens", {"suppress_tokens": range(4097)}),
        ("begin_suppress_tokens", {"begin_suppress_tokens": range(4097)}),
        ("sequence_bias", {"sequence_bias": [config_pb2.SequenceBias(token_ids=[1])] * 4097}),
        ("sequence_bias", {"sequence_bias": [config_pb2.SequenceBias(token_ids=[1] * 65)]}),
        ("allowed_token_ids", {"allowed_token_ids": range(65_537)}),
        ("allowed_token_trie", {"allowed_token_trie": config_pb2.AllowedTokenTrie(sequences=[ids(1)] * 8193)}),
        ("allowed_token_trie", {"allowed_token_trie": config_pb2.AllowedTokenTrie(sequences=[ids(*[1] * 65_537)])}),
        (
            "dola_layers",
            {"dola_layers": config_pb2.DolaLayers(indices=config_pb2.LayerIndices(indices=range(257)))},
        ),
        # Values without a plain form.
        ("early_stopping", {"early_stopping": 9}),
        ("num_assistant_tokens_schedule", {"num_assistant_tokens_schedule": 9}),
        ("constraints", {"constraints": [config_pb2.DecodingConstraint()]}),
        ("dola_layers", {"dola_layers": config_pb2.DolaLayers()}),
        ("negative_prompt_text", {"negative_prompt_text": "x"}),
    ],
)
def test_lists_beyond_their_bounds_and_unknown_kinds_name_their_field(field: str, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        to_options(config_pb2.GenerationConfig(**config))
    assert refused.value.field == f"config.{field}"


@pytest.mark.parametrize(
    ("message", "spec"),
    [
        (config_pb2.Constraint(), ConstraintSpec(None)),
        (config_pb2.Constraint(regex="a+"), ConstraintSpec(ConstraintKind.REGEX, "a+")),
        (config_pb2.Constraint(json_schema="{}"), ConstraintSpec(ConstraintKind.JSON_SCHEMA, "{}")),
        (config_pb2.Constraint(grammar="start: x"), ConstraintSpec(ConstraintKind.GRAMMAR, "start: x")),
        (config_pb2.Constraint(json_object=False), ConstraintSpec(ConstraintKind.JSON_OBJECT, enabled=False)),
        (
            config_pb2.Constraint(choice=config_pb2.Choices(values=["a", "b"])),
            ConstraintSpec(ConstraintKind.CHOICE, choices=("a", "b")),
        ),
    ],
)
def test_a_constraint_is_carried_as_it_was_sent(message: config_pb2.Constraint, spec: ConstraintSpec) -> None:
    assert convert.to_generate_options(generation_pb2.GenerateRequest(constraint=message)).constraint == spec


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
    command = convert.to_generate_options(message)
    assert (command.request_id, command.attempt_epoch, command.seed, command.priority) == ("r", 2, 0, -1)
    assert command.resumed_token_ids == [[3]]
    assert command.stop.stop_token_ids == ((4, 5),)
    assert command.constraint is None


def test_a_pace_travels_in_the_load_report() -> None:
    shares = [0.0] * 33
    shares[5] = 0.5
    waiting = {f"tenant-{number}": float(number) for number in range(100)}
    pace = Pace(1.5, 0.25, 0.125, 0.5, 48.0, shares, 256, 1.25, 2.0, True, waiting)
    message = convert.from_load(EngineLoad(step=3, pace=pace), StepView(), 2, 10, "p")
    assert message.step == 3
    back = to_pace(message)
    assert len(back.waiting) == convert.MAX_REPORTED_TENANTS
    assert min(back.waiting.values()) == 100 - convert.MAX_REPORTED_TENANTS
    assert back == pace._replace(waiting=back.waiting, output_shares=tuple(shares))
    assert to_pace(admin_pb2.Load()) == Pace()


@pytest.mark.parametrize("name", ["config", "stop", "output", "constraint"])
def test_options_of_another_release_are_refused_by_their_number(name: str) -> None:
    message = generation_pb2.GenerateRequest(prompt_token_ids=[1])
    getattr(message, name).MergeFromString(b"\xba\x3e\x01x")
    with pytest.raises(InvalidArgument, match="999") as caught:
        convert.to_generate_options(message)
    assert (caught.value.field, caught.value.reason) == (name, "UNKNOWN_FIELD")

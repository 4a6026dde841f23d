"""The router's idea of an answer's length and end against the service's own: a difference makes a liar of it."""

from __future__ import annotations

from typing import Any

from factories.servers.honest_model import HonestModel
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import resolve
from penstock.generation.options.validate import validate
from penstock.generation.wire.option_messages import from_options, to_options
from penstock.router.backends.expectations import expectations_of
from penstock.router.requests.request_state import RequestSpec
from penstock.v1 import common_pb2, config_pb2, generation_pb2, model_pb2, tokenizer_pb2

CONTEXT = 64
MODEL = ModelFacts("tiny", vocab_size=100, max_context_tokens=CONTEXT)
LENGTHS = st.none() | st.sampled_from([1, 2, 9, 30, 63, 64, 65, 1000])
SCALES = st.none() | st.sampled_from([0.0, 0.5, 1.0, 1.5])
CONFIGS = st.fixed_dictionaries({"max_new_tokens": LENGTHS, "max_length": LENGTHS, "guidance_scale": SCALES})


def config_of(values: dict[str, Any]) -> config_pb2.GenerationConfig:
    return config_pb2.GenerationConfig(**{name: value for name, value in values.items() if value is not None})


@given(CONFIGS, CONFIGS, st.integers(1, CONTEXT - 1), st.none() | st.integers(1, CONTEXT + 9))
@settings(max_examples=250, deadline=None)
def test_no_honest_answer_is_longer_than_expected(
    asked: dict[str, Any], default: dict[str, Any], prompt: int, negative: int | None
) -> None:
    defaults = ModelDefaults(options=to_options(config_of(default)))
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1] * prompt, config=config_of(asked))
    if negative is not None:
        request.config.negative_prompt_ids.CopyFrom(common_pb2.TokenIds(ids=[1] * negative))
    options = GenerateOptions(prompt_token_ids=[1] * prompt, options=to_options(request.config))
    try:
        validate(options, MODEL, RequestLimits())
        longest = resolve(options, defaults, MODEL, RequestLimits()).params.max_new_tokens
    except InvalidArgument:
        return
    info = model_pb2.GetModelInfoResponse(
        vocab_size=100,
        limits=model_pb2.Limits(max_context_tokens=CONTEXT),
        default_config=from_options(defaults.options),
    )
    spec = RequestSpec("a", request, num_sequences=1, decode_options=tokenizer_pb2.DecodeStreamOpen())
    expected = expectations_of(spec, request, info, now=0.0)
    assert longest == expected.budget if expected.is_exact else longest <= expected.budget


SCRIPT = list(range(10, 18))
IDS = st.lists(st.sampled_from([1, 10, 12, 17]), max_size=2)
ENDS = st.fixed_dictionaries(
    {"ignore_eos": st.booleans(), "stop_token_ids": st.lists(st.lists(st.integers(10, 13), min_size=1, max_size=2))}
)


@given(CONFIGS, ENDS, IDS, IDS, st.booleans(), st.sampled_from([1, 1, 2]))
@settings(max_examples=250, deadline=None)
def test_no_honest_answer_is_taken_for_a_lie(
    asked: dict[str, Any], ends: dict[str, Any], eos: list[int], config_eos: list[int], is_bound: bool, beams: int
) -> None:
    stops = [common_pb2.TokenIds(ids=ids) for ids in ends["stop_token_ids"]]
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=[1] * 5,
        config=config_of(asked),
        eos_token_ids=eos,
        stop=config_pb2.StopConfig(ignore_eos=ends["ignore_eos"], stop_token_ids=stops),
    )
    request.config.eos_token_id.extend(config_eos)
    request.config.num_beams = beams
    if is_bound:
        request.constraint.regex = "a*"
    try:
        answer = HonestModel(MODEL).answer(request, SCRIPT)
    except InvalidArgument:
        return
    info = model_pb2.GetModelInfoResponse(
        vocab_size=100,
        limits=model_pb2.Limits(max_context_tokens=CONTEXT),
        default_stop=config_pb2.StopConfig(),
    )
    spec = RequestSpec("a", request, num_sequences=1, decode_options=tokenizer_pb2.DecodeStreamOpen())
    expected = expectations_of(spec, request, info, now=0.0)
    total = len(answer.ids)
    expected.check_tokens(answer.ids, total, is_last=True)
    result = common_pb2.SequenceResult(finish_reason=answer.reason, token_count=total)
    expected.check_end(result, answer.ids, 0.0, lambda _: None)


def test_what_a_grammar_holds_may_be_closed_before_its_limit() -> None:
    info = model_pb2.GetModelInfoResponse(vocab_size=100, limits=model_pb2.Limits(max_context_tokens=CONTEXT))
    free = generation_pb2.GenerateRequest(prompt_token_ids=[1], config=config_pb2.GenerationConfig(max_new_tokens=9))
    held, bound = generation_pb2.GenerateRequest(), generation_pb2.GenerateRequest()
    held.CopyFrom(free)
    held.calls.CopyFrom(generation_pb2.CallGrammar(opens=["<"], grammar='start: "<a>"'))
    bound.CopyFrom(free)
    bound.constraint.json_object = True
    exact = []
    for request in (free, held, bound):
        spec = RequestSpec("a", request, num_sequences=1, decode_options=tokenizer_pb2.DecodeStreamOpen())
        exact.append(expectations_of(spec, request, info, now=0.0).is_exact)
    assert exact == [True, False, False]

"""Every impossible request is refused with its status and field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelFacts
from penstock.generation.options.table import OutputOptions, RequestOptions, StopOptions
from penstock.generation.options.validate import validate

MODEL = ModelFacts("tiny", vocab_size=100, max_context_tokens=16, tokenizer_fingerprint="aa", has_token_bytes=True)
LIMITS = RequestLimits()
NAN, INF = math.nan, math.inf


def command(**fields: Any) -> GenerateOptions:
    return GenerateOptions(**{"prompt_token_ids": [1, 2, 3], **fields})


def with_options(**options: Any) -> GenerateOptions:
    return command(options=RequestOptions(**options))


def check(request: GenerateOptions, model: ModelFacts = MODEL) -> None:
    validate(request, model, LIMITS)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [0]),
        ("max_length", [0]),
        ("max_time", [0.0, -1.0, NAN, INF]),
        ("num_return_sequences", [0, 65]),
        ("temperature", [-0.1, NAN, INF]),
        ("top_p", [-0.1, 1.1, NAN]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0.0, -1.0, NAN, INF]),
        ("frequency_penalty", [-2.1, 2.1, NAN]),
        ("presence_penalty", [-2.1, 2.1, NAN]),
        ("logit_bias", [{1: NAN}, {1: INF}, {100: 1.0}]),
        ("seed", [-1, 2**63]),
    ],
)
def test_an_impossible_option_names_its_field(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgument) as refused:
            check(with_options(**{name: value}))
        assert refused.value.field == f"config.{name}"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"frequency_penalty": -2.0},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"min_new_tokens": 0},
    ],
)
def test_the_edges_are_allowed(options: dict[str, Any]) -> None:
    check(with_options(**options))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"prompt_token_ids": []}),
        ("prompt", {"prompt_token_ids": [100]}),
        ("prompt", {"prompt_token_ids": [2**32 - 1]}),
        ("prompt", {"prompt_token_ids": [1] * 16}),
        ("eos_token_ids", {"eos_token_ids": (100,)}),
        ("resumed_token_ids", {"resumed_token_ids": [[100]]}),
        ("seed", {"seed": 2**63}),
        ("seed", {"seed": 2**64 - 1}),
        ("timeout_seconds", {"timeout_seconds": 0.0}),
        ("timeout_seconds", {"timeout_seconds": -1.0}),
        ("timeout_seconds", {"timeout_seconds": INF}),
        ("timeout_seconds", {"timeout_seconds": NAN}),
        ("request_id", {"request_id": "x" * 257}),
        ("cache_salt", {"cache_salt": "x" * 257}),
        ("stop.stop_strings", {"stop": StopOptions(stop_strings=("",))}),
        ("stop.stop_strings", {"stop": StopOptions(stop_strings=("x" * 257,))}),
        ("stop.stop_strings", {"stop": StopOptions(stop_strings=("x",) * 33)}),
        ("stop.stop_token_ids", {"stop": StopOptions(stop_token_ids=((),))}),
        ("stop.stop_token_ids", {"stop": StopOptions(stop_token_ids=((100,),))}),
        ("stop.stop_token_ids", {"stop": StopOptions(stop_token_ids=((1,) * 33,))}),
        ("stop.stop_token_ids", {"stop": StopOptions(stop_token_ids=((1,),) * 65)}),
        ("output.top_logprobs", {"output": OutputOptions(top_logprobs=21)}),
        ("output.prompt_logprobs", {"output": OutputOptions(prompt_logprobs=21)}),
        ("output.stream_interval", {"output": OutputOptions(stream_interval=0)}),
    ],
)
def test_an_impossible_request_names_its_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(command(**fields))
    assert refused.value.field == field


def test_prompt_logprobs_that_would_not_fit_a_message_are_refused() -> None:
    long = replace(MODEL, max_context_tokens=100_000)
    with pytest.raises(InvalidArgument) as refused:
        check(command(prompt_token_ids=[1] * 50_000, output=OutputOptions(prompt_logprobs=3)), long)
    assert refused.value.field == "output.prompt_logprobs"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(command(stop=StopOptions(stop_strings=("end",))), replace(MODEL, has_token_bytes=False))
    assert refused.value.field == "stop.stop_strings"


def test_unknown_names_are_not_found() -> None:
    with pytest.raises(NotFound, match="model"):
        check(command(model="other"))
    with pytest.raises(NotFound, match="adapter"):
        check(command(adapter="mine"))
    check(command(model="tiny"))


def test_another_tokenizer_is_a_failed_precondition() -> None:
    with pytest.raises(FailedPrecondition):
        check(command(tokenizer_fingerprint="bb"))
    check(command(tokenizer_fingerprint="aa"))
    check(command(tokenizer_fingerprint="bb"), replace(MODEL, tokenizer_fingerprint=""))


def test_no_message_repeats_what_the_caller_sent() -> None:
    for request in (command(prompt_token_ids=[777_777]), command(model="secret-777777"), command(adapter="777777")):
        with pytest.raises((InvalidArgument, NotFound)) as refused:
            check(request)
        assert "777777" not in refused.value.message

"""Precedence: request > generation_config.json > documented defaults; warnings are returned, not lost."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import EarlyStopping
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import Resolved, resolve
from penstock.generation.options.table import OutputOptions, RequestOptions, StopOptions

MODEL = ModelFacts("tiny", vocab_size=100, max_context_tokens=100)
QWEN = ModelDefaults(
    options=RequestOptions(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
    eos_token_ids=(7, 8),
    eos_sequences=((1, 2),),
)


def resolved(defaults: ModelDefaults = ModelDefaults(), model: ModelFacts = MODEL, **fields: Any) -> Resolved:  # noqa: B008
    options = fields.pop("options", {})
    command = GenerateOptions(
        prompt_token_ids=[1] * 10, options=RequestOptions(**{"max_new_tokens": 5, **options}), **fields
    )
    return resolve(command, defaults, model, RequestLimits())


def warnings_of(**fields: Any) -> str:
    return "\n".join(resolved(**fields).warnings)


def test_without_any_wish_transformers_defaults_hold() -> None:
    params = resolved(options={"do_sample": True}).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 50, 1.0, 0.0)
    assert resolved().params.do_sample is False


def test_the_models_file_supplies_defaults() -> None:
    params = resolved(QWEN).params
    assert (params.do_sample, params.temperature, params.top_k, params.top_p) == (True, 0.7, 20, 0.8)
    assert params.repetition_penalty == 1.05
    assert (params.eos_token_ids, params.stop_token_ids) == ((7, 8), ((1, 2),))


def test_the_request_wins_over_the_file_also_with_zero() -> None:
    params = resolved(QWEN, options={"top_k": 0, "top_p": 1.0, "temperature": 1.5, "repetition_penalty": 1.0}).params
    assert (params.top_k, params.top_p, params.temperature, params.repetition_penalty) == (0, 1.0, 1.5, 1.0)
    assert resolved(QWEN, options={"do_sample": False}).params.do_sample is False


def test_temperature_zero_is_greedy_and_says_so() -> None:
    result = resolved(options={"do_sample": True, "temperature": 0.0, "top_k": 5})
    assert result.params.do_sample is False
    assert result.params.top_k == 0
    assert any("config.do_sample has no effect" in text for text in result.warnings)
    assert any("config.top_k has no effect" in text for text in result.warnings)


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_sampling_field_while_greedy_is_warned_about(options: dict[str, Any]) -> None:
    assert f"config.{next(iter(options))} has no effect" in warnings_of(options=options)


def test_the_files_own_sampling_values_are_no_reason_to_warn() -> None:
    assert resolved(QWEN, options={"do_sample": False}).warnings == ()


def test_beam_only_fields_with_one_beam_are_warned_about() -> None:
    text = warnings_of(options={"length_penalty": 2.0, "early_stopping": EarlyStopping.TRUE})
    assert "config.length_penalty has no effect" in text
    assert "config.early_stopping has no effect" in text
    assert warnings_of(options={"length_penalty": 1.0, "early_stopping": EarlyStopping.FALSE}) == ""


def test_an_unset_length_reaches_to_the_context_and_is_told() -> None:
    result = resolved(options={"max_new_tokens": None})
    assert result.params.max_new_tokens == 90
    assert "max_new_tokens is unset" in result.warnings[0]


def test_an_unset_length_is_what_the_pool_holds_where_that_is_less() -> None:
    small = ModelFacts("tiny", 100, 100, max_output_tokens=lambda params, prompt: 40 // params.num_return_sequences)
    assert resolved(model=small, options={"max_new_tokens": None}).params.max_new_tokens == 40
    assert resolved(model=small, options={"max_new_tokens": 60}).params.max_new_tokens == 60


def test_new_tokens_win_over_total_length() -> None:
    result = resolved(options={"max_new_tokens": 5, "max_length": 50})
    assert result.params.max_new_tokens == 5
    assert "config.max_length has no effect" in result.warnings[0]


def test_total_lengths_include_the_prompt() -> None:
    params = resolved(options={"max_new_tokens": None, "max_length": 30, "min_length": 12}).params
    assert (params.max_new_tokens, params.min_new_tokens) == (20, 2)


def test_a_prompt_that_fills_max_length_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        resolved(options={"max_new_tokens": None, "max_length": 10})
    assert refused.value.field == "config.max_length"


def test_a_length_over_the_context_is_cut_and_told() -> None:
    result = resolved(options={"max_new_tokens": 1000})
    assert result.params.max_new_tokens == 90
    assert "exceeds the context" in result.warnings[0]


def test_a_minimum_over_the_maximum_is_warned_about() -> None:
    result = resolved(options={"min_new_tokens": 9})
    assert result.params.min_new_tokens == 5
    assert "minimum length exceeds" in result.warnings[0]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.0}, {"do_sample": True}])
def test_several_sequences_may_be_equal(options: dict[str, Any]) -> None:
    assert resolved(options={"num_return_sequences": 2, **options}).params.num_return_sequences == 2


def test_a_contrastive_search_has_one_sequence() -> None:
    with pytest.raises(InvalidArgument) as refused:
        resolved(options={"num_return_sequences": 2, "penalty_alpha": 0.6, "top_k": 4})
    assert refused.value.field == "config.num_return_sequences"


def test_resumed_ids_come_one_list_per_sequence_and_within_the_length() -> None:
    for lists in ([[1], [2]], [[1] * 6]):
        with pytest.raises(InvalidArgument) as refused:
            resolved(resumed_token_ids=lists)
        assert refused.value.field == "resumed_token_ids"
    assert resolved(resumed_token_ids=[[1] * 5]).params.max_new_tokens == 5


def test_the_seed_is_the_routers_then_the_callers_then_drawn() -> None:
    assert resolved(seed=0, options={"seed": 4}).params.seed == 0
    assert resolved(options={"seed": 4}).params.seed == 4
    assert 0 <= resolved().params.seed < 2**63


def test_explicit_end_ids_replace_the_models_and_ignoring_them_drops_its_sequences() -> None:
    explicit = resolved(QWEN, eos_token_ids=(9,)).params
    assert (explicit.eos_token_ids, explicit.stop_token_ids) == ((9,), ())
    ignoring = resolved(QWEN, stop=StopOptions(ignore_eos=True)).params
    assert (ignoring.ignore_eos, ignoring.stop_token_ids) == (True, ())


def test_echo_is_the_routers() -> None:
    assert "output.echo" in warnings_of(output=OutputOptions(echo=True))

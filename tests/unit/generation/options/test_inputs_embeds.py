"""inputs_embeds among a request's options: what is refused, by which field, and what lengths and warnings become."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from penstock.common.errors import InvalidArgument, PenstockError
from penstock.generation.core.tensors import TensorData
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import Resolved, resolve
from penstock.generation.options.table import OutputOptions, RequestOptions
from penstock.generation.options.validate import validate, with_prompt

HIDDEN = 6
MODEL = ModelFacts(
    "tiny",
    vocab_size=100,
    max_context_tokens=40,
    has_token_bytes=True,
    hidden_size=HIDDEN,
    assistant_model="draft",
    num_layers=4,
)
DEFAULTS = ModelDefaults(bos_token_id=1)


def rows(count: int = 4, dtype: str = "float32", hidden: int = HIDDEN, size: int | None = None) -> TensorData:
    item = 4 if dtype == "float32" else 2
    return TensorData(dtype, (count, hidden), bytes(item * count * hidden if size is None else size))


def prepared(limits: RequestLimits = RequestLimits(), **fields: Any) -> Resolved:  # noqa: B008
    given = {"inputs_embeds": rows(), **fields}
    options = RequestOptions(**{"max_new_tokens": 5, **given.pop("options", {})})
    request = with_prompt(GenerateOptions(options=options, **given), DEFAULTS, MODEL)
    validate(request, MODEL, limits)
    return resolve(request, DEFAULTS, MODEL, limits)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("prompt", [[], [5], [5, 6, 7, 8]])
def test_rows_with_and_without_ids(dtype: str, prompt: list[int]) -> None:
    assert prepared(inputs_embeds=rows(dtype=dtype), prompt_token_ids=prompt).params.max_new_tokens == 5


@pytest.mark.parametrize(
    ("field", "words", "fields"),
    [
        ("inputs_embeds", "dtype must be", {"inputs_embeds": TensorData("", (4, HIDDEN), bytes(96))}),
        ("inputs_embeds", "dtype must be", {"inputs_embeds": TensorData("int8", (4, HIDDEN), bytes(24))}),
        ("inputs_embeds", "(tokens, 6)", {"inputs_embeds": rows(hidden=5)}),
        ("inputs_embeds", "(tokens, 6)", {"inputs_embeds": rows(0)}),
        ("inputs_embeds", "(tokens, 6)", {"inputs_embeds": TensorData("float32", (-4, HIDDEN), b"")}),
        ("inputs_embeds", "(tokens, 6)", {"inputs_embeds": TensorData("float32", (), b"")}),
        ("inputs_embeds", "(tokens, 6)", {"inputs_embeds": TensorData("float32", (1, 4, HIDDEN), bytes(96))}),
        ("inputs_embeds", "data must be 96 bytes", {"inputs_embeds": rows(size=95)}),
        ("inputs_embeds", "data must be 96 bytes", {"inputs_embeds": rows(size=97)}),
        ("inputs_embeds", "context of 40", {"inputs_embeds": rows(40)}),
        ("inputs_embeds", "context of 40",
         {"inputs_embeds": rows(30), "prompt_token_ids": [5] * 10, "inputs_embeds_before_ids": True}),
        ("prompt", "at most as many tokens as inputs_embeds has rows (4)", {"prompt_token_ids": [5] * 5}),
        ("prompt", "below 100", {"prompt_token_ids": [100]}),
        ("inputs_embeds_before_ids", "must be false",
         {"inputs_embeds": None, "prompt_token_ids": [5], "inputs_embeds_before_ids": True}),
        ("config.token_healing", "must be false with inputs_embeds", {"options": {"token_healing": True}}),
        ("config.assistant_model", "must be unset with inputs_embeds", {"options": {"assistant_model": "draft"}}),
        ("config.negative_prompt_ids", "must be set", {"options": {"guidance_scale": 2.0}}),
        ("config.max_length", "must exceed", {"options": {"max_new_tokens": None, "max_length": 4}}),
        ("output.prompt_logprobs", "not every row", {"output": OutputOptions(prompt_logprobs=1)}),
        ("output.prompt_logprobs", "not every row",
         {"output": OutputOptions(prompt_logprobs=1), "prompt_token_ids": [5, 6, 7]}),
        ("output.prompt_logprobs", "not every row",
         {"output": OutputOptions(prompt_logprobs=1), "prompt_token_ids": [5], "inputs_embeds_before_ids": True}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_field(field: str, words: str, fields: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match=re.escape(words)) as refused:
        prepared(**fields)
    assert isinstance(refused.value, InvalidArgument)
    assert refused.value.field == field


def test_the_bound_on_bytes_names_its_flag() -> None:
    limits = replace(RequestLimits(), max_inputs_embeds_bytes=96)
    prepared(limits)
    with pytest.raises(InvalidArgument, match="96 bytes of --max-inputs-embeds-bytes") as refused:
        prepared(limits, inputs_embeds=rows(5))
    assert refused.value.field == "inputs_embeds"
    prepared(limits, inputs_embeds=rows(8, "bfloat16"))


def test_what_is_possible_beside_ids_for_every_row() -> None:
    ids = {"prompt_token_ids": [5, 6, 7, 8]}
    prepared(output=OutputOptions(prompt_logprobs=1), **ids)
    prepared(options={"guidance_scale": 2.0}, **ids)
    prepared(options={"guidance_scale": 2.0, "negative_prompt_ids": (3,)})


def test_drafts_of_a_model_are_possible_where_they_have_no_effect() -> None:
    assert prepared(options={"assistant_model": "draft", "prompt_lookup_num_tokens": 3}).warnings
    prepared(options={"assistant_model": "draft", "num_beams": 2})


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"options": {"max_new_tokens": None, "max_length": 12}}, 8),
        ({"options": {"max_new_tokens": None, "max_length": 12}, "prompt_token_ids": [5, 6, 7, 8]}, 8),
        # transformers takes the rows off a total length that holds the ids, too, and so generates 6.
        ({"options": {"max_new_tokens": None, "max_length": 12}, "prompt_token_ids": [5, 6]}, 8),
        ({"options": {"max_new_tokens": None, "max_length": 12}, "prompt_token_ids": [5, 6],
          "inputs_embeds_before_ids": True}, 6),
        ({"options": {"max_new_tokens": 100}}, 36),
        ({"options": {"max_new_tokens": 100}, "prompt_token_ids": [5, 6], "inputs_embeds_before_ids": True}, 34),
    ],
)  # fmt: skip
def test_lengths_count_what_the_model_reads(fields: dict[str, Any], longest: int) -> None:
    assert prepared(**fields).params.max_new_tokens == longest


def test_a_least_total_length_counts_the_rows() -> None:
    assert prepared(options={"min_length": 7}).params.min_new_tokens == 3
    assert prepared(options={"min_length": 3}).params.min_new_tokens == 0


@pytest.mark.parametrize("prompt", [[], [5, 6, 7, 8]])
def test_encoder_options_have_no_effect_and_say_so(prompt: list[int]) -> None:
    options = {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2}
    made = prepared(options=options, prompt_token_ids=prompt)
    assert (made.params.encoder_repetition_penalty, made.params.encoder_no_repeat_ngram_size) == (1.0, 0)
    for name in options:
        assert f"config.{name} has no effect: the prompt came as inputs_embeds" in made.warnings
    neutral = prepared(options={"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0})
    assert neutral.warnings == ()


def test_options_that_look_at_ids_say_when_they_see_none_of_the_prompt() -> None:
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    warnings = prepared(options=options).warnings
    assert len(warnings) == 2
    assert all("looks at the output only" in text for text in warnings)
    assert prepared(options=options, prompt_token_ids=[5]).warnings == ()
    assert prepared().warnings == ()
    # Only the request's own options warn.
    defaults = replace(DEFAULTS, options=RequestOptions(repetition_penalty=1.2))
    request = GenerateOptions(options=RequestOptions(max_new_tokens=5), inputs_embeds=rows())
    assert resolve(request, defaults, MODEL, RequestLimits()).warnings == ()


def test_rows_are_an_input_so_that_no_id_begins_the_prompt() -> None:
    request = with_prompt(GenerateOptions(inputs_embeds=rows()), DEFAULTS, MODEL)
    assert request.prompt_token_ids == []
    assert with_prompt(GenerateOptions(), DEFAULTS, MODEL).prompt_token_ids == [1]

"""The table of options is whole, and agrees with the protos, the sampler, transformers and what is made of it."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from penstock.common.options import options_of
from penstock.compat.option_names import ALIASES, VLLM_SAMPLING
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.decoding_mode import AssistantSchedule, Scope
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.options.kinds import FLAG, FLOAT32, INTEGER, NUMBERS, SCHEDULE, TEXT, Choice
from penstock.generation.options.option_spec import OptionSpec
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import resolve
from penstock.generation.options.table import CONFIG, SECTIONS, OutputOptions, RequestOptions, StopOptions
from penstock.v1 import config_pb2
from transformers import GenerationConfig

from tools import option_tables

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "reference" / "options.md").read_text(encoding="utf-8")
MESSAGES: dict[str, Any] = {
    "config": config_pb2.GenerationConfig,
    "stop": config_pb2.StopConfig,
    "output": config_pb2.OutputConfig,
}
ROWS = [spec for specs in SECTIONS.values() for spec in specs.values()]
# Resolved by hand into the modes' own options, the lengths and the ends; or facts about the request.
MADE = {
    "max_new_tokens", "min_new_tokens", "do_sample", "seed", "num_return_sequences", "eos_token_ids", "stop_token_ids",
    "stop_strings", "mode", "guidance", "tensors", "plugins", "thought_budget",
}  # fmt: skip
# The wire's own, OpenAI's and Penstock's.
NOT_OF_TRANSFORMERS = {
    "assistant_model", "negative_prompt_text", "negative_prompt_ids", "frequency_penalty", "presence_penalty",
    "logit_bias", "allowed_token_ids", "allowed_token_trie", "top_n_sigma", "seed",
    "xtc_probability", "xtc_threshold", "thinking_budget_tokens",
    "ngram_memory_num_tokens", "ngram_memory_match", "lookahead_window", "lookahead_ngram_size", "lookahead_guesses",
    # Arguments of generate() beside its configuration.
    "logits_processor", "stopping_criteria",
}  # fmt: skip


@pytest.mark.parametrize("name", option_tables.FILES)
def test_what_is_made_of_the_table_is_up_to_date(name: str) -> None:
    made = option_tables.FILES[name]()
    assert (ROOT / name).read_text(encoding="utf-8") == made, "run python tools/option_tables.py"


@pytest.mark.parametrize("section", MESSAGES)
def test_every_field_has_its_row(section: str) -> None:
    assert list(SECTIONS[section]) == [field.name for field in MESSAGES[section].DESCRIPTOR.fields]


def test_every_row_has_its_words() -> None:
    assert [spec.name for spec in ROWS if not spec.doc.endswith(".") or "|" in spec.doc] == []
    assert len({spec.doc for spec in ROWS}) == len(ROWS)


def test_every_limit_is_one_of_a_request() -> None:
    assert {spec.limit for spec in ROWS if spec.limit} <= {field.name for field in fields(RequestLimits)}


def test_every_parameter_of_the_sampler_comes_from_the_table_or_is_made_by_hand() -> None:
    taken = [spec.param for spec in ROWS if spec.param is not None]
    assert len(taken) == len(set(taken))
    assert {*taken, *MADE} == {field.name for field in fields(SamplingParams)}
    assert not MADE & set(taken)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"stop": StopOptions(ignore_eos=True)}, ("ignore_eos", True)),
        ({"stop": StopOptions(include_stop_string_in_output=True)}, ("include_stop_string_in_output", True)),
        ({"output": OutputOptions(skip_special_tokens=False)}, ("skip_special_tokens", False)),
        ({"output": OutputOptions(top_logprobs=0)}, ("top_logprobs", 0)),
        ({"output": OutputOptions(prompt_logprobs=3)}, ("prompt_logprobs", 3)),
    ],
)
def test_a_parameter_comes_from_whatever_section_its_row_is_in(part: dict[str, Any], value: tuple[str, Any]) -> None:
    model = ModelFacts("tiny", vocab_size=100, max_context_tokens=50)
    request = GenerateOptions(prompt_token_ids=[1], **part)
    params = resolve(request, ModelDefaults(), model, RequestLimits()).params
    assert getattr(params, value[0]) == value[1] != getattr(SamplingParams(1), value[0])


@pytest.mark.parametrize("options", [RequestOptions, StopOptions, OutputOptions])
def test_replaced_options_are_equal_to_options_made_so(options: Any) -> None:
    """`dataclasses.replace` passes every field, the unset ones with the value that they read as."""
    name = next(name for name, spec in options.specs.items() if spec.kind.type is bool)
    made = replace(options(), **{name: True})
    assert made == options(**{name: True})
    assert dict(made.items()) == {name: True}
    assert replace(made, **{name: None}) == options()
    fallback = options(**{one: (1,) for one, spec in options.specs.items() if getattr(options, one) == ()})
    assert dict(made.over(fallback).items()) == {**dict(fallback.items()), name: True}


def test_every_option_is_transformers_unless_it_is_told_otherwise() -> None:
    assert {name for name in CONFIG if name not in vars(GenerationConfig())} == NOT_OF_TRANSFORMERS


@pytest.mark.parametrize("spec", [spec for spec in ROWS if isinstance(spec.kind, Choice)], ids=lambda spec: spec.name)
def test_numbers_of_enums_are_the_protos(spec: OptionSpec) -> None:
    assert isinstance(spec.kind, Choice)
    enum = MESSAGES[spec.section].DESCRIPTOR.fields_by_name[spec.name].enum_type
    names = {value.number: value.name for value in enum.values if value.number}
    assert {number: names[number].endswith(f"_{value.name}") for number, value in spec.kind.numbers.items()} == (
        dict.fromkeys(names, True)
    )


def test_what_a_row_needs_is_another_row_of_its_section_that_can_be_off() -> None:
    for spec in ROWS:
        for need in spec.needs:
            other = SECTIONS[spec.section][need]
            assert other is not spec
            assert not other.asks(other.default), (spec.name, need)


@pytest.mark.parametrize("spec", [spec for spec in ROWS if spec.needs], ids=lambda spec: spec.name)
def test_an_option_without_what_it_needs_warns_and_with_it_does_not(spec: OptionSpec) -> None:
    model = ModelFacts("tiny", vocab_size=100, max_context_tokens=50, assistant_model="small")
    values = {
        FLAG: True, TEXT: "small", INTEGER: 3, NUMBERS: (1,), FLOAT32: 0.25, SCHEDULE: AssistantSchedule.HEURISTIC,
    }  # fmt: skip

    def warnings(*names: str) -> str:
        asked = {name: values[SECTIONS[spec.section][name].kind] for name in names}
        parts: dict[str, Any] = {"config": {"do_sample": True, "max_new_tokens": 5}, "output": {}}
        parts[spec.section].update(asked)
        request = GenerateOptions(
            prompt_token_ids=[1], options=RequestOptions(**parts["config"]), output=OutputOptions(**parts["output"])
        )
        return " ".join(resolve(request, ModelDefaults(), model, RequestLimits()).warnings)

    told = warnings(spec.name)
    assert f"{spec.path} has no effect" in told
    assert all(f"{spec.section}.{need}" in told for need in spec.needs)
    assert [name for name in spec.needs if warnings(name, spec.name)] == []


def test_every_mode_but_greedy_is_chosen_by_an_option() -> None:
    assert {spec.chooses for spec in ROWS} - {None} == set(Scope) - {Scope.GUIDANCE, Scope.ENDING}


def test_no_alias_is_a_name_or_another_alias() -> None:
    names = [spec.name for spec in ROWS]
    assert {*ALIASES, *VLLM_SAMPLING} <= {*names}
    names += [alias for aliases in ALIASES.values() for alias in aliases]
    assert len(names) == len(set(names))


def defaults() -> dict[str, Any]:
    """Return the options' values when neither the request nor the model's file sets them; the warpers' while
    sampling."""
    model = ModelFacts("tiny", vocab_size=100, max_context_tokens=50)
    known: dict[str, Any] = {}
    for options in (RequestOptions(do_sample=True), RequestOptions()):
        request = GenerateOptions(prompt_token_ids=[1], options=options)
        params = resolve(request, ModelDefaults(), model, RequestLimits()).params
        for part in (params, BeamOptions(1), AssistanceOptions()):
            known.update((name, getattr(part, name)) for name in CONFIG if hasattr(part, name) and name not in known)
    return {**known, "do_sample": params.do_sample}


def test_the_defaults_are_those_of_the_code() -> None:
    checked = 0
    for name, value in defaults().items():
        told = CONFIG[name].default
        if isinstance(value, (bool, int, float)) and not isinstance(told, str) and told is not None:
            assert told == value, name
            checked += 1
    assert checked > 20


def test_every_flag_that_is_named_exists() -> None:
    flags = {option.flag for option in options_of(GenerationServiceConfig)} | {"--assistant-model"}
    guide = (ROOT / "docs" / "guide" / "generation-config.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(--[\w-]+)`", PAGE + guide)) <= flags

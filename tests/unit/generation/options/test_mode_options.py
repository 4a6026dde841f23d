"""The options of a request become the parameters of its mode."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.errors import InvalidArgument, NotFound
from penstock.generation.core.decoding_mode import (
    NO_GUIDANCE,
    AssistantSchedule,
    EarlyStopping,
    GenerationMode,
    GuidanceOptions,
    WatermarkOptions,
)
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.engine.acceptance import most_output_tokens
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.generation.options.mode_options import check_assistant
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import Resolved, resolve
from penstock.generation.options.table import RequestOptions

MODEL = ModelFacts("tiny", vocab_size=100, max_context_tokens=100, num_layers=6, assistant_model="draft")


def resolved(defaults: ModelDefaults = ModelDefaults(), model: ModelFacts = MODEL, **options: Any) -> Resolved:  # noqa: B008
    constraint = options.pop("constraint", None)
    asked = RequestOptions(**{"max_new_tokens": 5, **options})
    command = GenerateOptions(prompt_token_ids=[1] * 10, options=asked, constraint=constraint)
    return resolve(command, defaults, model, RequestLimits())


def params_of(**options: Any) -> SamplingParams:
    return resolved(**options).params


def file_of(**options: Any) -> ModelDefaults:
    return ModelDefaults(options=RequestOptions(**options))


def test_beam_options_have_transformers_defaults() -> None:
    params = params_of(num_beams=4)
    assert (params.generation_mode, params.mode) == (GenerationMode.BEAM_SEARCH, BeamOptions(4))
    assert (params.top_k, params.temperature) == (0, 1.0)


def test_every_beam_option_arrives() -> None:
    params = params_of(
        num_beams=4,
        num_beam_groups=2,
        diversity_penalty=0.5,
        length_penalty=-2.0,
        early_stopping=EarlyStopping.NEVER,
        num_return_sequences=3,
    )
    assert params.generation_mode is GenerationMode.GROUP_BEAM_SEARCH
    assert params.mode == BeamOptions(4, 2, 0.5, -2.0, EarlyStopping.NEVER)
    assert params.num_return_sequences == 3


def test_a_length_penalty_of_zero_is_not_unset() -> None:
    beams = params_of(num_beams=2, length_penalty=0.0).mode
    assert beams is not None
    assert beams.length_penalty == 0.0


def test_beam_sampling_has_the_warpers() -> None:
    params = params_of(num_beams=2, do_sample=True, top_p=0.9)
    assert (params.generation_mode, params.top_p, params.top_k) == (GenerationMode.BEAM_SAMPLE, 0.9, 50)


def test_constraints_come_before_forced_words() -> None:
    params = params_of(num_beams=2, force_words_ids=(((1,),),), constraints=(((2,), (3,)),))
    assert params.generation_mode is GenerationMode.CONSTRAINED_BEAM_SEARCH
    assert isinstance(params.mode, BeamOptions)
    assert params.mode.constraints == (((2,), (3,)), ((1,),))


def test_finished_groups_count_as_the_models_pad_token() -> None:
    beams = resolved(ModelDefaults(pad_token_id=7), num_beams=2).params.mode
    assert isinstance(beams, BeamOptions)
    assert beams.pad_token_id == 7
    beams = resolved(ModelDefaults(pad_token_id=7), num_beams=2, pad_token_id=0).params.mode
    assert isinstance(beams, BeamOptions)
    assert beams.pad_token_id == 0


def test_a_requests_own_ends_replace_the_models() -> None:
    model = ModelDefaults(eos_token_ids=(7,), eos_sequences=((8, 9),))
    plain, asked = resolved(model).params, resolved(model, eos_token_id=(3, 4)).params
    assert (plain.eos_token_ids, plain.stop_token_ids) == ((7,), ((8, 9),))
    assert (asked.eos_token_ids, asked.stop_token_ids) == ((3, 4), ())


def test_contrastive_search_takes_top_k_from_the_defaults() -> None:
    assert params_of(penalty_alpha=0.6).mode == ContrastiveOptions(0.6, 50)
    params = params_of(penalty_alpha=0.6, top_k=4)
    assert (params.generation_mode, params.mode) == (GenerationMode.CONTRASTIVE_SEARCH, ContrastiveOptions(0.6, 4))
    assert resolved(penalty_alpha=0.6, top_k=4).warnings == ()
    assert params_of(penalty_alpha=0.6, top_k=4, do_sample=True).generation_mode is GenerationMode.SAMPLE


def test_prompt_lookup_is_assistance() -> None:
    params = params_of(prompt_lookup_num_tokens=3)
    assert params.generation_mode is GenerationMode.ASSISTED_GENERATION
    assert params.mode == AssistanceOptions(prompt_lookup_num_tokens=3)
    sized = params_of(prompt_lookup_num_tokens=3, max_matching_ngram_size=5).mode
    assert sized is not None
    assert sized.max_matching_ngram_size == 5


def test_a_draft_model_is_assistance() -> None:
    assert params_of(assistant_model="draft").mode == AssistanceOptions()
    params = params_of(
        assistant_model="draft",
        num_assistant_tokens=7,
        num_assistant_tokens_schedule=AssistantSchedule.HEURISTIC,
        assistant_confidence_threshold=0.0,
        do_sample=True,
        num_return_sequences=2,
    )
    assert params.mode == AssistanceOptions(7, AssistantSchedule.HEURISTIC, 0.0)
    assert params.num_return_sequences == 2


def test_memory_and_lookahead_are_assistance_beside_prompt_lookup() -> None:
    params = params_of(ngram_memory_num_tokens=5, lookahead_window=6, prompt_lookup_num_tokens=3, assistant_model="a")
    assert params.generation_mode is GenerationMode.ASSISTED_GENERATION
    assert params.mode == AssistanceOptions(prompt_lookup_num_tokens=3, ngram_memory_num_tokens=5, lookahead_window=6)
    sized = params_of(
        ngram_memory_num_tokens=5, ngram_memory_match=4, lookahead_window=6, lookahead_ngram_size=3, lookahead_guesses=2
    )
    assert sized.mode == AssistanceOptions(
        ngram_memory_num_tokens=5,
        ngram_memory_match=4,
        lookahead_window=6,
        lookahead_ngram_size=3,
        lookahead_guesses=2,
    )


def test_a_server_without_a_memory_says_so() -> None:
    forgetful = RequestLimits(remembers_outputs=False)
    request = GenerateOptions(prompt_token_ids=[1], options=RequestOptions(ngram_memory_num_tokens=5))
    result = resolve(request, ModelDefaults(), MODEL, forgetful)
    assert not isinstance(result.params.mode, AssistanceOptions)
    assert [text for text in result.warnings if "ngram_memory_num_tokens has no effect: this server" in text]


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": ""},
        {"prompt_lookup_num_tokens": 0},
        {"num_assistant_tokens": 3},
        {"ngram_memory_num_tokens": 0, "ngram_memory_match": 2},
        {"lookahead_window": 0, "lookahead_guesses": 2},
    ],
)
def test_nothing_is_drafted_unless_it_is_asked_for(options: dict[str, Any]) -> None:
    assert not isinstance(params_of(**options).mode, AssistanceOptions)


def test_an_unknown_assistant_is_not_found() -> None:
    for name in (None, "", "draft"):
        check_assistant(name, "draft")
    with pytest.raises(NotFound) as refused:
        check_assistant("other", "draft")
    assert refused.value.field == "config.assistant_model"


def test_guidance_of_one_is_off() -> None:
    assert params_of(guidance_scale=1.0, negative_prompt_ids=(3,)).guidance == NO_GUIDANCE
    assert params_of(guidance_scale=0.0).guidance == GuidanceOptions(0.0, ())
    assert params_of(guidance_scale=1.5, negative_prompt_ids=(3,)).guidance == GuidanceOptions(1.5, (3,))
    assert params_of(guidance_scale=1.5, dola_layers="low").guidance.is_on


def test_a_negative_prompt_takes_room_too() -> None:
    params = params_of(guidance_scale=1.5, negative_prompt_ids=(3,) * 60, max_new_tokens=1000)
    assert params.max_new_tokens == 40


def test_dola_names_layers() -> None:
    params = params_of(dola_layers="low", repetition_penalty=1.2)
    assert (params.generation_mode, params.mode) == (GenerationMode.DOLA_GENERATION, DolaOptions((0, 2)))
    assert params_of(dola_layers=(1, 3), repetition_penalty=1.2).mode == DolaOptions((1, 3))
    with pytest.raises(InvalidArgument) as refused:
        params_of(dola_layers=(6,))
    assert refused.value.field == "config.dola_layers"


def test_the_models_file_chooses_a_mode_and_the_request_another() -> None:
    beams = file_of(num_beams=3, length_penalty=0.5)
    assert resolved(beams).params.generation_mode is GenerationMode.BEAM_SEARCH
    assert resolved(beams, num_beams=1).params.generation_mode is GenerationMode.GREEDY_SEARCH
    assert resolved(beams, num_beams=1).warnings == ()
    guided = file_of(guidance_scale=1.5)
    assert resolved(guided, num_beams=2).params.guidance.scale == 1.5
    with pytest.raises(InvalidArgument):
        resolved(guided, num_beams=2, num_beam_groups=2, diversity_penalty=0.5)
    assert resolved(guided, num_beams=2, guidance_scale=1.0).params.guidance == NO_GUIDANCE


PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 4,
    "bad_words_ids": ((1,), (2, 3)),
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "forced_bos_token_id": 0,
    "exponential_decay_length_penalty": (5, 1.01),
    "suppress_tokens": (3,),
    "begin_suppress_tokens": (4, 5),
    "frequency_penalty": -0.1,
    "presence_penalty": 0.1,
    "allowed_token_trie": ((1, 2), (1, 3)),
}


def test_every_processor_arrives_from_the_request_and_from_the_models_file() -> None:
    for params in (params_of(**PROCESSORS), resolved(file_of(**PROCESSORS)).params):
        assert {name: getattr(params, name) for name in PROCESSORS} == PROCESSORS


def test_processors_that_change_their_form() -> None:
    watermark = WatermarkOptions(0.3)
    params = params_of(
        sequence_bias=(((1, 2), -0.5),),
        forced_eos_token_id=(1, 2),
        allowed_token_ids=(3, 4, 3),
        watermarking_config=watermark,
        logit_bias={3: -1.5},
    )
    assert params.sequence_bias == {(1, 2): -0.5}
    assert params.forced_eos_token_ids == (1, 2)
    assert params.allowed_token_ids == frozenset({3, 4})
    assert params.watermark == watermark
    assert params.logit_bias == {3: -1.5}


WARPERS = {
    "top_h": 0.4, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.2, "min_p": 0.05, "top_p": 0.8,
    "top_n_sigma": 1.5,
}  # fmt: skip


def test_every_warper_arrives_while_sampling_only() -> None:
    sampled, greedy = params_of(do_sample=True, **WARPERS), params_of(**WARPERS)
    assert {name: getattr(sampled, name) for name in WARPERS} == WARPERS
    plain = SamplingParams(5)
    assert all(getattr(greedy, name) == getattr(plain, name) for name in WARPERS)


def test_what_is_unset_switches_nothing_on() -> None:
    assert params_of(seed=3) == SamplingParams(5, seed=3)


def test_token_healing_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidArgument) as refused:
        params_of(token_healing=True)
    assert refused.value.field == "config.token_healing"
    tokenized = ModelFacts("tiny", 100, 100, has_token_bytes=True)
    assert resolved(model=tokenized, token_healing=True).params.token_healing


def test_a_grammar_goes_with_beams_but_not_with_forced_words() -> None:
    grammar = ConstraintSpec(ConstraintKind.REGEX, "a+")
    assert resolved(constraint=grammar, num_beams=2).params.mode == BeamOptions(2)
    with pytest.raises(InvalidArgument) as refused:
        resolved(file_of(force_words_ids=(((1,),),), num_beams=2), constraint=grammar)
    assert refused.value.field == "constraint"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"guidance_scale": 1.5, "negative_prompt_ids": (1,) * 30},
    ],
)
def test_an_unset_length_is_the_longest_that_the_pool_holds(options: dict[str, Any]) -> None:
    config = EngineConfig(num_blocks=40, block_size=4, max_context_tokens=120)
    model = ModelFacts("tiny", 100, 120, max_output_tokens=lambda *of: most_output_tokens(config, MODES, *of))
    params = resolved(model=model, max_new_tokens=None, **options).params
    longest = params.max_new_tokens
    assert MODES.blocks_needed(config, params, 10, longest) <= 40
    room = 120 - max(10, len(options.get("negative_prompt_ids", ())))
    assert longest == room or MODES.blocks_needed(config, params, 10, longest + 1) > 40

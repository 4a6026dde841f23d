"""Cases of the golden files as data, in the words of generate()'s keyword arguments.

A string "@0.4" stands for the id at 40 % of what the same call answers without the arguments that hold such strings:
ids that a random model is sure to meet, so that ends, bans and biases do something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

QWEN2, LLAMA, DEEP, DEEP_TIED = "golden-qwen2", "golden-llama", "golden-deep", "golden-deep-tied"
PROMPTS: Mapping[str, list[int]] = {
    "one": [11],
    "four": [150, 9, 33, 101],
    "six": [5, 9, 33, 101, 7, 250],
    "nine": [44, 45, 46, 200, 201, 117, 3, 299, 18],
    "loop": [60, 61, 62, 63, 60, 61, 62, 63, 60, 61],
    "long": [(37 * i + 11) % 300 + 4 for i in range(33)],
}


class GoldenCase(NamedTuple):
    """One call of generate()."""

    mode: str
    model: str
    prompt: str
    # Of generate(); lists where it has lists, and `constraints` as {"phrasal": ids} or {"disjunctive": [ids, …]}.
    kwargs: Mapping[str, Any]


# Every processor that changes what a search finds, by itself and some together.
PROCESSORS: tuple[Mapping[str, Any], ...] = (
    {"repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [["@0.1"], ["@0.4", "@0.5"], ["@0.9", 17, 18]]},
    {"min_new_tokens": 7, "eos_token_id": ["@0.1", "@0.3", "@0.8"]},
    {"suppress_tokens": ["@0.3", "@0.6"], "begin_suppress_tokens": ["@0"]},
    {"sequence_bias": [[[45], 4.0], [[45, 208], 6.0], [["@0.5"], -3.0]]},
    {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    {"forced_eos_token_id": 1},
    {"exponential_decay_length_penalty": [4, 1.3], "eos_token_id": ["@0.9", 44]},
    {"min_length": 14, "eos_token_id": "@0.2", "repetition_penalty": 0.8},
    {"forced_bos_token_id": 17},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppress_tokens": ["@0.5"], "min_new_tokens": 6},
    {"renormalize_logits": True, "remove_invalid_values": True, "repetition_penalty": 1.1},
)
# 4.41.1 applies this penalty to the first beam only, whatever the others repeat (mended in 5.x).
BEAM_PROCESSORS = tuple(
    {name: value for name, value in one.items() if name != "encoder_repetition_penalty"} for one in PROCESSORS
)


def _vary(
    mode: str, models: tuple[str, ...], base: Mapping[str, Any], variants: Iterable[Mapping[str, Any]]
) -> Iterator[GoldenCase]:
    """Each variant over `base`, on models and prompts in turn."""
    prompts = [*PROMPTS]
    for number, variant in enumerate(variants):
        # One more step after each round, so that every model meets every prompt.
        prompt = prompts[(number + number // len(prompts)) % len(prompts)]
        yield GoldenCase(mode, models[number % len(models)], prompt, {**base, **variant})


def contrastive() -> Iterator[GoldenCase]:
    """Contrastive search."""
    base = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 20}
    variants: tuple[Mapping[str, Any], ...] = (
        {},
        {"penalty_alpha": 0.1, "top_k": 2},
        {"penalty_alpha": 0.9, "top_k": 8},
        {"penalty_alpha": 1.0, "top_k": 3},
        {"penalty_alpha": 0.4, "top_k": 17},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2, "top_k": 6},
        {"max_new_tokens": 60, "top_k": 5},
        {"eos_token_id": "@0.6"},
        {"eos_token_id": ["@0.9", "@0.3", 5, 6, 7], "top_k": 6},
    )
    yield from _vary("contrastive", (QWEN2, LLAMA, DEEP), base, (*variants, *PROCESSORS))


def group_beam() -> Iterator[GoldenCase]:
    """Diverse (group) beam search."""
    base = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "max_new_tokens": 12}
    ends = {"eos_token_id": "@0.5", "num_return_sequences": 4}
    variants: tuple[Mapping[str, Any], ...] = (
        {},
        {"num_return_sequences": 4},
        {"num_beam_groups": 4, "num_return_sequences": 4, "diversity_penalty": 0.3},
        {"num_beams": 6, "num_beam_groups": 3, "num_return_sequences": 6, "diversity_penalty": 5.0},
        {"num_beams": 6, "num_beam_groups": 2, "num_return_sequences": 3},
        {"num_beams": 3, "num_beam_groups": 3, "num_return_sequences": 2, "max_new_tokens": 30},
        {"max_new_tokens": 1, "num_return_sequences": 4},
        {**ends},
        {**ends, "early_stopping": True},
        {**ends, "early_stopping": "never"},
        {**ends, "length_penalty": 0.0},
        {**ends, "length_penalty": 2.0, "early_stopping": "never"},
        {**ends, "length_penalty": -1.0, "early_stopping": True},
        {**ends, "eos_token_id": "@0.2", "length_penalty": -1.0, "early_stopping": "never"},
        {**ends, "eos_token_id": "@0.8", "num_beams": 6, "num_beam_groups": 3, "early_stopping": True},
        {**ends, "eos_token_id": "@0.3", "max_new_tokens": 25, "diversity_penalty": 2.5},
        {**ends, "eos_token_id": ["@0.7", "@0.4"]},
        {**ends, "eos_token_id": "@0.9", "max_new_tokens": 25, "early_stopping": "never", "length_penalty": 0.5},
    )
    single = ({**one, "num_return_sequences": 2} for one in BEAM_PROCESSORS)
    yield from _vary("group_beam", (QWEN2, LLAMA), base, (*variants, *single))


def constrained_beam() -> Iterator[GoldenCase]:
    """Constrained beam search: phrases and alternatives."""
    base = {"num_beams": 4, "max_new_tokens": 14, "force_words_ids": [[45]]}
    ends = {"eos_token_id": "@0.5", "num_return_sequences": 3}
    either = [[30, 31], [77], [120, 121, 122]]
    variants: tuple[Mapping[str, Any], ...] = (
        {},
        {"force_words_ids": [[45, 208, 61]]},
        {"force_words_ids": [[45, 208], [99]], "num_return_sequences": 2},
        {"force_words_ids": [[45], [46], [47]], "num_beams": 6, "num_return_sequences": 6},
        {"force_words_ids": [either]},
        {"force_words_ids": [either, [45, 46]], "num_return_sequences": 4},
        {"force_words_ids": [either, [[5, 6], [7, 8]]], "num_beams": 5},
        {"constraints": [{"phrasal": [10, 20, 10, 30]}], "force_words_ids": None},
        {"constraints": [{"phrasal": [10, 10]}, {"disjunctive": either}], "force_words_ids": None, "num_beams": 8},
        {"constraints": [{"disjunctive": [[1, 2, 3], [1, 2, 4]]}], "force_words_ids": None, "eos_token_id": 9},
        {"force_words_ids": [[45, 46, 47, 48, 49, 50]], "max_new_tokens": 4},
        {"force_words_ids": [[45, 46]], "max_new_tokens": 2, "num_beams": 2},
        {"force_words_ids": [[45, 46]], "num_beams": 2, "max_new_tokens": 30},
        {**ends},
        {**ends, "early_stopping": True},
        {**ends, "early_stopping": "never"},
        {**ends, "length_penalty": 0.0, "force_words_ids": [[99, 98], either]},
        {**ends, "length_penalty": 2.0, "early_stopping": True, "max_new_tokens": 24},
        {**ends, "length_penalty": -1.0, "eos_token_id": "@0.7"},
        {**ends, "eos_token_id": "@0.2", "num_beams": 8, "num_return_sequences": 8, "early_stopping": "never"},
        {**ends, "eos_token_id": "@0.9", "force_words_ids": [[45], [45, 46]]},
        {**ends, "eos_token_id": ["@0.3", "@0.6"], "max_new_tokens": 20},
        {**ends, "max_new_tokens": 40, "num_beams": 6, "force_words_ids": [[45, 208], either, [99]]},
        {**ends, "max_new_tokens": 40, "num_beams": 3, "length_penalty": 0.5, "early_stopping": "never"},
        {**ends, "force_words_ids": [["@0.2"]], "early_stopping": True},
        {**ends, "force_words_ids": [["@0.1", "@0.3"]], "eos_token_id": "@0.7", "max_new_tokens": 20},
        {**ends, "force_words_ids": [[["@0.2"], [99]], ["@0.4"]], "length_penalty": 0.0, "early_stopping": "never"},
        {**ends, "force_words_ids": [["@0"]], "eos_token_id": ["@0.4", "@0.6"], "num_beams": 6},
    )
    yield from _vary("constrained_beam", (QWEN2, LLAMA), base, (*variants, *BEAM_PROCESSORS))


def beam() -> Iterator[GoldenCase]:
    """Beam search as both releases have it: what the live comparison with 5.x is checked against."""
    base = {"num_beams": 4, "max_new_tokens": 12, "num_return_sequences": 2}
    variants: tuple[Mapping[str, Any], ...] = (
        {},
        {"num_beams": 2},
        {"num_beams": 7, "num_return_sequences": 7},
        {"max_new_tokens": 30},
    )
    yield from _vary("beam", (QWEN2, LLAMA), base, (*variants, *BEAM_PROCESSORS[:7]))


def guidance() -> Iterator[GoldenCase]:
    """Classifier-free guidance, greedy."""
    base = {"guidance_scale": 1.5, "max_new_tokens": 16}
    negative = {"negative_prompt_ids": [88, 89, 90, 91]}
    variants: tuple[Mapping[str, Any], ...] = (
        {},
        {"guidance_scale": 3.0},
        {"guidance_scale": 0.5},
        {**negative},
        {**negative, "guidance_scale": 4.0, "eos_token_id": ["@0.5", "@0.8"]},
        {"negative_prompt_ids": [5], "max_new_tokens": 40},
    )
    ours = ({**negative, **one} for one in PROCESSORS)
    yield from _vary("guidance", (QWEN2, LLAMA), base, (*variants, *ours))


def dola() -> Iterator[GoldenCase]:
    """DoLa, greedy."""
    base = {"dola_layers": "low", "max_new_tokens": 20}
    variants: tuple[Mapping[str, Any], ...] = (
        {},
        {"dola_layers": "high"},
        {"dola_layers": [2, 4, 6]},
        {"dola_layers": [5]},
        {"dola_layers": [0, 1, 2, 3, 4, 5, 6, 7]},
        {"dola_layers": "high", "max_new_tokens": 60},
        {"dola_layers": "high", "eos_token_id": ["@0.5", "@0.9"]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 40, "repetition_penalty": 1.2},
    )
    yield from _vary("dola", (DEEP, DEEP_TIED), base, (*variants, *PROCESSORS))


def all_cases() -> list[GoldenCase]:
    """Every case, by mode."""
    return [*contrastive(), *group_beam(), *constrained_beam(), *beam(), *guidance(), *dola()]

"""The matrix of generate(): mode x processors x ends x lengths x prompts, as data in generate()'s own words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

QWEN2, LLAMA, DEMO = "golden-qwen2", "golden-llama", "demo"
Arguments = Mapping[str, Any]

# Ids for the random models, text for the demo model. The loops are what prompt lookup is for.
RANDOM_PROMPTS: Mapping[str, list[int]] = {
    "one": [11],
    "four": [150, 9, 33, 101],
    "nine": [44, 45, 46, 200, 201, 117, 3, 299, 18],
    "loop": [60, 61, 62, 63, 60, 61, 62, 63, 60, 61],
    "long": [(37 * i + 11) % 300 + 4 for i in range(33)],
}
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
DEMO_PROMPTS: Mapping[str, str] = {
    "numbers": _TURN.format("Write the numbers from 3 to 15."),
    "sky": "Tell me about the sky.",
    "poem": _TURN.format("Write a poem about the sea."),
}


class Case(NamedTuple):
    """One request on one model. `prompt` names an entry of the prompts above."""

    group: str
    number: int
    model: str
    prompt: str
    arguments: Arguments

    @property
    def name(self) -> str:
        return f"{self.group}-{self.number:02d}-{self.model}-{self.prompt}"


def spread(group: str, models: tuple[str, ...], base: Arguments, variants: Iterable[Arguments]) -> list[Case]:
    """Make a case of each variant over `base`, on models and prompts in turn, and every third on a second model."""
    cases: list[Case] = []
    for number, variant in enumerate(variants):
        turns = range(number, number + 1 + (number % 3 == 0 and len(models) > 1))
        for turn in turns:
            model = models[turn % len(models)]
            prompts = [*(DEMO_PROMPTS if model == DEMO else RANDOM_PROMPTS)]
            # One more step after each round, so that every model meets every prompt.
            prompt = prompts[(turn + turn // len(prompts)) % len(prompts)]
            cases.append(Case(group, len(cases), model, prompt, {**base, **variant}))
    return cases


def over(base: Arguments, variants: Iterable[Arguments]) -> Iterator[Arguments]:
    """Yield each variant on top of `base`."""
    return ({**base, **variant} for variant in variants)


LENGTHS: tuple[Arguments, ...] = ({"max_new_tokens": 1}, {"max_new_tokens": 48}, {"max_length": 60})
ENDS: tuple[Arguments, ...] = (
    {"eos_token_id": "@0.5"},
    {"eos_token_id": ["@0.9", "@0.3", 7]},
    {"eos_token_id": ["@0.2", "@0.4"], "min_new_tokens": 10},
    {"eos_token_id": "@0.1", "min_length": 40},
    {"stop_token_ids": [["@0.6"]]},
    {"stop_token_ids": [["@0.4", "@0.45"], [5, 6, 7]], "eos_token_id": "@0.8"},
    {"eos_token_id": ["@0.6", 44], "exponential_decay_length_penalty": [3, 1.4]},
    {"eos_token_id": "@0.5", "exponential_decay_length_penalty": [0, 0.7]},
    {"eos_token_id": 12, "forced_eos_token_id": 12},
    {"eos_token_id": [12, 13], "forced_eos_token_id": [12, 13]},
)
PROCESSORS: tuple[Arguments, ...] = (
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 0.6},
    {"encoder_repetition_penalty": 1.8},
    {"encoder_repetition_penalty": 0.5, "encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [["@0.1"], ["@0.4", "@0.5"], [17, 18, 19]]},
    {"sequence_bias": [[[45], 3.0], [[45, 20], 5.0], [["@0.5"], -4.0], [["@0.2", "@0.25"], -9.0]]},
    {"suppress_tokens": ["@0.3", "@0.6"], "begin_suppress_tokens": ["@0"]},
    {"forced_bos_token_id": 17, "begin_suppress_tokens": ["@0", 30]},
    {"allowed_token_ids": [20, 21, 22, 40, 41, 42, 60, 61, 80]},
    {"allowed_token_trie": [[20, 21, 22, 23, 24, 25], [20, 30, 1], [21, 22, 23, 1]], "max_new_tokens": 3},
    {"renormalize_logits": True, "remove_invalid_values": True},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppress_tokens": ["@0.5"], "min_new_tokens": 6},
    {"bad_words_ids": [["@0.2"]], "sequence_bias": [[["@0.7"], 2.5]], "encoder_repetition_penalty": 1.1},
    {"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 15485863}},
    {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 4.0, "seeding_scheme": "selfhash", "context_width": 4}},
    {"repetition_penalty": 1.3, "watermarking_config": {"bias": 1.0, "context_width": 2}, "renormalize_logits": True},
)
# Where transformers' state of it, which follows rows, is that of one sequence.
SYNTHID: tuple[Arguments, ...] = (
    {"watermarking_config": {"ngram_len": 5, "keys": [654, 400, 836, 123, 340, 443, 597, 160, 57]}},
    {"watermarking_config": {"ngram_len": 2, "keys": [7, -3], "context_history_size": 3, "sampling_table_seed": 1}},
    {
        "watermarking_config": {"ngram_len": 3, "keys": [9, 8], "skip_first_ngram_calls": True},
        "repetition_penalty": 1.2,
    },
)
WARPERS: tuple[Arguments, ...] = (
    {},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 0, "temperature": 0.3},
    {"top_k": 0, "temperature": 2.5},
    {"top_k": 5},
    {"top_k": 300, "temperature": 0.9},
    {"top_k": 0, "top_p": 0.9},
    {"top_k": 0, "top_p": 0.2, "temperature": 0.7},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 0, "min_p": 0.05},
    {"top_k": 0, "min_p": 0.4, "temperature": 1.5},
    {"top_k": 0, "typical_p": 0.2},
    {"top_k": 0, "typical_p": 0.9},
    {"top_k": 0, "epsilon_cutoff": 0.005},
    {"top_k": 0, "eta_cutoff": 0.02},
    {"top_k": 0, "top_h": 0.4},
    {"top_k": 0, "top_h": 0.9, "temperature": 1.5},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.95, "epsilon_cutoff": 0.001, "eta_cutoff": 0.002},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
    {"top_k": 10, "renormalize_logits": True},
    {"top_k": 0, "top_p": 0.7, "renormalize_logits": True, "remove_invalid_values": True},
)
TEXT_STOPS: tuple[Arguments, ...] = (
    {"stop_strings": ["."]},
    {"stop_strings": ["ing", " is"], "max_new_tokens": 40},
    {"stop_strings": ["\n", "e"], "min_new_tokens": 5},
    {"stop_strings": [" a"], "repetition_penalty": 1.3},
)
MODELS = (QWEN2, LLAMA, DEMO)


def greedy() -> list[Case]:
    """Greedy search."""
    plain = spread("greedy", MODELS, {"max_new_tokens": 20}, ({}, *LENGTHS, *ENDS, *PROCESSORS, *SYNTHID))
    return plain + spread("greedy-text", (DEMO,), {"max_new_tokens": 24}, TEXT_STOPS)


def sample() -> list[Case]:
    """Multinomial sampling."""
    base = {"do_sample": True, "max_new_tokens": 12, "seed": 11}
    warped = spread("sample", MODELS, base, (*WARPERS, *over({"top_k": 0}, PROCESSORS), *ENDS[:8]))
    several = over({"num_return_sequences": 3}, ({}, {"repetition_penalty": 1.4}, {"eos_token_id": ["@0.3", 40]}))
    text = spread("sample-text", (DEMO,), {**base, "max_new_tokens": 24, "temperature": 1.4}, TEXT_STOPS)
    return warped + spread("sample-several", (QWEN2, LLAMA), base, several) + text


def beam() -> list[Case]:
    """Beam search: every early_stopping x length_penalty, numbers of beams and answers, processors."""
    base = {"num_beams": 4, "max_new_tokens": 14, "num_return_sequences": 2}
    endings = (
        {"early_stopping": stopping, "length_penalty": penalty, "eos_token_id": end, "num_return_sequences": 4}
        for stopping, penalty, end in product((False, True, "never"), (1.0, 0.0, 2.0, -1.0), ("@0.6", ["@0.2", "@0.8"]))
    )
    sizes: tuple[Arguments, ...] = (
        {"num_beams": 2, "num_return_sequences": 1},
        {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40},
        {"num_beams": 9, "num_return_sequences": 9},
        {"num_beams": 16, "num_return_sequences": 5, "max_new_tokens": 6},
        {"max_new_tokens": 1, "num_return_sequences": 4},
        {"num_beams": 6, "eos_token_id": "@0.9", "max_new_tokens": 30, "early_stopping": "never"},
        {"num_beams": 5, "stop_token_ids": [["@0.5"]]},
    )
    cases = spread("beam", MODELS, base, (*sizes, *endings, *PROCESSORS))
    return cases + spread("beam-text", (DEMO,), {**base, "max_new_tokens": 20}, TEXT_STOPS[:3])


def beam_sample() -> list[Case]:
    """Beam sampling: the scores of every row are compared, the ids are drawn by other numbers."""
    base = {"do_sample": True, "num_beams": 3, "max_new_tokens": 8, "seed": 5}
    some = (*WARPERS[1::2], *PROCESSORS[::2], *ENDS[:4], {"early_stopping": True, "num_return_sequences": 3})
    return spread("beam-sample", MODELS, base, some)


def prompt_lookup() -> list[Case]:
    """Greedy assisted by the prompt."""
    base = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 30}
    sizes: tuple[Arguments, ...] = (
        {},
        {"prompt_lookup_num_tokens": 1},
        {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
        {"max_matching_ngram_size": 1},
    )
    return spread("prompt-lookup", MODELS, base, (*sizes, *ENDS[:4], *PROCESSORS[:4], *PROCESSORS[12:15]))


def draft() -> list[Case]:
    """Greedy assisted by a draft model: the model itself, one that is near to it, another."""
    base = {"assistant_model": "near", "max_new_tokens": 24}
    sizes: tuple[Arguments, ...] = (
        {},
        {"assistant_model": "same"},
        {"assistant_model": "other"},
        {"num_assistant_tokens": 3},
        {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": "heuristic"},
        {"num_assistant_tokens_schedule": "heuristic_transient", "assistant_confidence_threshold": 0.0},
        {"assistant_model": "same", "assistant_confidence_threshold": 0.9, "num_assistant_tokens": 5},
    )
    return spread("draft", (QWEN2,), base, (*sizes, *ENDS[:4], *PROCESSORS[:4], *PROCESSORS[6:9]))


NEGATIVE = {"negative_prompt_ids": [88, 89, 90, 91]}
GUIDANCE: tuple[Arguments, ...] = (
    {},
    {"guidance_scale": 0.4},
    {**NEGATIVE},
    {**NEGATIVE, "guidance_scale": 4.0},
    {"negative_prompt_ids": [5], "max_new_tokens": 40},
    {**NEGATIVE, "eos_token_id": ["@0.4", "@0.8"]},
)


def greedy_guidance() -> list[Case]:
    """Classifier-free guidance, greedy."""
    return spread("guidance", MODELS, {"guidance_scale": 1.8, "max_new_tokens": 14}, (*GUIDANCE, *PROCESSORS[:8]))


def sampled_guidance() -> list[Case]:
    """Classifier-free guidance, sampling."""
    base = {"guidance_scale": 1.8, "do_sample": True, "seed": 3, "max_new_tokens": 10}
    return spread("guidance-sample", MODELS, base, (*GUIDANCE[:4], *WARPERS[7:9]))

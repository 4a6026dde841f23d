"""Requests of every mode with options drawn at random, as generate()'s arguments. A seed is always set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

Arguments = dict[str, Any]
Draw = Callable[[Random], Arguments]

HEADS: tuple[list[int], ...] = ([], [11, 12, 13, 14, 15, 16, 17, 18, 19], [*range(100, 120)])
# So many ids that random text meets one now and then.
ENDS = [7, 40, 93, 117, 160, 211, 250, 276, 300]
_WARPERS: tuple[Arguments, ...] = (
    {"top_k": 0},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 0, "min_p": 0.02},
    {"top_k": 0, "typical_p": 0.8},
    {"top_k": 0, "epsilon_cutoff": 0.002, "eta_cutoff": 0.002},
    {"top_k": 0, "top_h": 0.6},
    {"top_k": 0, "top_n_sigma": 1.2, "xtc_probability": 0.5, "xtc_threshold": 0.02},
)
_ENDINGS: tuple[Arguments, ...] = (
    {"ignore_eos": True},
    {"eos_token_id": ENDS},
    {"eos_token_id": ENDS, "min_new_tokens": 4},
    {"eos_token_id": [*range(3, 60)], "exponential_decay_length_penalty": [2, 1.2]},
    {"eos_token_id": 7, "stop_token_ids": [[40], [93], [211], [300, 12]]},
)
_PROCESSORS: tuple[Arguments, ...] = (
    {},
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[45, 46], [117], [211]], "suppress_tokens": [216]},
    {"sequence_bias": [[[45], 2.5], [[45, 208], 5.0]]},
    {"encoder_repetition_penalty": 1.3},
    {"watermarking_config": {"greenlist_ratio": 0.4, "bias": 1.5}},
    {"watermarking_config": {"ngram_len": 3, "keys": [5, 6, 7], "context_history_size": 4}},
    {"top_logprobs": 3},
    {"cache_salt": "tenant"},
)


def mixed_request(random: Random, extra: Mapping[str, Draw]) -> Arguments:
    """Make {"prompt": ids, and arguments} of a mode below or of the `extra` ones, which are tried twice as often."""
    mode = random.choice([*MODES, *MODES, *extra, *extra, *extra, *extra])
    options = {**MODES, **extra}[mode](random)
    prompt = random.choice(HEADS) + [random.randint(3, 300) for _ in range(random.randint(1, 9))]
    lengths = {"max_new_tokens": random.randint(1, 18), "seed": random.randint(0, 1 << 40)}
    return {"prompt": prompt, **lengths, **random.choice(_ENDINGS), **random.choice(_PROCESSORS), **options}


def _sampling(random: Random) -> Arguments:
    return {"do_sample": True, "temperature": random.choice([0.7, 1.0, 1.6]), **random.choice(_WARPERS)}


def _several(random: Random) -> Arguments:
    """Sampling, one sequence or more."""
    return {"num_return_sequences": random.choice([1, 2, 3]), **_sampling(random)}


def _sometimes(random: Random, draw: Draw) -> Arguments:
    return draw(random) if random.random() < 0.5 else {}


def _stopping(random: Random) -> Arguments:
    return {
        "length_penalty": random.choice([0.0, 1.0, 2.0]),
        "early_stopping": random.choice([False, True, "never"]),
        "num_return_sequences": random.choice([1, 2, 3]),
    }


def _beam(random: Random) -> Arguments:
    return {"num_beams": random.choice([3, 4]), **_stopping(random)}


def _beam_sample(random: Random) -> Arguments:
    return {"num_beams": 3, **_stopping(random), **_sampling(random)}


def _group(random: Random) -> Arguments:
    groups = random.choice([2, 4])
    return {"num_beams": 4, "num_beam_groups": groups, "diversity_penalty": 0.7, **_stopping(random)}


def _constrained(random: Random) -> Arguments:
    words = random.choice([[[45]], [[45, 46], [99]], [[[30, 31], [77]]]])
    return {"num_beams": 3, "force_words_ids": words, **_stopping(random)}


def _contrastive(random: Random) -> Arguments:
    return {"penalty_alpha": random.choice([0.3, 0.6]), "top_k": random.randint(2, 5)}


def _lookup(random: Random) -> Arguments:
    # Repetition is wanted, so that something is found.
    drafts = {"prompt_lookup_num_tokens": random.randint(1, 6), "repetition_penalty": 0.5}
    return {**drafts, **_sometimes(random, _several)}


def _texts(random: Random) -> Arguments:
    """Drafts from past outputs, from guesses, or from both and the prompt."""
    memory = {"ngram_memory_num_tokens": random.randint(1, 8), "ngram_memory_match": random.randint(2, 4)}
    ahead = {
        "lookahead_window": random.randint(1, 8),
        "lookahead_ngram_size": random.randint(2, 5),
        "lookahead_guesses": random.randint(1, 4),
    }
    drafts = random.choice([memory, ahead, {**memory, **ahead, "prompt_lookup_num_tokens": random.randint(1, 4)}])
    return {"repetition_penalty": 0.5, **drafts, **_sometimes(random, _several)}


def _dola(random: Random) -> Arguments:
    # Its filter may keep but one token, and a ban on that one leaves nothing.
    return {"dola_layers": random.choice(["low", "high"]), "no_repeat_ngram_size": None}


def _guided(random: Random) -> Arguments:
    negative = random.choice([{}, {"negative_prompt_ids": [88, 89, 90, 91, 92, 93]}])
    return {"guidance_scale": random.choice([0.5, 1.7, 3.0]), **negative, **_sometimes(random, _several)}


MODES: Mapping[str, Draw] = {
    "greedy": lambda random: {},
    "sample": _several,
    "beam": _beam,
    "beam-sample": _beam_sample,
    "group": _group,
    "constrained": _constrained,
    "contrastive": _contrastive,
    "lookup": _lookup,
    "texts": _texts,
    "dola": _dola,
    "guided": _guided,
}


def drafted(name: str) -> Draw:
    """Assisted by the draft model of this name."""

    def draw(random: Random) -> Arguments:
        return {
            "assistant_model": name,
            "num_assistant_tokens": random.randint(1, 6),
            "num_assistant_tokens_schedule": random.choice(["constant", "heuristic", "heuristic_transient"]),
            "assistant_confidence_threshold": random.choice([0.0, 0.4]),
            **_sometimes(random, _several),
        }

    return draw


def drafted_request(random: Random, name: str, prompts: Sequence[Sequence[int]]) -> Arguments:
    """Make a request of greedy search or sampling, drafted by `name`, about one of the prompts or about random ids."""
    own = list(random.choice(prompts)) if random.random() < 0.8 else [random.randint(3, 300) for _ in range(9)]
    text = random.choice([{}, {}, {"constraint": random.choice(_CONSTRAINTS)}, {"stop_strings": ["e", "ing"]}])
    ending = {"eos_token_id": None} if "constraint" in text else random.choice([*_ENDINGS, {}, {}, {}])
    return {
        "prompt": own,
        "max_new_tokens": random.randint(1, 40),
        "seed": random.randint(0, 1 << 40),
        **drafted(name)(random),
        **ending,
        **random.choice([*_PROCESSORS, {}, {}, {}]),
        **text,
    }


_CONSTRAINTS: tuple[Arguments, ...] = (
    {"regex": "[a-z]{2,6}( [0-9]+)*"},
    {"choice": {"values": ["Paris", "Pisa", "London", "a longer choice than those"]}},
    {"json_schema": json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})},
    {"json_object": True},
)


def structured(name: str) -> Draw:
    """Structured output in every mode that has it; `name` is the draft model's."""
    modes: tuple[Draw, ...] = (
        *(
            MODES[mode]
            for mode in ("greedy", "sample", "beam", "beam-sample", "group", "contrastive", "lookup", "texts")
        ),
        MODES["guided"],
        drafted(name),
    )
    # The model's own end: ENDS are letters and digits here, and some texts cannot be spelled without.
    return lambda random: {
        "constraint": random.choice(_CONSTRAINTS),
        **random.choice(modes)(random),
        "eos_token_id": None,
    }


def textual(random: Random) -> Arguments:
    """Make a request of a mode that needs a tokenizer."""
    mode = random.choice([MODES["greedy"], MODES["sample"], MODES["beam"], MODES["guided"]])
    return {**random.choice([{"stop_strings": ["e", "in"]}, {"token_healing": True}]), **mode(random)}

"""generation_config.json: known fields become defaults, the rest is reported, broken files stop the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.common.errors import StartupError
from penstock.generation.core.decoding_mode import AssistantSchedule, EarlyStopping, WatermarkOptions
from penstock.generation.options.hf_json import LoadedDefaults, load_defaults


def load(folder: Path, values: Any) -> LoadedDefaults:
    (folder / "generation_config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return load_defaults(folder, (5,), vocab_size=200_000)


def test_qwens_file_is_taken_whole(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        {
            "bos_token_id": 151643,
            "pad_token_id": 151643,
            "do_sample": True,
            "eos_token_id": [151645, 151643],
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "transformers_version": "4.37.0",
        },
    )
    options = loaded.defaults.options
    assert dict(options.items()) == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    }
    assert loaded.defaults.eos_token_ids == (151645, 151643)
    assert loaded.defaults.pad_token_id == 151643
    assert loaded.ignored == ()


def test_no_file_means_the_models_own_end_ids(tmp_path: Path) -> None:
    loaded = load_defaults(tmp_path, (5,), vocab_size=10)
    assert loaded.defaults.eos_token_ids == (5,)
    assert loaded.ignored == ()


@pytest.mark.parametrize(
    ("value", "ids", "sequences"),
    [(3, (3,), ()), ([3, 4, 3], (3, 4), ()), ([3, [4], [5, 6]], (3, 4), ((5, 6),)), (None, (5,), ())],
)
def test_end_ids_may_be_an_id_a_list_or_sequences(
    tmp_path: Path, value: Any, ids: tuple[int, ...], sequences: tuple[tuple[int, ...], ...]
) -> None:
    defaults = load(tmp_path, {"eos_token_id": value}).defaults
    assert (defaults.eos_token_ids, defaults.eos_sequences) == (ids, sequences)


def test_what_is_not_honoured_is_named_unless_it_is_off(tmp_path: Path) -> None:
    values = {
        "assistant_early_exit": 4,
        "constraints": [{}],
        "made_up": 0.9,
        "speculation_type": None,
        "use_mtp": False,
    }
    assert load(tmp_path, values).ignored == ("assistant_early_exit", "constraints", "made_up")
    assert load(tmp_path, {"num_beams": 1, "use_cache": True, "suppress_tokens": []}).ignored == ()
    # No request draws by it.
    assert load(tmp_path, {"seed": 7}).ignored == ("seed",)
    assert load(tmp_path, {"seed": 7}).defaults.options.seed is None


def test_every_option_of_the_file_is_taken(tmp_path: Path) -> None:
    values = {
        "num_beams": 4,
        "early_stopping": "never",
        "length_penalty": 0,
        "typical_p": 0.9,
        "force_words_ids": [[1, 2], [[3], [4, 5]]],
        "bad_words_ids": [[6], [7, 8]],
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 9,
        "exponential_decay_length_penalty": [5, 1.01],
        "suppress_tokens": [10, 11],
        "begin_suppress_tokens": None,
        "sequence_bias": [[[1, 2], -1.5], [[3], 2]],
        "watermarking_config": {"greenlist_ratio": 0.5, "seeding_scheme": "selfhash"},
        "num_assistant_tokens_schedule": "heuristic",
        "dola_layers": None,
        "guidance_scale": 1.0,
        "token_healing": False,
    }
    loaded = load(tmp_path, values)
    assert dict(loaded.defaults.options.items()) == {
        "num_beams": 4,
        "early_stopping": EarlyStopping.NEVER,
        "length_penalty": 0.0,
        "typical_p": 0.9,
        "force_words_ids": (((1, 2),), ((3,), (4, 5))),
        "bad_words_ids": ((6,), (7, 8)),
        "forced_bos_token_id": 0,
        "forced_eos_token_id": (9,),
        "exponential_decay_length_penalty": (5, 1.01),
        "suppress_tokens": (10, 11),
        "sequence_bias": (((1, 2), -1.5), ((3,), 2.0)),
        "watermarking_config": WatermarkOptions(greenlist_ratio=0.5, seeding_scheme="selfhash"),
        "num_assistant_tokens_schedule": AssistantSchedule.HEURISTIC,
        "guidance_scale": 1.0,
        "token_healing": False,
    }
    assert loaded.ignored == ()


@pytest.mark.parametrize(
    "values",
    [
        "{",
        "[]",
        {"top_p": 3},
        {"temperature": "hot"},
        {"do_sample": 1},
        {"top_k": 1.5},
        {"eos_token_id": "x"},
        {"eos_token_id": 200_000},
        {"stop_strings": [""]},
        {"temperature": 10**400},
        {"top_k": float("nan")},
        {"num_beams": -1},
        {"bad_words_ids": [1]},
        {"bad_words_ids": [[]]},
        {"suppress_tokens": [200_000]},
        {"suppress_tokens": 5},
        {"forced_eos_token_id": [True]},
        {"force_words_ids": [5]},
        {"sequence_bias": {"(1,)": 2.0}},
        {"sequence_bias": [[[1], 2.0], [[1], 3.0]]},
        {"exponential_decay_length_penalty": [1]},
        {"early_stopping": "always"},
        {"early_stopping": 1},
        {"num_assistant_tokens_schedule": "sometimes"},
        {"watermarking_config": {"ngram_len": 5}},
        {"watermarking_config": {"greenlist_ratio": 2}},
        {"watermarking_config": {"keys": [1]}},
        {"watermarking_config": {"ngram_len": 5, "keys": [True]}},
        {"watermarking_config": {"ngram_len": 5, "keys": [1], "debug_mode": True}},
        {"dola_layers": "middle"},
        {"dola_layers": [1]},
        # Combinations that no request could run with.
        {"num_beams": 4, "num_return_sequences": 5},
        {"num_return_sequences": 2, "penalty_alpha": 0.6, "top_k": 4},
        {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 0.5},
        {"num_beams": 4, "num_beam_groups": 2},
        {"force_words_ids": [[1]]},
        {"suppress_tokens": [7], "forced_bos_token_id": 7},
        {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "guidance_scale": 1.5},
    ],
)
def test_a_broken_file_stops_the_start_and_names_the_model(tmp_path: Path, values: Any) -> None:
    with pytest.raises(StartupError) as broken:
        load(tmp_path, values)
    assert broken.value.flag == "MODEL"
    assert "generation_config.json" in broken.value.message

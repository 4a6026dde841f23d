"""generation_config.json: known fields become defaults, the rest is reported, broken files stop the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.common.errors import StartupError
from penstock.generation.defaults import LoadedDefaults, load_defaults


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
    assert (options.do_sample, options.temperature, options.top_k, options.top_p) == (True, 0.7, 20, 0.8)
    assert options.repetition_penalty == 1.05
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
        "num_beams": 4,
        "typical_p": 0.9,
        "no_repeat_ngram_size": 0,
        "forced_bos_token_id": 0,
        "penalty_alpha": None,
    }
    assert load(tmp_path, values).ignored == ("forced_bos_token_id", "num_beams", "typical_p")
    assert load(tmp_path, {"num_beams": 1, "use_cache": True, "suppress_tokens": []}).ignored == ()


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
    ],
)
def test_a_broken_file_stops_the_start_and_names_the_model(tmp_path: Path, values: Any) -> None:
    with pytest.raises(StartupError) as broken:
        load(tmp_path, values)
    assert broken.value.flag == "MODEL"
    assert "generation_config.json" in broken.value.message

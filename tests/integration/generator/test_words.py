"""Errors of Generator are in our own words and name what the caller wrote: every option, and MindIE's operations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.engine.local_generators import mindie_generator
from factories.servers.generation import text_checkpoint
from factories.wire.foreign_words import FOREIGN, WRONG_VALUES, Odd
from penstock import BatchFailed
from penstock.common.errors import PenstockError
from penstock.compat.mindie import GeneratorTorch
from penstock.generator.call_arguments import GenerateArguments
from penstock_client import GenerationOptions

# Arguments of generate() that are no options, and options that Generator reads itself: the client's sweep has the rest.
OWN = {
    "logits_processor",
    "stopping_criteria",
    "assistant_model",
    "eos_token_id",
    "negative_prompt_ids",
    "inputs_embeds",
}
NAMES = sorted((set(GenerateArguments.__optional_keys__) - set(GenerationOptions.__optional_keys__)) | OWN)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorTorch]:
    with mindie_generator(text_checkpoint(tmp_path_factory.mktemp("model"))) as made:
        yield made


def words_of(call: Callable[[], Any]) -> str | None:
    """Return the words that refuse a call; None: it is answered."""
    try:
        call()
    except (TypeError, ValueError, PenstockError, BatchFailed) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_no_error_of_an_option_is_in_foreign_words(generator: GeneratorTorch, name: str) -> None:
    for value in WRONG_VALUES:
        prompt = "" if name in ("input_ids", "inputs", "inputs_embeds") else [5, 6]
        options = {"max_new_tokens": 1, name: value}
        words = words_of(lambda: generator.generate(prompt, **options))  # noqa: B023
        assert words is None or not FOREIGN.search(words), (value, words)


OPERATIONS: list[tuple[str, Callable[[GeneratorTorch, Any], Any], tuple[str, ...]]] = [
    ("prompt", lambda g, v: g.generate(v, max_new_tokens=1), ()),
    ("generation_config", lambda g, v: g.generate("x", v, max_new_tokens=1), ()),
    ("max_prefill_tokens", lambda g, v: g.warm_up(max_prefill_tokens=v), ("prefill_tokens",)),
    ("max_seq_len", lambda g, v: g.warm_up(max_seq_len=v), ("sequence_tokens",)),
    ("max_input_len", lambda g, v: g.warm_up(max_input_len=v), ("input_tokens",)),
    ("max_iter_times", lambda g, v: g.warm_up(max_iter_times=v), ("iterations",)),
    ("sequence_ids", lambda g, v: g.clear_cache(v), ("live_request_ids",)),
    ("model_input", lambda g, v: g.forward(v), ()),
    ("metadata", lambda g, v: g.sample([[0.0] * 8], v), ()),
    ("pairs", lambda g, v: g.copy_blocks(v), ()),
    ("swaps", lambda g, v: g.swap_cache(v), ()),
    ("blocks", lambda g, v: g.claim_blocks(v), ()),
    ("items", lambda g, v: g.score(v), ()),
    ("texts", lambda g, v: g.embed(v), ()),
    ("text", lambda g, v: g.tokenizer.encode(v), ()),
    ("token_ids", lambda g, v: g.tokenizer.decode(v), ()),
]


@pytest.mark.parametrize(("name", "call", "others"), OPERATIONS, ids=[one[0] for one in OPERATIONS])
def test_no_error_of_an_operation_is_in_foreign_words_or_names(
    generator: GeneratorTorch, name: str, call: Callable[[GeneratorTorch, Any], Any], others: tuple[str, ...]
) -> None:
    refused = 0
    for value in WRONG_VALUES:
        words = words_of(lambda: call(generator, value))  # noqa: B023
        if words is None:
            continue
        refused += 1
        assert not FOREIGN.search(words), (value, words)
        for other in others:
            assert not re.search(rf"(?<![a-z_]){other}", words), (value, words)
    assert refused


def test_names_are_those_of_the_arguments(generator: GeneratorTorch) -> None:
    cases = {
        "max_prefill_tokens: must be at least 1": lambda: generator.warm_up(0),
        "prompt: must be a text, a list of ids, from 0 to 4294967295, or": lambda: generator.generate([-1]),
        "max_iter_times: must be at least 1": lambda: generator.warm_up(max_iter_times=0),
        "sequence_ids[0]: no live request has this id": lambda: generator.clear_cache(["unknown"]),
        "model_input: has no field 'input'": lambda: generator.forward({"input": 1}),
        "position_ids: is missing": lambda: generator.forward({"input_ids": [1], "block_tables": [[0]]}),
        "model_input: must be a ModelInput or a mapping": lambda: generator.forward(Odd()),  # type: ignore[arg-type]
    }
    for words, call in cases.items():
        found = words_of(call)
        assert found is not None
        assert found.startswith(words), found


def test_a_mapping_stands_for_a_model_input(generator: GeneratorTorch) -> None:
    rows = {"input_ids": [5, 6], "position_ids": [0, 1], "block_tables": [[0]], "context_length": [2]}
    try:
        assert tuple(generator.forward(rows).shape) == (1, generator._engine.loaded.served.vocab_size)
    finally:
        generator.release_blocks()


def test_a_tokenizer_that_is_switched_off_is_why_stop_strings_are_refused(tmp_path: Path) -> None:
    with mindie_generator(text_checkpoint(tmp_path), load_tokenizer=False) as made:
        found = words_of(lambda: made.generate([5], stop_strings=["x"], max_new_tokens=1))
    assert found is not None
    assert "load_tokenizer" in found
    assert "tokenizer.json" not in found

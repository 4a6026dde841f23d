"""Commands of the recipes' page start and answer, each on a small model of the configuration that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.models.byte_tokenizer import save_byte_tokenizer
from factories.models.model_types import tiny_of
from factories.servers import stack
from penstock_client import Client

from tools.recipes import recipes

RECIPES = recipes()
# The page leaves these to the machine.
FLAGS = ("--kv-memory", "16MiB", "--threads", "1")


@pytest.mark.thinned(10)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_starts_and_answers(name: str, tmp_path: Path) -> None:
    tiny_of(tmp_path, RECIPES[name]["config"], vocab_size=256)
    save_byte_tokenizer(tmp_path)
    # As it is: without a word transformers makes the family's own of it.
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    process = stack.start(None, str(tmp_path), *RECIPES[name]["flags"].split(), *FLAGS)
    try:
        process.wait_ready()
        with Client(process.address) as client:
            answer = client.generate("Hello", max_new_tokens=4, ignore_eos=True, do_sample=False)
            assert answer.usage.completion_tokens == 4
    finally:
        process.kill()

"""MindIE's forms of requests: best_of, ends that are runs of ids, in requests and in the model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories.engine.local_generators import local_generator
from factories.servers.generation import text_checkpoint
from penstock import Generator
from penstock.common.errors import NotFound

PROMPT = [5, 6, 7]
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 11, "max_new_tokens": 6, "ignore_eos": True}


def test_best_of_returns_the_likeliest(generator: Generator) -> None:
    every = generator.generate(PROMPT, num_return_sequences=6, top_logprobs=0, **SAMPLED)
    means = {tuple(one.token_ids): sum(entry.logprob for entry in one.logprobs) / 6 for one in every.choices}
    wanted = sorted(means, key=lambda ids: means[ids], reverse=True)
    one = generator.generate(PROMPT, best_of=6, **SAMPLED)
    two = generator.generate([PROMPT], best_of=6, num_return_sequences=2, **SAMPLED)[0]
    assert [tuple(choice.token_ids) for choice in one.choices] == wanted[:1]
    assert [tuple(choice.token_ids) for choice in two.choices] == wanted[:2]
    assert [choice.index for choice in two.choices] == [0, 1]
    # All of them were made.
    assert one.usage.completion_tokens == 36
    for wrong, words in (
        ({"best_of": 1, "num_return_sequences": 2}, "at least num_return_sequences"),
        ({"best_of": 0}, "whole number of at least 1"),
        ({"best_of": 3, "num_beams": 3}, "beams are ranked"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            generator.generate(PROMPT, **wrong, max_new_tokens=1)
    with pytest.raises(ValueError, match="needs whole answers"):
        generator.stream(PROMPT, best_of=2, **SAMPLED)


def test_an_end_may_be_a_run_of_ids(generator: Generator) -> None:
    whole = generator.generate(PROMPT, max_new_tokens=12, do_sample=False, ignore_eos=True).token_ids
    run, single = whole[3:5], whole[8]
    answer = generator.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=[run])
    assert answer.token_ids == whole[:5]
    assert answer.finish_reason == "STOP_TOKEN"
    other = [whole[1], whole[3]]
    answer = generator.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=[other, single])
    assert answer.token_ids == whole[: whole.index(single) + 1]
    assert answer.finish_reason == "STOP_EOS"
    assert (
        generator.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=[[single]]).token_ids
        == answer.token_ids
    )
    with pytest.raises(ValueError, match="no empty run"):
        generator.generate(PROMPT, eos_token_id=[[]])


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_models_file_may_have_runs_of_ids_as_ends(generator: Generator, tmp_path: Path, file: str) -> None:
    whole = generator.generate(PROMPT, max_new_tokens=12, do_sample=False, ignore_eos=True).token_ids
    folder = text_checkpoint(tmp_path)
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, "eos_token_id": [[2], whole[3:5]]}))
    if file == "config.json":
        (folder / "generation_config.json").unlink(missing_ok=True)
    with local_generator(folder) as made:
        answer = made.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert answer.token_ids == whole[:5]


def test_the_draft_model_that_is_served_is_told(generator: Generator, folder: Path) -> None:
    with pytest.raises(NotFound, match=r"no draft model of this name is served .*none is, see --assistant-model"):
        generator.generate(PROMPT, assistant_model="another")
    with local_generator(folder, assistant_model=str(folder)) as made:
        name = made._engine.loaded.served.assistant_model
        with pytest.raises(NotFound, match=f"no draft model of this name is served .*'{name}' is"):
            made.generate(PROMPT, assistant_model="another")

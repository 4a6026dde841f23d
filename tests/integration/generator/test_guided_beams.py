"""guidance_scale with beams: generate()'s own ids and scores, the unconditional branch of a place included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.servers.generation import text_checkpoint
from penstock import Generator
from penstock.common.errors import InvalidArgument
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scale", [1.5, 3.0, 0.4])
@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}])
def test_guided_beams_are_those_of_transformers(
    generator: Generator, folder: Path, scale: float, beams: int, more: dict[str, Any]
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 12, "do_sample": False, **more}
    for prompt in ([5, 6, 7, 8], list(range(40, 70)), [9]):
        theirs = model.generate(
            torch.tensor([prompt]),
            guidance_scale=scale,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **options,
        )
        answer = generator.generate(prompt, guidance_scale=scale, output_scores=True, **options)
        for row, choice in enumerate(answer.choices):
            count = len(choice.token_ids)
            assert choice.token_ids == theirs.sequences[row, len(prompt) : len(prompt) + count].tolist()
            assert choice.cumulative_logprob == pytest.approx(float(theirs.sequences_scores[row]), abs=1e-3)
            assert choice.beam_indices == theirs.beam_indices[row, :count].tolist()
    generator._engine.call(generator._engine.core.hub.wait_idle())
    assert generator._engine.on_engine(lambda engine: engine.load().kv_blocks_used) == 0


def test_guided_beams_do_not_depend_on_the_batch(generator: Generator) -> None:
    options: dict[str, Any] = {"guidance_scale": 2.0, "num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    alone = [generator.generate([start, 6], **options).token_ids for start in (5, 15, 25)]
    together = generator.generate([[start, 6] for start in (5, 15, 25)], **options)
    assert [one.token_ids for one in together] == alone
    sampling = {**options, "do_sample": True, "seed": 4}
    sampled = [generator.generate([start, 6], **sampling).token_ids for start in (5, 15, 25)]
    together = generator.generate([[start, 6] for start in (5, 15, 25)], **sampling)
    assert [one.token_ids for one in together] == sampled
    # Another seed and another scale draw otherwise.
    for more in ({"seed": 5}, {"guidance_scale": 9.0}):
        assert [generator.generate([start, 6], **{**sampling, **more}).token_ids for start in (5, 15, 25)] != sampled


@pytest.mark.parametrize("negative", [[7, 8, 9], [40], list(range(50, 80))])
def test_a_negative_text_leads_beams_as_in_transformers(
    generator: Generator, folder: Path, negative: list[int]
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options: dict[str, Any] = {"guidance_scale": 3.0, "max_new_tokens": 8, "do_sample": False}
    differs = False
    for prompt in ([5, 6], [15, 6, 30], [9]):
        for beams in (1, 3):
            theirs = model.generate(
                torch.tensor([prompt]),
                # One row a beam: transformers does not spread it.
                negative_prompt_ids=torch.tensor([negative] * beams),
                num_beams=beams,
                pad_token_id=0,
                **options,
            )
            ours = generator.generate(prompt, negative_prompt_ids=negative, num_beams=beams, **options).token_ids
            assert ours == theirs[0, len(prompt) : len(prompt) + len(ours)].tolist()
            differs |= ours != generator.generate(prompt, num_beams=beams, **options).token_ids
    assert differs


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"num_beams": 2, "force_words_ids": [[5]]}],
)
def test_modes_of_older_releases_are_not_guided(generator: Generator, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"guidance_scale: must be 1 with groups of beams, forced words"):
        generator.generate([5, 6], guidance_scale=2.0, max_new_tokens=2, do_sample=False, **options)

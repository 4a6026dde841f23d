"""Scores, hidden states and attentions with beams: those of transformers, by its beam_indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories.servers.generation import text_checkpoint
from penstock import Generator
from transformers import AutoModelForCausalLM

PROMPT = list(range(20, 33))
EVERYTHING: dict[str, Any] = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
CASES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4, "num_return_sequences": 4},
    "penalties": {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.3, "length_penalty": 2.0},
    "early end": {
        "num_beams": 3,
        "num_return_sequences": 3,
        "early_stopping": True,
        "eos_token_id": [*range(1, 4096, 70)],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", CASES)
def test_tensors_with_beams_are_those_of_transformers(generator: Generator, model: Any, name: str) -> None:
    options = {"max_new_tokens": 7, "do_sample": False, **CASES[name]}
    theirs = model.generate(
        torch.tensor([PROMPT]), **options, **EVERYTHING, return_dict_in_generate=True, pad_token_id=0
    )
    transitions = model.compute_transition_scores(
        theirs.sequences, theirs.scores, theirs.beam_indices, normalize_logits=False
    )
    answer = generator.generate(PROMPT, **options, **EVERYTHING)
    assert len(answer.choices) == CASES[name]["num_return_sequences"]
    for row, choice in enumerate(answer.choices):
        count = len(choice.token_ids)
        assert choice.token_ids == theirs.sequences[row, len(PROMPT) : len(PROMPT) + count].tolist()
        assert choice.beam_indices == theirs.beam_indices[row, :count].tolist()
        assert np.allclose(choice.transition_scores(), transitions[row, :count].tolist(), atol=1e-4)
        total = sum(choice.transition_scores()) / count ** options.get("length_penalty", 1.0)
        assert choice.cumulative_logprob == pytest.approx(total, abs=1e-4)
        for step, (beam, tensors) in enumerate(zip(choice.beam_indices, choice.tensors, strict=True)):
            assert tensors.scores is not None
            assert tensors.logits is not None
            assert tensors.hidden_states is not None
            assert tensors.attentions is not None
            assert np.allclose(tensors.scores.values, theirs.scores[step][beam], atol=1e-3)
            assert np.allclose(tensors.logits.values, theirs.logits[step][beam], atol=1e-3)
            hidden = torch.stack([layer[beam, -1] for layer in theirs.hidden_states[step]])
            assert np.allclose(tensors.hidden_states.values, hidden, atol=1e-3)
            attention = torch.stack([layer[beam, :, -1] for layer in theirs.attentions[step]])
            assert np.allclose(tensors.attentions.values, attention, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 3, "do_sample": True, "seed": 3},
        {"num_beams": 3, "force_words_ids": [[7]]},
        {"num_beams": 3, "output_logits": True, "tensor_steps": [1, 2]},
    ],
)
def test_every_beam_mode_tells_its_scores(generator: Generator, options: dict[str, Any]) -> None:
    asked = {"max_new_tokens": 6, "do_sample": False, "ignore_eos": True, "output_scores": True, **options}
    asked["num_return_sequences"] = asked["num_beams"]
    answer = generator.generate(PROMPT, **asked)
    for choice in answer.choices:
        if "tensor_steps" in options:
            assert [one.scores is not None for one in choice.tensors] == [place in (1, 2) for place in range(6)]
            continue
        assert all(0 <= beam < asked["num_beams"] for beam in choice.beam_indices)
        assert choice.beam_indices[0] % 2 == 0
        total = sum(choice.transition_scores()) / len(choice.token_ids)
        assert choice.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_scores_of_sampling_become_log_probabilities(generator: Generator) -> None:
    answer = generator.generate(
        PROMPT, max_new_tokens=6, do_sample=True, temperature=0.7, top_k=20, output_scores=True, top_logprobs=0, seed=1
    )
    found = answer.choices[0].transition_scores(normalize_logits=True)
    assert np.allclose(found, [one.logprob for one in answer.choices[0].logprobs], atol=1e-5)
    with pytest.raises(ValueError, match="output_scores=True"):
        generator.generate(PROMPT, max_new_tokens=1, output_logits=True).choices[0].transition_scores()

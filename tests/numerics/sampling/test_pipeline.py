"""Processed scores against those of transformers' generate, step by step on the same ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories.engine.sequences import params, sequence
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.run_kernels import new_sampler
from transformers import PreTrainedModel

EOS = (1, 7)
STEPS = 12
# Names are GenerationConfig's and SamplingParams' alike.
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "min_new_tokens": 5},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "top_k": 20},
    {"do_sample": True, "top_p": 0.8},
    {"do_sample": True, "top_p": 0.99, "temperature": 1.7},
    {"do_sample": True, "min_p": 0.05},
    {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"do_sample": True, "top_k": 50, "top_p": 0.5, "min_p": 0.02, "min_new_tokens": 8, "repetition_penalty": 1.2},
    {"do_sample": True, "temperature": 0.1, "top_k": 1},
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    torch.set_num_threads(1)
    return reference_model(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=8))


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_scores_of_every_step_equal_generates(reference: PreTrainedModel, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    prompts = torch.randint(8, VOCAB_SIZE, (3, 10))
    # top_k=0 unless named: generate's own default is 50.
    generated = reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        eos_token_id=list(EOS),
        pad_token_id=0,
        max_new_tokens=STEPS,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **({"do_sample": False, "top_k": 0 if options.get("do_sample") else None} | options),
    )
    batch = [sequence(row, params(eos_token_ids=EOS, **options), seq_id=i) for i, row in enumerate(prompts.tolist())]
    sampler = new_sampler()
    for step, (logits, expected) in enumerate(zip(generated.logits, generated.scores, strict=True)):
        torch.testing.assert_close(sampler.processed_scores(logits, batch), expected, atol=1e-5, rtol=1e-6)
        for one, token_id in zip(batch, generated.sequences[:, 10 + step].tolist(), strict=True):
            one.token_ids.append(token_id)

"""Batches of sequences with any mix of sampling options, and the tokens that the definition draws for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from factories.engine.sequences import params, sequence
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.sampling.ops.counted_draws import stream_keys, uniforms
from torch import Tensor

# Not a multiple of any block size, and large enough that candidates come from block maxima.
VOCAB = 40_009


def logits(rows: int, seed: int, vocab: int = VOCAB, scale: float = 4.0) -> Tensor:
    """Make logits of bf16 values, as of a bf16 model: full of ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(torch.bfloat16).float()


def random_params(rng: random.Random, **fixed: Any) -> SamplingParams:
    """Make a random mix of options, each on or off."""
    options: dict[str, Any] = {
        "do_sample": rng.random() < 0.85,
        "temperature": rng.choice([1.0, 0.7, 0.2, 1.9, 0.0]),
        "top_k": rng.choice([0, 0, 1, 5, 20, 40, 50, 150, 400]),
        "top_p": rng.choice([1.0, 0.95, 0.8, 0.1, 0.0]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.5]),
        "repetition_penalty": rng.choice([1.0, 1.05, 1.5]),
        "frequency_penalty": rng.choice([0.0, 0.4]),
        "presence_penalty": rng.choice([0.0, -0.7]),
        "logit_bias": rng.choice([{}, {3: 5.0, 17: -100.0}]),
        "min_new_tokens": rng.choice([0, 3]),
        "eos_token_ids": (2, 9),
        "seed": rng.randrange(2**63),
        "top_logprobs": rng.choice([None, 0, 3, 20]),
    }
    return params(**(options | fixed))


def random_batch(rng: random.Random, rows: int, **fixed: Any) -> list[Sequence]:
    """Make sequences with prompts and outputs of some tokens."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    return [
        sequence(ids(rng.randrange(1, 50)), random_params(rng, **fixed), seq_id=row, output=ids(rng.randrange(6)))
        for row in range(rows)
    ]


def expected_draw(scores_V: Tensor, one: Sequence) -> int:
    """Draw by the inverse CDF over the processed probabilities in the order of token ids."""
    if not one.params.do_sample or one.params.temperature == 0.0:
        return int(scores_V.argmax())
    cumulative = scores_V.double().softmax(-1).cumsum(-1)
    keys = stream_keys(np.array([one.seed], np.uint64))
    uniform = float(uniforms(keys, np.array([one.num_output_tokens], np.uint64))[0])
    return int((cumulative <= uniform * cumulative[-1]).sum())

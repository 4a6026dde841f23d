"""A hundred updates of real weights: answers are those of the weights, and memory does not grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from factories.engine.local_generators import local_generator
from penstock import Generator
from penstock.generation.host.memory import resident_bytes
from safetensors.torch import load_file

from benchmarks.checkpoints import CACHE
from benchmarks.real_models import bf16_folder

HOME = Path(os.environ.get("PENSTOCK_REAL_MODELS") or CACHE)
MODEL = "smollm2-135m"
UPDATES, FIRST = 100, 20
# Of a model of 270 MB, with an embedding of 57 MB: an update that stays in memory is seen.
GROWTH_BYTES = 48 << 20
PROMPT = [504, 2731, 282, 260, 9420, 5240, 5889]

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (HOME / "real" / f"{MODEL}.gguf").is_file(), reason="the model is not in the cache: `make real` fetches it"
    ),
]


def changed(weights: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """Return the embedding, the last layer and the last norm, multiplied."""
    kept = {name: one for name, one in weights.items() if ".layers.29." in name or ".layers." not in name}
    return {name: one * factor for name, one in kept.items()}


def series(generator: Generator, weights: dict[str, torch.Tensor], updates: int) -> list[int]:
    """Write two draws of weights in turns, hold answers to them, and return the memory after each update."""
    draws = [changed(weights, 1.0), changed(weights, 0.5)]
    answers: dict[int, list[int]] = {}
    sizes = []
    for number in range(updates):
        assert generator.write_weights(draws[number % 2]) == number + 1
        ids = generator.generate(PROMPT, max_new_tokens=8, do_sample=False, ignore_eos=True).token_ids
        assert answers.setdefault(number % 2, ids) == ids
        sizes.append(resident_bytes())
    return sizes


@pytest.mark.timeout(0)  # a minute of processor time, however busy the machine is
def test_updates_of_real_weights_take_no_memory() -> None:
    folder = bf16_folder(MODEL, HOME)
    weights = load_file(folder / "model.safetensors")
    with local_generator(
        folder, load_tokenizer=False, dtype="bfloat16", kernels="auto", kv_memory="64MiB"
    ) as generator:
        sizes = series(generator, weights, FIRST + UPDATES)
    assert sizes[-1] - sizes[FIRST - 1] < GROWTH_BYTES, [size >> 20 for size in sizes[::10]]

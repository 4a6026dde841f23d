"""Models of transformers at widths that no other width follows from, made at random each run: generate()'s ids, alone,
in a full engine, and by beams."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from factories.models.model_types import (
    check_ids,
    odd_sizes,
    tiny_model_type,
)
from factories.models.run_kernels import cpu_device
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.models.registry import load_model


@pytest.mark.parametrize("number", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
@pytest.mark.parametrize("model_type", ["bloom", "stablelm"])
def test_a_type_of_odd_widths_gives_the_ids_of_generate(tmp_path: Path, model_type: str, number: int) -> None:
    torch.set_num_threads(1)
    seed = random.randrange(1 << 30)
    sizes = odd_sizes(random.Random(seed), model_type)
    # Shown where the test fails.
    print(f"seed {seed}: {sizes}")
    tiny_model_type(tmp_path, model_type, seed=seed, **sizes)
    model = load_model(tmp_path, dtype="float32", device=cpu_device(), route=ModelRoute("fallback"))
    check_ids(tmp_path, model, new_tokens=24)

"""Models of transformers at sizes that no other size follows from, made at random each run: generate()'s ids, alone, in
a full engine with chunks, preemption and cached prefixes, by beams, and of several drawn sequences.

PENSTOCK_ODD_SEED: the seed of a configuration that failed, which the test has told.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from factories.models.model_types import (
    FURTHER,
    FURTHER_STATEFUL,
    OLD,
    SEEING,
    STATEFUL,
    USUAL,
    check_ids,
    model_types,
    tiny_model_type,
)
from factories.models.odd_sizes import odd_sizes
from factories.models.run_kernels import cpu_device
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.models.registry import FAMILIES, load_model

TYPES = sorted({*USUAL, *SEEING, *STATEFUL, *FURTHER_STATEFUL, *FURTHER, *OLD, *FAMILIES})
# Native types by both routes, where transformers knows them by their name.
CASES = [*((one, "auto") for one in TYPES), *((one, "fallback") for one in sorted(FAMILIES.keys() & model_types()))]
# Configurations of each case in the whole run, others each time; cases of the ordinary run, which has the same each
# time: what a new configuration shows is not a fault of the change that is tested.
EACH, FEW = 3, 3


def check(folder: Path, model_type: str, route: str, seed: int | None = None) -> None:
    torch.set_num_threads(1)
    seed = int(os.environ.get("PENSTOCK_ODD_SEED") or (random.randrange(1 << 30) if seed is None else seed))
    sizes = odd_sizes(random.Random(seed), model_type)
    # Shown where the test fails.
    print(f"{model_type} by route {route}, PENSTOCK_ODD_SEED={seed}: {sizes}")
    tiny_model_type(folder, model_type, seed=seed, **sizes)
    check_ids(folder, load_model(folder, dtype="float32", device=cpu_device(), route=ModelRoute(route)))


@pytest.mark.parametrize("number", range(FEW))
def test_some_type_at_odd_sizes_gives_the_ids_of_generate(tmp_path: Path, number: int) -> None:
    model_type, route = random.Random(number).choice(CASES[number::FEW])
    check(tmp_path, model_type, route, number)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "route"), CASES)
@pytest.mark.parametrize("number", range(EACH))
def test_each_type_at_odd_sizes_gives_the_ids_of_generate(
    tmp_path: Path, number: int, model_type: str, route: str
) -> None:
    check(tmp_path, model_type, route)

"""Models by transformers' own modules give the ids of its generate(), alone and in a full, mixed engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories.models.model_types import FURTHER, USUAL, check_ids, tiny_model_type
from factories.models.run_kernels import cpu_device
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.models.registry import load_model

FALLBACK = ModelRoute("fallback")


def check(folder: Path, model_type: str) -> None:
    torch.set_num_threads(1)
    tiny_model_type(folder, model_type)
    check_ids(folder, load_model(folder, dtype="float32", device=cpu_device(), route=FALLBACK))


@pytest.mark.parametrize("model_type", USUAL)
def test_a_model_type_gives_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FURTHER)
def test_further_types_give_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type)

"""A model family that is one `Family` and one line of registration: transformers' ids, and the native route."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, reference_model
from factories.models.paged import PagedDriver
from factories.models.run_kernels import cpu_device
from factories.models.toy_family import toy_checkpoint, toy_family
from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.models.registry import load_model, read_model_config

NEW_TOKENS = 32


def test_its_ids_equal_generate(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = random.Random(3)
    prompts = [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 30, 64)]
    with toy_family():
        folder = toy_checkpoint(tmp_path, seed=5)
        assert read_model_config(folder).route == "native"
        model = load_model(folder, device=cpu_device())
        found = PagedDriver(model, num_blocks=200, block_size=5).greedy(prompts, NEW_TOKENS, max_chunk=11)
        reference = reference_model(folder)
    reference.generation_config.eos_token_id = None
    for prompt, ids in zip(prompts, found, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert ids == expected[0, len(prompt) :].tolist()


def test_without_its_line_it_is_refused_by_name(tmp_path: Path) -> None:
    with toy_family():
        folder = toy_checkpoint(tmp_path)
    with pytest.raises(StartupError, match="'toy' is not native"):
        read_model_config(folder, ModelRoute(route="native"))

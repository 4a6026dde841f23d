"""A reload of a checkpoint that carries a layer for drafts reads that layer again, and drafts by it."""

from __future__ import annotations

from pathlib import Path

import torch
from factories.engine.modes import load_service
from factories.models.carried_heads import WEIGHTS, Carried
from factories.models.run_kernels import KERNELS
from penstock.common.checkpoint import OWN_HEAD
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.runner.head_drafter import HeadDrafter
from penstock.generation.startup.load_again import load_again
from safetensors.torch import load_file, save_file


def test_the_layer_that_a_checkpoint_carries_is_read_again(tmp_path: Path) -> None:
    folder = Carried(tmp_path, "deepseek_v3").folder
    loaded = load_service(folder, draft_head=OWN_HEAD)
    assert loaded.engine.draft is not None
    drafter = loaded.engine.draft.drafter
    assert isinstance(drafter, HeadDrafter)
    before = drafter.head
    tensors = load_file(folder / WEIGHTS)
    for name in tensors:
        tensors[name] *= 1.5
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = GenerationServiceConfig(
        model=str(folder), draft_head=OWN_HEAD, kernels=KERNELS, threads=1, dtype="float32", kv_memory="1MiB"
    )
    fresh = load_again(config, loaded, lambda *_: None)
    # The old one drafts until the new weights are in place.
    assert drafter.head is before
    fresh.engine.follow(fresh.weights.model)
    assert drafter.head is fresh.weights.head is not before
    expected = load_service(folder, draft_head=OWN_HEAD).weights.head
    assert expected is not None
    rows = torch.randn(3, before.config.hidden_size)
    assert torch.equal(drafter.head.scores(rows), expected.scores(rows))
    assert not torch.equal(before.scores(rows), expected.scores(rows))

"""Experts in forms of their own give what transformers' modules give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.model_types import reference_of, tiny_model_type
from factories.models.run_kernels import KERNELS, cpu_device
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.models.expert_module import ExpertModule
from penstock.generation.models.foreign_experts import JetMoeExperts, Llama4Experts, LongcatExperts
from penstock.generation.models.registry import load_model
from penstock.generation.models.transformers_fallback import TransformersModel
from torch import Tensor

KINDS = {
    "dbrx": ("DbrxFFN", "experts", ExpertModule),
    "jetmoe": ("JetMoeMoE", "", JetMoeExperts),
    "llama4_text": ("Llama4TextMoe", "", Llama4Experts),
    "longcat_flash": ("LongcatFlashMoE", "experts", LongcatExperts),
}


def both(folder: Path, model_type: str, name: str) -> list[tuple[Any, Any]]:
    """Return the modules of a class in transformers' model, each with ours in its place."""
    tiny_model_type(folder, model_type, **({"num_experts_per_tok": 2} if model_type == "llama4_text" else {}))
    model = load_model(folder, dtype="float32", device=cpu_device(), route=ModelRoute("fallback"))
    assert isinstance(model, TransformersModel)
    places = dict(model.causal.named_modules())
    return [
        (module, places[place])
        for place, module in reference_of(folder).named_modules()
        if type(module).__name__ == name
    ]


def rows(count: int) -> Tensor:
    """Return rows (1, count, hidden)."""
    return torch.randn(1, count, 64, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("model_type", KINDS)
def test_a_mixture_gives_the_numbers_of_transformers(tmp_path: Path, model_type: str) -> None:
    name, part, kind = KINDS[model_type]
    pairs = both(tmp_path, model_type, name)
    assert pairs
    for theirs, ours in pairs:
        if KERNELS == "native":
            assert isinstance(getattr(ours, part) if part else ours, kind)
        for count in (1, 7, 40):
            x = rows(count)
            with torch.inference_mode():
                wanted, found = (one[0] if isinstance(one, tuple) else one for one in (theirs(x), ours(x)))
            assert torch.allclose(found.view(wanted.shape), wanted, rtol=1e-4, atol=1e-4)


def test_mixed_attention_gives_the_numbers_of_transformers_with_few_rows_and_many(tmp_path: Path) -> None:
    for theirs, ours in both(tmp_path, "jetmoe", "JetMoeMoA"):
        for count in (1, 5, 64, 65):
            x = rows(count)
            with torch.inference_mode():
                (queries, _, chosen), (wanted, _, wanted_chosen) = ours.map(x), theirs.map(x)
                assert torch.allclose(queries, wanted, rtol=1e-4, atol=1e-4)
                assert (len(chosen) == 2) == (count <= 64)
                mixed, wanted_mixed = ours.reduce(queries, chosen), theirs.reduce(wanted, wanted_chosen)
            assert torch.allclose(mixed, wanted_mixed, rtol=1e-4, atol=1e-4)

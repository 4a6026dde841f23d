"""Recurrent modules of transformers scan prompts in short chunks within a step, with their own results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories.models.model_types import tiny_config
from penstock.generation.models import module_scans
from penstock.generation.models.module_scans import chunk_length, selective_scan, shorten_scans
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mamba import modeling_mamba


def test_a_chunk_is_no_longer_than_its_rows_need() -> None:
    assert [chunk_length(rows, 256) for rows in (1, 2, 5, 24, 32, 33, 1024, 1025)] == [1, 2, 8, 32, 32, 32, 32, 64]
    # Where the module's own is short, it stays.
    assert chunk_length(500, 16) == 16


@pytest.mark.parametrize("rows", [1, 5, 64, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("together", [1 << 17, 200])
def test_rows_one_by_one_give_what_transformers_gives(
    rows: int, dtype: torch.dtype, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_scans, "_TOGETHER", together)
    draw = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    tensors = {
        "hidden_states": random(2, 6, rows).to(dtype),
        "dt": random(2, 6, rows).to(dtype),
        "A": -random(6, 4).abs(),
        "B": random(2, 4, rows).to(dtype),
        "C": random(2, 4, rows).to(dtype),
        "D": random(6),
        "z": random(2, 6, rows).to(dtype),
        "delta_bias": random(6),
    }
    named: dict[str, Any] = {**tensors, "delta_softplus": True, "return_last_state": True}
    for own, theirs in zip(selective_scan(**named), modeling_mamba.mamba_selective_scan(**named), strict=True):
        assert own.dtype is theirs.dtype
        assert own.shape == theirs.shape
        # Theirs rounds each row's states first.
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
        assert (own.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max()


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "kimi_linear", "mamba"])
def test_only_a_step_has_short_chunks(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(tiny_config(model_type)).eval()
    lengths: list[int] = []

    def counted(rows: int, own: int) -> int:
        lengths.append(rows)
        return chunk_length(rows, own)

    ids = torch.arange(3, 73).unsqueeze(0)
    with torch.inference_mode():
        wanted = model(input_ids=ids, use_cache=False).logits
        shorten_scans(model)
        monkeypatch.setattr(module_scans, "chunk_length", counted)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
        assert not lengths
        monkeypatch.setattr(module_scans, "step_of_thread", SimpleNamespace)
        found = model(input_ids=ids, use_cache=False).logits
    assert (set(lengths) == {70}) == (model_type != "mamba")
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, wanted)

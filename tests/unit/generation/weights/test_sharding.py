"""Parts of a checkpoint: those of all ranks are the whole, however the file's rows come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.errors import StartupError
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.models.registry import read_model_config
from penstock.generation.weights.checkpoint import Checkpoint
from penstock.generation.weights.sharding import Shard, ShardedSource
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, layer_linears, layer_prefix
from torch import Tensor


class SmallPieces:
    """A checkpoint of which pieces have a few rows only."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._checkpoint, self._rows = Checkpoint(folder), rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._checkpoint

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        whole = torch.cat(list(self._checkpoint.pieces(tensor)))
        yield from whole.split(max(1, self._rows // multiple) * multiple)


def parts(source: Any, config: ModelConfig, count: int, name: str) -> list[Tensor]:
    """Tensor of each rank."""
    ranks = [ShardedSource(source, config, Shard(rank, count)) for rank in range(count)]
    found = []
    for rank in ranks:
        is_vector = len(rank.shape(name)) == 1
        found.append(rank.take(name) if is_vector else torch.cat(list(rank.pieces(name))))
        assert tuple(found[-1].shape) == rank.shape(name)
    return found


@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_parts_are_the_whole(tmp_path: Path, family: str, rows: int) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    folder = tiny_checkpoint(tmp_path / "model", family, num_attention_heads=4, num_key_value_heads=2, **biases)
    config, source = read_model_config(folder), SmallPieces(folder, rows)
    qkv, output, gated, down = layer_linears(config)
    prefix = layer_prefix(0)
    stored = {name: torch.cat(list(Checkpoint(folder).pieces(name))) for name in Checkpoint(folder).names}
    heads = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    inner = config.intermediate_size, config.intermediate_size
    for linear, sizes in ((qkv, heads), (gated, inner)):
        for end in (".weight", ".bias") if linear.has_bias else (".weight",):
            names = [f"{prefix}{part}{end}" for part in linear.parts]
            whole = torch.cat([stored[name] for name in names])
            of_rank = [
                torch.cat(joint) for joint in zip(*(parts(source, config, 2, name) for name in names), strict=True)
            ]
            # Each rank has a part of q, then one of k, then one of v.
            each = [part.split([size // 2 for size in sizes]) for part in of_rank]
            assert torch.equal(torch.cat([piece for pieces in zip(*each, strict=True) for piece in pieces]), whole)
    for linear in (output, down):
        (part,) = linear.parts
        assert torch.equal(
            torch.cat(parts(source, config, 2, f"{prefix}{part}.weight"), dim=1), stored[f"{prefix}{part}.weight"]
        )
        if linear.has_bias:
            assert torch.equal(sum(parts(source, config, 2, f"{prefix}{part}.bias")), stored[f"{prefix}{part}.bias"])
    head = stored.get(LM_HEAD, stored[EMBEDDING])
    assert torch.equal(torch.cat(parts(source, config, 3, LM_HEAD)), head)
    assert all(torch.equal(one, stored[EMBEDDING]) for one in parts(source, config, 2, EMBEDDING))


def test_key_value_heads_that_are_too_few_are_there_several_times(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama", num_attention_heads=4, num_key_value_heads=2)
    config, name = read_model_config(folder), f"{layer_prefix(0)}self_attn.k_proj.weight"
    whole = torch.cat(list(Checkpoint(folder).pieces(name)))
    first, second = whole.chunk(2)
    found = parts(SmallPieces(folder, 5), config, 4, name)
    assert all(torch.equal(*pair) for pair in zip(found, (first, first, second, second), strict=True))
    assert Shard(0, 4).config(config).num_kv_heads == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, "6 heads cannot be shared out evenly"),
        ({"num_heads": 12, "num_kv_heads": 6}, "6 key/value heads can be neither"),
        ({"intermediate_size": 30}, "30 inner numbers"),
        ({"route": "fallback"}, "transformers' modules"),
        ({"has_sinks": True}, "sinks"),
        ({"qk_norm_is_whole": True}, "norms all heads together"),
    ],
)
def test_what_cannot_be_shared_out_names_the_flag(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    config = replace(read_model_config(tiny_checkpoint(tmp_path / "model")), num_heads=8, num_kv_heads=4)
    with pytest.raises(StartupError, match=fault) as caught:
        Shard(0, 4).check(replace(config, **changes))
    assert caught.value.flag == "--tensor-parallel"

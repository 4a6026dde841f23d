"""Parts of a checkpoint: those of all ranks are the whole, however the file's rows come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories.models.adapters import LAYER_TARGETS, lora_folder, merged_weights
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.errors import StartupError
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.peft_folder import PeftFolder
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.layers.lora import SITES_A_LAYER, LoraPart
from penstock.generation.models.registry import read_model_config
from penstock.generation.weights.safetensors_folder import Checkpoint
from penstock.generation.weights.sharding import Shard, ShardedSource, adapter_copies, adapter_parts
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, layer_linears, layer_prefix
from safetensors.torch import save_file
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


def change_of(parts: Sequence[LoraPart], outputs: int) -> Tensor:
    """Sum of the products of matrices, in their places (outputs, inputs)."""
    change = torch.zeros(outputs, parts[0].a_RI.shape[1])
    for part in parts:
        change[part.first : part.first + part.b_OR.shape[0]] += part.scale * part.b_OR @ part.a_RI
    return change


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", LAYER_TARGETS),
        ("llama", ("k_proj", "up_proj")),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("glm4", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
)
def test_an_adapter_is_cut_as_the_weights_that_it_changes(
    tmp_path: Path, family: str, targets: tuple[str, ...], count: int
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 321, "tie_word_embeddings": False}
    folder = tiny_checkpoint(tmp_path / "model", family, **sizes)
    config = read_model_config(folder)
    lora = lora_folder(tmp_path / "lora", folder, targets=(*targets, "lm_head"))
    read: list[dict[int, list[LoraPart]]] = []
    whole: Any = SimpleNamespace(
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        head_site=config.num_layers * SITES_A_LAYER,
        head=None,
        adapter_copies=lambda site: adapter_copies(site, config, count),
        adapter_weights=lambda sites, embedding: read.append(sites),
    )
    files = PeftFolder(lora, None, whole, AdapterLimits())
    files.read()
    (sites,) = read
    # A checkpoint of what the adapter adds.
    checkpoint = Checkpoint(folder)
    stored = {name: torch.zeros(checkpoint.shape(name)) for name in checkpoint.names}
    save_file(stored | merged_weights(lora), folder / "model.safetensors", metadata={"format": "pt"})
    source = SmallPieces(folder, 7)
    linears = dict(enumerate(linear for layer in range(config.num_layers) for linear in layer_linears(config, layer)))
    bytes_of_all = 0
    for rank in range(count):
        cut = ShardedSource(source, config, Shard(rank, count))
        for site, parts in sites.items():
            names, order = ["lm_head"], None
            if site in linears:
                prefix, linear = layer_prefix(site // SITES_A_LAYER), linears[site]
                names = [f"{prefix}{name}" for name in linear.parts]
                order = layer_linears(Shard(rank, count).config(config))[site % SITES_A_LAYER].order
            expected = torch.cat([piece for name in names for piece in cut.pieces(f"{name}.weight")])
            if order is not None:
                expected = order.applied(expected)
            own = adapter_parts(site, parts, config, Shard(rank, count))
            torch.testing.assert_close(change_of(own, len(expected)), expected)
            for part in own:
                bytes_of_all += part.a_RI.nbytes + part.b_OR.nbytes
                # Nothing keeps more in memory.
                for matrix in (part.a_RI, part.b_OR):
                    assert matrix.is_contiguous()
                    assert matrix.untyped_storage().nbytes() == matrix.nbytes
    # Rows of B of key/value heads that are there twice are not counted.
    modules = 2 if {"v_proj", "qkv_proj"} & {*targets} else 1
    rows = modules * config.num_layers * config.num_kv_heads * config.head_dim if count == 4 else 0
    assert bytes_of_all == files.num_bytes + rows * files.rank * 4


def test_a_rank_without_outputs_has_no_part(tmp_path: Path) -> None:
    config = replace(read_model_config(tiny_checkpoint(tmp_path / "model")), vocab_size=5)
    part = LoraPart(0, torch.randn(2, 3), torch.randn(5, 2), 1.0)
    site = config.num_layers * SITES_A_LAYER
    found = [adapter_parts(site, [part], config, Shard(rank, 4)) for rank in range(4)]
    assert [[len(one.b_OR) for one in parts] for parts in found] == [[2], [2], [1], []]
    assert all(one.first == 0 for parts in found for one in parts)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_heads": 6, "num_kv_heads": 6}, "6 heads cannot be divided evenly"),
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

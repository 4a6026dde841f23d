"""DFlash folders in the published layout: what is loaded, what a block computes, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.block_heads import (
    BLOCK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    MASK,
    TAPS,
    ReferenceBlocks,
    dflash_config,
    dflash_folder,
    dflash_tensors,
)
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.run_kernels import cpu_device
from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.dflash import DFlashConfig, DFlashHead, load_dflash
from penstock.generation.models.hidden_keeper import LayerTaps
from torch import Tensor

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served") / "model", "llama", seed=3, num_hidden_layers=5)
    return folder, load_tiny(folder)


def load(folder: Path, model: CausalLM) -> DFlashHead:
    return load_dflash(folder, model, cpu_device(), "none")


def pool(num_layers: int, kv_heads: int, head_dim: int) -> KVCachePool:
    return KVCachePool(num_layers, 32, BLOCK_SIZE, kv_heads, head_dim, torch.float32, torch.device("cpu"))


def metadata_of(first: int, count: int) -> tuple[AttentionMetadata, Tensor]:
    """Return rows from `first` on, of one sequence in the pool's first blocks."""
    return AttentionMetadata.build([count], [first + count], torch.arange(32, dtype=torch.int32)[None], BLOCK_SIZE)


def test_a_block_is_what_the_authors_code_computes(served: tuple[Path, CausalLM], tmp_path: Path) -> None:
    folder, model = served
    tensors = dflash_tensors(dflash_config())
    head = load(dflash_folder(tmp_path, tensors), model)
    hf = reference_model(folder)
    ids = torch.randint(2, VOCAB_SIZE, (14,), generator=torch.Generator().manual_seed(1))
    block = torch.tensor([int(ids[-1]), *[MASK] * (BLOCK - 1)])
    with torch.inference_mode():
        states = hf(ids[None], output_hidden_states=True).hidden_states
        # The states after the layers, of all rows but the last token's.
        rows = torch.cat([states[tap + 1][0, :-1] for tap in TAPS], dim=-1)
        hidden = ReferenceBlocks(tensors).block(rows, hf.get_input_embeddings()(block))
        scores = hf.lm_head(hidden)
        config, taps = model.config, LayerTaps(head.taps)
        metadata, positions = metadata_of(0, len(ids))
        keys = pool(config.num_layers, config.num_kv_heads, config.head_dim)
        model.forward(ids, positions, metadata, keys, keeper=taps)
        assert taps.rows_TKI is not None
        features = head.features(taps.rows_TKI[:-1])
        kv = pool(LAYERS, KV_HEADS, HEAD_DIM)
        for first, count in ((0, 6), (6, 1), (7, 6)):
            metadata, positions = metadata_of(first, count)
            own = features[first : first + count]
            head.forward(own, own, positions, metadata, kv)
        # Rows of a block leave nothing behind.
        for _ in range(2):
            metadata, positions = metadata_of(len(ids) - 1, BLOCK)
            found = head.block(model.embed(block), positions, metadata, kv)
            torch.testing.assert_close(found, hidden, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(head.scores(found), scores, atol=1e-2, rtol=1e-3)


def test_scores_get_the_factor_and_the_soft_cap_that_the_folder_names(
    served: tuple[Path, CausalLM], tmp_path: Path
) -> None:
    plain = load(dflash_folder(tmp_path / "plain"), served[1])
    fields = {**dflash_config()["dflash_config"], "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    other = load(dflash_folder(tmp_path / "other", dflash_config=fields), served[1])
    rows = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(other.scores(rows), (plain.scores(rows) * 0.5 / 2.0).tanh() * 2.0)


def test_fields_stand_in_an_object_of_their_own_or_beside_it(tmp_path: Path) -> None:
    config = DFlashConfig(dflash_folder(tmp_path / "nested"))
    beside = {"dflash_config": {"target_layer_ids": list(TAPS)}, "mask_token_id": MASK}
    other = DFlashConfig(dflash_folder(tmp_path / "beside", **beside))
    for one in (config, other):
        assert (one.taps, one.mask_id, one.block_size) == ((1, 3), MASK, BLOCK)
        assert one.is_causal == (False, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel has convolutions"),
        ({"architectures": ["DSparkDraftModel"]}, "a Markov head"),
        ({"architectures": ["LlamaForCausalLM"]}, "supported is DFlashDraftModel"),
        ({"model_type": "laguna"}, "model_type 'laguna'"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is missing"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 5]}}, "has 5 layers"),
        ({"dflash_config": {"mask_token_id": VOCAB_SIZE, "target_layer_ids": [0, 1]}}, "mask_token_id"),
        (
            {"dflash_config": {"projector_type": "domino", "mask_token_id": 3, "target_layer_ids": [0]}},
            "projector_type",
        ),
        ({"block_size": 1}, "block_size must be a whole number of at least 2"),
        ({"hidden_size": 32}, "hidden states of 32 numbers"),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["sliding_attention"] * LAYERS,
                "is_causal": False,
            },
            "is_causal must be true where layers have a window",
        ),
    ],
)
def test_other_heads_are_refused_by_name(
    served: tuple[Path, CausalLM], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        load(dflash_folder(tmp_path, **changes), served[1])


def test_a_tensor_that_is_missing_is_named(served: tuple[Path, CausalLM], tmp_path: Path) -> None:
    tensors = dflash_tensors(dflash_config())
    del tensors["layers.1.mlp.up_proj.weight"]
    with pytest.raises(StartupError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(dflash_folder(tmp_path, tensors), served[1])

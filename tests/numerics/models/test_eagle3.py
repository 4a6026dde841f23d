"""EAGLE-3 folders in the published layouts: what is loaded, what it computes, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.draft_heads import (
    DRAFT_VOCAB,
    HIDDEN,
    ReferenceHead,
    eagle3_folder,
    eagle3_tensors,
)
from factories.models.run_kernels import cpu_device
from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.eagle3 import Eagle3Config, Eagle3Head, load_eagle3
from penstock.generation.models.hidden_keeper import LayerTaps
from torch import Tensor

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served") / "model", "llama", seed=3, num_hidden_layers=5)
    return folder, load_tiny(folder)


def load(folder: Path, served: CausalLM) -> Eagle3Head:
    return load_eagle3(folder, served.config, cpu_device(), served.dtype, "none")


def pool(num_layers: int, kv_heads: int, head_dim: int) -> KVCachePool:
    return KVCachePool(num_layers, 32, BLOCK_SIZE, kv_heads, head_dim, torch.float32, torch.device("cpu"))


def metadata_of(first: int, count: int) -> tuple[AttentionMetadata, Tensor]:
    """Return rows from `first` on, of one sequence in the pool's first blocks."""
    return AttentionMetadata.build([count], [first + count], torch.arange(32, dtype=torch.int32)[None], BLOCK_SIZE)


def tapped(model: CausalLM, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    config, taps = model.config, LayerTaps(layers)
    metadata, positions = metadata_of(0, len(ids))
    model.forward(ids, positions, metadata, pool(config.num_layers, config.num_kv_heads, config.head_dim), keeper=taps)
    assert taps.rows_TKI is not None
    return taps.rows_TKI


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_a_head_computes_what_its_paper_says_row_by_row_and_in_a_chain(
    served: tuple[Path, CausalLM], tmp_path: Path, norm_before_residual: bool
) -> None:
    folder, model = served
    tensors = eagle3_tensors()
    head = load(eagle3_folder(tmp_path, tensors, norm_before_residual=norm_before_residual), model)
    theirs = ReferenceHead(tensors, norm_before_residual=norm_before_residual)
    hf = reference_model(folder)
    ids = torch.randint(2, VOCAB_SIZE, (21,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = hf(ids[None], output_hidden_states=True).hidden_states
        embeds = hf.get_input_embeddings()(ids[1:])
        assert head.taps == (2, 2, 2)
        features = theirs.features(*(states[tap][0, :-1] for tap in head.taps))
        ours = head.features(tapped(model, ids, head.taps)[:-1])
        torch.testing.assert_close(ours, features, atol=2e-4, rtol=1e-3)
        kv = pool(1, head.config.num_kv_heads, head.config.head_dim)
        pieces = []
        for first, count in ((0, 7), (7, 1), (8, 12)):
            rows = slice(first, first + count)
            metadata, positions = metadata_of(first, count)
            pieces.append(head.forward(model.embed(ids[1:][rows]), ours[rows], positions, metadata, kv))
        hidden, scores = theirs.forward(embeds, features)
        torch.testing.assert_close(torch.cat(pieces), hidden, atol=5e-4, rtol=1e-3)
        found = torch.full((20, VOCAB_SIZE), -torch.inf)
        assert head.served_ids is not None
        found[:, head.served_ids] = head.scores(torch.cat(pieces))
        torch.testing.assert_close(found, scores, atol=5e-3, rtol=1e-3)
        # A draft's row reads the result of the row before in place of the served model's hidden states.
        for place in range(20, 24):
            draft = int(scores[-1].argmax())
            features = torch.cat([features, hidden[-1:]])
            embeds = torch.cat([embeds, hf.get_input_embeddings()(torch.tensor([draft]))])
            before = pieces[-1][-1:]
            metadata, positions = metadata_of(place, 1)
            pieces.append(head.forward(model.embed(torch.tensor([draft])), before, positions, metadata, kv))
            hidden, scores = theirs.forward(embeds, features)
            torch.testing.assert_close(pieces[-1], hidden[-1:], atol=1e-3, rtol=1e-3)


def test_the_layout_of_speculators_is_the_same_head(served: tuple[Path, CausalLM], tmp_path: Path) -> None:
    plain = load(eagle3_folder(tmp_path / "plain"), served[1])
    own = {"hidden_size", "model_type", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    nested = eagle3_folder(tmp_path / "nested", eagle3_tensors(prefix="layers.0."))
    layer = {**_values(nested)}
    values = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [2, 2, 2],
        "norm_before_residual": False,
        "transformer_layer_config": {name: value for name, value in layer.items() if name not in ("architectures",)},
    }
    assert own <= set(values["transformer_layer_config"])
    _write(nested, values)
    other = load(nested, served[1])
    assert other.taps == plain.taps
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(other.scores(rows), plain.scores(rows))


def test_the_tapped_layers_are_those_that_the_folder_names(tmp_path: Path) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    assert Eagle3Config(eagle3_folder(tmp_path)).taps(32) == (2, 16, 29)
    assert Eagle3Config(eagle3_folder(tmp_path, **{name: [1, 3, 5]})).taps(32) == (1, 3, 5)
    # There they number layers, and the state after each is meant.
    assert Eagle3Config(eagle3_folder(tmp_path, eagle_config={name: [1, 15, 28]})).taps(32) == (2, 16, 29)


def test_a_head_may_have_an_embedding_of_its_own_and_the_whole_vocabulary(
    served: tuple[Path, CausalLM], tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in eagle3_tensors().items() if name not in ("d2t", "t2d")}
    tensors["lm_head.weight"] = torch.randn(VOCAB_SIZE, HIDDEN)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, HIDDEN)
    head = load(eagle3_folder(tmp_path, tensors, draft_vocab_size=None), served[1])
    assert head.served_ids is None
    ids = torch.tensor([5, 7])
    torch.testing.assert_close(head.embedded(ids, served[1].embed), tensors["embed_tokens.weight"][ids])


def _without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in eagle3_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("changes", "tensors", "said"),
    [
        ({"num_hidden_layers": 2}, None, "num_hidden_layers must be 1"),
        ({"model_type": "deepseek_v3"}, None, "model_type 'deepseek_v3'"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, None, "architectures"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, "eagle_config.use_aux_hidden_state"),
        ({"hidden_size": 36}, None, "hidden states of 36 numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}, None, "taps the hidden states [1, 2, 30]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, None, "taps the hidden states [1, 2]"),
        # An id beyond its rows would end the step that drafts after it.
        (
            {"vocab_size": 100},
            _without("t2d") | {"embed_tokens.weight": torch.zeros(100, HIDDEN)},
            f"embed_tokens.weight has 100 rows (vocab_size), and the served model {VOCAB_SIZE} ids",
        ),
        ({}, _without("fc.weight"), "lacks tensor fc.weight"),
        ({}, _without("d2t"), "lacks tensor d2t"),
        ({}, eagle3_tensors() | {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64) + 300}, "d2t must name"),
        ({}, eagle3_tensors() | {"surprise": torch.zeros(1)}, "unexpected tensor surprise"),
        ({}, eagle3_tensors() | {"norm.weight": torch.zeros(7)}, "norm.weight has shape [7]"),
    ],
)
def test_what_is_no_such_head_is_refused_by_name(
    served: tuple[Path, CausalLM], tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Tensor] | None, said: str
) -> None:
    with pytest.raises(StartupError) as refusal:
        load(eagle3_folder(tmp_path, tensors, **changes), served[1])
    assert said in refusal.value.message


def _values(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _write(folder: Path, values: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")

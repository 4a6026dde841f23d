"""Layers for multi-token prediction in DeepSeek-V3's and Qwen's layouts: what is read, what it computes, what is
refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories.engine.assisted import assisted_engine, head_engine
from factories.engine.fake_engine import request, run
from factories.engine.model_engine import load_tiny
from factories.models.carried_heads import WEIGHTS, Carried
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from factories.models.run_kernels import cpu_device
from penstock.common.errors import StartupError
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.core.step import DraftKind
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.mtp import MultiTokenHead, load_mtp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

FAMILIES = (
    *(("deepseek_v3", False), ("deepseek_v3", True), ("qwen3_5_text", True), ("qwen3_next", True)),
    *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("glm4_moe_lite", "deepseek_v32", "qwen3_5_moe_text")),
)
EPS = 1e-6


class Read:
    """The checkpoint as transformers reads it, and as it is read here."""

    def __init__(self, carried: Carried) -> None:
        self.carried = carried
        self.layer: PreTrainedModel = reference_model(carried.alone)
        self.served: PreTrainedModel = reference_model(carried.folder)

    def load(self) -> tuple[CausalLM, MultiTokenHead]:
        return load(self.carried)

    def reference(self, hidden_TI: Tensor, next_T: Tensor) -> Tensor:
        """Return the layer's result (T, hidden) after its norm, as the paper's equation 21 and what follows it."""
        own = self.carried.own
        rows = {"embed_norm": self.carried.table_VI[next_T], "state_norm": hidden_TI}
        both = [
            torch.nn.functional.rms_norm(x, x.shape[-1:], self.carried.offset + own[name], EPS)
            for name, x in rows.items()
        ]
        joint = torch.cat(both, dim=-1) @ own["joint"].T
        hidden: Tensor = self.layer.model(inputs_embeds=joint[None]).last_hidden_state[0]
        return hidden


def load(carried: Carried) -> tuple[CausalLM, MultiTokenHead]:
    model = load_tiny(carried.folder)
    return model, load_mtp(carried.folder, model, cpu_device(), "none")


@pytest.mark.parametrize(("family", "shares"), FAMILIES)
def test_the_layer_computes_what_the_paper_says_row_by_row_and_in_a_chain(
    tmp_path: Path, family: str, shares: bool
) -> None:
    carried = Carried(tmp_path, family, shares=shares)
    read = Read(carried)
    model, head = read.load()
    # What it shares with the model is in memory once.
    assert (head.scores.__self__._head is model.head) is shares  # type: ignore[attr-defined]
    ids = torch.randint(2, VOCAB_SIZE, (13,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = read.served.model(ids[None]).last_hidden_state[0, :-1]
        expected = read.reference(states, ids[1:])
        kv = KVShape.of(head.config, torch.float32, 4, num_layers=1).pool(8, torch.device("cpu"))
        pieces = []
        for first, count in ((0, 5), (5, 1), (6, 6)):
            rows = slice(first, first + count)
            metadata, positions = _metadata(first, count)
            embeds = head.embedded(ids[1:][rows], model.embed)
            pieces.append(head.forward(embeds, head.features(states[rows][:, None]), positions, metadata, kv))
        torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-3, rtol=1e-3)
        scores = head.scores(torch.cat(pieces))
        torch.testing.assert_close(scores, expected @ carried.head_VI.T, atol=5e-3, rtol=1e-3)
        draft = scores[-1:].argmax(-1)
        metadata, positions = _metadata(12, 1)
        further = head.forward(head.embedded(draft, model.embed), pieces[-1][-1:], positions, metadata, kv)
        again = read.reference(torch.cat([states, expected[-1:]]), torch.cat([ids[1:], draft]))
        torch.testing.assert_close(further, again[-1:], atol=2e-3, rtol=2e-3)


def _metadata(first: int, count: int) -> tuple[AttentionMetadata, Tensor]:
    return AttentionMetadata.build([count], [first + count], torch.arange(8, dtype=torch.int32)[None], 4)


def test_its_drafts_change_no_ids(tmp_path: Path) -> None:
    model, head = load(Carried(tmp_path, "deepseek_v3"))
    mode = AssistanceOptions(num_assistant_tokens=3, confidence_threshold=0.0)
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, VOCAB_SIZE, (length,), generator=rng).tolist() for length in (1, 9, 30)]
    engine = head_engine(model, head)
    for options in ({}, {"do_sample": True, "seed": 3, "repetition_penalty": 1.2}):
        items = [(str(place), ids) for place, ids in enumerate(prompts)]
        plain = run(assisted_engine(model), *(request(ids, request_id=name, **options) for name, ids in items))
        drafted = run(engine, *(request(ids, request_id=name, mode=mode, **options) for name, ids in items))
        assert {name: one.ids for name, one in plain.items()} == {name: one.ids for name, one in drafted.items()}
    assert sum(engine.stats.draft_tokens[DraftKind.DRAFT_HEAD]) > 0
    engine.check_integrity()


def test_a_shared_head_is_that_of_the_model_that_takes_the_served_ones_place(tmp_path: Path) -> None:
    for shares in (True, False):
        carried = Carried(tmp_path / str(shares), "deepseek_v3", shares=shares)
        _, head = load(carried)
        other = load_tiny(tiny_checkpoint(tmp_path / "other", "deepseek_v3", seed=5))
        row = torch.randn(1, head.config.hidden_size)
        head.share(other)
        expected = other.head.as_float(row) if shares else row @ carried.head_VI.T
        torch.testing.assert_close(head.scores(row), expected, atol=5e-3, rtol=1e-3)


def test_a_checkpoint_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "dense", "llama")
    with pytest.raises(StartupError, match="num_nextn_predict_layers"):
        load_mtp(folder, load_tiny(folder), cpu_device(), "none")
    bare = tiny_checkpoint(tmp_path / "bare", "deepseek_v3")
    with pytest.raises(StartupError, match=r"lacks tensors? model\.layers\.2\."):
        load_mtp(bare, load_tiny(bare), cpu_device(), "none")
    hybrid = tiny_checkpoint(tmp_path / "hybrid", "qwen3_5_text")
    with pytest.raises(StartupError, match=r"lacks tensor mtp\.fc\.weight: it carries no layer for drafts"):
        load_mtp(hybrid, load_tiny(hybrid), cpu_device(), "none")


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_the_experts_of_its_layer_may_be_stacked(tmp_path: Path, family: str) -> None:
    carried = Carried(tmp_path, family)
    _, plain = load(carried)
    tensors, own = load_file(carried.folder / WEIGHTS), "mtp.layers.0.mlp.experts."
    gate, up, down = (
        torch.stack([tensors.pop(f"{own}{number}.{name}_proj.weight") for number in range(6)])
        for name in ("gate", "up", "down")
    )
    tensors |= {f"{own}gate_up_proj": torch.cat((gate, up), dim=1), f"{own}down_proj": down}
    save_file(tensors, carried.folder / WEIGHTS)
    model, stacked = load(carried)
    rows = torch.randn(4, plain.config.hidden_size)
    metadata, positions = _metadata(0, 4)
    facts, cpu = plain.config, torch.device("cpu")
    found = []
    for head in (plain, stacked):
        kv = KVCachePool(1, 8, 4, facts.num_kv_heads, facts.head_dim, torch.float32, cpu)
        found.append(head.forward(model.embed(torch.arange(4)), rows, positions, metadata, kv))
    assert torch.equal(*found)

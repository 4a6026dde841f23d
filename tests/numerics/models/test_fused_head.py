"""A draft head's layer, and chains of drafts, in one call: the bits and the ids of the operators one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.draft_heads import HEAD_DIM, KV_HEADS, eagle3_folder, eagle3_tensors
from factories.models.native import PRODUCT_SETS, use_instruction_set
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.eagle3 import Eagle3Head, load_eagle3
from penstock.generation.models.fused_head import ChainLimits
from penstock.generation.models.registry import load_model
from torch import Tensor

BLOCK_SIZE = 4
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("bfloat16", "none", {}),
    ("bfloat16", "int8", {"norm_before_residual": True}),
    ("float32", "none", {"norm_before_residual": True}),
    ("float32", "none", {}),
]


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def load(
    folder: Path, dtype: str = "bfloat16", quantization: str = "none", *, has_table: bool = False, **config: Any
) -> tuple[CausalLM, Eagle3Head]:
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    served = tiny_checkpoint(folder / "model", num_hidden_layers=4)
    model = load_model(served, dtype=dtype, quantization=quantization, device=device)
    tensors = eagle3_tensors()
    if has_table:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, 48, generator=torch.Generator().manual_seed(5))
    head_folder = eagle3_folder(folder / "head", tensors, **config)
    head = load_eagle3(head_folder, model.config, device, model.dtype, quantization)
    assert head._fused is not None
    return model, head


class Rows:
    """Rows of some sequences, on a pool of their own."""

    def __init__(self, head: Eagle3Head, model: CausalLM, counts: list[int], before: list[int]) -> None:
        count, each = len(counts), -(-max(counts) // BLOCK_SIZE) + 20
        self.kv = KVCachePool(1, count * each, BLOCK_SIZE, KV_HEADS, HEAD_DIM, head.dtype, torch.device("cpu"))
        self.kv.tensors[0].fill_(0.25)
        self.tables = torch.arange(count * each, dtype=torch.int32).flip(0).reshape(count, each)
        lengths = [own + first for own, first in zip(counts, before, strict=True)]
        self.metadata, self.positions = AttentionMetadata.build(counts, lengths, self.tables, BLOCK_SIZE)
        generator = torch.Generator().manual_seed(sum(counts))
        self.features = torch.randn(sum(counts), 48, generator=generator).to(head.dtype)
        ids = torch.randint(0, VOCAB_SIZE, (sum(counts),), generator=generator)
        self.embeds = head.embedded(ids, model.embed)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        return self.embeds, self.features.clone(), self.positions, self.metadata


@pytest.mark.parametrize(("dtype", "quantization", "config"), KINDS)
@pytest.mark.parametrize("counts", [[3, 1, 6], [1, 1], [400]])
def test_the_layer_and_its_scores_have_the_bits_of_the_operators(
    tmp_path: Path,
    dtype: str,
    quantization: str,
    config: dict[str, Any],
    counts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, head = load(tmp_path, dtype, quantization, **config)
    before = [0, 5, 2][: len(counts)]
    fused = Rows(head, model, counts, before)
    found = head.step(*fused.arguments, fused.kv)
    monkeypatch.setattr(head, "_fused", None)
    single = Rows(head, model, counts, before)
    expected = head.step(*single.arguments, single.kv)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(fused.kv.tensors[0], single.kv.tensors[0])


def drafts_one_by_one(
    head: Eagle3Head, model: CausalLM, rows: Rows, limits: list[ChainLimits], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """Return the drafts of each sequence alone, by the operators."""
    monkeypatch.setattr(head, "_fused", None)
    hidden, scores = head.step(*rows.arguments, rows.kv)
    assert head.served_ids is not None
    drafts = []
    for number, limit in enumerate(limits):
        own: list[int] = []
        last, row = hidden[number : number + 1], scores[number]
        while True:
            token = int(head.served_ids[row.argmax()])
            if token in limit.ends:
                break
            own.append(token)
            if len(own) == limit.most or float(row.softmax(-1).max()) < limit.least_probability:
                break
            length = rows.metadata.kv_lens[number] + len(own)
            metadata, positions = AttentionMetadata.build([1], [length], rows.tables[number : number + 1], BLOCK_SIZE)
            embeds = head.embedded(torch.tensor([token]), model.embed)
            last, following = head.step(embeds, last.clone(), positions, metadata, rows.kv)
            row = following[0]
        drafts.append(own)
    return drafts


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize(("dtype", "quantization", "config"), KINDS)
def test_a_chain_is_what_its_rows_give_one_by_one(
    tmp_path: Path,
    dtype: str,
    quantization: str,
    config: dict[str, Any],
    has_table: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, head = load(tmp_path, dtype, quantization, has_table=has_table, **config)
    head.share(model)
    assert head.can_chain
    counts, before = [3, 1, 6, 2], [0, 5, 2, 9]
    free = [ChainLimits(9, 0.0, ())] * 4
    long = head.chain(*chain_arguments(head, model, counts, before), free)
    assert long == drafts_one_by_one(head, model, Rows(head, model, counts, before), free, monkeypatch)
    assert [len(one) for one in long] == [9] * 4
    monkeypatch.undo()
    # An end within, a bound, and drafts that are not sure.
    limits = [
        ChainLimits(9, 0.0, (long[0][4],)),
        ChainLimits(2, 0.0, ()),
        ChainLimits(9, 0.99, ()),
        ChainLimits(1, 0.0, ()),
    ]
    short = head.chain(*chain_arguments(head, model, counts, before), limits)
    assert short[0] == long[0][: long[0].index(long[0][4])]
    assert short[1] == long[1][:2]
    assert short[2] == long[2][: len(short[2])]
    assert short[3] == long[3][:1]
    assert short == drafts_one_by_one(head, model, Rows(head, model, counts, before), limits, monkeypatch)


def chain_arguments(head: Eagle3Head, model: CausalLM, counts: list[int], before: list[int]) -> tuple[Any, ...]:
    rows = Rows(head, model, counts, before)
    return (*rows.arguments, rows.tables, rows.kv)


def test_scores_that_are_no_numbers_end_a_chain(tmp_path: Path) -> None:
    model, head = load(tmp_path)
    head.share(model)
    rows = Rows(head, model, [1, 1], [0, 0])
    rows.features[1] = torch.nan
    drafts = head.chain(*rows.arguments, rows.tables, rows.kv, [ChainLimits(3, 0.0, ())] * 2)
    assert [len(one) for one in drafts] == [3, 0]


def test_tables_that_do_not_reach_are_refused(tmp_path: Path) -> None:
    model, head = load(tmp_path)
    head.share(model)
    rows = Rows(head, model, [4], [0])
    with pytest.raises(RuntimeError, match="longer than its table"):
        head.chain(*rows.arguments, rows.tables[:, :1].contiguous(), rows.kv, [ChainLimits(3, 0.0, ())])

"""Hidden states that the fused layers write on their way: the bits of the layers one by one, in every kind of step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import INSTRUCTION_SETS, use_instruction_set
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.hidden_keeper import LayerTaps
from penstock.generation.models.registry import load_model
from torch import Tensor

# Norms before, around and of another dtype; a factor on what layers add; windows with rotary embeddings of their own.
FAMILIES: list[Any] = [
    ("qwen2", {}),
    ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    # The last layer reads the keys of the one before: rows may go on alone from there.
    (
        "gemma4_text",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1},
    ),
    pytest.param("granite", {}, marks=pytest.mark.slow),
]
KINDS = [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8")]
BLOCK_SIZE, BLOCKS = 8, 64
LENGTHS = (9, 1, 17)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def native(folder: Path, dtype: str = "bfloat16", quantization: str = "none") -> CausalLM:
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype=dtype, quantization=quantization, device=device)
    assert model.can_draw
    return model


class Steps:
    """A pool, and steps of sequences that have a range of its blocks each."""

    def __init__(self, model: CausalLM, count: int) -> None:
        facts = model.config
        self.model = model
        self.kv = KVShape.of(facts, model.dtype, BLOCK_SIZE).pool(BLOCKS, model.device)
        self.tables = torch.arange(BLOCKS // count * count, dtype=torch.int32).view(count, -1)

    def forward(
        self, counts: list[int], lengths: list[int], taps: tuple[int, ...], rows: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states and taps of a step of `counts` tokens of each sequence, which has `lengths` then."""
        metadata, positions = AttentionMetadata.build(counts, lengths, self.tables, BLOCK_SIZE)
        keeper = LayerTaps(taps)
        wanted = None if rows is None else torch.tensor(rows)
        hidden = self.model.forward(ids_of(sum(counts)), positions, metadata, self.kv, wanted, keeper=keeper)
        assert keeper.rows_TKI is not None
        return hidden, keeper.rows_TKI


def ids_of(count: int) -> Tensor:
    draw = random.Random(count)
    return torch.tensor([draw.randrange(VOCAB_SIZE) for _ in range(count)])


def one_by_one(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_fused", None)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_taps_of_any_layers_have_the_bits_of_the_layers_one_by_one(
    tmp_path: Path,
    family: str,
    config: dict[str, Any],
    dtype: str,
    quantization: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = native(tiny_checkpoint(tmp_path, family, num_hidden_layers=3, **config), dtype, quantization)
    lengths, after = list(LENGTHS), [length + 1 for length in LENGTHS]
    some = [2, 9, 26]
    found = []
    for fused in (True, False):
        if not fused:
            one_by_one(model, monkeypatch)
        steps = Steps(model, len(LENGTHS))
        # The embedding, layers twice and out of order, and the rows after the final norm.
        all_rows = steps.forward(lengths, lengths, (2, 0, 3, 2))
        picked = steps.forward(lengths, lengths, (1, 2), some)
        both = steps.forward(lengths, lengths, (1, 3), some)
        decoded = steps.forward([1, 1, 1], after, (3, 1))
        found.append([*all_rows, *picked, *both, *decoded])
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        assert one.dtype == other.dtype == model.dtype
        assert torch.equal(one, other)
    hidden, taps = found[0][:2]
    assert torch.equal(taps[:, 2], hidden)
    assert torch.equal(taps[:, 0], taps[:, 3])
    assert torch.equal(taps[:, 1], model.embed(ids_of(sum(LENGTHS))))
    assert torch.equal(found[0][2], hidden[some])


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_are_tapped_by_all_threads(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread norms some of them, and would norm all of a few."""
    model = native(tiny_checkpoint(tmp_path, num_hidden_layers=3))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        fused = Steps(model, 1).forward([500], [500], (1, 2, 3))
    finally:
        torch.set_num_threads(before)
    one_by_one(model, monkeypatch)
    single = Steps(model, 1).forward([500], [500], (1, 2, 3))
    assert torch.equal(fused[0], single[0])
    assert torch.equal(fused[1], single[1])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_step_that_draws_is_tapped_as_well(tmp_path: Path, quantization: str) -> None:
    model = native(tiny_checkpoint(tmp_path, num_hidden_layers=3), quantization=quantization)
    lengths, after = [6, 11], [7, 12]
    plain, drawing, steady = (Steps(model, 2) for _ in range(3))
    expected = plain.forward(lengths, lengths, (0, 3))
    metadata, positions = AttentionMetadata.build(lengths, lengths, drawing.tables, BLOCK_SIZE)
    taps = LayerTaps((0, 3))
    hidden, drawn = model.forward_and_draw(ids_of(17), positions, metadata, drawing.kv, taps=taps)
    assert torch.equal(hidden, expected[0])
    assert taps.rows_TKI is not None
    assert torch.equal(taps.rows_TKI, expected[1])
    assert drawn.tolist() == model.compute_logits(hidden).argmax(-1).tolist()
    _, following = plain.forward([1, 1], after, (2, 3))
    steady.forward(lengths, lengths, (1,))
    further = LayerTaps((2, 3))
    ids = model.decode(ids_of(2).tolist(), after, 12, steady.tables, steady.kv, taps=further)
    assert further.rows_TKI is not None
    assert torch.equal(further.rows_TKI, following)
    assert ids == model.compute_logits(following[:, 1]).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("tapped", "shape", "refusal"),
    [
        ([4], (3, 1, 48), "no such layer"),
        ([-1], (3, 1, 48), "no such layer"),
        ([3], (3, 1, 48), "no such layer"),
        ([1, 2], (3, 1, 48), "wrong size"),
        ([1], (2, 1, 48), "wrong size"),
        ([1], (3, 1, 47), "wrong size"),
    ],
)
def test_taps_that_no_layer_fills_are_refused(
    tmp_path: Path, tapped: list[int], shape: tuple[int, ...], refusal: str
) -> None:
    """Row 1 alone is wanted: rows after the final norm are not all there."""
    model = native(tiny_checkpoint(tmp_path, num_hidden_layers=3))
    assert model._fused is not None
    steps = Steps(model, 1)
    metadata, positions = AttentionMetadata.build([3], [3], steps.tables, BLOCK_SIZE)
    cos, sin = model._fused._tables(3)
    arguments: Any = (
        model.embed(ids_of(3)),
        cos,
        sin,
        positions,
        metadata.slot_mapping,
        metadata.block_tables,
        metadata.query_start,
        metadata.context_lens,
        torch.tensor([1]),
        False,
        *steps.kv.tensors,
        None,
        steps.kv.places,
    )
    with pytest.raises(RuntimeError, match=refusal):
        model._fused._forward(*arguments, (tapped, torch.empty(shape, dtype=model.dtype)), None, None)

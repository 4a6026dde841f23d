"""Rows that nothing is drawn from end in the last layer. Wanted rows have the same bits as among all rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.pools import unwritten_pool
from factories.engine.sequences import params, sequence
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import PRODUCT_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import RunnerOutput, ScheduledSequence, SchedulerOutput
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner

BLOCK_SIZE = 8
# Threads share rows of 1024 elements from 17 on, and each does all of the narrow ones for itself.
MODELS: dict[str, dict[str, Any]] = {
    "narrow": {},
    "wide": {"hidden_size": 1024, "intermediate_size": 64, "initializer_range": 0.05},
    "one layer": {"num_hidden_layers": 1},
    # Experts beside a gated shared one; and a layer with compressed keys and values before one that has experts, too,
    # with a router in float32.
    "wide experts": {"family": "qwen2_moe", "hidden_size": 1024, "decoder_sparse_step": 1, "initializer_range": 0.05},
    "wide latents": {
        "family": "deepseek_v3",
        "hidden_size": 1024,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 240,
        "qk_rope_head_dim": 16,
        "initializer_range": 0.05,
    },
}
KINDS = [
    ("narrow", "none"),
    ("narrow", "int8"),
    ("narrow", "int4"),
    ("wide", "none"),
    ("wide", "int8"),
    ("one layer", "none"),
    ("wide experts", "none"),
    ("wide experts", "int8"),
    ("wide latents", "none"),
    ("wide latents", "int8"),
]


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, _instruction_set: None) -> Any:
    """(name, quantization) -> model, loaded once."""

    @functools.cache
    def load(name: str, quantization: str) -> CausalLM:
        return native(tiny_checkpoint(tmp_path_factory.mktemp("model"), **MODELS[name]), quantization)

    return load


def native(folder: Path, quantization: str = "none") -> CausalLM:
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype="bfloat16", quantization=quantization, device=device)
    assert model.can_draw
    return model


def new_pool(model: CausalLM, blocks: int, dtype: torch.dtype | None = None) -> KVCachePool:
    facts = model.config
    geometry = (facts.num_layers, blocks, BLOCK_SIZE, facts.num_kv_heads, facts.head_dim)
    return unwritten_pool(*geometry, dtype or model.dtype, has_values=facts.has_values)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Rows of each sequence, which of the step's rows are wanted, and the ids."""
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, 30)), min_size=1, max_size=5))
    rows = sum(lengths)
    some = st.sets(st.integers(0, rows - 1), max_size=rows)
    wanted = draw(st.one_of(some, st.just(set()), st.just(set(range(rows))), st.sets(st.just(rows - 1), min_size=1)))
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=rows, max_size=rows))
    return lengths, sorted(wanted), ids


@pytest.mark.parametrize(("name", "quantization"), KINDS)
@settings(max_examples=12)
@given(step=steps(), threads=st.sampled_from([1, 2, 3]), shared=st.booleans(), kv_int8=st.booleans())
def test_any_rows_of_a_step_have_the_bits_they_have_among_all(
    models: Any,
    name: str,
    quantization: str,
    step: tuple[list[int], list[int], list[int]],
    threads: int,
    shared: bool,
    kv_int8: bool,
) -> None:
    model = models(name, quantization)
    lengths, wanted, ids = step
    # The first sequence's block is the beginning of all others, which read what this step writes.
    common = BLOCK_SIZE if shared and lengths[0] >= BLOCK_SIZE else 0
    contexts = [lengths[0], *(length + common for length in lengths[1:])]
    tables = torch.arange(5 * len(lengths), dtype=torch.int32).view(-1, 5)
    if common:
        tables[1:, 0] = tables[0, 0]
    metadata, positions = AttentionMetadata.build(lengths, contexts, tables, BLOCK_SIZE)
    rows = torch.tensor(wanted, dtype=torch.int64)
    pools, hidden, chosen = [], [], []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for forward in (model.forward, model.forward, model.forward_and_draw):
            pools.append(new_pool(model, 5 * len(lengths), torch.int8 if kv_int8 else None))
            given_rows = [] if len(pools) == 1 else [rows]
            found = forward(torch.tensor(ids), positions, metadata, pools[-1], *given_rows)
            hidden.append(found[0] if isinstance(found, tuple) else found)
            chosen.append(found[1] if isinstance(found, tuple) else None)
    finally:
        torch.set_num_threads(before)
    everything = hidden[0][rows]
    assert everything.isfinite().all()
    assert torch.equal(hidden[1], everything)
    assert torch.equal(hidden[2], everything)
    for other in pools[1:]:
        assert all(
            torch.equal(one.nan_to_num(7), two.nan_to_num(7))
            for one, two in zip(pools[0].tensors, other.tensors, strict=True)
            if one is not None and two is not None
        )
    expected = model.compute_logits(everything).numpy().argmax(-1).tolist() if wanted else []
    assert chosen[2] is not None
    assert chosen[2].tolist() == expected


def test_rows_must_ascend_and_be_there(models: Any) -> None:
    model = models("narrow", "none")
    metadata, positions = AttentionMetadata.build([4], [4], torch.zeros(1, 1, dtype=torch.int32), BLOCK_SIZE)
    for rows in ([2, 1], [1, 1], [4], [-1]):
        with pytest.raises(RuntimeError, match="ascend"):
            model.forward(torch.arange(4), positions, metadata, new_pool(model, 1), torch.tensor(rows))


class Run:
    """A runner, and how often it was asked for logits."""

    def __init__(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> None:
        self.num_logits = 0
        compute_logits, kept = model.compute_logits, model._fused

        def counted(hidden: torch.Tensor, adapters: Any = None) -> torch.Tensor:
            self.num_logits += 1
            return compute_logits(hidden, adapters)

        monkeypatch.setattr(model, "compute_logits", counted)
        monkeypatch.setattr(model, "_fused", kept if fused else None)
        self._runner = ModelRunner(model, new_pool(model, 64))

    def step(self, *entries: ScheduledSequence) -> RunnerOutput:
        return self._runner.execute(SchedulerOutput(entries))


def new_sequences(lengths: list[int], options: list[dict[str, Any]]) -> list[Sequence]:
    made = []
    for place, (length, given_options) in enumerate(zip(lengths, options, strict=True)):
        prompt = [(7 * place + 3 * token) % VOCAB_SIZE for token in range(length)]
        made.append(sequence(prompt, params(**given_options), seq_id=place))
        made[-1].block_table.extend(range(4 * place, 4 * place + 4))
    return made


@pytest.mark.parametrize(
    ("options", "has_logits"),
    [
        # An unfinished prompt, a finished one, and one row.
        ([{}, {}, {}], False),
        ([{"do_sample": True, "repetition_penalty": 1.2}, {}, {}], False),
        ([{}, {"do_sample": True, "top_k": 5}, {}], True),
        ([{}, {"top_logprobs": 2}, {}], True),
        ([{"prompt_logprobs": 1}, {}, {}], True),
    ],
)
def test_a_mixed_step_draws_what_its_operators_one_by_one_draw(
    models: Any, options: list[dict[str, Any]], has_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = models("narrow", "none"), []
    for fused in (False, True):
        with monkeypatch.context() as patch:
            run = Run(model, patch, fused=fused)
            long, short, one = new_sequences([30, 9, 1], options)
            output = run.step(
                ScheduledSequence(long, 0, 20),
                ScheduledSequence(short, 0, 9, (short,)),
                ScheduledSequence(one, 0, 1, (one,)),
            )
            found.append((output.sampled, output.prompt_logprobs))
            assert set(output.sampled) == {1, 2}
            assert bool(run.num_logits) == (has_logits or not fused)
            assert bool(output.prompt_logprobs) == ("prompt_logprobs" in options[0])
    assert found[0] == found[1]


def test_siblings_draw_the_token_of_the_row_they_share(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(models("narrow", "none"), monkeypatch, fused=True)
    first, second, other = new_sequences([9, 9, 5], [{}, {}, {}])
    output = run.step(ScheduledSequence(first, 0, 9, (first, second)), ScheduledSequence(other, 0, 5, (other,)))
    assert set(output.sampled) == {0, 1, 2}
    assert run.num_logits == 0
    alone = Run(models("narrow", "none"), monkeypatch, fused=False).step(ScheduledSequence(first, 0, 9, (first,)))
    assert output.sampled[0] == output.sampled[1] == alone.sampled[0]


def test_who_wants_no_logits_gets_an_answer_beside_who_draws(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(models("narrow", "none"), monkeypatch, fused=True)
    drawing, silent = new_sequences([9, 6], [{}, {}])
    silent.draw = DrawSpec(DrawKind.NOTHING)
    output = run.step(ScheduledSequence(silent, 0, 6, (silent,)), ScheduledSequence(drawing, 0, 9, (drawing,)))
    assert output.sampled[1].token_id == -1
    assert output.sampled[0].token_id >= 0
    assert run.num_logits == 0
    nobody = run.step(ScheduledSequence(drawing, 0, 8))
    assert nobody.sampled == {}


def test_a_row_that_is_not_a_number_fails_alone_in_a_mixed_step(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("narrow", "none")
    run = Run(model, monkeypatch, fused=True)
    good, bad = new_sequences([9, 6], [{}, {}])
    embed = model.embed

    def spoilt(ids: torch.Tensor, adapters: Any = None) -> torch.Tensor:
        hidden = embed(ids, adapters)
        hidden[-1] = torch.nan
        return hidden

    monkeypatch.setattr(model, "embed", spoilt)
    output = run.step(ScheduledSequence(good, 0, 9, (good,)), ScheduledSequence(bad, 0, 6, (bad,)))
    assert output.failed == {1}
    monkeypatch.setattr(model, "embed", embed)
    expected = Run(model, monkeypatch, fused=True).step(ScheduledSequence(good, 0, 9, (good,)))
    assert output.sampled[0] == expected.sampled[0]

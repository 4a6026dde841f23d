"""Decode steps that go on from the last one give the results of the usual way, whatever happens between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import pytest
import torch
from factories.engine.pools import unwritten_pool
from factories.engine.sequences import params, sequence
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import PRODUCT_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.decoding_mode import TensorOutputs
from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import BlockCopy, Fork, RunnerOutput, ScheduledSequence, SchedulerOutput
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.draft_head import Embed
from penstock.generation.models.registry import load_model
from penstock.generation.runner.draw_rows import EntryRows
from penstock.generation.runner.feature_tap import FeatureTap
from penstock.generation.runner.model_runner import ModelRunner

BLOCK_SIZE, BLOCKS_EACH, MOST_SEQUENCES = 4, 24, 5
# Whose embedding is the head's rows, and whose is a table.
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "experts": {"family": "qwen3_moe"},
    "latents": {"family": "deepseek_v3"},
}
KINDS = [("tied", "bfloat16", "none"), ("tied", "float32", "none"), ("untied", "bfloat16", "none")]
KINDS += [("tied", "bfloat16", "int8"), ("untied", "bfloat16", "int4")]
KINDS += [("experts", "bfloat16", "none"), ("latents", "bfloat16", "none"), ("latents", "float32", "int8")]


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, _instruction_set: None) -> Any:
    """(name, dtype, quantization) -> model, loaded once."""

    @functools.cache
    def load(name: str, dtype: str, quantization: str) -> CausalLM:
        device = CPUDevice()
        device.instruction_set = torch.ops.penstock.instruction_set("")
        folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), **MODELS[name])
        model = load_model(folder, dtype=dtype, quantization=quantization, device=device)
        assert model.can_draw
        return model

    return load


class Run:
    """A runner with a pool and sequences of its own, and how often it went on from the last step."""

    def __init__(self, model: CausalLM, *, steady: bool, tap: FeatureTap | None = None) -> None:
        facts = model.config
        heads = facts.num_kv_heads, facts.head_dim
        geometry = (facts.num_layers, MOST_SEQUENCES * BLOCKS_EACH, BLOCK_SIZE, *heads)
        pool = unwritten_pool(*geometry, model.dtype, has_values=facts.has_values)
        self.pool: KVCachePool = pool
        self.runner = ModelRunner(model, pool, tap=tap)
        self.sequences: dict[int, Sequence] = {}
        self.num_steady = 0
        self._steady = steady
        self._released: tuple[int, ...] = ()

    def add(self, seq_id: int, prompt: list[int], **options: Any) -> None:
        made = sequence(prompt, params(max_new_tokens=500, **options), seq_id=seq_id)
        made.is_tapped = made.params.mode.asks_draft_model
        # Where no other sequence of a run is, in an order that is not that of the pool.
        first = seq_id % MOST_SEQUENCES * BLOCKS_EACH
        made.block_table.extend(range(first + BLOCKS_EACH - 1, first - 1, -1))
        self.sequences[seq_id] = made

    def remove(self, seq_id: int) -> None:
        del self.sequences[seq_id]
        self._released += (seq_id,)

    def step(self, ids: list[int]) -> RunnerOutput:
        """Everything of these sequences that is not computed, and the token that each draws."""
        entries = []
        for seq_id in ids:
            one = self.sequences[seq_id]
            first = one.num_computed_tokens
            entries.append(ScheduledSequence(one, first, len(one.token_ids) - first, (one,)))
        if not self._steady:
            self.runner._steady = None
        before = self.runner._steady
        result = self.runner.execute(SchedulerOutput(tuple(entries), released=self._released))
        self.num_steady += before is not None and self.runner._steady is before
        self._released = ()
        for entry in entries:
            entry.sequence.num_computed_tokens += entry.num_tokens
            entry.sequence.token_ids.append(result.sampled[entry.sequence.seq_id].token_id)
        return result


class Collector:
    """A tap that keeps what it is given: (seq_id, place) -> (taps, hidden)."""

    taps = (1, 2, 0)

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, entries: Items[EntryRows], rows_TKI: torch.Tensor, embed: Embed) -> None:
        for entry, first in entries:
            for place in range(entry.num_tokens):
                self.rows[entry.sequence.seq_id, entry.start + place] = rows_TKI[first + place]


def equal_pools(one: KVCachePool, other: KVCachePool) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(a is None or b is None or torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


PROMPTS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=11)
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("add"), PROMPTS),
    st.tuples(st.just("sampled"), PROMPTS),
    st.tuples(st.just("remove"), st.integers(0, MOST_SEQUENCES)),
    st.tuples(st.just("turn"), st.none()),
    st.tuples(st.just("skip"), st.none()),
    st.tuples(st.just("replace"), st.integers(0, VOCAB_SIZE - 1)),
)


def carry_out(run: Run, event: tuple[str, Any], next_id: int) -> list[RunnerOutput]:
    kind, value = event
    ids = list(run.sequences)
    if kind in ("add", "sampled"):
        if next_id % MOST_SEQUENCES in [one % MOST_SEQUENCES for one in ids]:
            return []
        run.add(next_id, value, **({"do_sample": True, "top_k": 9} if kind == "sampled" else {}))
        return [run.step(list(run.sequences))]
    if not ids:
        return []
    if kind == "remove":
        run.remove(ids[value % len(ids)])
        return []
    if kind == "replace":
        # As a strategy may, which puts another token in the place of the one that was drawn.
        run.sequences[ids[0]].token_ids[-1] = value
        return []
    orders = {"step": [ids] * (value or 0), "turn": [ids[::-1], ids[::-1]], "skip": [ids[1:], ids]}[kind]
    return [run.step(order) for order in orders if order]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "dtype", "quantization"), KINDS)
@settings(max_examples=25)
@given(prompt=PROMPTS, events=st.lists(EVENTS, max_size=9), threads=st.sampled_from([1, 2]))
def test_whatever_happens_ids_and_keys_are_those_of_the_usual_way(
    models: Any,
    name: str,
    dtype: str,
    quantization: str,
    prompt: list[int],
    events: list[tuple[str, Any]],
    threads: int,
) -> None:
    model = models(name, dtype, quantization)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        runs = [Run(model, steady=steady) for steady in (True, False)]
        for number, event in enumerate([("add", prompt), *events, ("step", 3)]):
            # As long as their blocks reach.
            if any(len(one.token_ids) > BLOCK_SIZE * BLOCKS_EACH - 13 for one in runs[0].sequences.values()):
                break
            results = [carry_out(run, event, number) for run in runs]
            assert results[0] == results[1], event
    finally:
        torch.set_num_threads(before)
    assert equal_pools(runs[0].pool, runs[1].pool)
    assert runs[1].num_steady == 0


def test_plain_decode_steps_go_on_however_long_the_sequences_grow(models: Any) -> None:
    model = models("tied", "bfloat16", "none")
    runs = [Run(model, steady=steady) for steady in (True, False)]
    for run in runs:
        run.add(0, [1, 2, 3])
        run.add(1, [4, 5])
        # Their tables' width when they begin is one block, and what they may grow by less than this.
        for _ in range(90):
            run.step([0, 1])
    for seq_id in (0, 1):
        assert runs[0].sequences[seq_id].token_ids == runs[1].sequences[seq_id].token_ids
    # Not the prompts, the first step after them, and one for each time that the tables were too narrow, and after it.
    assert 90 - 6 <= runs[0].num_steady <= 90 - 3
    assert equal_pools(runs[0].pool, runs[1].pool)


def test_tapped_steps_go_on_with_the_taps_of_the_usual_way(models: Any) -> None:
    """Sequence 1 is not tapped: its rows lie between those of the others."""
    model = models("tied", "bfloat16", "none")
    taps = [Collector(), Collector()]
    runs = [Run(model, steady=steady, tap=tap) for steady, tap in zip((True, False), taps, strict=True)]
    for run in runs:
        run.add(0, [1, 2, 3], mode=AssistanceOptions())
        run.add(1, [4, 5])
        run.add(2, [6], mode=AssistanceOptions())
        for _ in range(8):
            run.step([0, 1, 2])
        run.remove(0)
        for _ in range(4):
            run.step([1, 2])
    # Neither the prompts, nor the step that releases, nor the one after each.
    assert runs[0].num_steady == 6 + 3
    # All rows that were computed.
    assert taps[0].rows.keys() == {(0, place) for place in range(10)} | {(2, place) for place in range(12)}
    assert taps[0].rows.keys() == taps[1].rows.keys()
    assert all(torch.equal(rows, taps[1].rows[key]) for key, rows in taps[0].rows.items())
    assert runs[0].sequences[2].token_ids == runs[1].sequences[2].token_ids


def test_a_tap_begins_and_ceases_to_read_a_sequence_on_its_way(models: Any) -> None:
    model = models("tied", "bfloat16", "none")
    tap = Collector()
    run = Run(model, steady=True, tap=tap)
    run.add(0, [1, 2, 3], mode=AssistanceOptions())
    for is_tapped in (False, True, False):
        run.sequences[0].is_tapped = is_tapped
        for _ in range(4):
            run.step([0])
    # Not the prompt, nor the first step after it and after each change.
    assert run.num_steady == 2 + 3 + 3
    assert sorted(tap.rows) == [(0, place) for place in range(6, 10)]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.3},
        {"top_logprobs": 1},
        # Of one step only, and none of those before it.
        {"tensors": TensorOutputs(logits=True, steps=frozenset({3}))},
    ],
    ids=["sampled", "penalty", "logprobs", "tensors"],
)
def test_who_draws_otherwise_goes_the_usual_way(models: Any, options: dict[str, Any]) -> None:
    run = Run(models("tied", "bfloat16", "none"), steady=True)
    run.add(0, [1, 2, 3])
    run.add(1, [4, 5], **options)
    for _ in range(4):
        run.step([0, 1])
    assert run.num_steady == 0
    run.remove(1)
    for _ in range(4):
        run.step([0])
    # Neither the step that releases the other nor the one from which it goes on.
    assert run.num_steady == 3


def test_a_row_that_is_not_a_number_fails_alone(models: Any) -> None:
    model = models("tied", "bfloat16", "int8")
    run = Run(model, steady=True)
    run.add(0, [1, 2, 3])
    run.add(1, [4, 5])
    for _ in range(4):
        run.step([0, 1])
    assert run.num_steady == 2
    broken = next(token for token in range(VOCAB_SIZE) if token != run.sequences[0].token_ids[-1])
    kept = model._embedding[broken].clone()
    try:
        model._embedding[broken] = torch.nan
        run.sequences[1].token_ids[-1] = broken
        entries = tuple(ScheduledSequence(one, one.num_computed_tokens, 1, (one,)) for one in run.sequences.values())
        result = run.runner.execute(SchedulerOutput(entries))
    finally:
        model._embedding[broken] = kept
    assert result.failed == {1}
    assert result.sampled[0].token_id >= 0


@pytest.mark.parametrize(
    "what", ["copies", "forks", "released", "parked", "verifiers", "sample", "draw", "unconditional", "start"]
)
def test_what_is_not_the_step_after_the_last_is_not_done(models: Any, what: str) -> None:
    run = Run(models("tied", "bfloat16", "none"), steady=True)
    run.add(0, [1, 2, 3])
    run.add(1, [4, 5])
    for _ in range(3):
        run.step([0])
    steady = run.runner._steady
    assert steady is not None
    one, other = run.sequences[0], run.sequences[1]
    entry = ScheduledSequence(one, one.num_computed_tokens, 1, (one,))
    changed = {
        "verifiers": {"verifiers": ((0, other),)},
        "sample": {"sample": (one, other)},
        "start": {"start": entry.start - 1, "num_tokens": 2},
    }
    entry = dataclasses.replace(entry, **changed.get(what, {}))
    if what == "draw":
        one.draw = DrawSpec(DrawKind.NOTHING)
    if what == "unconditional":
        one.unconditional = other
    more: dict[str, Any] = {"copies": (BlockCopy(1, 2),), "forks": (Fork(0, 1, 2),), "released": (1,), "parked": (1,)}
    output = SchedulerOutput((entry,), **{name: more[name] for name in more if name == what})
    # Without a model: nothing is computed.
    assert steady.step(output, None, run.pool) is None  # type: ignore[arg-type]


def test_released_sequences_are_let_go(models: Any) -> None:
    run = Run(models("tied", "bfloat16", "none"), steady=True)
    run.add(0, [1, 2, 3])
    for _ in range(3):
        run.step([0])
    assert run.runner._steady is not None
    run.runner.release([0])
    assert run.runner._steady is None


def test_ids_and_tables_that_do_not_reach_are_refused(models: Any) -> None:
    for quantization in ("none", "int8"):
        model = models("tied", "bfloat16", quantization)
        run = Run(model, steady=True)
        table = torch.zeros(1, 2, dtype=torch.int32)
        for token in (-1, VOCAB_SIZE):
            with pytest.raises(IndexError, match="out of range"):
                model.decode([token], [3], 3, table, run.pool)
        with pytest.raises(RuntimeError, match="longer than its table"):
            model.decode([0], [2 * BLOCK_SIZE + 1], 2 * BLOCK_SIZE + 1, table, run.pool)

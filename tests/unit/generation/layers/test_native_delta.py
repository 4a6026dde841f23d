"""The native delta rule: the reference's results and states over random shapes, and the same bits in any chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from factories.models.native import INSTRUCTION_SETS, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.delta_heads import DeltaHeads
from penstock.generation.layers.delta_rule import DeltaRows, DeltaRule, DeltaWeights, NativeDeltaRule
from penstock.generation.layers.step_states import states_of_step
from torch import Tensor

SLOTS = 4


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


# Sizes around a vector's and around four of them.
widths = st.sampled_from([1, 5, 8, 16, 31, 33, 64, 70])
heads_of = st.builds(
    lambda keys, share, key_dim, value_dim, kernel: DeltaHeads(keys, keys * share, key_dim, value_dim, kernel, (True,)),
    st.integers(1, 2),
    st.integers(1, 3),
    widths,
    widths,
    st.integers(1, 5),
)


def weights_of(heads: DeltaHeads) -> DeltaWeights:
    return DeltaWeights(
        conv=torch.randn(heads.kernel, heads.channels) / heads.kernel,
        decay=torch.rand(heads.value_heads) * 3,
        bias=torch.randn(heads.value_heads),
        norm=1 + torch.randn(heads.value_dim) / 4,
        eps=1e-6,
    )


def states_of(heads: DeltaHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    conv = torch.randn(SLOTS, heads.kernel - 1, heads.channels).to(dtype)
    return conv, torch.randn(SLOTS, heads.value_heads, heads.key_dim, heads.value_dim)


def rows_of(heads: DeltaHeads, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(count, heads.channels + heads.values).to(dtype), torch.randn(count, 2 * heads.value_heads).to(
        dtype
    )


def step(
    counts: list[int], starts: list[int], slots: tuple[int, ...], kept: tuple[int, ...] | None = None
) -> AttentionMetadata:
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    tables = torch.zeros(len(counts), max(lengths), dtype=torch.int32)
    metadata, _ = AttentionMetadata.build(counts, lengths, tables, 1)
    return replace(metadata, state_slots=slots, state_kept=kept)


@settings(max_examples=12, deadline=None)
@given(
    heads=heads_of,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    counts=st.lists(st.sampled_from([1, 1, 2, 5, 64, 65, 100]), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def check_reference(heads: DeltaHeads, dtype: torch.dtype, counts: list[int], seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    weights, states = weights_of(heads), states_of(heads, dtype)
    starts = [data.draw(st.sampled_from([0, 3])) for _ in counts]
    kept = tuple(data.draw(st.integers(1, count)) for count in counts)
    slots = tuple(data.draw(st.permutations(range(SLOTS)))[: len(counts)])
    rows = rows_of(heads, sum(counts), dtype)
    results = []
    for rule in (DeltaRule(), NativeDeltaRule()):
        own = [state.clone() for state in states]
        metadata = step(counts, starts, slots, kept)
        out = rule(DeltaRows(*rows, states_of_step(metadata)), weights, heads, *own)
        results.append((out.float(), own[0].float(), own[1]))
    for expected, found in zip(*results, strict=True):
        # A convolution of one row keeps none.
        most = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, atol=most * (2e-4 if dtype is torch.float32 else 2e-2), rtol=0)


def test_results_and_states_are_the_references() -> None:
    check_reference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_in_any_chunks_beside_others_and_on_one_thread(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    heads = DeltaHeads(2, 4, 24, 40, 4, (True,))
    weights, states, rule = weights_of(heads), states_of(heads, dtype), NativeDeltaRule()
    mixed, numbers = rows_of(heads, 150, dtype)

    def run(chunks: list[int], other: int) -> tuple[Tensor, list[Tensor]]:
        own, found, first = [state.clone() for state in states], [], 0
        for count in chunks:
            part = slice(first, first + count)
            beside = rows_of(heads, other, dtype)
            both = (torch.cat((beside[0], mixed[part])), torch.cat((beside[1], numbers[part])))
            metadata = step([other, count], [5, first], (0, 2))
            found.append(rule(DeltaRows(*both, states_of_step(metadata)), weights, heads, *own)[other:])
            first += count
        return torch.cat(found), [state[2] for state in own]

    expected, after = run([150], 3)
    torch.set_num_threads(1)
    for chunks, other in (([1] * 150, 1), ([64, 86], 70), ([7, 63, 64, 16], 2)):
        found, own = run(chunks, other)
        assert torch.equal(found, expected)
        assert all(map(torch.equal, own, after))
    torch.set_num_threads(2)


def test_impossible_arguments_raise() -> None:
    heads = DeltaHeads(2, 4, 8, 8, 4, (True,))
    weights, (conv, state), rule = weights_of(heads), states_of(heads, torch.float32), NativeDeltaRule()
    mixed, numbers = rows_of(heads, 3, torch.float32)
    places = states_of_step(step([3], [0], (1,)))
    wrong = [
        (DeltaRows(mixed[:, 1:], numbers, places), conv, state),
        (DeltaRows(mixed, numbers.bfloat16(), places), conv, state),
        (DeltaRows(mixed[:2], numbers[:2], places), conv, state),
        (DeltaRows(mixed, numbers, places), conv[:, 1:], state),
        (DeltaRows(mixed, numbers, places), conv, state.double()),
        (DeltaRows(mixed, numbers, states_of_step(step([3], [0], (SLOTS,)))), conv, state),
        (DeltaRows(mixed, numbers, states_of_step(step([3], [0], (1,), (4,)))), conv, state),
    ]
    for rows, before, matrices in wrong:
        with pytest.raises(RuntimeError):
            rule(rows, weights, heads, before, matrices)

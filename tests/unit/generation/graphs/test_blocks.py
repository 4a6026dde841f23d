"""Masks of callers become lengths, and those that are not causal with padding are refused."""

from __future__ import annotations

import pytest
import torch
from penstock.common.errors import InvalidArgument
from penstock.generation.graphs.blocks import read_mask


def mask(history: int, rows: int, columns: int, num_rows: int, hidden: float = -10000.0) -> torch.Tensor:
    """Make one sequence's mask (1, num_rows, columns + num_rows)."""
    made = torch.full((1, num_rows, columns + num_rows), hidden)
    for row in range(rows):
        made[0, row, :history] = 0.0
        made[0, row, columns : columns + row + 1] = 0.0
    return made


@pytest.mark.parametrize("hidden", [-10000.0, -torch.inf, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("lengths", [(0, 5, 0, 5), (0, 3, 0, 5), (4, 1, 9, 1), (0, 1, 9, 1), (2, 2, 3, 4)])
def test_lengths_are_read(lengths: tuple[int, int, int, int], hidden: float) -> None:
    history, rows, columns, num_rows = lengths
    for dtype in (torch.float32, torch.bfloat16):
        made = mask(history, rows, columns, num_rows, hidden)[None].to(dtype)
        assert read_mask(made, num_rows) == [(history, rows)]


def test_each_sequence_has_its_own() -> None:
    made = torch.stack([mask(2, 1, 6, 3), mask(6, 3, 6, 3)])
    assert read_mask(made, 3) == [(2, 1), (6, 3)]


def test_others_are_refused() -> None:
    nothing = mask(0, 0, 2, 3)
    full = torch.zeros(1, 3, 3)
    gap = mask(3, 1, 4, 1)
    gap[0, 0, 1] = -10000.0
    left = mask(0, 3, 0, 3)
    left[0, 0, 0] = -10000.0
    biased = mask(0, 3, 0, 3)
    biased[0, 2, 0] = -0.5
    uneven = mask(1, 2, 2, 2)
    uneven[0, 1, 1] = 0.0
    for made, rows in ((nothing, 3), (full, 3), (gap, 1), (left, 3), (biased, 3), (uneven, 2)):
        with pytest.raises(InvalidArgument, match=r"inputs\[2\]"):
            read_mask(made[None], rows)

"""The fast path's test of a step, which is asked in every step: what it looks at again, and when."""

from __future__ import annotations

import pytest
import torch
from factories.engine.sequences import params, sequence
from penstock.generation.core.sequence import Sequence
from penstock.generation.runner import fast_path
from penstock.generation.runner.draw_rows import DrawRows
from penstock.generation.runner.fast_path import FastPath
from penstock.generation.sampling.sampler import Sampler


def draws_of(*sequences: Sequence) -> DrawRows:
    """Draws of a step in which each sequence draws from a row of its own."""
    count = len(sequences)
    return DrawRows(rows=list(range(count)), repeats=[1] * count, sequences=list(sequences))


def test_rows_are_examined_once_for_a_composition_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[int] = []
    # Nobody wants this feature; it tells who was asked.
    spy = [lambda one, plan: examined.append(one.seq_id) is not None]
    monkeypatch.setattr(fast_path, "_WANTED_BY_ROW", (*spy, *fast_path._WANTED_BY_ROW))
    path, sampler = FastPath(), Sampler(torch.device("cpu"))
    first, second, third = (sequence([1, 2], params(), seq_id=number) for number in range(3))

    def step(*sequences: Sequence, released: tuple[int, ...] = ()) -> bool:
        # As the runner does in every step, whether anything ends or not.
        sampler.release(released)
        path.release(released)
        return path.takes(draws_of(*sequences), len(sequences), sampler)

    assert all(step(first, second) for _ in range(5))
    assert examined == [0, 1]
    assert all(step(first, second, third) for _ in range(5))
    assert examined == [0, 1, 0, 1, 2]
    assert step(first, third, released=(1,))
    assert examined == [0, 1, 0, 1, 2, 0, 2]
    # Nothing of sequences that are gone is kept.
    path.release((0, 2))
    assert path._batch is None

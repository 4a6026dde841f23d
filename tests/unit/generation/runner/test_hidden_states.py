"""Hidden states kept for contrastive search: shared rows, written only by the sequence that goes on."""

from __future__ import annotations

import pytest
import torch
from factories.engine.sequences import params, sequence
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import Fork, ScheduledSequence
from penstock.generation.runner.hidden_states import CHUNK, HiddenHistories

HIDDEN = 6
RANDOM = torch.Generator().manual_seed(3)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=RANDOM)


def new(seq_id: int) -> Sequence:
    return sequence([1], params(), seq_id=seq_id)


def add(histories: HiddenHistories, start: int, *parts: tuple[Sequence, torch.Tensor]) -> None:
    """A step in which each sequence computes its rows from token `start` on."""
    entries, first = [], 0
    for one, part in parts:
        entries.append((ScheduledSequence(one, start, len(part)), first))
        first += len(part)
    histories.add(entries, torch.cat([part for _, part in parts]))


def expected(before: torch.Tensor, last: torch.Tensor) -> float:
    return float(torch.cosine_similarity(before, last[None]).max())


@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
@pytest.mark.parametrize("step", [1, 50, 10_000])
def test_similarity_is_the_largest_with_any_row_before_however_they_came(length: int, step: int) -> None:
    histories, one, everything = HiddenHistories(), new(1), rows(length + 1)
    for start in range(0, length, step):
        add(histories, start, (one, everything[start : min(start + step, length)]))
    add(histories, length, (one, everything[length:]))
    found = histories.similarities([one])
    assert found == {1: pytest.approx(expected(everything[:length], everything[length]), abs=1e-5)}


def test_candidates_share_what_they_go_on_from_and_only_the_chosen_one_writes() -> None:
    histories, parent, prompt = HiddenHistories(), new(1), rows(10)
    add(histories, 0, (parent, prompt))
    candidates = [new(2), new(3), new(4)]
    histories.fork([Fork(1, one.seq_id, 10) for one in candidates])
    histories.release([1])
    own = rows(3)
    add(histories, 10, *((one, own[place : place + 1]) for place, one in enumerate(candidates)))
    found = histories.similarities(candidates)
    for place, one in enumerate(candidates):
        assert found[one.seq_id] == pytest.approx(expected(prompt, own[place]), abs=1e-5)
    histories.fork([Fork(3, 5, 11)])
    histories.release([2, 3, 4])
    last, next_one = rows(1), new(5)
    add(histories, 11, (next_one, last))
    before = torch.cat([prompt, own[1:2]])
    assert histories.similarities([next_one])[5] == pytest.approx(expected(before, last[0]), abs=1e-5)
    state = histories._histories[5]
    assert len(state.rows.chunks) == 1, "the rows are written where they were"


@pytest.mark.parametrize("length", [3, CHUNK, CHUNK + 3])
def test_two_that_go_on_from_the_same_rows_have_their_own_after_them(length: int) -> None:
    histories, parent, prompt = HiddenHistories(), new(1), rows(length)
    add(histories, 0, (parent, prompt))
    left, right = new(2), new(3)
    histories.fork([Fork(1, 2, length), Fork(1, 3, length)])
    texts = {2: [prompt], 3: [prompt]}
    for position in range(length, length + 3):
        own = {2: rows(1), 3: rows(1)}
        add(histories, position, (left, own[2]), (right, own[3]))
        found = histories.similarities([left, right])
        for seq_id, text in texts.items():
            assert found[seq_id] == pytest.approx(expected(torch.cat(text), own[seq_id][0]), abs=1e-5)
            text.append(own[seq_id])


def test_a_fork_may_begin_before_its_parents_end() -> None:
    histories, parent, text = HiddenHistories(), new(1), rows(8)
    add(histories, 0, (parent, text))
    child, last = new(2), rows(1)
    histories.fork([Fork(1, 2, 5)])
    add(histories, 5, (child, last))
    assert histories.similarities([child])[2] == pytest.approx(expected(text[:5], last[0]), abs=1e-5)
    add(histories, 8, (parent, last))
    assert histories.similarities([parent])[1] == pytest.approx(expected(text, last[0]), abs=1e-5)


def test_a_sequence_that_starts_over_forgets_what_it_was() -> None:
    histories, one = HiddenHistories(), new(1)
    add(histories, 0, (one, rows(9)))
    fresh = rows(3)
    add(histories, 0, (one, fresh[:2]))
    add(histories, 2, (one, fresh[2:]))
    assert histories.similarities([one])[1] == pytest.approx(expected(fresh[:2], fresh[2]), abs=1e-5)

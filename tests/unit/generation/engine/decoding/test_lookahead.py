"""Guesses move towards what the model writes, and n-grams of their ways are kept within bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.engine.decoding.lookahead import Lookahead, NgramPool

Model = Callable[[list[int]], int]


def run(model: Model, prompt: list[int], length: int, lookahead: Lookahead) -> tuple[list[int], int]:
    """Decode by verified guesses; return the output and the number of steps."""
    token_ids, steps = list(prompt), 0
    drafts: list[int] = []
    while len(token_ids) < len(prompt) + length:
        steps += 1
        draws = [model([*token_ids, *drafts[:place]]) for place in range(len(drafts) + 1)]
        right = next((i for i, draft in enumerate(drafts) if draft != draws[i]), len(drafts))
        token_ids += draws[: right + 1]
        lookahead.learn(token_ids, right + 1, drafts, draws)
        drafts = lookahead.guess(token_ids[-1], 99)
    return token_ids[len(prompt) : len(prompt) + length], steps


def plain(model: Model, prompt: list[int], length: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(length):
        token_ids.append(model(token_ids))
    return token_ids[len(prompt) :]


def test_where_tokens_depend_on_their_position_alone_one_correction_is_enough() -> None:
    lookahead = Lookahead(8, 4, 4, [1])
    output, steps = run(lambda ids: len(ids) % 997 + 3, [1, 2], 63, lookahead)
    assert output == [n % 997 + 3 for n in range(2, 65)]
    # A first guess of fillers, then whole windows: two steps for nine tokens at the least.
    assert steps <= 2 * 63 // 9 + 2


def test_a_repetition_is_led_by_the_pool() -> None:
    lookahead = Lookahead(6, 4, 4, [0])
    output, steps = run(lambda ids: (ids[-1] + 1) % 10, [0], 70, lookahead)
    assert output == [(n + 1) % 10 for n in range(70)]
    assert steps < 30


@settings(max_examples=25, deadline=None)
@given(
    window=st.integers(1, 9),
    size=st.integers(2, 5),
    guesses=st.integers(1, 3),
    vocab=st.integers(2, 6),
    order=st.integers(1, 3),
)
def test_whatever_the_guesses_the_output_is_the_models(
    window: int, size: int, guesses: int, vocab: int, order: int
) -> None:
    def model(ids: list[int]) -> int:
        return sum((place + 2) * token for place, token in enumerate(ids[-order:])) % vocab

    output, steps = run(model, [1, 0, 1], 40, Lookahead(window, size, guesses, [0, 1]))
    assert output == plain(model, [1, 0, 1], 40)
    assert steps <= 40


def test_guesses_fill_the_window_or_the_room() -> None:
    lookahead = Lookahead(5, 3, 2, [7, 8])
    lookahead.learn([1, 2], 1, [], [2])
    assert len(lookahead.guess(2, 99)) == 5
    assert len(lookahead.guess(2, 3)) == 3


def test_a_diagonal_of_guesses_becomes_an_n_gram() -> None:
    lookahead = Lookahead(3, 3, 2, [0])
    # Nothing is right: what follows the guess 5 is drawn as 6, and what follows 6, a step later, as 7.
    lookahead.learn([1, 2], 1, [9, 5, 4], [2, 3, 6, 8])
    assert lookahead.guess(2, 9)[:3] == [3, 6, 8]
    lookahead.learn([1, 2, 30], 1, [3, 6, 8], [30, 31, 7, 32])
    assert lookahead.guess(5, 2) == [6, 7]


def test_the_pool_keeps_the_newest_and_prefers_what_the_guesses_say() -> None:
    pool = NgramPool(3, 2)
    for tail in ((2, 3), (4, 5), (6, 7)):
        pool.add((1, *tail))
    assert pool.after(1, []) == (6, 7)
    assert pool.after(1, [4, 9]) == (4, 5)
    assert pool.after(1, [2, 3]) == (6, 7), "the oldest had to go"
    pool.add((1, 4, 5))
    assert pool.after(1, []) == (4, 5)
    assert pool.after(2, [2]) == ()


@pytest.mark.parametrize("count", [1024, 5000])
def test_the_pool_is_bounded(count: int) -> None:
    pool = NgramPool(2, 1)
    for number in range(count):
        pool.add((number, 1))
    assert pool.after(count - 1, []) == (1,)
    assert sum(bool(pool.after(number, [])) for number in range(count)) == 1024

"""Drafts of a sequence from guesses that every step corrects: lookahead without rows of its own.

Lookahead decoding (Fu et al. 2024) computes a window of guesses in addition to the sequence, in rows with a mask of
their own, and verifies n-grams from earlier windows. Here the window is the drafts themselves (Jacobi decoding,
Santilli et al. 2023): a step draws after every draft anyway, and the draws after wrong drafts are better guesses for
the next step, since each sees the corrected guess before it. The n-grams that the guesses form go into a pool as in
lookahead decoding, and lead the drafts whenever the sequence comes to their first token.
docs/learn/decisions/lookahead-as-drafts.md says why.

With sampling, the draw of a position is a function of the tokens before it (its uniform is that of seed and position).
So the guesses move towards the sampled sequence just as they do towards the greedy one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

# First tokens of a sequence's n-grams that are kept.
_MOST_FIRST_TOKENS = 1024
_Ids: TypeAlias = tuple[int, ...]


class NgramPool:
    """N-grams by their first token: the last few of each first token, and the most recently met first tokens."""

    def __init__(self, size: int, guesses: int) -> None:
        """`size`: tokens of an n-gram. `guesses`: n-grams to keep for each first token."""
        self._size = size
        self._guesses = guesses
        # First token -> the tokens after it, the newest last.
        self._tails: OrderedDict[int, dict[_Ids, None]] = OrderedDict()

    def add(self, ngram: _Ids) -> None:
        """Keep an n-gram."""
        first, tail = ngram[0], ngram[1:]
        tails = self._tails.get(first)
        if tails is None:
            tails = self._tails[first] = {}
            if len(self._tails) > _MOST_FIRST_TOKENS:
                self._tails.popitem(last=False)
        else:
            self._tails.move_to_end(first)
            tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self._guesses:
            del tails[next(iter(tails))]

    def after(self, first: int, guesses: Sequence[int]) -> _Ids:
        """Return a likely continuation of `first`: the tail with the longest agreement with `guesses`, of several the
        newest."""
        tails = self._tails.get(first)
        if not tails:
            return ()
        best: _Ids = ()
        longest = -1
        for tail in reversed(tails):
            common = next((i for i, (one, other) in enumerate(zip(tail, guesses, strict=False)) if one != other), None)
            length = min(len(tail), len(guesses)) if common is None else common
            if length > longest:
                best, longest = tail, length
        return best


class Lookahead:
    """Guesses of one sequence: a window of positions, with the last few guesses of each.

    Guesses of neighbouring positions from successive steps are a diagonal of this window: each was drawn after the one
    before it. A whole diagonal is an n-gram that the model might write.
    """

    def __init__(self, window: int, ngram_size: int, guesses: int, fillers: Sequence[int]) -> None:
        """`window`: positions. `fillers`: tokens to begin guesses with, at least one."""
        self._window = window
        self._size = ngram_size
        self._pool = NgramPool(ngram_size, guesses)
        self._fillers = fillers
        self._num_filled = 0
        # For each position after the last token the diagonal that ends in its guess, shorter than an n-gram.
        self._diagonals: list[_Ids] = []

    def learn(self, token_ids: Sequence[int], num_new: int, drafts: Sequence[int], draws: Sequence[int]) -> None:
        """Take the draws of a step: `draws[i]` is what followed `drafts[: i]`.

        `token_ids` already end in the first `num_new` draws. The drafts before the last of these were all right.
        """
        size, pool = self._size, self._pool
        num_tokens = len(token_ids)
        for end in range(num_tokens - num_new + 1, num_tokens + 1):
            if end >= size:
                pool.add(tuple(token_ids[end - size : end]))
        known = self._diagonals
        diagonals: list[_Ids] = []
        for place in range(1, len(draws)):
            draft = drafts[place - 1]
            has_guess = place <= len(known) and known[place - 1][-1] == draft
            diagonal = (*(known[place - 1] if has_guess else (draft,)), draws[place])
            if len(diagonal) == size:
                if place >= num_new:
                    pool.add(diagonal)
                diagonal = diagonal[1:]
            if place >= num_new:
                diagonals.append(diagonal)
        self._diagonals = diagonals

    def guess(self, last_token_id: int, max_tokens: int) -> list[int]:
        """Return the guesses after the last token: n-grams of the pool, else the window's, else fillers."""
        wanted = min(self._window, max_tokens)
        guesses = [diagonal[-1] for diagonal in islice(self._diagonals, wanted)]
        drafts: list[int] = []
        last = last_token_id
        while len(drafts) < wanted:
            place = len(drafts)
            tail = self._pool.after(last, guesses[place:])
            if tail:
                drafts += tail[: wanted - place]
            elif place < len(guesses):
                drafts.append(guesses[place])
            else:
                drafts.append(self._filler())
            last = drafts[-1]
        return drafts

    def _filler(self) -> int:
        self._num_filled += 1
        return self._fillers[self._num_filled % len(self._fillers)]

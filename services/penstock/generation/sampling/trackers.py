"""Trackers keep facts about a sequence's tokens from step to step: a step costs only the tokens that it adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

_FIRST_CAPACITY = 64
# n-gram -> the tokens that followed it.
_Followers = dict[tuple[int, ...], set[int]]


class Tracker(ABC):
    """Follows the tokens of one sequence."""

    __slots__ = ()

    @abstractmethod
    def follow(self, token_ids: Seq[int], start: int) -> None:
        """Take `token_ids[start:]`, after earlier calls for the tokens before. A start of 0 begins anew."""

    @abstractmethod
    def copy(self) -> Self:
        """Return a copy for a sequence that continues the same tokens; the two share nothing that changes."""


class TokenCounts(Tracker):
    """Distinct token ids, each once, with counts, in arrays that grow by doubling. Adding a token is O(1)."""

    __slots__ = ("_counts", "_first", "_ids", "_index")

    def __init__(self, first: int = 0) -> None:
        """Begin without tokens; those before place `first` will not be counted."""
        self._first = first
        self._index: dict[int, int] = {}
        self._clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct ids; a view that is valid until the next change."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Number of occurrences of each of `ids`; a view that is valid until the next change."""
        return self._counts[: len(self._index)]

    def follow(self, token_ids: Seq[int], start: int) -> None:
        if start == 0:
            self._clear()
        self.extend(token_ids[max(start, self._first) :])

    def copy(self) -> Self:
        twin = type(self)(self._first)
        twin._ids, twin._counts, twin._index = self._ids.copy(), self._counts.copy(), self._index.copy()
        return twin

    def extend(self, token_ids: Seq[int]) -> None:
        """Count every one of `token_ids`."""
        if self._index or len(token_ids) < _FIRST_CAPACITY:
            for token_id in token_ids:
                self.add(token_id)
            return
        # A prompt is counted at once: token by token it would delay the step of all sequences, once per sibling.
        self._ids, counts = np.unique(np.array(token_ids, dtype=np.int64), return_counts=True)
        self._counts = counts.astype(np.float32)
        self._index = dict(zip(self._ids.tolist(), range(len(self._ids)), strict=True))

    def add(self, token_id: int) -> None:
        """Count one more occurrence."""
        index = self._index.get(token_id)
        if index is None:
            index = len(self._index)
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._index[token_id] = index
            self._ids[index] = token_id
        self._counts[index] += 1

    def _clear(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.float32)
        self._index.clear()


class PromptIds(Tracker):
    """Distinct ids of the prompt, ascending."""

    __slots__ = ("_num_prompt_tokens", "ids")

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self.ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def follow(self, token_ids: Seq[int], start: int) -> None:
        if start == 0:
            self.ids = np.unique(np.array(token_ids[: self._num_prompt_tokens], dtype=np.int64))

    def copy(self) -> Self:
        # Sequences of one request that share a prompt hold the same array.
        twin = type(self)(self._num_prompt_tokens)
        twin.ids = self.ids
        return twin


class NgramFollowers(Tracker):
    """Tokens after every (size - 1)-gram of the prompt and, unless `prompt_only`, of the output."""

    __slots__ = ("_num_prompt_tokens", "_of_output", "_of_prompt", "_own", "_prompt_only", "_size")

    def __init__(self, size: int, num_prompt_tokens: int, *, prompt_only: bool = False) -> None:
        self._size = size
        self._num_prompt_tokens = num_prompt_tokens
        self._prompt_only = prompt_only
        # Copies share the followers in the prompt; nothing is added to them.
        self._of_prompt: _Followers = {}
        self._of_output: _Followers = {}
        # The n-grams with followers in `_of_output` that no copy holds; None: all of them.
        self._own: set[tuple[int, ...]] | None = None

    def follow(self, token_ids: Seq[int], start: int) -> None:
        prompt = min(self._num_prompt_tokens, len(token_ids))
        if start == 0:
            self._of_prompt, self._of_output, self._own = {}, {}, None
            self._add(self._of_prompt, None, token_ids, 0, prompt)
        if not self._prompt_only:
            self._add(self._of_output, self._own, token_ids, max(start, prompt), len(token_ids))

    def copy(self) -> Self:
        twin = type(self)(self._size, self._num_prompt_tokens, prompt_only=self._prompt_only)
        twin._of_prompt = self._of_prompt
        # Followers are copied only when one of the two adds to them: an output has many, and a step makes many copies.
        twin._of_output = self._of_output.copy()
        self._own, twin._own = set(), set()
        return twin

    def after(self, token_ids: Seq[int]) -> set[int]:
        """Tokens that would complete an n-gram again after `token_ids`."""
        length = self._size - 1
        if len(token_ids) < length:
            return set()
        last = tuple(token_ids[len(token_ids) - length :])
        prompt, output = self._of_prompt.get(last), self._of_output.get(last)
        if prompt is None or output is None:
            return prompt or output or set()
        return prompt | output

    def _add(
        self, followers: _Followers, own: set[tuple[int, ...]] | None, token_ids: Seq[int], start: int, end: int
    ) -> None:
        length = self._size - 1
        for place in range(max(start, length), end):
            ngram = tuple(token_ids[place - length : place])
            known = followers.get(ngram)
            if known is None or (own is not None and ngram not in own):
                known = followers[ngram] = set(known or ())
                if own is not None:
                    own.add(ngram)
            known.add(token_ids[place])

"""What the sampler keeps per live sequence: its stream of draws and which tokens it has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.generation.sampling.rng import stream_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.generation.engine.sequence import Sequence

_FIRST_CAPACITY = 64


class TokenCounts:
    """Distinct token ids in order of first appearance, with counts, in arrays that grow by doubling.

    Adding a token is O(1), so a step costs the tokens it adds, not the length of the sequence.
    """

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.float32)
        self._index: dict[int, int] = {}
        for token_id in token_ids:
            self.add(token_id)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct ids; a view that is valid until the next `add`."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` occurred; a view that is valid until the next `add`."""
        return self._counts[: len(self._index)]

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


class SamplingState:
    """State of one sequence from its first draw until it is released; rebuilt from the ids after a preemption."""

    __slots__ = ("_num_counted", "key", "outputs", "seen", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.params
        self.sequence = sequence
        self.key = int(stream_keys(np.array([sequence.seed], dtype=np.uint64))[0])
        # Prompt and output, for the repetition penalty; None while it is off.
        self.seen = TokenCounts() if params.repetition_penalty != 1.0 else None
        # Output only, for OpenAI's penalties; None while they are off.
        penalised = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.outputs = TokenCounts() if penalised else None
        self._num_counted = 0

    def catch_up(self) -> None:
        """Count the tokens that the sequence gained since the last draw: one in a steady decode."""
        token_ids, counted = self.sequence.token_ids, self._num_counted
        if self.seen is not None:
            for token_id in token_ids[counted:]:
                self.seen.add(token_id)
        if self.outputs is not None:
            for token_id in token_ids[max(counted, self.sequence.num_prompt_tokens) :]:
                self.outputs.add(token_id)
        self._num_counted = len(token_ids)

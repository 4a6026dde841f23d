"""What the sampler keeps per live sequence: its stream of draws and which tokens it has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.generation.sampling.rng import stream_keys

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.engine.sequence import Sequence

_FIRST_CAPACITY = 64


class TokenCounts:
    """Distinct token ids, each once, with counts, in arrays that grow by doubling.

    Adding a token is O(1), so a step costs the tokens it adds, not the length of the sequence.
    """

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, token_ids: Seq[int] = ()) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.float32)
        self._index: dict[int, int] = {}
        self.extend(token_ids)

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

    def extend(self, token_ids: Seq[int]) -> None:
        """Count every one of `token_ids`."""
        if self._index or len(token_ids) < _FIRST_CAPACITY:
            for token_id in token_ids:
                self.add(token_id)
            return
        # A prompt at once: token by token it would hold up the step of everybody, once per sibling.
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
            self.seen.extend(token_ids[counted:])
        if self.outputs is not None:
            self.outputs.extend(token_ids[max(counted, self.sequence.num_prompt_tokens) :])
        self._num_counted = len(token_ids)

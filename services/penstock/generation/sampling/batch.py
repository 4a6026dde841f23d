"""The sequences that draw in a step, with their options as tensors over the rows."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.generation.sampling.processors import PROCESSORS, MinP, Temperature, TopK, TopP
from penstock.generation.sampling.rng import uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.engine.sequence import Sequence
    from penstock.generation.sampling.params import SamplingParams
    from penstock.generation.sampling.processors import LogitsProcessor, Warper
    from penstock.generation.sampling.state import SamplingState

# (largest top_k, candidates that are looked at for it); the surplus holds ties of the k-th score. A row's own options
# decide, never the other rows: the same row takes the same path in every batch.
_CANDIDATES = ((20, 32), (40, 64), (96, 128), (200, 256))
_NUCLEUS_CANDIDATES = 256


def is_greedy(params: SamplingParams) -> bool:
    """Greedy is do_sample off, or a temperature of 0."""
    return not params.do_sample or params.temperature == 0.0


def num_candidates(params: SamplingParams) -> int:
    """How many of the highest scores decide a draw with these options; 0 where only the whole vocabulary does."""
    if params.top_k > 0:
        return next((count for limit, count in _CANDIDATES if params.top_k <= limit), 0)
    return _NUCLEUS_CANDIDATES if params.top_p < 1.0 else 0


class SamplingBatch:
    """Options of N rows, M of them sampled; built when the composition of the batch changes, then reused.

    Attributes ending in `_M` are over the sampled rows, in the order of `sampled_rows`.
    """

    def __init__(self, states: Seq[SamplingState], device: torch.device) -> None:
        params = [state.sequence.params for state in states]
        self.states = states
        self.device = device
        self.greedy_rows = [row for row, p in enumerate(params) if is_greedy(p)]
        self.sampled_rows = [row for row, p in enumerate(params) if not is_greedy(p)]
        self.processors = _processors(states, device)
        # Rows whose state counts tokens.
        self.counting = [state for state in states if state.seen is not None or state.outputs is not None]
        # Row -> number of top logprobs, of the rows that asked for logprobs.
        self.num_top = {row: p.top_logprobs for row, p in enumerate(params) if p.top_logprobs is not None}

        sampled = [params[row] for row in self.sampled_rows]
        self.temperature = Temperature(sampled, device)
        self.top_k = TopK(sampled, device)
        self.top_p = TopP(sampled, device)
        self.min_p = MinP(sampled, device)
        self.keys_M = np.array([states[row].key for row in self.sampled_rows], dtype=np.uint64)
        self.sampled_index_M = self.index(self.sampled_rows)
        counts = [(num_candidates(p), p.top_k > 0) for p in sampled]
        # (number of candidates, has top-k) -> places among the sampled rows, which are drawn together.
        self.groups = {key: self.index([m for m, k in enumerate(counts) if k == key]) for key in sorted(set(counts))}

    def is_of(self, sequences: Seq[Sequence]) -> bool:
        """Whether the rows are these sequences, in this order."""
        states = self.states
        return len(states) == len(sequences) and all(map(is_, [state.sequence for state in states], sequences))

    @property
    def warpers(self) -> tuple[Warper, ...]:
        """The warpers in the order they run."""
        return (self.temperature, self.top_k, self.top_p, self.min_p)

    def index(self, rows: list[int]) -> torch.Tensor:
        """Row numbers as an index on the device."""
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def positions(self) -> npt.NDArray[np.uint64]:
        """Output tokens so far of every row (N)."""
        return np.array([state.sequence.num_output_tokens for state in self.states], dtype=np.uint64)

    def uniforms(self, positions_N: npt.NDArray[np.uint64]) -> torch.Tensor:
        """The draws of the sampled rows (M, fp64)."""
        return torch.from_numpy(uniforms(self.keys_M, positions_N[self.sampled_rows])).to(self.device)


def _processors(states: Seq[SamplingState], device: torch.device) -> list[LogitsProcessor]:
    active: list[LogitsProcessor] = []
    for kind in PROCESSORS:
        rows = [row for row, state in enumerate(states) if kind.wants(state.sequence.params)]
        if rows:
            active.append(kind(rows, [states[row] for row in rows], device))
    return active

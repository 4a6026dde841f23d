"""Masks of many sequences at once, on llguidance's own threads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from penstock.generation.grammar.tokenizer import words_of

if TYPE_CHECKING:
    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.grammar.state import MatcherState


class MaskWorkers:
    """Fills rows of a mask array (runner.grammar_masks.MaskFiller); the threads start with the first call."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        # As llguidance writes a mask: the end of output included.
        self.num_words = words_of(vocab_size + 1)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None

    def fill(self, states: Seq[GrammarState], words_RW: npt.NDArray[np.int32]) -> None:
        """Row i gets the mask of state i; `words_RW` has `num_words` columns.

        Releases the GIL while it computes; no two calls at once. The states are this library's: there is no other.
        """
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        own = cast("Seq[MatcherState]", states)
        rows, width = words_RW.shape
        self._executor.unsafe_compute_mask_ptr(
            [(state.matcher, row) for row, state in enumerate(own)], words_RW.ctypes.data, width * 4, rows
        )
        for state, row_W in zip(own, words_RW.view(np.uint32), strict=False):
            state.finish_mask(row_W)

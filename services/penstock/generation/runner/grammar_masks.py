"""Token masks of the sequences that draw in a step, computed during the forward pass."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.generation.sampling.token_masks import TokenMasks

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy.typing as npt

    from penstock.generation.core.grammar import GrammarState
    from penstock.generation.core.sequence import Sequence

_FIRST_ROWS = 8


class MaskFiller(Protocol):
    """Interface of the grammar library to the runner."""

    @property
    def num_words(self) -> int:
        """Number of words of a row: at least ceil(vocabulary / 32)."""
        ...

    def fill(self, states: Seq[GrammarState], words_RW: npt.NDArray[np.int32]) -> None:
        """Write the mask of state i into row i. Called on a thread of its own; releases the GIL."""
        ...


class GrammarMasks:
    """Masks of a step, started before its forward pass and taken after it. Used by one thread.

    No memory is allocated and no thread started before the first sequence with a grammar.
    """

    def __init__(self, filler: MaskFiller) -> None:
        self._filler = filler
        self._thread: ThreadPoolExecutor | None = None
        self._words_RW: npt.NDArray[np.int32] | None = None

    def start(self, sequences: Seq[Sequence]) -> PendingMasks:
        """Begin to compute the masks of `sequences`: at least one, each with a grammar.

        Their states must not change until the masks are taken. The next start overwrites the masks.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        states = [sequence.grammar for sequence in sequences if sequence.grammar is not None]
        words_RW = self._room(len(states))[: len(states)]
        row_of = {sequence.seq_id: row for row, sequence in enumerate(sequences)}
        return PendingMasks(TokenMasks(words_RW, row_of), self._thread.submit(self._filler.fill, states, words_RW))

    def _room(self, rows: int) -> npt.NDArray[np.int32]:
        room = self._words_RW
        if room is None or len(room) < rows:
            size = max(_FIRST_ROWS, 1 << (rows - 1).bit_length())
            room = self._words_RW = np.zeros((size, self._filler.num_words), dtype=np.int32)
        return room


class PendingMasks:
    """Masks in computation."""

    __slots__ = ("_done", "_masks")

    def __init__(self, masks: TokenMasks, done: Future[None]) -> None:
        self._masks = masks
        self._done = done

    def take(self) -> TokenMasks:
        """Wait for the masks and return them. Raises the filler's error."""
        try:
            self._done.result()
        except Exception:
            raise
        except BaseException as failure:  # a native library's panic is no Exception, and the engine must get it
            raise RuntimeError("token masks could not be computed") from failure
        return self._masks

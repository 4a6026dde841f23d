"""Hidden states of every token of the sequences in contrastive search, and their similarities.

Memory: a row of hidden size x 4 bytes per computed token. Candidates share the rows of their common prefix, and every
other sequence has KV blocks of its own (contrastive requests use no cached prefix). So there are never more rows than
slots in the pool, plus one unfinished chunk per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import Fork
    from penstock.generation.runner.draw_rows import EntryRows

# Rows to allocate at a time; a full chunk never moves.
CHUNK = 256


class _UnitRows:
    """Unit vectors (hidden) of consecutive tokens. Any number of sequences may read a prefix of them."""

    __slots__ = ("chunks", "filled")

    def __init__(self, chunks: list[Tensor], filled: int) -> None:
        self.chunks = chunks
        self.filled = filled

    def append(self, rows_NI: Tensor) -> None:
        """Append the rows of further tokens."""
        while len(rows_NI):
            used = self.filled % CHUNK
            if not used:
                self.chunks.append(rows_NI.new_empty((CHUNK, rows_NI.shape[1])))
            taken = min(len(rows_NI), CHUNK - used)
            self.chunks[-1][used : used + taken] = rows_NI[:taken]
            self.filled += taken
            rows_NI = rows_NI[taken:]

    def branch(self, length: int) -> _UnitRows:
        """Return rows that begin with the first `length` and continue differently. Full chunks are shared."""
        full, rest = divmod(length, CHUNK)
        chunks = self.chunks[:full]
        if rest:
            chunks.append(self.chunks[full].clone())
        return _UnitRows(chunks, length)

    def nearest(self, length: int, rows_KI: Tensor) -> Tensor:
        """Return (K): the largest cosine similarity of each of `rows_KI` with any of the first `length` rows."""
        found: Tensor | None = None
        for number, chunk in enumerate(self.chunks):
            known = min(length - number * CHUNK, CHUNK)
            if known <= 0:
                break
            highest_K = (chunk[:known] @ rows_KI.T).amax(0)
            found = highest_K if found is None else torch.maximum(found, highest_K)
        assert found is not None, "a candidate follows at least one token"
        return found


class _History:
    """History of one sequence: the first `length` of some rows, then `last_1I`, which is not among them yet.

    The last row stays out because candidates share the rows before it: only the candidate that goes on writes its row.
    """

    __slots__ = ("last_1I", "length", "rows")

    def __init__(self, rows: _UnitRows, length: int, last_1I: Tensor | None) -> None:
        self.rows = rows
        self.length = length
        self.last_1I = last_1I

    def settle(self) -> None:
        """Write the last row; into rows of its own if another sequence has extended the shared ones."""
        if self.last_1I is None:
            return
        if self.rows.filled != self.length:
            self.rows = self.rows.branch(self.length)
        self.rows.append(self.last_1I)
        self.length += 1
        self.last_1I = None

    def append(self, rows_NI: Tensor) -> None:
        """Append the rows of the next tokens."""
        self.settle()
        if len(rows_NI) > 1:
            if self.rows.filled != self.length:
                self.rows = self.rows.branch(self.length)
            self.rows.append(rows_NI[:-1])
            self.length += len(rows_NI) - 1
            rows_NI = rows_NI[-1:].clone()
        self.last_1I = rows_NI


class HiddenHistories:
    """Histories of the live sequences in contrastive search. Used by one thread, on the step path."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}

    def fork(self, forks: Iterable[Fork]) -> None:
        """Let children share their parents' rows of common tokens."""
        if not self._histories:
            return
        for parent, child, num_tokens in forks:
            history = self._histories.get(parent)
            if history is not None:
                if num_tokens > history.length:
                    history.settle()
                self._histories[child] = _History(history.rows, num_tokens, None)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences; ids that have no history are fine."""
        if self._histories:
            for seq_id in seq_ids:
                self._histories.pop(seq_id, None)

    def add(self, entries: Seq[EntryRows], hidden_TI: Tensor) -> None:
        """Append the entries' rows of the step's final hidden states (T, hidden) to their histories."""
        rows = [row + offset for entry, row in entries for offset in range(entry.num_tokens)]
        hidden_RI = hidden_TI[torch.tensor(rows, dtype=torch.int64, device=hidden_TI.device)].float()
        hidden_RI /= hidden_RI.norm(dim=-1, keepdim=True)
        first = 0
        for entry, _ in entries:
            seq_id = entry.sequence.seq_id
            if entry.start == 0:
                self._histories[seq_id] = _History(_UnitRows([], 0), 0, None)
            self._histories[seq_id].append(hidden_RI[first : first + entry.num_tokens])
            first += entry.num_tokens

    def similarities(self, sequences: Iterable[Sequence]) -> dict[int, float]:
        """Return seq_id -> largest cosine similarity of its last token with those before it.

        Candidates that go on from the same tokens take one product together.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for sequence in sequences:
            history = self._histories[sequence.seq_id]
            groups.setdefault((id(history.rows), history.length), []).append(sequence.seq_id)
        found: dict[int, float] = {}
        for (_, length), seq_ids in groups.items():
            histories = [self._histories[seq_id] for seq_id in seq_ids]
            last_KI = torch.cat([one.last_1I for one in histories if one.last_1I is not None])
            found.update(zip(seq_ids, histories[0].rows.nearest(length, last_KI).tolist(), strict=True))
        return found

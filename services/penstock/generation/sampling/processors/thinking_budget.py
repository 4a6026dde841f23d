"""The end of a thought before an answer that takes all of its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, cast

import torch

from penstock.generation.sampling.processors.base import Processor
from penstock.generation.sampling.trackers import Tracker
from penstock.text.token_bytes import TextCursor

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.thought_budget import ThoughtBudget
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.processors.base import RowState
    from penstock.text.thoughts import ThoughtGate


class ThoughtTokens(Tracker):
    """Number of tokens in the thought that an output begins with. A token that ends it or its first marker is none."""

    __slots__ = ("_budget", "_cursor", "_first", "_gate", "_num_ends", "_num_tokens")

    def __init__(self, budget: ThoughtBudget, first: int) -> None:
        """Begin without tokens; the output begins at place `first`."""
        self._budget, self._first = budget, first
        self._clear()

    def _clear(self) -> None:
        # None: the thought is over, or none came.
        self._gate: ThoughtGate[bytes] | None = self._budget.thought.byte_gate()
        self._cursor = TextCursor(self._budget.table, skip_special=False)
        self._num_tokens = 0
        # The last tokens are the first ids that close the thought.
        self._num_ends = 0

    @property
    def next_id(self) -> int | None:
        """The only token that may follow; None: any may."""
        if self._gate is None or not self._gate.has_thought or self._num_tokens < self._budget.num_free:
            return None
        return self._budget.end_ids[self._num_ends]

    def follow(self, token_ids: Seq[int], start: int) -> None:
        if start == 0:
            self._clear()
        for place in range(max(start, self._first), len(token_ids)):
            if self._gate is None:
                return
            self._take(self._gate, token_ids[place])

    def _take(self, gate: ThoughtGate[bytes], token_id: int) -> None:
        was_inside, forced = gate.has_thought, self.next_id
        _, answer = gate.feed(self._cursor.feed(token_id))
        self._num_tokens += was_inside
        # A call held to a grammar within a thought goes on to its end first.
        self._num_ends = self._num_ends + 1 if token_id == forced else 0
        if answer is not None or self._num_ends == len(self._budget.end_ids):
            self._gate = None

    def copy(self) -> Self:
        twin = type(self)(self._budget, self._first)
        twin._gate = None if self._gate is None else self._gate.copy()
        twin._cursor = self._cursor.copy()
        twin._num_tokens, twin._num_ends = self._num_tokens, self._num_ends
        return twin


class ThinkingBudget(Processor):
    """Closes a thought of `thinking_budget_tokens` tokens, as the model's chat template closes thoughts. It is the last
    of its stage: no other option keeps the closing ids from being drawn."""

    def __init__(self, rows: Seq[int], states: Seq[RowState], device: torch.device) -> None:
        self._rows = [
            (row, cast("ThoughtTokens", state.trackers[ThinkingBudget]))
            for row, state in zip(rows, states, strict=True)
        ]

    @staticmethod
    def wants(params: SamplingParams) -> bool:
        return params.thought_budget is not None

    @staticmethod
    def tracker(sequence: Sequence, prepared: object) -> ThoughtTokens | None:
        budget = sequence.params.thought_budget
        return None if budget is None else ThoughtTokens(budget, sequence.num_prompt_tokens)

    def apply(self, scores_NV: torch.Tensor, context: DrawContext) -> None:
        for row, tokens in self._rows:
            token_id = tokens.next_id
            if token_id is not None:
                scores_NV[row] = -torch.inf
                scores_NV[row, token_id] = 0.0

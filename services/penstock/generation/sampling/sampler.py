"""The sampler: logits become tokens.

processors of stage SCORES (all rows), the grammar's masks -> WARP (sampled rows) -> LATE (all rows)
    -> greedy rows: argmax
    -> sampled rows: one draw by inverse CDF, mostly without warping the whole vocabulary
    -> rows with a strategy that chooses the token: the highest scores
    -> logprobs, for the rows that asked

A row's result depends only on its own scores, options, seed and position: its own data choose its algorithm, and every
algorithm treats its rows one by one (no reduction is split by the number of rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.generation.sampling.batch import SamplingBatch
from penstock.generation.sampling.beam_candidates import draw_candidates
from penstock.generation.sampling.drawing import Drawing
from penstock.generation.sampling.row_plan import RowPlan
from penstock.generation.sampling.sampling_kernels import SamplingKernels
from penstock.generation.sampling.state import SamplingState

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from collections.abc import Sequence as Seq

    from penstock.generation.core.sequence import Sequence
    from penstock.generation.core.step import Fork, SampledToken
    from penstock.generation.sampling.draw_context import DrawContext
    from penstock.generation.sampling.token_masks import TokenMasks

# Numbers of drafts vary from step to step: batches with verifiers that are kept.
_MOST_ALIKE = 16


class Sampler:
    """Draws the next token of every row. Keeps state per sequence from its first draw until `release`."""

    def __init__(self, device: torch.device, kernels: SamplingKernels | None = None) -> None:
        """Make a sampler on `device`; `kernels` None: the reference, torch's operators."""
        self._device = device
        self._kernels = kernels or SamplingKernels()
        self._states: dict[int, SamplingState] = {}
        # States of forks that have not drawn yet.
        self._forked: dict[int, SamplingState] = {}
        self._batch: SamplingBatch | None = None
        # Batches of steps with verifiers, without their rows: those of one step are gone in the next, and have the
        # options of their sequences. The least recently made first.
        self._alike: dict[Hashable, SamplingBatch] = {}
        # The newest row plan: sequences of one request come one after another.
        self._plan: RowPlan | None = None

    @torch.inference_mode()
    def sample(
        self, logits_NV: torch.Tensor, sequences: Seq[Sequence], masks: TokenMasks | None = None
    ) -> list[SampledToken]:
        """Choose one token per row, for the sequence of that row.

        `logits_NV` (fp32, contiguous) are consumed: the processors work in place. Raises FloatingPointError when the
        model produced a NaN.
        """
        batch = self.batch_of(sequences)
        context = batch.context()
        drawing = self._kernels.drawing(batch, logits_NV, context)
        self._process(drawing, batch, logits_NV, context)
        if masks is not None:
            masks.apply(logits_NV, sequences)
        drawing.warp(batch.warped_first)
        for processor in batch.late_processors:
            processor.apply(logits_NV, context)
        if batch.greedy_rows:
            drawing.greedy()
        if batch.sampled_rows:
            drawing.sampled(batch.uniforms(context))
        tokens = drawing.tokens()
        if batch.candidate_rows:
            for row, token in draw_candidates(batch, logits_NV, self._kernels).items():
                tokens[row] = token
        if batch is not self._batch:
            # Verifiers live for one step.
            batch.states = ()
        return tokens

    @torch.inference_mode()
    def processed_scores(
        self, logits_NV: torch.Tensor, sequences: Seq[Sequence], masks: TokenMasks | None = None
    ) -> torch.Tensor:
        """Return the scores (N, V) that a token is drawn from, as in transformers' `output_scores` for this step.

        It is the reference for `sample`: every processor and warper runs on the whole vocabulary.
        """
        batch = SamplingBatch(
            [self._state_of(sequence) for sequence in sequences], self._device, SamplingKernels(), is_reference=True
        )
        scores_NV, context = logits_NV.clone(), batch.context()
        drawing = Drawing(batch, scores_NV, context)
        self._process(drawing, batch, scores_NV, context)
        if masks is not None:
            masks.apply(scores_NV, sequences)
        drawing.warp(batch.index(list(range(len(batch.sampled_rows)))))
        for processor in batch.late_processors:
            processor.apply(scores_NV, context)
        return scores_NV

    def fork(self, forks: Iterable[Fork]) -> None:
        """Let children begin with the counts of their parents, as far as they share tokens."""
        for parent, child, num_tokens in forks:
            state = self._states.get(parent) or self._forked.get(parent)
            # A child that has drawn already began before: siblings draw from the row that they fork after.
            if state is not None and child not in self._states and state.has_followed_at_most(num_tokens):
                self._forked[child] = state.copy()

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences; ids that never drew are fine."""
        for seq_id in seq_ids:
            self._forked.pop(seq_id, None)
            if self._states.pop(seq_id, None) is not None:
                self._batch = None
                self._alike.clear()

    def batch_of(self, sequences: Seq[Sequence]) -> SamplingBatch:
        """Return the batch of these sequences: last step's when it was the same."""
        last = self._batch
        if last is not None and last.is_of(sequences):
            return last
        states = [self._state_of(sequence) for sequence in sequences]
        if any(sequence.origin is not None for sequence in sequences):
            return self._verifying(states)
        batch = self._batch = SamplingBatch(states, self._device, self._kernels)
        return batch

    def _verifying(self, states: list[SamplingState]) -> SamplingBatch:
        """Return a batch with verifiers: one of an earlier step where rows were the same but for their tokens."""
        if any(state.plan.processors for state in states):
            # They know the rows.
            return SamplingBatch(states, self._device, self._kernels)
        key = tuple((state.plan, state.key, state.sequence.draw.kind) for state in states)
        batch = self._alike.get(key)
        if batch is not None:
            batch.states = states
            return batch
        if len(self._alike) == _MOST_ALIKE:
            del self._alike[next(iter(self._alike))]
        batch = self._alike[key] = SamplingBatch(states, self._device, self._kernels)
        return batch

    def plan_of(self, sequence: Sequence) -> RowPlan:
        """Return the row plan for the options of the sequence, or for a verifier those of its own sequence."""
        return self._state_of(sequence.origin or sequence).plan

    def _state_of(self, sequence: Sequence) -> SamplingState:
        origin = sequence.origin
        if origin is not None:
            beginning = self._state_of(origin)
            beginning.catch_up_without_drafts()
            return beginning.copy().attach(sequence)
        state = self._states.get(sequence.seq_id)
        if state is None:
            forked = self._forked.pop(sequence.seq_id, None)
            # A healed prompt's sequence forks from one with other options.
            inherits = forked is not None and forked.sequence.params is sequence.params
            state = forked.attach(sequence) if forked is not None and inherits else self._new_state(sequence)
            self._states[sequence.seq_id] = state
        return state

    def _new_state(self, sequence: Sequence) -> SamplingState:
        if self._plan is None or self._plan.params is not sequence.params:
            self._plan = RowPlan.of(sequence.params)
        return SamplingState(sequence, self._plan)

    @staticmethod
    def _process(drawing: Drawing, batch: SamplingBatch, scores_NV: torch.Tensor, context: DrawContext) -> None:
        """Run everything before the warpers, on all rows."""
        for state in batch.following:
            state.catch_up()
        if batch.candidate_rows:
            drawing.normalise()
        for processor in batch.processors:
            processor.apply(scores_NV, context)

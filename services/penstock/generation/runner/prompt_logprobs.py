"""Log-probabilities of prompt tokens by the model's own distribution, for prompt_logprobs and for scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.generation.core.request import PositionLogprobs
    from penstock.generation.core.step import ScheduledSequence
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.sampling.kernels import SamplingKernels


class PromptScorer:
    """Scorer of prompt rows. It computes logits of the needed rows only, a bounded number of them at a time."""

    def __init__(self, model: CausalLM, max_rows: int, kernels: SamplingKernels) -> None:
        """`max_rows`: most rows of logits at once; each takes vocabulary x 4 bytes, thrice."""
        self._model = model
        self._max_rows = max_rows
        self._kernels = kernels

    def score(self, entry: ScheduledSequence, hidden_PI: torch.Tensor) -> tuple[PositionLogprobs, ...]:
        """Return logprobs of the tokens that the entry's rows predict, from Sequence.first_logprob_row on; maybe none.

        `hidden_PI` are the entry's rows. Row i predicts token i + 1, of the prompt only.
        """
        sequence = entry.sequence
        first, end = max(entry.start, sequence.first_logprob_row or 0), entry.start + entry.num_tokens
        targets = sequence.token_ids[first + 1 : min(end + 1, sequence.num_prompt_tokens)]
        if sequence.next_token_id is not None and end == sequence.num_prompt_tokens:
            targets.append(sequence.next_token_id)
        num_top = sequence.params.prompt_logprobs or 0
        rows_PI = hidden_PI[first - entry.start :]
        entries: list[PositionLogprobs] = []
        for begin in range(0, len(targets), self._max_rows):
            some = targets[begin : begin + self._max_rows]
            chosen = torch.tensor(some, dtype=torch.int64, device=self._model.device)
            logits = self._model.compute_logits(rows_PI[begin : begin + len(some)])
            entries += self._kernels.position_logprobs(logits, chosen, [num_top] * len(some))
        return tuple(entries)

"""A draft model's copy of a sequence, from which it draws with the request's own options."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.generation.core.decoding_mode import PLAIN
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.drafts import goes_on

if TYPE_CHECKING:
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.step import DraftRequest


def new_shadow(request: DraftRequest) -> Sequence:
    """Return a sequence without tokens that draws as the request's own."""
    original = request.sequence
    return Sequence(
        seq_id=original.seq_id,
        index=original.index,
        params=_draft_params(original.params, request.confidence_threshold),
        seed=original.seed,
        token_ids=[],
        num_prompt_tokens=original.num_prompt_tokens,
    )


def take_draft(shadow: Sequence, token_id: int, logprob: float | None, confidence_threshold: float) -> bool:
    """Append a drawn token unless it ends the output. True: another one may follow."""
    params = shadow.params
    if token_id in params.ending_ids:
        return False
    if shadow.grammar is not None and not goes_on(shadow.grammar, token_id):
        return False
    shadow.token_ids.append(token_id)
    # The token itself still counts, as in transformers' ConfidenceCriteria.
    return logprob is None or math.exp(logprob) >= confidence_threshold


def _draft_params(params: SamplingParams, confidence_threshold: float) -> SamplingParams:
    """Return the options that the request's draws depend on, and of its outputs only the probability for a
    threshold."""
    return replace(
        params,
        top_logprobs=0 if confidence_threshold > 0.0 else None,
        prompt_logprobs=None,
        tensors=None,
        mode=PLAIN,
    )

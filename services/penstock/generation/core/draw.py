"""Purpose of a sequence's last row, and the result that comes back. Plain data: no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DrawKind(enum.Enum):
    """Use that the sampler makes of the last row of a sequence, once all its tokens are computed."""

    # One token, by the sequence's options.
    TOKEN = 1
    # The highest processed scores come back; the strategy chooses among them.
    CANDIDATES = 2
    # The row belongs to an unconditional branch: its logits guide another sequence's draw, and nothing comes back.
    UNCONDITIONAL = 3
    # Nothing is drawn; the strategy learns that the tokens are computed (scoring).
    NOTHING = 4
    # The mean of the final hidden states of all its tokens (embedding).
    EMBEDDING = 5


@dataclass(slots=True)
class DrawSpec:
    """Draw that a sequence's strategy wants. All fields except `kind` and `taken_ids` are for CANDIDATES only."""

    kind: DrawKind = DrawKind.TOKEN
    # Number of candidates that come back; fewer when fewer have a finite score.
    num_candidates: int = 0
    # Processors work on log_softmax(logits), not on logits (transformers' beam modes).
    log_softmax: bool = False
    # The scores of these ids come back as well.
    extra_ids: tuple[int, ...] = ()
    # Beam sampling: candidates are ranked by score + Gumbel noise of (seed, position, this slot, id), which draws
    # them without replacement with probabilities softmax(score).
    gumbel_slot: int | None = None
    # Group beam search: tokens that other groups chose at this position, for the Hamming diversity penalty.
    taken_ids: tuple[int, ...] = ()
    # Contrastive search: also return the largest cosine similarity of the last token's hidden state with all before it.
    similarity: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """The highest processed scores of one row, best key first; equal keys by ascending id."""

    token_ids: tuple[int, ...]
    # Processed scores, fp32: log-probabilities where DrawSpec.log_softmax is set.
    scores: tuple[float, ...]
    # Ranking keys: the scores, or the scores with noise.
    keys: tuple[float, ...]
    # Scores of DrawSpec.extra_ids, in order.
    extra_scores: tuple[float, ...] = ()
    # log of the sum of exp(scores) over the whole row; it turns scores into log-probabilities.
    log_total: float = 0.0
    # 1 + the number of tokens with a higher score, of every candidate; empty unless SamplingParams.top_logprobs is set.
    ranks: tuple[int, ...] = ()

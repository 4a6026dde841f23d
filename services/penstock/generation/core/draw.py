"""What a sequence's last row is for, and what comes back. Plain data: no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DrawKind(enum.Enum):
    """What the sampler does with the row of a sequence whose tokens are all computed."""

    # One token, by the sequence's options.
    TOKEN = 1
    # The highest processed scores; the strategy chooses.
    CANDIDATES = 2
    # Its logits guide another sequence's draw; nothing comes back.
    GUIDE = 3
    # Nothing is drawn: the strategy is told that the tokens are computed (scoring).
    NOTHING = 4
    # The mean of the final hidden states of all its tokens (embedding).
    EMBEDDING = 5


@dataclass(slots=True)
class DrawSpec:
    """Set by a sequence's strategy; the fields below `kind` are for CANDIDATES, but `taken_ids`."""

    kind: DrawKind = DrawKind.TOKEN
    # How many of the highest come back; fewer when fewer have a finite score.
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
    # Contrastive search: also the largest cosine similarity of the last token's hidden state with all before it.
    similarity: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """The highest processed scores of one row, best key first; equal keys by ascending id."""

    token_ids: tuple[int, ...]
    # Processed scores, fp32: log-probabilities where DrawSpec.log_softmax is set.
    scores: tuple[float, ...]
    # What they are ranked by: the scores, or the scores with noise.
    keys: tuple[float, ...]
    # Scores of DrawSpec.extra_ids, in order.
    extra_scores: tuple[float, ...] = ()
    # log of the sum of exp(scores) over the whole row: turns scores into log-probabilities.
    log_total: float = 0.0
    # 1 + the number of tokens with a higher score, of every candidate; empty unless SamplingParams.top_logprobs is set.
    ranks: tuple[int, ...] = ()

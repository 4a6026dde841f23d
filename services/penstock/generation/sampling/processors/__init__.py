"""Logits processors: one option each, vectorised over the rows of a batch that use it.

Order of transformers 5.x; OpenAI's penalties and logit_bias stand where custom processors go there: after its own
processors and before the warpers.
"""

from __future__ import annotations

from penstock.generation.sampling.processors.base import LogitsProcessor, Warper
from penstock.generation.sampling.processors.logit_bias import LogitBias
from penstock.generation.sampling.processors.min_new_tokens import MinNewTokens
from penstock.generation.sampling.processors.min_p import MinP
from penstock.generation.sampling.processors.penalties import OpenAIPenalties, RepetitionPenalty
from penstock.generation.sampling.processors.temperature import Temperature
from penstock.generation.sampling.processors.top_k import TopK
from penstock.generation.sampling.processors.top_p import TopP

# In the order they run; the warpers Temperature, TopK, TopP, MinP follow (see batch.py).
PROCESSORS: tuple[type[LogitsProcessor], ...] = (RepetitionPenalty, MinNewTokens, OpenAIPenalties, LogitBias)

__all__ = [
    "PROCESSORS",
    "LogitBias",
    "LogitsProcessor",
    "MinNewTokens",
    "MinP",
    "OpenAIPenalties",
    "RepetitionPenalty",
    "Temperature",
    "TopK",
    "TopP",
    "Warper",
]

"""The cost of a number format: two readings of one text beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from penstock.evaluation.reading import Reading

# Probability below which a rest is rounding: that of float32 over a whole vocabulary.
_NOTHING = 1e-6
_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Difference:
    """Means over the text's tokens, of a reading beside a reference."""

    # Magnitude of the difference of the log-probability of the token that the text has: mean, and 99th percentile.
    mean: float
    p99: float
    # Share of the places with the same likeliest token.
    agreement: float
    # Kullback-Leibler divergence from the reference, in nats: a bound from below, see `divergence`.
    kl: float
    perplexity_ratio: float

    @classmethod
    def between(cls, found: Reading, exact: Reading) -> Self:
        """Compare with the reference `exact`."""
        difference = (found.log_probability - exact.log_probability).double()
        return cls(
            mean=float(difference.abs().mean()),
            p99=float(difference.abs().quantile(0.99)),
            agreement=float((found.likeliest_ids[:, 0] == exact.likeliest_ids[:, 0]).double().mean()),
            kl=float(divergence(found, exact).mean()),
            perplexity_ratio=float((-difference.mean()).exp()),
        )


def divergence(found: Reading, exact: Reading) -> Tensor:
    """Return each place's Kullback-Leibler divergence of `found` from `exact`: (N), in nats, in float64.

    Each token that is among the likeliest of both counts by itself, and all others together as one. Joining outcomes
    never adds divergence, so this is a bound from below; with all of the vocabulary in both it is exact.
    """
    rows = range(0, len(exact.likeliest), _ROWS)
    return torch.cat([_of_rows(found, exact, slice(at, at + _ROWS)) for at in rows])


def _of_rows(found: Reading, exact: Reading, rows: slice) -> Tensor:
    wanted = exact.likeliest_ids[rows]
    ids, order = found.likeliest_ids[rows].sort(-1)
    place = torch.searchsorted(ids.contiguous(), wanted.contiguous()).clamp(max=ids.shape[1] - 1)
    both = ids.gather(1, place) == wanted
    theirs = exact.likeliest[rows].double()
    ours = found.likeliest[rows].gather(1, order.gather(1, place)).double()
    p, q = (torch.where(both, one.exp(), 0.0) for one in (theirs, ours))
    named = torch.where(both & (p > 0), p * (theirs - ours), 0.0).sum(-1)
    rest_p, rest_q = ((1 - one.sum(-1)).clamp(min=0.0) for one in (p, q))
    rest = torch.where(rest_p > _NOTHING, rest_p * (rest_p / rest_q.clamp(min=_NOTHING)).log(), 0.0)
    return (named + rest).clamp(min=0.0)

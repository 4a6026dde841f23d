"""Warpers on the candidates of a row, a few hundred tokens, with the results of the warpers on the whole vocabulary.

tests/unit/generation/sampling/test_sampler.py holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.generation.sampling.batch import SamplingBatch
    from penstock.generation.sampling.ops.candidates import CandidateTensors


@dataclass(frozen=True, slots=True)
class Nucleus:
    """The remaining candidates of R rows after the warpers.

    scores_RC: after the temperature, fp32; dropped candidates have them too.
    weights_RC: proportional to the probabilities, fp64, 0 where dropped.
    is_exact_R: False where a token outside the candidates survives too: such a row needs the whole vocabulary.
    """

    scores_RC: torch.Tensor
    weights_RC: torch.Tensor
    is_exact_R: torch.Tensor


def warp_candidates(
    batch: SamplingBatch, picked_R: torch.Tensor, found: CandidateTensors, total_R1: torch.Tensor | None
) -> Nucleus:
    """Apply temperature, top-k, top-p and min-p to candidates of the sampled rows `picked_R` of the batch.

    `total_R1` (fp64): sum over the vocabulary of exp((score - highest score) / temperature), for rows without top-k;
    None for rows with it.
    """
    scaled_RC = found.scores_RC / batch.temperature.values_M1[picked_R]
    weights_RC = (scaled_RC.double() - scaled_RC[:, :1]).exp_()
    if total_R1 is None:
        places_R1 = batch.top_k.last_places_M1[picked_R].clamp(max=scaled_RC.shape[1] - 1)
        lowest_R1 = scaled_RC.gather(1, places_R1)
        weights_RC.masked_fill_(scaled_RC < lowest_R1, 0.0)
        total_R1 = weights_RC.cumsum(-1)[:, -1:]
        keep_RC = _within_top_p(batch, picked_R, weights_RC, total_R1)
    else:
        keep_RC = _within_top_p(batch, picked_R, weights_RC, total_R1)
        lowest_R1 = scaled_RC.gather(1, keep_RC.sum(-1, keepdim=True) - 1)
    is_exact_R = (lowest_R1 > scaled_RC[:, -1:])[:, 0] | found.is_complete
    keep_RC &= weights_RC >= batch.min_p.values_M1[picked_R]
    return Nucleus(scaled_RC, weights_RC.masked_fill_(~keep_RC, 0.0), is_exact_R)


def _within_top_p(
    batch: SamplingBatch, picked_R: torch.Tensor, weights_RC: torch.Tensor, total_R1: torch.Tensor
) -> torch.Tensor:
    """Mask of the descending candidates that top-p keeps: a prefix that always has the first one."""
    before_RC = weights_RC.cumsum(-1) - weights_RC
    keep_RC = before_RC < batch.top_p.values_M1[picked_R] * total_R1
    keep_RC[:, 0] = True
    return keep_RC

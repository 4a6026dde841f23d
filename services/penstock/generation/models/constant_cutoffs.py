"""Gemma 3n's sparse MLPs with the cutoff's factor made once: its own way checks a distribution's numbers each time, so
that no pass could be recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.generation.models.own_attention import class_key


def keep_cutoffs(causal: nn.Module) -> None:
    """Let the MLPs of a model keep the factor by which they cut off gates."""
    for module in causal.modules():
        sparse: Any = module
        if class_key(module) == ("gemma3n", "Gemma3nTextMLP") and sparse.activation_sparsity > 0:
            share = torch.tensor(sparse.activation_sparsity, dtype=torch.float32)
            factor = torch.distributions.normal.Normal(0, 1).icdf(share)
            weight = next(module.parameters())
            sparse._gaussian_topk = partial(_largest, factor=factor.to(weight.device, weight.dtype))


def _largest(inputs: Tensor, *, factor: Tensor) -> Tensor:
    """Return what the numbers (…, width) have above their mean and `factor` deviations."""
    deviation = torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
    return functional.relu(inputs - (inputs.mean(-1, keepdim=True) + deviation * factor))

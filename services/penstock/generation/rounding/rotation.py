"""Blocks of a row turned by a Hadamard matrix before the row is rounded to bytes (QuaRot, arXiv:2404.00456, within one
product). An outlier is spread over all numbers of its block, so that the row's scale is finer. Weights are turned in
the same way when they are packed, and the product is the same, times the block.

The matrix consists of ones and minus ones: only the sums are rounded, and the scale of the weights cancels the block
exactly, since it is a power of two. A rotation stays within one matrix, so it works for every family; a rank's shard
has blocks of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# csrc/util/turned_block.h has the same. Of a linear layer's inputs larger blocks divide few widths, and are no better.
BLOCKS = (256, 128, 64, 32, 16)
MOST_INPUTS, MOST_OF_A_HEAD = 64, 256


def rotation_block(width: int, most: int = MOST_INPUTS) -> int:
    """Return the numbers of a block: the largest of BLOCKS, at most `most`, that divides the width; 1: nothing is
    turned."""
    return next((block for block in BLOCKS if block <= most and width % block == 0), 1)


def rotated(x_TI: Tensor, block: int) -> Tensor:
    """Return x in float32 with its blocks turned, stage by stage: for weights, once. Sums have the C++ kernels' order,
    and so their bits."""
    x = x_TI.float()
    if block == 1:
        return x
    x = x.reshape(-1, block)
    step = 1
    while step < block:
        pairs = x.view(-1, block // (2 * step), 2, step)
        low, high = pairs.unbind(2)
        x = torch.stack((low + high, low - high), dim=2)
        step *= 2
    return x.view(x_TI.shape)


def rotation_matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the matrix of `rotated_by_product`; None: nothing is turned. Each layer has its own, which lives as long
    as a graph that reads it."""
    if block == 1:
        return None
    # Symmetrical: a row is the place of an input.
    return (rotated(torch.eye(block), block) / halved(block)).to(device=device, dtype=dtype)


def rotated_by_product(x_TI: Tensor, matrix: Tensor | None) -> Tensor:
    """Return `rotated` in the matrix's dtype over `halved(block)`, by one product: each stage would be a call."""
    if matrix is None:
        return x_TI
    blocks = x_TI.reshape(-1, len(matrix))
    if len(blocks) == 1:
        # Libraries multiply a single vector with another order of sums: it would have other bits than in a batch.
        return (blocks.expand(2, -1) @ matrix)[0].view(x_TI.shape)
    return (blocks @ matrix).view(x_TI.shape)


def halved(block: int) -> int:
    """Return a power of two near the length by which a block's numbers grow: they stay in the range of their dtype."""
    return 1 << (block.bit_length() - 1) // 2


def natural_scale(scale: float, block: int) -> float:
    """Return a weight's scale for numbers that keep their length when they are turned."""
    return scale * math.sqrt(block)

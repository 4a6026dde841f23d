"""Vectors of the rows' tokens for each layer: a product of the embedding, normed, joined with the token's row of a
table. Layers add them to the stream (decoder_layer.LayerInput)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from penstock.generation.layers.layer_kernels import InputNorm, LayerKernels
    from penstock.generation.layers.linear.base import Linear


class TokenInputs:
    """Makes them. It is a part of a model, of its weights alone."""

    def __init__(self, table_VX: Tensor, product: Linear, norm: InputNorm, kernels: LayerKernels) -> None:
        """Take the table (vocabulary, layers * dim), and the product of the embedding with as many outputs."""
        self.table = table_VX
        self.product = product
        self.norm = norm
        self._kernels = kernels

    def rows(self, input_ids_T: Tensor) -> Tensor:
        """Return the table's rows of these ids (T, layers * dim)."""
        return F.embedding(input_ids_T, self.table)

    def __call__(self, embeds_TI: Tensor, input_ids_T: Tensor) -> Tensor:
        """Return the vectors (T, layers * dim) of rows with these embeddings, which were multiplied by their scale."""
        return self._kernels.token_inputs(self.product(embeds_TI), self.rows(input_ids_T), self.norm)

"""Interface of a model's weights, of any origin: they give its parts, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from penstock.generation.core.model_config import Activation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.weights.tensor_names import LayerLinear


class Weights(Protocol):
    """A model's weights on its device. Each part is asked for once, in the order of `build_model`."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of the parts so far."""

    @property
    def mapped_bytes(self) -> int:
        """Part of `num_bytes` that is mapped from the page cache."""

    @property
    def forms(self) -> Mapping[str, int]:
        """Number of quantised matrices of the checkpoint so far, by the format that they run in: int8, int4 or a
        dtype's name."""

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        """Return the last layer, and the embedding (vocabulary, hidden); None: it is the head's rows."""

    def token_table(self, name: str) -> Tensor:
        """Return another table with a row for each token, as the embedding's."""

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        """Return a linear layer of the decoder layer with the name prefix `prefix`; `activation` gates a gated one."""

    def matrix(self, prefix: str, linear: LayerLinear) -> Tensor:
        """Return the weight (outputs, inputs) of a linear layer that is read as a plain matrix, in `dtype`."""

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        """Return the weight of a norm, in `dtype`, or in float32 if it `is_exact`."""

    def layer_is_complete(self) -> None:
        """Note that this layer is complete."""

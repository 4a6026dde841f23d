"""The parts of a loaded model by the names of their tensors, and a model with some of them made anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.generation.core.model_config import Activation
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.generation.layers.linear.base import Linear
    from penstock.generation.models.loaded_weights import Weights
    from penstock.generation.weights.tensor_names import LayerLinear


@dataclass(slots=True)
class ModelParts:
    """Objects that `loaded_weights.Weights` returned for a model: the very ones that the model runs."""

    # By layer's prefix and LayerLinear.name.
    linears: dict[str, Linear] = field(default_factory=dict)
    # Of norms and plain matrices, as stored.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    head: tuple[Linear, Tensor | None] | None = None


class PartsKeeper:
    """Weights that remember what they returned."""

    def __init__(self, weights: Weights) -> None:
        self.parts = ModelParts()
        self._weights = weights

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def num_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def mapped_bytes(self) -> int:
        return self._weights.mapped_bytes

    @property
    def forms(self) -> Mapping[str, int]:
        return self._weights.forms

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        self.parts.head = self._weights.head_and_table()
        return self.parts.head

    def token_table(self, name: str) -> Tensor:
        self.parts.tensors[name] = made = self._weights.token_table(name)
        return made

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        made = self._weights.linear(prefix, linear, activation)
        self.parts.linears[f"{prefix}{linear.name}"] = made
        return made

    def matrix(self, prefix: str, linear: LayerLinear) -> Tensor:
        self.parts.tensors[f"{prefix}{linear.name}.weight"] = made = self._weights.matrix(prefix, linear)
        return made

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        self.parts.tensors[name] = made = self._weights.tensor(name, is_exact=is_exact)
        return made

    def layer_is_complete(self) -> None:
        self._weights.layer_is_complete()


class ReplacedWeights:
    """Weights of a model with new tensors; every part without a new tensor is the old model's own."""

    def __init__(self, old: ModelParts, mapped_bytes: int, fresh: Weights, names: Collection[str]) -> None:
        """Take the old model's parts, the bytes of it that are mapped (of its embedding), and the weights with the
        tensors `names`: all that run as one product."""
        self.dtype = fresh.dtype
        self._old, self._old_mapped, self._fresh, self._names = old, mapped_bytes, fresh, names
        self._kept_bytes = 0
        self.mapped_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._kept_bytes + self._fresh.num_bytes

    @property
    def forms(self) -> Mapping[str, int]:
        """No checkpoint with quantised matrices is replaced."""
        return {}

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        if EMBEDDING in self._names or LM_HEAD in self._names:
            return self._fresh.head_and_table()
        assert self._old.head is not None
        head, table = self._old.head
        self._kept_bytes += head.num_bytes + (0 if table is None else table.nbytes)
        self.mapped_bytes = self._old_mapped
        return head, table

    def token_table(self, name: str) -> Tensor:
        return self._fresh.token_table(name) if name in self._names else self._kept_tensor(name)

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        stored = f"{prefix}{linear.parts[0]}"
        if (stored if linear.expert is not None else f"{stored}.weight") in self._names:
            return self._fresh.linear(prefix, linear, activation)
        kept = self._old.linears[f"{prefix}{linear.name}"]
        self._kept_bytes += kept.num_bytes
        return kept

    def matrix(self, prefix: str, linear: LayerLinear) -> Tensor:
        name = f"{prefix}{linear.name}.weight"
        return self._fresh.matrix(prefix, linear) if name in self._names else self._kept_tensor(name)

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        if name in self._names:
            return self._fresh.tensor(name, is_exact=is_exact)
        return self._kept_tensor(name)

    def layer_is_complete(self) -> None:
        self._fresh.layer_is_complete()

    def _kept_tensor(self, name: str) -> Tensor:
        kept = self._old.tensors[name]
        self._kept_bytes += kept.nbytes
        return kept

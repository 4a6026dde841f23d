"""Experts of transformers' modules, with 3-D parameters as weights, by the device's own products.

Transformers runs the experts of nearly all of its models by functions that know four facts about a module: the order of
its weights' dimensions, biases, gate and rows (`use_experts_implementation`). This module reads the same facts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.generation.core.model_config import Activation
from penstock.generation.layers.experts import expert_products
from penstock.generation.layers.linear.base import Linear

if TYPE_CHECKING:
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import LinearMethod

_FACTS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# Largest difference of a gate in float32, relative to its largest result.
_TOLERANCE = 1e-5


class ExpertModule(nn.Module):
    """All experts of a layer, in the place of transformers' module of them."""

    def __init__(self, theirs: Any, method: LinearMethod, kernels: LayerKernels) -> None:
        """Take the weights out of a module that `has_known_experts`. Raises NotFinite for weights that the method's
        format cannot hold."""
        super().__init__()
        self.num_bytes = 0
        activation = activation_of(theirs, kernels)
        gate = theirs._apply_gate if theirs.has_gate else theirs.act_fn
        up_EOI, up_EO = _weights(theirs, "gate_up_proj" if theirs.has_gate else "up_proj")
        down_EOI, down_EO = _weights(theirs, "down_proj")
        experts: list[tuple[Callable[[Tensor], Tensor], Linear]] = []
        for number in range(len(up_EOI)):
            bias = None if up_EO is None else up_EO[number]
            if activation is None:
                up = method.linear(up_EOI[number].contiguous(), bias)
                gated: Callable[[Tensor], Tensor] = _Chain(up, gate)
            else:
                up = gated = method.gated(up_EOI[number].contiguous(), bias, kernels, activation)
            down = method.linear(down_EOI[number].contiguous(), None if down_EO is None else down_EO[number])
            self.num_bytes += up.num_bytes + down.num_bytes
            experts.append((gated, down))
        # The gate may be a method of the module.
        theirs._parameters.clear()
        self._multiply = expert_products(experts)
        # Object of the kernels that has the weights; None: there is none.
        self.handle: torch.ScriptObject | None = getattr(self._multiply, "owner", None)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each row's experts (T, experts of a row), in the shape of the rows: (T, hidden) or
        (B, T / B, hidden)."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = self._multiply(rows, top_k_index.long().contiguous(), top_k_weights.float().contiguous())
        return out.to(hidden_states.dtype).view(hidden_states.shape)


def has_known_experts(module: nn.Module, dtype: torch.dtype) -> bool:
    """True for a module of experts that transformers' own functions can run, with weights of `dtype`."""
    facts: Any = module
    if not all(isinstance(getattr(facts, name, None), bool) for name in _FACTS):
        return False
    if getattr(facts, "has_post_expert_norm", False) or getattr(facts, "_is_expert_parallel", False):
        return False
    names = ("gate_up_proj" if facts.has_gate else "up_proj", "down_proj")
    weights = [getattr(facts, name, None) for name in names]
    known = {name + suffix for name in names for suffix in (("", "_bias") if facts.has_bias else ("",))}
    return all(
        isinstance(weight, nn.Parameter) and weight.dim() == 3 and weight.dtype is dtype for weight in weights
    ) and known == {name for name, _ in module.named_parameters()}


def activation_of(theirs: Any, kernels: LayerKernels) -> Activation | None:
    """Return our gate function that equals the module's for random numbers; None: there is none."""
    if not theirs.has_gate or not theirs.is_concatenated:
        return None
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 3.0
    x = x.to(theirs.down_proj.device)
    try:
        wanted = theirs._apply_gate(x)
    except (TypeError, ValueError, RuntimeError):
        return None
    for activation in (Activation.SILU, Activation.GELU_TANH):
        found = kernels.gate(activation)(x)
        if wanted.shape == found.shape and (wanted - found).abs().max() <= _TOLERANCE * wanted.abs().max():
            return activation
    return None


def _weights(theirs: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Return weights (experts, outputs, inputs) and biases (experts, outputs)."""
    weight: Tensor = getattr(theirs, name).detach()
    if theirs.is_transposed:
        weight = weight.transpose(1, 2)
    return weight, getattr(theirs, f"{name}_bias").detach() if theirs.has_bias else None


class _Chain:
    """One function after another."""

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> None:
        self._first, self._second = first, second

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._second(self._first(x_TI))

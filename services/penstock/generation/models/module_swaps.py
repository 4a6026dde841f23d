"""Linear layers, experts and norms of transformers' modules, replaced by the device's own if these compute the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.common.errors import StartupError
from penstock.generation.layers.linear.base import Linear, NotFinite
from penstock.generation.models.expert_module import ExpertModule, activation_of, has_known_experts
from penstock.generation.models.foreign_experts import in_place_of, usual_form

if TYPE_CHECKING:
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import LinearMethod

# Largest difference of a norm in float32, relative to its largest result; in other formats the bits must be the same.
_NORM_TOLERANCE = 1e-6


class LinearModule(nn.Module):
    """One of our linear layers in the place of an `nn.Linear`, or of GPT-2's Conv1D."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in) to (…, out), in x's dtype."""
        rows = self._linear(x.reshape(-1, self.in_features).contiguous())
        return rows.view(*x.shape[:-1], self.out_features)


class NormModule(nn.Module):
    """RMSNorm in one operation; transformers takes six."""

    def __init__(self, weight: Tensor, eps: float, kernels: LayerKernels) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self._eps = eps
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        return self._kernels.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, self._eps).view(x.shape)


class ModuleSwaps:
    """Swaps in one model with weights of `dtype`; all methods change the model."""

    def __init__(self, causal: Any, dtype: torch.dtype) -> None:
        self._causal = causal
        self._dtype = dtype
        # Bytes of the weights of linear layers and experts in their new form, and their number before.
        self.num_bytes = 0
        self.num_swapped = 0

    def linears(self, method: LinearMethod, kept: Collection[nn.Module]) -> None:
        """Replace the linear layers by those of `method`, one by one.

        Layers in `kept` stay, since other modules read their weights; so do products of other modules. Raises
        StartupError for weights that the method's format cannot hold.
        """
        head = self._causal.get_output_embeddings()
        child: Any
        for parent, name, child in self._modules():
            if type(child) not in linear_types() or child in kept or child.weight.dtype is not self._dtype:
                continue
            weight, bias = child.weight.detach(), None if child.bias is None else child.bias.detach()
            if type(child) is not nn.Linear:
                weight = weight.t().contiguous()
            try:
                is_head = child is head and bias is None
                linear = method.head(weight) if is_head else method.linear(weight, bias)
            except NotFinite as error:
                raise StartupError(f"MODEL: {name}: {error}", flag="MODEL") from error
            self.num_bytes += linear.num_bytes
            self.num_swapped += weight.numel()
            setattr(parent, name, LinearModule(linear))

    def experts(self, method: LinearMethod, kernels: LayerKernels, *, is_quantised: bool) -> None:
        """Replace the experts of each layer where their products become one call, or where the method `is_quantised`.
        Elsewhere transformers' own functions are as fast. Raises StartupError as `linears` does."""
        for parent, name, child in self._modules():
            known = usual_form(child)
            if has_known_experts(known, self._dtype) and (
                is_quantised or (method.groups_experts and activation_of(known, kernels) is not None)
            ):
                count = sum(parameter.numel() for parameter in known.parameters())
                try:
                    experts = ExpertModule(known, method, kernels)
                except NotFinite as error:
                    raise StartupError(f"MODEL: {name}: {error}", flag="MODEL") from error
                self.num_bytes += experts.num_bytes
                self.num_swapped += count
                setattr(parent, name, in_place_of(child, experts))

    def norms(self, kernels: LayerKernels) -> None:
        """Replace each RMSNorm with the results of `kernels` for random numbers, by its weight or by the weight + 1."""
        draw = torch.Generator().manual_seed(0)
        for parent, name, child in self._modules():
            weight: Any = getattr(child, "weight", None)
            eps: Any = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if (
                not type(child).__name__.endswith("RMSNorm")
                or not isinstance(weight, nn.Parameter)
                or weight.dim() != 1
                or weight.dtype is not self._dtype
                or not isinstance(eps, float)
                or len(list(child.parameters())) != 1
            ):
                continue
            x = (torch.randn(4, len(weight), generator=draw) * 3.0).to(weight.device, self._dtype)
            for own in (weight.detach(), weight.detach() + 1.0):
                norm = NormModule(own, eps, kernels)
                if _is_same(child, norm, x):
                    setattr(parent, name, norm)
                    break

    def _modules(self) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        """Yield parent, name and module of all but the outermost; they may be replaced meanwhile."""
        for parent in list(self._causal.modules()):
            for name, child in list(parent.named_children()):
                yield parent, name, child


def linear_types() -> tuple[type[nn.Module], ...]:
    """Return the classes of modules that are a product and a bias: torch's, and one with a weight (in, out)."""
    from transformers.pytorch_utils import Conv1D

    return nn.Linear, Conv1D


@torch.inference_mode()
def _is_same(theirs: nn.Module, ours: nn.Module, x: Tensor) -> bool:
    """True when both give the same results for `x`, within the format's precision."""
    try:
        wanted, found = theirs(x), ours(x)
    except (TypeError, ValueError, RuntimeError):
        return False
    if wanted.dtype is not found.dtype or wanted.shape != found.shape:
        return False
    if x.dtype is not torch.float32:
        return torch.equal(wanted, found)
    return bool((wanted - found).abs().max() <= _NORM_TOLERANCE * wanted.abs().max())

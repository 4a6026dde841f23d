"""A seam for the small operations between the linear layers: torch's here, native ones where they are built."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerKernels:
    """The reference, in torch's operators. Stateless."""

    name = "torch"

    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm: float32 inside, cast back, then times the weight."""
        # torch's kernel rounds before the weight: bit-equal to transformers', and faster.
        return F.rms_norm(x_TI, weight_I.shape, weight_I, eps)

    def add_rms_norm(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Add `x` to `hidden` in place and return the RMSNorm of the sum."""
        hidden_TI.add_(x_TI)
        return F.rms_norm(hidden_TI, weight_I.shape, weight_I, eps)

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """Return silu(first half) * second half of every row: (T, 2 F) -> (T, F)."""
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class NativeKernels(LayerKernels):
    """The C++ kernels, which read every row once. They work in float32 and bfloat16; the library must be loaded."""

    name = "native"

    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """See LayerKernels."""
        result: Tensor = torch.ops.penstock.rms_norm(x_TI, weight_I, eps)
        return result

    def add_rms_norm(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """See LayerKernels."""
        result: Tensor = torch.ops.penstock.add_rms_norm(hidden_TI, x_TI, weight_I, eps)
        return result

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See LayerKernels."""
        result: Tensor = torch.ops.penstock.silu_mul(gate_up_TF)
        return result

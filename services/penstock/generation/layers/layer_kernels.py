"""A seam for the small operations between the linear layers: torch's, or native ones if they are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention import npu_operators
from penstock.generation.core.model_config import Activation

# gpt-oss's activation.
_ALPHA, _LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True)
class InputNorm:
    """Numbers by which vectors of tokens are made (`LayerKernels.token_inputs`)."""

    # Of a layer's numbers of the product, (dim) in float32.
    weight_D: Tensor
    eps: float
    # Of the product before its norm, of the table's row, and of their sum.
    product_factor: float
    row_factor: float
    factor: float


class LayerKernels:
    """The reference, in torch's operators. Stateless."""

    name = "torch"

    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the residual stream, and of what is added to it, in a model of `dtype`: the model's."""
        return dtype

    def normed_dtype(self, x_TI: Tensor) -> torch.dtype:
        """Return the dtype of a norm's result: x's, or the model's where x is a stream of another."""
        return x_TI.dtype

    def norm_addend(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm of what is added to the stream, in x's dtype."""
        return self.rms_norm(x_TI, weight_I, eps)

    def norm_addend_once(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Return `rms_norm_once` of what is added to the stream, in x's dtype."""
        return self.rms_norm_once(x_TI, weight_I, eps)

    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm: float32 inside, rounded once, after the weight."""
        return F.rms_norm(x_TI, weight_I.shape, weight_I, eps)

    def add_rms_norm(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Add `x` to `hidden` in place and return the RMSNorm of the sum."""
        hidden_TI.add_(x_TI)
        return F.rms_norm(hidden_TI, weight_I.shape, weight_I, eps)

    def rms_norm_once(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm times a weight in float32, rounded to x's dtype at the end alone."""
        return F.rms_norm(x_TI.float(), weight_I.shape, weight_I, eps).to(x_TI.dtype)

    def add_rms_norm_once(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Add `x` to `hidden` in place and return `rms_norm_once` of the sum."""
        return self.rms_norm_once(hidden_TI.add_(x_TI), weight_I, eps)

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """Return silu(first half) * second half of every row: (T, 2 F) -> (T, F)."""
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def sigmoid_mul(self, gates_TF: Tensor, x_TF: Tensor) -> Tensor:
        """Return sigmoid(gates) * x. Rows of the gates may lie apart."""
        return gates_TF.sigmoid().mul_(x_TF)

    def gelu_times(self, gates_TF: Tensor, x_TF: Tensor) -> Tensor:
        """Return gelu(gates) * x, by tanh. Rows of x may lie apart."""
        return F.gelu(gates_TF, approximate="tanh").mul_(x_TF)

    def token_inputs(self, products_TX: Tensor, rows_TX: Tensor, norm: InputNorm) -> Tensor:
        """Return vectors of tokens for each layer: products of the embedding, normed layer by layer, joined with rows
        of the table; all are (T, layers * dim)."""
        by_layer = (products_TX * norm.product_factor).view(len(products_TX), -1, len(norm.weight_D))
        normed_TX = self.rms_norm_once(by_layer, norm.weight_D, norm.eps).flatten(1)
        return (normed_TX + rows_TX * norm.row_factor) * norm.factor

    def gate(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """Return the function that gates the second half of every row with the first: (T, 2 F) -> (T, F)."""
        if activation is Activation.SILU:
            return self.silu_mul
        return _gelu_mul if activation is Activation.GELU_TANH else _clamped_mul


def _gelu_mul(gate_up_TF: Tensor) -> Tensor:
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _clamped_mul(gate_up_TF: Tensor) -> Tensor:
    gate, up = gate_up_TF.chunk(2, dim=-1)
    gate = gate.clamp(max=_LIMIT)
    return (up.clamp(-_LIMIT, _LIMIT) + 1) * (gate * torch.sigmoid(gate * _ALPHA))


class NativeKernels(LayerKernels):
    """The C++ kernels, which read every row once. They work in float32 and bfloat16; the library must be loaded.

    In bfloat16 the residual stream is float32, and so is what is added to it: norms read float32 and round once, to
    bfloat16. Of some sixty sums, each would be rounded else, and that was half of bfloat16's error.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Take the model's dtype; None: x's."""
        self._dtype = dtype

    @override
    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    @override
    def normed_dtype(self, x_TI: Tensor) -> torch.dtype:
        return x_TI.dtype if self._dtype is None else self._dtype

    @override
    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        result: Tensor = torch.ops.penstock.rms_norm(x_TI, weight_I, eps, self._dtype)
        return result

    @override
    def norm_addend(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        result: Tensor = torch.ops.penstock.rms_norm(x_TI, weight_I, eps)
        return result

    @override
    def norm_addend_once(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """The operator knows it by the weight's dtype."""
        return self.norm_addend(x_TI, weight_I, eps)

    @override
    def add_rms_norm(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        # What a layer adds may be in the model's dtype.
        addend_TI = x_TI.to(hidden_TI.dtype)
        result: Tensor = torch.ops.penstock.add_rms_norm(hidden_TI, addend_TI, weight_I, eps, self._dtype)
        return result

    @override
    def rms_norm_once(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """The operator knows it by the weight's dtype."""
        return self.rms_norm(x_TI, weight_I, eps)

    @override
    def add_rms_norm_once(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return self.add_rms_norm(hidden_TI, x_TI, weight_I, eps)

    @override
    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        result: Tensor = torch.ops.penstock.silu_mul(gate_up_TF)
        return result

    @override
    def sigmoid_mul(self, gates_TF: Tensor, x_TF: Tensor) -> Tensor:
        result: Tensor = torch.ops.penstock.sigmoid_mul(gates_TF, x_TF)
        return result

    @override
    def gelu_times(self, gates_TF: Tensor, x_TF: Tensor) -> Tensor:
        result: Tensor = torch.ops.penstock.gelu_times(gates_TF, x_TF)
        return result

    @override
    def token_inputs(self, products_TX: Tensor, rows_TX: Tensor, norm: InputNorm) -> Tensor:
        factors = (norm.eps, norm.product_factor, norm.row_factor, norm.factor)
        result: Tensor = torch.ops.penstock.token_inputs(products_TX, rows_TX, norm.weight_D, *factors)
        return result


class NPUKernels(LayerKernels):
    """torch-npu's fused operators, in float16, bfloat16 and float32. Gates other than SiLU's are torch's."""

    name = "npu"

    @override
    def rms_norm(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return npu_operators.rms_norm(x_TI, weight_I, eps)

    @override
    def add_rms_norm(self, hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        normed_TI, total_TI = npu_operators.add_rms_norm(hidden_TI, x_TI, weight_I, eps)
        hidden_TI.copy_(total_TI)
        return normed_TI

    @override
    def rms_norm_once(self, x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return npu_operators.rms_norm(x_TI.float(), weight_I, eps).to(x_TI.dtype)

    @override
    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        return npu_operators.swiglu(gate_up_TF)

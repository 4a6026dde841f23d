"""A GPU by CUDA: torch's FlashAttention over the paged pool, Triton's operators for small work, torch's own for the
rest.

docs/guide/cuda.md says what has run on a GPU, and how fast.
"""

from __future__ import annotations

from functools import cached_property
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from penstock.common.dtypes import dtype_name
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.attention.cuda import FlashAttention, FlashLimits
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.accelerator import Accelerator
from penstock.generation.devices.cuda_graphs import CUDAGraphs
from penstock.generation.devices.torch_dtypes import COMPUTED_DTYPES, named_dtype
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear import FP8
from penstock.generation.layers.linear.fp8 import Fp8LinearMethod
from penstock.generation.layers.linear.int4_cuda import CudaInt4Method
from penstock.generation.layers.linear.int8_accelerator import AcceleratorInt8Method

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.generation.attention.base import Attention
    from penstock.generation.devices.graph_capture import GraphCapture
    from penstock.generation.layers.linear.base import LinearMethod

_log = get_logger("penstock.generation")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
# Numbers of a first row for Triton.
_TRIED = 16
# Least compute capability of a quantised product.
_CAPABILITIES = {"int4": (8, 0), FP8: (8, 9)}


class CUDADevice(Accelerator):
    """One GPU, of those that CUDA_VISIBLE_DEVICES leaves visible."""

    name = "cuda"
    limits = FlashLimits()

    def _runtime(self) -> Any:
        runtime: Any = torch.cuda
        if torch.version.cuda is None:
            raise StartupError(
                f"--device {self.name} needs a torch with CUDA: this one is {torch.__version__} (the extra [cuda])",
                flag="--device",
            )
        self._check_number(runtime.device_count(), "GPUs", VISIBLE_GPUS)
        return runtime

    @override
    def compute_dtype(self, requested: str, checkpoint: torch.dtype) -> torch.dtype:
        """The word "auto" turns bfloat16 into float16 on a GPU that has no bfloat16 arithmetic."""
        if requested != "auto":
            return named_dtype(requested)
        dtype = checkpoint if checkpoint in COMPUTED_DTYPES.values() else torch.bfloat16
        if dtype is torch.bfloat16 and not self._has_bfloat16():
            _log.warning("the checkpoint's bfloat16 is loaded as float16: this GPU has no bfloat16 arithmetic")
            return torch.float16
        return dtype

    def _has_bfloat16(self) -> bool:
        return bool(self._runtime().is_bf16_supported(including_emulation=False))

    @override
    def block_size(self, requested: int | None) -> int:
        size = self.limits.block_multiple
        if requested is not None and requested % size:
            raise StartupError(
                f"--block-size must be a multiple of {size} with --device {self.name}, found {requested}",
                flag="--block-size",
            )
        return requested or max(size, super().block_size(None))

    @override
    def attention(self, dtype: torch.dtype, head_dim: int) -> Attention:
        if self.limits.fits(dtype, head_dim):
            if not self._has_triton:
                return FlashAttention(self.limits)
            from penstock.generation.attention.gpu_operators import turn_and_write

            return FlashAttention(self.limits, turn_and_write=turn_and_write)
        _log.warning(
            "attention runs by torch's general operators, which gather the context: FlashAttention has no such heads",
            dtype=dtype_name(dtype),
            head_dim=head_dim,
        )
        return SDPAAttention()

    @override
    def linear_method(self, dtype: torch.dtype, quantization: str = "none") -> LinearMethod:
        if quantization in _CAPABILITIES:
            self._check_capability(quantization, _CAPABILITIES[quantization])
        method = self._fused_method(quantization) if self._has_triton else self._plain_method(quantization)
        return method or super().linear_method(dtype, quantization)

    @staticmethod
    def _plain_method(quantization: str) -> LinearMethod | None:
        methods: dict[str, Callable[[], LinearMethod]] = {
            "int8": AcceleratorInt8Method,
            "int4": CudaInt4Method,
            FP8: Fp8LinearMethod,
        }
        return methods[quantization]() if quantization in methods else None

    @staticmethod
    def _fused_method(quantization: str) -> LinearMethod | None:
        from penstock.generation.layers import gpu

        if quantization == "int4":
            return CudaInt4Method(gpu.GPUInt8Linear)
        methods: dict[str, Callable[[], LinearMethod]] = {
            "none": gpu.GPULinearMethod,
            "int8": gpu.GPUInt8Method,
            FP8: gpu.GPUFp8Method,
        }
        return methods[quantization]() if quantization in methods else None

    def _check_capability(self, quantization: str, least: tuple[int, int]) -> None:
        """Raise StartupError naming --quantization on a GPU older than its product."""
        found = self._runtime().get_device_capability(self.number)
        if found < least:
            raise StartupError(
                f"--quantization {quantization} needs a GPU of compute capability {least[0]}.{least[1]}, and this one "
                f"has {found[0]}.{found[1]}: use int8 or none",
                flag="--quantization",
            )

    @override
    def graph_capture(self) -> GraphCapture | None:
        return CUDAGraphs()

    @override
    def layer_kernels(self, dtype: torch.dtype) -> LayerKernels:
        if not self._has_triton:
            return LayerKernels()
        from penstock.generation.layers.gpu import TritonKernels

        return TritonKernels()

    @cached_property
    def _has_triton(self) -> bool:
        """True when Triton is installed and can compile; a first kernel shows that: it needs a C compiler, and a folder
        to write to."""
        try:
            from penstock.generation.attention import gpu_operators

            x = torch.ones(1, _TRIED, device=self.torch_device)
            gpu_operators.rms_norm(x, x[0], 0.0)
        except (ImportError, RuntimeError, OSError, SubprocessError) as error:
            _log.warning("small operators and single rows are torch's, which is slower: no Triton", reason=str(error))
            return False
        return True

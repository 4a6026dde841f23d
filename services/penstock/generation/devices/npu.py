"""An Ascend NPU, by torch-npu: fused operators for attention and norms, torch's own for the rest.

No NPU has run this yet: docs/guide/ascend.md says what has been checked, and how.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from penstock.common.dtypes import dtype_name
from penstock.common.environment import VISIBLE_NPUS
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.attention.npu import NPUAttention
from penstock.generation.attention.npu_operators import AttentionLimits
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.accelerator import Accelerator
from penstock.generation.devices.npu_graphs import NPUGraphs
from penstock.generation.devices.torch_dtypes import COMPUTED_DTYPES, named_dtype
from penstock.generation.layers.layer_kernels import LayerKernels, NPUKernels
from penstock.generation.layers.linear import INT8_GROUPS, QUANTIZATIONS
from penstock.generation.layers.linear.dense import PlainLinearMethod
from penstock.generation.layers.linear.int8_groups import refuse_int8_groups
from penstock.generation.layers.linear.npu_products import DTYPES as PRODUCT_DTYPES
from penstock.generation.layers.linear.npu_products import NPUInt4Method, NPUInt8Method

if TYPE_CHECKING:
    from datetime import timedelta

    from penstock.generation.attention.base import Attention
    from penstock.generation.devices.graph_capture import GraphCapture
    from penstock.generation.layers.linear.base import LinearMethod

_log = get_logger("penstock.generation")


class NPUDevice(Accelerator):
    """One NPU, of those that ASCEND_RT_VISIBLE_DEVICES leaves visible."""

    name = "npu"
    limits = AttentionLimits()
    # HCCL's process group refuses to.
    gathers_at_one = False

    def _runtime(self) -> Any:
        try:
            import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise StartupError(
                f"--device {self.name} needs torch-npu (the extra [npu]) of torch's own version and CANN's libraries: "
                f"{error}",
                flag="--device",
            ) from error
        runtime: Any = torch.npu  # type: ignore[attr-defined]
        self._check_number(runtime.device_count(), "NPUs", VISIBLE_NPUS)
        return runtime

    @override
    def compute_dtype(self, requested: str, checkpoint: torch.dtype) -> torch.dtype:
        dtype = named_dtype(requested) if requested != "auto" else checkpoint
        if dtype not in COMPUTED_DTYPES.values():
            return torch.bfloat16
        if dtype is torch.float32:
            _log.warning("attention in float32 is slow on an NPU: its operator has float16 and bfloat16 only")
        return dtype

    @override
    def block_size(self, requested: int | None) -> int:
        size = self.limits.block_size
        if requested is not None and size is not None and requested != size:
            raise StartupError(f"--block-size must be {size} on an NPU, found {requested}", flag="--block-size")
        return size or super().block_size(requested)

    @override
    def linear_method(self, dtype: torch.dtype, quantization: str = "none") -> LinearMethod:
        if quantization == "none":
            return PlainLinearMethod()
        if quantization not in QUANTIZATIONS:
            raise StartupError(
                f"--quantization must be auto or one of {', '.join(QUANTIZATIONS)}", flag="--quantization"
            )
        if quantization == INT8_GROUPS:
            raise refuse_int8_groups(f"--device {self.name} has none")
        if dtype not in PRODUCT_DTYPES:
            raise StartupError(
                f"--quantization {quantization} needs --dtype bfloat16 or float16 with --device {self.name}",
                flag="--quantization",
            )
        return NPUInt8Method() if quantization == "int8" else NPUInt4Method(dtype)

    @override
    def attention(self, dtype: torch.dtype, head_dim: int) -> Attention:
        if self.limits.fits(dtype, head_dim):
            return NPUAttention(self.limits)
        _log.warning(
            "attention runs by torch's operators, which gather the context: the NPU's has no such heads",
            dtype=dtype_name(dtype),
            head_dim=head_dim,
        )
        return SDPAAttention()

    @override
    def graph_capture(self) -> GraphCapture | None:
        return NPUGraphs()

    @override
    def of_rank(self, rank: int) -> str:
        """Each rank has the next NPU."""
        return f"{self.name}:{self.number + rank}"

    @override
    def process_group(self, store: Any, rank: int, count: int, patience: timedelta) -> Any:
        """HCCL, made as torch-npu makes that of init_process_group("hccl")."""
        hccl = import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL
        options = hccl.Options()
        options._timeout = patience
        options.global_ranks_in_group = []
        options.group_id = "penstock"
        return hccl(store, rank, count, options)

    @override
    def layer_kernels(self, dtype: torch.dtype) -> LayerKernels:
        return NPUKernels()

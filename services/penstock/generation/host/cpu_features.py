"""Features of this CPU, and those that the libraries may use. No other module decides this.

Tiny products test oneDNN, not the CPU's flags: ONEDNN_MAX_CPU_ISA bounds it, and so do its build and the implementation
that it chooses. A product shows all of these. Every answer is found once per process.
"""

from __future__ import annotations

import functools
import platform
import sys
from enum import Enum
from pathlib import Path

import torch

from penstock.common.dtypes import dtype_name
from penstock.common.environment import torch_cpu_capability
from penstock.generation.host.cpu_flags import cpu_flags

# Rows of the test products: oneDNN has other code for one row.
_ROWS = (1, 16)
_SIZE = 64
_LARGEST = 127


# Instruction sets that the C++ kernels are compiled for, the wider first, by the kind of processor. Of Arm's: 8.2 with
# the dot products of bytes, and that with bfloat16's and those of signed by unsigned bytes (i8mm).
INSTRUCTION_SETS = {"x86_64": ("avx512", "avx2"), "aarch64": ("neon_bf16", "neon")}
# Requirements of the wider of them, by Linux's names in /proc/cpuinfo (csrc/util/ops_dispatch.cpp asks the CPU itself).
_WIDE_FLAGS = {
    "x86_64": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "aarch64": {"asimddp", "bf16", "i8mm"},
}


class Int8Product(Enum):
    """oneDNN's product of unsigned by signed bytes."""

    EXACT = "exact"
    # Products of neighbours are added in 16 bits (vpmaddubsw, where there is no VNNI): exact while the unsigned bytes
    # are at most 127, wrong above.
    SATURATES = "exact up to 127, above its 16-bit sums saturate"
    MISSING = "missing"


@functools.cache
def packing_obstacle(dtype: torch.dtype) -> str | None:
    """Reason why this torch and CPU cannot use oneDNN's packed weights of `dtype`; None when they can."""
    if not torch._C._has_mkldnn:
        return "this torch was built without oneDNN"
    weight = torch.eye(16, dtype=torch.float32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        found = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None if torch.equal(found, weight) else "oneDNN gives wrong results for it"


@functools.cache
def int8_product() -> Int8Product:
    """Test oneDNN's int8 product by products of the largest numbers."""
    if not torch._C._has_mkldnn:
        return Int8Product.MISSING
    try:
        if _is_exact(255, 128):
            return Int8Product.EXACT
        return Int8Product.SATURATES if _is_exact(_LARGEST, 0) else Int8Product.MISSING
    except (RuntimeError, AttributeError):
        return Int8Product.MISSING


def _is_exact(largest: int, zero: int) -> bool:
    """True when products of unsigned bytes (`largest` less `zero`) with weights of 127 and -127 are exact."""
    weight = torch.full((_SIZE, _SIZE), _LARGEST, dtype=torch.int8)
    weight[1::2] = -_LARGEST
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scales, zeros = torch.ones(_SIZE), torch.zeros(_SIZE, dtype=torch.int32)
    expected = weight.sum(dim=1, dtype=torch.float32) * (largest - zero)
    for rows in _ROWS:
        x = torch.full((rows, _SIZE), largest, dtype=torch.uint8)
        found = torch.ops.onednn.qlinear_pointwise(
            x, 1.0, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if not torch.equal(found, expected.expand(rows, -1)):
            return False
    return True


def native_bound() -> str | None:
    """Return the largest instruction set that the C++ kernels may use; None: the CPU's own is the only bound.

    ATEN_CPU_CAPABILITY keeps torch's own loops from the wider instructions, and the kernels as well.
    """
    sets, capability = native_sets(), torch_cpu_capability()
    if sets and capability in ("avx2", "default"):
        return sets[-1]
    # Without it the kernels may use x86's tile registers, which torch's own loops have not.
    return capability if capability in sets else None


def native_sets() -> tuple[str, ...]:
    """Return the instruction sets with C++ kernels for this kind of machine, the wider first.

    Empty on other systems than Linux.
    """
    return INSTRUCTION_SETS.get(platform.machine(), ()) if sys.platform == "linux" else ()


def has_wide_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True unless Linux says that this CPU lacks the wider of native_sets()."""
    flags = cpu_flags(cpuinfo)
    return flags is None or _WIDE_FLAGS.get(platform.machine(), set()) <= flags


def describe_onednn() -> str:
    """Describe, for people, the number formats that oneDNN packs and its int8 product."""
    formats = (torch.float32, torch.bfloat16, torch.float16)
    packed = [dtype_name(dtype) for dtype in formats if packing_obstacle(dtype) is None]
    return f"packs {', '.join(packed) or 'nothing'}; int8 {int8_product().value}"

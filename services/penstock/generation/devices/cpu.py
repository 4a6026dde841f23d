"""The CPU: oneDNN-packed linear layers, torch's attention, threads bounded by configuration."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from penstock.common.dtypes import dtype_name
from penstock.common.environment import cache_folder, system_folder
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.attention.base import Attention
from penstock.generation.attention.native import NativeAttention
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices import COMPACT_WEIGHTS, KERNELS
from penstock.generation.devices.base import Device, DeviceMemory
from penstock.generation.devices.native import library
from penstock.generation.devices.native.build import is_supported
from penstock.generation.devices.native.prebuilt import how_to_get
from penstock.generation.devices.torch_dtypes import COMPUTED_DTYPES, named_dtype
from penstock.generation.host.arena import Arena
from penstock.generation.host.cpu_features import packing_obstacle
from penstock.generation.host.memory import host_memory
from penstock.generation.layers.layer_kernels import LayerKernels, NativeKernels
from penstock.generation.layers.linear import FP8, INT8_GROUPS, QUANTIZATIONS
from penstock.generation.layers.linear.base import LinearMethod
from penstock.generation.layers.linear.dense import PlainLinearMethod, cpu_linear_method
from penstock.generation.layers.linear.int4 import Int4LinearMethod
from penstock.generation.layers.linear.int8 import Int8LinearMethod
from penstock.generation.layers.linear.int8_groups import refuse_int8_groups
from penstock.generation.layers.linear.native import NativeLinearMethod, formats
from penstock.generation.sampling.sampling_kernels import NativeSampling, SamplingKernels

if TYPE_CHECKING:
    from datetime import timedelta

    from penstock.generation.host.mapped import MappedFile

_log = get_logger("penstock.generation")
# Instruction sets with which compact weights were measured to be faster for few sequences, and slower by at most a
# twentieth for some more (docs/guide/performance.md).
_FASTER_COMPACT = ("avx512",)


class CPUDevice(Device):
    """All of this process's CPU cores, or `num_threads` of them."""

    name = "cpu"

    def __init__(self) -> None:
        # Instruction set of the native kernels; None while torch's operators are used.
        self.instruction_set: str | None = None
        self._could_be_faster: str | None = None
        self._kernels = "auto"
        self._compact_weights = False
        # Formats with a warning so far.
        self._slow: set[torch.dtype] = set()
        self._arena: Arena | None = None
        self._mapped_files: list[MappedFile] = []
        self._mapped_bytes = 0

    @property
    @override
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @override
    def start(
        self,
        *,
        num_threads: int | None = None,
        kernels: str = "auto",
        arena: Arena | None = None,
        compact_weights: str = "auto",
    ) -> None:
        """Raises StartupError naming --threads, --kernels or --compact-weights."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if num_threads is not None and num_threads < 1:
            raise StartupError("--threads must be at least 1", flag="--threads")
        if num_threads is not None and num_threads > cores:
            _log.warning("--threads is more than the cores that this process may use", threads=num_threads, cores=cores)
        torch.set_num_threads(num_threads or cores)
        self._kernels = kernels
        self.instruction_set = _native_kernels(kernels)
        self._compact_weights = _compacts(compact_weights, self.instruction_set)
        self._could_be_faster = _advice(kernels, self.instruction_set)
        if self.instruction_set is not None:
            self._arena = arena
        elif arena is not None:
            # oneDNN allocates the memory that it packs into.
            arena.close()

    @override
    def compute_dtype(self, requested: str, checkpoint: torch.dtype) -> torch.dtype:
        """The word "auto" turns float16 into bfloat16 on a CPU without float16 arithmetic: same size, and fast. A
        requested float16 works everywhere, slowly."""
        if requested != "auto":
            return named_dtype(requested)
        if checkpoint is torch.float16 and packing_obstacle(torch.float16) is not None:
            _log.warning("the checkpoint's float16 is loaded as bfloat16: this CPU has no float16 arithmetic")
            return torch.bfloat16
        return checkpoint if checkpoint in COMPUTED_DTYPES.values() else torch.float32

    @property
    @override
    def compacts_weights(self) -> bool:
        return self._compact_weights

    @override
    def memory(self) -> DeviceMemory:
        return DeviceMemory(*host_memory(mapped=self._mapped_bytes))

    @override
    def linear_method(self, dtype: torch.dtype, quantization: str = "none") -> LinearMethod:
        """A format that is slow here gets a warning, once."""
        method = cpu_method(
            dtype,
            quantization,
            native=self._uses_native(dtype),
            arena=self._arena,
            compact_weights=self._compact_weights,
        )
        if isinstance(method, PlainLinearMethod) and dtype not in self._slow:
            self._slow.add(dtype)
            name = dtype_name(dtype)
            _log.warning("the model's number format is slow on this CPU", dtype=name, advice=self._faster_than(dtype))
            _log.debug("linear layers are not packed", dtype=name, cause=packing_obstacle(dtype))
        return method

    @override
    def brief_linear_method(self, dtype: torch.dtype) -> LinearMethod:
        # What the arena hands out never comes back.
        return cpu_method(dtype, "none", native=self._uses_native(dtype))

    def _faster_than(self, dtype: torch.dtype) -> str:
        """Advice, in plain words, for a format that torch's operators do not pack."""
        if dtype in library.DTYPES and self._could_be_faster is not None:
            return self._could_be_faster
        if dtype in library.DTYPES and self._kernels == "torch" and is_supported():
            return "leave --kernels torch out: the C++ kernels are fast with it"
        for other in library.DTYPES:
            if other is not dtype and (self._uses_native(other) or packing_obstacle(other) is None):
                return f"choose --dtype {dtype_name(other)}"
        return "choose a machine with AVX2 or newer instructions"

    @override
    def weight_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = None if self._arena is None else self._arena.take(math.prod(shape) * dtype.itemsize)
        if not memory:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    @property
    @override
    def mapped_files(self) -> tuple[MappedFile, ...]:
        return tuple(self._mapped_files)

    @override
    def mapped_tensor(
        self, file: MappedFile, begin: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """None if its offset in the file is not a multiple of its numbers' size."""
        if begin % dtype.itemsize:
            return None
        return self._view(file, begin, math.prod(shape), dtype).view(shape)

    @override
    def mapped_weights(self, file: MappedFile, name: str) -> torch.Tensor:
        """Raises StartupError naming --kernels."""
        if self.instruction_set is None:
            raise StartupError(
                f"{name} was packed for the C++ kernels, which are turned off or not built: use --kernels native after "
                "`penstock build-kernels`, or the checkpoint it was made of",
                flag="--kernels",
            )
        return self._view(file, 0, len(file.memory), torch.uint8)

    def _view(self, file: MappedFile, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._mapped_files.append(file)
        self._mapped_bytes += count * dtype.itemsize
        with warnings.catch_warnings():
            # torch warns that it cannot be written; it must not be.
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(file.memory, dtype=dtype, count=count, offset=begin)

    @override
    def attention(self, dtype: torch.dtype, head_dim: int) -> Attention:
        fits = head_dim <= NativeAttention.MAX_HEAD_DIM
        return NativeAttention() if fits and self._uses_native(dtype) else SDPAAttention()

    @override
    def layer_kernels(self, dtype: torch.dtype) -> LayerKernels:
        return NativeKernels(dtype) if self._uses_native(dtype) else LayerKernels()

    @override
    def sampling_kernels(self) -> SamplingKernels:
        """Scores are float32 for every dtype of the model."""
        return SamplingKernels() if self.instruction_set is None else NativeSampling()

    def _uses_native(self, dtype: torch.dtype) -> bool:
        return self.instruction_set is not None and dtype in library.DTYPES

    @override
    def of_rank(self, rank: int) -> str:
        return self.name

    @override
    def process_group(self, store: Any, rank: int, count: int, patience: timedelta) -> Any:
        """Gloo, which listens on loopback."""
        # torch's stubs leave out what its process groups do.
        distributed: Any = torch.distributed
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = patience
        return gloo(store, rank, count, options)

    @override
    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    @override
    def advice(self) -> str | None:
        return self._could_be_faster

    @override
    def describe(self) -> str:
        threads = torch.get_num_threads()
        kernels = f", {self.instruction_set} kernels" if self.instruction_set else ""
        return f"cpu ({threads} thread{'s' if threads != 1 else ''}{kernels})"


def _native_kernels(wanted: str) -> str | None:
    if wanted not in KERNELS:
        raise StartupError(f"--kernels must be one of {', '.join(KERNELS)}", flag="--kernels")
    if wanted == "torch":
        return None
    folders = Path(cache_folder()), Path(system_folder())
    found = library.load(*folders)
    if found is None and wanted == "native":
        raise StartupError(
            f"the native kernels are not there: {how_to_get()}",
            flag="--kernels",
        )
    return found


def _compacts(wanted: str, instruction_set: str | None) -> bool:
    if wanted not in COMPACT_WEIGHTS:
        raise StartupError(f"--compact-weights must be one of {', '.join(COMPACT_WEIGHTS)}", flag="--compact-weights")
    if wanted == "on" and instruction_set is None:
        raise StartupError(
            "--compact-weights on needs the C++ kernels, which are turned off or not built (`penstock build-kernels`)",
            flag="--compact-weights",
        )
    return wanted == "on" or (wanted == "auto" and instruction_set in _FASTER_COMPACT)


def _advice(wanted: str, instruction_set: str | None) -> str | None:
    folders = Path(cache_folder()), Path(system_folder())
    if wanted == "torch" or instruction_set or not is_supported() or library.find_first(*folders):
        return None
    return f"no kernels, torch's are several times slower: {how_to_get()}"


def cpu_method(
    dtype: torch.dtype,
    quantization: str,
    *,
    native: bool,
    arena: Arena | None = None,
    compact_weights: bool = False,
) -> LinearMethod:
    """Return the method for `dtype` and `quantization`. `native`: the C++ kernels are loaded and work in `dtype`; they
    put weights into `arena` until it is used up, and those in bfloat16 are `compact_weights`.

    Raises StartupError naming --quantization.
    """
    if quantization == FP8:
        raise StartupError(f"--quantization {FP8} is for --device cuda: use int8 here", flag="--quantization")
    if quantization not in QUANTIZATIONS:
        raise StartupError(f"--quantization must be auto or one of {', '.join(QUANTIZATIONS)}", flag="--quantization")
    if quantization != "none" and dtype not in (torch.bfloat16, torch.float32):
        raise StartupError(f"--quantization {quantization} needs --dtype bfloat16 or float32", flag="--quantization")
    if native:
        layers, head = formats(dtype, quantization)
        return NativeLinearMethod(layers, head=head, arena=arena, compact=compact_weights)
    if quantization == "none":
        return cpu_linear_method(dtype)
    if quantization == INT8_GROUPS:
        raise refuse_int8_groups("they are turned off or not built (`penstock build-kernels`)")
    return Int8LinearMethod() if quantization == "int8" else Int4LinearMethod()

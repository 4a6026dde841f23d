"""The interface of a device for the rest of the engine. Everything specific to a device is behind it and Attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.common.errors import StartupError

if TYPE_CHECKING:
    from datetime import timedelta

    from penstock.generation.attention.base import Attention
    from penstock.generation.devices.graph_capture import GraphCapture
    from penstock.generation.host.arena import Arena
    from penstock.generation.host.mapped import MappedFile
    from penstock.generation.layers.layer_kernels import LayerKernels
    from penstock.generation.layers.linear.base import LinearMethod
    from penstock.generation.sampling.sampling_kernels import SamplingKernels

# Tokens of one KV block, unless the operator or the device needs another size.
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that this process may use (a container's limit counts)."""

    total: int
    available: int


class Device(ABC):
    """One accelerator, or the CPU. Cheap to make; call `start` once before anything is loaded."""

    name: str
    # Ranks of --tensor-parallel share one memory.
    ranks_share_memory = True
    # Its process group collects at one rank; otherwise at all of them.
    gathers_at_one = True

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Device of the tensors."""

    @abstractmethod
    def start(
        self,
        *,
        num_threads: int | None = None,
        kernels: str = "auto",
        arena: Arena | None = None,
        compact_weights: str = "auto",
    ) -> None:
        """Claim the device for this process; `num_threads` are those of host-side kernels (None: all allowed cores).

        `kernels`: "native" requires the C++ kernels, "auto" uses them if they are built, "torch" never uses them.
        `arena`: memory for weights; a device that does not need it closes it. `compact_weights`: "on" keeps weights in
        bfloat16 in fewer bytes, "auto" does where that was measured to be faster, "off" never does.

        Raises StartupError naming the flag that cannot be honoured.
        """

    @abstractmethod
    def compute_dtype(self, requested: str, checkpoint: torch.dtype) -> torch.dtype:
        """Return the dtype of weights, activations and KV for `--dtype requested` ("auto": by the checkpoint's).

        Raises StartupError naming --dtype when there is no such dtype here.
        """

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return the memory right now. Files that weights were mapped from must stay in memory, so they count as
        used."""

    def host_memory(self) -> DeviceMemory:
        """Return the memory of the device's machine, as `memory` does: the host pool is there."""
        return self.memory()

    def block_size(self, requested: int | None) -> int:
        """Return the tokens of one KV block for `--block-size requested` (None: the best here).

        Raises StartupError naming --block-size for a size that attention here cannot read.
        """
        return requested or BLOCK_SIZE

    @abstractmethod
    def linear_method(self, dtype: torch.dtype, quantization: str = "none") -> LinearMethod:
        """Return the method that stores and multiplies weights here: as `dtype`, or as int8 or int4 with activations of
        `dtype`.

        Raises StartupError naming --quantization when this device or dtype cannot.
        """

    @property
    def compacts_weights(self) -> bool:
        """True where weights in bfloat16 become compact (layers/linear/compact.py); to be asked after `start`."""
        return False

    def brief_linear_method(self, dtype: torch.dtype) -> LinearMethod:
        """Return a method that stores and multiplies weights as `dtype`, for weights that are here for a moment."""
        return self.linear_method(dtype)

    def weight_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a large unquantised weight, not initialised."""
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        """Files of mapped weights: no process may write into these."""
        return ()

    def mapped_tensor(
        self, file: MappedFile, begin: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the tensor at offset `begin` of the file, read-only; None: it must be copied."""
        return None

    def mapped_weights(self, file: MappedFile, name: str) -> torch.Tensor:
        """Return (bytes,) uint8, read-only: mapped weights in the layout of the CPU's C++ kernels.

        Raises StartupError naming the flag to change if they cannot be used; the message calls them `name`.
        """
        raise StartupError(
            f"{name} was packed for the CPU's C++ kernels: --device {self.name} needs the checkpoint it was made of",
            flag="--device",
        )

    @abstractmethod
    def attention(self, dtype: torch.dtype, head_dim: int) -> Attention:
        """Return the fastest attention for `dtype` and heads of this size that works here."""

    @abstractmethod
    def layer_kernels(self, dtype: torch.dtype) -> LayerKernels:
        """Return the fastest operations between linear layers for `dtype` that work here."""

    @abstractmethod
    def sampling_kernels(self) -> SamplingKernels:
        """Return the fastest operations on rows of scores that work here."""

    def of_rank(self, rank: int) -> str:
        """Return the name, for --device, of the device of a rank of --tensor-parallel when rank 0 has this one.

        Raises StartupError naming --tensor-parallel if a model cannot be sharded here.
        """
        raise StartupError(
            f"--tensor-parallel is not there with --device {self.name}: leave it out", flag="--tensor-parallel"
        )

    def process_group(self, store: Any, rank: int, count: int, patience: timedelta) -> Any:
        """Return torch's process group of `count` ranks over `store`, a store of torch.distributed; a collective waits
        for `patience`. Only where `of_rank` gives a name."""
        raise RuntimeError(f"{self.name} has no ranks")

    def graph_capture(self) -> GraphCapture | None:
        """Return the way to capture decode steps; None: the device has none."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def advice(self) -> str | None:
        """Advice to make this machine faster, in one line for people; None: there is none."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Description in one line for logs and GetModelInfo, such as `cpu (2 threads)`."""

"""Work that a generation process begins before it imports torch, which keeps one core busy for a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from penstock.common.checkpoint import resolve_model
from penstock.common.deferred import defer
from penstock.common.environment import cache_folder, system_folder, torch_cpu_capability
from penstock.common.errors import StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.model_config import CONFIG_FILE, read_json
from penstock.generation.devices.native import LIBRARY
from penstock.generation.host.arena import Arena, open_arena
from penstock.generation.host.cpu_flags import cpu_flags
from penstock.generation.host.mapped import populate_beside
from penstock.generation.host.memory import host_memory
from penstock.generation.parallel.begun import BegunRanks
from penstock.generation.weights.files import PACKED_FILE, is_packed, least_weight_bytes

# Memory that the process takes besides, before the weights: it must be free, too.
_BESIDE_BYTES = 2**28
# Memory that reading the tokenizer takes for a moment. The weights' memory must not be complete before that is over, or
# the peak of the process would be higher than without preloading.
UNTOUCHED_BYTES = 2**26
# Parts of torch that this package does not use, and that torch imports last or for its users only. Two of them register
# as they are loaded: results of operators for tensors without data (FakeTensor, torch.compile, the device "meta";
# without them torch.Generator() cannot be called either), and kernels for GPUs. So this is for CPU only, and code that
# needs these parts must read an attribute of them first.
UNUSED_OF_TORCH = (
    "torch._meta_registrations",
    "torch._native",
    # Texts of help().
    "torch._tensor_docs",
    "torch.compiler",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.fx.passes",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.sparse",
    "torch.testing",
    "torch.utils.data",
    "torchgen.model",
)


@dataclass(frozen=True, slots=True)
class Begun:
    """Parts of a start that were begun before torch was imported, for the loader of the model."""

    # Memory for the weights. None: there is no model, the memory would not be used, as for packed weights, which are
    # read ahead instead, or may not fit.
    arena: Arena | None = None
    # Other processes of the model.
    ranks: BegunRanks = field(default_factory=BegunRanks)

    def close(self) -> None:
        """Free the memory, and end the processes that the load has not taken. Calling it again is harmless."""
        if self.arena is not None:
            self.arena.close()
        self.ranks.close()


def begin(config: GenerationServiceConfig) -> Begun:
    """Begin to take memory for the weights of `config.model`, no more than they will need, and its other processes.

    Never raises: the loader reports errors of a model. Later imports of torch leave out UNUSED_OF_TORCH where that is
    allowed.
    """
    if config.defer_imports and _is_for_cpu(config.device):
        defer(UNUSED_OF_TORCH)
    return Begun(_arena(config), BegunRanks() if config.empty else begin_ranks(config))


def begin_ranks(config: GenerationServiceConfig) -> BegunRanks:
    """Begin the other processes of `config.model`: none where config.json tells that they cannot share its heads, for
    which the loader refuses it. Never raises."""
    begun = BegunRanks()
    if config.tensor_parallel == 1 or _may_be_spread(config):
        begun.begin(config.tensor_parallel)
    return begun


def _may_be_spread(config: GenerationServiceConfig) -> bool:
    try:
        values = read_json(resolve_model(config.model, allow_hub=False) / CONFIG_FILE)
    except (StartupError, OSError):
        # A model that is fetched first, or none.
        return True
    heads = values.get("num_attention_heads")
    return not isinstance(heads, int) or heads % config.tensor_parallel == 0


def _arena(config: GenerationServiceConfig) -> Arena | None:
    if (
        config.empty
        # Each process has a part.
        or config.tensor_parallel > 1
        or not config.prefault_weights
        or config.device not in ("auto", "cpu")
        or not _may_have_kernels(config.kernels)
    ):
        return None
    try:
        folder = resolve_model(config.model, allow_hub=False)
    except (StartupError, OSError):
        return None
    if is_packed(folder):
        # Packed weights are used where the page cache has them: the loader's own mapping finds the pages there.
        populate_beside(folder / PACKED_FILE)
        return None
    num_bytes = least_weight_bytes(
        folder,
        config.dtype,
        config.quantization,
        map_embeddings=config.map_embeddings,
        compact=_will_compact(config.compact_weights),
    )
    _, available = host_memory()
    return open_arena(num_bytes, UNTOUCHED_BYTES) if num_bytes + _BESIDE_BYTES <= available else None


def _will_compact(wanted: str) -> bool:
    """Guess whether weights become compact, as devices/cpu.py decides once torch is there."""
    if wanted != "auto":
        return wanted == "on"
    flags = cpu_flags() or frozenset()
    return "avx512_bf16" in flags and "amx_tile" not in flags and torch_cpu_capability() not in ("avx2", "default")


def _is_for_cpu(device: str) -> bool:
    if device != "auto":
        return device == "cpu"
    try:
        return metadata.version("torch").endswith("+cpu") and util.find_spec("torch_npu") is None
    except metadata.PackageNotFoundError:
        return False


def _may_have_kernels(wanted: str) -> bool:
    """True when C++ kernels may be there: only they pack weights into given memory. They may be of another torch."""
    if wanted == "torch":
        return False
    return any(next(Path(root).glob(f"*/{LIBRARY}-*.so"), None) for root in (cache_folder(), system_folder()))

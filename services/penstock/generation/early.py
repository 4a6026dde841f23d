"""What the start of a generation process begins before torch is imported, which keeps one core busy for a second."""

from __future__ import annotations

from pathlib import Path

from penstock.common.checkpoint import resolve_model
from penstock.common.environment import cache_folder, system_folder
from penstock.common.errors import StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.arena import Arena, open_arena
from penstock.generation.devices.mapped import populate_beside
from penstock.generation.devices.memory import host_memory
from penstock.generation.models.least_bytes import least_weight_bytes
from penstock.generation.models.shards import PACKED_FILE, is_packed
from penstock.generation.native import LIBRARY

# What the process takes besides, and must be free, too: the weights come only after it.
_BESIDE_BYTES = 2**28
# What reading the tokenizer takes for a moment. The weights' memory must not be whole before that is over, or the peak
# of the process would be higher than without all this.
UNTOUCHED_BYTES = 2**26


def begin(config: GenerationServiceConfig) -> Arena | None:
    """Memory for the weights of `config.model`, being taken from now on: no more than they will need. None where it
    would not be used, as for packed weights, which are read ahead instead, or where it is unsure that it fits. Never
    raises: the loader says what is wrong with a model."""
    if not config.prefault_weights or config.device not in ("auto", "cpu") or not _may_have_kernels(config.kernels):
        return None
    try:
        folder = resolve_model(config.model, allow_hub=False)
    except (StartupError, OSError):
        return None
    if is_packed(folder):
        # Used where they are. The loader's own mapping finds the pages there.
        populate_beside(folder / PACKED_FILE)
        return None
    num_bytes = least_weight_bytes(folder, config.dtype, config.quantization)
    _, available = host_memory()
    return open_arena(num_bytes, UNTOUCHED_BYTES) if num_bytes + _BESIDE_BYTES <= available else None


def _may_have_kernels(wanted: str) -> bool:
    """Only the C++ kernels pack weights into memory that is given to them. Those of another torch may lie there."""
    if wanted == "torch":
        return False
    return any(next(Path(root).glob(f"*/{LIBRARY}-*.so"), None) for root in (cache_folder(), system_folder()))

"""MindIE-LLM's GeneratorTorch and its `model_config` over the engine here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.compat.mindie.by_hand import ModelInput, SamplingMetadata
    from penstock.compat.mindie.generator_torch import GeneratorTorch
    from penstock.compat.mindie.lora_status import LoraStatus
    from penstock.compat.mindie.model_settings import ModelConfigError

__all__ = ["GeneratorTorch", "LoraStatus", "ModelConfigError", "ModelInput", "SamplingMetadata"]

# Imported when they are asked for: --model-config reads the dictionary before there is torch.
_HOMES = {
    "GeneratorTorch": "generator_torch",
    "LoraStatus": "lora_status",
    "ModelConfigError": "model_settings",
    "ModelInput": "by_hand",
    "SamplingMetadata": "by_hand",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

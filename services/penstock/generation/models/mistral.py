"""Mistral: every layer slides when `sliding_window` is set."""

from __future__ import annotations

from penstock.generation.core.model_config import ConfigReader
from penstock.generation.models.family import Family


def _sliding_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows of every layer. An absent `sliding_window` means the class default, null means none. `layer_types` has no
    effect, as in 5.x."""
    if config.values.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    return (config.integer("sliding_window", 4096),) * num_layers


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    sliding_windows=_sliding_windows,
    default_bos=1,
    default_eos=(2,),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)

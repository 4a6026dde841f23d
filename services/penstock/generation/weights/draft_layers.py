"""Names of the layers for drafts that a checkpoint carries: one layout for all, DeepSeek's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.weights.tensor_names import layer_prefix

if TYPE_CHECKING:
    from penstock.generation.weights.safetensors_folder import Checkpoint

# Tensors of a layer for drafts beside those of a decoder layer, by DeepSeek's names.
NEXT_NORM, STATE_NORM, JOINT = "enorm", "hnorm", "eh_proj"
DRAFT_NORM, DRAFT_HEAD, DRAFT_TABLE = "shared_head.norm.weight", "shared_head.head.weight", "embed_tokens.weight"
# Beginning of the names of Qwen3-Next and Qwen3.5, and of its parts: DeepSeek's.
QWEN = "mtp."
_QWEN_PARTS = {
    "layers.0.": "",
    "fc.": f"{JOINT}.",
    "pre_fc_norm_embedding.": f"{NEXT_NORM}.",
    "pre_fc_norm_hidden.": f"{STATE_NORM}.",
    "norm.": "shared_head.norm.",
}
# Of the product that joins both inputs: every such layer has it.
QWEN_JOINT = f"{QWEN}fc.weight"


def name_as_layer(checkpoint: Checkpoint, number: int) -> None:
    """Give the first of Qwen's layers for drafts the names that DeepSeek's layer `number` has."""
    for part, new in _QWEN_PARTS.items():
        checkpoint.rename(f"{QWEN}{part}", f"{layer_prefix(number)}{new}")

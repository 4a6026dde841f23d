"""The text part of a model that also sees: its configuration, and its tensors under the names of a text model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.core.model_config import ConfigReader
from penstock.generation.weights.draft_layers import QWEN, name_as_layer

if TYPE_CHECKING:
    from penstock.generation.weights.safetensors_folder import Checkpoint

# By the type of the whole: the type of its text part, which a native family runs.
TEXT_PARTS = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
}
_FIELD, _TIED = "text_config", "tie_word_embeddings"
# Names in the checkpoint of the whole: of the text's tensors, and of those that nothing reads here.
_PREFIX = "model.language_model."
_OF_GEMMA = ("vision_tower.", "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio.")
_OTHERS = ("model.visual.", QWEN, *(f"model.{name}" for name in _OF_GEMMA))


def text_part(config: ConfigReader) -> ConfigReader:
    """Return the fields of the text part, before those of the whole; the same where the whole is a text model.

    Raises StartupError naming the field.
    """
    own_type = TEXT_PARTS.get(str(config.values.get("model_type")))
    text = None if own_type is None else config.mapping(_FIELD)
    if text is None:
        return config
    values = {**config.values, **text.values, "model_type": own_type}
    # transformers ties a model that also sees by the flag of the whole, whatever its text part says.
    if _TIED in config.values:
        values[_TIED] = config.values[_TIED]
    return ConfigReader(values, config.source, config.prefix)


def take_text_part(checkpoint: Checkpoint, draft_layer: int | None = None) -> None:
    """Give the text's tensors the names of a text model, and take the others for absent.

    `draft_layer`: number that the layer for drafts gets; None: it is absent, too.
    """
    checkpoint.rename(_PREFIX, "model.")
    if draft_layer is not None:
        name_as_layer(checkpoint, draft_layer)
    for prefix in _OTHERS:
        checkpoint.leave_out(prefix)

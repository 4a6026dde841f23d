"""The text part of a model that also sees: its configuration, and its tensors under the names of a text model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.generation.core.media_ids import MediaIds
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
# By the type of the whole: fields with the ids that stand for images, videos and sounds, and their defaults. The text
# part reads its padding id in their place (transformers 5.24). In the other types they have rows of their own.
_OF_GEMMA_IDS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
_MEDIA_IDS = {"gemma4": _OF_GEMMA_IDS, "gemma4_unified": _OF_GEMMA_IDS}
_FIELD, _TIED, _PADDING = "text_config", "tie_word_embeddings", "pad_token_id"
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


def read_media_ids(config: ConfigReader, vocab_size: int) -> MediaIds | None:
    """Return the ids below `vocab_size` that a whole's text part reads as its padding id; None: it has no such ids.

    Raises StartupError naming the field.
    """
    fields = _MEDIA_IDS.get(str(config.values.get("model_type")), {})
    text = config.mapping(_FIELD)
    if not fields or text is None:
        return None
    named = (
        default if field not in config.values else config.optional_integer(field) for field, default in fields.items()
    )
    ids = tuple(sorted({one for one in named if one is not None and one < vocab_size}))
    # A null, and -1, mean no padding id: transformers has nothing to read then.
    absent = text.values.get(_PADDING, 0) in (None, -1)
    read_as = None if absent else text.integer(_PADDING, 0, minimum=0)
    if not ids or read_as is None:
        return None
    if read_as >= vocab_size:
        raise text.error(_PADDING, f"({read_as}) is not in the vocabulary of {vocab_size}: images' ids are read as it")
    return MediaIds(ids, read_as)


def take_text_part(checkpoint: Checkpoint, draft_layer: int | None = None) -> None:
    """Give the text's tensors the names of a text model, and take the others for absent.

    `draft_layer`: number that the layer for drafts gets; None: it is absent, too.
    """
    checkpoint.rename(_PREFIX, "model.")
    if draft_layer is not None:
        name_as_layer(checkpoint, draft_layer)
    for prefix in _OTHERS:
        checkpoint.leave_out(prefix)

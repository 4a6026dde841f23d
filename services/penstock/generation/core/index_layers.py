"""Layers with an indexer of their own, as config.json tells. No torch."""

from __future__ import annotations

from penstock.generation.core.model_config import ConfigReader

# Model types in which layers may share a choice; in the others that have indexers every layer has one.
_IN_TURNS = ("glm_moe_dsa",)
SPARSE_TYPES = ("deepseek_v32", *_IN_TURNS)
# Kinds of layers in `indexer_types`.
_FULL, _SHARED = "full", "shared"
# The same letters in `index_topk_pattern`.
_LETTERS = {"F": _FULL, "S": _SHARED}


def read_index_layers(config: ConfigReader, model_type: str, num_layers: int) -> tuple[bool, ...]:
    """Tell which layers have an indexer: by `indexer_types`, else by `index_topk_pattern`, else in turns. Raises
    StartupError naming the field."""
    if model_type not in _IN_TURNS:
        return (True,) * num_layers
    types, field = config.values.get("indexer_types"), "indexer_types"
    if types is None and config.has("index_topk_pattern"):
        types, field = config.values["index_topk_pattern"], "index_topk_pattern"
        if isinstance(types, str):
            types = [_LETTERS.get(letter, letter) for letter in types]
    if types is None:
        field = "index_topk_freq"
        # A frequency of 0 is one of 1.
        every = max(config.integer(field, 1, minimum=0), 1)
        offset = config.integer("index_skip_topk_offset", 2, minimum=0)
        types = [_SHARED if max(layer - offset + 1, 0) % every else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {_FULL, _SHARED}:
        raise config.error(field, f"must list {_FULL!r} or {_SHARED!r} for each of {num_layers} layers")
    if types[0] != _FULL:
        raise config.error(field, f"must begin with {_FULL!r}: no layer before the first one chooses positions")
    return tuple(one == _FULL for one in types)

"""Keys and values of a model by groups of layers, as its configuration tells: what a context takes in the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError
from penstock.generation.attention.cache_layout import LayerSight, layout_of
from penstock.generation.core.index_layers import SPARSE_TYPES, read_index_layers
from penstock.generation.core.layer_shapes import LayerShape
from penstock.generation.core.model_config import ConfigReader

_SLIDING, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"
# Names of kinds of layers that attend, in configurations of several kinds.
_ATTENDS = (_FULL, _CHUNKED, _SLIDING, "attention", "hybrid", "indexed_attention")
# Kinds of a type's layers where its configuration lists none: of (number of the layer, configuration).
_KINDS: Mapping[str, Callable[[int, Mapping[str, Any]], str]] = {
    "gemma2": lambda layer, _: _FULL if layer % 2 else _SLIDING,
    "gpt_oss": lambda layer, _: _FULL if layer % 2 else _SLIDING,
    "gemma3_text": lambda layer, values: _every(layer, values.get("sliding_window_pattern", 6)),
    "gemma3": lambda layer, values: _every(layer, values.get("sliding_window_pattern", 6)),
    "gemma4_text": lambda layer, values: _of_gemma4(layer, values),
    "gemma4_unified_text": lambda layer, values: _of_gemma4(layer, values),
    "cohere2": lambda layer, values: _every(layer, values.get("sliding_window_pattern", 4)),
    "llama4_text": lambda layer, _: _CHUNKED if (layer + 1) % 4 else _FULL,
    "llama4": lambda layer, _: _CHUNKED if (layer + 1) % 4 else _FULL,
}
# Types with a switch for windows, and the first layer that has one.
_SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


def layer_sights(values: Mapping[str, Any], num_layers: int) -> list[LayerSight]:
    """Return what the rows of each layer that attends read, by a configuration's text part.

    Windows as the portable attention reads them: the C++ kernels read from a multiple of 64 on.
    """
    kinds = values.get("layer_types") or values.get("layers_block_type")
    if not isinstance(kinds, list):
        kinds = [_kind(values, layer) for layer in range(num_layers)]
    attends = [kind for kind in kinds if kind in _ATTENDS]
    return [_sight(values, kind) for kind in attends]


def shapes_of(folder: Path) -> tuple[LayerShape, ...]:
    """Return the sizes of a model's layers where they are not all alike; else, and for one that is refused, nothing."""
    # Imports torch.
    from penstock.generation.models.registry import read_model_config

    try:
        return read_model_config(folder).layer_shapes
    except StartupError:
        return ()


def kv_groups(sights: Sequence[LayerSight], layer_bytes: int, widths: Sequence[int] = ()) -> list[dict[str, int]]:
    """Return facts of each group of layers; `layer_bytes` are those of a token in one layer, the widest. `widths`: see
    layout_of()."""
    layout = layout_of(sights, widths)
    return [
        {
            "layers": len(layers),
            "window": group.window,
            "chunk": group.chunk,
            "bytes_per_token": group.num_blocks * layout.layers_a_block * layer_bytes,
        }
        for group, layers in zip(layout.groups, layout.members, strict=True)
    ]


def context_bytes(
    sights: Sequence[LayerSight], layer_bytes: int, num_tokens: int, block_size: int = 16, widths: Sequence[int] = ()
) -> int:
    """Return the bytes of whole blocks that a decoding sequence of `num_tokens` holds between two steps; other
    arguments as kv_groups() has them."""
    layout, length = layout_of(sights, widths), -(-num_tokens // block_size)
    blocks = sum(
        group.num_blocks * (length - group.first_read(num_tokens - 1) // block_size) for group in layout.groups
    )
    return blocks * layout.layers_a_block * layer_bytes * block_size


def bytes_read(sights: Sequence[LayerSight], layer_bytes: int, num_tokens: int) -> int:
    """Return the bytes of the tokens that the next row reads, in each layer."""
    read = 0
    for sight in sights:
        first = 0
        if sight.window:
            first = max(num_tokens - sight.window, 0)
        elif sight.chunk:
            first = (num_tokens - 1) // sight.chunk * sight.chunk
        read += num_tokens - first
    return read * layer_bytes


def index_key_numbers(values: Mapping[str, Any], num_layers: int) -> int:
    """Return the numbers of a token's index keys over all layers; 0 where no layer has an indexer of ours."""
    model_type, config = str(values.get("model_type")), ConfigReader(values, "config.json")
    if model_type not in SPARSE_TYPES:
        return 0
    try:
        return config.integer("index_head_dim", 128) * sum(read_index_layers(config, model_type, num_layers))
    except StartupError:
        # A start names the field.
        return 0


def group_lines(groups: Sequence[Mapping[str, int]], shown: Callable[[int], str]) -> Iterator[str]:
    """Yield a text on each group; `shown` writes bytes."""
    for group in groups:
        sight = "everything"
        if group["window"]:
            sight = f"{group['window']} tokens back"
        elif group["chunk"]:
            sight = f"chunks of {group['chunk']} tokens"
        layers = f"{group['layers']} layer{'' if group['layers'] == 1 else 's'}"
        yield f"{shown(group['bytes_per_token'])} a token in {layers} that read {sight}"


def _every(layer: int, pattern: object) -> str:
    """Return the kind of a layer where every `pattern`-th reads everything."""
    return _SLIDING if isinstance(pattern, int) and pattern > 0 and (layer + 1) % pattern else _FULL


def _of_gemma4(layer: int, values: Mapping[str, Any]) -> str:
    """Return the kind of one of Gemma 4's layers: every sixth reads everything, and the last in any case."""
    return _FULL if layer + 1 == values.get("num_hidden_layers") else _every(layer, 6)


def _kind(values: Mapping[str, Any], layer: int) -> str:
    model_type = str(values.get("model_type"))
    if model_type in _KINDS:
        return _KINDS[model_type](layer, values)
    if model_type in _SWITCHED:
        return _SLIDING if values.get("use_sliding_window") and layer >= values.get("max_window_layers", 28) else _FULL
    return _SLIDING if values.get("sliding_window") else _FULL


def _sight(values: Mapping[str, Any], kind: str) -> LayerSight:
    window, chunk = values.get("sliding_window"), values.get("attention_chunk_size")
    if kind == _SLIDING and isinstance(window, int) and window > 0:
        return LayerSight(window)
    if kind == _CHUNKED and isinstance(chunk, int) and chunk > 0:
        return LayerSight(chunk=chunk)
    return LayerSight()

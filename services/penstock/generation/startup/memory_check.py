"""Estimate of the memory that a model takes, before any of it is read. No torch."""

from __future__ import annotations

import math
from pathlib import Path

from penstock.common.errors import DoesNotFit
from penstock.common.gguf_file import TYPES
from penstock.common.gguf_parts import GGUF_FILE, linked_parts
from penstock.common.units import format_size
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.layers.linear import FP8, INT8_GROUPS
from penstock.generation.weights.files import PACKED_FILE, is_packed
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, tensor_shapes

# Bytes per weight of a linear layer, with its part of the scales: quantised here, or by a form that was kept with its
# own scales.
_QUANTISED_BYTES = {"int8": 1.0, INT8_GROUPS: 1.0625, "int4": 0.5625, FP8: 1.0}
_KEPT_BYTES = {"int8": 1.0, "int4": 0.625, "int4-asymmetric": 0.75} | {
    kind.name.lower(): kind.num_bytes / kind.numbers for kind in TYPES.values()
}
# Of the bytes of weights in bfloat16 (12.1 bits of 16), with some matrices that stay whole.
_COMPACT_SHARE = 0.78


def stored_weight_bytes(folder: Path) -> int:
    """Return the bytes of the folder's weights on disk."""
    # The loader reports a link without its file, as a cleaned-up hub cache leaves it.
    files = linked_parts(folder) if (folder / GGUF_FILE).exists() else list(folder.glob("*.safetensors"))
    if is_packed(folder):
        files = [folder / PACKED_FILE]
    return sum(path.stat().st_size for path in files if path.is_file())


def check_weights(
    stored: int, model: ModelConfig | None, quantization: str, available: int, *, compact: bool = False
) -> None:
    """Refuse `stored` bytes of weights that do not fit into `available` bytes.

    `model`: the weights' configuration; None where they are used as they are stored. `compact`: those in bfloat16
    become so (layers/linear/compact.py). Raises DoesNotFit naming MODEL.
    """
    weights = stored if model is None else _loaded_bytes(stored, model, quantization, compact=compact)
    if weights > available:
        raise DoesNotFit(
            f"the weights take {format_size(weights)} and {format_size(available)} of memory is free: "
            "choose a smaller MODEL",
            flag="MODEL",
        )


def check_kv_memory(least: int, kv_memory: int, available: int) -> None:
    """Refuse a KV pool that has no room beside weights of `least` bytes or more.

    All in bytes. Raises DoesNotFit naming --kv-memory.
    """
    if least + kv_memory > available:
        raise DoesNotFit(
            f"--kv-memory {format_size(kv_memory)} is more than the {format_size(max(available - least, 0))} that the "
            f"weights leave ({format_size(least)} of the {format_size(available)} of memory that is free)",
            flag="--kv-memory",
        )


def check_least_kv(
    model: ModelConfig, kv_memory: int, *, block_size: int, item_bytes: int, parts: int, context: int
) -> None:
    """Refuse a KV pool that holds not one block of a native model, before its weights are read.

    `item_bytes`: least bytes of a number in the pool. `parts`: ranks that share the heads. `context`: tokens of the
    longest sequence. Where layers read different windows only one is counted: the pool's own check follows. Raises
    DoesNotFit naming --kv-memory.
    """
    if model.route != "native":
        return
    layers = model.num_kv_layers if len(set(model.sliding_windows)) < 2 else 1
    heads = max(1, model.num_kv_heads // parts)
    block = layers * (1 + model.has_values) * block_size * heads * model.head_dim * item_bytes
    if model.index is not None:
        block += model.index.num_layers * block_size * model.index.dim * item_bytes
    if kv_memory < block:
        whole = block * -(-context // block_size)
        raise DoesNotFit(
            f"--kv-memory {format_size(kv_memory)} holds no KV block: one takes {format_size(block)} or more, and one "
            f"sequence of the whole context ({context} tokens) {format_size(whole)}; give it that, or leave it out",
            flag="--kv-memory",
        )


def _compact_bytes(stored: int, model: ModelConfig) -> int:
    """Estimate the peak of loading `stored` bytes in bfloat16 as compact ones: the largest matrix lies whole beside."""
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(model).items()}
    table = sizes.pop(EMBEDDING)
    total = table + sum(sizes.values())
    # Tied, the table is the head.
    whole = table if LM_HEAD in sizes else 0
    sizes.pop(LM_HEAD, None)
    # Gate and up of a layer are one matrix.
    largest = max(table, 2 * max(sizes.values()))
    return int(stored * (whole + (total - whole) * _COMPACT_SHARE + largest) / total)


def _loaded_bytes(stored: int, model: ModelConfig, quantization: str, *, compact: bool) -> int:
    """Estimate the bytes that `stored` bytes of weights take once they are quantised, or else compact."""
    if quantization not in _QUANTISED_BYTES and not model.checkpoint_format:
        return _compact_bytes(stored, model) if compact else stored
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(model).items()}
    table, total = sizes[EMBEDDING], sum(sizes.values())
    layers = total - table - sizes.get(LM_HEAD, 0)
    if quantization not in _QUANTISED_BYTES:
        # A quantised checkpoint: its matrices keep their form, or become numbers of the dtype. Embedding and head do.
        item = 4.0 if model.checkpoint_dtype == "float32" else 2.0
        kept = model.kept_form if quantization == "auto" else ""
        if kept and model.checkpoint_format.startswith("gguf"):
            # In blocks it is as large as the file; a table that is not the head's becomes numbers of the dtype.
            return stored if LM_HEAD not in sizes else int(stored + table * item)
        return int((total - layers) * item + layers * _KEPT_BYTES.get(kept, item))
    if model.checkpoint_format:
        stored = total * 2
    each = _QUANTISED_BYTES[quantization]
    if quantization == "int4" and model.kept_form.startswith("int4"):
        each = max(each, _KEPT_BYTES.get(model.kept_form, each))
    # The embedding's table stays as it is. The head has a byte, also where the two are tied; with fp8 it stays, too.
    head_bytes = _QUANTISED_BYTES["int8" if quantization == "int4" else quantization]
    head = sizes.get(LM_HEAD, 0) * stored / total if quantization == FP8 else table * head_bytes
    return int(stored * table / total + head + layers * each)

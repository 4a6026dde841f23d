"""The files that hold a checkpoint's weights, and their headers. No torch."""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from penstock.common.dtypes import NATIVE, dtype_name
from penstock.common.errors import StartupError
from penstock.common.gguf_parts import GGUF_FILE, linked_parts
from penstock.generation.core.model_config import CONFIG_FILE, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# File that `penstock pack` writes; other software does not take this name for weights.
PACKED_FILE = "penstock.safetensors"
# Files of weights in other forms, by torch.
_PICKLES = ("pytorch_model*.bin", "*.bin", "*.pth", "*.pt", "*.ckpt")
# Buffers that old checkpoints carry and no loader reads.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
# Of a file system.
_MOST_NAME_BYTES = 255
# safetensors' own bound.
_MAX_HEADER_BYTES = 100_000_000
# More than any tensor has; numbers of 64 bits.
_MOST_DIMENSIONS, _MOST_SIZE = 64, 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: safetensors' name of its dtype, and where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path, *, most_bytes: int = _MAX_HEADER_BYTES) -> dict[str, StoredTensor]:
    """Return name -> tensor of one file. Raises OSError, and ValueError for bytes that are not a header, or for a
    header of more than `most_bytes`: parsing it holds the interpreter's lock."""
    with path.open("rb") as file:
        start = file.read(8)
        if (size := header_bytes(start)) > most_bytes:
            raise ValueError(f"its header has {size} bytes, and at most {most_bytes} are read")
        return stored_tensors(start + file.read(size))


def stored_tensors(start: bytes | mmap.mmap) -> dict[str, StoredTensor]:
    """Return name -> tensor from the beginning of a file. Raises ValueError for bytes that are no header."""
    header, data_begin = parse_header(start)
    return {name: _stored(entry, data_begin) for name, entry in header.items() if name != "__metadata__"}


def _stored(entry: object, data_begin: int) -> StoredTensor:
    """Return a header's entry after a check of its types: a file may say anything."""
    if not isinstance(entry, dict):
        raise ValueError("a tensor of a safetensors header is an object")
    dtype, shape, offsets = (entry.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("a tensor of a safetensors header has a text as dtype, a shape, and two offsets")
    begin, end = offsets
    if begin > end or len(shape) > _MOST_DIMENSIONS:
        raise ValueError("a tensor of a safetensors header ends before it begins, or has too many dimensions")
    return StoredTensor(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= _MOST_SIZE for one in value)


def parse_header(start: bytes | mmap.mmap) -> tuple[dict[str, Any], int]:
    """Return the JSON at the beginning of a file, and the offset of the tensors' bytes. Raises ValueError for bytes
    that are not a header."""
    size = header_bytes(start[:8])
    try:
        header = json.loads(start[8 : 8 + size])
    except RecursionError as error:
        raise ValueError("a safetensors header is not nested deeply") from error
    if not isinstance(header, dict):
        raise ValueError("a safetensors header is an object")
    return header, 8 + size


def header_bytes(start: bytes) -> int:
    """Return the length of a header by the first bytes of its file. Raises ValueError for an impossible length."""
    if len(start) < 8 or (size := int(struct.unpack("<Q", start)[0])) > _MAX_HEADER_BYTES:
        raise ValueError("no safetensors header")
    return size


def is_packed(folder: Path) -> bool:
    """True when `penstock pack` wrote the folder, even if the weights are a broken link."""
    return os.path.lexists(folder / PACKED_FILE)


def indexed_files(folder: Path) -> dict[str, str]:
    """Return tensor -> file of a sharded checkpoint; {} for a single file. Raises StartupError when there is
    neither."""
    if (folder / SINGLE_FILE).is_file():
        return {}
    if not (folder / INDEX_FILE).is_file():
        raise _no_weights(folder)
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{folder / INDEX_FILE} has no weight_map", flag="MODEL")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not _is_file_name(name):
            raise StartupError(f"{folder / INDEX_FILE}: weight_map of {tensor} is not a plain file name", flag="MODEL")
    return {tensor: name for tensor, name in weight_map.items() if not tensor.endswith(IGNORED_SUFFIX)}


def _no_weights(folder: Path) -> StartupError:
    """Return the error for a folder without safetensors; it tells how to convert the present files."""
    pickled = next((path.name for suffix in _PICKLES for path in sorted(folder.glob(suffix))), None)
    if pickled is None:
        return StartupError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}", flag="MODEL")
    return StartupError(
        f"{folder} has its weights in {pickled}, which can hold programs and is not read: convert it once to "
        'safetensors, by transformers: python -c "from transformers import AutoModelForCausalLM as A; '
        "A.from_pretrained('MODEL').save_pretrained('FOLDER')\", and copy the tokenizer's files beside them",
        flag="MODEL",
    )


def _is_file_name(name: str) -> bool:
    return name.isprintable() and len(name.encode()) <= _MOST_NAME_BYTES


def file_names(folder: Path) -> list[str]:
    """Return the names of all files, each once. Raises like `indexed_files`."""
    if (folder / GGUF_FILE).exists():
        return [path.name for path in linked_parts(folder)]
    listed = indexed_files(folder)
    return list(dict.fromkeys(listed.values())) if listed else [SINGLE_FILE]


# By each name of a format that the kernels have.
_ITEM_BYTES = {name: one.num_bytes for one in NATIVE.values() for name in (one.name, one.short, one.stored)}
# Bytes of a number in a linear layer.
_COMPACT_BYTES = 1.5
_QUANTISED_BYTES = {"int8": 1.0, "int8-groups": 1.0625, "int4": 0.5}
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def least_weight_bytes(
    folder: Path, dtype: str, quantization: str, *, map_embeddings: bool, compact: bool = False
) -> int:
    """Lower bound on the bytes that loading `folder` as `--dtype` and `--quantization` needs for its matrices.

    The embedding does not count if `map_embeddings` allows mapping it. `compact`: weights in bfloat16 may become so
    (layers/linear/compact.py). 0 if the kernels have no such format, the checkpoint is quantised, or anything is wrong
    with the folder: the loader reports that.
    """
    try:
        tensors = {name: one for file in file_names(folder) for name, one in read_header(folder / file).items()}
        config = read_json(folder / CONFIG_FILE)
        if config.get("quantization_config") or config.get("compression_config"):
            return 0
        matrices = {name: one for name, one in tensors.items() if len(one.shape) == 2}
        item = _item_bytes(matrices, config.get("dtype", config.get("torch_dtype")), dtype)
        each = _COMPACT_BYTES if compact and item == _ITEM_BYTES["bfloat16"] else item
        total = _layers(matrices, each, quantization) + _head(matrices, each, quantization)
        if _has_table(matrices, quantization, is_tied=config.get("tie_word_embeddings") is not False):
            table = matrices[_ends(matrices)[0]]
            is_mapped = map_embeddings and _ITEM_BYTES.get(table.dtype) == item
            total += 0 if is_mapped else table.shape[0] * table.shape[1] * item
        return int(total)
    except (StartupError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def _item_bytes(matrices: dict[str, StoredTensor], named: object, dtype: str) -> int:
    """Bytes of a number as `dtype`; for "auto" the smaller of config.json's dtype and the stored one."""
    if dtype != "auto":
        return _ITEM_BYTES[dtype]
    stored = _ITEM_BYTES[matrices[_EMBEDDING if _EMBEDDING in matrices else _LM_HEAD].dtype]
    return stored if named is None else min(stored, _ITEM_BYTES[dtype_name(named)])


def _ends(matrices: dict[str, StoredTensor]) -> list[str]:
    """Names of the present ones of embedding and head. The first serves as the table, the last as the head."""
    return [name for name in (_EMBEDDING, _LM_HEAD) if name in matrices]


def _layers(matrices: dict[str, StoredTensor], item: float, quantization: str) -> float:
    each = _QUANTISED_BYTES.get(quantization, item)
    return sum(one.shape[0] * one.shape[1] * each for name, one in matrices.items() if name not in _ends(matrices))


def _head(matrices: dict[str, StoredTensor], item: float, quantization: str) -> float:
    rows, columns = matrices[_ends(matrices)[-1]].shape
    # int8 for either of the two quantizations.
    return rows * columns * (_QUANTISED_BYTES["int8"] if quantization in _QUANTISED_BYTES else item)


def _has_table(matrices: dict[str, StoredTensor], quantization: str, *, is_tied: bool) -> bool:
    """True when a table in addition to the head is certain. If embedding and head are equal and unquantised, one serves
    as both; a config.json that unties them makes that unlikely."""
    return quantization in _QUANTISED_BYTES or (not is_tied and len(_ends(matrices)) > 1)

"""What a model's weights take at the least in the C++ kernels' formats, by the files' headers. No torch."""

from __future__ import annotations

from pathlib import Path

from penstock.common.errors import StartupError
from penstock.generation.core.model_config import CONFIG_FILE, read_json
from penstock.generation.weights.files import StoredTensor, file_names, read_header

_ITEM_BYTES = {"float32": 4, "fp32": 4, "F32": 4, "bfloat16": 2, "bf16": 2, "BF16": 2}
# Of a number in a linear layer.
_QUANTISED_BYTES = {"int8": 1.0, "int4": 0.5}
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def least_weight_bytes(folder: Path, dtype: str, quantization: str, *, map_embeddings: bool) -> int:
    """Bytes that loading `folder` as `--dtype` and `--quantization` will certainly need for its matrices, not counting
    the table that ids are looked up in where `map_embeddings` lets it be used where it is; 0 where the kernels
    have no such format, or anything is wrong with the folder: the loader says what."""
    try:
        tensors = {name: one for file in file_names(folder) for name, one in read_header(folder / file).items()}
        config = read_json(folder / CONFIG_FILE)
        matrices = {name: one for name, one in tensors.items() if len(one.shape) == 2}
        item = _item_bytes(matrices, config.get("dtype", config.get("torch_dtype")), dtype)
        total = _layers(matrices, item, quantization) + _head(matrices, item, quantization)
        if _has_table(matrices, quantization, is_tied=config.get("tie_word_embeddings") is not False):
            table = matrices[_ends(matrices)[0]]
            is_mapped = map_embeddings and _ITEM_BYTES.get(table.dtype) == item
            total += 0 if is_mapped else table.shape[0] * table.shape[1] * item
        return int(total)
    except (StartupError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def _item_bytes(matrices: dict[str, StoredTensor], named: object, dtype: str) -> int:
    """Of a number as `dtype`. "auto" is what config.json names, which need not be what is stored: the smaller."""
    if dtype != "auto":
        return _ITEM_BYTES[dtype]
    stored = _ITEM_BYTES[matrices[_EMBEDDING if _EMBEDDING in matrices else _LM_HEAD].dtype]
    return stored if named is None else min(stored, _ITEM_BYTES[str(named).removeprefix("torch.")])


def _ends(matrices: dict[str, StoredTensor]) -> list[str]:
    """Embedding and head, as far as they are there. The first is the table, the last the head."""
    return [name for name in (_EMBEDDING, _LM_HEAD) if name in matrices]


def _layers(matrices: dict[str, StoredTensor], item: int, quantization: str) -> float:
    each = _QUANTISED_BYTES.get(quantization, item)
    return sum(one.shape[0] * one.shape[1] * each for name, one in matrices.items() if name not in _ends(matrices))


def _head(matrices: dict[str, StoredTensor], item: int, quantization: str) -> float:
    rows, columns = matrices[_ends(matrices)[-1]].shape
    # int8 whichever is asked for.
    return rows * columns * (_QUANTISED_BYTES["int8"] if quantization in _QUANTISED_BYTES else item)


def _has_table(matrices: dict[str, StoredTensor], quantization: str, *, is_tied: bool) -> bool:
    """Whether certainly. Where embedding and head are equal and kept as they are, one serves as both; a config.json
    that unties them makes that unlikely."""
    return quantization in _QUANTISED_BYTES or (not is_tied and len(_ends(matrices)) > 1)

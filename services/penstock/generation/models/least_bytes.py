"""What a model's weights take at the least in the C++ kernels' formats, by the files' headers. No torch."""

from __future__ import annotations

from pathlib import Path

from penstock.common.errors import StartupError
from penstock.generation.models.config import CONFIG_FILE, read_json
from penstock.generation.models.shards import StoredTensor, file_names, read_header

_ITEM_BYTES = {"float32": 4, "fp32": 4, "F32": 4, "bfloat16": 2, "bf16": 2, "BF16": 2}
# Of a number in a linear layer.
_QUANTISED_BYTES = {"int8": 1.0, "int4": 0.5}
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def least_weight_bytes(folder: Path, dtype: str, quantization: str) -> int:
    """Bytes that loading `folder` as `--dtype` and `--quantization` will certainly need for its matrices; 0 where the
    kernels have no such format, or anything is wrong with the folder: the loader says what."""
    try:
        tensors = {name: one for file in file_names(folder) for name, one in read_header(folder / file).items()}
        config = read_json(folder / CONFIG_FILE)
        matrices = {name: one for name, one in tensors.items() if len(one.shape) == 2}
        item = _item_bytes(matrices, config.get("dtype", config.get("torch_dtype")), dtype)
        return _sum(matrices, item, quantization, is_tied=config.get("tie_word_embeddings") is not False)
    except (StartupError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def _item_bytes(matrices: dict[str, StoredTensor], named: object, dtype: str) -> int:
    """Of a number as `dtype`. "auto" is what config.json names, which need not be what is stored: the smaller."""
    if dtype != "auto":
        return _ITEM_BYTES[dtype]
    stored = _ITEM_BYTES[matrices[_EMBEDDING if _EMBEDDING in matrices else _LM_HEAD].dtype]
    return stored if named is None else min(stored, _ITEM_BYTES[str(named).removeprefix("torch.")])


def _sum(matrices: dict[str, StoredTensor], item: int, quantization: str, *, is_tied: bool) -> int:
    total = 0.0
    for name, one in matrices.items():
        if name not in (_EMBEDDING, _LM_HEAD):
            total += one.shape[0] * one.shape[1] * _QUANTISED_BYTES.get(quantization, item)
    ends = [matrices[name].shape for name in (_EMBEDDING, _LM_HEAD) if name in matrices]
    rows, columns = ends[0]
    if quantization in _QUANTISED_BYTES:
        # The table that ids are looked up in stays as it is; the head is int8 whichever is asked for.
        return int(total + rows * columns * (item + _QUANTISED_BYTES["int8"]))
    # One serves as both where they are equal, which only a config.json that unties them makes unlikely.
    return int(total + rows * columns * item * (1 if is_tied else len(ends)))

"""The supported formats, by `quantization_config.quant_method`, and the way from a folder to its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.dtypes import BY_STORED
from penstock.common.errors import StartupError
from penstock.common.gguf_parts import GGUF_FILE
from penstock.common.progress import CountBytes
from penstock.generation.core.delta_heads import DELTA_TYPES
from penstock.generation.core.model_config import CONFIG_FILE, ConfigReader, read_json
from penstock.generation.layers.linear.gguf_blocks import BLOCK_TYPES
from penstock.generation.weights.quantised.awq import Awq
from penstock.generation.weights.quantised.base import FIELD, UNQUANTISED, Part, QuantFormat, StoredFiles, StoredMatrix
from penstock.generation.weights.quantised.bitsandbytes import BitsAndBytes
from penstock.generation.weights.quantised.compressed_tensors import CompressedTensors
from penstock.generation.weights.quantised.fp8 import FbgemmFp8, Fp8
from penstock.generation.weights.quantised.gguf import WHOLE_TYPES, GgufCheckpoint
from penstock.generation.weights.quantised.gptq import Gptq
from penstock.generation.weights.quantised.mxfp4 import Mxfp4
from penstock.generation.weights.quantised.quantised_checkpoint import QuantisedCheckpoint
from penstock.generation.weights.quantised.torchao import TorchAo
from penstock.generation.weights.safetensors_folder import Checkpoint
from penstock.generation.weights.text_part import take_text_part, text_part


class Gguf(QuantFormat):
    """The format as named in the config.json that `common.gguf_folder` wrote; GgufCheckpoint reads the file."""

    method = "gguf"

    def __init__(self, config: ConfigReader) -> None:
        types = config.mapping("types")
        names = [] if types is None else list(types.values)
        self.description = f"gguf of {', '.join(names)}"
        if types is not None:
            most = max(types.values, key=lambda name: types.values[name] if name not in BY_STORED else 0, default="")
            self.form = WHOLE_TYPES.get(most) or (most.lower() if most in BLOCK_TYPES else "")

    @override
    def parts(self, module: str, shape: tuple[int, int], files: StoredFiles) -> dict[str, Part] | None:
        raise StartupError(f"quantization_config.quant_method gguf needs {GGUF_FILE}", flag="MODEL")

    @override
    def open(self, module: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        raise StartupError(f"quantization_config.quant_method gguf needs {GGUF_FILE}", flag="MODEL")


_CLASSES = (Gptq, Awq, CompressedTensors, BitsAndBytes, TorchAo, Fp8, FbgemmFp8, Gguf, Mxfp4)
FORMATS: dict[str, Callable[[ConfigReader], QuantFormat]] = {one.method: one for one in _CLASSES}
# Fields of config.json that tell of a quantised checkpoint: compressed-tensors had one of its own once.
QUANTISED_FIELDS = (FIELD, "compression_config")
# Advice for unsupported methods, if there is any besides the unquantised checkpoint.
_ADVICE = {
    "auto-round": f"AutoRound exports to the format auto_gptq or llm_compressor, too; or {UNQUANTISED}",
    "modelopt": f"a checkpoint of llm-compressor has the same fp8; or {UNQUANTISED}",
    "quark": f"a checkpoint of llm-compressor has the same int8 and fp8; or {UNQUANTISED}",
}


def read_format(config: ConfigReader) -> QuantFormat | None:
    """Return the format that config.json names; None: the checkpoint is not quantised.

    Raises StartupError naming the field of quantization_config that is not supported.
    """
    fields = config.mapping(next(filter(config.has, QUANTISED_FIELDS), FIELD))
    if fields is None:
        return None
    method = fields.values.get("quant_method")
    if method is None and any(fields.values.get(one) for one in ("load_in_8bit", "load_in_4bit")):
        # Of checkpoints from before the field.
        method = BitsAndBytes.method
    if not isinstance(method, str) or method not in FORMATS:
        advice = _ADVICE.get(str(method), UNQUANTISED)
        raise fields.error("quant_method", f"{method!r} is not supported; supported are {', '.join(FORMATS)}: {advice}")
    return FORMATS[method](fields)


def open_checkpoint(
    folder: Path, progress: CountBytes | None = None, *, draft_layer: int | None = None
) -> Checkpoint | QuantisedCheckpoint | GgufCheckpoint:
    """Open the tensors of a folder: safetensors, quantised or not, or a GGUF file's. Raises StartupError.

    `draft_layer`: number that a layer for drafts gets which is not named as one (weights.draft_layers); None: it is
    left out.
    """
    if (folder / GGUF_FILE).exists():
        return GgufCheckpoint(folder, progress)
    config = ConfigReader(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
    format = read_format(config)
    files = Checkpoint(folder, progress)
    if config.values.get("model_type") in DELTA_TYPES or text_part(config) is not config:
        take_text_part(files, draft_layer)
    return files if format is None else QuantisedCheckpoint(files, format)


def read_dense(
    folder: Path, linears: Mapping[str, tuple[int, int]], dtype: torch.dtype, progress: CountBytes | None = None
) -> tuple[dict[str, Tensor], int]:
    """Read all tensors of a quantised folder: matrices of `linears` (module -> outputs, inputs) dequantised, in
    `dtype`, the others as stored. Return them by name, and the number of quantised matrices.

    Raises StartupError naming a tensor that belongs to a quantised matrix of no linear layer, as of fused experts; a
    GGUF file has these, too.
    """
    if (folder / GGUF_FILE).exists():
        return GgufCheckpoint(folder, progress).dense(dtype)
    files = Checkpoint(folder, progress)
    format = read_format(ConfigReader(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE)))
    if format is None:
        raise TypeError(f"{folder} is not quantised")
    if format.method == Mxfp4.method:
        raise StartupError(
            f"{folder}: quantization_config.quant_method 'mxfp4' is read of gpt-oss only: {UNQUANTISED}",
            flag="MODEL",
        )
    checkpoint = QuantisedCheckpoint(files, format)
    weights: dict[str, tuple[int, ...]] = {f"{module}.weight": shape for module, shape in linears.items()}
    others = {name: files.shape(name) for name in files.names if name.rpartition(".")[0] not in linears}
    biases = {name: files.shape(name) for name in files.names if name.endswith(".bias")}
    checkpoint.check({}, {**weights, **others, **biases})
    found: dict[str, Tensor] = {}
    count = 0
    for name in (*weights, *others, *biases):
        if name not in checkpoint:
            continue
        if checkpoint.is_quantised(name):
            found[name] = torch.cat([piece.to(dtype) for piece in checkpoint.pieces(name)])
            count += 1
        else:
            found[name] = checkpoint.take(name).clone()
    return found, count

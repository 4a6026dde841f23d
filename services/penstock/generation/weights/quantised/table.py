"""The formats that are read, by `quantization_config.quant_method`. No file is opened here."""

from __future__ import annotations

from collections.abc import Callable

from penstock.generation.core.model_config import ConfigReader
from penstock.generation.weights.quantised.awq import Awq
from penstock.generation.weights.quantised.base import FIELD, UNQUANTISED, QuantFormat
from penstock.generation.weights.quantised.bitsandbytes import BitsAndBytes
from penstock.generation.weights.quantised.compressed_tensors import CompressedTensors
from penstock.generation.weights.quantised.fp8 import Fp8
from penstock.generation.weights.quantised.gguf import Gguf
from penstock.generation.weights.quantised.gptq import Gptq
from penstock.generation.weights.quantised.torchao import TorchAo

_CLASSES = (Gptq, Awq, CompressedTensors, BitsAndBytes, TorchAo, Fp8, Gguf)
FORMATS: dict[str, Callable[[ConfigReader], QuantFormat]] = {one.method: one for one in _CLASSES}


def read_format(config: ConfigReader) -> QuantFormat | None:
    """Return the format that config.json names; None: the checkpoint is not quantised.

    Raises StartupError naming the field of quantization_config that is not supported.
    """
    # compressed-tensors had a field of its own once.
    name = FIELD if config.has(FIELD) or not config.has("compression_config") else "compression_config"
    fields = config.mapping(name)
    if fields is None:
        return None
    method = fields.values.get("quant_method")
    if method is None and any(fields.values.get(one) for one in ("load_in_8bit", "load_in_4bit")):
        # Of checkpoints from before the field.
        method = BitsAndBytes.method
    if not isinstance(method, str) or method not in FORMATS:
        raise fields.error(
            "quant_method", f"{method!r} is not supported; supported are {', '.join(FORMATS)}: {UNQUANTISED}"
        )
    return FORMATS[method](fields)

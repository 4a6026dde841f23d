"""A safetensors checkpoint as GGUF, for llama.cpp: the families of ARCHITECTURES, bf16 or its own 8- and 4-bit blocks.

The vocabulary is left out (requests are token ids), and so is what speed does not depend on: generation defaults.
Families whose tensors are made over (FURTHER) are written as the tests of reading such files write theirs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# llama.cpp's name of a model type.
ARCHITECTURES = {
    "qwen2": "qwen2",
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
# Of these all tensors are in memory at once.
FURTHER = {"qwen3_5_text": "qwen35", "deepseek_v2": "deepseek2", "gemma4_text": "gemma4", "gpt_oss": "gpt-oss"}
_CONVERTER = Path(__file__).resolve().parents[2] / "tests" / "factories" / "models" / "gguf_converter.py"
QUANTIZATIONS = {"bf16": "BF16", "fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}


def convert(folder: Path, out: Path, dtype: str) -> None:
    """Write `out`. Raises ValueError for another model type."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    if family in FURTHER:
        _convert_further(folder, out, FURTHER[family], dtype, config)
        return
    if family not in ARCHITECTURES:
        raise ValueError(f"cannot write {family} as GGUF")
    architecture = ARCHITECTURES[family]
    wanted = gguf.GGMLQuantizationType[QUANTIZATIONS[dtype]]
    unfinished = out.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, architecture)
    _write_facts(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for name, values in _together(_tensors(folder), _experts(config)):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"GGUF has no name for {name}")
        matrix = values.ndim > 1
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _pairs_beside(values, _head_dim(config))
        if family == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1
        # What chooses the experts is float32 in llama.cpp, whatever the others are.
        kind = wanted if matrix and not name.endswith("mlp.gate.weight") else gguf.GGMLQuantizationType.F32
        writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
    if _rope(config)["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)


def _convert_further(folder: Path, out: Path, architecture: str, dtype: str, config: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("gguf_converter", _CONVERTER)
    assert spec is not None
    assert spec.loader is not None
    converter: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    unfinished, kind = out.with_suffix(".part"), QUANTIZATIONS[dtype]
    vocabulary = {"tokenizer.ggml.model": "none", f"{architecture}.vocab_size": config["vocab_size"]}
    converter.convert(folder, unfinished, architecture, matrices=kind, experts=kind, vocabulary=vocabulary)
    unfinished.rename(out)


def _write_facts(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    if experts := _experts(config):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("layer_types", [None])[0] == "sliding_attention":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _experts(config: dict[str, Any]) -> int:
    """Return the number of experts; 0: the model has none."""
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotation; where layers differ, that of those which see everything."""
    found = config.get("rope_parameters")
    if found is None:
        # The fields of transformers 4.
        if config.get("rope_scaling"):
            raise ValueError("cannot write rope_scaling as GGUF")
        return {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return dict(found.get("full_attention", found))


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and fp32 values."""
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                yield name, file.get_tensor(name).to(torch.float32).numpy()


def _together(tensors: Iterator[tuple[str, Any]], experts: int) -> Iterator[tuple[str, Any]]:
    """Put each matrix of a layer's experts into one of three dimensions, as llama.cpp has them."""
    import numpy

    waiting: dict[str, dict[int, Any]] = {}
    for name, values in tensors:
        layer, _, rest = name.partition(".experts.")
        if not rest:
            yield name, values
            continue
        number, _, part = rest.partition(".")
        joined = waiting.setdefault(f"{layer}.experts.{part}", {})
        joined[int(number)] = values
        if len(joined) == experts:
            whole = waiting.pop(f"{layer}.experts.{part}")
            yield f"{layer}.experts.{part}", numpy.stack([whole[place] for place in range(experts)])


def _pairs_beside(values: Any, head_dim: int) -> Any:
    """Rows of q or k so that a rotation turns neighbours, as llama.cpp's Llama does, and not halves of a head."""
    heads = values.shape[0] // head_dim
    return values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(config: dict[str, Any]) -> Any:
    """Return the divisor of each frequency."""
    import numpy

    rope, head_dim = config["rope_parameters"], _head_dim(config)
    wavelength = 2 * numpy.pi * rope["rope_theta"] ** (numpy.arange(0, head_dim, 2) / head_dim)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = numpy.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(numpy.float32)

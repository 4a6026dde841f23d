"""Rotary embeddings of GGUF files: the fields of config.json that say how heads turn, architecture by architecture.

A file holds a base, the dims that turn, the kind of scaling and its numbers, or divisors of frequencies as a tensor.
"""

from __future__ import annotations

import math
from typing import Any

from penstock.common.gguf_facts import (
    FULL,
    MOST_WHOLE,
    SHOWN_CHARS,
    SLIDING,
    Config,
    head_dim_of,
    read_floats,
    read_number,
    read_whole,
)
from penstock.common.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# For Llama 3.1 and later, the only models with frequency factors of their own kind in their files.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_MOST_FACTOR = 1e6
# Divisor of the frequency of dims that do not turn, in Gemma 4's files.
_STANDS = 1e29


def rope_of_whole_heads(file: GgufFile, config: Config) -> Config:
    """Return `rope_scaling`, of heads that turn as a whole."""
    head_dim = head_dim_of(config)
    turned = read_whole(file, "rope.dimension_count", head_dim)
    if turned != head_dim:
        name = f"{file.architecture}.rope.dimension_count"
        raise file.error(f"has {name} {turned}: only a whole head ({head_dim}) is supported")
    return _scaling(file, config)


def _scaling(file: GgufFile, config: Config, **yarn: Any) -> Config:
    """Return `rope_scaling`, if any; `yarn`: its fields that llama.cpp has in its code."""
    name = file.architecture
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise file.error(f"has both {name}.rope.scaling.type and {ROPE_FACTORS}")
        return {"rope_scaling": _llama3(file, config.get("rope_theta", 10_000.0), head_dim_of(config))}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise file.error(f"has {name}.rope.scaling.type {kind[:SHOWN_CHARS]!r}; supported are none, linear, yarn")
    scaling: Config = {"rope_type": kind, "factor": read_number(file, "rope.scaling.factor", 1.0)}
    if original := read_whole(file, "rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        own = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        for fact, one in own.items():
            if (value := file.number(f"{name}.rope.scaling.{fact}")) is not None:
                scaling[one] = value
        scaling |= yarn
    return {"rope_scaling": scaling}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> Config:
    """Return the scaling of Llama 3.1 and later that gives these frequency factors."""
    factors = read_floats(file, ROPE_FACTORS, head_dim // 2)
    if max(factors) > _MOST_FACTOR:
        raise file.error(f"has {ROPE_FACTORS} that are not divisors of frequencies")
    factor = max(factors)
    for index, found in enumerate(factors):
        turns = _ORIGINAL * theta ** (-2 * index / head_dim) / math.tau
        smooth = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        if abs(found * ((1 - smooth) / factor + smooth) - 1) > 1e-3:
            raise file.error(f"has {ROPE_FACTORS} of an unknown scaling: give the model's safetensors")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def partial_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of heads in which the first dims turn."""
    return {"partial_rotary_factor": _turned(file, config) / head_dim_of(config), **_scaling(file, config)}


def _turned(file: GgufFile, config: Config) -> int:
    """Return the dims of a head that turn."""
    head_dim = head_dim_of(config)
    turned = read_whole(file, "rope.dimension_count", head_dim, least=1)
    if turned > head_dim:
        raise file.error(f"has {file.architecture}.rope.dimension_count {turned}: a head has {head_dim} dims")
    return turned


def phi3_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of Phi: a part of a head turns, by longrope where the file has two lists of factors."""
    turned = _turned(file, config)
    original = read_whole(file, "rope.scaling.original_context_length", config["max_position_embeddings"], least=1)
    found: Config = {
        "partial_rotary_factor": turned / head_dim_of(config),
        "original_max_position_embeddings": original,
    }
    if SHORT_FACTORS in file.tensors:
        if LONG_FACTORS not in file.tensors:
            raise file.error(f"has {SHORT_FACTORS}, and no {LONG_FACTORS}")
        scaling: Config = {"rope_type": "longrope"}
        for one, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
            scaling[one] = read_floats(file, name, turned // 2)
        factor = file.number(f"{file.architecture}.rope.scaling.attn_factor")
        found["rope_scaling"] = scaling | ({} if factor is None else {"attention_factor": factor})
    return found


def gpt_oss_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of gpt-oss."""
    # The class's own default is yarn: a model without it says so.
    found = _scaling(file, config, truncate=False)
    return found or {"rope_scaling": {"rope_type": "default"}}


def rope_parameters(file: GgufFile, config: Config) -> Config:
    """Return the rotary embedding in transformers 5.x's form, and leave the older fields out."""
    scaling = rope_of_whole_heads(file, config).get("rope_scaling", {"rope_type": "default"})
    return _in_new_form(config, scaling)


def _in_new_form(config: Config, scaling: Config) -> Config:
    return {"rope_parameters": {"rope_theta": config.pop("rope_theta", 10_000.0), **scaling}}


def olmo3_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of OLMo 3: scaled where a layer reads everything, plain in windows."""
    full = rope_of_whole_heads(file, config).get("rope_scaling", {"rope_type": "default"})
    theta = config.pop("rope_theta", 500_000.0)
    local = {"rope_type": "default", "rope_theta": read_number(file, "rope.freq_base_swa", theta)}
    return {"rope_parameters": {FULL: {"rope_theta": theta, **full}, SLIDING: local}}


def _magnitude(file: GgufFile, multiplier: float) -> Config:
    """Return yarn's two magnitudes, which the models that have them set alike."""
    found = read_number(file, "rope.scaling.yarn_log_multiplier", 0.0) * multiplier
    return {"mscale": found, "mscale_all_dim": found} if found else {}


def ministral3_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of Ministral 3: yarn, and a temperature by position."""
    scaling = _scaling(file, config, **_magnitude(file, 1.0))["rope_scaling"]
    scaling["llama_4_scaling_beta"] = read_number(file, "attention.temperature_scale", 0.1)
    return _in_new_form(config, scaling)


def deepseek2_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of DeepSeek 2."""
    # The file holds a tenth of it.
    found = _scaling(file, config, **_magnitude(file, 10.0)).get("rope_scaling", {"rope_type": "default"})
    return _in_new_form(config, found)


def qwen35_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of Qwen 3.5: sections of a head for the axes of an image."""
    name = f"{file.architecture}.rope.dimension_sections"
    sections = [one for one in file.numbers(name) if one]
    if not sections or not all(type(one) is int and 0 < one <= MOST_WHOLE for one in sections):
        raise file.error(f"has {name} that are not whole numbers")
    scaling = {
        "rope_type": "default",
        "mrope_section": sections,
        "mrope_interleaved": True,
        "partial_rotary_factor": read_whole(file, "rope.dimension_count", least=1) / head_dim_of(config),
    }
    return _in_new_form(config, scaling)


def gemma4_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of Gemma 4: where a layer reads everything, the last dims of a head stand."""
    width = config["global_head_dim"]
    turning = width // 2
    if ROPE_FACTORS in file.tensors:
        factors = read_floats(file, ROPE_FACTORS, width // 2)
        turning = sum(one < _STANDS for one in factors)
        if any(one != 1.0 for one in factors[:turning]) or any(one < _STANDS for one in factors[turning:]):
            raise file.error(f"has {ROPE_FACTORS} of an unknown scaling: give the model's safetensors")
    full = {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / width}
    theta = read_number(file, "rope.freq_base_swa", 10_000.0)
    return {
        "rope_parameters": {
            FULL: {"rope_theta": config.pop("rope_theta", 1e6), **full},
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        }
    }

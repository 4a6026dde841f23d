"""llama.cpp's architectures that are read from GGUF: a row each, with Hugging Face's names of its facts and tensors.

What a row says is what llama.cpp's converter (conversion/*.py there) did to a Hugging Face model, and so what must be
undone. Facts that change a model's numbers and that its row does not read are refused by name. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.common.gguf_file import GgufFile

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Numbers of config.json are 32 bits on the wire.
MOST_WHOLE = 2**31 - 1
FULL, SLIDING = "full_attention", "sliding_attention"
# For Llama 3.1 and later, the only models with frequency factors of their own kind in their files.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_LEAST_FACTOR, _MOST_FACTOR = 1e-3, 1e6
# Divisor of the frequency of dims that do not turn, in Gemma 4's files.
_STANDS = 1e29
# No model has more, and there are lists with an entry a layer.
_MOST_LAYERS = 10_000
# Most characters of a fact in an error.
_SHOWN_CHARS = 80
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_KEY, _VALUE = "attention.key_length", "attention.value_length"
_NEXT = "nextn_predict_layers"
# Facts that change a model's numbers: a row reads them, or the file is refused.
_FOREIGN = (
    "expert_count", "expert_group_count", "expert_weights_scale", "expert_gating_func", "interleave_moe_layer_step",
    _WINDOW, "attention.chunk_size", "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping",
    "logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.output_scale",
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale", "attention.kv_lora_rank",
    "attention.shared_kv_layers", "attention.indexer.head_count", "rope.dimension_sections", "rope.freq_base_swa",
    "rope.scaling.yarn_log_multiplier", "ssm.state_size", "pooling_type", "use_parallel_residual", _NEXT,
)  # fmt: skip
# Facts that are 0 where the model has none.
_ABSENT_IF_ZERO = frozenset((*_FOREIGN, "expert_used_count", "expert_feed_forward_length"))


@dataclass(frozen=True, slots=True)
class Field:
    """A field of config.json that a fact holds: a whole number of at least 1, or any number above 0."""

    name: str
    is_whole: bool = True
    is_required: bool = False


def whole(name: str) -> Field:
    """Return a whole number that a file may leave out."""
    return Field(name)


def needed(name: str) -> Field:
    """Return a whole number that a file must have."""
    return Field(name, is_required=True)


def number(name: str) -> Field:
    """Return a number that a file may leave out."""
    return Field(name, is_whole=False)


Config = dict[str, Any]
# (file, the fields that are known) -> more fields. Raises StartupError naming a fact.
Rule = Callable[[GgufFile, Config], Config]

_FIELDS = {
    "context_length": needed("max_position_embeddings"),
    "embedding_length": needed("hidden_size"),
    "feed_forward_length": needed("intermediate_size"),
    "block_count": needed("num_hidden_layers"),
    "attention.head_count": needed("num_attention_heads"),
    "attention.head_count_kv": whole("num_key_value_heads"),
    "attention.layer_norm_rms_epsilon": number("rms_norm_eps"),
    _KEY: whole("head_dim"),
    "rope.freq_base": number("rope_theta"),
}
_ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def nothing(file: GgufFile, config: Config) -> Config:
    """Add no field."""
    return {}


def rope_of_whole_heads(file: GgufFile, config: Config) -> Config:
    """Return `rope_scaling`, of heads that turn as a whole."""
    head_dim = _head_dim(config)
    turned = _whole(file, "rope.dimension_count", head_dim)
    if turned != head_dim:
        name = f"{file.architecture}.rope.dimension_count"
        raise file.error(f"has {name} {turned}: only a whole head ({head_dim}) is supported")
    return _scaling(file, config)


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture: Hugging Face's class of it, its fields and its tensors' names."""

    model_type: str
    class_name: str
    # By facts after the architecture's name, beside or in place of those that all have; None: `rule` reads it.
    fields: Mapping[str, Field | None] = field(default_factory=dict)
    # Other facts that `rule` or `rope` reads, or that need no field.
    read: tuple[str, ...] = ()
    # Fields that llama.cpp has in its code.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rule: Rule = nothing
    rope: Rule = rope_of_whole_heads
    # Hugging Face's names of modules of a layer and of others, beside or in place of those that all have; empty: the
    # architecture has no such module. A name with .weight or .bias is that of the tensor alone. `{}` stands for the
    # number of an expert.
    layer: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    # Number added to norms in the file, and names of norms without it.
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    # Rows of the query's and the key's heads have their two halves interleaved in the file.
    is_turned: bool = False
    # Other models under the same name: the first row for which a file meets the condition.
    variants: tuple[tuple[Callable[[GgufFile], bool], GgufArchitecture], ...] = ()

    def all_fields(self) -> dict[str, Field]:
        """Return the fields by their facts."""
        found = {**_FIELDS, **self.fields}
        return {fact: one for fact, one in found.items() if one is not None}

    def layer_names(self) -> dict[str, str]:
        """Return Hugging Face's names of a layer's modules by llama.cpp's."""
        return {ours: name for ours, name in {**_LAYER, **self.layer}.items() if name}

    def end_names(self) -> dict[str, str]:
        """Return Hugging Face's names of modules outside of layers by llama.cpp's."""
        return {ours: name for ours, name in {**_ENDS, **self.ends}.items() if name}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Return the row of a file. Raises StartupError naming an architecture that is not read."""
    name = file.architecture
    row = ARCHITECTURES.get(name)
    if row is None:
        raise file.error(
            f"has general.architecture {name[:_SHOWN_CHARS]!r}, which is not read from GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}: give the model's safetensors"
        )
    return next((other for applies, other in row.variants if applies(file)), row)


def config_fields(file: GgufFile, row: GgufArchitecture) -> Config:
    """Return the fields of the model itself. Raises StartupError naming a missing or unsupported fact."""
    name, fields = file.architecture, row.all_fields()
    for fact, one in fields.items():
        if one.is_required and f"{name}.{fact}" not in file.facts:
            raise file.error(f"has no {name}.{fact}")
    values = {one.name: _field(file, fact, one) for fact, one in fields.items()}
    for fact in _FOREIGN:
        if fact not in fields and fact not in row.fields and fact not in row.read and _is_set(file, fact):
            raise file.error(f"has {name}.{fact}, which is not read from GGUF: give the model's safetensors")
    if file.facts.get(f"{name}.attention.causal") is False:
        raise file.error(f"has {name}.attention.causal false: it is no decoder")
    if EMBEDDING not in file.tensors:
        raise file.error(f"has no tensor {EMBEDDING}")
    config: Config = {"model_type": row.model_type, "architectures": [row.class_name]}
    config |= row.fixed
    config |= {one: value for one, value in values.items() if value is not None}
    config["vocab_size"] = file.tensors[EMBEDDING].shape[0]
    config["tie_word_embeddings"] = HEAD not in file.tensors
    config |= row.rule(file, config)
    if _VALUE not in row.read and (width := _whole(file, _VALUE, 0)) not in (0, _head_dim(config)):
        raise file.error(f"has {name}.{_VALUE} {width}: only the width of keys ({_head_dim(config)}) is supported")
    return config | row.rope(file, config)


def _is_set(file: GgufFile, fact: str) -> bool:
    """True for a fact that is there, and neither 0 nor false."""
    return bool(file.facts.get(f"{file.architecture}.{fact}"))


def _field(file: GgufFile, fact: str, one: Field) -> int | float | None:
    name = f"{file.architecture}.{fact}"
    if not one.is_whole:
        return file.number(name)
    if not one.is_required and file.facts.get(name) == 0 and fact in _ABSENT_IF_ZERO:
        return None
    return file.whole(name, least=1, most=_MOST_LAYERS if fact == "block_count" else MOST_WHOLE)


def _whole(file: GgufFile, fact: str, default: int | None = None, *, least: int = 0) -> int:
    """Return a whole number of the architecture; required without a default."""
    name = f"{file.architecture}.{fact}"
    found = file.whole(name, default, least=least, most=MOST_WHOLE)
    if found is None:
        raise file.error(f"has no {name}")
    return found


def _number(file: GgufFile, fact: str, default: float) -> float:
    found = file.number(f"{file.architecture}.{fact}")
    return default if found is None else found


def _by_layer(file: GgufFile, fact: str, config: Config, default: int | None = None) -> list[int]:
    """Return a whole number for each layer: a file has one, or an array of them."""
    name, layers = f"{file.architecture}.{fact}", config["num_hidden_layers"]
    value = file.facts.get(name, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return [_whole(file, fact, default)] * layers
    found = file.numbers(name)
    if len(found) < layers or not all(type(one) is int and 0 <= one <= MOST_WHOLE for one in found[:layers]):
        raise file.error(f"has {name} of {len(found)} entries: {layers} layers need whole numbers")
    return list(found[:layers])


def _layer_types(file: GgufFile, config: Config, *, period: int) -> list[str]:
    """Return the kind of attention of each layer: `period` where the file has no pattern."""
    name = f"{file.architecture}.{_PATTERN}"
    value = file.facts.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        turns = _whole(file, _PATTERN, period, least=1)
        slides = [bool((layer + 1) % turns) for layer in range(config["num_hidden_layers"])]
    else:
        slides = [bool(one) for one in _by_layer(file, _PATTERN, config)]
    return [SLIDING if one else FULL for one in slides]


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _has(file: GgufFile, tensor: str) -> bool:
    """True when a layer has this tensor."""
    return any(name.startswith("blk.") and name.split(".", 2)[-1] == tensor for name in file.tensors)


# Rotary embeddings.


def _scaling(file: GgufFile, config: Config, **yarn: Any) -> Config:
    """Return `rope_scaling`, if any; `yarn`: its fields that llama.cpp has in its code."""
    name = file.architecture
    kind = file.text(f"{name}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise file.error(f"has both {name}.rope.scaling.type and {ROPE_FACTORS}")
        return {"rope_scaling": _llama3(file, config.get("rope_theta", 10_000.0), _head_dim(config))}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise file.error(f"has {name}.rope.scaling.type {kind[:_SHOWN_CHARS]!r}; supported are none, linear, yarn")
    scaling: Config = {"rope_type": kind, "factor": _number(file, "rope.scaling.factor", 1.0)}
    if original := _whole(file, "rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        own = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        for fact, one in own.items():
            if (value := file.number(f"{name}.rope.scaling.{fact}")) is not None:
                scaling[one] = value
        scaling |= yarn
    return {"rope_scaling": scaling}


def floats(file: GgufFile, name: str, count: int) -> list[float]:
    """Read a tensor of float32. Raises StartupError if it has another type or number."""
    tensor = file.tensors[name]
    size = tensor.end - tensor.begin
    if tensor.type.name != "F32" or size != 4 * count or not size:
        raise file.error(f"has {size} bytes of {name}, a head has {count} frequencies of float32")
    try:
        with tensor.path.open("rb") as opened:
            opened.seek(tensor.begin)
            data = opened.read(size)
    except OSError as error:
        raise file.error(f"cannot be read: {error.strerror}") from error
    found: list[float] = list(memoryview(data).cast("f")) if len(data) == size else []
    if not found or not all(one >= _LEAST_FACTOR for one in found):
        raise file.error(f"has {name} that are not divisors of frequencies")
    return found


def _llama3(file: GgufFile, theta: float, head_dim: int) -> Config:
    """Return the scaling of Llama 3.1 and later that gives these frequency factors."""
    factors = floats(file, ROPE_FACTORS, head_dim // 2)
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


def _partial_rope(file: GgufFile, config: Config) -> Config:
    """Return the fields of heads in which the first dims turn."""
    return {"partial_rotary_factor": _turned(file, config) / _head_dim(config), **_scaling(file, config)}


def _turned(file: GgufFile, config: Config) -> int:
    """Return the dims of a head that turn."""
    head_dim = _head_dim(config)
    turned = _whole(file, "rope.dimension_count", head_dim, least=1)
    if turned > head_dim:
        raise file.error(f"has {file.architecture}.rope.dimension_count {turned}: a head has {head_dim} dims")
    return turned


def _phi3_rope(file: GgufFile, config: Config) -> Config:
    turned = _turned(file, config)
    original = _whole(file, "rope.scaling.original_context_length", config["max_position_embeddings"], least=1)
    found: Config = {
        "partial_rotary_factor": turned / _head_dim(config),
        "original_max_position_embeddings": original,
    }
    if SHORT_FACTORS in file.tensors:
        if LONG_FACTORS not in file.tensors:
            raise file.error(f"has {SHORT_FACTORS}, and no {LONG_FACTORS}")
        scaling: Config = {"rope_type": "longrope"}
        for one, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
            scaling[one] = floats(file, name, turned // 2)
        factor = file.number(f"{file.architecture}.rope.scaling.attn_factor")
        found["rope_scaling"] = scaling | ({} if factor is None else {"attention_factor": factor})
    return found


def _gpt_oss_rope(file: GgufFile, config: Config) -> Config:
    # The class's own default is yarn: a model without it says so.
    found = _scaling(file, config, truncate=False)
    return found or {"rope_scaling": {"rope_type": "default"}}


def rope_parameters(file: GgufFile, config: Config) -> Config:
    """Return the rotary embedding in transformers 5.x's form, and leave the older fields out."""
    scaling = rope_of_whole_heads(file, config).get("rope_scaling", {"rope_type": "default"})
    return _in_new_form(config, scaling)


def _in_new_form(config: Config, scaling: Config) -> Config:
    return {"rope_parameters": {"rope_theta": config.pop("rope_theta", 10_000.0), **scaling}}


def _olmo3_rope(file: GgufFile, config: Config) -> Config:
    full = rope_of_whole_heads(file, config).get("rope_scaling", {"rope_type": "default"})
    theta = config.pop("rope_theta", 500_000.0)
    local = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", theta)}
    return {"rope_parameters": {FULL: {"rope_theta": theta, **full}, SLIDING: local}}


def _magnitude(file: GgufFile, multiplier: float) -> Config:
    """Return yarn's two magnitudes, which the models that have them set alike."""
    found = _number(file, "rope.scaling.yarn_log_multiplier", 0.0) * multiplier
    return {"mscale": found, "mscale_all_dim": found} if found else {}


def _ministral3_rope(file: GgufFile, config: Config) -> Config:
    scaling = _scaling(file, config, **_magnitude(file, 1.0))["rope_scaling"]
    scaling["llama_4_scaling_beta"] = _number(file, "attention.temperature_scale", 0.1)
    return _in_new_form(config, scaling)


def _deepseek2_rope(file: GgufFile, config: Config) -> Config:
    # The file holds a tenth of it.
    found = _scaling(file, config, **_magnitude(file, 10.0)).get("rope_scaling", {"rope_type": "default"})
    return _in_new_form(config, found)


def _qwen35_rope(file: GgufFile, config: Config) -> Config:
    name = f"{file.architecture}.rope.dimension_sections"
    sections = [one for one in file.numbers(name) if one]
    if not sections or not all(type(one) is int and 0 < one <= MOST_WHOLE for one in sections):
        raise file.error(f"has {name} that are not whole numbers")
    scaling = {
        "rope_type": "default",
        "mrope_section": sections,
        "mrope_interleaved": True,
        "partial_rotary_factor": _whole(file, "rope.dimension_count", least=1) / _head_dim(config),
    }
    return _in_new_form(config, scaling)


def _gemma4_rope(file: GgufFile, config: Config) -> Config:
    width = config["global_head_dim"]
    turning = width // 2
    if ROPE_FACTORS in file.tensors:
        factors = floats(file, ROPE_FACTORS, width // 2)
        turning = sum(one < _STANDS for one in factors)
        if any(one != 1.0 for one in factors[:turning]) or any(one < _STANDS for one in factors[turning:]):
            raise file.error(f"has {ROPE_FACTORS} of an unknown scaling: give the model's safetensors")
    full = {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / width}
    theta = _number(file, "rope.freq_base_swa", 10_000.0)
    return {
        "rope_parameters": {
            FULL: {"rope_theta": config.pop("rope_theta", 1e6), **full},
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        }
    }


# Fields that take more than a fact.


def _llama(file: GgufFile, config: Config) -> Config:
    return {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_gate.bias")}


def _attention_bias(file: GgufFile, config: Config) -> Config:
    return {"attention_bias": _has(file, "attn_q.bias")}


def _query_width(config: Config, layers: int) -> Config:
    """Return the width that scores are scaled by: of a head, and in the model of `layers` layers of the hidden size.
    llama.cpp recognises it so."""
    is_largest = config["num_hidden_layers"] == layers
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": width}


def _gemma2(file: GgufFile, config: Config) -> Config:
    return _query_width(config, 46)


def _gemma3(file: GgufFile, config: Config) -> Config:
    return {**_query_width(config, 62), "layer_types": _layer_types(file, config, period=6)}


def _olmo3(file: GgufFile, config: Config) -> Config:
    return {"layer_types": _layer_types(file, config, period=4), **_attention_bias(file, config)}


def _cohere(file: GgufFile, config: Config) -> Config:
    return {"use_qk_norm": _has(file, "attn_q_norm.weight"), **_attention_bias(file, config)}


def _cohere2(file: GgufFile, config: Config) -> Config:
    return {"layer_types": _layer_types(file, config, period=4)}


def _gemma4(file: GgufFile, config: Config) -> Config:
    types = _layer_types(file, config, period=6)
    kv_heads = _by_layer(file, "attention.head_count_kv", config)
    inner = _by_layer(file, "feed_forward_length", config)
    full_heads, sliding_heads = (
        [heads for heads, one in zip(kv_heads, types, strict=True) if one == kind] or kv_heads
        for kind in (FULL, SLIDING)
    )
    layers = range(config["num_hidden_layers"])
    # Layers that share keys and values have none of their own.
    own = [f"blk.{layer}." for layer in layers if types[layer] == FULL and f"blk.{layer}.attn_k.weight" in file.tensors]
    per_layer = "per_layer_token_embd.weight"
    found: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "num_key_value_heads": sliding_heads[0],
        "num_global_key_value_heads": full_heads[0],
        "global_head_dim": _whole(file, _KEY, least=1),
        "head_dim": _whole(file, f"{_KEY}_swa", least=1),
        "intermediate_size": min(inner),
        "use_double_wide_mlp": max(inner) > min(inner),
        "attention_k_eq_v": any(f"{layer}attn_v.weight" not in file.tensors for layer in own),
        "hidden_size_per_layer_input": _whole(file, "embedding_length_per_layer_input", 0),
        "enable_moe_block": _has(file, "ffn_down_exps.weight"),
    }
    if per_layer in file.tensors:
        found["vocab_size_per_layer_input"] = file.tensors[per_layer].shape[0]
    return found


def _qwen35(file: GgufFile, config: Config) -> Config:
    values = _whole(file, "ssm.time_step_rank", least=1)
    next_layers = _whole(file, _NEXT, 0)
    return {
        # The file counts the layers that guess further tokens.
        "num_hidden_layers": config["num_hidden_layers"] - next_layers,
        "full_attention_interval": _whole(file, "full_attention_interval", 4, least=1),
        "linear_conv_kernel_dim": _whole(file, "ssm.conv_kernel", least=1),
        "linear_key_head_dim": _whole(file, "ssm.state_size", least=1),
        "linear_num_key_heads": _whole(file, "ssm.group_count", least=1),
        "linear_num_value_heads": values,
        "linear_value_head_dim": _whole(file, "ssm.inner_size", least=1) // values,
        **_attention_bias(file, config),
    }


def _lfm2(file: GgufFile, config: Config) -> Config:
    heads = _by_layer(file, "attention.head_count_kv", config)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if one else "conv" for one in heads],
        "conv_L_cache": _whole(file, "shortconv.l_cache", least=1),
        "conv_bias": _has(file, "shortconv.in_proj.bias"),
    }


def _falcon_h1(file: GgufFile, config: Config) -> Config:
    inner, heads = _whole(file, "ssm.inner_size", least=1), _whole(file, "ssm.time_step_rank", least=1)
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": _whole(file, "ssm.group_count", 1, least=1),
        "mamba_d_state": _whole(file, "ssm.state_size", least=1),
        "mamba_d_conv": _whole(file, "ssm.conv_kernel", least=1),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "projectors_bias": _has(file, "ssm_out.bias"),
        "mlp_bias": _has(file, "ffn_gate.bias"),
        **_attention_bias(file, config),
    }


def _deepseek2(file: GgufFile, config: Config) -> Config:
    turning = _whole(file, "rope.dimension_count", least=1)
    # Older files have the widths of decompressed heads under the plain names.
    key = _whole(file, f"{_KEY}_mla", _whole(file, _KEY), least=turning + 1)
    value = _whole(file, f"{_VALUE}_mla", _whole(file, _VALUE), least=1)
    groups = _whole(file, "expert_group_count", 0)
    return {
        # The file has 1: keys and values before they are decompressed.
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": turning,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": value,
        "n_group": groups or 1,
        "topk_group": _whole(file, "expert_group_used_count", 1, least=1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": file.flag(f"{file.architecture}.expert_weights_norm", default=False),
        "routed_scaling_factor": _number(file, "expert_weights_scale", 1.0),
        "q_lora_rank": _whole(file, "attention.q_lora_rank", 0) or None,
        **_attention_bias(file, config),
    }


def _is_yarn(file: GgufFile) -> bool:
    return file.text(f"{file.architecture}.rope.scaling.type", "none") == "yarn"


def _is_set_fact(fact: str) -> Callable[[GgufFile], bool]:
    return lambda file: _is_set(file, fact)


def _gates_by_sigmoid(file: GgufFile) -> bool:
    return _whole(file, "expert_gating_func", 1) == _SIGMOID


_SIGMOID = 2

# Tensors of several architectures.
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}

# Of all experts in one tensor.
_STACKED = {
    "ffn_gate_exps.weight": "mlp.experts.gate",
    "ffn_up_exps.weight": "mlp.experts.up",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}


def _shared(module: str) -> dict[str, str]:
    """Return the names of the MLP that all rows share."""
    return {f"ffn_{one}_shexp": f"mlp.{module}.{one}_proj" for one in ("gate", "up", "down")}


_MIXTRAL = GgufArchitecture(
    "mixtral",
    "MixtralForCausalLM",
    fields={"expert_count": needed("num_local_experts"), "expert_used_count": needed("num_experts_per_tok")},
    fixed={"sliding_window": None},
    layer={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    is_turned=True,
)
_QWEN2_MOE = GgufArchitecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    fields={
        "expert_count": needed("num_experts"),
        "expert_used_count": needed("num_experts_per_tok"),
        "expert_feed_forward_length": needed("moe_intermediate_size"),
        "expert_shared_feed_forward_length": needed("shared_expert_intermediate_size"),
    },
    layer={**_EXPERTS, **_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
)
_GEMMA2 = GgufArchitecture(
    "gemma2",
    "Gemma2ForCausalLM",
    fields={
        _WINDOW: needed("sliding_window"),
        _KEY: needed("head_dim"),
        "attn_logit_softcapping": number("attn_logit_softcapping"),
        "final_logit_softcapping": number("final_logit_softcapping"),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    rule=_gemma2,
    layer=_GEMMA_NORMS,
    norm_offset=1.0,
)
_OLMO2 = GgufArchitecture(
    "olmo2",
    "Olmo2ForCausalLM",
    rule=_attention_bias,
    layer={**_NORMS_AFTER, "attn_norm": "", "ffn_norm": ""},
)
_COHERE = GgufArchitecture(
    "cohere",
    "CohereForCausalLM",
    fields={"attention.layer_norm_epsilon": number("layer_norm_eps"), "logit_scale": number("logit_scale")},
    rule=_cohere,
    layer={"ffn_norm": ""},
)
_QWEN35 = GgufArchitecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    fields={_KEY: needed("head_dim")},
    read=(_NEXT, "rope.dimension_sections", "ssm.state_size"),
    rule=_qwen35,
    rope=_qwen35_rope,
    layer={
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "",
    },
    norm_offset=1.0,
    plain_norms=("linear_attn.norm",),
)
_DEEPSEEK_V2 = GgufArchitecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    fields={
        _KEY: None,
        "attention.head_count_kv": None,
        "attention.kv_lora_rank": needed("kv_lora_rank"),
        "leading_dense_block_count": whole("first_k_dense_replace"),
        "expert_count": needed("n_routed_experts"),
        "expert_used_count": needed("num_experts_per_tok"),
        "expert_feed_forward_length": needed("moe_intermediate_size"),
        "expert_shared_count": needed("n_shared_experts"),
    },
    read=(
        "expert_group_count",
        "expert_weights_scale",
        "expert_gating_func",
        "rope.scaling.yarn_log_multiplier",
        _VALUE,
    ),
    fixed={"first_k_dense_replace": 0},
    rule=_deepseek2,
    rope=_deepseek2_rope,
    layer={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b",
        "attn_v_b": "self_attn.v_b",
        "ffn_gate_inp": "mlp.gate",
        **_STACKED,
        **_shared("shared_experts"),
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
)
_LLAMA = GgufArchitecture(
    "llama",
    "LlamaForCausalLM",
    rule=_llama,
    is_turned=True,
    variants=((_is_set_fact("expert_count"), _MIXTRAL),),
)
_MINISTRAL3 = GgufArchitecture(
    "ministral3",
    "Ministral3ForCausalLM",
    read=("rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
    rope=_ministral3_rope,
    is_turned=True,
)

# By llama.cpp's names.
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": _LLAMA,
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        fields={
            _WINDOW: needed("sliding_window"),
            _KEY: needed("head_dim"),
            "rope.freq_base_swa": number("rope_local_base_freq"),
            "final_logit_softcapping": number("final_logit_softcapping"),
        },
        rule=_gemma3,
    ),
    "gemma4": GgufArchitecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        fields={
            _WINDOW: needed("sliding_window"),
            _KEY: None,
            "attention.head_count_kv": None,
            "feed_forward_length": None,
            "attention.shared_kv_layers": whole("num_kv_shared_layers"),
            "final_logit_softcapping": number("final_logit_softcapping"),
            "expert_count": whole("num_experts"),
            "expert_used_count": whole("top_k_experts"),
            "expert_feed_forward_length": whole("moe_intermediate_size"),
        },
        read=("rope.freq_base_swa", _VALUE),
        rule=_gemma4,
        rope=_gemma4_rope,
        ends={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        layer={
            **_GEMMA_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
    ),
    "phi3": GgufArchitecture(
        "phi3",
        "Phi3ForCausalLM",
        fields={_WINDOW: whole("sliding_window")},
        fixed={"sliding_window": None},
        rope=_phi3_rope,
        layer={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "qwen2moe": _QWEN2_MOE,
    "qwen3moe": replace(
        _QWEN2_MOE,
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        fields={fact: one for fact, one in _QWEN2_MOE.fields.items() if "shared" not in fact},
        fixed={"norm_topk_prob": True},
        layer=_EXPERTS,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        fields={
            _WINDOW: needed("sliding_window"),
            "expert_count": needed("num_local_experts"),
            "expert_used_count": needed("num_experts_per_tok"),
            "expert_feed_forward_length": needed("intermediate_size"),
            "feed_forward_length": None,
        },
        fixed={"attention_bias": True},
        rope=_gpt_oss_rope,
        layer={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate",
            "ffn_up_exps": "mlp.experts.up",
            "ffn_down_exps": "mlp.experts.down",
        },
    ),
    "mistral3": GgufArchitecture(
        "mistral",
        "MistralForCausalLM",
        fixed={"sliding_window": None},
        is_turned=True,
        variants=((_is_yarn, _MINISTRAL3),),
    ),
    "glm4": GgufArchitecture(
        "glm4",
        "Glm4ForCausalLM",
        rule=_attention_bias,
        rope=_partial_rope,
        layer={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "granite": replace(
        _LLAMA,
        model_type="granite",
        class_name="GraniteForCausalLM",
        fields={
            "attention.scale": number("attention_multiplier"),
            "embedding_scale": number("embedding_multiplier"),
            "residual_scale": number("residual_multiplier"),
            "logit_scale": number("logits_scaling"),
        },
        variants=(),
    ),
    "olmo2": replace(
        _OLMO2,
        variants=(
            (
                _is_set_fact(_WINDOW),
                replace(
                    _OLMO2,
                    model_type="olmo3",
                    class_name="Olmo3ForCausalLM",
                    fields={_WINDOW: needed("sliding_window")},
                    read=("rope.freq_base_swa",),
                    rule=_olmo3,
                    rope=_olmo3_rope,
                ),
            ),
        ),
    ),
    "command-r": _COHERE,
    "cohere2": replace(
        _COHERE,
        model_type="cohere2",
        class_name="Cohere2ForCausalLM",
        fields={**_COHERE.fields, _WINDOW: needed("sliding_window")},
        rule=_cohere2,
    ),
    "smollm3": replace(
        _LLAMA,
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        # Every fourth layer has no rotary embedding.
        fixed={"no_rope_layer_interval": 4},
        variants=(),
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        fields={
            **_QWEN35.fields,
            "feed_forward_length": None,
            "expert_count": needed("num_experts"),
            "expert_used_count": needed("num_experts_per_tok"),
            "expert_feed_forward_length": needed("moe_intermediate_size"),
            "expert_shared_feed_forward_length": needed("shared_expert_intermediate_size"),
        },
        layer={
            **_QWEN35.layer,
            **_shared("shared_expert"),
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **_STACKED,
        },
    ),
    "falcon-h1": GgufArchitecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        read=("ssm.state_size",),
        # The multipliers are in the weights; the norm comes behind the gate in llama.cpp.
        fixed={"mamba_norm_before_gate": False},
        rule=_falcon_h1,
        rope=rope_parameters,
        ends={"output_norm": "model.final_layernorm"},
        layer={
            # Of that name alone in files of today.
            "ffn_norm": "pre_ff_layernorm.weight",
            "ffn_norm.weight": "pre_ff_layernorm.weight",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt.bias": "mamba.dt_bias",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
    ),
    "lfm2": GgufArchitecture(
        "lfm2",
        "Lfm2ForCausalLM",
        fields={"attention.head_count_kv": None, "attention.layer_norm_rms_epsilon": number("norm_eps")},
        fixed={"block_auto_adjust_ff_dim": False},
        rule=_lfm2,
        rope=rope_parameters,
        ends={"token_embd_norm": "model.embedding_norm", "output_norm": ""},
        layer={
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
        },
    ),
    "deepseek2": replace(
        _DEEPSEEK_V2,
        variants=(
            (
                _gates_by_sigmoid,
                replace(_DEEPSEEK_V2, model_type="deepseek_v3", class_name="DeepseekV3ForCausalLM"),
            ),
        ),
    ),
}
